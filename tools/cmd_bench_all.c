/* tools/cmd_bench_all.c - `spillway bench all`: one part after the other, each kept in the machine
 * profile as soon as it is there, so that an interrupt loses the part at hand alone. */
#include "tools/bench.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/log.h"
#include "base/size.h"
#include "engine/collective.h"
#include "engine/options.h"
#include "offload/profile.h"
#include "offload/stream.h"
#include "offload/team.h"
#include "tools/bench_commit.h"
#include "tools/bench_device.h"
#include "tools/command_line.h"

enum { HOST_RANKS = 2, MEMORY_SHARE = 64, COMMITS_SHARE = 10 };
#define ADAM_PARAMS (16ull << 20)
/* A layer's share on a GPU of eight billion parameters, and what a CPU does of it in time. */
enum { GPU_TOKENS = 4096, GPU_HIDDEN = 4096, HOST_TOKENS = 256, HOST_HIDDEN = 1024 };
#define COPY_BYTES  (64ull << 20)
#define RANKS_BYTES (32ull << 20)

struct options {
    double seconds;
    uint64_t size;
    int json;
    const char *profile;
    const char *nvme[SW_NVME_FOLDERS_MAX];
    uint32_t nvme_count;
};

struct report {
    struct options options;
    struct sw_topology topology;
    struct sw_numa_node nodes[SW_NUMA_NODES_MAX];
    int node_count, gpus;
    char profile[PATH_MAX], about[192];
    json_t *machine, *numa, *copies; /* what was measured; copies: NULL without GPUs */
};

static const struct sw_option options_table[] = {
    SW_BENCH_OPTION_NVME, SW_BENCH_OPTION_SECONDS("each part ", "10"),
    SW_BENCH_OPTION_SIZE, SW_BENCH_OPTION_PROFILE,
    SW_BENCH_OPTION_JSON, SW_OPTION_HELP("Options"),
};

static const struct sw_command command = {
    .name = "bench all",
    .usage =
        "bench all [--nvme DIR[,DIR...]] [--seconds S] [--size SIZE] [--profile FILE] [--json]",
    .summary =
        "Measures this machine for spillway plan, and keeps the figures in the machine profile\n"
        "($SPILLWAY_PROFILE, else spillway/machine.json in ~/.config): memory and the optimizer's\n"
        "update on each NUMA node, each drive and what a commit takes on all of them, copies to\n"
        "and from the device each way and both at once, matrix products, and what ranks send each\n"
        "other. Without a GPU the CPU is the device. An interrupt keeps the parts that are done.\n"
        "The exit status is 1 when something that is measured gives a wrong result.",
    .options = options_table,
    .option_count = sizeof(options_table) / sizeof(options_table[0]),
};

static void set(json_t *object, const char *key, double value) {
    json_object_set_new(object, key, json_real(value));
}

/* Everything that is there so far. */
static int keep(struct report *r) {
    char date[16];
    const time_t seconds = time(NULL);
    struct tm day;
    localtime_r(&seconds, &day);
    strftime(date, sizeof(date), "%Y-%m-%d", &day);
    json_object_set_new(r->machine, "measured", json_string(date));
    json_t *keys = json_pack("{s:s, s:O}", "about", r->about, "machine", r->machine);
    if (keys && r->copies) json_object_set(keys, "copies", r->copies);
    if (keys && json_array_size(r->numa) == (size_t)r->node_count)
        json_object_set(keys, "numa_nodes", r->numa);
    const int ret = keys ? sw_profile_merge(keys) : -ENOMEM;
    json_decref(keys);
    return ret;
}

/* ---- the parts ---- */

struct node_part {
    struct report *r;
    const struct sw_adam_variant *variant;
    int i, ret;
};

/* A node's memory, its cores at work on it. */
static int measure_node(struct report *r, const struct sw_adam_variant *variant, int i) {
    const struct sw_numa_node *node = &r->nodes[i];
    struct sw_bench_adam *bench = NULL;
    struct sw_team *team = NULL;
    struct sw_bench_adam_row row = {.params = ADAM_PARAMS, .grad = SW_BF16, .weight = 1};
    const uint64_t fit = r->topology.memory_bytes / MEMORY_SHARE / sw_stream_bytes(SW_BF16, 1);
    if (row.params > fit) row.params = fit / SW_ADAM_BLOCK * SW_ADAM_BLOCK;
    int ret = sw_bench_adam_open(&bench, variant, row.params, node->id);
    if (ret < 0) return ret;
    ret = sw_team_open(&team, &r->topology, sw_topology_adam_threads(&r->topology), 1);
    if (ret == 0) {
        uint64_t bytes;
        const void *memory = sw_bench_adam_memory(bench, &bytes);
        row.threads = sw_team_place(team, memory, bytes);
        ret = sw_bench_adam_measure(bench, &row, r->options.seconds);
    }
    if (ret == 0) {
        json_t *entry = json_object();
        set(entry, "cores", node->cores);
        set(entry, "memory_bytes", (double)node->memory_bytes);
        set(entry, "memory_bytes_per_s", 1e9 * row.limit_gb_per_s);
        set(entry, "adam_bytes_per_s", 1e9 * row.gb_per_s);
        json_array_append_new(r->numa, entry);
        if (!r->options.json)
            printf("memory   node %d: %.2f GB/s, the update %.2f GB/s with %d thread%s\n", i,
                   row.limit_gb_per_s, row.gb_per_s, row.threads, row.threads == 1 ? "" : "s");
    }
    sw_team_close(team);
    sw_bench_adam_close(bench);
    return ret;
}

static void *run_node(void *arg) {
    struct node_part *part = arg;
    part->ret = measure_node(part->r, part->variant, part->i);
    return NULL;
}

/* In a thread of its own, as it is bound to the node, and so is its team. */
static int measure_node_apart(struct report *r, const struct sw_adam_variant *variant, int i) {
    struct node_part part = {r, variant, i, 0};
    pthread_t thread;
    const int error = pthread_create(&thread, NULL, run_node, &part);
    if (error) {
        sw_error("bench all: a thread cannot be started: %s", strerror(error));
        return -error;
    }
    pthread_join(thread, NULL);
    return part.ret;
}

static int measure_memory(struct report *r) {
    const struct sw_adam_variant *variant;
    int ret = sw_bench_adam_verify();
    if (ret == 0) ret = sw_adam_pick(&variant);
    for (int i = 0; i < r->node_count && ret == 0; i++) ret = measure_node_apart(r, variant, i);
    return ret;
}

static int open_device(const struct report *r, struct sw_device_handle *out, uint32_t index,
                       uint32_t ranks) {
    return sw_bench_device_open(&r->topology, r->gpus > 0, index, ranks, out);
}

static void print_piece(const char *way, uint64_t bytes) {
    char size[32];
    printf("         %s in pieces of %s\n", way, sw_size_print(bytes, size, sizeof(size)));
}

static int measure_copies(struct report *r, const struct sw_device_handle *d) {
    struct sw_bench_copies c;
    const int ret = sw_bench_copies(d, COPY_BYTES, r->options.seconds, &c);
    if (ret < 0) return ret;
    set(r->machine, "h2d_bytes_per_s", c.h2d);
    set(r->machine, "d2h_bytes_per_s", c.d2h);
    set(r->machine, "both_bytes_per_s", c.both);
    set(r->machine, "h2d_pageable_bytes_per_s", c.h2d_pageable);
    set(r->machine, "d2h_pageable_bytes_per_s", c.d2h_pageable);
    if (r->gpus) set(r->machine, "gpu_memory_bytes_per_s", c.inside);
    if (r->gpus && !r->copies)
        r->copies =
            json_pack("{s:s, s:I, s:I}", "gpu", d->ops->numerics(d->device), "h2d_piece_bytes",
                      (json_int_t)c.h2d_piece, "d2h_piece_bytes", (json_int_t)c.d2h_piece);
    if (r->options.json) return 0;
    printf("copies   up %.2f GB/s, down %.2f GB/s, both at once %.2f GB/s; pageable %.2f and "
           "%.2f GB/s\n",
           1e-9 * c.h2d, 1e-9 * c.d2h, 1e-9 * c.both, 1e-9 * c.h2d_pageable, 1e-9 * c.d2h_pageable);
    if (c.h2d_piece) print_piece("up", c.h2d_piece);
    if (c.d2h_piece) print_piece("down", c.d2h_piece);
    return 0;
}

static int measure_products(struct report *r, const struct sw_device_handle *d) {
    double flops;
    const uint64_t tokens = r->gpus ? GPU_TOKENS : HOST_TOKENS,
                   hidden = r->gpus ? GPU_HIDDEN : HOST_HIDDEN;
    int ret = sw_bench_products(d, tokens, hidden, r->options.seconds, &flops);
    const int threads = r->gpus ? 0 : sw_topology_threads(&r->topology);
    struct sw_bench_rounding rounding;
    if (ret == 0) ret = sw_bench_rounding(d, threads, r->options.seconds / 8, &rounding);
    if (ret < 0) return ret;
    set(r->machine, "flops_per_s", flops);
    set(r->machine, "round_bytes_per_s", rounding.bytes_per_s);
    if (!r->gpus) set(r->machine, "region_s", rounding.region_s);
    /* What contexts and libraries took is gone from it by now. */
    set(r->machine, "gpus", r->gpus);
    set(r->machine, "gpu_reserved_bytes", 0);
    if (r->gpus) {
        set(r->machine, "gpu_memory_bytes", (double)d->ops->free_bytes(d->device));
        json_object_set_new(r->machine, "gpu", json_string(d->ops->numerics(d->device)));
    }
    if (!r->options.json)
        printf("products %.4g TFLOP/s in BF16; gradients rounded at %.2f GB/s\n", 1e-12 * flops,
               1e-9 * rounding.bytes_per_s);
    return 0;
}

static int measure_device(struct report *r, int products) {
    struct sw_device_handle d;
    int ret = open_device(r, &d, 0, 1);
    if (ret < 0) return ret;
    ret = products ? measure_products(r, &d) : measure_copies(r, &d);
    d.ops->close(d.device);
    return ret;
}

static int measure_copies_part(struct report *r) {
    return measure_device(r, 0);
}
static int measure_products_part(struct report *r) {
    return measure_device(r, 1);
}

static int measure_ranks(struct report *r) {
    struct sw_device_handle devices[SW_RANKS_MAX];
    const uint32_t ranks = r->gpus ? (uint32_t)r->gpus : HOST_RANKS;
    uint32_t opened = 0;
    double gather = 0, scatter = 0;
    int ret = 0;
    if (ranks < 2) return 0;
    while (opened < ranks && ret == 0) {
        ret = open_device(r, &devices[opened], opened, ranks);
        opened += ret == 0;
    }
    if (ret == 0)
        ret = sw_bench_ranks(devices, ranks, r->gpus > 0, RANKS_BYTES, r->options.seconds, &gather,
                             &scatter);
    while (opened > 0) {
        opened--;
        devices[opened].ops->close(devices[opened].device);
    }
    if (ret < 0) return ret;
    set(r->machine, "gather_bytes_per_s", gather);
    set(r->machine, "scatter_bytes_per_s", scatter);
    if (!r->options.json)
        printf("ranks    %u of them: each sends %.2f GB/s gathering, %.2f GB/s reducing\n", ranks,
               1e-9 * gather, 1e-9 * scatter);
    return 0;
}

static int measure_drives(struct report *r) {
    const struct options *o = &r->options;
    const int status = sw_bench_nvme_drives(o->nvme, o->nvme_count, o->seconds, o->size, o->json);
    return status == SW_EXIT_OK ? 0 : sw_bench_stopped() ? -EINTR : -EIO;
}

static int measure_commits(struct report *r) {
    double commit_s;
    const struct options *o = &r->options;
    const int ret = sw_bench_commit(o->nvme, o->nvme_count, o->seconds / COMMITS_SHARE, &commit_s);
    if (ret < 0) return ret;
    set(r->machine, "commit_s", commit_s);
    if (!o->json)
        printf("commits  %.3g ms each, once their writes are over, on %u drive%s\n", 1e3 * commit_s,
               o->nvme_count, o->nvme_count == 1 ? "" : "s");
    return 0;
}

/* ---- the run ---- */

static const struct {
    const char *name;
    int (*measure)(struct report *r);
} parts[] = {{"memory and update", measure_memory},
             {"copies", measure_copies_part},
             {"products", measure_products_part},
             {"ranks", measure_ranks},
             {"drives", measure_drives},
             {"commits", measure_commits}};
enum { PARTS = sizeof(parts) / sizeof(parts[0]) };

static int begin(struct report *r) {
    struct options *o = &r->options;
    if (o->profile) setenv("SPILLWAY_PROFILE", o->profile, 1);
    sw_profile_path(r->profile, sizeof(r->profile));
    if (sw_topology_read(&r->topology) < 0) return -EIO;
    r->node_count = sw_topology_numa(&r->topology, r->nodes);
    const int gpus = sw_device_cuda_usable();
    r->gpus = gpus > 0 ? gpus : 0;
    r->machine = json_object();
    r->numa = json_array();
    if (!r->machine || !r->numa) return -ENOMEM;
    char memory[32];
    snprintf(r->about, sizeof(r->about), "%s%s%d cores, %s of RAM, %d GPU%s", r->topology.cpu_name,
             r->topology.cpu_name[0] ? ", " : "", r->topology.cores,
             sw_size_print(r->topology.memory_bytes, memory, sizeof(memory)), r->gpus,
             r->gpus == 1 ? "" : "s");
    set(r->machine, "cores", r->topology.cores);
    set(r->machine, "cpus", sw_topology_threads(&r->topology));
    set(r->machine, "memory_bytes", (double)r->topology.memory_bytes);
    const double drives = o->nvme_count + (o->nvme_count > 1 ? 1.0 / 3 : 0) + 1.0 / COMMITS_SHARE;
    const double all = o->seconds * (r->node_count + 2 + (r->gpus != 1) + drives);
    sw_info("bench all: about %.0f seconds, and some to write and read back scratch on %u drive%s; "
            "%d NUMA node%s, %s. An interrupt keeps what is done by then",
            all > 1 ? all : 1, o->nvme_count, o->nvme_count == 1 ? "" : "s", r->node_count,
            r->node_count == 1 ? "" : "s",
            r->gpus ? "GPUs are the device" : "no GPU: the CPU is the device");
    return 0;
}

static void print_json(const struct report *r, json_t *done) {
    json_t *root = json_pack("{s:i, s:s, s:O, s:O, s:O}", "schema", 1, "profile", r->profile,
                             "machine", r->machine, "numa_nodes", r->numa, "done", done);
    if (root && r->copies) json_object_set(root, "copies", r->copies);
    if (root) json_dumpf(root, stdout, JSON_INDENT(2));
    putchar('\n');
    json_decref(root);
}

static int run(struct report *r) {
    json_t *done = json_array();
    int ret = begin(r), part = 0;
    sw_bench_watch_signals();
    for (; part < PARTS && ret == 0; part++) {
        ret = parts[part].measure(r);
        /* Drives keep themselves, those that are done before an interrupt too. */
        if (ret == 0) ret = keep(r);
        if (ret == 0) json_array_append_new(done, json_string(parts[part].name));
        if (!r->options.json) fflush(stdout);
    }
    if (ret == 0 || ret == -EINTR) {
        if (r->options.json) print_json(r, done);
        if (*r->profile && json_array_size(done) > 0)
            sw_info("bench all: kept in '%s'", r->profile);
    }
    if (ret == -EINTR)
        sw_info("bench all: stopped after %zu of %d parts, in %s", json_array_size(done), PARTS,
                parts[part - 1].name);
    json_decref(done);
    return ret == 0 ? SW_EXIT_OK : ret == -EINTR ? 128 + sw_bench_stopped() : SW_EXIT_FAILED;
}

int sw_cmd_bench_all(int argc, char **argv) {
    struct report *r = calloc(1, sizeof(*r));
    struct sw_parsed parsed;
    if (!r) return SW_EXIT_FAILED;
    r->options = (struct options){.seconds = 10, .nvme = {"."}, .nvme_count = 1};
    int ret = sw_options_parse(&command, argc, argv, &r->options, &parsed);
    if (ret == 0)
        ret = run(r);
    else
        ret = ret > 0 ? SW_EXIT_OK : SW_EXIT_USAGE;
    sw_parsed_close(&parsed);
    json_decref(r->machine);
    json_decref(r->numa);
    json_decref(r->copies);
    free(r);
    return ret;
}
