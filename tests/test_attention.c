/* Attention on the host device: forward against a naive double version that does hold the scores,
 * backward against central differences of it and, on larger shapes, against the naive backward,
 * which is itself compared with the differences. On every instruction set that this CPU runs. */
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

static struct sw_attention shape_of(uint32_t batch, uint32_t time, uint32_t heads,
                                    uint32_t kv_heads, uint32_t head_dim) {
    return (struct sw_attention){.batch = batch,
                                 .time = time,
                                 .heads = heads,
                                 .kv_heads = kv_heads,
                                 .head_dim = head_dim,
                                 .scale = (float)(1.0 / sqrt((double)head_dim))};
}

/* Everything one shape needs: device tensors, and naive results in double. */
struct problem {
    struct ref_device *d;
    struct sw_attention shape;
    enum sw_dtype dtype;
    uint64_t q_count, kv_count, lse_count;
    struct ref_tensor q, k, v, dout, out, lse, dq, dk, dv;
    double *want, *want_lse, *want_dq, *want_dk, *want_dv;
    void *scratch;
    uint64_t scratch_bytes;
};

static void problem_open(struct problem *p, struct ref_device *d, enum sw_dtype dtype,
                         struct sw_attention shape) {
    const uint64_t rows = (uint64_t)shape.batch * shape.time;
    *p = (struct problem){.d = d, .shape = shape, .dtype = dtype};
    p->q_count = rows * shape.heads * shape.head_dim;
    p->kv_count = rows * shape.kv_heads * shape.head_dim;
    p->lse_count = rows * shape.heads;
    p->q = ref_tensor_new(d, dtype, p->q_count, 1.5);
    p->k = ref_tensor_new(d, dtype, p->kv_count, 1.5);
    p->v = ref_tensor_new(d, dtype, p->kv_count, 1.0);
    p->dout = ref_tensor_new(d, dtype, p->q_count, 1.0);
    p->out = ref_tensor_new(d, dtype, p->q_count, 0.0);
    p->lse = ref_tensor_new(d, SW_FP32, p->lse_count, 0.0);
    p->dq = ref_tensor_new(d, dtype, p->q_count, 0.0);
    p->dk = ref_tensor_new(d, dtype, p->kv_count, 0.0);
    p->dv = ref_tensor_new(d, dtype, p->kv_count, 0.0);
    p->want = calloc(p->q_count, sizeof(double));
    p->want_lse = calloc(p->lse_count, sizeof(double));
    p->want_dq = calloc(p->q_count, sizeof(double));
    p->want_dk = calloc(p->kv_count, sizeof(double));
    p->want_dv = calloc(p->kv_count, sizeof(double));
    p->scratch_bytes = d->ops->attention_scratch_bytes(d->device, &shape);
    assert_int_equal(d->ops->alloc(d->device, p->scratch_bytes + 4096, &p->scratch), 0);
    memset(p->scratch, 0xFF, p->scratch_bytes); /* NaN: nothing may rely on what lies there */
    memset((char *)p->scratch + p->scratch_bytes, 0x5A, 4096);
}

static void problem_close(struct problem *p) {
    for (int i = 0; i < 4096; i++)
        assert_int_equal(((unsigned char *)p->scratch)[p->scratch_bytes + (uint64_t)i], 0x5A);
    struct ref_tensor *all[] = {&p->q,   &p->k,  &p->v,  &p->dout, &p->out,
                                &p->lse, &p->dq, &p->dk, &p->dv};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) ref_tensor_free(p->d, all[i]);
    p->d->ops->free(p->d->device, p->scratch, p->scratch_bytes + 4096);
    free(p->want), free(p->want_lse), free(p->want_dq), free(p->want_dk), free(p->want_dv);
}

static void run_forward(struct problem *p) {
    const struct ref_device *d = p->d;
    assert_int_equal(d->ops->attention(d->stream, p->dtype, &p->shape, p->out.data, p->lse.data,
                                       p->q.data, p->k.data, p->v.data, p->scratch),
                     0);
}

static void run_backward(struct problem *p) {
    const struct ref_device *d = p->d;
    assert_int_equal(d->ops->attention_backward(d->stream, p->dtype, &p->shape, p->dq.data,
                                                p->dk.data, p->dv.data, p->dout.data, p->out.data,
                                                p->lse.data, p->q.data, p->k.data, p->v.data,
                                                p->scratch),
                     0);
}

/* A score is a sum of head_dim products of up to 1.5^2 / sqrt(head_dim) each, so it is off by up to
 * head_dim roundings of a third of sqrt(head_dim); it enters the exponent. Sums over up to `time`
 * keys and some ten further roundings follow. Backward uses scores twice and sums over heads as
 * well. */
static double forward_limit(const struct sw_attention *s) {
    const double dim = s->head_dim;
    return (dim * sqrt(dim) / 3.0 + s->time + 10.0) * 0x1p-24;
}

static double backward_limit(const struct sw_attention *s) {
    return 2.0 * forward_limit(s) + (double)s->heads / s->kv_heads * s->time * 0x1p-24;
}

static double attention_loss(void *ctx) {
    struct problem *p = ctx;
    ref_attention(p->want, NULL, p->q.exact, p->k.exact, p->v.exact, &p->shape);
    return ref_dot(p->want, p->dout.exact, p->q_count);
}

static void forward_matches_double(void **state) {
    (void)state;
    const struct sw_attention shapes[] = {
        shape_of(1, 1, 1, 1, 8),     shape_of(2, 5, 4, 2, 16),  shape_of(1, 63, 3, 1, 80),
        shape_of(1, 64, 2, 2, 64),   shape_of(2, 65, 5, 5, 10), shape_of(1, 150, 6, 2, 96),
        shape_of(1, 193, 9, 1, 128), shape_of(3, 128, 8, 4, 1),
    };
    struct ref_report report = {.name = "attention forward"};
    ref_seed(11);
    for (struct ref_device *d = devices; d < devices + device_count; d++)
        for (size_t c = 0; c < sizeof(shapes) / sizeof(shapes[0]); c++)
            for (int dtype = SW_BF16; dtype <= SW_FP32; dtype++) {
                struct problem p;
                problem_open(&p, d, (enum sw_dtype)dtype, shapes[c]);
                report.limit = forward_limit(&shapes[c]);
                ref_attention(p.want, p.want_lse, p.q.exact, p.k.exact, p.v.exact, &p.shape);
                run_forward(&p);
                ref_check(&report, p.dtype, p.out.data, p.want, p.q_count);
                /* the error of a score, and roundings of values up to four */
                for (uint64_t i = 0; i < p.lse_count; i++)
                    assert_true(fabs(ref_value(SW_FP32, p.lse.data, i) - p.want_lse[i]) <=
                                4.0 * report.limit);
                problem_close(&p);
            }
    ref_report_print(&report);
}

static void backward_matches_differences(void **state) {
    (void)state;
    static const uint32_t short_ones[2 * 5] = {0, 0, 2, 2, 4, 0, 1, 1, 1, 1};
    uint32_t across_a_tile[67];
    struct sw_attention shapes[] = {shape_of(2, 5, 4, 2, 6), shape_of(1, 67, 2, 1, 5),
                                    shape_of(2, 5, 4, 2, 6), shape_of(1, 67, 2, 1, 5)};
    ref_starts(across_a_tile, 1, 67, (const uint32_t[]){30, 35}, 2);
    shapes[2].starts = short_ones;
    shapes[3].starts = across_a_tile;
    struct ref_report report = {.name = "attention backward"};
    struct ref_report naive = {.name = "attention backward, naive", .limit = 1e-9};
    for (size_t c = 0; c < sizeof(shapes) / sizeof(shapes[0]); c++) {
        struct problem first;
        for (struct ref_device *d = devices; d < devices + device_count; d++) {
            struct problem p;
            ref_seed(12); /* equal problems: the differences are taken once */
            problem_open(&p, d, SW_FP32, shapes[c]);
            if (d == devices) {
                ref_differences(p.want_dq, p.q.exact, p.q_count, attention_loss, &p);
                ref_differences(p.want_dk, p.k.exact, p.kv_count, attention_loss, &p);
                ref_differences(p.want_dv, p.v.exact, p.kv_count, attention_loss, &p);
                first = p;
            }
            run_forward(&p);
            run_backward(&p);
            report.limit = backward_limit(&shapes[c]);
            ref_check(&report, SW_FP32, p.dq.data, first.want_dq, p.q_count);
            ref_check(&report, SW_FP32, p.dk.data, first.want_dk, p.kv_count);
            ref_check(&report, SW_FP32, p.dv.data, first.want_dv, p.kv_count);
            if (d != devices) problem_close(&p);
        }
        double *dq = calloc(first.q_count, sizeof(double));
        double *dk = calloc(first.kv_count, sizeof(double));
        double *dv = calloc(first.kv_count, sizeof(double));
        attention_loss(&first);
        ref_attention_backward(dq, dk, dv, first.dout.exact, first.want, first.q.exact,
                               first.k.exact, first.v.exact, &first.shape);
        for (uint64_t i = 0; i < first.q_count; i++)
            assert_true(fabs(dq[i] - first.want_dq[i]) < naive.limit);
        for (uint64_t i = 0; i < first.kv_count; i++)
            assert_true(fabs(dk[i] - first.want_dk[i]) < naive.limit &&
                        fabs(dv[i] - first.want_dv[i]) < naive.limit);
        free(dq), free(dk), free(dv);
        problem_close(&first);
    }
    ref_report_print(&report);
}

static void backward_matches_naive_on_larger_shapes(void **state) {
    (void)state;
    const struct sw_attention shapes[] = {
        shape_of(1, 1, 1, 1, 8),    shape_of(2, 64, 2, 2, 16),   shape_of(1, 63, 3, 1, 80),
        shape_of(1, 150, 6, 2, 96), shape_of(1, 193, 4, 1, 128), shape_of(2, 128, 8, 4, 1),
    };
    struct ref_report report = {.name = "attention backward, larger"};
    ref_seed(13);
    for (struct ref_device *d = devices; d < devices + device_count; d++)
        for (size_t c = 0; c < sizeof(shapes) / sizeof(shapes[0]); c++)
            for (int dtype = SW_BF16; dtype <= SW_FP32; dtype++) {
                struct problem p;
                problem_open(&p, d, (enum sw_dtype)dtype, shapes[c]);
                report.limit = backward_limit(&shapes[c]);
                run_forward(&p);
                for (uint64_t i = 0; i < p.q_count; i++)
                    p.out.exact[i] = ref_value(p.dtype, p.out.data, i);
                run_backward(&p);
                ref_attention_backward(p.want_dq, p.want_dk, p.want_dv, p.dout.exact, p.out.exact,
                                       p.q.exact, p.k.exact, p.v.exact, &p.shape);
                /* one key: the gradient of its score is zero up to a rounding of dout . v */
                if (p.shape.time > 1) {
                    ref_check(&report, p.dtype, p.dq.data, p.want_dq, p.q_count);
                    ref_check(&report, p.dtype, p.dk.data, p.want_dk, p.kv_count);
                }
                ref_check(&report, p.dtype, p.dv.data, p.want_dv, p.kv_count);
                problem_close(&p);
            }
    ref_report_print(&report);
}

/* Borders on both sides of a tile's edge, documents of one token, of a tile and of several, in rows
 * that differ. */
static const struct documents {
    uint32_t batch, time, heads, kv_heads, head_dim, count, lengths[4];
} documents[] = {
    {2, 40, 2, 1, 16, 1, {1}},          {1, 130, 4, 2, 10, 2, {63, 70}},
    {1, 130, 2, 2, 64, 1, {64}},        {2, 193, 3, 1, 24, 2, {65, 1}},
    {3, 150, 6, 2, 33, 3, {0, 3, 0}},   {2, 260, 2, 1, 8, 4, {1, 62, 2, 0}},
    {1, 300, 5, 1, 16, 2, {129, 1000}},
};

static void documents_match_double(void **state) {
    (void)state;
    struct ref_report there = {.name = "attention forward, documents"};
    struct ref_report back = {.name = "attention backward, documents"};
    ref_seed(16);
    for (struct ref_device *d = devices; d < devices + device_count; d++)
        for (size_t c = 0; c < sizeof(documents) / sizeof(documents[0]); c++)
            for (int dtype = SW_BF16; dtype <= SW_FP32; dtype++) {
                const struct documents *w = &documents[c];
                uint32_t starts[600];
                struct problem p;
                struct sw_attention shape =
                    shape_of(w->batch, w->time, w->heads, w->kv_heads, w->head_dim);
                ref_starts(starts, w->batch, w->time, w->lengths, w->count);
                shape.starts = starts;
                problem_open(&p, d, (enum sw_dtype)dtype, shape);
                there.limit = forward_limit(&shape);
                back.limit = backward_limit(&shape);
                ref_attention(p.want, p.want_lse, p.q.exact, p.k.exact, p.v.exact, &p.shape);
                run_forward(&p);
                ref_check(&there, p.dtype, p.out.data, p.want, p.q_count);
                for (uint64_t i = 0; i < p.lse_count; i++)
                    assert_true(fabs(ref_value(SW_FP32, p.lse.data, i) - p.want_lse[i]) <=
                                4.0 * there.limit);
                for (uint64_t i = 0; i < p.q_count; i++)
                    p.out.exact[i] = ref_value(p.dtype, p.out.data, i);
                run_backward(&p);
                ref_attention_backward(p.want_dq, p.want_dk, p.want_dv, p.dout.exact, p.out.exact,
                                       p.q.exact, p.k.exact, p.v.exact, &p.shape);
                if (w->count > 1 || w->lengths[0] > 1) { /* as above, of one key */
                    ref_check(&back, p.dtype, p.dq.data, p.want_dq, p.q_count);
                    ref_check(&back, p.dtype, p.dk.data, p.want_dk, p.kv_count);
                }
                ref_check(&back, p.dtype, p.dv.data, p.want_dv, p.kv_count);
                problem_close(&p);
            }
    ref_report_print(&there);
    ref_report_print(&back);
}

/* The bits of all results, in a row. */
static char *results_of(struct problem *p, uint64_t *bytes) {
    const struct ref_tensor *all[] = {&p->out, &p->lse, &p->dq, &p->dk, &p->dv};
    uint64_t at = 0;
    *bytes = 0;
    for (int i = 0; i < 5; i++) *bytes += all[i]->count * sw_dtype_bytes(all[i]->dtype);
    char *copy = malloc(*bytes);
    for (int i = 0; i < 5; i++) {
        const uint64_t n = all[i]->count * sw_dtype_bytes(all[i]->dtype);
        memcpy(copy + at, all[i]->data, n);
        at += n;
    }
    return copy;
}

static void a_row_of_one_document_has_the_same_bits(void **state) {
    (void)state;
    const uint32_t starts[2 * 150] = {0};
    ref_seed(17);
    for (struct ref_device *d = devices; d < devices + device_count; d++)
        for (int dtype = SW_BF16; dtype <= SW_FP32; dtype++) {
            struct problem p;
            uint64_t bytes;
            problem_open(&p, d, (enum sw_dtype)dtype, shape_of(2, 150, 4, 2, 20));
            run_forward(&p);
            run_backward(&p);
            char *want = results_of(&p, &bytes);
            p.shape.starts = starts;
            run_forward(&p);
            run_backward(&p);
            char *got = results_of(&p, &bytes);
            assert_memory_equal(got, want, bytes);
            free(want), free(got);
            problem_close(&p);
        }
}

/* Another document may hold anything: not a bit of the two around it changes. */
static void documents_do_not_see_each_other(void **state) {
    (void)state;
    enum { TIME = 200, FROM = 60, TO = 140, HEADS = 2, DIM = 16 };
    uint32_t starts[TIME];
    ref_starts(starts, 1, TIME, (const uint32_t[]){FROM, TO - FROM}, 2);
    ref_seed(18);
    for (struct ref_device *d = devices; d < devices + device_count; d++) {
        struct problem p;
        struct sw_attention shape = shape_of(1, TIME, HEADS, 1, DIM);
        shape.starts = starts;
        problem_open(&p, d, SW_FP32, shape);
        const struct ref_tensor *out[] = {&p.out, &p.dq, &p.dk, &p.dv};
        const struct ref_tensor *in[] = {&p.q, &p.k, &p.v, &p.dout};
        float *before[4];
        run_forward(&p);
        run_backward(&p);
        for (int n = 0; n < 4; n++) {
            before[n] = malloc(out[n]->count * sizeof(float));
            memcpy(before[n], out[n]->data, out[n]->count * sizeof(float));
            const uint64_t width = in[n]->count / TIME;
            for (uint64_t i = FROM * width; i < TO * width; i++)
                ((float *)in[n]->data)[i] = (float)(i % 7) - 2.5f;
        }
        run_forward(&p);
        run_backward(&p);
        for (int n = 0; n < 4; n++) {
            const uint64_t width = out[n]->count / TIME;
            const float *now = out[n]->data;
            assert_memory_equal(now, before[n], FROM * width * sizeof(float));
            assert_memory_equal(now + TO * width, before[n] + TO * width,
                                (TIME - TO) * width * sizeof(float));
            assert_memory_not_equal(now + FROM * width, before[n] + FROM * width,
                                    (TO - FROM) * width * sizeof(float));
            free(before[n]);
        }
        problem_close(&p);
    }
}

/* What lies in the future must not change a bit. */
static void later_positions_do_not_matter(void **state) {
    (void)state;
    enum { CUT = 70, TIME = 130 };
    ref_seed(14);
    for (struct ref_device *d = devices; d < devices + device_count; d++) {
        struct problem p;
        problem_open(&p, d, SW_FP32, shape_of(1, TIME, 2, 1, 16));
        run_forward(&p);
        const uint64_t kept = CUT * 2 * 16 * sizeof(float);
        float *before = malloc(kept);
        memcpy(before, p.out.data, kept);
        for (uint64_t i = CUT * 16; i < p.kv_count; i++) ((float *)p.k.data)[i] = -7.0f;
        for (uint64_t i = CUT * 16; i < p.kv_count; i++) ((float *)p.v.data)[i] = 3.0f;
        run_forward(&p);
        assert_memory_equal(p.out.data, before, kept);
        free(before);
        problem_close(&p);
    }
}

/* Scores far apart: the running maximum keeps every exponential in range. */
static void large_scores_stay_finite(void **state) {
    (void)state;
    ref_seed(15);
    for (struct ref_device *d = devices; d < devices + device_count; d++) {
        struct problem p;
        problem_open(&p, d, SW_FP32, shape_of(1, 130, 1, 1, 8));
        for (uint64_t i = 0; i < p.q_count; i++) ((float *)p.q.data)[i] *= 300.0f;
        run_forward(&p);
        run_backward(&p);
        for (uint64_t i = 0; i < p.q_count; i++)
            assert_true(isfinite(((float *)p.out.data)[i]) && isfinite(((float *)p.dq.data)[i]));
        problem_close(&p);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forward_matches_double),
        cmocka_unit_test(backward_matches_differences),
        cmocka_unit_test(backward_matches_naive_on_larger_shapes),
        cmocka_unit_test(documents_match_double),
        cmocka_unit_test(a_row_of_one_document_has_the_same_bits),
        cmocka_unit_test(documents_do_not_see_each_other),
        cmocka_unit_test(later_positions_do_not_matter),
        cmocka_unit_test(large_scores_stay_finite),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
