/* engine/turn_work.h - how much work each task of a turn is, for the trainer that does it and for a
 * player that only counts it.
 *
 * Pure functions of shapes. */
#ifndef ENGINE_TURN_WORK_H
#define ENGINE_TURN_WORK_H
#include "engine/llama.h"
#include "engine/options.h"
#include "engine/sizing.h"
#include "engine/turn.h"

/* What the work follows from. The placement and the tables of `sizing` are the caller's and
 * outlive it. */
struct sw_turn_work {
    const struct sw_placement *placement;
    const struct sw_model *model;
    const uint64_t *shard_elements, *trained_elements; /* by unit */
    uint32_t shards, replicas;
    struct sw_adam_format format;
    enum sw_dtype dtype, grad_dtype, reduce_dtype;
    uint64_t micro_tokens, activation_bytes;
    struct sw_llama llama; /* described, never opened */
};

/* options: resolved. activation_bytes: as in the placement's input. */
void sw_turn_work_describe(struct sw_turn_work *out, const struct sw_sizing *sizing,
                           const struct sw_train_options *options,
                           const struct sw_placement *placement, uint64_t activation_bytes);

/* What a copy, an NVMe task or a collective moves: of the latter, what a rank sends. */
uint64_t sw_turn_work_bytes(const struct sw_turn_work *w, const struct sw_task *task);
/* The same, or the bytes that Adam reads and writes, on either side, or the compute lane's
 * floating-point operations. */
double sw_turn_work(const struct sw_turn_work *w, const struct sw_task *task);

/* The turns that a run of these options has: the mode of overlap where it is open, and which units
 * are late, where the options do not say it. Where the rates of lanes are known (options->sim, with
 * one for the operations), the turn is played at them with several choices, and the shortest step
 * is taken; else sw_turn_shape_pick_late() decides. 0 or -ENOMEM. */
int sw_turn_work_shape(struct sw_turn_shape *out, const struct sw_turn_work *w,
                       const struct sw_train_options *options, int stops_together);

#endif
