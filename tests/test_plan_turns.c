/* Turns of the size that a plan is about: Llama-3 70B over eight ranks, where the plan puts it,
 * must keep every invariant, update each parameter once and run to their end on lanes that do
 * nothing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "tests/support_null_lanes.h"
#include "tests/support_plan.h"

enum { STEPS = 4, RANKS = 8 };

static struct planned_turns turns;

static void open_case(const struct planned_case *of) {
    if (planned_open(&turns, of)) fail_msg("%s on %s: not planned", of->model, of->machine);
    assert_int_equal(planned_build(&turns), 0);
    assert_int_equal(turns.run.options.ranks, RANKS);
}

/* In the update tasks of a turn, of all ranks. */
static double updated_params(const struct sw_turn *turn) {
    double sum = 0;
    for (uint32_t i = 0; i < turn->task_count; i++) {
        const struct sw_task *task = &turn->tasks[i];
        if (task->kind == SW_TASK_ADAM || task->kind == SW_TASK_DEVICE_ADAM)
            sum += (double)turns.run.placement.chunks[task->chunk].count * RANKS;
    }
    return sum;
}

static void check_case(const struct planned_case *of) {
    const struct sw_turn *list[STEPS + 1];
    char why[256] = "";
    open_case(of);
    const uint32_t count = planned_list(&turns, STEPS, list);
    if (sw_turn_check(&turns.shape, list, (int)count, why, sizeof(why)))
        fail_msg("%s on %s: %s", of->model, of->machine, why);
    /* Shares are rounded up to blocks. */
    const double updated = updated_params(&turns.steady) / (double)turns.subject.params;
    if (!(updated >= 1 && updated < 1.0001)) fail_msg("a step updates %.6f of all", updated);
}

static const struct planned_case in_ram = {"llama-3-70b", "8xh100",        131072,
                                           4096,          SW_OVERLAP_AUTO, 0};
static const struct planned_case with_nvme = {"llama-3-70b", "8xh100:ram=1T", 131072,
                                              4096,          SW_OVERLAP_AUTO, 0};
static const struct planned_case in_turns = {"llama-3-70b", "8xh100:ram=300G", 65536,
                                             4096,          SW_OVERLAP_NONE,   0};
/* More tasks in a lane than 16 bits count. */
static const struct planned_case large = {"llama-3-405b", "8xh200",        65536,
                                          4096,           SW_OVERLAP_AUTO, 0};

static void large_turns_keep_the_invariants(void **state) {
    (void)state;
    const struct planned_case *const cases[] = {&in_ram, &with_nvme, &in_turns, &large};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        check_case(cases[i]);
        planned_close(&turns);
    }
}

/* What a task waits for is over when it starts, of 400,000 tasks a step; none is left out. */
static void turns_of_70b_run_on_null_lanes(void **state) {
    (void)state;
    const struct sw_turn *list[STEPS + 1];
    struct null_lanes lanes;
    open_case(&with_nvme);
    const uint32_t count = planned_list(&turns, 2, list);
    assert_int_equal(null_lanes_open(&lanes, RANKS, turns.rates.nodes.of, list, count), 0);
    uint64_t want = 0;
    for (uint32_t t = 0; t < count; t++) {
        assert_int_equal(null_lanes_push(&lanes, list[t]), 0);
        want += null_lanes_tasks(list[t], RANKS);
    }
    assert_int_equal(null_lanes_idle(&lanes), 0);
    assert_true(atomic_load(&lanes.tasks) == want);
    null_lanes_close(&lanes);
    planned_close(&turns);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(large_turns_keep_the_invariants),
        cmocka_unit_test(turns_of_70b_run_on_null_lanes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
