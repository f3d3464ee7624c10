/* engine/task_count.h - how many tasks of a lane are over, and who waits for how many.
 *
 * Counting up takes no lock, and wakes those whose number has come and nobody else. Threads: one
 * counts up; each waiter number below SW_COUNT_WAITERS_MAX is one thread's; anyone reads. */
#ifndef ENGINE_TASK_COUNT_H
#define ENGINE_TASK_COUNT_H
#include <stdalign.h>
#include <stdatomic.h>
#include <stdint.h>
#include "base/park.h"
#include "engine/turn.h"

enum { SW_COUNT_WAITERS_MAX = SW_LANE_COUNT + 1 };

/* All zero: nothing is over and nobody waits. A cache line is not shared with another lane's. */
struct sw_task_count {
    alignas(64) _Atomic uint64_t count;
    _Atomic uint32_t waiting; /* a bit for each waiter */
    _Atomic uint64_t wanted[SW_COUNT_WAITERS_MAX];
    struct sw_park *_Atomic parks[SW_COUNT_WAITERS_MAX];
};

static inline uint64_t sw_task_count(struct sw_task_count *c) {
    return atomic_load(&c->count);
}

void sw_task_count_up(struct sw_task_count *c);

/* Says that the waiter is to be woken once `wanted` tasks are over; 0: they already are, and it is
 * not. After a 1 it sleeps on its park, which may be woken for other reasons, and asks again. */
int sw_task_count_wants(struct sw_task_count *c, uint32_t waiter, uint64_t wanted,
                        struct sw_park *park);

/* It does not wait any more; due after a 1. */
void sw_task_count_left(struct sw_task_count *c, uint32_t waiter);

#endif
