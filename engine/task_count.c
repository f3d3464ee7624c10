/* engine/task_count.c - see the header.
 *
 * A waiter says what it wants before it looks at the count, and the one who counts up looks at who
 * waits after it has: whichever comes second sees the other. All of it is sequentially consistent.
 */
#include "engine/task_count.h"

#include <assert.h>

void sw_task_count_up(struct sw_task_count *c) {
    const uint64_t count = atomic_fetch_add(&c->count, 1) + 1;
    uint32_t waiting = atomic_load(&c->waiting);
    for (; waiting; waiting &= waiting - 1) {
        const uint32_t waiter = (uint32_t)__builtin_ctz(waiting), bit = 1u << waiter;
        if (atomic_load(&c->wanted[waiter]) > count) continue;
        /* Whoever takes the bit wakes. By now it may be there for something later, which the
         * waiter, woken too early, asks for again. */
        if (atomic_fetch_and(&c->waiting, ~bit) & bit) sw_park_wake(atomic_load(&c->parks[waiter]));
    }
}

int sw_task_count_wants(struct sw_task_count *c, uint32_t waiter, uint64_t wanted,
                        struct sw_park *park) {
    assert(waiter < SW_COUNT_WAITERS_MAX);
    atomic_store_explicit(&c->parks[waiter], park, memory_order_relaxed);
    atomic_store_explicit(&c->wanted[waiter], wanted, memory_order_relaxed);
    atomic_fetch_or(&c->waiting, 1u << waiter);
    if (atomic_load(&c->count) < wanted) return 1;
    sw_task_count_left(c, waiter);
    return 0;
}

void sw_task_count_left(struct sw_task_count *c, uint32_t waiter) {
    atomic_fetch_and(&c->waiting, ~(1u << waiter));
}
