/* engine/sizing.h - what a run's options ask of memory, as the input of a placement: for the
 * trainer before it allocates, and for a plan of a run that is never made.
 *
 * Pure functions of shapes and options. The device is asked for the sizes of its scratch memory and
 * for whether its memory is the host's, and for nothing else. */
#ifndef ENGINE_SIZING_H
#define ENGINE_SIZING_H
#include "base/block_norm.h"
#include "engine/llama.h"
#include "engine/model.h"
#include "engine/options.h"
#include "offload/placement.h"

/* What stays while placements are tried. Everything is the caller's. */
struct sw_sizing {
    const struct sw_model *model;
    const struct sw_device_handle *device;
    uint32_t shards, replicas, local_ranks; /* as in struct sw_placement_input */
    const uint64_t *shard_elements;         /* by unit, as sw_model_shards() gives them */
    const uint64_t *trained_elements;       /* likewise */
    uint64_t taken_bytes;   /* of the device's memory, by its context and libraries */
    uint64_t machine_bytes; /* of memory that this process may use; 0: any */
};

/* Fills `in` but for tiers and homes, which sw_budget_place() chooses. The device is apart from the
 * host's memory where o->device is not SW_DEVICE_HOST. */
void sw_sizing_input(const struct sw_sizing *sizing, const struct sw_train_options *o,
                     struct sw_placement_input *in);

/* A step so large that its bytes could not be counted is refused by what it takes at least; all
 * sums and products of smaller ones stay below 2^64. 0 or -ENOMEM, reported. */
int sw_sizing_check_step(const struct sw_model *model, const struct sw_train_options *o);

/* Freezes what o->freeze names, and tells a rank's elements of each unit, padded and trained, as
 * sw_model_shards() does; both arrays are the caller's to free(), in any case. 0 or -errno. */
int sw_sizing_cut(struct sw_model *model, const struct sw_train_options *o, uint32_t shards,
                  uint32_t replicas, uint64_t **shard_elements, uint64_t **trained_elements);

/* Norm blocks of a rank's trained elements of a unit, and the bytes of all units' sums. */
static inline uint64_t sw_sizing_blocks(uint64_t elements) {
    return (elements + SW_NORM_BLOCK - 1) / SW_NORM_BLOCK;
}
uint64_t sw_sizing_block_sum_bytes(const struct sw_model *model, const uint64_t *trained_elements);

/* Of a micro-batch of so many tokens: the FP32 gradient of the head's input, the softmax's sums. */
uint64_t sw_sizing_head_grad_bytes(const struct sw_model *model, uint64_t tokens);
uint64_t sw_sizing_head_stats_bytes(uint64_t tokens);

#endif
