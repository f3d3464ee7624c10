/* kernels/cuda/embed.cu - rows of a table gathered, and gradients added to rows in token order.
 *
 * Backward gives each different token one block for each piece of the columns: the one of its first
 * occurrence. That block walks the later tokens in order and adds up the rows of its own, so every
 * sum has the host's order, and no two blocks write to one row. */
#include "kernels/cuda/launchers.h"
#include "kernels/cuda/lots.h"

namespace {
constexpr int THREADS = 256, COLUMNS = 4; /* of a thread, in backward */

/* What lies before the first row wraps to beyond the last one. */
__device__ __forceinline__ uint64_t row_of(int32_t token, uint64_t first_row) {
    return (uint64_t)token - first_row;
}

/* E is what is copied at once: rows are copied as they are. */
template <class E>
__global__ void __launch_bounds__(THREADS)
    gather(E *out, const E *table, const int32_t *tokens, uint64_t width, uint64_t first_row,
           uint64_t rows) {
    const uint64_t i = blockIdx.x, row = row_of(tokens[i], first_row);
    if (row >= rows) return;
    for (uint64_t c = (uint64_t)blockIdx.y * THREADS + threadIdx.x; c < width;
         c += (uint64_t)gridDim.y * THREADS)
        out[i * width + c] = table[row * width + c];
}

template <class E>
cudaError_t gather_as(cudaStream_t s, void *out, const void *table, const int32_t *tokens,
                      uint64_t n, uint64_t row_bytes, uint64_t first_row, uint64_t rows) {
    const uint64_t width = row_bytes / sizeof(E), parts = (width + THREADS - 1) / THREADS;
    const dim3 grid((unsigned)n, (unsigned)(parts < 64 ? parts : 64));
    GPU_LAUNCH((gather<E>), grid, THREADS, 0, s, static_cast<E *>(out),
               static_cast<const E *>(table), tokens, width, first_row, rows);
    return cudaGetLastError();
}

template <enum sw_dtype T>
__global__ void __launch_bounds__(THREADS)
    scatter(float *dtable, const void *dout, const int32_t *tokens, uint64_t n, uint64_t width,
            uint64_t first_row, uint64_t rows) {
    GPU_SHARED(uint32_t, found, [THREADS / 32]);
    const uint64_t first = blockIdx.x, row = row_of(tokens[first], first_row);
    const int32_t token = tokens[first];
    if (row >= rows) return; /* the whole block */
    int earlier = 0;
    for (uint64_t i = threadIdx.x; i < first; i += THREADS) earlier |= tokens[i] == token;
    if (__syncthreads_or(earlier)) return;

    const uint64_t column = (uint64_t)blockIdx.y * (THREADS * COLUMNS) + threadIdx.x;
    float sum[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        const uint64_t at = column + (uint64_t)c * THREADS;
        sum[c] = at < width ? dtable[row * width + at] : 0.0f;
    }
    for (uint64_t base = first; base < n; base += THREADS) {
        const uint64_t i = base + threadIdx.x;
        const unsigned votes = __ballot_sync(GPU_ALL_LANES, i < n && tokens[i] == token);
        if ((threadIdx.x & 31) == 0) found[threadIdx.x >> 5] = votes;
        __syncthreads();
        for (int w = 0; w < THREADS / 32; w++)
            for (unsigned left = found[w]; left; left &= left - 1) {
                const uint64_t at = base + (uint64_t)(w * 32 + __ffs((int)left) - 1);
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) {
                    const uint64_t x = column + (uint64_t)c * THREADS;
                    if (x < width) sum[c] += sw_load(T, dout, at * width + x);
                }
            }
        __syncthreads(); /* all have read what the next votes overwrite */
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        const uint64_t at = column + (uint64_t)c * THREADS;
        if (at < width) dtable[row * width + at] = sum[c];
    }
}

template <enum sw_dtype T>
cudaError_t scatter_as(cudaStream_t s, float *dtable, const void *dout, const int32_t *tokens,
                       uint64_t n, uint64_t width, uint64_t first_row, uint64_t rows) {
    const uint64_t piece = THREADS * COLUMNS;
    const dim3 grid((unsigned)n, (unsigned)((width + piece - 1) / piece));
    GPU_LAUNCH((scatter<T>), grid, THREADS, 0, s, dtable, dout, tokens, n, width, first_row, rows);
    return cudaGetLastError();
}
} // namespace

cudaError_t sw_cuda_embed(cudaStream_t s, enum sw_dtype dtype, void *out, const void *table,
                          const int32_t *tokens, uint64_t n, uint64_t width, uint64_t first_row,
                          uint64_t rows) {
    const uint64_t bytes = width * sw_dtype_bytes(dtype);
    if (n == 0 || width == 0) return cudaSuccess;
    if (all_wide(out, table) && bytes % sizeof(uint4) == 0)
        return gather_as<uint4>(s, out, table, tokens, n, bytes, first_row, rows);
    if (dtype == SW_FP32)
        return gather_as<uint32_t>(s, out, table, tokens, n, bytes, first_row, rows);
    return gather_as<uint16_t>(s, out, table, tokens, n, bytes, first_row, rows);
}

cudaError_t sw_cuda_embed_backward(cudaStream_t s, enum sw_dtype dtype, float *dtable,
                                   const void *dout, const int32_t *tokens, uint64_t n,
                                   uint64_t width, uint64_t first_row, uint64_t rows) {
    if (n == 0 || width == 0) return cudaSuccess;
    return BY_DTYPE(dtype, scatter_as, s, dtable, dout, tokens, n, width, first_row, rows);
}
