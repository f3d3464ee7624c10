/* base/park.c - a word that the kernel watches while its thread sleeps. */
#include "base/park.h"

#include <linux/futex.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { ASLEEP = -1, NOTHING = 0, WOKEN = 1 };

/* An error is a word that has changed, a signal or the end of the time: the caller looks again. */
static void futex(struct sw_park *park, int op, int value, const struct timespec *limit) {
    syscall(SYS_futex, &park->state, op | FUTEX_PRIVATE_FLAG, value, limit, NULL, 0);
}

void sw_park_sleep(struct sw_park *park, uint64_t limit_ns) {
    int32_t state = NOTHING;
    if (atomic_compare_exchange_strong(&park->state, &state, ASLEEP)) {
        const struct timespec limit = {(time_t)(limit_ns / 1000000000u),
                                       (long)(limit_ns % 1000000000u)};
        futex(park, FUTEX_WAIT, ASLEEP, limit_ns ? &limit : NULL);
    }
    atomic_exchange(&park->state, NOTHING);
}

void sw_park_wake(struct sw_park *park) {
    if (atomic_exchange(&park->state, WOKEN) == ASLEEP) futex(park, FUTEX_WAKE, 1, NULL);
}
