/* The executor must start a task only when everything that it waits for is over, run each task
 * once, keep lane order, and end every wait on an abort. Tasks here do nothing but take a random
 * time; what is over is recorded by the test itself. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>
#include "tests/support_turns.h"
#include <errno.h>
#include "engine/executor.h"

enum { TURNS = 12, RANKS_MAX = 3, TASKS_MAX = 640 };

struct watch {
    const struct sw_executor *executor;
    atomic_int over[TURNS + 1][TASKS_MAX * RANKS_MAX]; /* as in sw_run_at() */
    atomic_int violations, runs;
    int in_flight[2]; /* read, write lane: each touched by its own thread */
    int fail_kind;    /* a task of this kind fails in turn fail_turn; -1: none */
    uint64_t fail_turn;
    unsigned seed[SW_LANE_COUNT][RANKS_MAX];
    atomic_int waiting[SW_LANE_COUNT], waits[SW_LANE_COUNT]; /* for a lane: now, and in all */
    pthread_t adam_threads[RANKS_MAX];                       /* that did a rank's last update */
};

static void no_adam(const struct sw_device_adam_step *step,
                    const struct sw_device_adam_chunk *chunk, void *ctx) {
    (void)step;
    (void)chunk;
    (void)ctx;
}

/* A seed for each rank where its lane may be its own, else the first one. */
static unsigned next_random(struct watch *w, int lane, uint32_t rank) {
    const int own = sw_lane_on_device((enum sw_lane)lane) || lane == SW_LANE_ADAM;
    unsigned *seed = &w->seed[lane][own ? rank : 0];
    *seed = *seed * 1103515245u + 12345u;
    return *seed >> 16;
}

static void pause_randomly(struct watch *w, int lane, uint32_t rank) {
    const unsigned r = next_random(w, lane, rank);
    if (r % 4 == 0) usleep(r % 300);
}

static int is_joint(const struct sw_task *task) {
    return sw_task_is_joint((enum sw_task_kind)task->kind);
}

/* A task may start when its dependencies and its lane's predecessor are over, of its rank; a joint
 * one waits for all ranks. run->step counts turns here. */
static void check_start(struct watch *w, const struct sw_run *run, const struct sw_task *task,
                        uint32_t rank) {
    const uint32_t end = is_joint(task) ? run->rank_count : rank + 1;
    if (is_joint(task) && rank > 0) atomic_fetch_add(&w->violations, 1);
    for (uint32_t d = 0; d < task->dep_count; d++)
        for (uint32_t r = rank; r < end; r++) {
            const struct sw_dep *dep = &task->deps[d];
            const struct sw_run *in = dep->turn == 0 ? run : run->before;
            const struct sw_task *other =
                &in->turn->tasks[in->turn->lane_tasks[dep->lane][dep->index]];
            if (!atomic_load(&w->over[in->step][sw_run_at(in, other, is_joint(other) ? 0 : r)]))
                atomic_fetch_add(&w->violations, 1);
        }
}

/* The last rank is the one that fails, so that the others must be told. */
static int fails(const struct watch *w, const struct sw_run *run, const struct sw_task *task,
                 uint32_t rank) {
    if (task->kind != w->fail_kind || run->step != w->fail_turn) return 0;
    return is_joint(task) || rank + 1 == run->rank_count;
}

static int on_run(void *ctx, struct sw_run *run, const struct sw_task *task, uint32_t rank,
                  struct sw_stream *stream) {
    struct watch *w = ctx;
    if ((stream != NULL) != sw_lane_on_device((enum sw_lane)task->lane))
        atomic_fetch_add(&w->violations, 1);
    if (task->lane == SW_LANE_ADAM) w->adam_threads[rank] = pthread_self();
    check_start(w, run, task, rank);
    pause_randomly(w, task->lane, rank);
    return fails(w, run, task, rank) ? -EIO : 0;
}

static int on_start(void *ctx, struct sw_run *run, const struct sw_task *task, uint32_t rank) {
    struct watch *w = ctx;
    check_start(w, run, task, rank);
    if (fails(w, run, task, rank)) return -EIO;
    if (next_random(w, task->lane, rank) % 3 == 0) return 1;
    w->in_flight[task->lane == SW_LANE_NVME_WRITE]++;
    return 0;
}

static int on_finish(void *ctx, enum sw_lane lane, uint32_t max) {
    struct watch *w = ctx;
    int *in_flight = &w->in_flight[lane == SW_LANE_NVME_WRITE];
    pause_randomly(w, lane, 0);
    if (*in_flight == 0) atomic_fetch_add(&w->violations, 1);
    int count = 1 + (int)((w->seed[lane][0] >> 20) % (unsigned)*in_flight);
    if (count > (int)max) count = (int)max;
    *in_flight -= count;
    return count;
}

static void on_done(void *ctx, struct sw_run *run, const struct sw_task *task, uint32_t rank) {
    struct watch *w = ctx;
    const uint64_t index = sw_run_at(run, task, rank);
    if (run->end_ns[index] < run->start_ns[index]) atomic_fetch_add(&w->violations, 1);
    if (atomic_exchange(&w->over[run->step][index], 1)) atomic_fetch_add(&w->violations, 1);
    atomic_fetch_add(&w->runs, 1);
}

static void on_waits(void *ctx, enum sw_lane other, int begins) {
    struct watch *w = ctx;
    if (begins) atomic_fetch_add(&w->waits[other], 1);
    if (atomic_fetch_add(&w->waiting[other], begins ? 1 : -1) < (begins ? 0 : 1))
        atomic_fetch_add(&w->violations, 1);
}

static const struct sw_executor_ops ops = {
    .run = on_run, .start = on_start, .finish = on_finish, .waits = on_waits, .done = on_done};

struct setup {
    struct test_turns turns;
    struct sw_device_handle devices[RANKS_MAX];
    uint32_t ranks;
    uint8_t adam_lane[RANKS_MAX];
    int has_adam_lanes;
    struct sw_executor *executor;
    struct watch *watch;
};

static void open_setup(struct setup *s, enum sw_overlap overlap, enum sw_tier tier, int fail_kind,
                       uint32_t ranks) {
    test_turns_build(&s->turns, overlap, tier, ranks);
    assert_true(s->turns.steady.task_count < TASKS_MAX);
    const struct sw_host_device_options options = {.threads = 1, .adam = no_adam};
    s->ranks = ranks;
    for (uint32_t r = 0; r < ranks; r++)
        assert_int_equal(sw_device_host_open(&s->devices[r], &options), 0);
    s->watch = calloc(1, sizeof(*s->watch));
    s->watch->fail_kind = fail_kind;
    for (int l = 0; l < SW_LANE_COUNT * RANKS_MAX; l++)
        s->watch->seed[l / RANKS_MAX][l % RANKS_MAX] = (unsigned)time(NULL) + 77u * (unsigned)l;
    const struct sw_turn *const turns[] = {&s->turns.first, &s->turns.second, &s->turns.steady,
                                           &s->turns.drain};
    for (uint32_t r = 0; r < ranks; r++) s->adam_lane[r] = r % 2;
    const struct sw_executor_ranks with = {.count = ranks,
                                           .devices = s->devices,
                                           .adam_lane =
                                               overlap == SW_OVERLAP_FORWARD ? NULL : s->adam_lane};
    s->has_adam_lanes = with.adam_lane != NULL;
    assert_int_equal(sw_executor_open(&s->executor, &with, &ops, s->watch, turns, 4), 0);
}

static void close_setup(struct setup *s) {
    sw_executor_close(s->executor);
    for (uint32_t r = 0; r < s->ranks; r++) s->devices[r].ops->close(s->devices[r].device);
    test_turns_free(&s->turns);
    free(s->watch);
}

static int push(struct setup *s, const struct sw_turn *turn, uint64_t number,
                struct sw_run **last) {
    int ret;
    while ((ret = sw_executor_push(s->executor, turn, number, *last)) == -EAGAIN) {
        ret = sw_executor_wait(s->executor);
        if (ret < 0) return ret;
    }
    *last = sw_executor_last_run(s->executor);
    return ret;
}

static int push_all(struct setup *s) {
    struct sw_run *last = NULL;
    int ret = 0;
    for (uint64_t n = 0; n < TURNS && ret == 0; n++)
        ret = push(s,
                   n == 0   ? &s->turns.first
                   : n == 1 ? &s->turns.second
                            : &s->turns.steady,
                   n, &last);
    if (ret == 0) ret = push(s, &s->turns.drain, TURNS, &last);
    return ret ? ret : sw_executor_idle(s->executor);
}

static const enum sw_overlap overlaps[] = {SW_OVERLAP_NONE, SW_OVERLAP_FORWARD,
                                           SW_OVERLAP_BACKWARD};

static uint32_t tasks_of(const struct sw_turn *turn, uint32_t ranks) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < turn->task_count; i++) count += is_joint(&turn->tasks[i]) ? 1 : ranks;
    return count;
}

static void tasks_start_after_what_they_wait_for(void **state) {
    (void)state;
    for (int o = 0; o < 6; o++)
        for (int tier = 0; tier < SW_TIER_COUNT; tier++) {
            const uint32_t ranks = o < 3 ? 1 : 2 + (uint32_t)tier % 2;
            struct setup s = {0};
            open_setup(&s, overlaps[o % 3], (enum sw_tier)tier, -1, ranks);
            assert_int_equal(push_all(&s), 0);
            const uint32_t want =
                tasks_of(&s.turns.first, ranks) + tasks_of(&s.turns.second, ranks) +
                (TURNS - 2) * tasks_of(&s.turns.steady, ranks) + tasks_of(&s.turns.drain, ranks);
            assert_int_equal(atomic_load(&s.watch->runs), want);
            assert_int_equal(atomic_load(&s.watch->violations), 0);
            for (int lane = 0; lane < SW_LANE_COUNT; lane++)
                assert_int_equal(atomic_load(&s.watch->waiting[lane]), 0);
            for (uint32_t r = 1; r < ranks && tier != SW_TIER_DEVICE; r++)
                assert_int_equal(
                    pthread_equal(s.watch->adam_threads[0], s.watch->adam_threads[r]) != 0,
                    !s.has_adam_lanes || s.adam_lane[r] == s.adam_lane[0]);
            /* Random pauses make somebody wait for a read in some of the turns. */
            if (tier == SW_TIER_NVME)
                assert_true(atomic_load(&s.watch->waits[SW_LANE_NVME_READ]) > 0);
            close_setup(&s);
        }
}

static int has_kind(const struct sw_turn *turn, int kind) {
    for (uint32_t i = 0; i < turn->task_count; i++)
        if (turn->tasks[i].kind == kind) return 1;
    return 0;
}

/* Whatever kind fails, on whatever lane, push or idle must return its error soon. */
static void a_failure_ends_every_wait(void **state) {
    (void)state;
    static const uint64_t fail_turns[] = {4, TURNS - 1}; /* while pushing, and while idling */
    int tried[SW_TASK_KIND_COUNT] = {0};
    for (int i = 0; i < 2 * SW_TIER_COUNT * 2 * SW_TASK_KIND_COUNT; i++) {
        const int kind = i / 2 % SW_TASK_KIND_COUNT;
        struct setup s = {0};
        open_setup(&s, SW_OVERLAP_FORWARD,
                   (enum sw_tier)(i / 2 / SW_TASK_KIND_COUNT % SW_TIER_COUNT), kind,
                   i < SW_TIER_COUNT * 2 * SW_TASK_KIND_COUNT ? 1 : 2);
        s.watch->fail_turn = fail_turns[i % 2];
        const int used = has_kind(&s.turns.steady, kind);
        tried[kind] |= used;
        if (used) assert_int_equal(push_all(&s), -EIO);
        close_setup(&s);
    }
    for (int kind = 0; kind < SW_TASK_KIND_COUNT; kind++)
        if (!tried[kind] && kind != SW_TASK_GATE)
            fail_msg("no turn has a task of kind %s", sw_task_name((enum sw_task_kind)kind));
}

/* What the first rank decides holds for all. */
static void a_step_is_cancelled_for_all_ranks_or_none(void **state) {
    (void)state;
    for (int first = 0; first < 2; first++) {
        struct sw_run run = {0};
        assert_int_equal(sw_run_decide(&run, first), first);
        for (int other = 0; other < 2; other++) assert_int_equal(sw_run_decide(&run, other), first);
        assert_int_equal(atomic_load(&run.cancelled), first);
    }
}

static void closing_while_turns_run_is_safe(void **state) {
    (void)state;
    for (int i = 0; i < 20; i++) {
        struct setup s = {0};
        struct sw_run *last = NULL;
        open_setup(&s, SW_OVERLAP_FORWARD, SW_TIER_NVME, -1, 1 + (uint32_t)i % 2);
        assert_int_equal(push(&s, &s.turns.first, 0, &last), 0);
        assert_int_equal(push(&s, &s.turns.second, 1, &last), 0);
        usleep((useconds_t)(i * 50));
        close_setup(&s);
    }
}

/* A run whose times are made up: the path from the task that ended last follows whichever
 * predecessor ended last. */
static void the_step_clock_is_the_longest_on_the_path(void **state) {
    (void)state;
    struct setup s = {0};
    open_setup(&s, SW_OVERLAP_NONE, SW_TIER_NVME, -1, 1);
    const struct sw_turn *turn = &s.turns.first;
    uint64_t start[TASKS_MAX], end[TASKS_MAX], at = 0;
    for (int writes = 0; writes < 2; writes++) /* one after another, the writes last and long */
        for (uint32_t i = 0; i < turn->task_count; i++) {
            if ((turn->tasks[i].kind == SW_TASK_WRITE) != writes) continue;
            start[i] = at;
            at += writes ? 1000 : 10;
            end[i] = at;
        }
    uint32_t positions[TASKS_MAX];
    const struct sw_run run = {
        .turn = turn, .rank_count = 1, .start_ns = start, .end_ns = end, .positions = positions};
    double share[SW_LANE_COUNT], sum = 0;
    assert_int_equal(sw_run_step_clock(&run, share), SW_LANE_NVME_WRITE);
    for (int l = 0; l < SW_LANE_COUNT; l++) sum += share[l];
    assert_true(sum > 0.999999 && sum < 1.000001);
    for (uint32_t i = 0; i < turn->task_count; i++) /* the same order, but compute takes longest */
        end[i] = start[i] + (turn->tasks[i].lane == SW_LANE_COMPUTE ? 9 : 1);
    assert_int_equal(sw_run_step_clock(&run, share), SW_LANE_COMPUTE);
    /* A pipeline bound by its reads: each Adam ends its wait with a read, not with the Adam before,
     * and each write with an Adam, though the writes together are long as well. */
    uint64_t reads = 0;
    for (uint32_t i = 0; i < turn->task_count; i++) {
        const int kind = turn->tasks[i].kind;
        if (kind == SW_TASK_READ) reads++;
        start[i] = reads * 1000 + (kind == SW_TASK_ADAM ? 1000 : kind == SW_TASK_WRITE ? 1010 : 0);
        end[i] = start[i] + (kind == SW_TASK_READ ? 1000 : kind == SW_TASK_WRITE ? 400 : 10);
        if (kind == SW_TASK_UPLOAD) end[i] = start[i] = reads * 1000 + 1010;
        if (reads == 0) end[i] = start[i] = i;
    }
    assert_int_equal(sw_run_step_clock(&run, share), SW_LANE_NVME_READ);
    assert_true(share[SW_LANE_NVME_READ] > 0.8);
    close_setup(&s);
}

/* The last rank's updates are short, those of the others before it on the same lane long: these are
 * what its path goes through; with a lane for each rank they are not. */
static void the_step_clock_follows_a_lane_over_its_ranks(void **state) {
    (void)state;
    enum { RANKS = 3, LAST = RANKS - 1 };
    static const uint8_t own[RANKS] = {0, 1, 2};
    struct setup s = {0};
    open_setup(&s, SW_OVERLAP_NONE, SW_TIER_HOST, -1, RANKS);
    const struct sw_turn *turn = &s.turns.first;
    static uint64_t start[TASKS_MAX * RANKS], end[TASKS_MAX * RANKS];
    uint32_t positions[TASKS_MAX];
    struct sw_run run = {.turn = turn,
                         .rank_count = RANKS,
                         .start_ns = start,
                         .end_ns = end,
                         .positions = positions};
    uint64_t at = 0;
    for (uint32_t i = 0; i < turn->task_count; i++) {
        const int adam = turn->tasks[i].kind == SW_TASK_ADAM;
        for (uint32_t r = 0; r < (is_joint(&turn->tasks[i]) ? 1 : RANKS); r++) {
            const uint64_t index = sw_run_at(&run, &turn->tasks[i], r);
            start[index] = at;
            end[index] = at + (!adam ? 10 + r : r < LAST ? 1000 : 1);
            if (adam) at = end[index];
        }
        if (!adam) at += 10 + LAST;
    }
    double share[SW_LANE_COUNT];
    assert_int_equal(sw_run_step_clock(&run, share), SW_LANE_ADAM);
    assert_true(share[SW_LANE_ADAM] > 0.9);
    run.adam_lane = own;
    assert_int_not_equal(sw_run_step_clock(&run, share), SW_LANE_ADAM);
    close_setup(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tasks_start_after_what_they_wait_for),
        cmocka_unit_test(a_failure_ends_every_wait),
        cmocka_unit_test(a_step_is_cancelled_for_all_ranks_or_none),
        cmocka_unit_test(closing_while_turns_run_is_safe),
        cmocka_unit_test(the_step_clock_is_the_longest_on_the_path),
        cmocka_unit_test(the_step_clock_follows_a_lane_over_its_ranks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
