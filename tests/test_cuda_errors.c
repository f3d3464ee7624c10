/* Calls of CUDA, cuBLASLt and NCCL that fail, on the CPU stand-in: each call of a device's whole
 * life in turn. Every failure is reported, once, and comes back as an error; what was made is given
 * back all the same (memory is counted here, the rest by ASan's look for leaks); and where nothing
 * fails any more, the same life succeeds. */
#include "kernels/device.h"
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>
#include "base/log.h"
#include "tests/support_cuda.h"

enum { DEVICES = 2, MEMORY_BYTES = 1 << 18, PAGE_BYTES = 4096 };

static int file;                   /* this program's own */
static struct cuda_device watcher; /* of the first device's memory */
static int error_count;
static char error_last[512];

static void count_errors(enum sw_log_level level, const char *line, void *ctx) {
    (void)ctx;
    if (level != SW_LOG_ERROR) return;
    error_count++;
    snprintf(error_last, sizeof(error_last), "%s", line);
}

static int open_watcher(void **state) {
    (void)state;
    setenv("STANDIN_DEVICES", "2", 1);
    assert_true(cuda_use_cufile());
    file = open("/proc/self/exe", O_RDONLY);
    cuda_device_open(&watcher, 0);
    sw_log_set_sink(count_errors, NULL);
    return 0;
}

static int close_watcher(void **state) {
    (void)state;
    cuda_device_close(&watcher);
    close(file);
    return 0;
}

/* ---- a life ---- */

struct life {
    struct sw_device_handle h[DEVICES];
    struct sw_stream *streams[DEVICES], *other;
    struct sw_device_group *groups[DEVICES];
    struct sw_event *event;
    char *memory[DEVICES];
    void *host, *pinned;
    struct sw_device_file *file;
};

#define TRY(call)                                                                                  \
    do {                                                                                           \
        const int tried = (call);                                                                  \
        if (tried < 0) return tried;                                                               \
    } while (0)

/* In what a life's groups carry sums. */
static enum sw_dtype carried = SW_FP32;

/* The devices reach each other, for as long as that is trusted. */
static int meet(const struct life *l, struct sw_device *const *list) {
    const struct sw_device_group_ops *ops = l->h[0].ops->group;
    uint8_t direct[DEVICES * DEVICES];
    TRY(ops->connect(list, DEVICES, direct));
    TRY(ops->copy(l->streams[0], list[1], l->memory[1], l->memory[0], PAGE_BYTES));
    TRY(l->h[0].ops->stream_sync(l->streams[0]));
    return ops->detour(list, DEVICES, direct);
}

static int begin(struct life *l) {
    struct sw_device *list[DEVICES];
    for (int i = 0; i < DEVICES; i++) {
        void *memory = NULL;
        TRY(sw_device_cuda_open(&l->h[i], &(struct sw_cuda_device_options){.index = i}));
        TRY(l->h[i].ops->stream_create(l->h[i].device, &l->streams[i]));
        TRY(l->h[i].ops->alloc(l->h[i].device, MEMORY_BYTES, &memory));
        l->memory[i] = memory;
        list[i] = l->h[i].device;
    }
    const struct sw_device_ops *ops = l->h[0].ops;
    TRY(ops->stream_create(l->h[0].device, &l->other));
    TRY(ops->prepare(l->other, 0));
    TRY(ops->prepare(l->streams[0], 1));
    TRY(ops->event_create(l->h[0].device, &l->event));
    if (ops->free_bytes(l->h[0].device) == 0) return -EIO;
    if (ops->taken_bytes(l->h[0].device) == 0) return -EIO;
    l->host = aligned_alloc(PAGE_BYTES, PAGE_BYTES);
    TRY(ops->pin(l->h[0].device, l->host, PAGE_BYTES));
    l->pinned = l->host;
    char why[256];
    TRY(ops->file_open(l->h[0].device, file, l->memory[0], MEMORY_BYTES, &l->file, why,
                       sizeof(why)));
    if (!ops->group) return 0; /* a build without NCCL */
    TRY(meet(l, list));
    char text[64];
    if (ops->group->numerics(carried, text, sizeof(text)) < 0) return -EIO;
    char name[SW_DEVICE_GROUP_NAME_BYTES];
    TRY(ops->group->make_name(name));
    const int ret = ops->group->open(list, DEVICES, 0, DEVICES, name, carried, l->groups);
    if (ret < 0) memset(l->groups, 0, sizeof(l->groups));
    return ret;
}

static int move(const struct life *l) {
    const struct sw_device_ops *ops = l->h[0].ops;
    char *to = l->memory[0];
    memset(l->pinned, 0, PAGE_BYTES);
    TRY(ops->zero(l->streams[0], to, MEMORY_BYTES));
    TRY(ops->copy_h2d(l->streams[0], to, l->pinned, PAGE_BYTES));
    TRY(ops->event_record(l->event, l->streams[0]));
    TRY(ops->stream_wait(l->other, l->event));
    TRY(ops->copy_d2d(l->other, to + PAGE_BYTES, to, PAGE_BYTES));
    TRY(ops->copy_d2h(l->other, l->pinned, to + PAGE_BYTES, PAGE_BYTES));
    TRY(ops->event_record(l->event, l->other));
    TRY(ops->event_wait(l->event));
    TRY(ops->event_done(l->event));
    return ops->stream_sync(l->other);
}

static int multiply(const struct life *l) {
    char *at = l->memory[0];
    struct sw_gemm g = {.m = 4, .n = 4, .k = 4, .lda = 4, .ldb = 4, .ldc = 4};
    g.a = at, g.b = at + 4096, g.c = at + 8192;
    g.a_dtype = g.b_dtype = g.c_dtype = SW_FP32;
    TRY(l->h[0].ops->gemm(l->streams[0], &g));
    g.trans_a = g.trans_b = 1;
    TRY(l->h[0].ops->gemm(l->streams[0], &g));
    g.k = 0;
    return l->h[0].ops->gemm(l->streams[0], &g);
}

/* Head dimensions of both ways to compute it. */
static int attend(const struct life *l, uint32_t head_dim) {
    const struct sw_attention shape = {
        .batch = 1, .time = 4, .heads = 1, .kv_heads = 1, .head_dim = head_dim, .scale = 1.0f};
    char *at = l->memory[0];
    char *q = at, *k = at + 8192, *v = at + 16384, *out = at + 24576, *lse = at + 32768;
    char *dq = at + 40960, *dk = at + 49152, *dv = at + 57344, *scratch = at + 65536;
    TRY(l->h[0].ops->attention(l->streams[0], SW_BF16, &shape, out, (float *)lse, q, k, v,
                               scratch));
    return l->h[0].ops->attention_backward(l->streams[0], SW_BF16, &shape, dq, dk, dv, q, out,
                                           (float *)lse, q, k, v, scratch);
}

static int update(const struct life *l) {
    const struct sw_device_adam_range range = {.end = 256, .decays = 1};
    char *at = l->memory[0];
    const struct sw_device_adam_chunk chunk = {.record = at,
                                               .grad = at + 16384,
                                               .weight = at + 32768,
                                               .count = 256,
                                               .ranges = &range,
                                               .range_count = 1,
                                               .grad_dtype = SW_BF16,
                                               .weight_dtype = SW_BF16};
    return l->h[0].ops->adam(l->streams[0], (struct sw_device_adam_step *)(at + 65536), &chunk);
}

static int compute(const struct life *l) {
    const struct sw_device_ops *ops = l->h[0].ops;
    struct sw_stream *s = l->streams[0];
    char *at = l->memory[0];
    float *a = (float *)at, *b = (float *)(at + 8192), *c = (float *)(at + 16384);
    int32_t *tokens = (int32_t *)(at + 24576);
    void *scratch = at + 32768;
    TRY(ops->embed(s, SW_FP32, a, b, tokens, 4, 8, 0, 4));
    TRY(ops->embed_backward(s, SW_FP32, a, b, tokens, 4, 8, 0, 4));
    TRY(ops->rmsnorm(s, SW_FP32, a, c, b, b, 4, 8, 1e-5f));
    TRY(ops->rmsnorm_backward(s, SW_FP32, a, 0, b, 0, c, c, c, c, 4, 8, scratch));
    TRY(ops->rope(s, SW_FP32, a, b, b, 4, 4, 1, 8, 0));
    TRY(ops->swiglu(s, SW_FP32, a, b, c, 32));
    TRY(ops->swiglu_backward(s, SW_FP32, a, b, c, b, c, 32));
    TRY(ops->softmax_stats(s, a, b, tokens, 4, 8, 0, 1));
    TRY(ops->softmax_loss(s, a, b, NULL, 4));
    TRY(ops->softmax_backward(s, SW_FP32, a, b, c, tokens, NULL, 1.0f, 4, 8, 0));
    TRY(ops->sum(s, (double *)scratch, a, 4));
    TRY(ops->round(s, SW_BF16, a, b, 32));
    TRY(ops->round_norm(s, a, SW_BF16, b, 32, (double *)c, (struct sw_nonfinite *)scratch));
    uint64_t sum;
    TRY(ops->file_read(s, l->file, at + 65536, 0, 4096, &sum));
    TRY(multiply(l));
    TRY(attend(l, 64));
    TRY(attend(l, 8));
    return update(l);
}

static int gather(const struct life *l) {
    const struct sw_device_group_ops *ops = l->h[0].ops->group;
    for (int i = 0; i < DEVICES && ops; i++)
        TRY(ops->all_gather(l->groups[i], l->streams[i], l->memory[i], l->memory[i], 64));
    for (int i = 0; i < DEVICES && ops; i++)
        TRY(ops->reduce_scatter(l->groups[i], l->streams[i], (float *)l->memory[i],
                                (float *)l->memory[i], 64));
    for (int i = 0; i < DEVICES && ops; i++) TRY(ops->poll(l->groups[i]));
    for (int i = 0; i < DEVICES; i++) TRY(l->h[i].ops->stream_sync(l->streams[i]));
    return 0;
}

/* Whatever there is. After an error, a part that waits for others is ended. */
static void end(struct life *l, int failed) {
    const struct sw_device_ops *ops = watcher.ops;
    for (int i = 0; i < DEVICES && failed; i++)
        if (l->groups[i]) ops->group->abort(l->groups[i]);
    for (int i = 0; i < DEVICES && ops->group; i++) ops->group->close(l->groups[i]);
    ops->file_close(l->file);
    ops->event_destroy(l->event);
    ops->stream_destroy(l->other);
    if (l->h[0].device) ops->unpin(l->h[0].device, l->pinned);
    for (int i = 0; i < DEVICES; i++) {
        ops->stream_destroy(l->streams[i]);
        if (l->memory[i]) ops->free(l->h[i].device, l->memory[i], MEMORY_BYTES);
        ops->close(l->h[i].device);
    }
    free(l->host);
}

/* ---- failures ---- */

/* A life in which call n of this function fails, and how often that was reported: 0, there is no
 * such call. */
static int reports_of(const char *name, int n) {
    const uint64_t before = watcher.ops->free_bytes(watcher.device);
    char setting[64];
    struct life l = {0};
    snprintf(setting, sizeof(setting), "%s:%d", name, n);
    error_count = 0;
    error_last[0] = '\0';
    setenv("STANDIN_FAIL", setting, 1);
    int ret = begin(&l);
    if (ret == 0) ret = move(&l);
    if (ret == 0) ret = compute(&l);
    if (ret == 0) ret = gather(&l);
    const int in_time = error_count; /* reported before the end began */
    end(&l, ret < 0);
    unsetenv("STANDIN_FAIL");
    unsetenv("NCCL_P2P_DISABLE"); /* the detour's */
    if (ret < 0 && in_time == 0)
        fail_msg("%s: result %d with %d reports, '%s'", setting, ret, in_time, error_last);
    if (error_count > 0 && !strstr(error_last, "CUDA"))
        fail_msg("%s: reported as '%s'", setting, error_last);
    if (watcher.ops->free_bytes(watcher.device) != before)
        fail_msg("%s: memory is not given back", setting);
    return error_count;
}

/* All its calls; a product's error is told once by the library and once with its shape. */
static int failures_of(const char *name, int reports_max) {
    int calls = 0, reports;
    while ((reports = reports_of(name, calls + 1)) > 0) {
        if (reports > reports_max)
            fail_msg("%s:%d is reported %d times: %s", name, calls + 1, reports, error_last);
        calls++;
    }
    print_message("%s: %d calls\n", name, calls);
    assert_true(calls > 0);
    return calls;
}

static void of_the_runtime(void **state) {
    (void)state;
    static const char *const names[] = {
        "cudaSetDevice",
        "cudaGetDeviceProperties",
        "cudaRuntimeGetVersion",
        "cudaFuncSetAttribute",
        "cudaFuncGetAttributes",
        "cudaMemcpyPeerAsync",
        "cudaDeviceCanAccessPeer",
        "cudaDeviceEnablePeerAccess",
        "cudaDeviceDisablePeerAccess",
        "cudaMalloc",
        "cudaFree",
        "cudaMemset",
        "cudaMemGetInfo",
        "cudaHostRegister",
        "cudaHostUnregister",
        "cudaMemcpyAsync",
        "cudaMemsetAsync",
        "cudaStreamSynchronize",
        "cudaStreamCreateWithFlags",
        "cudaStreamWaitEvent",
        "cudaEventCreateWithFlags",
        "cudaEventRecord",
        "cudaEventSynchronize",
        "cudaEventQuery",
    };
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) failures_of(names[i], 1);
}

static void of_kernels(void **state) {
    (void)state;
    assert_true(failures_of("launch", 1) >= 20);
}

static void of_matrix_products(void **state) {
    (void)state;
    failures_of("cublasLtCreate", 1);
    failures_of("cublasLtMatmul", 1);
    static const char *const names[] = {
        "cublasLtMatmulDescCreate",       "cublasLtMatmulDescSetAttribute",
        "cublasLtMatrixLayoutCreate",     "cublasLtMatmulPreferenceCreate",
        "cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmulPreferenceSetAttribute",
    };
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) failures_of(names[i], 2);
}

static void of_groups(void **state) {
    (void)state;
    if (!watcher.ops->group) skip();
    failures_of("ncclGetUniqueId", 1);
    failures_of("ncclCommInitRank", DEVICES);
    failures_of("ncclAllGather", 1);
    failures_of("ncclReduceScatter", 1);
    failures_of("ncclCommGetAsyncError", 1);
    carried = SW_BF16;
    failures_of("ncclSend", 1);
    failures_of("ncclRecv", 1);
    failures_of("ncclGroupEnd", 1);
    failures_of("cudaMalloc", 1);
    failures_of("cudaFree", 1);
    assert_true(failures_of("launch", 1) >= 20);
    carried = SW_FP32;
}

static void of_host_memory(void **state) {
    (void)state;
    assert_true(failures_of("calloc", 1) >= 10);
}

/* A device keeps the algorithm of each shape: one too many is refused, the others go on. */
static void of_room_for_shapes(void **state) {
    (void)state;
    struct cuda_device d = {0};
    void *memory;
    cuda_device_open(&d, 0);
    assert_int_equal(d.ops->alloc(d.device, MEMORY_BYTES, &memory), 0);
    struct sw_gemm g = {.m = 1, .n = 1, .a = memory, .b = memory, .c = memory, .ldc = 1};
    g.a_dtype = g.b_dtype = g.c_dtype = SW_FP32;
    int ret = 0;
    uint64_t shapes = 0;
    error_count = 0;
    g.ldb = 1;
    while (ret == 0 && shapes < 1000) {
        g.k = g.lda = ++shapes;
        ret = d.ops->gemm(d.stream, &g);
    }
    assert_int_equal(shapes, 257);
    assert_int_equal(ret, -ENOSPC);
    assert_int_equal(error_count, 1);
    g.k = g.lda = 7;
    assert_int_equal(d.ops->gemm(d.stream, &g), 0);
    d.ops->free(d.device, memory, MEMORY_BYTES);
    cuda_device_close(&d);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(of_the_runtime),     cmocka_unit_test(of_kernels),
        cmocka_unit_test(of_matrix_products), cmocka_unit_test(of_groups),
        cmocka_unit_test(of_host_memory),     cmocka_unit_test(of_room_for_shapes),
    };
    return cmocka_run_group_tests(tests, open_watcher, close_watcher);
}
