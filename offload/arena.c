/* offload/arena.c - one anonymous mapping at its exact size, populated in parallel.
 *
 * First touch of fresh huge pages can be the slowest thing a start does, so several threads
 * populate a piece each. They are gone afterwards, unlike a runtime's team, and a machine that
 * refuses them only makes the start slower. Large arenas begin at a 2 MiB border: below it no huge
 * page fits. */
#include "offload/arena.h"

#include <assert.h>
#include <errno.h>
#include <hwloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/log.h"
#include "base/size.h"
#include "offload/topology.h"
#include "offload/topology_internal.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

enum { PAGE_BYTES = 4096, HUGE_BYTES = 2 << 20, HELPERS_MAX = 63 };
#define PIECE_BYTES (64ull << 20)

#ifdef SW_POISON
enum { POISON = 1 };
#else
enum { POISON = 0 };
#endif

/* Memory that the kernel can give without killing someone. 0: unknown. */
static uint64_t available_bytes(void) {
    FILE *f = fopen("/proc/meminfo", "re");
    if (!f) return 0;
    char line[128];
    unsigned long long kib, sum = 0;
    while (fgets(line, sizeof(line), f))
        if (sscanf(line, "MemAvailable: %llu", &kib) == 1 ||
            sscanf(line, "SwapFree: %llu", &kib) == 1)
            sum += kib * 1024;
    fclose(f);
    return sum;
}

static int refuse(uint64_t bytes, uint64_t have, const char *what) {
    char need[32], size[32];
    sw_error("arena: %s of host memory are needed, %s %s", sw_size_print(bytes, need, sizeof(need)),
             sw_size_print(have, size, sizeof(size)), what);
    return -ENOMEM;
}

/* Maps bytes; from 2 MiB on at a 2 MiB border, giving the rest of a larger mapping back. */
static char *map_exact(uint64_t bytes) {
    const uint64_t slack = bytes >= HUGE_BYTES ? HUGE_BYTES : 0;
    char *p = mmap(NULL, bytes + slack, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return NULL;
    if (!slack) return p;
    const uint64_t head = sw_round_up((uintptr_t)p, HUGE_BYTES) - (uintptr_t)p;
    if (head) munmap(p, head);
    if (slack - head) munmap(p + head + bytes, slack - head);
    madvise(p + head, bytes, MADV_HUGEPAGE); /* refused: 4 KiB pages, slower and still right */
    return p + head;
}

/* A piece's nodes: its own, or those that this process may use. */
static hwloc_membind_policy_t choose_nodes(hwloc_topology_t topo, int node, hwloc_nodeset_t nodes) {
    if (node >= 0) {
        hwloc_bitmap_only(nodes, (unsigned)node);
        return HWLOC_MEMBIND_BIND;
    }
    hwloc_cpuset_t cpus = hwloc_bitmap_alloc();
    if (cpus && hwloc_get_cpubind(topo, cpus, HWLOC_CPUBIND_PROCESS) == 0)
        hwloc_cpuset_to_nodeset(topo, cpus, nodes);
    hwloc_bitmap_free(cpus);
    const int one = hwloc_bitmap_weight(nodes) == 1;
    return one ? HWLOC_MEMBIND_BIND : HWLOC_MEMBIND_INTERLEAVE;
}

/* Memory that cannot be bound is used all the same. */
static void bind_memory(char *base, const struct sw_arena_piece *pieces, uint32_t count) {
    hwloc_topology_t topo = sw_topology_load();
    if (!topo) return;
    hwloc_nodeset_t nodes = hwloc_bitmap_alloc();
    const int several = hwloc_get_nbobjs_by_type(topo, HWLOC_OBJ_NUMANODE) > 1;
    for (uint32_t i = 0; i < count && several && nodes; i++) {
        hwloc_bitmap_zero(nodes);
        const hwloc_membind_policy_t policy = choose_nodes(topo, pieces[i].node, nodes);
        if (pieces[i].bytes && !hwloc_bitmap_iszero(nodes) &&
            hwloc_set_area_membind(topo, base, pieces[i].bytes, nodes, policy,
                                   HWLOC_MEMBIND_BYNODESET))
            sw_warning("arena: memory is not bound to its NUMA nodes: %s", strerror(errno));
        base += pieces[i].bytes;
    }
    hwloc_bitmap_free(nodes);
    hwloc_topology_destroy(topo);
}

static int populate_piece(char *p, uint64_t bytes) {
    int ret;
    do ret = madvise(p, bytes, MADV_POPULATE_WRITE) ? -errno : 0;
    while (ret == -EINTR || ret == -EAGAIN);
    if (ret == -EINVAL) { /* before Linux 5.14: touch each page */
        for (uint64_t at = 0; at < bytes; at += PAGE_BYTES) *(volatile char *)(p + at) = 0;
        ret = 0;
    }
    if (!ret && POISON) memset(p, 0xFF, bytes);
    return ret;
}

struct populate {
    char *base;
    uint64_t bytes, pieces;
    atomic_uint_fast64_t next;
    atomic_int error;
};

static void *populate_pieces(void *arg) {
    struct populate *p = arg;
    for (uint64_t i; (i = atomic_fetch_add(&p->next, 1)) < p->pieces;) {
        const uint64_t at = i * PIECE_BYTES, left = p->bytes - at;
        const int ret = populate_piece(p->base + at, left < PIECE_BYTES ? left : PIECE_BYTES);
        if (ret < 0) atomic_store(&p->error, ret);
    }
    return NULL;
}

static int populate(char *base, uint64_t bytes, int threads) {
    struct populate p = {
        .base = base, .bytes = bytes, .pieces = (bytes + PIECE_BYTES - 1) / PIECE_BYTES};
    pthread_t helpers[HELPERS_MAX];
    int count = 0;
    while (count < HELPERS_MAX && count < threads - 1 && (uint64_t)count + 1 < p.pieces &&
           !pthread_create(&helpers[count], NULL, populate_pieces, &p))
        count++;
    populate_pieces(&p);
    for (int i = 0; i < count; i++) pthread_join(helpers[i], NULL);
    return atomic_load(&p.error);
}

int sw_arena_open(struct sw_arena *arena, uint64_t bytes) {
    const uint64_t whole = bytes <= UINT64_MAX / 2 ? sw_round_up(bytes, PAGE_BYTES) : bytes;
    return sw_arena_open_pieces(arena, &(struct sw_arena_piece){whole, -1}, 1);
}

int sw_arena_open_pieces(struct sw_arena *arena, const struct sw_arena_piece *pieces,
                         uint32_t count) {
    assert(arena);
    memset(arena, 0, sizeof(*arena));
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < count; i++) bytes += pieces[i].bytes;
    if (!bytes) return 0;
    const uint64_t available = available_bytes();
    if (bytes > UINT64_MAX / 2 || (available && bytes > available))
        return refuse(bytes, available, "are free");
    struct sw_topology topology = {.cpus = 1, .quota_cpus = 1, .numa_nodes = 1};
    const int known = sw_topology_read(&topology) == 0;
    if (known && bytes > topology.memory_bytes)
        return refuse(bytes, topology.memory_bytes, "may be used by this process");
    char *base = map_exact(bytes);
    if (!base) return refuse(bytes, available, "are free, and the kernel refuses the mapping");
    if (topology.numa_nodes > 1) bind_memory(base, pieces, count);
    const int ret = populate(base, bytes, sw_topology_threads(&topology));
    if (ret < 0) {
        munmap(base, bytes);
        sw_error("arena: populating memory failed: %s", strerror(-ret));
        return refuse(bytes, available, "were free");
    }
    arena->base = base;
    arena->bytes = bytes;
    return 0;
}

void sw_arena_close(struct sw_arena *arena) {
    assert(arena);
    if (arena->base) munmap(arena->base, arena->bytes);
    memset(arena, 0, sizeof(*arena));
}

uint64_t sw_arena_need(uint64_t bytes) {
    return sw_round_up(bytes, PAGE_BYTES);
}

void *sw_arena_take(struct sw_arena *arena, uint64_t bytes) {
    assert(arena);
    const uint64_t need = sw_arena_need(bytes);
    assert(need <= arena->bytes - arena->used);
    char *p = arena->base + arena->used;
    arena->used += need;
    return p;
}
