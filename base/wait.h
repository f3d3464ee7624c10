/* base/wait.h - how long something has been waited for, without what the process itself was stopped
 * for: after SIGSTOP or Ctrl-Z the clock has gone on, but nobody has waited. */
#ifndef BASE_WAIT_H
#define BASE_WAIT_H
#include <pthread.h>
#include <stdint.h>

/* All zero: begins with the first look. */
struct sw_wait {
    uint64_t looked_ns, waited_ns;
};

/* Whoever waits looks every SW_WAIT_STEP_NS at least; of a look that comes later than that, no
 * more is counted. Returns what has been waited, in ns. */
#define SW_WAIT_STEP_NS 250000000u
uint64_t sw_wait_look(struct sw_wait *w);

/* Waits for the condition, whose clock is CLOCK_MONOTONIC, with `lock` held: 0 (look again, as
 * with any condition), or -ETIMEDOUT once limit_s has been waited in all. */
int sw_wait_for(struct sw_wait *w, pthread_cond_t *changed, pthread_mutex_t *lock, double limit_s);

#endif
