/* tests/standin/standin_tensor.h - the wrapped instructions of kernels/cuda/gpu.h: tensor cores,
 * their loads from shared memory, and copies that run behind the thread's back.
 *
 * Fragments lie in the lanes as the PTX manual says of mma.m16n8k16 and ldmatrix. */
#ifndef TESTS_STANDIN_STANDIN_TENSOR_H
#define TESTS_STANDIN_STANDIN_TENSOR_H
#include "base/bf16.h"

namespace standin {
inline float bf16_half(uint32_t packed, int high) {
    return __uint_as_float((high ? packed >> 16 : packed & 0xFFFFu) << 16);
}

struct Mma {
    float *d;
    const uint32_t *a, *b;
};

/* Sums over k in order, in FP32. */
STANDIN_INTERNAL inline void mma_run(Warp &w, uint32_t mask) {
    if (mask != 0xFFFFFFFFu) die("mma.sync: all 32 lanes must take part");
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; lane++) {
        auto *m = static_cast<Mma *>(w.arg[lane]);
        const int group = lane >> 2, pair = (lane & 3) * 2;
        for (int r = 0; r < 4; r++)
            for (int h = 0; h < 2; h++)
                a[group + (r & 1) * 8][pair + h + (r >> 1) * 8] = bf16_half(m->a[r], h);
        for (int r = 0; r < 2; r++)
            for (int h = 0; h < 2; h++) b[pair + h + r * 8][group] = bf16_half(m->b[r], h);
    }
    for (int lane = 0; lane < 32; lane++) {
        auto *m = static_cast<Mma *>(w.arg[lane]);
        const int group = lane >> 2, pair = (lane & 3) * 2;
        for (int i = 0; i < 4; i++) {
            float sum = m->d[i];
            for (int k = 0; k < 16; k++) sum += a[group + (i >> 1) * 8][k] * b[k][pair + (i & 1)];
            m->d[i] = sum;
        }
    }
}

struct Ldmatrix {
    uint32_t *out;
    uint32_t row[4]; /* the 16 bytes that this lane addressed */
    int matrices;
    bool transposed;
};

STANDIN_INTERNAL inline uint32_t ldmatrix_element(const Warp &w, int matrix, int row, int column) {
    const uint32_t word = static_cast<Ldmatrix *>(w.arg[matrix * 8 + row])->row[column / 2];
    return column & 1 ? word >> 16 : word & 0xFFFFu;
}

/* Matrix i's rows come from lanes 8 i to 8 i + 7; lane l gets row l / 4, columns 2 (l % 4) and the
 * next one, or the same of the transposed matrix. */
STANDIN_INTERNAL inline void ldmatrix_run(Warp &w, uint32_t mask) {
    if (mask != 0xFFFFFFFFu) die("ldmatrix: all 32 lanes must take part");
    for (int lane = 0; lane < 32; lane++) {
        auto *me = static_cast<Ldmatrix *>(w.arg[lane]);
        const int row = lane / 4, column = lane % 4 * 2;
        for (int i = 0; i < me->matrices; i++)
            me->out[i] = me->transposed ? ldmatrix_element(w, i, column, row) |
                                              ldmatrix_element(w, i, column + 1, row) << 16
                                        : ldmatrix_element(w, i, row, column) |
                                              ldmatrix_element(w, i, row, column + 1) << 16;
    }
}

/* Each lane reads its own row here, in code that the sanitizers watch. */
template <int N>
inline void ldmatrix(uint32_t *out, const void *row, bool transposed) {
    Ldmatrix lane{out, {}, N, transposed};
    if (lane_id() < N * 8) {
        if (reinterpret_cast<uintptr_t>(row) & 15) die("ldmatrix: a row is not 16-byte aligned");
        const uint4 v = *static_cast<const uint4 *>(row);
        lane.row[0] = v.x, lane.row[1] = v.y, lane.row[2] = v.z, lane.row[3] = v.w;
    }
    warp_collective(0xFFFFFFFFu, OP_LDMATRIX, &lane, ldmatrix_run);
}
} // namespace standin

STANDIN_INTERNAL inline void gpu_mma(float (&d)[4], const uint32_t (&a)[4],
                                     const uint32_t (&b)[2]) {
    standin::Mma lane{d, a, b};
    standin::warp_collective(0xFFFFFFFFu, standin::OP_MMA, &lane, standin::mma_run);
}
inline void gpu_ldmatrix_x4(uint32_t (&out)[4], const void *row) {
    standin::ldmatrix<4>(out, row, false);
}
inline void gpu_ldmatrix_x4_trans(uint32_t (&out)[4], const void *row) {
    standin::ldmatrix<4>(out, row, true);
}
inline void gpu_copy_async(void *shared, const void *global) {
    standin::copy_async(shared, global, 16);
}
inline void gpu_copy_async_commit() {
    standin::copy_async_commit();
}
template <int N>
inline void gpu_copy_async_wait() {
    standin::copy_async_wait(N);
}
inline uint32_t gpu_pack_bf16(float low, float high) {
    return sw_bf16_from_f32(low) | (uint32_t)sw_bf16_from_f32(high) << 16;
}

#endif
