/* kernels/host/pointwise_isa.c - gather and scatter of embedding rows, rotation, gating, rounding
 * and the conversions around matrix products. */
#include "base/block_norm.h"
#include "kernels/host/isa_loops.h"
#include <omp.h>
#include <string.h>
#include "kernels/host/host.h"

enum { SPAN = 4096, COLUMNS = 16 }; /* elements and table columns of one thread's smallest share */

static uint64_t spans_of(uint64_t count) {
    return (count + SPAN - 1) / SPAN;
}

static uint64_t span_length(uint64_t count, uint64_t span) {
    const uint64_t left = count - span * SPAN;
    return left < SPAN ? left : SPAN;
}

/* The token's row in a table that begins at first_row; what lies before it wraps to a huge number,
 * so that one comparison with the table's rows tells whether it is there. */
static uint64_t row_of(int32_t token, uint64_t first_row) {
    return (uint64_t)token - first_row;
}

static void embed(int threads, enum sw_dtype dtype, void *out, const void *table,
                  const int32_t *tokens, uint64_t n, uint64_t width, uint64_t first_row,
                  uint64_t rows) {
    const uint64_t row_bytes = width * sw_dtype_bytes(dtype);
#pragma omp parallel for schedule(static) num_threads(sw_team(threads, n *width))
    for (uint64_t i = 0; i < n; i++) {
        const uint64_t row = row_of(tokens[i], first_row);
        if (row < rows)
            memcpy((char *)out + i * row_bytes, (const char *)table + row * row_bytes, row_bytes);
    }
}

SW_INLINE void add_row(enum sw_dtype dtype, float *row, const void *dout, uint64_t first,
                       uint64_t count) {
#pragma omp simd
    for (uint64_t c = 0; c < count; c++) row[c] += sw_load(dtype, dout, first + c);
}

/* Each thread owns a range of columns and walks all tokens in order, so every sum has one order. */
static void embed_backward(int threads, enum sw_dtype dtype, float *dtable, const void *dout,
                           const int32_t *tokens, uint64_t n, uint64_t width, uint64_t first_row,
                           uint64_t rows) {
    const uint64_t groups = (width + COLUMNS - 1) / COLUMNS;
#pragma omp parallel num_threads(sw_team(threads, n *width))
    {
        const uint64_t team = (uint64_t)omp_get_num_threads(), me = (uint64_t)omp_get_thread_num();
        const uint64_t begin = groups * me / team * COLUMNS;
        const uint64_t last = groups * (me + 1) / team * COLUMNS;
        const uint64_t end = last < width ? last : width;
        for (uint64_t i = 0; i < n && begin < end; i++) {
            const uint64_t row = row_of(tokens[i], first_row);
            if (row < rows)
                SW_BY_DTYPE(dtype, add_row, dtable + row * width + begin, dout, i * width + begin,
                            end - begin);
        }
    }
}

SW_INLINE void rope_head(enum sw_dtype dtype, void *x, const float *cos, const float *sin,
                         uint64_t half, float sign) {
#pragma omp simd
    for (uint64_t i = 0; i < half; i++) {
        const float a = sw_load(dtype, x, i), b = sw_load(dtype, x, half + i);
        const float s = sign * sin[i];
        sw_store(dtype, x, i, a * cos[i] - b * s);
        sw_store(dtype, x, half + i, b * cos[i] + a * s);
    }
}

static void rope(int threads, enum sw_dtype dtype, void *x, const float *cos, const float *sin,
                 uint64_t rows, uint64_t time, uint64_t heads, uint64_t head_dim, int inverse) {
    const uint64_t half = head_dim / 2;
    const float sign = inverse ? -1.0f : 1.0f;
#pragma omp parallel for schedule(static) num_threads(sw_team(threads, rows *heads *head_dim))
    for (uint64_t row = 0; row < rows; row++) {
        const uint64_t angle = row % time * half;
        for (uint64_t h = 0; h < heads; h++)
            SW_BY_DTYPE(dtype, rope_head, sw_at(dtype, x, (row * heads + h) * head_dim),
                        cos + angle, sin + angle, half, sign);
    }
}

SW_INLINE void swiglu_span(enum sw_dtype dtype, void *out, const void *gate, const void *up,
                           uint64_t first, uint64_t count) {
#pragma omp simd
    for (uint64_t i = first; i < first + count; i++) {
        const float g = sw_load(dtype, gate, i);
        sw_store(dtype, out, i, g / (1.0f + sw_exp(-g)) * sw_load(dtype, up, i));
    }
}

static void swiglu(int threads, enum sw_dtype dtype, void *out, const void *gate, const void *up,
                   uint64_t count) {
#pragma omp parallel for schedule(static) num_threads(sw_team(threads, count))
    for (uint64_t s = 0; s < spans_of(count); s++)
        SW_BY_DTYPE(dtype, swiglu_span, out, gate, up, s * SPAN, span_length(count, s));
}

/* d silu(g) / dg = sigmoid(g) (1 + g (1 - sigmoid(g))) */
SW_INLINE void swiglu_backward_span(enum sw_dtype dtype, void *dgate, void *dup, const void *dout,
                                    const void *gate, const void *up, uint64_t first,
                                    uint64_t count) {
#pragma omp simd
    for (uint64_t i = first; i < first + count; i++) {
        const float g = sw_load(dtype, gate, i), u = sw_load(dtype, up, i);
        const float d = sw_load(dtype, dout, i);
        const float e = sw_exp(-g), sigmoid = 1.0f / (1.0f + e);
        const float slope = sigmoid * (1.0f + g * (e * sigmoid)); /* 1 - sigmoid, not cancelled */
        sw_store(dtype, dgate, i, d * u * slope);
        sw_store(dtype, dup, i, d * (g * sigmoid));
    }
}

static void swiglu_backward(int threads, enum sw_dtype dtype, void *dgate, void *dup,
                            const void *dout, const void *gate, const void *up, uint64_t count) {
#pragma omp parallel for schedule(static) num_threads(sw_team(threads, count))
    for (uint64_t s = 0; s < spans_of(count); s++)
        SW_BY_DTYPE(dtype, swiglu_backward_span, dgate, dup, dout, gate, up, s * SPAN,
                    span_length(count, s));
}

SW_INLINE void round_span(enum sw_dtype dtype, void *dst, const float *src, uint64_t first,
                          uint64_t count) {
#pragma omp simd
    for (uint64_t i = first; i < first + count; i++) sw_store(dtype, dst, i, src[i]);
}

/* Not named round: that is libm's, which the compiler knows. */
static void round_all(int threads, enum sw_dtype dtype, void *dst, const float *src,
                      uint64_t count) {
#pragma omp parallel for schedule(static) num_threads(sw_team(threads, count))
    for (uint64_t s = 0; s < spans_of(count); s++)
        SW_BY_DTYPE(dtype, round_span, dst, src, s * SPAN, span_length(count, s));
}

SW_INLINE uint64_t first_nonfinite(enum sw_dtype dtype, const void *x, uint64_t first) {
    while ((sw_f32_bits(sw_load(dtype, x, first)) & 0x7F800000u) != 0x7F800000u) first++;
    return first;
}

static void round_norm(int threads, void *dst, enum sw_dtype dtype, const float *src,
                       uint64_t count, double *block_sums, struct sw_nonfinite *bad) {
    const uint64_t blocks = (count + SW_NORM_BLOCK - 1) / SW_NORM_BLOCK;
    uint64_t total = 0, first = UINT64_MAX;
#pragma omp parallel for schedule(static) num_threads(sw_team(threads, count))                     \
    reduction(+ : total) reduction(min : first)
    for (uint64_t b = 0; b < blocks; b++) {
        const uint64_t begin = b * SW_NORM_BLOCK, left = count - begin;
        const uint64_t length = left < SW_NORM_BLOCK ? left : SW_NORM_BLOCK;
        SW_BY_DTYPE(dtype, round_span, dst, src, begin, length);
        const char *block = (const char *)dst + begin * sw_dtype_bytes(dtype);
        uint64_t found = 0;
        block_sums[b] = SW_BY_DTYPE(dtype, sw_block_norm, block, length, &found);
        if (found) {
            const uint64_t at = SW_BY_DTYPE(dtype, first_nonfinite, dst, begin);
            first = at < first ? at : first;
            total += found;
        }
    }
    *bad = (struct sw_nonfinite){.count = total};
    if (total) {
        const float value = SW_BY_DTYPE(dtype, sw_load, dst, first);
        bad->first = first;
        bad->is_nan = value != value;
    }
}

SW_INLINE void widen_row(enum sw_dtype dtype, float *out, const void *x, uint64_t count) {
#pragma omp simd
    for (uint64_t i = 0; i < count; i++) out[i] = sw_load(dtype, x, i);
}

static void widen(int threads, float *panel, uint64_t panel_ld, const void *src,
                  enum sw_dtype dtype, uint64_t ld, uint64_t rows, uint64_t cols) {
#pragma omp parallel for schedule(static) num_threads(sw_team(threads, rows *cols))
    for (uint64_t r = 0; r < rows; r++)
        SW_BY_DTYPE(dtype, widen_row, panel + r * panel_ld, sw_at_const(dtype, src, r * ld), cols);
}

SW_INLINE void narrow_row(enum sw_dtype dtype, void *out, const float *x, uint64_t count) {
#pragma omp simd
    for (uint64_t i = 0; i < count; i++) sw_store(dtype, out, i, x[i]);
}

static void narrow(int threads, void *dst, enum sw_dtype dtype, uint64_t ld, const float *panel,
                   uint64_t panel_ld, uint64_t rows, uint64_t cols) {
#pragma omp parallel for schedule(static) num_threads(sw_team(threads, rows *cols))
    for (uint64_t r = 0; r < rows; r++)
        SW_BY_DTYPE(dtype, narrow_row, sw_at(dtype, dst, r * ld), panel + r * panel_ld, cols);
}

static void exp_span(float *out, const float *x, uint64_t count) {
#pragma omp simd
    for (uint64_t i = 0; i < count; i++) out[i] = sw_exp(x[i]);
}

extern const struct sw_host_pointwise SW_ISA_NAME(sw_host_pointwise);
const struct sw_host_pointwise SW_ISA_NAME(sw_host_pointwise) = {
    .embed = embed,
    .embed_backward = embed_backward,
    .rope = rope,
    .swiglu = swiglu,
    .swiglu_backward = swiglu_backward,
    .round = round_all,
    .round_norm = round_norm,
    .widen = widen,
    .narrow = narrow,
    .exp = exp_span,
};
