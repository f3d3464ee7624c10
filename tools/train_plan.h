/* tools/train_plan.h - the plan of a run that is about to begin: what is left open of its placement
 * is the fastest that fits, where the machine's rates are known; and what the plan said beside what
 * the run took. One thread. */
#ifndef TOOLS_TRAIN_PLAN_H
#define TOOLS_TRAIN_PLAN_H
#include "engine/trainer.h"
#include "plan/search.h"
#include "tools/run_log.h"

enum { SW_TRAIN_PLAN_STEPS = 1001 };

struct sw_train_plan {
    int is_made;       /* else all that follows but why_not is 0 */
    char why_not[128]; /* there is none, where placements are open; "" */
    char machine[80];
    struct sw_plan_found found;
    uint64_t seen;                      /* steps of this process */
    double step_s[SW_TRAIN_PLAN_STEPS]; /* the latest, in a circle */
    uint32_t clocks[SW_LANE_COUNT];     /* how often each lane was the step clock */
};

/* Plans, and fills in what the options leave open of placements, --checkpoint-every, --zero,
 * --overlap and the late units. A run of several processes, or whose machine's rates are unknown,
 * has no plan and keeps its options. 0 or -errno, reported. */
int sw_train_plan_make(struct sw_train_plan *plan, struct sw_train_options *options);

/* The plan in five lines; where there is none, why; nothing where nothing was open. */
void sw_train_plan_print(const struct sw_train_plan *plan);
json_t *sw_train_plan_json(const struct sw_train_plan *plan); /* NULL without one */

/* Takes in a step that was made. Allocates nothing. */
void sw_train_plan_step(struct sw_train_plan *plan, const struct sw_step_report *report);
/* Predicted beside measured, once steps were made that count. */
void sw_train_plan_end(struct sw_train_plan *plan, struct sw_run_log *log, uint64_t step);

#endif
