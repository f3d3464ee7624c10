/* tools/cmd_report.c - spillway report: a trace as a page, and its figures as JSON. */
#include "tools/commands.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/log.h"
#include "tools/command_line.h"
#include "tools/page_file.h"
#include "tools/report.h"

struct report_options {
    const char *output;
    int json;
};

static const struct sw_option options_table[] = {
    {.name = "output",
     .letter = 'o',
     .value = "FILE",
     .section = "Options",
     .help = "the page, one HTML file that needs nothing else",
     .kind = SW_OPTION_TEXT,
     .offset = offsetof(struct report_options, output)},
    {.name = "json",
     .section = "Options",
     .help = "the figures as one JSON object, to standard output",
     .kind = SW_OPTION_FLAG,
     .offset = offsetof(struct report_options, json)},
    SW_OPTION_HELP("Options"),
};

static const struct sw_command command = {
    .name = "report",
    .usage = "report TRACE [-o FILE] [--json]",
    .summary = "Shows what set the time of a run's steps, from the trace that train --trace wrote: "
               "the lanes\nover time, memory, busy time, critical path and bandwidth. A trace that "
               "was cut off counts as\nfar as it goes.",
    .operand = "TRACE",
    .options = options_table,
    .option_count = sizeof(options_table) / sizeof(options_table[0]),
};

static int same_file(const char *a, const char *b) {
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

/* Whether the page can go there without losing the trace. */
static int check_output(const char *trace, const char *output) {
    char partial[PATH_MAX];
    sw_page_partial(output, partial);
    if (same_file(trace, output) || same_file(trace, partial)) {
        sw_error("--output %s would overwrite the trace %s; choose another name", output, trace);
        return -EEXIST;
    }
    return 0;
}

struct page {
    const struct sw_report_trace *trace;
    const struct sw_report_figures *figures;
    const char *path;
};

static int fill_page(void *ctx, FILE *out) {
    const struct page *page = ctx;
    return sw_report_page(page->trace, page->figures, page->path, out);
}

static int write_page(const struct sw_report_trace *trace, const struct sw_report_figures *figures,
                      const char *path, const char *output) {
    struct page page = {trace, figures, path};
    const int ret = check_output(path, output);
    return ret < 0 ? ret : sw_page_write("--output", output, fill_page, &page);
}

static int print_json(const struct sw_report_trace *trace, const struct sw_report_figures *figures,
                      const char *path) {
    json_t *root = sw_report_json(trace, figures, path);
    const int bad = !root || json_dumpf(root, stdout, JSON_COMPACT | JSON_REAL_PRECISION(12));
    json_decref(root);
    if (bad) {
        sw_error("the figures of %s could not be printed", path);
        return -EIO;
    }
    putchar('\n');
    return 0;
}

static int report(const char *path, const struct report_options *options) {
    struct sw_report_trace trace;
    struct sw_report_figures figures;
    int ret = sw_report_open(&trace, path);
    if (ret < 0) return ret;
    ret = sw_report_compute(&trace, &figures);
    if (ret == 0 && options->output) ret = write_page(&trace, &figures, path, options->output);
    if (ret == 0 && options->json) {
        ret = print_json(&trace, &figures, path);
    } else if (ret == 0) {
        char sentence[256];
        sw_report_sentence(&trace, &figures.steady, figures.steady_parts, sentence,
                           sizeof(sentence));
        printf("%s: %s\n", options->output, sentence);
    }
    sw_report_figures_free(&figures);
    sw_report_close(&trace);
    return ret;
}

int sw_cmd_report(int argc, char **argv) {
    struct report_options options = {0};
    struct sw_parsed parsed;
    int status = SW_EXIT_OK;
    const int parse = sw_options_parse(&command, argc, argv, &options, &parsed);
    if (parse < 0) {
        status = SW_EXIT_USAGE;
    } else if (parse == 0 && !options.output && !options.json) {
        sw_error("report: name the page with -o FILE, or ask for --json");
        status = SW_EXIT_USAGE;
    } else if (parse == 0 && options.output && !strcmp(options.output, "-")) {
        sw_error("report: -o - is not a file: the page takes its place whole; only --json goes to "
                 "standard output");
        status = SW_EXIT_USAGE;
    } else if (parse == 0 && report(parsed.operand, &options) < 0) {
        status = SW_EXIT_FAILED;
    }
    sw_parsed_close(&parsed);
    return status;
}
