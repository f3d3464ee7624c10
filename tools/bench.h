/* tools/bench.h - what the parts of `spillway bench` share. Times are wall time; a sample is one
 * pass, or several where one is too short to be measured. */
#ifndef TOOLS_BENCH_H
#define TOOLS_BENCH_H
#include <jansson.h>
#include <stddef.h>
#include <stdint.h>
#include "base/bf16.h"
#include "cpu_adam/adam.h"
#include "offload/topology.h"

enum { SW_BENCH_ROUNDS_MAX = 1001, SW_BENCH_ROUNDS_MIN = 3 };

double sw_bench_now(void);     /* seconds, monotonic */
double sw_bench_cpu_now(void); /* of all threads of this process, on all CPUs */
double sw_bench_median(const double *values, int count);

/* Numbers of an option at commas, each from 1 to max. Their count, or -EINVAL, reported. */
enum { SW_BENCH_LIST_MAX = 8 };
int sw_bench_list(const char *name, const char *text, uint64_t max,
                  uint64_t out[SW_BENCH_LIST_MAX]);

/* INT and TERM ask for an end; sw_bench_stopped() is the signal's number, 0 before. A second one
 * leaves at once. */
void sw_bench_watch_signals(void);
int sw_bench_stopped(void);
/* What a second one says as it leaves; NULL: nothing. The text stays until another takes its place.
 */
void sw_bench_leave_says(const char *text);

/* Every variant that runs here against the scalar one, bit for bit, in every format, and the scalar
 * one against the rule in double precision. 0, or -EIO, reported. */
int sw_bench_adam_verify(void);

/* One measured case and its figures. */
struct sw_bench_adam_row {
    uint64_t params;
    int threads;
    enum sw_dtype grad;
    int weight; /* a BF16 weight is emitted */
    uint64_t bytes_per_param;
    double ns_per_param, gb_per_s, limit_gb_per_s;
    double ratio;     /* median over rounds of (limit's time / update's time) */
    double cpu_share; /* of the threads' wall time that they had a CPU */
    int rounds;
    const char *limit_way;
};

/* What another format or an extra costs, beside the plain update. */
struct sw_bench_adam_kind {
    const char *name;
    double ns_per_param, relative; /* median over rounds of (its time / plain's time) */
};
enum { SW_BENCH_ADAM_KINDS = 6 };

/* Of scratch in a folder, at least. */
#define SW_BENCH_NVME_SIZE_MIN (4ull << 20)

/* Options that benchmarks share, fields of whose struct options they are named after. */
#define SW_BENCH_OPTION_SECONDS(what, seconds_by_default)                                          \
    {                                                                                              \
        .name = "seconds", .value = "S", .section = "Options",                                     \
        .help = "measure " what "for about so long", .fallback = (seconds_by_default),             \
        .kind = SW_OPTION_REAL, .offset = offsetof(struct options, seconds), .min = 0.1,           \
        .max = 3600                                                                                \
    }
#define SW_BENCH_OPTION_JSON                                                                       \
    {                                                                                              \
        .name = "json", .section = "Options", .help = "one JSON object instead of tables",         \
        .kind = SW_OPTION_FLAG, .offset = offsetof(struct options, json)                           \
    }
#define SW_BENCH_OPTION_PROFILE                                                                    \
    {                                                                                              \
        .name = "profile", .value = "FILE", .section = "Options",                                  \
        .help = "where to keep it, for plan --machine FILE",                                       \
        .fallback = "the machine profile of this user", .kind = SW_OPTION_TEXT,                    \
        .offset = offsetof(struct options, profile)                                                \
    }
#define SW_BENCH_OPTION_NVME                                                                       \
    {                                                                                              \
        .name = "nvme", .value = "DIR[,DIR...]", .section = "Options",                             \
        .help = "folders, one per drive", .fallback = "the current folder",                        \
        .kind = SW_OPTION_LIST, .offset = offsetof(struct options, nvme),                          \
        .count_offset = offsetof(struct options, nvme_count)                                       \
    }
#define SW_BENCH_OPTION_SIZE                                                                       \
    {                                                                                              \
        .name = "size", .value = "SIZE", .section = "Options",                                     \
        .help = "of the scratch file in each folder",                                              \
        .fallback = "1Gi, or an eighth of what is free", .kind = SW_OPTION_SIZE,                   \
        .offset = offsetof(struct options, size), .min = SW_BENCH_NVME_SIZE_MIN, .max = 1ull << 46 \
    }

struct sw_bench_adam;

/* Memory for cases of at most params_max parameters, filled; on a NUMA node (-1: any), which
 * sw_bench_adam_memory() tells to a team. 0 or -errno, reported. */
int sw_bench_adam_open(struct sw_bench_adam **bench, const struct sw_adam_variant *variant,
                       uint64_t params_max, int node);
const void *sw_bench_adam_memory(const struct sw_bench_adam *bench, uint64_t *bytes);
void sw_bench_adam_close(struct sw_bench_adam *bench); /* NULL is fine */

/* Fills row's figures in about `seconds`: interleaved rounds of update and limit. 0 or -EINTR. */
int sw_bench_adam_measure(struct sw_bench_adam *bench, struct sw_bench_adam_row *row,
                          double seconds);

/* The formats and extras beside each other, in about `seconds`. 0, or -errno, reported unless it is
 * -EINTR. */
int sw_bench_adam_kinds(const struct sw_adam_variant *variant, uint64_t params, int threads,
                        double seconds, struct sw_bench_adam_kind out[SW_BENCH_ADAM_KINDS]);

/* The drives of folders as `bench nvme` measures them, one by one and then together, about
 * `seconds` for each; kept in the machine profile. size: of scratch, 0: by what is free. quiet:
 * prints no table. The exit status. */
int sw_bench_nvme_drives(const char *const *folders, uint32_t count, double seconds, uint64_t size,
                         int quiet);

int sw_cmd_bench_all(int argc, char **argv);
int sw_cmd_bench_adam(int argc, char **argv);
int sw_cmd_bench_model(int argc, char **argv);
int sw_cmd_bench_nvme(int argc, char **argv);
int sw_cmd_bench_step(int argc, char **argv);

#endif
