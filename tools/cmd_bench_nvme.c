/* tools/cmd_bench_nvme.c - `spillway bench nvme`: its options, its drives one after the other, what
 * it prints, and what it keeps in the machine profile. */
#include "tools/bench.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/size.h"
#include "engine/options.h"
#include "nvme/nvme.h"
#include "offload/arena.h"
#include "offload/profile.h"
#include "tools/bench_nvme.h"
#include "tools/command_line.h"

enum { FOLDERS_MAX = SW_NVME_FOLDERS_MAX, DEPTH_MAX = 256 };
/* The default size: at most, and as a part of what is free. */
#define SIZE_DEFAULT  (1ull << 30)
#define BLOCK_MAX     (4ull << 20)
#define IN_FLIGHT_MAX (32ull << 20)
enum { FREE_SHARE = 8 };
/* The sweep's part of the time. */
#define SWEEP_PART 0.55

static const uint64_t blocks_default[] = {128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20};
static const uint64_t in_flight_default[] = {1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20};
enum {
    BLOCKS_DEFAULT = sizeof(blocks_default) / sizeof(blocks_default[0]),
    IN_FLIGHT_DEFAULT = sizeof(in_flight_default) / sizeof(in_flight_default[0])
};

static const char *const patterns[] = {"read", "write", "mixed"};

struct options {
    double seconds;
    uint64_t size;
    int json, no_profile;
    int quiet; /* neither */
    const char *block, *depth;
    const char *nvme[FOLDERS_MAX];
    uint32_t nvme_count;
};

/* What is measured together: a folder, or at the end all of them. */
struct drive {
    const char *const *folders;
    uint32_t folder_count;
    char *name; /* "" for all */
    uint64_t bytes;
    struct sw_bench_nvme bench;
    int verified, kept;
};

struct report {
    struct options options;
    struct sw_bench_nvme_setting settings[SW_BENCH_NVME_SETTINGS_MAX];
    int setting_count;
    struct sw_arena arena;
    struct drive *drives;
    uint32_t drive_count; /* started */
    char profile[PATH_MAX];
};

static const struct sw_option options_table[] = {
    SW_BENCH_OPTION_NVME,
    SW_BENCH_OPTION_SECONDS("each drive ", "10"),
    SW_BENCH_OPTION_SIZE,
    {.name = "block",
     .value = "SIZE[,SIZE...]",
     .section = "Options",
     .help = "block sizes to try, up to 4Mi",
     .fallback = "128Ki to 2Mi",
     .kind = SW_OPTION_TEXT,
     .offset = offsetof(struct options, block)},
    {.name = "depth",
     .value = "N[,N...]",
     .section = "Options",
     .help = "blocks in flight to try, in each direction",
     .fallback = "as many as make 1 to 16Mi",
     .kind = SW_OPTION_TEXT,
     .offset = offsetof(struct options, depth)},
    {.name = "no-profile",
     .section = "Options",
     .help = "keep nothing in the machine profile",
     .kind = SW_OPTION_FLAG,
     .offset = offsetof(struct options, no_profile)},
    SW_BENCH_OPTION_JSON,
    SW_OPTION_HELP("Options"),
};

static const struct sw_command command = {
    .name = "bench nvme",
    .usage = "bench nvme [--nvme DIR[,DIR...]] [--seconds S] [--size SIZE] [--block SIZE[,SIZE...]]"
             "\n           [--depth N[,N...]] [--no-profile] [--json]",
    .summary =
        "Measures drives as the store uses them. In each folder a scratch file is written and "
        "read\n"
        "back, then block sizes and depths are tried in the mixed pattern of a training step (a "
        "reader\n"
        "and a writer side by side), then read, write and mixed are timed with the best setting: "
        "the\n"
        "fewest bytes in flight within 3% of the fastest. Setting and rates go to the machine "
        "profile\n"
        "($SPILLWAY_PROFILE, else spillway/machine.json in ~/.config). The exit status is 1 when\n"
        "what is read differs from what was written.",
    .options = options_table,
    .option_count = sizeof(options_table) / sizeof(options_table[0]),
};

/* ---- what to measure ---- */

static void add_setting(struct report *r, uint64_t block, uint64_t depth) {
    for (int i = 0; i < r->setting_count; i++)
        if (r->settings[i].block_bytes == block && r->settings[i].depth == depth) return;
    r->settings[r->setting_count++] =
        (struct sw_bench_nvme_setting){.block_bytes = (uint32_t)block, .depth = (uint32_t)depth};
}

static int choose_settings(struct report *r) {
    uint64_t blocks[SW_BENCH_LIST_MAX], depths[SW_BENCH_LIST_MAX];
    int block_count = BLOCKS_DEFAULT, depth_count = 0;
    memcpy(blocks, blocks_default, sizeof(blocks_default));
    if (r->options.block) block_count = sw_bench_list("block", r->options.block, BLOCK_MAX, blocks);
    if (r->options.depth) depth_count = sw_bench_list("depth", r->options.depth, DEPTH_MAX, depths);
    if (block_count < 0 || depth_count < 0) return -EINVAL;
    for (int b = 0; b < block_count; b++) {
        if (blocks[b] % SW_NVME_ALIGN_BYTES) {
            sw_error("--block: %" PRIu64 " is not a multiple of %u", blocks[b],
                     SW_NVME_ALIGN_BYTES);
            return -EINVAL;
        }
        for (int d = 0; d < depth_count; d++) {
            if (blocks[b] * depths[d] > IN_FLIGHT_MAX) {
                sw_error("--depth: %" PRIu64 " blocks of %" PRIu64
                         " bytes are more than 32Mi in flight",
                         depths[d], blocks[b]);
                return -EINVAL;
            }
            add_setting(r, blocks[b], depths[d]);
        }
        for (int f = 0; f < IN_FLIGHT_DEFAULT && !depth_count; f++) {
            const uint64_t depth = in_flight_default[f] / blocks[b];
            /* One block in flight leaves a drive idle in between. */
            add_setting(r, blocks[b], depth < 2 ? 2 : depth < DEPTH_MAX ? depth : DEPTH_MAX);
        }
    }
    return 0;
}

static uint64_t scratch_bytes(const struct report *r, const char *folder) {
    const uint64_t available = sw_nvme_free_bytes(folder);
    if (r->options.size) return r->options.size;
    if (available == UINT64_MAX) return SW_BENCH_NVME_SIZE_MIN;
    const uint64_t share = available / FREE_SHARE;
    return share < SW_BENCH_NVME_SIZE_MIN ? SW_BENCH_NVME_SIZE_MIN
           : share < SIZE_DEFAULT         ? share
                                          : SIZE_DEFAULT;
}

/* ---- what is said ---- */

static void print_drive(const struct drive *d) {
    const struct sw_bench_nvme_setting *s = &d->bench.best;
    char bytes[32];
    sw_size_print(d->bytes, bytes, sizeof(bytes));
    if (d->folder_count == 1)
        printf("folder   %s\ndrive    %s\n", d->folders[0], d->name);
    else
        printf("folders  all %u together\n", d->folder_count);
    if (d->verified) printf("checked  %s written and read back\n", bytes);
    if (!s->block_bytes) return;
    printf("setting  blocks of %u KiB, %u in flight in each direction (of %d tried)\n\n",
           s->block_bytes >> 10, s->depth, d->bench.setting_count ? d->bench.setting_count : 1);
    if (d->bench.rounds)
        printf("%8s %10s %11s %11s %9s %9s %7s\n", "pattern", "read GB/s", "write GB/s",
               "total GB/s", "slowest", "fastest", "rounds");
    for (int p = 0; p < SW_BENCH_NVME_PATTERNS && d->bench.rounds; p++) {
        const struct sw_bench_nvme_row *row = &d->bench.rows[p];
        printf("%8s %10.3f %11.3f %11.3f %9.3f %9.3f %7d\n", patterns[p], 1e-9 * row->read,
               1e-9 * row->write, 1e-9 * row->rate, 1e-9 * row->slowest, 1e-9 * row->fastest,
               d->bench.rounds);
    }
    putchar('\n');
    fflush(stdout);
}

static json_t *folders_json(const struct drive *d) {
    json_t *list = json_array();
    for (uint32_t f = 0; f < d->folder_count; f++)
        json_array_append_new(list, json_string(d->folders[f]));
    return list;
}

static json_t *drive_json(const struct drive *d) {
    json_t *sweep = json_array();
    for (int i = 0; i < d->bench.setting_count; i++) {
        const struct sw_bench_nvme_setting *s = &d->bench.settings[i];
        if (s->passes)
            json_array_append_new(sweep, json_pack("{s:I, s:I, s:f, s:i}", "block_bytes",
                                                   (json_int_t)s->block_bytes, "depth",
                                                   (json_int_t)s->depth, "gb_per_s", 1e-9 * s->rate,
                                                   "passes", s->passes));
    }
    return json_pack("{s:o, s:s, s:I, s:I, s:I, s:b, s:o}", "folders", folders_json(d), "drive",
                     d->name, "scratch_bytes", (json_int_t)d->bytes, "block_bytes",
                     (json_int_t)d->bench.best.block_bytes, "depth",
                     (json_int_t)d->bench.best.depth, "kept", d->kept, "sweep", sweep);
}

static void add_rows(json_t *rows, const struct drive *d) {
    for (int p = 0; p < SW_BENCH_NVME_PATTERNS && d->bench.rounds; p++) {
        const struct sw_bench_nvme_row *row = &d->bench.rows[p];
        json_array_append_new(
            rows, json_pack("{s:o, s:s, s:I, s:I, s:f, s:f, s:f, s:f, s:f, s:i}", "folders",
                            folders_json(d), "pattern", patterns[p], "block_bytes",
                            (json_int_t)d->bench.best.block_bytes, "depth",
                            (json_int_t)d->bench.best.depth, "read_gb_per_s", 1e-9 * row->read,
                            "write_gb_per_s", 1e-9 * row->write, "gb_per_s", 1e-9 * row->rate,
                            "slowest_gb_per_s", 1e-9 * row->slowest, "fastest_gb_per_s",
                            1e-9 * row->fastest, "rounds", d->bench.rounds));
    }
}

static int print_json(const struct report *r) {
    json_t *drives = json_array(), *rows = json_array();
    int verified = 1;
    for (uint32_t i = 0; i < r->drive_count; i++) {
        json_array_append_new(drives, drive_json(&r->drives[i]));
        add_rows(rows, &r->drives[i]);
        verified &= r->drives[i].verified;
    }
    json_t *root =
        json_pack("{s:i, s:b, s:s, s:o, s:o}", "schema", 1, "verified", verified, "profile",
                  r->options.no_profile ? "" : r->profile, "drives", drives, "rows", rows);
    const int ret = root ? json_dumpf(root, stdout, JSON_INDENT(2)) : -1;
    putchar('\n');
    json_decref(root);
    return ret;
}

/* ---- the run ---- */

static int keep(struct report *r, struct drive *d) {
    const struct sw_bench_nvme *b = &d->bench;
    const struct sw_drive_profile profile = {
        .block_bytes = b->best.block_bytes,
        .depth = b->best.depth,
        .read_bytes_per_s = b->rows[SW_NVME_READ].rate,
        .write_bytes_per_s = b->rows[SW_NVME_WRITE].rate,
        .mixed_bytes_per_s = b->rows[SW_NVME_MIXED].rate,
    };
    if (r->options.no_profile || !*r->profile) return 0;
    const int ret = sw_profile_keep(d->folders[0], &profile);
    d->kept = !ret;
    return ret;
}

/* Alone a drive is swept; all of them together take the largest of their settings. */
static int measure(struct report *r, struct drive *d, double seconds) {
    struct sw_bench_nvme *b = &d->bench;
    int ret = sw_nvme_measure_fill(b->measure);
    if (!ret) ret = sw_nvme_measure_check(b->measure);
    d->verified = !ret;
    if (ret) return ret;
    double sweep = 0;
    if (d->folder_count == 1) {
        sweep = SWEEP_PART * seconds;
        memcpy(b->settings, r->settings, sizeof(b->settings));
        b->setting_count = r->setting_count;
        ret = sw_bench_nvme_sweep(b, sweep);
    } else {
        for (uint32_t i = 0; i + 1 < r->drive_count; i++) {
            const struct sw_bench_nvme_setting *s = &r->drives[i].bench.best;
            if ((uint64_t)s->block_bytes * s->depth > (uint64_t)b->best.block_bytes * b->best.depth)
                b->best = *s;
        }
    }
    if (!ret) ret = sw_bench_nvme_rounds(b, seconds - sweep);
    return ret;
}

static int run_drive(struct report *r, struct drive *d, double seconds) {
    const struct sw_nvme_measure_options options = {.folders = d->folders,
                                                    .folder_count = d->folder_count,
                                                    .name = "spillway-bench",
                                                    .bytes = d->bytes,
                                                    .buf = r->arena.base,
                                                    .buf_bytes = r->arena.bytes,
                                                    .stopped = sw_bench_stopped};
    int ret = sw_nvme_measure_open(&d->bench.measure, &options);
    if (ret) return ret;
    d->bytes = sw_nvme_measure_bytes(d->bench.measure);
    ret = measure(r, d, seconds);
    sw_nvme_measure_close(d->bench.measure);
    if (!ret && d->folder_count == 1 && keep(r, d) < 0) ret = -EIO;
    if (!r->options.json && !r->options.quiet && (!ret || ret == -EINTR)) print_drive(d);
    return ret;
}

/* The folders one by one, then all of them together. */
static int run_drives(struct report *r) {
    const struct options *o = &r->options;
    const uint32_t runs = o->nvme_count + (o->nvme_count > 1);
    int ret = 0;
    for (uint32_t i = 0; i < runs && !ret; i++) {
        struct drive *d = &r->drives[r->drive_count++];
        const int all = i == o->nvme_count;
        d->folders = all ? o->nvme : &o->nvme[i];
        d->folder_count = all ? o->nvme_count : 1;
        d->bytes = scratch_bytes(r, d->folders[0]);
        for (uint32_t f = 1; f < d->folder_count; f++) {
            const uint64_t bytes = scratch_bytes(r, d->folders[f]);
            d->bytes = bytes < d->bytes ? bytes : d->bytes;
        }
        char name[2 * PATH_MAX] = "";
        if (!all) ret = sw_profile_identity(d->folders[0], name, sizeof(name));
        d->name = strdup(name);
        if (!d->name) ret = -ENOMEM;
        if (!ret) ret = run_drive(r, d, all ? o->seconds / 3 : o->seconds);
    }
    return ret;
}

static int run(struct report *r) {
    const struct options *o = &r->options;
    char size[32];
    uint64_t bytes = 0;
    if (choose_settings(r) < 0) return SW_EXIT_USAGE;
    sw_bench_watch_signals();
    for (uint32_t i = 0; i < o->nvme_count; i++) bytes += scratch_bytes(r, o->nvme[i]);
    sw_info("bench nvme: about %.3g seconds for each of %u drive%s, and some to write and read "
            "back %s of scratch",
            o->seconds, o->nvme_count, o->nvme_count == 1 ? "" : "s",
            sw_size_print(bytes, size, sizeof(size)));
    if (sw_arena_open(&r->arena, SW_NVME_MEASURE_BUF_BYTES) < 0) return SW_EXIT_FAILED;
    sw_profile_path(r->profile, sizeof(r->profile));
    const int ret = run_drives(r);
    sw_arena_close(&r->arena);
    if (ret < 0 && ret != -EINTR) return SW_EXIT_FAILED;
    if (o->json) print_json(r);
    int kept = 0;
    for (uint32_t i = 0; i < r->drive_count; i++) kept += r->drives[i].kept;
    if (kept) sw_info("bench nvme: kept in '%s'", r->profile);
    if (ret != -EINTR) return SW_EXIT_OK;
    const struct drive *last = &r->drives[r->drive_count - 1];
    sw_info("bench nvme: stopped after %d of %d rounds of drive %u of %u", last->bench.rounds,
            SW_BENCH_NVME_ROUNDS, r->drive_count < o->nvme_count ? r->drive_count : o->nvme_count,
            o->nvme_count);
    return 128 + sw_bench_stopped();
}

static struct report *report_open(void) {
    struct report *r = calloc(1, sizeof(*r));
    if (r) r->drives = calloc(FOLDERS_MAX + 1, sizeof(*r->drives));
    if (r && r->drives) return r;
    free(r);
    sw_error("bench nvme: no memory for its tables");
    return NULL;
}

static void report_close(struct report *r) {
    for (uint32_t i = 0; i < r->drive_count; i++) free(r->drives[i].name);
    free(r->drives);
    free(r);
}

int sw_bench_nvme_drives(const char *const *folders, uint32_t count, double seconds, uint64_t size,
                         int quiet) {
    struct report *r = report_open();
    if (!r) return SW_EXIT_FAILED;
    r->options =
        (struct options){.seconds = seconds, .size = size, .quiet = quiet, .nvme_count = count};
    memcpy(r->options.nvme, folders, count * sizeof(*folders));
    const int status = run(r);
    report_close(r);
    return status;
}

int sw_cmd_bench_nvme(int argc, char **argv) {
    struct report *r = report_open();
    struct sw_parsed parsed;
    if (!r) return SW_EXIT_FAILED;
    r->options.seconds = 10;
    r->options.nvme[0] = ".";
    r->options.nvme_count = 1;
    int ret = sw_options_parse(&command, argc, argv, &r->options, &parsed);
    if (ret == 0)
        ret = run(r);
    else
        ret = ret > 0 ? SW_EXIT_OK : SW_EXIT_USAGE;
    sw_parsed_close(&parsed);
    report_close(r);
    return ret;
}
