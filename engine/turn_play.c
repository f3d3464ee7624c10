/* engine/turn_play.c - see the header. */
#include "engine/turn_play.h"

#include <errno.h>
#include <stdlib.h>

enum { WARM_UP = 3, MEASURED = 3 };

int sw_turn_play(const struct sw_turn *const *turns, int count, sw_task_cost cost, void *ctx,
                 double *ends) {
    double *before = NULL, lane_free[SW_LANE_COUNT] = {0};
    int ret = 0;
    for (int t = 0; t < count && ret == 0; t++) {
        const struct sw_turn *turn = turns[t];
        double *now = malloc((turn->task_count + 1) * sizeof(*now)), last = 0;
        if (!now) ret = -ENOMEM;
        for (uint32_t i = 0; ret == 0 && i < turn->task_count; i++) {
            const struct sw_task *task = &turn->tasks[i];
            double start = lane_free[task->lane];
            for (uint32_t d = 0; d < task->dep_count; d++) {
                const struct sw_dep *dep = &task->deps[d];
                if (dep->index < 0) continue; /* of a turn that has ended */
                const struct sw_turn *of = dep->turn == 0 ? turn : turns[t - 1];
                const double *in = dep->turn == 0 ? now : before;
                const double end = in[of->lane_tasks[dep->lane][dep->index]];
                if (end > start) start = end;
            }
            now[i] = lane_free[task->lane] = start + cost(ctx, task);
            if (now[i] > last) last = now[i];
        }
        ends[t] = last;
        free(before);
        before = now;
    }
    free(before);
    return ret;
}

double sw_turn_steady_step(const struct sw_turn_shape *shape, sw_task_cost cost, void *ctx) {
    const int late = sw_turn_shape_is_late(shape);
    struct sw_turn first, second = {0}, steady = {0};
    int ret = sw_turn_build(&first, shape, SW_TURN_TRAIN, 0, NULL);
    if (ret < 0) return ret;
    ret = sw_turn_build(&second, shape, SW_TURN_TRAIN, late, &first);
    if (ret == 0) ret = sw_turn_build(&steady, shape, SW_TURN_TRAIN, late, &second);
    const struct sw_turn *turns[WARM_UP + MEASURED] = {&first, &second};
    double ends[WARM_UP + MEASURED];
    for (int i = 2; i < WARM_UP + MEASURED; i++) turns[i] = &steady;
    if (ret == 0) ret = sw_turn_play(turns, WARM_UP + MEASURED, cost, ctx, ends);
    sw_turn_free(&first);
    sw_turn_free(&second);
    sw_turn_free(&steady);
    if (ret < 0) return ret;
    return (ends[WARM_UP + MEASURED - 1] - ends[WARM_UP - 1]) / MEASURED;
}
