/* Every instruction set that this CPU runs, in the little work that an emulated CPU has time for:
 * the CPU Adam at lengths around the borders of its vectors and blocks, attention on shapes that
 * cross a tile, and the panels of matrix products. The long sweeps are in the tests of each. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "kernels/host/host.h"
#include "tests/support_adam.h"
#include "tests/support_reference.h"

static void check_length(const struct sw_adam_variant *variant, int shape, uint64_t count) {
    const struct sw_adam_variant *scalar = adam_forced(SW_ISA_SCALAR);
    struct adam_box want, got;
    const unsigned offset = (unsigned)(count * 7 % 17);
    const struct sw_adam_step step = adam_step(adam_shape(shape).coupled, 3, 0.37f);
    adam_box_init(&want, adam_shape(shape), count, offset, 7);
    adam_box_init(&got, adam_shape(shape), count, offset, 7);
    adam_box_update(&want, scalar, &step, 0, count, 1, NULL);
    adam_box_update(&got, variant, &step, 0, count, 1, NULL);
    adam_box_same(&want, &got, sw_isa_name(variant->isa));
    adam_box_exit(&want);
    adam_box_exit(&got);
}

static void adam_has_the_scalar_bits_around_each_border(void **state) {
    (void)state;
    static const uint64_t counts[] = {0,  1,  7,  8,  9,   15,  16,  17,  31,  32,  33,
                                      47, 63, 64, 65, 127, 129, 255, 256, 257, 511, 1025};
    for (int isa = 1; isa < SW_ISA_COUNT; isa++) {
        const struct sw_adam_variant *variant = adam_forced((enum sw_isa)isa);
        if (!variant) continue;
        assert_true(variant->isa == (enum sw_isa)isa);
        print_message("adam: %s\n", sw_isa_name(variant->isa));
        for (int shape = 0; shape < ADAM_SHAPES; shape++)
            for (size_t c = 0; c < sizeof(counts) / sizeof(counts[0]); c++)
                check_length(variant, shape, counts[c]);
    }
}

/* Limits as derived in test_attention.c. */
static void check_attention(struct ref_device *d, enum sw_dtype dtype, struct sw_attention s) {
    const uint64_t rows = (uint64_t)s.batch * s.time, queries = rows * s.heads * s.head_dim;
    const uint64_t keys = rows * s.kv_heads * s.head_dim, dim = s.head_dim;
    struct ref_report there = {.name = "attention"}, back = {.name = "attention backward"};
    there.limit = ((double)dim * sqrt((double)dim) / 3.0 + s.time + 10.0) * 0x1p-24;
    back.limit = 2.0 * there.limit + (double)s.heads / s.kv_heads * s.time * 0x1p-24;
    struct ref_tensor q = ref_tensor_new(d, dtype, queries, 1.5);
    struct ref_tensor k = ref_tensor_new(d, dtype, keys, 1.5);
    struct ref_tensor v = ref_tensor_new(d, dtype, keys, 1.0);
    struct ref_tensor dout = ref_tensor_new(d, dtype, queries, 1.0);
    struct ref_tensor out = ref_tensor_new(d, dtype, queries, 0.0);
    struct ref_tensor lse = ref_tensor_new(d, SW_FP32, rows * s.heads, 0.0);
    struct ref_tensor dq = ref_tensor_new(d, dtype, queries, 0.0);
    struct ref_tensor dk = ref_tensor_new(d, dtype, keys, 0.0);
    struct ref_tensor dv = ref_tensor_new(d, dtype, keys, 0.0);
    const uint64_t scratch = d->ops->attention_scratch_bytes(d->device, &s);
    struct ref_tensor room = ref_tensor_new(d, SW_FP32, scratch / 4 + 1, 0.0);

    ref_attention(out.exact, NULL, q.exact, k.exact, v.exact, &s);
    assert_int_equal(d->ops->attention(d->stream, dtype, &s, out.data, lse.data, q.data, k.data,
                                       v.data, room.data),
                     0);
    ref_check(&there, dtype, out.data, out.exact, queries);
    for (uint64_t i = 0; i < queries; i++) out.exact[i] = ref_value(dtype, out.data, i);
    ref_attention_backward(dq.exact, dk.exact, dv.exact, dout.exact, out.exact, q.exact, k.exact,
                           v.exact, &s);
    assert_int_equal(d->ops->attention_backward(d->stream, dtype, &s, dq.data, dk.data, dv.data,
                                                dout.data, out.data, lse.data, q.data, k.data,
                                                v.data, room.data),
                     0);
    ref_check(&back, dtype, dq.data, dq.exact, queries);
    ref_check(&back, dtype, dk.data, dk.exact, keys);
    ref_check(&back, dtype, dv.data, dv.exact, keys);
    struct ref_tensor *all[] = {&q, &k, &v, &dout, &out, &lse, &dq, &dk, &dv, &room};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) ref_tensor_free(d, all[i]);
}

static void attention_matches_double_across_a_tile(void **state) {
    (void)state;
    enum { TIME = SW_HOST_ATTENTION_BLOCK + 3 };
    static const uint32_t dims[] = {16, 7, 40};
    uint32_t starts[TIME];
    ref_starts(starts, 1, TIME, (const uint32_t[]){20, 45}, 2);
    struct ref_device devices[REF_DEVICES_MAX];
    const int count = ref_devices_open(devices, 1);
    ref_seed(31);
    for (struct ref_device *d = devices; d < devices + count; d++) {
        print_message("attention: %s\n", d->isa);
        for (size_t i = 0; i < sizeof(dims) / sizeof(dims[0]); i++)
            for (int dtype = SW_BF16; dtype <= SW_FP32; dtype++)
                for (int borders = 0; borders < 2; borders++)
                    check_attention(d, (enum sw_dtype)dtype,
                                    (struct sw_attention){1, TIME, 2, 1, dims[i],
                                                          1 / sqrtf((float)dims[i]),
                                                          borders ? starts : NULL});
        ref_device_close(d);
    }
}

/* Widening is exact and narrowing one rounding: every set has the scalar one's bits, and what lies
 * between the rows stays. */
static void panels_have_the_scalar_bits(void **state) {
    (void)state;
    enum { ROWS = 3, COLS_MAX = 67, LD = 71 };
    const struct sw_host_pointwise *scalar = sw_host_isas[SW_ISA_SCALAR].pointwise;
    float values[ROWS * LD], panel[2][ROWS * LD], narrow[2][ROWS * LD];
    ref_seed(32);
    for (int isa = 1; isa < SW_ISA_COUNT; isa++) {
        if (!sw_isa_supported((enum sw_isa)isa)) continue;
        const struct sw_host_pointwise *other = sw_host_isas[isa].pointwise;
        for (int i = 0; i < ROWS * LD; i++)
            values[i] = (float)((double)ref_random() / 0x1p31 - 1.0);
        for (int dtype = SW_BF16; dtype <= SW_FP32; dtype++)
            for (uint64_t cols = 1; cols <= COLS_MAX; cols++) {
                for (int side = 0; side < 2; side++) {
                    const struct sw_host_pointwise *kernels = side ? other : scalar;
                    memset(panel[side], 0x5A, sizeof(panel[side]));
                    memset(narrow[side], 0x5A, sizeof(narrow[side]));
                    kernels->widen(1, panel[side], cols, values, (enum sw_dtype)dtype, LD, ROWS,
                                   cols);
                    kernels->narrow(1, narrow[side], (enum sw_dtype)dtype, LD, values, LD, ROWS,
                                    cols);
                }
                assert_memory_equal(panel[0], panel[1], sizeof(panel[0]));
                assert_memory_equal(narrow[0], narrow[1], sizeof(narrow[0]));
            }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(adam_has_the_scalar_bits_around_each_border),
        cmocka_unit_test(attention_matches_double_across_a_tile),
        cmocka_unit_test(panels_have_the_scalar_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
