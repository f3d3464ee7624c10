/* base/park.h - where one thread sleeps until another wakes it.
 *
 * A wake that finds nobody asleep is kept, once, and ends the next sleep at its beginning: whoever
 * looks, finds nothing and then sleeps misses nothing that was told in between. Neither side makes
 * a system call unless the thread does sleep. All zero: nobody sleeps, nothing is kept. Threads:
 * one sleeps, any wake. What was done before a wake is seen after the sleep that it ended. */
#ifndef BASE_PARK_H
#define BASE_PARK_H
#include <stdatomic.h>
#include <stdint.h>

struct sw_park {
    _Atomic int32_t state;
};

/* Sleeps until woken, or at most limit_ns (0: without limit). May end early: look again. */
void sw_park_sleep(struct sw_park *park, uint64_t limit_ns);
void sw_park_wake(struct sw_park *park);

#endif
