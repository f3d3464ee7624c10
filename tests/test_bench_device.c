/* What bench all asks of devices, of the host's here: rates come out, and a device that copies,
 * multiplies or gathers wrongly is found out before anything is timed. No rate is compared with
 * another: the machine may be busy. */
#include "tools/bench_device.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "base/log.h"
#include "tests/support_files.h"

#define SECONDS 0.06
enum { RANKS = 3, TOKENS = 24, HIDDEN = 32 };

static struct sw_device_handle devices[RANKS];
static const struct sw_device_ops *real; /* of the device at hand */
static struct sw_device_ops wrong_ops;

static void no_adam(const struct sw_device_adam_step *step,
                    const struct sw_device_adam_chunk *chunk, void *ctx) {
    (void)step, (void)chunk, (void)ctx;
}

static void open_host(void) {
    const struct sw_host_device_options options = {.threads = 1, .adam = no_adam};
    for (int i = 0; i < RANKS; i++) assert_int_equal(sw_device_host_open(&devices[i], &options), 0);
    real = devices[0].ops;
    log_catch();
}

static void close_host(void) {
    for (int i = 0; i < RANKS; i++) real->close(devices[i].device);
}

static void all_rates_come_out(const struct sw_device_handle *d) {
    struct sw_bench_copies c;
    double flops = 0;
    assert_int_equal(sw_bench_copies(d, 1 << 16, SECONDS, &c), 0);
    const double rates[] = {c.h2d, c.d2h, c.both, c.h2d_pageable, c.d2h_pageable, c.inside};
    for (int i = 0; i < 6; i++) assert_true(rates[i] > 0);
    assert_int_equal(sw_bench_products(d, TOKENS, HIDDEN, SECONDS, &flops), 0);
    assert_true(flops > 0);
}

static void the_host_is_measured(void **state) {
    (void)state;
    double gather = 0, scatter = 0;
    open_host();
    all_rates_come_out(&devices[0]);
    assert_int_equal(sw_bench_ranks(devices, RANKS, 0, 12288, SECONDS, &gather, &scatter), 0);
    assert_true(gather > 0 && scatter > 0);
    assert_string_equal(log_text(), "");
    close_host();
}

/* ---- wrong ones ---- */

static int wrong_copy(struct sw_stream *s, void *dst, const void *src, uint64_t bytes) {
    const int ret = real->copy_d2h(s, dst, src, bytes);
    ((char *)dst)[bytes - 1] ^= 1;
    return ret;
}

/* The last row of the result is another one's. */
static int wrong_product(struct sw_stream *s, const struct sw_gemm *g) {
    const int ret = real->gemm(s, g);
    const uint64_t row = g->ldc * sw_dtype_bytes(g->c_dtype);
    memset((char *)g->c + (g->m / 2) * row, 0, (g->m - g->m / 2) * row);
    return ret;
}

static int failing_product(struct sw_stream *s, const struct sw_gemm *g) {
    (void)s, (void)g;
    return -EIO;
}

static void wrong_devices_are_found_out(void **state) {
    (void)state;
    struct sw_bench_copies c;
    double a = 0, b = 0;
    open_host();
    wrong_ops = *real;
    wrong_ops.copy_d2h = wrong_copy;
    for (int i = 0; i < RANKS; i++) devices[i].ops = &wrong_ops;
    assert_int_equal(sw_bench_copies(&devices[0], 1 << 16, SECONDS, &c), -EIO);
    assert_reported("not what it was");
    log_catch();
    assert_int_equal(sw_bench_ranks(devices, RANKS, 0, 12288, SECONDS, &a, &b), -EIO);
    assert_reported("is wrong");
    log_catch();
    wrong_ops = *real;
    wrong_ops.gemm = wrong_product;
    assert_int_equal(sw_bench_products(&devices[0], TOKENS, HIDDEN, SECONDS, &a), -EIO);
    assert_reported("a matrix product is");
    wrong_ops.gemm = failing_product;
    assert_int_equal(sw_bench_products(&devices[0], TOKENS, HIDDEN, SECONDS, &a), -EIO);
    assert_true(a == 0 && b == 0);
    close_host();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_host_is_measured),
        cmocka_unit_test(wrong_devices_are_found_out),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
