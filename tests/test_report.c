/* tests/test_report.c - the figures of `spillway report`: a path worked out by hand, random traces
 * against the definition taken literally, steps and steady steps, and reading whole, cut and
 * foreign files. Times are whole nanoseconds, so that everything is compared exactly. */
#include "tools/report.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "tests/support_files.h"

enum { RANDOM_TRACES = 400, TASKS_MAX = 60 };

static struct sw_report_trace trace;
static struct sw_report_figures figures;

static void begin(void) {
    sw_report_init(&trace);
    log_catch();
}

static void end(void) {
    sw_report_figures_free(&figures);
    sw_report_close(&trace);
}

static void add(const char *lane, uint64_t step, int64_t start_ns, int64_t end_ns, uint64_t bytes) {
    const int place = sw_report_lane(&trace, lane);
    const int64_t name = sw_report_intern(&trace, "task");
    assert_true(place >= 0 && name >= 0);
    const struct sw_report_task task = {.start_ns = start_ns,
                                        .end_ns = end_ns,
                                        .bytes = bytes,
                                        .step = step,
                                        .name = (uint32_t)name,
                                        .lane = (uint8_t)place};
    assert_int_equal(sw_report_add_task(&trace, &task), 0);
}

static const struct sw_report_part *part(uint32_t step, const char *lane) {
    return &figures.parts[step * figures.lane_count + (uint32_t)sw_report_lane(&trace, lane)];
}

/* Step 7: compute 0-100, write 100-160 (waits), read 20-90 (in its shade), Adam 170-200. */
static void a_path_worked_out_by_hand(void **state) {
    (void)state;
    begin();
    add("nvme_read", 7, 20, 90, 700);
    add("compute", 7, 0, 100, 0);
    add("nvme_write", 7, 100, 160, 600);
    add("adam", 7, 170, 200, 0);
    assert_int_equal(sw_report_compute(&trace, &figures), 0);
    assert_int_equal(figures.step_count, 1);
    const struct sw_report_step *step = &figures.steps[0];
    assert_int_equal(step->step, 7);
    assert_int_equal(step->begin_ns, 0);
    assert_int_equal(step->end_ns, 200);
    assert_int_equal(step->gap_ns, 10);
    assert_int_equal(step->path_ns, 190);
    assert_int_equal(part(0, "compute")->path_ns, 100);
    assert_int_equal(part(0, "nvme_write")->path_ns, 60);
    assert_int_equal(part(0, "nvme_read")->path_ns, 0);
    assert_int_equal(part(0, "nvme_read")->busy_ns, 70);
    assert_int_equal(part(0, "nvme_read")->bytes, 700);
    assert_int_equal(part(0, "adam")->path_ns, 30);
    assert_string_equal(trace.lanes[step->clock].name, "compute");
    char sentence[128];
    sw_report_sentence(&trace, step, figures.parts, sentence, sizeof(sentence));
    assert_string_equal(sentence, "Compute sets the step: 53% of the critical path.");
    end();
}

/* A read and a write end together when the next write starts: the lane goes on with itself. */
static void of_several_that_end_together_the_same_lane(void **state) {
    (void)state;
    begin();
    add("nvme_write", 1, 0, 50, 0);
    add("nvme_read", 1, 10, 50, 0);
    add("nvme_write", 1, 50, 80, 0);
    assert_int_equal(sw_report_compute(&trace, &figures), 0);
    assert_int_equal(part(0, "nvme_write")->path_ns, 80);
    assert_int_equal(part(0, "nvme_read")->path_ns, 0);
    end();
}

/* A step begins where the one before it ended; what its path has before that is cut off. */
static void a_step_begins_where_the_one_before_ended(void **state) {
    (void)state;
    begin();
    add("compute", 1, 0, 100, 0);
    add("adam", 2, 20, 150, 0);
    add("compute", 2, 150, 250, 0);
    assert_int_equal(sw_report_compute(&trace, &figures), 0);
    assert_int_equal(figures.step_count, 2);
    assert_int_equal(figures.steps[1].begin_ns, 100);
    assert_int_equal(part(1, "adam")->path_ns, 50);
    assert_int_equal(part(1, "adam")->busy_ns, 130);
    assert_int_equal(part(1, "compute")->path_ns, 100);
    assert_int_equal(figures.steps[1].gap_ns, 0);
    end();
}

/* Evaluations are in no step, and the time they take is not the next step's. */
static void evaluations_are_left_out(void **state) {
    (void)state;
    begin();
    add("compute", 1, 0, 100, 0);
    add("compute", 1, 100, 900, 0);
    trace.tasks[1].eval = 1;
    add("compute", 2, 950, 1000, 0);
    assert_int_equal(sw_report_compute(&trace, &figures), 0);
    assert_int_equal(figures.steps[0].end_ns, 100);
    assert_int_equal(part(0, "compute")->busy_ns, 100);
    assert_int_equal(figures.steps[1].begin_ns, 950);
    assert_int_equal(figures.steps[1].path_ns, 50);
    end();
}

static void steady_steps_leave_out_two_and_one(void **state) {
    (void)state;
    for (uint32_t steps = 0; steps <= 6; steps++) {
        begin();
        for (uint32_t s = 0; s < steps; s++) add("adam", 5 + s, 100 * s, 100 * s + 10 * s, 1u << s);
        assert_int_equal(sw_report_compute(&trace, &figures), 0);
        const uint32_t first = steps < 4 ? 0 : 2, count = steps < 4 ? steps : steps - 3;
        assert_int_equal(figures.steady_first, first);
        assert_int_equal(figures.steady_count, count);
        uint64_t bytes = 0, busy = 0;
        for (uint32_t s = first; s < first + count; s++) {
            bytes += 1u << s;
            busy += 10 * s;
        }
        if (steps) assert_int_equal(figures.steady_parts[0].bytes, bytes);
        if (steps) assert_int_equal(figures.steady_parts[0].busy_ns, busy);
        end();
    }
}

/* ---- the definition, literally ---- */

/* Whether x stands behind y in order of end, start, place. */
static int is_later(uint32_t x, uint32_t y) {
    const struct sw_report_task *a = &trace.tasks[x], *b = &trace.tasks[y];
    if (a->end_ns != b->end_ns) return a->end_ns > b->end_ns;
    if (a->start_ns != b->start_ns) return a->start_ns > b->start_ns;
    return x > y;
}

static int64_t literal_before(uint32_t task) {
    int64_t best = -1;
    for (uint32_t i = 0; i < trace.task_count; i++) {
        const struct sw_report_task *t = &trace.tasks[i];
        if (t->end_ns > trace.tasks[task].start_ns || !is_later(task, i)) continue;
        if (best < 0) {
            best = i;
            continue;
        }
        const int own = t->lane == trace.tasks[task].lane;
        const int best_own = trace.tasks[best].lane == trace.tasks[task].lane;
        if (t->end_ns != trace.tasks[best].end_ns) {
            if (t->end_ns > trace.tasks[best].end_ns) best = i;
        } else if (own != best_own ? own : is_later(i, (uint32_t)best)) {
            best = i;
        }
    }
    return best;
}

static void check_step(uint32_t s) {
    const struct sw_report_step *step = &figures.steps[s];
    uint64_t lanes[SW_REPORT_LANES_MAX] = {0}, sum = 0;
    for (int64_t task = step->last; task >= 0; task = literal_before((uint32_t)task)) {
        const struct sw_report_task *t = &trace.tasks[task];
        const int64_t from = t->start_ns > step->begin_ns ? t->start_ns : step->begin_ns;
        if (t->end_ns <= step->begin_ns) break;
        lanes[t->lane] += (uint64_t)(t->end_ns - from);
    }
    for (uint32_t l = 0; l < figures.lane_count; l++) {
        assert_int_equal(figures.parts[s * figures.lane_count + l].path_ns, lanes[l]);
        sum += lanes[l];
    }
    assert_int_equal(step->path_ns, sum);
    assert_int_equal(step->path_ns + step->gap_ns, step->end_ns - step->begin_ns);
}

static void random_traces_follow_the_definition(void **state) {
    (void)state;
    static const char *const lanes[] = {"compute", "adam", "nvme_read", "nvme_write"};
    srand(20261130);
    for (int i = 0; i < RANDOM_TRACES; i++) {
        int64_t free_at[4] = {0};
        const int tasks = rand() % TASKS_MAX;
        begin();
        for (int k = 0; k < tasks; k++) {
            const int lane = rand() % 4;
            const int64_t start = free_at[lane] + (rand() % 3 ? 0 : rand() % 8);
            free_at[lane] = start + rand() % 6; /* often nothing, often together */
            add(lanes[lane], 1 + (uint64_t)(start / 12), start, free_at[lane], 1);
        }
        assert_int_equal(sw_report_compute(&trace, &figures), 0);
        for (uint32_t s = 0; s < figures.step_count; s++) check_step(s);
        end();
    }
}

/* ---- files ---- */

static const char head[] = "{\"schema\":1,\"traceEvents\":[\n";
static const char task[] = "{\"ph\":\"X\",\"name\":\"read a\",\"ts\":-1.5,\"dur\":2.001,\"args\":"
                           "{\"lane\":\"nvme_read\",\"unit\":\"a\",\"micro\":3,\"bytes\":4096,"
                           "\"step\":12}}";

static int read_text(const char *a, const char *b, const char *c) {
    char text[2048];
    snprintf(text, sizeof(text), "%s%s%s", a, b, c);
    file_write(in_folder("trace.json"), text, strlen(text));
    log_catch();
    return sw_report_open(&trace, in_folder("trace.json"));
}

static void events_are_read_to_the_nanosecond(void **state) {
    (void)state;
    assert_int_equal(
        read_text(head, task,
                  ",{\"ph\":\"C\",\"name\":\"memory host\",\"ts\":5e-1,\"args\":{\"used\":7,"
                  "\"budget\":9}},{\"ph\":\"M\",\"name\":\"peak_bandwidth\",\"args\":{\"lane\":"
                  "\"nvme_read\",\"bytes_per_s\":2000}},{\"ph\":\"i\",\"x\":[1,{\"y\":null}]}]}"),
        0);
    assert_string_equal(log_text(), "");
    assert_int_equal(trace.truncated, 0);
    assert_int_equal(trace.task_count, 1);
    assert_int_equal(trace.tasks[0].start_ns, -1500);
    assert_int_equal(trace.tasks[0].end_ns, 501);
    assert_int_equal(trace.tasks[0].bytes, 4096);
    assert_int_equal(trace.tasks[0].step, 12);
    assert_int_equal(trace.tasks[0].micro, 3);
    assert_string_equal(sw_report_name(&trace, trace.tasks[0].name), "read a");
    assert_string_equal(trace.lanes[trace.tasks[0].lane].name, "nvme_read");
    assert_int_equal(trace.lanes[trace.tasks[0].lane].peak_bytes_per_s, 2000);
    assert_int_equal(trace.tier_count, 1);
    assert_int_equal(trace.tiers[0].samples[0].at_ns, 500);
    assert_int_equal(trace.tiers[0].samples[0].used, 7);
    assert_int_equal(trace.tiers[0].samples[0].budget, 9);
    sw_report_close(&trace);
}

/* Cut at every byte: either what is there counts, or the file is named. */
static void a_cut_file_counts_as_far_as_it_goes(void **state) {
    (void)state;
    char whole[1024];
    snprintf(whole, sizeof(whole), "%s%s,%s]}", head, task, task);
    for (size_t cut = 0; cut < strlen(whole); cut++) {
        file_write(in_folder("trace.json"), whole, cut);
        log_catch();
        const int ret = sw_report_open(&trace, in_folder("trace.json"));
        if (cut < strlen(head) - 1) { /* the bracket is the last but one */
            assert_int_equal(ret, -EINVAL);
            assert_reported("trace.json");
            continue;
        }
        assert_int_equal(ret, 0);
        assert_int_equal(trace.truncated, 1);
        const size_t first = strlen(head) + strlen(task), second = first + 1 + strlen(task);
        assert_int_equal(trace.task_count, (cut >= first) + (cut >= second));
        assert_non_null(strstr(log_text(), "trace.json ends in the middle"));
        sw_report_close(&trace);
    }
}

static void what_is_no_trace_is_refused_by_name(void **state) {
    (void)state;
    static const char *const bad[] = {
        "no json",
        "[1, 2]",
        "{}",
        "{\"schema\":2,\"traceEvents\":[]}",
        "{\"traceEvents\":[]}",
        "{\"schema\":1,\"traceEvents\":[1]}",
        "{\"schema\":1,\"traceEvents\":[{}]} more",
        "{\"schema\":1,\"traceEvents\":[{\"ph\":\"X\",\"ts\":1,\"dur\":1,\"args\":{}}]}",
        "{\"schema\":1,\"traceEvents\":[{\"ph\":\"X\",\"ts\":1,\"dur\":-1,\"args\":{\"step\":1}}]}",
        "{\"schema\":1,\"traceEvents\":[{\"ph\":\"X\",\"ts\":\"1\"}]}",
        "{\"schema\":1,\"traceEvents\":[{\"ph\":\"X\" \"ts\":1}]}",
        "{\"schema\":1,"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(read_text(bad[i], "", ""), -EINVAL);
        assert_reported("trace.json");
    }
}

static int setup(void **state) {
    (void)state;
    folder_make();
    return 0;
}

static int teardown(void **state) {
    (void)state;
    folder_remove();
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_path_worked_out_by_hand),
        cmocka_unit_test(of_several_that_end_together_the_same_lane),
        cmocka_unit_test(a_step_begins_where_the_one_before_ended),
        cmocka_unit_test(evaluations_are_left_out),
        cmocka_unit_test(steady_steps_leave_out_two_and_one),
        cmocka_unit_test(random_traces_follow_the_definition),
        cmocka_unit_test(events_are_read_to_the_nanosecond),
        cmocka_unit_test(a_cut_file_counts_as_far_as_it_goes),
        cmocka_unit_test(what_is_no_trace_is_refused_by_name),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
