/* plan/fit.c - see the header. */
#include "plan/fit.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "engine/budget.h"
#include "engine/collective.h"
#include "plan/gpu_sizes.h"

/* What the system and other programs keep of a machine's memory, as a share of it. */
#define HOST_RESERVED_SHARE (1.0 / 32)

/* Patterns that fit nothing, or everything, are told once and here. */
static int check_freeze(const struct sw_plan_case *c) {
    struct sw_model model;
    if (!c->options.freeze) return 0;
    int ret = sw_model_open_shape(&model, &c->subject->model.config);
    if (ret == 0) ret = sw_model_freeze(&model, c->options.freeze, 1, 1);
    sw_model_close(&model);
    return ret;
}

/* As many micro-batches as hold the tokens of a step. */
static int settle_tokens(struct sw_plan_case *c) {
    struct sw_train_options *o = &c->options;
    const uint64_t each = (uint64_t)o->micro_batch * o->seq_len * o->ranks * c->nodes;
    const uint64_t count = (c->tokens + each - 1) / each;
    if (c->tokens == 0) return 0;
    if (count > SW_ACCUMULATE_MAX) {
        sw_error("--tokens %" PRIu64
                 ": that is more than %d micro-batches of --micro-batch %" PRIu32
                 " x --seq-len %" PRIu32 " on each rank",
                 c->tokens, SW_ACCUMULATE_MAX, o->micro_batch, o->seq_len);
        return -EINVAL;
    }
    o->accumulate = (uint32_t)count;
    return 0;
}

int sw_plan_case_settle(struct sw_plan_case *c) {
    struct sw_train_options *o = &c->options;
    const struct sw_machine *m = c->machine;
    const uint32_t gpus = (uint32_t)m->gpus, limit = c->subject->model.config.max_positions;
    if (o->device == SW_DEVICE_AUTO) o->device = gpus ? SW_DEVICE_CUDA : SW_DEVICE_HOST;
    if (o->device == SW_DEVICE_CUDA && gpus == 0) {
        sw_error("--device cuda: the machine (%s) has no GPU", m->name);
        return -EINVAL;
    }
    const int on_gpus = o->device == SW_DEVICE_CUDA;
    if (on_gpus && m->gpu_memory_bytes == 0) {
        sw_error("the profile of the machine (%s) does not say what its GPUs hold: name it with "
                 "--machine %s:gpu-memory=SIZE",
                 m->name, m->name);
        return -EINVAL;
    }
    if (o->ranks == 0) o->ranks = on_gpus ? gpus : 1;
    if (on_gpus && o->ranks > gpus) {
        sw_error("--ranks %u: the machine (%s) has %u GPU%s", o->ranks, m->name, gpus,
                 gpus == 1 ? "" : "s");
        return -EINVAL;
    }
    if (o->ranks * c->nodes > SW_RANKS_MAX) {
        sw_error("--nodes %u x %u ranks are %u; a run has up to %d", c->nodes, o->ranks,
                 o->ranks * c->nodes, SW_RANKS_MAX);
        return -EINVAL;
    }
    if (o->seq_len == 0) o->seq_len = limit < 512 ? limit : 512;
    if (o->seq_len > limit) {
        sw_error("--seq-len %u: the model's limit is %u", o->seq_len, limit);
        return -EINVAL;
    }
    if (settle_tokens(c) < 0 || sw_sizing_check_step(&c->subject->model, o) < 0) return -EINVAL;
    return check_freeze(c);
}

/* ---- the run itself ---- */

/* All but the placement: the model cut for the ranks, and what its sizes follow from. */
static int open_parts(struct sw_plan_run *run, const struct sw_plan_case *c,
                      const struct sw_train_options *o) {
    const uint32_t ranks = o->ranks;
    const uint32_t shards = o->shard_in_node ? ranks : ranks * c->nodes;
    const uint32_t replicas = ranks * c->nodes / shards;
    *run = (struct sw_plan_run){.options = *o};
    int ret = sw_model_open_shape(&run->model, &c->subject->model.config);
    if (ret == 0)
        ret = sw_sizing_cut(&run->model, o, shards, replicas, &run->shard_elements,
                            &run->trained_elements);
    if (ret == 0) ret = sw_plan_device_open(&run->device, c, o);
    run->sizing = (struct sw_sizing){.model = &run->model,
                                     .device = &run->device,
                                     .shards = shards,
                                     .replicas = replicas,
                                     .local_ranks = ranks,
                                     .shard_elements = run->shard_elements,
                                     .trained_elements = run->trained_elements};
    return ret;
}

int sw_plan_run_open(struct sw_plan_run *run, const struct sw_plan_case *c,
                     const struct sw_fit *fit) {
    struct sw_shortfall shortfall;
    int ret = open_parts(run, c, &fit->options);
    if (ret < 0) return ret;
    sw_sizing_input(&run->sizing, &run->options, &run->input);
    memcpy(run->input.give_up, fit->given_up, sizeof(fit->given_up));
    ret = sw_budget_place(&run->placement, &run->input, &run->options, run->options.resume,
                          &shortfall);
    if (ret == -ENOMEM) sw_error("no memory for the tables of the plan");
    return ret == -ENOSPC ? 0 : ret; /* whether it fits, the fit tells */
}

void sw_plan_run_close(struct sw_plan_run *run) {
    sw_placement_free(&run->placement);
    if (run->device.ops) sw_plan_device_close(&run->device);
    free(run->shard_elements);
    free(run->trained_elements);
    sw_model_close(&run->model);
}

/* ---- what it takes ---- */

static void set_budgets(struct sw_fit *f, const struct sw_plan_case *c,
                        const struct sw_train_options *o) {
    const struct sw_machine *m = c->machine;
    double *budget = f->budget_bytes;
    budget[SW_TIER_DEVICE] =
        o->device == SW_DEVICE_CUDA ? fmax(m->gpu_memory_bytes - m->gpu_reserved_bytes, 1) : 0;
    if (o->device_memory_bytes) budget[SW_TIER_DEVICE] = (double)o->device_memory_bytes;
    budget[SW_TIER_HOST] = floor(m->memory_bytes * (1 - HOST_RESERVED_SHARE));
    if (o->host_memory_bytes) budget[SW_TIER_HOST] = (double)o->host_memory_bytes;
    budget[SW_TIER_NVME] = sw_machine_drive_bytes(m);
}

static void add_rows(struct sw_fit *f, const struct sw_placement *p, uint32_t ranks, double scale) {
    for (int tier = 0; tier < SW_TIER_COUNT; tier++) {
        const double each = tier == SW_TIER_DEVICE ? 1 : ranks;
        const double kept = each * (double)p->kept_bytes[tier];
        const double rows = (double)sw_placement_bytes(f->rows, f->row_count, (enum sw_tier)tier);
        const double state = tier == SW_TIER_NVME
                                 ? rows - kept /* with its second homes */
                                 : each * (double)(p->weight_bytes[tier] + p->state_bytes[tier] +
                                                   p->grad_bytes[tier]);
        f->state_bytes[tier] = state * scale;
        f->need_bytes[tier] = rows + state * (scale - 1);
    }
}

static void judge(struct sw_fit *f, const struct sw_plan_case *c) {
    const double *need = f->need_bytes, *budget = f->budget_bytes;
    f->fits = 1;
    for (int tier = SW_TIER_COUNT - 1; tier >= 0; tier--)
        if (budget[tier] > 0 && need[tier] > budget[tier]) {
            f->fits = 0;
            f->short_of = (enum sw_tier)tier;
        }
    /* A machine without drives has none to use. */
    if (need[SW_TIER_NVME] > 0 && c->machine->drive_count == 0 && c->options.nvme_count == 0) {
        f->fits = 0;
        f->short_of = SW_TIER_NVME;
    }
    if (f->options.device == SW_DEVICE_HOST &&
        f->options.ranks * need[SW_TIER_DEVICE] + need[SW_TIER_HOST] > budget[SW_TIER_HOST]) {
        f->fits = 0;
        f->short_of = SW_TIER_COUNT;
    }
}

static int build(struct sw_fit *f, const struct sw_sizing *s, double scale) {
    struct sw_placement p;
    struct sw_placement_input in;
    struct sw_shortfall shortfall;
    sw_sizing_input(s, &f->options, &in);
    const int ret = sw_budget_place(&p, &in, &f->options, f->options.resume, &shortfall);
    if (ret < 0 && ret != -ENOSPC) return ret;
    f->row_count = sw_placement_table(&p, &in, f->rows);
    f->kept_groups = p.kept_groups;
    memcpy(f->given_up, p.given_up, sizeof(f->given_up));
    add_rows(f, &p, s->local_ranks, scale);
    sw_placement_free(&p);
    return 0;
}

/* The budget that is left for the units that are counted; 1 byte where nothing is. */
static uint64_t left_over(const struct sw_fit *f, enum sw_tier tier, double scale) {
    const double beyond = f->state_bytes[tier] * (1 - 1 / scale);
    const double left = f->budget_bytes[tier] - beyond;
    return f->budget_bytes[tier] == 0 ? 0 : left > 1 ? (uint64_t)left : 1;
}

static int fit(struct sw_fit *f, const struct sw_plan_case *c, const struct sw_sizing *s) {
    const double scale = sw_subject_scale(c->subject);
    f->options.device_memory_bytes = f->options.host_memory_bytes = 0;
    int ret = scale == 1 ? 0 : build(f, s, scale);
    if (ret < 0) return ret;
    /* With the budgets, for which rings become shorter. */
    f->options.device_memory_bytes = left_over(f, SW_TIER_DEVICE, scale);
    f->options.host_memory_bytes = left_over(f, SW_TIER_HOST, scale);
    ret = build(f, s, scale);
    judge(f, c);
    return ret;
}

int sw_plan_fit(const struct sw_plan_case *c, const struct sw_train_options *o,
                struct sw_fit *out) {
    const uint32_t ranks = o->ranks * c->nodes, layers = c->subject->model.config.layers;
    struct sw_plan_run run;
    assert(sw_tiers_chosen(o->params) && sw_tiers_chosen(o->optimizer) &&
           sw_tiers_chosen(o->gradients) && sw_tiers_chosen(o->activations));
    *out = (struct sw_fit){.options = *o};
    if (out->options.zero < 0) out->options.zero = ranks > 1 ? 3 : 0;
    if (out->options.checkpoint_every > layers) out->options.checkpoint_every = layers;
    set_budgets(out, c, o);
    int ret = open_parts(&run, c, o);
    if (ret == 0) ret = fit(out, c, &run.sizing);
    if (ret == -ENOMEM) sw_error("no memory for the tables of the plan");
    sw_plan_run_close(&run);
    return ret;
}
