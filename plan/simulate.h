/* plan/simulate.h - the time of a step, before there is a run: the turns that the trainer would
 * have, built by the same functions from the same placement, played at a machine's rates.
 *
 * Several turns follow each other as in a run, each beginning while the one before is under way,
 * until the step's time no longer changes. No I/O but the trace, no device. */
#ifndef PLAN_SIMULATE_H
#define PLAN_SIMULATE_H
#include "engine/turn.h"
#include "plan/fit.h"

enum { SW_SIMULATION_MISSING_MAX = 16 };

struct sw_simulation {
    double step_s, tokens, tokens_per_s; /* tokens: of a step, of all ranks */
    double compute_s; /* forward and backward of a rank, when nothing slows them */
    uint32_t steps;   /* played; the last but one is the one that follows */
    int is_steady;    /* its time is that of the steps before */
    enum sw_lane step_clock;
    double share[SW_LANE_COUNT];  /* of the critical path */
    double busy_s[SW_LANE_COUNT]; /* of the busiest rank or node where a lane is theirs */
    double bytes[SW_LANE_COUNT];  /* moved in a step, of all ranks of a machine */
    /* To the drives of a machine, with what idle lanes write for a commit in between. */
    double written_bytes, written_bytes_per_day;
    uint32_t tasks; /* of a step, of all ranks of a machine */
    /* Rates that tasks need and the profile does not tell: these took no time. */
    const char *missing[SW_SIMULATION_MISSING_MAX];
    uint32_t missing_count;
};

/* Plays a fit's run. trace: the file for the last steps that were played, all of them steady, as a
 * run writes it (engine/trace.h); NULL: none. 0 or -errno, reported. */
int sw_simulate(const struct sw_plan_case *c, const struct sw_fit *fit, const char *trace,
                struct sw_simulation *out);

/* The same with one rank that stands for all, which do alike, and where coarse is set with fewer
 * chunks where they are many, and no longer than usual for steps to become alike: that many times
 * faster, and close enough to choose by. bytes and tasks are what was played. */
int sw_simulate_one(const struct sw_plan_case *c, const struct sw_fit *fit, int coarse,
                    struct sw_simulation *out);

#endif
