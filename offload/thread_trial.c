/* offload/thread_trial.c - holds threads at a gate, then lets all of them go.
 *
 * The kernel lowers a user's and a group's count of threads a little after a thread is joined, so
 * the end waits until the kernel has forgotten every one: otherwise the threads that follow could
 * fail because of these. */
#include "offload/thread_trial.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "offload/topology_internal.h"

enum {
    STACK_USUAL_BYTES = 8 << 20,
    FORGET_TRIES = 20000, /* of FORGET_NS each: a second */
    FORGET_NS = 50000
};

struct gate {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int open;
};

struct held {
    pthread_t thread;
    struct gate *gate;
    pid_t tid; /* written by the thread, read once it is joined */
};

static void *hold(void *arg) {
    struct held *me = arg;
    me->tid = (pid_t)syscall(SYS_gettid);
    pthread_mutex_lock(&me->gate->lock);
    while (!me->gate->open) pthread_cond_wait(&me->gate->changed, &me->gate->lock);
    pthread_mutex_unlock(&me->gate->lock);
    return NULL;
}

/* OpenMP's: a number with B, K, M or G; without one it counts KiB. */
static size_t parse_stack(const char *text) {
    char *end;
    errno = 0;
    const unsigned long long number = strtoull(text, &end, 10);
    if (end == text || errno) return 0;
    while (*end == ' ') end++;
    static const char letters[] = "BKMG";
    int shift = 10;
    if (*end) {
        const char *letter = strchr(letters, *end >= 'a' ? *end - 'a' + 'A' : *end);
        if (!letter) return 0;
        shift = 10 * (int)(letter - letters);
        if (end[1 + strspn(end + 1, " ")]) return 0;
    }
    return number > (unsigned long long)SIZE_MAX >> shift ? 0 : (size_t)number << shift;
}

size_t sw_thread_trial_stack_bytes(void) {
    static const char *const names[] = {"OMP_STACKSIZE", "GOMP_STACKSIZE", "KMP_STACKSIZE"};
    for (int i = 0; i < 3; i++) {
        const char *text = getenv(names[i]);
        const size_t bytes = text ? parse_stack(text) : 0;
        if (bytes >= (size_t)PTHREAD_STACK_MIN) return bytes;
    }
    return 0;
}

/* The limit that most likely refused `missing` more threads; called while the others are held. */
static void name_limit(int missing, size_t stack_bytes, char *why, size_t why_size) {
    struct sw_cgroup_limits group;
    sw_cgroup_read("", &group);
    if (group.threads_left < (uint64_t)missing) {
        snprintf(why, why_size, "the container's limit of %" PRIu64 " processes (pids.max)",
                 group.threads_max);
        return;
    }
    const size_t bytes = stack_bytes ? stack_bytes : STACK_USUAL_BYTES;
    void *stack = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (stack == MAP_FAILED) {
        snprintf(why, why_size, "no memory for a stack of %zu KiB (ulimit -v, OMP_STACKSIZE)",
                 bytes >> 10);
        return;
    }
    munmap(stack, bytes);
    struct rlimit limit;
    if (getuid() != 0 && !getrlimit(RLIMIT_NPROC, &limit) && limit.rlim_cur != RLIM_INFINITY)
        snprintf(why, why_size, "this user's limit of %llu processes (ulimit -u, RLIMIT_NPROC)",
                 (unsigned long long)limit.rlim_cur);
    else
        snprintf(why, why_size, "a limit of the whole machine (kernel.threads-max or pid_max)");
}

/* Until the kernel knows the thread no more: only then is it off every count. */
static void wait_forgotten(pid_t tid) {
    const struct timespec pause = {0, FORGET_NS};
    for (int i = 0; i < FORGET_TRIES && !syscall(SYS_tgkill, getpid(), tid, 0); i++)
        nanosleep(&pause, NULL);
}

int sw_thread_trial(int wanted, char *why, size_t why_size) {
    assert(wanted >= 0 && why && why_size > 0);
    why[0] = 0;
    struct held *held = wanted ? calloc((size_t)wanted, sizeof(*held)) : NULL;
    if (!held) {
        if (wanted) snprintf(why, why_size, "no memory");
        return 0;
    }
    struct gate gate = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    const size_t stack_bytes = sw_thread_trial_stack_bytes();
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    if (stack_bytes) pthread_attr_setstacksize(&attributes, stack_bytes);
    int made = 0;
    for (; made < wanted; made++) {
        held[made].gate = &gate;
        if (pthread_create(&held[made].thread, &attributes, hold, &held[made])) break;
    }
    if (made < wanted) name_limit(wanted - made, stack_bytes, why, why_size);
    pthread_attr_destroy(&attributes);
    pthread_mutex_lock(&gate.lock);
    gate.open = 1;
    pthread_cond_broadcast(&gate.changed);
    pthread_mutex_unlock(&gate.lock);
    for (int i = 0; i < made; i++) pthread_join(held[i].thread, NULL);
    for (int i = 0; i < made; i++) wait_forgotten(held[i].tid);
    pthread_mutex_destroy(&gate.lock);
    pthread_cond_destroy(&gate.changed);
    free(held);
    return made;
}
