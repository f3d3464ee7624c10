/* kernels/cuda/word_sum.cu - the sum of base/word_sum.h, of memory of the device, in parts. */
#include "kernels/cuda/gpu.h"
#include "base/word_sum.h"
#include "kernels/cuda/launchers.h"

namespace {
constexpr int THREADS = 256;

__global__ void __launch_bounds__(THREADS)
    word_parts(uint64_t *parts, const unsigned char *data, uint64_t bytes, bool aligned) {
    GPU_SHARED(uint64_t, sums, [THREADS]);
    const uint64_t words = (bytes + 7) / 8, whole = bytes / 8;
    uint64_t sum = 0;
    for (uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x; i < words;
         i += (uint64_t)gridDim.x * THREADS) {
        const bool fits = aligned && i < whole;
        sum += sw_word_term(i, fits ? reinterpret_cast<const uint64_t *>(data)[i]
                                    : sw_word_of(data, i, bytes));
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int t = 1; t < THREADS; t++) sum += sums[t];
    parts[blockIdx.x] = sum;
}
} // namespace

cudaError_t sw_cuda_word_parts(cudaStream_t s, uint64_t *parts, const void *data, uint64_t bytes) {
    GPU_LAUNCH(word_parts, SW_CUDA_WORD_PARTS, THREADS, 0, s, parts,
               static_cast<const unsigned char *>(data), bytes,
               reinterpret_cast<uintptr_t>(data) % 8 == 0);
    return cudaGetLastError();
}
