/* kernels/cuda/gpu.h - the only place that knows which of two worlds a kernel is built for.
 *
 * With nvcc it is CUDA; with the host's compiler it is the CPU stand-in of tests/standin, which the
 * tests execute. So that both can be built from one source, kernels keep to these rules:
 * - launch with GPU_LAUNCH(kernel, grid, block, shared_bytes, stream, arguments...), a template's
 *   name in parentheses, and return cudaGetLastError(); what is launched anywhere is listed before
 *   main() begins, so that load.cu can load it at start;
 * - shared memory is GPU_SHARED(float, tile, [16][17]) or GPU_DYNAMIC_SHARED(char, buffer), one of
 *   the latter a kernel;
 * - inline PTX only in the wrappers below, each with its twin in tests/standin/standin_tensor.h;
 * - warp operations are the *_sync ones with true masks; lanes are not in lockstep;
 * - no float atomics, no waiting for other blocks. */
#ifndef KERNELS_CUDA_GPU_H
#define KERNELS_CUDA_GPU_H
#include <stdint.h>

#if defined(__CUDACC__)
#include <cuda_runtime.h>

#define GPU_START(kernel, grid, block, shared_bytes, stream, ...)                                  \
    (kernel)<<<(grid), (block), (shared_bytes), (stream)>>>(__VA_ARGS__)
#define GPU_SHARED(type, name, dims) __shared__ __align__(16) type name dims
#define GPU_DYNAMIC_SHARED(type, name)                                                             \
    extern __shared__ __align__(128) unsigned char gpu_dynamic_shared[];                           \
    type *name = reinterpret_cast<type *>(gpu_dynamic_shared)

/* d[16][8] += a[16][16] b[16][8]: BF16 row-major times BF16 column-major, FP32 sums. */
__device__ __forceinline__ void gpu_mma(float (&d)[4], const uint32_t (&a)[4],
                                        const uint32_t (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
/* Four matrices of 8 x 8 halves; lane l names row l % 8 of matrix l / 8, 16-byte aligned. */
__device__ __forceinline__ void gpu_ldmatrix_x4(uint32_t (&out)[4], const void *row) {
    const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(at)
                 : "memory");
}
__device__ __forceinline__ void gpu_ldmatrix_x4_trans(uint32_t (&out)[4], const void *row) {
    const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(at)
                 : "memory");
}
/* 16 bytes from global to shared memory, behind the thread's back until a wait covers them. */
__device__ __forceinline__ void gpu_copy_async(void *shared, const void *global) {
    const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(at), "l"(global) : "memory");
}
__device__ __forceinline__ void gpu_copy_async_commit() {
    asm volatile("cp.async.commit_group;\n" ::: "memory");
}
/* Until at most N groups of this thread's are under way. */
template <int N>
__device__ __forceinline__ void gpu_copy_async_wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}
/* Two halves of a register, each rounded to nearest even. */
__device__ __forceinline__ uint32_t gpu_pack_bf16(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
#else
#include <standin.h>
#endif

#include "base/bf16.h"
#include "base/moments8.h"

#define GPU_ALL_LANES 0xFFFFFFFFu

/* A kernel that some launch names, in the list of all of them. */
struct gpu_kernel {
    const void *at;
    const gpu_kernel *next;
    explicit gpu_kernel(const void *kernel);
};
template <auto KERNEL>
struct gpu_listed {
    static const gpu_kernel node;
};
template <auto KERNEL>
const gpu_kernel gpu_listed<KERNEL>::node{reinterpret_cast<const void *>(KERNEL)};

/* To name the node is what puts it into the list. */
#define GPU_LAUNCH(kernel, ...)                                                                    \
    do {                                                                                           \
        (void)&gpu_listed<(kernel)>::node;                                                         \
        GPU_START(kernel, __VA_ARGS__);                                                            \
    } while (0)

#endif
