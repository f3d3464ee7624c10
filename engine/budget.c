/* engine/budget.c - see the header. */
#include "engine/budget.h"

#include <errno.h>
#include <stdio.h>
#include "base/log.h"
#include "base/size.h"

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
    const int ret = sw_placement_build(placement, s->input);
    if (ret < 0) return ret;
    struct sw_byte_row rows[SW_BYTE_ROWS_MAX];
    const int count = sw_placement_table(placement, s->input, rows);
    for (int tier = 0; tier < SW_TIER_COUNT; tier++)
        s->need[tier] = sw_placement_bytes(rows, count, (enum sw_tier)tier);
    return 0;
}

static int refuse(const struct search *s, const char *whose, uint64_t need, uint64_t have) {
    char a[32], b[32], c[32];
    sw_error("the run needs %s of %s memory and may use %s: %s are missing; lower tiers (--params, "
             "--activations, --gradients, --optimizer nvme), --checkpoint-every, a smaller "
             "--micro-batch, --accumulate or --seq-len need less (--dry-run prints the table)",
             sw_size_print(need, a, sizeof(a)), whose, sw_size_print(have, b, sizeof(b)),
             sw_size_print(need - have, c, sizeof(c)));
    (void)s;
    return -ENOMEM;
}

int sw_budget_place(struct sw_placement *placement, struct sw_placement_input *input,
                    struct sw_train_options *o, int resuming, uint64_t memory_bytes) {
    struct search s = {.input = input, .options = o};
    const uint64_t *budget = input->budget_bytes;
    begin(&s);
    for (;;) {
        int ret = build(&s, placement, resuming);
        if (ret < 0) return ret;
        const uint64_t sum = s.need[SW_TIER_DEVICE] + s.need[SW_TIER_HOST];
        const int device = over(s.need[SW_TIER_DEVICE], budget[SW_TIER_DEVICE]);
        const int host = over(s.need[SW_TIER_HOST], budget[SW_TIER_HOST]);
        const int both = over(sum, memory_bytes);
        if (!device && !host && !both) break;
        if (device ? lower(&s, SW_TIER_DEVICE) : lower(&s, SW_TIER_HOST)) {
            sw_placement_free(placement);
            continue;
        }
        if (!device && !host && lower(&s, SW_TIER_DEVICE)) {
            sw_placement_free(placement);
            continue;
        }
        ret = device ? refuse(&s, "device", s.need[SW_TIER_DEVICE], budget[SW_TIER_DEVICE])
              : host ? refuse(&s, "host", s.need[SW_TIER_HOST], budget[SW_TIER_HOST])
                     : refuse(&s, "this machine's", sum, memory_bytes);
        sw_placement_free(placement);
        return ret;
    }
    o->commit_every = commit_interval(&s);
    o->activations = input->activations;
    o->gradients = input->gradients;
    o->optimizer = input->optimizer;
    o->params = input->params;
    return 0;
}
