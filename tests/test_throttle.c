/* tests/test_throttle.c - lanes held to rates: never faster, nothing lost, computation left out. */
#include "engine/throttle.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "base/clock.h"

enum { TASKS = 8 };

/* What the real ops were asked, and what they answer. */
static struct { int runs, starts, finishes, waits, done, finish_count, start_answer; } seen;

static int on_run(void *ctx, struct sw_run *run, const struct sw_task *task, uint32_t rank,
                  struct sw_stream *stream) {
    (void)ctx;
    (void)rank;
    (void)run;
    (void)task;
    (void)stream;
    seen.runs++;
    return 0;
}
static int on_start(void *ctx, struct sw_run *run, const struct sw_task *task, uint32_t rank) {
    (void)ctx;
    (void)rank;
    (void)run;
    (void)task;
    seen.starts++;
    return seen.start_answer;
}
static int on_finish(void *ctx, enum sw_lane lane, uint32_t max) {
    (void)ctx;
    (void)lane;
    seen.finishes++;
    assert_true(seen.finish_count <= (int)max);
    return seen.finish_count;
}
static void on_waits(void *ctx, enum sw_lane other, int begins) {
    (void)ctx;
    seen.waits += other == SW_LANE_NVME_READ ? (begins ? 1 : 100) : 10000;
}
static void on_done(void *ctx, struct sw_run *run, const struct sw_task *task, uint32_t rank) {
    (void)ctx;
    (void)rank;
    (void)run;
    (void)task;
    seen.done++;
}
static double on_work(void *ctx, struct sw_run *run, const struct sw_task *task) {
    (void)ctx;
    (void)run;
    return task->kind == SW_TASK_ADAM ? 2e6 : 3e6;
}

static const struct sw_executor_ops real = {
    .run = on_run, .start = on_start, .finish = on_finish, .waits = on_waits, .done = on_done};

static struct sw_task tasks[TASKS];
static struct sw_turn turn = {.tasks = tasks, .task_count = TASKS};
static uint64_t bytes[TASKS];
static struct sw_run run = {.turn = &turn, .bytes = bytes, .rank_count = 1};

static struct sw_throttle throttle_of(struct sw_sim_rates rates) {
    memset(&seen, 0, sizeof(seen));
    memset(tasks, 0, sizeof(tasks));
    return (struct sw_throttle){.rates = rates, .real = real, .work = on_work};
}

/* Nanoseconds that `count` tasks of a kind take one after the other. */
static uint64_t time_of(struct sw_throttle *t, enum sw_task_kind kind, enum sw_lane lane,
                        uint64_t moved, int count) {
    const uint64_t start = sw_now_ns();
    for (int i = 0; i < count; i++) {
        tasks[i].kind = (uint8_t)kind;
        tasks[i].lane = (uint8_t)lane;
        bytes[i] = moved;
        assert_int_equal(sw_throttle_ops.run(t, &run, &tasks[i], 0, NULL), 0);
    }
    return sw_now_ns() - start;
}

static void a_lane_is_never_faster_than_its_rate(void **state) {
    (void)state;
    struct sw_throttle t = throttle_of((struct sw_sim_rates){
        .copy_bytes = {100000000, 50000000}, .adam_bytes = 200000000, .flops = 300000000});
    /* 4 x 1 MB at 100 MB/s, at 50 MB/s; 4 x 2 MB at 200 MB/s; 4 x 3 MFLOP at 300 MFLOP/s. */
    assert_true(time_of(&t, SW_TASK_UPLOAD, SW_LANE_H2D, 1000000, 4) >= 40000000);
    assert_true(time_of(&t, SW_TASK_GRAD, SW_LANE_D2H, 1000000, 4) >= 80000000);
    assert_true(time_of(&t, SW_TASK_ADAM, SW_LANE_ADAM, 0, 4) >= 40000000);
    assert_int_equal(seen.runs, 12);
    /* One lane: what follows at once begins when the work before was due, not when that was seen.
     */
    const uint64_t start = sw_now_ns();
    time_of(&t, SW_TASK_FORWARD, SW_LANE_COMPUTE, 0, 2);
    time_of(&t, SW_TASK_BACKWARD, SW_LANE_COMPUTE, 0, 2);
    assert_true(sw_now_ns() - start >= 40000000);
}

static void computation_alone_is_left_out(void **state) {
    (void)state;
    struct sw_throttle t = throttle_of((struct sw_sim_rates){.flops = 1000000000000});
    time_of(&t, SW_TASK_FORWARD, SW_LANE_COMPUTE, 0, 1);
    time_of(&t, SW_TASK_BACKWARD, SW_LANE_COMPUTE, 0, 1);
    time_of(&t, SW_TASK_RECOMPUTE, SW_LANE_COMPUTE, 0, 1);
    time_of(&t, SW_TASK_HEAD_WHOLE, SW_LANE_COMPUTE, 0, 1);
    assert_int_equal(seen.runs, 0);
    time_of(&t, SW_TASK_DEVICE_ADAM, SW_LANE_COMPUTE, 0, 1);
    time_of(&t, SW_TASK_NORM, SW_LANE_CONTROL, 0, 1);
    time_of(&t, SW_TASK_UPLOAD, SW_LANE_H2D, 1000, 1);
    assert_int_equal(seen.runs, 3);
    t = throttle_of((struct sw_sim_rates){.adam_bytes = 1000000000000});
    time_of(&t, SW_TASK_FORWARD, SW_LANE_COMPUTE, 0, 1);
    time_of(&t, SW_TASK_ADAM, SW_LANE_ADAM, 0, 1);
    assert_int_equal(seen.runs, 2);
}

static void records_in_flight_end_one_by_one_when_they_are_due(void **state) {
    (void)state;
    struct sw_throttle t = throttle_of((struct sw_sim_rates){.nvme_bytes = {100000000, 50000000}});
    for (int write = 0; write < 2; write++) {
        const enum sw_lane lane = write ? SW_LANE_NVME_WRITE : SW_LANE_NVME_READ;
        const uint64_t start = sw_now_ns();
        for (int i = 0; i < 5; i++) {
            tasks[i].kind = write ? SW_TASK_WRITE : SW_TASK_READ;
            tasks[i].lane = (uint8_t)lane;
            bytes[i] = 1000000;
            seen.start_answer = i == 2; /* one that needs no I/O */
            assert_int_equal(sw_throttle_ops.start(&t, &run, &tasks[i], 0), i == 2);
        }
        seen.finish_count = 2;
        seen.finishes = 0;
        for (uint64_t i = 1; i <= 4; i++) {
            assert_int_equal(sw_throttle_ops.finish(&t, lane, 4), 1);
            assert_true(sw_now_ns() - start >= i * (write ? 20000000 : 10000000));
        }
        assert_int_equal(seen.finishes, 2); /* those that are over are not asked for again */
        assert_int_equal(t.lanes[lane][0].count, 0);
    }
    assert_int_equal(seen.starts, 10);
}

static void lanes_without_a_rate_are_passed_on(void **state) {
    (void)state;
    struct sw_throttle t = throttle_of((struct sw_sim_rates){.nvme_bytes = {0, 1000}});
    tasks[0] = (struct sw_task){.kind = SW_TASK_READ, .lane = SW_LANE_NVME_READ};
    assert_int_equal(sw_throttle_ops.start(&t, &run, &tasks[0], 0), 0);
    seen.finish_count = 3;
    assert_int_equal(sw_throttle_ops.finish(&t, SW_LANE_NVME_READ, 4), 3);
    seen.finish_count = -5;
    assert_int_equal(sw_throttle_ops.finish(&t, SW_LANE_NVME_READ, 4), -5);
    sw_throttle_ops.waits(&t, SW_LANE_NVME_READ, 1);
    sw_throttle_ops.waits(&t, SW_LANE_NVME_READ, 0);
    sw_throttle_ops.done(&t, &run, &tasks[0], 0);
    assert_int_equal(seen.waits, 101);
    assert_int_equal(seen.done, 1);
}

static void any_rate_counts(void **state) {
    (void)state;
    struct sw_sim_rates none = {0};
    assert_false(sw_sim_any(&none));
    uint64_t *const each[] = {&none.copy_bytes[0], &none.copy_bytes[1], &none.nvme_bytes[0],
                              &none.nvme_bytes[1], &none.adam_bytes,    &none.comm_bytes,
                              &none.flops};
    for (size_t i = 0; i < sizeof(each) / sizeof(each[0]); i++) {
        *each[i] = 1;
        assert_true(sw_sim_any(&none));
        *each[i] = 0;
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_lane_is_never_faster_than_its_rate),
        cmocka_unit_test(computation_alone_is_left_out),
        cmocka_unit_test(records_in_flight_end_one_by_one_when_they_are_due),
        cmocka_unit_test(lanes_without_a_rate_are_passed_on),
        cmocka_unit_test(any_rate_counts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
