/* kernels/cuda/rmsnorm.cu - the RMS norm by rows, and its backward.
 *
 * dw in two stages: partial sums over slabs of rows, cut by the number of rows alone, then the
 * slabs in order. dx comes after dw, so that it may lie where dy does. */
#include "kernels/cuda/launchers.h"
#include "kernels/cuda/lots.h"

namespace {
constexpr int THREADS = 256;
constexpr int LANES = 32, GROUPS = 8; /* of a block of dw: lots of columns, and rows at a time */
constexpr uint64_t SLABS_MAX = 128, SLAB_ROWS_MIN = 64;

/* Six blocks at a time: eight would leave 32 registers, one too few. */
template <enum sw_dtype T>
__global__ void __launch_bounds__(THREADS, 6)
    forward(void *out, float *rstd, const void *x, const void *w, uint64_t width, float eps,
            bool wide) {
    const uint64_t row = (uint64_t)blockIdx.x * width;
    float squares = 0.0f, a[LOT], b[LOT];
    for (uint64_t c = threadIdx.x * LOT; c < width; c += THREADS * LOT) {
        load_lot<T>(a, x, row + c, lot_length(c, width), wide);
#pragma unroll
        for (int i = 0; i < LOT; i++) squares += a[i] * a[i];
    }
    const float r = 1.0f / sqrtf(block_sum(squares) / (float)width + eps);
    if (threadIdx.x == 0) rstd[blockIdx.x] = r;
    for (uint64_t c = threadIdx.x * LOT; c < width; c += THREADS * LOT) {
        const int length = lot_length(c, width);
        load_lot<T>(a, x, row + c, length, wide);
        load_lot<T>(b, w, c, length, wide);
#pragma unroll
        for (int i = 0; i < LOT; i++) a[i] = a[i] * r * b[i];
        store_lot<T>(out, row + c, a, length, wide);
    }
}

template <enum sw_dtype T>
cudaError_t forward_as(cudaStream_t s, void *out, float *rstd, const void *x, const void *w,
                       uint64_t n, uint64_t width, float eps) {
    const bool wide = all_wide(out, x, w) && width % LOT == 0;
    GPU_LAUNCH((forward<T>), (unsigned)n, THREADS, 0, s, out, rstd, x, w, width, eps, wide);
    return cudaGetLastError();
}

/* Rows of a slab: a multiple of GROUPS, so that every row of threads has as many. */
__host__ __device__ __forceinline__ uint64_t slab_rows(uint64_t n) {
    const uint64_t even = (n + SLABS_MAX - 1) / SLABS_MAX;
    const uint64_t rows = even < SLAB_ROWS_MIN ? SLAB_ROWS_MIN : even;
    return (rows + GROUPS - 1) / GROUPS * GROUPS;
}
uint64_t slab_count(uint64_t n) {
    return (n + slab_rows(n) - 1) / slab_rows(n);
}

template <enum sw_dtype T>
__global__ void __launch_bounds__(LANES *GROUPS)
    partial_dw(float *partial, const void *dy, const void *x, const float *rstd, uint64_t n,
               uint64_t width, bool wide) {
    GPU_SHARED(float, sums, [GROUPS][LANES * LOT + 1]);
    const uint64_t c = ((uint64_t)blockIdx.x * LANES + threadIdx.x) * LOT, rows = slab_rows(n);
    const uint64_t first = blockIdx.y * rows, last = first + rows < n ? first + rows : n;
    const int length = c < width ? lot_length(c, width) : 0;
    float sum[LOT] = {};
    for (uint64_t row = first + threadIdx.y; row < last && length > 0; row += GROUPS) {
        float g[LOT], v[LOT];
        const float r = rstd[row];
        load_lot<T>(g, dy, row * width + c, length, wide);
        load_lot<T>(v, x, row * width + c, length, wide);
#pragma unroll
        for (int i = 0; i < LOT; i++) sum[i] += g[i] * (v[i] * r);
    }
#pragma unroll
    for (int i = 0; i < LOT; i++) sums[threadIdx.y][threadIdx.x * LOT + i] = sum[i];
    __syncthreads();
    const int column = (int)(threadIdx.y * LANES + threadIdx.x); /* one each: GROUPS == LOT */
    const uint64_t at = (uint64_t)blockIdx.x * (LANES * LOT) + (uint64_t)column;
    if (at >= width) return;
    float total = 0.0f;
    for (int g = 0; g < GROUPS; g++) total += sums[g][column];
    partial[blockIdx.y * width + at] = total;
}
static_assert(GROUPS == LOT, "a block's threads are as many as its columns");

__global__ void __launch_bounds__(THREADS)
    whole_dw(float *dw, int add, const float *partial, uint64_t slabs, uint64_t width) {
    const uint64_t c = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
    if (c >= width) return;
    float sum = add ? dw[c] : 0.0f;
    for (uint64_t slab = 0; slab < slabs; slab++) sum += partial[slab * width + c];
    dw[c] = sum;
}

/* With xhat = x rstd and g = dy w: dx = rstd (g - xhat mean(g xhat)). */
template <enum sw_dtype T>
__global__ void __launch_bounds__(THREADS)
    backward_dx(void *dx, int add, const void *dy, const void *x, const void *w, const float *rstd,
                uint64_t width, bool wide) {
    const uint64_t row = (uint64_t)blockIdx.x * width;
    const float r = rstd[blockIdx.x];
    float dot = 0.0f, g[LOT], v[LOT], m[LOT], d[LOT];
    for (uint64_t c = threadIdx.x * LOT; c < width; c += THREADS * LOT) {
        const int length = lot_length(c, width);
        load_lot<T>(g, dy, row + c, length, wide);
        load_lot<T>(v, x, row + c, length, wide);
        load_lot<T>(m, w, c, length, wide);
#pragma unroll
        for (int i = 0; i < LOT; i++) dot += g[i] * m[i] * (v[i] * r);
    }
    const float mean = block_sum(dot) / (float)width;
    for (uint64_t c = threadIdx.x * LOT; c < width; c += THREADS * LOT) {
        const int length = lot_length(c, width);
        load_lot<T>(g, dy, row + c, length, wide);
        load_lot<T>(v, x, row + c, length, wide);
        load_lot<T>(m, w, c, length, wide);
#pragma unroll
        for (int i = 0; i < LOT; i++) d[i] = r * (g[i] * m[i] - v[i] * r * mean);
        if (add) {
            load_lot<T>(g, dx, row + c, length, wide);
#pragma unroll
            for (int i = 0; i < LOT; i++) d[i] = g[i] + d[i];
        }
        store_lot<T>(dx, row + c, d, length, wide);
    }
}

template <enum sw_dtype T>
cudaError_t backward_as(cudaStream_t s, void *dx, int add_dx, float *dw, int add_dw, const void *dy,
                        const void *x, const void *w, const float *rstd, uint64_t n, uint64_t width,
                        float *partial) {
    const uint64_t slabs = slab_count(n), columns = LANES * LOT;
    const bool wide = all_wide(dx, dy, x, w) && width % LOT == 0;
    if (dw && slabs) {
        const dim3 grid((unsigned)((width + columns - 1) / columns), (unsigned)slabs);
        GPU_LAUNCH((partial_dw<T>), grid, dim3(LANES, GROUPS), 0, s, partial, dy, x, rstd, n, width,
                   wide);
    }
    if (dw)
        GPU_LAUNCH(whole_dw, (unsigned)((width + THREADS - 1) / THREADS), THREADS, 0, s, dw, add_dw,
                   partial, slabs, width);
    if (n)
        GPU_LAUNCH((backward_dx<T>), (unsigned)n, THREADS, 0, s, dx, add_dx, dy, x, w, rstd, width,
                   wide);
    return cudaGetLastError();
}
} // namespace

cudaError_t sw_cuda_rmsnorm(cudaStream_t s, enum sw_dtype dtype, void *out, float *rstd,
                            const void *x, const void *w, uint64_t n, uint64_t width, float eps) {
    if (n == 0) return cudaSuccess;
    return BY_DTYPE(dtype, forward_as, s, out, rstd, x, w, n, width, eps);
}

uint64_t sw_cuda_rmsnorm_scratch_bytes(uint64_t n, uint64_t width) {
    return n ? slab_count(n) * width * sizeof(float) : 0;
}

cudaError_t sw_cuda_rmsnorm_backward(cudaStream_t s, enum sw_dtype dtype, void *dx, int add_dx,
                                     float *dw, int add_dw, const void *dy, const void *x,
                                     const void *w, const float *rstd, uint64_t n, uint64_t width,
                                     void *scratch) {
    return BY_DTYPE(dtype, backward_as, s, dx, add_dx, dw, add_dw, dy, x, w, rstd, n, width,
                    static_cast<float *>(scratch));
}
