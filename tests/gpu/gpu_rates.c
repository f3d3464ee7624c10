/* Rates of a GPU through the program's device table, a JSON line each:
 *
 *     gpu_rates devices | copies | products | attention  [tiny]
 *
 * Results are looked at before they are timed. bare_rates.c does the same through CUDA itself. */
#include "kernels/device.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "tests/gpu/rates.h"

static struct sw_device_handle dev;
static struct sw_stream *streams[2];

static void print_line(enum sw_log_level level, const char *line, void *ctx) {
    (void)level;
    (void)ctx;
    fprintf(stderr, "gpu_rates: %s\n", line);
}

static void must(int ret, const char *what) {
    if (ret >= 0) return;
    fprintf(stderr, "gpu_rates: %s: error %d\n", what, -ret);
    exit(1);
}

static void *device_bytes(uint64_t bytes) {
    void *p;
    must(dev.ops->alloc(dev.device, bytes, &p), "device memory");
    return p;
}

static void *host_bytes(uint64_t bytes) {
    void *p = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    must(p ? 0 : -1, "host memory");
    return p;
}

static int wait_all(void *ctx) {
    (void)ctx;
    for (int i = 0; i < 2; i++) must(dev.ops->stream_sync(streams[i]), "a stream");
    return 0;
}

/* ---- copies ---- */

static int copy(void *ctx) {
    const struct rates_copies *c = ctx;
    int ret = 0;
    if (c->up) ret = dev.ops->copy_h2d(streams[0], c->device[0], c->host[0], c->bytes);
    if (c->down && ret == 0)
        ret = dev.ops->copy_d2h(streams[1], c->host[1], c->device[1], c->bytes);
    return ret;
}

static void copies(void) {
    struct rates_copies c = {.bytes = rates_size(256 << 20)};
    for (int i = 0; i < 2; i++) {
        c.host[i] = host_bytes(c.bytes);
        c.device[i] = device_bytes(c.bytes);
        rates_fill(c.host[i], c.bytes / 2, (uint64_t)i + 1);
        must(dev.ops->pin(dev.device, c.host[i], c.bytes), "pinning");
    }
    must(dev.ops->copy_h2d(streams[0], c.device[1], c.host[0], c.bytes), "a copy");
    must(dev.ops->stream_sync(streams[0]), "a copy");
    must(dev.ops->copy_d2h(streams[1], c.host[1], c.device[1], c.bytes), "a copy");
    wait_all(NULL);
    must(memcmp(c.host[0], c.host[1], c.bytes) == 0 ? 0 : -1, "other bytes come back");
    rates_say_copies(copy, wait_all, &c);
    for (int i = 0; i < 2; i++) {
        dev.ops->unpin(dev.device, c.host[i]);
        dev.ops->free(dev.device, c.device[i], c.bytes);
        free(c.host[i]);
    }
}

/* ---- products ---- */

static int multiply(void *ctx) {
    return dev.ops->gemm(streams[0], ctx);
}

/* Some elements of C against sums in double: FP32 sums of k terms in any order, rounded once. */
static void look_at_product(const struct sw_gemm *g, const sw_bf16 *a, const sw_bf16 *b) {
    enum { LOOKED_AT = 16 };
    const uint64_t bytes = g->m * g->n * sw_dtype_bytes(g->c_dtype);
    void *c = host_bytes(bytes);
    must(dev.ops->copy_d2h(streams[0], c, g->c, bytes), "a copy");
    must(dev.ops->stream_sync(streams[0]), "a copy");
    for (uint64_t i = 0; i < LOOKED_AT; i++) {
        const uint64_t row = i * 7919 % g->m, col = (i * 104729 + 5) % g->n;
        double want = 0.0, size = 0.0;
        for (uint64_t k = 0; k < g->k; k++) {
            const double x = sw_f32_from_bf16(a[g->trans_a ? k * g->lda + row : row * g->lda + k]);
            const double y = sw_f32_from_bf16(b[g->trans_b ? col * g->ldb + k : k * g->ldb + col]);
            want += x * y;
            size += fabs(x * y);
        }
        const uint64_t at = row * g->ldc + col;
        const double got =
            g->c_dtype == SW_FP32 ? ((float *)c)[at] : sw_f32_from_bf16(((sw_bf16 *)c)[at]);
        const double limit =
            size * (double)g->k * 0x1p-24 + (g->c_dtype == SW_BF16 ? fabs(want) * 0x1p-8 : 0.0);
        if (!(fabs(got - want) <= limit)) {
            fprintf(stderr, "gpu_rates: a product is %g instead of %g, limit %g\n", got, want,
                    limit);
            exit(1);
        }
    }
    free(c);
}

static void products(void) {
    for (int i = 0; i < MATRICES; i++)
        for (int direction = 0; direction < DIRECTIONS; direction++) {
            struct sw_gemm g = rates_product(&rates_matrices[i], direction);
            const uint64_t a_bytes = g.m * g.k * 2, b_bytes = g.k * g.n * 2,
                           c_bytes = g.m * g.n * sw_dtype_bytes(g.c_dtype);
            sw_bf16 *a = host_bytes(a_bytes), *b = host_bytes(b_bytes);
            void *a_there = device_bytes(a_bytes), *b_there = device_bytes(b_bytes);
            rates_fill(a, a_bytes / 2, 1);
            rates_fill(b, b_bytes / 2, 2);
            must(dev.ops->copy_h2d(streams[0], a_there, a, a_bytes), "a copy");
            must(dev.ops->copy_h2d(streams[0], b_there, b, b_bytes), "a copy");
            g.a = a_there;
            g.b = b_there;
            g.c = device_bytes(c_bytes);
            must(dev.ops->zero(streams[0], g.c, c_bytes), "clearing");
            must(multiply(&g), "a product");
            look_at_product(&g, a, b);
            const double seconds = rates_time(multiply, wait_all, &g);
            must(seconds > 0.0 ? 0 : -1, "a product");
            rates_say_product(&rates_matrices[i], direction, &g, seconds);
            dev.ops->free(dev.device, a_there, a_bytes);
            dev.ops->free(dev.device, b_there, b_bytes);
            dev.ops->free(dev.device, g.c, c_bytes);
            free(a);
            free(b);
        }
}

/* ---- attention ---- */

enum { TENSORS = 8 };
struct attention {
    struct sw_attention shape;
    void *q, *k, *v, *out, *dout, *dq, *dk, *dv, *scratch;
    float *lse;
    uint64_t q_bytes, k_bytes, lse_bytes, scratch_bytes;
};

static int forward(void *ctx) {
    const struct attention *a = ctx;
    return dev.ops->attention(streams[0], SW_BF16, &a->shape, a->out, a->lse, a->q, a->k, a->v,
                              a->scratch);
}

static int backward(void *ctx) {
    const struct attention *a = ctx;
    return dev.ops->attention_backward(streams[0], SW_BF16, &a->shape, a->dq, a->dk, a->dv, a->dout,
                                       a->out, a->lse, a->q, a->k, a->v, a->scratch);
}

static void fill_there(void *there, uint64_t bytes, uint64_t seed) {
    sw_bf16 *values = host_bytes(bytes);
    rates_fill(values, bytes / 2, seed);
    must(dev.ops->copy_h2d(streams[0], there, values, bytes), "a copy");
    must(dev.ops->stream_sync(streams[0]), "a copy");
    free(values);
}

/* The causal half is what is counted: two products forward, five backward, whatever else a kernel
 * computes again. */
static void attention(void) {
    struct attention a = {
        .shape = {1, (uint32_t)rates_size(4096), 32, 8, 128, 0.08838834764831845f}};
    const struct sw_attention *s = &a.shape;
    if (rates_tiny) a.shape.heads = 4, a.shape.kv_heads = 1;
    a.q_bytes = 2ull * s->time * s->heads * s->head_dim;
    a.k_bytes = 2ull * s->time * s->kv_heads * s->head_dim;
    a.lse_bytes = 4ull * s->time * s->heads;
    a.scratch_bytes = dev.ops->attention_scratch_bytes(dev.device, s);
    void **const like_q[] = {&a.q, &a.out, &a.dout, &a.dq},
                 **const like_k[] = {&a.k, &a.v, &a.dk, &a.dv};
    for (uint64_t i = 0; i < TENSORS / 2; i++) {
        *like_q[i] = device_bytes(a.q_bytes);
        *like_k[i] = device_bytes(a.k_bytes);
        fill_there(*like_q[i], a.q_bytes, 2 * i + 1);
        fill_there(*like_k[i], a.k_bytes, 2 * i + 2);
    }
    a.lse = device_bytes(a.lse_bytes);
    a.scratch = device_bytes(a.scratch_bytes);
    const double product = 1e-12 * s->time * (double)s->time * s->head_dim * s->heads;
    const double forth = rates_time(forward, wait_all, &a),
                 back = rates_time(backward, wait_all, &a);
    must(forth > 0.0 && back > 0.0 ? 0 : -1, "attention");
    rates_say("attention", "forward", 2 * product / forth, "TFLOP/s");
    rates_say("attention", "backward", 5 * product / back, "TFLOP/s");
    for (int i = 0; i < TENSORS / 2; i++) {
        dev.ops->free(dev.device, *like_q[i], a.q_bytes);
        dev.ops->free(dev.device, *like_k[i], a.k_bytes);
    }
    dev.ops->free(dev.device, a.lse, a.lse_bytes);
    dev.ops->free(dev.device, a.scratch, a.scratch_bytes);
}

static void devices(void) {
    rates_say("devices", dev.ops->numerics(dev.device), sw_device_cuda_count(), "");
    rates_say("free memory", "of the first", (double)dev.ops->free_bytes(dev.device), "B");
}

int main(int argc, char **argv) {
    const struct sw_cuda_device_options options = {.index = 0};
    const char *mode = argc > 1 ? argv[1] : "";
    void (*const run)(void) = strcmp(mode, "devices") == 0     ? devices
                              : strcmp(mode, "copies") == 0    ? copies
                              : strcmp(mode, "products") == 0  ? products
                              : strcmp(mode, "attention") == 0 ? attention
                                                               : NULL;
    rates_tiny = argc > 2 && strcmp(argv[2], "tiny") == 0;
    if (!run) {
        fprintf(stderr, "usage: gpu_rates devices|copies|products|attention [tiny]\n");
        return 2;
    }
    sw_log_set_sink(print_line, NULL);
    must(sw_device_cuda_open(&dev, &options), "the device");
    for (int i = 0; i < 2; i++) {
        must(dev.ops->stream_create(dev.device, &streams[i]), "a stream");
        must(dev.ops->prepare(streams[i], 1), "a stream");
    }
    run();
    for (int i = 0; i < 2; i++) dev.ops->stream_destroy(streams[i]);
    dev.ops->close(dev.device);
    return 0;
}
