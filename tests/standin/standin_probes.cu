/* tests/standin/standin_probes.cu - kernels for the test of the stand-in itself: some are right,
 * and most have the bug that their name says. Each runs on `out`, device memory of `count` ints. */
#include "tests/standin/standin_probes.h"
#include "kernels/cuda/gpu.h"

namespace {
constexpr int THREADS = 64;

__global__ void right(int *out, int) {
    GPU_SHARED(int, tile, [THREADS]);
    const int t = (int)threadIdx.x;
    tile[t] = t;
    __syncthreads();
    out[t] = tile[(t + 1) % THREADS];
}

__global__ void no_barrier(int *out, int) {
    GPU_SHARED(int, tile, [THREADS]);
    const int t = (int)threadIdx.x;
    tile[t] = t;
    out[t] = tile[(t + 1) % THREADS];
}

__global__ void no_barrier_before_reuse(int *out, int) {
    GPU_SHARED(int, tile, [THREADS]);
    const int t = (int)threadIdx.x;
    for (int i = 0; i < 3; i++) {
        tile[t] = t + i;
        __syncthreads();
        out[t] = tile[(t + 1) % THREADS];
    }
}

__global__ void two_barriers(int *out, int) {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
    out[threadIdx.x] = 1;
}

__global__ void barrier_for_some(int *out, int) {
    if (threadIdx.x < 16)
        __syncthreads();
    else
        out[threadIdx.x] = __shfl_sync(GPU_ALL_LANES, 1, 0);
}

__global__ void returned_in_mask(int *out, int) {
    if (threadIdx.x % 2) return;
    out[threadIdx.x] = __shfl_xor_sync(GPU_ALL_LANES, 1, 2);
}

__global__ void half_warps(int *out, int) {
    const int t = (int)threadIdx.x;
    out[t] = t % 2 ? __shfl_xor_sync(0xAAAAAAAAu, t, 2) : __shfl_xor_sync(0x55555555u, t, 4);
}

__global__ void no_wait_for_copy(int *out, int) {
    GPU_SHARED(int4, tile, [THREADS]);
    const int t = (int)threadIdx.x;
    out[t] = t;
    __syncthreads();
    if (t < THREADS / 4) gpu_copy_async(&tile[t], out + 4 * t);
    gpu_copy_async_commit();
    __syncthreads();
    if (t < THREADS / 4) out[4 * t] = tile[t].x + 1000;
}

__global__ void past_the_end(int *out, int count) {
    out[0] = out[count];
}

__global__ void dynamic_past_the_end(int *out, int) {
    GPU_DYNAMIC_SHARED(int, tile);
    tile[THREADS] = 1;
    out[0] = tile[THREADS];
}

__global__ void sum_of_blocks(int *out, int) {
    if (threadIdx.x == 0) out[0] += 1;
}

__global__ void no_syncwarp(int *out, int) {
    GPU_SHARED(int, tile, [THREADS]);
    const int t = (int)threadIdx.x;
    tile[t] = t;
    const int other = __shfl_xor_sync(GPU_ALL_LANES, t, 1); /* orders no memory */
    out[t] = tile[other];
}

__global__ void misaligned(int *out, int) {
    const int4 v = *reinterpret_cast<const int4 *>(out + 1);
    out[0] = v.x;
}

struct probe {
    const char *name;
    void (*kernel)(int *, int);
    int blocks;
    size_t shared_bytes;
};
const probe probes[] = {
    {"right", right, 1, 0},
    {"no_barrier", no_barrier, 1, 0},
    {"no_barrier_before_reuse", no_barrier_before_reuse, 1, 0},
    {"two_barriers", two_barriers, 1, 0},
    {"barrier_for_some", barrier_for_some, 1, 0},
    {"returned_in_mask", returned_in_mask, 1, 0},
    {"half_warps", half_warps, 1, 0},
    {"no_wait_for_copy", no_wait_for_copy, 1, 0},
    {"past_the_end", past_the_end, 1, 0},
    {"dynamic_past_the_end", dynamic_past_the_end, 1, THREADS * sizeof(int)},
    {"sum_of_blocks", sum_of_blocks, 4, 0},
    {"no_syncwarp", no_syncwarp, 1, 0},
    {"misaligned", misaligned, 1, 0},
    {"too_much_shared", right, 1, (48 << 10) + 1},
};
} // namespace

cudaError_t sw_probe_launch(const char *name, cudaStream_t stream, int *out, int count) {
    for (const probe &p : probes)
        if (strcmp(p.name, name) == 0) {
            GPU_START(p.kernel, (unsigned)p.blocks, THREADS, p.shared_bytes, stream, out, count);
            return cudaGetLastError();
        }
    return cudaErrorInvalidValue;
}
