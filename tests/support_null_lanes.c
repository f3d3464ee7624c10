/* tests/support_null_lanes.c - see the header. */
#include "tests/support_null_lanes.h"

#include <errno.h>
#include <pthread.h>

static void no_adam(const struct sw_device_adam_step *step,
                    const struct sw_device_adam_chunk *chunk, void *ctx) {
    (void)step;
    (void)chunk;
    (void)ctx;
}

static int on_enter(void *ctx, enum sw_lane lane, uint32_t rank, struct sw_stream *stream) {
    struct null_lanes *lanes = ctx;
    (void)stream;
    struct null_lane *own = &lanes->lanes[atomic_fetch_add(&lanes->lane_count, 1)];
    *own = (struct null_lane){.id = lane, .rank = rank};
    return -pthread_getcpuclockid(pthread_self(), &own->clock);
}

static int on_run(void *ctx, struct sw_run *run, const struct sw_task *task, uint32_t rank,
                  struct sw_stream *stream) {
    (void)ctx;
    (void)run;
    (void)task;
    (void)rank;
    (void)stream;
    return 0;
}

static int on_start(void *ctx, struct sw_run *run, const struct sw_task *task, uint32_t rank) {
    (void)ctx;
    (void)run;
    (void)task;
    (void)rank;
    return 1;
}

/* Nothing is ever in flight. */
static int on_finish(void *ctx, enum sw_lane lane, uint32_t max) {
    (void)ctx;
    (void)lane;
    (void)max;
    return -EIO;
}

static void on_done(void *ctx, struct sw_run *run, const struct sw_task *task, uint32_t rank) {
    struct null_lanes *lanes = ctx;
    (void)run;
    (void)task;
    (void)rank;
    atomic_fetch_add_explicit(&lanes->tasks, 1, memory_order_relaxed);
}

static const struct sw_executor_ops ops = {
    .enter = on_enter, .run = on_run, .start = on_start, .finish = on_finish, .done = on_done};

int null_lanes_open(struct null_lanes *out, uint32_t ranks, const uint8_t *adam_lane,
                    const struct sw_turn *const *turns, uint32_t turn_count) {
    const struct sw_host_device_options options = {.threads = 1, .adam = no_adam};
    int ret = 0;
    *out = (struct null_lanes){0};
    for (; out->ranks < ranks && ret == 0; out->ranks++)
        ret = sw_device_host_open(&out->devices[out->ranks], &options);
    if (ret < 0) out->ranks--;
    const struct sw_executor_ranks with = {
        .count = ranks, .devices = out->devices, .adam_lane = adam_lane};
    if (ret == 0) ret = sw_executor_open(&out->executor, &with, &ops, out, turns, turn_count);
    if (ret < 0) null_lanes_close(out);
    return ret;
}

int null_lanes_push(struct null_lanes *lanes, const struct sw_turn *turn) {
    const uint64_t step = lanes->steps + 1;
    int ret;
    while ((ret = sw_executor_push(lanes->executor, turn, step, lanes->last)) == -EAGAIN) {
        ret = sw_executor_wait(lanes->executor);
        if (ret < 0) return ret;
    }
    lanes->steps = step;
    lanes->last = sw_executor_last_run(lanes->executor);
    return ret;
}

int null_lanes_idle(struct null_lanes *lanes) {
    return sw_executor_idle(lanes->executor);
}

void null_lanes_close(struct null_lanes *lanes) {
    sw_executor_close(lanes->executor);
    for (uint32_t r = 0; r < lanes->ranks; r++)
        lanes->devices[r].ops->close(lanes->devices[r].device);
    lanes->ranks = 0;
}

uint64_t null_lanes_tasks(const struct sw_turn *turn, uint32_t ranks) {
    uint64_t count = 0;
    for (uint32_t i = 0; i < turn->task_count; i++)
        count += sw_task_is_joint((enum sw_task_kind)turn->tasks[i].kind) ? 1 : ranks;
    return count;
}
