/* kernels/cuda/lots.h - how element-wise kernels read and write, and sums over a block.
 *
 * A thread takes a lot of eight elements: 16 bytes of BF16, or twice 16 of FP32, where every
 * pointer of the call is aligned to 16; element by element where not, and at the end. Sums go
 * through lanes and warps in a fixed tree, so equal inputs give equal bits. */
#ifndef KERNELS_CUDA_LOTS_H
#define KERNELS_CUDA_LOTS_H
#include "kernels/cuda/gpu.h"

constexpr int LOT = 8;

/* How many elements of the lot that begins at `at` exist. */
__device__ __forceinline__ int lot_length(uint64_t at, uint64_t count) {
    return count - at < LOT ? (int)(count - at) : LOT;
}

template <enum sw_dtype T>
__device__ __forceinline__ void load_lot(float (&x)[LOT], const void *p, uint64_t at, int length,
                                         bool wide) {
    if (!wide || length < LOT) {
#pragma unroll
        for (int i = 0; i < LOT; i++) x[i] = i < length ? sw_load(T, p, at + (uint64_t)i) : 0.0f;
    } else if (T == SW_FP32) {
        const float4 *from = reinterpret_cast<const float4 *>(static_cast<const float *>(p) + at);
        const float4 low = from[0], high = from[1];
        x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
        x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    } else {
        const uint4 v = *reinterpret_cast<const uint4 *>(static_cast<const sw_bf16 *>(p) + at);
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[2 * i] = sw_f32_from_bits(words[i] << 16);
            x[2 * i + 1] = sw_f32_from_bits(words[i] & 0xFFFF0000u);
        }
    }
}

template <enum sw_dtype T>
__device__ __forceinline__ void store(void *p, uint64_t at, float x) {
    if (T == SW_FP32)
        static_cast<float *>(p)[at] = x;
    else
        static_cast<sw_bf16 *>(p)[at] = sw_bf16_from_f32(x);
}

/* Rounds to nearest even. */
template <enum sw_dtype T>
__device__ __forceinline__ void store_lot(void *p, uint64_t at, const float (&x)[LOT], int length,
                                          bool wide) {
    if (!wide || length < LOT) {
#pragma unroll
        for (int i = 0; i < LOT; i++)
            if (i < length) store<T>(p, at + (uint64_t)i, x[i]);
    } else if (T == SW_FP32) {
        float4 *to = reinterpret_cast<float4 *>(static_cast<float *>(p) + at);
        to[0] = make_float4(x[0], x[1], x[2], x[3]);
        to[1] = make_float4(x[4], x[5], x[6], x[7]);
    } else {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            words[i] = sw_bf16_from_f32(x[2 * i]) | (uint32_t)sw_bf16_from_f32(x[2 * i + 1]) << 16;
        *reinterpret_cast<uint4 *>(static_cast<sw_bf16 *>(p) + at) =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
}

/* What a lot of 16-bit codes is. */
__device__ __forceinline__ void load_halves(uint16_t (&x)[LOT], const uint16_t *p, uint64_t at,
                                            int length, bool wide) {
    if (!wide || length < LOT) {
#pragma unroll
        for (int i = 0; i < LOT; i++) x[i] = i < length ? p[at + (uint64_t)i] : (uint16_t)0;
        return;
    }
    const uint4 v = *reinterpret_cast<const uint4 *>(p + at);
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < LOT; i++) x[i] = (uint16_t)(words[i / 2] >> (i % 2 * 16));
}

__device__ __forceinline__ void store_halves(uint16_t *p, uint64_t at, const uint16_t (&x)[LOT],
                                             int length, bool wide) {
    if (!wide || length < LOT) {
#pragma unroll
        for (int i = 0; i < LOT; i++)
            if (i < length) p[at + (uint64_t)i] = x[i];
        return;
    }
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) words[i] = x[2 * i] | (uint32_t)x[2 * i + 1] << 16;
    *reinterpret_cast<uint4 *>(p + at) = make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(GPU_ALL_LANES, x, d);
    return x;
}

/* In every thread; the block is whole warps. Once between two barriers of the block: the last reads
 * of `part` are not waited for. */
__device__ __forceinline__ float block_sum(float x) {
    GPU_SHARED(float, part, [32]);
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    x = warp_sum(x);
    if (lane == 0) part[threadIdx.x >> 5] = x;
    __syncthreads();
    return warp_sum(lane < warps ? part[lane] : 0.0f);
}

/* ---- on the host ---- */

template <class... P>
static inline bool all_wide(const P *...pointers) {
    return ((... | reinterpret_cast<uintptr_t>(pointers)) & 15) == 0;
}

/* Blocks for an element-wise kernel of `threads` threads each; its threads stride over the grid. */
static inline unsigned blocks_for(uint64_t count, unsigned threads) {
    const uint64_t lots = (count + LOT - 1) / LOT, blocks = (lots + threads - 1) / threads;
    return blocks > 1u << 20 ? 1u << 20 : (unsigned)blocks;
}

/* Calls function<dtype>(...) with the constant. */
#define BY_DTYPE(dtype, function, ...)                                                             \
    ((dtype) == SW_FP32 ? function<SW_FP32>(__VA_ARGS__) : function<SW_BF16>(__VA_ARGS__))

#endif
