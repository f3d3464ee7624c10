/* The search for the fastest placement: all placements of small spaces are played, and none that
 * fits is faster than what it found; it keeps what was given, offers what fits, and finds the
 * fewest tokens that keep a step near its computation. */
#include "plan/search.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "plan/balance.h"
#include "plan/played.h"
#include "tests/support_files.h"

static struct sw_subject subject;
static struct sw_machine machine;
static struct sw_plan_case c;
static struct sw_plan_decision d;
static struct sw_plan_found found;

/* A small model on a machine whose memory does not hold all of it. */
static void open_case(const char *name, uint32_t ranks, double clip) {
    log_catch();
    assert_int_equal(sw_subject_open(&subject, "smollm2-135m"), 0);
    assert_int_equal(sw_machine_open(&machine, name), 0);
    c = (struct sw_plan_case){.subject = &subject, .machine = &machine, .nodes = 1};
    sw_train_defaults(&c.options);
    c.options.device = SW_DEVICE_CUDA;
    c.options.ranks = ranks;
    c.options.clip = clip;
    c.options.seq_len = 256;
    c.options.accumulate = 2;
}

static void search(void) {
    if (sw_plan_case_settle(&c) || sw_plan_decide(&c, &d)) fail_msg("%s", log_text());
    assert_true(d.chosen >= 0);
    if (sw_plan_search(&c, &d, &found)) fail_msg("%s", log_text());
    assert_true(found.is_searched && !found.missing);
    assert_true(found.step.fit.fits);
}

static void done(void) {
    sw_subject_close(&subject);
}

/* ---- brute force ---- */

static const struct sw_tiers shares[] = {
    {{100, 0, 0}}, {{0, 100, 0}}, {{0, 0, 100}}, {{50, 50, 0}}, {{0, 50, 50}}, {{0, 25, 75}},
};
enum { WHOLE = 3, SHARES = sizeof(shares) / sizeof(shares[0]) };

struct least {
    double step_s;
    uint32_t fitting, all;
    char what[256];
};

static void try_options(const struct sw_train_options *o, struct least *least) {
    struct sw_fit fit;
    struct sw_simulation times;
    assert_int_equal(sw_plan_fit(&c, o, &fit), 0);
    least->all++;
    if (!fit.fits) return;
    least->fitting++;
    assert_int_equal(sw_simulate(&c, &fit, NULL, &times), 0);
    if (times.step_s >= least->step_s) return;
    char p[40], g[40], a[40], s[40];
    least->step_s = times.step_s;
    snprintf(least->what, sizeof(least->what), "%s %s %s %s K %u stage %d overlap %d",
             sw_tiers_print(o->params, p, sizeof(p)), sw_tiers_print(o->optimizer, s, sizeof(s)),
             sw_tiers_print(o->gradients, g, sizeof(g)),
             sw_tiers_print(o->activations, a, sizeof(a)), o->checkpoint_every, (int)o->zero,
             (int)o->overlap);
}

/* Of a choice of stage, K and overlap: all tiers of weights, gradients and kept inputs, and shares
 * of the optimizer. */
static void try_tiers(struct sw_train_options o, struct least *least) {
    for (int p = 0; p < WHOLE; p++)
        for (int s = 0; s < SHARES; s++)
            for (int g = 0; g < WHOLE; g++)
                for (int a = 0; a < WHOLE; a++) {
                    o.params = shares[p];
                    o.optimizer = shares[s];
                    o.gradients = shares[g];
                    o.activations = shares[a];
                    const int adam = sw_tiers_has(o.optimizer, SW_TIER_DEVICE);
                    if (adam && !sw_tiers_is_all(o.params, SW_TIER_DEVICE)) continue;
                    if (sw_tiers_is_all(o.optimizer, SW_TIER_DEVICE) && g != 0) continue;
                    try_options(&o, least);
                }
}

/* Within what counts as equal, what wear may weigh, and what one rank for all may hide. */
#define TOLERANCE 0.015

static void nothing_is_faster_than(const char *name, uint32_t ranks, double clip) {
    struct least least = {.step_s = 1e30};
    open_case(name, ranks, clip);
    search();
    const struct sw_train_options plain = c.options;
    for (int zero = ranks > 1 ? 1 : 3; zero <= 3; zero += 2)
        for (uint32_t k = 1; k <= 4; k += 3) {
            struct sw_train_options o = plain;
            o.zero = ranks > 1 ? zero : 0;
            o.checkpoint_every = k;
            o.overlap = clip > 0 ? SW_OVERLAP_FORWARD : SW_OVERLAP_BACKWARD;
            try_tiers(o, &least);
        }
    assert_true(least.fitting > 10 && least.fitting < least.all);
    if (found.times.step_s > least.step_s * (1 + TOLERANCE))
        fail_msg("%s, %u ranks: found %.6f s, %s takes %.6f s", name, ranks, found.times.step_s,
                 least.what, least.step_s);
    assert_true(found.times.step_s <= found.decided_step_s);
    done();
}

static void brute_force_finds_nothing_faster(void **state) {
    (void)state;
    nothing_is_faster_than("rtx4090:gpu-memory=2200M,ram=1500M,nvme=1xgen4", 1, 1);
    nothing_is_faster_than("rtx4090:gpu-memory=2200M,ram=1200M,nvme=1xgen4", 1, 0);
    nothing_is_faster_than("8xh100:gpu-memory=2200M,ram=2500M,nvme=1xgen4", 2, 1);
}

/* ---- what is kept, what is offered ---- */

static void what_is_given_stays(void **state) {
    (void)state;
    open_case("8xh100:gpu-memory=2200M,ram=2500M,nvme=1xgen4", 2, 1);
    c.options.optimizer = sw_tiers_all(SW_TIER_NVME);
    c.options.activations = sw_tiers_all(SW_TIER_HOST);
    c.options.zero = 2;
    c.options.overlap = SW_OVERLAP_NONE;
    c.options.checkpoint_every = 3;
    search();
    const struct sw_train_options *o = &found.step.fit.options;
    assert_true(sw_tiers_is_all(o->optimizer, SW_TIER_NVME));
    assert_true(sw_tiers_is_all(o->activations, SW_TIER_HOST));
    assert_int_equal(o->zero, 2);
    assert_int_equal(o->overlap, SW_OVERLAP_NONE);
    assert_int_equal(o->checkpoint_every, 3);
    done();
}

/* Clipping needs the norm, which is known only after backward. */
static void clipping_is_never_beside_backward(void **state) {
    (void)state;
    open_case("rtx4090:gpu-memory=2200M,ram=1500M,nvme=1xgen4", 1, 1);
    search();
    assert_int_not_equal(sw_overlap_of(&found.step.fit.options), SW_OVERLAP_BACKWARD);
    done();
}

static void without_rates_nothing_is_searched(void **state) {
    (void)state;
    open_case("rtx4090:gpu-memory=2200M,ram=1500M,nvme=1xgen4", 1, 1);
    machine.flops_per_s = 0;
    assert_int_equal(sw_plan_case_settle(&c), 0);
    assert_int_equal(sw_plan_decide(&c, &d), 0);
    assert_int_equal(sw_plan_search(&c, &d, &found), 0);
    assert_string_equal(found.missing, "flops_per_s");
    assert_false(found.is_searched);
    assert_int_equal(found.played, 0);
    assert_memory_equal(&found.step, &d.steps[d.chosen], sizeof(found.step));
    done();
}

/* ---- the fewest tokens ---- */

/* 1: a step of so many micro-batches, of the balance's own placement, is near its computation. */
static int is_near(const struct sw_plan_balance *b, uint32_t micro) {
    struct sw_train_options o = b->options;
    struct sw_fit fit;
    struct sw_simulation times;
    struct sw_plan_case other = c;
    other.options.accumulate = o.accumulate = micro;
    o.device_memory_bytes = o.host_memory_bytes = 0;
    assert_int_equal(sw_plan_fit(&other, &o, &fit), 0);
    assert_int_equal(sw_simulate(&other, &fit, NULL, &times), 0);
    return times.step_s <= (1 + SW_PLAN_OVERHEAD) * times.compute_s;
}

static void fewest_tokens_are_just_enough(void **state) {
    struct sw_plan_balance b;
    (void)state;
    open_case("rtx4090:gpu-memory=4G,ram=8G,nvme=1xgen4", 1, 1);
    c.options.params = c.options.activations = sw_tiers_all(SW_TIER_DEVICE);
    c.options.optimizer = c.options.gradients = sw_tiers_all(SW_TIER_HOST);
    search();
    assert_int_equal(sw_plan_balance(&c, &found.step.fit, &b), 0);
    const uint32_t micro = (uint32_t)(b.tokens / 256);
    assert_true(micro > 2 && b.tokens == micro * 256ull);
    assert_true(b.step_s <= (1 + SW_PLAN_OVERHEAD) * b.compute_s);
    assert_true(is_near(&b, micro));
    assert_false(is_near(&b, micro - 1));
    done();
}

/* ---- plays that are kept ---- */

static void same_answer(const struct sw_plan_found *a, const struct sw_plan_found *b) {
    const struct sw_train_options *x = &a->step.fit.options, *y = &b->step.fit.options;
    assert_memory_equal(&x->params, &y->params, sizeof(x->params));
    assert_memory_equal(&x->optimizer, &y->optimizer, sizeof(x->optimizer));
    assert_memory_equal(&x->gradients, &y->gradients, sizeof(x->gradients));
    assert_memory_equal(&x->activations, &y->activations, sizeof(x->activations));
    assert_true(a->times.step_s == b->times.step_s && a->decided_step_s == b->decided_step_s);
    assert_int_equal(a->times.tasks, b->times.tasks);
    assert_int_equal(a->times.step_clock, b->times.step_clock);
    assert_int_equal(a->played, b->played);
    assert_int_equal(a->fitted, b->fitted);
}

/* Machines of other RAM, and one of them again, for which then nothing is played. */
static void what_was_played_gives_the_same_answers(void **state) {
    static const char *const machines[] = {"8xh100:gpu-memory=2200M,ram=2500M,nvme=1xgen4",
                                           "8xh100:gpu-memory=2200M,ram=3G,nvme=1xgen4",
                                           "8xh100:gpu-memory=2200M,ram=2500M,nvme=1xgen4"};
    enum { MACHINES = 3 };
    static struct sw_plan_found plain[MACHINES];
    struct sw_played *played = sw_played_open();
    uint64_t hits, kept[MACHINES];
    (void)state;
    assert_non_null(played);
    for (int i = 0; i < 2 * MACHINES; i++) {
        const int m = i % MACHINES;
        open_case(machines[m], 2, 1);
        c.options.overlap = SW_OVERLAP_FORWARD; /* then a placement has one spelling */
        c.played = i < MACHINES ? NULL : played;
        search();
        if (i < MACHINES)
            plain[m] = found;
        else
            same_answer(&found, &plain[m]);
        sw_played_count(played, &hits, &kept[m]);
        done();
    }
    assert_true(kept[0] > 0 && hits > kept[0]); /* of the second some, of the third all */
    assert_int_equal(kept[2], kept[1]);
    sw_played_close(played);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(brute_force_finds_nothing_faster),
        cmocka_unit_test(what_is_given_stays),
        cmocka_unit_test(clipping_is_never_beside_backward),
        cmocka_unit_test(without_rates_nothing_is_searched),
        cmocka_unit_test(fewest_tokens_are_just_enough),
        cmocka_unit_test(what_was_played_gives_the_same_answers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
