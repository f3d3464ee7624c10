/* engine/trainer.h - a whole fine-tuning run: from options to a written model.
 *
 * sw_trainer_open() reads and checks everything that the options name, resolves what they leave
 * open and sizes every pool, but allocates no pool and writes nothing: --dry-run stops there.
 * sw_trainer_start() takes the output folder, allocates and loads; sw_trainer_run() trains. One
 * trainer, one thread; hooks are called from that thread. Errors: 0 or -errno, reported. */
#ifndef ENGINE_TRAINER_H
#define ENGINE_TRAINER_H
#include <stdatomic.h>
#include <stdint.h>
#include "engine/options.h"
#include "engine/turn.h"

enum sw_traffic {
    SW_BYTES_H2D,
    SW_BYTES_D2H,
    SW_BYTES_COMM,
    SW_BYTES_NVME_READ,
    SW_BYTES_NVME_WRITE,
    SW_BYTES_NVME_DIRECT, /* of those read, past the host's memory */
    SW_BYTES_COUNT
};
const char *sw_traffic_name(enum sw_traffic traffic);

/* What one step did, all of its update included, whichever turn that ran in. */
struct sw_step_report {
    uint64_t step, steps; /* this one, from 1; of the run */
    double loss;          /* before the update; NaN when no token counted */
    double grad_norm;     /* before clipping */
    double clip_factor, lr;
    uint64_t tokens; /* unmasked */
    double step_s;
    double lane_busy_s[SW_LANE_COUNT];
    enum sw_lane step_clock;
    double clock_share;
    uint64_t bytes[SW_BYTES_COUNT];
    uint64_t memory_bytes[SW_TIER_COUNT];
    int skipped;
    char why_skipped[192];
};

/* A run that does not fit: what it would take, and options with which it would. */
enum { SW_REMEDIES_MAX = 4, SW_REMEDY_OPTIONS_MAX = 8 };

struct sw_remedy {
    struct {
        char name[24], value[40]; /* "params", "host"; value "": the option is taken away */
    } options[SW_REMEDY_OPTIONS_MAX];
    int option_count;
    const char *effect; /* on the result, in words */
};

struct sw_refusal {
    const struct sw_byte_row *rows;
    int row_count;
    struct sw_remedy remedies[SW_REMEDIES_MAX];
    int remedy_count;
    uint32_t shorter_rows; /* without a remedy: the --seq-len with which a run would fit, or 0 */
};

enum sw_beside_steps { SW_LOADING, SW_EVALUATING, SW_SAVING, SW_EXPORTING };

struct sw_trainer_hooks {
    void *ctx;
    void (*on_step)(void *ctx, const struct sw_step_report *report);
    void (*on_eval)(void *ctx, uint64_t step, double loss, uint64_t tokens);
    /* What takes long beside the steps, piece by piece: rows of an evaluation, else bytes. */
    void (*on_progress)(void *ctx, enum sw_beside_steps work, uint64_t done, uint64_t total);
    void (*on_saved)(void *ctx, uint64_t step, const char *dir);
    /* Of every process: a stop is from now on followed by a save, or by nothing (0), as no step was
     * made yet. */
    void (*on_stop_means)(void *ctx, int saves);
    /* After the error that says so, from sw_trainer_open(). NULL: not told. */
    void (*on_refused)(void *ctx, const struct sw_refusal *refusal);
    const atomic_int
        *stop; /* a signal: finish the step at hand and save, or stop loading; 0: none */
};

struct sw_trainer;

/* -ERESTART: a copy between GPUs never ends, which a warning has told. Only the end of the program
 * gives the GPUs back: let it begin again, by exec, with the environment that it has now, in which
 * they exchange nothing directly. For a run of one process. */
int sw_trainer_open(struct sw_trainer **out, const struct sw_train_options *options,
                    const struct sw_trainer_hooks *hooks);
/* NULL is fine. 0, or the error that a run of several processes ended with in another one. */
int sw_trainer_close(struct sw_trainer *t);

/* Whether this is the first of the run's processes: it alone writes models and log, and has its
 * hooks called but on_stop_means. After open. */
int sw_trainer_is_first(const struct sw_trainer *t);

/* After open: the options with every default resolved, and the byte table. */
const struct sw_train_options *sw_trainer_options(const struct sw_trainer *t);
int sw_trainer_table(const struct sw_trainer *t, struct sw_byte_row rows[SW_BYTE_ROWS_MAX]);
const char *sw_trainer_numerics_key(const struct sw_trainer *t);
uint64_t sw_trainer_params(const struct sw_trainer *t);
uint64_t sw_trainer_trained_params(const struct sw_trainer *t);
uint64_t sw_trainer_tokens_per_step(const struct sw_trainer *t);

/* --resume found this run's finished result: nothing is to be done. After open. */
int sw_trainer_done_before(const struct sw_trainer *t);
/* Then removes the store that such a run left when it was killed while it cleaned up. */
void sw_trainer_forget_store(const struct sw_trainer *t);

/* Takes the output folder, allocates and loads. 1: hooks->stop was set meanwhile; only a close may
 * follow. */
int sw_trainer_start(struct sw_trainer *t);

/* Bytes of working weights and optimizer records that start has put into their tiers, from the
 * model's files or a commit. A unit or a piece of one at a time: nothing was held twice. */
uint64_t sw_trainer_loaded_bytes(const struct sw_trainer *t);

/* Steps done before this process, by the commit that --resume found, or by what was imported; 0
 * without either. After start. */
uint64_t sw_trainer_start_step(const struct sw_trainer *t);

/* Whether the run begins with --import, which a commit to go on from comes before. After open. */
int sw_trainer_was_imported(const struct sw_trainer *t);

/* Bytes this process has written to the drives: records and commits. Any thread. */
uint64_t sw_trainer_written_bytes(const struct sw_trainer *t);

/* Whether the store holds a commit that all processes have, and of which step. While no step runs.
 */
int sw_trainer_commits(const struct sw_trainer *t, uint64_t *step);
/* The same of what this process has on its drives, which may be a step ahead of another's. */
int sw_trainer_has_on_disk(const struct sw_trainer *t, uint64_t *step);
/* Its store's folder, and its number among the processes; *processes: how many there are. */
const char *sw_trainer_store_place(const struct sw_trainer *t, uint32_t *process,
                                   uint32_t *processes);

/* Text on what the store uses ("io_uring, direct, ..."), after start; "" without a store. */
const char *sw_trainer_store_mode(const struct sw_trainer *t);

/* 0: done, the model is in --out. 1: stopped by hooks->stop; *stopped_at is the last finished step
 * and the weights are where on_saved said. Or -errno. */
int sw_trainer_run(struct sw_trainer *t, uint64_t *stopped_at);

/* The signal that the run was stopped by, whichever of its processes that came to; 0: none. */
int sw_trainer_stopped_by(const struct sw_trainer *t);

/* Hashes over masters, momenta, variances and working weights in unit order, after a run: equal
 * hashes mean equal bits, whatever the tiers and chunks. XXH3, 64 bits each. */
struct sw_digest {
    uint64_t master, momentum, variance, weights;
};
int sw_trainer_digest(struct sw_trainer *t, struct sw_digest *digest);

#endif
