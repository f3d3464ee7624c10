/* engine/budget.h - chooses the placements that the options leave open, by what fits.
 *
 * A pure function of numbers, before anything is loaded. */
#ifndef ENGINE_BUDGET_H
#define ENGINE_BUDGET_H
#include "engine/options.h"
#include "offload/placement.h"

/* Whose limit was too low, and by how much. */
struct sw_shortfall {
    enum sw_tier tier; /* SW_TIER_COUNT: of the machine's memory, with devices that are in it */
    uint64_t need_bytes, allowed_bytes;
};

/* Fills the tiers of `input` and everything that options leaves open about them (tiers,
 * commit_every), and builds the placement. Left open, a state begins in the tier that costs the
 * least time (weights and kept inputs on the device, records and gradients in the host's memory)
 * and goes one down while its tier is over its budget, or the machine's memory is too small.
 * resuming: a commit has to be kept. 0; -ENOSPC when nothing fits, not reported: the shortfall is
 * that of the lowest tiers, whose placement is built; -ENOMEM. */
int sw_budget_place(struct sw_placement *placement, struct sw_placement_input *input,
                    struct sw_train_options *options, int resuming, struct sw_shortfall *shortfall);

#endif
