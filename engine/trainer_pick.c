/* engine/trainer_pick.c - which units are updated late, where the lanes' rates are known: the turn
 * is played at these rates with several choices, and the shortest step is taken. Where rates are
 * not known sw_turn_shape_pick_late() stays. */
#include "engine/trainer_internal.h"

#include <errno.h>
#include "engine/turn_play.h"

static double cost_of(void *ctx, const struct sw_task *task) {
    const struct sw_trainer *t = ctx;
    const uint64_t rate = sw_sim_rate(&t->options.sim, task);
    return rate ? sw_trainer_task_work(t, task) / (double)rate : 0;
}

int sw_trainer_pick_late(struct sw_trainer *t) {
    static const double shares[] = {0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6};
    struct sw_turn_shape best = t->shape;
    if (t->shape.overlap != SW_OVERLAP_BACKWARD || !t->options.sim.flops) return 0;
    double best_s = sw_turn_steady_step(&best, cost_of, t);
    for (size_t below = 0; below < sizeof(shares) / sizeof(shares[0]); below++)
        for (size_t top = 0; shares[below] + shares[top] <= 0.9 && top < 7; top++) {
            struct sw_turn_shape shape = t->shape;
            sw_turn_shape_late_shares(&shape, t->trained_elements, shares[below], shares[top]);
            const double step_s = sw_turn_steady_step(&shape, cost_of, t);
            if (step_s < 0 || best_s < 0) return -ENOMEM;
            if (step_s >= best_s * 0.999) continue;
            best = shape;
            best_s = step_s;
        }
    t->shape = best;
    return 0;
}
