/* Sweeps: crossovers of made-up step functions whose places are known exactly, the values that are
 * asked for, and what is scaled, kept and decided anew of a case. */
#include "plan/sweep_case.h"

#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include "plan/search.h"
#include "tests/support_files.h"
#include "tests/support_machine.h"

/* ---- made-up step functions ---- */

enum { ASKED_MAX = 1000 };

/* Up to each end, which does not belong to it, a lane is the clock; behind `most` nothing fits. */
struct made_up {
    struct {
        double end;
        enum sw_lane clock;
    } parts[4];
    double most;
    double asked[ASKED_MAX];
    int count;
};

static int made_up(void *ctx, double value, struct sw_sweep_point *out) {
    struct made_up *m = ctx;
    int i = 0;
    assert_true(m->count < ASKED_MAX);
    m->asked[m->count++] = value;
    assert_true(out->value == value && !out->fits);
    if (m->most > 0 && value > m->most) return 0;
    while (value >= m->parts[i].end) i++;
    out->fits = 1;
    out->step_clock = m->parts[i].clock;
    out->step_s = 1 / value;
    return 0;
}

static int was_asked(const struct made_up *m, double value) {
    for (int i = 0; i < m->count; i++)
        if (m->asked[i] == value) return 1;
    return 0;
}

/* The only values between which the change can be told. */
static void crossed(const struct made_up *m, const struct sw_sweep_crossover *x, double at) {
    assert_true(was_asked(m, x->below.value) && was_asked(m, x->above.value));
    if (!(x->below.value < at && at <= x->above.value))
        fail_msg("%.9g lies not between %.9g and %.9g", at, x->below.value, x->above.value);
}

static void a_crossover_is_found_to_a_hundredth(void **state) {
    (void)state;
    struct made_up m = {.parts = {{37.3, SW_LANE_NVME_READ}, {INFINITY, SW_LANE_COMPUTE}}};
    struct sw_sweep s = {0};
    const double values[] = {10, 20, 40, 80};
    assert_int_equal(sw_sweep_run(&s, values, 4, 20, made_up, &m), 0);
    assert_int_equal(s.point_count, 4);
    assert_int_equal(s.crossover_count, 1);
    crossed(&m, &s.crossovers[0], 37.3);
    assert_true(s.crossovers[0].above.value <= s.crossovers[0].below.value * (1 + SW_SWEEP_CLOSE));
    assert_int_equal(s.crossovers[0].below.step_clock, SW_LANE_NVME_READ);
    assert_int_equal(s.crossovers[0].above.step_clock, SW_LANE_COMPUTE);
    for (int i = 0; i < 4; i++) assert_int_equal(s.points[i].is_own, i == 1);
}

static void two_crossovers_between_two_points(void **state) {
    (void)state;
    struct made_up m = {
        .parts = {{12.5, SW_LANE_H2D}, {31, SW_LANE_NVME_WRITE}, {INFINITY, SW_LANE_ADAM}}};
    struct sw_sweep s = {0};
    const double values[] = {10, 40};
    assert_int_equal(sw_sweep_run(&s, values, 2, 0, made_up, &m), 0);
    assert_int_equal(s.crossover_count, 2);
    crossed(&m, &s.crossovers[0], 12.5);
    crossed(&m, &s.crossovers[1], 31);
    assert_true(sw_sweep_alike(&s.crossovers[0].above, &s.crossovers[1].below));
}

/* Whole numbers of 512: the change is between two that are next to each other. */
static void on_a_grain_it_is_found_exactly(void **state) {
    (void)state;
    for (int at = 2; at <= 16; at++) {
        struct made_up m = {.parts = {{512.0 * at, SW_LANE_ADAM}, {INFINITY, SW_LANE_COMPUTE}}};
        struct sw_sweep s = {.grain = 512};
        const double values[] = {512, 8192};
        assert_int_equal(sw_sweep_run(&s, values, 2, 0, made_up, &m), 0);
        assert_int_equal(s.crossover_count, 1);
        assert_true(s.crossovers[0].below.value == 512.0 * (at - 1));
        assert_true(s.crossovers[0].above.value == 512.0 * at);
        for (int i = 0; i < m.count; i++) assert_true(fmod(m.asked[i], 512) == 0);
    }
}

static void what_does_not_fit_is_crossed_too(void **state) {
    (void)state;
    struct made_up m = {.parts = {{INFINITY, SW_LANE_COMPUTE}}, .most = 25};
    struct sw_sweep s = {0};
    const double values[] = {10, 20, 40, 80};
    assert_int_equal(sw_sweep_run(&s, values, 4, 0, made_up, &m), 0);
    assert_int_equal(s.crossover_count, 1);
    assert_true(s.crossovers[0].below.fits && !s.crossovers[0].above.fits);
    assert_true(s.crossovers[0].below.value <= 25 && s.crossovers[0].above.value > 25);
    assert_true(s.points[1].fits && !s.points[2].fits && s.points[2].step_s == 0);
}

static void of_measured_points_neighbours_are_told(void **state) {
    (void)state;
    struct sw_sweep s = {.point_count = 4};
    for (uint32_t i = 0; i < 4; i++)
        s.points[i] = (struct sw_sweep_point){
            .value = 10 << i, .fits = 1, .step_clock = i < 3 ? SW_LANE_H2D : SW_LANE_COMPUTE};
    sw_sweep_between(&s);
    assert_int_equal(s.crossover_count, 1);
    assert_true(s.crossovers[0].below.value == 40 && s.crossovers[0].above.value == 80);
}

static void values_ascend_on_the_grain_with_the_own(void **state) {
    (void)state;
    double v[SW_SWEEP_POINTS_MAX];
    uint32_t n = sw_sweep_values(1e9 / 8, 8e9, 1e9, 0, 13, v);
    assert_int_equal(n, 13);
    assert_true(v[6] == 1e9 && fabs(v[0] - 1.25e8) < 1 && fabs(v[12] - 8e9) < 1);
    for (uint32_t i = 1; i < n; i++) assert_true(fabs(v[i] / v[i - 1] - sqrt(2)) < 1e-9);
    n = sw_sweep_values(512, 4096, 512, 512, 13, v); /* 1, 2, 3, ... without repeats */
    assert_true(n >= 4 && n <= 8 && v[0] == 512 && v[1] == 1024 && v[n - 1] == 4096);
    for (uint32_t i = 1; i < n; i++) assert_true(v[i] > v[i - 1] && fmod(v[i], 512) == 0);
    n = sw_sweep_values(100, 200, 150, 0, 2, v);
    assert_true(n == 3 && v[1] == 150);
    assert_int_equal(sw_sweep_values(100, 200, 300, 0, 2, v), 2);
}

static void ranges_are_read(void **state) {
    (void)state;
    struct sw_sweep_range r;
    assert_int_equal(sw_sweep_parse("tokens=16K..1M", &r), 0);
    assert_true(r.what == SW_SWEEP_TOKENS && r.from == 16e3 && r.to == 1e6);
    assert_int_equal(sw_sweep_parse("pcie", &r), 0);
    assert_true(r.what == SW_SWEEP_PCIE && r.from == 0 && r.to == 0);
    const char *const wrong[] = {"",          "disk",        "nvme=",     "nvme=1G",  "nvme=1G..",
                                 "nvme=..2G", "nvme=2G..1G", "ram=0..1G", "ram=1..x", "tokensx"};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        log_catch();
        assert_int_equal(sw_sweep_parse(wrong[i], &r), -EINVAL);
    }
}

/* ---- cases ---- */

static struct sw_subject subject;
static struct sw_machine machine;
static struct sw_plan_case c;
static struct sw_plan_decision decision;
static struct sw_plan_found found;
static struct sw_sweep sweep;

static void machine_of(double gpus) {
    machine = made_machine(gpus);
}

/* A small model with these placements, where they are chosen. */
static void set_case(struct sw_tiers params, struct sw_tiers optimizer) {
    c = (struct sw_plan_case){.subject = &subject, .machine = &machine, .nodes = 1};
    sw_train_defaults(&c.options);
    c.options.seq_len = 128;
    c.options.overlap = SW_OVERLAP_NONE;
    c.options.params = params;
    c.options.optimizer = optimizer;
    assert_int_equal(sw_plan_case_settle(&c), 0);
}

static int run_sweep(const char *text) {
    struct sw_sweep_range range;
    assert_int_equal(sw_sweep_parse(text, &range), 0);
    assert_int_equal(sw_plan_decide(&c, &decision), 0);
    if (decision.chosen < 0) return sw_sweep_case(&c, NULL, &range, &sweep);
    assert_int_equal(sw_plan_search(&c, &decision, &found), 0);
    return sw_sweep_case(&c, &found.step, &range, &sweep);
}

/* Nothing but what is swept takes time. */
static void step_is_in_proportion(void) {
    assert_int_equal(sweep.point_count, 13);
    for (uint32_t i = 0; i < sweep.point_count; i++) {
        const struct sw_sweep_point *p = &sweep.points[i];
        const double all = p->step_s * p->value,
                     own = sweep.points[6].step_s * sweep.points[6].value;
        if (!(fabs(all - own) < 1e-6 * own))
            fail_msg("at %.9g: %.9g, not %.9g", p->value, all, own);
        assert_true(p->fits && !p->anew && p->is_own == (i == 6));
    }
}

static void every_rate_of_the_drives_is_scaled(void **state) {
    (void)state;
    machine_of(1);
    machine.drives[0].read_bytes_per_s = 4e9;
    machine.drives[0].write_bytes_per_s = 3e9;
    machine.drives[0].mixed_bytes_per_s = 5e9;
    set_case(sw_tiers_all(SW_TIER_DEVICE), sw_tiers_all(SW_TIER_NVME));
    assert_int_equal(run_sweep("nvme"), 0);
    assert_true(sweep.points[6].value == 4e9);
    step_is_in_proportion();
}

static void every_rate_of_the_copies_is_scaled(void **state) {
    (void)state;
    machine_of(8);
    machine.h2d_bytes_per_s = 1e10;
    machine.d2h_bytes_per_s = 8e9;
    machine.both_bytes_per_s = 1.2e10;
    machine.switch_bytes_per_s = 1.5e10;
    machine.gpus_per_switch = 4;
    set_case(sw_tiers_all(SW_TIER_HOST), sw_tiers_all(SW_TIER_HOST));
    assert_int_equal(run_sweep("pcie"), 0);
    assert_true(sweep.points[6].value == 1e10);
    step_is_in_proportion();
}

static void a_throttle_is_swept_in_the_machines_place(void **state) {
    (void)state;
    machine_of(1);
    set_case(sw_tiers_all(SW_TIER_DEVICE), sw_tiers_all(SW_TIER_NVME));
    c.options.sim.nvme_bytes[0] = 2000000000;
    c.options.sim.nvme_bytes[1] = 1000000000;
    assert_int_equal(run_sweep("nvme"), 0);
    assert_true(sweep.points[6].value == 2e9);
    step_is_in_proportion();
}

static void a_figure_that_is_missing_is_named(void **state) {
    (void)state;
    static const struct {
        const char *sweep, *figure;
    } cases[] = {{"nvme", "read_bytes_per_s"},
                 {"pcie", "h2d_bytes_per_s"},
                 {"adam", "adam_bytes_per_s"},
                 {"flops", "flops_per_s"},
                 {"gpus", "gpus"},
                 {"tokens", "no rate"}};
    machine_of(0);
    set_case(sw_tiers_all(SW_TIER_DEVICE), sw_tiers_all(SW_TIER_HOST));
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        log_catch();
        assert_int_equal(run_sweep(cases[i].sweep), -EINVAL);
        assert_reported(cases[i].figure);
    }
}

/* RAM is what the state lies in: less of it sends a share to the drive, more brings it back. */
static void with_other_ram_it_is_decided_anew(void **state) {
    (void)state;
    const struct sw_tiers open = {{0}};
    machine_of(1);
    machine.gpu_memory_bytes = 1.2e9;
    machine.memory_bytes = 1.5e9;
    machine.flops_per_s = 1e12;
    machine.adam_bytes_per_s = 2e10;
    machine.drives[0].read_bytes_per_s = machine.drives[0].write_bytes_per_s = 1e9;
    set_case(open, open);
    assert_int_equal(run_sweep("ram=20M..6G"), 0);
    int fit = 0, anew = 0, missed = 0;
    for (uint32_t i = 0; i < sweep.point_count; i++) {
        const struct sw_sweep_point *p = &sweep.points[i];
        const struct sw_tiers own = found.step.fit.options.optimizer;
        fit += p->fits;
        missed += !p->fits;
        anew += p->anew;
        if (p->fits) assert_true(p->anew || !memcmp(&p->optimizer, &own, sizeof(own)));
        if (p->is_own) assert_true(p->fits && !p->anew);
        if (!p->fits) assert_true(p->step_s == 0 && p->tokens_per_s == 0 && !p->anew);
    }
    assert_true(fit >= 3 && anew >= 1 && missed >= 1);
    assert_true(sw_tiers_is_all(sweep.points[sweep.point_count - 1].optimizer, SW_TIER_HOST));
}

static void more_tokens_keep_the_line_until_it_does_not_fit(void **state) {
    (void)state;
    const struct sw_tiers open = {{0}};
    machine_of(1);
    machine.gpu_memory_bytes = 2.4e9;
    machine.flops_per_s = 1e12;
    set_case(open, open);
    c.options.accumulate = 16;
    assert_int_equal(run_sweep("tokens"), 0);
    uint32_t anew = 0;
    for (uint32_t i = 0; i < sweep.point_count; i++) {
        const struct sw_sweep_point *p = &sweep.points[i];
        assert_true(fmod(p->value, 128) == 0 && p->fits);
        assert_true(fabs(p->tokens_per_s * p->step_s - p->value) < 1e-6 * p->value);
        assert_true(p->anew >= (int)(anew > 0)); /* once it does not fit, with more it does not */
        anew += (uint32_t)p->anew;
    }
    assert_true(sweep.points[0].value == 128 * 2 && sweep.points[12].value == 128 * 128);
    assert_true(anew > 0 && anew < sweep.point_count);
}

static void gpus_are_powers_of_two(void **state) {
    (void)state;
    machine_of(3);
    machine.flops_per_s = 1e12;
    set_case(sw_tiers_all(SW_TIER_DEVICE), sw_tiers_all(SW_TIER_HOST));
    c.tokens = 128 * 24;
    c.options.accumulate = 8;
    assert_int_equal(run_sweep("gpus"), 0);
    const double want[] = {1, 2, 3, 4, 8, 16};
    assert_int_equal(sweep.point_count, 6);
    for (uint32_t i = 0; i < 6; i++) {
        const struct sw_sweep_point *p = &sweep.points[i];
        assert_true(p->value == want[i] && p->is_own == (i == 2) && p->fits);
        assert_true(p->tokens_per_s * p->step_s > 128 * 24 - 1e-3);
    }
    /* 24 micro-batches are 12 on each of two, 8 on each of three. */
    assert_true(fabs(2 * sweep.points[1].step_s - 3 * sweep.points[2].step_s) < 1e-6);
    assert_true(sweep.points[0].step_s > 1.5 * sweep.points[1].step_s);
}

static int open_subject(void **state) {
    (void)state;
    return sw_subject_open(&subject, "smollm2-135m");
}

static int close_subject(void **state) {
    (void)state;
    sw_subject_close(&subject);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_crossover_is_found_to_a_hundredth),
        cmocka_unit_test(two_crossovers_between_two_points),
        cmocka_unit_test(on_a_grain_it_is_found_exactly),
        cmocka_unit_test(what_does_not_fit_is_crossed_too),
        cmocka_unit_test(of_measured_points_neighbours_are_told),
        cmocka_unit_test(values_ascend_on_the_grain_with_the_own),
        cmocka_unit_test(ranges_are_read),
        cmocka_unit_test(every_rate_of_the_drives_is_scaled),
        cmocka_unit_test(every_rate_of_the_copies_is_scaled),
        cmocka_unit_test(a_throttle_is_swept_in_the_machines_place),
        cmocka_unit_test(a_figure_that_is_missing_is_named),
        cmocka_unit_test(with_other_ram_it_is_decided_anew),
        cmocka_unit_test(more_tokens_keep_the_line_until_it_does_not_fit),
        cmocka_unit_test(gpus_are_powers_of_two),
    };
    return cmocka_run_group_tests(tests, open_subject, close_subject);
}
