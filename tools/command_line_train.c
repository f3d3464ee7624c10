/* tools/command_line_train.c - the options of `spillway train`, and which of them do not go
 * together.
 *
 * An option stands here when its feature works, never before. */
#include "tools/command_line.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/log.h"
#include "engine/collective.h"
#include "engine/identity.h"
#include "engine/world.h"
#include "offload/placement.h"
#include "offload/topology.h"
#include "plan/machine.h"

static const char *const orders[] = {"shuffle", "sequential", NULL};
static const char *const schedules[] = {"constant", "linear", "cosine", NULL};
static const char *const decays[] = {"matrices", "all", NULL};
static const char *const devices[] = {"auto", "host", "cuda", NULL};
static const char *const dtypes[] = {"bf16", "fp32", NULL};
static const char *const masters[] = {"fp32", "split", NULL};
static const char *const moments[] = {"fp32", "8bit", NULL};
static const char *const shard_groups[] = {"world", "node", NULL};
static const char *const overlaps[] = {"auto", "none", "forward", "backward", NULL};

#define FIELD(name)             .offset = offsetof(struct sw_train_options, name)
#define TEXT(value_text, field) .value = value_text, .kind = SW_OPTION_TEXT, FIELD(field)
#define FLAG(field)             .kind = SW_OPTION_FLAG, FIELD(field)

#define CHOICE(list, field) .value = "NAME", .kind = SW_OPTION_CHOICE, .choices = list, FIELD(field)

#define TIERS(field) .value = "TIER", .marks = SW_UNSET, .kind = SW_OPTION_TIERS, FIELD(field)

#define COUNT(field, least)                                                                        \
    .value = "N", .kind = SW_OPTION_COUNT, .min = least, .max = UINT32_MAX, FIELD(field)
#define COUNT64(field, least)                                                                      \
    .value = "N", .kind = SW_OPTION_COUNT64, .min = least, .max = 1e15, FIELD(field)
#define REAL(field, least, most)                                                                   \
    .value = "X", .kind = SW_OPTION_REAL, .min = least, .max = most, FIELD(field)

static const struct sw_option options_table[] = {
    {"model", .section = "Files", TEXT("DIR", model), .marks = SW_REQUIRED,
     .help = "model folder: config.json and safetensors"},
    {"data", .section = "Files", TEXT("FILE", data), .marks = SW_REQUIRED,
     .help = "training tokens: flat uint16, above a vocabulary of 65536 uint32"},
    {"mask", .section = "Files", TEXT("FILE", mask),
     .help = "one byte per training token: 1 when the prediction of it counts"},
    {"documents", .section = "Files", TEXT("FILE", documents),
     .help = "where documents begin: uint64 offsets in tokens; no row attends across"},
    {"val", .section = "Files", TEXT("FILE", val), .help = "tokens for evaluation"},
    {"out", .section = "Files", TEXT("DIR", out), .marks = SW_REQUIRED,
     .help = "folder for the trained model, empty or not yet there"},
    {"resume", .section = "Files", FLAG(resume), .help = "go on from the last commit of the store"},
    {"import", .section = "Files", TEXT("DIR", import_dir),
     .help = "begin with an optimizer that spillway export wrote, at its step"},
    {"restart", .section = "Files", FLAG(restart),
     .help = "begin anew in an --out that is not empty"},
    {"keep-store", .section = "Files", FLAG(keep_store),
     .help = "keep the optimizer state after the last step"},
    {"log", .section = "Files", TEXT("FILE", log), .help = "one JSON object per step"},
    {"trace", .section = "Files", TEXT("FILE", trace),
     .help = "every task, as a Chrome trace (for spillway report, Perfetto)"},
    {"config", .section = "Files", .value = "FILE", .kind = SW_OPTION_CONFIG, .offset = SW_NO_FIELD,
     .help = "options from a TOML file; the command line wins over it"},

    {"freeze", .section = "Model", TEXT("PATTERNS", freeze),
     .help = "tensors to leave as they are: globs of their names, a,b; !c trains c again"},

    {"steps", .section = "Batches", COUNT64(steps, 1), .marks = SW_UNSET, .fallback = "one epoch",
     .help = "optimizer steps"},
    {"seq-len", .section = "Batches", COUNT(seq_len, 1), .marks = SW_UNSET,
     .fallback = "512, or the model's limit", .help = "tokens per row"},
    {"micro-batch", .section = "Batches", COUNT(micro_batch, 1), .fallback = "1",
     .help = "rows that go through the model together"},
    {"accumulate", .section = "Batches", .value = "N", .kind = SW_OPTION_COUNT, .min = 1,
     .max = SW_ACCUMULATE_MAX, FIELD(accumulate), .fallback = "1",
     .help = "micro-batches per step"},
    {"order", .section = "Batches", CHOICE(orders, order), .fallback = "shuffle",
     .help = "of the rows in an epoch"},
    {"seed", .section = "Batches", .value = "N", .kind = SW_OPTION_COUNT64, FIELD(seed),
     .fallback = "0", .help = "of the shuffle"},
    {"eval-every", .section = "Batches", COUNT64(eval_every, 0), .fallback = "0",
     .help = "steps between evaluations on --val; 0: none in between"},
    {"save-every", .section = "Batches", COUNT64(save_every, 0), .fallback = "0",
     .help = "steps between saves; 0: only at the end"},
    {"commit-every", .section = "Batches", .value = "N", .kind = SW_OPTION_STEPS,
     FIELD(commit_every), .marks = SW_UNSET, .fallback = "1 on NVMe, else as --save-every",
     .help = "steps between commits, from which --resume goes on; 0: never"},

    {"lr", .section = "Optimizer", REAL(lr, 0, INFINITY), .fallback = "1e-5",
     .help = "learning rate"},
    {"schedule", .section = "Optimizer", CHOICE(schedules, schedule), .fallback = "cosine",
     .help = "of the learning rate after the warm-up"},
    {"warmup", .section = "Optimizer", .value = "N", .kind = SW_OPTION_STEPS, FIELD(warmup),
     .marks = SW_UNSET, .fallback = "3% of steps", .help = "steps of linear warm-up"},
    {"min-lr", .section = "Optimizer", REAL(min_lr, 0, INFINITY), .fallback = "0",
     .help = "where a linear or cosine schedule ends"},
    {"decay", .section = "Optimizer", CHOICE(decays, decay), .fallback = "matrices",
     .help = "what weight decay applies to"},
    {"weight-decay", .section = "Optimizer", REAL(weight_decay, 0, INFINITY), .fallback = "0.1",
     .help = "decoupled, times the learning rate"},
    {"beta1", .section = "Optimizer", REAL(beta1, 0, 1), .marks = SW_MAX_OPEN, .fallback = "0.9",
     .help = "decay of the momentum"},
    {"beta2", .section = "Optimizer", REAL(beta2, 0, 1), .marks = SW_MAX_OPEN, .fallback = "0.95",
     .help = "decay of the variance"},
    {"eps", .section = "Optimizer", REAL(eps, 0, INFINITY), .marks = SW_MIN_OPEN,
     .fallback = "1e-8", .help = "added to the root of the variance"},
    {"clip", .section = "Optimizer", REAL(clip, 0, INFINITY), .fallback = "1",
     .help = "largest global gradient norm; 0: off"},
    {"max-skips", .section = "Optimizer", COUNT(max_skips, 0), .fallback = "10",
     .help = "steps in a row that may be skipped as not finite"},

    {"ranks", .section = "Ranks", .value = "N", .kind = SW_OPTION_COUNT, .min = 1,
     .max = SW_RANKS_MAX, FIELD(ranks), .marks = SW_UNSET, .fallback = "the GPUs; on the host 1",
     .help = "devices of a process that train together, each on its own rows; 64 in all processes"},
    {"zero", .section = "Ranks", .value = "STAGE", .kind = SW_OPTION_STEPS, FIELD(zero),
     .marks = SW_UNSET, .fallback = "3 from 2 ranks on",
     .help = "what is sharded over ranks: 1 optimizer state, 2 and gradients, 3 and weights"},
    {"shard", .section = "Ranks", CHOICE(shard_groups, shard_in_node), .fallback = "world",
     .help = "over which ranks: of all processes, or of each one, which then all hold the same"},
    {"reduce-dtype", .section = "Ranks", CHOICE(dtypes, reduce_dtype), .fallback = "fp32",
     .help = "in which gradients travel between ranks; bf16 halves the bytes, and rounds"},
    {"rank-timeout", .section = "Ranks", REAL(rank_timeout_s, 0, 1e6), .marks = SW_MIN_OPEN,
     .fallback = "600", .help = "seconds that ranks wait for each other"},

    {"device", .section = "Placement", CHOICE(devices, device),
     .fallback = "cuda if usable, else host",
     .help = "what computes the model; auto is what is there"},
    {"dtype", .section = "Placement", CHOICE(dtypes, dtype), .fallback = "bf16",
     .help = "of weights and activations"},
    {"grad-dtype", .section = "Placement", CHOICE(dtypes, grad_dtype), .fallback = "as --dtype",
     .help = "of gradients on their way to the optimizer"},
    {"params", .section = "Placement", TIERS(params), .fallback = "device, or what fits",
     .help = "where the working weights live: device, or host and nvme, streamed in"},
    {"optimizer", .section = "Placement", TIERS(optimizer), .fallback = "host, or what fits",
     .help = "where the FP32 optimizer state lives; shares as in host:60%,nvme"},
    {"gradients", .section = "Placement", TIERS(gradients), .fallback = "host, or what fits",
     .help = "where rounded gradients wait for the norm"},
    {"activations", .section = "Placement", TIERS(activations), .fallback = "device, or what fits",
     .help = "where the layers' inputs are kept for backward"},
    {"checkpoint-every", .section = "Placement", COUNT(checkpoint_every, 1), .fallback = "1",
     .help = "layers from one kept input to the next; those between are recomputed"},
    {"device-memory", .section = "Placement", .value = "SIZE", .kind = SW_OPTION_SIZE,
     FIELD(device_memory_bytes), .marks = SW_UNSET, .min = 1, .max = 1e18, .fallback = "no limit",
     .help = "what each rank may take of its device's memory"},
    {"host-memory", .section = "Placement", .value = "SIZE", .kind = SW_OPTION_SIZE,
     FIELD(host_memory_bytes), .marks = SW_UNSET, .min = 1, .max = 1e18, .fallback = "no limit",
     .help = "and of the host's"},
    {"master", .section = "Placement", CHOICE(masters, master), .fallback = "fp32",
     .help = "split: the weight's 16 bits and a 16-bit remainder, lossless"},
    {"moments", .section = "Placement", CHOICE(moments, moments), .fallback = "fp32",
     .help = "8bit: a quarter of the bytes of momentum and variance, lossy"},
    {"machine", .section = "Placement", TEXT("NAME", machine),
     .fallback = "this machine, where it was measured",
     .help = "what is left open is planned for it: a profile (a file, or a name that plan --help "
             "lists) and changes to it: 8xh100:ram=1T,nvme=8xgen5"},
    {"overlap", .section = "Placement", CHOICE(overlaps, overlap), .fallback = "auto",
     .help = "update beside forward (any clip) or backward (--clip 0)"},
    {"late-below", .section = "Placement", .value = "PERCENT", .kind = SW_OPTION_STEPS,
     FIELD(late_below), .max = 100, .marks = SW_UNSET, .fallback = "chosen",
     .help = "of the parameters, from the first unit up: updated beside the next forward, where "
             "the overlap is backward"},
    {"late-top", .section = "Placement", .value = "PERCENT", .kind = SW_OPTION_STEPS,
     FIELD(late_top), .max = 100, .marks = SW_UNSET, .fallback = "chosen",
     .help = "the same from the last unit down"},
    {"chunk", .section = "Placement", .value = "SIZE", .kind = SW_OPTION_SIZE, FIELD(chunk_bytes),
     .min = SW_CHUNK_BYTES_MIN, .max = 1 << 30, .fallback = "8Mi",
     .help = "piece of optimizer state that moves at once"},
    {"threads", .section = "Placement", .value = "N", .kind = SW_OPTION_INT, FIELD(threads),
     .min = 1, .max = SW_TEAM_THREADS_MAX, .marks = SW_UNSET,
     .fallback = "the cores that affinity and quota give",
     .help = "of the optimizer on the CPU: one per core, as it waits for memory"},
    {"device-threads", .section = "Placement", .value = "N", .kind = SW_OPTION_INT,
     FIELD(device_threads), .min = 1, .max = SW_TEAM_THREADS_MAX, .marks = SW_UNSET,
     .fallback = "what affinity and quota give each rank",
     .help = "of each rank's host device: fewer leave cores to the optimizer and the store"},
    {"nvme", .section = "Placement", .value = "DIR[,DIR...]", .kind = SW_OPTION_LIST, FIELD(nvme),
     .count_offset = offsetof(struct sw_train_options, nvme_count), .fallback = "the output folder",
     .help = "folders of the store, one per drive"},
    {"sqpoll", .section = "Placement", FLAG(sqpoll),
     .help = "a kernel thread submits the store's I/O (io_uring SQPOLL): takes cores"},
    {"iopoll", .section = "Placement", FLAG(iopoll),
     .help = "poll for the store's completions (io_uring IOPOLL): takes cores"},
    {"write-budget", .section = "Placement", .value = "SIZE", .kind = SW_OPTION_SIZE,
     FIELD(write_budget_bytes), .min = 0, .max = 1e18, .fallback = "0",
     .help = "warn when the run has written this much to the drives (they wear); 0: never"},

    {"sim-pcie", .section = "Another machine's clock", .value = "UP[,DOWN]",
     .kind = SW_OPTION_RATES, FIELD(sim.copy_bytes), .marks = SW_UNSET, .min = 1, .max = 1e18,
     .fallback = "as fast as it goes",
     .help = "hold copies to and from the device to these bytes per second"},
    {"sim-nvme", .section = "Another machine's clock", .value = "READ[,WRITE]",
     .kind = SW_OPTION_RATES, FIELD(sim.nvme_bytes), .marks = SW_UNSET, .min = 1, .max = 1e18,
     .fallback = "as fast as it goes", .help = "and the store, reading and writing"},
    {"sim-adam", .section = "Another machine's clock", .value = "RATE", .kind = SW_OPTION_RATE,
     FIELD(sim.adam_bytes), .marks = SW_UNSET, .min = 1, .max = 1e18,
     .fallback = "as fast as it goes",
     .help = "and Adam's reads and writes of state, gradient and weight"},
    {"sim-comm", .section = "Another machine's clock", .value = "RATE", .kind = SW_OPTION_RATE,
     FIELD(sim.comm_bytes), .marks = SW_UNSET, .min = 1, .max = 1e18,
     .fallback = "as fast as it goes", .help = "and what each rank sends to the others"},
    {"sim-flops", .section = "Another machine's clock", .value = "RATE", .kind = SW_OPTION_RATE,
     FIELD(sim.flops), .marks = SW_UNSET, .min = 1, .max = 1e18, .fallback = "computed here",
     .help = "leave the model's computation out and wait as long as a device of this many\n"
             "operations per second would take: times a step, trains nothing, writes no model"},

    {"dry-run", .section = "Other", FLAG(dry_run),
     .help = "check options and files, print the plan, stop; write nothing"},
    {"digest", .section = "Other", FLAG(digest),
     .help = "end with hashes of masters, momenta, variances and weights"},
    SW_OPTION_HELP("Other"),
};

const struct sw_command sw_train_command = {
    .name = "train",
    .usage = "train --model DIR --data FILE --out DIR [options]",
    .summary =
        "Fine-tunes a Llama-family model with its optimizer state in memory or on NVMe. Under\n"
        "mpirun or srun --mpi=pmix several processes train together (docs/ranks.md).",
    .options = options_table,
    .option_count = sizeof(options_table) / sizeof(options_table[0]),
};

static int contradiction(const char *what) {
    sw_error("train: %s", what);
    return -EINVAL;
}

/* Whether a placement is on NVMe, or may come to be there because a budget or a plan says so. */
static int may_use_nvme(const struct sw_train_options *o) {
    const struct sw_tiers all[] = {o->params, o->optimizer, o->gradients, o->activations};
    int open = 0;
    for (int i = 0; i < 4; i++) {
        if (sw_tiers_has(all[i], SW_TIER_NVME)) return 1;
        open |= !sw_tiers_chosen(all[i]);
    }
    if (!open) return 0;
    if (o->machine || o->host_memory_bytes > 0 || o->device_memory_bytes > 0) return 1;
    return !sw_world_is_launched() && sw_machine_is_measured();
}

/* Options that exclude each other, and options that would do nothing: accepted in silence, they
 * would leave the user believing in an effect that never happened. --seed is exempt: it names the
 * run. */
static int check_together(const struct sw_train_options *o, const struct sw_parsed *parsed) {
    const int alone = o->ranks == 1 && !sw_world_is_launched();
    if (o->overlap == SW_OVERLAP_BACKWARD && o->clip > 0) {
        sw_error(
            "train: --overlap backward needs --clip 0 (it is %g): the exact gradient norm is known "
            "only after backward",
            o->clip);
        return -EINVAL;
    }
    const int late = o->late_below >= 0 || o->late_top >= 0;
    if (late && sw_overlap_of(o) != SW_OVERLAP_BACKWARD)
        return contradiction("--late-below and --late-top have no effect without overlap backward "
                             "(--clip 0)");
    if (fmax((double)o->late_below, 0) + fmax((double)o->late_top, 0) > 100)
        return contradiction("--late-below and --late-top are more than 100% together");
    const int commits =
        o->commit_every > 0 || (o->commit_every < 0 && (o->save_every > 0 || o->keep_store));
    const int nvme = may_use_nvme(o), store = nvme || commits || o->resume;
    if (o->nvme_count > 0 && !store)
        return contradiction(
            "--nvme has no effect without a placement on nvme or commits; on a machine that was "
            "measured (spillway bench all), or with --machine, a plan says what lies there");
    if ((o->sqpoll || o->iopoll) && !nvme)
        return contradiction("--sqpoll and --iopoll have no effect without a placement on nvme");
    if (o->write_budget_bytes > 0 && !store)
        return contradiction("--write-budget has no effect without a placement on nvme or commits");
    if ((o->sim.nvme_bytes[0] || o->sim.nvme_bytes[1]) && !nvme)
        return contradiction("--sim-nvme has no effect without a placement on nvme");
    if (o->sim.adam_bytes && sw_tiers_is_all(o->optimizer, SW_TIER_DEVICE))
        return contradiction("--sim-adam has no effect with --optimizer device");
    const int streamed = sw_tiers_chosen(o->params) && !sw_tiers_is_all(o->params, SW_TIER_DEVICE);
    if (streamed && sw_tiers_has(o->params, SW_TIER_DEVICE))
        return contradiction("--params takes device, or shares of host and nvme: weights that are "
                             "streamed pass through a window, and those that stay do not");
    if (streamed && sw_tiers_has(o->optimizer, SW_TIER_DEVICE))
        return contradiction("--optimizer device needs --params device: Adam on the device writes "
                             "the weights there");
    if (sw_tiers_is_all(o->optimizer, SW_TIER_DEVICE) && sw_tiers_chosen(o->gradients) &&
        !sw_tiers_is_all(o->gradients, SW_TIER_DEVICE))
        return contradiction("--gradients has no effect with --optimizer device: they wait there");
    if (o->sim.comm_bytes && alone) return contradiction("--sim-comm has no effect with one rank");
    if (o->sim.flops &&
        (o->val || o->save_every || o->resume || o->keep_store || o->digest || o->import_dir))
        return contradiction("--sim-flops trains nothing: without --val, --save-every, --resume, "
                             "--import, --keep-store and --digest");
    if (o->eval_every > 0 && !o->val)
        return contradiction("--eval-every has no effect without --val");
    if (o->schedule == SW_SCHEDULE_CONSTANT && sw_option_origin(parsed, "min-lr"))
        return contradiction("--min-lr has no effect with --schedule constant");
    if (o->min_lr > o->lr) {
        sw_error("train: --min-lr %g is above --lr %g", o->min_lr, o->lr);
        return -EINVAL;
    }
    if (o->weight_decay == 0 && sw_option_origin(parsed, "decay"))
        return contradiction("--decay has no effect with --weight-decay 0");
    if (o->zero > 3) return contradiction("--zero takes 0, 1, 2 or 3");
    if (alone && sw_option_origin(parsed, "reduce-dtype"))
        return contradiction("--reduce-dtype has no effect with one rank");
    if (o->freeze && strlen(o->freeze) >= SW_FREEZE_BYTES) {
        sw_error("train: --freeze is longer than %d characters", SW_FREEZE_BYTES - 1);
        return -EINVAL;
    }
    if (o->resume && o->restart) return contradiction("--resume and --restart exclude each other");
    if (o->keep_store && o->commit_every == 0)
        return contradiction("--keep-store has no effect with --commit-every 0");
    if (o->steps > 0 && o->warmup > (int64_t)o->steps) {
        sw_error("train: --warmup %" PRId64 " is longer than --steps %" PRIu64, o->warmup,
                 o->steps);
        return -EINVAL;
    }
    return 0;
}

int sw_parse_train(int argc, char **argv, struct sw_train_options *options,
                   struct sw_parsed *parsed) {
    sw_train_defaults(options);
    const int ret = sw_options_parse(&sw_train_command, argc, argv, options, parsed);
    if (ret != 0) return ret;
    if (!sw_option_origin(parsed, "grad-dtype")) options->grad_dtype = options->dtype;
    sw_train_settle_device(options, 0);
    return check_together(options, parsed);
}
