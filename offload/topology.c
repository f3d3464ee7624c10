/* offload/topology.c - affinity mask, cgroup limits, NUMA nodes and the name of the CPU.
 *
 * A runtime's own count of cores ignores the quota of a container, and a team larger than the quota
 * spends its time in barriers waiting for throttled threads. */
#include "offload/topology.h"

#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <hwloc.h>
#include <omp.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
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

static void lower_memory(struct sw_cgroup_limits *limits, const char *folder, const char *text) {
    char *end;
    struct stat group;
    const uint64_t bytes = strtoull(text, &end, 10);
    if (end == text || bytes >= limits->memory_bytes) return; /* "max", or wider */
    limits->memory_bytes = bytes;
    limits->memory_group = stat(folder, &group) == 0 ? group.st_ino : 0;
}

static void lower_threads(struct sw_cgroup_limits *limits, const char *max, const char *current) {
    char *end;
    const uint64_t most = strtoull(max, &end, 10);
    if (end == max) return; /* "max" */
    const uint64_t now = strtoull(current, NULL, 10), left = most > now ? most - now : 0;
    if (limits->threads_max != UINT64_MAX && left >= limits->threads_left) return;
    limits->threads_max = most;
    limits->threads_left = left;
}

/* The number behind a name at the start of a line, as files of counters have them. 0 or -1. */
static int read_counter(const char *path, const char *name, uint64_t *count) {
    char line[128];
    const size_t len = strlen(name);
    FILE *f = fopen(path, "re");
    int ret = -1;
    if (!f) return -1;
    while (ret < 0 && fgets(line, sizeof(line), f))
        if (!strncmp(line, name, len) && line[len] == ' ') {
            *count = strtoull(line + len, NULL, 10);
            ret = 0;
        }
    fclose(f);
    return ret;
}

/* A group counts its own processes and those of the groups in it. */
static void read_oom_kills(const char *folder, struct sw_cgroup_limits *limits) {
    static const char *const files[] = {"memory.events", "memory.oom_control"};
    char path[PATH_BYTES + 64];
    for (int i = 0; i < 2 && limits->oom_kills == UINT64_MAX; i++) {
        const int n = snprintf(path, sizeof(path), "%s/%s", folder, files[i]);
        if (n < (int)sizeof(path)) read_counter(path, "oom_kill", &limits->oom_kills);
    }
}

/* The limits set in one folder, whichever version's files lie there. */
static void read_folder(const char *folder, struct sw_cgroup_limits *limits) {
    char line[128], period_line[128], current[128];
    double quota, period;
    if (!read_in(folder, "cpu.max", line, sizeof(line)) &&
        sscanf(line, "%lf %lf", &quota, &period) == 2) /* "max 100000" is no quota */
        lower_cpus(limits, quota, period);
    if (!read_in(folder, "cpu.cfs_quota_us", line, sizeof(line)) &&
        !read_in(folder, "cpu.cfs_period_us", period_line, sizeof(period_line)))
        lower_cpus(limits, atof(line), atof(period_line));
    if (!read_in(folder, "memory.max", line, sizeof(line))) lower_memory(limits, folder, line);
    if (!read_in(folder, "memory.limit_in_bytes", line, sizeof(line)))
        lower_memory(limits, folder, line);
    if (!read_in(folder, "pids.max", line, sizeof(line)) &&
        !read_in(folder, "pids.current", current, sizeof(current)))
        lower_threads(limits, line, current);
    read_oom_kills(folder, limits);
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
    *limits = (struct sw_cgroup_limits){.memory_bytes = UINT64_MAX,
                                        .threads_max = UINT64_MAX,
                                        .threads_left = UINT64_MAX,
                                        .oom_kills = UINT64_MAX};
    static const char *const controllers[] = {"cpu", "memory", "pids"};
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
        }
        for (int c = 0; c < 3; c++) { /* under the controllers' joint name, and under its own */
            if (!has_controller(list, controllers[c])) continue;
            snprintf(mount, sizeof(mount), "%s/sys/fs/cgroup/%.256s", root, list);
            read_up(mount, group, limits);
            snprintf(mount, sizeof(mount), "%s/sys/fs/cgroup/%s", root, controllers[c]);
            read_up(mount, group, limits);
        }
    }
    fclose(f);
}

int sw_bus_node(const char *root, const char *address) {
    char path[PATH_BYTES], line[32], name[64] = "";
    for (size_t i = 0; address[i] && i + 1 < sizeof(name); i++)
        name[i] = (char)tolower((unsigned char)address[i]); /* as the kernel writes it */
    snprintf(path, sizeof(path), "%s/sys/bus/pci/devices/%s/numa_node", root, name);
    return *name && read_line(path, line, sizeof(line)) == 0 ? atoi(line) : -1;
}

int sw_topology_bus_node(const char *address) {
    return sw_bus_node("", address);
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

/* Whether the user has OpenMP place its threads: then nothing here may. */
static int user_binds(void) {
    static const char *const names[] = {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY",
                                        "KMP_AFFINITY"};
    for (int i = 0; i < 4; i++)
        if (getenv(names[i])) return 1;
    return 0;
}

int sw_topology_cores(hwloc_topology_t topo, hwloc_const_cpuset_t set) {
    int cores = 0;
    for (hwloc_obj_t core = NULL;
         (core = hwloc_get_next_obj_by_type(topo, HWLOC_OBJ_CORE, core)) != NULL;)
        cores += core->cpuset && hwloc_bitmap_intersects(core->cpuset, set);
    if (cores > 0) return cores;
    const int units = hwloc_bitmap_weight(set);
    return units > 0 ? units : 1;
}

int sw_topology_nodes(hwloc_topology_t topo, hwloc_const_cpuset_t set) {
    int nodes = 0;
    for (hwloc_obj_t node = NULL;
         (node = hwloc_get_next_obj_by_type(topo, HWLOC_OBJ_NUMANODE, node)) != NULL;)
        nodes += node->cpuset && hwloc_bitmap_intersects(node->cpuset, set);
    return nodes > 0 ? nodes : 1;
}

hwloc_topology_t sw_topology_load(void) {
    hwloc_topology_t topo;
    if (hwloc_topology_init(&topo)) return NULL;
    /* The x86 component moves the calling thread to every CPU in turn, those outside the user's
     * mask too; what it adds to the kernel's own answers is not used here. */
    hwloc_topology_set_components(topo, HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST, "x86");
    if (hwloc_topology_load(topo) == 0) return topo;
    hwloc_topology_destroy(topo);
    return NULL;
}

static int list_nodes(hwloc_topology_t topo, hwloc_cpuset_t mask, struct sw_numa_node *nodes) {
    int count = 0;
    for (hwloc_obj_t node = NULL;
         (node = hwloc_get_next_obj_by_type(topo, HWLOC_OBJ_NUMANODE, node)) != NULL;) {
        if (count == SW_NUMA_NODES_MAX || !node->cpuset ||
            !hwloc_bitmap_intersects(node->cpuset, mask))
            continue;
        hwloc_bitmap_t both = hwloc_bitmap_alloc();
        if (!both) continue;
        hwloc_bitmap_and(both, node->cpuset, mask);
        nodes[count++] = (struct sw_numa_node){(int)node->os_index, sw_topology_cores(topo, both),
                                               node->attr->numanode.local_memory};
        hwloc_bitmap_free(both);
    }
    return count;
}

int sw_topology_numa(const struct sw_topology *t, struct sw_numa_node nodes[SW_NUMA_NODES_MAX]) {
    int count = 0;
    hwloc_topology_t topo = t->numa_nodes > 1 ? sw_topology_load() : NULL;
    hwloc_cpuset_t mask = topo ? hwloc_bitmap_alloc() : NULL;
    if (mask && hwloc_get_cpubind(topo, mask, HWLOC_CPUBIND_THREAD) == 0)
        count = list_nodes(topo, mask, nodes);
    hwloc_bitmap_free(mask);
    if (topo) hwloc_topology_destroy(topo);
    if (count > 1) return count;
    nodes[0] = (struct sw_numa_node){-1, t->cores, t->memory_bytes};
    return 1;
}

static void read_hwloc(struct sw_topology *t) {
    hwloc_topology_t topo = sw_topology_load();
    if (!topo) return;
    hwloc_cpuset_t mask = hwloc_bitmap_alloc();
    if (mask && hwloc_get_cpubind(topo, mask, HWLOC_CPUBIND_THREAD) == 0) {
        /* OpenMP may have narrowed this thread's own mask at start: then what the container
         * allows is as near as one can come. */
        if (hwloc_bitmap_weight(mask) < t->cpus)
            hwloc_bitmap_copy(mask, hwloc_topology_get_allowed_cpuset(topo));
        const int cores = sw_topology_cores(topo, mask);
        if (cores < t->cores) t->cores = cores;
        t->numa_nodes = sw_topology_nodes(topo, mask);
        hwloc_bitmap_list_snprintf(t->cpu_list, sizeof(t->cpu_list), mask);
    }
    hwloc_bitmap_free(mask);
    hwloc_obj_t package = hwloc_get_obj_by_type(topo, HWLOC_OBJ_PACKAGE, 0);
    const char *name = package ? hwloc_obj_get_info_by_name(package, "CPUModel") : NULL;
    if (name) snprintf(t->cpu_name, sizeof(t->cpu_name), "%s", name);
    hwloc_topology_destroy(topo);
}

int sw_topology_read(struct sw_topology *t) {
    assert(t);
    memset(t, 0, sizeof(*t));
    t->cpus = mask_cpus();
    t->user_binds = user_binds();
    /* Told to bind, OpenMP moves the first thread to one place before main begins; it counted the
     * mask before that. */
    if (t->user_binds && t->cpus > 0 && omp_get_num_procs() > t->cpus)
        t->cpus = omp_get_num_procs();
    const long pages = sysconf(_SC_PHYS_PAGES), page_bytes = sysconf(_SC_PAGESIZE);
    if (t->cpus < 0 || pages <= 0 || page_bytes <= 0) {
        const int ret = t->cpus < 0 ? t->cpus : -ENOSYS;
        sw_error("topology: cannot read the cores and memory of this machine: %s", strerror(-ret));
        return ret;
    }
    t->numa_nodes = 1;
    t->cores = t->cpus;
    snprintf(t->cpu_list, sizeof(t->cpu_list), "unknown");
    snprintf(t->cpu_name, sizeof(t->cpu_name), "unknown");
    read_hwloc(t);
    struct sw_cgroup_limits limits;
    sw_cgroup_read("", &limits);
    t->quota = limits.cpus;
    t->quota_cpus = sw_quota_cpus(limits.cpus, t->cpus);
    t->machine_bytes = t->memory_bytes = (uint64_t)pages * (uint64_t)page_bytes;
    if (limits.memory_bytes >= t->memory_bytes) return 0;
    t->memory_bytes = limits.memory_bytes;
    t->memory_group = limits.memory_group;
    return 0;
}

uint64_t sw_topology_oom_kills(void) {
    struct sw_cgroup_limits limits;
    uint64_t count = 0;
    sw_cgroup_read("", &limits);
    if (limits.oom_kills != UINT64_MAX) return limits.oom_kills;
    return read_counter("/proc/vmstat", "oom_kill", &count) == 0 ? count : 0;
}

static int least(int a, int b) {
    const int n = a < b ? a : b;
    return n < SW_TEAM_THREADS_MAX ? n : SW_TEAM_THREADS_MAX;
}

int sw_topology_threads(const struct sw_topology *t) {
    assert(t);
    return least(t->cpus, t->quota_cpus);
}

int sw_topology_adam_threads(const struct sw_topology *t) {
    assert(t);
    return least(t->cores, t->quota_cpus);
}
