/* plan/lane_rates.h - what each task of a turn costs on a machine: its bytes or operations over the
 * rate of its lane, and what it takes meanwhile of what lanes share.
 *
 * Shared are the host's memory (the update, copies, NVMe), the two directions of each GPU's link
 * and of the drives, the link of a PCIe switch, and on the CPU as device its cores. --sim-* holds
 * lanes to its rates as in a run. What the machine's profile does not tell takes no time, and is
 * listed. Pure data once opened: any thread may read. */
#ifndef PLAN_LANE_RATES_H
#define PLAN_LANE_RATES_H
#include "engine/turn_play.h"
#include "engine/turn_work.h"
#include "offload/rank_nodes.h"
#include "plan/fit.h"

enum { SW_RATES_SWITCHES_MAX = 8, SW_RATES_RESOURCES_MAX = 3 + 64 + 2 * SW_RATES_SWITCHES_MAX };

struct sw_rates {
    const struct sw_plan_case *c;
    const struct sw_plan_run *run;
    struct sw_turn_work work;
    const struct sw_machine_model *times; /* of the model's own operations; NULL: by their count */
    struct sw_rank_nodes nodes;           /* an adam lane for each */
    double drive_read, drive_write;       /* of all drives together */
    uint32_t switches;
    struct sw_play_resource resources[SW_RATES_RESOURCES_MAX];
    uint32_t resource_count;
};

/* run and c outlive it. */
void sw_rates_open(struct sw_rates *out, const struct sw_plan_case *c,
                   const struct sw_plan_run *run);

/* Of a task of a turn whose own step is this one, counted from 1. `cost` comes with 0
 * seconds and no uses. */
void sw_rates_cost(const struct sw_rates *r, const struct sw_task *task, uint32_t rank,
                   uint64_t step, struct sw_play_cost *cost);
/* The same where one rank stands for all, which do alike: what lanes of the host do for one rank
 * after the other is one task, and what ranks do at once draws on what they share for all of them.
 */
void sw_rates_cost_of_all(const struct sw_rates *r, const struct sw_task *task, uint64_t step,
                          struct sw_play_cost *cost);
/* What it moves, as a run counts: nothing is read of a chunk that was never updated. */
uint64_t sw_rates_bytes(const struct sw_rates *r, const struct sw_task *task, uint64_t step);

/* Work per second of a task's lane, of one rank; 0: none is known. */
double sw_rates_of(const struct sw_rates *r, const struct sw_task *task);

/* What keeps tasks of this kind and lane without a rate, by its name in a profile. */
const char *sw_rates_missing(const struct sw_rates *r, const struct sw_task *task);

#endif
