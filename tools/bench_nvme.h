/* tools/bench_nvme.h - the two stages of `spillway bench nvme` on one drive. Rates are bytes per
 * second. Errors as in nvme/measure.h. */
#ifndef TOOLS_BENCH_NVME_H
#define TOOLS_BENCH_NVME_H
#include <stdint.h>
#include "nvme/measure.h"

enum {
    SW_BENCH_NVME_SETTINGS_MAX = 64,
    SW_BENCH_NVME_PASSES = 5,
    SW_BENCH_NVME_ROUNDS = 5,
    SW_BENCH_NVME_PATTERNS = 3
};

/* A block size and a depth of the sweep, and the median of its mixed rates, both directions
 * together. All are tried twice, the best of them SW_BENCH_NVME_PASSES times. */
struct sw_bench_nvme_setting {
    uint32_t block_bytes, depth;
    double rate, samples[SW_BENCH_NVME_PASSES];
    int passes;
};

/* Medians over rounds, and the rates of the slowest and fastest round. */
struct sw_bench_nvme_row {
    enum sw_nvme_pattern pattern;
    double read, write, rate, slowest, fastest;
};

struct sw_bench_nvme {
    struct sw_nvme_measure *measure;
    struct sw_bench_nvme_setting settings[SW_BENCH_NVME_SETTINGS_MAX];
    int setting_count;
    struct sw_bench_nvme_setting best;
    struct sw_bench_nvme_row rows[SW_BENCH_NVME_PATTERNS];
    int rounds; /* that are whole: 0, and rows mean nothing */
};

/* Of the settings that were tried to the end, the one with the fewest bytes in flight whose rate is
 * near the best. */
const struct sw_bench_nvme_setting *
sw_bench_nvme_choose(const struct sw_bench_nvme_setting *settings, int count);

/* Tries all settings in the mixed pattern and sets best. */
int sw_bench_nvme_sweep(struct sw_bench_nvme *bench, double seconds);

/* Times the patterns at the best setting in interleaved rounds. Interrupted, the rows are of the
 * rounds before. */
int sw_bench_nvme_rounds(struct sw_bench_nvme *bench, double seconds);

#endif
