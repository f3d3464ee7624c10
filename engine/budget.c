/* engine/budget.c - see the header. */
#include "engine/budget.h"

#include <errno.h>

/* The states in the order in which they go down a tier when the device, or the host, is full: first
 * what costs the least time. */
enum state { ACTIVATIONS, GRADIENTS, OPTIMIZER, PARAMS, STATE_COUNT };

struct search {
    struct sw_placement_input *input;
    const struct sw_train_options *options;
    struct sw_tiers *tiers[STATE_COUNT];
    int open[STATE_COUNT]; /* not chosen by the user */
    uint64_t need[SW_TIER_COUNT];
};

static void begin(struct search *s) {
    const struct sw_train_options *o = s->options;
    struct sw_placement_input *in = s->input;
    in->activations = o->activations;
    in->gradients = o->gradients;
    in->optimizer = o->optimizer;
    in->params = o->params;
    s->tiers[ACTIVATIONS] = &in->activations;
    s->tiers[GRADIENTS] = &in->gradients;
    s->tiers[OPTIMIZER] = &in->optimizer;
    s->tiers[PARAMS] = &in->params;
    for (int i = 0; i < STATE_COUNT; i++) {
        s->open[i] = !sw_tiers_chosen(*s->tiers[i]);
        if (!s->open[i]) continue;
        const int device = i == ACTIVATIONS || i == PARAMS;
        *s->tiers[i] = sw_tiers_all(device ? SW_TIER_DEVICE : SW_TIER_HOST);
    }
    /* Where Adam runs on the device, gradients wait there. */
    if (s->open[GRADIENTS] && sw_tiers_is_all(in->optimizer, SW_TIER_DEVICE))
        in->gradients = sw_tiers_all(SW_TIER_DEVICE);
}

static int64_t commit_interval(const struct search *s) {
    const struct sw_train_options *o = s->options;
    if (o->commit_every >= 0) return o->commit_every;
    if (sw_tiers_is_all(s->input->optimizer, SW_TIER_NVME)) return 1;
    if (o->save_every) return (int64_t)o->save_every;
    return o->keep_store ? (int64_t)o->steps : 0;
}

/* A commit that a run goes on from stays whole, also where the run makes none. */
static uint32_t homes(const struct search *s, int resuming) {
    if (commit_interval(s) || resuming) return 2;
    return sw_tiers_has(s->input->optimizer, SW_TIER_NVME);
}

/* Lowers one state that is open and wholly in `tier`. 0: there is none. */
static int lower(struct search *s, enum sw_tier tier) {
    for (int i = 0; i < STATE_COUNT; i++) {
        if (!s->open[i] || !sw_tiers_is_all(*s->tiers[i], tier)) continue;
        /* Weights leave the device only where Adam does not work on them there. */
        if (i == PARAMS && tier == SW_TIER_DEVICE &&
            sw_tiers_has(s->input->optimizer, SW_TIER_DEVICE))
            continue;
        *s->tiers[i] = sw_tiers_all((enum sw_tier)(tier + 1));
        return 1;
    }
    return 0;
}

static int over(uint64_t need, uint64_t budget) {
    return budget && need > budget;
}

static int build(struct search *s, struct sw_placement *placement, int resuming) {
    s->input->homes = homes(s, resuming);
    int ret = sw_placement_build(placement, s->input);
    if (ret == 0 && s->input->homes == 1 && placement->state_bytes[SW_TIER_NVME] == 0) {
        sw_placement_free(placement); /* units too small for their shares: nothing came to NVMe */
        s->input->homes = 0;
        ret = sw_placement_build(placement, s->input);
    }
    if (ret < 0) return ret;
    struct sw_byte_row rows[SW_BYTE_ROWS_MAX];
    const int count = sw_placement_table(placement, s->input, rows);
    for (int tier = 0; tier < SW_TIER_COUNT; tier++)
        s->need[tier] = sw_placement_bytes(rows, count, (enum sw_tier)tier);
    return 0;
}

/* Whose budget is exceeded; 0: nobody's. */
static int exceeds(const struct search *s, struct sw_shortfall *out) {
    const struct sw_placement_input *in = s->input;
    const enum sw_tier tiers[] = {SW_TIER_DEVICE, SW_TIER_HOST};
    for (int i = 0; i < 2; i++) {
        const uint64_t budget = in->budget_bytes[tiers[i]];
        *out = (struct sw_shortfall){tiers[i], s->need[tiers[i]], budget};
        if (over(out->need_bytes, budget)) return 1;
    }
    const uint64_t devices = in->device_is_apart ? 0 : in->local_ranks * s->need[SW_TIER_DEVICE];
    *out = (struct sw_shortfall){SW_TIER_COUNT, devices + s->need[SW_TIER_HOST], in->machine_bytes};
    return over(out->need_bytes, in->machine_bytes);
}

int sw_budget_place(struct sw_placement *placement, struct sw_placement_input *input,
                    struct sw_train_options *o, int resuming, struct sw_shortfall *shortfall) {
    struct search s = {.input = input, .options = o};
    begin(&s);
    for (;;) {
        const int ret = build(&s, placement, resuming);
        if (ret < 0) return ret;
        if (!exceeds(&s, shortfall)) break;
        const enum sw_tier tier = shortfall->tier;
        int lowered = lower(&s, tier == SW_TIER_COUNT ? SW_TIER_HOST : tier);
        if (!lowered && tier == SW_TIER_COUNT && !input->device_is_apart)
            lowered = lower(&s, SW_TIER_DEVICE);
        if (!lowered) return -ENOSPC;
        sw_placement_free(placement);
    }
    o->commit_every = commit_interval(&s);
    o->activations = input->activations;
    o->gradients = input->gradients;
    o->optimizer = input->optimizer;
    o->params = input->params;
    return 0;
}
