/* kernels/cuda/operators_cuda.c - the operators of the table: checks what callers owe, picks the
 * kernels, and enqueues them. Tokens and targets lie in device memory, so those are not looked at.
 */
#include <assert.h>
#include <errno.h>
#include "base/log.h"
#include "kernels/cuda/cuda_internal.h"
#include "kernels/cuda/launchers.h"

/* Makes the stream's device current and enqueues. */
#define ENQUEUE(s, what, call)                                                                     \
    do {                                                                                           \
        const cudaError_t current = cudaSetDevice((s)->device->index);                             \
        return sw_cuda_check((s)->device, current == cudaSuccess ? (call) : current, what);        \
    } while (0)

static int op_embed(struct sw_stream *s, enum sw_dtype dtype, void *out, const void *table,
                    const int32_t *tokens, uint64_t n, uint64_t width, uint64_t first_row,
                    uint64_t rows) {
    ENQUEUE(s, "embed",
            sw_cuda_embed(s->stream, dtype, out, table, tokens, n, width, first_row, rows));
}

static int op_embed_backward(struct sw_stream *s, enum sw_dtype dtype, float *dtable,
                             const void *dout, const int32_t *tokens, uint64_t n, uint64_t width,
                             uint64_t first_row, uint64_t rows) {
    ENQUEUE(
        s, "embed_backward",
        sw_cuda_embed_backward(s->stream, dtype, dtable, dout, tokens, n, width, first_row, rows));
}

static int op_rmsnorm(struct sw_stream *s, enum sw_dtype dtype, void *out, float *rstd,
                      const void *x, const void *w, uint64_t n, uint64_t width, float eps) {
    assert(width > 0);
    ENQUEUE(s, "rmsnorm", sw_cuda_rmsnorm(s->stream, dtype, out, rstd, x, w, n, width, eps));
}

static int op_rmsnorm_backward(struct sw_stream *s, enum sw_dtype dtype, void *dx, int add_dx,
                               float *dw, int add_dw, const void *dy, const void *x, const void *w,
                               const float *rstd, uint64_t n, uint64_t width, void *scratch) {
    assert(width > 0);
    ENQUEUE(s, "rmsnorm_backward",
            sw_cuda_rmsnorm_backward(s->stream, dtype, dx, add_dx, dw, add_dw, dy, x, w, rstd, n,
                                     width, scratch));
}

static uint64_t op_rmsnorm_scratch_bytes(struct sw_device *d, uint64_t n, uint64_t width) {
    (void)d;
    return sw_cuda_rmsnorm_scratch_bytes(n, width);
}

static int op_gemm(struct sw_stream *s, const struct sw_gemm *g) {
    const int ret = sw_cuda_check(s->device, cudaSetDevice(s->device->index), "gemm");
    return ret < 0 ? ret : sw_cuda_gemm(s, g);
}

static int op_rope(struct sw_stream *s, enum sw_dtype dtype, void *x, const float *cos,
                   const float *sin, uint64_t rows, uint64_t time, uint64_t heads,
                   uint64_t head_dim, int inverse) {
    assert(time > 0 && head_dim % 2 == 0);
    ENQUEUE(s, "rope",
            sw_cuda_rope(s->stream, dtype, x, cos, sin, rows, time, heads, head_dim, inverse));
}

static void check_shape(const struct sw_attention *shape) {
    assert(shape->kv_heads > 0 && shape->heads % shape->kv_heads == 0);
    assert(shape->head_dim > 0);
    assert(shape->scale > 0); /* the largest product is the largest score */
}

/* delta of backward. */
static uint64_t op_attention_scratch_bytes(struct sw_device *d, const struct sw_attention *shape) {
    (void)d;
    check_shape(shape);
    return (uint64_t)shape->batch * shape->time * shape->heads * sizeof(float);
}

static int is_aligned(const void *p) {
    return (uintptr_t)p % 16 == 0;
}

static int op_attention(struct sw_stream *s, enum sw_dtype dtype, const struct sw_attention *shape,
                        void *out, float *lse, const void *q, const void *k, const void *v,
                        void *scratch) {
    (void)scratch;
    check_shape(shape);
    if (shape->batch == 0 || shape->time == 0) return 0;
    if (sw_cuda_attention_is_fast(dtype, shape) && is_aligned(out) && is_aligned(q) &&
        is_aligned(k) && is_aligned(v))
        ENQUEUE(s, "attention", sw_cuda_attention(s->stream, shape, out, lse, q, k, v));
    ENQUEUE(s, "attention", sw_cuda_attention_any(s->stream, dtype, shape, out, lse, q, k, v));
}

static int op_attention_backward(struct sw_stream *s, enum sw_dtype dtype,
                                 const struct sw_attention *shape, void *dq, void *dk, void *dv,
                                 const void *dout, const void *out, const float *lse, const void *q,
                                 const void *k, const void *v, void *scratch) {
    float *delta = scratch;
    check_shape(shape);
    if (shape->batch == 0 || shape->time == 0) return 0;
    int ret = sw_cuda_check(s->device, cudaSetDevice(s->device->index), "attention_backward");
    if (ret == 0)
        ret = sw_cuda_check(s->device,
                            sw_cuda_attention_delta(s->stream, dtype, shape, delta, dout, out),
                            "attention_backward");
    if (ret < 0) return ret;
    if (sw_cuda_attention_is_fast(dtype, shape) && is_aligned(dq) && is_aligned(dk) &&
        is_aligned(dv) && is_aligned(dout) && is_aligned(q) && is_aligned(k) && is_aligned(v))
        ENQUEUE(
            s, "attention_backward",
            sw_cuda_attention_backward(s->stream, shape, dq, dk, dv, dout, lse, delta, q, k, v));
    ENQUEUE(s, "attention_backward",
            sw_cuda_attention_any_backward(s->stream, dtype, shape, dq, dk, dv, dout, lse, delta, q,
                                           k, v));
}

static int op_swiglu(struct sw_stream *s, enum sw_dtype dtype, void *out, const void *gate,
                     const void *up, uint64_t count) {
    ENQUEUE(s, "swiglu", sw_cuda_swiglu(s->stream, dtype, out, gate, up, count));
}

static int op_swiglu_backward(struct sw_stream *s, enum sw_dtype dtype, void *dgate, void *dup,
                              const void *dout, const void *gate, const void *up, uint64_t count) {
    ENQUEUE(s, "swiglu_backward",
            sw_cuda_swiglu_backward(s->stream, dtype, dgate, dup, dout, gate, up, count));
}

static int op_softmax_stats(struct sw_stream *s, float *stats, const float *logits,
                            const int32_t *targets, uint64_t n, uint64_t width,
                            uint64_t first_column, int begin) {
    assert(width > 0);
    ENQUEUE(
        s, "softmax_stats",
        sw_cuda_softmax_stats(s->stream, stats, logits, targets, n, width, first_column, begin));
}

static int op_softmax_loss(struct sw_stream *s, float *loss, const float *stats,
                           const uint8_t *mask, uint64_t n) {
    ENQUEUE(s, "softmax_loss", sw_cuda_softmax_loss(s->stream, loss, stats, mask, n));
}

static int op_softmax_backward(struct sw_stream *s, enum sw_dtype dtype, void *dlogits,
                               const float *logits, const float *stats, const int32_t *targets,
                               const uint8_t *mask, float scale, uint64_t n, uint64_t width,
                               uint64_t first_column) {
    assert(width > 0);
    ENQUEUE(s, "softmax_backward",
            sw_cuda_softmax_backward(s->stream, dtype, dlogits, logits, stats, targets, mask, scale,
                                     n, width, first_column));
}

static int op_sum(struct sw_stream *s, double *out, const float *x, uint64_t n) {
    ENQUEUE(s, "sum", sw_cuda_sum(s->stream, out, x, n));
}

static int op_round(struct sw_stream *s, enum sw_dtype dtype, void *dst, const float *src,
                    uint64_t count) {
    assert(count == 0 || dst != (const void *)src);
    ENQUEUE(s, "round", sw_cuda_round(s->stream, dtype, dst, src, count));
}

static int op_round_norm(struct sw_stream *s, void *dst, enum sw_dtype dst_dtype, const float *src,
                         uint64_t count, double *block_sums, struct sw_nonfinite *bad) {
    assert(dst != (const void *)src);
    ENQUEUE(s, "round_norm",
            sw_cuda_round_norm(s->stream, dst, dst_dtype, src, count, block_sums, bad));
}

static int op_adam(struct sw_stream *s, const struct sw_device_adam_step *step,
                   const struct sw_device_adam_chunk *chunk) {
    assert(chunk->count == 0 ||
           (chunk->range_count > 0 && chunk->ranges[chunk->range_count - 1].end == chunk->count));
    assert(!chunk->coded_moments || chunk->first % 256 == 0);
    ENQUEUE(s, "adam", sw_cuda_adam(s->stream, step, chunk));
}

void sw_cuda_operators(struct sw_device_ops *ops) {
    ops->embed = op_embed;
    ops->embed_backward = op_embed_backward;
    ops->rmsnorm = op_rmsnorm;
    ops->rmsnorm_backward = op_rmsnorm_backward;
    ops->rmsnorm_scratch_bytes = op_rmsnorm_scratch_bytes;
    ops->gemm = op_gemm;
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
