/* kernels/host/operators.c - the operators of the table: checks what callers owe, then runs the
 * loops of the picked instruction set inline. */
#include "kernels/host/host.h"
#include <assert.h>

static void check_tokens(const int32_t *tokens, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) assert(tokens[i] >= 0);
}

static int op_embed(struct sw_stream *s, enum sw_dtype dtype, void *out, const void *table,
                    const int32_t *tokens, uint64_t n, uint64_t width, uint64_t first_row,
                    uint64_t rows) {
    check_tokens(tokens, n);
    s->device->isa->pointwise->embed(s->device->threads, dtype, out, table, tokens, n, width,
                                     first_row, rows);
    return 0;
}

static int op_embed_backward(struct sw_stream *s, enum sw_dtype dtype, float *dtable,
                             const void *dout, const int32_t *tokens, uint64_t n, uint64_t width,
                             uint64_t first_row, uint64_t rows) {
    check_tokens(tokens, n);
    s->device->isa->pointwise->embed_backward(s->device->threads, dtype, dtable, dout, tokens, n,
                                              width, first_row, rows);
    return 0;
}

static int op_rmsnorm(struct sw_stream *s, enum sw_dtype dtype, void *out, float *rstd,
                      const void *x, const void *w, uint64_t n, uint64_t width, float eps) {
    assert(width > 0);
    s->device->isa->rows->rmsnorm(s->device->threads, dtype, out, rstd, x, w, n, width, eps);
    return 0;
}

static int op_rmsnorm_backward(struct sw_stream *s, enum sw_dtype dtype, void *dx, int add_dx,
                               float *dw, int add_dw, const void *dy, const void *x, const void *w,
                               const float *rstd, uint64_t n, uint64_t width, void *scratch) {
    assert(width > 0);
    (void)scratch; /* dw is summed by columns: no partial sums */
    s->device->isa->rows->rmsnorm_backward(s->device->threads, dtype, dx, add_dx, dw, add_dw, dy, x,
                                           w, rstd, n, width);
    return 0;
}

static uint64_t op_rmsnorm_scratch_bytes(struct sw_device *d, uint64_t n, uint64_t width) {
    (void)d, (void)n, (void)width;
    return 0;
}

static int op_rope(struct sw_stream *s, enum sw_dtype dtype, void *x, const float *cos,
                   const float *sin, uint64_t rows, uint64_t time, uint64_t heads,
                   uint64_t head_dim, int inverse) {
    assert(time > 0 && head_dim % 2 == 0);
    s->device->isa->pointwise->rope(s->device->threads, dtype, x, cos, sin, rows, time, heads,
                                    head_dim, inverse);
    return 0;
}

static void check_shape(const struct sw_attention *shape) {
    assert(shape->kv_heads > 0 && shape->heads % shape->kv_heads == 0);
    assert(shape->head_dim > 0);
}

/* Starts lie in this device's memory, so they can be looked at. */
static void check_starts(const struct sw_attention *shape) {
    for (uint64_t at = 0; shape->starts && at < (uint64_t)shape->batch * shape->time; at++) {
        const uint32_t i = (uint32_t)(at % shape->time), start = shape->starts[at];
        assert(start <= i && (i == 0 || start >= shape->starts[at - 1]));
    }
}

static int op_attention(struct sw_stream *s, enum sw_dtype dtype, const struct sw_attention *shape,
                        void *out, float *lse, const void *q, const void *k, const void *v,
                        void *scratch) {
    check_shape(shape);
    check_starts(shape);
    s->device->isa->attention->forward(s->device->threads, dtype, shape, out, lse, q, k, v,
                                       scratch);
    return 0;
}

static int op_attention_backward(struct sw_stream *s, enum sw_dtype dtype,
                                 const struct sw_attention *shape, void *dq, void *dk, void *dv,
                                 const void *dout, const void *out, const float *lse, const void *q,
                                 const void *k, const void *v, void *scratch) {
    check_shape(shape);
    s->device->isa->attention->backward(s->device->threads, dtype, shape, dq, dk, dv, dout, out,
                                        lse, q, k, v, scratch);
    return 0;
}

static uint64_t op_attention_scratch_bytes(struct sw_device *d, const struct sw_attention *shape) {
    check_shape(shape);
    return d->isa->attention->scratch_bytes(d->threads, shape);
}

static int op_swiglu(struct sw_stream *s, enum sw_dtype dtype, void *out, const void *gate,
                     const void *up, uint64_t count) {
    s->device->isa->pointwise->swiglu(s->device->threads, dtype, out, gate, up, count);
    return 0;
}

static int op_swiglu_backward(struct sw_stream *s, enum sw_dtype dtype, void *dgate, void *dup,
                              const void *dout, const void *gate, const void *up, uint64_t count) {
    s->device->isa->pointwise->swiglu_backward(s->device->threads, dtype, dgate, dup, dout, gate,
                                               up, count);
    return 0;
}

static int op_softmax_stats(struct sw_stream *s, float *stats, const float *logits,
                            const int32_t *targets, uint64_t n, uint64_t width,
                            uint64_t first_column, int begin) {
    assert(width > 0);
    s->device->isa->rows->softmax_stats(s->device->threads, stats, logits, targets, n, width,
                                        first_column, begin);
    return 0;
}

static int op_softmax_loss(struct sw_stream *s, float *loss, const float *stats,
                           const uint8_t *mask, uint64_t n) {
    s->device->isa->rows->softmax_loss(s->device->threads, loss, stats, mask, n);
    return 0;
}

static int op_softmax_backward(struct sw_stream *s, enum sw_dtype dtype, void *dlogits,
                               const float *logits, const float *stats, const int32_t *targets,
                               const uint8_t *mask, float scale, uint64_t n, uint64_t width,
                               uint64_t first_column) {
    assert(width > 0);
    s->device->isa->rows->softmax_backward(s->device->threads, dtype, dlogits, logits, stats,
                                           targets, mask, scale, n, width, first_column);
    return 0;
}

static int op_sum(struct sw_stream *s, double *out, const float *x, uint64_t n) {
    double total = 0.0;
    (void)s;
    for (uint64_t i = 0; i < n; i++) total += (double)x[i];
    *out = total;
    return 0;
}

static int op_round(struct sw_stream *s, enum sw_dtype dtype, void *dst, const float *src,
                    uint64_t count) {
    assert(count == 0 || dst != (const void *)src);
    s->device->isa->pointwise->round(s->device->threads, dtype, dst, src, count);
    return 0;
}

static int op_round_norm(struct sw_stream *s, void *dst, enum sw_dtype dst_dtype, const float *src,
                         uint64_t count, double *block_sums, struct sw_nonfinite *bad) {
    assert(dst != (const void *)src);
    s->device->isa->pointwise->round_norm(s->device->threads, dst, dst_dtype, src, count,
                                          block_sums, bad);
    return 0;
}

static int op_adam(struct sw_stream *s, const struct sw_device_adam_step *step,
                   const struct sw_device_adam_chunk *chunk) {
    assert(s->device->adam);
    s->device->adam(step, chunk, s->device->adam_ctx);
    return 0;
}

void sw_host_operators(struct sw_device_ops *ops) {
    ops->embed = op_embed;
    ops->embed_backward = op_embed_backward;
    ops->rmsnorm = op_rmsnorm;
    ops->rmsnorm_backward = op_rmsnorm_backward;
    ops->rmsnorm_scratch_bytes = op_rmsnorm_scratch_bytes;
    ops->gemm = sw_host_gemm;
    ops->rope = op_rope;
    ops->attention = op_attention;
    ops->attention_backward = op_attention_backward;
    ops->attention_scratch_bytes = op_attention_scratch_bytes;
    ops->swiglu = op_swiglu;
    ops->swiglu_backward = op_swiglu_backward;
    ops->softmax_stats = op_softmax_stats;
    ops->softmax_loss = op_softmax_loss;
    ops->softmax_backward = op_softmax_backward;
    ops->sum = op_sum;
    ops->round = op_round;
    ops->round_norm = op_round_norm;
    ops->adam = op_adam;
}
