/* base/block_norm.h - the squared norm of a block of gradients: one order of additions for every
 * device, instruction set and thread count. */
#ifndef BASE_BLOCK_NORM_H
#define BASE_BLOCK_NORM_H
#include <stdint.h>
#include <string.h>
#include "base/bf16.h"

/* Elements of a block, counted from a shard's start; blocks are then added in order. */
#define SW_NORM_BLOCK 16384u

#ifndef __CUDACC__ /* kernels/cuda has its own, in the same order */

typedef double sw_double4 __attribute__((vector_size(32)));
typedef float sw_float4 __attribute__((vector_size(16)));
typedef uint32_t sw_uint32x4 __attribute__((vector_size(16)));
typedef uint16_t sw_uint16x4 __attribute__((vector_size(8)));

/* Eight running sums in double, element i in sum i % 8, folded as a tree. A float's square is exact
 * in double, so contraction could not change it. Adds the elements that are Inf or NaN to
 * *nonfinite; they do enter the sum. dtype is a constant where this is called. */
static inline __attribute__((always_inline)) double
sw_block_norm(enum sw_dtype dtype, const void *x, uint64_t count, uint64_t *nonfinite) {
    sw_double4 sum[2] = {{0}, {0}};
    sw_uint32x4 bad = {0};
    const uint64_t whole = count & ~7ull;
    for (uint64_t i = 0; i < whole; i += 8) {
#pragma GCC unroll 2
        for (uint64_t half = 0; half < 2; half++) {
            sw_uint32x4 bits; /* of FP32 */
            sw_uint16x4 upper;
            if (dtype == SW_FP32) {
                memcpy(&bits, (const float *)x + i + 4 * half, sizeof(bits));
            } else {
                memcpy(&upper, (const sw_bf16 *)x + i + 4 * half, sizeof(upper));
                bits = __builtin_convertvector(upper, sw_uint32x4) << 16;
            }
            const sw_double4 value = __builtin_convertvector((sw_float4)bits, sw_double4);
            sum[half] += value * value;
            bad -= (sw_uint32x4)((bits & 0x7F800000u) == 0x7F800000u); /* true is all ones */
        }
    }
    double lane[8];
    uint64_t found = 0;
    for (int l = 0; l < 8; l++) lane[l] = sum[l / 4][l % 4];
    for (int l = 0; l < 4; l++) found += bad[l];
    for (uint64_t i = whole; i < count; i++) {
        const float value = sw_load(dtype, x, i);
        lane[i - whole] += (double)value * (double)value;
        found += (sw_f32_bits(value) & 0x7F800000u) == 0x7F800000u;
    }
    *nonfinite += found;
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) +
           ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

#endif

#endif
