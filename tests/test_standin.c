/* The CPU stand-in for CUDA is itself able to see what it is for: each bug of a kernel that it
 * claims to find is planted in a probe and found; streams and events keep CUDA's promises and no
 * others; collectives are those of NCCL. Linked with the stand-in, not with the plugin. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#ifdef SW_WITH_STANDIN /* CUDA's headers and NCCL's */
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "tests/standin/standin_probes.h"

#if defined(__SANITIZE_ADDRESS__)
enum { ASAN = 1, TSAN = 0 };
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
enum { ASAN = 0, TSAN = 1 };
#else
enum { ASAN = 0, TSAN = 0 };
#endif
#else
enum { ASAN = 0, TSAN = 0 };
#endif

enum { COUNT = 64, DEVICES = 3 };

/* ---- probes, each in a process of its own: this program with SW_PROBE set ---- */

static int run_probe(const char *name) {
    int *out = NULL, got[COUNT];
    if (strcmp(name, "host_reads_device") == 0) {
        if (cudaMalloc((void **)&out, sizeof(got)) != cudaSuccess) return 3;
        printf("%d\n", *(volatile int *)out);
        return 0;
    }
    /* More than a page, so that what lies behind it is nobody's. */
    if (cudaMalloc((void **)&out, sizeof(got)) != cudaSuccess) return 3;
    if (cudaMemset(out, 0, sizeof(got)) != cudaSuccess) return 3;
    const cudaError_t error = sw_probe_launch(name, NULL, out, COUNT);
    if (error != cudaSuccess) {
        printf("refused: %s\n", cudaGetErrorName(error));
        return 0;
    }
    if (cudaMemcpy(got, out, sizeof(got), cudaMemcpyDeviceToHost) != cudaSuccess) return 3;
    for (int i = 0; i < COUNT; i++) printf("%d ", got[i]);
    printf("\n");
    return 0;
}

/* What the probe says under these settings; its exit status, or minus the signal. */
static int probe(const char *name, const char *settings, char *said, size_t size) {
    char command[1024], self[512];
    const ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);
    self[length] = '\0';
    snprintf(command, sizeof(command), "SW_PROBE=%s %s '%s' 2>&1", name, settings, self);
    FILE *run = popen(command, "r");
    const size_t got = fread(said, 1, size - 1, run);
    said[got] = '\0';
    const int status = pclose(run);
    return WEXITSTATUS(status) > 128 ? 128 - WEXITSTATUS(status) : WEXITSTATUS(status);
}

static void assert_finds(const char *name, const char *settings, const char *part) {
    static char said[1 << 16];
    const int status = probe(name, settings, said, sizeof(said));
    if (status == 0 || !strstr(said, part))
        fail_msg("%s with '%s' ended with %d and without '%s': %.2000s", name, settings, status,
                 part, said);
}

/* The probe runs to its end; whether its results are the right ones. */
static int is_right(const char *name, const char *settings) {
    static char said[4096], want[4096];
    const int status = probe(name, settings, said, sizeof(said));
    if (status != 0) fail_msg("%s with '%s' ended with %d: %s", name, settings, status, said);
    assert_int_equal(probe("right", "", want, sizeof(want)), 0);
    return strcmp(said, want) == 0;
}

static const char *const orders[] = {"", "STANDIN_SCHED=rev", "STANDIN_SCHED=rand:1",
                                     "STANDIN_SCHED=rand:2 STANDIN_STRICT=1"};

static void right_kernels_are_right_in_every_order(void **state) {
    (void)state;
    static char said[4096];
    for (int o = 0; o < 4; o++) {
        assert_true(is_right("right", orders[o]));
        assert_int_equal(probe("half_warps", orders[o], said, sizeof(said)), 0);
        char *at = said;
        for (int i = 0; i < COUNT; i++)
            assert_int_equal(strtol(at, &at, 10), i % 2 ? i ^ 2 : i ^ 4);
    }
}

static void missing_barriers_are_found(void **state) {
    (void)state;
    if (TSAN) {
        assert_finds("no_barrier", "", "data race");
        assert_finds("no_barrier_before_reuse", "", "data race");
        assert_finds("no_syncwarp", "", "data race");
        assert_finds("sum_of_blocks", "", "data race");
        return;
    }
    for (int o = 0; o < 4; o++) assert_false(is_right("no_barrier", orders[o]));
    assert_finds("two_barriers", "STANDIN_STRICT=1", "wait at different barriers");
    assert_finds("barrier_for_some", "", "no thread can run");
    assert_finds("returned_in_mask", "STANDIN_STRICT=1", "lanes that have returned");
}

static void missing_waits_for_copies_are_found(void **state) {
    (void)state;
    static char said[4096];
    assert_int_equal(probe("no_wait_for_copy", "STANDIN_COPY=late", said, sizeof(said)), 0);
    assert_int_not_equal(strtol(said, NULL, 10), 1000);
    assert_int_equal(probe("no_wait_for_copy", "STANDIN_COPY=early", said, sizeof(said)), 0);
    assert_int_equal(strtol(said, NULL, 10), 1000);
}

static void wrong_addresses_are_found(void **state) {
    (void)state;
    static char said[4096];
    if (ASAN) {
        assert_finds("past_the_end", "", "AddressSanitizer");
        assert_finds("dynamic_past_the_end", "", "AddressSanitizer");
        assert_finds("misaligned", "", "misaligned address");
    } else if (!TSAN) {
        /* A signal ends the shell's command with 128 and its number. */
        assert_int_equal(probe("host_reads_device", "STANDIN_GUARD=1", said, sizeof(said)), -11);
        assert_int_equal(probe("past_the_end", "STANDIN_GUARD=1", said, sizeof(said)), -11);
    }
    assert_int_equal(probe("too_much_shared", "", said, sizeof(said)), 0);
    assert_non_null(strstr(said, "refused: cudaErrorInvalidValue"));
}

/* ---- streams ---- */

static cudaStream_t stream_new(void) {
    cudaStream_t s;
    assert_int_equal(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), 0);
    return s;
}
static cudaEvent_t event_new(void) {
    cudaEvent_t e;
    assert_int_equal(cudaEventCreateWithFlags(&e, cudaEventDisableTiming), 0);
    return e;
}

struct note {
    pthread_t thread;
    int order;
};
static int notes;
static void note_thread(void *data) {
    struct note *n = data;
    n->thread = pthread_self();
    n->order = notes++; /* unsynchronised: one thread calls them all */
}

static void host_functions_run_in_order_in_one_thread(void **state) {
    (void)state;
    enum { CALLS = 20 };
    struct note seen[CALLS];
    cudaStream_t s[2] = {stream_new(), stream_new()};
    cudaEvent_t e = event_new();
    for (int i = 0; i < CALLS; i++) {
        cudaStreamWaitEvent(s[i % 2], e, 0);
        assert_int_equal(cudaLaunchHostFunc(s[i % 2], note_thread, &seen[i]), 0);
        cudaEventRecord(e, s[i % 2]);
    }
    cudaEventSynchronize(e);
    for (int i = 0; i < CALLS; i++) {
        assert_int_equal(seen[i].order, i);
        assert_true(pthread_equal(seen[i].thread, seen[0].thread));
        assert_false(pthread_equal(seen[i].thread, pthread_self()));
    }
    cudaStreamDestroy(s[0]);
    cudaStreamDestroy(s[1]);
    cudaEventDestroy(e);
}

/* A wait is for what was recorded before it, whatever is recorded later; and for nothing where
 * nothing was. */
static void a_wait_is_for_the_last_record_before_it(void **state) {
    (void)state;
    int *there, *pinned;
    cudaStream_t a = stream_new(), b = stream_new();
    cudaEvent_t e = event_new();
    cudaMalloc((void **)&there, 256);
    cudaMallocHost((void **)&pinned, 256);
    assert_int_equal(cudaEventQuery(e), cudaSuccess);
    assert_int_equal(cudaStreamWaitEvent(b, e, 0), cudaSuccess);
    assert_int_equal(cudaEventSynchronize(e), cudaSuccess);
    for (int round = 0; round < 100; round++) {
        pinned[0] = -1;
        cudaMemsetAsync(there, 0, 256, a);
        cudaEventRecord(e, a);
        cudaStreamWaitEvent(b, e, 0);
        cudaMemcpyAsync(pinned, there, 4, cudaMemcpyDeviceToHost, b);
        cudaStreamSynchronize(b);
        assert_int_equal(pinned[0], 0);
        cudaMemsetAsync(there, 1, 256, a);
        cudaEventRecord(e, a);
        while (cudaEventQuery(e) == cudaErrorNotReady) {
        } /* asking brings it about */
        cudaMemcpyAsync(pinned, there, 4, cudaMemcpyDeviceToHost, b);
        cudaStreamSynchronize(b);
        assert_int_equal(pinned[0], 0x01010101);
    }
    cudaStreamDestroy(a);
    cudaStreamDestroy(b);
    cudaEventDestroy(e);
    cudaFree(there);
    cudaFreeHost(pinned);
}

static void sleep_20_ms(void *data) {
    (void)data;
    usleep(20000);
}

/* Between two events that keep time lies the work between them; before it ran there is no time, and
 * other events never have one. */
static void times_of_events_are_those_of_the_work(void **state) {
    (void)state;
    cudaStream_t s;
    cudaEvent_t from, to, other = event_new();
    float ms = -1.0f;
    cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
    cudaEventCreateWithFlags(&from, cudaEventDefault);
    cudaEventCreateWithFlags(&to, cudaEventBlockingSync);
    assert_int_equal(cudaEventElapsedTime(&ms, from, to), cudaErrorInvalidResourceHandle);
    for (int round = 0; round < 5; round++) {
        cudaEventRecord(from, s);
        cudaLaunchHostFunc(s, sleep_20_ms, NULL);
        cudaEventRecord(to, s);
        assert_int_equal(cudaEventElapsedTime(&ms, from, to), cudaErrorNotReady);
        cudaEventRecord(other, s);
        assert_int_equal(cudaEventSynchronize(to), cudaSuccess);
        assert_int_equal(cudaEventElapsedTime(&ms, from, to), cudaSuccess);
        assert_true(ms >= 20.0f);
        assert_int_equal(cudaEventElapsedTime(&ms, to, from), cudaSuccess);
        assert_true(ms <= -20.0f);
        assert_int_equal(cudaEventElapsedTime(&ms, from, other), cudaErrorInvalidResourceHandle);
    }
    cudaGetLastError();
    cudaEventDestroy(from);
    cudaEventDestroy(to);
    cudaEventDestroy(other);
    cudaStreamDestroy(s);
}

static void work_of_a_destroyed_stream_still_runs(void **state) {
    (void)state;
    unsigned char *there, *pinned;
    cudaMalloc((void **)&there, 16);
    cudaMallocHost((void **)&pinned, 16);
    for (int round = 0; round < 50; round++) {
        cudaStream_t s = stream_new();
        memset(pinned, 0xEE, 16);
        cudaMemsetAsync(there, round, 16, s);
        cudaMemcpyAsync(pinned, there, 16, cudaMemcpyDeviceToHost, s);
        cudaStreamDestroy(s);
        cudaDeviceSynchronize();
        assert_int_equal(pinned[15], round);
    }
    cudaFree(there);
    cudaFreeHost(pinned);
}

/* Streams made without cudaStreamNonBlocking and the null stream wait for each other. */
static void the_null_stream_waits_for_blocking_streams(void **state) {
    (void)state;
    unsigned char *there, got = 0;
    cudaStream_t s;
    cudaMalloc((void **)&there, 16);
    cudaStreamCreate(&s);
    for (int round = 0; round < 50; round++) {
        cudaMemsetAsync(there, round, 16, s);
        cudaMemcpy(&got, there, 1, cudaMemcpyDeviceToHost);
        assert_int_equal(got, round);
        cudaMemset(there, round + 100, 16);
        cudaMemcpyAsync(&got, there, 1, cudaMemcpyDeviceToHost, s);
        assert_int_equal(got, round + 100);
    }
    cudaStreamDestroy(s);
    cudaFree(there);
}

/* ---- collectives ---- */

struct rank {
    ncclComm_t comm;
    cudaStream_t stream;
    float *in, *out; /* device memory of DEVICES * 4 */
};
static struct rank ranks[DEVICES];

static void ranks_open(void) {
    ncclComm_t comms[DEVICES];
    ncclUniqueId id;
    assert_int_equal(ncclGetUniqueId(&id), ncclSuccess);
    assert_int_equal(ncclGroupStart(), ncclSuccess);
    for (int r = 0; r < DEVICES; r++) {
        assert_int_equal(cudaSetDevice(r), cudaSuccess);
        assert_int_equal(ncclCommInitRank(&comms[r], DEVICES, id, r), ncclSuccess);
    }
    assert_int_equal(ncclGroupEnd(), ncclSuccess);
    for (int r = 0; r < DEVICES; r++) {
        float values[DEVICES * 4];
        for (int i = 0; i < DEVICES * 4; i++) values[i] = (float)(100 * (r + 1) + i);
        assert_int_equal(cudaSetDevice(r), cudaSuccess);
        ranks[r].comm = comms[r];
        ranks[r].stream = stream_new();
        cudaMalloc((void **)&ranks[r].in, sizeof(values));
        cudaMalloc((void **)&ranks[r].out, sizeof(values));
        cudaMemcpy(ranks[r].in, values, sizeof(values), cudaMemcpyHostToDevice);
    }
}

static void ranks_close(int aborted) {
    for (int r = 0; r < DEVICES; r++) {
        cudaSetDevice(r);
        if (!aborted) assert_int_equal(ncclCommDestroy(ranks[r].comm), ncclSuccess);
        cudaStreamDestroy(ranks[r].stream);
        cudaFree(ranks[r].in);
        cudaFree(ranks[r].out);
    }
    cudaSetDevice(0);
}

static float result(int r, int i) {
    float out[DEVICES * 4];
    cudaSetDevice(r);
    cudaMemcpyAsync(out, ranks[r].out, sizeof(out), cudaMemcpyDeviceToHost, ranks[r].stream);
    return out[i];
}

static void collectives_are_those_of_nccl(void **state) {
    (void)state;
    ranks_open();
    for (int grouped = 0; grouped < 2; grouped++) {
        if (grouped) ncclGroupStart();
        for (int r = 0; r < DEVICES; r++)
            assert_int_equal(ncclAllGather(ranks[r].in, ranks[r].out, 4, ncclFloat32, ranks[r].comm,
                                           ranks[r].stream),
                             ncclSuccess);
        if (grouped) assert_int_equal(ncclGroupEnd(), ncclSuccess);
        for (int r = 0; r < DEVICES; r++)
            for (int i = 0; i < DEVICES * 4; i++)
                assert_true(result(r, i) == (float)(100 * (i / 4 + 1) + i % 4));
    }
    for (int r = 0; r < DEVICES; r++)
        ncclReduceScatter(ranks[r].in, ranks[r].out, 4, ncclFloat32, ncclSum, ranks[r].comm,
                          ranks[r].stream);
    for (int r = 0; r < DEVICES; r++)
        for (int i = 0; i < 4; i++) assert_true(result(r, i) == (float)(600 + 3 * (4 * r + i)));
    for (int r = 0; r < DEVICES; r++)
        ncclAllReduce(ranks[r].in, ranks[r].out, 12, ncclFloat32, ncclSum, ranks[r].comm,
                      ranks[r].stream);
    for (int r = 0; r < DEVICES; r++)
        for (int i = 0; i < 12; i++) assert_true(result(r, i) == (float)(600 + 3 * i));
    for (int r = 0; r < DEVICES; r++)
        ncclBroadcast(r == 1 ? ranks[r].in : NULL, ranks[r].out, 12, ncclFloat32, 1, ranks[r].comm,
                      ranks[r].stream);
    for (int r = 0; r < DEVICES; r++)
        for (int i = 0; i < 12; i++) assert_true(result(r, i) == (float)(200 + i));
    assert_int_equal(
        ncclAllGather(ranks[1].in, ranks[0].out, 4, ncclFloat32, ranks[0].comm, ranks[0].stream),
        ncclInvalidArgument); /* another device's memory */
    ranks_close(0);
}

/* A rank that does not call leaves the others waiting, and an abort ends the waiting. */
static void a_collective_waits_for_every_rank(void **state) {
    (void)state;
    ncclResult_t error = ncclSystemError;
    ranks_open();
    for (int r = 0; r < DEVICES - 1; r++)
        ncclAllReduce(ranks[r].in, ranks[r].out, 12, ncclFloat32, ncclSum, ranks[r].comm,
                      ranks[r].stream);
    for (int i = 0; i < 1000; i++)
        assert_int_equal(cudaStreamQuery(ranks[0].stream), cudaErrorNotReady);
    assert_int_equal(ncclCommGetAsyncError(ranks[0].comm, &error), ncclSuccess);
    assert_int_equal(error, ncclSuccess);
    for (int r = 0; r < DEVICES; r++) ncclCommAbort(ranks[r].comm);
    for (int r = 0; r < DEVICES; r++)
        assert_int_equal(cudaStreamSynchronize(ranks[r].stream), cudaSuccess);
    ranks_close(1);
}

static void a_failing_collective_is_an_asynchronous_error(void **state) {
    (void)state;
    ncclResult_t error = ncclSuccess;
    setenv("STANDIN_NCCL_FAIL", "2", 1);
    ranks_open();
    unsetenv("STANDIN_NCCL_FAIL");
    for (int call = 0; call < 2; call++) {
        ncclCommGetAsyncError(ranks[1].comm, &error);
        assert_int_equal(error, ncclSuccess);
        for (int r = 0; r < DEVICES; r++)
            ncclAllReduce(ranks[r].in, ranks[r].out, 12, ncclFloat32, ncclSum, ranks[r].comm,
                          ranks[r].stream);
    }
    ncclCommGetAsyncError(ranks[1].comm, &error);
    assert_int_equal(error, ncclRemoteError);
    assert_int_equal(cudaStreamQuery(ranks[2].stream), cudaErrorNotReady);
    ncclCommAbort(ranks[0].comm);
    assert_int_equal(ncclAllReduce(ranks[1].in, ranks[1].out, 12, ncclFloat32, ncclSum,
                                   ranks[1].comm, ranks[1].stream),
                     ncclInvalidUsage);
    for (int r = 1; r < DEVICES; r++) ncclCommAbort(ranks[r].comm);
    for (int r = 0; r < DEVICES; r++) cudaStreamSynchronize(ranks[r].stream);
    ranks_close(1);
}

int main(void) {
    setenv("STANDIN_DEVICES", "3", 0);
    if (getenv("SW_PROBE")) return run_probe(getenv("SW_PROBE"));
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(right_kernels_are_right_in_every_order),
        cmocka_unit_test(missing_barriers_are_found),
        cmocka_unit_test(missing_waits_for_copies_are_found),
        cmocka_unit_test(wrong_addresses_are_found),
        cmocka_unit_test(host_functions_run_in_order_in_one_thread),
        cmocka_unit_test(a_wait_is_for_the_last_record_before_it),
        cmocka_unit_test(times_of_events_are_those_of_the_work),
        cmocka_unit_test(work_of_a_destroyed_stream_still_runs),
        cmocka_unit_test(the_null_stream_waits_for_blocking_streams),
        cmocka_unit_test(collectives_are_those_of_nccl),
        cmocka_unit_test(a_collective_waits_for_every_rank),
        cmocka_unit_test(a_failing_collective_is_an_asynchronous_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
#else
static void needs_headers(void **state) {
    (void)state;
    print_message("the stand-in was not built: the headers of CUDA and NCCL are not here\n");
    skip();
}
int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(needs_headers)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
#endif
