/* plan/search.h - the fastest placement that fits, of equally fast ones that which spares the
 * drives: by playing the steps of many, from the one that the rule chose and from the fullest of
 * each stage.
 *
 * What is left open of stage, placements with their shares, K, the mode of overlap and the units
 * that are late is searched; window and rings follow from the memory that a placement leaves. What
 * the numerics key names is never touched. Candidates are played with one rank for all, the best of
 * them with every rank. How many are played is counted, not timed, so a case has one answer. */
#ifndef PLAN_SEARCH_H
#define PLAN_SEARCH_H
#include "plan/decide.h"
#include "plan/simulate.h"

struct sw_plan_found {
    struct sw_plan_step step;
    struct sw_simulation times;
    double decided_step_s;   /* of the placement that the rule chose */
    uint32_t fitted, played; /* placements that were looked at, and those with a step's time */
    int is_searched;
    const char *missing; /* the rate for want of which nothing was searched, or NULL */
};

/* The rule's choice and its times, of a decision that found something that fits. 0 or -errno,
 * reported. */
int sw_plan_take(const struct sw_plan_case *c, const struct sw_plan_decision *decided,
                 struct sw_plan_found *out);

/* Goes on from there. */
int sw_plan_search(const struct sw_plan_case *c, const struct sw_plan_decision *decided,
                   struct sw_plan_found *out);

/* Gives options the placement of others: what a search chooses, and nothing else. */
void sw_plan_place(struct sw_train_options *o, const struct sw_train_options *placed);

#endif
