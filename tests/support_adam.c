/* See support_adam.h. */
#include "tests/support_adam.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#ifdef __SANITIZE_ADDRESS__
#define ADAM_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ADAM_ASAN 1
#endif
#endif
#ifdef ADAM_ASAN
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(at, bytes)   ((void)(at), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(at, bytes) ((void)(at), (void)(bytes))
#endif

enum { GUARD_BYTES = 64, GUARD = 0xA5 };

struct adam_shape adam_shape(int index) {
    const int emit = index / 2 % 3;
    return (struct adam_shape){
        .format = {.grad = index % 2 ? SW_FP32 : SW_BF16,
                   .weight = emit == 2 ? SW_FP32 : SW_BF16,
                   .master = index / 6 % 2 ? SW_MASTER_SPLIT : SW_MASTER_FP32,
                   .moments = index / 12 % 2 ? SW_MOMENTS_8BIT : SW_MOMENTS_FP32},
        .emits = emit != 0,
        .coupled = index / 24 % 2,
    };
}

const char *adam_shape_name(const struct adam_shape *s) {
    static char name[128];
    snprintf(name, sizeof(name), "%s gradient, %s master, %s moments, %s weight, %s decay",
             sw_dtype_name(s->format.grad), s->format.master == SW_MASTER_SPLIT ? "split" : "fp32",
             s->format.moments == SW_MOMENTS_8BIT ? "8-bit" : "fp32",
             s->emits ? sw_dtype_name(s->format.weight) : "no", s->coupled ? "coupled" : "own");
    return name;
}

static uint64_t random_state;

void adam_seed(uint64_t seed) {
    random_state = seed * 2 + 1;
}
uint32_t adam_random(void) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}
float adam_uniform(void) {
    return (float)(int32_t)adam_random() * 0x1p-31f;
}

struct sw_adam_step adam_step(int coupled, uint64_t t, float grad_scale) {
    const struct sw_adam_hyper hyper = {.lr = 0.01,
                                        .beta1 = 0.9,
                                        .beta2 = 0.95,
                                        .eps = 1e-8,
                                        .weight_decay = 10,
                                        .coupled = coupled};
    struct sw_adam_step step;
    sw_adam_prepare(&step, &hyper, t, grad_scale);
    return step;
}

/* ---- what the boxes are filled with ---- */

enum { BLOCKS_MAX = (ADAM_COUNT_MAX + SW_ADAM_BLOCK - 1) / SW_ADAM_BLOCK };
static struct {
    uint64_t seed;
    int filled;
    float master[ADAM_COUNT_MAX], momentum[ADAM_COUNT_MAX], variance[ADAM_COUNT_MAX];
    float grad32[ADAM_COUNT_MAX], scales[2][BLOCKS_MAX];
    sw_bf16 grad16[ADAM_COUNT_MAX], half[ADAM_COUNT_MAX];
    int16_t remainder[ADAM_COUNT_MAX];
    uint8_t codes[2][ADAM_COUNT_MAX];
} source;

/* Values on which a fast path could take a short cut. */
static void fill_odd_values(void) {
    static const float odd[] = {0.0f,  -0.0f,  1e-40f,   -1e-40f,   1.2e-38f, -1e-30f,
                                3e38f, -3e38f, INFINITY, -INFINITY, NAN,      1e-20f};
    enum { ODD = sizeof(odd) / sizeof(odd[0]) };
    for (int i = 0; i < ODD; i++) {
        source.grad32[100 + i] = odd[i];
        source.grad16[200 + i] = sw_bf16_from_f32(odd[i]);
        source.momentum[300 + i] = odd[i];
        source.variance[320 + i] = fabsf(odd[i]);
        source.master[340 + i] = odd[i];
    }
    source.grad32[400] = source.momentum[400] = source.variance[400] = 0;
    source.grad16[400] = 0;
    source.master[401] = 3.4e38f;
    source.variance[402] = source.momentum[402] = 1e-40f;
    memset(source.codes, 0, sizeof(source.codes[0][0]) * 20);
    source.scales[0][3] = source.scales[1][3] = 0; /* a block of zeros */
    memset(&source.codes[0][3 * SW_ADAM_BLOCK], 0, SW_ADAM_BLOCK);
    memset(&source.codes[1][3 * SW_ADAM_BLOCK], 0, SW_ADAM_BLOCK);
    memset(&source.grad32[3 * SW_ADAM_BLOCK], 0, sizeof(float) * SW_ADAM_BLOCK);
    memset(&source.grad16[3 * SW_ADAM_BLOCK], 0, sizeof(sw_bf16) * SW_ADAM_BLOCK);
}

static void fill_source(uint64_t seed) {
    if (source.filled && source.seed == seed) return;
    source.filled = 1;
    source.seed = seed;
    adam_seed(seed);
    for (int i = 0; i < ADAM_COUNT_MAX; i++) {
        source.master[i] = adam_uniform();
        source.momentum[i] = adam_uniform() * 0.1f;
        source.variance[i] = fabsf(adam_uniform()) * 0.01f;
        source.grad32[i] = adam_uniform() * 0.3f;
        source.grad16[i] = sw_bf16_from_f32(adam_uniform() * 0.3f);
        source.codes[0][i] = (uint8_t)(adam_random() >> 24);
        source.codes[1][i] = (uint8_t)(adam_random() >> 24);
    }
    for (int b = 0; b < BLOCKS_MAX; b++) {
        source.scales[0][b] = fabsf(adam_uniform()) * 0.1f;
        source.scales[1][b] = fabsf(adam_uniform()) * 0.01f;
    }
    fill_odd_values();
    for (int i = 0; i < ADAM_COUNT_MAX; i++) {
        source.half[i] = sw_bf16_from_weight(source.master[i]);
        source.remainder[i] =
            (int16_t)(sw_f32_bits(source.master[i]) - ((uint32_t)source.half[i] << 16));
    }
}

/* ---- boxes ---- */

/* A buffer of `count` items behind a guard; NULL `from`: filled with 0xEE. */
static void *add_piece(struct adam_box *box, const void *from, size_t item_bytes, uint64_t count,
                       unsigned offset) {
    const size_t at = (box->bytes + GUARD_BYTES + 63) / 64 * 64 + offset * item_bytes;
    const int p = box->piece_count++;
    box->pieces[p].at = at;
    box->pieces[p].bytes = count * item_bytes;
    box->bytes = at + count * item_bytes;
    if (!box->memory) return NULL; /* only measuring */
    if (from)
        memcpy(box->memory + at, from, count * item_bytes);
    else
        memset(box->memory + at, 0xEE, count * item_bytes);
    return box->memory + at;
}

static void lay_out(struct adam_box *box, unsigned offset) {
    struct sw_adam_chunk *c = &box->chunk;
    const uint64_t n = c->count, blocks = (n + SW_ADAM_BLOCK - 1) / SW_ADAM_BLOCK;
    box->bytes = 0;
    box->piece_count = 0;
    if (c->format.master == SW_MASTER_SPLIT) {
        c->half = add_piece(box, source.half, sizeof(*c->half), n, offset);
        c->remainder = add_piece(box, source.remainder, sizeof(*c->remainder), n, offset);
    } else {
        c->master = add_piece(box, source.master, sizeof(*c->master), n, offset);
    }
    if (c->format.moments == SW_MOMENTS_8BIT) {
        c->momentum_scales = add_piece(box, source.scales[0], sizeof(float), blocks, offset);
        c->variance_scales = add_piece(box, source.scales[1], sizeof(float), blocks, offset);
        c->momentum_codes = add_piece(box, source.codes[0], 1, n, offset);
        c->variance_codes = add_piece(box, source.codes[1], 1, n, offset);
    } else {
        c->momentum = add_piece(box, source.momentum, sizeof(float), n, offset);
        c->variance = add_piece(box, source.variance, sizeof(float), n, offset);
    }
    const int wide = c->format.grad == SW_FP32;
    c->grad =
        add_piece(box, wide ? (const void *)source.grad32 : source.grad16, wide ? 4 : 2, n, offset);
    if (box->shape.emits)
        c->weight = add_piece(box, NULL, sw_dtype_bytes(c->format.weight), n, offset);
    box->bytes += GUARD_BYTES;
}

static void fill_guards(struct adam_box *box) {
    size_t at = 0;
    for (int p = 0; p < box->piece_count; p++) {
        memset(box->memory + at, GUARD, box->pieces[p].at - at);
        at = box->pieces[p].at + box->pieces[p].bytes;
    }
    memset(box->memory + at, GUARD, box->bytes - at);
}

static void check_guards(const struct adam_box *box) {
    unsigned char guard[4 * GUARD_BYTES + 64];
    memset(guard, GUARD, sizeof(guard));
    size_t at = 0;
    for (int p = 0; p <= box->piece_count; p++) {
        const size_t end = p < box->piece_count ? box->pieces[p].at : box->bytes;
        assert_true(end - at <= sizeof(guard));
        if (memcmp(box->memory + at, guard, end - at) != 0)
            fail_msg("%s, %llu elements: written outside its buffers, before buffer %d",
                     adam_shape_name(&box->shape), (unsigned long long)box->chunk.count, p);
        if (p < box->piece_count) at = end + box->pieces[p].bytes;
    }
}

void adam_box_init(struct adam_box *box, struct adam_shape shape, uint64_t count, unsigned offset,
                   uint64_t seed) {
    assert_true(count <= ADAM_COUNT_MAX && offset <= 16);
    memset(box, 0, sizeof(*box));
    fill_source(seed);
    box->shape = shape;
    box->offset = offset;
    box->ranges[0] = (struct sw_adam_range){count / 3, 1};
    box->ranges[1] = (struct sw_adam_range){count / 2, 0};
    box->ranges[2] = (struct sw_adam_range){count, 1};
    box->chunk = (struct sw_adam_chunk){.format = shape.format,
                                        .count = count,
                                        .first = 5 * SW_ADAM_BLOCK,
                                        .ranges = box->ranges,
                                        .range_count = 3};
    lay_out(box, offset);
    assert_int_equal(posix_memalign((void **)&box->memory, 64, box->bytes), 0);
    lay_out(box, offset);
    fill_guards(box);
}

void adam_box_exit(struct adam_box *box) {
    free(box->memory);
    box->memory = NULL;
}

void adam_box_refill(struct adam_box *box, uint64_t seed) {
    fill_source(seed);
    lay_out(box, box->offset);
}

struct sw_adam_chunk adam_part(const struct sw_adam_chunk *chunk, uint64_t first, uint64_t end,
                               struct sw_adam_range *ranges) {
    struct sw_adam_chunk part = *chunk;
    part.count = end - first;
    part.first = chunk->first + first;
    part.ranges = ranges;
    part.range_count = 0;
    for (int i = 0; i < chunk->range_count; i++) {
        const uint64_t stop = chunk->ranges[i].end < end ? chunk->ranges[i].end : end;
        if (stop <= first) continue;
        ranges[part.range_count++] = (struct sw_adam_range){stop - first, chunk->ranges[i].decays};
    }
    if (part.count == 0) part.range_count = 0;
    const uint64_t block = first / SW_ADAM_BLOCK;
    if (part.master) part.master += first;
    if (part.half) part.half += first;
    if (part.remainder) part.remainder += first;
    if (part.momentum) part.momentum += first;
    if (part.variance) part.variance += first;
    if (part.momentum_codes) part.momentum_codes += first;
    if (part.variance_codes) part.variance_codes += first;
    if (part.momentum_scales) part.momentum_scales += block;
    if (part.variance_scales) part.variance_scales += block;
    part.grad = (const char *)part.grad + first * sw_dtype_bytes(part.format.grad);
    if (part.weight) part.weight = (char *)part.weight + first * sw_dtype_bytes(part.format.weight);
    return part;
}

void adam_box_update(struct adam_box *box, const struct sw_adam_variant *variant,
                     const struct sw_adam_step *step, uint64_t first, uint64_t end, int threads,
                     struct sw_adam_extra *extra) {
    struct sw_adam_range ranges[3];
    const struct sw_adam_chunk part = adam_part(&box->chunk, first, end, ranges);
    for (int p = 0; p < box->piece_count; p++)
        ASAN_POISON_MEMORY_REGION(box->memory + box->pieces[p].at + box->pieces[p].bytes,
                                  GUARD_BYTES);
    sw_adam_update(variant, step, &part, threads, extra);
    ASAN_UNPOISON_MEMORY_REGION(box->memory, box->bytes);
    check_guards(box);
}

/* What byte i of piece p is NaN by: its own number's bits, its master's where it is a remainder, or
 * its block's scale where it is a momentum's code (whose sign alone may then differ). */
static float owner(const struct adam_box *box, int p, size_t i, size_t *item) {
    const struct sw_adam_chunk *c = &box->chunk;
    const void *at = box->memory + box->pieces[p].at;
    const int narrow_weight = at == c->weight && c->format.weight == SW_BF16;
    *item = 4;
    if (at == c->momentum_codes || at == c->variance_codes) {
        *item = 1;
        return at == c->momentum_codes ? c->momentum_scales[i / SW_ADAM_BLOCK] : 0;
    }
    if (at == c->half || at == c->remainder || narrow_weight) {
        *item = 2;
        return sw_f32_from_bf16(narrow_weight ? ((const sw_bf16 *)at)[i / 2] : c->half[i / 2]);
    }
    if (at == c->grad && c->format.grad == SW_BF16) {
        *item = 2;
        return 0;
    }
    return ((const float *)at)[i / 4];
}

void adam_box_same(const struct adam_box *want, const struct adam_box *got, const char *what) {
    assert_int_equal(want->piece_count, got->piece_count);
    for (int p = 0; p < want->piece_count; p++) {
        const unsigned char *a = want->memory + want->pieces[p].at;
        const unsigned char *b = got->memory + got->pieces[p].at;
        assert_int_equal(want->pieces[p].bytes, got->pieces[p].bytes);
        if (memcmp(a, b, want->pieces[p].bytes) == 0) continue;
        size_t item = 1;
        for (size_t i = 0; i < want->pieces[p].bytes; i += item) {
            const float x = owner(want, p, i, &item), y = owner(got, p, i, &item);
            if (memcmp(a + i, b + i, item) != 0 && !(isnan(x) && isnan(y)))
                fail_msg("%s: %s, %llu elements: buffer %d differs at byte %zu", what,
                         adam_shape_name(&want->shape), (unsigned long long)want->chunk.count, p,
                         i);
        }
    }
}

const struct sw_adam_variant *adam_forced(enum sw_isa isa) {
    const struct sw_adam_variant *variant = NULL;
    setenv("SPILLWAY_ISA", sw_isa_name(isa), 1);
    const int ret = sw_isa_supported(isa) ? sw_adam_pick(&variant) : 0;
    unsetenv("SPILLWAY_ISA");
    assert_int_equal(ret, 0);
    if (variant) assert_int_equal(variant->isa, isa);
    if (variant) assert_ptr_equal(variant, &sw_adam_variants[isa]);
    return variant;
}
