/* plan/fit.h - what a run would really take of a machine's memory: the placement that the trainer
 * itself would build, beside what the machine has. */
#ifndef PLAN_FIT_H
#define PLAN_FIT_H
#include "engine/options.h"
#include "engine/sizing.h"
#include "offload/placement.h"
#include "plan/machine.h"
#include "plan/subject.h"

struct sw_played;

/* The case that a plan is about. Everything is the caller's and stays as it is. */
struct sw_plan_case {
    const struct sw_subject *subject;
    const struct sw_machine *machine;
    /* As given: what is open stays so, but for seq_len and ranks (of one machine), device (HOST or
     * CUDA) and grad_dtype, which are settled. */
    struct sw_train_options options;
    uint32_t nodes; /* machines like this one, each with a process of so many ranks */
    /* Of a step, at least, over all ranks; 0: as accumulate says, which else follows. */
    uint64_t tokens;
    /* Steps that were played of cases that are this one but for its machine's memory
     * (plan/played.h); NULL: none are kept. */
    struct sw_played *played;
};

/* Settles the former: rows of min(512, the model's limit), a rank for each GPU; and accumulate,
 * where tokens are told. 0 or -EINVAL,
 * reported, where ranks and GPUs do not go together. */
int sw_plan_case_settle(struct sw_plan_case *c);

struct sw_fit {
    struct sw_train_options options; /* as tried, with all that a run would resolve */
    int fits;
    enum sw_tier short_of; /* where it does not; SW_TIER_COUNT: memory that device and host share */
    /* Of one rank on the device, of one machine on the others; a bare count's state by its count.
     * budget 0: no limit is known. */
    double need_bytes[SW_TIER_COUNT], budget_bytes[SW_TIER_COUNT];
    double state_bytes[SW_TIER_COUNT];         /* of need: weights, waiting gradients, records */
    struct sw_byte_row rows[SW_BYTE_ROWS_MAX]; /* of the subject's units */
    int row_count;
    uint32_t kept_groups;
    uint8_t given_up[SW_TIER_COUNT]; /* as in struct sw_placement */
};

/* Tries options whose placements are all chosen. 0 (whether it fits or not) or -errno, reported. */
int sw_plan_fit(const struct sw_plan_case *c, const struct sw_train_options *o, struct sw_fit *out);

/* The run that a fit is about, as its trainer would have it before anything is allocated. */
struct sw_plan_run {
    struct sw_train_options options;
    struct sw_model model;
    uint64_t *shard_elements, *trained_elements;
    struct sw_device_handle device; /* for sizes */
    struct sw_sizing sizing;
    struct sw_placement_input input;
    struct sw_placement placement;
};
/* 0 or -errno, reported. out stays where it is until sw_plan_run_close(), which is due in any case.
 */
int sw_plan_run_open(struct sw_plan_run *out, const struct sw_plan_case *c,
                     const struct sw_fit *fit);
void sw_plan_run_close(struct sw_plan_run *run);

#endif
