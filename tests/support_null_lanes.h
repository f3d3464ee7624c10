/* tests/support_null_lanes.h - the executor with lanes that do nothing: tasks end at once, in the
 * order and after the waits of a real run. What is left is what the executor itself costs. */
#ifndef TESTS_SUPPORT_NULL_LANES_H
#define TESTS_SUPPORT_NULL_LANES_H
#include <stdatomic.h>
#include <time.h>
#include "engine/executor.h"

enum { NULL_LANES_MAX = SW_LANE_COUNT + SW_RANKS_MAX * SW_LANE_COUNT };

struct null_lanes {
    struct sw_executor *executor;
    struct sw_device_handle devices[SW_RANKS_MAX]; /* hosts that nothing is asked of */
    uint32_t ranks;
    uint64_t steps; /* pushed */
    struct sw_run *last;
    _Atomic uint64_t tasks; /* that are over */
    /* Of each lane that has entered, to read its processor time while the executor is open. */
    _Atomic uint32_t lane_count;
    struct null_lane {
        enum sw_lane id;
        uint32_t rank;
        clockid_t clock;
    } lanes[NULL_LANES_MAX];
};

/* turns: those that will be pushed. 0 or -errno; out stays where it is until it is closed. */
int null_lanes_open(struct null_lanes *out, uint32_t ranks, const uint8_t *adam_lane,
                    const struct sw_turn *const *turns, uint32_t turn_count);
/* Pushes one behind those that run, waiting while too many do. 0 or -errno. */
int null_lanes_push(struct null_lanes *lanes, const struct sw_turn *turn);
int null_lanes_idle(struct null_lanes *lanes);
void null_lanes_close(struct null_lanes *lanes);

/* Tasks that a turn is for so many ranks. */
uint64_t null_lanes_tasks(const struct sw_turn *turn, uint32_t ranks);

#endif
