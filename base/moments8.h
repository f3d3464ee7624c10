/* base/moments8.h - 8-bit moments: a block's scale and the codes of its elements.
 *
 * Blockwise quantisation with the block's largest magnitude as scale is Dettmers et al.,
 * arXiv:2110.02861, section 2.1; the codes are small floats instead of their table, because a float
 * is made with shifts: a momentum has a sign, 4 exponent and 3 mantissa bits, a variance, never
 * negative, 5 exponent and 3 mantissa bits. The scale maps the largest magnitude to 0.9375, the
 * largest code; below the smallest normal code the steps are even, down to 0.
 *
 * Rounding is stochastic (Gupta et al., arXiv:1502.02551, section 3): nearest would hold a moment
 * in place whenever one step moves it by less than half a code, that is by 6%, and beta2's 5% or
 * less is such a step. The random bits are a hash of the update and the element's index in the
 * model, so thread, chunk and variant do not enter. A variance above 0 never becomes 0: that would
 * turn a small divisor into eps and the element's step into a large one. */
#ifndef BASE_MOMENTS8_H
#define BASE_MOMENTS8_H
#include <stdint.h>
#include "base/bf16.h"

/* Exponent field of 2^-15 and 2^-31, where the normal codes of momentum and variance begin. */
enum { SW_M8_EXPONENT = 112, SW_V8_EXPONENT = 96, SW_8BIT_MANTISSA = 3 };

#define SW_8BIT_TOP 0.9375f

/* 32 random bits. The two constants and shifts are Wellons's lowbias32 (public domain). */
SW_EVERYWHERE uint32_t sw_8bit_hash(uint32_t seed, uint32_t index) {
    uint32_t x = index ^ (seed * 0x9E3779B9u);
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    x ^= x >> 16;
    return x;
}

/* Both sides are made anyway; a mask keeps the loops free of branches. */
SW_EVERYWHERE uint32_t sw_8bit_select(int which, uint32_t yes, uint32_t no) {
    const uint32_t mask = 0u - (uint32_t)which;
    return (yes & mask) | (no & ~mask);
}

/* Magnitude x in [0, 0.9375] to a code in [0, top]; `exponent` begins the normal codes, `dither` is
 * 16 random bits. */
SW_EVERYWHERE uint32_t sw_8bit_code(float x, uint32_t exponent, uint32_t top, uint32_t dither) {
    const uint32_t bits = sw_f32_bits(x);
    const uint32_t normal = ((bits + (dither << 4)) >> 20) - ((exponent - 1) << 3);
    /* Even steps of 2^(exponent - 127 - 3): scaled so that a step is 1, then floor(x + dither). */
    const float step = sw_f32_from_bits((127 + 127 + SW_8BIT_MANTISSA - exponent) << 23);
    const float steps = x * step < 8 ? x * step : 8; /* the conversion below must not overflow */
    const uint32_t even = (uint32_t)(int32_t)(steps + (float)dither * 0x1p-16f);
    const uint32_t code = sw_8bit_select(bits >= exponent << 23, normal, even);
    return code < top ? code : top;
}

SW_EVERYWHERE float sw_8bit_value(uint32_t code, uint32_t exponent) {
    const uint32_t normal = (code << 20) + ((exponent - 1) << 23);
    const float step = sw_f32_from_bits((exponent - SW_8BIT_MANTISSA) << 23);
    const uint32_t even = sw_f32_bits((float)(int32_t)code * step);
    return sw_f32_from_bits(sw_8bit_select(code >= 8, normal, even));
}

SW_EVERYWHERE float sw_8bit_momentum(uint8_t code, float scale) {
    const float magnitude = sw_8bit_value(code & 127u, SW_M8_EXPONENT) * scale;
    return sw_f32_from_bits(sw_f32_bits(magnitude) | (uint32_t)(code & 128u) << 24);
}

SW_EVERYWHERE float sw_8bit_variance(uint8_t code, float scale) {
    return sw_8bit_value(code, SW_V8_EXPONENT) * scale;
}

#endif
