/* The guard of steps, in a program whose calls are watched: each call that takes memory or starts a
 * thread is a fault in any thread but the trainer's, nothing else is, and where the guard stops the
 * program it names the call, its bytes and the thread. And what serves the libraries in their
 * place. */
#include "base/alloc_guard.h"
#include "base/library_memory.h"

#include <malloc.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>
#include <dnnl.h>

enum { BYTES = 12345, PAGE = 4096 };

/* Where the compiler cannot see that a block is never used. */
static void *volatile kept, *volatile none;

static void take_malloc(void) {
    kept = malloc(BYTES);
}
static void take_calloc(void) {
    kept = calloc(1, BYTES);
}
static void take_realloc(void) {
    kept = realloc(none, BYTES);
}
static void take_aligned_alloc(void) {
    kept = aligned_alloc(64, BYTES);
}
static void take_memalign(void) {
    kept = memalign(64, BYTES);
}
static void take_posix_memalign(void) {
    void *p = NULL;
    if (posix_memalign(&p, 64, BYTES) == 0) kept = p;
}
static void take_mmap(void) {
    kept = mmap(NULL, BYTES, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}
static void take_mremap(void) {
    kept = mremap(kept, PAGE, BYTES, MREMAP_MAYMOVE);
}
static void take_sbrk(void) {
    kept = sbrk(BYTES);
}
static void *nothing(void *arg) {
    return arg;
}
static void take_thread(void) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, nothing, NULL) == 0) pthread_join(thread, NULL);
}

static const struct {
    const char *call, *bytes;
    void (*take)(void);
} calls[] = {
    {"malloc", "12345", take_malloc},     {"calloc", "12345", take_calloc},
    {"realloc", "12345", take_realloc},   {"aligned_alloc", "12345", take_aligned_alloc},
    {"memalign", "12345", take_memalign}, {"posix_memalign", "12345", take_posix_memalign},
    {"mmap", "12345", take_mmap},         {"mremap", "12345", take_mremap},
    {"sbrk", "12345", take_sbrk},         {"pthread_create", "0", take_thread},
};
enum { CALLS = sizeof(calls) / sizeof(calls[0]) };

/* A lane that is there before the step and does one thing when told. */
struct lane {
    pthread_t thread;
    pthread_barrier_t turn;
    void (*task)(void);
};

static void *lane_main(void *arg) {
    struct lane *lane = arg;
    pthread_setname_np(pthread_self(), "a lane");
    pthread_barrier_wait(&lane->turn);
    lane->task();
    pthread_barrier_wait(&lane->turn);
    return NULL;
}

static void lane_open(struct lane *lane, void (*task)(void)) {
    lane->task = task;
    pthread_barrier_init(&lane->turn, NULL, 2);
    if (pthread_create(&lane->thread, NULL, lane_main, lane)) abort();
}

static void lane_run(struct lane *lane) {
    pthread_barrier_wait(&lane->turn);
    pthread_barrier_wait(&lane->turn);
    pthread_join(lane->thread, NULL);
    pthread_barrier_destroy(&lane->turn);
}

/* A sanitizer's build is not watched: then nothing is ever counted, which a test below checks. */
static int has_hooks(void) {
    return sw_alloc_guard_watching();
}

static void page_for_mremap(void) {
    kept = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

static void every_call_of_a_lane_is_counted(void **state) {
    (void)state;
    if (!has_hooks()) return;
    for (int i = 0; i < CALLS; i++) {
        struct lane lane;
        page_for_mremap();
        lane_open(&lane, calls[i].take);
        const uint64_t before = sw_alloc_guard_count();
        sw_alloc_guard_enter();
        lane_run(&lane);
        sw_alloc_guard_leave();
        /* A thread's start also takes memory for it. */
        if (sw_alloc_guard_count() <= before) fail_msg("%s is not counted", calls[i].call);
        if (strcmp(calls[i].call, "pthread_create") != 0)
            assert_int_equal(sw_alloc_guard_count() - before, 1);
    }
}

static void free_kept(void) {
    free(kept);
}

static void giving_back_and_the_trainers_own_calls_are_no_faults(void **state) {
    (void)state;
    if (!has_hooks()) return;
    const uint64_t before = sw_alloc_guard_count();
    struct lane lane;
    kept = malloc(BYTES);
    lane_open(&lane, free_kept);
    sw_alloc_guard_enter();
    lane_run(&lane);
    for (int i = 0; i < CALLS; i++)
        if (strcmp(calls[i].call, "mremap") != 0) calls[i].take();
    sw_alloc_guard_leave();
    assert_int_equal(sw_alloc_guard_count(), before);
    lane_open(&lane, take_malloc); /* between steps */
    lane_run(&lane);
    assert_int_equal(sw_alloc_guard_count(), before);
    assert_true(sw_alloc_guard_before().calls > 0);
    assert_true(sw_alloc_guard_before().bytes > 0);
}

/* In a child whose standard error is a pipe: what it said, and how it ended. */
static int stopped(int call, const char *mode, char *said, size_t said_size) {
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    const pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        signal(SIGABRT, SIG_DFL); /* the test framework's otherwise */
        struct lane lane;
        setenv("SPILLWAY_ALLOC_GUARD", mode, 1);
        if (sw_alloc_guard_open() < 0) _exit(3);
        page_for_mremap();
        lane_open(&lane, calls[call].take);
        sw_alloc_guard_enter();
        lane_run(&lane);
        sw_alloc_guard_leave();
        _exit(sw_alloc_guard_count() > 0 ? 0 : 2);
    }
    close(ends[1]);
    size_t used = 0;
    ssize_t n;
    while ((n = read(ends[0], said + used, said_size - 1 - used)) > 0) used += (size_t)n;
    said[used] = 0;
    close(ends[0]);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    return status;
}

static void it_stops_with_the_call_its_bytes_the_thread_and_where_it_came_from(void **state) {
    (void)state;
    if (!has_hooks()) return;
    for (int i = 0; i < CALLS; i++) {
        char said[8192], want[128];
        const int status = stopped(i, "stop", said, sizeof(said));
        assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
        snprintf(want, sizeof(want), "%s of %s bytes inside a step, by thread 'a lane'",
                 calls[i].call, calls[i].bytes);
        if (!strstr(said, want)) fail_msg("no '%s' in '%s'", want, said);
        assert_non_null(strstr(said, "test_alloc_guard(")); /* a line of the backtrace */
    }
}

static void it_counts_where_it_is_told_to_and_refuses_what_it_does_not_know(void **state) {
    (void)state;
    if (!has_hooks()) return;
    char said[8192];
    int status = stopped(0, "count", said, sizeof(said));
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_string_equal(said, "");
    status = stopped(0, "halt", said, sizeof(said));
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 3);
}

static void unwatched_nothing_is_counted_or_served(void **state) {
    (void)state;
    if (has_hooks()) return;
    struct lane lane;
    lane_open(&lane, take_malloc);
    sw_library_memory_open(1 << 20);
    sw_alloc_guard_enter();
    lane_run(&lane);
    assert_null(sw_library_memory_take((const void *)(uintptr_t)dnnl_sgemm, 64, 64));
    sw_alloc_guard_leave();
    free(kept);
    assert_int_equal(sw_alloc_guard_count(), 0);
    assert_int_equal(sw_alloc_guard_before().calls, 0);
}

/* Calls are a library's by the address they come from: the matrix library's own will do. */
static void blocks_of_a_library_never_overlap_and_come_back(void **state) {
    (void)state;
    if (!has_hooks()) return;
    enum { BLOCKS = 100, ROUNDS = 2000, ROOM = 1 << 20 };
    const void *library = (const void *)(uintptr_t)dnnl_sgemm;
    static char *at[BLOCKS];
    static size_t bytes[BLOCKS];
    unsigned seed = 1;
    sw_library_memory_open(ROOM);
    assert_null(sw_library_memory_take(library, 64, 64)); /* no step runs */
    sw_alloc_guard_enter();
    assert_null(sw_library_memory_take((const void *)(uintptr_t)has_hooks, 64, 64));
    assert_null(sw_library_memory_take(library, 64, ROOM + 1));
    assert_int_equal(sw_library_memory_give(bytes), 0);
    for (int round = 0; round < ROUNDS; round++) {
        const int i = rand_r(&seed) % BLOCKS;
        if (at[i]) {
            for (size_t b = 0; b < bytes[i]; b++) assert_int_equal(at[i][b], i);
            assert_true(sw_library_memory_size(at[i]) >= bytes[i]);
            assert_int_equal(sw_library_memory_give(at[i]), 1);
            at[i] = NULL;
            continue;
        }
        const size_t alignment = (size_t)64 << rand_r(&seed) % 7;
        bytes[i] = (size_t)rand_r(&seed) % 9000;
        at[i] = sw_library_memory_take(library, alignment, bytes[i]);
        assert_non_null(at[i]);
        assert_int_equal((uintptr_t)at[i] % alignment, 0);
        memset(at[i], i, bytes[i]);
    }
    for (int i = 0; i < BLOCKS; i++)
        if (at[i]) assert_int_equal(sw_library_memory_give(at[i]), 1);
    char *all = sw_library_memory_take(library, 64, ROOM); /* nothing was lost in between */
    assert_non_null(all);
    assert_null(sw_library_memory_take(library, 64, 1));
    assert_int_equal(sw_library_memory_give(all), 1);
    assert_int_equal(sw_library_memory_peak(), ROOM);
    sw_alloc_guard_leave();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_call_of_a_lane_is_counted),
        cmocka_unit_test(giving_back_and_the_trainers_own_calls_are_no_faults),
        cmocka_unit_test(it_stops_with_the_call_its_bytes_the_thread_and_where_it_came_from),
        cmocka_unit_test(it_counts_where_it_is_told_to_and_refuses_what_it_does_not_know),
        cmocka_unit_test(unwatched_nothing_is_counted_or_served),
        cmocka_unit_test(blocks_of_a_library_never_overlap_and_come_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
