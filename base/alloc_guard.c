/* base/alloc_guard.c - counts faults, or ends the program at the first one.
 *
 * Nothing here may allocate: it runs inside malloc. The thread's name is the kernel's, which the
 * threads of a lane's team inherit from the lane. */
#include "base/alloc_guard.h"

#include <errno.h>
#include <execinfo.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>
#include "base/log.h"

enum { FRAMES_MAX = 64 };

#ifdef SW_CHECK_TURNS
enum { STOPS_BY_DEFAULT = 1 };
#else
enum { STOPS_BY_DEFAULT = 0 };
#endif

static atomic_int inside, begun, stops; /* a step runs; one ever ran; a fault ends the program */
static _Atomic uint64_t faults, before_calls, before_bytes;
static _Thread_local int is_exempt;

int sw_alloc_guard_open(void) {
    const char *text = getenv("SPILLWAY_ALLOC_GUARD");
    int stop = STOPS_BY_DEFAULT;
    if (text && strcmp(text, "stop") == 0) {
        stop = 1;
    } else if (text && strcmp(text, "count") == 0) {
        stop = 0;
    } else if (text) {
        sw_error("SPILLWAY_ALLOC_GUARD=%s is neither stop nor count", text);
        return -EINVAL;
    }
    if (text && !sw_alloc_guard_watching())
        sw_warning("SPILLWAY_ALLOC_GUARD has no effect: this build does not watch allocations");
    /* The first backtrace loads a library, which the one inside malloc must not have to. */
    void *frames[FRAMES_MAX];
    if (stop) backtrace(frames, FRAMES_MAX);
    atomic_store(&stops, stop);
    return 0;
}

int sw_alloc_guard_watching(void) {
    /* A program whose calls are watched has made some long before it can ask. */
    return atomic_load(&before_calls) > 0;
}

void sw_alloc_guard_enter(void) {
    is_exempt = 1;
    atomic_store(&begun, 1);
    atomic_store(&inside, 1);
}

void sw_alloc_guard_leave(void) {
    atomic_store(&inside, 0);
}

int sw_alloc_guard_inside(void) {
    return atomic_load_explicit(&inside, memory_order_relaxed);
}

uint64_t sw_alloc_guard_count(void) {
    return atomic_load(&faults);
}

struct sw_alloc_figures sw_alloc_guard_before(void) {
    return (struct sw_alloc_figures){atomic_load(&before_calls), atomic_load(&before_bytes)};
}

static _Noreturn void stop(const char *call, uint64_t bytes) {
    static atomic_flag stopping = ATOMIC_FLAG_INIT;
    while (atomic_flag_test_and_set(&stopping)) pause(); /* another thread tells its story */
    char name[17] = "?", line[256];
    prctl(PR_GET_NAME, name);
    const int length = snprintf(line, sizeof(line),
                                "spillway: error: %s of %llu bytes inside a step, by thread '%s' "
                                "(SPILLWAY_ALLOC_GUARD); called from:\n",
                                call, (unsigned long long)bytes, name);
    const ssize_t ignored = write(STDERR_FILENO, line, (size_t)length);
    (void)ignored;
    void *frames[FRAMES_MAX];
    backtrace_symbols_fd(frames, backtrace(frames, FRAMES_MAX), STDERR_FILENO);
    abort();
}

void sw_alloc_guard_note(const char *call, uint64_t bytes) {
    if (sw_alloc_guard_inside()) {
        if (is_exempt) return;
        atomic_fetch_add(&faults, 1);
        if (atomic_load(&stops)) stop(call, bytes);
    } else if (!atomic_load_explicit(&begun, memory_order_relaxed)) {
        atomic_fetch_add_explicit(&before_calls, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&before_bytes, bytes, memory_order_relaxed);
    }
}
