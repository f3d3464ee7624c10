/* tools/cmd_bench.c - `spillway bench WHAT`: finds the benchmark. */
#include "tools/commands.h"

#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "tools/bench.h"
#include "tools/command_line.h"

static const struct {
    const char *name, *summary;
    int (*run)(int argc, char **argv);
} benches[] = {
    {"adam", "the optimizer step on the CPU, against the memory limit", sw_cmd_bench_adam},
};
enum { BENCHES = sizeof(benches) / sizeof(benches[0]) };

static void print_usage(FILE *out) {
    fputs("usage: spillway bench WHAT [options]\n\nMeasures a part of this machine. WHAT is:\n\n",
          out);
    for (int i = 0; i < BENCHES; i++)
        fprintf(out, "  %-10s %s\n", benches[i].name, benches[i].summary);
    fputs("\nspillway bench WHAT --help lists its options.\n", out);
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
