/* offload/team.c - binds a team's threads from within, each one itself.
 *
 * A runtime's threads inherit the mask of the thread that starts them, so those that come later are
 * right by themselves; those that exist are told inside a parallel region. A rebinding costs a
 * system call per thread and comes only when the next chunk lies on another node. It happens inside
 * steps, so it takes the C library's calls, which unlike hwloc's allocate nothing. */
#include "offload/team.h"

#include <assert.h>
#include <errno.h>
#include <omp.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/log.h"
#include "offload/team_internal.h"
#include "offload/topology_internal.h"

enum { SAMPLES = 8 }; /* addresses asked for their node, from the first to the last byte */

/* A mask as the kernel reads it, for up to CPUS_MAX processing units. */
enum { CPUS_MAX = 8192, WORD_BITS = 8 * sizeof(unsigned long), WORDS = CPUS_MAX / WORD_BITS };

struct sw_team {
    int threads, per_core;
    hwloc_topology_t topo; /* NULL: never bound */
    sw_team_locate locate;
    hwloc_cpuset_t mask, set, first; /* the process's; scratch of placing and of narrowing */
    int node;                        /* bound to; -1: none */
    int now;                         /* threads there */
    char unbound[192];               /* where they run when nothing is bound, and why */
};

/* The kernel's own call: hwloc's allocates, and this runs for every chunk. move_pages(2) without
 * target nodes moves nothing and fills in where each page is, or a negative errno. */
static int locate_pages(hwloc_topology_t topo, const void *bytes, uint64_t count) {
    (void)topo;
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    void *pages[SAMPLES];
    int nodes[SAMPLES];
    if (count == 0) return -1;
    for (uint64_t i = 0; i < SAMPLES; i++)
        pages[i] = (void *)(((uintptr_t)bytes + (count - 1) / (SAMPLES - 1) * i) / page * page);
    if (syscall(SYS_move_pages, 0, (unsigned long)SAMPLES, pages, NULL, nodes, 0)) return -1;
    for (int i = 1; i < SAMPLES; i++)
        if (nodes[i] != nodes[0]) return -1;
    return nodes[0] >= 0 ? nodes[0] : -1;
}

int sw_team_choose(hwloc_topology_t topo, hwloc_const_cpuset_t mask, int node, int threads,
                   int per_core, hwloc_cpuset_t set, int *bound) {
    assert(threads >= 1);
    const hwloc_obj_t where =
        node < 0 ? NULL : hwloc_get_numanode_obj_by_os_index(topo, (unsigned)node);
    hwloc_bitmap_zero(set);
    if (where && where->cpuset) hwloc_bitmap_and(set, where->cpuset, mask);
    *bound = !hwloc_bitmap_iszero(set);
    if (!*bound) {
        hwloc_bitmap_copy(set, mask);
        return threads;
    }
    const int most = per_core ? sw_topology_cores(topo, set) : hwloc_bitmap_weight(set);
    return threads < most ? threads : most;
}

int sw_team_open_on(struct sw_team **out, hwloc_topology_t topo, sw_team_locate locate, int threads,
                    int per_core) {
    assert(out && threads >= 1 && threads <= SW_TEAM_THREADS_MAX);
    struct sw_team *team = calloc(1, sizeof(*team));
    if (!team) {
        if (topo) hwloc_topology_destroy(topo);
        sw_error("no memory for Adam's thread team");
        return -ENOMEM;
    }
    *team = (struct sw_team){.threads = threads,
                             .per_core = per_core,
                             .topo = topo,
                             .locate = locate,
                             .node = -1,
                             .now = threads};
    snprintf(team->unbound, sizeof(team->unbound), ", not bound");
    *out = team;
    if (!topo) return 0;
    team->mask = hwloc_bitmap_alloc();
    team->set = hwloc_bitmap_alloc();
    team->first = hwloc_bitmap_alloc();
    if (team->mask && team->set && team->first &&
        hwloc_get_cpubind(topo, team->mask, HWLOC_CPUBIND_THREAD) == 0 &&
        sw_topology_nodes(topo, team->mask) > 1)
        return 0;
    hwloc_topology_destroy(topo); /* nothing to choose between */
    team->topo = NULL;
    return 0;
}

int sw_team_open(struct sw_team **out, const struct sw_topology *topology, int threads,
                 int per_core) {
    const int may_bind = topology->numa_nodes > 1 && !topology->user_binds;
    hwloc_topology_t topo = may_bind ? sw_topology_load() : NULL;
    const int ret = sw_team_open_on(out, topo, locate_pages, threads, per_core);
    if (ret == 0 && topology->user_binds)
        snprintf((*out)->unbound, sizeof((*out)->unbound),
                 ", placed by OpenMP as the environment says (OMP_PROC_BIND and its kin)");
    else if (ret == 0)
        snprintf((*out)->unbound, sizeof((*out)->unbound), " on CPU%s %s, not bound: %s",
                 topology->cpus == 1 ? "" : "s", topology->cpu_list,
                 topology->numa_nodes > 1 ? "the machine cannot be read" : "one NUMA node");
    return ret;
}

void sw_team_close(struct sw_team *team) {
    if (!team) return;
    if (team->topo) hwloc_topology_destroy(team->topo);
    hwloc_bitmap_free(team->mask);
    hwloc_bitmap_free(team->set);
    hwloc_bitmap_free(team->first);
    free(team);
}

/* The mask at the start, less what was taken away since: the first thread is never bound here, so
 * its mask is what the user wants now. */
static void narrow_mask(struct sw_team *team) {
    unsigned long words[WORDS];
    if (sched_getaffinity(getpid(), sizeof(words), (cpu_set_t *)words)) return;
    hwloc_bitmap_zero(team->first);
    for (unsigned i = 0; i < WORDS; i++)
        if (words[i]) hwloc_bitmap_set_ith_ulong(team->first, i, words[i]);
    if (hwloc_bitmap_intersects(team->first, team->mask))
        hwloc_bitmap_and(team->mask, team->mask, team->first);
}

static int bind_self(hwloc_topology_t topo, hwloc_const_cpuset_t set) {
    if (!hwloc_topology_is_thissystem(topo)) return 0; /* a made-up machine */
    unsigned long words[WORDS];
    for (unsigned i = 0; i < WORDS; i++) words[i] = hwloc_bitmap_to_ith_ulong(set, i);
    return sched_setaffinity(0, sizeof(words), (const cpu_set_t *)words) ? errno : 0;
}

int sw_team_bind(hwloc_topology_t topo, hwloc_const_cpuset_t set, int threads) {
    int error = 0;
#pragma omp parallel num_threads(threads) reduction(max : error)
    error = bind_self(topo, set);
    return error;
}

void sw_team_form(int threads) {
    atomic_int together = 0; /* a region with nothing in it would not be one */
#pragma omp parallel num_threads(threads)
    atomic_fetch_add(&together, 1);
}

void sw_team_start(const struct sw_team *team) {
    assert(team);
    sw_team_form(team->threads);
}

int sw_team_place(struct sw_team *team, const void *bytes, uint64_t count) {
    assert(team);
    if (!team->topo) return team->threads;
    int node = team->locate(team->topo, bytes, count), bound;
    if (node == team->node) return team->now;
    narrow_mask(team);
    const int threads = sw_team_choose(team->topo, team->mask, node, team->threads, team->per_core,
                                       team->set, &bound);
    if (!bound && team->node < 0) return team->now; /* neither before nor after */
    const int error = sw_team_bind(team->topo, team->set, threads);
    if (error) {
        sw_warning("Adam's threads are not bound to their NUMA node: %s", strerror(error));
        hwloc_bitmap_copy(team->set, team->mask);
        sw_team_bind(team->topo, team->set,
                     team->threads); /* back to where the user put them, as far as it goes */
        hwloc_topology_destroy(team->topo);
        team->topo = NULL;
        return team->threads;
    }
    team->node = bound ? node : -1;
    team->now = threads;
    return threads;
}

void sw_team_announce(struct sw_team *team, const void *bytes, uint64_t count) {
    assert(team);
    const char *s = team->threads == 1 ? "" : "s"; /* of all of them */
    hwloc_bitmap_t set = team->topo ? hwloc_bitmap_alloc() : NULL;
    if (!set) {
        sw_info("Adam: %d thread%s%s", team->threads, s, team->unbound);
        return;
    }
    int bound;
    char list[128];
    const int node = team->locate(team->topo, bytes, count);
    const int threads =
        sw_team_choose(team->topo, team->mask, node, team->threads, team->per_core, set, &bound);
    hwloc_bitmap_list_snprintf(list, sizeof(list), set);
    if (bound)
        sw_info("Adam: %d thread%s on NUMA node %d, CPU%s %s", threads, threads == 1 ? "" : "s",
                node, hwloc_bitmap_weight(set) == 1 ? "" : "s", list);
    else
        sw_info("Adam: %d thread%s on CPUs %s; its memory is not on one NUMA node", threads, s,
                list);
    hwloc_bitmap_free(set);
}
