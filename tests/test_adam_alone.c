/* The CPU Adam used on its own: the Makefile links this program with the objects of cpu_adam/ and
 * base/ and nothing else of the tree. It fits y = 3 x - 2 with a weight and an offset, in the plain
 * format and in the smallest one. */
#include "cpu_adam/adam.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>

static void fit(enum sw_adam_master master, enum sw_adam_moments moments) {
    enum { PARAMETERS = 2, STEPS = 800 };
    float grad[PARAMETERS], now[PARAMETERS] = {0};
    const struct sw_adam_range all = {PARAMETERS, 0};
    struct sw_adam_chunk chunk = {.format = {master, moments, SW_FP32, SW_BF16},
                                  .count = PARAMETERS,
                                  .ranges = &all,
                                  .range_count = 1,
                                  .grad = grad};
    void *record = malloc(sw_adam_record_bytes(&chunk.format, PARAMETERS));
    assert_non_null(record);
    const struct sw_adam_variant *variant;
    assert_int_equal(sw_adam_pick(&variant), 0);
    sw_adam_record_map(&chunk, record);
    sw_adam_start(&chunk, 0, PARAMETERS, now);
    for (int t = 1; t <= STEPS; t++) {
        grad[0] = grad[1] = 0;
        for (int i = -4; i <= 4; i++) {
            const float x = (float)i * 0.25f, error = now[0] * x + now[1] - (3 * x - 2);
            grad[0] += error * x;
            grad[1] += error;
        }
        const struct sw_adam_hyper hyper = {
            .lr = 0.05 * (1 - (t - 1.0) / STEPS), .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8};
        struct sw_adam_step step;
        sw_adam_prepare(&step, &hyper, (uint64_t)t, 1);
        sw_adam_update(variant, &step, &chunk, 1, NULL);
        sw_adam_read(&chunk, 0, PARAMETERS, now, NULL, NULL);
    }
    free(record);
    /* Adam circles the optimum at the size of its step, which shrinks to nothing. */
    print_message("y = %.4f x + %.4f\n", (double)now[0], (double)now[1]);
    assert_true(fabsf(now[0] - 3) < 0.01f && fabsf(now[1] + 2) < 0.01f);
}

static void it_fits_a_line_in_the_plain_format(void **state) {
    (void)state;
    fit(SW_MASTER_FP32, SW_MOMENTS_FP32);
}

static void it_fits_a_line_in_the_smallest_format(void **state) {
    (void)state;
    fit(SW_MASTER_SPLIT, SW_MOMENTS_8BIT);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_fits_a_line_in_the_plain_format),
        cmocka_unit_test(it_fits_a_line_in_the_smallest_format),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
