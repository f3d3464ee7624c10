/* offload/placement.h - which bytes live where: the chunks of the optimizer state, the tiers of
 * weights, gradients and kept inputs, and the size of every pool, decided before anything is
 * loaded.
 *
 * A pure function of plain numbers: it reads no file and touches no device. What the byte table
 * says is what the run allocates. */
#ifndef OFFLOAD_PLACEMENT_H
#define OFFLOAD_PLACEMENT_H
#include <stddef.h>
#include <stdint.h>
#include "base/bf16.h"
#include "base/size.h"
#include "cpu_adam/adam.h"
#include "offload/tiers.h"
#include "offload/unit_order.h"

/* Pools whose slots are used in a circle. A use is opened by the task that fills it and closed by
 * its last reader. */
enum sw_ring {
    SW_RING_STATE,        /* host: optimizer records of NVMe chunks */
    SW_RING_EMIT,         /* host: updated weights of a chunk on their way to device or NVMe */
    SW_RING_WINDOW,       /* device: weights of a unit, streamed in */
    SW_RING_WEIGHT_STAGE, /* host: weights of a chunk on their way from NVMe */
    SW_RING_ACC,          /* device: FP32 gradient of a unit */
    SW_RING_ROUNDED,      /* device: rounded gradient of a span of chunks */
    SW_RING_GRAD_STAGE,   /* host: gradient of a chunk that does not wait in host memory */
    SW_RING_KEPT,         /* device: kept inputs of layers that do not stay there */
    SW_RING_KEPT_STAGE,   /* host: kept inputs on their way to and from NVMe */
    SW_RING_COUNT
};

/* A piece of a rank's shard of a unit: one record of cpu_adam/adam.h, with its weights and
 * gradients. A frozen one has weights alone. */
struct sw_chunk {
    uint32_t unit;
    int frozen;
    enum sw_tier tier;        /* of the optimizer state */
    enum sw_tier weight_tier; /* of the working weight */
    enum sw_tier grad_tier; /* where the rounded gradient waits; the device's if Adam runs there */
    uint64_t first, count;  /* elements of the shard; first is a multiple of SW_ADAM_BLOCK */
    uint64_t index; /* in the model, of what the first shard has at `first`; likewise a multiple */
    uint64_t record_bytes;  /* rounded up to 4 KiB */
    uint64_t record_offset; /* in its tier's pool of records (device, host); 0 on NVMe */
    uint64_t
        weight_offset;    /* in its tier's pool of weights, likewise; of the first shard if whole */
    uint64_t grad_offset; /* in its tier's pool of gradients, likewise */
    /* Gradients are rounded by spans of chunks that begin at a border of SW_NORM_BLOCK elements. */
    uint32_t span_first, span_end; /* chunks */
};

struct sw_placement_input {
    struct sw_unit_order order;
    uint32_t micro_count;
    /* Ranks of a group, each with an equal piece of every unit; 1: alone. Everything here is one
     * rank's, but for slots and accumulators, which hold whole units. */
    uint32_t shards;
    uint32_t replicas; /* ranks that have the same shard */
    /* Of this process: the byte table has their host memory and files together. */
    uint32_t local_ranks;
    int whole_weights; /* weights that stay on the device are there whole, on each rank */
    /* Of a rank's shard, with padding: all elements, and the trained ones, which come first (NULL:
     * all are trained). */
    const uint64_t *unit_elements, *unit_trained;
    struct sw_adam_format format; /* .weight and .grad are the run's dtypes */
    /* Weights lie on the device whole or not at all; where Adam runs on the device they do. */
    struct sw_tiers optimizer, params, gradients, activations;
    uint32_t checkpoint_every;   /* layers from one kept input to the next */
    uint32_t homes;              /* on disk, of every chunk: 0, 1 (scratch) or 2 (with commits) */
    uint64_t chunk_bytes;        /* of a record; at least SW_CHUNK_BYTES_MIN */
    uint64_t activation_bytes;   /* one unit input of one micro-batch */
    uint64_t head_bytes;         /* the head's FP32 gradient and statistics of one micro-batch */
    uint64_t workspace_bytes[2]; /* of the compute lane: the head in parts, or whole */
    uint64_t batch_bytes;        /* token ids, targets, masks, starts of documents of one step */
    int layers_read_batch;       /* which is where documents begin */
    uint64_t program_bytes;      /* of the host's memory: turns, tables, libraries */
    uint64_t task_bytes;         /* and for each task that a turn has for every micro-batch */
    /* What the pools of a tier may take; 0: no limit. Rings become shorter to fit. */
    uint64_t budget_bytes[SW_TIER_COUNT];
    /* Steps towards shorter rings that are taken in any case, as another placement took them. */
    uint8_t give_up[SW_TIER_COUNT];
    uint64_t taken_bytes;   /* of the device's memory, by its context and libraries */
    uint64_t machine_bytes; /* of host memory that this process may use; 0: no limit */
    int device_is_apart;    /* the devices' memory is their own, none of the host's */
};

#define SW_CHUNK_BYTES_MIN 12288u

/* The longest rings, when there is room for them. */
enum {
    SW_STATE_SLOTS_MIN = 6,
    SW_STATE_SLOTS_MAX = 64,
    SW_EMIT_SLOTS = 6,
    SW_WINDOW_SLOTS = 3,
    SW_WEIGHT_STAGE_SLOTS = 8,
    SW_ACC_SLOTS = 2,
    SW_ROUNDED_SLOTS = 4,
    SW_GRAD_STAGE_SLOTS = 8,
    SW_KEPT_STAGE_SLOTS = 4
};

/* A kept input of one micro-batch. */
struct sw_kept {
    enum sw_tier tier;
    uint64_t offset; /* in its tier's pool; 0 on NVMe */
};

/* Shares are percentages, so dealing repeats after so many. */
enum { SW_DEAL_PERIOD = 100 };

struct sw_placement {
    struct sw_unit_order order;
    uint32_t micro_count, checkpoint_every; /* at most the number of layers */
    uint32_t shards, replicas;
    int whole_weights; /* shards > 1, and weights stay on the device, those of all shards */
    int layers_read_batch;
    uint32_t chunk_count;
    struct sw_chunk *chunks;    /* by unit, ascending */
    uint32_t *unit_first_chunk; /* unit_count + 1 entries */
    uint32_t *unit_trained_end; /* the chunk behind a unit's trained ones, by unit */
    uint32_t backward_end;      /* the lowest unit that backward comes to; behind the norm: none */
    uint64_t *unit_weight_offset; /* in the device's pool of weights, by unit */

    uint32_t kept_groups; /* of checkpoint_every layers, each with one kept input per micro-batch */
    struct sw_tiers kept_shares; /* how those are dealt out, and the first of them */
    uint8_t kept_tier[SW_DEAL_PERIOD], kept_before[SW_DEAL_PERIOD]; /* of the same tier */
    uint64_t kept_input_bytes;

    uint32_t ring_slots[SW_RING_COUNT];
    uint64_t ring_slot_bytes[SW_RING_COUNT];
    uint8_t given_up[SW_TIER_COUNT]; /* steps towards shorter rings, to fit the tier's budget */
    int head_whole; /* logits, weights and accumulators of all parts of the head at once */
    uint64_t head_acc_offset[SW_PARTS_MAX +
                             1]; /* by part, in the head's accumulators; the last is their size */

    uint64_t state_bytes[SW_TIER_COUNT]; /* records per tier, one home each */
    uint64_t weight_bytes[SW_TIER_COUNT], grad_bytes[SW_TIER_COUNT], kept_bytes[SW_TIER_COUNT];
    uint64_t group_bytes; /* inputs inside a group, recomputed in backward */
    uint64_t store_bytes; /* on disk: records in all homes, and what else lies on NVMe */
};

/* One line of the byte table. */
struct sw_byte_row {
    const char *what;
    enum sw_tier tier;
    uint64_t bytes;
};
enum { SW_BYTE_ROWS_MAX = 40 };

/* Elements of a unit's equal shards; where there are several ranks, of whole blocks, as many as
 * every replica of a shard sums an equal piece. */
static inline uint64_t sw_placement_shard(uint64_t elements, uint32_t shards, uint32_t replicas) {
    if (shards * replicas == 1) return elements;
    return sw_round_up((elements + shards - 1) / shards, (uint64_t)replicas * SW_ADAM_BLOCK);
}

/* How many chunks that will be. */
uint64_t sw_placement_chunks(const struct sw_placement_input *input);

/* 0 or -ENOMEM. Frees with sw_placement_free(). Budgets are honoured as far as shorter rings can:
 * whether all fits, sw_placement_bytes() tells. */
int sw_placement_build(struct sw_placement *placement, const struct sw_placement_input *input);
void sw_placement_free(struct sw_placement *placement);

/* Whether a unit has anything to train. */
static inline int sw_placement_trains(const struct sw_placement *p, uint32_t unit) {
    return p->unit_trained_end[unit] > p->unit_first_chunk[unit];
}
/* Whether the head makes the gradient of its input. */
static inline int sw_placement_head_has_dx(const struct sw_placement *p) {
    return p->backward_end <= sw_order_norm(&p->order);
}
/* The layers of a group (counted from 0) are [*first, *first + *count), and those from *backward on
 * have a backward pass: none where that is their end. */
void sw_placement_group_layers(const struct sw_placement *p, uint32_t group, uint32_t *first,
                               uint32_t *count, uint32_t *backward);
/* The first group whose kept inputs backward needs; those before it need none. */
uint32_t sw_placement_first_needed(const struct sw_placement *p);

/* Where the kept input lies that is the index-th by group, then by micro-batch. */
struct sw_kept sw_placement_kept(const struct sw_placement *placement, uint64_t index);

/* Tasks of a training turn that are there for each micro-batch, of all micro-batches together. */
uint64_t sw_placement_micro_tasks(const struct sw_placement *placement);

/* What the process takes of the host's memory beside its pools. */
uint64_t sw_placement_program_bytes(const struct sw_placement *placement,
                                    const struct sw_placement_input *input);

/* Fills the byte table: the device's rows for one rank, the others for all of the process. Returns
 * the number of rows. */
int sw_placement_table(const struct sw_placement *placement, const struct sw_placement_input *input,
                       struct sw_byte_row rows[SW_BYTE_ROWS_MAX]);

/* The sum of a tier's rows. */
uint64_t sw_placement_bytes(const struct sw_byte_row *rows, int row_count, enum sw_tier tier);

/* The layers that share a kept input: the group of a layer (counted from 0) and its place there. */
static inline uint32_t sw_placement_group(const struct sw_placement *p, uint32_t layer) {
    return layer / p->checkpoint_every;
}
static inline uint32_t sw_placement_place(const struct sw_placement *p, uint32_t layer) {
    return layer % p->checkpoint_every;
}

#endif
