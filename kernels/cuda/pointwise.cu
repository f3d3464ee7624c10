/* kernels/cuda/pointwise.cu - rotation, gating and rounding: no element needs another one. */
#include "kernels/cuda/launchers.h"
#include "kernels/cuda/lots.h"

namespace {
constexpr unsigned THREADS = 256;

/* Above e^88 a float overflows, and infinity times zero would make a NaN; a NaN stays one. */
__device__ __forceinline__ float exp_bounded(float x) {
    return expf(x > 88.0f ? 88.0f : x);
}

/* A thread rotates a lot of pairs: both halves of a head lie in it. */
template <enum sw_dtype T>
__global__ void __launch_bounds__(THREADS)
    rope(void *x, const float *cos, const float *sin, uint64_t rows, uint64_t time, uint64_t heads,
         uint64_t half, float sign, bool wide) {
    const uint64_t lots = (half + LOT - 1) / LOT, all = rows * heads * lots;
    for (uint64_t n = (uint64_t)blockIdx.x * THREADS + threadIdx.x; n < all;
         n += (uint64_t)gridDim.x * THREADS) {
        const uint64_t first = n % lots * LOT, head = n / lots;
        const uint64_t angle = head / heads % time * half + first, at = head * 2 * half + first;
        const int length = lot_length(first, half);
        float a[LOT], b[LOT], c[LOT], s[LOT], low[LOT], high[LOT];
        load_lot<T>(a, x, at, length, wide);
        load_lot<T>(b, x, at + half, length, wide);
        load_lot<SW_FP32>(c, cos, angle, length, wide);
        load_lot<SW_FP32>(s, sin, angle, length, wide);
#pragma unroll
        for (int i = 0; i < LOT; i++) {
            low[i] = a[i] * c[i] - b[i] * (sign * s[i]);
            high[i] = b[i] * c[i] + a[i] * (sign * s[i]);
        }
        store_lot<T>(x, at, low, length, wide);
        store_lot<T>(x, at + half, high, length, wide);
    }
}

template <enum sw_dtype T>
cudaError_t rope_as(cudaStream_t s, void *x, const float *cos, const float *sin, uint64_t rows,
                    uint64_t time, uint64_t heads, uint64_t half, int inverse) {
    const bool wide = all_wide(x, cos, sin) && half % LOT == 0;
    const uint64_t lots = rows * heads * ((half + LOT - 1) / LOT);
    GPU_LAUNCH((rope<T>), blocks_for(lots * LOT, THREADS), THREADS, 0, s, x, cos, sin, rows, time,
               heads, half, inverse ? -1.0f : 1.0f, wide);
    return cudaGetLastError();
}

template <enum sw_dtype T>
__global__ void __launch_bounds__(THREADS)
    swiglu(void *out, const void *gate, const void *up, uint64_t count, bool wide) {
    for (uint64_t at = ((uint64_t)blockIdx.x * THREADS + threadIdx.x) * LOT; at < count;
         at += (uint64_t)gridDim.x * THREADS * LOT) {
        const int length = lot_length(at, count);
        float g[LOT], u[LOT], y[LOT];
        load_lot<T>(g, gate, at, length, wide);
        load_lot<T>(u, up, at, length, wide);
#pragma unroll
        for (int i = 0; i < LOT; i++) y[i] = g[i] / (1.0f + exp_bounded(-g[i])) * u[i];
        store_lot<T>(out, at, y, length, wide);
    }
}

template <enum sw_dtype T>
cudaError_t swiglu_as(cudaStream_t s, void *out, const void *gate, const void *up, uint64_t count) {
    GPU_LAUNCH((swiglu<T>), blocks_for(count, THREADS), THREADS, 0, s, out, gate, up, count,
               all_wide(out, gate, up));
    return cudaGetLastError();
}

/* d silu(g) / dg = sigmoid(g) (1 + g (1 - sigmoid(g))), and 1 - sigmoid is e sigmoid. */
template <enum sw_dtype T>
__global__ void __launch_bounds__(THREADS)
    swiglu_backward(void *dgate, void *dup, const void *dout, const void *gate, const void *up,
                    uint64_t count, bool wide) {
    for (uint64_t at = ((uint64_t)blockIdx.x * THREADS + threadIdx.x) * LOT; at < count;
         at += (uint64_t)gridDim.x * THREADS * LOT) {
        const int length = lot_length(at, count);
        float g[LOT], u[LOT], d[LOT], dg[LOT], du[LOT];
        load_lot<T>(g, gate, at, length, wide);
        load_lot<T>(u, up, at, length, wide);
        load_lot<T>(d, dout, at, length, wide);
#pragma unroll
        for (int i = 0; i < LOT; i++) {
            const float e = exp_bounded(-g[i]), sigmoid = 1.0f / (1.0f + e);
            dg[i] = d[i] * u[i] * (sigmoid * (1.0f + g[i] * (e * sigmoid)));
            du[i] = d[i] * (g[i] * sigmoid);
        }
        store_lot<T>(dgate, at, dg, length, wide);
        store_lot<T>(dup, at, du, length, wide);
    }
}

template <enum sw_dtype T>
cudaError_t swiglu_backward_as(cudaStream_t s, void *dgate, void *dup, const void *dout,
                               const void *gate, const void *up, uint64_t count) {
    GPU_LAUNCH((swiglu_backward<T>), blocks_for(count, THREADS), THREADS, 0, s, dgate, dup, dout,
               gate, up, count, all_wide(dgate, dup, dout, gate, up));
    return cudaGetLastError();
}

template <enum sw_dtype T>
__global__ void __launch_bounds__(THREADS)
    round_to(void *dst, const float *src, uint64_t count, bool wide) {
    for (uint64_t at = ((uint64_t)blockIdx.x * THREADS + threadIdx.x) * LOT; at < count;
         at += (uint64_t)gridDim.x * THREADS * LOT) {
        const int length = lot_length(at, count);
        float x[LOT];
        load_lot<SW_FP32>(x, src, at, length, wide);
        store_lot<T>(dst, at, x, length, wide);
    }
}

template <enum sw_dtype T>
cudaError_t round_as(cudaStream_t s, void *dst, const float *src, uint64_t count) {
    GPU_LAUNCH((round_to<T>), blocks_for(count, THREADS), THREADS, 0, s, dst, src, count,
               all_wide(dst, src));
    return cudaGetLastError();
}
} // namespace

cudaError_t sw_cuda_rope(cudaStream_t s, enum sw_dtype dtype, void *x, const float *cos,
                         const float *sin, uint64_t rows, uint64_t time, uint64_t heads,
                         uint64_t head_dim, int inverse) {
    if (rows * heads * head_dim == 0) return cudaSuccess;
    return BY_DTYPE(dtype, rope_as, s, x, cos, sin, rows, time, heads, head_dim / 2, inverse);
}

cudaError_t sw_cuda_swiglu(cudaStream_t s, enum sw_dtype dtype, void *out, const void *gate,
                           const void *up, uint64_t count) {
    if (count == 0) return cudaSuccess;
    return BY_DTYPE(dtype, swiglu_as, s, out, gate, up, count);
}

cudaError_t sw_cuda_swiglu_backward(cudaStream_t s, enum sw_dtype dtype, void *dgate, void *dup,
                                    const void *dout, const void *gate, const void *up,
                                    uint64_t count) {
    if (count == 0) return cudaSuccess;
    return BY_DTYPE(dtype, swiglu_backward_as, s, dgate, dup, dout, gate, up, count);
}

cudaError_t sw_cuda_round(cudaStream_t s, enum sw_dtype dtype, void *dst, const float *src,
                          uint64_t count) {
    if (count == 0) return cudaSuccess;
    return BY_DTYPE(dtype, round_as, s, dst, src, count);
}
