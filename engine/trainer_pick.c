/* engine/trainer_pick.c - which units are updated late, where the lanes' rates are known: the turn
 * is played at these rates with several choices, and the shortest step is taken. Where rates are
 * not known sw_turn_shape_pick_late() stays. */
#include "engine/trainer_internal.h"

#include <errno.h>
#include "engine/turn_play.h"

static uint64_t rate_of(const struct sw_sim_rates *r, enum sw_lane lane) {
    switch (lane) {
    case SW_LANE_COMPUTE:
        return r->flops;
    case SW_LANE_H2D:
        return r->copy_bytes[0];
    case SW_LANE_D2H:
        return r->copy_bytes[1];
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

static double cost_of(void *ctx, const struct sw_task *task) {
    const struct sw_trainer *t = ctx;
    const enum sw_lane lane = (enum sw_lane)task->lane;
    const uint64_t rate = rate_of(&t->options.sim, lane);
    if (!rate) return 0;
    const double work = lane == SW_LANE_COMPUTE && task->kind != SW_TASK_DEVICE_ADAM
                            ? sw_trainer_flops(t, task)
                        : lane == SW_LANE_ADAM ? sw_trainer_adam_bytes(t, task)
                                               : (double)sw_trainer_task_bytes(t, task);
    return work / (double)rate;
}

int sw_trainer_pick_late(struct sw_trainer *t) {
    static const double shares[] = {0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6};
    struct sw_turn_shape best = t->shape;
    if (t->shape.overlap != SW_OVERLAP_BACKWARD || !t->options.sim.flops) return 0;
    double best_s = sw_turn_steady_step(&best, cost_of, t);
    for (size_t below = 0; below < sizeof(shares) / sizeof(shares[0]); below++)
        for (size_t top = 0; shares[below] + shares[top] <= 0.9 && top < 7; top++) {
            struct sw_turn_shape shape = t->shape;
            sw_turn_shape_late_shares(&shape, t->unit_elements, shares[below], shares[top]);
            const double step_s = sw_turn_steady_step(&shape, cost_of, t);
            if (step_s < 0 || best_s < 0) return -ENOMEM;
            if (step_s >= best_s * 0.999) continue;
            best = shape;
            best_s = step_s;
        }
    t->shape = best;
    return 0;
}
