/* offload/topology.c - affinity mask, cgroup limits, NUMA nodes and the name of the CPU.
 *
 * A runtime's own count of cores ignores the quota of a container, and a team larger than the quota
 * spends its time in barriers waiting for throttled threads. */
#include "offload/topology.h"

#include <assert.h>
#include <errno.h>
#include <hwloc.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "offload/topology_internal.h"

enum { PATH_BYTES = 4096 };

/* The first line of a file without its newline. 0 or -1. */
static int read_line(const char *path, char *line, size_t size) {
    FILE *f = fopen(path, "re");
    if (!f) return -1;
    const int ok = fgets(line, (int)size, f) != NULL;
    fclose(f);
    if (!ok) return -1;
    line[strcspn(line, "\n")] = 0;
    return 0;
}

static int read_in(const char *folder, const char *name, char *line, size_t size) {
    char path[PATH_BYTES + 64];
    const int n = snprintf(path, sizeof(path), "%s/%s", folder, name);
    return n < (int)sizeof(path) ? read_line(path, line, size) : -1;
}

static void lower_cpus(struct sw_cgroup_limits *limits, double quota, double period) {
    if (quota <= 0 || period <= 0) return; /* version 1 says -1 for no quota */
    const double cpus = quota / period;
    if (limits->cpus == 0 || cpus < limits->cpus) limits->cpus = cpus;
}

static void lower_memory(struct sw_cgroup_limits *limits, const char *text) {
    char *end;
    const uint64_t bytes = strtoull(text, &end, 10);
    if (end != text && bytes < limits->memory_bytes) limits->memory_bytes = bytes; /* not "max" */
}

/* The limits set in one folder, whichever version's files lie there. */
static void read_folder(const char *folder, struct sw_cgroup_limits *limits) {
    char line[128], period_line[128];
    double quota, period;
    if (!read_in(folder, "cpu.max", line, sizeof(line)) &&
        sscanf(line, "%lf %lf", &quota, &period) == 2) /* "max 100000" is no quota */
        lower_cpus(limits, quota, period);
    if (!read_in(folder, "cpu.cfs_quota_us", line, sizeof(line)) &&
        !read_in(folder, "cpu.cfs_period_us", period_line, sizeof(period_line)))
        lower_cpus(limits, atof(line), atof(period_line));
    if (!read_in(folder, "memory.max", line, sizeof(line))) lower_memory(limits, line);
    if (!read_in(folder, "memory.limit_in_bytes", line, sizeof(line))) lower_memory(limits, line);
}

/* Reads mount + group and every folder above it up to the mount. Inside a container the path may be
 * the host's and not exist here; then the mount itself is the container's group. */
static void read_up(const char *mount, const char *group, struct sw_cgroup_limits *limits) {
    char folder[PATH_BYTES];
    const int n = snprintf(folder, sizeof(folder), "%s%s", mount, group);
    if (n < 0 || n >= (int)sizeof(folder)) return;
    for (size_t len = (size_t)n; len >= strlen(mount);) {
        folder[len] = 0;
        read_folder(folder, limits);
        if (len == strlen(mount)) break;
        const char *slash = strrchr(folder, '/');
        len = (size_t)(slash - folder);
    }
}

static int has_controller(const char *list, const char *name) {
    const size_t len = strlen(name);
    for (const char *c = list; *c; c += strcspn(c, ","), c += *c == ',')
        if (!strncmp(c, name, len) && (c[len] == ',' || !c[len])) return 1;
    return 0;
}

void sw_cgroup_read(const char *root, struct sw_cgroup_limits *limits) {
    assert(root && limits);
    *limits = (struct sw_cgroup_limits){0, UINT64_MAX};
    char path[PATH_BYTES], line[PATH_BYTES], mount[PATH_BYTES + 300];
    snprintf(path, sizeof(path), "%s/proc/self/cgroup", root);
    FILE *f = fopen(path, "re");
    if (!f) return;
    while (fgets(line, sizeof(line), f)) { /* ID:CONTROLLERS:GROUP, version 2 without controllers */
        line[strcspn(line, "\n")] = 0;
        char *list = strchr(line, ':');
        char *group = list ? strchr(list + 1, ':') : NULL;
        if (!group) continue;
        *group++ = 0;
        list++;
        if (!*list) {
            snprintf(mount, sizeof(mount), "%s/sys/fs/cgroup", root);
            read_up(mount, group, limits);
            snprintf(mount, sizeof(mount), "%s/sys/fs/cgroup/unified", root);
            read_up(mount, group, limits);
        } else if (has_controller(list, "cpu") || has_controller(list, "memory")) {
            snprintf(mount, sizeof(mount), "%s/sys/fs/cgroup/%.256s", root, list);
            read_up(mount, group, limits);
            const char *one = has_controller(list, "cpu") ? "cpu" : "memory";
            snprintf(mount, sizeof(mount), "%s/sys/fs/cgroup/%s", root, one);
            read_up(mount, group, limits);
        }
    }
    fclose(f);
}

int sw_quota_cpus(double quota, int cpus) {
    if (quota <= 0 || quota >= cpus) return cpus;
    return quota < 1 ? 1 : (int)quota;
}

/* The affinity mask's size; the mask grows until the kernel's fits. */
static int mask_cpus(void) {
    for (int bits = 1024; bits <= 1 << 20; bits *= 2) {
        cpu_set_t *set = CPU_ALLOC(bits);
        if (!set) return -ENOMEM;
        const size_t size = CPU_ALLOC_SIZE(bits);
        const int err = sched_getaffinity(0, size, set) ? errno : 0;
        const int count = err ? 0 : CPU_COUNT_S(size, set);
        CPU_FREE(set);
        if (!err) return count > 0 ? count : 1;
        if (err != EINVAL) return -err;
    }
    return -EINVAL;
}

static void read_hwloc(struct sw_topology *t) {
    hwloc_topology_t topo;
    if (hwloc_topology_init(&topo)) return;
    if (hwloc_topology_load(topo) == 0) {
        hwloc_cpuset_t mask = hwloc_bitmap_alloc();
        if (mask && hwloc_get_cpubind(topo, mask, HWLOC_CPUBIND_PROCESS) == 0) {
            int nodes = 0;
            hwloc_obj_t node = NULL; /* by hand: a node without memory or cores is no surprise */
            while ((node = hwloc_get_next_obj_by_type(topo, HWLOC_OBJ_NUMANODE, node)) != NULL)
                nodes += node->cpuset && hwloc_bitmap_intersects(node->cpuset, mask);
            if (nodes > 0) t->numa_nodes = nodes;
        }
        hwloc_bitmap_free(mask);
        hwloc_obj_t package = hwloc_get_obj_by_type(topo, HWLOC_OBJ_PACKAGE, 0);
        const char *name = package ? hwloc_obj_get_info_by_name(package, "CPUModel") : NULL;
        if (name) snprintf(t->cpu_name, sizeof(t->cpu_name), "%s", name);
    }
    hwloc_topology_destroy(topo);
}

int sw_topology_read(struct sw_topology *t) {
    assert(t);
    memset(t, 0, sizeof(*t));
    t->cpus = mask_cpus();
    const long pages = sysconf(_SC_PHYS_PAGES), page_bytes = sysconf(_SC_PAGESIZE);
    if (t->cpus < 0 || pages <= 0 || page_bytes <= 0) {
        const int ret = t->cpus < 0 ? t->cpus : -ENOSYS;
        sw_error("topology: cannot read the cores and memory of this machine: %s", strerror(-ret));
        return ret;
    }
    t->numa_nodes = 1;
    snprintf(t->cpu_name, sizeof(t->cpu_name), "unknown");
    read_hwloc(t);
    struct sw_cgroup_limits limits;
    sw_cgroup_read("", &limits);
    t->quota_cpus = sw_quota_cpus(limits.cpus, t->cpus);
    t->memory_bytes = (uint64_t)pages * (uint64_t)page_bytes;
    if (limits.memory_bytes < t->memory_bytes) t->memory_bytes = limits.memory_bytes;
    return 0;
}

int sw_topology_threads(const struct sw_topology *t) {
    assert(t);
    return t->cpus < t->quota_cpus ? t->cpus : t->quota_cpus;
}
