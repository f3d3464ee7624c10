/* How the CPU Adam's state is kept: the split master loses nothing, 8-bit moments lose what they
 * promise and no more, a record lies as described, and its checksums are those of its bytes. */
#include "cpu_adam/adam.h"

#include <errno.h>
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "base/crc32c.h"
#include "base/moments8.h"
#include "tests/support_adam.h"

static const struct sw_adam_variant *best(void) {
    const struct sw_adam_variant *variant = NULL;
    assert_int_equal(sw_adam_pick(&variant), 0);
    return variant;
}

/* ---- the split master ---- */

/* The library's calls take half a minute for all values, so they see a sixteenth of them (another
 * sixteenth of the lower halves with each upper one), and the two lines of arithmetic in them,
 * written out here, see all 2^32. Builds without optimisation step through both. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__OPTIMIZE__)
enum { STEP = 251 };
#else
enum { STEP = 1 };
#endif
enum { PIECE = 4096, PIECES = 1 << 20 };

/* Values of [first, first + PIECE) that splitting and joining changes. */
static uint32_t lost_by_arithmetic(uint32_t first) {
    uint32_t lost = 0;
#pragma omp simd reduction(+ : lost)
    for (uint32_t i = 0; i < PIECE; i++) {
        const uint32_t bits = first + i;
        const uint32_t half = sw_bf16_from_weight(sw_f32_from_bits(bits));
        const int32_t remainder = (int16_t)(bits - (half << 16));
        lost += (half << 16) + (uint32_t)remainder != bits;
    }
    return lost;
}

/* The same through the library, and halves that are not the rounded value. */
static uint32_t lost_by_library(uint32_t first) {
    uint32_t bits[PIECE], lost = 0;
    float in[PIECE], out[PIECE], momentum[PIECE], variance[PIECE];
    sw_bf16 half[PIECE];
    int16_t remainder[PIECE];
    const struct sw_adam_chunk chunk = {
        .format = {SW_MASTER_SPLIT, SW_MOMENTS_FP32, SW_FP32, SW_BF16},
        .count = PIECE,
        .half = half,
        .remainder = remainder,
        .momentum = momentum,
        .variance = variance};
    for (uint32_t i = 0; i < PIECE; i++) bits[i] = first + i;
    memcpy(in, bits, sizeof(in));
    sw_adam_start(&chunk, 0, PIECE, in);
    sw_adam_read(&chunk, 0, PIECE, out, NULL, NULL);
    for (uint32_t i = 0; i < PIECE; i++) {
        lost += sw_f32_bits(out[i]) != bits[i];
        lost += half[i] != (uint16_t)((bits[i] + 0x8000u) >> 16);
    }
    return lost;
}

static void the_split_master_holds_every_finite_value(void **state) {
    (void)state;
    uint64_t lost = 0, seen = 0;
#pragma omp parallel for reduction(+ : lost, seen) schedule(dynamic, 64)
    for (uint32_t piece = 0; piece < PIECES; piece += STEP) {
        const uint32_t first = piece * PIECE;
        if ((first & 0x7F800000u) == 0x7F800000u) continue; /* Inf and NaN */
        lost += lost_by_arithmetic(first);
        if (piece % 16 == piece / 16 % 16) lost += lost_by_library(first);
        seen += PIECE;
    }
    assert_int_equal(lost, 0);
    if (STEP == 1) assert_int_equal(seen, (1ull << 32) - (1ull << 24));
    assert_true(seen > 1ull << 23);
}

/* Training-like: gradients of changing size and sign, decay, clipping. After each update both
 * kinds hold the same masters, moments and weights, and the half is the emitted weight. */
static void the_split_master_trains_like_the_fp32_one(void **state) {
    (void)state;
    enum { COUNT = 4096 + 33, UPDATES = 60 };
    static float p[2][COUNT], m[2][COUNT], v[2][COUNT];
    for (int shape = 0; shape < ADAM_SHAPES; shape++) {
        if (adam_shape(shape).format.master == SW_MASTER_SPLIT) continue;
        struct adam_box box[2];
        adam_box_init(&box[0], adam_shape(shape), COUNT, 0, 21);
        adam_box_init(&box[1], adam_shape(shape + 6), COUNT, 0, 21);
        assert_int_equal(box[1].chunk.format.master, SW_MASTER_SPLIT);
        for (uint64_t t = 1; t <= UPDATES; t++) {
            const float scale = (t % 2 ? 1.f : -1.f) * (t % 7 ? 1.f : 0.01f);
            const struct sw_adam_step step = adam_step(box[0].shape.coupled, t, scale);
            for (int b = 0; b < 2; b++)
                adam_box_update(&box[b], best(), &step, 0, COUNT, 1 + b, NULL);
        }
        for (int b = 0; b < 2; b++) sw_adam_read(&box[b].chunk, 0, COUNT, p[b], m[b], v[b]);
        for (int i = 0; i < COUNT; i++) {
            if (!isfinite(p[0][i])) continue; /* the odd values of the box */
            if (memcmp(&p[0][i], &p[1][i], 4) || memcmp(&m[0][i], &m[1][i], 4) ||
                memcmp(&v[0][i], &v[1][i], 4))
                fail_msg("%s: element %d: %a, split %a", adam_shape_name(&box[0].shape), i,
                         (double)p[0][i], (double)p[1][i]);
            assert_int_equal(box[1].chunk.half[i], sw_bf16_from_weight(p[0][i]));
            if (box[0].shape.emits) {
                const size_t size = sw_dtype_bytes(box[0].chunk.format.weight);
                assert_memory_equal((char *)box[0].chunk.weight + i * size,
                                    (char *)box[1].chunk.weight + i * size, size);
            }
        }
        adam_box_exit(&box[0]);
        adam_box_exit(&box[1]);
    }
}

/* ---- codes of 8-bit moments ---- */

static const struct {
    uint32_t exponent, top;
} kinds[2] = {{SW_M8_EXPONENT, 127}, {SW_V8_EXPONENT, 255}};

/* A code's value from the format's description: eight even steps of 2^(e - 127 - 3) up to the
 * smallest normal code, then eight per power of two. */
static double value_of(uint32_t code, uint32_t exponent) {
    const int first = (int)exponent - 127;
    if (code < 8) return ldexp(code, first - 3);
    return ldexp(1 + (code & 7) / 8.0, first + (int)(code >> 3) - 1);
}

static void codes_have_the_described_values_in_order(void **state) {
    (void)state;
    for (int k = 0; k < 2; k++) {
        assert_true(sw_8bit_value(0, kinds[k].exponent) == 0);
        for (uint32_t code = 0; code <= kinds[k].top; code++) {
            assert_true((double)sw_8bit_value(code, kinds[k].exponent) ==
                        value_of(code, kinds[k].exponent));
            if (code)
                assert_true(sw_8bit_value(code, kinds[k].exponent) >
                            sw_8bit_value(code - 1, kinds[k].exponent));
        }
        assert_true(sw_8bit_value(kinds[k].top, kinds[k].exponent) == SW_8BIT_TOP);
    }
}

static void representable_values_keep_their_code(void **state) {
    (void)state;
    for (int k = 0; k < 2; k++)
        for (uint32_t code = 0; code <= kinds[k].top; code++)
            for (uint32_t dither = 0; dither < 65536; dither += dither < 65530 ? 13 : 1)
                assert_int_equal(sw_8bit_code(sw_8bit_value(code, kinds[k].exponent),
                                              kinds[k].exponent, kinds[k].top, dither),
                                 code);
}

/* Between two codes each of the 65,536 dithers gives one of the two, the upper one in the share
 * that the value's place between them asks for: within one dither, and where steps are even within
 * the rounding of the float sum, half an ulp below 8, which is an eighth of a dither. */
static void rounding_takes_a_neighbour_in_proportion(void **state) {
    (void)state;
    adam_seed(4);
    for (int k = 0; k < 2; k++) {
        for (uint32_t code = 0; code < kinds[k].top; code++) {
            const double low = value_of(code, kinds[k].exponent);
            const double gap = value_of(code + 1, kinds[k].exponent) - low;
            const float x = (float)(low + gap * (adam_random() >> 8) * 0x1p-24);
            int up = 0;
            uint32_t last = code;
            for (uint32_t dither = 0; dither < 65536; dither++) {
                const uint32_t got = sw_8bit_code(x, kinds[k].exponent, kinds[k].top, dither);
                assert_true(got == code || got == code + 1);
                assert_true(got >= last); /* more dither never rounds down */
                last = got;
                up += got == code + 1;
            }
            assert_true(fabs(up - 65536 * ((double)x - low) / gap) <= 1.125);
        }
    }
}

/* What no caller should pass still gives a code: nothing is out of bounds. */
static void codes_stay_in_range(void **state) {
    (void)state;
    const float odd[] = {1, 0.95f, 3e38f, INFINITY, NAN, 1e-40f, 0};
    for (int k = 0; k < 2; k++)
        for (size_t i = 0; i < sizeof(odd) / sizeof(odd[0]); i++)
            for (uint32_t dither = 0; dither < 65536; dither += 255)
                assert_true(sw_8bit_code(odd[i], kinds[k].exponent, kinds[k].top, dither) <=
                            kinds[k].top);
}

/* ---- 8-bit moments through updates ---- */

enum { BLOCK = SW_ADAM_BLOCK };

/* A chunk of one record that is the caller's to free. */
static struct sw_adam_chunk record_chunk(struct sw_adam_format format, uint64_t count,
                                         const void *grad, const struct sw_adam_range *all) {
    struct sw_adam_chunk c = {
        .format = format, .count = count, .grad = grad, .ranges = all, .range_count = 1};
    void *record = calloc(1, sw_adam_record_bytes(&format, count) + 1);
    assert_non_null(record);
    sw_adam_record_map(&c, record);
    return c;
}

static void *record_of(const struct sw_adam_chunk *c) {
    return c->format.master == SW_MASTER_SPLIT ? (void *)c->half : (void *)c->master;
}

static const struct sw_adam_format coded = {SW_MASTER_FP32, SW_MOMENTS_8BIT, SW_FP32, SW_BF16};

/* With both betas 0 an update makes the momentum g and the variance g * g, so what was stored is
 * read back beside what should have been. */
static struct sw_adam_step storing_step(uint64_t t) {
    const struct sw_adam_hyper hyper = {0, 0, 0, 1, 0, 0};
    struct sw_adam_step step;
    sw_adam_prepare(&step, &hyper, t, 1);
    return step;
}

/* Over many updates each element's mean is its exact value. One sample lies at one of the two codes
 * around x, so its standard deviation is at most half their distance, and that of the mean of n is
 * 1/sqrt(n) of it; 6 of those, plus two dithers (2^-15 of the distance) and the roundings of scale
 * and product (4 * 2^-24 of x), bound a correct mean; among 1024 elements chance exceeds 6 once in
 * a million tries, and the seeds are fixed. The sum over all elements would show a bias far below
 * that of any single one. */
static void check_unbiased(float size, double *worst) {
    enum { COUNT = 2 * BLOCK, UPDATES = 4000 };
    static float g[COUNT], m[COUNT], v[COUNT];
    static double sums[2][COUNT];
    const struct sw_adam_range all = {COUNT, 0};
    memset(sums, 0, sizeof(sums));
    /* The smallest is above one step of either kind, where a variance would be held up. */
    for (int i = 0; i < COUNT; i++) g[i] = size * exp2f(7 * adam_uniform()) * (i % 2 ? 1 : -1);
    struct sw_adam_chunk c = record_chunk(coded, COUNT, g, &all);
    for (uint64_t t = 1; t <= UPDATES; t++) {
        const struct sw_adam_step step = storing_step(t);
        sw_adam_update(best(), &step, &c, 1, NULL);
        sw_adam_read(&c, 0, COUNT, NULL, m, v);
        for (int i = 0; i < COUNT; i++) {
            sums[0][i] += (double)m[i];
            sums[1][i] += (double)v[i];
        }
    }
    double total[2] = {0};
    for (int i = 0; i < COUNT; i++) {
        const double exact[2] = {(double)g[i], (double)(g[i] * g[i])};
        const float scales[2] = {c.momentum_scales[i / BLOCK], c.variance_scales[i / BLOCK]};
        for (int k = 0; k < 2; k++) {
            const double mean = sums[k][i] / UPDATES, x = fabs(exact[k]) / (double)scales[k];
            uint32_t code = 0;
            while (code < kinds[k].top && value_of(code + 1, kinds[k].exponent) < x) code++;
            const double low = value_of(code, kinds[k].exponent);
            const double gap =
                code < kinds[k].top ? value_of(code + 1, kinds[k].exponent) - low : low / 8;
            const double sigma = gap * (double)scales[k] / 2 / sqrt(UPDATES);
            const double bound =
                6 * sigma + gap * (double)scales[k] * 0x1p-15 + fabs(exact[k]) * 0x1p-22;
            const double off = mean - exact[k];
            *worst = fmax(*worst, fabs(off) / sigma);
            total[k] += off / sigma * (exact[k] < 0 ? -1 : 1);
            if (!(fabs(off) <= bound))
                fail_msg("kind %d, element %d: mean %g of %g, bound %g", k, i, mean, exact[k],
                         bound);
        }
    }
    /* Sums of 512 numbers of variance at most 1. */
    for (int k = 0; k < 2; k++) assert_true(fabs(total[k]) <= 6 * sqrt(COUNT));
    free(record_of(&c));
}

static void stochastic_rounding_has_no_bias(void **state) {
    (void)state;
    double worst = 0;
    adam_seed(17);
    check_unbiased(1e-3f, &worst);
    check_unbiased(40.0f, &worst);
    assert_true(worst > 1.5); /* or it would not be rounding at random */
}

/* A block's largest magnitude is kept to within the roundings of its scale, whatever its size, and
 * each other element within one step of its code: an eighth of itself, or an even step. */
static void a_block_has_its_own_scale(void **state) {
    (void)state;
    enum { COUNT = 4 * BLOCK + 3 };
    static const float sizes[] = {1, 1e-12f, 1e6f, 0, 3e-4f};
    static float g[COUNT], m[COUNT], v[COUNT];
    const struct sw_adam_range all = {COUNT, 0};
    adam_seed(8);
    for (int i = 0; i < COUNT; i++) g[i] = sizes[i / BLOCK] * adam_uniform();
    struct sw_adam_chunk c = record_chunk(coded, COUNT, g, &all);
    const struct sw_adam_step step = storing_step(9);
    sw_adam_update(best(), &step, &c, 1, NULL);
    sw_adam_read(&c, 0, COUNT, NULL, m, v);
    for (int first = 0; first < COUNT; first += BLOCK) {
        const int end = first + BLOCK < COUNT ? first + BLOCK : COUNT;
        float top = 0;
        for (int i = first; i < end; i++) top = fmaxf(top, fabsf(g[i]));
        assert_true(fabsf(c.momentum_scales[first / BLOCK] * 0.9375f - top) <= top * 0x1p-22f);
        assert_true(fabsf(c.variance_scales[first / BLOCK] * 0.9375f - top * top) <=
                    top * top * 0x1p-22f);
        for (int i = first; i < end; i++) {
            const double slack = 1 + 0x1p-20;
            const double m_step = fmax(fabs((double)g[i]) / 8, (double)top / 0.9375 * 0x1p-18);
            const double square = (double)g[i] * (double)g[i];
            const double v_step = fmax(square / 8, (double)(top * top) / 0.9375 * 0x1p-34);
            assert_true(fabs((double)m[i] - (double)g[i]) <= m_step * slack);
            assert_true(fabs((double)v[i] - square) <= v_step * slack);
            if (fabsf(g[i]) == top) assert_true(fabsf(m[i] - g[i]) <= top * 0x1p-22f);
        }
    }
    free(record_of(&c));
}

/* Variances of a ratio far beyond the codes' range: the small one stays above 0 over many updates,
 * or its element's next step would be divided by eps alone. */
static void a_positive_variance_never_becomes_zero(void **state) {
    (void)state;
    enum { COUNT = BLOCK };
    static float g[COUNT], m[COUNT], v[COUNT], p[COUNT];
    const struct sw_adam_range all = {COUNT, 0};
    for (int i = 0; i < COUNT; i++) g[i] = i == 7 ? 1 : 1e-9f * (float)(i % 5);
    struct sw_adam_chunk c = record_chunk(coded, COUNT, g, &all);
    for (int isa = 0; isa < SW_ISA_COUNT; isa++) {
        const struct sw_adam_variant *variant = adam_forced((enum sw_isa)isa);
        if (!variant) continue;
        sw_adam_start(&c, 0, COUNT, p);
        for (uint64_t t = 1; t <= 300; t++) {
            const struct sw_adam_hyper hyper = {1e-3, 0.9, 0.999, 1e-12, 0, 0};
            struct sw_adam_step step;
            sw_adam_prepare(&step, &hyper, t, 1);
            sw_adam_update(variant, &step, &c, 1, NULL);
            sw_adam_read(&c, 0, COUNT, NULL, m, v);
            for (int i = 0; i < COUNT; i++)
                if ((v[i] > 0) != (g[i] > 0))
                    fail_msg("update %d: element %d: %g", (int)t, i, (double)v[i]);
        }
        float after[COUNT];
        sw_adam_read(&c, 0, COUNT, after, NULL, NULL);
        for (int i = 0; i < COUNT; i++) assert_true(fabsf(after[i]) < 0.5f);
    }
    free(record_of(&c));
}

static void a_block_of_zeros_stays_zero(void **state) {
    (void)state;
    enum { COUNT = BLOCK + 5 };
    static float g[COUNT], m[COUNT], v[COUNT], p[COUNT];
    const struct sw_adam_range all = {COUNT, 0};
    struct sw_adam_chunk c = record_chunk(coded, COUNT, g, &all);
    for (int i = 0; i < COUNT; i++) p[i] = 1;
    sw_adam_start(&c, 0, COUNT, p);
    const struct sw_adam_step step = adam_step(0, 1, 1);
    sw_adam_update(best(), &step, &c, 1, NULL);
    sw_adam_read(&c, 0, COUNT, p, m, v);
    for (int i = 0; i < COUNT; i++) assert_true(p[i] == 1 && m[i] == 0 && v[i] == 0);
    for (int b = 0; b < 2; b++) assert_true(c.momentum_scales[b] == 0 && c.variance_scales[b] == 0);
    free(record_of(&c));
}

/* The same update of other elements, and another update of the same ones, round differently. */
static void rounding_depends_on_update_and_element(void **state) {
    (void)state;
    static float g[BLOCK];
    const struct sw_adam_range all = {BLOCK, 0};
    for (int i = 0; i < BLOCK; i++) g[i] = 0.1f + 1e-3f * (float)i;
    struct sw_adam_chunk c = record_chunk(coded, BLOCK, g, &all);
    uint8_t seen[4][2 * BLOCK];
    for (int i = 0; i < 4; i++) {
        const struct sw_adam_step step = storing_step(i == 1 ? 8 : 7);
        c.first = i == 2 ? BLOCK : 0;
        sw_adam_update(best(), &step, &c, 1, NULL);
        memcpy(seen[i], c.momentum_codes, BLOCK);
        memcpy(seen[i] + BLOCK, c.variance_codes, BLOCK);
    }
    /* Half of the elements or so differ: each is a matter of chance of its own. */
    for (int i = 1; i < 3; i++) {
        int differ[2] = {0};
        for (int e = 0; e < 2 * BLOCK; e++) differ[e / BLOCK] += seen[i][e] != seen[0][e];
        assert_in_range(differ[0], BLOCK / 8, BLOCK * 7 / 8);
        assert_in_range(differ[1], BLOCK / 8, BLOCK * 7 / 8);
    }
    assert_memory_equal(seen[0], seen[3], sizeof(seen[0]));
    /* Momentum and variance of an element do not share their chance. */
    int same = 0;
    for (int e = 0; e < BLOCK; e++)
        same += (seen[0][e] != seen[1][e]) == (seen[0][BLOCK + e] != seen[1][BLOCK + e]);
    assert_in_range(same, BLOCK / 8, BLOCK * 7 / 8);
    free(record_of(&c));
}

/* ---- records ---- */

static const uint64_t record_counts[] = {1, 2, 3, 255, 256, 257, 1023, 1025, 4097, 12293};
enum { RECORD_COUNTS = sizeof(record_counts) / sizeof(record_counts[0]) };

static void a_record_lies_as_described(void **state) {
    (void)state;
    for (int shape = 0; shape < ADAM_SHAPES; shape++) {
        const struct sw_adam_format f = adam_shape(shape).format;
        for (int i = 0; i < RECORD_COUNTS; i++) {
            const uint64_t n = record_counts[i], blocks = (n + 255) / 256;
            const uint64_t bytes =
                4 * n + (f.moments == SW_MOMENTS_8BIT ? 8 * blocks + 2 * n : 8 * n);
            assert_int_equal(sw_adam_record_bytes(&f, n), bytes);
            char *record = malloc(bytes);
            struct sw_adam_chunk c = {.format = f, .count = n};
            memset(&c.master, 0x11, (size_t)((char *)&c.grad - (char *)&c.master));
            sw_adam_record_map(&c, record);
            char *at = record;
            if (f.master == SW_MASTER_SPLIT) {
                assert_null(c.master);
                assert_ptr_equal(c.half, at);
                assert_ptr_equal(c.remainder, at + 2 * n);
            } else {
                assert_null(c.half);
                assert_null(c.remainder);
                assert_ptr_equal(c.master, at);
            }
            at += 4 * n;
            if (f.moments == SW_MOMENTS_8BIT) {
                assert_null(c.momentum);
                assert_null(c.variance);
                assert_ptr_equal(c.momentum_scales, at);
                assert_ptr_equal(c.variance_scales, at + 4 * blocks);
                assert_ptr_equal(c.momentum_codes, at + 8 * blocks);
                assert_ptr_equal(c.variance_codes, at + 8 * blocks + n);
            } else {
                assert_null(c.momentum_codes);
                assert_null(c.variance_codes);
                assert_null(c.momentum_scales);
                assert_null(c.variance_scales);
                assert_ptr_equal(c.momentum, at);
                assert_ptr_equal(c.variance, at + 4 * n);
            }
            free(record);
        }
    }
}

/* Started and read in parts; moments begin at zero whatever lay there, and nothing else changes. */
static void start_and_read_in_parts(void **state) {
    (void)state;
    enum { COUNT = 3 * BLOCK + 9, FIRST = BLOCK, END = 3 * BLOCK };
    static float in[COUNT], p[COUNT], m[COUNT], v[COUNT], q[COUNT];
    for (int shape = 0; shape < ADAM_SHAPES; shape++) {
        struct adam_box box, before;
        adam_box_init(&box, adam_shape(shape), COUNT, 1, 7);
        adam_box_init(&before, adam_shape(shape), COUNT, 1, 7);
        for (int i = 0; i < COUNT; i++) in[i] = 1 + 0.001f * (float)i;
        sw_adam_start(&box.chunk, FIRST, END - FIRST, in + FIRST);
        sw_adam_read(&box.chunk, FIRST + 1, END - FIRST - 1, p, m, v);
        for (int i = 0; i < END - FIRST - 1; i++)
            assert_true(p[i] == in[FIRST + 1 + i] && m[i] == 0 && v[i] == 0 && !signbit(m[i]));
        for (int part = 0; part < 2; part++) {
            const uint64_t at = part ? END : 0, n = part ? COUNT - END : FIRST;
            float *outs[3] = {p, m, v};
            for (int o = 0; o < 3; o++) {
                sw_adam_read(&box.chunk, at, n, o == 0 ? outs[0] : NULL, o == 1 ? outs[1] : NULL,
                             o == 2 ? outs[2] : NULL);
                sw_adam_read(&before.chunk, at, n, o == 0 ? q : NULL, o == 1 ? q : NULL,
                             o == 2 ? q : NULL);
                assert_memory_equal(outs[o], q, n * sizeof(float));
            }
        }
        sw_adam_start(&box.chunk, 0, 0, NULL);
        sw_adam_read(&box.chunk, COUNT, 0, NULL, NULL, NULL);
        adam_box_exit(&box);
        adam_box_exit(&before);
    }
}

/* ---- given values ---- */

/* What a chunk's codes stand for is coded by the same values again: after trained-like updates, of
 * blocks at every size. Masters and FP32 moments keep every bit. */
static void values_that_a_chunk_stands_for_are_kept(void **state) {
    (void)state;
    enum { COUNT = 40 * BLOCK + 77, ROUNDS = 12 };
    static float g[COUNT], p[2][COUNT], m[2][COUNT], v[2][COUNT];
    const struct sw_adam_range all = {COUNT, 1};
    adam_seed(31);
    for (int form = 0; form < 4; form++) {
        const struct sw_adam_format format = {form & 1 ? SW_MASTER_SPLIT : SW_MASTER_FP32,
                                              form & 2 ? SW_MOMENTS_8BIT : SW_MOMENTS_FP32, SW_FP32,
                                              SW_BF16};
        struct sw_adam_chunk c = record_chunk(format, COUNT, g, &all);
        struct sw_adam_chunk d = record_chunk(format, COUNT, g, &all);
        for (int round = 0; round < ROUNDS; round++) {
            for (int i = 0; i < COUNT; i++)
                g[i] = i / BLOCK % 7 == 3 ? 0 : ldexpf(adam_uniform(), i / BLOCK - 30);
            const struct sw_adam_step step = adam_step(0, (uint64_t)round + 1, 1);
            sw_adam_update(best(), &step, &c, 1, NULL);
            sw_adam_read(&c, 0, COUNT, p[0], m[0], v[0]);
            assert_true(sw_adam_write(&d, 0, 9 * BLOCK, p[0], m[0], v[0]) == 0);
            const int rest = 9 * BLOCK;
            assert_true(
                sw_adam_write(&d, rest, COUNT - rest, p[0] + rest, m[0] + rest, v[0] + rest) == 0);
            sw_adam_read(&d, 0, COUNT, p[1], m[1], v[1]);
            assert_memory_equal(p[0], p[1], sizeof(p[0]));
            assert_memory_equal(m[0], m[1], sizeof(m[0]));
            assert_memory_equal(v[0], v[1], sizeof(v[0]));
        }
        free(record_of(&c));
        free(record_of(&d));
    }
}

/* Others go to the nearest code, and what a form cannot hold is refused. */
static void other_values_go_to_the_nearest_code(void **state) {
    (void)state;
    static float p[BLOCK], m[2][BLOCK], v[2][BLOCK];
    const struct sw_adam_range all = {BLOCK, 1};
    struct sw_adam_chunk c = record_chunk(coded, BLOCK, NULL, &all);
    adam_seed(32);
    for (int i = 0; i < BLOCK; i++) {
        m[0][i] = ldexpf(adam_uniform(), -(i % 12));
        v[0][i] = ldexpf(fabsf(adam_uniform()) + 0.5f, -(i % 32));
    }
    assert_true(sw_adam_write(&c, 0, BLOCK, p, m[0], v[0]) > BLOCK);
    sw_adam_read(&c, 0, BLOCK, NULL, m[1], v[1]);
    for (int k = 0; k < 2; k++) {
        const float *want = k ? v[0] : m[0], *got = k ? v[1] : m[1];
        const double scale = (double)(k ? c.variance_scales[0] : c.momentum_scales[0]);
        for (int i = 0; i < BLOCK; i++) {
            const double x = fabs((double)want[i]) / scale, y = fabs((double)got[i]) / scale;
            uint32_t code = 0;
            while (code < kinds[k].top && value_of(code + 1, kinds[k].exponent) <= x) code++;
            const double low = value_of(code, kinds[k].exponent);
            const double gap =
                code < kinds[k].top ? value_of(code + 1, kinds[k].exponent) - low : 1;
            /* Half a gap, the rounding of 16 bits of it, and of scale and product. */
            if (fabs(x - y) > gap * (0.5 + 0x1p-15) + 4 * 0x1p-24 * x)
                fail_msg("kind %d, element %d: %a became %a", k, i, x, y);
            assert_int_equal(signbit(want[i]) != 0, signbit(got[i]) != 0);
        }
    }
    const float bad[] = {-1, NAN, INFINITY};
    for (int i = 0; i < 3; i++) {
        const float good = v[0][5];
        v[0][5] = bad[i];
        assert_true(sw_adam_write(&c, 0, BLOCK, p, m[0], v[0]) == -EDOM);
        v[0][5] = good;
    }
    m[0][5] = NAN;
    assert_true(sw_adam_write(&c, 0, BLOCK, p, m[0], v[0]) == -EDOM);
    free(record_of(&c));
}

/* ---- checksums ---- */

static struct sw_adam_extra summed(const struct sw_adam_chunk *c,
                                   const struct sw_adam_variant *variant, int threads) {
    struct sw_adam_extra extra = {.checksum = 1, .update_square = 5};
    const struct sw_adam_step step = adam_step(0, 3, 1);
    sw_adam_update(variant, &step, c, threads, &extra);
    return extra;
}

/* State that looks like a trained one: every byte of the record is set. */
static void fill_record(const struct sw_adam_chunk *c, float *grad) {
    unsigned char *record = record_of(c);
    const uint64_t bytes = sw_adam_record_bytes(&c->format, c->count);
    adam_seed(c->count);
    for (uint64_t i = 0; i < c->count; i++) grad[i] = adam_uniform(); /* of either type */
    for (uint64_t i = 0; i < bytes; i++) record[i] = (unsigned char)(adam_random() >> 24);
    for (uint64_t i = 3; i < bytes; i += 4) record[i] &= 0x3F; /* finite where it is a float */
}

static void checksums_are_those_of_the_records_bytes(void **state) {
    (void)state;
    static float grad[12293];
    for (int shape = 0; shape < 24; shape++) {
        for (int i = 0; i < RECORD_COUNTS; i++) {
            const struct sw_adam_range all = {record_counts[i], 1};
            struct sw_adam_chunk c =
                record_chunk(adam_shape(shape).format, record_counts[i], grad, &all);
            const uint64_t bytes = sw_adam_record_bytes(&c.format, c.count);
            void *plain = malloc(bytes);
            fill_record(&c, grad);
            struct sw_adam_chunk other = c;
            sw_adam_record_map(&other, plain);
            for (int isa = 0; isa < SW_ISA_COUNT; isa++) {
                const struct sw_adam_variant *variant = adam_forced((enum sw_isa)isa);
                for (int threads = 1; variant && threads <= 8; threads *= 2) {
                    fill_record(&c, grad);
                    const uint32_t before = sw_crc32c(0, record_of(&c), bytes);
                    const struct sw_adam_extra extra = summed(&c, variant, threads);
                    assert_int_equal(extra.checksum_before, before);
                    assert_int_equal(extra.checksum_after, sw_crc32c(0, record_of(&c), bytes));
                    assert_true(extra.update_square == 5); /* not asked for */
                    /* Asking for them changes no bit. */
                    fill_record(&other, grad);
                    const struct sw_adam_step step = adam_step(0, 3, 1);
                    sw_adam_update(variant, &step, &other, threads, NULL);
                    assert_memory_equal(plain, record_of(&c), bytes);
                    if (c.count <= 4096) break; /* one share, so one thread */
                }
            }
            free(plain);
            free(record_of(&c));
        }
    }
}

static void every_flipped_bit_shows_in_the_checksum(void **state) {
    (void)state;
    enum { COUNT = 4096 + 261 };
    static float grad[COUNT];
    const struct sw_adam_range all = {COUNT, 1};
    for (int shape = 1; shape < 24; shape += 6) {
        struct sw_adam_chunk c = record_chunk(adam_shape(shape).format, COUNT, grad, &all);
        const uint64_t bytes = sw_adam_record_bytes(&c.format, COUNT);
        fill_record(&c, grad);
        char *saved = malloc(bytes);
        assert_non_null(saved);
        memcpy(saved, record_of(&c), bytes);
        const struct sw_adam_variant *variant = best();
        const uint32_t good = summed(&c, variant, 1).checksum_before;
        for (uint64_t bit = 0; bit < bytes * 8;
             bit += bit < 64 || bit > bytes * 8 - 64 ? 1 : 1997) {
            memcpy(record_of(&c), saved, bytes);
            ((unsigned char *)record_of(&c))[bit / 8] ^= (unsigned char)(1 << bit % 8);
            assert_int_not_equal(summed(&c, variant, 1).checksum_before, good);
        }
        free(saved);
        free(record_of(&c));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_split_master_holds_every_finite_value),
        cmocka_unit_test(the_split_master_trains_like_the_fp32_one),
        cmocka_unit_test(codes_have_the_described_values_in_order),
        cmocka_unit_test(representable_values_keep_their_code),
        cmocka_unit_test(rounding_takes_a_neighbour_in_proportion),
        cmocka_unit_test(codes_stay_in_range),
        cmocka_unit_test(stochastic_rounding_has_no_bias),
        cmocka_unit_test(a_block_has_its_own_scale),
        cmocka_unit_test(a_positive_variance_never_becomes_zero),
        cmocka_unit_test(a_block_of_zeros_stays_zero),
        cmocka_unit_test(rounding_depends_on_update_and_element),
        cmocka_unit_test(a_record_lies_as_described),
        cmocka_unit_test(start_and_read_in_parts),
        cmocka_unit_test(values_that_a_chunk_stands_for_are_kept),
        cmocka_unit_test(other_values_go_to_the_nearest_code),
        cmocka_unit_test(checksums_are_those_of_the_records_bytes),
        cmocka_unit_test(every_flipped_bit_shows_in_the_checksum),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
