/* The CUDA device apart from its arithmetic, on the CPU stand-in: how the plugin is found and what
 * is said when it cannot be used; memory; copies; streams and events between threads and devices,
 * where nothing but a wait brings work about. On a GPU what no promise holds back may happen early:
 * there the tests look at the promises alone. */
#include "kernels/device.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>
#include "base/clock.h"
#include "base/log.h"
#include "base/word_sum.h"
#include "kernels/cuda_plugin.h"
#include "tests/support_cuda.h"
#include "tests/support_files.h"

enum { DEVICES_MAX = 2 };
static struct cuda_device devices[DEVICES_MAX];
static int has_cufile;
static int device_count; /* one where the machine has one */

static int open_devices(void **state) {
    (void)state;
    setenv("STANDIN_DEVICES", "2", 1);
    setenv("STANDIN_MEMORY", "1000000000", 1);
    setenv("STANDIN_DRIFT", "10000", 1);
    has_cufile = cuda_use_cufile();
    cuda_device_open(&devices[0], 0);
    device_count = sw_device_cuda_count() < DEVICES_MAX ? 1 : DEVICES_MAX;
    for (int i = 1; i < device_count; i++) cuda_device_open(&devices[i], i);
    return 0;
}

static int close_devices(void **state) {
    (void)state;
    for (int i = 0; i < device_count; i++) cuda_device_close(&devices[i]);
    return 0;
}

/* ---- opening ---- */

static void print_report(enum sw_log_level level, const char *line, void *ctx) {
    (void)ctx;
    if (level == SW_LOG_ERROR) printf("%s\n", line);
}

/* Whether this device reads its own program by itself. */
static void say_of_a_file(const struct sw_device_handle *h) {
    struct sw_device_file *file = NULL;
    char why[256] = "";
    void *memory = NULL;
    const int fd = open("/proc/self/exe", O_RDONLY);
    if (!h->ops->file_open || h->ops->alloc(h->device, 4096, &memory) < 0) return;
    const int ret = h->ops->file_open(h->device, fd, memory, 4096, &file, why, sizeof(why));
    printf("%s, and a file: %d\n", why, ret);
    h->ops->file_close(file);
    h->ops->free(h->device, memory, 4096);
    close(fd);
}

/* This program, run with SW_TEST_OPEN set, opens a device and says what came of it: each case needs
 * a process that has not opened the plugin yet. */
static int open_and_say(void) {
    const struct sw_cuda_device_options options = {.index = atoi(getenv("SW_TEST_OPEN"))};
    struct sw_device_handle h = {0};
    sw_log_set_sink(print_report, NULL);
    const int ret = sw_device_cuda_open(&h, &options);
    printf("result %d\n", ret);
    if (ret == 0) {
        printf("%s\n", h.ops->numerics(h.device));
        say_of_a_file(&h);
        h.ops->close(h.device);
    }
    return 0;
}

/* What opening says with these settings, "NAME=VALUE" each. */
static const char *opening(const char *one, const char *other) {
    static char said[4096];
    char command[1024], self[512];
    const ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);
    self[length] = '\0';
    snprintf(command, sizeof(command), "SW_TEST_OPEN=0 %s %s '%s'", one, other, self);
    FILE *run = popen(command, "r");
    const size_t got = fread(said, 1, sizeof(said) - 1, run);
    said[got] = '\0';
    assert_int_equal(pclose(run), 0);
    return said;
}

static void assert_says(const char *said, int result, const char *part) {
    char line[32];
    snprintf(line, sizeof(line), "result %d\n", result);
    if (!strstr(said, line) || !strstr(said, part))
        fail_msg("neither '%s' nor '%s' where both were expected: %s", line, part, said);
    const char *end = strchr(said, '\n'); /* reported once */
    if (result < 0) assert_true(end && strncmp(end + 1, "result", 6) == 0);
}

static void why_it_cannot_be_used_is_said(void **state) {
    (void)state;
    cuda_standin_only(devices, "errors at the opening are the stand-in's to make");
    assert_says(opening("", ""), 0, "cuda CPU stand-in, compute capability 8.9, CUDA ");
    assert_says(opening("STANDIN_ERROR=35", ""), -ENODEV, "no NVIDIA driver here, or one older");
    assert_says(opening("STANDIN_ERROR=100", ""), -ENODEV, "sees no GPU");
    assert_says(opening("STANDIN_DEVICES=0", ""), -ENODEV, "sees no GPU");
    assert_says(opening("STANDIN_ERROR=999", ""), -ENODEV, "CUDA cannot be used");
    assert_says(opening("STANDIN_CAPABILITY=75", ""), -ENOTSUP,
                "compute capability 7.5; 8.0 or more is needed");
    assert_says(opening("SW_TEST_OPEN=7", ""), -ENODEV, "no device 7; this machine has 2");
    assert_says(opening("SPILLWAY_CUDA_PLUGIN=/no/such.so", ""), -ENOENT, "/no/such.so");
    /* A library that is no plugin at all. */
    assert_says(opening("SPILLWAY_CUDA_PLUGIN=libm.so.6", ""), -ENOEXEC, "none of this version");
}

/* Beside the program, when nothing else is named. */
static void the_plugin_lies_beside_the_program(void **state) {
    (void)state;
    assert_says(opening("SPILLWAY_CUDA_PLUGIN=", ""), -ENOENT, "tests/libspillway_cuda.so");
}

/* ---- memory ---- */

static void memory_is_aligned_and_cleared(void **state) {
    (void)state;
#ifdef SW_POISON
    const unsigned char fill = 0xFF;
#else
    const unsigned char fill = 0;
#endif
    static const uint64_t sizes[] = {0, 1, 4096, 4097, (3 << 20) + 1};
    for (int i = 0; i < 2 * device_count * 5; i++) { /* what was freed comes back clean */
        struct cuda_device *d = &devices[i % device_count];
        const uint64_t size = sizes[i / device_count % 5];
        unsigned char *bytes = malloc(size + 1);
        void *p = NULL;
        assert_int_equal(d->ops->alloc(d->device, size, &p), 0);
        assert_int_equal((uintptr_t)p % 4096, 0);
        cuda_bytes_get(d, bytes, p, size);
        for (uint64_t b = 0; b < size; b++) assert_int_equal(bytes[b], fill);
        memset(bytes, 0x33, size);
        assert_int_equal(d->ops->copy_h2d(d->stream, p, bytes, size), 0);
        d->ops->free(d->device, p, size);
        free(bytes);
    }
    devices->ops->free(devices->device, NULL, 4096);
}

static void memory_that_does_not_exist_is_refused(void **state) {
    (void)state;
    void *p = &p;
    log_catch();
    assert_int_equal(devices->ops->alloc(devices->device, 1ull << 50, &p), -ENOMEM);
    assert_ptr_equal(p, &p); /* out is written on success alone */
    assert_reported("no memory for 1125899906842624 bytes");
    sw_log_set_sink(NULL, NULL);
    p = cuda_bytes_new(devices, NULL, 100);
    /* The next launch does not find the error again. */
    assert_int_equal(devices->ops->sum(devices->stream, p, (float *)p + 2, 1), 0);
    devices->ops->free(devices->device, p, 100);
}

static void wrong_sides_of_a_copy_are_refused(void **state) {
    (void)state;
    cuda_standin_only(devices, "CUDA need not look at the sides of a copy");
    char host[64] = {0};
    char *there = cuda_bytes_new(devices, host, sizeof(host));
    const struct sw_device_ops *ops = devices->ops;
    assert_int_equal(ops->copy_h2d(devices->stream, host, there, 64), -EIO);
    assert_int_equal(ops->copy_d2h(devices->stream, there, host, 64), -EIO);
    assert_int_equal(ops->copy_d2d(devices->stream, there, host, 64), -EIO);
    assert_int_equal(ops->zero(devices->stream, host, 64), -EIO);
    assert_int_equal(ops->copy_h2d(devices->stream, there + 8000, host, 64), -EIO);
    ops->free(devices->device, there, 64);
}

/* ---- order ---- */

enum { BYTES = 256, ROUNDS = 200 };

/* Two streams of device memory: the second one copies on what the first one brings. `waits` says
 * whether it waits for that. How often the right bytes arrive. */
static int handed_over(int waits) {
    const struct sw_device_ops *ops = devices->ops;
    char *first = cuda_bytes_new(devices, NULL, BYTES),
         *then = cuda_bytes_new(devices, NULL, BYTES);
    struct sw_stream *other;
    struct sw_event *event;
    unsigned char *pinned = aligned_alloc(4096, 4096), got[BYTES];
    int right = 0;
    assert_int_equal(ops->pin(devices->device, pinned, 4096), 0);
    assert_int_equal(ops->stream_create(devices->device, &other), 0);
    assert_int_equal(ops->event_create(devices->device, &event), 0);
    for (int round = 1; round <= ROUNDS; round++) {
        memset(pinned, round, BYTES);
        assert_int_equal(ops->copy_h2d(devices->stream, first, pinned, BYTES), 0);
        assert_int_equal(ops->event_record(event, devices->stream), 0);
        if (waits) assert_int_equal(ops->stream_wait(other, event), 0);
        assert_int_equal(ops->copy_d2d(other, then, first, BYTES), 0);
        assert_int_equal(ops->copy_d2h(other, got, then, BYTES), 0);
        assert_int_equal(ops->stream_sync(other), 0);
        right += got[0] == (unsigned char)round && got[BYTES - 1] == (unsigned char)round;
        assert_int_equal(ops->stream_sync(devices->stream), 0); /* pinned is written next */
    }
    ops->stream_destroy(other);
    ops->event_destroy(event);
    ops->unpin(devices->device, pinned);
    free(pinned);
    ops->free(devices->device, first, BYTES);
    ops->free(devices->device, then, BYTES);
    return right;
}

/* How many copies such a one is: with that number the first is refused that is not made. */
static int copies_of(struct sw_stream *stream, void *to, const void *from, uint64_t bytes) {
    for (int n = 1;; n++) {
        char setting[32];
        snprintf(setting, sizeof(setting), "cudaMemcpyAsync:%d", n);
        setenv("STANDIN_FAIL", setting, 1);
        const int ret = devices[0].ops->copy_h2d(stream, to, from, bytes);
        unsetenv("STANDIN_FAIL");
        if (ret == 0) return n - 1;
    }
}

static void cut_copies_bring_the_same_bytes(void **state) {
    (void)state;
    enum { CUT_BYTES = 100003 };
    static const uint64_t pieces[] = {0, 1, 4096, 99999, CUT_BYTES, 1 << 20};
    const struct cuda_device *d = &devices[0];
    struct sw_stream *stream;
    void *there;
    unsigned char *from = malloc(CUT_BYTES), *to = malloc(CUT_BYTES + 1);
    assert_int_equal(d->ops->stream_create(d->device, &stream), 0);
    assert_int_equal(d->ops->alloc(d->device, CUT_BYTES, &there), 0);
    for (int i = 0; i < 6; i++) {
        for (int k = 0; k < CUT_BYTES; k++) from[k] = (unsigned char)(k * 31 + (k >> 8) + i);
        memset(to, 0, CUT_BYTES + 1);
        to[CUT_BYTES] = 77;
        d->ops->cut_copies(d->device, pieces[i], pieces[5 - i]);
        assert_int_equal(d->ops->copy_h2d(stream, there, from, CUT_BYTES), 0);
        assert_int_equal(d->ops->copy_d2h(stream, to, there, CUT_BYTES), 0);
        assert_int_equal(d->ops->stream_sync(stream), 0);
        assert_memory_equal(from, to, CUT_BYTES);
        assert_int_equal(to[CUT_BYTES], 77);
    }
    if (cuda_is_standin(devices)) {
        sw_log_set_sink(NULL, NULL);
        d->ops->cut_copies(d->device, 25000, 0);
        assert_int_equal(copies_of(stream, there, from, CUT_BYTES), 5);
        assert_int_equal(copies_of(stream, there, from, 25000), 1);
        d->ops->cut_copies(d->device, 0, 25000);
        assert_int_equal(copies_of(stream, there, from, CUT_BYTES), 1);
    }
    d->ops->cut_copies(d->device, 0, 0);
    assert_int_equal(d->ops->stream_sync(stream), 0);
    d->ops->free(d->device, there, CUT_BYTES);
    d->ops->stream_destroy(stream);
    free(from);
    free(to);
}

static void only_a_wait_orders_streams(void **state) {
    (void)state;
    assert_int_equal(handed_over(1), ROUNDS);
    const int right = handed_over(0);
    print_message("without the wait %d of %d arrive\n", right, ROUNDS);
    if (cuda_is_standin(devices)) assert_true(right < ROUNDS / 2);
}

/* A pinned source is read when the stream gets there, another one at the call. */
static void pinned_copies_run_late(void **state) {
    (void)state;
    const struct sw_device_ops *ops = devices->ops;
    char *there = cuda_bytes_new(devices, NULL, BYTES);
    unsigned char *memory = aligned_alloc(4096, 4096), got[BYTES];
    int late = 0;
    for (int pinned = 0; pinned < 2; pinned++) {
        if (pinned) assert_int_equal(ops->pin(devices->device, memory, 4096), 0);
        for (int round = 0; round < ROUNDS; round++) {
            memset(memory, 1, BYTES);
            assert_int_equal(ops->copy_h2d(devices->stream, there, memory, BYTES), 0);
            memset(memory, 2, BYTES); /* too early where it is pinned */
            cuda_bytes_get(devices, got, there, BYTES);
            if (!pinned) assert_int_equal(got[0], 1);
            late += got[0] == 2;
        }
    }
    print_message("a source overwritten too early shows %d times of %d\n", late, ROUNDS);
    if (cuda_is_standin(devices)) assert_true(late > ROUNDS / 2);
    ops->unpin(devices->device, memory);
    free(memory);
    ops->free(devices->device, there, BYTES);
}

/* A result in pinned memory is there after the event, and not before it was waited for. */
static void results_come_with_their_event(void **state) {
    (void)state;
    const struct sw_device_ops *ops = devices->ops;
    char *there = cuda_bytes_new(devices, NULL, BYTES);
    unsigned char *pinned = aligned_alloc(4096, 4096);
    struct sw_event *event;
    int early = 0;
    assert_int_equal(ops->pin(devices->device, pinned, 4096), 0);
    assert_int_equal(ops->event_create(devices->device, &event), 0);
    assert_int_equal(ops->event_wait(event), 0); /* never recorded: nothing to wait for */
    assert_int_equal(ops->stream_wait(devices->stream, event), 0);
    for (int round = 0; round < ROUNDS; round++) {
        memset(pinned, 0x77, BYTES);
        assert_int_equal(ops->zero(devices->stream, there, BYTES), 0);
        assert_int_equal(ops->copy_d2h(devices->stream, pinned, there, BYTES), 0);
        assert_int_equal(ops->event_record(event, devices->stream), 0);
        early += pinned[0] == 0x77;
        assert_int_equal(ops->event_wait(event), 0);
        for (int i = 0; i < BYTES; i++) assert_int_equal(pinned[i], 0);
    }
    if (cuda_is_standin(devices)) assert_true(early > ROUNDS / 4);
    ops->event_destroy(event);
    ops->event_destroy(NULL);
    ops->unpin(devices->device, pinned);
    free(pinned);
    ops->free(devices->device, there, BYTES);
}

/* What was submitted to a stream is over when the stream has been waited for, or destroyed. */
static void a_stream_is_over_with_its_work(void **state) {
    (void)state;
    const struct sw_device_ops *ops = devices->ops;
    char *there = cuda_bytes_new(devices, NULL, BYTES);
    unsigned char *pinned = aligned_alloc(4096, 4096);
    assert_int_equal(ops->pin(devices->device, pinned, 4096), 0);
    for (int round = 0; round < ROUNDS; round++) {
        struct sw_stream *s;
        memset(pinned, 0x77, BYTES);
        assert_int_equal(ops->stream_create(devices->device, &s), 0);
        assert_int_equal(ops->zero(s, there, BYTES), 0);
        assert_int_equal(ops->copy_d2h(s, pinned, there, BYTES), 0);
        if (round % 2)
            assert_int_equal(ops->stream_sync(s), 0);
        else
            ops->stream_destroy(s);
        for (int i = 0; i < BYTES; i++) assert_int_equal(pinned[i], 0);
        if (round % 2) ops->stream_destroy(s);
    }
    ops->unpin(devices->device, pinned);
    free(pinned);
    ops->free(devices->device, there, BYTES);
}

/* A relay between lanes of two devices in two threads: each stage adds one float, ordered by events
 * alone. The product 1 x 1 + C is the only arithmetic it needs. */
enum { STAGES = 60 };
struct relay {
    struct sw_event *events[STAGES + 1];
    float *cell, *one;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int recorded; /* how many of the events: a wait for a later one would be a wait for nothing */
    int first;
};

static void *relay_lane(void *ctx) {
    struct relay *r = ctx;
    const int first = __atomic_fetch_add(&r->first, 1, __ATOMIC_RELAXED);
    const struct sw_device_ops *ops = devices->ops;
    struct sw_stream *s;
    if (ops->stream_create(devices->device, &s) < 0) return NULL;
    const struct sw_gemm g = {.m = 1,
                              .n = 1,
                              .k = 1,
                              .accumulate = 1,
                              .a = r->one,
                              .a_dtype = SW_FP32,
                              .lda = 1,
                              .b = r->one,
                              .b_dtype = SW_FP32,
                              .ldb = 1,
                              .c = r->cell,
                              .c_dtype = SW_FP32,
                              .ldc = 1};
    for (int i = first; i < STAGES; i += 2) {
        pthread_mutex_lock(&r->lock);
        while (r->recorded <= i) pthread_cond_wait(&r->changed, &r->lock);
        pthread_mutex_unlock(&r->lock);
        if (i % 4 < 2)
            ops->stream_wait(s, r->events[i]);
        else
            ops->event_wait(r->events[i]);
        ops->gemm(s, &g);
        ops->event_record(r->events[i + 1], s);
        pthread_mutex_lock(&r->lock);
        r->recorded++;
        pthread_cond_broadcast(&r->changed);
        pthread_mutex_unlock(&r->lock);
    }
    ops->stream_destroy(s);
    return NULL;
}

static void events_hand_over_between_threads(void **state) {
    (void)state;
    const struct sw_device_ops *ops = devices->ops;
    struct relay r = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    const float zero = 0.0f, one = 1.0f;
    float got = -1.0f;
    pthread_t lanes[2];
    r.cell = cuda_bytes_new(devices, &zero, sizeof(zero));
    r.one = cuda_bytes_new(devices, &one, sizeof(one));
    for (int i = 0; i <= STAGES; i++)
        assert_int_equal(ops->event_create(devices->device, &r.events[i]), 0);
    ops->event_record(r.events[0], devices->stream);
    r.recorded = 1;
    for (int i = 0; i < 2; i++) pthread_create(&lanes[i], NULL, relay_lane, &r);
    for (int i = 0; i < 2; i++) pthread_join(lanes[i], NULL);
    ops->stream_wait(devices->stream, r.events[STAGES]);
    cuda_bytes_get(devices, &got, r.cell, sizeof(got));
    assert_true(got == (float)STAGES);
    for (int i = 0; i <= STAGES; i++) ops->event_destroy(r.events[i]);
    ops->free(devices->device, r.cell, sizeof(zero));
    ops->free(devices->device, r.one, sizeof(one));
}

/* ---- files ---- */

enum { FILE_BYTES = 300000 };
static unsigned char in_file[FILE_BYTES];

/* An open file of the test's bytes, of the last folder_make(). */
static int file_new(void) {
    for (int i = 0; i < FILE_BYTES; i++) in_file[i] = (unsigned char)(i * 37 + (i >> 9));
    file_write(in_folder("file"), in_file, FILE_BYTES);
    const int fd = open(in_folder("file"), O_RDONLY);
    assert_true(fd >= 0);
    return fd;
}

static struct sw_device_file *file_opened(int fd, char *base, int result, const char *says) {
    struct sw_device_file *file = NULL;
    char why[256] = "";
    assert_int_equal(
        devices->ops->file_open(devices->device, fd, base, FILE_BYTES, &file, why, sizeof(why)),
        result);
    if (says && !strstr(why, says)) fail_msg("'%s' is not in '%s'", says, why);
    return file;
}

/* Reads so many bytes from there to there, and compares. */
static void read_piece(struct sw_device_file *file, char *to, uint64_t offset, uint64_t bytes) {
    uint64_t sum = 0;
    unsigned char *got = malloc(bytes);
    assert_int_equal(devices->ops->file_read(devices->stream, file, to, offset, bytes, &sum), 0);
    cuda_bytes_get(devices, got, to, bytes);
    assert_memory_equal(got, in_file + offset, bytes);
    assert_true(sum == sw_word_sum(in_file + offset, bytes));
    free(got);
}

/* All of it, and of any length to any place, in memory that the library knows or not, in one go or
 * in several. */
static void files_are_read_by_the_device(void **state) {
    (void)state;
    cuda_standin_only(devices, "only its cuFile can be told to fail");
    if (!has_cufile) skip();
    folder_make();
    const int fd = file_new();
    char *there = cuda_bytes_new(devices, NULL, FILE_BYTES + 64);
    static const char *const faults[] = {"", "memory", "short"};
    for (int i = 0; i < 3; i++) {
        setenv("CUFILE_FAULT", faults[i], 1);
        struct sw_device_file *file = file_opened(fd, there, 0, NULL);
        read_piece(file, there, 0, FILE_BYTES);
        for (uint64_t bytes = 1; bytes < 40; bytes++)
            read_piece(file, there + bytes % 11, 4096 * bytes, bytes);
        read_piece(file, there + 8, 4096, 100001);
        read_piece(file, there + 60, 8192, FILE_BYTES - 8192); /* beyond what it knows */
        devices->ops->file_close(file);
    }
    unsetenv("CUFILE_FAULT");
    devices->ops->file_close(NULL);
    devices->ops->free(devices->device, there, FILE_BYTES + 64);
    close(fd);
    folder_remove();
}

/* Its work may come late; the file's bytes never do so before. */
static void a_file_waits_for_what_is_on_the_stream(void **state) {
    (void)state;
    cuda_standin_only(devices, "only there what is not awaited comes late");
    if (!has_cufile) skip();
    const struct sw_device_ops *ops = devices->ops;
    folder_make();
    const int fd = file_new();
    char *there = cuda_bytes_new(devices, NULL, FILE_BYTES),
         *aside = cuda_bytes_new(devices, NULL, 8);
    struct sw_device_file *file = file_opened(fd, there, 0, NULL);
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t sum = 0, got = 1;
        assert_int_equal(ops->zero(devices->stream, there, FILE_BYTES), 0);
        assert_int_equal(ops->copy_d2d(devices->stream, aside, there + 4096, 8), 0);
        assert_int_equal(ops->file_read(devices->stream, file, there, 0, FILE_BYTES, &sum), 0);
        cuda_bytes_get(devices, &got, aside, 8);
        assert_true(got == 0);
        assert_true(sum == sw_word_sum(in_file, FILE_BYTES));
    }
    ops->file_close(file);
    ops->free(devices->device, there, FILE_BYTES);
    ops->free(devices->device, aside, 8);
    close(fd);
    folder_remove();
}

static void a_file_that_cannot_be_read_is_told(void **state) {
    (void)state;
    cuda_standin_only(devices, "only its cuFile can be told to fail");
    if (!has_cufile) skip();
    uint64_t sum;
    folder_make();
    const int fd = file_new();
    char *there = cuda_bytes_new(devices, NULL, FILE_BYTES);
    setenv("CUFILE_FAULT", "file", 1);
    file_opened(fd, there, -ENOTSUP, "no direct way to such a file: its error 5008");
    unsetenv("CUFILE_FAULT");
    struct sw_device_file *file = file_opened(fd, there, 0, NULL);
    log_catch();
    assert_int_equal(/* beyond its end */
                     devices->ops->file_read(devices->stream, file, there, FILE_BYTES - 4, 8, &sum),
                     -EIO);
    assert_reported("cuFile has read 4 of 8 bytes from byte 299996 on, and then ended with 0");
    setenv("CUFILE_FAULT", "error", 1);
    assert_int_equal(devices->ops->file_read(devices->stream, file, there, 0, 8, &sum), -EIO);
    unsetenv("CUFILE_FAULT");
    assert_reported("ended with -1 (Input/output error)");
    sw_log_set_sink(NULL, NULL);
    devices->ops->file_close(file);
    devices->ops->free(devices->device, there, FILE_BYTES);
    close(fd);
    folder_remove();
}

static void why_there_is_no_such_way_is_said(void **state) {
    (void)state;
    cuda_standin_only(devices, "another machine may have it");
    if (!has_cufile) skip();
    assert_non_null(
        strstr(opening("SPILLWAY_CUFILE=/no/such.so", ""), "/no/such.so is not installed"));
    assert_non_null(
        strstr(opening("SPILLWAY_CUFILE=libm.so.6", ""), "libm.so.6 has no cuFileDriverOpen"));
    assert_non_null(
        strstr(opening("CUFILE_FAULT=start", ""), "does not start: error 5001 of cuFile"));
    assert_non_null(strstr(opening("", ""), "and a file: 0"));
}

/* ---- times ---- */

static struct sw_event *timed_event(void) {
    struct sw_event *e;
    assert_int_equal(devices->ops->timed_event_create(devices->device, &e), 0);
    return e;
}

/* An event's time is known once it has happened and was waited for, and that of another kind of
 * event never. */
static void only_timed_events_tell_when(void **state) {
    (void)state;
    const struct sw_device_ops *ops = devices->ops;
    char *there = cuda_bytes_new(devices, NULL, BYTES);
    struct sw_event *timed = timed_event(), *other;
    uint64_t ns = 7;
    int early = 0;
    assert_int_equal(ops->event_create(devices->device, &other), 0);
    assert_int_equal(ops->clock_set(devices->device), 0);
    log_catch();
    assert_int_equal(ops->event_ns(timed, &ns), -EIO); /* never recorded */
    assert_int_equal(ops->event_record(other, devices->stream), 0);
    assert_int_equal(ops->event_wait(other), 0);
    assert_int_equal(ops->event_ns(other, &ns), -EIO);
    assert_reported("the time between two events");
    for (int round = 0; round < ROUNDS; round++) {
        assert_int_equal(ops->zero(devices->stream, there, BYTES), 0);
        assert_int_equal(ops->event_record(timed, devices->stream), 0);
        const int ret = ops->event_ns(timed, &ns);
        early += ret == -EAGAIN;
        assert_true(ret == 0 || ret == -EAGAIN);
        assert_int_equal(ops->event_wait(timed), 0);
        assert_int_equal(ops->event_ns(timed, &ns), 0);
    }
    sw_log_set_sink(NULL, NULL);
    if (cuda_is_standin(devices)) assert_true(early > ROUNDS / 4);
    ops->event_destroy(timed);
    ops->event_destroy(other);
    ops->free(devices->device, there, BYTES);
}

/* A machine that is busy just then: the base before serves on, as exact as it was. */
static void a_poor_look_at_the_clock_counts_for_none(void **state) {
    (void)state;
    cuda_standin_only(devices, "how long a wait takes is the stand-in's to choose");
    const struct sw_device_ops *ops = devices->ops;
    const struct timespec pause = {.tv_nsec = SW_CLOCK_NS + 1000000};
    nanosleep(&pause, NULL);
    while (ops->clock_set(devices->device) == 0) nanosleep(&pause, NULL);
    const uint64_t error_ns = ops->clock_error_ns(devices->device);
    setenv("STANDIN_SYNC_US", "20000", 1);
    nanosleep(&pause, NULL);
    assert_int_equal(ops->clock_set(devices->device), 0);
    unsetenv("STANDIN_SYNC_US");
    assert_int_equal(ops->clock_error_ns(devices->device), error_ns);
}

struct moment {
    struct sw_event *event;
    uint64_t before_ns, after_ns; /* it was recorded, and over */
    uint64_t unset_ns;            /* until then, since the clock was set, the time before last */
};

/* The times of events, asked for long after they happened, lie between the host's before they were
 * recorded and after they were over, give or take the error that is told and what the clocks drift
 * apart since the host's was looked at (a look just before an event does not count): 1% on the
 * stand-in, less than 200 millionths on a GPU. */
static void times_are_those_of_the_hosts_clock(void **state) {
    (void)state;
    enum { EVENTS_MAX = 400, PAUSE_US = 25000, TIMES_SET = 4 };
    const struct sw_device_ops *ops = devices->ops;
    static struct moment moments[EVENTS_MAX];
    uint64_t set_ns[2] = {sw_now_ns(), sw_now_ns()};
    int count = 0, times_set = 0;
    for (; count < EVENTS_MAX && times_set < TIMES_SET; count++) {
        struct moment *m = &moments[count];
        m->event = timed_event();
        const uint64_t now_ns = sw_now_ns();
        const int set = ops->clock_set(devices->device);
        assert_true(set >= 0);
        if (set) set_ns[0] = set_ns[1];
        if (set) set_ns[1] = now_ns;
        times_set += set;
        m->before_ns = sw_now_ns();
        assert_int_equal(ops->event_record(m->event, devices->stream), 0);
        assert_int_equal(ops->event_wait(m->event), 0);
        m->after_ns = sw_now_ns();
        m->unset_ns = m->after_ns - set_ns[0];
        usleep(PAUSE_US);
    }
    assert_int_equal(times_set, TIMES_SET);
    const double drift = cuda_is_standin(devices) ? 0.01 : 0.0002;
    const double error_ns = (double)ops->clock_error_ns(devices->device) + 2000;
    print_message("%d events, exact to %.1f us\n", count, error_ns * 1e-3);
    for (int i = 0; i < count; i++) {
        const struct moment *m = &moments[i];
        uint64_t ns = 0;
        assert_int_equal(ops->event_ns(m->event, &ns), 0);
        const double early = (double)m->before_ns - (double)ns;
        const double late = (double)ns - (double)m->after_ns;
        const double slack = error_ns + drift * (double)m->unset_ns;
        if (early > slack || late > slack)
            fail_msg("event %d: %.0f ns too early, %.0f too late, where %.0f are allowed", i, early,
                     late, slack);
        ops->event_destroy(m->event);
    }
}

int main(void) {
    if (getenv("SW_TEST_OPEN")) return open_and_say();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(why_it_cannot_be_used_is_said),
        cmocka_unit_test(the_plugin_lies_beside_the_program),
        cmocka_unit_test(memory_is_aligned_and_cleared),
        cmocka_unit_test(memory_that_does_not_exist_is_refused),
        cmocka_unit_test(wrong_sides_of_a_copy_are_refused),
        cmocka_unit_test(cut_copies_bring_the_same_bytes),
        cmocka_unit_test(only_a_wait_orders_streams),
        cmocka_unit_test(pinned_copies_run_late),
        cmocka_unit_test(results_come_with_their_event),
        cmocka_unit_test(a_stream_is_over_with_its_work),
        cmocka_unit_test(events_hand_over_between_threads),
        cmocka_unit_test(
            times_are_those_of_the_hosts_clock), /* sets the clock for the first time */
        cmocka_unit_test(only_timed_events_tell_when),
        cmocka_unit_test(a_poor_look_at_the_clock_counts_for_none),
        cmocka_unit_test(files_are_read_by_the_device),
        cmocka_unit_test(a_file_waits_for_what_is_on_the_stream),
        cmocka_unit_test(a_file_that_cannot_be_read_is_told),
        cmocka_unit_test(why_there_is_no_such_way_is_said),
    };
    return cmocka_run_group_tests(tests, open_devices, close_devices);
}
