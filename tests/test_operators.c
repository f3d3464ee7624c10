/* The host device's operators against naive double versions: forward directly, backward against
 * central differences of the naive forward, on every instruction set that this CPU runs. Limits are
 * counts of roundings on the longest chain, each 2^-24 of the largest value, and say so. */
#include "kernels/device.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "kernels/host/host.h"
#include "tests/support_reference.h"

static const double unit = 0x1p-24;
static struct ref_device devices[REF_DEVICES_MAX];
static int device_count;
static const enum sw_dtype dtypes[2] = {SW_FP32, SW_BF16};

#define EACH_DEVICE_AND_DTYPE(d, dtype)                                                            \
    for (struct ref_device *d = devices; d < devices + device_count; d++)                          \
        for (int dtype##_i = 0; dtype##_i < 2; dtype##_i++)                                        \
            for (enum sw_dtype dtype = dtypes[dtype##_i], once = SW_BF16; once == SW_BF16;         \
                 once = SW_FP32)

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

/* out = f(x, y) with a fixed dout: the scalar that central differences see. */
struct graph {
    struct ref_tensor x, y, dout;
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

/* Forward: the sum of squares has `width` roundings, halved by the root, and six more follow.
 * Backward: the dot product has width + 4, dw a chain of n + 3, and the result five more, relative
 * to terms that may cancel to half. */
static void rmsnorm_case(struct ref_device *d, enum sw_dtype dtype, uint64_t n, uint64_t width,
                         struct ref_report *there, struct ref_report *back) {
    struct graph g = {.n = n, .width = width, .eps = (double)1e-5f};
    g.x = ref_tensor_new(d, dtype, n * width, 2.0);
    g.y = ref_tensor_new(d, dtype, width, 1.5);
    g.dout = ref_tensor_new(d, dtype, n * width, 1.0);
    g.out = calloc(n * width, sizeof(double));
    struct ref_tensor out = ref_tensor_new(d, dtype, n * width, 0.0);
    struct ref_tensor dx = ref_tensor_new(d, dtype, n * width, 1.0);
    struct ref_tensor dw = ref_tensor_new(d, SW_FP32, width, 1.0);
    struct ref_tensor rstd = ref_tensor_new(d, SW_FP32, n, 0.0);
    double *want_dx = calloc(n * width, sizeof(double)), *want_dw = calloc(width, sizeof(double));
    there->limit = ((double)width / 2 + 6) * unit;
    back->limit = 2.0 * (double)(width + n + 12) * unit;

    d->ops->rmsnorm(d->stream, dtype, out.data, rstd.data, g.x.data, g.y.data, n, width, 1e-5f);
    rmsnorm_loss(&g);
    ref_check(there, dtype, out.data, g.out, n * width);
    ref_differences(want_dx, g.x.exact, n * width, rmsnorm_loss, &g);
    ref_differences(want_dw, g.y.exact, width, rmsnorm_loss, &g);
    for (int add = 1; add >= 0; add--) { /* first onto what is there, then instead of it */
        for (uint64_t i = 0; i < n * width && add; i++) dx.exact[i] += want_dx[i];
        for (uint64_t i = 0; i < width && add; i++) dw.exact[i] += want_dw[i];
        d->ops->rmsnorm_backward(d->stream, dtype, dx.data, add, dw.data, add, g.dout.data,
                                 g.x.data, g.y.data, rstd.data, n, width, NULL);
        ref_check(back, dtype, dx.data, add ? dx.exact : want_dx, n * width);
        ref_check(back, SW_FP32, dw.data, add ? dw.exact : want_dw, width);
    }
    struct ref_tensor *all[] = {&g.x, &g.y, &g.dout, &out, &dx, &dw, &rstd};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) ref_tensor_free(d, all[i]);
    free(g.out), free(want_dx), free(want_dw);
}

static void rmsnorm_matches_double_and_differences(void **state) {
    (void)state;
    struct ref_report there = {.name = "rmsnorm forward"}, back = {.name = "rmsnorm backward"};
    ref_seed(1);
    EACH_DEVICE_AND_DTYPE(d, dtype) {
        rmsnorm_case(d, dtype, 1, 8, &there, &back);
        rmsnorm_case(d, dtype, 5, 67, &there, &back);
        rmsnorm_case(d, dtype, 3, 130, &there, &back);
    }
    ref_report_print(&there);
    ref_report_print(&back);
}

static void rope_turns_and_turns_back(void **state) {
    (void)state;
    /* Two products and a sum of values up to the largest. */
    struct ref_report there = {.name = "rope forward", .limit = 4 * unit};
    struct ref_report back = {.name = "rope backward", .limit = 4 * unit};
    static const uint64_t dims[] = {8, 16, 64, 80, 96, 128, 2, 10};
    ref_seed(2);
    EACH_DEVICE_AND_DTYPE(d, dtype) {
        for (size_t c = 0; c < sizeof(dims) / sizeof(dims[0]); c++) {
            const uint64_t dim = dims[c], time = 7, rows = 3 * time, heads = 3;
            struct ref_tensor x = ref_tensor_new(d, dtype, rows * heads * dim, 1.0);
            struct ref_tensor angles = ref_tensor_new(d, SW_FP32, time * dim / 2, 3.0);
            float *cos_table = calloc(time * dim / 2, sizeof(float));
            float *sin_table = calloc(time * dim / 2, sizeof(float));
            for (uint64_t i = 0; i < time * dim / 2; i++) {
                cos_table[i] = (float)cos(angles.exact[i]);
                sin_table[i] = (float)sin(angles.exact[i]);
            }
            for (int inverse = 0; inverse < 2; inverse++) {
                ref_rope(x.exact, cos_table, sin_table, rows, time, heads, dim, inverse);
                d->ops->rope(d->stream, dtype, x.data, cos_table, sin_table, rows, time, heads, dim,
                             inverse);
                ref_check(inverse ? &back : &there, dtype, x.data, x.exact, x.count);
                for (uint64_t i = 0; i < x.count; i++) x.exact[i] = ref_value(dtype, x.data, i);
            }
            free(cos_table), free(sin_table);
            ref_tensor_free(d, &x);
            ref_tensor_free(d, &angles);
        }
    }
    ref_report_print(&there);
    ref_report_print(&back);
}

static double rope_loss(void *ctx) {
    struct graph *g = ctx;
    memcpy(g->out, g->x.exact, g->x.count * sizeof(double));
    ref_rope(g->out, g->y.data, (const float *)g->y.data + 3, 1, 1, 1, 6, 0);
    return ref_dot(g->out, g->dout.exact, g->x.count);
}

/* The backward of a rotation is the rotation back: shown by differences, not by the formula. */
static void rope_inverse_is_the_gradient(void **state) {
    (void)state;
    struct ref_report back = {.name = "rope by differences", .limit = 4 * unit};
    ref_seed(3);
    for (struct ref_device *d = devices; d < devices + device_count; d++) {
        struct graph g = {.x = ref_tensor_new(d, SW_FP32, 6, 1.0),
                          .y = ref_tensor_new(d, SW_FP32, 6, 1.0),
                          .dout = ref_tensor_new(d, SW_FP32, 6, 1.0),
                          .out = calloc(6, sizeof(double))};
        double want[6];
        ref_differences(want, g.x.exact, 6, rope_loss, &g);
        d->ops->rope(d->stream, SW_FP32, g.dout.data, g.y.data, (const float *)g.y.data + 3, 1, 1,
                     1, 6, 1);
        ref_check(&back, SW_FP32, g.dout.data, want, 6);
        ref_tensor_free(d, &g.x);
        ref_tensor_free(d, &g.y);
        ref_tensor_free(d, &g.dout);
        free(g.out);
    }
    ref_report_print(&back);
}

static double swiglu_loss(void *ctx) {
    struct graph *g = ctx;
    ref_swiglu(g->out, g->x.exact, g->y.exact, g->x.count);
    return ref_dot(g->out, g->dout.exact, g->x.count);
}

/* The exponential is within 3 units and at most nine roundings surround it. */
static void swiglu_matches_double_and_differences(void **state) {
    (void)state;
    struct ref_report there = {.name = "swiglu forward", .limit = 12 * unit};
    struct ref_report back = {.name = "swiglu backward", .limit = 16 * unit};
    ref_seed(4);
    EACH_DEVICE_AND_DTYPE(d, dtype) {
        static const uint64_t counts[] = {1, 15, 33, 131};
        for (size_t c = 0; c < sizeof(counts) / sizeof(counts[0]); c++) {
            const uint64_t count = counts[c];
            struct graph g = {.x = ref_tensor_new(d, dtype, count, 9.0),
                              .y = ref_tensor_new(d, dtype, count, 2.0),
                              .dout = ref_tensor_new(d, dtype, count, 1.0),
                              .out = calloc(count, sizeof(double))};
            struct ref_tensor out = ref_tensor_new(d, dtype, count, 0.0);
            double *dgate = calloc(count, sizeof(double)), *dup = calloc(count, sizeof(double));
            d->ops->swiglu(d->stream, dtype, out.data, g.x.data, g.y.data, count);
            swiglu_loss(&g);
            ref_check(&there, dtype, out.data, g.out, count);
            ref_differences(dgate, g.x.exact, count, swiglu_loss, &g);
            ref_differences(dup, g.y.exact, count, swiglu_loss, &g);
            /* in place: the gradients take the places of what they are gradients of */
            d->ops->swiglu_backward(d->stream, dtype, g.x.data, g.y.data, g.dout.data, g.x.data,
                                    g.y.data, count);
            ref_check(&back, dtype, g.x.data, dgate, count);
            ref_check(&back, dtype, g.y.data, dup, count);
            struct ref_tensor *all[] = {&g.x, &g.y, &g.dout, &out};
            for (size_t i = 0; i < 4; i++) ref_tensor_free(d, all[i]);
            free(g.out), free(dgate), free(dup);
        }
    }
    ref_report_print(&there);
    ref_report_print(&back);
}

static void swiglu_of_extreme_gates_stays_finite(void **state) {
    (void)state;
    for (struct ref_device *d = devices; d < devices + device_count; d++) {
        float gate[4] = {-1e30f, -100.0f, 100.0f, 1e30f}, up[4] = {1, 1, 1, 1}, out[4];
        float dout[4] = {1, 1, 1, 1}, dgate[4], dup[4];
        d->ops->swiglu(d->stream, SW_FP32, out, gate, up, 4);
        d->ops->swiglu_backward(d->stream, SW_FP32, dgate, dup, dout, gate, up, 4);
        assert_true(fabsf(out[1]) < 1e-30f && out[2] == 100.0f && out[3] == 1e30f);
        assert_true(fabsf(dgate[0]) < 1e-6f && fabsf(dgate[1]) < 1e-30f);
        assert_true(dgate[2] == 1.0f && dgate[3] == 1.0f);
        gate[0] = NAN;
        d->ops->swiglu(d->stream, SW_FP32, out, gate, up, 1);
        assert_true(isnan(out[0]));
    }
}

static const struct sw_host_isa *isa_named(const char *name) {
    const struct sw_host_isa *isa = sw_host_isas;
    while (strcmp(isa->name, name) != 0) isa++;
    return isa;
}

/* Every 1,009th float of the range, on both sides of zero: 2^-22.4 relative, as promised. */
static void exp_keeps_its_bound(void **state) {
    (void)state;
    enum { LOT = 4096 };
    static float x[LOT], y[LOT];
    for (struct ref_device *d = devices; d < devices + device_count; d++) {
        const struct sw_host_pointwise *kernels = isa_named(d->isa)->pointwise;
        double worst = 0.0;
        for (int sign = 0; sign < 2; sign++) {
            const uint32_t end = sw_f32_bits(sign ? -87.33f : 88.37f);
            for (uint32_t bits = sw_f32_bits(sign ? -1e-9f : 1e-9f); bits <= end;) {
                int count = 0;
                for (; count < LOT && bits <= end; bits += 1009)
                    x[count++] = sw_f32_from_bits(bits);
                kernels->exp(y, x, (uint64_t)count);
                for (int i = 0; i < count; i++)
                    worst = fmax(worst, fabs((double)y[i] / exp((double)x[i]) - 1.0));
            }
        }
        print_message("exp (%s): worst relative error 2^%.2f, limit 2^-22.40\n", d->isa,
                      log2(worst));
        assert_true(worst <= exp2(-22.4));
        const float edge[4] = {-88.0f, -INFINITY, 89.0f, NAN};
        kernels->exp(y, edge, 4);
        assert_true(y[0] == 0.0f && y[1] == 0.0f && y[2] > 2e38f && isnan(y[3]));
    }
}

static double cross_entropy_loss(void *ctx) {
    struct graph *g = ctx;
    ref_cross_entropy(g->out, g->x.exact, g->targets, g->mask, g->n, g->width);
    double sum = 0.0;
    for (uint64_t i = 0; i < g->n; i++) sum += g->out[i];
    return sum;
}

/* Columns [first, first + width) of a matrix [n][of], to or from a dense one. */
static void cut_columns(void *whole, void *part, uint64_t element, uint64_t n, uint64_t of,
                        uint64_t first, uint64_t width, int back) {
    for (uint64_t i = 0; i < n; i++) {
        char *there = (char *)whole + (i * of + first) * element;
        char *here = (char *)part + i * width * element;
        memcpy(back ? there : here, back ? here : there, width * element);
    }
}

/* The columns come `step` at a time, the last ones fewer. */
static void softmax_forward(struct ref_device *d, const struct graph *g, uint64_t step,
                            float *stats, float *loss) {
    float *part = calloc(g->n * step, sizeof(*part));
    memset(stats, 0xFF, g->n * 3 * sizeof(*stats)); /* NaN: what begins afresh does not see it */
    for (uint64_t first = 0; first < g->width; first += step) {
        const uint64_t width = g->width - first < step ? g->width - first : step;
        cut_columns(g->x.data, part, sizeof(*part), g->n, g->width, first, width, 0);
        d->ops->softmax_stats(d->stream, stats, part, g->targets, g->n, width, first, first == 0);
    }
    d->ops->softmax_loss(d->stream, loss, stats, g->mask, g->n);
    free(part);
}

static void softmax_gradient(struct ref_device *d, enum sw_dtype dtype, const struct graph *g,
                             uint64_t step, float scale, const float *stats, void *out) {
    float *part = calloc(g->n * step, sizeof(*part));
    void *rounded = calloc(g->n * step, sizeof(float));
    for (uint64_t first = 0; first < g->width; first += step) {
        const uint64_t width = g->width - first < step ? g->width - first : step;
        void *to = dtype == SW_FP32 ? (void *)part : rounded; /* in place where it may be */
        cut_columns(g->x.data, part, sizeof(*part), g->n, g->width, first, width, 0);
        d->ops->softmax_backward(d->stream, dtype, to, part, stats, g->targets, g->mask, scale,
                                 g->n, width, first);
        cut_columns(out, to, sw_dtype_bytes(dtype), g->n, g->width, first, width, 1);
    }
    free(part), free(rounded);
}

/* The maximum and the target's logit are values of the row, exactly. */
static void check_stats(const struct graph *g, const float *stats) {
    for (uint64_t i = 0; i < g->n; i++) {
        const double *row = g->x.exact + i * g->width;
        double most = row[0];
        for (uint64_t c = 1; c < g->width; c++) most = fmax(most, row[c]);
        assert_true((double)stats[3 * i] == most);
        assert_true((double)stats[3 * i + 2] == row[g->targets[i]]);
    }
}

/* A sum of `vocab` exponentials of 3 units each: at most vocab + 8 roundings to a loss or a
 * gradient. A span of 4,096 is summed at a time, and lanes divide that by four at least. Each part
 * after the first adds an exponential, a product and the rounding of the joint sum. */
static void softmax_case(struct ref_device *d, enum sw_dtype dtype, uint64_t n, uint64_t vocab,
                         uint64_t step, int masked, struct ref_report *there,
                         struct ref_report *back) {
    struct graph g = {.n = n, .width = vocab, .x = ref_tensor_new(d, SW_FP32, n * vocab, 6.0)};
    struct ref_tensor loss = ref_tensor_new(d, SW_FP32, n, 0.0);
    struct ref_tensor stats = ref_tensor_new(d, SW_FP32, n * 3, 0.0);
    struct ref_tensor dlogits = ref_tensor_new(d, dtype, n * vocab, 0.0);
    double *want = calloc(n * vocab, sizeof(double));
    const float scale = 0.37f;
    g.out = calloc(n, sizeof(double));
    g.targets = calloc(n, sizeof(int32_t));
    g.mask = masked ? calloc(n, 1) : NULL;
    for (uint64_t i = 0; i < n; i++) g.targets[i] = (int32_t)(ref_random() % vocab);
    for (uint64_t i = 0; i < n && masked; i++) g.mask[i] = i % 3 != 1;
    const double parts = (double)((vocab + step - 1) / step);
    const double limit = ((double)vocab / (vocab > 100 ? 4 : 1) + 8 + 5 * parts) * unit;
    there->limit = limit;
    softmax_forward(d, &g, step, stats.data, loss.data);
    check_stats(&g, stats.data);
    cross_entropy_loss(&g);
    ref_check(there, SW_FP32, loss.data, g.out, n);
    if (vocab < 100) {
        back->limit = limit;
        softmax_gradient(d, dtype, &g, step, scale, stats.data, dlogits.data);
        ref_differences(want, g.x.exact, n * vocab, cross_entropy_loss, &g);
        for (uint64_t i = 0; i < n * vocab; i++) want[i] *= (double)scale;
        ref_check(back, dtype, dlogits.data, want, n * vocab);
    }
    struct ref_tensor *all[] = {&g.x, &loss, &stats, &dlogits};
    for (size_t i = 0; i < 4; i++) ref_tensor_free(d, all[i]);
    free(want), free(g.out), free(g.targets), free(g.mask);
}

static void softmax_in_parts_matches_double_and_differences(void **state) {
    (void)state;
    struct ref_report there = {.name = "cross-entropy forward"};
    struct ref_report back = {.name = "cross-entropy backward"};
    ref_seed(5);
    EACH_DEVICE_AND_DTYPE(d, dtype) {
        softmax_case(d, dtype, 5, 37, 37, 0, &there, &back);
        softmax_case(d, dtype, 5, 37, 16, 0, &there, &back);
        softmax_case(d, dtype, 4, 29, 29, 1, &there, &back);
        softmax_case(d, dtype, 4, 29, 7, 1, &there, &back);
        softmax_case(d, dtype, 3, 9, 1, 0, &there, &back);
        softmax_case(d, dtype, 2, 9001, 9001, 0, &there, &back);
        softmax_case(d, dtype, 2, 9001, 1808, 0, &there, &back);
    }
    ref_report_print(&there);
    ref_report_print(&back);
}

/* Maxima far apart, rising and falling: no part's sum may count for more than its share. */
static void softmax_parts_of_other_sizes_are_weighed(void **state) {
    (void)state;
    for (struct ref_device *d = devices; d < devices + device_count; d++)
        for (int falling = 0; falling < 2; falling++) {
            float logits[48], loss = 0.0f, stats[3];
            const int32_t target = 20;
            for (int c = 0; c < 48; c++) logits[c] = 90.0f * (float)(falling ? 2 - c / 16 : c / 16);
            for (int part = 0; part < 3; part++)
                d->ops->softmax_stats(d->stream, stats, logits + 16 * part, &target, 1, 16,
                                      16 * (uint64_t)part, part == 0);
            d->ops->softmax_loss(d->stream, &loss, stats, NULL, 1);
            assert_true(stats[0] == 180.0f && stats[1] == 16.0f && stats[2] == 90.0f);
            assert_true(fabs((double)loss - (90.0 + log(16.0))) <= 92.0 * 2 * unit);
        }
}

static void losses_of_nonfinite_logits_are_not_finite(void **state) {
    (void)state;
    static const int places[] = {0, 1, 15, 16, 17, 31, 32, 39};
    for (struct ref_device *d = devices; d < devices + device_count; d++)
        for (size_t p = 0; p < sizeof(places) / sizeof(places[0]); p++)
            for (int kind = 0; kind < 2; kind++)
                for (uint64_t step = 16; step <= 40; step += 24) {
                    float logits[40] = {0}, loss = 0.0f, stats[3];
                    const int32_t target = 3;
                    logits[places[p]] = kind ? INFINITY : NAN;
                    for (uint64_t first = 0; first < 40; first += step)
                        d->ops->softmax_stats(d->stream, stats, logits + first, &target, 1,
                                              40 - first < step ? 40 - first : step, first,
                                              first == 0);
                    d->ops->softmax_loss(d->stream, &loss, stats, NULL, 1);
                    assert_false(isfinite(loss));
                }
}

static void a_target_without_its_column_has_no_loss(void **state) {
    (void)state;
    for (struct ref_device *d = devices; d < devices + device_count; d++) {
        const float logits[16] = {0};
        const int32_t targets[2] = {16, -1};
        float loss = 0.0f, stats[3];
        for (int i = 0; i < 2; i++) {
            d->ops->softmax_stats(d->stream, stats, logits, &targets[i], 1, 16, 0, 1);
            d->ops->softmax_loss(d->stream, &loss, stats, NULL, 1);
            assert_true(isnan(loss));
        }
    }
}

/* Tokens of the whole vocabulary against a table that holds `rows` of it. */
static void embedding_part_case(struct ref_device *d, enum sw_dtype dtype, uint64_t width,
                                uint64_t first, uint64_t rows) {
    enum { N = 300, VOCAB = 9 };
    struct ref_tensor table = ref_tensor_new(d, dtype, rows * width, 1.0);
    struct ref_tensor dout = ref_tensor_new(d, dtype, N * width, 1.0);
    struct ref_tensor out = ref_tensor_new(d, dtype, N * width, 2.0);
    struct ref_tensor grad = ref_tensor_new(d, SW_FP32, rows * width, 1.0);
    float *want = calloc(rows * width, sizeof(float));
    int32_t tokens[N];
    for (int i = 0; i < N; i++) tokens[i] = (int32_t)(ref_random() % VOCAB);
    memcpy(want, grad.data, rows * width * sizeof(float));
    d->ops->embed(d->stream, dtype, out.data, table.data, tokens, N, width, first, rows);
    d->ops->embed_backward(d->stream, dtype, grad.data, dout.data, tokens, N, width, first, rows);
    for (uint64_t i = 0; i < N; i++) {
        const uint64_t token = (uint64_t)tokens[i];
        const int is_here = token >= first && token < first + rows;
        for (uint64_t c = 0; c < width; c++) {
            const double before = out.exact[i * width + c];
            const uint64_t at = (token - first) * width + c;
            assert_true(ref_value(dtype, out.data, i * width + c) ==
                        (is_here ? table.exact[at] : before));
            if (is_here) want[at] += (float)dout.exact[i * width + c];
        }
    }
    assert_memory_equal(grad.data, want, rows * width * sizeof(float)); /* exact */
    struct ref_tensor *all[] = {&table, &dout, &out, &grad};
    for (size_t i = 0; i < 4; i++) ref_tensor_free(d, all[i]);
    free(want);
}

static void embedding_rows_are_gathered_and_summed_in_order(void **state) {
    (void)state;
    ref_seed(6);
    EACH_DEVICE_AND_DTYPE(d, dtype) {
        for (uint64_t width = 1; width < 140; width += 69) {
            embedding_part_case(d, dtype, width, 0, 9);
            embedding_part_case(d, dtype, width, 0, 4);
            embedding_part_case(d, dtype, width, 4, 3);
            embedding_part_case(d, dtype, width, 7, 2);
        }
    }
}

static void rounding_is_to_nearest_even(void **state) {
    (void)state;
    static const uint64_t counts[] = {1, 7, 4096, 40000};
    ref_seed(9);
    EACH_DEVICE_AND_DTYPE(d, dtype) {
        for (size_t c = 0; c < sizeof(counts) / sizeof(counts[0]); c++) {
            struct ref_tensor src = ref_tensor_new(d, SW_FP32, counts[c], 3.0);
            struct ref_tensor dst = ref_tensor_new(d, dtype, counts[c], 0.0);
            float *x = src.data;
            x[0] = sw_f32_from_bits(0x3F808000u); /* half way between two: to the even one */
            d->ops->round(d->stream, dtype, dst.data, x, counts[c]);
            for (uint64_t i = 0; i < counts[c]; i++) {
                const float want =
                    dtype == SW_FP32 ? x[i] : sw_f32_from_bf16(sw_bf16_from_f32(x[i]));
                assert_true(ref_value(dtype, dst.data, i) == (double)want);
            }
            ref_tensor_free(d, &src);
            ref_tensor_free(d, &dst);
        }
    }
}

/* The documented order, spelled out: element i of a block in sum i % 8, then a tree. */
static double block_sum(enum sw_dtype dtype, const void *x, uint64_t first, uint64_t count) {
    double s[8] = {0};
    for (uint64_t i = 0; i < count; i++) {
        const double value = ref_value(dtype, x, first + i);
        s[i % 8] += value * value;
    }
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}

static void round_norm_rounds_and_sums_exactly(void **state) {
    (void)state;
    static const uint64_t counts[] = {1, 7, 8, 1000, SW_NORM_BLOCK, 3 * SW_NORM_BLOCK + 5};
    ref_seed(7);
    EACH_DEVICE_AND_DTYPE(d, dtype) {
        for (size_t c = 0; c < sizeof(counts) / sizeof(counts[0]); c++) {
            const uint64_t count = counts[c], blocks = (count + SW_NORM_BLOCK - 1) / SW_NORM_BLOCK;
            struct ref_tensor src = ref_tensor_new(d, SW_FP32, count, 3.0);
            struct ref_tensor dst = ref_tensor_new(d, dtype, count, 0.0);
            double sums[8];
            struct sw_nonfinite bad = {.count = 9};
            d->ops->round_norm(d->stream, dst.data, dtype, src.data, count, sums, &bad);
            assert_int_equal(bad.count, 0);
            for (uint64_t i = 0; i < count; i++) {
                const float x = (float)src.exact[i];
                const float want = dtype == SW_FP32 ? x : sw_f32_from_bf16(sw_bf16_from_f32(x));
                assert_true(ref_value(dtype, dst.data, i) == (double)want);
            }
            for (uint64_t b = 0; b < blocks; b++) {
                const uint64_t first = b * SW_NORM_BLOCK, left = count - first;
                const double want =
                    block_sum(dtype, dst.data, first, left < SW_NORM_BLOCK ? left : SW_NORM_BLOCK);
                assert_memory_equal(&sums[b], &want, sizeof(want));
            }
            ref_tensor_free(d, &src);
            ref_tensor_free(d, &dst);
        }
    }
}

static void round_norm_counts_what_is_not_finite(void **state) {
    (void)state;
    EACH_DEVICE_AND_DTYPE(d, dtype) {
        const uint64_t count = 2 * SW_NORM_BLOCK + 100;
        struct ref_tensor src = ref_tensor_new(d, SW_FP32, count, 1.0);
        struct ref_tensor dst = ref_tensor_new(d, dtype, count, 0.0);
        double sums[3];
        struct sw_nonfinite bad;
        float *x = src.data;
        x[SW_NORM_BLOCK + 77] = -INFINITY;
        x[2 * SW_NORM_BLOCK + 99] = NAN;
        x[2 * SW_NORM_BLOCK + 1] = INFINITY;
        d->ops->round_norm(d->stream, dst.data, dtype, x, count, sums, &bad);
        assert_int_equal(bad.count, 3);
        assert_int_equal(bad.first, SW_NORM_BLOCK + 77);
        assert_int_equal(bad.is_nan, 0);
        assert_true(isfinite(sums[0]) && isinf(sums[1]) && isnan(sums[2]));
        x[5] = sw_f32_from_bits(0x7F800001u); /* its upper half alone would be an infinity */
        d->ops->round_norm(d->stream, dst.data, dtype, x, count, sums, &bad);
        assert_int_equal(bad.count, 4);
        assert_int_equal(bad.first, 5);
        assert_int_equal(bad.is_nan, 1);
        ref_tensor_free(d, &src);
        ref_tensor_free(d, &dst);
    }
}

static void sum_is_in_index_order_in_double(void **state) {
    (void)state;
    static float x[1001];
    ref_seed(8);
    double want = 0.0, got = 1.0;
    for (int i = 0; i < 1001; i++) want += (double)(x[i] = (float)ref_random() / 3.0f);
    for (struct ref_device *d = devices; d < devices + device_count; d++) {
        d->ops->sum(d->stream, &got, x, 1001);
        assert_memory_equal(&got, &want, sizeof(want));
        d->ops->sum(d->stream, &got, x, 0);
        assert_true(got == 0.0);
    }
}

/* Nothing to do is done without touching anything. */
static void empty_calls_change_nothing(void **state) {
    (void)state;
    EACH_DEVICE_AND_DTYPE(d, dtype) {
        float guard[16], before[16];
        struct sw_nonfinite bad = {.count = 5};
        struct sw_attention shape = {
            .batch = 0, .time = 0, .heads = 2, .kv_heads = 1, .head_dim = 8};
        memset(guard, 0x11, sizeof(guard));
        memcpy(before, guard, sizeof(guard));
        d->ops->embed(d->stream, dtype, guard, guard, NULL, 0, 4, 0, 4);
        d->ops->embed_backward(d->stream, dtype, guard, guard, NULL, 0, 4, 0, 4);
        d->ops->rmsnorm(d->stream, dtype, guard, guard, guard, guard, 0, 4, 1e-5f);
        d->ops->rmsnorm_backward(d->stream, dtype, guard, 0, guard, 1, guard, guard, guard, guard,
                                 0, 4, NULL);
        d->ops->rope(d->stream, dtype, guard, guard, guard, 0, 1, 1, 4, 0);
        d->ops->swiglu(d->stream, dtype, guard, guard, guard, 0);
        d->ops->swiglu_backward(d->stream, dtype, guard, guard, guard, guard, guard, 0);
        d->ops->softmax_stats(d->stream, guard, guard, NULL, 0, 4, 0, 1);
        d->ops->softmax_loss(d->stream, guard, guard, NULL, 0);
        d->ops->softmax_backward(d->stream, dtype, guard, guard, guard, NULL, NULL, 1.0f, 0, 4, 0);
        d->ops->round(d->stream, dtype, guard, before, 0);
        d->ops->round_norm(d->stream, guard, dtype, before, 0, NULL, &bad);
        d->ops->attention(d->stream, dtype, &shape, guard, guard, guard, guard, guard, guard);
        shape.batch = 1;
        d->ops->attention(d->stream, dtype, &shape, guard, guard, guard, guard, guard, guard);
        d->ops->attention_backward(d->stream, dtype, &shape, guard, guard, guard, guard, guard,
                                   guard, guard, guard, guard, guard);
        d->ops->zero(d->stream, guard, 0);
        d->ops->copy_d2h(d->stream, guard, before, 0);
        assert_memory_equal(guard, before, sizeof(guard));
        assert_int_equal(bad.count, 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rmsnorm_matches_double_and_differences),
        cmocka_unit_test(rope_turns_and_turns_back),
        cmocka_unit_test(rope_inverse_is_the_gradient),
        cmocka_unit_test(swiglu_matches_double_and_differences),
        cmocka_unit_test(swiglu_of_extreme_gates_stays_finite),
        cmocka_unit_test(exp_keeps_its_bound),
        cmocka_unit_test(softmax_in_parts_matches_double_and_differences),
        cmocka_unit_test(softmax_parts_of_other_sizes_are_weighed),
        cmocka_unit_test(losses_of_nonfinite_logits_are_not_finite),
        cmocka_unit_test(a_target_without_its_column_has_no_loss),
        cmocka_unit_test(embedding_rows_are_gathered_and_summed_in_order),
        cmocka_unit_test(rounding_is_to_nearest_even),
        cmocka_unit_test(round_norm_rounds_and_sums_exactly),
        cmocka_unit_test(round_norm_counts_what_is_not_finite),
        cmocka_unit_test(sum_is_in_index_order_in_double),
        cmocka_unit_test(empty_calls_change_nothing),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
