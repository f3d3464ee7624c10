/* kernels/cuda/norm.cu - sums that must have one order on every device: of losses, and of the
 * squares of rounded gradients.
 *
 * base/block_norm.h has the order of a block: eight running sums in double. A CUDA block takes one
 * such block, tile by tile: all threads load, round and store; then eight of them add up what the
 * tile holds, in order. Enough blocks are resident that memory stays the limit. */
#include "kernels/cuda/launchers.h"
#include "kernels/cuda/lots.h"

namespace {
constexpr int THREADS = 256, TILE = THREADS * LOT, SUM_TILE = 1024;
static_assert(SW_NORM_BLOCK % TILE == 0, "a block is whole tiles");

__global__ void __launch_bounds__(THREADS) sum_in_order(double *out, const float *x, uint64_t n) {
    GPU_SHARED(float, tile, [SUM_TILE]);
    double total = 0.0;
    for (uint64_t first = 0; first < n; first += SUM_TILE) {
        const uint64_t length = n - first < SUM_TILE ? n - first : SUM_TILE;
        for (uint64_t i = threadIdx.x; i < length; i += THREADS) tile[i] = x[first + i];
        __syncthreads();
        if (threadIdx.x == 0)
            for (uint64_t i = 0; i < length; i++) total += (double)tile[i];
        __syncthreads();
    }
    if (threadIdx.x == 0) *out = total;
}

__global__ void bad_begin(struct sw_nonfinite *bad) {
    bad->count = 0;
    bad->first = UINT64_MAX;
    bad->is_nan = bad->pad = 0;
}

template <enum sw_dtype T>
__global__ void bad_end(struct sw_nonfinite *bad, const void *dst) {
    if (bad->count == 0) {
        bad->first = 0;
        return;
    }
    const float value = sw_load(T, dst, bad->first);
    bad->is_nan = value != value;
}

template <enum sw_dtype T>
__global__ void __launch_bounds__(THREADS)
    round_norm(void *dst, const float *src, uint64_t count, double *block_sums,
               struct sw_nonfinite *bad, bool wide) {
    GPU_SHARED(float, tile, [TILE]);
    GPU_SHARED(double, lanes, [8]);
    const uint64_t begin = (uint64_t)blockIdx.x * SW_NORM_BLOCK;
    const uint64_t left = count - begin, length = left < SW_NORM_BLOCK ? left : SW_NORM_BLOCK;
    double sum = 0.0;
    for (uint64_t first = 0; first < length; first += TILE) {
        const uint64_t mine = first + threadIdx.x * LOT, at = begin + mine;
        if (mine < length) {
            const int here = lot_length(at, begin + length);
            float x[LOT];
            load_lot<SW_FP32>(x, src, at, here, wide);
            store_lot<T>(dst, at, x, here, wide);
            for (int i = 0; i < here; i++) {
                const float rounded =
                    T == SW_FP32 ? x[i] : sw_f32_from_bf16(sw_bf16_from_f32(x[i]));
                tile[threadIdx.x * LOT + i] = rounded;
                if ((sw_f32_bits(rounded) & 0x7F800000u) == 0x7F800000u) {
                    atomicAdd(reinterpret_cast<unsigned long long *>(&bad->count), 1ull);
                    atomicMin(reinterpret_cast<unsigned long long *>(&bad->first),
                              (unsigned long long)(at + (uint64_t)i));
                }
            }
        }
        __syncthreads();
        const uint64_t rest = length - first, here = rest < TILE ? rest : TILE;
        if (threadIdx.x < 8)
            for (uint64_t i = threadIdx.x; i < here; i += 8)
                sum += (double)tile[i] * (double)tile[i];
        __syncthreads();
    }
    if (threadIdx.x < 8) lanes[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x == 0)
        block_sums[blockIdx.x] = ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
                                 ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

template <enum sw_dtype T>
cudaError_t round_norm_as(cudaStream_t s, void *dst, const float *src, uint64_t count,
                          double *block_sums, struct sw_nonfinite *bad) {
    const uint64_t blocks = (count + SW_NORM_BLOCK - 1) / SW_NORM_BLOCK;
    GPU_LAUNCH(bad_begin, 1, 1, 0, s, bad);
    const cudaError_t begun = cudaGetLastError();
    if (begun != cudaSuccess) return begun; /* bad_end would read where garbage points */
    if (blocks)
        GPU_LAUNCH((round_norm<T>), (unsigned)blocks, THREADS, 0, s, dst, src, count, block_sums,
                   bad, all_wide(dst, src));
    GPU_LAUNCH((bad_end<T>), 1, 1, 0, s, bad, dst);
    return cudaGetLastError();
}
} // namespace

cudaError_t sw_cuda_sum(cudaStream_t s, double *out, const float *x, uint64_t n) {
    GPU_LAUNCH(sum_in_order, 1, THREADS, 0, s, out, x, n);
    return cudaGetLastError();
}

cudaError_t sw_cuda_round_norm(cudaStream_t s, void *dst, enum sw_dtype dst_dtype, const float *src,
                               uint64_t count, double *block_sums, struct sw_nonfinite *bad) {
    return BY_DTYPE(dst_dtype, round_norm_as, s, dst, src, count, block_sums, bad);
}
