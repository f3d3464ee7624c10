/* engine/step_clock.c - which lane sets the time of a step, by the times of its tasks. */
#include <string.h>
#include "engine/executor.h"

/* Where a task's times are, as one rank sees it. */
static uint64_t seen_by(const struct sw_run *run, uint32_t index, uint32_t rank) {
    const struct sw_task *task = &run->turn->tasks[index];
    return sw_run_at(run, task, sw_task_is_joint((enum sw_task_kind)task->kind) ? 0 : rank);
}

/* A task as it was for one rank; task -1: none. */
struct place {
    int64_t task;
    uint32_t rank;
    uint64_t end_ns;
};

static int is_joint(const struct sw_task *task) {
    return sw_task_is_joint((enum sw_task_kind)task->kind);
}

/* It begins when the last rank has come. */
static int waits_for_all(const struct sw_task *task) {
    return is_joint(task) || task->kind == SW_TASK_GATHER || task->kind == SW_TASK_SCATTER;
}

static void consider(const struct sw_run *run, uint32_t task, uint32_t rank, struct place *best) {
    const uint64_t end_ns = run->end_ns[seen_by(run, task, rank)];
    if (best->task < 0 || end_ns > best->end_ns) *best = (struct place){task, rank, end_ns};
}

/* Whether a lane does the tasks of both ranks, one after the other. */
static int one_lane(const struct sw_run *run, const struct sw_task *task, uint32_t a, uint32_t b) {
    if (sw_lane_on_device((enum sw_lane)task->lane)) return a == b || waits_for_all(task);
    if (task->lane != SW_LANE_ADAM || !run->adam_lane) return 1;
    return run->adam_lane[a] == run->adam_lane[b];
}

/* What the lane did before: on the host the same task for an earlier rank, else the last one. */
static void consider_lane(const struct sw_run *run, const struct place *of, struct place *best) {
    const struct sw_task *t = &run->turn->tasks[of->task];
    for (uint32_t r = 0; r < of->rank && !waits_for_all(t); r++)
        if (one_lane(run, t, r, of->rank)) consider(run, (uint32_t)of->task, r, best);
    const uint32_t position = run->positions[of->task];
    if (position == 0) return;
    const uint32_t before = run->turn->lane_tasks[t->lane][position - 1];
    for (uint32_t r = 0; r < run->rank_count; r++)
        if (one_lane(run, t, r, of->rank)) consider(run, before, r, best);
}

/* The predecessor within the turn that ended last. */
static struct place last_predecessor(const struct sw_run *run, const struct place *of) {
    const struct sw_turn *turn = run->turn;
    const struct sw_task *t = &turn->tasks[of->task];
    const uint32_t first = waits_for_all(t) ? 0 : of->rank;
    const uint32_t end = waits_for_all(t) ? run->rank_count : of->rank + 1;
    struct place best = {.task = -1};
    consider_lane(run, of, &best);
    for (uint32_t d = 0; d < t->dep_count; d++) {
        if (t->deps[d].turn != 0 || t->deps[d].index < 0) continue;
        const uint32_t other = turn->lane_tasks[t->deps[d].lane][t->deps[d].index];
        for (uint32_t r = first; r < end; r++) consider(run, other, r, &best);
    }
    return best;
}

static struct place last_task(const struct sw_run *run) {
    struct place last = {.task = -1};
    for (uint32_t i = 0; i < run->turn->task_count; i++)
        for (uint32_t r = 0; r < run->rank_count; r++) consider(run, i, r, &last);
    return last;
}

enum sw_lane sw_run_step_clock(const struct sw_run *run, double share[SW_LANE_COUNT]) {
    const struct sw_turn *turn = run->turn;
    memset(share, 0, SW_LANE_COUNT * sizeof(*share));
    for (int l = 0; l < SW_LANE_COUNT; l++)
        for (uint32_t i = 0; i < turn->lane_count[l]; i++)
            run->positions[turn->lane_tasks[l][i]] = i;
    double total = 0;
    for (struct place at = last_task(run); at.task >= 0; at = last_predecessor(run, &at)) {
        const uint64_t index = seen_by(run, (uint32_t)at.task, at.rank);
        const double busy = (double)(run->end_ns[index] - run->start_ns[index]);
        share[turn->tasks[at.task].lane] += busy;
        total += busy;
    }
    enum sw_lane clock = SW_LANE_COMPUTE;
    for (int l = 0; l < SW_LANE_COUNT; l++) {
        if (total > 0) share[l] /= total;
        if (share[l] > share[clock]) clock = (enum sw_lane)l;
    }
    return clock;
}
