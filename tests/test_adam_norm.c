/* The two sums of squares that the CPU Adam returns: the change of an update and the norm of the
 * gradients. Both have a documented order, so they equal a separate pass bit for bit. */
#include "cpu_adam/adam.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "kernels/host/host.h"
#include "tests/support_adam.h"

#define EACH_VARIANT(v)                                                                            \
    for (int isa_ = 0; isa_ < SW_ISA_COUNT; isa_++)                                                \
        for (const struct sw_adam_variant *v = adam_forced((enum sw_isa)isa_); v; v = NULL)

/* ---- the norm of an update ---- */

/* Of a block: element i goes to sum i % 16, then the upper half of the sums is added to the lower
 * one, four times. */
static double block_change(const float *before, const float *after, uint64_t count) {
    double lane[16] = {0};
    for (uint64_t i = 0; i < count; i++) {
        const double moved = (double)(after[i] - before[i]);
        lane[i % 16] += moved * moved;
    }
    for (int half = 8; half > 0; half /= 2)
        for (int l = 0; l < half; l++) lane[l] += lane[l + half];
    return lane[0];
}

static int same_double(double a, double b) {
    return memcmp(&a, &b, sizeof(a)) == 0 || (isnan(a) && isnan(b));
}

static void check_update_norm(int shape, uint64_t count, const struct sw_adam_variant *variant,
                              int threads) {
    static float before[ADAM_COUNT_MAX], after[ADAM_COUNT_MAX];
    enum { BLOCKS_MAX = ADAM_COUNT_MAX / SW_ADAM_BLOCK + 2 };
    static double squares[BLOCKS_MAX];
    const uint64_t blocks = (count + SW_ADAM_BLOCK - 1) / SW_ADAM_BLOCK;
    struct adam_box with, without;
    adam_box_init(&with, adam_shape(shape), count, 1, 7);
    adam_box_init(&without, adam_shape(shape), count, 1, 7);
    const struct sw_adam_step step = adam_step(with.shape.coupled, 3, 1);
    for (uint64_t b = 0; b <= blocks; b++) squares[b] = -7;
    struct sw_adam_extra extra = {.update_squares = squares};
    sw_adam_read(&with.chunk, 0, count, before, NULL, NULL);
    adam_box_update(&with, variant, &step, 0, count, threads, &extra);
    sw_adam_read(&with.chunk, 0, count, after, NULL, NULL);
    adam_box_update(&without, variant, &step, 0, count, threads, NULL);
    adam_box_same(&without, &with, "with the update's norm");
    double sum = 0;
    for (uint64_t b = 0; b < blocks; b++) {
        const uint64_t at = b * SW_ADAM_BLOCK, left = count - at;
        const double want =
            block_change(before + at, after + at, left < SW_ADAM_BLOCK ? left : SW_ADAM_BLOCK);
        if (!same_double(squares[b], want))
            fail_msg("%s: block %d of %d elements: %a, not %a", adam_shape_name(&with.shape),
                     (int)b, (int)count, squares[b], want);
        sum += want;
    }
    assert_true(squares[blocks] == -7); /* no more than was promised */
    assert_true(same_double(extra.update_square, sum));
    assert_int_equal(extra.checksum_before | extra.checksum_after, 0);
    adam_box_exit(&with);
    adam_box_exit(&without);
}

static void the_updates_norm_is_a_separate_pass_bit_for_bit(void **state) {
    (void)state;
    static const uint64_t counts[] = {1, 15, 16, 17, 255, 256, 257, 4097, 2 * 4096 + 3};
    EACH_VARIANT(variant) {
        for (int shape = 0; shape < ADAM_SHAPES; shape++)
            for (size_t c = 0; c < sizeof(counts) / sizeof(counts[0]); c++)
                for (int threads = 1; threads <= (counts[c] > 4096 ? 4 : 1); threads++)
                    check_update_norm(shape, counts[c], variant, threads);
    }
}

/* A plain sum in double of differences in double. A float difference is within u = 2^-24 of its
 * value and so its square within 2u + u^2; each addition of n in any order is within n * 2^-53 of
 * the sum of positive numbers. */
static void the_updates_norm_is_the_length_of_the_move(void **state) {
    (void)state;
    enum { COUNT = 5000 };
    static float p[COUNT], q[COUNT], m[COUNT], v[COUNT], g[COUNT];
    static double squares[COUNT / SW_ADAM_BLOCK + 1];
    const struct sw_adam_range all = {COUNT, 1};
    const struct sw_adam_chunk chunk = {
        .format = {SW_MASTER_FP32, SW_MOMENTS_FP32, SW_FP32, SW_BF16},
        .count = COUNT,
        .ranges = &all,
        .range_count = 1,
        .master = p,
        .momentum = m,
        .variance = v,
        .grad = g};
    adam_seed(3);
    for (int i = 0; i < COUNT; i++) {
        p[i] = q[i] = adam_uniform();
        g[i] = adam_uniform();
    }
    struct sw_adam_extra extra = {.update_squares = squares, .checksum = 1};
    const struct sw_adam_step step = adam_step(0, 1, 1);
    sw_adam_update(adam_forced(SW_ISA_SCALAR), &step, &chunk, 2, &extra);
    double sum = 0;
    for (int i = 0; i < COUNT; i++)
        sum += ((double)p[i] - (double)q[i]) * ((double)p[i] - (double)q[i]);
    assert_true(sum > 1);
    assert_true(fabs(extra.update_square - sum) <= sum * (0x1.01p-23 + 2 * COUNT * 0x1p-53));
}

/* ---- the norm of gradients ---- */

enum { NORM_BLOCK = SW_NORM_BLOCK, NORM_MAX = 4 * NORM_BLOCK + 9 };
static float grad32[NORM_MAX + 1];
static sw_bf16 grad16[NORM_MAX + 1];
static double sums[NORM_MAX / NORM_BLOCK + 2];

static void fill_gradients(void) {
    adam_seed(13);
    for (int i = 0; i <= NORM_MAX; i++) {
        grad32[i] = adam_uniform() * exp2f(60 * adam_uniform());
        grad16[i] = sw_bf16_from_f32(grad32[i]);
    }
}

static double value_at(enum sw_dtype dtype, const void *grad, uint64_t i) {
    return dtype == SW_FP32 ? (double)((const float *)grad)[i]
                            : (double)sw_f32_from_bf16(((const sw_bf16 *)grad)[i]);
}

/* Element i of a block goes to sum i % 8; the eight are added in pairs. */
static double block_norm(enum sw_dtype dtype, const void *grad, uint64_t first, uint64_t count) {
    double s[8] = {0};
    for (uint64_t i = 0; i < count; i++) {
        const double x = value_at(dtype, grad, first + i);
        s[i % 8] += x * x;
    }
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}

static void the_gradients_norm_has_its_documented_order(void **state) {
    (void)state;
    static const uint64_t counts[] = {
        0, 1, 7, 8, 9, 1000, NORM_BLOCK - 1, NORM_BLOCK, NORM_BLOCK + 1, 3 * NORM_BLOCK, NORM_MAX};
    fill_gradients();
    EACH_VARIANT(variant) {
        for (size_t c = 0; c < sizeof(counts) / sizeof(counts[0]); c++) {
            for (int of = 0; of < 4; of++) {
                const enum sw_dtype dtype = of % 2 ? SW_FP32 : SW_BF16;
                const int shift = of / 2; /* elements: an address that no vector likes */
                const void *grad = of % 2 ? (const void *)(grad32 + shift) : grad16 + shift;
                const uint64_t n = counts[c], blocks = (n + NORM_BLOCK - 1) / NORM_BLOCK;
                double want = 0;
                for (uint64_t b = 0; b < blocks; b++) {
                    const uint64_t at = b * NORM_BLOCK, left = n - at;
                    want += block_norm(dtype, grad, at, left < NORM_BLOCK ? left : NORM_BLOCK);
                }
                for (int threads = 1; threads <= 8; threads += n > NORM_BLOCK ? 1 : 7) {
                    struct sw_adam_nonfinite bad = {.count = 5};
                    sums[blocks] = -7;
                    const double got =
                        sw_adam_grad_norm(variant, grad, dtype, n, threads, sums, &bad);
                    if (!same_double(got, want))
                        fail_msg("%s, %d elements, %d threads: %a, not %a",
                                 sw_isa_name(variant->isa), (int)n, threads, got, want);
                    for (uint64_t b = 0; b < blocks; b++) {
                        const uint64_t at = b * NORM_BLOCK, left = n - at;
                        assert_true(same_double(
                            sums[b],
                            block_norm(dtype, grad, at, left < NORM_BLOCK ? left : NORM_BLOCK)));
                    }
                    assert_true(sums[blocks] == -7);
                    assert_int_equal(bad.count, 0);
                }
            }
        }
    }
}

/* What device code sums when it rounds a gradient is what Adam's pass would have summed. */
static void the_host_devices_norm_has_the_same_bits(void **state) {
    (void)state;
    enum { N = NORM_MAX };
    static double theirs[N / NORM_BLOCK + 1];
    static float rounded[N];
    fill_gradients();
    grad32[5] = 1e-40f; /* subnormal gradients count in both: their squares are normal doubles */
    for (int isa = 0; isa < SW_ISA_COUNT; isa++) {
        if (!sw_isa_supported((enum sw_isa)isa)) continue;
        for (int of = 0; of < 4; of++) {
            const enum sw_dtype dtype = of % 2 ? SW_FP32 : SW_BF16;
            grad32[NORM_BLOCK + 3] = of / 2 ? -INFINITY : 1;
            grad32[3 * NORM_BLOCK + 1] = of / 2 ? NAN : 1;
            struct sw_nonfinite bad;
            struct sw_adam_nonfinite mine;
            sw_host_isas[isa].pointwise->round_norm(2, rounded, dtype, grad32, N, theirs, &bad);
            sw_adam_grad_norm(&sw_adam_variants[isa], rounded, dtype, N, 3, sums, &mine);
            for (int b = 0; b <= N / NORM_BLOCK; b++) assert_true(same_double(sums[b], theirs[b]));
            assert_int_equal(mine.count, bad.count);
            assert_int_equal(mine.count, of / 2 ? 2 : 0);
            assert_int_equal(mine.first, bad.first);
            assert_int_equal(mine.is_nan, bad.is_nan);
        }
    }
}

/* Against a plain sum: 2^-53 for each of at most n additions of positive numbers, on both sides. */
static void the_gradients_norm_is_the_sum_of_squares(void **state) {
    (void)state;
    fill_gradients();
    double plain = 0;
    for (int i = 0; i < NORM_MAX; i++) plain += value_at(SW_FP32, grad32, i) * (double)grad32[i];
    struct sw_adam_nonfinite bad;
    const double got = sw_adam_grad_norm(&sw_adam_variants[SW_ISA_SCALAR], grad32, SW_FP32,
                                         NORM_MAX, 2, sums, &bad);
    assert_true(fabs(got - plain) <= plain * 2 * NORM_MAX * 0x1p-53);
}

static void what_is_not_finite_is_counted_and_the_first_is_named(void **state) {
    (void)state;
    static const struct {
        uint64_t at[3];
        float value[3];
        int count, is_nan;
    } cases[] = {
        {{NORM_BLOCK + 77, 2 * NORM_BLOCK + 99, 2 * NORM_BLOCK + 1},
         {-INFINITY, NAN, INFINITY},
         3,
         0},
        {{0}, {NAN}, 1, 1},
        {{NORM_MAX - 1}, {INFINITY}, 1, 0},
        {{4 * NORM_BLOCK + 8, 4 * NORM_BLOCK - 1, 4 * NORM_BLOCK}, {INFINITY, NAN, INFINITY}, 3, 1},
    };
    EACH_VARIANT(variant) {
        for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
            for (int threads = 1; threads <= 8; threads++) {
                fill_gradients();
                uint64_t first = UINT64_MAX;
                for (int i = 0; i < cases[c].count; i++) {
                    const uint64_t at = cases[c].at[i];
                    grad32[at] = cases[c].value[i];
                    grad16[at] = sw_bf16_from_f32(cases[c].value[i]);
                    first = at < first ? at : first;
                }
                for (int wide = 0; wide < 2; wide++) {
                    struct sw_adam_nonfinite bad;
                    memset(&bad, 0xEE, sizeof(bad));
                    const double sum =
                        sw_adam_grad_norm(variant, wide ? (const void *)grad32 : grad16,
                                          wide ? SW_FP32 : SW_BF16, NORM_MAX, threads, sums, &bad);
                    assert_false(isfinite(sum));
                    assert_int_equal(bad.count, cases[c].count);
                    assert_int_equal(bad.first, first);
                    assert_int_equal(bad.is_nan, cases[c].is_nan);
                    assert_int_equal(bad.padding, 0);
                }
            }
        }
    }
    /* A NaN whose upper half alone would be an infinity. */
    fill_gradients();
    grad32[5] = sw_f32_from_bits(0x7F800001u);
    struct sw_adam_nonfinite bad;
    sw_adam_grad_norm(&sw_adam_variants[SW_ISA_SCALAR], grad32, SW_FP32, NORM_MAX, 2, sums, &bad);
    assert_true(bad.count == 1 && bad.first == 5 && bad.is_nan == 1);
}

static void no_gradients_have_a_norm_of_zero(void **state) {
    (void)state;
    EACH_VARIANT(variant) {
        struct sw_adam_nonfinite bad = {.count = 5};
        assert_true(sw_adam_grad_norm(variant, NULL, SW_BF16, 0, 4, NULL, &bad) == 0);
        assert_int_equal(bad.count, 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_updates_norm_is_a_separate_pass_bit_for_bit),
        cmocka_unit_test(the_updates_norm_is_the_length_of_the_move),
        cmocka_unit_test(the_gradients_norm_has_its_documented_order),
        cmocka_unit_test(the_host_devices_norm_has_the_same_bits),
        cmocka_unit_test(the_gradients_norm_is_the_sum_of_squares),
        cmocka_unit_test(what_is_not_finite_is_counted_and_the_first_is_named),
        cmocka_unit_test(no_gradients_have_a_norm_of_zero),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
