/* tests/test_trace.c - the trace: every event of every thread once, with its fields; more events
 * than the buffers hold; a file that can be read before it is closed; a write that fails. */
#include "engine/trace.h"

#include <errno.h>
#include <jansson.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>
#include <cmocka.h>
#include "engine/process_name.h"
#include "tests/support_files.h"

enum { PER_LANE = 5000, WAIT_MS_MAX = 10000 };

static json_t *read_json(const char *path) {
    json_error_t error;
    json_t *root = json_load_file(path, 0, &error);
    if (!root) print_error("%s: line %d: %s\n", path, error.line, error.text);
    assert_non_null(root);
    return root;
}

static uint64_t number(const json_t *object, const char *key) {
    return (uint64_t)json_integer_value(json_object_get(object, key));
}

static uint32_t count_of(const json_t *events, const char *phase) {
    uint32_t count = 0;
    for (size_t i = 0; i < json_array_size(events); i++)
        count +=
            !strcmp(json_string_value(json_object_get(json_array_get(events, i), "ph")), phase);
    return count;
}

static struct sw_trace *open_trace;

/* As a lane would: event i of lane l lasts from i to i + 0.5 microseconds. */
static void *add_many(void *arg) {
    const enum sw_lane lane = (enum sw_lane)(intptr_t)arg;
    for (uint32_t i = 1; i <= PER_LANE; i++) {
        const struct sw_trace_event event = {.kind = SW_TASK_READ,
                                             .lane = lane,
                                             .unit = "layer.1",
                                             .micro = i % 7,
                                             .step = i,
                                             .bytes = (uint64_t)i << 32,
                                             .start_ns = 1000ull * i,
                                             .end_ns = 1000ull * i + 500};
        sw_trace_add(open_trace, &event);
    }
    return NULL;
}

static void check_task(const json_t *event, uint32_t seen[SW_LANE_COUNT]) {
    const json_t *args = json_object_get(event, "args");
    const uint64_t lane = number(event, "tid"), i = ++seen[lane];
    assert_string_equal(json_string_value(json_object_get(args, "lane")),
                        sw_lane_name((enum sw_lane)lane));
    assert_string_equal(json_string_value(json_object_get(event, "name")), "read layer.1");
    assert_string_equal(json_string_value(json_object_get(args, "unit")), "layer.1");
    assert_int_equal(number(args, "step"), i);
    assert_int_equal(number(args, "micro"), i % 7);
    assert_int_equal(number(args, "bytes"), i << 32);
    assert_true(json_number_value(json_object_get(event, "ts")) == (double)i - 1);
    assert_true(json_number_value(json_object_get(event, "dur")) == 0.5);
}

static void every_event_of_every_thread_once(void **state) {
    (void)state;
    assert_int_equal(sw_trace_open(&open_trace, in_folder("trace.json"), 0, 1, NULL), 0);
    pthread_t threads[SW_LANE_COUNT];
    sw_trace_memory(open_trace, SW_TIER_HOST, 5, 6, 1000);
    for (int l = 0; l < SW_LANE_COUNT; l++)
        assert_int_equal(pthread_create(&threads[l], NULL, add_many, (void *)(intptr_t)l), 0);
    for (int l = 0; l < SW_LANE_COUNT; l++) pthread_join(threads[l], NULL);
    sw_trace_peak(open_trace, SW_LANE_NVME_READ, 77);
    assert_int_equal(sw_trace_close(open_trace), 0);
    json_t *root = read_json(in_folder("trace.json"));
    const json_t *events = json_object_get(root, "traceEvents");
    uint32_t seen[SW_LANE_COUNT] = {0};
    assert_int_equal(number(root, "schema"), 1);
    assert_int_equal(count_of(events, "X"), SW_LANE_COUNT * PER_LANE);
    assert_int_equal(count_of(events, "C"), 1);
    assert_int_equal(count_of(events, "M"), SW_LANE_COUNT + 1);
    for (size_t i = 0; i < json_array_size(events); i++) {
        const json_t *event = json_array_get(events, i);
        if (!strcmp(json_string_value(json_object_get(event, "ph")), "X")) check_task(event, seen);
    }
    assert_int_equal(file_count(), 1); /* no .partial */
    json_decref(root);
}

static void memory_and_evaluations_have_their_form(void **state) {
    (void)state;
    assert_int_equal(sw_trace_open(&open_trace, in_folder("trace.json"), 0, 1, NULL), 0);
    const struct sw_trace_event event = {
        .kind = SW_TASK_NORM, .lane = SW_LANE_CONTROL, .eval = 1, .start_ns = 5000, .end_ns = 5001};
    sw_trace_add(open_trace, &event);
    sw_trace_memory(open_trace, SW_TIER_NVME, 1ull << 40, 1ull << 41, 4999);
    assert_int_equal(sw_trace_close(open_trace), 0);
    size_t bytes;
    char *text = file_read(in_folder("trace.json"), &bytes);
    assert_non_null(strstr(text,
                           "{\"ph\":\"X\",\"name\":\"norm\",\"cat\":\"eval\",\"pid\":0,\"tid\":7,"
                           "\"ts\":0.000,\"dur\":0.001,\"args\":{\"lane\":\"control\","
                           "\"unit\":\"\",\"micro\":0,\"bytes\":0,\"rank\":0,\"step\":0}}"));
    assert_non_null(strstr(text, "{\"ph\":\"C\",\"name\":\"memory nvme\",\"pid\":0,\"ts\":-0.001,"
                                 "\"args\":{\"used\":1099511627776,\"budget\":2199023255552}}"));
    free(text);
}

/* What a run that is killed now would leave. */
static void the_file_can_be_read_before_it_is_closed(void **state) {
    (void)state;
    assert_int_equal(sw_trace_open(&open_trace, in_folder("trace.json"), 0, 1, NULL), 0);
    for (int round = 1; round <= 3; round++) {
        add_many((void *)SW_LANE_ADAM);
        uint32_t found = 0;
        for (int ms = 0; ms < WAIT_MS_MAX && found < (uint32_t)round * PER_LANE; ms += 10) {
            usleep(10000);
            json_t *root = json_load_file(in_folder("trace.json.partial"), 0, NULL);
            if (root) found = count_of(json_object_get(root, "traceEvents"), "X");
            json_decref(root);
        }
        assert_int_equal(found, round * PER_LANE);
    }
    assert_int_equal(sw_trace_close(open_trace), 0);
}

static void a_failed_write_is_reported_at_close(void **state) {
    (void)state;
    struct rlimit old, small;
    signal(SIGXFSZ, SIG_IGN);
    log_catch();
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    small = old;
    small.rlim_cur = 100000;
    assert_int_equal(sw_trace_open(&open_trace, in_folder("trace.json"), 0, 1, NULL), 0);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    add_many((void *)SW_LANE_ADAM);
    const int ret = sw_trace_close(open_trace);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_int_equal(ret, -EFBIG);
    assert_reported("trace.json");
    assert_int_equal(file_exists(in_folder("trace.json")), 0);
}

static void what_cannot_be_opened_is_reported(void **state) {
    (void)state;
    log_catch();
    assert_int_equal(sw_trace_open(&open_trace, in_folder("none/trace.json"), 0, 1, NULL), -ENOENT);
    assert_reported("none/trace.json");
    assert_null(open_trace);
    assert_int_equal(sw_trace_open(&open_trace, NULL, 0, 1, NULL), 0);
    assert_null(open_trace);
    add_many((void *)SW_LANE_ADAM); /* goes nowhere */
    assert_int_equal(sw_trace_close(open_trace), 0);
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

static void check_name(const char *path, uint32_t process, const char *want) {
    char name[32];
    assert_int_equal(sw_process_path(path, process, name, sizeof(name)), 0);
    assert_string_equal(name, want);
}

static void processes_have_names_of_their_own(void **state) {
    (void)state;
    check_name("a.b/trace.v1.json", 0, "a.b/trace.v1.json");
    check_name("a.b/trace.v1.json", 12, "a.b/trace.v1-p12.json");
    check_name("a.b/trace", 1, "a.b/trace-p1");
    check_name(".trace", 1, ".trace-p1");
    char small[12];
    assert_int_equal(sw_process_path("trace.json", 1, small, sizeof(small)), -ENAMETOOLONG);
    const char *const own[] = {"trace.json", "trace-p1.json", "trace-p63.json"};
    const char *const others[] = {"trace-p.json",   "trace-p1",    "trace-p1.json.x",
                                  "trace-p1x.json", "trace1.json", "race.json",
                                  "trace"};
    for (size_t i = 0; i < sizeof(own) / sizeof(own[0]); i++)
        assert_true(sw_process_is_named(own[i], "trace.json"));
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++)
        assert_false(sw_process_is_named(others[i], "trace.json"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(every_event_of_every_thread_once, setup, teardown),
        cmocka_unit_test_setup_teardown(memory_and_evaluations_have_their_form, setup, teardown),
        cmocka_unit_test_setup_teardown(the_file_can_be_read_before_it_is_closed, setup, teardown),
        cmocka_unit_test_setup_teardown(a_failed_write_is_reported_at_close, setup, teardown),
        cmocka_unit_test_setup_teardown(what_cannot_be_opened_is_reported, setup, teardown),
        cmocka_unit_test(processes_have_names_of_their_own),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
