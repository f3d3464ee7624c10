/* The CUDA device's operators on the CPU stand-in, against naive double versions; backward against
 * central differences of the naive forward. Limits are counts of roundings on the longest chain,
 * each 2^-24 of the largest value, as in test_operators.c; exponentials are within 2 units. */
#include "kernels/device.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "engine/llama.h"
#include "kernels/cuda_sizes.h"
#include "tests/support_cuda.h"
#include "tests/support_reference.h"

static const double unit = 0x1p-24;
static const enum sw_dtype dtypes[2] = {SW_FP32, SW_BF16};

#define RUN(call) assert_int_equal(cuda_dev.ops->call, 0)

static void free_all(struct cuda_tensor **all, size_t count) {
    for (size_t i = 0; i < count; i++) cuda_tensor_free(all[i]);
}
#define FREE_ALL(...)                                                                              \
    do {                                                                                           \
        struct cuda_tensor *all[] = {__VA_ARGS__};                                                 \
        free_all(all, sizeof(all) / sizeof(all[0]));                                               \
    } while (0)

static struct cuda_tensor tensor(enum sw_dtype dtype, uint64_t count, double size) {
    return cuda_tensor_new(&cuda_dev, dtype, count, size);
}

static void check(struct ref_report *report, struct cuda_tensor *t, const double *want) {
    cuda_tensor_get(t);
    ref_check(report, t->dtype, t->host, want, t->count);
}

/* out = f(x, y) with a fixed dout: the scalar that central differences see. */
struct graph {
    struct cuda_tensor x, y, dout;
    double *out;
    uint64_t n, width;
    double eps;
    int32_t *targets;
    uint8_t *mask;
};

static double rmsnorm_loss(void *ctx) {
    struct graph *g = ctx;
    ref_rmsnorm(g->out, g->x.exact, g->y.exact, g->n, g->width, g->eps);
    return ref_dot(g->out, g->dout.exact, g->n * g->width);
}

static void rmsnorm_case(enum sw_dtype dtype, uint64_t n, uint64_t width, struct ref_report *there,
                         struct ref_report *back) {
    const uint64_t count = n * width;
    const uint64_t scratch_bytes = cuda_dev.ops->rmsnorm_scratch_bytes(cuda_dev.device, n, width);
    struct graph g = {.n = n, .width = width, .eps = (double)1e-5f};
    g.x = tensor(dtype, count, 2.0);
    g.y = tensor(dtype, width, 1.5);
    g.dout = tensor(dtype, count, 1.0);
    g.out = calloc(count, sizeof(double));
    struct cuda_tensor out = tensor(dtype, count, 0.0), dx = tensor(dtype, count, 1.0);
    struct cuda_tensor dw = tensor(SW_FP32, width, 1.0), rstd = tensor(SW_FP32, n, 0.0);
    struct cuda_tensor scratch = tensor(SW_BF16, scratch_bytes / 2, 0.0);
    double *want_dx = calloc(count, sizeof(double)), *want_dw = calloc(width, sizeof(double));
    there->limit = ((double)width / 2 + 6) * unit;
    back->limit = 2.0 * (double)(width + n + 12) * unit;

    RUN(rmsnorm(cuda_dev.stream, dtype, out.data, rstd.data, g.x.data, g.y.data, n, width, 1e-5f));
    rmsnorm_loss(&g);
    check(there, &out, g.out);
    ref_differences(want_dx, g.x.exact, count, rmsnorm_loss, &g);
    ref_differences(want_dw, g.y.exact, width, rmsnorm_loss, &g);
    for (int add = 1; add >= 0; add--) { /* first onto what is there, then instead of it */
        for (uint64_t i = 0; i < count && add; i++) dx.exact[i] += want_dx[i];
        for (uint64_t i = 0; i < width && add; i++) dw.exact[i] += want_dw[i];
        RUN(rmsnorm_backward(cuda_dev.stream, dtype, dx.data, add, dw.data, add, g.dout.data,
                             g.x.data, g.y.data, rstd.data, n, width, scratch.data));
        check(back, &dx, add ? dx.exact : want_dx);
        check(back, &dw, add ? dw.exact : want_dw);
    }
    /* Where dy lies. */
    RUN(rmsnorm_backward(cuda_dev.stream, dtype, g.dout.data, 0, dw.data, 0, g.dout.data, g.x.data,
                         g.y.data, rstd.data, n, width, scratch.data));
    check(back, &g.dout, want_dx);
    check(back, &dw, want_dw);
    FREE_ALL(&g.x, &g.y, &g.dout, &out, &dx, &dw, &rstd, &scratch);
    free(g.out), free(want_dx), free(want_dw);
}

static void rmsnorm_matches_double_and_differences(void **state) {
    (void)state;
    struct ref_report there = {.name = "rmsnorm forward"}, back = {.name = "rmsnorm backward"};
    ref_seed(1);
    for (int t = 0; t < 2; t++) {
        rmsnorm_case(dtypes[t], 1, 8, &there, &back);
        rmsnorm_case(dtypes[t], 5, 67, &there, &back);
        rmsnorm_case(dtypes[t], 3, 136, &there, &back);
        rmsnorm_case(dtypes[t], 131, 4, &there, &back); /* three slabs, the last one short */
    }
    ref_report_print(&there);
    ref_report_print(&back);
}

/* A row longer than one pass of a block: ones have norm one. */
static void rmsnorm_of_a_long_row(void **state) {
    (void)state;
    enum { WIDTH = 5000 };
    struct cuda_tensor x = tensor(SW_BF16, WIDTH, 0.0), w = tensor(SW_BF16, WIDTH, 0.0);
    struct cuda_tensor out = tensor(SW_BF16, WIDTH, 0.0), rstd = tensor(SW_FP32, 1, 0.0);
    for (int i = 0; i < WIDTH; i++) ((sw_bf16 *)x.host)[i] = sw_bf16_from_f32(i % 2 ? 2.0f : -2.0f);
    for (int i = 0; i < WIDTH; i++) ((sw_bf16 *)w.host)[i] = sw_bf16_from_f32((float)(i % 7));
    cuda_tensor_put(&x);
    cuda_tensor_put(&w);
    RUN(rmsnorm(cuda_dev.stream, SW_BF16, out.data, rstd.data, x.data, w.data, 1, WIDTH, 0.0f));
    cuda_tensor_get(&out);
    cuda_tensor_get(&rstd);
    assert_true(*(float *)rstd.host == 0.5f);
    for (int i = 0; i < WIDTH; i++)
        assert_true(ref_value(SW_BF16, out.host, (uint64_t)i) == (i % 2 ? 1.0 : -1.0) * (i % 7));
    FREE_ALL(&x, &w, &out, &rstd);
}

static void rope_turns_and_turns_back(void **state) {
    (void)state;
    struct ref_report there = {.name = "rope forward", .limit = 4 * unit};
    struct ref_report back = {.name = "rope backward", .limit = 4 * unit};
    static const uint64_t dims[] = {8, 16, 64, 80, 96, 128, 2, 10};
    ref_seed(2);
    for (size_t c = 0; c < 2 * sizeof(dims) / sizeof(dims[0]); c++) {
        const uint64_t dim = dims[c / 2], time = 7, rows = 3 * time, heads = 3;
        struct cuda_tensor x = tensor(dtypes[c % 2], rows * heads * dim, 1.0);
        struct cuda_tensor angles = tensor(SW_FP32, time * dim / 2, 3.0);
        struct cuda_tensor cosines = tensor(SW_FP32, time * dim / 2, 0.0);
        struct cuda_tensor sines = tensor(SW_FP32, time * dim / 2, 0.0);
        for (uint64_t i = 0; i < time * dim / 2; i++) {
            ((float *)cosines.host)[i] = (float)cos(angles.exact[i]);
            ((float *)sines.host)[i] = (float)sin(angles.exact[i]);
        }
        cuda_tensor_put(&cosines);
        cuda_tensor_put(&sines);
        for (int inverse = 0; inverse < 2; inverse++) {
            ref_rope(x.exact, cosines.host, sines.host, rows, time, heads, dim, inverse);
            RUN(rope(cuda_dev.stream, x.dtype, x.data, cosines.data, sines.data, rows, time, heads,
                     dim, inverse));
            check(inverse ? &back : &there, &x, x.exact);
            for (uint64_t i = 0; i < x.count; i++) x.exact[i] = ref_value(x.dtype, x.host, i);
        }
        FREE_ALL(&x, &angles, &cosines, &sines);
    }
    ref_report_print(&there);
    ref_report_print(&back);
}

static double swiglu_loss(void *ctx) {
    struct graph *g = ctx;
    ref_swiglu(g->out, g->x.exact, g->y.exact, g->x.count);
    return ref_dot(g->out, g->dout.exact, g->x.count);
}

static void swiglu_matches_double_and_differences(void **state) {
    (void)state;
    struct ref_report there = {.name = "swiglu forward", .limit = 12 * unit};
    struct ref_report back = {.name = "swiglu backward", .limit = 16 * unit};
    static const uint64_t counts[] = {1, 15, 33, 4131};
    ref_seed(4);
    for (size_t c = 0; c < 2 * sizeof(counts) / sizeof(counts[0]); c++) {
        const uint64_t count = counts[c / 2];
        const enum sw_dtype dtype = dtypes[c % 2];
        struct graph g = {.x = tensor(dtype, count, 9.0),
                          .y = tensor(dtype, count, 2.0),
                          .dout = tensor(dtype, count, 1.0),
                          .out = calloc(count, sizeof(double))};
        struct cuda_tensor out = tensor(dtype, count, 0.0);
        double *dgate = calloc(count, sizeof(double)), *dup = calloc(count, sizeof(double));
        RUN(swiglu(cuda_dev.stream, dtype, out.data, g.x.data, g.y.data, count));
        swiglu_loss(&g);
        check(&there, &out, g.out);
        if (count < 100) {
            ref_differences(dgate, g.x.exact, count, swiglu_loss, &g);
            ref_differences(dup, g.y.exact, count, swiglu_loss, &g);
            /* in place: the gradients take the places of what they are gradients of */
            RUN(swiglu_backward(cuda_dev.stream, dtype, g.x.data, g.y.data, g.dout.data, g.x.data,
                                g.y.data, count));
            check(&back, &g.x, dgate);
            check(&back, &g.y, dup);
        }
        FREE_ALL(&g.x, &g.y, &g.dout, &out);
        free(g.out), free(dgate), free(dup);
    }
    ref_report_print(&there);
    ref_report_print(&back);
}

static void swiglu_of_extreme_gates_stays_finite(void **state) {
    (void)state;
    static const float gates[5] = {-1e30f, -100.0f, 100.0f, 1e30f, NAN};
    struct cuda_tensor gate = tensor(SW_FP32, 5, 0.0), one = tensor(SW_FP32, 5, 0.0);
    struct cuda_tensor out = tensor(SW_FP32, 5, 0.0), dgate = tensor(SW_FP32, 5, 0.0);
    struct cuda_tensor dup = tensor(SW_FP32, 5, 0.0);
    memcpy(gate.host, gates, sizeof(gates));
    for (int i = 0; i < 5; i++) ((float *)one.host)[i] = 1.0f;
    cuda_tensor_put(&gate);
    cuda_tensor_put(&one);
    RUN(swiglu(cuda_dev.stream, SW_FP32, out.data, gate.data, one.data, 5));
    RUN(swiglu_backward(cuda_dev.stream, SW_FP32, dgate.data, dup.data, one.data, gate.data,
                        one.data, 5));
    cuda_tensor_get(&out);
    cuda_tensor_get(&dgate);
    const float *y = out.host, *d = dgate.host;
    assert_true(fabsf(y[1]) < 1e-30f && y[2] == 100.0f && y[3] == 1e30f && isnan(y[4]));
    assert_true(fabsf(d[0]) < 1e-6f && fabsf(d[1]) < 1e-30f && d[2] == 1.0f && d[3] == 1.0f);
    FREE_ALL(&gate, &one, &out, &dgate, &dup);
}

/* ---- the cross-entropy ---- */

static double cross_entropy_loss(void *ctx) {
    struct graph *g = ctx;
    ref_cross_entropy(g->out, g->x.exact, g->targets, g->mask, g->n, g->width);
    double sum = 0.0;
    for (uint64_t i = 0; i < g->n; i++) sum += g->out[i];
    return sum;
}

/* Columns [first, first + width) of the logits as a dense matrix on the device. */
static struct cuda_tensor columns(const struct graph *g, uint64_t first, uint64_t width) {
    struct cuda_tensor part = tensor(SW_FP32, g->n * width, 0.0);
    for (uint64_t i = 0; i < g->n; i++)
        memcpy((float *)part.host + i * width, (const float *)g->x.host + i * g->width + first,
               width * sizeof(float));
    cuda_tensor_put(&part);
    return part;
}

/* The columns come `step` at a time, the last ones fewer. */
static void softmax_case(enum sw_dtype dtype, uint64_t n, uint64_t vocab, uint64_t step, int masked,
                         struct ref_report *there, struct ref_report *back) {
    struct graph g = {.n = n, .width = vocab, .x = tensor(SW_FP32, n * vocab, 6.0)};
    struct cuda_tensor loss = tensor(SW_FP32, n, 0.0), stats = tensor(SW_FP32, n * 3, 0.0);
    double *want = calloc(n * vocab, sizeof(double)), *got = calloc(n * vocab, sizeof(double));
    const float scale = 0.37f;
    g.out = calloc(n, sizeof(double));
    g.targets = calloc(n, sizeof(int32_t));
    g.mask = masked ? calloc(n, 1) : NULL;
    for (uint64_t i = 0; i < n; i++) g.targets[i] = (int32_t)(ref_random() % vocab);
    for (uint64_t i = 0; i < n && masked; i++) g.mask[i] = i % 3 != 1;
    int32_t *targets = cuda_bytes_new(&cuda_dev, g.targets, n * sizeof(int32_t));
    uint8_t *mask = masked ? cuda_bytes_new(&cuda_dev, g.mask, n) : NULL;
    const double parts = (double)((vocab + step - 1) / step);
    there->limit = ((double)vocab / (vocab > 100 ? 4 : 1) + 8 + 5 * parts) * unit;
    memset(stats.host, 0xFF, n * 3 * sizeof(float)); /* NaN: what begins afresh does not see it */
    cuda_tensor_put(&stats);
    for (uint64_t first = 0; first < vocab; first += step) {
        const uint64_t width = vocab - first < step ? vocab - first : step;
        struct cuda_tensor part = columns(&g, first, width);
        RUN(softmax_stats(cuda_dev.stream, stats.data, part.data, targets, n, width, first,
                          first == 0));
        cuda_tensor_free(&part);
    }
    RUN(softmax_loss(cuda_dev.stream, loss.data, stats.data, mask, n));
    cuda_tensor_get(&stats);
    for (uint64_t i = 0; i < n; i++) {
        double most = g.x.exact[i * vocab];
        for (uint64_t c = 1; c < vocab; c++) most = fmax(most, g.x.exact[i * vocab + c]);
        assert_true((double)((float *)stats.host)[3 * i] == most);
        assert_true((double)((float *)stats.host)[3 * i + 2] ==
                    g.x.exact[i * vocab + (uint64_t)g.targets[i]]);
    }
    cross_entropy_loss(&g);
    check(there, &loss, g.out);
    if (vocab < 100) {
        back->limit = there->limit;
        ref_differences(want, g.x.exact, n * vocab, cross_entropy_loss, &g);
        for (uint64_t i = 0; i < n * vocab; i++) want[i] *= (double)scale;
        for (uint64_t first = 0; first < vocab; first += step) {
            const uint64_t width = vocab - first < step ? vocab - first : step;
            struct cuda_tensor part = columns(&g, first, width);
            struct cuda_tensor out = tensor(dtype, n * width, 0.0);
            void *to = dtype == SW_FP32 ? part.data : out.data; /* in place where it may be */
            RUN(softmax_backward(cuda_dev.stream, dtype, to, part.data, stats.data, targets, mask,
                                 scale, n, width, first));
            cuda_bytes_get(&cuda_dev, out.host, to, n * width * sw_dtype_bytes(dtype));
            for (uint64_t i = 0; i < n; i++)
                memcpy((char *)got + (i * vocab + first) * sw_dtype_bytes(dtype),
                       (char *)out.host + i * width * sw_dtype_bytes(dtype),
                       width * sw_dtype_bytes(dtype));
            FREE_ALL(&part, &out);
        }
        ref_check(back, dtype, got, want, n * vocab);
    }
    FREE_ALL(&g.x, &loss, &stats);
    cuda_dev.ops->free(cuda_dev.device, targets, 0);
    cuda_dev.ops->free(cuda_dev.device, mask, 0);
    free(want), free(got), free(g.out), free(g.targets), free(g.mask);
}

static void softmax_in_parts_matches_double_and_differences(void **state) {
    (void)state;
    struct ref_report there = {.name = "cross-entropy forward"};
    struct ref_report back = {.name = "cross-entropy backward"};
    ref_seed(5);
    for (int t = 0; t < 2; t++) {
        softmax_case(dtypes[t], 5, 37, 37, 0, &there, &back);
        softmax_case(dtypes[t], 5, 40, 16, 0, &there, &back);
        softmax_case(dtypes[t], 4, 29, 7, 1, &there, &back);
        softmax_case(dtypes[t], 3, 9, 1, 0, &there, &back);
        softmax_case(dtypes[t], 2, 9001, 9001, 0, &there, &back);
        softmax_case(dtypes[t], 2, 9001, 1808, 0, &there, &back);
    }
    ref_report_print(&there);
    ref_report_print(&back);
}

/* Loss and statistics of one row of 40 logits, `step` at a time. */
static float loss_of(const float logits[40], int32_t target, uint64_t step, float stats[3]) {
    float *row = cuda_bytes_new(&cuda_dev, logits, 40 * sizeof(float));
    float *out = cuda_bytes_new(&cuda_dev, NULL, 4 * sizeof(float)), loss;
    int32_t *wanted = cuda_bytes_new(&cuda_dev, &target, sizeof(target));
    for (uint64_t first = 0; first < 40; first += step)
        RUN(softmax_stats(cuda_dev.stream, out, row + first, wanted, 1,
                          40 - first < step ? 40 - first : step, first, first == 0));
    RUN(softmax_loss(cuda_dev.stream, out + 3, out, NULL, 1));
    cuda_bytes_get(&cuda_dev, stats, out, 3 * sizeof(float));
    cuda_bytes_get(&cuda_dev, &loss, out + 3, sizeof(loss));
    cuda_dev.ops->free(cuda_dev.device, row, 0);
    cuda_dev.ops->free(cuda_dev.device, out, 0);
    cuda_dev.ops->free(cuda_dev.device, wanted, 0);
    return loss;
}

static void softmax_of_uneven_and_nonfinite_logits(void **state) {
    (void)state;
    static const int places[] = {0, 1, 7, 8, 9, 31, 39};
    float logits[40], stats[3];
    for (int falling = 0; falling < 2; falling++) {
        for (int c = 0; c < 40; c++) logits[c] = 90.0f * (float)(falling ? 4 - c / 8 : c / 8);
        const float loss = loss_of(logits, 20, 8, stats);
        assert_true(stats[0] == 360.0f && stats[1] == 8.0f && stats[2] == 180.0f);
        assert_true(fabs((double)loss - (180.0 + log(8.0))) <= 184.0 * 2 * unit);
    }
    for (int c = 0; c < 40; c++) logits[c] = c < 20 ? -INFINITY : 0.0f; /* parts of -Inf count */
    assert_true(fabs((double)loss_of(logits, 20, 40, stats) - log(20.0)) <= 4 * 2 * unit);
    for (size_t p = 0; p < sizeof(places) / sizeof(places[0]); p++)
        for (int kind = 0; kind < 2; kind++)
            for (uint64_t step = 16; step <= 40; step += 24) {
                memset(logits, 0, sizeof(logits));
                logits[places[p]] = kind ? INFINITY : NAN;
                assert_false(isfinite(loss_of(logits, 3, step, stats)));
            }
    for (int c = 0; c < 40; c++) logits[c] = c >= 16 && c < 32 ? -INFINITY : 0.0f;
    assert_true(isnan(loss_of(logits, 3, 16, stats))); /* a call of nothing but -Inf */
    memset(logits, 0, sizeof(logits));
    assert_true(isnan(loss_of(logits, 40, 40, stats)) && isnan(loss_of(logits, -1, 40, stats)));
}

/* ---- what is exact ---- */

static void embedding_part_case(enum sw_dtype dtype, uint64_t width, uint64_t first,
                                uint64_t rows) {
    enum { N = 300, VOCAB = 9 };
    struct cuda_tensor table = tensor(dtype, rows * width, 1.0);
    struct cuda_tensor dout = tensor(dtype, N * width, 1.0), out = tensor(dtype, N * width, 2.0);
    struct cuda_tensor grad = tensor(SW_FP32, rows * width, 1.0);
    float *want = calloc(rows * width, sizeof(float));
    int32_t tokens[N];
    for (int i = 0; i < N; i++) tokens[i] = (int32_t)(ref_random() % VOCAB);
    int32_t *on_device = cuda_bytes_new(&cuda_dev, tokens, sizeof(tokens));
    memcpy(want, grad.host, rows * width * sizeof(float));
    RUN(embed(cuda_dev.stream, dtype, out.data, table.data, on_device, N, width, first, rows));
    RUN(embed_backward(cuda_dev.stream, dtype, grad.data, dout.data, on_device, N, width, first,
                       rows));
    cuda_tensor_get(&out);
    cuda_tensor_get(&grad);
    for (uint64_t i = 0; i < N; i++) {
        const uint64_t token = (uint64_t)tokens[i];
        const int is_here = token >= first && token < first + rows;
        for (uint64_t c = 0; c < width; c++) {
            const uint64_t at = (token - first) * width + c;
            assert_true(ref_value(dtype, out.host, i * width + c) ==
                        (is_here ? table.exact[at] : out.exact[i * width + c]));
            if (is_here) want[at] += (float)dout.exact[i * width + c];
        }
    }
    assert_memory_equal(grad.host, want, rows * width * sizeof(float)); /* exact */
    FREE_ALL(&table, &dout, &out, &grad);
    cuda_dev.ops->free(cuda_dev.device, on_device, sizeof(tokens));
    free(want);
}

static void embedding_rows_are_gathered_and_summed_in_order(void **state) {
    (void)state;
    static const uint64_t widths[] = {1, 70, 136, 1100};
    ref_seed(6);
    for (size_t c = 0; c < 8; c++) {
        const enum sw_dtype dtype = dtypes[c % 2];
        embedding_part_case(dtype, widths[c / 2], 0, 9);
        embedding_part_case(dtype, widths[c / 2], 4, 3);
        embedding_part_case(dtype, widths[c / 2], 7, 2);
    }
}

static void rounding_is_to_nearest_even(void **state) {
    (void)state;
    static const uint64_t counts[] = {1, 7, 4096, 40001};
    ref_seed(9);
    for (size_t c = 0; c < 8; c++) {
        struct cuda_tensor src = tensor(SW_FP32, counts[c / 2], 3.0);
        struct cuda_tensor dst = tensor(dtypes[c % 2], counts[c / 2], 0.0);
        float *x = src.host;
        x[0] = sw_f32_from_bits(0x3F808000u); /* half way between two: to the even one */
        cuda_tensor_put(&src);
        RUN(round(cuda_dev.stream, dst.dtype, dst.data, src.data, src.count));
        cuda_tensor_get(&dst);
        for (uint64_t i = 0; i < src.count; i++) {
            const float want =
                dst.dtype == SW_FP32 ? x[i] : sw_f32_from_bf16(sw_bf16_from_f32(x[i]));
            assert_true(ref_value(dst.dtype, dst.host, i) == (double)want);
        }
        FREE_ALL(&src, &dst);
    }
}

static double block_sum(enum sw_dtype dtype, const void *x, uint64_t first, uint64_t count) {
    const char *at = (const char *)x + first * sw_dtype_bytes(dtype);
    uint64_t bad = 0;
    return dtype == SW_FP32 ? sw_block_norm(SW_FP32, at, count, &bad)
                            : sw_block_norm(SW_BF16, at, count, &bad);
}

static void round_norm_rounds_and_sums_as_the_cpu_does(void **state) {
    (void)state;
    static const uint64_t counts[] = {0, 1, 7, 8, 1000, SW_NORM_BLOCK, 3 * SW_NORM_BLOCK + 5};
    ref_seed(7);
    for (size_t c = 0; c < 14; c++) {
        const uint64_t count = counts[c / 2], blocks = (count + SW_NORM_BLOCK - 1) / SW_NORM_BLOCK;
        struct cuda_tensor src = tensor(SW_FP32, count, 3.0);
        struct cuda_tensor dst = tensor(dtypes[c % 2], count, 0.0);
        double sums[4];
        struct sw_nonfinite bad = {.count = 9};
        double *on_device = cuda_bytes_new(&cuda_dev, NULL, sizeof(sums));
        struct sw_nonfinite *bad_there = cuda_bytes_new(&cuda_dev, &bad, sizeof(bad));
        RUN(round_norm(cuda_dev.stream, dst.data, dst.dtype, src.data, count, on_device,
                       bad_there));
        cuda_tensor_get(&dst);
        cuda_bytes_get(&cuda_dev, sums, on_device, sizeof(sums));
        cuda_bytes_get(&cuda_dev, &bad, bad_there, sizeof(bad));
        assert_true(bad.count == 0 && bad.first == 0 && bad.is_nan == 0);
        for (uint64_t i = 0; i < count; i++) {
            const float x = ((float *)src.host)[i];
            const float want = dst.dtype == SW_FP32 ? x : sw_f32_from_bf16(sw_bf16_from_f32(x));
            assert_true(ref_value(dst.dtype, dst.host, i) == (double)want);
        }
        for (uint64_t b = 0; b < blocks; b++) {
            const uint64_t first = b * SW_NORM_BLOCK, left = count - first;
            const double want =
                block_sum(dst.dtype, dst.host, first, left < SW_NORM_BLOCK ? left : SW_NORM_BLOCK);
            assert_memory_equal(&sums[b], &want, sizeof(want));
        }
        FREE_ALL(&src, &dst);
        cuda_dev.ops->free(cuda_dev.device, on_device, sizeof(sums));
        cuda_dev.ops->free(cuda_dev.device, bad_there, sizeof(bad));
    }
}

static void round_norm_counts_what_is_not_finite(void **state) {
    (void)state;
    const uint64_t count = 2 * SW_NORM_BLOCK + 100;
    for (int t = 0; t < 2; t++) {
        struct cuda_tensor src = tensor(SW_FP32, count, 1.0), dst = tensor(dtypes[t], count, 0.0);
        double *sums = cuda_bytes_new(&cuda_dev, NULL, 3 * sizeof(double)), got[3];
        struct sw_nonfinite bad, *bad_there = cuda_bytes_new(&cuda_dev, NULL, sizeof(bad));
        float *x = src.host;
        x[SW_NORM_BLOCK + 77] = -INFINITY;
        x[2 * SW_NORM_BLOCK + 99] = NAN;
        x[2 * SW_NORM_BLOCK + 1] = INFINITY;
        for (int round = 0; round < 2; round++) {
            if (round) x[5] = sw_f32_from_bits(0x7F800001u); /* its upper half is an infinity's */
            cuda_tensor_put(&src);
            RUN(round_norm(cuda_dev.stream, dst.data, dst.dtype, src.data, count, sums, bad_there));
            cuda_bytes_get(&cuda_dev, &bad, bad_there, sizeof(bad));
            cuda_bytes_get(&cuda_dev, got, sums, sizeof(got));
            assert_int_equal(bad.count, 3 + round);
            assert_int_equal(bad.first, round ? 5 : SW_NORM_BLOCK + 77);
            assert_int_equal(bad.is_nan, round);
            assert_true((round ? isnan(got[0]) : isfinite(got[0])) && isinf(got[1]) &&
                        isnan(got[2]));
        }
        FREE_ALL(&src, &dst);
        cuda_dev.ops->free(cuda_dev.device, sums, sizeof(got));
        cuda_dev.ops->free(cuda_dev.device, bad_there, sizeof(bad));
    }
}

static void sum_is_in_index_order_in_double(void **state) {
    (void)state;
    enum { N = 2501 };
    struct cuda_tensor x = tensor(SW_FP32, N, 0.0);
    double want = 0.0, got = 1.0, *out = cuda_bytes_new(&cuda_dev, NULL, sizeof(got));
    ref_seed(8);
    for (int i = 0; i < N; i++) want += (double)(((float *)x.host)[i] = (float)ref_random() / 3.0f);
    cuda_tensor_put(&x);
    RUN(sum(cuda_dev.stream, out, x.data, N));
    cuda_bytes_get(&cuda_dev, &got, out, sizeof(got));
    assert_memory_equal(&got, &want, sizeof(want));
    RUN(sum(cuda_dev.stream, out, x.data, 0));
    cuda_bytes_get(&cuda_dev, &got, out, sizeof(got));
    assert_true(got == 0.0);
    cuda_tensor_free(&x);
    cuda_dev.ops->free(cuda_dev.device, out, sizeof(got));
}

/* ---- products ---- */

/* A sum of k products and of C: k + 2 roundings, relative to terms that may cancel to half of the
 * largest result. */
static void product_case(int form, uint64_t m, uint64_t n, uint64_t k, struct ref_report *report) {
    const int trans_a = form & 1, trans_b = form >> 1 & 1, accumulate = form >> 2 & 1;
    const enum sw_dtype dtype = form >> 3 & 1 ? SW_FP32 : SW_BF16;
    const enum sw_dtype c_dtype = form >> 4 & 1 ? SW_BF16 : SW_FP32;
    const uint64_t lda = (trans_a ? m : k) + 3, ldb = (trans_b ? k : n) + 5, ldc = n + 2;
    struct cuda_tensor a = tensor(dtype, (trans_a ? k : m) * lda, 1.0);
    struct cuda_tensor b = tensor(dtype, (trans_b ? n : k) * ldb, 1.0);
    struct cuda_tensor c = tensor(c_dtype, m * ldc, 1.0);
    const struct sw_gemm g = {m,   n,      k,     trans_a, trans_b, accumulate, a.data, dtype,
                              lda, b.data, dtype, ldb,     c.data,  c_dtype,    ldc};
    for (uint64_t i = 0; i < m; i++)
        for (uint64_t j = 0; j < n; j++) {
            double sum = accumulate ? c.exact[i * ldc + j] : 0.0;
            for (uint64_t x = 0; x < k; x++)
                sum += a.exact[trans_a ? x * lda + i : i * lda + x] *
                       b.exact[trans_b ? j * ldb + x : x * ldb + j];
            c.exact[i * ldc + j] = sum;
        }
    report->limit = 2.0 * (double)(k + 2) * unit;
    RUN(gemm(cuda_dev.stream, &g));
    check(report, &c, c.exact); /* and what lies between the rows is as it was */
    FREE_ALL(&a, &b, &c);
}

static void products_match_double(void **state) {
    (void)state;
    struct ref_report report = {.name = "products"};
    ref_seed(10);
    for (int form = 0; form < 32; form++) {
        if ((form >> 3 & 3) == 3) continue; /* FP32 to BF16 is nobody's */
        product_case(form, 17, 9, 33, &report);
        product_case(form, 8, 24, 16, &report);
        product_case(form, 4, 5, 1, &report);
    }
    ref_report_print(&report);
}

/* A slice of a tensor begins anywhere. */
static void products_of_slices(void **state) {
    (void)state;
    for (uint64_t first = 0; first < 16; first++) {
        struct cuda_tensor x = tensor(SW_BF16, 64, 1.0), c = tensor(SW_FP32, 64, 1.0);
        const sw_bf16 *at = (const sw_bf16 *)x.data + first;
        const struct sw_gemm g = {
            4, 4, 4, 0, 0, 0, at, SW_BF16, 4, at, SW_BF16, 4, (float *)c.data + first, SW_FP32, 4};
        RUN(gemm(cuda_dev.stream, &g));
        cuda_tensor_get(&c);
        for (uint64_t i = 0; i < 16; i++) {
            double sum = 0.0;
            for (uint64_t k = 0; k < 4; k++)
                sum += x.exact[first + i / 4 * 4 + k] * x.exact[first + k * 4 + i % 4];
            assert_true(fabs(ref_value(SW_FP32, c.host, first + i) - sum) <= 4 * 4 * unit);
        }
        FREE_ALL(&x, &c);
    }
}

/* Over an empty sum C stays, or becomes zero; products of nothing do nothing. */
static void products_of_nothing(void **state) {
    (void)state;
    struct cuda_tensor c = tensor(SW_FP32, 12, 1.0);
    struct sw_gemm g = {.m = 3, .n = 3, .accumulate = 1, .a_dtype = SW_BF16, .b_dtype = SW_BF16};
    g.a = g.b = g.c = c.data;
    g.lda = g.ldb = g.ldc = 4;
    g.c_dtype = SW_FP32;
    RUN(gemm(cuda_dev.stream, &g));
    cuda_tensor_get(&c);
    for (uint64_t i = 0; i < 12; i++) assert_true(ref_value(SW_FP32, c.host, i) == c.exact[i]);
    g.accumulate = 0;
    RUN(gemm(cuda_dev.stream, &g));
    cuda_tensor_get(&c);
    for (uint64_t i = 0; i < 12; i++)
        assert_true(ref_value(SW_FP32, c.host, i) == (i % 4 < 3 ? 0.0 : c.exact[i]));
    g.m = 0;
    RUN(gemm(cuda_dev.stream, &g));
    cuda_tensor_free(&c);
}

/* Nothing to do is done without touching anything. */
static void empty_calls_change_nothing(void **state) {
    (void)state;
    struct cuda_tensor guard = tensor(SW_FP32, 16, 1.0);
    struct sw_attention shape = {.heads = 2, .kv_heads = 1, .head_dim = 64, .scale = 1.0f};
    void *p = guard.data;
    for (int t = 0; t < 2; t++) {
        const enum sw_dtype dtype = dtypes[t];
        RUN(embed(cuda_dev.stream, dtype, p, p, NULL, 0, 4, 0, 4));
        RUN(embed_backward(cuda_dev.stream, dtype, p, p, NULL, 0, 4, 0, 4));
        RUN(rmsnorm(cuda_dev.stream, dtype, p, p, p, p, 0, 4, 1e-5f));
        RUN(rmsnorm_backward(cuda_dev.stream, dtype, p, 0, p, 1, p, p, p, p, 0, 4, NULL));
        RUN(rope(cuda_dev.stream, dtype, p, p, p, 0, 1, 1, 4, 0));
        RUN(swiglu(cuda_dev.stream, dtype, p, p, p, 0));
        RUN(swiglu_backward(cuda_dev.stream, dtype, p, p, p, p, p, 0));
        RUN(softmax_stats(cuda_dev.stream, p, p, NULL, 0, 4, 0, 1));
        RUN(softmax_loss(cuda_dev.stream, p, p, NULL, 0));
        RUN(softmax_backward(cuda_dev.stream, dtype, p, p, p, NULL, NULL, 1.0f, 0, 4, 0));
        RUN(round(cuda_dev.stream, dtype, p, NULL, 0));
        shape.batch = 0;
        RUN(attention(cuda_dev.stream, dtype, &shape, p, p, p, p, p, p));
        shape.batch = 1;
        RUN(attention(cuda_dev.stream, dtype, &shape, p, p, p, p, p, p));
        RUN(attention_backward(cuda_dev.stream, dtype, &shape, p, p, p, p, p, p, p, p, p, p));
    }
    RUN(zero(cuda_dev.stream, p, 0));
    RUN(copy_d2d(cuda_dev.stream, p, NULL, 0));
    cuda_tensor_get(&guard);
    for (uint64_t i = 0; i < 16; i++)
        assert_true(ref_value(SW_FP32, guard.host, i) == guard.exact[i]);
    cuda_tensor_free(&guard);
}

/* More than the operations that a card does while it reads a byte, else the head's matrix, which
 * every slice reads, sets the time. */
static void a_slice_of_the_head_is_long_enough(void **state) {
    (void)state;
    const struct sw_model model = {.config = {.vocab = 128256}};
    assert_int_equal(sw_llama_head_slice(&model, &cuda_dev.handle, 8192), 499);
    assert_int_equal(sw_llama_head_slice(&model, &cuda_dev.handle, 100), 100);
}

/* A plan counts them where no back end is to be asked. */
static void scratch_sizes_are_those_of_a_plan(void **state) {
    (void)state;
    const struct cuda_device *d = &cuda_dev;
    for (uint64_t n = 1; n < 100000; n += 1 + n / 7)
        for (uint64_t width = 64; width <= 16384; width *= 4)
            assert_int_equal(sw_cuda_sizes_rmsnorm(n, width),
                             d->ops->rmsnorm_scratch_bytes(d->device, n, width));
    for (uint32_t time = 16; time <= 4096; time *= 4) {
        const struct sw_attention shape = {3, time, 8, 2, 64, 0.125f, NULL};
        assert_int_equal(sw_cuda_sizes_attention(&shape),
                         d->ops->attention_scratch_bytes(d->device, &shape));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rmsnorm_matches_double_and_differences),
        cmocka_unit_test(rmsnorm_of_a_long_row),
        cmocka_unit_test(scratch_sizes_are_those_of_a_plan),
        cmocka_unit_test(rope_turns_and_turns_back),
        cmocka_unit_test(swiglu_matches_double_and_differences),
        cmocka_unit_test(swiglu_of_extreme_gates_stays_finite),
        cmocka_unit_test(softmax_in_parts_matches_double_and_differences),
        cmocka_unit_test(softmax_of_uneven_and_nonfinite_logits),
        cmocka_unit_test(embedding_rows_are_gathered_and_summed_in_order),
        cmocka_unit_test(rounding_is_to_nearest_even),
        cmocka_unit_test(round_norm_rounds_and_sums_as_the_cpu_does),
        cmocka_unit_test(round_norm_counts_what_is_not_finite),
        cmocka_unit_test(sum_is_in_index_order_in_double),
        cmocka_unit_test(products_match_double),
        cmocka_unit_test(products_of_slices),
        cmocka_unit_test(products_of_nothing),
        cmocka_unit_test(empty_calls_change_nothing),
        cmocka_unit_test(a_slice_of_the_head_is_long_enough),
    };
    return cmocka_run_group_tests(tests, cuda_open, cuda_close);
}
