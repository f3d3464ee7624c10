/* base/wait.c - waiting in steps, each of which counts for no more than itself. */
#include "base/wait.h"

#include <errno.h>

#include "base/clock.h"

uint64_t sw_wait_look(struct sw_wait *w) {
    const uint64_t now_ns = sw_now_ns();
    if (w->looked_ns) {
        const uint64_t step_ns = now_ns - w->looked_ns;
        w->waited_ns += step_ns < SW_WAIT_STEP_NS ? step_ns : SW_WAIT_STEP_NS;
    }
    w->looked_ns = now_ns;
    return w->waited_ns;
}

int sw_wait_for(struct sw_wait *w, pthread_cond_t *changed, pthread_mutex_t *lock, double limit_s) {
    const double left_ns = limit_s * 1e9 - (double)sw_wait_look(w);
    if (left_ns <= 0) return -ETIMEDOUT;
    const uint64_t step_ns = left_ns < SW_WAIT_STEP_NS ? (uint64_t)left_ns + 1 : SW_WAIT_STEP_NS;
    const uint64_t until_ns = w->looked_ns + step_ns;
    const struct timespec until = {(time_t)(until_ns / 1000000000u),
                                   (long)(until_ns % 1000000000u)};
    pthread_cond_timedwait(changed, lock, &until);
    return 0;
}
