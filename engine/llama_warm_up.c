/* engine/llama_warm_up.c - see the header.
 *
 * Which products there are, the decoder itself tells: it is run over a back end, the one in this
 * file, that notes products and does nothing else. What stands for memory there is an address that
 * nobody touches; products are told apart by all but their pointers, and of those by how they are
 * aligned, as a library looks at that, too. */
#include "engine/llama_warm_up.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "base/size.h"

/* Operators do nothing with what they are given. */
#pragma GCC diagnostic ignored "-Wunused-parameter"

enum { PRODUCTS_MAX = 1024, ALIGN_BYTES = 256 };
#define NOWHERE ((char *)(UINT64_C(1) << 40))

/* This back end's: what was noted. */
struct sw_stream {
    struct sw_gemm products[PRODUCTS_MAX]; /* pointers: their places within ALIGN_BYTES */
    uint32_t count;
};

#define TRY(call)                                                                                  \
    do {                                                                                           \
        const int try_ret = (call);                                                                \
        if (try_ret < 0) return try_ret;                                                           \
    } while (0)

/* ---- the back end ---- */

static const void *place_of(const void *p) {
    return (const void *)((uintptr_t)p % ALIGN_BYTES);
}

static int is_same(const struct sw_gemm *x, const struct sw_gemm *y) {
    return x->m == y->m && x->n == y->n && x->k == y->k && x->lda == y->lda && x->ldb == y->ldb &&
           x->ldc == y->ldc && x->trans_a == y->trans_a && x->trans_b == y->trans_b &&
           x->accumulate == y->accumulate && x->a_dtype == y->a_dtype && x->b_dtype == y->b_dtype &&
           x->c_dtype == y->c_dtype && x->a == y->a && x->b == y->b && x->c == y->c;
}

static int note_gemm(struct sw_stream *s, const struct sw_gemm *g) {
    struct sw_gemm product = *g;
    product.a = place_of(g->a);
    product.b = place_of(g->b);
    product.c = (void *)place_of(g->c);
    for (uint32_t i = 0; i < s->count; i++)
        if (is_same(&s->products[i], &product)) return 0;
    if (s->count == PRODUCTS_MAX) return -ENOSPC;
    s->products[s->count++] = product;
    return 0;
}

static int no_sync(struct sw_stream *s) {
    return 0;
}
static int no_upload(struct sw_stream *s, void *dst, const void *src, uint64_t bytes) {
    return 0;
}
static int no_copy(struct sw_stream *s, void *dst, const void *src, uint64_t bytes) {
    return 0;
}
static int no_zero(struct sw_stream *s, void *dst, uint64_t bytes) {
    return 0;
}
static int no_rmsnorm(struct sw_stream *s, enum sw_dtype dtype, void *out, float *rstd,
                      const void *x, const void *w, uint64_t n, uint64_t width, float eps) {
    return 0;
}
static int no_rmsnorm_backward(struct sw_stream *s, enum sw_dtype dtype, void *dx, int add_dx,
                               float *dw, int add_dw, const void *dy, const void *x, const void *w,
                               const float *rstd, uint64_t n, uint64_t width, void *scratch) {
    return 0;
}
static int no_rope(struct sw_stream *s, enum sw_dtype dtype, void *x, const float *cos,
                   const float *sin, uint64_t rows, uint64_t time, uint64_t heads,
                   uint64_t head_dim, int inverse) {
    return 0;
}
static int no_attention(struct sw_stream *s, enum sw_dtype dtype, const struct sw_attention *shape,
                        void *out, float *lse, const void *q, const void *k, const void *v,
                        void *scratch) {
    return 0;
}
static int no_attention_backward(struct sw_stream *s, enum sw_dtype dtype,
                                 const struct sw_attention *shape, void *dq, void *dk, void *dv,
                                 const void *dout, const void *out, const float *lse, const void *q,
                                 const void *k, const void *v, void *scratch) {
    return 0;
}
static int no_swiglu(struct sw_stream *s, enum sw_dtype dtype, void *out, const void *gate,
                     const void *up, uint64_t count) {
    return 0;
}
static int no_swiglu_backward(struct sw_stream *s, enum sw_dtype dtype, void *dgate, void *dup,
                              const void *dout, const void *gate, const void *up, uint64_t count) {
    return 0;
}
static int no_softmax_stats(struct sw_stream *s, float *stats, const float *logits,
                            const int32_t *targets, uint64_t n, uint64_t width,
                            uint64_t first_column, int begin) {
    return 0;
}
static int no_softmax_loss(struct sw_stream *s, float *loss, const float *stats,
                           const uint8_t *mask, uint64_t n) {
    return 0;
}
static int no_softmax_backward(struct sw_stream *s, enum sw_dtype dtype, void *dlogits,
                               const float *logits, const float *stats, const int32_t *targets,
                               const uint8_t *mask, float scale, uint64_t n, uint64_t width,
                               uint64_t first_column) {
    return 0;
}
static int no_sum(struct sw_stream *s, double *out, const float *x, uint64_t n) {
    return 0;
}

/* The device's own sizes, and nothing of its work. */
static struct sw_device_ops noting(const struct sw_device_ops *real) {
    struct sw_device_ops ops = *real;
    ops.gemm = note_gemm;
    ops.stream_sync = no_sync;
    ops.copy_h2d = no_upload;
    ops.copy_d2d = no_copy;
    ops.zero = no_zero;
    ops.rmsnorm = no_rmsnorm;
    ops.rmsnorm_backward = no_rmsnorm_backward;
    ops.rope = no_rope;
    ops.attention = no_attention;
    ops.attention_backward = no_attention_backward;
    ops.swiglu = no_swiglu;
    ops.swiglu_backward = no_swiglu_backward;
    ops.softmax_stats = no_softmax_stats;
    ops.softmax_loss = no_softmax_loss;
    ops.softmax_backward = no_softmax_backward;
    ops.sum = no_sum;
    return ops;
}

/* ---- what a step does ---- */

static int note_layer(const struct sw_llama *l, struct sw_stream *s, const struct sw_unit *unit,
                      int accumulates) {
    TRY(sw_llama_layer(l, s, unit, NOWHERE, NULL, NOWHERE, NOWHERE));
    for (int add = 0; add <= accumulates; add++)
        TRY(sw_llama_layer_backward(l, s, unit, NOWHERE, NULL, (float *)NOWHERE, add, NOWHERE,
                                    NOWHERE));
    return 0;
}

static struct sw_llama_head head_of(const struct sw_llama *l, uint32_t part, int add) {
    return (struct sw_llama_head){.unit = &l->model->units[sw_model_head_unit(l->model, part)],
                                  .matrix = NOWHERE,
                                  .x = NOWHERE,
                                  .targets = (const int32_t *)NOWHERE,
                                  .stats = (float *)NOWHERE,
                                  .dx = (float *)NOWHERE,
                                  .d_matrix = (float *)NOWHERE,
                                  .d_accumulate = add};
}

static int note_parts(const struct sw_llama *l, struct sw_stream *s, int accumulates) {
    for (uint32_t part = 0; part < l->model->parts; part++)
        for (int add = 0; add <= accumulates; add++)
            for (int first = 0; first < 2; first++) {
                struct sw_llama_head h = head_of(l, part, add);
                h.dx_accumulate = !first;
                TRY(sw_llama_head_stats(l, s, &h, first));
                TRY(sw_llama_head_backward(l, s, &h));
            }
    return 0;
}

static int note_whole(const struct sw_llama *l, struct sw_stream *s, int accumulates) {
    struct sw_llama_head parts[SW_PARTS_MAX];
    for (int add = 0; add <= accumulates; add++) {
        for (uint32_t part = 0; part < l->model->parts; part++) parts[part] = head_of(l, part, add);
        TRY(sw_llama_head_whole(l, s, parts, l->model->parts, (double *)NOWHERE, (float *)NOWHERE));
    }
    return 0;
}

static int note_model(const struct sw_llama *l, struct sw_stream *s, int accumulates) {
    for (uint32_t u = 0; u < l->model->unit_count; u++)
        if (l->model->units[u].kind == SW_UNIT_LAYER)
            TRY(note_layer(l, s, &l->model->units[u], accumulates));
    return l->head_whole ? note_whole(l, s, accumulates) : note_parts(l, s, accumulates);
}

/* ---- the products ---- */

static uint64_t room_for(uint64_t rows, uint64_t ld, enum sw_dtype dtype) {
    return sw_round_up(rows * ld * sw_dtype_bytes(dtype) + ALIGN_BYTES, ALIGN_BYTES);
}

/* Both operands begin at the same place; what they are says nothing. */
static uint64_t room_for_operands(const struct sw_gemm *g) {
    const uint64_t a = room_for(g->trans_a ? g->k : g->m, g->lda, g->a_dtype);
    const uint64_t b = room_for(g->trans_b ? g->n : g->k, g->ldb, g->b_dtype);
    return a > b ? a : b;
}

static int make_products(const struct sw_stream *noted, const struct sw_device_handle *device,
                         struct sw_stream *stream) {
    uint64_t bytes = 0;
    void *memory;
    for (uint32_t i = 0; i < noted->count; i++) {
        const struct sw_gemm *g = &noted->products[i];
        const uint64_t room = room_for_operands(g) + room_for(g->m, g->ldc, g->c_dtype);
        if (room > bytes) bytes = room;
    }
    if (bytes > device->ops->free_bytes(device->device)) return 0;
    int ret = device->ops->alloc(device->device, bytes, &memory);
    if (ret < 0) return ret;
    for (uint32_t i = 0; i < noted->count && ret == 0; i++) {
        struct sw_gemm g = noted->products[i];
        char *base = memory;
        g.c = base + room_for_operands(&g) + (uintptr_t)g.c;
        g.a = base + (uintptr_t)g.a;
        g.b = base + (uintptr_t)g.b;
        ret = device->ops->gemm(stream, &g);
    }
    const int over = device->ops->stream_sync(stream);
    device->ops->free(device->device, memory, bytes);
    return ret < 0 ? ret : over;
}

int sw_llama_warm_up(const struct sw_model *model, const struct sw_device_handle *device,
                     enum sw_dtype dtype, uint64_t batch, uint64_t time, int accumulates,
                     struct sw_stream *stream) {
    assert(model && device && stream);
    const struct sw_device_ops ops = noting(device->ops);
    const struct sw_device_handle here = {device->device, &ops};
    struct sw_stream *noted = calloc(1, sizeof(*noted));
    int ret = noted ? 0 : -ENOMEM;
    for (int whole = 0; whole < 2 && ret == 0; whole++) {
        struct sw_llama l;
        ret = sw_llama_open(&l, model, &here, dtype, batch, time, whole, NOWHERE, noted);
        if (ret == 0) ret = note_model(&l, noted, accumulates != 0);
    }
    if (ret == 0) ret = make_products(noted, device, stream);
    free(noted);
    return ret;
}
