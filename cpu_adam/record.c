/* cpu_adam/record.c - a chunk's state as one piece of memory, its start, and its reading back. */
#include <assert.h>
#include <errno.h>
#include <float.h>
#include <math.h>
#include <string.h>

#include "cpu_adam/adam_internal.h"
#include "base/moments8.h"

int sw_adam_streams(const struct sw_adam_chunk *c, struct sw_adam_stream out[SW_ADAM_STREAMS_MAX]) {
    int n = 0;
    if (c->format.master == SW_MASTER_SPLIT) {
        out[n++] = (struct sw_adam_stream){(char *)c->half, sizeof(*c->half), 0};
        out[n++] = (struct sw_adam_stream){(char *)c->remainder, sizeof(*c->remainder), 0};
    } else {
        out[n++] = (struct sw_adam_stream){(char *)c->master, sizeof(*c->master), 0};
    }
    if (c->format.moments == SW_MOMENTS_8BIT) {
        out[n++] = (struct sw_adam_stream){(char *)c->momentum_scales, sizeof(float), 1};
        out[n++] = (struct sw_adam_stream){(char *)c->variance_scales, sizeof(float), 1};
        out[n++] = (struct sw_adam_stream){(char *)c->momentum_codes, 1, 0};
        out[n++] = (struct sw_adam_stream){(char *)c->variance_codes, 1, 0};
    } else {
        out[n++] = (struct sw_adam_stream){(char *)c->momentum, sizeof(*c->momentum), 0};
        out[n++] = (struct sw_adam_stream){(char *)c->variance, sizeof(*c->variance), 0};
    }
    return n;
}

uint64_t sw_adam_record_bytes(const struct sw_adam_format *format, uint64_t count) {
    /* By itself and not by the streams, as plans ask for it millions of times. */
    const uint64_t blocks = (count + SW_ADAM_BLOCK - 1) / SW_ADAM_BLOCK;
    const uint64_t moment =
        format->moments == SW_MOMENTS_8BIT ? blocks * sizeof(float) + count : count * sizeof(float);
    return count * sizeof(float) + 2 * moment;
}

void sw_adam_record_map(struct sw_adam_chunk *c, void *record) {
    assert(c && record && (uintptr_t)record % sizeof(float) == 0);
    const uint64_t n = c->count, blocks = (n + SW_ADAM_BLOCK - 1) / SW_ADAM_BLOCK;
    char *at = record;
    c->master = NULL;
    c->half = NULL;
    c->remainder = NULL;
    c->momentum = c->variance = c->momentum_scales = c->variance_scales = NULL;
    c->momentum_codes = c->variance_codes = NULL;
    if (c->format.master == SW_MASTER_SPLIT) {
        c->half = (sw_bf16 *)at;
        c->remainder = (int16_t *)(at + n * sizeof(*c->half));
    } else {
        c->master = (float *)at;
    }
    at += n * sizeof(float); /* either way */
    if (c->format.moments == SW_MOMENTS_8BIT) {
        c->momentum_scales = (float *)at;
        c->variance_scales = c->momentum_scales + blocks;
        c->momentum_codes = (uint8_t *)(c->variance_scales + blocks);
        c->variance_codes = c->momentum_codes + n;
    } else {
        c->momentum = (float *)at;
        c->variance = c->momentum + n;
    }
}

static void write_masters(const struct sw_adam_chunk *c, uint64_t first, uint64_t count,
                          const float *masters) {
    if (c->format.master == SW_MASTER_FP32) {
        memcpy(c->master + first, masters, count * sizeof(*masters));
        return;
    }
    for (uint64_t i = 0; i < count; i++) {
        const sw_bf16 half = sw_bf16_from_weight(masters[i]);
        c->half[first + i] = half;
        c->remainder[first + i] = sw_remainder_from_f32(masters[i], half);
    }
}

void sw_adam_start(const struct sw_adam_chunk *c, uint64_t first, uint64_t count,
                   const float *masters) {
    assert(c && first + count <= c->count && (masters || count == 0));
    if (count == 0) return;
    write_masters(c, first, count, masters);
    struct sw_adam_stream streams[SW_ADAM_STREAMS_MAX];
    const int n = sw_adam_streams(c, streams);
    for (int s = c->format.master == SW_MASTER_SPLIT ? 2 : 1; s < n; s++)
        memset(sw_adam_stream_at(&streams[s], first), 0,
               sw_adam_stream_bytes(&streams[s], first, first + count));
}

/* ---- moments as codes ---- */

/* One of the two moments of a block. */
struct block {
    const float *values;
    uint64_t count;
    int is_variance;
    uint8_t codes[SW_ADAM_BLOCK];
};

static float decode(const struct block *b, uint8_t code, float scale) {
    return b->is_variance ? sw_8bit_variance(code, scale) : sw_8bit_momentum(code, scale);
}

static uint8_t nearest(const struct block *b, float value, float scale) {
    enum { HALF = 0x8000 };
    const uint32_t sign = sw_f32_bits(value) >> 31;
    const float ratio = scale < FLT_MIN ? 0 : fabsf(value) / scale;
    const float x = ratio < SW_8BIT_TOP ? ratio : SW_8BIT_TOP;
    if (!b->is_variance) return (uint8_t)(sign << 7 | sw_8bit_code(x, SW_M8_EXPONENT, 127, HALF));
    const uint32_t code = sw_8bit_code(x, SW_V8_EXPONENT, 255, HALF);
    return (uint8_t)(code | ((code == 0) & (value > 0)));
}

/* Codes the block; how many values that changes. The scale is the one that the largest value was
 * made with, if a code made it: s = 16 n / 15 rounded is found again from 15 s / 16 rounded, as no
 * such s lies in the middle between two of those. */
static uint64_t code_block(struct block *b, float *scale) {
    uint32_t top = 0;
    for (uint64_t i = 0; i < b->count; i++) {
        const uint32_t bits = sw_f32_bits(b->values[i]) & 0x7FFFFFFFu;
        top = bits > top ? bits : top;
    }
    *scale = sw_f32_from_bits(top) / SW_8BIT_TOP;
    uint64_t changed = 0;
    for (uint64_t i = 0; i < b->count; i++) {
        b->codes[i] = nearest(b, b->values[i], *scale);
        changed += sw_f32_bits(decode(b, b->codes[i], *scale)) != sw_f32_bits(b->values[i]);
    }
    return changed;
}

static uint64_t write_codes(const struct sw_adam_chunk *c, uint64_t first, uint64_t count,
                            const float *momentum, const float *variance) {
    uint64_t changed = 0;
    assert(first % SW_ADAM_BLOCK == 0);
    for (uint64_t i = 0; i < count; i += SW_ADAM_BLOCK) {
        const uint64_t n = count - i < SW_ADAM_BLOCK ? count - i : SW_ADAM_BLOCK, at = first + i;
        struct block m = {.values = momentum + i, .count = n};
        struct block v = {.values = variance + i, .count = n, .is_variance = 1};
        changed += code_block(&m, &c->momentum_scales[at / SW_ADAM_BLOCK]);
        changed += code_block(&v, &c->variance_scales[at / SW_ADAM_BLOCK]);
        memcpy(c->momentum_codes + at, m.codes, n);
        memcpy(c->variance_codes + at, v.codes, n);
    }
    return changed;
}

/* Split masters and codes have no infinities, and a variance no sign. */
static int can_hold(const struct sw_adam_chunk *c, uint64_t count, const float *masters,
                    const float *momentum, const float *variance) {
    const int split = c->format.master == SW_MASTER_SPLIT;
    const int coded = c->format.moments == SW_MOMENTS_8BIT;
    int good = 1;
    for (uint64_t i = 0; i < count; i++) {
        good &= variance[i] >= 0;
        good &= !split || isfinite(masters[i]);
        good &= !coded || (isfinite(momentum[i]) && isfinite(variance[i]));
    }
    return good;
}

int64_t sw_adam_write(const struct sw_adam_chunk *c, uint64_t first, uint64_t count,
                      const float *masters, const float *momentum, const float *variance) {
    assert(c && first + count <= c->count);
    if (!can_hold(c, count, masters, momentum, variance)) return -EDOM;
    write_masters(c, first, count, masters);
    if (c->format.moments == SW_MOMENTS_8BIT)
        return (int64_t)write_codes(c, first, count, momentum, variance);
    memcpy(c->momentum + first, momentum, count * sizeof(*momentum));
    memcpy(c->variance + first, variance, count * sizeof(*variance));
    return 0;
}

void sw_adam_read(const struct sw_adam_chunk *c, uint64_t first, uint64_t count, float *master,
                  float *momentum, float *variance) {
    assert(c && first + count <= c->count);
    const int split = c->format.master == SW_MASTER_SPLIT;
    const int coded = c->format.moments == SW_MOMENTS_8BIT;
    for (uint64_t k = 0; k < count; k++) {
        const uint64_t i = first + k, block = i / SW_ADAM_BLOCK;
        if (master)
            master[k] = split ? sw_f32_from_split(c->half[i], c->remainder[i]) : c->master[i];
        if (momentum)
            momentum[k] = coded ? sw_8bit_momentum(c->momentum_codes[i], c->momentum_scales[block])
                                : c->momentum[i];
        if (variance)
            variance[k] = coded ? sw_8bit_variance(c->variance_codes[i], c->variance_scales[block])
                                : c->variance[i];
    }
}
