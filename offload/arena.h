/* offload/arena.h - host memory that is mapped once, at its exact size, and handed out by offset.
 *
 * Backed by huge pages where the kernel grants them, bound by hwloc to a NUMA node, populated in
 * parallel before the first step. Nothing is returned before the whole arena is closed. */
#ifndef OFFLOAD_ARENA_H
#define OFFLOAD_ARENA_H
#include <stdint.h>

struct sw_arena {
    char *base;
    uint64_t bytes, used;
};

/* Maps and populates `bytes` (0 is fine). 0 or -ENOMEM, reported with the size. */
int sw_arena_open(struct sw_arena *arena, uint64_t bytes);

/* Pieces of an arena, one behind the other, each on a NUMA node (as the system counts) or, with -1,
 * wherever the process may use memory, spread over several nodes page by page. */
struct sw_arena_piece {
    uint64_t bytes; /* whole pages of 4 KiB */
    int node;
};
int sw_arena_open_pieces(struct sw_arena *arena, const struct sw_arena_piece *pieces,
                         uint32_t count);
void sw_arena_close(struct sw_arena *arena);

/* The next `bytes`, aligned to 4 KiB. Running out is a caller's bug: the arena's size comes from
 * the same sums (sw_arena_need). Zeroed; test builds (SW_POISON) fill with 0xFF instead. */
void *sw_arena_take(struct sw_arena *arena, uint64_t bytes);

/* What taking `bytes` adds to an arena's size. */
uint64_t sw_arena_need(uint64_t bytes);

#endif
