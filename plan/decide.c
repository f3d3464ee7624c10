/* plan/decide.c - see the header. */
#include "plan/decide.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/block_norm.h"
#include "base/log.h"
#include "cpu_adam/adam.h"

/* ---- the numbers ---- */

/* Per token, what one layer's backward reads: the buffers of engine/llama.c that hold its forward,
 * in BF16, with FP32 statistics of two norms and of attention's rows. */
static double inside_bytes(const struct sw_model_config *c) {
    const double queries = (double)c->heads * c->head_dim, keys = (double)c->kv_heads * c->head_dim;
    const double halves = 3.0 * c->hidden + 2 * queries + 2 * keys + 3.0 * c->intermediate;
    return 2 * halves + 4 * (2.0 + c->heads);
}

static uint64_t largest_unit(const struct sw_model *model) {
    uint64_t most = 0;
    for (uint32_t u = 0; u < model->unit_count; u++)
        if (model->units[u].params > most) most = model->units[u].params;
    return most;
}

/* How many of the parameters are frozen; patterns that fit nothing were refused before. */
static double frozen_params(const struct sw_plan_case *c) {
    struct sw_model model;
    double frozen = 0;
    if (!c->options.freeze) return 0;
    if (sw_model_open_shape(&model, &c->subject->model.config) < 0) return 0;
    if (sw_model_freeze(&model, c->options.freeze, 1, 1) == 0)
        frozen = (double)(model.params - model.trained_params);
    sw_model_close(&model);
    return frozen * sw_subject_scale(c->subject);
}

void sw_plan_numbers(const struct sw_plan_case *c, struct sw_arithmetic_in *out) {
    const struct sw_train_options *o = &c->options;
    const struct sw_subject *s = c->subject;
    const struct sw_adam_format coded = {.moments = SW_MOMENTS_8BIT};
    const double frozen = frozen_params(c);
    *out = (struct sw_arithmetic_in){
        .params = (double)s->params - frozen,
        .frozen = frozen,
        .unit_params = (double)largest_unit(&s->model) * sw_subject_scale(s),
        .ranks = (double)o->ranks * c->nodes,
        .node_ranks = o->ranks,
        .micro_tokens = (double)o->micro_batch * o->seq_len,
        .micro_batches = o->accumulate,
        .hidden = s->model.config.hidden,
        .layers = s->model.config.layers,
        .inside_bytes = inside_bytes(&s->model.config),
        .checkpoint_every = o->checkpoint_every > 1 ? o->checkpoint_every : 4, /* as an example */
        .adapters = 0.01,
        .moments8_bytes = (double)sw_adam_record_bytes(&coded, SW_NORM_BLOCK) / SW_NORM_BLOCK,
    };
}

/* ---- candidates ---- */

/* What the user chose stays; 0 where that makes the candidate another one. */
static int overlay(struct sw_train_options *o, const struct sw_train_options *asked,
                   enum sw_scheme scheme) {
    struct sw_tiers *const states[] = {&o->params, &o->optimizer, &o->gradients, &o->activations};
    const struct sw_tiers given[] = {asked->params, asked->optimizer, asked->gradients,
                                     asked->activations};
    const int offloads = scheme >= SW_SCHEME_OFFLOAD_OPTIMIZER;
    for (int i = 0; i < 4; i++) {
        if (!sw_tiers_chosen(given[i])) continue;
        if (memcmp(&given[i], states[i], sizeof(given[i])) && !offloads && i < 2) return 0;
        *states[i] = given[i];
    }
    /* Each offload scheme is the one whose weights lie where it says. */
    const int on_device = sw_tiers_is_all(o->params, SW_TIER_DEVICE);
    if (offloads && on_device != (scheme == SW_SCHEME_OFFLOAD_OPTIMIZER)) return 0;
    if (!on_device && sw_tiers_has(o->optimizer, SW_TIER_DEVICE)) return 0;
    if (sw_tiers_is_all(o->optimizer, SW_TIER_DEVICE)) {
        if (sw_tiers_chosen(asked->gradients) && !sw_tiers_is_all(asked->gradients, SW_TIER_DEVICE))
            return 0;
        o->gradients = sw_tiers_all(SW_TIER_DEVICE);
    }
    return 1;
}

/* Stage and group of a scheme; 0: it does not exist for so many ranks, or the user wants another.
 */
static int set_stage(struct sw_train_options *o, const struct sw_plan_case *c,
                     enum sw_scheme scheme) {
    static const int stages[SW_SCHEME_COUNT] = {0, 1, 2, 3, 3, 3, 3};
    const uint32_t ranks = o->ranks * c->nodes;
    const int sharded = scheme != SW_SCHEME_DATA_PARALLEL && scheme < SW_SCHEME_OFFLOAD_OPTIMIZER;
    if (sharded && ranks == 1) return 0;
    if (scheme == SW_SCHEME_HYBRID && (c->nodes == 1 || o->ranks == 1)) return 0;
    if (scheme == SW_SCHEME_ZERO3 && c->options.shard_in_node && c->nodes > 1) return 0;
    if (c->options.zero >= 0 && scheme < SW_SCHEME_OFFLOAD_OPTIMIZER &&
        c->options.zero != stages[scheme])
        return 0;
    if (c->options.zero < 0) o->zero = stages[scheme];
    if (scheme == SW_SCHEME_HYBRID) o->shard_in_node = 1;
    return 1;
}

static struct sw_tiers share(int host_percent) {
    struct sw_tiers t = {{0}};
    t.percent[SW_TIER_HOST] = (uint8_t)host_percent;
    t.percent[SW_TIER_NVME] = (uint8_t)(100 - host_percent);
    return t;
}

/* ---- one scheme ---- */

struct search {
    const struct sw_plan_case *c;
    struct sw_arithmetic_in numbers;
    struct sw_plan_decision *out;
};

/* The verdict on options of a scheme. */
static int weigh_by(const struct sw_plan_case *c, const struct sw_arithmetic_in *numbers,
                    const struct sw_train_options *o, struct sw_plan_step *step) {
    const int ret = sw_plan_fit(c, o, &step->fit);
    if (ret < 0) return ret;
    const struct sw_fit *f = &step->fit;
    const double budget = f->budget_bytes[SW_TIER_DEVICE];
    const double rest = f->need_bytes[SW_TIER_DEVICE] - f->state_bytes[SW_TIER_DEVICE];
    step->gpu_state_bytes = f->state_bytes[SW_TIER_DEVICE];
    if (step->scheme < SW_SCHEME_OFFLOAD_OPTIMIZER && o->device == SW_DEVICE_CUDA) {
        struct sw_arithmetic_row row;
        sw_arithmetic_scheme(numbers, step->scheme, &row);
        if (row.gpu_bytes > step->gpu_state_bytes) step->gpu_state_bytes = row.gpu_bytes;
    }
    step->gpu_need_bytes = step->gpu_state_bytes + rest;
    step->state_fits = budget == 0 || step->gpu_state_bytes <= budget;
    step->fits = f->fits && (budget == 0 || step->gpu_need_bytes <= budget);
    return 0;
}

static int weigh(const struct search *s, const struct sw_train_options *o,
                 struct sw_plan_step *step) {
    return weigh_by(s->c, &s->numbers, o, step);
}

int sw_plan_weigh(const struct sw_plan_case *c, const struct sw_train_options *o,
                  struct sw_plan_step *step) {
    struct sw_arithmetic_in numbers;
    sw_plan_numbers(c, &numbers);
    return weigh_by(c, &numbers, o, step);
}

/* Activations as they came; then every K-th layer's input, up to the square root of the layers;
 * then in the host's memory; then on NVMe, each time what the user left open of it. */
static int try_activations(const struct search *s, struct sw_train_options o,
                           struct sw_plan_step *step) {
    const struct sw_train_options *asked = &s->c->options;
    const double layers = s->numbers.layers;
    const uint32_t first = o.checkpoint_every, root = (uint32_t)lround(sqrt(layers));
    const int open = !sw_tiers_chosen(asked->activations), k_open = first == 1;
    const enum sw_tier tiers[] = {SW_TIER_DEVICE, SW_TIER_HOST, SW_TIER_NVME};
    int tries = 0;
    for (int t = 0; t < 3; t++) {
        if (open) o.activations = sw_tiers_all(tiers[t]);
        for (uint32_t k = first; k == first || (k_open && t == 0 && k <= root); k++) {
            o.checkpoint_every = k;
            const int ret = weigh(s, &o, step);
            if (ret < 0) return ret;
            step->activations_bound = tries++ > 0;
            if (step->fits || !step->state_fits) return 0;
        }
        if (!open) break;
        /* Only the device's memory is helped. */
        const double budget = step->fit.budget_bytes[SW_TIER_DEVICE];
        if (t == 0 && budget > 0 && step->gpu_need_bytes <= budget) return 0;
        if (t == 1 && s->c->machine->drive_count == 0) return 0;
    }
    return 0;
}

/* The largest share of the optimizer in RAM that fits, by fives; without one on NVMe alone. */
static int try_optimizer(const struct search *s, struct sw_train_options o,
                         struct sw_plan_step *step) {
    const struct sw_train_options *asked = &s->c->options;
    int ret;
    const int open = !sw_tiers_chosen(asked->optimizer);
    if (!open) return try_activations(s, o, step);
    o.optimizer = sw_tiers_all(SW_TIER_HOST);
    ret = try_activations(s, o, step);
    if (ret < 0 || step->fits || s->c->machine->drive_count == 0) return ret;
    o.optimizer = sw_tiers_all(SW_TIER_NVME);
    ret = try_activations(s, o, step);
    if (ret < 0 || !step->fits) return ret;
    int low = 0, high = 20; /* of twenty parts in RAM: low fits, high does not */
    while (high - low > 1) {
        struct sw_plan_step between = {.scheme = step->scheme};
        const int middle = (low + high) / 2;
        o.optimizer = share(5 * middle);
        ret = try_activations(s, o, &between);
        if (ret < 0) return ret;
        if (between.fits) {
            *step = between;
            low = middle;
        } else {
            high = middle;
        }
    }
    return 0;
}

/* Where weights and waiting gradients lie while the optimizer is off the GPUs: RAM first; then the
 * gradients go, which move once a step each way, and the weights last, which are read twice. */
static int try_offload(const struct search *s, struct sw_train_options o,
                       struct sw_plan_step *step) {
    static const struct {
        enum sw_tier params, gradients;
    } ways[] = {{SW_TIER_DEVICE, SW_TIER_HOST},
                {SW_TIER_DEVICE, SW_TIER_NVME},
                {SW_TIER_HOST, SW_TIER_HOST},
                {SW_TIER_HOST, SW_TIER_NVME},
                {SW_TIER_NVME, SW_TIER_NVME}};
    const int all = step->scheme == SW_SCHEME_OFFLOAD_ALL;
    const int first = all ? 2 : 0, end = all ? 5 : 2;
    const struct sw_train_options plain = o;
    int tried = 0;
    for (int w = first; w < end; w++) {
        const int nvme = ways[w].params == SW_TIER_NVME || ways[w].gradients == SW_TIER_NVME;
        if (nvme && s->c->machine->drive_count == 0) break;
        o = plain;
        o.params = sw_tiers_all(ways[w].params);
        o.gradients = sw_tiers_all(ways[w].gradients);
        o.optimizer = sw_tiers_all(SW_TIER_HOST);
        if (!overlay(&o, &s->c->options, step->scheme)) continue;
        const int ret = try_optimizer(s, o, step);
        if (ret < 0) return ret;
        tried = 1;
        if (step->fits || !step->state_fits) break;
    }
    return tried ? 0 : 1;
}

/* 1: the scheme is none for this case. */
static int try_scheme(const struct search *s, enum sw_scheme scheme, struct sw_plan_step *step) {
    struct sw_train_options o = s->c->options;
    *step = (struct sw_plan_step){.scheme = scheme};
    if (!set_stage(&o, s->c, scheme)) return 1;
    o.params = o.optimizer = o.gradients = o.activations = sw_tiers_all(SW_TIER_DEVICE);
    /* On the CPU all is RAM, and an update beside the model's work is better than one after it. */
    const struct sw_tiers asked = s->c->options.optimizer;
    if (o.device == SW_DEVICE_HOST && !sw_tiers_is_all(asked, SW_TIER_DEVICE))
        o.optimizer = o.gradients = sw_tiers_all(SW_TIER_HOST);
    if (scheme >= SW_SCHEME_OFFLOAD_OPTIMIZER) return try_offload(s, o, step);
    return overlay(&o, &s->c->options, scheme) ? try_activations(s, o, step) : 1;
}

int sw_plan_decide(const struct sw_plan_case *c, struct sw_plan_decision *out) {
    struct search s = {.c = c, .out = out};
    sw_plan_numbers(c, &s.numbers);
    out->step_count = 0;
    out->chosen = -1;
    for (int scheme = 0; scheme < SW_SCHEME_COUNT; scheme++) {
        struct sw_plan_step *step = &out->steps[out->step_count];
        const int ret = try_scheme(&s, (enum sw_scheme)scheme, step);
        if (ret < 0) return ret;
        if (ret == 1) continue;
        out->step_count++;
        if (!step->fits) continue;
        out->chosen = out->step_count - 1;
        break;
    }
    return 0;
}

/* ---- the command line ---- */

static void add(struct sw_plan_option *list, int *count, const char *name, const char *value) {
    assert(*count < SW_PLAN_OPTIONS_MAX);
    struct sw_plan_option *option = &list[(*count)++];
    snprintf(option->name, sizeof(option->name), "%s", name);
    snprintf(option->value, sizeof(option->value), "%s", value);
}

static void add_number(struct sw_plan_option *list, int *count, const char *name, double value) {
    char text[40];
    snprintf(text, sizeof(text), "%.0f", value);
    add(list, count, name, text);
}

/* In megabytes, down: a budget that a size of three digits would exceed is not there. */
static void add_budget(struct sw_plan_option *list, int *count, const char *name, double bytes) {
    char text[40];
    if (bytes < 1e7)
        snprintf(text, sizeof(text), "%.0fK", floor(bytes / 1e3));
    else
        snprintf(text, sizeof(text), "%.0fM", floor(bytes / 1e6));
    add(list, count, name, text);
}

static void add_tiers(struct sw_plan_option *list, int *count, const char *name,
                      struct sw_tiers tiers) {
    char text[64];
    add(list, count, name, sw_tiers_print(tiers, text, sizeof(text)));
}

/* A folder on each drive, by names that stand for where they are mounted. */
static void add_folders(struct sw_plan_option *list, int *count, const struct sw_machine *m) {
    char text[sizeof(list->value)] = "";
    for (uint32_t i = 0; i < m->drive_count; i++) {
        if (!strcmp(m->drives[i].name, SW_MACHINE_OUT_FOLDER)) return; /* what train takes anyway */
        const size_t used = strlen(text);
        snprintf(text + used, sizeof(text) - used, "%s/mnt/nvme%u", i ? "," : "", i);
    }
    add(list, count, "nvme", text);
}

int sw_plan_options(const struct sw_plan_case *c, const struct sw_plan_step *step,
                    struct sw_plan_option out[SW_PLAN_OPTIONS_MAX]) {
    const struct sw_fit *f = &step->fit;
    const struct sw_train_options *o = &f->options, *asked = &c->options;
    const uint32_t ranks = o->ranks * c->nodes;
    int n = 0;
    add(out, &n, "device", o->device == SW_DEVICE_CUDA ? "cuda" : "host");
    add_number(out, &n, "ranks", o->ranks);
    if (c->tokens) add_number(out, &n, "accumulate", o->accumulate);
    if (ranks > 1) add_number(out, &n, "zero", (double)o->zero);
    if (o->shard_in_node) add(out, &n, "shard", "node");
    add_tiers(out, &n, "params", o->params);
    add_tiers(out, &n, "optimizer", o->optimizer);
    if (!sw_tiers_is_all(o->optimizer, SW_TIER_DEVICE))
        add_tiers(out, &n, "gradients", o->gradients);
    add_tiers(out, &n, "activations", o->activations);
    if (f->need_bytes[SW_TIER_NVME] > 0 && asked->nvme_count == 0) add_folders(out, &n, c->machine);
    if (o->checkpoint_every > 1) add_number(out, &n, "checkpoint-every", o->checkpoint_every);
    if (sw_overlap_of(o) != sw_overlap_of(asked))
        add(out, &n, "overlap", sw_overlap_name(o->overlap));
    if (o->late_below >= 0) add_number(out, &n, "late-below", (double)o->late_below);
    if (o->late_top >= 0) add_number(out, &n, "late-top", (double)o->late_top);
    if (o->device == SW_DEVICE_CUDA && !asked->device_memory_bytes)
        add_budget(out, &n, "device-memory", f->budget_bytes[SW_TIER_DEVICE]);
    if (!asked->host_memory_bytes)
        add_budget(out, &n, "host-memory", f->budget_bytes[SW_TIER_HOST]);
    return n;
}
