/* The player of turns and the simulator on cases whose times are known exactly: lanes in order,
 * waits, resources that are shared, ranks that meet, how far a run goes ahead; and whole plans of
 * which one rate alone is known. */
#include "plan/simulate.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "engine/turn_play.h"
#include "tests/support_files.h"
#include "tests/support_machine.h"

enum { TASKS_MAX = 16, RANKS = 4 };

/* ---- turns by hand ---- */

struct made {
    struct sw_turn turn;
    struct sw_task tasks[TASKS_MAX];
    uint32_t lanes[SW_LANE_COUNT][TASKS_MAX];
};

/* Seconds are in `unit`, shares of the first resource (in percent) in `micro`. */
static struct sw_task *add(struct made *m, enum sw_task_kind kind, enum sw_lane lane,
                           uint32_t seconds, uint32_t percent) {
    struct sw_turn *t = &m->turn;
    struct sw_task *task = &m->tasks[t->task_count];
    *task = (struct sw_task){
        .kind = (uint8_t)kind, .lane = (uint8_t)lane, .unit = seconds, .micro = percent};
    m->lanes[lane][t->lane_count[lane]++] = t->task_count++;
    t->tasks = m->tasks;
    for (int l = 0; l < SW_LANE_COUNT; l++) t->lane_tasks[l] = m->lanes[l];
    return task;
}

static void after(struct sw_task *task, enum sw_lane lane, int index, int turn) {
    task->deps[task->dep_count++] =
        (struct sw_dep){.index = index, .turn = (int8_t)turn, .lane = (uint8_t)lane};
}

struct seen {
    double end_s[4][RANKS][TASKS_MAX]; /* by turn, rank and unit */
    uint32_t late_rank, late_s;        /* a rank whose compute takes so much longer */
};

static void made_cost(void *ctx, uint32_t turn, const struct sw_task *task, uint32_t rank,
                      struct sw_play_cost *cost) {
    const struct seen *seen = ctx;
    (void)turn;
    cost->seconds = task->unit;
    if (task->lane == SW_LANE_COMPUTE && rank == seen->late_rank) cost->seconds += seen->late_s;
    if (task->micro)
        cost->uses[cost->use_count++] = (struct sw_play_use){
            .resource = 0, .side = task->lane == SW_LANE_D2H, .share = task->micro * 0.01};
}

static void made_done(void *ctx, uint32_t turn, const struct sw_task *task, uint32_t rank,
                      double start_s, double end_s) {
    struct seen *seen = ctx;
    assert_true(end_s >= start_s);
    seen->end_s[turn][rank][task->unit] = end_s;
}

static void play(struct seen *seen, const struct made *m, uint32_t count, uint32_t ranks,
                 const uint8_t *adam_lane, double mixed, double *ends) {
    const struct sw_turn *turns[4] = {&m->turn, &m->turn, &m->turn, &m->turn};
    const struct sw_play_resource resource = {1, mixed};
    const struct sw_play p = {ranks, adam_lane, 1, &resource, made_cost, made_done, seen};
    assert_int_equal(sw_play_turns(&p, turns, count, ends), 0);
}

static void near(double got, double want) {
    if (!(got > want - 1e-9 && got < want + 1e-9)) fail_msg("%.12g, not %.12g", got, want);
}

static void lanes_are_in_order_and_wait(void **state) {
    (void)state;
    struct made m = {0};
    struct seen seen = {0};
    double ends[4];
    add(&m, SW_TASK_FORWARD, SW_LANE_COMPUTE, 2, 0);
    add(&m, SW_TASK_FORWARD, SW_LANE_COMPUTE, 1, 0);
    after(add(&m, SW_TASK_GRAD, SW_LANE_D2H, 5, 0), SW_LANE_COMPUTE, 0, 0);
    play(&seen, &m, 4, 1, NULL, 1, ends);
    near(seen.end_s[0][0][2], 2);
    near(seen.end_s[0][0][1], 3);
    near(ends[0], 7); /* the copy alone is late, and is the clock from then on */
    near(ends[1], 12);
    near(ends[3], 22);
}

static void a_turn_waits_for_the_one_before(void **state) {
    (void)state;
    struct made m = {0};
    struct seen seen = {0};
    double ends[4];
    after(add(&m, SW_TASK_FORWARD, SW_LANE_COMPUTE, 3, 0), SW_LANE_D2H, 0, -1);
    after(add(&m, SW_TASK_GRAD, SW_LANE_D2H, 4, 0), SW_LANE_COMPUTE, 0, 0);
    play(&seen, &m, 3, 1, NULL, 1, ends);
    near(ends[0], 7);
    near(ends[2], 21);
}

/* Filling does not wait for anything, yet the third turn is pushed when the first has ended. */
static void a_run_is_two_turns_ahead(void **state) {
    (void)state;
    struct made m = {0};
    struct seen seen = {0};
    double ends[4];
    add(&m, SW_TASK_FILL, SW_LANE_DATA, 1, 0);
    add(&m, SW_TASK_FORWARD, SW_LANE_COMPUTE, 10, 0);
    play(&seen, &m, 4, 1, NULL, 1, ends);
    near(seen.end_s[0][0][1], 1);
    near(seen.end_s[1][0][1], 2);
    near(seen.end_s[2][0][1], 11);
    near(seen.end_s[3][0][1], 21);
}

static void what_is_shared_slows_all_alike(void **state) {
    (void)state;
    static const struct {
        uint32_t up, down;          /* percent */
        double mixed, down_s, up_s; /* when 4 s up and 2 s down end */
    } cases[] = {
        {100, 100, 1, 4, 6},       /* half speed each, then the rest alone */
        {100, 100, 2, 2, 4},       /* two directions that do not touch */
        {100, 100, 1.6, 2.5, 4.5}, /* 0.8 each */
        {100, 50, 1, 3, 5},        /* 1 / 1.5 each */
        {40, 60, 1, 2, 4},         /* just enough */
        {100, 100, 0.5, 8, 10},    /* both at once are worse than one after the other */
        {0, 100, 0.5, 2, 4},       /* one alone is not slowed down */
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct made m = {0};
        struct seen seen = {0};
        double ends[4];
        add(&m, SW_TASK_LOAD, SW_LANE_H2D, 4, cases[i].up);
        add(&m, SW_TASK_GRAD, SW_LANE_D2H, 2, cases[i].down);
        add(&m, SW_TASK_FORWARD, SW_LANE_COMPUTE, 3, 0);
        play(&seen, &m, 1, 1, NULL, cases[i].mixed, ends);
        near(seen.end_s[0][0][2], cases[i].down_s);
        near(seen.end_s[0][0][4], cases[i].up_s);
        near(seen.end_s[0][0][3], 3);
    }
}

static void host_lanes_take_rank_after_rank(void **state) {
    (void)state;
    static const uint8_t two[RANKS] = {0, 0, 1, 1};
    struct made m = {0};
    double ends[4];
    struct seen seen = {0};
    after(add(&m, SW_TASK_ADAM, SW_LANE_ADAM, 2, 0), SW_LANE_COMPUTE, 0, 0);
    add(&m, SW_TASK_FORWARD, SW_LANE_COMPUTE, 1, 0);
    play(&seen, &m, 1, RANKS, NULL, 1, ends);
    for (uint32_t r = 0; r < RANKS; r++) near(seen.end_s[0][r][2], 3 + 2 * r);
    play(&seen, &m, 1, RANKS, two, 1, ends);
    for (uint32_t r = 0; r < RANKS; r++) near(seen.end_s[0][r][2], 3 + 2 * (r % 2));
}

static void ranks_meet_and_joint_tasks_wait_for_all(void **state) {
    (void)state;
    struct made m = {0};
    struct seen seen = {.late_rank = 2, .late_s = 7};
    double ends[4];
    add(&m, SW_TASK_FORWARD, SW_LANE_COMPUTE, 1, 0);
    after(add(&m, SW_TASK_GATHER, SW_LANE_COMM, 2, 0), SW_LANE_COMPUTE, 0, 0);
    after(add(&m, SW_TASK_LOSS, SW_LANE_D2H, 3, 0), SW_LANE_COMPUTE, 0, 0);
    after(add(&m, SW_TASK_NORM, SW_LANE_CONTROL, 5, 0), SW_LANE_D2H, 0, 0);
    after(add(&m, SW_TASK_SCALARS, SW_LANE_H2D, 6, 0), SW_LANE_CONTROL, 0, 0);
    play(&seen, &m, 1, RANKS, NULL, 1, ends);
    near(seen.end_s[0][0][3], 4);
    for (uint32_t r = 0; r < RANKS; r++) {
        near(seen.end_s[0][r][2], 10); /* the last comes after 8 s */
        near(seen.end_s[0][r][6], 8 + 3 + 5 + 6);
    }
    near(seen.end_s[0][0][5], 16);
}

/* ---- whole plans ---- */

static struct sw_subject subject;
static struct sw_machine machine;
static struct sw_plan_case c;
static struct sw_fit fit;
static struct sw_sim_rates held; /* lanes of the cases that follow */

/* A small model, with its optimizer where the argument says. */
static struct sw_simulation simulate(struct sw_tiers params, struct sw_tiers optimizer,
                                     enum sw_overlap overlap) {
    struct sw_simulation s;
    assert_int_equal(sw_subject_open(&subject, "smollm2-135m"), 0);
    c = (struct sw_plan_case){.subject = &subject, .machine = &machine, .nodes = 1};
    sw_train_defaults(&c.options);
    c.options.device = machine.gpus > 0 ? SW_DEVICE_CUDA : SW_DEVICE_HOST;
    c.options.seq_len = 128;
    c.options.overlap = overlap;
    c.options.sim = held;
    c.options.params = params;
    c.options.optimizer = optimizer;
    c.options.gradients = c.options.activations = sw_tiers_all(SW_TIER_DEVICE);
    if (!sw_tiers_is_all(optimizer, SW_TIER_DEVICE))
        c.options.gradients = sw_tiers_all(SW_TIER_HOST);
    assert_int_equal(sw_plan_case_settle(&c), 0);
    assert_int_equal(sw_plan_fit(&c, &c.options, &fit), 0);
    assert_int_equal(sw_simulate(&c, &fit, NULL, &s), 0);
    sw_subject_close(&subject);
    return s;
}

static void machine_of(double gpus) {
    machine = made_machine(gpus);
}

/* SmolLM2-135M: 30 layers of hidden size 576, 9 heads of 64 with 3 for keys, inner size 1536, and a
 * tied head of 49,152 rows. */
#define LAYER_WEIGHTS (2.0 * 576 * 576 + 2.0 * 576 * 192 + 3.0 * 576 * 1536)
#define HEAD_WEIGHTS  (49152.0 * 576)
#define PARAMS        134515008.0

/* A layer's forward twice (in backward once more), and twice that backward; the head's whole. */
static double step_flops(double tokens) {
    const double layer = 2 * LAYER_WEIGHTS + 2 * tokens * 576;
    return tokens * (30 * 4 * layer + 3 * 2 * HEAD_WEIGHTS);
}

static void close_within(double got, double want, double share) {
    if (!(got > want * (1 - share) && got < want * (1 + share)))
        fail_msg("%.9g, not %.9g", got, want);
}

static void close_to(double got, double want) {
    close_within(got, want, 1e-6);
}

/* Records are padded by some bytes. */
#define PADDING 5e-5

static void operations_alone(void **state) {
    (void)state;
    machine_of(1);
    machine.flops_per_s = 1e12;
    const struct sw_simulation s =
        simulate(sw_tiers_all(SW_TIER_DEVICE), sw_tiers_all(SW_TIER_HOST), SW_OVERLAP_FORWARD);
    close_to(s.step_s, step_flops(128) / 1e12);
    assert_int_equal(s.step_clock, SW_LANE_COMPUTE);
    close_to(s.share[SW_LANE_COMPUTE], 1);
    close_to(s.tokens_per_s, 128 / s.step_s);
    assert_true(s.is_steady);
    assert_true(s.missing_count >= 3);
    assert_true(s.written_bytes == 0);
}

static void the_update_behind_the_operations(void **state) {
    (void)state;
    machine_of(1);
    machine.flops_per_s = 1e12;
    machine.adam_bytes_per_s = 4e10;
    const struct sw_simulation s =
        simulate(sw_tiers_all(SW_TIER_DEVICE), sw_tiers_all(SW_TIER_HOST), SW_OVERLAP_NONE);
    close_within(s.busy_s[SW_LANE_ADAM], 28 * PARAMS / 4e10, PADDING);
    /* A chunk's update begins when the last gradient is there. */
    close_within(s.step_s, step_flops(128) / 1e12 + 28 * PARAMS / 4e10, PADDING);
}

static void one_memory_for_update_and_copies(void **state) {
    (void)state;
    machine_of(1);
    machine.adam_bytes_per_s = 4e10;
    const struct sw_tiers on_device = sw_tiers_all(SW_TIER_DEVICE);
    const struct sw_tiers in_ram = sw_tiers_all(SW_TIER_HOST);
    const double alone = 28 * PARAMS / 4e10;
    close_within(simulate(on_device, in_ram, SW_OVERLAP_NONE).step_s, alone, PADDING);
    machine.memory_bytes_per_s = 2e10; /* less than the update could use */
    close_within(simulate(on_device, in_ram, SW_OVERLAP_NONE).step_s, 2 * alone, PADDING);
}

/* Records are read and written at once: of 12 bytes there and back, at the rate of both. */
static void drives_read_and_write_at_once(void **state) {
    (void)state;
    machine_of(1);
    machine.drives[0].read_bytes_per_s = 4e9;
    machine.drives[0].write_bytes_per_s = 4e9;
    machine.drives[0].mixed_bytes_per_s = 8e9; /* as if they were two */
    const struct sw_tiers on_device = sw_tiers_all(SW_TIER_DEVICE);
    const struct sw_tiers on_nvme = sw_tiers_all(SW_TIER_NVME);
    const struct sw_simulation two = simulate(on_device, on_nvme, SW_OVERLAP_NONE);
    const double one_way_s = two.bytes[SW_LANE_NVME_READ] / 4e9;
    assert_true(two.bytes[SW_LANE_NVME_READ] >= 12 * PARAMS);
    assert_true(two.bytes[SW_LANE_NVME_WRITE] == two.bytes[SW_LANE_NVME_READ]);
    assert_true(two.step_s > one_way_s && two.step_s < 1.03 * one_way_s);
    machine.drives[0].mixed_bytes_per_s = 4e9;
    const struct sw_simulation one = simulate(on_device, on_nvme, SW_OVERLAP_NONE);
    close_to(one.step_s, 2 * one_way_s);
    close_to(one.written_bytes_per_day, one.written_bytes * 86400 / one.step_s);
    machine.commit_s = 0.25; /* each step commits, and its successor's first write waits */
    const struct sw_simulation committed = simulate(on_device, on_nvme, SW_OVERLAP_NONE);
    assert_true(committed.step_s > one.step_s);
    assert_true(committed.step_s <= one.step_s + 0.25 + 1e-9);
    assert_true(committed.busy_s[SW_LANE_COMMIT] == 0.25);
}

/* Eight GPUs stream weights up; two by two they share a switch's link. */
static void a_switch_is_shared(void **state) {
    (void)state;
    machine_of(8);
    machine.h2d_bytes_per_s = 1e10;
    const struct sw_tiers in_ram = sw_tiers_all(SW_TIER_HOST);
    const struct sw_simulation own = simulate(in_ram, in_ram, SW_OVERLAP_NONE);
    close_to(own.step_s, own.busy_s[SW_LANE_H2D]);
    close_to(own.busy_s[SW_LANE_H2D], own.bytes[SW_LANE_H2D] / 8 / 1e10);
    machine.switch_bytes_per_s = 1e10;
    machine.gpus_per_switch = 2;
    close_to(simulate(in_ram, in_ram, SW_OVERLAP_NONE).step_s, 2 * own.step_s);
    machine.switch_bytes_per_s = 2e10;
    close_to(simulate(in_ram, in_ram, SW_OVERLAP_NONE).step_s, own.step_s);
}

/* What a model's units were seen to take counts instead of their operations. */
static void measured_operations_take_their_time(void **state) {
    (void)state;
    machine_of(1);
    machine.flops_per_s = 1e9;
    machine.model_count = 1;
    machine.models[0] = (struct sw_machine_model){.layer_forward_s = 2,
                                                  .layer_backward_s = 5,
                                                  .embed_forward_s = 1,
                                                  .embed_backward_s = 3,
                                                  .norm_forward_s = 0.25,
                                                  .norm_backward_s = 0.5,
                                                  .head_whole_s = 7};
    const struct sw_train_options o = {
        .device = SW_DEVICE_CUDA, .dtype = SW_BF16, .micro_batch = 1, .seq_len = 128};
    struct sw_machine_model *times = &machine.models[0];
    assert_int_equal(sw_subject_open(&subject, "smollm2-135m"), 0);
    sw_machine_model_key(&subject.model.config, &o, times->key, sizeof(times->key));
    sw_subject_close(&subject);
    const struct sw_tiers device = sw_tiers_all(SW_TIER_DEVICE);
    close_to(simulate(device, device, SW_OVERLAP_NONE).step_s,
             30 * (2 + 5) + 1 + 3 + 0.25 + 0.5 + 7);
    times->key[0] = 'x'; /* of another device */
    close_to(simulate(device, device, SW_OVERLAP_NONE).step_s, step_flops(128) / 1e9);
}

/* On the CPU the update takes cores from the operations; held to a rate, these take none. */
static void cores_are_shared(void **state) {
    (void)state;
    machine_of(0);
    machine.flops_per_s = 1e12;
    machine.adam_bytes_per_s = 4e10;
    const struct sw_tiers on_device = sw_tiers_all(SW_TIER_DEVICE);
    const struct sw_simulation s =
        simulate(on_device, sw_tiers_all(SW_TIER_HOST), SW_OVERLAP_FORWARD);
    close_within(s.step_s, step_flops(128) / 1e12 + 28 * PARAMS / 4e10, PADDING);
}

/* Each task of a team waits for the team to wake, and the CPU as device alone has teams that sleep.
 */
static void teams_must_be_woken(void **state) {
    (void)state;
    const struct sw_tiers on_device = sw_tiers_all(SW_TIER_DEVICE);
    const struct sw_tiers in_ram = sw_tiers_all(SW_TIER_HOST);
    for (int gpus = 0; gpus < 2; gpus++) {
        machine_of(gpus);
        machine.adam_bytes_per_s = machine.memory_bytes_per_s = 4e10;
        machine.gpu_memory_bytes_per_s = machine.round_bytes_per_s = 4e10;
        const struct sw_simulation at_once = simulate(on_device, in_ram, SW_OVERLAP_NONE);
        machine.region_s = 0.01;
        const struct sw_simulation woken = simulate(on_device, in_ram, SW_OVERLAP_NONE);
        const enum sw_lane lanes[] = {SW_LANE_ADAM, SW_LANE_COMM};
        for (int l = 0; l < 2; l++) {
            const double tasks = (woken.busy_s[lanes[l]] - at_once.busy_s[lanes[l]]) / 0.01;
            if (gpus)
                near(tasks, 0);
            else if (tasks < 31 || fabs(tasks - round(tasks)) > 1e-6) /* units, at least */
                fail_msg("%.9g tasks of lane %d", tasks, (int)lanes[l]);
        }
    }
}

/* A copy that is held to a tenth of what it could do takes a tenth of a core. */
static void what_is_held_back_leaves_the_cores(void **state) {
    (void)state;
    machine_of(0);
    machine.flops_per_s = 1e11;
    machine.d2h_bytes_per_s = 1e10;
    held.copy_bytes[1] = 1000000000;
    const struct sw_simulation s =
        simulate(sw_tiers_all(SW_TIER_DEVICE), sw_tiers_all(SW_TIER_HOST), SW_OVERLAP_FORWARD);
    held = (struct sw_sim_rates){0};
    const double alone_s = step_flops(128) / 1e11, copies_s = 2 * PARAMS / 1e9;
    assert_true(s.busy_s[SW_LANE_D2H] > copies_s * (1 + 1e-4));
    assert_true(s.busy_s[SW_LANE_D2H] < copies_s * (1 + 0.1 / 4 + 1e-4)); /* some stand alone */
    assert_true(s.busy_s[SW_LANE_COMPUTE] > alone_s * (1 + 1e-4));
    assert_true(s.busy_s[SW_LANE_COMPUTE] < alone_s + copies_s * 0.1 / 4 * 1.0001);
}

/* Operations that leave half of the CPU to others slow these down by half of what they would. */
static void operations_leave_cores_to_others(void **state) {
    (void)state;
    const struct sw_train_options o = {
        .device = SW_DEVICE_HOST, .dtype = SW_BF16, .micro_batch = 1, .seq_len = 128, .ranks = 1};
    double update_s[2];
    for (int half = 0; half < 2; half++) {
        machine_of(0);
        machine.adam_bytes_per_s = 4e10;
        machine.cpus = 4;
        machine.model_count = 1;
        machine.models[0] =
            (struct sw_machine_model){.layer_forward_s = 2, .embed_forward_s = 2, .cpus = 2 * half};
        struct sw_machine_model *times = &machine.models[0];
        assert_int_equal(sw_subject_open(&subject, "smollm2-135m"), 0);
        sw_machine_model_key(&subject.model.config, &o, times->key, sizeof(times->key));
        sw_subject_close(&subject);
        const struct sw_simulation s =
            simulate(sw_tiers_all(SW_TIER_DEVICE), sw_tiers_all(SW_TIER_HOST), SW_OVERLAP_FORWARD);
        update_s[half] = s.busy_s[SW_LANE_ADAM];
    }
    const double alone_s = 28 * PARAMS / 4e10;
    assert_true(update_s[0] > 1.9 * alone_s); /* all but the first part stands beside a forward */
    close_within(update_s[1], alone_s + (update_s[0] - alone_s) / 2, PADDING);
}

/* Ranks that share the CPU have times of their own; GPUs have one each. */
static void ranks_of_the_cpu_are_measured_together(void **state) {
    (void)state;
    char one[128], two[128], gpus[128];
    struct sw_train_options o = {
        .device = SW_DEVICE_HOST, .dtype = SW_BF16, .micro_batch = 1, .seq_len = 128, .ranks = 1};
    assert_int_equal(sw_subject_open(&subject, "smollm2-135m"), 0);
    sw_machine_model_key(&subject.model.config, &o, one, sizeof(one));
    o.ranks = 2;
    sw_machine_model_key(&subject.model.config, &o, two, sizeof(two));
    assert_string_not_equal(one, two);
    o.device = SW_DEVICE_CUDA;
    sw_machine_model_key(&subject.model.config, &o, gpus, sizeof(gpus));
    o.ranks = 1;
    sw_machine_model_key(&subject.model.config, &o, one, sizeof(one));
    assert_string_equal(one, gpus);
    sw_subject_close(&subject);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lanes_are_in_order_and_wait),
        cmocka_unit_test(a_turn_waits_for_the_one_before),
        cmocka_unit_test(a_run_is_two_turns_ahead),
        cmocka_unit_test(what_is_shared_slows_all_alike),
        cmocka_unit_test(host_lanes_take_rank_after_rank),
        cmocka_unit_test(ranks_meet_and_joint_tasks_wait_for_all),
        cmocka_unit_test(operations_alone),
        cmocka_unit_test(the_update_behind_the_operations),
        cmocka_unit_test(one_memory_for_update_and_copies),
        cmocka_unit_test(drives_read_and_write_at_once),
        cmocka_unit_test(a_switch_is_shared),
        cmocka_unit_test(measured_operations_take_their_time),
        cmocka_unit_test(cores_are_shared),
        cmocka_unit_test(teams_must_be_woken),
        cmocka_unit_test(what_is_held_back_leaves_the_cores),
        cmocka_unit_test(operations_leave_cores_to_others),
        cmocka_unit_test(ranks_of_the_cpu_are_measured_together),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
