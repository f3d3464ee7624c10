/* plan/balance.h - how many tokens a step needs for its computation to hide all the rest. */
#ifndef PLAN_BALANCE_H
#define PLAN_BALANCE_H
#include "plan/decide.h"

/* The fewest tokens of a step, in whole micro-batches, at which a step takes at most
 * (1 + SW_PLAN_OVERHEAD) times its own computation. */
#define SW_PLAN_OVERHEAD 0.05
struct sw_plan_balance {
    uint64_t tokens;     /* 0: none up to tokens_max, or nothing that fits */
    uint64_t tokens_max; /* that was looked at */
    double step_s, compute_s;
    struct sw_train_options options; /* of that step */
};
/* Keeps a placement where it fits; else kept inputs go down, else the rule chooses again. 0 or
 * -errno, reported. */
int sw_plan_balance(const struct sw_plan_case *c, const struct sw_fit *fit,
                    struct sw_plan_balance *out);

#endif
