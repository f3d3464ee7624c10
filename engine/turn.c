/* engine/turn.c - names, and which units are updated when. */
#include "engine/turn.h"

#include <stdlib.h>
#include "engine/turn_track.h"

const char *sw_lane_name(enum sw_lane lane) {
    static const char *const names[] = {"compute",   "h2d",        "d2h",     "comm",   "adam",
                                        "nvme_read", "nvme_write", "control", "commit", "data"};
    return names[lane];
}

const char *sw_task_name(enum sw_task_kind kind) {
    static const char *const names[SW_TASK_KIND_COUNT] = {
        [SW_TASK_FILL] = "fill",
        [SW_TASK_BATCH] = "batch",
        [SW_TASK_FORWARD] = "forward",
        [SW_TASK_RECOMPUTE] = "recompute",
        [SW_TASK_BACKWARD] = "backward",
        [SW_TASK_HEAD_FORWARD] = "head forward",
        [SW_TASK_HEAD_WHOLE] = "head",
        [SW_TASK_HEAD_BACKWARD] = "head backward",
        [SW_TASK_HEAD_GRAD] = "head gradient",
        [SW_TASK_LOSS] = "loss",
        [SW_TASK_GATE] = "gate",
        [SW_TASK_GATHER] = "all-gather",
        [SW_TASK_SCATTER] = "reduce-scatter",
        [SW_TASK_REDUCE] = "reduce",
        [SW_TASK_GRAD] = "grad",
        [SW_TASK_NORMS] = "norms",
        [SW_TASK_NORM] = "norm",
        [SW_TASK_SCALARS] = "scalars",
        [SW_TASK_READ] = "read",
        [SW_TASK_ADAM] = "adam",
        [SW_TASK_DEVICE_ADAM] = "device adam",
        [SW_TASK_WRITE] = "write",
        [SW_TASK_UPLOAD] = "upload",
        [SW_TASK_COMMIT] = "commit",
        [SW_TASK_LOAD] = "load",
        [SW_TASK_READ_WEIGHT] = "read weights",
        [SW_TASK_WRITE_WEIGHT] = "write weights",
        [SW_TASK_READ_GRAD] = "read gradient",
        [SW_TASK_WRITE_GRAD] = "write gradient",
        [SW_TASK_SPILL] = "spill",
        [SW_TASK_WRITE_KEPT] = "write input",
        [SW_TASK_READ_KEPT] = "read input",
        [SW_TASK_FETCH] = "fetch",
    };
    return names[kind];
}

int sw_turn_unit_is_late(const struct sw_turn_shape *shape, uint32_t unit) {
    return sw_placement_trains(shape->placement, unit) &&
           (unit < shape->turning_point ||
            unit >= shape->placement->order.unit_count - shape->late_top);
}

int sw_turn_shape_is_late(const struct sw_turn_shape *shape) {
    for (uint32_t u = 0; u < shape->placement->order.unit_count; u++)
        if (sw_turn_unit_is_late(shape, u)) return 1;
    return 0;
}

int sw_turn_commits(const struct sw_placement *p) {
    return p->state_bytes[SW_TIER_NVME] > 0 && p->state_bytes[SW_TIER_HOST] == 0 &&
           p->state_bytes[SW_TIER_DEVICE] == 0;
}

/* Units from one end of the model that together hold at most this share of the elements. */
static uint32_t units_within(const struct sw_turn_shape *shape, const uint64_t *unit_elements,
                             double share, int from_top) {
    const uint32_t units = shape->placement->order.unit_count;
    double total = 0, sum = 0;
    for (uint32_t u = 0; u < units; u++) total += (double)unit_elements[u];
    for (uint32_t n = 0; n < units; n++) {
        sum += (double)unit_elements[from_top ? units - 1 - n : n];
        if (sum > total * share) return n;
    }
    return units;
}

#define LATE_SHARE     0.29
#define LATE_TOP_SHARE 0.20

void sw_turn_shape_late_shares(struct sw_turn_shape *shape, const uint64_t *unit_elements,
                               double below, double top) {
    shape->turning_point = units_within(shape, unit_elements, below, 0);
    shape->late_top = units_within(shape, unit_elements, top, 1);
}

void sw_turn_shape_pick_late(struct sw_turn_shape *shape, const uint64_t *unit_elements) {
    shape->turning_point = shape->late_top = 0;
    if (shape->overlap == SW_OVERLAP_FORWARD)
        shape->turning_point = shape->placement->order.unit_count;
    if (shape->overlap == SW_OVERLAP_BACKWARD)
        sw_turn_shape_late_shares(shape, unit_elements, LATE_SHARE, LATE_TOP_SHARE);
}

void sw_turn_settle(struct sw_turn *turn) {
    sw_track_close(turn->end);
    turn->end = NULL;
}

void sw_turn_free(struct sw_turn *turn) {
    sw_turn_settle(turn);
    for (int l = 0; l < SW_LANE_COUNT; l++) free(turn->lane_tasks[l]);
    free(turn->tasks);
    *turn = (struct sw_turn){0};
}
