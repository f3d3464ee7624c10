/* cpu_adam/record.c - a chunk's state as one piece of memory, its start, and its reading back. */
#include <assert.h>
#include <string.h>

#include "cpu_adam/adam_internal.h"
#include "cpu_adam/moments8.h"

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
    const struct sw_adam_chunk chunk = {.format = *format};
    struct sw_adam_stream streams[SW_ADAM_STREAMS_MAX];
    const int n = sw_adam_streams(&chunk, streams);
    uint64_t bytes = 0;
    for (int s = 0; s < n; s++) bytes += sw_adam_stream_bytes(&streams[s], 0, count);
    return bytes;
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

void sw_adam_start(const struct sw_adam_chunk *c, uint64_t first, uint64_t count,
                   const float *masters) {
    assert(c && first + count <= c->count && (masters || count == 0));
    if (count == 0) return;
    if (c->format.master == SW_MASTER_SPLIT) {
        for (uint64_t i = 0; i < count; i++) {
            const sw_bf16 half = sw_bf16_from_weight(masters[i]);
            c->half[first + i] = half;
            c->remainder[first + i] = sw_remainder_from_f32(masters[i], half);
        }
    } else {
        memcpy(c->master + first, masters, count * sizeof(*masters));
    }
    struct sw_adam_stream streams[SW_ADAM_STREAMS_MAX];
    const int n = sw_adam_streams(c, streams);
    for (int s = c->format.master == SW_MASTER_SPLIT ? 2 : 1; s < n; s++)
        memset(sw_adam_stream_at(&streams[s], first), 0,
               sw_adam_stream_bytes(&streams[s], first, first + count));
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
