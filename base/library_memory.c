/* base/library_memory.c - first fit over a sorted table of what is taken.
 *
 * Few blocks are taken at a time (a handful per thread), so the table is short and a lock is held
 * for a fraction of what waking a team costs. */
#include "base/library_memory.h"

#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include "base/alloc_guard.h"

enum { GRANULE = 64, BLOCKS_MAX = 4096, RANGES_MAX = 8 };

struct block {
    uintptr_t begin, end;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards blocks, taken and peak */
static struct block blocks[BLOCKS_MAX];                  /* by address */
static size_t block_count, taken, peak;

/* Set once, before `ready`. */
static uintptr_t base, limit;
static struct block ranges[RANGES_MAX]; /* the libraries' code */
static int range_count;
static atomic_int ready;

static int is_served(const char *path) {
    const char *slash = strrchr(path, '/');
    const char *name = slash ? slash + 1 : path;
    return strncmp(name, "libdnnl.so", 10) == 0 || strncmp(name, "libgomp.so", 10) == 0;
}

static int find_ranges(struct dl_phdr_info *info, size_t size, void *arg) {
    (void)size;
    (void)arg;
    if (!info->dlpi_name || !is_served(info->dlpi_name)) return 0;
    for (int i = 0; i < info->dlpi_phnum && range_count < RANGES_MAX; i++) {
        const ElfW(Phdr) *p = &info->dlpi_phdr[i];
        if (p->p_type != PT_LOAD || !(p->p_flags & PF_X)) continue;
        const uintptr_t begin = info->dlpi_addr + p->p_vaddr;
        ranges[range_count++] = (struct block){begin, begin + p->p_memsz};
    }
    return 0;
}

void sw_library_memory_open(size_t bytes) {
    if (!sw_alloc_guard_watching()) return;
    pthread_mutex_lock(&lock);
    if (!base) {
        void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (map != MAP_FAILED) {
            base = (uintptr_t)map;
            limit = base + bytes;
            dl_iterate_phdr(find_ranges, NULL);
            atomic_store(&ready, 1);
        }
    }
    pthread_mutex_unlock(&lock);
}

static int is_library(const void *caller) {
    const uintptr_t at = (uintptr_t)caller;
    for (int i = 0; i < range_count; i++)
        if (at >= ranges[i].begin && at < ranges[i].end) return 1;
    return 0;
}

static uintptr_t up(uintptr_t at, size_t alignment) {
    return (at + alignment - 1) / alignment * alignment;
}

void *sw_library_memory_take(const void *caller, size_t alignment, size_t bytes) {
    if (!sw_alloc_guard_inside() || !atomic_load_explicit(&ready, memory_order_acquire) ||
        !is_library(caller))
        return NULL;
    if (alignment < GRANULE) alignment = GRANULE;
    bytes = up(bytes ? bytes : 1, GRANULE);
    if (bytes > limit - base) return NULL;
    uintptr_t at = 0;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i <= block_count && block_count < BLOCKS_MAX; i++) {
        const uintptr_t begin = up(i ? blocks[i - 1].end : base, alignment);
        const uintptr_t end = i < block_count ? blocks[i].begin : limit;
        if (begin >= end || end - begin < bytes) continue;
        memmove(&blocks[i + 1], &blocks[i], (block_count - i) * sizeof(*blocks));
        blocks[i] = (struct block){begin, begin + bytes};
        block_count++;
        taken += bytes;
        if (taken > peak) peak = taken;
        at = begin;
        break;
    }
    pthread_mutex_unlock(&lock);
    return (void *)at;
}

static int is_ours(const void *p) {
    return atomic_load_explicit(&ready, memory_order_acquire) && (uintptr_t)p >= base &&
           (uintptr_t)p < limit;
}

/* The index of the block that begins at p, or block_count. The lock is held. */
static size_t find(const void *p) {
    size_t i = 0;
    while (i < block_count && blocks[i].begin != (uintptr_t)p) i++;
    return i;
}

int sw_library_memory_give(void *p) {
    if (!is_ours(p)) return 0;
    pthread_mutex_lock(&lock);
    const size_t i = find(p);
    if (i < block_count) {
        taken -= blocks[i].end - blocks[i].begin;
        memmove(&blocks[i], &blocks[i + 1], (--block_count - i) * sizeof(*blocks));
    }
    pthread_mutex_unlock(&lock);
    return 1;
}

size_t sw_library_memory_size(const void *p) {
    if (!is_ours(p)) return 0;
    pthread_mutex_lock(&lock);
    const size_t i = find(p);
    const size_t bytes = i < block_count ? blocks[i].end - blocks[i].begin : 0;
    pthread_mutex_unlock(&lock);
    return bytes;
}

size_t sw_library_memory_peak(void) {
    pthread_mutex_lock(&lock);
    const size_t bytes = peak;
    pthread_mutex_unlock(&lock);
    return bytes;
}
