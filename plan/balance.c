/* plan/balance.c - see the header. */
#include "plan/balance.h"

#include <errno.h>
#include <stdlib.h>

#include "plan/simulate.h"

/* So many micro-batches at most are looked at, and no turn of more tasks than this. */
enum { MICRO_MAX = 4096, TASKS_MAX = 1 << 20 };

struct balance {
    const struct sw_plan_case *c;
    const struct sw_train_options *placed;
    struct sw_plan_balance *out;
};

/* 1: the step takes little more than its computation, and is kept. */
static int weigh_step(const struct balance *b, const struct sw_plan_case *c,
                      const struct sw_fit *fit) {
    struct sw_simulation times;
    const int ret = sw_simulate_one(c, fit, 1, &times);
    if (ret < 0) return ret;
    b->out->tokens_max = (uint64_t)times.tokens;
    if (times.step_s > (1 + SW_PLAN_OVERHEAD) * times.compute_s) return 0;
    b->out->tokens = (uint64_t)times.tokens;
    b->out->step_s = times.step_s;
    b->out->compute_s = times.compute_s;
    b->out->options = fit->options;
    return 1;
}

/* What the rule chooses for so many micro-batches. 1: balanced; 0: not; -ENOSPC: nothing fits. */
static int is_decided_balanced(const struct balance *b, const struct sw_plan_case *c) {
    struct sw_plan_decision *d = malloc(sizeof(*d));
    int ret = d ? sw_plan_decide(c, d) : -ENOMEM;
    if (ret == 0) ret = d->chosen < 0 ? -ENOSPC : weigh_step(b, c, &d->steps[d->chosen].fit);
    free(d);
    return ret;
}

/* A step of so many micro-batches: with the placement as it is, else with the kept inputs in a
 * lower tier, else with the rule's. 1: balanced; 0: not; -ENOSPC: it does not fit, or has too many
 * tasks to be played. */
static int is_balanced(const struct balance *b, uint32_t micro) {
    static const enum sw_tier tiers[] = {SW_TIER_DEVICE, SW_TIER_HOST, SW_TIER_NVME};
    struct sw_plan_case c = *b->c;
    struct sw_train_options o;
    struct sw_fit fit;
    c.options.accumulate = micro;
    if ((uint64_t)micro * c.subject->model.unit_count > TASKS_MAX / 8) return -ENOSPC;
    o = *b->placed;
    o.accumulate = micro;
    o.device_memory_bytes = c.options.device_memory_bytes;
    o.host_memory_bytes = c.options.host_memory_bytes;
    int ret = sw_plan_fit(&c, &o, &fit);
    const int lower = sw_tiers_chosen(c.options.activations) ? 0 : 1 + (c.machine->drive_count > 0);
    for (int t = 1; t <= lower && ret == 0 && !fit.fits; t++) {
        o.activations = sw_tiers_all(tiers[t]);
        ret = sw_plan_fit(&c, &o, &fit);
    }
    if (ret == 0 && fit.fits) ret = weigh_step(b, &c, &fit);
    return ret == 0 ? is_decided_balanced(b, &c) : ret;
}

int sw_plan_balance(const struct sw_plan_case *c, const struct sw_fit *fit,
                    struct sw_plan_balance *out) {
    const struct balance b = {.c = c, .placed = &fit->options, .out = out};
    uint32_t low = 0, high = 1; /* micro-batches: too few, enough */
    int ret;
    *out = (struct sw_plan_balance){0};
    while ((ret = is_balanced(&b, high)) == 0 && high < MICRO_MAX) {
        low = high;
        high *= 2;
    }
    if (ret != 1) return ret == -ENOSPC ? 0 : ret;
    while (high - low > 1) {
        const uint32_t middle = low + (high - low) / 2;
        ret = is_balanced(&b, middle);
        if (ret < 0) return ret;
        if (ret)
            high = middle;
        else
            low = middle;
    }
    return 0;
}
