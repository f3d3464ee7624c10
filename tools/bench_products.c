/* tools/bench_products.c - the matrix products of a decoder layer, forward and both gradients. */
#include <errno.h>
#include <stdlib.h>

#include "base/log.h"
#include "kernels/products.h"
#include "tools/bench.h"
#include "tools/bench_device.h"

/* In hidden sizes, as Llama 3 has them: q and o, k and v, gate and up, down. */
static const struct {
    double out, in;
    int times; /* in a layer */
} matrices[] = {{1, 1, 2}, {0.25, 1, 2}, {3.5, 1, 2}, {1, 3.5, 1}};
enum {
    MATRICES = sizeof(matrices) / sizeof(matrices[0]),
    DIRECTIONS = SW_PRODUCT_COUNT,
    LOOKED_AT = 32
};

static struct sw_gemm product(int matrix, int direction, uint64_t tokens, uint64_t hidden) {
    return sw_product_of((enum sw_product)direction,
                         (uint64_t)(matrices[matrix].out * (double)hidden),
                         (uint64_t)(matrices[matrix].in * (double)hidden), tokens);
}

/* Eighths from -1 to 7/8: sums of their products are exact in FP32, in any order. Random, as cards
 * are faster on numbers that are not. */
static void fill(sw_bf16 *out, uint64_t count, uint64_t x) {
    for (uint64_t i = 0; i < count; i++) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        out[i] = sw_bf16_from_f32((float)((int)(x >> 60) - 8) / 8);
    }
}

struct operands {
    sw_bf16 *a, *b;
    void *c, *there[3];
    uint64_t bytes[3];
};

static int look(const struct sw_gemm *g, const struct operands *o) {
    for (uint64_t i = 0; i < LOOKED_AT; i++) {
        const uint64_t row = i * 7919 % g->m, col = (i * 104729 + 5) % g->n;
        float want = 0;
        for (uint64_t k = 0; k < g->k; k++)
            want += sw_f32_from_bf16(o->a[g->trans_a ? k * g->lda + row : row * g->lda + k]) *
                    sw_f32_from_bf16(o->b[g->trans_b ? col * g->ldb + k : k * g->ldb + col]);
        const uint64_t at = row * g->ldc + col;
        const int is_float = g->c_dtype == SW_FP32;
        const float got =
            is_float ? ((const float *)o->c)[at] : sw_f32_from_bf16(((const sw_bf16 *)o->c)[at]);
        if (!is_float) want = sw_f32_from_bf16(sw_bf16_from_f32(want));
        if (got == want) continue;
        sw_error("bench: a matrix product is %g instead of %g", (double)got, (double)want);
        return -EIO;
    }
    return 0;
}

static int open_operands(struct operands *o, const struct sw_device_handle *d,
                         const struct sw_gemm *g) {
    const uint64_t bytes[3] = {2 * g->m * g->k, 2 * g->k * g->n,
                               g->m * g->n * sw_dtype_bytes(g->c_dtype)};
    o->a = malloc(bytes[0]);
    o->b = malloc(bytes[1]);
    o->c = malloc(bytes[2]);
    if (!o->a || !o->b || !o->c) {
        sw_error("bench: no memory for the operands of products");
        return -ENOMEM;
    }
    int ret = 0;
    for (int i = 0; i < 3 && ret == 0; i++) {
        ret = d->ops->alloc(d->device, bytes[i], &o->there[i]);
        if (ret == 0) o->bytes[i] = bytes[i];
    }
    fill(o->a, g->m * g->k, 88172645463325252u);
    fill(o->b, g->k * g->n, 2463534242u);
    return ret;
}

static void close_operands(struct operands *o, const struct sw_device_handle *d) {
    for (int i = 0; i < 3; i++)
        if (o->bytes[i]) d->ops->free(d->device, o->there[i], o->bytes[i]);
    free(o->a);
    free(o->b);
    free(o->c);
}

/* Seconds of one call, queued in batches so that the wait at a batch's end does not count. */
static int time_calls(const struct sw_device_handle *d, struct sw_stream *s,
                      const struct sw_gemm *g, double seconds, double *each) {
    uint64_t calls = 0, batch = 1;
    const double start = sw_bench_now();
    double passed = 0;
    int ret = 0;
    while (ret == 0 && passed < seconds) {
        if (sw_bench_stopped()) return -EINTR;
        for (uint64_t i = 0; i < batch && ret == 0; i++) ret = d->ops->gemm(s, g);
        if (ret == 0) ret = d->ops->stream_sync(s);
        calls += batch;
        passed = sw_bench_now() - start;
        if (passed < seconds / 16) batch *= 2;
    }
    *each = passed / (double)calls;
    return ret;
}

static int measure(const struct sw_device_handle *d, struct sw_stream *s, struct sw_gemm *g,
                   struct operands *o, double seconds, double *each) {
    const struct sw_device_ops *ops = d->ops;
    g->a = o->there[0];
    g->b = o->there[1];
    g->c = o->there[2];
    int ret = ops->copy_h2d(s, o->there[0], o->a, o->bytes[0]);
    if (ret == 0) ret = ops->copy_h2d(s, o->there[1], o->b, o->bytes[1]);
    if (ret == 0) ret = ops->zero(s, o->there[2], o->bytes[2]);
    if (ret == 0) ret = ops->gemm(s, g);
    if (ret == 0) ret = ops->copy_d2h(s, o->c, o->there[2], o->bytes[2]);
    if (ret == 0) ret = ops->stream_sync(s);
    if (ret == 0) ret = look(g, o);
    return ret < 0 ? ret : time_calls(d, s, g, seconds, each);
}

int sw_bench_products(const struct sw_device_handle *d, uint64_t tokens, uint64_t hidden,
                      double seconds, double *flops_per_s) {
    struct sw_stream *stream = NULL;
    double operations = 0, passed = 0;
    int ret = d->ops->stream_create(d->device, &stream);
    if (ret == 0) ret = d->ops->prepare(stream, 1);
    for (int i = 0; i < MATRICES * DIRECTIONS && ret == 0; i++) {
        struct sw_gemm g = product(i / DIRECTIONS, i % DIRECTIONS, tokens, hidden);
        struct operands o = {0};
        double each = 0;
        ret = open_operands(&o, d, &g);
        if (ret == 0) ret = measure(d, stream, &g, &o, seconds / (MATRICES * DIRECTIONS), &each);
        close_operands(&o, d);
        operations +=
            2.0 * (double)g.m * (double)g.n * (double)g.k * matrices[i / DIRECTIONS].times;
        passed += each * matrices[i / DIRECTIONS].times;
    }
    if (stream) d->ops->stream_destroy(stream);
    *flops_per_s = ret == 0 ? operations / passed : 0;
    return ret;
}
