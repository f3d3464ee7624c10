/* kernels/cuda/load.cu - loads every kernel of the back end on the current device.
 *
 * CUDA else loads a kernel at its first launch, which takes memory, and waits for the device, in
 * the middle of a step. To ask for a kernel's attributes loads it. */
#include "kernels/cuda/gpu.h"
#include "kernels/cuda/launchers.h"

static const gpu_kernel *gpu_kernels = nullptr; /* before any constructor runs */

gpu_kernel::gpu_kernel(const void *kernel) : at(kernel), next(gpu_kernels) {
    gpu_kernels = this;
}

cudaError_t sw_cuda_load_kernels(void) {
    cudaError_t error = cudaSuccess;
    for (const gpu_kernel *k = gpu_kernels; k && error == cudaSuccess; k = k->next) {
        struct cudaFuncAttributes attributes;
        error = cudaFuncGetAttributes(&attributes, k->at);
    }
    return error;
}
