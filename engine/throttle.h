/* engine/throttle.h - lanes held to chosen rates, so that the step clock of another machine can be
 * played on this one.
 *
 * Stands between the executor and whoever does the tasks. A throttled lane does its real work and
 * then waits out the rest of the time that the work takes at its rate; a faster one than this
 * machine's changes nothing. Computation alone is left out and waited for in full, as nothing else
 * would let a CPU play a GPU: such a run trains nothing. A lane's stream is waited for before its
 * task's time begins: a GPU may still be at earlier work. Each lane keeps its own clock, so that
 * waking late is made up for by the next task. Threads: the lanes', as with the ops themselves. */
#ifndef ENGINE_THROTTLE_H
#define ENGINE_THROTTLE_H
#include <stdint.h>
#include "engine/collective.h"
#include "engine/executor.h"

/* The work of a task: bytes of an ADAM, floating-point operations of what the compute lane does for
 * the model; 0 where the run leaves the task out (a skipped step, a stop). What the
 * copies and NVMe lanes moved stands in run->bytes. */
typedef double (*sw_work)(void *ctx, struct sw_run *run, const struct sw_task *task);

struct sw_throttle_lane {
    uint64_t due_ns; /* when the work so far is over at the lane's rate */
    /* NVMe lanes: tasks in flight, oldest first, and how many of them are really over. */
    double bytes[SW_LANE_IN_FLIGHT_MAX];
    uint64_t start_ns[SW_LANE_IN_FLIGHT_MAX];
    uint32_t first, count, over;
};

struct sw_throttle {
    struct sw_sim_rates rates;
    struct sw_executor_ops real;
    void *ctx; /* of the real ops, and of work */
    sw_work work;
    const struct sw_device_ops *device; /* of the streams; NULL: there are none */
    /* By rank, and how many there are; NULL: one. Each has an equal part of Adam's rate. */
    const uint8_t *adam_lane;
    uint32_t adam_lanes;
    struct sw_throttle_lane lanes[SW_LANE_COUNT][SW_RANKS_MAX];
};

int sw_sim_any(const struct sw_sim_rates *rates);
/* The rate that a task's lane is held to; 0: none. */
uint64_t sw_sim_rate(const struct sw_sim_rates *rates, const struct sw_task *task);

/* The ops to give the executor, with the throttle as their ctx; they call those of `real`. */
extern const struct sw_executor_ops sw_throttle_ops;

#endif
