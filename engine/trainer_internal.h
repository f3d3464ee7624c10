/* engine/trainer_internal.h - the run's state, shared by the trainer's files: trainer.c (life),
 * trainer_devices.c (devices), trainer_groups.c (what ranks do together), trainer_memory.c (pools),
 * trainer_load.c (what they begin with, and weights in and out of their tiers), trainer_store.c
 * (the store and its commits), trainer_result.c (a result that is there), trainer_agree.c (one run
 * for all processes), trainer_import.c (a begin from an export), trainer_spill.c (what else is on
 * NVMe), trainer_lanes.c and trainer_compute.c (what each task does), trainer_run.c (the loop,
 * evaluation and saving).
 *
 * Ownership between threads: a step's record is set up by the trainer's thread before its turn is
 * pushed; each field is then written by one lane and read by lanes that wait for it, and by the
 * trainer's thread once it is finished. */
#ifndef ENGINE_TRAINER_INTERNAL_H
#define ENGINE_TRAINER_INTERNAL_H
#include <assert.h>
#include <limits.h>
#include <pthread.h>
#include "base/size.h"
#include "cpu_adam/adam.h"
#include "engine/drives.h"
#include "engine/budget.h"
#include "engine/collective.h"
#include "engine/executor.h"
#include "engine/identity.h"
#include "engine/import.h"
#include "engine/llama.h"
#include "engine/pin.h"
#include "engine/process_name.h"
#include "engine/sizing.h"
#include "engine/throttle.h"
#include "engine/trace.h"
#include "engine/trainer.h"
#include "engine/turn_work.h"
#include "engine/world.h"
#include "nvme/homes.h"
#include "offload/arena.h"
#include "offload/core_share.h"
#include "offload/rank_nodes.h"
#include "offload/team.h"
#include "offload/topology.h"

#define SW_NO_COMMIT UINT64_MAX

enum { STEP_RECORDS = SW_RUNS_KEPT, RANGES_MAX = 2 * SW_TENSORS_PER_UNIT_MAX + 1 };

struct sw_trainer;
struct sw_rank;
struct sw_direct; /* trainer_direct.c */

struct step_record {
    uint64_t step;
    double lr;
    /* Control lane's verdict. */
    struct sw_adam_step adam;
    int apply;
    int stop; /* some process was asked to, by this signal: no step after this one */
    double factor;
    uint64_t updates, skips_in_a_row; /* after this step */
    struct sw_step_report report;
    /* Batch. */
    uint64_t tokens;
    /* Accounting. */
    uint64_t busy_ns[SW_RANKS_MAX][SW_LANE_COUNT];
    uint64_t bytes[SW_RANKS_MAX][SW_BYTES_COUNT];
    atomic_uint tasks_left;
    _Atomic uint64_t end_ns; /* the latest of its tasks' */
    atomic_int finished;     /* the record is the trainer's thread's again */
    struct sw_run *run;
};

/* What a rank contributes to the verdict over a step. */
struct rank_verdict {
    double loss, squared; /* sums over its tokens, and over its shards' gradients */
    int64_t bad_unit;     /* with a gradient that is not finite, or -1 */
    struct sw_nonfinite bad;
    int64_t stop; /* the signal that its process was asked by; 0: it was not */
};

/* Between the processes of a run: each for one thread at a time. */
enum channel { CHANNEL_MAIN, CHANNEL_CONTROL, CHANNEL_COMMIT, CHANNEL_COUNT };

struct chunk_state {
    struct sw_adam_range ranges[RANGES_MAX]; /* where tensors begin and end */
    int range_count;
    uint32_t fresh_checksum; /* of what Adam left in the slot; adam lane, then write lane */
};

/* What comes down with a unit's gradient. */
struct unit_norms {
    double *block_sums; /* host, block_count */
    uint64_t block_count;
};

/* What lies on NVMe for the length of the run, beside the optimizer's store: files without a second
 * home, dropped at the end. */
enum spill { SPILL_WEIGHTS, SPILL_GRADS, SPILL_KEPT, SPILL_COUNT };

struct spill_store {
    struct sw_nvme_store *store;           /* NULL: nothing of it is on NVMe */
    struct sw_nvme_queue *reader, *writer; /* of the lanes */
    struct sw_nvme_queue *idle[2];         /* read, write: the trainer's thread's */
    uint32_t *record_of;                   /* by sw_spill_index() */
    uint32_t *checksums;                   /* by record: CRC-32C of what was written */
    uint64_t *bytes;                       /* by record, not rounded up */
};

/* A transfer of an NVMe lane. */
struct lane_request {
    struct sw_nvme_req req;
    struct sw_nvme_queue *queue;
    struct spill_store *spill; /* NULL: an optimizer record */
    struct step_record *record;
    struct sw_rank *rank;
    uint32_t unit;
};

struct eval_state {
    uint64_t next_row; /* data lane */
    double loss_sum;   /* control lane */
    uint64_t tokens;   /* data lane */
};

/* One rank: its device and what it holds of every unit. All ranks have the same placement. */
struct sw_rank {
    struct sw_trainer *t;
    uint32_t index; /* of the process's ranks */
    uint32_t shard; /* of every unit: which one is this rank's */
    struct sw_device_handle device;
    struct sw_stream *stream;                 /* the trainer's thread's own */
    struct sw_stream *lanes[SW_DEVICE_LANES]; /* the executor's lanes' */
    struct sw_comm_handle comm;               /* of the ranks that share out every unit */
    struct sw_comm_handle across;             /* of those with the same shard, in other processes */

    /* Device memory: one allocation, carved. */
    char *device_base;
    uint64_t device_bytes, device_used;
    char *rings[SW_RING_COUNT];              /* on their side of the border */
    char *weights;                           /* of all units, where they stay */
    char *kept, *group;                      /* kept inputs that stay; inputs inside a group */
    char *norm_input, *head_input, *between; /* [micro], activation_bytes each */
    float *head_grad, *stats;                /* [micro][tokens][hidden], [micro][tokens][3] */
    char *head_acc;                          /* by part, where the head is whole */
    char *grads;                             /* that wait on the device */
    double **block_sums;                     /* by unit */
    struct sw_nonfinite *bad;                /* by chunk: the first of each span counts */
    double *loss_sums;                       /* by micro */
    int32_t *batch_tokens, *batch_targets;
    uint8_t *batch_mask;
    uint32_t *batch_starts; /* of documents; NULL without */
    struct sw_device_adam_step *device_step;
    char *device_state;
    struct sw_llama llama;

    /* Host memory: its part of the process's. */
    char *host_weights, *host_state, *host_grads, *host_kept;
    int32_t *stage_tokens, *stage_targets;
    uint8_t *stage_mask;
    uint32_t *stage_starts;
    struct unit_norms *norms; /* by unit */
    char *landing;            /* pinned: what comes down beside gradients, as follows */
    uint64_t landing_bytes;
    struct sw_nonfinite *host_bad;
    double *host_loss_sums;
    struct sw_device_adam_step host_step; /* staging of the device's scalars */
    struct chunk_state *chunks;
};

struct sw_trainer {
    struct sw_train_options options; /* resolved */
    struct sw_trainer_hooks hooks;
    struct sw_model model;
    struct sw_data data, val;
    int data_open, val_open;
    struct sw_topology topology;
    struct sw_rank_nodes nodes;          /* of the ranks: an adam lane for each */
    struct sw_team *teams[SW_NODES_MAX]; /* of the adam lanes, each placed by its own */
    struct sw_core_share *cores;         /* of the ranks' device lanes */
    const struct sw_adam_variant *adam_variant;
    struct sw_adam_format format;
    struct sw_identity run;

    /* By unit: of a rank's shard, with padding, all elements, and the trained ones, which come
     * first. */
    uint64_t *shard_elements, *trained_elements;
    struct sw_placement_input input;
    struct sw_placement placement;
    struct sw_turn_work work; /* of tasks, when nothing is skipped */
    struct sw_turn_shape shape;
    uint64_t step_rows, rank_rows, micro_tokens; /* rows: of a step, and each rank's of them */
    struct sw_rank *ranks;
    uint32_t rank_count;    /* in this process */
    struct sw_world *world; /* the processes of the run; NULL: this one alone */
    struct sw_comm_handle channels[CHANNEL_COUNT];
    uint32_t world_ranks, first_rank; /* of all processes; the first one here */
    uint32_t first_gpu;               /* this process's, of those that it sees */
    uint32_t machines;                /* that GPUs of several processes are on; else 0 */
    uint32_t shards, replicas;        /* world_ranks in all */
    int stop_agreed; /* the signal that some process was asked to stop by; 0: none was */
    int failed;
    struct rank_verdict verdicts[SW_RANKS_MAX]; /* by rank; control lane */
    struct sw_arena arena; /* host memory; a pool of one kind lies together for all ranks */
    struct sw_pins pins;   /* of it, and what lands beside it */
    uint64_t taken_bytes;  /* of a device's memory, before the run's pools; of the fullest */

    char *weight_buffer;    /* of a chunk, for loading and saving; the trainer's thread's */
    uint64_t loaded_bytes;  /* of weights and records, into their tiers */
    uint64_t saved_bytes;   /* of the save under way */
    uint32_t fetched_chunk; /* whose weights are in it, from NVMe; UINT32_MAX: none */

    struct sw_nvme_store *store;
    struct sw_nvme_queue *reader, *writer; /* of the lanes */
    struct sw_nvme_queue *idle[2];         /* read, write: the trainer's thread's */
    struct spill_store spills[SPILL_COUNT];
    struct sw_direct *direct; /* GPUs read weights by themselves; NULL: the host does */
    /* Read, write: a ring each, in the order in which they were started. */
    struct lane_request requests[2][SW_LANE_IN_FLIGHT_MAX];
    uint32_t request_next[2], request_first[2];
    int store_begun, told_missing;
    char store_mode[160];
    struct sw_drives drives; /* as the store uses them */

    _Atomic uint64_t written_bytes; /* to the drives: records and commits */
    struct sw_journal *journal;     /* NULL: nothing is committed */
    struct sw_homes homes;
    char identity[SW_COMMIT_IDENTITY_BYTES];
    struct sw_commit resumed; /* the commit that this run goes on from */
    uint64_t run_id;          /* of this run and all that resume it, the same in all processes */
    int resuming, finished;   /* finished: the model is saved, the store no longer needed */
    int done_before;          /* --resume found the result */
    struct sw_import *import; /* what the run begins with, until it is loaded; NULL: nothing */
    uint64_t start_step;
    /* Or SW_NO_COMMIT; commit lane, or the trainer's thread when idle: of all processes, and of
     * this one, whose record may be on its drive while another's is not yet. */
    uint64_t committed_step, durable_step;

    struct sw_turn first, second, steady, drain_first, drain, eval_first, eval_next;
    struct sw_executor *executor;
    pthread_mutex_t executor_lock; /* whoever ends it, and a thread of the ranks' that aborts it */
    int executor_closes;
    struct sw_throttle throttle; /* between executor and lanes, when a rate is set */
    struct sw_trace *trace;      /* NULL: none */

    struct step_record records[STEP_RECORDS];
    uint32_t train_tasks, late_tasks; /* per step: in its own turn, not the first; in the next */
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

/* The signal, or 0. */
static inline int sw_stop_asked(const struct sw_trainer *t) {
    return t->hooks.stop ? atomic_load(t->hooks.stop) : 0;
}

static inline void sw_trainer_progress(const struct sw_trainer *t, enum sw_beside_steps work,
                                       uint64_t done, uint64_t total) {
    if (t->hooks.on_progress) t->hooks.on_progress(t->hooks.ctx, work, done, total);
}

/* ---- where a task's things are ---- */

/* What the head has of each micro-batch of so many tokens: the FP32 gradient of its input, and the
 * statistics of the softmax. */
static inline uint64_t sw_head_grad_bytes(const struct sw_trainer *t, uint64_t tokens) {
    return sw_sizing_head_grad_bytes(&t->model, tokens);
}

static inline uint64_t sw_head_stats_bytes(uint64_t tokens) {
    return sw_sizing_head_stats_bytes(tokens);
}

static inline const struct sw_chunk *sw_chunk_of(const struct sw_trainer *t,
                                                 const struct sw_task *task) {
    return &t->placement.chunks[task->chunk];
}

static inline char *sw_slot_at(const struct sw_rank *r, const struct sw_run *run, enum sw_ring ring,
                               int32_t position) {
    const struct sw_trainer *t = r->t;
    assert(position >= 0);
    const uint64_t slot =
        (run->ring_base[ring] + (uint64_t)position) % t->placement.ring_slots[ring];
    return r->rings[ring] + slot * t->placement.ring_slot_bytes[ring];
}

static inline char *sw_slot(const struct sw_rank *r, const struct sw_run *run,
                            const struct sw_task *task, enum sw_ring ring) {
    return sw_slot_at(r, run, ring, task->at[ring]);
}

/* Over what an earlier run left, and without a commit of it. */
static inline int sw_starts_anew(const struct sw_trainer *t) {
    return (t->options.restart || t->options.resume) && !t->resuming;
}

static inline uint64_t sw_kept_index(const struct sw_trainer *t, uint32_t unit, uint32_t micro) {
    const uint32_t layer = unit - t->model.parts;
    return (uint64_t)sw_placement_group(&t->placement, layer) * t->options.accumulate + micro;
}

static inline struct step_record *sw_record_of(struct sw_trainer *t, const struct sw_run *run,
                                               const struct sw_task *task) {
    return sw_record(t, run->step - task->late);
}

/* Whether the step that a task belongs to was cancelled before it began: then the task does
 * nothing. */
static inline int sw_is_cancelled(const struct sw_run *run, const struct sw_task *task) {
    if (task->late) return run->before && atomic_load(&run->before->cancelled);
    return atomic_load(&run->cancelled);
}

static inline uint64_t *sw_bytes_of(const struct sw_rank *r, struct sw_run *run,
                                    const struct sw_task *task) {
    return &run->bytes[sw_run_at(run, task, r->index)];
}

/* A unit is shared out in two pieces, what is trained and, behind all shards of that, what is
 * frozen. A piece of a rank's shard: [first, first + count) of the unit, and of its shard from
 * `local` on. Either may be empty. */
enum { SW_PIECES = 2 };
struct sw_piece {
    uint64_t first, count, local;
};
static inline struct sw_piece sw_piece_of(const struct sw_trainer *t, uint32_t shard, uint32_t unit,
                                          int frozen) {
    const uint64_t trained = t->trained_elements[unit];
    const uint64_t rest = t->shard_elements[unit] - trained;
    if (!frozen) return (struct sw_piece){shard * trained, trained, 0};
    return (struct sw_piece){t->placement.shards * trained + shard * rest, rest, trained};
}

/* Where a chunk begins in its unit. */
static inline uint64_t sw_chunk_begin(const struct sw_rank *r, const struct sw_chunk *chunk) {
    const struct sw_piece piece = sw_piece_of(r->t, r->shard, chunk->unit, chunk->frozen);
    return piece.first + chunk->first - piece.local;
}

/* A chunk's number in the store, where every rank's are. */
static inline uint32_t sw_store_chunk(const struct sw_rank *r, uint32_t chunk) {
    return chunk * r->t->rank_count + r->index;
}

static inline uint32_t sw_trainer_store_chunks(const struct sw_trainer *t) {
    return t->placement.chunk_count * t->rank_count;
}

/* Where a chunk's weights are on the device when they stay there. */
static inline char *sw_weights_at(const struct sw_rank *r, const struct sw_chunk *chunk) {
    const struct sw_placement *p = &r->t->placement;
    const uint64_t element = sw_dtype_bytes(r->t->options.dtype);
    if (!p->whole_weights) return r->weights + chunk->weight_offset;
    return r->weights + p->unit_weight_offset[chunk->unit] + sw_chunk_begin(r, chunk) * element;
}

/* ---- the files ---- */

/* trainer_devices.c: opens the ranks' devices and makes them ready, up to their first calls of each
 * kind, and measures what that has left. */
int sw_trainer_open_devices(struct sw_trainer *t);
void sw_trainer_list_devices(const struct sw_trainer *t, struct sw_device_handle *devices);
/* From 1 to 0 the devices are asked for nothing but a run's work (settle of kernels/device.h). */
void sw_trainer_settle(struct sw_trainer *t, int settled);
void sw_trainer_close_devices(struct sw_trainer *t);

/* trainer_groups.c: whether all processes train on the same kind of device; this one's GPUs, of
 * `count` that it sees; and, once they are open, whether no GPU has two ranks. Reported. */
int sw_trainer_agree_on_kind(struct sw_trainer *t);
int sw_trainer_choose_gpus(struct sw_trainer *t, uint32_t count);
int sw_trainer_compare_gpus(struct sw_trainer *t);
/* How GPUs meet, and a try of it. */
int sw_trainer_open_gpu_group(struct sw_trainer *t);
/* How ranks of the host device meet, last of all: processes wait for each other there. */
int sw_trainer_open_group(struct sw_trainer *t);
void sw_trainer_close_groups(const struct sw_rank *r);

/* trainer_memory.c: what ranks have of every unit, before there are devices; sizes; allocation. */
int sw_trainer_cut(struct sw_trainer *t);
int sw_trainer_size(struct sw_trainer *t);
/* Sizes the run as these options would have it, chooses what they leave open and builds its
 * placement, which is the caller's to free also after -ENOSPC (it does not fit: shortfall). */
int sw_trainer_try(struct sw_trainer *t, struct sw_train_options *options,
                   struct sw_placement *placement, struct sw_placement_input *input,
                   struct sw_shortfall *shortfall);

/* trainer_refuse.c: reports a run that does not fit, and looks for options with which it would.
 * asked: the options before anything was chosen. Returns -ENOMEM. */
int sw_trainer_refuse(struct sw_trainer *t, const struct sw_train_options *asked,
                      const struct sw_shortfall *shortfall);
int sw_trainer_allocate(struct sw_trainer *t);
void sw_trainer_free_memory(struct sw_trainer *t);
/* Chunk c's state in this record; gradient and weight are left NULL. */
void sw_trainer_map(const struct sw_rank *r, uint32_t c, void *record, struct sw_adam_chunk *out);
/* Bytes of a chunk's weights. */
uint64_t sw_trainer_weight_bytes(const struct sw_trainer *t, uint32_t c);

/* trainer_world.c: what processes do together. Alone all of it is nothing, or a copy. */
int sw_trainer_open_world(struct sw_trainer *t);
/* all [processes][bytes] = every process's `mine`; bytes 0 waits for all. */
int sw_trainer_share(struct sw_trainer *t, enum channel channel, void *all, const void *mine,
                     uint64_t bytes);
/* The signal that a stop was asked for by, in any process, or 0: the trainer's thread, in all
 * processes alike; of several signals the largest counts everywhere. While steps run the verdicts
 * over them tell (sw_trainer_stops_before). */
int sw_trainer_stop(struct sw_trainer *t);
/* Whether, and by which signal, the run stops before this step of a stretch that began with `from`:
 * decided in all
 * processes alike by the verdict over the step before, which is there. */
int sw_trainer_stops_before(const struct sw_trainer *t, uint64_t from, uint64_t step);
/* What a process finds of its store. */
struct store_left {
    uint64_t step, number;       /* of its last commit; SW_NO_COMMIT and 0: it has none */
    uint64_t has_journal;        /* a file for commits is there */
    uint64_t run;                /* that the commit is of, as the next two */
    uint32_t process, processes; /* see struct sw_commit */
};
/* The step that all stores have a commit of; SW_NO_COMMIT where one has none because the run ended
 * in its first. Where a part is lost that the others' commits belong to, or is not this run's of
 * this process: -EINVAL, reported by who lacks it, or has it. */
int sw_trainer_common_step(struct sw_trainer *t, const struct store_left *mine, uint64_t *common);
/* The first process saves and hashes; the others hand it what they have until it is done. */
int sw_trainer_serve(struct sw_trainer *t);
int sw_trainer_end_serving(struct sw_trainer *t, int ret);
/* In the first process: weights, and records, of ranks of other processes. */
int sw_trainer_fetch_remote(struct sw_trainer *t, uint32_t rank, uint32_t unit, uint64_t first,
                            uint64_t end, void *out);
int sw_trainer_record_remote(struct sw_trainer *t, uint32_t rank, uint32_t chunk, void *record);
/* Whether another process than the first can write its trace where it would; errors name that and
 * what the user gave. */
int sw_trainer_check_trace(const struct sw_trainer *t);
/* What this process's store of that name is called (process_name.h). */
const char *sw_trainer_name(const struct sw_trainer *t, const char *name,
                            char out[SW_PROCESS_NAME_BYTES]);

/* trainer_agree.c: whether all processes were asked for the same run, first what they do before
 * they can compare the rest. The first difference is reported, with both processes and their hosts.
 */
int sw_trainer_agree_to_meet(struct sw_trainer *t);
int sw_trainer_agree(struct sw_trainer *t);

/* trainer_load.c: filling, and a chunk's weights in and out of their tier with idle lanes. 1: a
 * stop was asked for meanwhile. */
int sw_trainer_load(struct sw_trainer *t);
/* A virgin chunk's record: the model's weights as masters, moments of zero, the rest zero. */
void sw_trainer_start_chunk(const struct sw_rank *r, uint32_t c, void *record);
/* Rounds the masters of a record to the working type. */
void sw_trainer_round_masters(const struct sw_rank *r, uint32_t c, void *record, void *weights);
/* Puts the weights of t->weight_buffer where the chunk's are kept. */
int sw_trainer_put_weights(struct sw_rank *r, uint32_t c);
/* A sw_model_fetch over the working weights, wherever they are. */
/* Elements [first, end) of a rank's shard of a unit. */
int sw_trainer_fetch_shard(struct sw_rank *r, uint32_t unit, uint64_t first, uint64_t end,
                           void *out);
int sw_trainer_fetch(void *ctx, uint32_t unit, uint64_t first, uint64_t count, enum sw_dtype dtype,
                     void *out);

/* trainer_direct.c: lets the ranks' devices read the weights' store, where they can; its records.
 */
int sw_trainer_open_direct(struct sw_trainer *t, uint32_t records);
void sw_trainer_close_direct(struct sw_trainer *t);
/* A record is about to be written; by its writer. */
void sw_direct_wrote(struct sw_trainer *t, uint32_t record, const void *data);
/* Into the device's memory, behind what is on the stream; compared with what was written. */
int sw_direct_load(struct sw_rank *r, const struct sw_run *run, struct step_record *step,
                   uint32_t record, void *dst, struct sw_stream *stream);

/* trainer_spill.c */
int sw_trainer_open_spills(struct sw_trainer *t);
void sw_trainer_close_spills(struct sw_trainer *t);
/* Removes the files that a killed run left of what this one keeps elsewhere; those that are open
 * stay. */
void sw_trainer_drop_scratch(const struct sw_trainer *t);
/* Moves a record with idle lanes; checksums are made and compared. */
int sw_spill_move(struct sw_trainer *t, enum spill spill, uint64_t index, int write, void *buffer);
/* Where the spills' tables have a rank's chunk, or group and micro-batch. */
uint64_t sw_spill_index(const struct sw_rank *r, uint64_t index);
/* What a lane's request was asked to move is what was written: 0 or -EIO, reported. */
int sw_spill_check(const struct sw_trainer *t, const struct lane_request *request);

/* trainer_compute.c: the tasks of the model. */
int sw_trainer_compute(struct sw_rank *r, struct sw_run *run, const struct sw_task *task,
                       struct sw_stream *stream);

/* trainer_run.c: tasks of a turn, late ones or the others, for all ranks together. */
uint32_t sw_trainer_count_tasks(const struct sw_trainer *t, const struct sw_turn *turn, int late);

/* trainer_lanes.c: how much work a task is (as sw_work in engine/throttle.h). */
double sw_trainer_work(void *ctx, struct sw_run *run, const struct sw_task *task);

/* trainer_store.c: the order of a start is find, check, open, restore chunks, go on. */
int sw_trainer_find_commit(struct sw_trainer *t);
int sw_trainer_check_resume(struct sw_trainer *t);
int sw_trainer_open_store(struct sw_trainer *t);
/* Once nothing can be refused any more: a run that starts anew forgets what was committed. */
int sw_trainer_begin_store(struct sw_trainer *t);
/* Whether the commit that this run goes on from has a record of chunk c. */
int sw_trainer_is_committed(const struct sw_rank *r, uint32_t c);
/* Puts it into its tier and its masters, rounded, where the weights are kept; record: a slot's
 * bytes of scratch. */
int sw_trainer_restore_chunk(struct sw_rank *r, uint32_t c, void *record);
/* From now on the run stands where the commit does. */
void sw_trainer_go_on(struct sw_trainer *t);
void sw_trainer_close_store(struct sw_trainer *t);
/* Where a run starts anew and makes no commits: a store that it finds must not outlive it, with a
 * commit (--restart) or without one (--resume). */
void sw_trainer_drop_commit(const struct sw_trainer *t);
const char *sw_trainer_store_folder(const struct sw_trainer *t);
/* Makes the newest state durable as that of `step`; all its writes are over. */
int sw_trainer_commit(struct sw_trainer *t, uint64_t step, uint64_t updates, uint64_t skips);
/* The same with idle lanes, for chunks of every tier; nothing when `step` is committed already. */
int sw_trainer_commit_idle(struct sw_trainer *t, uint64_t step);
/* Brings a chunk's record into `record`, from whichever tier; lanes are idle. */
int sw_trainer_read_record(struct sw_rank *r, uint32_t c, void *record);
/* Compares the checksum of what was read from the chunk's newest home with that of what was
 * written: 0 or -EIO, reported with file, chunk and step. */
int sw_trainer_check_bytes(const struct sw_rank *r, uint32_t c, uint64_t step, uint32_t have);

/* A chunk's record into its next home, with idle lanes. */
int sw_trainer_write_record(struct sw_rank *r, uint32_t c, void *record);
/* A record into its tier (device, host), and its masters, rounded, to where the weights are kept.
 */
int sw_trainer_place_record(struct sw_rank *r, uint32_t c, void *record);

/* trainer_result.c: what a run writes beside its result, and whether --resume finds that of this
 * run: sets t->done_before, in all processes as the first one has it; refuses another run's. After
 * the identity is known. */
int sw_trainer_write_result(struct sw_trainer *t);
int sw_trainer_check_result(struct sw_trainer *t);

/* trainer_import.c: nothing without --import, or where --resume has something to go on from. Opens
 * and checks; makes a chunk's record and places it; begins where the export stood, with a commit
 * where the run makes any. */
int sw_trainer_open_import(struct sw_trainer *t);
int sw_trainer_import_chunk(struct sw_rank *r, uint32_t c, void *record);
int sw_trainer_end_import(struct sw_trainer *t);
void sw_trainer_close_import(struct sw_trainer *t);

/* trainer_enter.c: what each lane's thread keeps, made before the first step. */
int sw_trainer_enter_lane(void *ctx, enum sw_lane lane, uint32_t rank, struct sw_stream *stream);

/* trainer_lanes.c */
extern const struct sw_executor_ops sw_trainer_lanes;
void sw_trainer_host_adam(const struct sw_device_adam_step *step,
                          const struct sw_device_adam_chunk *chunk, void *ctx);

/* The folders of the run's files on NVMe, one per drive, and how a drive is used. */
const char *const *sw_trainer_folders(const struct sw_trainer *t, uint32_t *count);
void sw_trainer_lane_options(const struct sw_trainer *t, int write,
                             struct sw_nvme_queue_options *o);

#endif
