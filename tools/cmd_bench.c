/* tools/cmd_bench.c - `spillway bench WHAT`: finds the benchmark. */
#include "tools/commands.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "base/size.h"
#include "tools/bench.h"
#include "tools/command_line.h"

static const struct {
    const char *name, *summary;
    int (*run)(int argc, char **argv);
} benches[] = {
    {"adam", "the optimizer step on the CPU, against the memory limit", sw_cmd_bench_adam},
    {"all", "this machine, for spillway plan: memory, drives, copies, products, ranks",
     sw_cmd_bench_all},
    {"model", "the operations of a model's units, for plans of it", sw_cmd_bench_model},
    {"nvme", "the drives, as the store uses them, and their best setting", sw_cmd_bench_nvme},
    {"step", "what sets the time of a step, by runs with throttled lanes, beside the simulator",
     sw_cmd_bench_step},
};
enum { BENCHES = sizeof(benches) / sizeof(benches[0]) };

static void print_usage(FILE *out) {
    fputs("usage: spillway bench WHAT [options]\n\nMeasures a part of this machine. WHAT is:\n\n",
          out);
    for (int i = 0; i < BENCHES; i++)
        fprintf(out, "  %-10s %s\n", benches[i].name, benches[i].summary);
    fputs("\nspillway bench WHAT --help lists its options.\n", out);
}

int sw_bench_list(const char *name, const char *text, uint64_t max,
                  uint64_t out[SW_BENCH_LIST_MAX]) {
    int count = 0;
    for (const char *at = text;; at++) {
        char item[32];
        const size_t length = strcspn(at, ",");
        if (count == SW_BENCH_LIST_MAX) {
            sw_error("--%s: more than %d entries", name, SW_BENCH_LIST_MAX);
            return -EINVAL;
        }
        snprintf(item, sizeof(item), "%.*s", length < sizeof(item) ? (int)length : 0, at);
        if (sw_size_parse(item, &out[count]) < 0) {
            sw_error("--%s: '%.*s' is not a count", name, (int)length, at);
            return -EINVAL;
        }
        if (out[count] < 1 || out[count] > max) {
            sw_error("--%s: %s is out of range (1 to %" PRIu64 ")", name, item, max);
            return -EINVAL;
        }
        count++;
        at += length;
        if (!*at) return count;
    }
}

int sw_cmd_bench(int argc, char **argv) {
    const char *names[BENCHES];
    for (int i = 0; i < BENCHES; i++) names[i] = benches[i].name;
    if (argc < 2) {
        print_usage(stderr);
        return SW_EXIT_USAGE;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h")) {
        print_usage(stdout);
        return SW_EXIT_OK;
    }
    for (int i = 0; i < BENCHES; i++)
        if (!strcmp(argv[1], names[i])) return benches[i].run(argc - 1, argv + 1);
    sw_error("bench: nothing named '%s' to measure; the nearest is '%s'", argv[1],
             sw_nearest(argv[1], names, BENCHES));
    return SW_EXIT_USAGE;
}
