/* tools/plan_search.c - what a plan says of the placements that were searched, and from how many
 * tokens on the computation is all that counts; as text and as JSON. */
#include <inttypes.h>
#include <string.h>

#include "tools/plan.h"

static const struct {
    const char *name;
    size_t offset;
} states[] = {
    {"weights", offsetof(struct sw_train_options, params)},
    {"optimizer", offsetof(struct sw_train_options, optimizer)},
    {"gradients", offsetof(struct sw_train_options, gradients)},
    {"kept inputs", offsetof(struct sw_train_options, activations)},
};
enum { STATES = sizeof(states) / sizeof(states[0]) };

void sw_plan_say_placement(const struct sw_train_options *o, uint32_t ranks, char *out,
                           size_t out_size) {
    char tiers[64];
    size_t used = 0;
    *out = 0;
    for (int i = 0; i < STATES; i++) {
        struct sw_tiers t;
        memcpy(&t, (const char *)o + states[i].offset, sizeof(t));
        used += (size_t)snprintf(out + used, out_size - used, "%s%s %s", i ? ", " : "",
                                 states[i].name, sw_tiers_print(t, tiers, sizeof(tiers)));
    }
    if (ranks > 1)
        used += (size_t)snprintf(out + used, out_size - used, ", stage %d", (int)o->zero);
    if (o->checkpoint_every > 1)
        used += (size_t)snprintf(out + used, out_size - used,
                                 ", an input kept every %" PRIu32 " layers", o->checkpoint_every);
    snprintf(out + used, out_size - used, ", overlap %s", sw_overlap_name(sw_overlap_of(o)));
}

static void print_found(const struct sw_plan_case *c, const struct sw_plan_found *f, FILE *out) {
    char placement[512], text[1024], step[32], rule[32];
    if (!f->is_searched && !f->missing) return;
    if (f->missing) {
        fprintf(out, "\nno faster placement was searched: the profile does not tell %s\n",
                f->missing);
        return;
    }
    sw_plan_say_placement(&f->step.fit.options, c->options.ranks * c->nodes, placement,
                          sizeof(placement));
    fprintf(out, "\nsearch: %" PRIu32 " placements were looked at, %" PRIu32 " of them played\n",
            f->fitted, f->played);
    sw_plan_duration(f->times.step_s, step, sizeof(step));
    if (f->times.step_s < f->decided_step_s)
        snprintf(text, sizeof(text), "The fastest takes %s a step, where the rule's takes %s: %s.",
                 step, sw_plan_duration(f->decided_step_s, rule, sizeof(rule)), placement);
    else
        snprintf(text, sizeof(text), "None is faster than the rule's, %s a step: %s.", step,
                 placement);
    sw_plan_wrapped(text, "  ", out);
}

static void print_balance(const struct sw_plan_answer *a, FILE *out) {
    const struct sw_plan_balance *b = &a->balance;
    char text[512], tokens[32], step[32], compute[32];
    if (!a->found.is_searched) return;
    if (b->tokens == 0)
        snprintf(text, sizeof(text),
                 "No step of up to %s tokens takes less than %.0f%% more than its computation.",
                 sw_plan_commas(b->tokens_max, tokens, sizeof(tokens)), 100 * SW_PLAN_OVERHEAD);
    else
        snprintf(text, sizeof(text),
                 "From %s tokens a step on it takes at most %.0f%% more than its computation (%s, "
                 "of which %s).",
                 sw_plan_commas(b->tokens, tokens, sizeof(tokens)), 100 * SW_PLAN_OVERHEAD,
                 sw_plan_duration(b->step_s, step, sizeof(step)),
                 sw_plan_duration(b->compute_s, compute, sizeof(compute)));
    sw_plan_wrapped(text, "  ", out);
}

void sw_plan_print_search(const struct sw_plan_case *c, const struct sw_plan_answer *a, FILE *out) {
    print_found(c, &a->found, out);
    print_balance(a, out);
}

static json_t *placement_json(const struct sw_train_options *o) {
    static const char *const keys[STATES] = {"params", "optimizer", "gradients", "activations"};
    json_t *root = json_object();
    char text[64];
    for (int i = 0; i < STATES; i++) {
        struct sw_tiers t;
        memcpy(&t, (const char *)o + states[i].offset, sizeof(t));
        json_object_set_new(root, keys[i], json_string(sw_tiers_print(t, text, sizeof(text))));
    }
    json_object_set_new(root, "zero", json_integer(o->zero));
    json_object_set_new(root, "checkpoint_every", json_integer(o->checkpoint_every));
    json_object_set_new(root, "overlap", json_string(sw_overlap_name(sw_overlap_of(o))));
    return root;
}

json_t *sw_plan_search_json(const struct sw_plan_answer *a) {
    const struct sw_plan_found *f = &a->found;
    const struct sw_plan_balance *b = &a->balance;
    return json_pack("{s:b, s:s?, s:i, s:i, s:f, s:f, s:f, s:o, s:o}", "searched", f->is_searched,
                     "missing", f->missing, "looked_at", (int)f->fitted, "played", (int)f->played,
                     "decided_step_s", f->decided_step_s, "step_s", f->times.step_s, "compute_s",
                     f->times.compute_s, "placement", placement_json(&f->step.fit.options),
                     "balance",
                     b->tokens == 0 ? json_null()
                                    : json_pack("{s:I, s:f, s:f}", "tokens", (json_int_t)b->tokens,
                                                "step_s", b->step_s, "compute_s", b->compute_s));
}
