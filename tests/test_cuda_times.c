/* The executor on devices that keep times, the CPU stand-in's: a task's times are those of its work
 * on the device, not of when it was submitted. So, of a turn's tasks on two ranks, whatever waits
 * for another one begins when that has ended, exactly but for what the clocks may be wrong by; a
 * lane is never busy twice at a time; and a task is done when its work is. Where there is one GPU
 * alone, both ranks have it. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>
#include <errno.h>
#include "base/clock.h"
#include "engine/executor.h"
#include "tests/support_cuda.h"
#include "tests/support_turns.h"

enum { TURNS = 6, RANKS = 2, TASKS_MAX = 640, BYTES = 1 << 20, ROUNDING_NS = 2000 };
/* Of a GPU's clock until it is compared with the host's again: 200 millionths. */
enum { DRIFT_NS = 2 * SW_CLOCK_NS / 5000 };

struct times {
    uint64_t start_ns, end_ns, told_ns;
};

struct watch {
    struct times times[TURNS + 1][TASKS_MAX * RANKS];
    const struct sw_turn *turns[TURNS + 1];
    atomic_int done;
    unsigned seed[SW_LANE_COUNT][RANKS];
    /* What ranks do together: streams wait for each other's event. */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t arrivals; /* at meetings, of all ranks */
    int aborted;
    struct sw_event *arrived[RANKS];
    char *memory[SW_LANE_COMM + 1][RANKS];
    int fail_turn; /* its last batch fails; -1: none does */
};

static struct cuda_device devices[RANKS];

static unsigned next_random(struct watch *w, const struct sw_task *task, uint32_t rank) {
    unsigned *seed = &w->seed[task->lane][rank];
    *seed = *seed * 1103515245u + 12345u;
    return *seed >> 16;
}

/* Until all ranks are here, or one has failed. */
static int arrive(struct watch *w) {
    pthread_mutex_lock(&w->lock);
    const uint64_t complete = w->arrivals++ / RANKS * RANKS + RANKS;
    pthread_cond_broadcast(&w->changed);
    while (w->arrivals < complete && !w->aborted) pthread_cond_wait(&w->changed, &w->lock);
    const int ret = w->arrivals < complete ? -ECANCELED : 0;
    pthread_mutex_unlock(&w->lock);
    return ret;
}

static void on_abort(void *ctx, int error) {
    struct watch *w = ctx;
    (void)error;
    pthread_mutex_lock(&w->lock);
    w->aborted = 1;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

static int meet(struct watch *w, uint32_t rank, struct sw_stream *stream) {
    const struct sw_device_ops *ops = devices->ops;
    int ret = ops->event_record(w->arrived[rank], stream);
    if (ret == 0) ret = arrive(w);
    for (uint32_t r = 0; r < RANKS && ret == 0; r++)
        if (r != rank) ret = ops->stream_wait(stream, w->arrived[r]);
    return ret < 0 ? ret : arrive(w); /* none is recorded anew before */
}

static int on_run(void *ctx, struct sw_run *run, const struct sw_task *task, uint32_t rank,
                  struct sw_stream *stream) {
    struct watch *w = ctx;
    const unsigned random = next_random(w, task, rank);
    if (!stream) {
        usleep(random % 1000);
        return 0;
    }
    if ((int)run->step == w->fail_turn && task->kind == SW_TASK_BATCH && rank == 1) return -EIO;
    int ret = 0;
    if (task->kind == SW_TASK_GATHER || task->kind == SW_TASK_SCATTER) ret = meet(w, rank, stream);
    for (unsigned i = 0; i < random % 4 && ret == 0; i++)
        ret = devices->ops->zero(stream, w->memory[task->lane][rank], BYTES);
    return ret;
}

static int on_start(void *ctx, struct sw_run *run, const struct sw_task *task, uint32_t rank) {
    (void)ctx, (void)run, (void)task, (void)rank;
    return 1;
}

static int on_finish(void *ctx, enum sw_lane lane, uint32_t max) {
    (void)ctx, (void)lane, (void)max;
    return -EIO; /* nothing is in flight */
}

static void on_done(void *ctx, struct sw_run *run, const struct sw_task *task, uint32_t rank) {
    struct watch *w = ctx;
    const uint64_t at = sw_run_at(run, task, rank);
    w->times[run->step][at] = (struct times){run->start_ns[at], run->end_ns[at], sw_now_ns()};
    atomic_fetch_add(&w->done, 1);
}

static const struct sw_executor_ops ops = {
    .run = on_run, .start = on_start, .finish = on_finish, .done = on_done, .abort = on_abort};

struct setup {
    struct test_turns turns;
    struct sw_executor *executor;
    struct watch *watch;
};

static void open_setup(struct setup *s, enum sw_tier tier, int fail_turn) {
    test_turns_build(&s->turns, SW_OVERLAP_FORWARD, tier, RANKS);
    assert_true(s->turns.steady.task_count < TASKS_MAX);
    struct watch *w = s->watch = calloc(1, sizeof(*w));
    w->fail_turn = fail_turn;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->changed, NULL);
    struct sw_device_handle handles[RANKS];
    for (uint32_t r = 0; r < RANKS; r++) {
        handles[r] = devices[r].handle;
        assert_int_equal(devices->ops->event_create(devices[r].device, &w->arrived[r]), 0);
        for (int l = 0; l <= SW_LANE_COMM; l++)
            w->memory[l][r] = cuda_bytes_new(&devices[r], NULL, BYTES);
        for (int l = 0; l < SW_LANE_COUNT; l++) w->seed[l][r] = 77u * (unsigned)l + r;
    }
    const struct sw_turn *const turns[] = {&s->turns.first, &s->turns.second, &s->turns.steady,
                                           &s->turns.drain};
    const struct sw_executor_ranks ranks = {.count = RANKS, .devices = handles};
    assert_int_equal(sw_executor_open(&s->executor, &ranks, &ops, w, turns, 4), 0);
}

static void close_setup(struct setup *s) {
    struct watch *w = s->watch;
    sw_executor_close(s->executor);
    for (uint32_t r = 0; r < RANKS; r++) {
        devices->ops->event_destroy(w->arrived[r]);
        for (int l = 0; l <= SW_LANE_COMM; l++)
            devices->ops->free(devices[r].device, w->memory[l][r], BYTES);
    }
    pthread_mutex_destroy(&w->lock);
    pthread_cond_destroy(&w->changed);
    test_turns_free(&s->turns);
    free(w);
}

static int push_all(struct setup *s) {
    struct sw_run *last = NULL;
    int ret = 0;
    for (uint64_t n = 0; n <= TURNS && ret == 0; n++) {
        const struct sw_turn *turn = n == 0       ? &s->turns.first
                                     : n == 1     ? &s->turns.second
                                     : n == TURNS ? &s->turns.drain
                                                  : &s->turns.steady;
        s->watch->turns[n] = turn;
        while ((ret = sw_executor_push(s->executor, turn, n, last)) == -EAGAIN)
            if ((ret = sw_executor_wait(s->executor)) < 0) return ret;
        last = sw_executor_last_run(s->executor);
    }
    return ret ? ret : sw_executor_idle(s->executor);
}

static int is_joint(const struct sw_task *task) {
    return sw_task_is_joint((enum sw_task_kind)task->kind);
}

static const struct times *times_of(const struct watch *w, int n, uint32_t index, uint32_t rank) {
    const uint32_t own = is_joint(&w->turns[n]->tasks[index]) ? 0 : rank;
    return &w->times[n][(uint64_t)index * RANKS + own];
}

/* By how much the task begins before one that it waits for has ended, at most. */
static int64_t ahead_ns(const struct watch *w, int n, uint32_t index, uint32_t rank) {
    const struct sw_task *task = &w->turns[n]->tasks[index];
    int64_t most = 0;
    for (uint32_t d = 0; d < task->dep_count; d++) {
        const struct sw_dep *dep = &task->deps[d];
        const int in = n + dep->turn;
        if (in < 0 || dep->index < 0) continue;
        const uint32_t other = w->turns[in]->lane_tasks[dep->lane][dep->index];
        const int64_t ahead =
            (int64_t)(times_of(w, in, other, rank)->end_ns - times_of(w, n, index, rank)->start_ns);
        if (ahead > most) most = ahead;
    }
    return most;
}

/* What all ranks do together begins when every one's has come. */
static int64_t ahead_of_any_ns(const struct watch *w, int n, uint32_t index, uint32_t rank) {
    const uint8_t kind = w->turns[n]->tasks[index].kind;
    const int64_t later_ns = (int64_t)(times_of(w, n, index, 1 - rank)->start_ns -
                                       times_of(w, n, index, rank)->start_ns);
    const int64_t own_ns = ahead_ns(w, n, index, rank);
    if (kind != SW_TASK_GATHER && kind != SW_TASK_SCATTER) return own_ns;
    return later_ns > own_ns ? later_ns : own_ns;
}

static void check_lane(const struct watch *w, enum sw_lane lane, uint32_t rank, int64_t slack_ns) {
    uint64_t end_ns = 0;
    for (int n = 0; n <= TURNS; n++)
        for (uint32_t i = 0; i < w->turns[n]->lane_count[lane]; i++) {
            const uint32_t index = w->turns[n]->lane_tasks[lane][i];
            const struct times *t = times_of(w, n, index, rank);
            const int64_t ahead = ahead_of_any_ns(w, n, index, rank);
            if (ahead > slack_ns)
                fail_msg("turn %d, %s of rank %u begins %lld ns before what it waits for has ended",
                         n, sw_task_name((enum sw_task_kind)w->turns[n]->tasks[index].kind), rank,
                         (long long)ahead);
            assert_true(t->start_ns >= end_ns && t->end_ns >= t->start_ns);
            assert_true(t->told_ns + (uint64_t)slack_ns >= t->end_ns);
            end_ns = t->end_ns;
        }
}

static void times_are_those_of_the_work(void **state) {
    (void)state;
    for (int tier = 0; tier < SW_TIER_COUNT; tier++) {
        struct setup s = {0};
        open_setup(&s, (enum sw_tier)tier, -1);
        assert_int_equal(push_all(&s), 0);
        int64_t slack_ns = ROUNDING_NS + (cuda_is_standin(devices) ? 0 : DRIFT_NS);
        for (uint32_t r = 0; r < RANKS; r++)
            slack_ns += (int64_t)devices->ops->clock_error_ns(devices[r].device);
        print_message("tier %d: %d tasks, times exact to %lld ns\n", tier,
                      atomic_load(&s.watch->done), (long long)slack_ns);
        for (uint32_t r = 0; r < RANKS; r++)
            for (int lane = 0; lane < SW_LANE_COUNT; lane++)
                if (sw_lane_on_device((enum sw_lane)lane))
                    check_lane(s.watch, (enum sw_lane)lane, r, slack_ns);
        for (int n = 0; n <= TURNS; n++) /* host lanes waited for devices, too */
            for (uint32_t i = 0; i < s.watch->turns[n]->task_count; i++)
                for (uint32_t r = 0; r < RANKS; r++)
                    assert_true(ahead_ns(s.watch, n, i, r) <= slack_ns);
        close_setup(&s);
    }
}

/* An error ends the wait for times, too. */
static void a_failure_ends_the_run(void **state) {
    (void)state;
    for (int turn = 0; turn < TURNS; turn += 3) {
        struct setup s = {0};
        open_setup(&s, SW_TIER_DEVICE, turn);
        assert_int_equal(push_all(&s), -EIO);
        close_setup(&s);
    }
}

static int open_devices(void **state) {
    (void)state;
    setenv("STANDIN_DEVICES", "2", 1);
    cuda_device_open(&devices[0], 0);
    const int count = sw_device_cuda_count();
    for (int r = 1; r < RANKS; r++) cuda_device_open(&devices[r], r % count);
    return 0;
}

static int close_devices(void **state) {
    (void)state;
    for (int r = 0; r < RANKS; r++) cuda_device_close(&devices[r]);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(times_are_those_of_the_work),
        cmocka_unit_test(a_failure_ends_the_run),
    };
    return cmocka_run_group_tests(tests, open_devices, close_devices);
}
