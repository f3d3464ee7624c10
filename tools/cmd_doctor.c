/* tools/cmd_doctor.c - what this machine gives to training, checked by trying it.
 *
 * One line per check: state, what was found, why, and what would change it. Storage is checked with
 * a small store of the kind that a run makes, so the answer is the run's own. */
#include "tools/commands.h"

#include <assert.h>
#include <errno.h>
#include <jansson.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <linux/magic.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/isa.h"
#include "base/log.h"
#include "base/size.h"
#include "engine/teams.h"
#include "kernels/device.h"
#include "nvme/nvme.h"
#include "offload/arena.h"
#include "offload/thread_trial.h"
#include "offload/topology.h"
#include "tools/command_line.h"

enum {
    FOLDERS_MAX = SW_NVME_FOLDERS_MAX,
    CHECKS_MAX = 8 + 4 * FOLDERS_MAX,
    TEXT_BYTES = 512,
    LINES_MAX = 8
};
#define PROBE_BYTES (4u << 20)
#define LOW_DISK    (1ull << 30)

/* SLOW: works, and costs speed. BAD: does not work. INFO never counts. */
enum state { OK, INFO, SLOW, BAD };
static const char *const state_names[] = {"ok", "info", "slow", "bad"};

struct check {
    const char *name;
    enum state state;
    char found[TEXT_BYTES], why[TEXT_BYTES], fix[TEXT_BYTES];
};

struct doctor {
    struct check checks[CHECKS_MAX];
    int count;
    int ring_checked;
    char said[LINES_MAX][TEXT_BYTES]; /* what a probe logged: the reasons of refusals */
    int said_count;
};

static void keep_lines(enum sw_log_level level, const char *line, void *ctx) {
    struct doctor *d = ctx;
    if (level != SW_LOG_INFO && d->said_count < LINES_MAX)
        snprintf(d->said[d->said_count++], TEXT_BYTES, "%s", line);
}

/* The line of the last probe that speaks of `word`, else fallback. */
static const char *reason(const struct doctor *d, const char *word, const char *fallback) {
    for (int i = 0; i < d->said_count; i++)
        if (strstr(d->said[i], word)) return d->said[i];
    return fallback;
}

static __attribute__((format(printf, 4, 5))) struct check *
add(struct doctor *d, const char *name, enum state state, const char *format, ...) {
    assert(d->count < CHECKS_MAX);
    struct check *c = &d->checks[d->count++];
    c->name = name;
    c->state = state;
    va_list args;
    va_start(args, format);
    vsnprintf(c->found, sizeof(c->found), format, args);
    va_end(args);
    return c;
}

static void because(struct check *c, const char *why, const char *fix) {
    snprintf(c->why, sizeof(c->why), "%s", why);
    snprintf(c->fix, sizeof(c->fix), "%s", fix);
}

static void check_isa(struct doctor *d) {
    enum sw_isa picked, best = SW_ISA_AVX512;
    while (!sw_isa_supported(best)) best--;
    d->said_count = 0;
    if (sw_isa_pick(&picked) < 0) {
        because(add(d, "instructions", BAD, "no variant"), reason(d, "SPILLWAY_ISA", ""),
                "unset SPILLWAY_ISA, or set it to avx512, avx2 or scalar");
        return;
    }
    if (picked != best)
        because(add(d, "instructions", SLOW, "%s", sw_isa_name(picked)),
                "SPILLWAY_ISA forces it, and this CPU can do better", "unset SPILLWAY_ISA");
    else if (picked == SW_ISA_SCALAR)
        because(add(d, "instructions", SLOW, "scalar"), "this CPU has no AVX2",
                "a CPU from 2013 or later, or a virtual machine that shows its host's CPU");
    else
        add(d, "instructions", OK, "%s", sw_isa_name(picked));
}

/* The default sizes of a run's teams, why, and whether so many threads can be started. */
static void check_threads(struct doctor *d, const struct sw_topology *t) {
    const int adam = sw_topology_adam_threads(t), device = sw_topology_threads(t);
    struct check *c = add(d, "threads", OK, "Adam %d, host device %d", adam, device);
    char quota[48] = "no quota", limit[160], why[TEXT_BYTES];
    if (t->quota > 0) snprintf(quota, sizeof(quota), "a quota of %.4g CPUs", t->quota);
    const char *bound = t->user_binds       ? "placed by OpenMP as the environment says"
                        : t->numa_nodes > 1 ? "Adam's bound to the NUMA node that holds the chunk"
                                            : "not bound, as there is one NUMA node";
    snprintf(why, sizeof(why), "%d CPU%s in the affinity mask (%s) on %d core%s, %s; %s", t->cpus,
             t->cpus == 1 ? "" : "s", t->cpu_list, t->cores, t->cores == 1 ? "" : "s", quota,
             bound);
    because(c, why, "");
    const struct sw_team_sizes sizes = {adam, device, 0, 1};
    const int wanted = sw_teams_threads(&sizes);
    const int made = sw_thread_trial(wanted, limit, sizeof(limit));
    if (made == wanted) return;
    c->state = SLOW;
    snprintf(why, sizeof(why), "only %d more threads can be started: %s", made, limit);
    because(c, why, "raise that limit (ulimit -u, docker run --pids-limit)");
}

static void check_machine(struct doctor *d) {
    struct sw_topology t;
    d->said_count = 0;
    if (sw_topology_read(&t) < 0) {
        because(add(d, "cores", BAD, "unknown"), reason(d, "topology", ""), "mount /proc and /sys");
        return;
    }
    struct check *c = add(d, "cores", OK, "%d of %s, %d NUMA node%s", t.cores, t.cpu_name,
                          t.numa_nodes, t.numa_nodes == 1 ? "" : "s");
    if (t.quota_cpus < t.cpus) {
        c->state = SLOW;
        because(c, "the container's CPU quota is below the cores it may run on",
                "raise the quota (docker run --cpus, cpu.max)");
    }
    check_threads(d, &t);
    char size[32];
    add(d, "memory", OK, "%s may be used", sw_size_print(t.memory_bytes, size, sizeof(size)));
}

static void check_huge_pages(struct doctor *d) {
    char line[128] = "";
    FILE *f = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "re");
    if (f) {
        if (!fgets(line, sizeof(line), f)) line[0] = 0;
        fclose(f);
    }
    if (strstr(line, "[always]"))
        add(d, "huge pages", OK, "always");
    else if (strstr(line, "[madvise]"))
        add(d, "huge pages", OK, "on request");
    else
        because(add(d, "huge pages", SLOW, "off"),
                *line ? "transparent huge pages are set to never" : "the kernel has none",
                "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled");
}

/* CAP_IPC_LOCK lifts the limit. It is bit 14 of the effective set. */
static int may_lock_anything(void) {
    FILE *f = fopen("/proc/self/status", "re");
    if (!f) return 0;
    char line[256];
    unsigned long long caps = 0;
    while (fgets(line, sizeof(line), f))
        if (sscanf(line, "CapEff: %llx", &caps) == 1) break;
    fclose(f);
    return (caps >> 14) & 1;
}

static void check_memlock(struct doctor *d) {
    struct rlimit limit;
    char size[32];
    if (getrlimit(RLIMIT_MEMLOCK, &limit) || limit.rlim_cur == RLIM_INFINITY)
        add(d, "locked memory", OK, "unlimited");
    else if (may_lock_anything())
        add(d, "locked memory", OK, "unlimited for this user (CAP_IPC_LOCK)");
    else if (limit.rlim_cur >= (1ull << 30))
        add(d, "locked memory", OK, "%s", sw_size_print(limit.rlim_cur, size, sizeof(size)));
    else
        because(
            add(d, "locked memory", SLOW, "%s", sw_size_print(limit.rlim_cur, size, sizeof(size))),
            "chunk buffers are registered with io_uring, which locks them",
            "ulimit -l unlimited, docker run --ulimit memlock=-1, or limits.conf");
}

/* Writes a pattern through a queue and reads it back into the second half of the arena. */
static int round_trip(struct sw_nvme_store *store, struct sw_arena *arena,
                      struct sw_nvme_mode *mode) {
    char *half[2] = {arena->base, arena->base + PROBE_BYTES};
    for (uint32_t i = 0; i < PROBE_BYTES; i++) half[0][i] = (char)(i * 31 + (i >> 12));
    memset(half[1], 0, PROBE_BYTES);
    for (int write = 1; write >= 0; write--) {
        struct sw_nvme_queue *queue;
        int ret = sw_nvme_queue_open(
            &queue, store,
            &(struct sw_nvme_queue_options){write, 4, 1u << 20, arena->base, arena->bytes, 0, 0});
        if (ret < 0) return ret;
        struct sw_nvme_req req = {.buf = half[!write], .write = (uint32_t)write}, *done;
        ret = sw_nvme_submit(queue, &req);
        if (!ret) ret = sw_nvme_reap(queue, &done, 1, 1);
        if (ret >= 0) ret = req.result;
        sw_nvme_queue_mode(queue, mode);
        sw_nvme_queue_close(queue);
        if (ret < 0) return ret;
    }
    if (memcmp(half[0], half[1], PROBE_BYTES) == 0) return 0;
    sw_error("nvme: what was read back differs from what was written");
    return -EIO;
}

static int probe_folder(struct doctor *d, const char *folder, struct sw_nvme_mode *mode) {
    char name[64];
    snprintf(name, sizeof(name), "spillway-doctor-%ld", (long)getpid());
    const uint64_t record = PROBE_BYTES;
    const struct sw_nvme_options options = {.folders = &folder,
                                            .folder_count = 1,
                                            .name = name,
                                            .record_bytes = &record,
                                            .chunk_count = 1,
                                            .homes = 1};
    struct sw_nvme_store *store;
    struct sw_arena arena;
    d->said_count = 0;
    int ret = sw_arena_open(&arena, 2ull * PROBE_BYTES);
    if (ret < 0) return ret;
    ret = sw_nvme_open(&store, &options);
    if (!ret) {
        ret = round_trip(store, &arena, mode);
        sw_nvme_close(store, 1);
    }
    sw_arena_close(&arena);
    return ret;
}

static void check_ring(struct doctor *d, const struct sw_nvme_mode *mode) {
    if (!mode->io_uring) {
        because(
            add(d, "io_uring", SLOW, "refused, threads instead"), reason(d, "io_uring", ""),
            "sysctl kernel.io_uring_disabled=0; in a container a seccomp profile that admits it");
        return;
    }
    add(d, "io_uring", OK, "usable");
    if (mode->fixed_buffers && mode->fixed_files)
        add(d, "registration", OK, "buffers and files");
    else
        because(add(d, "registration", SLOW, "no %s%s%s", mode->fixed_buffers ? "" : "buffers",
                    mode->fixed_buffers || mode->fixed_files ? "" : ", no ",
                    mode->fixed_files ? "" : "files"),
                reason(d, "not registered", ""), "ulimit -l unlimited, and a kernel from 5.10 on");
}

static void check_folder(struct doctor *d, const char *folder) {
    struct sw_nvme_mode mode;
    const int ret = probe_folder(d, folder, &mode);
    if (ret < 0) {
        because(add(d, "storage", BAD, "%s cannot be used", folder), reason(d, "", strerror(-ret)),
                "name an existing, writable folder on a local drive with --nvme");
        return;
    }
    if (!d->ring_checked++) check_ring(d, &mode);
    struct statfs fs;
    if (statfs(folder, &fs) == 0 && (fs.f_type == TMPFS_MAGIC || fs.f_type == RAMFS_MAGIC))
        because(add(d, "direct I/O", SLOW, "%s lies in memory", folder),
                "its files take the memory that offloading is to save",
                "a folder on a local drive");
    else if (mode.direct)
        add(d, "direct I/O", OK, "%s", folder);
    else
        because(add(d, "direct I/O", SLOW, "%s: through the page cache", folder),
                reason(d, "direct I/O", "the file system refuses it"),
                "a folder on ext4 or xfs, on a local drive");
    struct statvfs vfs;
    if (statvfs(folder, &vfs)) return;
    char size[32];
    const uint64_t bytes = (uint64_t)vfs.f_bavail * vfs.f_frsize;
    struct check *c =
        add(d, "free space", OK, "%s: %s", folder, sw_size_print(bytes, size, sizeof(size)));
    if (bytes < LOW_DISK) {
        c->state = SLOW;
        because(c, "optimizer state takes 12 bytes for each parameter", "make room");
    }
}

static void print_text(const struct doctor *d) {
    for (int i = 0; i < d->count; i++) {
        const struct check *c = &d->checks[i];
        printf("%-4s  %-13s %s", state_names[c->state], c->name, c->found);
        if (*c->why) printf("; why: %s", c->why);
        if (*c->fix) printf("; fix: %s", c->fix);
        putchar('\n');
    }
}

static int print_json(const struct doctor *d, int healthy) {
    json_t *list = json_array();
    for (int i = 0; i < d->count; i++) {
        const struct check *c = &d->checks[i];
        json_array_append_new(list, json_pack("{s:s, s:s, s:s, s:s, s:s}", "name", c->name, "state",
                                              state_names[c->state], "found", c->found, "why",
                                              c->why, "fix", c->fix));
    }
    json_t *root = json_pack("{s:i, s:b, s:o}", "schema", 1, "ok", healthy, "checks", list);
    const int ret = root ? json_dumpf(root, stdout, JSON_INDENT(2)) : -1;
    putchar('\n');
    json_decref(root);
    return ret;
}

struct doctor_options {
    const char *nvme[FOLDERS_MAX];
    uint32_t nvme_count;
    int json;
};

static const struct sw_option options_table[] = {
    {.name = "nvme",
     .value = "DIR[,DIR...]",
     .section = "Options",
     .help = "folders to try, one per drive",
     .fallback = "the current folder",
     .kind = SW_OPTION_LIST,
     .offset = offsetof(struct doctor_options, nvme),
     .count_offset = offsetof(struct doctor_options, nvme_count)},
    {.name = "json",
     .section = "Options",
     .help = "one JSON object instead of lines",
     .kind = SW_OPTION_FLAG,
     .offset = offsetof(struct doctor_options, json)},
    SW_OPTION_HELP("Options"),
};

static const struct sw_command command = {
    .name = "doctor",
    .usage = "doctor [--nvme DIR[,DIR...]] [--json]",
    .summary = "Tries what training needs on this machine and prints a line per check: its state\n"
               "(ok, info, slow or bad), what was found, why, and what would change it. The exit\n"
               "status is 0 when nothing that costs speed is missing, else 1.",
    .options = options_table,
    .option_count = sizeof(options_table) / sizeof(options_table[0]),
};

/* Whether a GPU reads files of that folder by itself: those of --params nvme. */
static void check_gpu_reads(struct doctor *d, const struct sw_device_handle *device,
                            const char *folder) {
    const struct sw_device_ops *ops = device->ops;
    struct sw_device_file *file = NULL;
    char path[PATH_MAX], why[TEXT_BYTES] = "its files cannot be opened past the page cache";
    void *memory = NULL;
    if (!ops->file_open || ops->alloc(device->device, PROBE_BYTES, &memory) < 0) return;
    snprintf(path, sizeof(path), "%s/.spillway-doctor-%ld", folder, (long)getpid());
    const int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_DIRECT | O_CLOEXEC, 0600);
    if (fd >= 0) unlink(path);
    int ret = fd < 0 || ftruncate(fd, PROBE_BYTES) < 0 ? -errno : 0;
    if (ret == 0)
        ret = ops->file_open(device->device, fd, memory, PROBE_BYTES, &file, why, sizeof(why));
    if (ret == 0)
        add(d, "GPU reads", OK, "%s: past the host's memory", folder);
    else
        because(add(d, "GPU reads", INFO, "%s: through the host's memory", folder), why,
                "GPUDirect Storage (libcufile, nvidia-fs) and a drive and file system that it "
                "knows");
    ops->file_close(file);
    if (fd >= 0) close(fd);
    ops->free(device->device, memory, PROBE_BYTES);
}

/* What --device auto takes. */
static void check_device(struct doctor *d, const struct doctor_options *o) {
    d->said_count = 0;
    const int count = sw_device_cuda_count();
    struct sw_device_handle first;
    const struct sw_cuda_device_options options = {.index = 0};
    if (count > 0 && sw_device_cuda_open(&first, &options) == 0) {
        char memory[32];
        struct check *c =
            add(d, "device", OK, "CUDA device%s, %d, %s free on the first", count == 1 ? "" : "s",
                count, sw_size_print(first.ops->free_bytes(first.device), memory, sizeof(memory)));
        because(c, first.ops->numerics(first.device), "");
        for (uint32_t i = 0; i < o->nvme_count; i++) check_gpu_reads(d, &first, o->nvme[i]);
        first.ops->close(first.device);
        return;
    }
    because(add(d, "device", INFO, "host: the CPU computes the model"),
            reason(d, "CUDA", "no GPU was found"), "");
}

static int examine(const struct doctor_options *options) {
    struct doctor *d = calloc(1, sizeof(*d));
    if (!d) return SW_EXIT_FAILED;
    sw_log_set_sink(keep_lines, d); /* nothing runs behind this command that needs the other one */
    check_isa(d);
    check_machine(d);
    check_huge_pages(d);
    check_memlock(d);
    for (uint32_t i = 0; i < options->nvme_count; i++) check_folder(d, options->nvme[i]);
    check_device(d, options);
    sw_log_set_sink(NULL, NULL);
    int healthy = 1;
    for (int i = 0; i < d->count; i++) healthy &= d->checks[i].state < SLOW;
    if (options->json)
        print_json(d, healthy);
    else
        print_text(d);
    free(d);
    return healthy ? SW_EXIT_OK : SW_EXIT_FAILED;
}

int sw_cmd_doctor(int argc, char **argv) {
    struct doctor_options options = {.nvme = {"."}, .nvme_count = 1};
    struct sw_parsed parsed;
    int ret = sw_options_parse(&command, argc, argv, &options, &parsed);
    if (ret == 0)
        ret = examine(&options);
    else
        ret = ret > 0 ? SW_EXIT_OK : SW_EXIT_USAGE;
    sw_parsed_close(&parsed);
    return ret;
}
