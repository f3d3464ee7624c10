/* tools/bench_nvme.c - the sweep over settings, and the patterns in interleaved rounds.
 *
 * The sweep judges by the mixed pattern, which is what a training step does. Machines are shared:
 * passes over all settings interleave, so that a disturbance hits all of them alike, and the time
 * is spent on those that have been fast once. */
#include "tools/bench_nvme.h"

#include <assert.h>

#include "tools/bench.h"

/* As good as the best. */
#define NEAR_RATIO 0.97
/* A shorter look sees the start and the end alone. */
#define SLICE_MIN_S 0.002
enum { FIRST_PASSES = 2, FINALISTS = 8 };

static uint64_t in_flight(const struct sw_bench_nvme_setting *s) {
    return (uint64_t)s->block_bytes * s->depth;
}

const struct sw_bench_nvme_setting *
sw_bench_nvme_choose(const struct sw_bench_nvme_setting *settings, int count) {
    assert(count > 0);
    double best = 0;
    for (int i = 0; i < count; i++)
        if (settings[i].passes == SW_BENCH_NVME_PASSES && settings[i].rate > best)
            best = settings[i].rate;
    const struct sw_bench_nvme_setting *chosen = NULL;
    for (int i = 0; i < count; i++) {
        const struct sw_bench_nvme_setting *s = &settings[i];
        if (s->passes < SW_BENCH_NVME_PASSES || s->rate < NEAR_RATIO * best) continue;
        if (!chosen || in_flight(s) < in_flight(chosen) ||
            (in_flight(s) == in_flight(chosen) && s->rate > chosen->rate))
            chosen = s;
    }
    assert(chosen);
    return chosen;
}

static int try(struct sw_bench_nvme *b, struct sw_bench_nvme_setting *s, double seconds) {
    struct sw_nvme_rates rates;
    const int ret =
        sw_nvme_measure_run(b->measure, SW_NVME_MIXED, s->block_bytes, s->depth, seconds, &rates);
    if (ret) return ret;
    s->samples[s->passes++] = rates.read + rates.write;
    s->rate = sw_bench_median(s->samples, s->passes);
    return 0;
}

/* Each setting that `chosen` marks, once. */
static int pass(struct sw_bench_nvme *b, const int *chosen, double seconds) {
    int ret = 0;
    for (int i = 0; i < b->setting_count && !ret; i++)
        if (chosen[i]) ret = try(b, &b->settings[i], seconds > SLICE_MIN_S ? seconds : SLICE_MIN_S);
    return ret;
}

static double fastest(const struct sw_bench_nvme_setting *s) {
    double most = 0;
    for (int i = 0; i < s->passes; i++) most = s->samples[i] > most ? s->samples[i] : most;
    return most;
}

/* Leaves the FINALISTS whose fastest sample is best: what disturbs a sample makes it slower. */
static int pick_finalists(const struct sw_bench_nvme *b, int *chosen) {
    int count = 0;
    for (int i = 0; i < b->setting_count; i++) {
        int better = 0;
        for (int j = 0; j < b->setting_count; j++)
            better += fastest(&b->settings[j]) > fastest(&b->settings[i]);
        chosen[i] = better < FINALISTS;
        count += chosen[i];
    }
    return count;
}

int sw_bench_nvme_sweep(struct sw_bench_nvme *b, double seconds) {
    assert(b && b->setting_count > 0 && b->setting_count <= SW_BENCH_NVME_SETTINGS_MAX);
    const double begin = sw_bench_now();
    int chosen[SW_BENCH_NVME_SETTINGS_MAX], ret = 0;
    for (int i = 0; i < b->setting_count; i++) chosen[i] = 1;
    for (int n = 0; n < FIRST_PASSES && !ret; n++)
        ret = pass(b, chosen, seconds / 2 / FIRST_PASSES / b->setting_count);
    if (ret) return ret;
    const int count = pick_finalists(b, chosen);
    const double left = begin + seconds - sw_bench_now();
    for (int n = FIRST_PASSES; n < SW_BENCH_NVME_PASSES && !ret; n++)
        ret = pass(b, chosen, left / (SW_BENCH_NVME_PASSES - FIRST_PASSES) / count);
    if (!ret) b->best = *sw_bench_nvme_choose(b->settings, b->setting_count);
    return ret;
}

int sw_bench_nvme_rounds(struct sw_bench_nvme *b, double seconds) {
    assert(b && b->best.block_bytes > 0);
    enum { READ, WRITE, BOTH, KINDS };
    double samples[SW_BENCH_NVME_PATTERNS][KINDS][SW_BENCH_NVME_ROUNDS];
    double slice = seconds / SW_BENCH_NVME_ROUNDS / SW_BENCH_NVME_PATTERNS;
    if (slice < SLICE_MIN_S) slice = SLICE_MIN_S;
    int ret = 0;
    for (b->rounds = 0; b->rounds < SW_BENCH_NVME_ROUNDS; b->rounds++) {
        for (int k = 0; k < SW_BENCH_NVME_PATTERNS && !ret; k++) {
            /* Each goes first in its turn. */
            const int p = (k + b->rounds) % SW_BENCH_NVME_PATTERNS;
            struct sw_nvme_rates rates;
            ret = sw_nvme_measure_run(b->measure, (enum sw_nvme_pattern)p, b->best.block_bytes,
                                      b->best.depth, slice, &rates);
            if (ret) break;
            samples[p][READ][b->rounds] = rates.read;
            samples[p][WRITE][b->rounds] = rates.write;
            samples[p][BOTH][b->rounds] = rates.read + rates.write;
        }
        if (ret) break;
    }
    for (int p = 0; p < SW_BENCH_NVME_PATTERNS && b->rounds > 0; p++) {
        struct sw_bench_nvme_row *row = &b->rows[p];
        *row = (struct sw_bench_nvme_row){
            .pattern = (enum sw_nvme_pattern)p,
            .read = sw_bench_median(samples[p][READ], b->rounds),
            .write = sw_bench_median(samples[p][WRITE], b->rounds),
            .rate = sw_bench_median(samples[p][BOTH], b->rounds),
            .slowest = samples[p][BOTH][0],
        };
        for (int r = 0; r < b->rounds; r++) {
            const double rate = samples[p][BOTH][r];
            if (rate < row->slowest) row->slowest = rate;
            if (rate > row->fastest) row->fastest = rate;
        }
    }
    return ret;
}
