/* Attention of the CUDA device, on the CPU stand-in: forward and backward against naive double
 * versions, for each head dimension that has kernels for tensor cores, and for the fallback.
 *
 * The kernels for tensor cores round twice more than FP32 ones: the softmax's weights p and the
 * gradients of scores ds, each to BF16, by 2^-8 of itself at most, before they are multiplied. So
 * an element of a product may be off by 2^-8 times the sum of the magnitudes of its terms, which
 * the reference adds up. */
#include "kernels/device.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "tests/support_cuda.h"
#include "tests/support_reference.h"

struct problem {
    struct sw_attention shape;
    enum sw_dtype dtype;
    uint64_t q_count, kv_count, lse_count, scratch_bytes;
    struct cuda_tensor q, k, v, dout, out, lse, dq, dk, dv;
    double *want_out, *want_lse, *want_dq, *want_dk, *want_dv;
    double *sum_out, *sum_dq, *sum_dk, *sum_dv; /* of the terms' magnitudes */
    struct sw_attention device_shape;           /* with the starts in device memory */
    uint32_t *starts; /* of shape, in the host's; NULL without documents */
    char *scratch;
};

static void problem_open(struct problem *p, enum sw_dtype dtype, uint32_t batch, uint32_t time,
                         uint32_t heads, uint32_t kv_heads, uint32_t head_dim) {
    const uint64_t rows = (uint64_t)batch * time;
    *p = (struct problem){.dtype = dtype};
    p->shape = p->device_shape =
        (struct sw_attention){.batch = batch,
                              .time = time,
                              .heads = heads,
                              .kv_heads = kv_heads,
                              .head_dim = head_dim,
                              .scale = (float)(1.0 / sqrt((double)head_dim))};
    p->q_count = rows * heads * head_dim;
    p->kv_count = rows * kv_heads * head_dim;
    p->lse_count = rows * heads;
    struct cuda_tensor *tensors[] = {&p->q,  &p->k,  &p->v,  &p->dout, &p->out,
                                     &p->dq, &p->dk, &p->dv, &p->lse};
    const uint64_t counts[] = {p->q_count, p->kv_count, p->kv_count, p->q_count,  p->q_count,
                               p->q_count, p->kv_count, p->kv_count, p->lse_count};
    for (int i = 0; i < 9; i++)
        *tensors[i] =
            cuda_tensor_new(&cuda_dev, i == 8 ? SW_FP32 : dtype, counts[i], i < 2 ? 1.5 : 1.0);
    double **wants[] = {&p->want_out, &p->want_dq, &p->want_dk, &p->want_dv, &p->want_lse,
                        &p->sum_out,  &p->sum_dq,  &p->sum_dk,  &p->sum_dv};
    const uint64_t sizes[] = {p->q_count, p->q_count, p->kv_count, p->kv_count, p->lse_count,
                              p->q_count, p->q_count, p->kv_count, p->kv_count};
    for (int i = 0; i < 9; i++) *wants[i] = calloc(sizes[i] + 1, sizeof(double));
    p->scratch_bytes = cuda_dev.ops->attention_scratch_bytes(cuda_dev.device, &p->shape);
    char *marked = malloc(p->scratch_bytes + 4096);
    memset(marked, 0xFF, p->scratch_bytes); /* NaN: nothing may rely on what lies there */
    memset(marked + p->scratch_bytes, 0x5A, 4096);
    p->scratch = cuda_bytes_new(&cuda_dev, marked, p->scratch_bytes + 4096);
    free(marked);
}

static void problem_close(struct problem *p) {
    char behind[4096];
    cuda_bytes_get(&cuda_dev, behind, p->scratch + p->scratch_bytes, sizeof(behind));
    for (int i = 0; i < 4096; i++) assert_int_equal(behind[i], 0x5A);
    struct cuda_tensor *tensors[] = {&p->q,  &p->k,  &p->v,  &p->dout, &p->out,
                                     &p->dq, &p->dk, &p->dv, &p->lse};
    for (int i = 0; i < 9; i++) cuda_tensor_free(tensors[i]);
    double *all[] = {p->want_out, p->want_dq, p->want_dk, p->want_dv, p->want_lse,
                     p->sum_out,  p->sum_dq,  p->sum_dk,  p->sum_dv};
    for (int i = 0; i < 9; i++) free(all[i]);
    cuda_dev.ops->free(cuda_dev.device, p->scratch, p->scratch_bytes + 4096);
    if (p->starts) cuda_dev.ops->free(cuda_dev.device, (void *)p->device_shape.starts, 0);
    free(p->starts);
}

/* Documents of these lengths, as ref_starts() has them. */
static void cut_documents(struct problem *p, const uint32_t *lengths, uint32_t count) {
    const uint64_t bytes = (uint64_t)p->shape.batch * p->shape.time * sizeof(*p->starts);
    p->starts = malloc(bytes);
    ref_starts(p->starts, p->shape.batch, p->shape.time, lengths, count);
    p->shape.starts = p->starts;
    p->device_shape.starts = (const uint32_t *)cuda_bytes_new(&cuda_dev, p->starts, bytes);
}

static void run(struct problem *p) {
    assert_int_equal(cuda_dev.ops->attention(cuda_dev.stream, p->dtype, &p->device_shape,
                                             p->out.data, p->lse.data, p->q.data, p->k.data,
                                             p->v.data, p->scratch),
                     0);
    assert_int_equal(cuda_dev.ops->attention_backward(cuda_dev.stream, p->dtype, &p->device_shape,
                                                      p->dq.data, p->dk.data, p->dv.data,
                                                      p->dout.data, p->out.data, p->lse.data,
                                                      p->q.data, p->k.data, p->v.data, p->scratch),
                     0);
    struct cuda_tensor *results[] = {&p->out, &p->lse, &p->dq, &p->dk, &p->dv};
    for (int i = 0; i < 5; i++) cuda_tensor_get(results[i]);
}

/* With the weights and score gradients of one row, the magnitudes of what is added up. */
static void add_magnitudes(struct problem *p, uint64_t b, uint64_t h, uint64_t i) {
    const struct sw_attention *s = &p->shape;
    const uint64_t dim = s->head_dim, kv_head = h / (s->heads / s->kv_heads);
    const uint64_t at = ((b * s->time + i) * s->heads + h) * dim;
    const double log_sum = p->want_lse[(b * s->heads + h) * s->time + i];
    double delta = 0.0;
    for (uint64_t d = 0; d < dim; d++) delta += p->dout.exact[at + d] * p->out.exact[at + d];
    for (uint64_t j = p->starts ? p->starts[b * s->time + i] : 0; j <= i; j++) {
        const uint64_t kv = ((b * s->time + j) * s->kv_heads + kv_head) * dim;
        const double score = (double)s->scale * ref_dot(p->q.exact + at, p->k.exact + kv, dim);
        const double weight = exp(score - log_sum);
        const double dp = ref_dot(p->dout.exact + at, p->v.exact + kv, dim);
        const double ds = fabs(weight * (dp - delta) * (double)s->scale);
        for (uint64_t d = 0; d < dim; d++) {
            p->sum_out[at + d] += weight * fabs(p->v.exact[kv + d]);
            p->sum_dq[at + d] += ds * fabs(p->k.exact[kv + d]);
            p->sum_dk[kv + d] += ds * fabs(p->q.exact[at + d]);
            p->sum_dv[kv + d] += weight * fabs(p->dout.exact[at + d]);
        }
    }
}

/* As in test_attention.c: a score's roundings, in the exponent; sums over keys; some ten more. */
static double fp32_limit(const struct sw_attention *s, int back) {
    const double dim = s->head_dim;
    const double there = (dim * sqrt(dim) / 3.0 + s->time + 10.0) * 0x1p-24;
    return back ? 2.0 * there + (double)s->heads / s->kv_heads * s->time * 0x1p-24 : there;
}

static void check(const char *name, const struct problem *p, const struct cuda_tensor *got,
                  const double *want, const double *magnitudes, double limit, int rounds,
                  double *worst) {
    double largest = 0.0;
    for (uint64_t i = 0; i < got->count; i++) largest = fmax(largest, fabs(want[i]));
    for (uint64_t i = 0; i < got->count; i++) {
        const double error = fabs(ref_value(got->dtype, got->host, i) - want[i]);
        const double inside = limit * largest + (rounds ? 0x1p-8 * magnitudes[i] : 0.0);
        const double bound =
            got->dtype == SW_FP32 ? inside : inside + 0x1p-8 * (fabs(want[i]) + inside);
        if (!(error <= bound + 0x1p-133)) /* catches NaN */
            fail_msg("%s, %s, head dimension %u: element %llu is %g, not %g: off by %.2e, "
                     "allowed %.2e",
                     name, sw_dtype_name(p->dtype), p->shape.head_dim, (unsigned long long)i,
                     ref_value(got->dtype, got->host, i), want[i], error, bound);
        *worst = fmax(*worst, error / fmax(bound, 1e-300));
    }
}

/* lengths: of documents, as in ref_starts(); count 0: each row is one. */
static void documents_case(enum sw_dtype dtype, int rounds, uint32_t batch, uint32_t time,
                           uint32_t heads, uint32_t kv_heads, uint32_t head_dim,
                           const uint32_t *lengths, uint32_t count) {
    struct problem p;
    double worst[2] = {0.0, 0.0};
    problem_open(&p, dtype, batch, time, heads, kv_heads, head_dim);
    if (count) cut_documents(&p, lengths, count);
    run(&p);
    ref_attention(p.want_out, p.want_lse, p.q.exact, p.k.exact, p.v.exact, &p.shape);
    for (uint64_t i = 0; i < p.q_count; i++) p.out.exact[i] = ref_value(dtype, p.out.host, i);
    ref_attention_backward(p.want_dq, p.want_dk, p.want_dv, p.dout.exact, p.out.exact, p.q.exact,
                           p.k.exact, p.v.exact, &p.shape);
    for (uint64_t b = 0; b < batch; b++)
        for (uint64_t h = 0; h < heads; h++)
            for (uint64_t i = 0; i < time; i++) add_magnitudes(&p, b, h, i);
    const double there = fp32_limit(&p.shape, 0), back = fp32_limit(&p.shape, 1);
    check("out", &p, &p.out, p.want_out, p.sum_out, there, rounds, &worst[0]);
    for (uint64_t i = 0; i < p.lse_count; i++) /* values up to four */
        assert_true(fabs(ref_value(SW_FP32, p.lse.host, i) - p.want_lse[i]) <= 4.0 * there);
    if (time > 1 &&
        !(count == 1 &&
          lengths[0] ==
              1)) { /* of one key the score's gradient is zero up to a rounding of dout . v */
        check("dq", &p, &p.dq, p.want_dq, p.sum_dq, back, rounds, &worst[1]);
        check("dk", &p, &p.dk, p.want_dk, p.sum_dk, back, rounds, &worst[1]);
    }
    check("dv", &p, &p.dv, p.want_dv, p.sum_dv, back, rounds, &worst[1]);
    print_message("%s, head dimension %u, %u positions: forward at %.0f%%, backward at %.0f%% of "
                  "their bounds\n",
                  sw_dtype_name(dtype), head_dim, time, 100 * worst[0], 100 * worst[1]);
    problem_close(&p);
}

static void shape_case(enum sw_dtype dtype, int rounds, uint32_t batch, uint32_t time,
                       uint32_t heads, uint32_t kv_heads, uint32_t head_dim) {
    documents_case(dtype, rounds, batch, time, heads, kv_heads, head_dim, NULL, 0);
}

static void tensor_cores_match_double(void **state) {
    (void)state;
    ref_seed(21);
    shape_case(SW_BF16, 1, 2, 65, 4, 2, 64);
    shape_case(SW_BF16, 1, 1, 150, 3, 1, 64);
    shape_case(SW_BF16, 1, 1, 1, 2, 1, 64);
    shape_case(SW_BF16, 1, 1, 70, 2, 2, 80);
    shape_case(SW_BF16, 1, 1, 64, 4, 2, 96);
    shape_case(SW_BF16, 1, 1, 100, 2, 1, 128);
    shape_case(SW_BF16, 1, 1, 81, 2, 1, 256);
}

static void the_fallback_matches_double(void **state) {
    (void)state;
    ref_seed(22);
    shape_case(SW_FP32, 0, 1, 1, 1, 1, 8);
    shape_case(SW_FP32, 0, 2, 37, 4, 2, 16);
    shape_case(SW_BF16, 0, 1, 33, 3, 1, 10);
    shape_case(SW_FP32, 0, 1, 66, 2, 1, 64);
    shape_case(SW_BF16, 0, 3, 32, 4, 4, 1);
    shape_case(SW_FP32, 0, 1, 20, 1, 1, 257); /* tiles of eight */
}

#define LENGTHS(...)                                                                               \
    (const uint32_t[]){__VA_ARGS__}, sizeof((const uint32_t[]){__VA_ARGS__}) / sizeof(uint32_t)

/* Borders on both sides of the tiles' edges, documents of one token, of a tile and of several, in
 * rows that differ. */
static void documents_match_double(void **state) {
    (void)state;
    ref_seed(26);
    documents_case(SW_BF16, 1, 2, 150, 2, 1, 64, LENGTHS(63, 66, 1));
    documents_case(SW_BF16, 1, 1, 70, 1, 1, 64, LENGTHS(1));
    documents_case(SW_BF16, 1, 1, 140, 2, 2, 80, LENGTHS(64));
    documents_case(SW_BF16, 1, 2, 135, 2, 1, 96, LENGTHS(65, 31, 2));
    documents_case(SW_BF16, 1, 1, 200, 2, 1, 128, LENGTHS(20, 170));
    documents_case(SW_BF16, 1, 2, 100, 2, 1, 256, LENGTHS(15, 17, 33, 0));
    documents_case(SW_FP32, 0, 3, 100, 4, 2, 16, LENGTHS(31, 33, 0));
    documents_case(SW_BF16, 0, 1, 97, 2, 1, 10, LENGTHS(32, 1));
    documents_case(SW_FP32, 0, 1, 40, 1, 1, 257, LENGTHS(7, 10));
}

/* All results, one after the other. */
static char *results_of(const struct problem *p, uint64_t *bytes) {
    const struct cuda_tensor *all[] = {&p->out, &p->lse, &p->dq, &p->dk, &p->dv};
    uint64_t at = 0;
    *bytes = 0;
    for (int i = 0; i < 5; i++) *bytes += all[i]->count * sw_dtype_bytes(all[i]->dtype);
    char *copy = malloc(*bytes);
    for (int i = 0; i < 5; i++) {
        const uint64_t n = all[i]->count * sw_dtype_bytes(all[i]->dtype);
        memcpy(copy + at, all[i]->host, n);
        at += n;
    }
    return copy;
}

static void a_row_of_one_document_has_the_same_bits(void **state) {
    (void)state;
    ref_seed(27);
    for (int dtype = SW_BF16; dtype <= SW_FP32; dtype++) {
        struct problem p;
        uint64_t bytes;
        problem_open(&p, (enum sw_dtype)dtype, 2, 100, 2, 1, 64);
        run(&p);
        char *want = results_of(&p, &bytes);
        cut_documents(&p, LENGTHS(100));
        run(&p);
        char *got = results_of(&p, &bytes);
        assert_memory_equal(got, want, bytes);
        free(want), free(got);
        problem_close(&p);
    }
}

/* Another document may hold anything: not a bit of the two around it changes. */
static void documents_do_not_see_each_other(void **state) {
    (void)state;
    enum { TIME = 180, FROM = 50, TO = 135, HEADS = 2, DIM = 64 };
    ref_seed(28);
    for (int dtype = SW_BF16; dtype <= SW_FP32; dtype++) {
        struct problem p;
        problem_open(&p, (enum sw_dtype)dtype, 1, TIME, HEADS, 1, DIM);
        cut_documents(&p, LENGTHS(FROM, TO - FROM, TIME - TO));
        struct cuda_tensor *in[] = {&p.q, &p.k, &p.v, &p.dout};
        const struct cuda_tensor *out[] = {&p.out, &p.dq, &p.dk, &p.dv};
        char *before[4];
        run(&p);
        for (int n = 0; n < 4; n++) {
            const uint64_t row = in[n]->count / TIME * sw_dtype_bytes(p.dtype);
            const uint64_t whole = out[n]->count * sw_dtype_bytes(p.dtype);
            before[n] = malloc(whole);
            memcpy(before[n], out[n]->host, whole);
            memset((char *)in[n]->host + FROM * row, n % 2 ? 0x3F : 0xBF, (TO - FROM) * row);
            cuda_tensor_put(in[n]);
        }
        run(&p);
        for (int n = 0; n < 4; n++) {
            const uint64_t row = out[n]->count / TIME * sw_dtype_bytes(p.dtype);
            const char *now = out[n]->host;
            assert_memory_equal(now, before[n], FROM * row);
            assert_memory_equal(now + TO * row, before[n] + TO * row, (TIME - TO) * row);
            free(before[n]);
        }
        problem_close(&p);
    }
}

/* What lies in the future must not change a bit; and equal inputs give equal bits. */
static void later_positions_do_not_matter(void **state) {
    (void)state;
    enum { CUT = 70, TIME = 130, KV_HEADS = 1, HEADS = 2, DIM = 64 };
    ref_seed(23);
    for (int dtype = SW_BF16; dtype <= SW_FP32; dtype++) {
        struct problem p;
        problem_open(&p, (enum sw_dtype)dtype, 1, TIME, HEADS, KV_HEADS, DIM);
        const uint64_t bytes = sw_dtype_bytes(p.dtype), kept = CUT * HEADS * DIM * bytes;
        const uint64_t whole = p.kv_count * bytes;
        run(&p);
        char *before = malloc(kept), *dk = malloc(whole);
        memcpy(before, p.out.host, kept);
        memcpy(dk, p.dk.host, whole);
        run(&p);
        assert_memory_equal(p.dk.host, dk, whole);
        memset((char *)p.k.host + CUT * DIM * bytes, 0x3F, whole - CUT * DIM * bytes);
        memset((char *)p.v.host + CUT * DIM * bytes, 0xBF, whole - CUT * DIM * bytes);
        cuda_tensor_put(&p.k);
        cuda_tensor_put(&p.v);
        run(&p);
        assert_memory_equal(p.out.host, before, kept);
        free(before);
        free(dk);
        problem_close(&p);
    }
}

/* Scores far apart: the running maximum keeps every exponential in range. */
static void large_scores_stay_finite(void **state) {
    (void)state;
    ref_seed(24);
    struct problem p;
    problem_open(&p, SW_BF16, 1, 130, 1, 1, 64);
    for (uint64_t i = 0; i < p.q_count; i++)
        ((sw_bf16 *)p.q.host)[i] = sw_bf16_from_f32(300.0f * (float)p.q.exact[i]);
    cuda_tensor_put(&p.q);
    run(&p);
    for (uint64_t i = 0; i < p.q_count; i++)
        assert_true(isfinite(ref_value(SW_BF16, p.out.host, i)) &&
                    isfinite(ref_value(SW_BF16, p.dq.host, i)));
    problem_close(&p);
}

/* A pointer that is not aligned to 16 goes to the fallback, with results as good. */
static void unaligned_tensors_are_served(void **state) {
    (void)state;
    ref_seed(25);
    struct problem p;
    problem_open(&p, SW_BF16, 1, 20, 1, 1, 64);
    char *shifted = cuda_bytes_new(&cuda_dev, NULL, p.q_count * 2 + 16);
    double worst = 0.0;
    ref_attention(p.want_out, p.want_lse, p.q.exact, p.k.exact, p.v.exact, &p.shape);
    assert_int_equal(cuda_dev.ops->copy_h2d(cuda_dev.stream, shifted + 2, p.q.host, p.q_count * 2),
                     0);
    assert_int_equal(cuda_dev.ops->attention(cuda_dev.stream, SW_BF16, &p.shape, p.out.data,
                                             p.lse.data, shifted + 2, p.k.data, p.v.data,
                                             p.scratch),
                     0);
    cuda_tensor_get(&p.out);
    check("out", &p, &p.out, p.want_out, p.sum_out, fp32_limit(&p.shape, 0), 0, &worst);
    cuda_dev.ops->free(cuda_dev.device, shifted, 0);
    problem_close(&p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tensor_cores_match_double),
        cmocka_unit_test(the_fallback_matches_double),
        cmocka_unit_test(documents_match_double),
        cmocka_unit_test(a_row_of_one_document_has_the_same_bits),
        cmocka_unit_test(documents_do_not_see_each_other),
        cmocka_unit_test(later_positions_do_not_matter),
        cmocka_unit_test(large_scores_stay_finite),
        cmocka_unit_test(unaligned_tensors_are_served),
    };
    return cmocka_run_group_tests(tests, cuda_open, cuda_close);
}
