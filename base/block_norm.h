/* base/block_norm.h - the squared norm of a block of gradients: one order of additions for every
 * device, instruction set and thread count. */
#ifndef BASE_BLOCK_NORM_H
#define BASE_BLOCK_NORM_H
#include <stdint.h>
#include "base/bf16.h"

/* Elements of a block, counted from a shard's start; blocks are then added in order. */
#define SW_NORM_BLOCK 16384u

/* Eight running sums in double, element i in sum i % 8, folded as a tree. A float's square is exact
 * in double, so contraction could not change it. Adds the elements that are Inf or NaN to
 * *nonfinite; they do enter the sum. dtype is a constant where this is called. */
static inline __attribute__((always_inline)) double
sw_block_norm(enum sw_dtype dtype, const void *x, uint64_t count, uint64_t *nonfinite) {
    double lane[8] = {0};
    uint32_t bad = 0;
    const uint64_t whole = count & ~7ull;
    for (uint64_t i = 0; i < whole; i += 8) {
#pragma GCC unroll 8
        for (uint64_t l = 0; l < 8; l++) {
            const float value = sw_load(dtype, x, i + l);
            lane[l] += (double)value * (double)value;
            bad += (sw_f32_bits(value) & 0x7F800000u) == 0x7F800000u;
        }
    }
    for (uint64_t i = whole; i < count; i++) {
        const float value = sw_load(dtype, x, i);
        lane[i - whole] += (double)value * (double)value;
        bad += (sw_f32_bits(value) & 0x7F800000u) == 0x7F800000u;
    }
    *nonfinite += bad;
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) +
           ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

#endif
