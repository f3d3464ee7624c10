/* plan/sweep_case.c - see the header. */
#include "plan/sweep_case.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/size.h"
#include "engine/collective.h"
#include "plan/lane_rates.h"
#include "plan/search.h"

/* How far a sweep goes where nobody says. */
enum { TIMES = 8 };

static const char *const names[] = {"tokens", "nvme", "pcie", "ram", "gpus", "adam", "flops"};

const char *sw_sweep_name(enum sw_sweep_what what) {
    return names[what];
}

/* ---- the option ---- */

static int complain(const char *text, const char *why) {
    sw_error("--sweep: '%s' %s", text, why);
    return -EINVAL;
}

/* "16K..1M" */
static int parse_range(const char *text, struct sw_sweep_range *out) {
    const char *dots = strstr(text, "..");
    char first[32];
    uint64_t from, to;
    const size_t length = dots ? (size_t)(dots - text) : sizeof(first);
    snprintf(first, sizeof(first), "%.*s", length < sizeof(first) ? (int)length : 0, text);
    if (!dots || sw_size_parse(first, &from) < 0 || sw_size_parse(dots + 2, &to) < 0)
        return complain(text, "is no range (such as 16K..1M)");
    if (from == 0 || from >= to) return complain(text, "must begin above 0 and end above that");
    out->from = (double)from;
    out->to = (double)to;
    return 0;
}

int sw_sweep_parse(const char *text, struct sw_sweep_range *out) {
    const size_t length = strcspn(text, "=");
    *out = (struct sw_sweep_range){.what = SW_SWEEP_WHAT_COUNT};
    for (int i = 0; i < SW_SWEEP_WHAT_COUNT; i++)
        if (strlen(names[i]) == length && !strncmp(names[i], text, length))
            out->what = (enum sw_sweep_what)i;
    if (out->what == SW_SWEEP_WHAT_COUNT)
        return complain(text, "does not begin with one of: tokens, nvme, pcie, ram, gpus, adam, "
                              "flops");
    return text[length] ? parse_range(text + length + 1, out) : 0;
}

/* ---- the case's own value ---- */

static double micro_tokens(const struct sw_plan_case *c) {
    const struct sw_train_options *o = &c->options;
    return (double)o->micro_batch * o->seq_len * o->ranks * c->nodes;
}

static int is_throttled(const struct sw_sim_rates *sim, enum sw_sweep_what what) {
    return what == SW_SWEEP_NVME    ? sim->nvme_bytes[0] > 0
           : what == SW_SWEEP_PCIE  ? sim->copy_bytes[0] > 0
           : what == SW_SWEEP_ADAM  ? sim->adam_bytes > 0
           : what == SW_SWEEP_FLOPS ? sim->flops > 0
                                    : 0;
}

/* The throttle, or what the machine has; *figure: by its name in a profile, what is missing. */
static double drives_own(const struct sw_plan_case *c, const char **figure) {
    const struct sw_machine *m = c->machine;
    double read = 0;
    *figure = m->drive_count ? NULL : "drives";
    for (uint32_t d = 0; d < m->drive_count; d++) {
        read += m->drives[d].read_bytes_per_s;
        if (m->drives[d].write_bytes_per_s <= 0) *figure = "write_bytes_per_s of the drives";
        if (m->drives[d].read_bytes_per_s <= 0) *figure = "read_bytes_per_s of the drives";
    }
    return read;
}

static double machine_own(const struct sw_plan_case *c, enum sw_sweep_what what,
                          const char **figure) {
    const struct sw_machine *m = c->machine;
    switch (what) {
    case SW_SWEEP_NVME:
        return drives_own(c, figure);
    case SW_SWEEP_PCIE:
        *figure = m->h2d_bytes_per_s <= 0   ? "h2d_bytes_per_s"
                  : m->d2h_bytes_per_s <= 0 ? "d2h_bytes_per_s"
                                            : NULL;
        return m->h2d_bytes_per_s;
    case SW_SWEEP_RAM:
        *figure = m->memory_bytes > 0 ? NULL : "memory_bytes";
        return c->options.host_memory_bytes ? (double)c->options.host_memory_bytes
                                            : m->memory_bytes;
    case SW_SWEEP_GPUS:
        *figure = c->options.device == SW_DEVICE_CUDA ? NULL : "gpus";
        return c->options.ranks;
    case SW_SWEEP_ADAM:
        *figure = m->adam_bytes_per_s > 0 ? NULL : "adam_bytes_per_s";
        return m->adam_bytes_per_s;
    case SW_SWEEP_FLOPS:
        *figure = m->flops_per_s > 0 ? NULL : "flops_per_s";
        return m->flops_per_s;
    default:
        *figure = NULL;
        return micro_tokens(c) * c->options.accumulate;
    }
}

int sw_sweep_own(const struct sw_plan_case *c, enum sw_sweep_what what, double *own) {
    const struct sw_sim_rates *sim = &c->options.sim;
    const char *figure;
    if (is_throttled(sim, what)) {
        *own = (double)(what == SW_SWEEP_NVME   ? sim->nvme_bytes[0]
                        : what == SW_SWEEP_PCIE ? sim->copy_bytes[0]
                        : what == SW_SWEEP_ADAM ? sim->adam_bytes
                                                : sim->flops);
        return 0;
    }
    *own = machine_own(c, what, &figure);
    if (!figure) return 0;
    sw_error("--sweep %s: the machine (%s) has no %s", names[what], c->machine->name, figure);
    return -EINVAL;
}

/* ---- the case at another value ---- */

static uint64_t scaled(uint64_t rate, double times) {
    const double value = round((double)rate * times);
    return rate == 0 ? 0 : value < 1 ? 1 : (uint64_t)value;
}

static void scale_drives(struct sw_machine *m, double times) {
    for (uint32_t d = 0; d < m->drive_count; d++) {
        m->drives[d].read_bytes_per_s *= times;
        m->drives[d].write_bytes_per_s *= times;
        m->drives[d].mixed_bytes_per_s *= times;
    }
}

static void scale_throttle(struct sw_sim_rates *sim, enum sw_sweep_what what, double times) {
    for (int i = 0; i < 2; i++) {
        if (what == SW_SWEEP_NVME) sim->nvme_bytes[i] = scaled(sim->nvme_bytes[i], times);
        if (what == SW_SWEEP_PCIE) sim->copy_bytes[i] = scaled(sim->copy_bytes[i], times);
    }
    if (what == SW_SWEEP_ADAM) sim->adam_bytes = scaled(sim->adam_bytes, times);
    if (what == SW_SWEEP_FLOPS) sim->flops = scaled(sim->flops, times);
}

static void scale_machine(struct sw_machine *m, enum sw_sweep_what what, double times) {
    if (what == SW_SWEEP_NVME) scale_drives(m, times);
    if (what == SW_SWEEP_PCIE) {
        m->h2d_bytes_per_s *= times;
        m->d2h_bytes_per_s *= times;
        m->both_bytes_per_s *= times;
        m->switch_bytes_per_s *= times;
    }
    if (what == SW_SWEEP_RAM) m->memory_bytes *= times;
    if (what == SW_SWEEP_ADAM) m->adam_bytes_per_s *= times;
    if (what == SW_SWEEP_FLOPS) m->flops_per_s *= times;
}

/* As many micro-batches as the tokens of a step take, where these were told. */
static void set_gpus(struct sw_plan_case *c, struct sw_machine *m, double gpus) {
    c->options.ranks = (uint32_t)gpus;
    m->gpus = gpus;
    if (c->tokens) c->options.accumulate = (uint32_t)ceil((double)c->tokens / micro_tokens(c));
}

/* c and m are copies, that of c with m as its machine. */
static void move(struct sw_plan_case *c, struct sw_machine *m, enum sw_sweep_what what, double own,
                 double value) {
    struct sw_train_options *o = &c->options;
    if (what == SW_SWEEP_TOKENS)
        o->accumulate = (uint32_t)llround(value / micro_tokens(c));
    else if (what == SW_SWEEP_GPUS)
        set_gpus(c, m, value);
    else if (is_throttled(&o->sim, what))
        scale_throttle(&o->sim, what, value / own);
    else
        scale_machine(m, what, value / own);
    if (what == SW_SWEEP_RAM) o->host_memory_bytes = scaled(o->host_memory_bytes, value / own);
}

void sw_sweep_options(const struct sw_plan_case *c, enum sw_sweep_what what, double own,
                      double value, struct sw_train_options *out) {
    struct sw_machine machine = *c->machine;
    struct sw_plan_case there = *c;
    move(&there, &machine, what, own, value);
    *out = there.options;
}

/* ---- a point ---- */

struct what_if {
    const struct sw_plan_case *c;
    const struct sw_plan_step *step;
    enum sw_sweep_what what;
    int no_search;
    double own;
    const struct sw_sweep_range *range;
    const struct sw_sweep *sweep; /* as far as it is */
    uint32_t points;
    struct sw_plan_decision *decision; /* of a point */
    struct sw_plan_found *found;
};

/* What the case's own line says, but for what is swept. */
static int weigh_kept(const struct what_if *w, const struct sw_plan_case *c,
                      struct sw_plan_step *out) {
    struct sw_train_options o = w->step->fit.options;
    o.accumulate = c->options.accumulate;
    o.sim = c->options.sim;
    o.device_memory_bytes = c->options.device_memory_bytes;
    o.host_memory_bytes = c->options.host_memory_bytes;
    *out = (struct sw_plan_step){.scheme = w->step->scheme};
    return sw_plan_weigh(c, &o, out);
}

static int same_tiers(struct sw_tiers a, struct sw_tiers b) {
    return !memcmp(&a, &b, sizeof(a));
}

/* The same but for what is swept: scheme, placements, kept inputs, overlap. */
static int same_line(const struct sw_plan_step *a, const struct sw_plan_step *b) {
    const struct sw_train_options *x = &a->fit.options, *y = &b->fit.options;
    return a->scheme == b->scheme && x->zero == y->zero && x->shard_in_node == y->shard_in_node &&
           x->checkpoint_every == y->checkpoint_every && sw_overlap_of(x) == sw_overlap_of(y) &&
           x->late_below == y->late_below && x->late_top == y->late_top &&
           same_tiers(x->params, y->params) && same_tiers(x->optimizer, y->optimizer) &&
           same_tiers(x->gradients, y->gradients) && same_tiers(x->activations, y->activations);
}

/* As the plan of a case is made. *step: where it stands; NULL: nothing fits. */
static int decide(const struct what_if *w, const struct sw_plan_case *c,
                  const struct sw_plan_step **step, struct sw_simulation *times) {
    int ret = sw_plan_decide(c, w->decision);
    if (ret < 0 || w->decision->chosen < 0) return ret;
    ret = w->no_search ? sw_plan_take(c, w->decision, w->found)
                       : sw_plan_search(c, w->decision, w->found);
    *step = ret == 0 ? &w->found->step : NULL;
    *times = w->found->times;
    return ret;
}

/* The step of a point, and what it takes. */
static int settle(const struct what_if *w, const struct sw_plan_case *c, double value,
                  const struct sw_plan_step **step, struct sw_simulation *times) {
    struct sw_plan_step *kept = &w->decision->steps[0];
    const int says_what_fits = w->what == SW_SWEEP_RAM || w->what == SW_SWEEP_GPUS;
    if (w->step && value == w->own) {
        *step = w->step; /* as it was decided for the case */
        return sw_simulate(c, &w->step->fit, NULL, times);
    }
    if (w->step && !says_what_fits) {
        const int ret = weigh_kept(w, c, kept);
        if (ret < 0) return ret;
        if (kept->fits) {
            *step = kept;
            return sw_simulate(c, &kept->fit, NULL, times);
        }
    }
    /* A rate changes nothing of what fits. */
    return says_what_fits || w->what == SW_SWEEP_TOKENS ? decide(w, c, step, times) : 0;
}

static int answer(void *ctx, double value, struct sw_sweep_point *out) {
    const struct what_if *w = ctx;
    struct sw_machine machine = *w->c->machine;
    struct sw_plan_case c = *w->c;
    const struct sw_plan_step *step = NULL;
    struct sw_simulation times;
    if (w->range->told) w->range->told(w->range->told_ctx, w->sweep->point_count, w->points, value);
    c.machine = &machine;
    if (w->what != SW_SWEEP_RAM) c.played = NULL; /* other machines take other times */
    move(&c, &machine, w->what, w->own, value);
    if (c.options.accumulate > SW_ACCUMULATE_MAX) return 0; /* no run has so many */
    int ret = sw_sizing_check_step(&c.subject->model, &c.options);
    if (ret == 0) ret = settle(w, &c, value, &step, &times);
    if (ret < 0 || !step) return ret;
    if (!(times.step_s > 0)) {
        sw_error("--sweep %s: no rate of the machine (%s) is known, and a step takes no time",
                 names[w->what], machine.name);
        return -EINVAL;
    }
    out->fits = 1;
    out->anew = !w->step || !same_line(w->step, step);
    out->scheme = step->scheme;
    out->params = step->fit.options.params;
    out->optimizer = step->fit.options.optimizer;
    out->step_s = times.step_s;
    out->tokens_per_s = times.tokens_per_s;
    out->step_clock = times.step_clock;
    out->clock_share = times.share[times.step_clock];
    return 0;
}

/* ---- the range ---- */

/* Ranks that a run may have on a machine, and that the switches of a plan are enough for. */
static double most_gpus(const struct sw_plan_case *c) {
    const struct sw_machine *m = c->machine;
    const double ranks = floor((double)SW_RANKS_MAX / c->nodes);
    if (m->switch_bytes_per_s <= 0 || m->gpus_per_switch <= 0) return ranks;
    return fmin(ranks, floor(m->gpus_per_switch * SW_RATES_SWITCHES_MAX));
}

/* Powers of two from 1 on, and the case's own count. */
static uint32_t gpu_values(double to, double own, double out[SW_SWEEP_POINTS_MAX]) {
    uint32_t n = 0;
    for (double gpus = 1; gpus <= to; gpus *= 2) {
        out[n++] = gpus;
        if (own > gpus && own < 2 * gpus) out[n++] = own;
    }
    return n;
}

static int range_of(const struct sw_plan_case *c, const struct sw_sweep_range *r, double own,
                    double grain, double *from, double *to) {
    const double most = r->what == SW_SWEEP_TOKENS ? grain * SW_ACCUMULATE_MAX
                        : r->what == SW_SWEEP_GPUS ? most_gpus(c)
                                                   : 1e18;
    *from = r->from > 0 ? r->from : r->what == SW_SWEEP_GPUS ? 1 : own / TIMES;
    *to = r->to > 0 ? r->to : TIMES * own;
    *from = fmax(*from, grain);
    *to = fmin(*to, most);
    if (*from <= *to) return 0;
    sw_error("--sweep %s: from %.15g to %.15g is nothing that a run can have", names[r->what],
             r->from, r->to);
    return -EINVAL;
}

int sw_sweep_case(const struct sw_plan_case *c, const struct sw_plan_step *step,
                  const struct sw_sweep_range *range, struct sw_sweep *out) {
    double values[SW_SWEEP_POINTS_MAX], from = 0, to = 0;
    struct what_if w = {.c = c,
                        .step = step,
                        .what = range->what,
                        .no_search = range->no_search,
                        .range = range,
                        .sweep = out};
    /* Rates and sizes are whole, too. */
    *out = (struct sw_sweep){.grain = range->what == SW_SWEEP_TOKENS ? micro_tokens(c) : 1};
    int ret = sw_sweep_own(c, range->what, &w.own);
    if (ret == 0) ret = range_of(c, range, w.own, out->grain, &from, &to);
    if (ret < 0) return ret;
    w.decision = malloc(sizeof(*w.decision));
    w.found = malloc(sizeof(*w.found));
    const uint32_t points = range->points ? range->points : SW_SWEEP_POINTS_USUAL;
    const uint32_t count = range->what == SW_SWEEP_GPUS && range->to == 0
                               ? gpu_values(to, w.own, values)
                               : sw_sweep_values(from, to, w.own, out->grain, points, values);
    w.points = count;
    ret = w.decision && w.found ? sw_sweep_run(out, values, count, w.own, answer, &w) : -ENOMEM;
    free(w.decision);
    free(w.found);
    return ret;
}
