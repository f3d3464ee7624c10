/* kernels/cuda/softmax.cu - the cross-entropy over columns that come in parts.
 *
 * A block reads a row once, each thread with an online softmax of its own; the threads' pairs of
 * maximum and sum then join in a fixed tree. */
#include "kernels/cuda/launchers.h"
#include "kernels/cuda/lots.h"

namespace {
constexpr int THREADS = 256;
enum { MOST, SUM, WANTED, STATS }; /* a row's place in stats */

/* A maximum, and the sum of exp(x - maximum). No element yet: -Inf and 0. */
struct part {
    float most, sum;
};

/* What a sum under `most` weighs under `both`; -Inf weighs nothing even where both are. */
__device__ __forceinline__ float weight(float most, float both) {
    return most == -INFINITY ? 0.0f : expf(most - both);
}

/* fmaxf takes the number where the other is a NaN, which then comes into the sum by itself. */
__device__ __forceinline__ part join(part a, part b) {
    const float both = fmaxf(a.most, b.most);
    return {both, a.sum * weight(a.most, both) + b.sum * weight(b.most, both)};
}

__device__ __forceinline__ part join_block(part mine) {
    GPU_SHARED(part, parts, [THREADS / 32]);
    for (int d = 16; d > 0; d >>= 1) {
        part other;
        other.most = __shfl_xor_sync(GPU_ALL_LANES, mine.most, d);
        other.sum = __shfl_xor_sync(GPU_ALL_LANES, mine.sum, d);
        /* Both sides of a pair compute it in one order, so all lanes agree. */
        mine = (threadIdx.x & (unsigned)d) ? join(other, mine) : join(mine, other);
    }
    if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = mine;
    __syncthreads();
    part all = parts[0];
    for (int w = 1; w < THREADS / 32; w++) all = join(all, parts[w]);
    return all;
}

/* A target before the first column wraps to beyond the last. */
__device__ __forceinline__ uint64_t column_of(int32_t target, uint64_t first_column) {
    return (uint64_t)target - first_column;
}

__global__ void __launch_bounds__(THREADS)
    row_stats(float *stats, const float *logits, const int32_t *targets, uint64_t width,
              uint64_t first_column, int begin, bool wide) {
    const float *row = logits + (uint64_t)blockIdx.x * width;
    part mine = {-INFINITY, 0.0f};
    for (uint64_t c = threadIdx.x * LOT; c < width; c += THREADS * LOT) {
        const int length = lot_length(c, width);
        float x[LOT];
        load_lot<SW_FP32>(x, row, c, length, wide);
        part lot = {-INFINITY, 0.0f};
        for (int i = 0; i < length; i++) lot.most = fmaxf(lot.most, x[i]);
        for (int i = 0; i < length; i++)
            lot.sum += x[i] == -INFINITY ? 0.0f : expf(x[i] - lot.most);
        mine = join(mine, lot);
    }
    const part all = join_block(mine);
    if (threadIdx.x != 0) return;
    float *out = stats + (uint64_t)blockIdx.x * STATS;
    part whole = {all.most, all.most == -INFINITY ? NAN : all.sum};
    if (!begin) whole = join(part{out[MOST], out[SUM]}, whole);
    out[MOST] = whole.most;
    out[SUM] = whole.sum;
    const uint64_t wanted = column_of(targets[blockIdx.x], first_column);
    if (wanted < width)
        out[WANTED] = row[wanted];
    else if (begin)
        out[WANTED] = NAN;
}

__global__ void __launch_bounds__(THREADS)
    row_loss(float *loss, const float *stats, const uint8_t *mask, uint64_t n) {
    const uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= n) return;
    const float *row = stats + i * STATS;
    const double rest = (double)row[MOST] - (double)row[WANTED];
    loss[i] = !mask || mask[i] ? (float)(log((double)row[SUM]) + rest) : 0.0f;
}

template <enum sw_dtype T>
__global__ void __launch_bounds__(THREADS)
    row_gradient(void *dlogits, const float *logits, const float *stats, const int32_t *targets,
                 const uint8_t *mask, float scale, uint64_t width, uint64_t first_column,
                 bool wide) {
    const uint64_t i = blockIdx.x;
    const float most = stats[i * STATS + MOST];
    const float factor = (float)((double)scale / (double)stats[i * STATS + SUM]);
    const uint64_t wanted = column_of(targets[i], first_column);
    const bool counts = !mask || mask[i];
    for (uint64_t c = threadIdx.x * LOT; c < width; c += THREADS * LOT) {
        const int length = lot_length(c, width);
        float x[LOT];
        load_lot<SW_FP32>(x, logits, i * width + c, length, wide);
#pragma unroll
        for (int k = 0; k < LOT; k++) {
            const float d = expf(x[k] - most) * factor;
            x[k] = !counts ? 0.0f : c + (uint64_t)k == wanted ? d - scale : d;
        }
        store_lot<T>(dlogits, i * width + c, x, length, wide);
    }
}

template <enum sw_dtype T>
cudaError_t gradient_as(cudaStream_t s, void *dlogits, const float *logits, const float *stats,
                        const int32_t *targets, const uint8_t *mask, float scale, uint64_t n,
                        uint64_t width, uint64_t first_column) {
    GPU_LAUNCH((row_gradient<T>), (unsigned)n, THREADS, 0, s, dlogits, logits, stats, targets, mask,
               scale, width, first_column, all_wide(dlogits, logits) && width % LOT == 0);
    return cudaGetLastError();
}
} // namespace

cudaError_t sw_cuda_softmax_stats(cudaStream_t s, float *stats, const float *logits,
                                  const int32_t *targets, uint64_t n, uint64_t width,
                                  uint64_t first_column, int begin) {
    if (n == 0) return cudaSuccess;
    GPU_LAUNCH(row_stats, (unsigned)n, THREADS, 0, s, stats, logits, targets, width, first_column,
               begin, all_wide(logits) && width % LOT == 0);
    return cudaGetLastError();
}

cudaError_t sw_cuda_softmax_loss(cudaStream_t s, float *loss, const float *stats,
                                 const uint8_t *mask, uint64_t n) {
    if (n == 0) return cudaSuccess;
    GPU_LAUNCH(row_loss, (unsigned)((n + THREADS - 1) / THREADS), THREADS, 0, s, loss, stats, mask,
               n);
    return cudaGetLastError();
}

cudaError_t sw_cuda_softmax_backward(cudaStream_t s, enum sw_dtype dtype, void *dlogits,
                                     const float *logits, const float *stats,
                                     const int32_t *targets, const uint8_t *mask, float scale,
                                     uint64_t n, uint64_t width, uint64_t first_column) {
    if (n == 0) return cudaSuccess;
    return BY_DTYPE(dtype, gradient_as, s, dlogits, logits, stats, targets, mask, scale, n, width,
                    first_column);
}
