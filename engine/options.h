/* engine/options.h - what a run is asked to do: the effective options after defaults.
 *
 * tools/ fills this from the command line and a TOML file; the engine reads it and changes nothing.
 * Strings are the caller's and live as long as the run. */
#ifndef ENGINE_OPTIONS_H
#define ENGINE_OPTIONS_H
#include <stdint.h>
#include "base/bf16.h"
#include "cpu_adam/adam.h"
#include "engine/data.h"
#include "offload/tiers.h"

enum sw_schedule { SW_SCHEDULE_CONSTANT, SW_SCHEDULE_LINEAR, SW_SCHEDULE_COSINE };
enum sw_decay { SW_DECAY_MATRICES, SW_DECAY_ALL };
enum sw_device_kind { SW_DEVICE_AUTO, SW_DEVICE_HOST, SW_DEVICE_CUDA };
enum sw_overlap { SW_OVERLAP_AUTO, SW_OVERLAP_NONE, SW_OVERLAP_FORWARD, SW_OVERLAP_BACKWARD };

enum { SW_NVME_FOLDERS_MAX = 64, SW_ACCUMULATE_MAX = 65536 };

/* Rates per second that lanes are held to (engine/throttle.h); 0: as fast as it goes. A pair is
 * given at once: up and down, read and write. */
struct sw_sim_rates {
    uint64_t copy_bytes[2]; /* host to device, device to host */
    uint64_t nvme_bytes[2]; /* read, write */
    uint64_t adam_bytes;    /* of state, gradient and weight that Adam reads and writes */
    uint64_t comm_bytes;    /* that each rank sends to the others */
    uint64_t flops;         /* of forward and backward, which are then left out */
};

struct sw_train_options {
    const char *model, *data, *mask, *documents, *val, *out; /* NULL when not given */
    const char *machine;    /* whose profile the run is planned with; NULL: this one's */
    const char *freeze;     /* patterns of sw_model_freeze(), or NULL */
    const char *import_dir; /* an exported optimizer to begin with, or NULL */
    uint64_t steps;         /* 0: one epoch */
    uint32_t seq_len;       /* 0: min(512, the model's limit) */
    uint32_t micro_batch, accumulate;
    enum sw_order order;
    uint64_t seed;

    double lr, min_lr, weight_decay, beta1, beta2, eps, clip; /* clip 0: off */
    enum sw_schedule schedule;
    int64_t warmup; /* steps; -1: 3% of steps */
    enum sw_decay decay;
    uint32_t max_skips;

    enum sw_device_kind device;
    uint32_t ranks;             /* of this process, each with a device; 0: as many as GPUs */
    int shard_in_node;          /* each process has all shards; processes have replicas */
    int64_t zero;               /* what is sharded over them: 0..3; -1: 3 with several */
    enum sw_dtype reduce_dtype; /* in which gradients travel between ranks; sums are FP32 */
    double rank_timeout_s;      /* how long ranks wait for each other */
    enum sw_dtype dtype, grad_dtype;
    enum sw_adam_master master;
    enum sw_adam_moments moments;
    struct sw_tiers params, optimizer, gradients, activations; /* not chosen: by what fits */
    uint32_t checkpoint_every;                       /* layers from one kept input to the next */
    uint64_t device_memory_bytes, host_memory_bytes; /* budgets of the pools; 0: none */
    enum sw_overlap overlap;
    /* With backward: percent of the elements, of the first units and of the last ones, whose update
     * waits for the next step's forward; both -1: the engine chooses. */
    int64_t late_below, late_top;
    uint64_t chunk_bytes; /* of a record on disk */
    int threads;          /* of Adam; 0: what the affinity mask and the quota give */
    int device_threads;   /* of each rank's host device; 0: likewise, shared out over the ranks */
    const char *nvme[SW_NVME_FOLDERS_MAX];
    uint32_t nvme_count; /* 0: the store lies in the output folder */
    int sqpoll, iopoll;  /* as in struct sw_nvme_queue_options */

    uint64_t save_every, eval_every; /* steps; 0: never in between */
    const char *log, *trace;         /* NULL: none */
    uint64_t write_budget_bytes;     /* to the drives, before a warning; 0: none */
    int64_t commit_every;            /* steps; 0: never; -1: 1 on NVMe, else as save_every */
    int resume, restart, keep_store, dry_run, digest;
    struct sw_sim_rates sim;
};

/* The documented defaults; paths NULL. */
void sw_train_defaults(struct sw_train_options *options);

/* Chooses what the user left open: a GPU where there is one that can be used, a rank for each. In
 * one process of several the device stays open until they have met, and there is one rank. */
void sw_train_settle_device(struct sw_train_options *options, int have_met);

/* The learning rate of step 1, 2, ...: linear warm-up lr * step / warmup, then constant, linear or
 * cosine from lr down to min_lr over the steps after the warm-up. warmup and steps resolved. */
double sw_learning_rate(const struct sw_train_options *options, uint64_t step);

/* The mode of overlap: the one that was asked for; left open, the fastest that clips. */
enum sw_overlap sw_overlap_of(const struct sw_train_options *options);
const char *sw_overlap_name(enum sw_overlap overlap);

#endif
