/* offload/placement.h - which bytes live where: the chunks of the optimizer state and the size of
 * every pool, decided before anything is loaded.
 *
 * A pure function of plain numbers: it reads no file and touches no device. What the byte table
 * says is what the run allocates. */
#ifndef OFFLOAD_PLACEMENT_H
#define OFFLOAD_PLACEMENT_H
#include <stddef.h>
#include <stdint.h>
#include "base/bf16.h"
#include "cpu_adam/adam.h"

enum sw_tier { SW_TIER_DEVICE, SW_TIER_HOST, SW_TIER_NVME, SW_TIER_COUNT };

const char *sw_tier_name(enum sw_tier tier);

/* A piece of a unit's optimizer state: one record of cpu_adam/adam.h. */
struct sw_chunk {
    uint32_t unit;
    enum sw_tier tier;
    uint64_t first, count;  /* elements of the unit; first is a multiple of SW_ADAM_BLOCK */
    uint64_t index;         /* of the first element in the model, likewise */
    uint64_t record_bytes;  /* rounded up to 4 KiB */
    uint64_t record_offset; /* in its tier's pool of records (device, host); 0 on NVMe */
};

struct sw_placement_input {
    uint32_t unit_count, micro_count;
    const uint64_t *unit_elements; /* with padding */
    int tied;                      /* unit 0's accumulator is its own */
    struct sw_adam_format format;  /* .weight and .grad are the run's dtypes */
    enum sw_tier optimizer;
    uint32_t homes;            /* on disk, of every chunk: 0, 1 (scratch) or 2 (with commits) */
    uint64_t chunk_bytes;      /* of a record; at least SW_CHUNK_BYTES_MIN */
    uint64_t activation_bytes; /* one unit input of one micro-batch */
    uint64_t workspace_bytes;  /* of the compute lane */
    uint64_t batch_bytes;      /* token ids, targets and masks of one step */
};

#define SW_CHUNK_BYTES_MIN 12288u

enum {
    SW_ACC_SLOTS = 2,
    SW_GRAD_SLOTS = 2,
    SW_CHUNK_SLOTS_MIN = 6,
    SW_CHUNK_SLOTS_MAX = 64,
    SW_EMIT_SLOTS_MAX = 6
};

struct sw_placement {
    uint32_t unit_count;
    uint32_t chunk_count;
    struct sw_chunk *chunks;    /* by unit, ascending */
    uint32_t *unit_first_chunk; /* unit_count + 1 entries */

    uint32_t chunk_slots, emit_slots; /* rings for NVMe chunks and for weights on their way up */
    uint64_t chunk_slot_bytes, emit_slot_bytes;
    uint64_t acc_slot_bytes;  /* FP32 accumulators; SW_ACC_SLOTS of them */
    uint64_t tied_acc_bytes;  /* the tied embedding's own; 0 when untied */
    uint64_t grad_slot_bytes; /* rounded gradients on the device; SW_GRAD_SLOTS of them, unless */
    uint64_t grad_resident_bytes;        /* they stay on the device: all units */
    uint64_t state_bytes[SW_TIER_COUNT]; /* records per tier, one home each */
    uint64_t store_bytes;                /* on disk, all homes */
};

/* One line of the byte table. */
struct sw_byte_row {
    const char *what;
    enum sw_tier tier;
    uint64_t bytes;
};
enum { SW_BYTE_ROWS_MAX = 24 };

/* 0 or -ENOMEM. Frees with sw_placement_free(). */
int sw_placement_build(struct sw_placement *placement, const struct sw_placement_input *input);
void sw_placement_free(struct sw_placement *placement);

/* Fills the byte table; returns the number of rows. */
int sw_placement_table(const struct sw_placement *placement, const struct sw_placement_input *input,
                       struct sw_byte_row rows[SW_BYTE_ROWS_MAX]);

/* The sum of a tier's rows. */
uint64_t sw_placement_bytes(const struct sw_byte_row *rows, int row_count, enum sw_tier tier);

#endif
