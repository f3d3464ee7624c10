/* engine/trainer_internal.h - the run's state, shared by the trainer's files: trainer.c (life),
 * trainer_memory.c (pools), trainer_store.c (the store and its commits), trainer_lanes.c (what each
 * task does), trainer_run.c (the loop, evaluation and saving).
 *
 * Ownership between threads: a step's record is set up by the trainer's thread before its turn is
 * pushed; each field is then written by one lane and read by lanes that wait for it, and by the
 * trainer's thread once it is finished. */
#ifndef ENGINE_TRAINER_INTERNAL_H
#define ENGINE_TRAINER_INTERNAL_H
#include "cpu_adam/adam.h"
#include "engine/executor.h"
#include "engine/llama.h"
#include "engine/throttle.h"
#include "engine/trace.h"
#include "engine/trainer.h"
#include "nvme/homes.h"
#include "offload/arena.h"
#include "offload/team.h"
#include "offload/topology.h"

#define SW_NO_COMMIT UINT64_MAX

enum { STEP_RECORDS = SW_RUNS_KEPT, RANGES_MAX = 2 * SW_TENSORS_PER_UNIT_MAX + 1 };

struct step_record {
    uint64_t step;
    double lr;
    /* Control lane's verdict. */
    struct sw_adam_step adam;
    int apply;
    double factor;
    uint64_t updates, skips_in_a_row; /* after this step */
    struct sw_step_report report;
    /* Batch. */
    uint64_t tokens;
    /* Accounting. */
    uint64_t busy_ns[SW_LANE_COUNT];
    atomic_uint tasks_left;
    uint64_t end_ns;     /* set by the task that ended last, before finished */
    atomic_int finished; /* the record is the trainer's thread's again */
    struct sw_run *run;
};

struct chunk_state {
    struct sw_adam_range ranges[RANGES_MAX]; /* where tensors begin and end */
    int range_count;
    uint32_t fresh_checksum; /* of what Adam left in the slot; adam lane, then write lane */
};

/* What comes down with a unit's gradient. */
struct unit_norms {
    double *block_sums; /* host, block_count */
    uint64_t block_count;
    struct sw_nonfinite bad;
};

struct eval_state {
    uint64_t next_row; /* data lane */
    double loss_sum;   /* control lane */
    uint64_t tokens;   /* data lane */
};

struct sw_trainer {
    struct sw_train_options options; /* resolved */
    struct sw_trainer_hooks hooks;
    struct sw_model model;
    struct sw_data data, val;
    int data_open, val_open;
    struct sw_topology topology;
    struct sw_team *team; /* Adam's; placed by the adam lane */
    struct sw_device_handle device;
    const struct sw_adam_variant *adam_variant;
    struct sw_adam_format format;
    char numerics_key[512];

    uint64_t *unit_elements;
    struct sw_placement_input input;
    struct sw_placement placement;
    struct sw_turn_shape shape;
    uint64_t step_rows, micro_tokens;

    /* Device memory: one allocation, carved. */
    char *device_base;
    uint64_t device_bytes, device_used;
    char **weights;              /* by unit */
    char *kept;                  /* [unit - 1][micro], activation_bytes each */
    char *between;               /* [micro]: the gradient between units */
    char *acc[SW_ACC_SLOTS + 1]; /* the last one is the tied embedding's */
    char *grad_slots[SW_GRAD_SLOTS];
    char **grad_resident;     /* by unit, when they stay on the device */
    double **block_sums;      /* by unit */
    struct sw_nonfinite *bad; /* by unit */
    double *loss_sums;        /* by micro */
    int32_t *batch_tokens, *batch_targets;
    uint8_t *batch_mask;
    struct sw_device_adam_step *device_step;
    char *device_state;
    struct sw_llama llama;

    /* Host memory. */
    struct sw_arena arena;
    char *host_state, **host_grads, *chunk_slots, *emit_slots;
    int32_t *stage_tokens, *stage_targets;
    uint8_t *stage_mask;
    struct unit_norms *norms; /* by unit */
    double *host_loss_sums;
    struct sw_device_adam_step host_step; /* staging of the device's scalars */
    struct chunk_state *chunks;

    struct sw_nvme_store *store;
    struct sw_nvme_queue *reader, *writer;                 /* of the lanes */
    struct sw_nvme_queue *idle[2];                         /* read, write: the trainer's thread's */
    struct sw_nvme_req requests[2][SW_LANE_IN_FLIGHT_MAX]; /* read, write; a ring each */
    uint32_t request_next[2];
    char store_mode[160];

    _Atomic uint64_t written_bytes; /* to the drives: records and commits */
    struct sw_journal *journal;     /* NULL: nothing is committed */
    struct sw_homes homes;
    char identity[SW_COMMIT_IDENTITY_BYTES];
    struct sw_commit resumed; /* the commit that this run goes on from */
    int resuming, finished;   /* finished: the model is saved, the store no longer needed */
    int done_before;          /* --resume found the result */
    uint64_t start_step;
    uint64_t committed_step; /* or SW_NO_COMMIT; commit lane, or the trainer's thread when idle */

    struct sw_turn first, second, steady, drain_first, drain, eval_first, eval_next;
    struct sw_executor *executor;
    struct sw_throttle throttle; /* between executor and lanes, when a rate is set */
    struct sw_trace *trace;      /* NULL: none */
    struct sw_stream *stream;    /* the trainer's thread's own */

    struct step_record records[STEP_RECORDS];
    uint32_t train_tasks, late_tasks; /* per step: in its own turn, in the next one */
    uint64_t updates;                 /* applied; control lane */
    uint32_t skips_in_a_row;          /* control lane */
    struct eval_state eval;
    uint64_t reported;      /* steps */
    uint64_t last_end_ns;   /* of the step before, or of the last pause */
    int out_made, out_held; /* held: a descriptor with the folder's lock, or -1 */
};

static inline struct step_record *sw_record(struct sw_trainer *t, uint64_t step) {
    return &t->records[step % STEP_RECORDS];
}

/* trainer_memory.c: sizes, allocation, filling. */
int sw_trainer_size(struct sw_trainer *t);
int sw_trainer_allocate(struct sw_trainer *t);
int sw_trainer_load(struct sw_trainer *t);
void sw_trainer_free_memory(struct sw_trainer *t);
/* Chunk c's state in this record; gradient and weight are left NULL. */
void sw_trainer_map(const struct sw_trainer *t, uint32_t c, void *record,
                    struct sw_adam_chunk *out);
/* A virgin chunk's record: the model's weights as masters, moments of zero, the rest zero. */
void sw_trainer_start_chunk(const struct sw_trainer *t, uint32_t c, void *record);

int sw_trainer_upload_piece(struct sw_trainer *t, uint32_t unit, uint64_t first, uint64_t count,
                            const float *values, sw_bf16 *rounded);

/* trainer_lanes.c: how much work a task is (as sw_work in engine/throttle.h). */
double sw_trainer_work(void *ctx, struct sw_run *run, const struct sw_task *task);

/* trainer_store.c: the order of a start is find, check, open, restore. */
int sw_trainer_find_commit(struct sw_trainer *t);
int sw_trainer_check_resume(struct sw_trainer *t);
int sw_trainer_open_store(struct sw_trainer *t);
/* values and rounded: room for `piece` weights. */
int sw_trainer_restore(struct sw_trainer *t, float *values, sw_bf16 *rounded, uint64_t piece);
void sw_trainer_close_store(struct sw_trainer *t);
const char *sw_trainer_store_folder(const struct sw_trainer *t);
/* Makes the newest state durable as that of `step`; all its writes are over. */
int sw_trainer_commit(struct sw_trainer *t, uint64_t step, uint64_t updates, uint64_t skips);
/* The same with idle lanes, for chunks of every tier; nothing when `step` is committed already. */
int sw_trainer_commit_idle(struct sw_trainer *t, uint64_t step);
/* Brings a chunk's record into `record`, from whichever tier; lanes are idle. */
int sw_trainer_read_record(struct sw_trainer *t, uint32_t c, void *record);
/* Compares the checksum of what was read from the chunk's newest home with that of what was
 * written: 0 or -EIO, reported with file, chunk and step. */
int sw_trainer_check_bytes(const struct sw_trainer *t, uint32_t c, uint64_t step, uint32_t have);

/* trainer_lanes.c */
extern const struct sw_executor_ops sw_trainer_lanes;
void sw_trainer_host_adam(const struct sw_device_adam_step *step,
                          const struct sw_device_adam_chunk *chunk, void *ctx);

/* A sw_model_fetch over the device's working weights, for the trainer's thread when lanes are idle.
 */
int sw_trainer_fetch(void *ctx, uint32_t unit, uint64_t first, uint64_t count, enum sw_dtype dtype,
                     void *out);

#endif
