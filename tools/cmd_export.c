/* tools/cmd_export.c - spillway export: the optimizer of a stopped or kept run as safetensors. */
#include "tools/commands.h"

#include <stddef.h>
#include <stdio.h>

#include "base/size.h"
#include "engine/export.h"
#include "tools/command_line.h"
#include "tools/progress.h"
#include "tools/stop_signal.h"

#define FIELD(name) .offset = offsetof(struct sw_export_options, name)

static const struct sw_option options_table[] = {
    {.name = "model",
     .value = "DIR",
     .section = "Options",
     .help = "model folder that the run began from",
     .kind = SW_OPTION_TEXT,
     .marks = SW_REQUIRED,
     FIELD(model)},
    {.name = "from",
     .value = "DIR",
     .section = "Options",
     .help = "the run's --out, where the store lies unless --nvme says so",
     .kind = SW_OPTION_TEXT,
     .marks = SW_REQUIRED,
     FIELD(from)},
    {.name = "nvme",
     .value = "DIR[,DIR...]",
     .section = "Options",
     .help = "the run's --nvme: all folders of its store, in their order; of several processes "
             "those of one after the other, or one place for all",
     .fallback = "the folder of --from",
     .kind = SW_OPTION_LIST,
     FIELD(nvme),
     .count_offset = offsetof(struct sw_export_options, nvme_count)},
    {.name = "to",
     .value = "DIR",
     .section = "Options",
     .help = "folder for the files, empty or not yet there",
     .kind = SW_OPTION_TEXT,
     .marks = SW_REQUIRED,
     FIELD(to)},
    {.name = "file-size",
     .value = "SIZE",
     .section = "Options",
     .help = "begin another file before one passes this",
     .fallback = "5G",
     .kind = SW_OPTION_SIZE,
     .min = 1,
     .max = 1e18,
     FIELD(file_bytes_max)},
    SW_OPTION_HELP("Options"),
};

static const struct sw_command command = {
    .name = "export",
    .usage = "export --model DIR --from OUT [--nvme DIR,...] --to DIR",
    .summary = "Writes masters, momenta and variances of a store's last commit as FP32 tensors,\n"
               "for spillway train --import with other ranks or another layout, and for other\n"
               "tools. The store is locked and only read.",
    .options = options_table,
    .option_count = sizeof(options_table) / sizeof(options_table[0]),
};

static void on_progress(void *ctx, uint64_t done_bytes, uint64_t total_bytes) {
    sw_progress_beside(ctx, SW_EXPORTING, done_bytes, total_bytes);
}

static int export(const struct sw_export_options *options) {
    struct sw_progress progress;
    struct sw_export_report report;
    char size[32];
    sw_stop_watch("\nspillway: leaving; nothing of the export stays\n");
    sw_progress_begin(&progress);
    const struct sw_export_hooks hooks = {
        .ctx = &progress, .on_progress = on_progress, .stop = &sw_stop_signal};
    const int ret = sw_export(options, &hooks, &report);
    sw_progress_clear(&progress);
    if (ret == 1) {
        printf("stopped; nothing was exported\n");
        return 128 + atomic_load(&sw_stop_signal);
    }
    if (ret < 0) return SW_EXIT_FAILED;
    printf("exported step %llu: %llu parameters, %s in %u file%s in %s\n",
           (unsigned long long)report.step, (unsigned long long)report.params,
           sw_size_print(report.bytes, size, sizeof(size)), report.files,
           report.files == 1 ? "" : "s", options->to);
    printf("next: spillway train ... --import %s\n", options->to);
    return SW_EXIT_OK;
}

int sw_cmd_export(int argc, char **argv) {
    struct sw_export_options options;
    struct sw_parsed parsed;
    sw_export_defaults(&options);
    const int parse = sw_options_parse(&command, argc, argv, &options, &parsed);
    const int status = parse < 0 ? SW_EXIT_USAGE : parse == 0 ? export(&options) : SW_EXIT_OK;
    sw_parsed_close(&parsed);
    return status;
}
