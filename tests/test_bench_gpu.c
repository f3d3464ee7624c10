/* What bench all asks of a GPU, of the CPU stand-in for one: rates come out. */
#include "tools/bench_device.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <cmocka.h>

#include "tests/support_cuda.h"

#define SECONDS 0.06
enum { TOKENS = 24, HIDDEN = 32 };

static void a_gpu_is_measured(void **state) {
    (void)state;
    const struct sw_device_handle *d = &cuda_dev.handle;
    struct sw_bench_copies c;
    double flops = 0;
    assert_int_equal(sw_bench_copies(d, 1 << 16, SECONDS, &c), 0);
    const double rates[] = {c.h2d, c.d2h, c.both, c.h2d_pageable, c.d2h_pageable, c.inside};
    for (int i = 0; i < 6; i++) assert_true(rates[i] > 0);
    assert_int_equal(sw_bench_products(d, TOKENS, HIDDEN, SECONDS, &flops), 0);
    assert_true(flops > 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_gpu_is_measured)};
    return cmocka_run_group_tests(tests, cuda_open, cuda_close);
}
