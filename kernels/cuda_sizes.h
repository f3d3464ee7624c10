/* kernels/cuda_sizes.h - the scratch memory that the CUDA back end's operators ask for, for who
 * plans a run where the back end is not. A test compares them with the back end's own. */
#ifndef KERNELS_CUDA_SIZES_H
#define KERNELS_CUDA_SIZES_H
#include "kernels/device.h"

static inline uint64_t sw_cuda_sizes_attention(const struct sw_attention *shape) {
    return (uint64_t)shape->batch * shape->time * shape->heads * sizeof(float);
}

/* Partial sums over slabs of rows: up to 128 of them, of 64 rows or more, in eights. */
static inline uint64_t sw_cuda_sizes_rmsnorm(uint64_t n, uint64_t width) {
    const uint64_t even = (n + 127) / 128, rows = even < 64 ? 64 : (even + 7) / 8 * 8;
    return (n + rows - 1) / rows * width * sizeof(float);
}

#endif
