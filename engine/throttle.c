/* engine/throttle.c - see the header. */
#include "engine/throttle.h"

#include <assert.h>
#include <errno.h>
#include <time.h>

#include "base/clock.h"

/* A task that begins so soon after the lane's last one was due follows it without a gap. */
enum { WITHOUT_GAP_NS = 500000 };

int sw_sim_any(const struct sw_sim_rates *r) {
    return r->copy_bytes[0] || r->copy_bytes[1] || r->nvme_bytes[0] || r->nvme_bytes[1] ||
           r->adam_bytes || r->comm_bytes || r->flops;
}

static void sleep_until(uint64_t ns) {
    const struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR) continue;
}

/* When work that began then is over. */
static uint64_t due(struct sw_throttle_lane *lane, uint64_t start_ns, double work, uint64_t rate) {
    const uint64_t begin =
        start_ns < lane->due_ns + WITHOUT_GAP_NS && lane->due_ns ? lane->due_ns : start_ns;
    return begin + (uint64_t)(work / (double)rate * 1e9);
}

static int is_compute(const struct sw_task *task) {
    return task->lane == SW_LANE_COMPUTE && task->kind != SW_TASK_DEVICE_ADAM;
}

uint64_t sw_sim_rate(const struct sw_sim_rates *r, const struct sw_task *task) {
    if (is_compute(task)) return r->flops;
    switch (task->lane) {
    case SW_LANE_H2D:
        return r->copy_bytes[0];
    case SW_LANE_D2H:
        return r->copy_bytes[1];
    case SW_LANE_COMM: /* rounding moves nothing between ranks */
        return task->kind == SW_TASK_REDUCE ? 0 : r->comm_bytes;
    case SW_LANE_ADAM:
        return r->adam_bytes;
    case SW_LANE_NVME_READ:
        return r->nvme_bytes[0];
    case SW_LANE_NVME_WRITE:
        return r->nvme_bytes[1];
    default:
        return 0;
    }
}

static uint64_t moved(const struct sw_run *run, const struct sw_task *task, uint32_t rank) {
    return run->bytes[sw_run_at(run, task, rank)];
}

/* Each rank has its own device and links; Adam and the drives are the process's. */
static struct sw_throttle_lane *lane_of(struct sw_throttle *t, enum sw_lane lane, uint32_t rank) {
    if (lane == SW_LANE_ADAM && t->adam_lane) return &t->lanes[lane][t->adam_lane[rank]];
    return &t->lanes[lane][sw_lane_on_device(lane) ? rank : 0];
}

static uint64_t rate_of(const struct sw_throttle *t, const struct sw_task *task) {
    const uint64_t rate = sw_sim_rate(&t->rates, task);
    if (task->lane != SW_LANE_ADAM || !t->adam_lane || rate < t->adam_lanes) return rate;
    return rate / t->adam_lanes;
}

static int throttled_run(void *ctx, struct sw_run *run, const struct sw_task *task, uint32_t rank,
                         struct sw_stream *stream) {
    struct sw_throttle *t = ctx;
    const uint64_t rate = rate_of(t, task);
    if (!rate) return t->real.run(t->ctx, run, task, rank, stream);
    /* What the stream waits for, or has not done, delays the task and is none of its time. */
    const int synced = stream && t->device ? t->device->stream_sync(stream) : 0;
    if (synced < 0) return synced;
    struct sw_throttle_lane *lane = lane_of(t, (enum sw_lane)task->lane, rank);
    const uint64_t start_ns = sw_now_ns();
    if (is_compute(task)) {
        run->bytes[sw_run_at(run, task, rank)] = 0; /* not what an earlier run left there */
    } else {
        const int ret = t->real.run(t->ctx, run, task, rank, stream);
        if (ret < 0) return ret;
    }
    /* Ranks that wait for each other send nothing yet. */
    const uint64_t began_ns =
        task->lane == SW_LANE_COMM ? run->start_ns[sw_run_at(run, task, rank)] : start_ns;
    const int by_work = is_compute(task) || task->kind == SW_TASK_ADAM;
    const double work = by_work ? t->work(t->ctx, run, task) : (double)moved(run, task, rank);
    lane->due_ns = due(lane, began_ns, work, rate);
    sleep_until(lane->due_ns);
    return 0;
}

static int throttled_start(void *ctx, struct sw_run *run, const struct sw_task *task,
                           uint32_t rank) {
    struct sw_throttle *t = ctx;
    struct sw_throttle_lane *lane = lane_of(t, (enum sw_lane)task->lane, rank);
    const uint64_t start_ns = sw_now_ns();
    const int ret = t->real.start(t->ctx, run, task, rank);
    if (ret != 0 || !sw_sim_rate(&t->rates, task)) return ret;
    assert(lane->count < SW_LANE_IN_FLIGHT_MAX);
    const uint32_t at = (lane->first + lane->count++) % SW_LANE_IN_FLIGHT_MAX;
    lane->bytes[at] = (double)moved(run, task, rank);
    lane->start_ns[at] = start_ns;
    return 0;
}

static int throttled_finish(void *ctx, enum sw_lane id, uint32_t max) {
    struct sw_throttle *t = ctx;
    struct sw_throttle_lane *lane = lane_of(t, id, 0);
    const uint64_t rate = t->rates.nvme_bytes[id == SW_LANE_NVME_WRITE];
    if (!rate) return t->real.finish(t->ctx, id, max);
    if (!lane->over) {
        const int ret = t->real.finish(t->ctx, id, max);
        if (ret < 0) return ret;
        lane->over = (uint32_t)ret;
    }
    /* One at a time, each when it is due: who waits for it goes on then. */
    assert(lane->over > 0 && lane->over <= lane->count);
    lane->due_ns = due(lane, lane->start_ns[lane->first], lane->bytes[lane->first], rate);
    lane->first = (lane->first + 1) % SW_LANE_IN_FLIGHT_MAX;
    lane->count--;
    lane->over--;
    sleep_until(lane->due_ns);
    return 1;
}

static void throttled_waits(void *ctx, enum sw_lane other, int begins) {
    const struct sw_throttle *t = ctx;
    if (t->real.waits) t->real.waits(t->ctx, other, begins);
}

static void throttled_done(void *ctx, struct sw_run *run, const struct sw_task *task,
                           uint32_t rank) {
    const struct sw_throttle *t = ctx;
    t->real.done(t->ctx, run, task, rank);
}

static int throttled_enter(void *ctx, enum sw_lane lane, uint32_t rank, struct sw_stream *stream) {
    const struct sw_throttle *t = ctx;
    return t->real.enter ? t->real.enter(t->ctx, lane, rank, stream) : 0;
}

static void throttled_abort(void *ctx, int error) {
    const struct sw_throttle *t = ctx;
    if (t->real.abort) t->real.abort(t->ctx, error);
}

const struct sw_executor_ops sw_throttle_ops = {.enter = throttled_enter,
                                                .run = throttled_run,
                                                .start = throttled_start,
                                                .finish = throttled_finish,
                                                .waits = throttled_waits,
                                                .done = throttled_done,
                                                .abort = throttled_abort};
