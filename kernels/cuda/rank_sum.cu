/* kernels/cuda/rank_sum.cu - the sum over ranks of values that came as BF16, in the host's order.
 *
 * As in engine/rendezvous.h it begins with -0, which changes nothing that is added to it, and adds
 * rank after rank in FP32: so GPUs and host ranks that carry BF16 have the same bits. */
#include "kernels/cuda/gpu.h"
#include "kernels/cuda/launchers.h"
#include "kernels/cuda/lots.h"

namespace {
constexpr int THREADS = 256;

__global__ void __launch_bounds__(THREADS) sum_ranks(float *out, const sw_bf16 *in, int ranks,
                                                     uint64_t stride, uint64_t count, bool wide) {
    for (uint64_t at = ((uint64_t)blockIdx.x * THREADS + threadIdx.x) * LOT; at < count;
         at += (uint64_t)gridDim.x * THREADS * LOT) {
        const int length = lot_length(at, count);
        float sum[LOT], x[LOT];
#pragma unroll
        for (int i = 0; i < LOT; i++) sum[i] = -0.0f;
        for (int r = 0; r < ranks; r++) {
            load_lot<SW_BF16>(x, in, (uint64_t)r * stride + at, length, wide);
#pragma unroll
            for (int i = 0; i < LOT; i++) sum[i] += x[i];
        }
        store_lot<SW_FP32>(out, at, sum, length, wide);
    }
}
} // namespace

cudaError_t sw_cuda_rank_sum(cudaStream_t s, float *out, const sw_bf16 *in, uint32_t ranks,
                             uint64_t stride, uint64_t count) {
    if (count == 0) return cudaSuccess;
    GPU_LAUNCH(sum_ranks, blocks_for(count, THREADS), THREADS, 0, s, out, in, (int)ranks, stride,
               count, all_wide(out, in) && stride % LOT == 0);
    return cudaGetLastError();
}
