/* The host device apart from its arithmetic: memory, copies, streams and events between threads,
 * the choice of the instruction set, and bits that no thread count changes. */
#include "kernels/device.h"
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "base/log.h"
#include "kernels/host/host.h"
#include "tests/support_reference.h"

static struct ref_device devices[REF_DEVICES_MAX];
static int device_count;
static int reports;
static char last_report[256];

static void count_report(enum sw_log_level level, const char *line, void *ctx) {
    (void)ctx;
    if (level != SW_LOG_ERROR) return;
    reports++;
    snprintf(last_report, sizeof(last_report), "%s", line);
}

static int open_all(void **state) {
    (void)state;
    sw_log_set_sink(count_report, NULL);
    device_count = ref_devices_open(devices, 2);
    return 0;
}

static int close_all(void **state) {
    (void)state;
    for (int i = 0; i < device_count; i++) ref_device_close(&devices[i]);
    sw_log_set_sink(NULL, NULL);
    return 0;
}

static int open_with(const char *isa, struct sw_device_handle *h) {
    const struct sw_host_device_options options = {.threads = 1};
    setenv("SPILLWAY_ISA", isa, 1);
    reports = 0;
    const int ret = sw_device_host_open(h, &options);
    unsetenv("SPILLWAY_ISA");
    return ret;
}

static void instruction_set_is_the_one_asked_for_or_an_error(void **state) {
    (void)state;
    struct sw_device_handle h = {0};
    for (int i = 0; i < SW_ISA_COUNT; i++) {
        const struct sw_host_isa *isa = &sw_host_isas[i];
        const int ret = open_with(isa->name, &h);
        if (sw_isa_supported((enum sw_isa)i)) {
            char start[32];
            assert_int_equal(ret, 0);
            snprintf(start, sizeof(start), "host %s, oneDNN ", isa->name);
            assert_memory_equal(h.ops->numerics(h.device), start, strlen(start));
            h.ops->close(h.device);
        } else {
            assert_int_equal(ret, -ENOTSUP);
            assert_int_equal(reports, 1);
            assert_non_null(strstr(last_report, isa->name));
        }
    }
    assert_int_equal(open_with("sse9", &h), -EINVAL);
    assert_int_equal(reports, 1);
    assert_non_null(strstr(last_report, "sse9"));
    /* Unset, and set to nothing: the best one that this CPU runs. */
    enum sw_isa top = SW_ISA_AVX512;
    while (!sw_isa_supported(top)) top--;
    const struct sw_host_isa *best = &sw_host_isas[top];
    const struct sw_host_isa *picked = NULL;
    assert_int_equal(sw_host_pick(&picked), 0);
    assert_ptr_equal(picked, best);
}

static void numerics_tells_what_can_change_a_bit(void **state) {
    (void)state;
    struct ref_device d;
    ref_device_open(&d, "scalar", 3);
    const char *text = d.ops->numerics(d.device);
    assert_non_null(strstr(text, "oneDNN"));
    assert_non_null(strstr(text, "scalar"));
    assert_non_null(strstr(text, "3 threads"));
    ref_device_close(&d);
}

static void memory_is_aligned_and_zeroed(void **state) {
    (void)state;
#ifdef SW_POISON
    const unsigned char fill = 0xFF;
#else
    const unsigned char fill = 0;
#endif
    static const uint64_t sizes[] = {0, 1, 4096, 4097, 2 << 20, (3 << 20) + 1};
    const struct ref_device *d = devices;
    for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++)
        for (int round = 0; round < 2; round++) { /* what was freed comes back clean */
            void *p = NULL;
            assert_int_equal(d->ops->alloc(d->device, sizes[s], &p), 0);
            assert_int_equal((uintptr_t)p % 4096, 0);
            for (uint64_t i = 0; i < sizes[s]; i++) assert_int_equal(((unsigned char *)p)[i], fill);
            memset(p, 0x33, sizes[s]);
            d->ops->free(d->device, p, sizes[s]);
        }
    d->ops->free(d->device, NULL, 4096);
}

static void memory_that_does_not_exist_is_refused(void **state) {
    (void)state;
    void *p = &p;
    reports = 0;
    assert_int_equal(devices->ops->alloc(devices->device, 1ull << 50, &p), -ENOMEM);
    assert_ptr_equal(p, &p); /* out is written on success alone */
    assert_int_equal(reports, 1);
}

static void copies_copy_and_zero_zeroes(void **state) {
    (void)state;
    const struct sw_device_ops *ops = devices->ops;
    struct sw_stream *s = devices->stream;
    unsigned char from[100], to[100];
    assert_int_equal(ops->pin(devices->device, from, sizeof(from)), 0); /* no matter here */
    ops->unpin(devices->device, from);
    for (int i = 0; i < 100; i++) from[i] = (unsigned char)(i + 1);
    int (*const copies[])(struct sw_stream *, void *, const void *,
                          uint64_t) = {ops->copy_h2d, ops->copy_d2h, ops->copy_d2d};
    for (int c = 0; c < 3; c++) {
        memset(to, 0x77, sizeof(to));
        assert_int_equal(copies[c](s, to, from, 99), 0);
        assert_memory_equal(to, from, 99);
        assert_int_equal(to[99], 0x77);
    }
    assert_int_equal(ops->zero(s, to, 99), 0);
    for (int i = 0; i < 99; i++) assert_int_equal(to[i], 0);
    assert_int_equal(to[99], 0x77);
    assert_int_equal(ops->stream_sync(s), 0);
}

/* A relay between two lanes: each stage adds one to what the other wrote, ordered by events alone.
 */
enum { STAGES = 400 };
struct relay {
    struct sw_event *events[STAGES + 1];
    uint64_t value;
    int first;
};

static void *relay_lane(void *ctx) {
    struct relay *r = ctx;
    struct sw_stream *s;
    if (devices->ops->stream_create(devices->device, &s) < 0) return NULL;
    const int first = __atomic_fetch_add(&r->first, 1, __ATOMIC_RELAXED);
    for (int i = first; i < STAGES; i += 2) {
        if (i % 4 < 2)
            devices->ops->stream_wait(s, r->events[i]);
        else
            devices->ops->event_wait(r->events[i]);
        const uint64_t next = r->value + 1;
        devices->ops->copy_h2d(s, &r->value, &next, sizeof(next));
        devices->ops->event_record(r->events[i + 1], s);
    }
    devices->ops->stream_destroy(s);
    return NULL;
}

static void events_hand_over_between_threads(void **state) {
    (void)state;
    struct relay r = {0};
    pthread_t lanes[2];
    for (int i = 0; i <= STAGES; i++)
        assert_int_equal(devices->ops->event_create(devices->device, &r.events[i]), 0);
    for (int i = 0; i < 2; i++) pthread_create(&lanes[i], NULL, relay_lane, &r);
    devices->ops->event_record(r.events[0], devices->stream); /* both may be waiting by now */
    devices->ops->event_wait(r.events[STAGES]);
    assert_int_equal(r.value, STAGES);
    for (int i = 0; i < 2; i++) pthread_join(lanes[i], NULL);
    for (int i = 0; i <= STAGES; i++) devices->ops->event_destroy(r.events[i]);
    devices->ops->event_destroy(NULL);
}

struct adam_call {
    const struct sw_device_adam_step *step;
    const struct sw_device_adam_chunk *chunk;
    int calls;
};

static void note_adam(const struct sw_device_adam_step *step,
                      const struct sw_device_adam_chunk *chunk, void *ctx) {
    struct adam_call *call = ctx;
    *call = (struct adam_call){step, chunk, call->calls + 1};
}

static void adam_is_the_one_passed_in(void **state) {
    (void)state;
    struct adam_call call = {0};
    const struct sw_host_device_options options = {
        .threads = 1, .adam = note_adam, .adam_ctx = &call};
    struct sw_device_handle h;
    struct sw_stream *s;
    const struct sw_device_adam_step step = {.apply = 1};
    const struct sw_device_adam_chunk chunk = {.count = 3};
    assert_int_equal(sw_device_host_open(&h, &options), 0);
    assert_int_equal(h.ops->stream_create(h.device, &s), 0);
    assert_int_equal(h.ops->adam(s, &step, &chunk), 0);
    assert_int_equal(call.calls, 1);
    assert_ptr_equal(call.step, &step);
    assert_ptr_equal(call.chunk, &chunk);
    h.ops->stream_destroy(s);
    h.ops->close(h.device);
}

/* Every operator but the products, on shapes that keep several threads busy; all results in a row.
 */
enum { N = 300, WIDTH = 328, VOCAB = 211, HEADS = 6, KV = 2, DIM = 16, OUTPUTS = 17 };

static void run_everything(struct ref_device *d, enum sw_dtype dtype, struct ref_tensor *out) {
    const struct sw_device_ops *ops = d->ops;
    uint32_t starts[N] = {0}; /* a row of one document, one of several */
    ref_starts(starts + N / 2, 1, N / 2, (const uint32_t[]){5, 30}, 2);
    const struct sw_attention shape = {2, N / 2, HEADS, KV, DIM, 0.25f, starts};
    struct ref_tensor x[6];
    ref_seed(31);
    for (int i = 0; i < 6; i++) x[i] = ref_tensor_new(d, dtype, N * WIDTH, 1.0);
    struct ref_tensor logits = ref_tensor_new(d, SW_FP32, N * VOCAB, 4.0);
    int32_t tokens[N];
    for (int i = 0; i < N; i++) tokens[i] = (int32_t)(ref_random() % VOCAB);
    for (int i = 0; i < OUTPUTS; i++) {
        const int fp32 = i == 1 || i == 3 || i == 5 || i == 8 || i == 14 || i == 15;
        out[i] = ref_tensor_new(d, fp32 ? SW_FP32 : dtype, N * WIDTH, 1.0);
    }
    void *scratch;
    const uint64_t scratch_bytes = ops->attention_scratch_bytes(d->device, &shape);
    assert_int_equal(ops->alloc(d->device, scratch_bytes, &scratch), 0);

    ops->embed(d->stream, dtype, out[0].data, x[0].data, tokens, N, WIDTH, 40, 150);
    ops->embed_backward(d->stream, dtype, out[1].data, x[1].data, tokens, N, WIDTH, 40, 150);
    ops->rmsnorm(d->stream, dtype, out[2].data, out[3].data, x[0].data, x[2].data, N, WIDTH, 1e-5f);
    ops->rmsnorm_backward(d->stream, dtype, out[4].data, 1, out[5].data, 1, x[1].data, x[0].data,
                          x[2].data, out[3].data, N, WIDTH, NULL);
    ops->rope(d->stream, dtype, out[6].data, logits.data, logits.data, N, N / 2, WIDTH / DIM, DIM,
              0);
    ops->attention(d->stream, dtype, &shape, out[7].data, out[8].data, x[0].data, x[1].data,
                   x[2].data, scratch);
    ops->attention_backward(d->stream, dtype, &shape, out[9].data, out[10].data, out[11].data,
                            x[3].data, out[7].data, out[8].data, x[0].data, x[1].data, x[2].data,
                            scratch);
    ops->swiglu(d->stream, dtype, out[12].data, x[0].data, x[1].data, N * WIDTH);
    ops->swiglu_backward(d->stream, dtype, x[4].data, x[5].data, x[3].data, x[0].data, x[1].data,
                         N * WIDTH);
    ops->copy_d2d(d->stream, out[13].data, x[4].data, N * WIDTH * sw_dtype_bytes(dtype));
    /* The loss and its gradient over two parts of the columns, each a dense matrix. */
    const uint64_t part = 112, rest = VOCAB - part;
    const float *left = logits.data, *right = left + N * part;
    float *loss = out[14].data, *stats = loss + N;
    void *d_right = (char *)x[2].data + N * part * sw_dtype_bytes(dtype);
    ops->softmax_stats(d->stream, stats, left, tokens, N, part, 0, 1);
    ops->softmax_stats(d->stream, stats, right, tokens, N, rest, part, 0);
    ops->softmax_loss(d->stream, loss, stats, NULL, N);
    ops->softmax_backward(d->stream, dtype, x[2].data, left, stats, tokens, NULL, 0.5f, N, part, 0);
    ops->softmax_backward(d->stream, dtype, d_right, right, stats, tokens, NULL, 0.5f, N, rest,
                          part);
    ops->round(d->stream, dtype, out[16].data, out[1].data, N * WIDTH);
    struct sw_nonfinite bad;
    ops->round_norm(d->stream, x[3].data, dtype, out[1].data, N * WIDTH, out[15].data, &bad);
    memcpy((char *)out[15].data + 1024, &bad, sizeof(bad));
    memcpy((char *)out[15].data + 2048, x[2].data, N * VOCAB * sw_dtype_bytes(dtype));

    ops->free(d->device, scratch, scratch_bytes);
    for (int i = 0; i < 6; i++) ref_tensor_free(d, &x[i]);
    ref_tensor_free(d, &logits);
}

static void thread_counts_and_repetition_change_no_bit(void **state) {
    (void)state;
    static const int teams[] = {1, 2, 2, 3, 7};
    for (int i = 0; i < device_count; i++)
        for (int dtype = SW_BF16; dtype <= SW_FP32; dtype++) {
            struct ref_tensor first[OUTPUTS], out[OUTPUTS];
            for (size_t t = 0; t < sizeof(teams) / sizeof(teams[0]); t++) {
                struct ref_device d;
                ref_device_open(&d, devices[i].isa, teams[t]);
                run_everything(&d, (enum sw_dtype)dtype, t == 0 ? first : out);
                for (int o = 0; o < OUTPUTS && t > 0; o++) {
                    assert_memory_equal(first[o].data, out[o].data,
                                        first[o].count * sw_dtype_bytes(first[o].dtype));
                    ref_tensor_free(&d, &out[o]);
                }
                ref_device_close(&d);
            }
            for (int o = 0; o < OUTPUTS; o++) ref_tensor_free(devices, &first[o]);
        }
}

/* Two lanes multiply at once on one device: its panels are not mixed up. */
struct lane_product {
    struct sw_gemm g;
    struct sw_stream *stream;
};

static void *multiply_often(void *ctx) {
    struct lane_product *p = ctx;
    for (int i = 0; i < 20; i++) devices->ops->gemm(p->stream, &p->g);
    return NULL;
}

static void products_of_two_threads_do_not_mix(void **state) {
    (void)state;
    enum { EDGE = 96 };
    struct lane_product lanes[2];
    struct ref_tensor a[2], b[2], c[2], alone[2];
    pthread_t threads[2];
    ref_seed(32);
    for (int i = 0; i < 2; i++) {
        struct ref_tensor *const all[] = {&a[i], &b[i], &c[i], &alone[i]};
        for (int t = 0; t < 4; t++) *all[t] = ref_tensor_new(devices, SW_BF16, EDGE * EDGE, 1.0);
        lanes[i].g = (struct sw_gemm){.m = EDGE,
                                      .n = EDGE,
                                      .k = EDGE,
                                      .a = a[i].data,
                                      .b = b[i].data,
                                      .c = alone[i].data,
                                      .lda = EDGE,
                                      .ldb = EDGE,
                                      .ldc = EDGE};
        assert_int_equal(devices->ops->stream_create(devices->device, &lanes[i].stream), 0);
        devices->ops->gemm(lanes[i].stream, &lanes[i].g);
        lanes[i].g.c = c[i].data;
    }
    for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, multiply_often, &lanes[i]);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < 2; i++) {
        assert_memory_equal(c[i].data, alone[i].data, EDGE * EDGE * sizeof(sw_bf16));
        devices->ops->stream_destroy(lanes[i].stream);
        struct ref_tensor *const all[] = {&a[i], &b[i], &c[i], &alone[i]};
        for (int t = 0; t < 4; t++) ref_tensor_free(devices, all[t]);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(instruction_set_is_the_one_asked_for_or_an_error),
        cmocka_unit_test(numerics_tells_what_can_change_a_bit),
        cmocka_unit_test(memory_is_aligned_and_zeroed),
        cmocka_unit_test(memory_that_does_not_exist_is_refused),
        cmocka_unit_test(copies_copy_and_zero_zeroes),
        cmocka_unit_test(events_hand_over_between_threads),
        cmocka_unit_test(adam_is_the_one_passed_in),
        cmocka_unit_test(thread_counts_and_repetition_change_no_bit),
        cmocka_unit_test(products_of_two_threads_do_not_mix),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
