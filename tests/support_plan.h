/* tests/support_plan.h - the turns of a run that exists in a plan alone: a named model on a
 * described machine, in the placement that the plan chooses, built as the trainer would build
 * them. */
#ifndef TESTS_SUPPORT_PLAN_H
#define TESTS_SUPPORT_PLAN_H
#include "plan/decide.h"
#include "plan/lane_rates.h"

struct planned_case {
    const char *model, *machine; /* as the plan's command line names them */
    uint64_t tokens;             /* of a step, of all ranks */
    uint32_t seq_len;
    enum sw_overlap overlap;
    uint64_t chunk_bytes; /* 0: the usual ones */
};

struct planned_turns {
    struct sw_subject subject;
    struct sw_machine machine;
    struct sw_plan_case c;
    struct sw_plan_decision decision;
    struct sw_plan_run run;
    struct sw_rates rates;
    struct sw_turn_shape shape;
    struct sw_turn first, second, steady, drain;
    int has_drain;
};

/* All up to the shape of the turns; out stays where it is until planned_close(), which is due in
 * any case. 0 or -errno; -ENOSPC: no scheme fits. */
int planned_open(struct planned_turns *out, const struct planned_case *of);
/* The turns, the drain only where there is one. 0 or -ENOMEM. */
int planned_build(struct planned_turns *p);
void planned_close(struct planned_turns *p);

/* The turns in the order of a run of so many steps; what list must hold is one more. Their
 * count. */
uint32_t planned_list(const struct planned_turns *p, uint32_t steps, const struct sw_turn **list);

#endif
