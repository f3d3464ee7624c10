/* The CPU Adam gives the same bits whatever runs it: every instruction set, length, alignment,
 * thread count and split of a chunk, in every format; subnormals are zero everywhere. Equality is
 * exact; each instruction set is forced through SPILLWAY_ISA, as a user would. */
#include "cpu_adam/adam.h"

#include <float.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <xmmintrin.h>
#include <cmocka.h>
#include "tests/support_adam.h"

enum { SHARE = 4096 }; /* elements of which threads get whole ones */

static const struct sw_adam_variant *scalar(void) {
    return adam_forced(SW_ISA_SCALAR);
}

/* Every variant that runs here but the scalar one; without another there is nothing to compare. */
#define EACH_OTHER_VARIANT(v)                                                                      \
    for (int isa_ = 1; isa_ < SW_ISA_COUNT; isa_++)                                                \
        for (const struct sw_adam_variant *v = adam_forced((enum sw_isa)isa_); v; v = NULL)

static void compare_at(int shape, uint64_t count, const struct sw_adam_variant *variant,
                       const struct sw_adam_step *step) {
    struct adam_box want, got;
    const unsigned offset = (unsigned)(count * 7 % 17); /* elements; so any alignment of theirs */
    adam_box_init(&want, adam_shape(shape), count, offset, 7);
    adam_box_init(&got, adam_shape(shape), count, offset, 7);
    adam_box_update(&want, scalar(), step, 0, count, 1, NULL);
    adam_box_update(&got, variant, step, 0, count, 1, NULL);
    adam_box_same(&want, &got, sw_isa_name(variant->isa));
    adam_box_exit(&want);
    adam_box_exit(&got);
}

/* The plain formats see every length; the others, whose loops come from the same text, every
 * length of the first block and then those around the borders of vectors, tiles and blocks. */
static void every_variant_has_the_scalar_bits_at_every_length(void **state) {
    (void)state;
    EACH_OTHER_VARIANT(variant) {
        for (int shape = 0; shape < ADAM_SHAPES; shape++) {
            const int plain = shape < 6;
            const struct sw_adam_step step = adam_step(adam_shape(shape).coupled, 3, 0.37f);
            for (uint64_t n = 0; n <= 4200; n++)
                if (plain || n <= 258 || n % 61 == 0 || (n >= 4094 && n <= 4100))
                    compare_at(shape, n, variant, &step);
        }
    }
}

/* State that has gone through many updates is not the state that the boxes are filled with. */
static void variants_stay_together_over_many_updates(void **state) {
    (void)state;
    enum { COUNT = 1283 };
    EACH_OTHER_VARIANT(variant) {
        for (int shape = 0; shape < ADAM_SHAPES; shape++) {
            struct adam_box want, got;
            adam_box_init(&want, adam_shape(shape), COUNT, 1, 31);
            adam_box_init(&got, adam_shape(shape), COUNT, 1, 31);
            for (uint64_t t = 1; t <= 40; t++) {
                const struct sw_adam_step step = adam_step(want.shape.coupled, t, t % 2 ? 1 : -.9f);
                adam_box_update(&want, scalar(), &step, 0, COUNT, 1, NULL);
                adam_box_update(&got, variant, &step, 0, COUNT, 1, NULL);
            }
            adam_box_same(&want, &got, sw_isa_name(variant->isa));
            adam_box_exit(&want);
            adam_box_exit(&got);
        }
    }
}

static void threads_do_not_show(void **state) {
    (void)state;
    static const uint64_t counts[] = {1,         SHARE - 1,     SHARE,
                                      SHARE + 1, 2 * SHARE + 3, ADAM_COUNT_MAX};
    for (int isa = 0; isa < SW_ISA_COUNT; isa++) {
        const struct sw_adam_variant *variant = adam_forced((enum sw_isa)isa);
        if (!variant) continue;
        for (int shape = 0; shape < ADAM_SHAPES; shape++) {
            const struct sw_adam_step step = adam_step(adam_shape(shape).coupled, 5, 1);
            for (size_t c = 0; c < sizeof(counts) / sizeof(counts[0]); c++) {
                if (shape % 5 && counts[c] != 2 * SHARE + 3) continue; /* the loops are the same */
                struct adam_box want, got;
                adam_box_init(&want, adam_shape(shape), counts[c], 3, 7);
                adam_box_init(&got, adam_shape(shape), counts[c], 3, 7);
                adam_box_update(&want, variant, &step, 0, counts[c], 1, NULL);
                for (int threads = 2; threads <= 8; threads++) {
                    adam_box_refill(&got, 7);
                    adam_box_update(&got, variant, &step, 0, counts[c], threads, NULL);
                    adam_box_same(&want, &got, "threads");
                }
                adam_box_exit(&want);
                adam_box_exit(&got);
            }
        }
    }
}

/* Chunks are cut at multiples of SW_ADAM_BLOCK; with FP32 moments anywhere. */
static void splits_of_a_chunk_do_not_show(void **state) {
    (void)state;
    enum { COUNT = 2 * SHARE + 3 };
    static const uint64_t coded[] = {0, 256, 256, 1024, 4096, 4352, 8192, COUNT};
    static const uint64_t plain[] = {0, 1, 2, 259, 1024, 4097, 8191, COUNT};
    for (int isa = 0; isa < SW_ISA_COUNT; isa++) {
        const struct sw_adam_variant *variant = adam_forced((enum sw_isa)isa);
        if (!variant) continue;
        for (int shape = 0; shape < ADAM_SHAPES; shape++) {
            const int is_coded = adam_shape(shape).format.moments == SW_MOMENTS_8BIT;
            const uint64_t *cut = is_coded ? coded : plain;
            struct adam_box want, got;
            adam_box_init(&want, adam_shape(shape), COUNT, 1, 7);
            adam_box_init(&got, adam_shape(shape), COUNT, 1, 7);
            const struct sw_adam_step step = adam_step(want.shape.coupled, 5, 1);
            adam_box_update(&want, variant, &step, 0, COUNT, 1, NULL);
            for (size_t c = 0; c + 1 < sizeof(coded) / sizeof(coded[0]); c++)
                adam_box_update(&got, variant, &step, cut[c], cut[c + 1], 1 + (int)c % 3, NULL);
            adam_box_same(&want, &got, "split");
            adam_box_exit(&want);
            adam_box_exit(&got);
        }
    }
}

/* What the buffers' addresses divide by must not matter, and nor must the order of the ranges'
 * borders and the vectors' ones. */
static void alignments_do_not_show(void **state) {
    (void)state;
    enum { COUNT = 700 };
    for (int isa = 0; isa < SW_ISA_COUNT; isa++) {
        const struct sw_adam_variant *variant = adam_forced((enum sw_isa)isa);
        if (!variant) continue;
        for (int shape = 0; shape < ADAM_SHAPES; shape++) {
            struct adam_box want, got;
            adam_box_init(&want, adam_shape(shape), COUNT, 0, 7);
            const struct sw_adam_step step = adam_step(want.shape.coupled, 5, 1);
            adam_box_update(&want, variant, &step, 0, COUNT, 1, NULL);
            for (unsigned offset = 1; offset <= 16; offset++) {
                adam_box_init(&got, adam_shape(shape), COUNT, offset, 7);
                adam_box_update(&got, variant, &step, 0, COUNT, 1, NULL);
                adam_box_same(&want, &got, "alignment");
                adam_box_exit(&got);
            }
            adam_box_exit(&want);
        }
    }
}

/* ---- the emitted weight ---- */

/* The nearest BF16, ties away from zero, said with numbers instead of bits: the remainder of a
 * value beyond its upper half, against half of the distance to the next one. */
static sw_bf16 nearest_weight(float x) {
    const uint32_t upper = sw_f32_bits(x) >> 16;
    if (isnan(x) || isinf(x)) return (sw_bf16)upper;
    const double below = fabs((double)sw_f32_from_bits(upper << 16));
    const double above = ((upper + 1) & 0x7FFFu) == 0x7F80u
                             ? 0x1p128
                             : fabs((double)sw_f32_from_bits((upper + 1) << 16));
    const double at = fabs((double)x);
    return (sw_bf16)(at - below < above - at ? upper : upper + 1);
}

/* Masters reach the rounding as they are when the gradient is 0, the moments are 0 and nothing
 * decays; only subnormals become zero on the way, as documented. */
static void check_rounding(const struct sw_adam_variant *variant, enum sw_adam_master kept,
                           uint32_t low) {
    enum { HALVES = 65536 };
    static float master[HALVES], before[HALVES], zeros[HALVES], momentum[HALVES], variance[HALVES];
    static sw_bf16 weight[HALVES], half[HALVES];
    static int16_t remainder[HALVES];
    const struct sw_adam_range all = {HALVES, 0};
    const struct sw_adam_chunk chunk = {.format = {kept, SW_MOMENTS_FP32, SW_FP32, SW_BF16},
                                        .count = HALVES,
                                        .ranges = &all,
                                        .range_count = 1,
                                        .master = master,
                                        .half = half,
                                        .remainder = remainder,
                                        .momentum = momentum,
                                        .variance = variance,
                                        .grad = zeros,
                                        .weight = weight};
    const struct sw_adam_step step = adam_step(0, 1, 1);
    for (uint32_t i = 0; i < HALVES; i++) before[i] = sw_f32_from_bits(i << 16 | low);
    sw_adam_start(&chunk, 0, HALVES, before);
    memset(weight, 0x77, sizeof(weight));
    sw_adam_update(variant, &step, &chunk, 1, NULL);
    for (uint32_t i = 0; i < HALVES; i++) {
        const int tiny = fabsf(before[i]) < FLT_MIN;
        const float x = tiny ? copysignf(0, before[i]) : before[i];
        const float widened = sw_f32_from_bf16(weight[i]);
        if (isnan(x) ? !isnan(widened) : weight[i] != nearest_weight(x))
            fail_msg("%s: %08x becomes %04x", sw_isa_name(variant->isa), sw_f32_bits(before[i]),
                     weight[i]);
        if (kept == SW_MASTER_SPLIT) assert_int_equal(half[i], weight[i]);
    }
}

static void weights_round_to_nearest_with_ties_away(void **state) {
    (void)state;
    static const uint32_t lows[] = {0,      1,      2,      0x3FFF, 0x7FFE, 0x7FFF, 0x8000,
                                    0x8001, 0x8002, 0xBFFF, 0xC000, 0xFFFE, 0xFFFF};
    for (int isa = 0; isa < SW_ISA_COUNT; isa++) {
        const struct sw_adam_variant *variant = adam_forced((enum sw_isa)isa);
        if (!variant) continue;
        for (size_t l = 0; l < sizeof(lows) / sizeof(lows[0]); l++) {
            check_rounding(variant, SW_MASTER_FP32, lows[l]);
            /* A split NaN is not lossless: of one whose payload lies in the low half alone the
             * rounded half is a quiet NaN all the same. */
            check_rounding(variant, SW_MASTER_SPLIT, lows[l]);
        }
    }
}

/* ---- subnormals ---- */

static void subnormals_become_zero_in_every_variant_and_thread(void **state) {
    (void)state;
    enum { COUNT = 8 * SHARE };
    static float master[COUNT], momentum[COUNT], variance[COUNT], grad[COUNT];
    const struct sw_adam_range all = {COUNT, 1};
    const struct sw_adam_chunk chunk = {
        .format = {SW_MASTER_FP32, SW_MOMENTS_FP32, SW_FP32, SW_BF16},
        .count = COUNT,
        .ranges = &all,
        .range_count = 1,
        .master = master,
        .momentum = momentum,
        .variance = variance,
        .grad = grad};
    const struct sw_adam_step step = adam_step(0, 100, 1);
    for (int isa = 0; isa < SW_ISA_COUNT; isa++) {
        const struct sw_adam_variant *variant = adam_forced((enum sw_isa)isa);
        for (int threads = 1; variant && threads <= 8; threads++) {
            /* Operands: 1e-40 counts as zero. Results: 0.9 * 1.2e-38 lies below 1.1755e-38. */
            for (int i = 0; i < COUNT; i++) {
                momentum[i] = i % 2 ? 1e-40f : -1.2e-38f;
                variance[i] = i % 2 ? 1.2e-38f : 1e-40f;
                master[i] = i % 3 ? 1e-40f : 1;
                grad[i] = i % 5 ? 0 : 1e-40f;
            }
            sw_adam_update(variant, &step, &chunk, threads, NULL);
            for (int i = 0; i < COUNT; i++)
                if (momentum[i] != 0 || variance[i] != 0 ||
                    master[i] != (i % 3 ? 0 : step.decay_factor))
                    fail_msg("%s, %d threads: element %d: %g %g %g", sw_isa_name(variant->isa),
                             threads, i, (double)momentum[i], (double)variance[i],
                             (double)master[i]);
        }
    }
}

/* The caller's and the team's own threads keep their floating-point mode, with its flags. */
static void the_floating_point_mode_is_given_back(void **state) {
    (void)state;
    struct adam_box box;
    adam_box_init(&box, adam_shape(1), ADAM_COUNT_MAX, 0, 7);
    const struct sw_adam_step step = adam_step(0, 1, 1);
    const unsigned before = _mm_getcsr(), odd = before ^ (1u << 13); /* round downwards */
    unsigned modes[2][4];
    for (int round = 0; round < 2; round++) {
        struct sw_adam_extra extra = {.checksum = round};
        _mm_setcsr(round ? odd : before);
        adam_box_update(&box, scalar(), &step, 0, ADAM_COUNT_MAX, 1, &extra);
        modes[round][0] = _mm_getcsr();
        adam_box_update(&box, scalar(), &step, 0, ADAM_COUNT_MAX, 4, &extra);
        modes[round][1] = _mm_getcsr();
        _mm_setcsr(before);
    }
    assert_int_equal(modes[0][0], before);
    assert_int_equal(modes[0][1], before);
    assert_int_equal(modes[1][0], odd);
    assert_int_equal(modes[1][1], odd);
    volatile float tiny = 1e-38f;
    int kept = 0;
#pragma omp parallel num_threads(4) reduction(+ : kept)
    kept += tiny * 0.5f > 0; /* subnormal, so 0 where the mode was left behind */
    assert_int_equal(kept, 4);
    adam_box_exit(&box);
}

/* ---- callers side by side ---- */

static void *update_part(void *box) {
    const struct sw_adam_step step = adam_step(0, 5, 1);
    adam_box_update(box, &sw_adam_variants[SW_ISA_SCALAR], &step, 0, 2 * SHARE + 3, 2, NULL);
    return NULL;
}

static void callers_on_their_own_chunks_do_not_meet(void **state) {
    (void)state;
    enum { CALLERS = 3 };
    struct adam_box boxes[CALLERS];
    pthread_t threads[CALLERS];
    for (int i = 0; i < CALLERS; i++) adam_box_init(&boxes[i], adam_shape(12), 2 * SHARE + 3, 1, 7);
    for (int i = 0; i < CALLERS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, update_part, &boxes[i]), 0);
    for (int i = 0; i < CALLERS; i++) assert_int_equal(pthread_join(threads[i], NULL), 0);
    for (int i = 1; i < CALLERS; i++) adam_box_same(&boxes[0], &boxes[i], "callers");
    for (int i = 0; i < CALLERS; i++) adam_box_exit(&boxes[i]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_variant_has_the_scalar_bits_at_every_length),
        cmocka_unit_test(variants_stay_together_over_many_updates),
        cmocka_unit_test(threads_do_not_show),
        cmocka_unit_test(splits_of_a_chunk_do_not_show),
        cmocka_unit_test(alignments_do_not_show),
        cmocka_unit_test(weights_round_to_nearest_with_ties_away),
        cmocka_unit_test(subnormals_become_zero_in_every_variant_and_thread),
        cmocka_unit_test(the_floating_point_mode_is_given_back),
        cmocka_unit_test(callers_on_their_own_chunks_do_not_meet),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
