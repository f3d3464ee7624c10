/* kernels/cuda/tiles.h - tiles of BF16 in shared memory, and the products of a warp with them.
 *
 * A tile is [rows][PITCH<D>]: the eight halves behind each row keep rows 16 bytes aligned and put
 * the same column of eight neighbouring rows into different banks, for every D here. A warp works
 * on 16 rows of its product; lane l holds elements (l / 4, 2 (l % 4)) and the next one of each
 * 8 x 8 piece, and the same eight rows below (the PTX manual's fragments of mma.m16n8k16). */
#ifndef KERNELS_CUDA_TILES_H
#define KERNELS_CUDA_TILES_H
#include "kernels/cuda/gpu.h"

constexpr int TILE_THREADS = 128, TILE_ROWS = 64; /* four warps of 16 rows */
constexpr float LOG2_E = 1.4426950408889634f;

template <int D>
constexpr int PITCH = D + 8;

struct attention_shape {
    int time, heads, kv_heads;
    float scale;
    const uint32_t *starts; /* as in kernels/device.h */
};

/* Where the document of position i of a row begins. */
__device__ __forceinline__ int start_of(const attention_shape &shape, int batch, int i) {
    return shape.starts ? (int)shape.starts[(uint64_t)batch * (uint64_t)shape.time + (uint64_t)i]
                        : 0;
}

__device__ __forceinline__ int lane_index() {
    return (int)(threadIdx.x & 31);
}
/* Of the tile's 64 rows, the first of this warp. */
__device__ __forceinline__ int warp_row() {
    return (int)(threadIdx.x >> 5) * 16;
}
/* Row and column of element e of piece n, in the warp's 16 rows. */
__device__ __forceinline__ int fragment_row(int e) {
    return lane_index() / 4 + (e >> 1) * 8;
}
__device__ __forceinline__ int fragment_column(int n, int e) {
    return n * 8 + lane_index() % 4 * 2 + (e & 1);
}

/* Rows [first, first + ROWS) of a matrix of `time` rows; zeros beyond. The caller commits. */
template <int D, int ROWS>
__device__ __forceinline__ void load_tile(sw_bf16 *to, const sw_bf16 *from, uint64_t stride,
                                          int first, int time) {
    for (int i = (int)threadIdx.x; i < ROWS * (D / 8); i += TILE_THREADS) {
        const int row = i / (D / 8), column = i % (D / 8) * 8;
        sw_bf16 *at = to + row * PITCH<D> + column;
        if (first + row < time)
            gpu_copy_async(at, from + (uint64_t)(first + row) * stride + column);
        else
            *reinterpret_cast<uint4 *>(at) = make_uint4(0, 0, 0, 0);
    }
}

/* The warp's 16 rows and WIDTH columns of a tile to rows [first, ...) of a matrix; the warp has
 * written them itself. */
template <int D, int WIDTH>
__device__ __forceinline__ void store_rows(sw_bf16 *to, const sw_bf16 *tile, uint64_t stride,
                                           int first, int time) {
    __syncwarp();
    for (int i = lane_index(); i < 16 * (WIDTH / 8); i += 32) {
        const int row = warp_row() + i / (WIDTH / 8), column = i % (WIDTH / 8) * 8;
        if (first + row < time)
            *reinterpret_cast<uint4 *>(to + (uint64_t)(first + row) * stride + column) =
                *reinterpret_cast<const uint4 *>(tile + row * PITCH<D> + column);
    }
}

/* A warp's 16 x WIDTH result into its rows of a tile, each row times its factor. */
template <int D, int WIDTH>
__device__ __forceinline__ void put_rows(sw_bf16 *tile, const float (&x)[WIDTH / 8][4],
                                         const float (&factor)[2]) {
    __syncwarp(); /* the other lanes have read what lay there */
#pragma unroll
    for (int n = 0; n < WIDTH / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e += 2)
            *reinterpret_cast<uint32_t *>(tile + (warp_row() + fragment_row(e)) * PITCH<D> +
                                          fragment_column(n, e)) =
                gpu_pack_bf16(x[n][e] * factor[e >> 1], x[n][e + 1] * factor[e >> 1]);
}

/* c[16][N] += (16 rows of a)(N rows of b)^T over D, both [row][D]. */
template <int D, int N>
__device__ __forceinline__ void multiply_rows(float (&c)[N / 8][4], const sw_bf16 *a,
                                              const sw_bf16 *b) {
    const int lane = lane_index();
    const sw_bf16 *a_at = a + (lane % 16) * PITCH<D> + lane / 16 * 8;
    const sw_bf16 *b_at = b + (lane / 16 * 8 + lane % 8) * PITCH<D> + (lane / 8 & 1) * 8;
#pragma unroll
    for (int k = 0; k < D; k += 16) {
        uint32_t x[4];
        gpu_ldmatrix_x4(x, a_at + k);
#pragma unroll
        for (int n = 0; n < N; n += 16) {
            uint32_t y[4];
            gpu_ldmatrix_x4(y, b_at + n * PITCH<D> + k);
            const uint32_t low[2] = {y[0], y[1]}, high[2] = {y[2], y[3]};
            gpu_mma(c[n / 8], x, low);
            gpu_mma(c[n / 8 + 1], x, high);
        }
    }
}

/* c[16][WIDTH] += s[16][K] (K rows of b, columns [0, WIDTH)); s is rounded to BF16. */
template <int D, int K, int WIDTH>
__device__ __forceinline__ void multiply_scores(float (&c)[WIDTH / 8][4],
                                                const float (&s)[K / 8][4], const sw_bf16 *b) {
    const int lane = lane_index();
    const sw_bf16 *b_at = b + ((lane / 8 & 1) * 8 + lane % 8) * PITCH<D> + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < K; k += 16) {
        const float(&left)[4] = s[k / 8], (&right)[4] = s[k / 8 + 1];
        const uint32_t x[4] = {gpu_pack_bf16(left[0], left[1]), gpu_pack_bf16(left[2], left[3]),
                               gpu_pack_bf16(right[0], right[1]),
                               gpu_pack_bf16(right[2], right[3])};
#pragma unroll
        for (int n = 0; n < WIDTH; n += 16) {
            uint32_t y[4];
            gpu_ldmatrix_x4_trans(y, b_at + k * PITCH<D> + n);
            const uint32_t low[2] = {y[0], y[1]}, high[2] = {y[2], y[3]};
            gpu_mma(c[n / 8], x, low);
            gpu_mma(c[n / 8 + 1], x, high);
        }
    }
}

#endif
