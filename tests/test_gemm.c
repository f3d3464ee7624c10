/* Matrix products on the host device against a naive double one: every transposition and pair of
 * types, with and without accumulation, sizes on both sides of the blocks in which BF16 is widened.
 */
#include "kernels/device.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "tests/support_reference.h"

static struct ref_device devices[REF_DEVICES_MAX];
static int device_count;

static int open_all(void **state) {
    (void)state;
    device_count = ref_devices_open(devices, 2);
    return 0;
}

static int close_all(void **state) {
    (void)state;
    for (int i = 0; i < device_count; i++) ref_device_close(&devices[i]);
    return 0;
}

/* Padding beyond m, n and k shows a wrong leading dimension. */
struct product {
    struct ref_device *d;
    struct sw_gemm g;
    struct ref_tensor a, b, c;
};

static void product_open(struct product *p, struct ref_device *d, struct sw_gemm g, uint64_t pad) {
    g.lda = (g.trans_a ? g.m : g.k) + pad;
    g.ldb = (g.trans_b ? g.k : g.n) + 2 * pad;
    g.ldc = g.n + 3 * pad;
    p->d = d;
    p->a = ref_tensor_new(d, g.a_dtype, (g.trans_a ? g.k : g.m) * g.lda, 1.0);
    p->b = ref_tensor_new(d, g.b_dtype, (g.trans_b ? g.n : g.k) * g.ldb, 1.0);
    p->c = ref_tensor_new(d, g.c_dtype, g.m * g.ldc, 1.0);
    g.a = p->a.data;
    g.b = p->b.data;
    g.c = p->c.data;
    p->g = g;
}

static void product_close(struct product *p) {
    ref_tensor_free(p->d, &p->a);
    ref_tensor_free(p->d, &p->b);
    ref_tensor_free(p->d, &p->c);
}

static double naive(const struct product *p, uint64_t i, uint64_t j) {
    const struct sw_gemm *g = &p->g;
    double sum = g->accumulate ? p->c.exact[i * g->ldc + j] : 0.0;
    for (uint64_t l = 0; l < g->k; l++)
        sum += p->a.exact[g->trans_a ? l * g->lda + i : i * g->lda + l] *
               p->b.exact[g->trans_b ? j * g->ldb + l : l * g->ldb + j];
    return sum;
}

/* Checks every stride-th row and column. A sum of k products of values below 1 whose partial sums
 * stay below 4 sqrt(k): k roundings of that, and one to BF16 if C is. What is between rows must
 * stay. */
static void product_check(const struct product *p, uint64_t stride) {
    const struct sw_gemm *g = &p->g;
    const double limit = (double)(g->k + 1) * 4.0 * sqrt((double)g->k + 1.0) * 0x1p-24;
    for (uint64_t i = 0; i < g->m; i += stride) {
        for (uint64_t j = 0; j < g->n; j += stride) {
            const double want = naive(p, i, j), got = ref_value(g->c_dtype, g->c, i * g->ldc + j);
            const double bound =
                limit + (g->c_dtype == SW_FP32 ? 0.0 : 0x1p-8 * (fabs(want) + limit));
            if (!(fabs(got - want) <= bound))
                fail_msg("%s%s %llu x %llu x %llu: C[%llu][%llu] is %g, not %g, allowed %.1e",
                         g->trans_a ? "T" : "N", g->trans_b ? "T" : "N", (unsigned long long)g->m,
                         (unsigned long long)g->n, (unsigned long long)g->k, (unsigned long long)i,
                         (unsigned long long)j, got, want, bound);
        }
        for (uint64_t j = g->n; j < g->ldc; j++)
            assert_true(ref_value(g->c_dtype, g->c, i * g->ldc + j) == p->c.exact[i * g->ldc + j]);
    }
}

static void every_form_matches_double(void **state) {
    (void)state;
    static const uint64_t sizes[][3] = {{1, 1, 1}, {17, 33, 5}, {64, 172, 64}, {3, 130, 257}};
    ref_seed(21);
    for (struct ref_device *d = devices; d < devices + device_count; d++)
        for (size_t c = 0; c < sizeof(sizes) / sizeof(sizes[0]); c++)
            for (int form = 0; form < 64; form++) {
                struct product p;
                product_open(&p, d,
                             (struct sw_gemm){.m = sizes[c][0],
                                              .n = sizes[c][1],
                                              .k = sizes[c][2],
                                              .trans_a = form & 1,
                                              .trans_b = form >> 1 & 1,
                                              .accumulate = form >> 2 & 1,
                                              .a_dtype = (enum sw_dtype)(form >> 3 & 1),
                                              .b_dtype = (enum sw_dtype)(form >> 4 & 1),
                                              .c_dtype = (enum sw_dtype)(form >> 5 & 1)},
                             c * 3);
                assert_int_equal(d->ops->gemm(d->stream, &p.g), 0);
                product_check(&p, 1);
                product_close(&p);
            }
}

static void sizes_beyond_one_block_match_double(void **state) {
    (void)state;
    static const uint64_t sizes[][3] = {{1030, 40, 50}, {40, 2100, 33}, {20, 24, 2300}};
    ref_seed(22);
    for (size_t c = 0; c < sizeof(sizes) / sizeof(sizes[0]); c++)
        for (int form = 0; form < 16; form++) {
            struct product p;
            product_open(&p, devices,
                         (struct sw_gemm){.m = sizes[c][0],
                                          .n = sizes[c][1],
                                          .k = sizes[c][2],
                                          .trans_a = form & 1,
                                          .trans_b = form >> 1 & 1,
                                          .accumulate = form >> 2 & 1,
                                          .c_dtype = (enum sw_dtype)(form >> 3 & 1)},
                         5);
            assert_int_equal(devices->ops->gemm(devices->stream, &p.g), 0);
            product_check(&p, 7);
            product_close(&p);
        }
}

/* C holds NaN before a product that does not accumulate. */
static void old_result_is_not_read(void **state) {
    (void)state;
    for (struct ref_device *d = devices; d < devices + device_count; d++)
        for (int dtype = SW_BF16; dtype <= SW_FP32; dtype++) {
            struct product p;
            product_open(&p, d,
                         (struct sw_gemm){.m = 9,
                                          .n = 20,
                                          .k = 30,
                                          .a_dtype = (enum sw_dtype)dtype,
                                          .b_dtype = (enum sw_dtype)dtype,
                                          .c_dtype = (enum sw_dtype)dtype},
                         0);
            memset(p.c.data, 0xFF, p.c.count * sw_dtype_bytes(p.c.dtype));
            assert_int_equal(d->ops->gemm(d->stream, &p.g), 0);
            product_check(&p, 1);
            product_close(&p);
        }
}

static void empty_sums_are_zero(void **state) {
    (void)state;
    for (int dtype = SW_BF16; dtype <= SW_FP32; dtype++)
        for (int accumulate = 0; accumulate < 2; accumulate++) {
            struct product p;
            product_open(
                &p, devices,
                (struct sw_gemm){
                    .m = 3, .n = 5, .accumulate = accumulate, .c_dtype = (enum sw_dtype)dtype},
                2);
            assert_int_equal(devices->ops->gemm(devices->stream, &p.g), 0);
            product_check(&p, 1);
            p.g.m = 0;
            assert_int_equal(devices->ops->gemm(devices->stream, &p.g), 0);
            product_close(&p);
        }
}

/* Equal inputs, equal bits, whatever ran before and in between. */
static void repeated_products_have_equal_bits(void **state) {
    (void)state;
    static const uint64_t sizes[][3] = {{300, 700, 200}, {64, 64, 512}, {700, 100, 1100}};
    ref_seed(23);
    for (size_t c = 0; c < 3; c++)
        for (int dtype = SW_BF16; dtype <= SW_FP32; dtype++) {
            struct product p;
            product_open(&p, devices,
                         (struct sw_gemm){.m = sizes[c][0],
                                          .n = sizes[c][1],
                                          .k = sizes[c][2],
                                          .trans_b = 1,
                                          .a_dtype = (enum sw_dtype)dtype,
                                          .b_dtype = (enum sw_dtype)dtype,
                                          .c_dtype = SW_FP32},
                         0);
            float *first = malloc(p.c.count * sizeof(float));
            for (int round = 0; round < 6; round++) {
                devices->ops->gemm(devices->stream, &p.g);
                if (round == 0) memcpy(first, p.c.data, p.c.count * sizeof(float));
                assert_memory_equal(first, p.c.data, p.c.count * sizeof(float));
            }
            free(first);
            product_close(&p);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_form_matches_double),
        cmocka_unit_test(sizes_beyond_one_block_match_double),
        cmocka_unit_test(old_result_is_not_read),
        cmocka_unit_test(empty_sums_are_zero),
        cmocka_unit_test(repeated_products_have_equal_bits),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
