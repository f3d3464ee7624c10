/* tools/cmd_init.c - spillway init: a model folder with random weights, made from a configuration.
 */
#include "tools/commands.h"

#include <stddef.h>
#include <stdio.h>

#include "engine/model.h"
#include "engine/output.h"
#include "tools/command_line.h"

struct init_options {
    const char *config, *out;
    uint64_t seed;
    enum sw_dtype dtype;
};

static const char *const dtypes[] = {"bf16", "fp32", NULL};

static const struct sw_option options_table[] = {
    {.name = "config",
     .value = "FILE",
     .section = "Options",
     .help = "the model's config.json, or a folder with it",
     .kind = SW_OPTION_TEXT,
     .marks = SW_REQUIRED,
     .offset = offsetof(struct init_options, config)},
    {.name = "out",
     .value = "DIR",
     .section = "Options",
     .help = "folder for the model, empty or not yet there",
     .kind = SW_OPTION_TEXT,
     .marks = SW_REQUIRED,
     .offset = offsetof(struct init_options, out)},
    {.name = "seed",
     .value = "N",
     .section = "Options",
     .help = "equal seeds give equal files",
     .fallback = "0",
     .kind = SW_OPTION_COUNT64,
     .offset = offsetof(struct init_options, seed)},
    {.name = "dtype",
     .section = "Options",
     .help = "of the weights in the files",
     .fallback = "bf16",
     .kind = SW_OPTION_CHOICE,
     .choices = dtypes,
     .offset = offsetof(struct init_options, dtype)},
    SW_OPTION_HELP("Options"),
};

static const struct sw_command command = {
    .name = "init",
    .usage = "init --config FILE --out DIR [--seed N] [--dtype bf16|fp32]",
    .summary =
        "Makes a model folder with random weights: matrices N(0, initializer_range), norms 1.",
    .options = options_table,
    .option_count = sizeof(options_table) / sizeof(options_table[0]),
};

int sw_cmd_init(int argc, char **argv) {
    struct init_options options = {.dtype = SW_BF16};
    struct sw_parsed parsed;
    int status = SW_EXIT_OK;
    const int parse = sw_options_parse(&command, argc, argv, &options, &parsed);
    if (parse < 0) status = SW_EXIT_USAGE;
    if (parse == 0) {
        /* The configuration first, so that a bad one leaves no folder behind. */
        struct sw_model model;
        int made;
        int ret = sw_model_open_config(&model, options.config);
        if (ret == 0) ret = sw_output_make_empty("init", options.out, &made);
        if (ret == 0) ret = sw_model_init(options.config, options.out, options.seed, options.dtype);
        if (ret == 0)
            printf("%s: %llu parameters, %s, seed %llu\n", options.out,
                   (unsigned long long)model.params, sw_dtype_name(options.dtype),
                   (unsigned long long)options.seed);
        sw_model_close(&model);
        if (ret < 0) status = SW_EXIT_FAILED;
    }
    sw_parsed_close(&parsed);
    return status;
}
