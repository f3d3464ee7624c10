/* engine/executor.c - lane threads, the ring of runs, and the thread that tells
 * when tasks ran on a device. */
#include "engine/executor.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc_guard.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/wait.h"
#include "engine/task_count.h"

/* Turns that events must outlive: a task waits for this turn's or the one before's. */
enum { EVENT_TURNS = SW_RUNS_ACTIVE_MAX + 1 };

/* Who waits for a count: a lane by its id, of which each rank has one, and the timekeeper. */
enum { WAITER_TIMEKEEPER = SW_LANE_COUNT };

struct lane {
    struct sw_executor *ex;
    enum sw_lane id;
    uint32_t rank; /* the only one of a device lane, the first one of an adam lane; else 0 */
    pthread_t thread;
    int started;
    struct sw_park park;      /* where the thread waits for tasks of others */
    struct sw_stream *stream; /* device lanes */
    int owns_stream;
    struct sw_event **events; /* by task, modulo event_count: where it ends */
    struct sw_event **begins; /* where it begins, for devices that keep times; else NULL */
    uint64_t event_count;
    uint64_t end_ns; /* the timekeeper's: of the last task whose times it knows */
};

struct sw_executor {
    const struct sw_device_ops *device_ops;
    struct sw_executor_ops ops;
    void *ctx;
    uint32_t rank_count;
    struct sw_device *devices[SW_RANKS_MAX];
    int keeps_times; /* the devices do: work runs on them after its call */
    pthread_t timekeeper;
    int timekeeper_started;
    struct sw_park timekeeper_park;
    struct lane *lanes; /* of lane_of() */
    uint32_t lane_count;
    uint8_t adam_lane[SW_RANKS_MAX]; /* by rank */
    /* [lane][rank]: tasks that are over (host lanes) or submitted (device lanes), over all runs. */
    struct sw_task_count *counts;
    _Atomic int error; /* 0 or the first -errno */

    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t pushed, progress;
    struct sw_run runs[SW_RUNS_KEPT];
    uint64_t pushed_count, ended_count; /* runs */
    uint64_t events_seen, events_told;  /* progress */
    uint32_t entered_count;             /* lanes */
    int closing;
    uint64_t total[SW_LANE_COUNT]; /* tasks pushed */
    uint64_t ring_total[SW_RING_COUNT];
};

static int error_of(struct sw_executor *ex) {
    return atomic_load(&ex->error);
}

/* Device lanes come first, rank by rank; all adam lanes but the first are at the end. */
static struct lane *lane_of(struct sw_executor *ex, uint32_t id, uint32_t rank) {
    const uint32_t device_lanes = SW_DEVICE_LANES;
    if (sw_lane_on_device((enum sw_lane)id)) return &ex->lanes[rank * device_lanes + id];
    struct lane *others = &ex->lanes[ex->rank_count * device_lanes];
    if (id == SW_LANE_ADAM && ex->adam_lane[rank])
        return &others[SW_LANE_COUNT - device_lanes + ex->adam_lane[rank] - 1];
    return &others[id - device_lanes];
}

/* Whether the lane does this rank's tasks. */
static int has_rank(const struct lane *lane, uint32_t rank) {
    if (sw_lane_on_device(lane->id)) return rank == lane->rank;
    if (lane->id != SW_LANE_ADAM) return 1;
    return lane->ex->adam_lane[rank] == lane->ex->adam_lane[lane->rank];
}

static struct sw_task_count *count_of(struct sw_executor *ex, uint32_t id, uint32_t rank) {
    return &ex->counts[id * ex->rank_count + rank];
}

void sw_executor_abort(struct sw_executor *ex, int error) {
    assert(error < 0);
    int none = 0;
    sw_alloc_guard_leave();
    const int first = atomic_compare_exchange_strong(&ex->error, &none, error);
    if (first && ex->ops.abort) ex->ops.abort(ex->ctx, error);
    for (uint32_t i = 0; i < ex->lane_count; i++) sw_park_wake(&ex->lanes[i].park);
    sw_park_wake(&ex->timekeeper_park);
    pthread_mutex_lock(&ex->lock);
    ex->events_told++;
    pthread_cond_broadcast(&ex->pushed);
    pthread_cond_broadcast(&ex->progress);
    pthread_mutex_unlock(&ex->lock);
}

/* ---- counts ---- */

/* Waits until a lane has done (submitted) `wanted` tasks of a rank. 0, or the error that aborted.
 */
static int wait_count(struct lane *lane, uint32_t id, uint32_t rank, uint64_t wanted) {
    struct sw_executor *ex = lane->ex;
    struct sw_task_count *count = count_of(ex, id, rank);
    if (sw_task_count(count) >= wanted) return error_of(ex);
    if (ex->ops.waits) ex->ops.waits(ex->ctx, (enum sw_lane)id, 1);
    while (sw_task_count_wants(count, lane->id, wanted, &lane->park)) {
        if (error_of(ex)) {
            sw_task_count_left(count, lane->id);
            break;
        }
        sw_park_sleep(&lane->park, 0);
    }
    if (ex->ops.waits) ex->ops.waits(ex->ctx, (enum sw_lane)id, 0);
    return error_of(ex);
}

static uint64_t dep_count(const struct sw_run *run, const struct sw_dep *dep) {
    const uint64_t base = dep->turn == 0 ? run->base[dep->lane] : run->base_before[dep->lane];
    return base + (uint64_t)(dep->index + 1);
}

static int deps_ready(struct sw_executor *ex, const struct sw_run *run, const struct sw_task *task,
                      uint32_t rank) {
    for (uint32_t d = 0; d < task->dep_count; d++) {
        const struct sw_dep *dep = &task->deps[d];
        if (sw_task_count(count_of(ex, dep->lane, rank)) < dep_count(run, dep)) return 0;
    }
    return 1;
}

static struct sw_event *event_of(struct lane *lane, uint64_t count) {
    return lane->events[(count - 1) % lane->event_count];
}

static struct sw_event *begin_of(struct lane *lane, uint64_t count) {
    return lane->begins[(count - 1) % lane->event_count];
}

/* Host predecessors are over on return; device predecessors are over too for a host lane, and for
 * a device lane the stream waits for them. */
static int wait_deps(struct lane *lane, const struct sw_run *run, const struct sw_task *task,
                     uint32_t rank) {
    struct sw_executor *ex = lane->ex;
    int ret = error_of(ex);
    for (uint32_t d = 0; d < task->dep_count && ret == 0; d++) {
        const struct sw_dep *dep = &task->deps[d];
        const uint64_t count = dep_count(run, dep);
        if (count == 0) continue; /* nothing came before */
        ret = wait_count(lane, dep->lane, rank, count);
        if (ret < 0 || !sw_lane_on_device((enum sw_lane)dep->lane)) continue;
        struct sw_event *event = event_of(lane_of(ex, dep->lane, rank), count);
        ret = lane->stream ? ex->device_ops->stream_wait(lane->stream, event)
                           : ex->device_ops->event_wait(event);
        /* What an abort has ended is no result. */
        if (ret == 0) ret = error_of(ex);
    }
    return ret;
}

/* ---- runs ---- */

/* The lane's next run, or NULL when closing or aborted. `wait` 0: NULL also when none is there. */
static struct sw_run *next_run(struct sw_executor *ex, uint64_t number, int wait) {
    struct sw_run *run = NULL;
    pthread_mutex_lock(&ex->lock);
    while (wait && ex->pushed_count <= number && !ex->closing && !error_of(ex))
        pthread_cond_wait(&ex->pushed, &ex->lock);
    if (ex->pushed_count > number && !error_of(ex)) run = &ex->runs[number % SW_RUNS_KEPT];
    pthread_mutex_unlock(&ex->lock);
    return run;
}

static void leave_run(struct sw_executor *ex, struct sw_run *run) {
    pthread_mutex_lock(&ex->lock);
    if (--run->lanes_left == 0) {
        ex->ended_count++;
        ex->events_told++;
        pthread_cond_broadcast(&ex->progress);
    }
    pthread_mutex_unlock(&ex->lock);
}

/* A task is over and the run knows when; who waits for it is told. */
static void complete(struct lane *lane, struct sw_run *run, uint32_t index, uint32_t rank,
                     uint64_t end) {
    struct sw_executor *ex = lane->ex;
    const struct sw_task *task = &run->turn->tasks[index];
    const uint64_t at = sw_run_at(run, task, rank);
    const int joint = sw_task_is_joint((enum sw_task_kind)task->kind);
    run->end_ns[at] = end;
    ex->ops.done(ex->ctx, run, task, rank);
    for (uint32_t r = rank; r < (joint ? ex->rank_count : rank + 1); r++)
        sw_task_count_up(count_of(ex, lane->id, r));
}

/* ---- lanes that run one task at a time ---- */

static int run_task(struct lane *lane, struct sw_run *run, uint32_t index, uint32_t rank) {
    struct sw_executor *ex = lane->ex;
    const struct sw_task *task = &run->turn->tasks[index];
    const int joint = sw_task_is_joint((enum sw_task_kind)task->kind);
    const uint64_t count = sw_task_count(count_of(ex, lane->id, rank)) + 1;
    int ret = 0;
    for (uint32_t r = rank; r < (joint ? ex->rank_count : rank + 1) && ret == 0; r++)
        ret = wait_deps(lane, run, task, r);
    if (ret < 0) return ret;
    run->start_ns[sw_run_at(run, task, rank)] = sw_now_ns();
    /* Behind the stream's waits, which are no work. */
    if (lane->begins) ret = ex->device_ops->event_record(begin_of(lane, count), lane->stream);
    if (ret == 0) ret = ex->ops.run(ex->ctx, run, task, rank, lane->stream);
    if (ret == 0 && lane->stream)
        ret = ex->device_ops->event_record(event_of(lane, count), lane->stream);
    if (ret < 0) return ret;
    if (lane->begins) /* it is submitted; the timekeeper does the rest */
        sw_task_count_up(count_of(ex, lane->id, rank));
    else
        complete(lane, run, index, rank, sw_now_ns());
    return 0;
}

/* A task of one lane, for the ranks that this lane serves. */
static int run_for_ranks(struct lane *lane, struct sw_run *run, uint32_t index) {
    const int joint = sw_task_is_joint((enum sw_task_kind)run->turn->tasks[index].kind);
    int ret = 0;
    for (uint32_t r = 0; r < (joint ? 1 : lane->ex->rank_count) && ret == 0; r++)
        if (has_rank(lane, r)) ret = run_task(lane, run, index, r);
    return ret;
}

static void serve(struct lane *lane) {
    struct sw_executor *ex = lane->ex;
    for (uint64_t number = 0;; number++) {
        struct sw_run *run = next_run(ex, number, 1);
        if (!run) return;
        for (uint32_t i = 0; i < run->turn->lane_count[lane->id]; i++) {
            const int ret = run_for_ranks(lane, run, run->turn->lane_tasks[lane->id][i]);
            if (ret == 0) continue;
            sw_executor_abort(ex, ret);
            return;
        }
        leave_run(ex, run);
    }
}

/* ---- lanes with several tasks in flight ---- */

struct flight {
    struct sw_run *run;
    uint32_t task, rank;
    int at_once; /* needed no I/O */
    int last;    /* of this lane in its run */
    uint64_t start_ns;
};

struct flights {
    struct flight ring[SW_LANE_IN_FLIGHT_MAX];
    uint32_t first, count;
    uint64_t end_ns; /* of the last completion: busy time must not count twice */
};

static void land(struct lane *lane, struct flights *f) {
    struct flight *flight = &f->ring[f->first];
    const uint64_t now = sw_now_ns();
    const uint64_t start = flight->start_ns > f->end_ns ? flight->start_ns : f->end_ns;
    const struct sw_task *task = &flight->run->turn->tasks[flight->task];
    flight->run->start_ns[sw_run_at(flight->run, task, flight->rank)] = start;
    complete(lane, flight->run, flight->task, flight->rank, now);
    f->end_ns = now;
    if (flight->last) leave_run(lane->ex, flight->run);
    f->first = (f->first + 1) % SW_LANE_IN_FLIGHT_MAX;
    f->count--;
}

/* Completes what needed no I/O and stands in front; then waits for one that did. */
static int land_some(struct lane *lane, struct flights *f) {
    if (f->ring[f->first].at_once) {
        land(lane, f);
        return 0;
    }
    int landed = lane->ex->ops.finish(lane->ex->ctx, lane->id, f->count);
    if (landed < 0) return landed;
    while (f->count > 0 && (landed > 0 || f->ring[f->first].at_once)) {
        if (!f->ring[f->first].at_once) landed--;
        land(lane, f);
    }
    return 0;
}

/* Tasks of an NVMe lane in a turn, each for every rank. */
static uint32_t flights_of(const struct lane *lane, const struct sw_run *run) {
    return run->turn->lane_count[lane->id] * run->rank_count;
}

static uint32_t task_at(const struct lane *lane, const struct sw_run *run, uint32_t position) {
    return run->turn->lane_tasks[lane->id][position / run->rank_count];
}

static int take_off(struct lane *lane, struct flights *f, struct sw_run *run, uint32_t position) {
    const uint32_t index = task_at(lane, run, position), rank = position % run->rank_count;
    int ret = wait_deps(lane, run, &run->turn->tasks[index], rank);
    if (ret < 0) return ret;
    struct flight *flight = &f->ring[(f->first + f->count) % SW_LANE_IN_FLIGHT_MAX];
    *flight = (struct flight){.run = run,
                              .task = index,
                              .rank = rank,
                              .last = position + 1 == flights_of(lane, run),
                              .start_ns = sw_now_ns()};
    ret = lane->ex->ops.start(lane->ex->ctx, run, &run->turn->tasks[index], rank);
    if (ret < 0) return ret;
    flight->at_once = ret == 1;
    f->count++;
    return 0;
}

static int is_ready(struct lane *lane, const struct sw_run *run, uint32_t position) {
    return deps_ready(lane->ex, run, &run->turn->tasks[task_at(lane, run, position)],
                      position % run->rank_count);
}

static void serve_flights(struct lane *lane) {
    struct sw_executor *ex = lane->ex;
    struct flights flights = {0};
    struct sw_run *run = NULL;
    uint64_t number = 0;
    uint32_t position = 0;
    int ret = 0;
    while (ret == 0) {
        if (!run) {
            run = next_run(ex, number, flights.count == 0);
            if (!run && flights.count == 0) return;
            if (run && flights_of(lane, run) == 0) {
                leave_run(ex, run);
                run = NULL;
                number++;
                continue;
            }
            position = 0;
        }
        /* Ahead while the next task could start now; else the oldest in flight is awaited. */
        if (run && flights.count < SW_LANE_IN_FLIGHT_MAX &&
            (flights.count == 0 || is_ready(lane, run, position))) {
            ret = take_off(lane, &flights, run, position);
            if (++position == flights_of(lane, run)) {
                run = NULL;
                number++;
            }
        } else {
            ret = land_some(lane, &flights);
        }
    }
    sw_executor_abort(ex, ret);
}

/* ---- when tasks ran on a device ----
 *
 * The timekeeper takes the device lanes' tasks of each run in the turn's order, in which whatever a
 * task waits for comes before it. It waits until one is submitted and over, sleeping, reads its two
 * events, and only then is the task done and, after the last one, the run. A lane uses an event
 * again EVENT_TURNS turns later at the earliest, in a run that is pushed once all but
 * SW_RUNS_ACTIVE_MAX - 1 runs before it have ended: by then its times have been read. */

static int set_clocks(struct sw_executor *ex) {
    int ret = 0;
    for (uint32_t r = 0; r < ex->rank_count && ret >= 0; r++)
        ret = ex->device_ops->clock_set(ex->devices[r]);
    return ret < 0 ? ret : 0;
}

/* Sleeps until something may have changed, so short that the clocks can be set in between. `lock`,
 * which guards the condition, is not held meanwhile. */
static int doze(struct sw_executor *ex, pthread_cond_t *changed, pthread_mutex_t *lock) {
    struct sw_wait wait = {0};
    sw_wait_for(&wait, changed, lock, 2e-9 * SW_WAIT_STEP_NS);
    pthread_mutex_unlock(lock);
    const int ret = set_clocks(ex);
    pthread_mutex_lock(lock);
    return ret;
}

static struct sw_run *await_run(struct sw_executor *ex, uint64_t number) {
    int ret = 0;
    pthread_mutex_lock(&ex->lock);
    while (ex->pushed_count <= number && !ex->closing && !error_of(ex) && ret == 0)
        ret = doze(ex, &ex->pushed, &ex->lock);
    struct sw_run *run = ex->pushed_count > number ? &ex->runs[number % SW_RUNS_KEPT] : NULL;
    pthread_mutex_unlock(&ex->lock);
    if (ret < 0) sw_executor_abort(ex, ret);
    return error_of(ex) ? NULL : run;
}

/* Sleeps as doze() does. */
static int await_submitted(struct sw_executor *ex, struct sw_task_count *count, uint64_t wanted) {
    int ret = set_clocks(ex);
    while (ret == 0 &&
           sw_task_count_wants(count, WAITER_TIMEKEEPER, wanted, &ex->timekeeper_park)) {
        if (!error_of(ex)) sw_park_sleep(&ex->timekeeper_park, SW_WAIT_STEP_NS);
        sw_task_count_left(count, WAITER_TIMEKEEPER);
        ret = error_of(ex) ? error_of(ex) : set_clocks(ex);
    }
    return ret;
}

/* The times of a lane's task number `count`, counted from 1. */
static int read_times(struct lane *lane, uint64_t count, uint64_t *start_ns, uint64_t *end_ns) {
    struct sw_executor *ex = lane->ex;
    int ret = await_submitted(ex, count_of(ex, lane->id, lane->rank), count);
    if (ret == 0) ret = error_of(ex);
    if (ret == 0) ret = ex->device_ops->event_wait(event_of(lane, count));
    if (ret == 0) ret = error_of(ex); /* what an abort has ended has no time */
    if (ret == 0) ret = ex->device_ops->event_ns(begin_of(lane, count), start_ns);
    if (ret == 0) ret = ex->device_ops->event_ns(event_of(lane, count), end_ns);
    assert(ret != -EAGAIN); /* both are over */
    return ret;
}

/* Several bases of a clock, none of them exact, may make a lane's times cross by as much as that.
 */
static void settle_times(struct lane *lane, uint64_t *start_ns, uint64_t *end_ns) {
    if (*start_ns < lane->end_ns) *start_ns = lane->end_ns;
    if (*end_ns < *start_ns) *end_ns = *start_ns;
    lane->end_ns = *end_ns;
}

/* A task of all ranks. What ranks do together is busy from when the last one has come. */
static int time_task(struct sw_executor *ex, struct sw_run *run, uint32_t index, uint64_t count) {
    const struct sw_task *task = &run->turn->tasks[index];
    const int together = task->kind == SW_TASK_GATHER || task->kind == SW_TASK_SCATTER;
    uint64_t last_start_ns = 0;
    int ret = 0;
    for (uint32_t r = 0; r < ex->rank_count && ret == 0; r++) {
        const uint64_t at = sw_run_at(run, task, r);
        ret = read_times(lane_of(ex, task->lane, r), count, &run->start_ns[at], &run->end_ns[at]);
        if (run->start_ns[at] > last_start_ns) last_start_ns = run->start_ns[at];
    }
    for (uint32_t r = 0; r < ex->rank_count && ret == 0; r++) {
        const uint64_t at = sw_run_at(run, task, r);
        if (together) run->start_ns[at] = last_start_ns;
        settle_times(lane_of(ex, task->lane, r), &run->start_ns[at], &run->end_ns[at]);
        ex->ops.done(ex->ctx, run, task, r);
    }
    return ret;
}

static int time_run(struct sw_executor *ex, struct sw_run *run) {
    const struct sw_turn *turn = run->turn;
    uint64_t count[SW_LANE_COUNT];
    int ret = 0;
    memcpy(count, run->base, sizeof(count));
    for (uint32_t i = 0; i < turn->task_count && ret == 0; i++) {
        const enum sw_lane lane = (enum sw_lane)turn->tasks[i].lane;
        if (sw_lane_on_device(lane)) ret = time_task(ex, run, i, ++count[lane]);
    }
    return ret;
}

static void *timekeeper_main(void *arg) {
    struct sw_executor *ex = arg;
    pthread_setname_np(pthread_self(), "timekeeper");
    for (uint64_t number = 0;; number++) {
        struct sw_run *run = await_run(ex, number);
        if (!run) return NULL;
        const int ret = time_run(ex, run);
        if (ret < 0) {
            sw_executor_abort(ex, ret);
            return NULL;
        }
        leave_run(ex, run);
    }
}

static int start_timekeeper(struct sw_executor *ex) {
    if (!ex->keeps_times) return 0;
    int ret = set_clocks(ex); /* before the first event */
    if (ret < 0) return ret;
    ret = pthread_create(&ex->timekeeper, NULL, timekeeper_main, ex);
    if (ret) sw_error("cannot start the timekeeper's thread: %s", strerror(ret));
    ex->timekeeper_started = ret == 0;
    return -ret;
}

/* ---- life ---- */

static void *lane_main(void *arg) {
    struct lane *lane = arg;
    struct sw_executor *ex = lane->ex;
    pthread_setname_np(pthread_self(), sw_lane_name(lane->id)); /* 15 characters are enough */
    const int ret = ex->ops.enter ? ex->ops.enter(ex->ctx, lane->id, lane->rank, lane->stream) : 0;
    if (ret < 0) sw_executor_abort(ex, ret);
    pthread_mutex_lock(&ex->lock);
    ex->entered_count++;
    pthread_cond_broadcast(&ex->progress);
    pthread_mutex_unlock(&ex->lock);
    if (lane->id == SW_LANE_NVME_READ || lane->id == SW_LANE_NVME_WRITE)
        serve_flights(lane);
    else
        serve(lane);
    return NULL;
}

/* What lanes make for themselves must be there before the first step. */
static int wait_entered(struct sw_executor *ex) {
    pthread_mutex_lock(&ex->lock);
    while (ex->entered_count < ex->lane_count) pthread_cond_wait(&ex->progress, &ex->lock);
    pthread_mutex_unlock(&ex->lock);
    return error_of(ex);
}

static int open_stream(struct lane *lane, struct sw_device *device, uint64_t events) {
    const struct sw_device_ops *ops = lane->ex->device_ops;
    const int timed = lane->ex->keeps_times;
    int ret = 0;
    lane->owns_stream = !lane->stream;
    if (lane->owns_stream) ret = ops->stream_create(device, &lane->stream);
    lane->events = calloc(events + 1, sizeof(*lane->events));
    if (timed) lane->begins = calloc(events + 1, sizeof(*lane->begins));
    if (!lane->events || (timed && !lane->begins)) ret = -ENOMEM;
    for (; ret == 0 && lane->event_count < events; lane->event_count++) {
        struct sw_event **event = &lane->events[lane->event_count];
        ret = timed ? ops->timed_event_create(device, event) : ops->event_create(device, event);
        if (ret == 0 && timed)
            ret = ops->timed_event_create(device, &lane->begins[lane->event_count]);
    }
    return ret;
}

static void close_stream(struct lane *lane) {
    const struct sw_device_ops *ops = lane->ex->device_ops;
    for (uint64_t i = 0; lane->events && lane->events[i]; i++) ops->event_destroy(lane->events[i]);
    for (uint64_t i = 0; lane->begins && lane->begins[i]; i++) ops->event_destroy(lane->begins[i]);
    free(lane->events);
    free(lane->begins);
    if (lane->stream && lane->owns_stream) ops->stream_destroy(lane->stream);
}

/* tasks: of this lane in a turn, at most. */
static int open_lane(struct lane *lane, uint32_t tasks) {
    if (sw_lane_on_device(lane->id)) {
        struct sw_device *device = lane->ex->devices[lane->rank];
        const int ret = open_stream(lane, device, (uint64_t)tasks * EVENT_TURNS);
        if (ret < 0) return ret;
    }
    const int ret = pthread_create(&lane->thread, NULL, lane_main, lane);
    if (ret) {
        sw_error("cannot start the %s lane's thread: %s", sw_lane_name(lane->id), strerror(ret));
        return -ret;
    }
    lane->started = 1;
    return 0;
}

static int open_runs(struct sw_executor *ex, uint32_t tasks_max) {
    const uint64_t each = (uint64_t)tasks_max * ex->rank_count;
    for (int i = 0; i < SW_RUNS_KEPT; i++) {
        struct sw_run *run = &ex->runs[i];
        run->rank_count = ex->rank_count;
        run->adam_lane = ex->adam_lane;
        run->start_ns = calloc(each, sizeof(uint64_t));
        run->end_ns = calloc(each, sizeof(uint64_t));
        run->bytes = calloc(each, sizeof(uint64_t));
        run->positions = calloc(tasks_max, sizeof(uint32_t));
        if (!run->start_ns || !run->end_ns || !run->bytes || !run->positions) return -ENOMEM;
    }
    return 0;
}

/* Its clock is that of sw_wait_for(). */
static void init_condition(pthread_cond_t *condition) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

static int open_tables(struct sw_executor *ex) {
    uint32_t adam_lanes = 1;
    for (uint32_t r = 0; r < ex->rank_count; r++)
        if (ex->adam_lane[r] == adam_lanes) adam_lanes++;
    ex->lane_count = SW_LANE_COUNT + adam_lanes - 1 + (ex->rank_count - 1) * SW_DEVICE_LANES;
    ex->lanes = calloc(ex->lane_count, sizeof(*ex->lanes));
    const uint64_t counts_bytes = (uint64_t)SW_LANE_COUNT * ex->rank_count * sizeof(*ex->counts);
    ex->counts = aligned_alloc(alignof(struct sw_task_count), counts_bytes);
    if (!ex->lanes || !ex->counts) return -ENOMEM;
    memset(ex->counts, 0, counts_bytes);
    for (uint32_t l = 0; l < SW_LANE_COUNT; l++)
        for (uint32_t r = 0; r < ex->rank_count; r++) {
            struct lane *lane = lane_of(ex, l, r);
            if (lane->ex) continue; /* it is an earlier rank's, too */
            *lane = (struct lane){.ex = ex, .id = (enum sw_lane)l, .rank = r};
        }
    return 0;
}

static void take_streams(struct sw_executor *ex, struct sw_stream *const *streams) {
    for (uint32_t r = 0; r < ex->rank_count; r++)
        for (uint32_t l = 0; l < SW_DEVICE_LANES; l++)
            lane_of(ex, l, r)->stream = streams[r * SW_DEVICE_LANES + l];
}

int sw_executor_open(struct sw_executor **out, const struct sw_executor_ranks *ranks,
                     const struct sw_executor_ops *ops, void *ctx,
                     const struct sw_turn *const *turns, uint32_t turn_count) {
    assert(ranks->count >= 1 && ranks->count <= SW_RANKS_MAX);
    struct sw_executor *ex = calloc(1, sizeof(*ex));
    if (!ex) return -ENOMEM;
    uint32_t tasks_max = 1, lane_max[SW_LANE_COUNT] = {0};
    for (uint32_t i = 0; i < turn_count; i++) {
        if (turns[i]->task_count > tasks_max) tasks_max = turns[i]->task_count;
        for (int l = 0; l < SW_LANE_COUNT; l++)
            if (turns[i]->lane_count[l] > lane_max[l]) lane_max[l] = turns[i]->lane_count[l];
    }
    ex->device_ops = ranks->devices[0].ops;
    ex->keeps_times = ex->device_ops->event_ns != NULL;
    for (uint32_t r = 0; r < ranks->count; r++) ex->devices[r] = ranks->devices[r].device;
    ex->ops = *ops;
    ex->ctx = ctx;
    ex->rank_count = ranks->count;
    if (ranks->adam_lane) memcpy(ex->adam_lane, ranks->adam_lane, ranks->count);
    pthread_mutex_init(&ex->lock, NULL);
    init_condition(&ex->pushed);
    init_condition(&ex->progress);
    int ret = open_tables(ex);
    if (ret == 0 && ranks->streams) take_streams(ex, ranks->streams);
    if (ret == 0) ret = open_runs(ex, tasks_max);
    for (uint32_t i = 0; i < ex->lane_count && ret == 0; i++)
        ret = open_lane(&ex->lanes[i], lane_max[ex->lanes[i].id]);
    if (ret == 0) ret = wait_entered(ex);
    if (ret == 0) ret = start_timekeeper(ex);
    if (ret < 0) {
        sw_executor_close(ex);
        return ret;
    }
    *out = ex;
    return 0;
}

void sw_executor_close(struct sw_executor *ex) {
    if (!ex) return;
    pthread_mutex_lock(&ex->lock);
    ex->closing = 1;
    const int busy = ex->pushed_count > ex->ended_count;
    pthread_cond_broadcast(&ex->pushed);
    pthread_mutex_unlock(&ex->lock);
    if (busy) sw_executor_abort(ex, -ECANCELED);
    for (uint32_t l = 0; ex->lanes && l < ex->lane_count; l++)
        if (ex->lanes[l].started) pthread_join(ex->lanes[l].thread, NULL);
    if (ex->timekeeper_started) pthread_join(ex->timekeeper, NULL);
    for (uint32_t l = 0; ex->lanes && l < ex->lane_count; l++) close_stream(&ex->lanes[l]);
    free(ex->lanes);
    free(ex->counts);
    for (int i = 0; i < SW_RUNS_KEPT; i++) {
        free(ex->runs[i].start_ns);
        free(ex->runs[i].end_ns);
        free(ex->runs[i].bytes);
        free(ex->runs[i].positions);
    }
    pthread_mutex_destroy(&ex->lock);
    pthread_cond_destroy(&ex->pushed);
    pthread_cond_destroy(&ex->progress);
    free(ex);
}

int sw_executor_push(struct sw_executor *ex, const struct sw_turn *turn, uint64_t step,
                     struct sw_run *before_run) {
    int ret = error_of(ex);
    if (ret < 0) return ret;
    pthread_mutex_lock(&ex->lock);
    if (ex->pushed_count - ex->ended_count >= SW_RUNS_ACTIVE_MAX) {
        pthread_mutex_unlock(&ex->lock);
        return -EAGAIN;
    }
    struct sw_run *run = &ex->runs[ex->pushed_count % SW_RUNS_KEPT];
    const struct sw_run *before =
        ex->pushed_count ? &ex->runs[(ex->pushed_count - 1) % SW_RUNS_KEPT] : NULL;
    run->turn = turn;
    run->step = step;
    run->before = before_run;
    atomic_store(&run->cancelled, 0);
    atomic_store(&run->decided, 0);
    run->lanes_left = ex->lane_count + (uint32_t)ex->keeps_times; /* the timekeeper leaves, too */
    memcpy(run->ring_base, ex->ring_total, sizeof(run->ring_base));
    for (int l = 0; l < SW_LANE_COUNT; l++) {
        run->base[l] = ex->total[l];
        run->base_before[l] = before ? before->base[l] : 0;
        ex->total[l] += turn->lane_count[l];
    }
    for (int r = 0; r < SW_RING_COUNT; r++) ex->ring_total[r] += turn->ring_uses[r];
    ex->pushed_count++;
    sw_alloc_guard_enter();
    pthread_cond_broadcast(&ex->pushed);
    pthread_mutex_unlock(&ex->lock);
    return 0;
}

struct sw_run *sw_executor_last_run(struct sw_executor *ex) {
    pthread_mutex_lock(&ex->lock);
    struct sw_run *run = ex->pushed_count ? &ex->runs[(ex->pushed_count - 1) % SW_RUNS_KEPT] : NULL;
    pthread_mutex_unlock(&ex->lock);
    return run;
}

int sw_executor_active(struct sw_executor *ex) {
    pthread_mutex_lock(&ex->lock);
    const int active = (int)(ex->pushed_count - ex->ended_count);
    pthread_mutex_unlock(&ex->lock);
    return active;
}

int sw_executor_wait(struct sw_executor *ex) {
    pthread_mutex_lock(&ex->lock);
    while (ex->events_seen == ex->events_told) pthread_cond_wait(&ex->progress, &ex->lock);
    ex->events_seen = ex->events_told;
    pthread_mutex_unlock(&ex->lock);
    return error_of(ex);
}

void sw_executor_nudge(struct sw_executor *ex) {
    pthread_mutex_lock(&ex->lock);
    ex->events_told++;
    pthread_cond_broadcast(&ex->progress);
    pthread_mutex_unlock(&ex->lock);
}

int sw_executor_idle(struct sw_executor *ex) {
    pthread_mutex_lock(&ex->lock);
    while (ex->ended_count < ex->pushed_count && !error_of(ex))
        pthread_cond_wait(&ex->progress, &ex->lock);
    pthread_mutex_unlock(&ex->lock);
    sw_alloc_guard_leave();
    return error_of(ex);
}

int sw_run_decide(struct sw_run *run, int cancel) {
    enum { OPEN, GO, CANCEL };
    int decided = OPEN;
    if (atomic_compare_exchange_strong(&run->decided, &decided, cancel ? CANCEL : GO))
        decided = cancel ? CANCEL : GO;
    if (decided == CANCEL) atomic_store(&run->cancelled, 1);
    return decided == CANCEL;
}
