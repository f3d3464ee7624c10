/* tools/bench_adam.c - the update against the memory limit, in interleaved rounds.
 *
 * Both work on the same memory with the same threads, one after the other: what disturbs the
 * machine disturbs both, and their ratio stays. The limit is the best of the ways of
 * offload/stream.h, chosen by trying them all, then measured anew beside the update. */
#include "tools/bench.h"

#include <assert.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "offload/arena.h"
#include "offload/stream.h"
#include "tools/signals.h"

/* A sample passes over at least so many parameters, unless they are very few. */
enum { SAMPLE_PARAMS = 4 << 20, REPEATS_MAX = 1024 };

/* Arrays whose addresses agree in their low bits would fight for the same cache sets. */
enum { SKEW_BYTES = 5 * 4096 + 1024 };

struct sw_bench_adam {
    const struct sw_adam_variant *variant;
    struct sw_arena arena;
    uint64_t params_max;
    float *master, *momentum, *variance;
    void *grad;
    sw_bf16 *weight;
    const struct sw_stream_way *way; /* the limit's, chosen for the row way_of */
    struct sw_bench_adam_row way_of;
};

/* ---- time and signals ---- */

static atomic_int stop_signal;

static _Atomic(const char *) last_words;

static void on_signal(int number) {
    int none = 0;
    if (atomic_compare_exchange_strong(&stop_signal, &none, number)) return;
    const char *text = atomic_load(&last_words);
    const ssize_t ignored = text ? write(STDERR_FILENO, text, strlen(text)) : 0;
    (void)ignored;
    _exit(128 + number);
}

void sw_bench_leave_says(const char *text) {
    atomic_store(&last_words, text);
}

void sw_bench_watch_signals(void) {
    sw_catch_signal(SIGINT, on_signal);
    sw_catch_signal(SIGTERM, on_signal);
}

int sw_bench_stopped(void) {
    return atomic_load(&stop_signal);
}

static double seconds_of(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

double sw_bench_now(void) {
    return seconds_of(CLOCK_MONOTONIC);
}

double sw_bench_cpu_now(void) {
    return seconds_of(CLOCK_PROCESS_CPUTIME_ID);
}

static int compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double sw_bench_median(const double *values, int count) {
    double sorted[SW_BENCH_ROUNDS_MAX];
    assert(count > 0 && count <= SW_BENCH_ROUNDS_MAX);
    memcpy(sorted, values, (size_t)count * sizeof(*values));
    qsort(sorted, (size_t)count, sizeof(*sorted), compare);
    return count % 2 ? sorted[count / 2] : (sorted[count / 2 - 1] + sorted[count / 2]) / 2;
}

/* ---- memory ---- */

/* Gradients near 1e-3 of either sign, as [0, count) of either dtype. */
static void fill_grad(void *grad, enum sw_dtype dtype, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) {
        const float g = (i % 3 ? 1e-3f : -1e-3f) * (float)(1 + i % 7);
        if (dtype == SW_BF16)
            ((sw_bf16 *)grad)[i] = sw_bf16_from_f32(g);
        else
            ((float *)grad)[i] = g;
    }
}

int sw_bench_adam_open(struct sw_bench_adam **bench, const struct sw_adam_variant *variant,
                       uint64_t params_max, int node) {
    struct sw_bench_adam *b = calloc(1, sizeof(*b));
    if (!b) return -ENOMEM;
    const uint64_t floats = sw_arena_need(params_max * sizeof(float) + 5 * SKEW_BYTES);
    const struct sw_arena_piece piece = {
        4 * floats + sw_arena_need(params_max * sizeof(sw_bf16) + 5 * SKEW_BYTES), node};
    const int ret = sw_arena_open_pieces(&b->arena, &piece, 1);
    if (ret) {
        free(b);
        return ret;
    }
    b->variant = variant;
    b->params_max = params_max;
    void *at[5];
    for (int i = 0; i < 5; i++)
        at[i] = (char *)sw_arena_take(&b->arena,
                                      params_max * (i < 4 ? sizeof(float) : sizeof(sw_bf16)) +
                                          5 * SKEW_BYTES) +
                i * SKEW_BYTES;
    b->master = at[0];
    b->momentum = at[1];
    b->variance = at[2];
    b->grad = at[3];
    b->weight = at[4];
    for (uint64_t i = 0; i < params_max; i++) {
        b->master[i] = 0.5f + (float)(i % 1024) * 0x1p-11f;
        b->momentum[i] = 1e-3f;
        b->variance[i] = 1e-5f;
    }
    *bench = b;
    return 0;
}

const void *sw_bench_adam_memory(const struct sw_bench_adam *b, uint64_t *bytes) {
    *bytes = b->arena.bytes;
    return b->arena.base;
}

void sw_bench_adam_close(struct sw_bench_adam *b) {
    if (!b) return;
    sw_arena_close(&b->arena);
    free(b);
}

/* ---- one case ---- */

/* One case's passes: updates, and streams of the same mix. */
struct passes {
    const struct sw_adam_variant *variant;
    struct sw_adam_step step;
    struct sw_adam_range range;
    struct sw_adam_chunk chunk;
    struct sw_stream_arrays arrays;
    int threads;
    uint64_t repeats;
};

static void set_up(struct passes *p, const struct sw_bench_adam *b,
                   const struct sw_bench_adam_row *row) {
    const struct sw_adam_hyper hyper = {1e-6, 0.9, 0.95, 1e-8, 0.1, 0};
    memset(p, 0, sizeof(*p));
    p->variant = b->variant;
    p->threads = row->threads;
    p->repeats = row->params < SAMPLE_PARAMS ? SAMPLE_PARAMS / row->params : 1;
    if (p->repeats > REPEATS_MAX) p->repeats = REPEATS_MAX;
    p->range = (struct sw_adam_range){row->params, 1};
    sw_adam_prepare(&p->step, &hyper, 100, 0.5f);
    p->chunk = (struct sw_adam_chunk){
        .format = {.grad = row->grad, .weight = SW_BF16},
        .count = row->params,
        .ranges = &p->range,
        .range_count = 1,
        .master = b->master,
        .momentum = b->momentum,
        .variance = b->variance,
        .grad = b->grad,
        .weight = row->weight ? b->weight : NULL,
    };
    p->arrays = (struct sw_stream_arrays){
        .count = row->params,
        .master = b->master,
        .momentum = b->momentum,
        .variance = b->variance,
        .grad = b->grad,
        .grad_dtype = row->grad,
        .weight = row->weight ? b->weight : NULL,
    };
}

/* Seconds of one sample: of the update, or of a way of passing. */
static double sample(const struct passes *p, const struct sw_stream_way *way) {
    const double start = sw_bench_now();
    for (uint64_t r = 0; r < p->repeats; r++) {
        if (way)
            sw_stream_pass(p->variant->isa, way, &p->arrays, p->threads);
        else
            sw_adam_update(p->variant, &p->step, &p->chunk, p->threads, NULL);
    }
    return sw_bench_now() - start;
}

/* Every way once, then the better half twice more; the fastest sample wins. */
static const struct sw_stream_way *best_way(const struct passes *p) {
    double least[SW_STREAM_WAYS], sorted[SW_STREAM_WAYS];
    for (int w = 0; w < SW_STREAM_WAYS; w++) least[w] = sample(p, &sw_stream_ways[w]);
    memcpy(sorted, least, sizeof(least));
    qsort(sorted, SW_STREAM_WAYS, sizeof(*sorted), compare);
    int best = 0;
    for (int w = 0; w < SW_STREAM_WAYS; w++)
        for (int again = 0; again < 2 && least[w] <= sorted[SW_STREAM_WAYS / 2]; again++) {
            const double s = sample(p, &sw_stream_ways[w]);
            least[w] = s < least[w] ? s : least[w];
        }
    for (int w = 1; w < SW_STREAM_WAYS; w++)
        if (least[w] < least[best]) best = w;
    return &sw_stream_ways[best];
}

/* Cases that differ only in how far they are past the cache share their way. */
static int same_way(const struct sw_bench_adam *b, const struct sw_bench_adam_row *row) {
    const struct sw_bench_adam_row *had = &b->way_of;
    return b->way && had->threads == row->threads && had->grad == row->grad &&
           had->weight == row->weight && had->params >= SAMPLE_PARAMS && row->params > had->params;
}

int sw_bench_adam_measure(struct sw_bench_adam *b, struct sw_bench_adam_row *row, double seconds) {
    assert(b && row && row->params > 0 && row->params <= b->params_max && row->threads >= 1);
    double update[SW_BENCH_ROUNDS_MAX], limit[SW_BENCH_ROUNDS_MAX], ratio[SW_BENCH_ROUNDS_MAX];
    const double start = sw_bench_now();
    struct passes p;
    set_up(&p, b, row);
    fill_grad(b->grad, row->grad, row->params);
    sample(&p, NULL); /* warm-up: threads, pages, caches */
    if (!same_way(b, row)) b->way = best_way(&p);
    b->way_of = *row;
    const double wall = sw_bench_now(), cpu = sw_bench_cpu_now();
    int n = 0;
    while (n < SW_BENCH_ROUNDS_MAX &&
           (n < SW_BENCH_ROUNDS_MIN || sw_bench_now() - start < seconds)) {
        /* Who goes first takes turns: neither always follows the other. */
        if (n % 2) limit[n] = sample(&p, b->way);
        update[n] = sample(&p, NULL);
        if (n % 2 == 0) limit[n] = sample(&p, b->way);
        if (sw_bench_stopped()) return -EINTR;
        ratio[n] = limit[n] / update[n];
        n++;
    }
    const double passed = (double)row->params * (double)p.repeats;
    row->bytes_per_param = sw_stream_bytes(row->grad, row->weight);
    row->ns_per_param = 1e9 * sw_bench_median(update, n) / passed;
    row->gb_per_s = (double)row->bytes_per_param / row->ns_per_param;
    row->limit_gb_per_s = 1e-9 * (double)row->bytes_per_param * passed / sw_bench_median(limit, n);
    row->ratio = sw_bench_median(ratio, n);
    row->cpu_share = (sw_bench_cpu_now() - cpu) / ((sw_bench_now() - wall) * (double)row->threads);
    row->rounds = n;
    row->limit_way = b->way->name;
    return 0;
}
