/* kernels/host/attention_isa.c - causal grouped-query attention over tiles of 64 queries by 64
 * keys, inside documents.
 *
 * Scores are held transposed, [key][query]: then the online softmax works lane by lane over
 * queries, and keys and values need no transposition. Queries are packed once per tile as
 * [head_dim][query]. Work splits into units that share no output, so whichever thread takes a unit,
 * the bits are equal: forward, four (query tile, head) pairs of one key-value head; backward, one
 * key-value head, so that dk and dv are summed over heads and query tiles in one order. A query
 * tile begins with the key tile in which the document of its first query begins. */
#include "kernels/host/isa_loops.h"
#include <assert.h>
#include <math.h>
#include <omp.h>
#include <string.h>
#include "base/size.h"
#include "kernels/host/host.h"

enum { TILE = SW_HOST_ATTENTION_BLOCK, STATES = 4, ROWS = 4, COLUMNS = 2 * SW_VEC };
static_assert(TILE % COLUMNS == 0 && TILE % ROWS == 0, "a tile is whole register tiles");

/* Sizes in floats; wide is head_dim padded to whole register tiles, the pad being zeros. */
struct geometry {
    uint64_t batch, time, tiles, heads, kv_heads, group, dim, wide;
    uint64_t q_stride, kv_stride; /* elements from one position to the next */
    const uint32_t *starts;       /* [batch][time], or NULL */
    float scale;
};

static struct geometry geometry_of(const struct sw_attention *shape) {
    struct geometry g = {
        .batch = shape->batch,
        .time = shape->time,
        .tiles = (shape->time + TILE - 1) / TILE,
        .heads = shape->heads,
        .kv_heads = shape->kv_heads,
        .group = shape->heads / shape->kv_heads,
        .dim = shape->head_dim,
        .wide = sw_round_up(shape->head_dim, COLUMNS),
        .starts = shape->starts,
        .scale = shape->scale,
    };
    g.q_stride = g.heads * g.dim;
    g.kv_stride = g.kv_heads * g.dim;
    return g;
}

static uint64_t tile_length(const struct geometry *g, uint64_t tile) {
    const uint64_t left = g->time - tile * TILE;
    return left < TILE ? left : TILE;
}

/* rows x COLUMNS of c (+)= a b over k; a[i][kk] lies at i * a_row + kk * a_col. rows is a constant.
 */
SW_INLINE void register_tile(int rows, uint64_t k, const float *a, uint64_t a_row, uint64_t a_col,
                             const float *b, uint64_t ldb, float *c, uint64_t ldc, int add) {
    sw_vec low[ROWS], high[ROWS];
    for (int i = 0; i < rows; i++) {
        low[i] = add ? sw_vec_load(c + (uint64_t)i * ldc) : sw_vec_all(0.0f);
        high[i] = add ? sw_vec_load(c + (uint64_t)i * ldc + SW_VEC) : sw_vec_all(0.0f);
    }
    for (uint64_t kk = 0; kk < k; kk++) {
        const sw_vec b0 = sw_vec_load(b + kk * ldb), b1 = sw_vec_load(b + kk * ldb + SW_VEC);
        for (int i = 0; i < rows; i++) {
            const sw_vec x = sw_vec_all(a[(uint64_t)i * a_row + kk * a_col]);
            low[i] = sw_vec_fma(x, b0, low[i]);
            high[i] = sw_vec_fma(x, b1, high[i]);
        }
    }
    for (int i = 0; i < rows; i++) {
        sw_vec_store(c + (uint64_t)i * ldc, low[i]);
        sw_vec_store(c + (uint64_t)i * ldc + SW_VEC, high[i]);
    }
}

/* c[m][n] (+)= a b, n in whole register tiles. */
static __attribute__((noinline)) void multiply(uint64_t m, uint64_t n, uint64_t k, const float *a,
                                               uint64_t a_row, uint64_t a_col, const float *b,
                                               uint64_t ldb, float *c, uint64_t ldc, int add) {
    for (uint64_t j = 0; j < n; j += COLUMNS) {
        uint64_t i = 0;
        for (; i + ROWS <= m; i += ROWS)
            register_tile(ROWS, k, a + i * a_row, a_row, a_col, b + j, ldb, c + i * ldc + j, ldc,
                          add);
        for (; i < m; i++)
            register_tile(1, k, a + i * a_row, a_row, a_col, b + j, ldb, c + i * ldc + j, ldc, add);
    }
}

/* dst[TILE][wide]: rows of src, zeros beyond them and beyond dim. */
SW_INLINE void pack_rows(enum sw_dtype dtype, const struct geometry *g, float *dst, const void *src,
                         uint64_t first, uint64_t stride, uint64_t rows) {
    for (uint64_t r = 0; r < rows; r++) {
        float *row = dst + r * g->wide;
        const uint64_t at = first + r * stride;
#pragma omp simd
        for (uint64_t d = 0; d < g->dim; d++) row[d] = sw_load(dtype, src, at + d);
        for (uint64_t d = g->dim; d < g->wide; d++) row[d] = 0.0f;
    }
    memset(dst + rows * g->wide, 0, (TILE - rows) * g->wide * sizeof(float));
}

/* dst[dim][TILE]: the rows of a packed tile as columns, times factor. */
static void transpose(const struct geometry *g, float *dst, const float *packed, float factor) {
    for (uint64_t r = 0; r < TILE; r++)
        for (uint64_t d = 0; d < g->dim; d++) dst[d * TILE + r] = packed[r * g->wide + d] * factor;
}

SW_INLINE void unpack_row(enum sw_dtype dtype, void *dst, uint64_t first, const float *row,
                          float factor, uint64_t dim) {
#pragma omp simd
    for (uint64_t d = 0; d < dim; d++) sw_store(dtype, dst, first + d, row[d] * factor);
}

/* Keys after the query do not count: in the diagonal tile, key j of queries below j. */
static void mask_diagonal(float *scores, uint64_t keys, float value) {
    for (uint64_t j = 1; j < keys; j++)
        for (uint64_t i = 0; i < j; i++) scores[j * TILE + i] = value;
}

/* Where the documents of a tile's queries begin; NULL: nowhere but in front. */
static const uint32_t *starts_of(const struct geometry *g, uint64_t batch, uint64_t tile) {
    return g->starts ? g->starts + batch * g->time + tile * TILE : NULL;
}

/* The key tile in which the document of a query tile's first query begins. */
static uint64_t first_key_tile(const struct geometry *g, uint64_t batch, uint64_t tile) {
    return g->starts ? starts_of(g, batch, tile)[0] / TILE : 0;
}

/* Keys before the query's document do not count: key j of the tile that begins at first_key. */
static void mask_documents(float *scores, uint64_t keys, const uint32_t *starts, uint64_t rows,
                           uint64_t first_key, float value) {
    if (!starts || starts[rows - 1] <= first_key) return; /* they ascend */
    for (uint64_t j = 0; j < keys; j++) {
        const uint32_t key = (uint32_t)(first_key + j);
        float *row = scores + j * TILE;
#pragma omp simd
        for (uint64_t i = 0; i < rows; i++) row[i] = key < starts[i] ? value : row[i];
    }
}

/* What one query tile of one head carries from key tile to key tile. */
struct state {
    const uint32_t *starts; /* of its queries' documents, or NULL */
    float *q, *sums;        /* [dim][TILE] scaled queries; [TILE][wide] unnormalised output */
    float *most, *total;    /* [TILE] running maximum and sum of exponentials */
    uint64_t first_tile, tile, q_first, lse_first, rows; /* key tiles first_tile .. tile */
};

/* scores becomes exp(scores - maximum); shrink what was summed under the old maximum by alpha. A
 * query that has seen nothing of its document yet has a maximum of -Inf, and sums of zero. */
static void online_softmax(float *scores, uint64_t keys, float *restrict most,
                           float *restrict total, float *restrict alpha) {
    float next[TILE];
    memcpy(next, most, sizeof(next));
    for (uint64_t j = 0; j < keys; j++) {
        const float *row = scores + j * TILE;
#pragma omp simd
        for (int i = 0; i < TILE; i++) next[i] = row[i] > next[i] ? row[i] : next[i];
    }
#pragma omp simd
    for (int i = 0; i < TILE; i++) {
        const float shift = next[i] == -INFINITY ? 0.0f : next[i];
        alpha[i] = sw_exp(most[i] - shift);
        total[i] *= alpha[i];
        most[i] = next[i];
        next[i] = shift;
    }
    for (uint64_t j = 0; j < keys; j++) {
        float *row = scores + j * TILE;
#pragma omp simd
        for (int i = 0; i < TILE; i++) {
            row[i] = sw_exp(row[i] - next[i]);
            total[i] += row[i];
        }
    }
}

static void attend(const struct geometry *g, struct state *s, const float *k, const float *v,
                   uint64_t key_tile, float *scores) {
    float alpha[TILE];
    const uint64_t keys = tile_length(g, key_tile);
    multiply(keys, TILE, g->dim, k, g->wide, 1, s->q, TILE, scores, TILE, 0);
    if (key_tile == s->tile) mask_diagonal(scores, keys, -INFINITY);
    mask_documents(scores, keys, s->starts, s->rows, key_tile * TILE, -INFINITY);
    online_softmax(scores, keys, s->most, s->total, alpha);
    for (uint64_t i = 0; i < s->rows; i++) {
        float *row = s->sums + i * g->wide;
#pragma omp simd
        for (uint64_t d = 0; d < g->wide; d++) row[d] *= alpha[i];
    }
    multiply(s->rows, g->wide, keys, scores, 1, TILE, v, g->wide, s->sums, g->wide, 1);
}

static uint64_t forward_floats(const struct geometry *g) {
    const uint64_t state = TILE * g->dim + TILE * g->wide + 2 * TILE;
    return 2 * TILE * g->wide + TILE * TILE + STATES * state;
}

/* The whole team or one thread: a runtime ends the threads that a smaller team leaves over, and
 * starts them anew for the next large one. */
static int team_of(int threads, uint64_t units) {
    return units > 1 ? threads : 1;
}

/* Sets up the pairs [first, first + count) of a key-value head: pair p is tile p / group of the
 * head p % group. */
static void start_states(enum sw_dtype dtype, const struct geometry *g, struct state *states,
                         uint64_t count, uint64_t first, uint64_t batch, uint64_t kv_head,
                         const void *q, float *space, float *packed) {
    for (uint64_t n = 0; n < count; n++) {
        struct state *s = &states[n];
        const uint64_t head = kv_head * g->group + (first + n) % g->group;
        s->tile = (first + n) / g->group;
        s->rows = tile_length(g, s->tile);
        s->starts = starts_of(g, batch, s->tile);
        s->first_tile = first_key_tile(g, batch, s->tile);
        s->q_first = (batch * g->time + s->tile * TILE) * g->q_stride + head * g->dim;
        s->lse_first = (batch * g->heads + head) * g->time + s->tile * TILE;
        s->q = space;
        s->sums = s->q + TILE * g->dim;
        s->most = s->sums + TILE * g->wide;
        s->total = s->most + TILE;
        space = s->total + TILE;
        SW_BY_DTYPE(dtype, pack_rows, g, packed, q, s->q_first, g->q_stride, s->rows);
        transpose(g, s->q, packed, g->scale);
        memset(s->sums, 0, TILE * g->wide * sizeof(float));
        for (int i = 0; i < TILE; i++) {
            s->most[i] = -INFINITY;
            s->total[i] = 0.0f;
        }
    }
}

static void forward_unit(enum sw_dtype dtype, const struct geometry *g, uint64_t unit,
                         uint64_t units_per_head, void *out, float *lse, const void *q,
                         const void *k, const void *v, float *scratch) {
    const uint64_t batch = unit / units_per_head / g->kv_heads;
    const uint64_t kv_head = unit / units_per_head % g->kv_heads;
    const uint64_t first = unit % units_per_head * STATES, pairs = g->tiles * g->group;
    const uint64_t count = pairs - first < STATES ? pairs - first : STATES;
    float *keys = scratch, *values = keys + TILE * g->wide, *scores = values + TILE * g->wide;
    struct state states[STATES];
    start_states(dtype, g, states, count, first, batch, kv_head, q, scores + TILE * TILE, keys);
    for (uint64_t t = first_key_tile(g, batch, first / g->group); t <= states[count - 1].tile;
         t++) {
        const uint64_t at = (batch * g->time + t * TILE) * g->kv_stride + kv_head * g->dim;
        SW_BY_DTYPE(dtype, pack_rows, g, keys, k, at, g->kv_stride, tile_length(g, t));
        SW_BY_DTYPE(dtype, pack_rows, g, values, v, at, g->kv_stride, tile_length(g, t));
        for (uint64_t n = 0; n < count; n++)
            if (t >= states[n].first_tile && t <= states[n].tile)
                attend(g, &states[n], keys, values, t, scores);
    }
    for (uint64_t n = 0; n < count; n++) {
        const struct state *s = &states[n];
        for (uint64_t i = 0; i < s->rows; i++) {
            SW_BY_DTYPE(dtype, unpack_row, out, s->q_first + i * g->q_stride, s->sums + i * g->wide,
                        1.0f / s->total[i], g->dim);
            lse[s->lse_first + i] = s->most[i] + logf(s->total[i]);
        }
    }
}

static void forward(int threads, enum sw_dtype dtype, const struct sw_attention *shape, void *out,
                    float *lse, const void *q, const void *k, const void *v, void *scratch) {
    const struct geometry g = geometry_of(shape);
    const uint64_t per_head = (g.tiles * g.group + STATES - 1) / STATES;
    const uint64_t units = g.batch * g.kv_heads * per_head, each = forward_floats(&g);
    if (units == 0) return;
#pragma omp parallel for schedule(dynamic, 1) num_threads(team_of(threads, units))
    for (uint64_t unit = 0; unit < units; unit++)
        forward_unit(dtype, &g, unit, per_head, out, lse, q, k, v,
                     (float *)scratch + each * (uint64_t)omp_get_thread_num());
}

/* One thread's buffers for backward: whole key-value head, then one query tile. */
struct workspace {
    float *k, *v, *dk, *dv;                  /* [tiles * TILE][wide] */
    float *q, *qt, *dout, *doutt, *dq, *out; /* [TILE][wide] or, transposed, [dim][TILE] */
    float *p, *ds;                           /* [key][query] */
    float lse[TILE], delta[TILE];
    const uint32_t *starts; /* of the tile's `rows` queries' documents, or NULL */
    uint64_t rows;
};

static uint64_t backward_floats(const struct geometry *g) {
    return 4 * g->tiles * TILE * g->wide + 4 * TILE * g->wide + 2 * TILE * g->dim + 2 * TILE * TILE;
}

static void workspace_lay(const struct geometry *g, struct workspace *w, float *space) {
    const uint64_t whole = g->tiles * TILE * g->wide, tile = TILE * g->wide;
    w->k = space;
    w->v = w->k + whole;
    w->dk = w->v + whole;
    w->dv = w->dk + whole;
    w->q = w->dv + whole;
    w->dout = w->q + tile;
    w->dq = w->dout + tile;
    w->out = w->dq + tile;
    w->qt = w->out + tile;
    w->doutt = w->qt + TILE * g->dim;
    w->p = w->doutt + TILE * g->dim;
    w->ds = w->p + TILE * TILE;
}

/* With p = exp(s - lse) and delta_i = dout_i . out_i: ds = p (dp - delta) scale. */
static void score_gradient(const struct geometry *g, struct workspace *w) {
    for (uint64_t j = 0; j < TILE; j++) {
        float *p = w->p + j * TILE, *ds = w->ds + j * TILE;
#pragma omp simd
        for (int i = 0; i < TILE; i++) {
            p[i] = sw_exp(p[i] - w->lse[i]);
            ds[i] = p[i] * (ds[i] - w->delta[i]) * g->scale;
        }
    }
}

/* One query tile of one head against key tile t: adds to dq, dk and dv. Padded queries have zero q
 * and dout, padded keys lie above the diagonal: both add nothing. Nor do keys of other documents.
 */
static void backward_pair(const struct geometry *g, struct workspace *w, uint64_t t, int diagonal) {
    const uint64_t at = t * TILE * g->wide, wide = g->wide;
    multiply(TILE, TILE, g->dim, w->k + at, wide, 1, w->qt, TILE, w->p, TILE, 0);
    multiply(TILE, TILE, g->dim, w->v + at, wide, 1, w->doutt, TILE, w->ds, TILE, 0);
    if (diagonal) mask_diagonal(w->p, TILE, -INFINITY);
    mask_documents(w->p, TILE, w->starts, w->rows, t * TILE, -INFINITY);
    score_gradient(g, w);
    if (diagonal) mask_diagonal(w->ds, TILE, 0.0f); /* whatever a padded key held */
    mask_documents(w->ds, TILE, w->starts, w->rows, t * TILE, 0.0f);
    multiply(TILE, wide, TILE, w->p, TILE, 1, w->dout, wide, w->dv + at, wide, 1);
    multiply(TILE, wide, TILE, w->ds, TILE, 1, w->q, wide, w->dk + at, wide, 1);
    multiply(TILE, wide, TILE, w->ds, 1, TILE, w->k + at, wide, w->dq, wide, 1);
}

struct gradients {
    void *dq, *dk, *dv;
    const void *dout, *out, *q, *k, *v;
    const float *lse;
};

static void backward_tile(enum sw_dtype dtype, const struct geometry *g, struct workspace *w,
                          const struct gradients *x, uint64_t batch, uint64_t head, uint64_t tile) {
    const uint64_t rows = tile_length(g, tile);
    const uint64_t first = (batch * g->time + tile * TILE) * g->q_stride + head * g->dim;
    const float *lse = x->lse + (batch * g->heads + head) * g->time + tile * TILE;
    SW_BY_DTYPE(dtype, pack_rows, g, w->q, x->q, first, g->q_stride, rows);
    SW_BY_DTYPE(dtype, pack_rows, g, w->dout, x->dout, first, g->q_stride, rows);
    SW_BY_DTYPE(dtype, pack_rows, g, w->out, x->out, first, g->q_stride, rows);
    transpose(g, w->qt, w->q, g->scale);
    transpose(g, w->doutt, w->dout, 1.0f);
    memset(w->dq, 0, TILE * g->wide * sizeof(float));
    for (uint64_t i = 0; i < TILE; i++) {
        const float *a = w->dout + i * g->wide, *b = w->out + i * g->wide;
        float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
        for (uint64_t d = 0; d < g->wide; d++) dot += a[d] * b[d];
        w->delta[i] = dot;
        w->lse[i] = i < rows ? lse[i] : 0.0f;
    }
    w->rows = rows;
    w->starts = starts_of(g, batch, tile);
    for (uint64_t t = first_key_tile(g, batch, tile); t <= tile; t++)
        backward_pair(g, w, t, t == tile);
    for (uint64_t i = 0; i < rows; i++)
        SW_BY_DTYPE(dtype, unpack_row, x->dq, first + i * g->q_stride, w->dq + i * g->wide, 1.0f,
                    g->dim);
}

static void backward_unit(enum sw_dtype dtype, const struct geometry *g, const struct gradients *x,
                          uint64_t unit, float *scratch) {
    struct workspace w;
    const uint64_t batch = unit / g->kv_heads, kv_head = unit % g->kv_heads;
    const uint64_t first = batch * g->time * g->kv_stride + kv_head * g->dim;
    workspace_lay(g, &w, scratch);
    for (uint64_t t = 0; t < g->tiles; t++) {
        const uint64_t to = t * TILE * g->wide, at = first + t * TILE * g->kv_stride;
        SW_BY_DTYPE(dtype, pack_rows, g, w.k + to, x->k, at, g->kv_stride, tile_length(g, t));
        SW_BY_DTYPE(dtype, pack_rows, g, w.v + to, x->v, at, g->kv_stride, tile_length(g, t));
    }
    memset(w.dk, 0, 2 * g->tiles * TILE * g->wide * sizeof(float)); /* dv follows dk */
    for (uint64_t h = 0; h < g->group; h++)
        for (uint64_t t = 0; t < g->tiles; t++)
            backward_tile(dtype, g, &w, x, batch, kv_head * g->group + h, t);
    for (uint64_t i = 0; i < g->time; i++) {
        const uint64_t at = first + i * g->kv_stride;
        SW_BY_DTYPE(dtype, unpack_row, x->dk, at, w.dk + i * g->wide, 1.0f, g->dim);
        SW_BY_DTYPE(dtype, unpack_row, x->dv, at, w.dv + i * g->wide, 1.0f, g->dim);
    }
}

static void backward(int threads, enum sw_dtype dtype, const struct sw_attention *shape, void *dq,
                     void *dk, void *dv, const void *dout, const void *out, const float *lse,
                     const void *q, const void *k, const void *v, void *scratch) {
    const struct geometry g = geometry_of(shape);
    const struct gradients x = {dq, dk, dv, dout, out, q, k, v, lse};
    const uint64_t units = g.batch * g.kv_heads, each = backward_floats(&g);
    if (units == 0 || g.time == 0) return;
#pragma omp parallel for schedule(dynamic, 1) num_threads(team_of(threads, units))
    for (uint64_t unit = 0; unit < units; unit++)
        backward_unit(dtype, &g, &x, unit,
                      (float *)scratch + each * (uint64_t)omp_get_thread_num());
}

static uint64_t scratch_bytes(int threads, const struct sw_attention *shape) {
    const struct geometry g = geometry_of(shape);
    const uint64_t heads = g.batch * g.kv_heads;
    const uint64_t units = heads * ((g.tiles * g.group + STATES - 1) / STATES);
    const uint64_t there = (uint64_t)team_of(threads, units) * forward_floats(&g);
    const uint64_t back = (uint64_t)team_of(threads, heads) * backward_floats(&g);
    return (there > back ? there : back) * sizeof(float);
}

extern const struct sw_host_attention SW_ISA_NAME(sw_host_attention);
const struct sw_host_attention SW_ISA_NAME(sw_host_attention) = {
    .scratch_bytes = scratch_bytes,
    .forward = forward,
    .backward = backward,
};
