/* The start of a run on GPUs, part by part, on the CPU stand-in: what pairs of devices and groups
 * of them do is tried before it is trusted, and what comes wrong, or never, is refused by name;
 * sums of what is carried as BF16 have the bits of host ranks; and once devices are settled, the
 * stand-in stops a program at every call that does not belong to a step. */
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>
#include "base/log.h"
#include "engine/collective_try.h"
#include "tests/support_cuda.h"
#include "tests/support_files.h"
#include "tests/support_reference.h"

enum { DEVICES = 3 };
static struct sw_device_handle devices[DEVICES];
static struct sw_stream *streams[DEVICES];
static const struct sw_device_ops *ops;

/* Not those of another test, which may have been given up. */
static int open_devices(void **state) {
    (void)state;
    struct cuda_device first;
    setenv("STANDIN_DEVICES", "3", 1);
    setenv("STANDIN_PAGEABLE", "late", 1); /* or some waits would not be needed */
    cuda_device_open(&first, 0);           /* finds the plugin */
    cuda_device_close(&first);
    for (int i = 0; i < DEVICES; i++) {
        const struct sw_cuda_device_options options = {.index = i, .loads_later = 1};
        assert_int_equal(sw_device_cuda_open(&devices[i], &options), 0);
        ops = devices[i].ops;
        assert_int_equal(ops->stream_create(devices[i].device, &streams[i]), 0);
    }
    log_catch();
    return 0;
}

static int close_devices(void **state) {
    (void)state;
    unsetenv("STANDIN_PEER");
    unsetenv("STANDIN_NCCL");
    unsetenv("NCCL_P2P_DISABLE");
    sw_log_set_sink(NULL, NULL);
    for (int i = 0; i < DEVICES; i++) {
        ops->stream_destroy(streams[i]);
        ops->close(devices[i].device);
    }
    return 0;
}

/* Where it is only helps to place a rank: not to know it is no error, now or in the next call. */
static void a_device_knows_where_it_is(void **state) {
    (void)state;
    char address[SW_BUS_ADDRESS_BYTES];
    ops->bus_address(devices[1].device, address);
    assert_string_equal(address, "0000:3C:00.0");
    setenv("STANDIN_FAIL", "cudaDeviceGetPCIBusId:1", 1);
    ops->bus_address(devices[1].device, address);
    unsetenv("STANDIN_FAIL");
    assert_string_equal(address, "");
    assert_string_equal(log_text(), "");
    assert_int_equal(ops->load(devices[1].device), 0);
}

/* ---- pairs ---- */

static uint64_t all_free(void) {
    uint64_t sum = 0;
    for (int i = 0; i < DEVICES; i++) sum += ops->free_bytes(devices[i].device);
    return sum;
}

static void copies_between_devices_are_tried(void **state) {
    (void)state;
    if (!ops->group) skip();
    const uint64_t before = all_free();
    assert_int_equal(sw_try_peers(devices, streams, DEVICES), 0);
    assert_int_equal(sw_try_peers(devices, streams, 1), 0);
    setenv("STANDIN_PEER", "none", 1);
    assert_int_equal(sw_try_peers(devices, streams, DEVICES), 0);
    assert_string_equal(log_text(), "");
    assert_int_equal(all_free(), before);
}

static void wrong_bytes_take_the_way_through_the_host(void **state) {
    (void)state;
    if (!ops->group) skip();
    setenv("STANDIN_PEER", "wrong", 1);
    assert_int_equal(sw_try_peers(devices, streams, DEVICES), 0);
    assert_non_null(strstr(log_text(), "GPU 0 brings wrong bytes into the memory of GPU 1"));
    assert_non_null(strstr(log_text(), "iommu=pt"));
    assert_string_equal(getenv("NCCL_P2P_DISABLE"), "1");
    /* Who has chosen it hears nothing. */
    log_catch();
    assert_int_equal(sw_try_peers(devices, streams, DEVICES), 0);
    assert_string_equal(log_text(), "");
}

/* Every pair both ways: what comes back may be right all the same. */
static void one_direction_alone_is_found(void **state) {
    (void)state;
    if (!ops->group) skip();
    for (int from = 0; from < DEVICES; from++)
        for (int to = 0; to < DEVICES; to++) {
            char setting[32], says[80];
            if (from == to) continue;
            log_catch();
            unsetenv("NCCL_P2P_DISABLE");
            snprintf(setting, sizeof(setting), "wrong:%d>%d", from, to);
            snprintf(says, sizeof(says),
                     "warning: GPU %d brings wrong bytes into the memory of GPU %d", from, to);
            setenv("STANDIN_PEER", setting, 1);
            assert_int_equal(sw_try_peers(devices, streams, DEVICES), 0);
            assert_non_null(strstr(log_text(), says));
            assert_non_null(strstr(log_text(), "switch ACS off"));
            assert_string_equal(getenv("NCCL_P2P_DISABLE"), "1");
        }
}

static void bytes_that_stay_wrong_are_refused(void **state) {
    (void)state;
    if (!ops->group) skip();
    const uint64_t before = all_free();
    setenv("STANDIN_PEER", "lost", 1);
    assert_int_equal(sw_try_peers(devices, streams, DEVICES), -EIO);
    assert_reported("error: GPU 0 brings wrong bytes into the memory of GPU 1, on the way through");
    assert_int_equal(all_free(), before);
}

/* Such devices are good for nothing until the program has ended. */
static void a_direct_copy_that_never_ends_is_for_another_start(void **state) {
    (void)state;
    if (!ops->group) skip();
    setenv("STANDIN_PEER", "hang:2>1", 1); /* the other way is sound */
    assert_int_equal(sw_try_peers(devices, streams, DEVICES), -ERESTART);
    assert_non_null(strstr(log_text(),
                           "warning: GPU 2: a copy of its memory to GPU 1 has not ended "
                           "within a second; "));
    assert_null(strstr(log_text(), "error: "));
    assert_string_equal(getenv("NCCL_P2P_DISABLE"), "1");
}

static void a_copy_that_never_ends_through_the_host_is_an_error(void **state) {
    (void)state;
    if (!ops->group) skip();
    setenv("STANDIN_PEER", "stuck", 1);
    setenv("NCCL_P2P_DISABLE", "1", 1);
    assert_int_equal(sw_try_peers(devices, streams, DEVICES), -ETIMEDOUT);
    assert_reported("error: GPU 0: a copy of its memory to GPU 1 has not ended within a second, on "
                    "the way through the host's memory");
}

/* ---- groups ---- */

static int failures;
static void group_failed(void *ctx, int error) {
    (void)ctx, (void)error;
    failures++;
}

static void open_group(struct sw_comm_handle *handles, enum sw_dtype carried) {
    const struct sw_comm_devices of = {.devices = devices,
                                       .count = DEVICES,
                                       .carried = carried,
                                       .timeout_s = 20,
                                       .failed = group_failed};
    assert_int_equal(sw_comm_open_local_devices(handles, &of), 0);
}

static void close_group(struct sw_comm_handle *handles) {
    for (int i = 0; i < DEVICES; i++) handles[i].ops->close(handles[i].comm);
}

static void load_all(void) {
    for (int i = 0; i < DEVICES; i++) assert_int_equal(ops->load(devices[i].device), 0);
}

static int tried(enum sw_dtype carried) {
    struct sw_comm_handle handles[DEVICES];
    open_group(handles, carried);
    const uint64_t before = all_free();
    const int ret =
        sw_try_collectives(handles, devices, streams, DEVICES, carried, UINT64_C(3) << 20);
    assert_int_equal(all_free(), before);
    close_group(handles);
    return ret;
}

static void calls_of_groups_are_tried(void **state) {
    (void)state;
    if (!ops->group) skip();
    static const enum sw_dtype types[] = {SW_FP32, SW_BF16};
    load_all();
    for (int i = 0; i < 2; i++) {
        log_catch();
        assert_int_equal(tried(types[i]), 0);
        assert_string_equal(log_text(), "");
        setenv("STANDIN_NCCL", "wrong", 1);
        assert_int_equal(tried(types[i]), -EIO);
        assert_reported("the first all-gather of the GPUs brings wrong values");
        unsetenv("STANDIN_NCCL");
    }
    assert_int_equal(failures, 0);
}

static void a_call_of_a_group_that_never_ends_is_aborted(void **state) {
    (void)state;
    if (!ops->group) skip();
    load_all();
    setenv("STANDIN_NCCL", "hang", 1);
    assert_int_equal(tried(SW_FP32), -ETIMEDOUT);
    assert_reported("the first all-gather of the GPUs has not ended within a second");
    const char *told = strstr(log_text(), "error: ");
    assert_null(strstr(told + 1, "error: ")); /* by one of them */
}

/* ---- sums ---- */

struct summing {
    const struct sw_comm_handle *c;
    struct sw_stream *stream;
    float *out;
    const float *in;
    uint64_t count;
    int ret;
};

static void *sum_rank(void *arg) {
    struct summing *s = arg;
    s->ret = s->c->ops->reduce_scatter(s->c->comm, s->stream, s->out, s->in, SW_BF16, s->count);
    return NULL;
}

static void sum_all(struct summing *s) {
    pthread_t threads[DEVICES];
    for (int i = 0; i < DEVICES; i++) pthread_create(&threads[i], NULL, sum_rank, &s[i]);
    for (int i = 0; i < DEVICES; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(s[i].ret, 0);
    }
}

/* Of all sizes, so that their order shows; zeros of both signs and what is not finite, too. */
static void fill(float *x, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) {
        const int exponent = (int)(ref_random() % 24) - 12;
        x[i] = ldexpf((float)((double)ref_random() / 0x1p31 - 1.0), exponent);
        if (i % 97 == 5) x[i] = -0.0f;
        if (i % 1013 == 7) x[i] = INFINITY;
    }
}

/* out in place, or apart. */
static void compare_sums(const struct sw_comm_handle *gpus, const struct sw_comm_handle *hosts,
                         uint64_t count, int in_place) {
    struct summing on_gpu[DEVICES], on_host[DEVICES];
    float *values[DEVICES], *sums[DEVICES];
    const uint64_t bytes = (DEVICES + 1) * count * sizeof(float);
    for (int r = 0; r < DEVICES; r++) {
        void *memory;
        values[r] = malloc(bytes);
        sums[r] = malloc(count * sizeof(float));
        fill(values[r], DEVICES * count);
        assert_int_equal(ops->alloc(devices[r].device, bytes, &memory), 0);
        assert_int_equal(ops->copy_h2d(streams[r], memory, values[r], bytes), 0);
        float *in = memory, *out = in + (in_place ? (uint64_t)r : DEVICES) * count;
        on_gpu[r] = (struct summing){&gpus[r], streams[r], out, in, count, 0};
        on_host[r] = (struct summing){&hosts[r], NULL, sums[r], values[r], count, 0};
    }
    sum_all(on_gpu);
    sum_all(on_host);
    for (int r = 0; r < DEVICES; r++) {
        float *got = malloc(count * sizeof(float));
        assert_int_equal(ops->copy_d2h(streams[r], got, on_gpu[r].out, count * sizeof(float)), 0);
        assert_int_equal(ops->stream_sync(streams[r]), 0);
        for (uint64_t i = 0; i < count; i++)
            if (memcmp(&got[i], &sums[r][i], sizeof(float)) != 0)
                fail_msg("rank %d, value %llu of %llu: %a on GPUs, %a on the host", r,
                         (unsigned long long)i, (unsigned long long)count, (double)got[i],
                         (double)sums[r][i]);
        free(got);
    }
    for (int r = 0; r < DEVICES; r++) {
        ops->free(devices[r].device, (void *)on_gpu[r].in, bytes);
        free(values[r]);
        free(sums[r]);
    }
}

static void sums_of_bf16_have_the_bits_of_host_ranks(void **state) {
    (void)state;
    if (!ops->group) skip();
    struct sw_comm_handle gpus[DEVICES], hosts[DEVICES];
    /* The last one does not fit into one block, nor into whole ones. */
    static const uint64_t counts[] = {1, 256, 1000, (8 << 20) / 2 / DEVICES + 1237};
    load_all();
    open_group(gpus, SW_BF16);
    assert_int_equal(sw_comm_open_host(hosts, DEVICES, 20), 0);
    for (int i = 0; i < 4; i++)
        for (int in_place = 0; in_place < 2; in_place++)
            if (i < 3 || in_place) compare_sums(gpus, hosts, counts[i], in_place);
    close_group(gpus);
    for (int r = 0; r < DEVICES; r++) hosts[r].ops->close(hosts[r].comm);
}

/* ---- what may be called in a step ---- */

/* What a step does, to be settled on: everything of it has been done once. */
struct step {
    char *memory, *pinned;
    struct sw_event *event, *timed;
    struct sw_gemm product;
};

static int do_step(const struct step *s) {
    struct sw_stream *stream = streams[0];
    uint64_t ns;
    int ret = ops->zero(stream, s->memory, 4096);
    if (ret == 0) ret = ops->copy_h2d(stream, s->memory, s->pinned, 4096);
    if (ret == 0) ret = ops->event_record(s->timed, stream);
    if (ret == 0) ret = ops->gemm(stream, &s->product);
    if (ret == 0) ret = ops->sum(stream, (double *)s->memory, (float *)s->memory + 64, 16);
    if (ret == 0) ret = ops->copy_d2h(stream, s->pinned, s->memory, 4096);
    if (ret == 0) ret = ops->event_record(s->event, stream);
    if (ret == 0) ret = ops->stream_wait(streams[0], s->event);
    if (ret == 0) ret = ops->event_wait(s->event);
    if (ret == 0) ret = ops->event_done(s->event) == 1 ? 0 : -EIO;
    if (ret == 0) ret = ops->stream_sync(stream);
    if (ret == 0) ret = ops->clock_set(devices[0].device) < 0 ? -EIO : 0;
    return ret < 0 ? ret : ops->event_ns(s->timed, &ns);
}

/* Each a call that belongs to the start. */
static const char *const forbidden[] = {
    "cudaMalloc",
    "cudaFree",
    "cudaHostRegister",
    "cudaHostUnregister",
    "cudaStreamCreateWithFlags",
    "cudaStreamSynchronize",
    "cudaEventCreateWithFlags",
    "cudaEventDestroy",
    "cudaMemGetInfo",
    "cudaGetDeviceCount",
    "cudaDeviceGetPCIBusId",
    "cublasLtMatmulDescCreate",
    "cudaFuncGetAttributes",
    "sum_in_order",
    "none", /* the last one: nothing of all this */
};
enum { FORBIDDEN = sizeof(forbidden) / sizeof(forbidden[0]) };

static void call(int which, struct step *s) {
    char address[SW_BUS_ADDRESS_BYTES];
    struct sw_stream *other;
    struct sw_event *event;
    void *memory;
    struct sw_device *d = devices[0].device;
    struct sw_gemm product = s->product;
    product.m = 5;
    switch (which) {
    case 0:
        ops->alloc(d, 4096, &memory);
        break;
    case 1:
        ops->free(d, s->memory, 1 << 16);
        break;
    case 2:
        ops->pin(d, s->pinned + 4096, 4096);
        break;
    case 3:
        ops->unpin(d, s->pinned);
        break;
    case 4:
        ops->stream_create(d, &other);
        break;
    case 5:
        ops->stream_destroy(streams[0]);
        break;
    case 6:
        ops->event_create(d, &event);
        break;
    case 7:
        ops->event_destroy(s->event);
        break;
    case 8:
        ops->free_bytes(d);
        break;
    case 9:
        sw_device_cuda_count();
        break;
    case 10:
        ops->bus_address(d, address);
        break;
    case 11:
        ops->gemm(streams[0], &product);
        break;
    case 12:
        ops->load(devices[1].device);
        break;
    case 13: /* its kernels were never loaded */
        ops->sum(streams[2], (double *)s->memory, (float *)s->memory + 64, 16);
        break;
    default:
        break;
    }
}

static void do_or_exit(int ret, const char *what) {
    if (ret >= 0) return;
    printf("%s: %d\n", what, ret);
    exit(3);
}

/* This program, run with SW_TEST_CALL set, settles and then makes that call, between two steps. */
static int settle_and_call(void) {
    struct step s = {.pinned = aligned_alloc(4096, 8192)};
    void *memory;
    open_devices(NULL);
    sw_log_set_sink(NULL, NULL);
    struct sw_device *d = devices[0].device;
    do_or_exit(ops->load(d), "load");
    do_or_exit(ops->prepare(streams[0], 1), "prepare");
    do_or_exit(ops->alloc(d, 1 << 16, &memory), "alloc");
    do_or_exit(ops->pin(d, s.pinned, 4096), "pin");
    do_or_exit(ops->event_create(d, &s.event), "event");
    do_or_exit(ops->timed_event_create(d, &s.timed), "event");
    s.memory = memory;
    s.product = (struct sw_gemm){.m = 4, .n = 4, .k = 4, .lda = 4, .ldb = 4, .ldc = 4};
    s.product.a = s.memory + 8192;
    s.product.b = s.memory + 12288;
    s.product.c = s.memory + 16384;
    s.product.a_dtype = s.product.b_dtype = s.product.c_dtype = SW_FP32;
    memset(s.pinned, 0, 8192);
    do_or_exit(ops->clock_set(d), "clock");
    do_or_exit(do_step(&s), "a step before");
    for (int i = 0; i < DEVICES; i++) ops->settle(devices[i].device, 1);
    do_or_exit(do_step(&s), "a step");
    call(atoi(getenv("SW_TEST_CALL")), &s);
    do_or_exit(do_step(&s), "a step after");
    for (int i = 0; i < DEVICES; i++) ops->settle(devices[i].device, 0);
    ops->event_destroy(s.event);
    ops->event_destroy(s.timed);
    ops->unpin(d, s.pinned);
    ops->free(d, s.memory, 1 << 16);
    free(s.pinned);
    close_devices(NULL);
    printf("went through\n");
    return 0;
}

static void only_work_is_asked_for_after_the_start(void **state) {
    (void)state;
    char self[512], command[640], said[2048];
    const ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);
    self[length] = '\0';
    for (int i = 0; i < FORBIDDEN; i++) {
        snprintf(command, sizeof(command), "SW_TEST_CALL=%d '%s' 2>&1", i, self);
        FILE *run = popen(command, "r");
        const size_t got = fread(said, 1, sizeof(said) - 1, run);
        said[got] = '\0';
        const int status = pclose(run);
        const int last = i == FORBIDDEN - 1;
        const int stopped = strstr(said, "after the start") && strstr(said, forbidden[i]);
        if (last ? status != 0 || !strstr(said, "went through") : status == 0 || !stopped)
            fail_msg("%s: status %d, %s", forbidden[i], status, said);
    }
}

int main(void) {
    if (getenv("SW_TEST_CALL")) return settle_and_call();
#define TEST(name) cmocka_unit_test_setup_teardown(name, open_devices, close_devices)
    const struct CMUnitTest tests[] = {
        TEST(a_device_knows_where_it_is),
        TEST(copies_between_devices_are_tried),
        TEST(wrong_bytes_take_the_way_through_the_host),
        TEST(one_direction_alone_is_found),
        TEST(bytes_that_stay_wrong_are_refused),
        TEST(calls_of_groups_are_tried),
        TEST(a_call_of_a_group_that_never_ends_is_aborted),
        TEST(sums_of_bf16_have_the_bits_of_host_ranks),
        TEST(only_work_is_asked_for_after_the_start),
        /* The last ones: their devices are lost. */
        TEST(a_direct_copy_that_never_ends_is_for_another_start),
        TEST(a_copy_that_never_ends_through_the_host_is_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
