/* engine/trainer_refuse.c - a run that does not fit: by how much, and what would make it fit. */
#include "engine/trainer_internal.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include "base/log.h"
#include "base/size.h"

static const char same[] = "the same bits, more traffic";
static const char slower[] = "the same bits, more traffic and computation";
static const char split[] = "the same step in smaller micro-batches: other roundings";
static const char larger[] = "as asked, with more memory";

static int is_same(struct sw_tiers a, struct sw_tiers b) {
    return memcmp(&a, &b, sizeof(a)) == 0;
}

static void set(struct sw_remedy *remedy, const char *name, const char *value) {
    const int i = remedy->option_count++;
    snprintf(remedy->options[i].name, sizeof(remedy->options[i].name), "%s", name);
    snprintf(remedy->options[i].value, sizeof(remedy->options[i].value), "%s", value);
}

static void set_tiers(struct sw_remedy *r, const char *name, struct sw_tiers asked,
                      struct sw_tiers got) {
    char text[40];
    if (!is_same(asked, got)) set(r, name, sw_tiers_print(got, text, sizeof(text)));
}

static void set_number(struct sw_remedy *r, const char *name, uint64_t asked, uint64_t got) {
    char text[40];
    snprintf(text, sizeof(text), "%llu", (unsigned long long)got);
    if (asked != got) set(r, name, text);
}

static void set_budget(struct sw_remedy *r, const char *name, uint64_t bytes) {
    char text[40];
    snprintf(text, sizeof(text), "%lluK", (unsigned long long)(bytes / 1000));
    if (bytes) set(r, name, text);
}

/* Whether these options fit; the ones that differ from what was asked become a remedy. */
static int try(struct sw_trainer *t, const struct sw_train_options *asked,
               struct sw_train_options *o, const char *effect, struct sw_refusal *out) {
    struct sw_placement placement;
    struct sw_placement_input input;
    struct sw_shortfall shortfall;
    if (out->remedy_count == SW_REMEDIES_MAX) return 0;
    const int ret = sw_trainer_try(t, o, &placement, &input, &shortfall);
    if (ret == 0 || ret == -ENOSPC) sw_placement_free(&placement);
    if (ret < 0) return 0;
    struct sw_remedy *r = &out->remedies[out->remedy_count++];
    *r = (struct sw_remedy){.effect = effect};
    set_tiers(r, "params", asked->params, o->params);
    set_tiers(r, "optimizer", asked->optimizer, o->optimizer);
    set_tiers(r, "gradients", asked->gradients, o->gradients);
    set_tiers(r, "activations", asked->activations, o->activations);
    set_number(r, "checkpoint-every", asked->checkpoint_every, o->checkpoint_every);
    set_number(r, "micro-batch", asked->micro_batch, o->micro_batch);
    set_number(r, "accumulate", asked->accumulate, o->accumulate);
    return 1;
}

static struct sw_train_options opened(const struct sw_train_options *asked) {
    struct sw_train_options o = *asked;
    const struct sw_tiers open = {{0}};
    o.params = o.optimizer = o.gradients = o.activations = open;
    return o;
}

/* The least divisor of `micro_batch` that is at least `factor`; 0: none that accumulate admits. */
static uint32_t next_factor(const struct sw_train_options *asked, uint32_t factor) {
    const uint32_t most = SW_ACCUMULATE_MAX / asked->accumulate;
    for (; factor <= most && factor <= asked->micro_batch; factor++)
        if (asked->micro_batch % factor == 0) return factor;
    return 0;
}

/* The same rows in `factor` times as many micro-batches. */
static int try_split(struct sw_trainer *t, const struct sw_train_options *asked, uint32_t factor,
                     struct sw_refusal *out) {
    struct sw_train_options o = *asked;
    o.micro_batch /= factor;
    o.accumulate *= factor;
    struct sw_train_options open = opened(&o);
    return try(t, asked, &o, split, out) || try(t, asked, &open, split, out);
}

/* Lower tiers, then fewer kept inputs, then smaller micro-batches. */
static void look_lower(struct sw_trainer *t, const struct sw_train_options *asked,
                       struct sw_refusal *out) {
    struct sw_train_options o = opened(asked);
    int found = try(t, asked, &o, same, out);
    for (uint32_t every = 2; !found && every <= t->model.config.layers; every *= 2) {
        o = opened(asked);
        o.checkpoint_every = every;
        found = every > asked->checkpoint_every && try(t, asked, &o, slower, out);
    }
    /* Each a quarter larger than the one before, at least: some numbers have many divisors. */
    for (uint32_t f = 2; !found && (f = next_factor(asked, f)) > 0; f += f / 4 + 1)
        found = try_split(t, asked, f, out);
}

/* The longest rows, by halves, of which a run would fit; 0: none. */
static uint32_t look_shorter(struct sw_trainer *t, const struct sw_train_options *asked) {
    struct sw_refusal none = {0};
    for (uint32_t length = asked->seq_len / 2; length > 0; length /= 2) {
        struct sw_train_options o = opened(asked);
        o.seq_len = length;
        if (try(t, asked, &o, same, &none)) return length;
    }
    return 0;
}

/* Budgets that suffice: the least that the lowest tiers which are open take. */
static void look_larger(struct sw_trainer *t, const struct sw_train_options *asked,
                        struct sw_refusal *out) {
    if (out->remedy_count == SW_REMEDIES_MAX) return;
    struct sw_train_options o = *asked;
    uint64_t need[SW_TIER_COUNT] = {0};
    int grew = 0;
    for (int pass = 0; pass < 4; pass++) {
        struct sw_placement placement;
        struct sw_placement_input input;
        struct sw_shortfall s;
        struct sw_train_options again = o;
        const int ret = sw_trainer_try(t, &again, &placement, &input, &s);
        if (ret == 0 || ret == -ENOSPC) sw_placement_free(&placement);
        if (ret == 0) break;
        if (ret != -ENOSPC || s.tier == SW_TIER_COUNT) return;
        need[s.tier] = (s.need_bytes / 1000 + 1) * 1000;
        if (s.tier == SW_TIER_DEVICE) o.device_memory_bytes = need[s.tier];
        if (s.tier == SW_TIER_HOST) o.host_memory_bytes = need[s.tier];
        grew = 1;
    }
    if (!grew) return;
    struct sw_remedy *r = &out->remedies[out->remedy_count++];
    *r = (struct sw_remedy){.effect = larger};
    set_budget(r, "device-memory", need[SW_TIER_DEVICE]);
    set_budget(r, "host-memory", need[SW_TIER_HOST]);
}

int sw_trainer_refuse(struct sw_trainer *t, const struct sw_train_options *asked,
                      const struct sw_shortfall *s) {
    static const char *const limits[] = {"device memory, and --device-memory allows",
                                         "host memory, and --host-memory allows", "",
                                         "memory, and may use"};
    char need[32], have[32], missing[32];
    sw_error("the run needs %s of %s %s: %s are missing",
             sw_size_print(s->need_bytes, need, sizeof(need)), limits[s->tier],
             sw_size_print(s->allowed_bytes, have, sizeof(have)),
             sw_size_print(s->need_bytes - s->allowed_bytes, missing, sizeof(missing)));
    if (!t->hooks.on_refused) return -ENOMEM;
    struct sw_byte_row rows[SW_BYTE_ROWS_MAX];
    struct sw_refusal refusal = {.rows = rows,
                                 .row_count = sw_placement_table(&t->placement, &t->input, rows)};
    look_lower(t, asked, &refusal);
    look_larger(t, asked, &refusal);
    if (refusal.remedy_count == 0) refusal.shorter_rows = look_shorter(t, asked);
    t->hooks.on_refused(t->hooks.ctx, &refusal);
    return -ENOMEM;
}
