/* engine/step_clock.c - which lane sets the time of a step, by the times of its tasks. */
#include <string.h>
#include "engine/executor.h"

/* Where a task's times are, as one rank sees it. */
static uint64_t seen_by(const struct sw_run *run, uint32_t index, uint32_t rank) {
    const struct sw_task *task = &run->turn->tasks[index];
    return sw_run_at(run, task, sw_task_is_joint((enum sw_task_kind)task->kind) ? 0 : rank);
}

/* The predecessor within the turn that ended last, or -1. */
static int64_t last_predecessor(const struct sw_run *run, uint32_t task, uint32_t rank) {
    const struct sw_turn *turn = run->turn;
    const struct sw_task *t = &turn->tasks[task];
    int64_t best = -1;
    uint64_t best_ns = 0;
    if (run->positions[task] > 0) {
        best = turn->lane_tasks[t->lane][run->positions[task] - 1];
        best_ns = run->end_ns[seen_by(run, (uint32_t)best, rank)];
    }
    for (uint32_t d = 0; d < t->dep_count; d++) {
        if (t->deps[d].turn != 0 || t->deps[d].index < 0) continue;
        const uint32_t other = turn->lane_tasks[t->deps[d].lane][t->deps[d].index];
        const uint64_t end_ns = run->end_ns[seen_by(run, other, rank)];
        if (best >= 0 && end_ns <= best_ns) continue;
        best = other;
        best_ns = end_ns;
    }
    return best;
}

enum sw_lane sw_run_step_clock(const struct sw_run *run, double share[SW_LANE_COUNT]) {
    const struct sw_turn *turn = run->turn;
    memset(share, 0, SW_LANE_COUNT * sizeof(*share));
    if (turn->task_count == 0) return SW_LANE_COMPUTE;
    int64_t task = 0;
    uint32_t rank = 0;
    for (int l = 0; l < SW_LANE_COUNT; l++)
        for (uint32_t i = 0; i < turn->lane_count[l]; i++)
            run->positions[turn->lane_tasks[l][i]] = i;
    for (uint32_t i = 0; i < turn->task_count; i++)
        for (uint32_t r = 0; r < run->rank_count; r++) {
            if (run->end_ns[seen_by(run, i, r)] <= run->end_ns[seen_by(run, (uint32_t)task, rank)])
                continue;
            task = i;
            rank = r;
        }
    double total = 0;
    while (task >= 0) {
        const uint64_t at = seen_by(run, (uint32_t)task, rank);
        const double busy = (double)(run->end_ns[at] - run->start_ns[at]);
        share[turn->tasks[task].lane] += busy;
        total += busy;
        task = last_predecessor(run, (uint32_t)task, rank);
    }
    enum sw_lane clock = SW_LANE_COMPUTE;
    for (int l = 0; l < SW_LANE_COUNT; l++) {
        if (total > 0) share[l] /= total;
        if (share[l] > share[clock]) clock = (enum sw_lane)l;
    }
    return clock;
}
