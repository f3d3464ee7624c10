/* tools/cmd_bench_adam.c - `spillway bench adam`: its options, the order of its rows, and what it
 * prints. Verifies first: figures of a wrong update are worth nothing. */
#include "tools/bench.h"

#include <errno.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/size.h"
#include "offload/thread_trial.h"
#include "tools/command_line.h"

enum { MIXES = 4, ROWS_MAX = SW_BENCH_LIST_MAX * SW_BENCH_LIST_MAX * MIXES };
/* In the second-level cache of any core; past it; and of each kind of format. */
#define SMALL_PARAMS (16ull << 10)
#define LARGE_PARAMS (64ull << 20)
#define KIND_PARAMS  (16ull << 20)
/* Of the memory that may be used, the default sizes take this much at most. */
enum { MEMORY_SHARE = 3 };
/* State and gradient and weight at their widest. */
enum { PARAM_BYTES = 3 * 4 + 4 + 2 };
/* The formats' part of the time. */
enum { KINDS_SHARE = 8 };

struct options {
    double seconds;
    int json;
    const char *threads, *params;
};

struct report {
    struct options options;
    struct sw_topology topology;
    const struct sw_adam_variant *variant;
    uint64_t params[SW_BENCH_LIST_MAX];
    int params_count;
    int threads[SW_BENCH_LIST_MAX];
    int threads_count, threads_max;
    struct sw_bench_adam_row rows[ROWS_MAX];
    int row_count, rows_done;
    struct sw_bench_adam_kind kinds[SW_BENCH_ADAM_KINDS];
    int kinds_done;
    uint64_t kind_params;
};

static const struct sw_option options_table[] = {
    SW_BENCH_OPTION_SECONDS("", "100"),
    {.name = "threads",
     .value = "N[,N...]",
     .section = "Options",
     .help = "thread counts to try",
     .fallback = "1 and as many as may run",
     .kind = SW_OPTION_TEXT,
     .offset = offsetof(struct options, threads)},
    {.name = "params",
     .value = "N[,N...]",
     .section = "Options",
     .help = "parameter counts, such as 64Mi",
     .fallback = "one in the cache, two past it",
     .kind = SW_OPTION_TEXT,
     .offset = offsetof(struct options, params)},
    SW_BENCH_OPTION_JSON,
    SW_OPTION_HELP("Options"),
};

static const struct sw_command command = {
    .name = "bench adam",
    .usage = "bench adam [--seconds S] [--threads N[,N...]] [--params N[,N...]] [--json]",
    .summary =
        "Checks every variant of the CPU's Adam on this machine, then times the update against "
        "the\n"
        "memory limit: streams of the same reads and writes without the arithmetic, in "
        "interleaved\n"
        "rounds. ratio is the median of limit's time / update's time; 1 is all that memory gives.\n"
        "GB/s count what the update reads and writes: 24 bytes of state, gradient, weight.\n"
        "SPILLWAY_ISA=avx512|avx2|scalar picks the variant. The exit status is 1 when a check "
        "fails.",
    .options = options_table,
    .option_count = sizeof(options_table) / sizeof(options_table[0]),
};

/* ---- what to measure ---- */

/* The last cache's size, so that "past it" is. 0: unknown. */
static uint64_t cache_bytes(void) {
    const long l3 = sysconf(_SC_LEVEL3_CACHE_SIZE), l2 = sysconf(_SC_LEVEL2_CACHE_SIZE);
    return l3 > 0 ? (uint64_t)l3 : l2 > 0 ? (uint64_t)l2 : 0;
}

static int choose_params(struct report *r) {
    if (r->options.params) {
        r->params_count = sw_bench_list("params", r->options.params, 1ull << 40, r->params);
        return r->params_count < 0 ? r->params_count : 0;
    }
    uint64_t large = LARGE_PARAMS;
    while (large * 12 < 3 * cache_bytes()) large *= 2;
    const uint64_t fits = r->topology.memory_bytes / MEMORY_SHARE / PARAM_BYTES;
    r->params[r->params_count++] = SMALL_PARAMS;
    while (large > fits && large > SMALL_PARAMS) large /= 2;
    if (large > SMALL_PARAMS) r->params[r->params_count++] = large;
    if (2 * large <= fits) r->params[r->params_count++] = 2 * large;
    return 0;
}

static int choose_threads(struct report *r) {
    uint64_t list[SW_BENCH_LIST_MAX] = {1, (uint64_t)sw_topology_threads(&r->topology)};
    int count = list[1] > 1 ? 2 : 1;
    if (r->options.threads)
        count = sw_bench_list("threads", r->options.threads, SW_ADAM_THREADS_MAX, list);
    if (count < 0) return count;
    for (int i = 0; i < count; i++) {
        r->threads[i] = (int)list[i];
        if (r->threads[i] > r->threads_max) r->threads_max = r->threads[i];
    }
    r->threads_count = count;
    return 0;
}

/* Sizes innermost: those past the cache share what was found out about the limit. */
static void choose_rows(struct report *r) {
    for (int t = 0; t < r->threads_count; t++)
        for (int mix = 0; mix < MIXES; mix++)
            for (int p = 0; p < r->params_count; p++)
                r->rows[r->row_count++] = (struct sw_bench_adam_row){
                    .params = r->params[p],
                    .threads = r->threads[t],
                    .grad = mix & 2 ? SW_FP32 : SW_BF16,
                    .weight = !(mix & 1),
                };
}

static uint64_t largest(const struct report *r) {
    uint64_t most = 0;
    for (int p = 0; p < r->params_count; p++) most = r->params[p] > most ? r->params[p] : most;
    return most;
}

static void warn(const struct report *r) {
    const struct sw_topology *t = &r->topology;
    const int may = sw_topology_threads(t);
    if (r->threads_max > may)
        sw_warning("bench: %d threads on %d CPU%s%s: they wait for each other, and so does the "
                   "update",
                   r->threads_max, may, may == 1 ? "" : "s",
                   t->quota_cpus < t->cpus ? " (the container's quota)" : "");
}

/* ---- what is said ---- */

static const char *count_text(uint64_t count, char *out, size_t size) {
    static const char *const units[] = {"", "Ki", "Mi", "Gi"};
    int u = 0;
    while (u < 3 && count >= 1024 && count % 1024 == 0) {
        count /= 1024;
        u++;
    }
    snprintf(out, size, "%" PRIu64 "%s", count, units[u]);
    return out;
}

static void print_head(const struct report *r) {
    const struct sw_topology *t = &r->topology;
    printf("CPU      %s, %d CPU%s (%s), %d NUMA node%s\n", t->cpu_name, t->cpus,
           t->cpus == 1 ? "" : "s", t->cpu_list, t->numa_nodes, t->numa_nodes == 1 ? "" : "s");
    if (t->quota_cpus < t->cpus) printf("quota    %.3g CPUs\n", t->quota);
    printf("variant  %s\n", sw_isa_name(r->variant->isa));
    printf("binding  %s\n", t->user_binds ? "OpenMP's, by the environment (OMP_PROC_BIND, ...)"
                                          : "none: threads run anywhere on these CPUs");
    printf("checked  every variant that runs here has the same bits and follows the rule\n\n");
    printf("%8s %7s %7s %5s %6s %7s %9s %7s %7s %6s\n", "params", "threads", "variant", "grad",
           "weight", "B/param", "ns/param", "GB/s", "limit", "ratio");
    fflush(stdout);
}

static void print_row(const struct report *r, const struct sw_bench_adam_row *row) {
    char params[32];
    printf("%8s %7d %7s %5s %6s %7" PRIu64 " %9.3f %7.2f %7.2f %6.3f\n",
           count_text(row->params, params, sizeof(params)), row->threads,
           sw_isa_name(r->variant->isa), sw_dtype_name(row->grad), row->weight ? "bf16" : "none",
           row->bytes_per_param, row->ns_per_param, row->gb_per_s, row->limit_gb_per_s, row->ratio);
    fflush(stdout);
}

static void print_end(const struct report *r) {
    char params[32];
    if (r->kinds_done)
        printf("\n%s parameters, %d thread%s, BF16 gradient and weight:\n",
               count_text(r->kind_params, params, sizeof(params)), r->threads_max,
               r->threads_max == 1 ? "" : "s");
    for (int k = 0; k < SW_BENCH_ADAM_KINDS && r->kinds_done; k++)
        printf("  %-18s %7.3f ns/param, %5.2f times plain\n", r->kinds[k].name,
               r->kinds[k].ns_per_param, r->kinds[k].relative);
    double share = 1;
    for (int i = 0; i < r->rows_done; i++)
        if (r->rows[i].cpu_share < share) share = r->rows[i].cpu_share;
    if (share < 0.9)
        printf("\nThe machine was shared: the threads had a CPU %.0f%% of the time in the worst "
               "row.\nRatios still mean something, rates do not.\n",
               100 * share);
}

static json_t *row_json(const struct report *r, const struct sw_bench_adam_row *row) {
    return json_pack(
        "{s:I, s:i, s:s, s:s, s:s, s:I, s:f, s:f, s:f, s:f, s:i, s:s, s:f}", "params",
        (json_int_t)row->params, "threads", row->threads, "variant", sw_isa_name(r->variant->isa),
        "grad", sw_dtype_name(row->grad), "weight_out", row->weight ? "bf16" : "none",
        "bytes_per_param", (json_int_t)row->bytes_per_param, "ns_per_param", row->ns_per_param,
        "gb_per_s", row->gb_per_s, "limit_gb_per_s", row->limit_gb_per_s, "ratio", row->ratio,
        "rounds", row->rounds, "limit_way", row->limit_way, "cpu_share", row->cpu_share);
}

static int print_json(const struct report *r) {
    const struct sw_topology *t = &r->topology;
    json_t *rows = json_array(), *kinds = json_array();
    for (int i = 0; i < r->rows_done; i++) json_array_append_new(rows, row_json(r, &r->rows[i]));
    for (int k = 0; k < SW_BENCH_ADAM_KINDS && r->kinds_done; k++)
        json_array_append_new(
            kinds, json_pack("{s:s, s:I, s:i, s:f, s:f}", "kind", r->kinds[k].name, "params",
                             (json_int_t)r->kind_params, "threads", r->threads_max, "ns_per_param",
                             r->kinds[k].ns_per_param, "relative", r->kinds[k].relative));
    json_t *root =
        json_pack("{s:i, s:s, s:i, s:i, s:s, s:i, s:b, s:b, s:o, s:o}", "schema", 1, "cpu",
                  t->cpu_name, "cpus", t->cpus, "quota_cpus", t->quota_cpus, "cpu_list",
                  t->cpu_list, "numa_nodes", t->numa_nodes, "bound_by_environment", t->user_binds,
                  "verified", 1, "rows", rows, "kinds", kinds);
    const int ret = root ? json_dumpf(root, stdout, JSON_INDENT(2)) : -1;
    putchar('\n');
    json_decref(root);
    return ret;
}

/* ---- the run ---- */

static int measure(struct report *r) {
    const double begin = sw_bench_now();
    struct sw_bench_adam *bench;
    int ret = sw_bench_adam_open(&bench, r->variant, largest(r), -1);
    if (ret) return ret;
    const double rows_end = begin + r->options.seconds * (KINDS_SHARE - 1) / KINDS_SHARE;
    for (int i = 0; i < r->row_count; i++) {
        /* What is left, shared by the rows that are left. */
        const double seconds = (rows_end - sw_bench_now()) / (r->row_count - i);
        ret = sw_bench_adam_measure(bench, &r->rows[i], seconds);
        if (ret) break;
        r->rows_done++;
        if (!r->options.json) print_row(r, &r->rows[i]);
    }
    sw_bench_adam_close(bench);
    if (ret) return ret;
    r->kind_params = largest(r) < KIND_PARAMS ? largest(r) : KIND_PARAMS;
    ret = sw_bench_adam_kinds(r->variant, r->kind_params, r->threads_max,
                              begin + r->options.seconds - sw_bench_now(), r->kinds);
    r->kinds_done = !ret;
    return ret;
}

static int run(struct report *r) {
    if (choose_params(r) < 0 || choose_threads(r) < 0) return SW_EXIT_USAGE;
    char size[32], why[256];
    sw_info("bench adam: about %.3g seconds, %s of memory", r->options.seconds,
            sw_size_print(largest(r) * PARAM_BYTES, size, sizeof(size)));
    if (sw_adam_pick(&r->variant) < 0) return SW_EXIT_FAILED;
    choose_rows(r);
    warn(r);
    if (sw_thread_trial(r->threads_max - 1, why, sizeof(why)) < r->threads_max - 1) {
        sw_error("bench: %d threads cannot be started: %s", r->threads_max, why);
        return SW_EXIT_FAILED;
    }
    sw_bench_watch_signals();
    if (sw_bench_adam_verify() < 0) return SW_EXIT_FAILED;
    if (!r->options.json) print_head(r);
    const int ret = measure(r);
    if (ret < 0 && ret != -EINTR) return SW_EXIT_FAILED;
    if (r->options.json)
        print_json(r);
    else
        print_end(r);
    if (ret != -EINTR) return SW_EXIT_OK;
    sw_info("bench adam: stopped after %d of %d rows", r->rows_done, r->row_count);
    return 128 + sw_bench_stopped();
}

int sw_cmd_bench_adam(int argc, char **argv) {
    struct report *r = calloc(1, sizeof(*r));
    struct sw_parsed parsed;
    if (!r) return SW_EXIT_FAILED;
    r->options.seconds = 100;
    int ret = sw_options_parse(&command, argc, argv, &r->options, &parsed);
    if (ret == 0)
        ret = sw_topology_read(&r->topology) < 0 ? SW_EXIT_FAILED : run(r);
    else
        ret = ret > 0 ? SW_EXIT_OK : SW_EXIT_USAGE;
    sw_parsed_close(&parsed);
    free(r);
    return ret;
}
