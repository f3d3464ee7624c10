/* kernels/host/rows_isa.c - operators that reduce along a row: the RMS norm, and the cross-entropy
 * over columns that come in parts. */
#include "kernels/host/isa_loops.h"
#include <math.h>
#include "kernels/host/host.h"

enum { COLUMNS = 64, SPAN = 4096, LANES = 16 };

SW_INLINE float rmsnorm_row(enum sw_dtype dtype, void *out, const void *x, const void *w,
                            uint64_t width, float eps) {
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (uint64_t c = 0; c < width; c++) {
        const float value = sw_load(dtype, x, c);
        squares += value * value;
    }
    const float rstd = 1.0f / sqrtf(squares / (float)width + eps);
#pragma omp simd
    for (uint64_t c = 0; c < width; c++)
        sw_store(dtype, out, c, sw_load(dtype, x, c) * rstd * sw_load(dtype, w, c));
    return rstd;
}

static void rmsnorm(int threads, enum sw_dtype dtype, void *out, float *rstd, const void *x,
                    const void *w, uint64_t n, uint64_t width, float eps) {
#pragma omp parallel for schedule(static) num_threads(sw_team(threads, n *width))
    for (uint64_t i = 0; i < n; i++)
        rstd[i] = SW_BY_DTYPE(dtype, rmsnorm_row, sw_at(dtype, out, i * width),
                              sw_at_const(dtype, x, i * width), w, width, eps);
}

/* dw of `count` columns: all rows in order, whoever computes it. */
SW_INLINE void rmsnorm_dw(enum sw_dtype dtype, float *dw, int add, const void *dy, const void *x,
                          const float *rstd, uint64_t n, uint64_t width, uint64_t first,
                          uint64_t count) {
    float sums[COLUMNS];
    for (uint64_t c = 0; c < count; c++) sums[c] = add ? dw[first + c] : 0.0f;
    for (uint64_t i = 0; i < n; i++) {
        const uint64_t at = i * width + first;
        const float r = rstd[i];
#pragma omp simd
        for (uint64_t c = 0; c < count; c++)
            sums[c] += sw_load(dtype, dy, at + c) * (sw_load(dtype, x, at + c) * r);
    }
    for (uint64_t c = 0; c < count; c++) dw[first + c] = sums[c];
}

/* With xhat = x rstd and g = dy w: dx = rstd (g - xhat mean(g xhat)). */
SW_INLINE void rmsnorm_dx(enum sw_dtype dtype, void *dx, int add, const void *dy, const void *x,
                          const void *w, float rstd, uint64_t width) {
    float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
    for (uint64_t c = 0; c < width; c++)
        dot += sw_load(dtype, dy, c) * sw_load(dtype, w, c) * (sw_load(dtype, x, c) * rstd);
    const float mean = dot / (float)width;
    if (add) {
#pragma omp simd
        for (uint64_t c = 0; c < width; c++) {
            const float g = sw_load(dtype, dy, c) * sw_load(dtype, w, c);
            const float d = rstd * (g - sw_load(dtype, x, c) * rstd * mean);
            sw_store(dtype, dx, c, sw_load(dtype, dx, c) + d);
        }
    } else {
#pragma omp simd
        for (uint64_t c = 0; c < width; c++) {
            const float g = sw_load(dtype, dy, c) * sw_load(dtype, w, c);
            sw_store(dtype, dx, c, rstd * (g - sw_load(dtype, x, c) * rstd * mean));
        }
    }
}

static void rmsnorm_backward(int threads, enum sw_dtype dtype, void *dx, int add_dx, float *dw,
                             int add_dw, const void *dy, const void *x, const void *w,
                             const float *rstd, uint64_t n, uint64_t width) {
    const int team = sw_team(threads, n * width);
    const uint64_t columns = dw ? width : 0;
#pragma omp parallel for schedule(static) num_threads(team)
    for (uint64_t first = 0; first < columns; first += COLUMNS) {
        const uint64_t count = width - first < COLUMNS ? width - first : COLUMNS;
        SW_BY_DTYPE(dtype, rmsnorm_dw, dw, add_dw, dy, x, rstd, n, width, first, count);
    }
    /* After dw, so that dx may lie where dy does. */
#pragma omp parallel for schedule(static) num_threads(team)
    for (uint64_t i = 0; i < n; i++)
        SW_BY_DTYPE(dtype, rmsnorm_dx, sw_at(dtype, dx, i * width), add_dx,
                    sw_at_const(dtype, dy, i * width), sw_at_const(dtype, x, i * width), w, rstd[i],
                    width);
}

/* Lane by lane, because not every compiler vectorises a maximum as a reduction. */
static float row_max(const float *x, uint64_t count) {
    float lanes[LANES];
    for (int l = 0; l < LANES; l++) lanes[l] = x[0];
    const uint64_t whole = count / LANES * LANES;
    for (uint64_t c = 0; c < whole; c += LANES) {
#pragma omp simd
        for (int l = 0; l < LANES; l++)
            lanes[l] = x[c + (uint64_t)l] > lanes[l] ? x[c + (uint64_t)l] : lanes[l];
    }
    float most = lanes[0];
    for (int l = 1; l < LANES; l++) most = lanes[l] > most ? lanes[l] : most;
    for (uint64_t c = whole; c < count; c++) most = x[c] > most ? x[c] : most;
    return most;
}

/* In spans, each summed in FP32 and added in double: the error does not grow with the row. */
static double exp_sum(const float *x, float most, uint64_t count) {
    double total = 0.0;
    for (uint64_t first = 0; first < count; first += SPAN) {
        const uint64_t last = count - first < SPAN ? count : first + SPAN;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (uint64_t c = first; c < last; c++) sum += sw_exp(x[c] - most);
        total += (double)sum;
    }
    return total;
}

SW_INLINE void softmax_row(enum sw_dtype dtype, void *out, const float *x, float most, float factor,
                           uint64_t count) {
#pragma omp simd
    for (uint64_t c = 0; c < count; c++) sw_store(dtype, out, c, sw_exp(x[c] - most) * factor);
}

SW_INLINE void zero_row(enum sw_dtype dtype, void *out, uint64_t count) {
#pragma omp simd
    for (uint64_t c = 0; c < count; c++) sw_store(dtype, out, c, 0.0f);
}

/* A row's place in stats. */
enum { MOST, SUM, WANTED, STATS };

/* Joins columns with what came before. One of the two factors is exp(0), exactly 1. A NaN on either
 * side makes the sum NaN, and a NaN stays one. */
static void stats_row(float *stats, const float *x, uint64_t width, uint64_t wanted, int begin) {
    const float most = row_max(x, width);
    const double sum = exp_sum(x, most, width);
    if (begin) {
        stats[MOST] = most;
        stats[SUM] = (float)sum;
        stats[WANTED] = NAN;
    } else {
        const float both = stats[MOST] > most ? stats[MOST] : most;
        const double before = (double)stats[SUM] * (double)sw_exp(stats[MOST] - both);
        stats[SUM] = (float)(before + sum * (double)sw_exp(most - both));
        stats[MOST] = both;
    }
    if (wanted < width) stats[WANTED] = x[wanted];
}

/* A target before the first column wraps to beyond the last. */
static uint64_t column_of(int32_t target, uint64_t first_column) {
    return (uint64_t)target - first_column;
}

static void softmax_stats(int threads, float *stats, const float *logits, const int32_t *targets,
                          uint64_t n, uint64_t width, uint64_t first_column, int begin) {
#pragma omp parallel for schedule(static) num_threads(sw_team(threads, n *width))
    for (uint64_t i = 0; i < n; i++)
        stats_row(stats + i * STATS, logits + i * width, width, column_of(targets[i], first_column),
                  begin);
}

static void softmax_loss(int threads, float *loss, const float *stats, const uint8_t *mask,
                         uint64_t n) {
#pragma omp parallel for schedule(static) num_threads(sw_team(threads, n))
    for (uint64_t i = 0; i < n; i++) {
        const float *row = stats + i * STATS;
        const double rest = (double)row[MOST] - (double)row[WANTED];
        loss[i] = !mask || mask[i] ? (float)(log((double)row[SUM]) + rest) : 0.0f;
    }
}

SW_INLINE void gradient_row(enum sw_dtype dtype, void *out, const float *x, const float *stats,
                            float scale, uint64_t width, uint64_t wanted) {
    const float factor = (float)((double)scale / (double)stats[SUM]), most = stats[MOST];
    float at_target = 0.0f; /* before out may overwrite it */
    if (wanted < width) at_target = (sw_exp(x[wanted] - most) * factor) - scale;
    softmax_row(dtype, out, x, most, factor, width);
    if (wanted < width) sw_store(dtype, out, wanted, at_target);
}

static void softmax_backward(int threads, enum sw_dtype dtype, void *dlogits, const float *logits,
                             const float *stats, const int32_t *targets, const uint8_t *mask,
                             float scale, uint64_t n, uint64_t width, uint64_t first_column) {
#pragma omp parallel for schedule(static) num_threads(sw_team(threads, n *width))
    for (uint64_t i = 0; i < n; i++) {
        void *row = sw_at(dtype, dlogits, i * width);
        if (!mask || mask[i])
            SW_BY_DTYPE(dtype, gradient_row, row, logits + i * width, stats + i * STATS, scale,
                        width, column_of(targets[i], first_column));
        else
            SW_BY_DTYPE(dtype, zero_row, row, width);
    }
}

extern const struct sw_host_rows SW_ISA_NAME(sw_host_rows);
const struct sw_host_rows SW_ISA_NAME(sw_host_rows) = {
    .rmsnorm = rmsnorm,
    .rmsnorm_backward = rmsnorm_backward,
    .softmax_stats = softmax_stats,
    .softmax_loss = softmax_loss,
    .softmax_backward = softmax_backward,
};
