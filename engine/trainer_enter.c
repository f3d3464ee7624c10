/* engine/trainer_enter.c - what a lane's thread keeps from step to step, made before the first one.
 *
 * A team belongs to the thread that opens its parallel regions, and a library's state often to the
 * thread that called it, so each lane makes its own. */
#include "engine/trainer_internal.h"

int sw_trainer_enter_lane(void *ctx, enum sw_lane lane, uint32_t rank, struct sw_stream *stream) {
    struct sw_trainer *t = ctx;
    const struct sw_device_ops *ops = t->ranks[rank].device.ops;
    if (sw_lane_on_device(lane)) sw_core_share_bind(t->cores, rank);
    switch (lane) {
    case SW_LANE_COMPUTE:
        return ops->prepare(stream, 1);
    case SW_LANE_COMM:
        return ops->prepare(stream, 0);
    case SW_LANE_ADAM:
        if (!sw_tiers_is_all(t->options.optimizer, SW_TIER_DEVICE))
            sw_team_start(t->teams[t->nodes.of[rank]]);
        return 0;
    default:
        return 0;
    }
}
