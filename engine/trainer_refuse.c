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
    for (uint32_t micro = asked->micro_batch; micro > 1 && micro % 2 == 0 && !found;) {
        micro /= 2;
        const uint64_t accumulate = (uint64_t)asked->accumulate * asked->micro_batch / micro;
        if (accumulate > UINT32_MAX) break;
        o = *asked;
        o.micro_batch = micro;
        o.accumulate = (uint32_t)accumulate;
        if (try(t, asked, &o, split, out)) break;
        o = opened(&o);
        o.micro_batch = micro;
        o.accumulate = (uint32_t)accumulate;
        found = try(t, asked, &o, split, out);
    }
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
                                         "memory, and this machine has"};
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
    t->hooks.on_refused(t->hooks.ctx, &refusal);
    return -ENOMEM;
}
