/* tools/plan_words.c - the decision in words, with the numbers of the case. */
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <string.h>

#include "tools/plan.h"

const char *sw_plan_commas(uint64_t value, char *out, size_t out_size) {
    char digits[32];
    snprintf(digits, sizeof(digits), "%" PRIu64, value);
    const size_t length = strlen(digits);
    size_t at = 0;
    for (size_t i = 0; i < length && at + 2 < out_size; i++) {
        if (i && (length - i) % 3 == 0) out[at++] = ',';
        out[at++] = digits[i];
    }
    out[at] = 0;
    return out;
}

const char *sw_plan_size(double bytes, char *out, size_t out_size) {
    static const struct {
        const char *name;
        double bytes;
    } units[] = {{"GB", 1e9}, {"MB", 1e6}, {"kB", 1e3}};
    const size_t last = sizeof(units) / sizeof(units[0]) - 1;
    size_t u = 0;
    while (u < last && bytes < 0.9995 * units[u].bytes) u++;
    const double value = bytes / units[u].bytes;
    char text[32];
    if (value >= 99.95 || fabs(value - round(value)) < 0.05)
        sw_plan_commas((uint64_t)llrint(value), text, sizeof(text));
    else
        snprintf(text, sizeof(text), "%.1f", value);
    snprintf(out, out_size, "%s %s", text, units[u].name);
    return out;
}

void sw_plan_say(char *out, size_t out_size, const char *format, ...) {
    const size_t used = strlen(out);
    va_list args;
    va_start(args, format);
    vsnprintf(out + used, out_size - used, format, args);
    va_end(args);
}

static const char *device_word(const struct sw_plan_case *c) {
    return c->options.device == SW_DEVICE_CUDA ? "GPU" : "rank";
}

/* Where a state lies: "65% in RAM and the rest on NVMe". */
static void say_place(char *out, size_t out_size, struct sw_tiers t) {
    const int ram = t.percent[SW_TIER_HOST];
    if (ram == 100)
        sw_plan_say(out, out_size, "in RAM");
    else if (sw_tiers_is_all(t, SW_TIER_NVME))
        sw_plan_say(out, out_size, "on NVMe");
    else
        sw_plan_say(out, out_size, "%d%% in RAM and the rest on NVMe", ram);
}

static void say_memory(char *out, size_t out_size, const struct sw_fit *f, enum sw_tier tier) {
    static const char *const where[] = {"", "RAM", "NVMe"};
    char need[32], have[32];
    if (f->need_bytes[tier] == 0) return;
    sw_plan_say(out, out_size, ", %s of %s", sw_plan_size(f->need_bytes[tier], need, sizeof(need)),
                where[tier]);
    if (f->budget_bytes[tier] > 0)
        sw_plan_say(out, out_size, " of %s",
                    sw_plan_size(f->budget_bytes[tier], have, sizeof(have)));
}

void sw_plan_verdict(const struct sw_plan_case *c, const struct sw_plan_decision *d, int i,
                     char *out, size_t out_size) {
    const struct sw_plan_step *s = &d->steps[i];
    const struct sw_fit *f = &s->fit;
    const double budget = f->budget_bytes[SW_TIER_DEVICE];
    char state[32], need[32], have[32];
    sw_plan_size(s->gpu_state_bytes, state, sizeof(state));
    sw_plan_size(s->gpu_need_bytes, need, sizeof(need));
    sw_plan_size(budget, have, sizeof(have));
    *out = 0;
    sw_plan_say(out, out_size, "%s: %s of weights, gradients and optimizer on each %s",
                sw_scheme_name(s->scheme), s->gpu_state_bytes > 0 ? state : "nothing",
                device_word(c));
    if (!s->state_fits) {
        sw_plan_say(out, out_size, ", which may hold %s: no", have);
        return;
    }
    sw_plan_say(out, out_size, ", %s with activations and the unit at hand", need);
    if (budget > 0) sw_plan_say(out, out_size, ", of %s", have);
    if (!s->fits && budget > 0 && s->gpu_need_bytes > budget) {
        sw_plan_say(out, out_size, ": no");
        return;
    }
    say_memory(out, out_size, f, SW_TIER_HOST);
    say_memory(out, out_size, f, SW_TIER_NVME);
    sw_plan_say(out, out_size, s->fits ? ": fits" : ": no");
}

/* The clause of the rule that the choice is made by. */
static void say_rule(char *out, size_t out_size, const struct sw_plan_case *c,
                     const struct sw_plan_step *s) {
    const struct sw_train_options *o = &s->fit.options;
    switch (s->scheme) {
    case SW_SCHEME_DATA_PARALLEL:
        sw_plan_say(out, out_size,
                    o->ranks * c->nodes > 1 ? "It fits with data parallel: use it."
                                            : "It fits whole: use it so.");
        break;
    case SW_SCHEME_ZERO1:
    case SW_SCHEME_ZERO2:
        sw_plan_say(out, out_size, "The optimizer state is what hurts: stage %d shards it%s.",
                    (int)s->scheme, s->scheme == SW_SCHEME_ZERO2 ? ", and the gradients" : "");
        break;
    case SW_SCHEME_HYBRID:
        sw_plan_say(out, out_size,
                    "The parameters do not fit whole: stage 3, inside each machine, which "
                    "spares the network between them.");
        break;
    case SW_SCHEME_ZERO3:
        sw_plan_say(out, out_size, "The parameters do not fit whole: stage 3 shards them.");
        break;
    case SW_SCHEME_OFFLOAD_OPTIMIZER:
        sw_plan_say(out, out_size, "The state does not fit on the %ss: the optimizer leaves them, ",
                    device_word(c));
        say_place(out, out_size, o->optimizer);
        sw_plan_say(out, out_size, ".");
        break;
    case SW_SCHEME_OFFLOAD_ALL:
        sw_plan_say(out, out_size, "Not even the weights fit on the %ss: they lie ",
                    device_word(c));
        say_place(out, out_size, o->params);
        sw_plan_say(out, out_size, ", the optimizer ");
        say_place(out, out_size, o->optimizer);
        sw_plan_say(out, out_size, ", and units are streamed in.");
        break;
    case SW_SCHEME_COUNT:
        break;
    }
}

static void say_nothing_fits(char *out, size_t out_size, const struct sw_plan_case *c,
                             const struct sw_plan_step *s) {
    static const char *const where[] = {"", "RAM", "NVMe", "memory"};
    const struct sw_fit *f = &s->fit;
    const int shared = f->short_of == SW_TIER_COUNT;
    const int tier = shared ? SW_TIER_HOST : (int)f->short_of;
    const double need =
        shared ? f->options.ranks * f->need_bytes[SW_TIER_DEVICE] + f->need_bytes[SW_TIER_HOST]
        : tier == SW_TIER_DEVICE ? s->gpu_need_bytes
                                 : f->need_bytes[tier];
    char missing[32];
    sw_plan_size(need - f->budget_bytes[tier], missing, sizeof(missing));
    sw_plan_say(out, out_size, "Nothing fits: with %s, ", sw_scheme_name(s->scheme));
    if (f->short_of == SW_TIER_NVME && c->machine->drive_count == 0)
        sw_plan_say(out, out_size, "%s of NVMe are missing", missing);
    else
        sw_plan_say(out, out_size, "%s of %s are missing", missing,
                    f->short_of == SW_TIER_DEVICE ? "device memory" : where[f->short_of]);
    if (c->machine->drive_count == 0)
        sw_plan_say(out, out_size,
                    ", and the machine has no drives for what RAM cannot hold "
                    "(--machine NAME:nvme=8xgen5)");
    sw_plan_say(out, out_size,
                ". Fewer tokens at once (--micro-batch, --seq-len) need less device memory, "
                "fewer a step (--accumulate) fewer kept inputs, --freeze less of all.");
}

void sw_plan_conclusion(const struct sw_plan_case *c, const struct sw_plan_decision *d, char *out,
                        size_t out_size) {
    *out = 0;
    if (d->chosen < 0) {
        say_nothing_fits(out, out_size, c, &d->steps[d->step_count - 1]);
        return;
    }
    const struct sw_plan_step *s = &d->steps[d->chosen];
    const struct sw_train_options *o = &s->fit.options;
    say_rule(out, out_size, c, s);
    if (!s->activations_bound) return;
    if (sw_tiers_has(o->activations, SW_TIER_DEVICE)) {
        sw_plan_say(out, out_size,
                    " Activations bind: keep every %u%s layer's input, compute the layers "
                    "between again.",
                    o->checkpoint_every,
                    o->checkpoint_every == 2   ? "nd"
                    : o->checkpoint_every == 3 ? "rd"
                                               : "th");
        return;
    }
    sw_plan_say(out, out_size, " Activations bind: layers' inputs are kept ");
    say_place(out, out_size, o->activations);
    sw_plan_say(out, out_size, ".");
}
