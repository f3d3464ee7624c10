/* engine/llama.c - the decoder's units, written as the sequence of operators that they are. */
#include "engine/llama.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include "base/size.h"

enum {
    BUFFER_ALIGN = 4096,
    HEAD_LOGITS_HOST_BYTES_MAX = 32000000,
    HEAD_LOGITS_BYTES_MAX = 256000000
};

#define TRY(call)                                                                                  \
    do {                                                                                           \
        const int try_ret = (call);                                                                \
        if (try_ret < 0) return try_ret;                                                           \
    } while (0)

/* ---- workspace ---- */

uint64_t sw_llama_head_slice(const struct sw_model *model, const struct sw_device_handle *device,
                             uint64_t tokens) {
    const int is_host = device->ops->free_bytes(device->device) == UINT64_MAX;
    const uint64_t bytes = is_host ? HEAD_LOGITS_HOST_BYTES_MAX : HEAD_LOGITS_BYTES_MAX;
    uint64_t slice = bytes / ((uint64_t)model->config.vocab * sizeof(float));
    if (slice < 16) slice = 16;
    return slice < tokens ? slice : tokens;
}

double sw_llama_flops(const struct sw_llama *l, uint32_t u, enum sw_llama_pass pass) {
    static const int forwards[] = {
        [SW_PASS_FORWARD] = 1,   [SW_PASS_BACKWARD] = 3,  [SW_PASS_HEAD_DX] = 2,
        [SW_PASS_HEAD_GRAD] = 2, [SW_PASS_RECOMPUTE] = 1, [SW_PASS_EMBED] = 0};
    const struct sw_unit *unit = &l->model->units[u];
    const struct sw_attention *a = &l->attention;
    if (unit->kind == SW_UNIT_EMBED && !l->model->config.tied) return 0;
    double weights = 0, frozen = 0, attention = 0;
    for (uint32_t i = 0; i < unit->tensor_count; i++) {
        const struct sw_tensor *tensor = &unit->tensors[i];
        weights += (double)(tensor->cols ? tensor->count : 0);
        frozen += (double)(tensor->cols && tensor->frozen ? tensor->count : 0);
    }
    if (unit->kind == SW_UNIT_LAYER)
        attention = 2.0 * (double)l->time * a->heads * a->head_dim; /* 2 products, half of them */
    const double spared = pass == SW_PASS_BACKWARD ? 2 * frozen : 0;
    return ((2 * weights + attention) * forwards[pass] - spared) * (double)l->tokens;
}

/* Takes `bytes` from the workspace; with base NULL only the size is counted. */
static void *take(char *base, uint64_t *used, uint64_t bytes) {
    void *p = base ? base + *used : NULL;
    *used += sw_round_up(bytes, BUFFER_ALIGN);
    return p;
}

static uint64_t scratch_bytes(const struct sw_llama *l, struct sw_device *device) {
    const uint64_t a = l->ops->attention_scratch_bytes(device, &l->attention);
    const uint64_t b = l->ops->rmsnorm_scratch_bytes(device, l->tokens, l->model->config.hidden);
    return a > b ? a : b;
}

static uint64_t lay_out(struct sw_llama *l, struct sw_device *device, char *base) {
    const struct sw_model_config *c = &l->model->config;
    const uint64_t element = sw_dtype_bytes(l->dtype), n = l->tokens;
    const uint64_t hidden = n * c->hidden * element;
    const uint64_t queries = n * c->heads * c->head_dim * element;
    const uint64_t keys = n * c->kv_heads * c->head_dim * element;
    const uint64_t inner = n * c->intermediate * element;
    uint64_t used = 0;
    l->norm1 = take(base, &used, hidden);
    l->q = take(base, &used, queries);
    l->k = take(base, &used, keys);
    l->v = take(base, &used, keys);
    l->att = take(base, &used, queries);
    l->mid = take(base, &used, hidden);
    l->norm2 = take(base, &used, hidden);
    l->gate = take(base, &used, inner);
    l->up = take(base, &used, inner);
    l->act = take(base, &used, inner);
    l->d_norm = take(base, &used, hidden);
    l->d_att = take(base, &used, queries);
    l->d_q = take(base, &used, queries);
    l->d_k = take(base, &used, keys);
    l->d_v = take(base, &used, keys);
    l->rstd1 = take(base, &used, n * sizeof(float));
    l->rstd2 = take(base, &used, n * sizeof(float));
    l->lse = take(base, &used, n * c->heads * sizeof(float));
    l->rope_cos = take(base, &used, l->time * c->head_dim / 2 * sizeof(float));
    l->rope_sin = take(base, &used, l->time * c->head_dim / 2 * sizeof(float));
    l->losses = take(base, &used, n * sizeof(float));
    /* The first part is the largest. */
    const uint64_t part = l->head_slice * l->model->units[0].tensors[0].rows;
    const uint64_t logits = l->head_whole ? l->head_slice * c->vocab : part;
    l->logits = take(base, &used, logits * sizeof(float));
    l->d_logits = l->dtype == SW_FP32 ? NULL : take(base, &used, part * element);
    l->scratch = take(base, &used, scratch_bytes(l, device));
    return used;
}

void sw_llama_describe(struct sw_llama *l, const struct sw_model *model,
                       const struct sw_device_handle *device, enum sw_dtype dtype, uint64_t batch,
                       uint64_t time, int head_whole) {
    const struct sw_model_config *c = &model->config;
    *l = (struct sw_llama){
        .ops = device->ops,
        .model = model,
        .dtype = dtype,
        .batch = batch,
        .time = time,
        .tokens = batch * time,
        .head_slice = sw_llama_head_slice(model, device, batch * time),
        .head_whole = head_whole,
        .attention = {.batch = (uint32_t)batch,
                      .time = (uint32_t)time,
                      .heads = c->heads,
                      .kv_heads = c->kv_heads,
                      .head_dim = c->head_dim,
                      .scale = (float)(1.0 / sqrt(c->head_dim))},
    };
}

uint64_t sw_llama_workspace_bytes(const struct sw_model *model,
                                  const struct sw_device_handle *device, enum sw_dtype dtype,
                                  uint64_t batch, uint64_t time, int head_whole) {
    struct sw_llama l;
    sw_llama_describe(&l, model, device, dtype, batch, time, head_whole);
    return lay_out(&l, device->device, NULL);
}

/* ---- rotary embedding ---- */

void sw_llama_rope_frequencies(const struct sw_model_config *c, double *frequencies) {
    const double tau = 6.283185307179586476925287;
    for (uint32_t i = 0; i < c->head_dim / 2; i++) {
        double f = pow(c->rope_theta, -2.0 * i / c->head_dim);
        if (c->rope_kind == SW_ROPE_LINEAR) {
            f /= c->rope_factor;
        } else if (c->rope_kind == SW_ROPE_LLAMA3) {
            const double wavelength = tau / f;
            const double turns = c->rope_original_positions / wavelength;
            if (turns < c->rope_low_freq_factor) {
                f /= c->rope_factor;
            } else if (turns <= c->rope_high_freq_factor) {
                const double smooth = (turns - c->rope_low_freq_factor) /
                                      (c->rope_high_freq_factor - c->rope_low_freq_factor);
                f = (1 - smooth) * f / c->rope_factor + smooth * f;
            }
        }
        frequencies[i] = f;
    }
}

static int upload_angles(struct sw_llama *l, struct sw_stream *stream) {
    const uint64_t half = l->model->config.head_dim / 2, count = l->time * half;
    float *table = malloc(2 * count * sizeof(*table));
    double *frequencies = malloc(half * sizeof(*frequencies));
    int ret = -ENOMEM;
    if (table && frequencies) {
        sw_llama_rope_frequencies(&l->model->config, frequencies);
        for (uint64_t t = 0; t < l->time; t++)
            for (uint64_t i = 0; i < half; i++) {
                table[t * half + i] = (float)cos((double)t * frequencies[i]);
                table[count + t * half + i] = (float)sin((double)t * frequencies[i]);
            }
        ret = l->ops->copy_h2d(stream, l->rope_cos, table, count * sizeof(*table));
        if (ret == 0)
            ret = l->ops->copy_h2d(stream, l->rope_sin, table + count, count * sizeof(*table));
        if (ret == 0) ret = l->ops->stream_sync(stream);
    }
    free(frequencies);
    free(table);
    return ret;
}

int sw_llama_open(struct sw_llama *l, const struct sw_model *model,
                  const struct sw_device_handle *device, enum sw_dtype dtype, uint64_t batch,
                  uint64_t time, int head_whole, void *workspace, struct sw_stream *stream) {
    sw_llama_describe(l, model, device, dtype, batch, time, head_whole);
    lay_out(l, device->device, workspace);
    return upload_angles(l, stream);
}

/* ---- helpers ---- */

static const void *tensor_at(const struct sw_llama *l, const struct sw_unit *unit,
                             const void *weights, int tensor) {
    return (const char *)weights + unit->tensors[tensor].first * sw_dtype_bytes(l->dtype);
}

/* y[n][rows] = x[n][cols] w[rows][cols]^T, added to y when accumulate. */
static int project(const struct sw_llama *l, struct sw_stream *s, void *y, const void *x,
                   const void *w, uint64_t n, uint64_t rows, uint64_t cols, int accumulate) {
    const struct sw_gemm g = {.m = n,
                              .n = rows,
                              .k = cols,
                              .trans_b = 1,
                              .accumulate = accumulate,
                              .a = x,
                              .a_dtype = l->dtype,
                              .lda = cols,
                              .b = w,
                              .b_dtype = l->dtype,
                              .ldb = cols,
                              .c = y,
                              .c_dtype = l->dtype,
                              .ldc = rows};
    return l->ops->gemm(s, &g);
}

/* dx[n][cols] (+)= dy[n][rows] w[rows][cols], with dx of dx_dtype. */
static int project_back_to(const struct sw_llama *l, struct sw_stream *s, enum sw_dtype dx_dtype,
                           void *dx, const void *dy, const void *w, uint64_t n, uint64_t rows,
                           uint64_t cols, int accumulate) {
    const struct sw_gemm g = {.m = n,
                              .n = cols,
                              .k = rows,
                              .accumulate = accumulate,
                              .a = dy,
                              .a_dtype = l->dtype,
                              .lda = rows,
                              .b = w,
                              .b_dtype = l->dtype,
                              .ldb = cols,
                              .c = dx,
                              .c_dtype = dx_dtype,
                              .ldc = cols};
    return l->ops->gemm(s, &g);
}

static int project_back(const struct sw_llama *l, struct sw_stream *s, void *dx, const void *dy,
                        const void *w, uint64_t n, uint64_t rows, uint64_t cols, int accumulate) {
    return project_back_to(l, s, l->dtype, dx, dy, w, n, rows, cols, accumulate);
}

/* dw[rows][cols] (+)= dy[n][rows]^T x[n][cols], in FP32; nothing where dw is NULL. */
static int weight_gradient(const struct sw_llama *l, struct sw_stream *s, float *dw, const void *dy,
                           const void *x, uint64_t n, uint64_t rows, uint64_t cols,
                           int accumulate) {
    if (!dw) return 0;
    const struct sw_gemm g = {.m = rows,
                              .n = cols,
                              .k = n,
                              .trans_a = 1,
                              .accumulate = accumulate,
                              .a = dy,
                              .a_dtype = l->dtype,
                              .lda = rows,
                              .b = x,
                              .b_dtype = l->dtype,
                              .ldb = cols,
                              .c = dw,
                              .c_dtype = SW_FP32,
                              .ldc = cols};
    return l->ops->gemm(s, &g);
}

static int rotate(const struct sw_llama *l, struct sw_stream *s, void *q, void *k, int inverse) {
    const struct sw_model_config *c = &l->model->config;
    TRY(l->ops->rope(s, l->dtype, q, l->rope_cos, l->rope_sin, l->tokens, l->time, c->heads,
                     c->head_dim, inverse));
    return l->ops->rope(s, l->dtype, k, l->rope_cos, l->rope_sin, l->tokens, l->time, c->kv_heads,
                        c->head_dim, inverse);
}

/* ---- embedding, norm ---- */

int sw_llama_embed(const struct sw_llama *l, struct sw_stream *s, const struct sw_unit *unit,
                   const void *weights, const int32_t *tokens, void *out) {
    assert(unit->kind == SW_UNIT_EMBED);
    return l->ops->embed(s, l->dtype, out, weights, tokens, l->tokens, l->model->config.hidden,
                         unit->first_row, unit->tensors[0].rows);
}

int sw_llama_embed_backward(const struct sw_llama *l, struct sw_stream *s,
                            const struct sw_unit *unit, float *acc, int accumulate,
                            const int32_t *tokens, const void *dout) {
    assert(unit->kind == SW_UNIT_EMBED);
    if (!accumulate) TRY(l->ops->zero(s, acc, unit->tensors[0].count * sizeof(*acc)));
    return l->ops->embed_backward(s, l->dtype, acc, dout, tokens, l->tokens,
                                  l->model->config.hidden, unit->first_row, unit->tensors[0].rows);
}

int sw_llama_norm(const struct sw_llama *l, struct sw_stream *s, const struct sw_unit *unit,
                  const void *weights, const void *x, void *out) {
    assert(unit->kind == SW_UNIT_NORM);
    return l->ops->rmsnorm(s, l->dtype, out, l->rstd1, x, weights, l->tokens,
                           l->model->config.hidden, l->model->config.rms_eps);
}

int sw_llama_norm_backward(const struct sw_llama *l, struct sw_stream *s,
                           const struct sw_unit *unit, const void *weights, float *acc,
                           int accumulate, const void *x, const float *dout, void *dx) {
    const uint64_t n = l->tokens, hidden = l->model->config.hidden;
    /* Once more for rstd alone: layers have used its place since. */
    TRY(sw_llama_norm(l, s, unit, weights, x, l->norm1));
    TRY(l->ops->round(s, l->dtype, l->d_norm, dout, n * hidden));
    return l->ops->rmsnorm_backward(s, l->dtype, dx, 0, acc, accumulate, l->d_norm, x, weights,
                                    l->rstd1, n, hidden, l->scratch);
}

/* ---- layers ---- */

/* Where a tensor's gradient goes; NULL where nothing trains it. */
static float *gradient_at(const struct sw_unit *unit, float *acc, int tensor) {
    return unit->tensors[tensor].frozen ? NULL : acc + unit->tensors[tensor].first;
}

static struct sw_attention attention_of(const struct sw_llama *l, const uint32_t *starts) {
    struct sw_attention shape = l->attention;
    shape.starts = starts;
    return shape;
}

/* Everything of a layer up to `act`; mid is the sum after attention. */
static int layer_inside(const struct sw_llama *l, struct sw_stream *s, const struct sw_unit *unit,
                        const void *weights, const uint32_t *starts, const void *x) {
    const struct sw_attention attention = attention_of(l, starts);
    const struct sw_model_config *c = &l->model->config;
    const struct sw_device_ops *ops = l->ops;
    const uint64_t n = l->tokens, hidden = c->hidden, inner = c->intermediate;
    const uint64_t queries = (uint64_t)c->heads * c->head_dim;
    const uint64_t keys = (uint64_t)c->kv_heads * c->head_dim;
#define W(t) tensor_at(l, unit, weights, (t))
    TRY(ops->rmsnorm(s, l->dtype, l->norm1, l->rstd1, x, W(SW_LAYER_NORM1), n, hidden, c->rms_eps));
    TRY(project(l, s, l->q, l->norm1, W(SW_LAYER_Q), n, queries, hidden, 0));
    TRY(project(l, s, l->k, l->norm1, W(SW_LAYER_K), n, keys, hidden, 0));
    TRY(project(l, s, l->v, l->norm1, W(SW_LAYER_V), n, keys, hidden, 0));
    TRY(rotate(l, s, l->q, l->k, 0));
    TRY(ops->attention(s, l->dtype, &attention, l->att, l->lse, l->q, l->k, l->v, l->scratch));
    TRY(ops->copy_d2d(s, l->mid, x, n * hidden * sw_dtype_bytes(l->dtype)));
    TRY(project(l, s, l->mid, l->att, W(SW_LAYER_O), n, hidden, queries, 1));
    TRY(ops->rmsnorm(s, l->dtype, l->norm2, l->rstd2, l->mid, W(SW_LAYER_NORM2), n, hidden,
                     c->rms_eps));
    TRY(project(l, s, l->gate, l->norm2, W(SW_LAYER_GATE), n, inner, hidden, 0));
    TRY(project(l, s, l->up, l->norm2, W(SW_LAYER_UP), n, inner, hidden, 0));
    return ops->swiglu(s, l->dtype, l->act, l->gate, l->up, n * inner);
#undef W
}

int sw_llama_layer(const struct sw_llama *l, struct sw_stream *s, const struct sw_unit *unit,
                   const void *weights, const uint32_t *starts, const void *x, void *out) {
    const struct sw_model_config *c = &l->model->config;
    TRY(layer_inside(l, s, unit, weights, starts, x));
    TRY(l->ops->copy_d2d(s, out, l->mid, l->tokens * c->hidden * sw_dtype_bytes(l->dtype)));
    return project(l, s, out, l->act, tensor_at(l, unit, weights, SW_LAYER_DOWN), l->tokens,
                   c->hidden, c->intermediate, 1);
}

/* dx: gradient of the output, becomes that of mid. */
static int mlp_backward(const struct sw_llama *l, struct sw_stream *s, const struct sw_unit *unit,
                        const void *weights, float *acc, int add, void *dx) {
    const struct sw_model_config *c = &l->model->config;
    const uint64_t n = l->tokens, hidden = c->hidden, inner = c->intermediate;
#define W(t)  tensor_at(l, unit, weights, (t))
#define DW(t) gradient_at(unit, acc, (t))
    TRY(weight_gradient(l, s, DW(SW_LAYER_DOWN), dx, l->act, n, hidden, inner, add));
    TRY(project_back(l, s, l->act, dx, W(SW_LAYER_DOWN), n, hidden, inner, 0));
    TRY(l->ops->swiglu_backward(s, l->dtype, l->gate, l->up, l->act, l->gate, l->up, n * inner));
    TRY(weight_gradient(l, s, DW(SW_LAYER_GATE), l->gate, l->norm2, n, inner, hidden, add));
    TRY(weight_gradient(l, s, DW(SW_LAYER_UP), l->up, l->norm2, n, inner, hidden, add));
    TRY(project_back(l, s, l->d_norm, l->gate, W(SW_LAYER_GATE), n, inner, hidden, 0));
    TRY(project_back(l, s, l->d_norm, l->up, W(SW_LAYER_UP), n, inner, hidden, 1));
    return l->ops->rmsnorm_backward(s, l->dtype, dx, 1, DW(SW_LAYER_NORM2), add, l->d_norm, l->mid,
                                    W(SW_LAYER_NORM2), l->rstd2, n, hidden, l->scratch);
}

/* dx: gradient of mid, becomes that of the layer's input x. */
static int attention_backward(const struct sw_llama *l, struct sw_stream *s,
                              const struct sw_unit *unit, const void *weights,
                              const uint32_t *starts, float *acc, int add, const void *x,
                              void *dx) {
    const struct sw_model_config *c = &l->model->config;
    const struct sw_attention attention = attention_of(l, starts);
    const uint64_t n = l->tokens, hidden = c->hidden;
    const uint64_t queries = (uint64_t)c->heads * c->head_dim;
    const uint64_t keys = (uint64_t)c->kv_heads * c->head_dim;
    TRY(weight_gradient(l, s, DW(SW_LAYER_O), dx, l->att, n, hidden, queries, add));
    TRY(project_back(l, s, l->d_att, dx, W(SW_LAYER_O), n, hidden, queries, 0));
    TRY(l->ops->attention_backward(s, l->dtype, &attention, l->d_q, l->d_k, l->d_v, l->d_att,
                                   l->att, l->lse, l->q, l->k, l->v, l->scratch));
    TRY(rotate(l, s, l->d_q, l->d_k, 1));
    TRY(weight_gradient(l, s, DW(SW_LAYER_Q), l->d_q, l->norm1, n, queries, hidden, add));
    TRY(weight_gradient(l, s, DW(SW_LAYER_K), l->d_k, l->norm1, n, keys, hidden, add));
    TRY(weight_gradient(l, s, DW(SW_LAYER_V), l->d_v, l->norm1, n, keys, hidden, add));
    TRY(project_back(l, s, l->d_norm, l->d_q, W(SW_LAYER_Q), n, queries, hidden, 0));
    TRY(project_back(l, s, l->d_norm, l->d_k, W(SW_LAYER_K), n, keys, hidden, 1));
    TRY(project_back(l, s, l->d_norm, l->d_v, W(SW_LAYER_V), n, keys, hidden, 1));
    return l->ops->rmsnorm_backward(s, l->dtype, dx, 1, DW(SW_LAYER_NORM1), add, l->d_norm, x,
                                    W(SW_LAYER_NORM1), l->rstd1, n, hidden, l->scratch);
#undef W
#undef DW
}

int sw_llama_layer_backward(const struct sw_llama *l, struct sw_stream *s,
                            const struct sw_unit *unit, const void *weights, const uint32_t *starts,
                            float *acc, int accumulate, const void *x, void *dx) {
    TRY(layer_inside(l, s, unit, weights, starts, x));
    TRY(mlp_backward(l, s, unit, weights, acc, accumulate, dx));
    return attention_backward(l, s, unit, weights, starts, acc, accumulate, x, dx);
}

/* ---- the head ---- */

/* A slice of tokens: all that is done for it is one row of products of the same shapes, whether its
 * parts are visited one by one or together, so the bits are the same. */
struct slice {
    uint64_t first, n;
};

static int next_slice(const struct sw_llama *l, struct slice *slice) {
    slice->first += slice->n;
    const uint64_t left = l->tokens - slice->first;
    slice->n = left < l->head_slice ? left : l->head_slice;
    return slice->n > 0;
}

static const void *input_of(const struct sw_llama *l, const struct sw_llama_head *h,
                            const struct slice *slice) {
    const uint64_t hidden = l->model->config.hidden;
    return (const char *)h->x + slice->first * hidden * sw_dtype_bytes(l->dtype);
}

static float *stats_of(const struct sw_llama_head *h, const struct slice *slice) {
    return h->stats + slice->first * 3;
}

/* logits FP32 [slice][rows] of h's part. */
static int part_logits(const struct sw_llama *l, struct sw_stream *s, const struct sw_llama_head *h,
                       const struct slice *slice, float *logits) {
    const uint64_t hidden = l->model->config.hidden, rows = h->unit->tensors[0].rows;
    const struct sw_gemm g = {.m = slice->n,
                              .n = rows,
                              .k = hidden,
                              .trans_b = 1,
                              .a = input_of(l, h, slice),
                              .a_dtype = l->dtype,
                              .lda = hidden,
                              .b = h->matrix,
                              .b_dtype = l->dtype,
                              .ldb = hidden,
                              .c = logits,
                              .c_dtype = SW_FP32,
                              .ldc = rows};
    return l->ops->gemm(s, &g);
}

static int part_stats(const struct sw_llama *l, struct sw_stream *s, const struct sw_llama_head *h,
                      const struct slice *slice, const float *logits, int begin) {
    return l->ops->softmax_stats(s, stats_of(h, slice), logits, h->targets + slice->first, slice->n,
                                 h->unit->tensors[0].rows, h->unit->first_row, begin);
}

/* From the part's logits, which are used up, to the gradients that are asked for. */
static int part_gradients(const struct sw_llama *l, struct sw_stream *s,
                          const struct sw_llama_head *h, const struct slice *slice, float *logits) {
    const uint64_t hidden = l->model->config.hidden, rows = h->unit->tensors[0].rows;
    void *d_logits = l->dtype == SW_FP32 ? logits : l->d_logits;
    TRY(l->ops->softmax_backward(s, l->dtype, d_logits, logits, stats_of(h, slice),
                                 h->targets + slice->first, h->mask ? h->mask + slice->first : NULL,
                                 h->scale, slice->n, rows, h->unit->first_row));
    if (h->d_matrix)
        TRY(weight_gradient(l, s, h->d_matrix, d_logits, input_of(l, h, slice), slice->n, rows,
                            hidden, h->d_accumulate || slice->first > 0));
    if (!h->dx) return 0;
    return project_back_to(l, s, SW_FP32, h->dx + slice->first * hidden, d_logits, h->matrix,
                           slice->n, rows, hidden, h->dx_accumulate);
}

int sw_llama_head_stats(const struct sw_llama *l, struct sw_stream *s,
                        const struct sw_llama_head *h, int begin) {
    for (struct slice slice = {0}; next_slice(l, &slice);) {
        TRY(part_logits(l, s, h, &slice, l->logits));
        TRY(part_stats(l, s, h, &slice, l->logits, begin));
    }
    return 0;
}

int sw_llama_head_loss(const struct sw_llama *l, struct sw_stream *s, const float *stats,
                       const uint8_t *mask, double *loss_sum) {
    TRY(l->ops->softmax_loss(s, l->losses, stats, mask, l->tokens));
    return l->ops->sum(s, loss_sum, l->losses, l->tokens);
}

int sw_llama_head_backward(const struct sw_llama *l, struct sw_stream *s,
                           const struct sw_llama_head *h) {
    for (struct slice slice = {0}; next_slice(l, &slice);) {
        TRY(part_logits(l, s, h, &slice, l->logits));
        TRY(part_gradients(l, s, h, &slice, l->logits));
    }
    return 0;
}

/* parts[i] with what all parts share taken from the first; dx is begun by the last. */
static struct sw_llama_head part_of(const struct sw_llama_head *parts, uint32_t count, uint32_t i,
                                    float *dx) {
    struct sw_llama_head h = parts[0];
    h.unit = parts[i].unit;
    h.matrix = parts[i].matrix;
    h.d_matrix = parts[i].d_matrix;
    h.d_accumulate = parts[i].d_accumulate;
    h.dx = dx;
    h.dx_accumulate = i + 1 < count;
    return h;
}

static int whole_slice(const struct sw_llama *l, struct sw_stream *s,
                       const struct sw_llama_head *parts, uint32_t count, float *dx,
                       const struct slice *slice) {
    for (uint32_t i = 0; i < count; i++) {
        const struct sw_llama_head h = part_of(parts, count, i, dx);
        float *logits = l->logits + slice->n * h.unit->first_row;
        TRY(part_logits(l, s, &h, slice, logits));
        TRY(part_stats(l, s, &h, slice, logits, i == 0));
    }
    for (uint32_t i = count; i-- > 0;) {
        const struct sw_llama_head h = part_of(parts, count, i, dx);
        if (h.dx || h.d_matrix)
            TRY(part_gradients(l, s, &h, slice, l->logits + slice->n * h.unit->first_row));
    }
    return 0;
}

int sw_llama_head_whole(const struct sw_llama *l, struct sw_stream *s,
                        const struct sw_llama_head *parts, uint32_t count, double *loss_sum,
                        float *dx) {
    assert(l->head_whole && count == l->model->parts);
    for (struct slice slice = {0}; next_slice(l, &slice);)
        TRY(whole_slice(l, s, parts, count, dx, &slice));
    return sw_llama_head_loss(l, s, parts[0].stats, parts[0].mask, loss_sum);
}
