/* tools/bench_adam_kinds.c - what the other formats and the extras cost, beside the plain update.
 *
 * Each has memory of its own and they take turns, so that none finds its state in a cache. */
#include "tools/bench.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "offload/arena.h"

enum { FILL_ELEMENTS = 64 * SW_ADAM_BLOCK };

struct kind {
    const char *name;
    struct sw_adam_format format;
    int checksum, tiny; /* tiny: moments of 1e-40 and no gradient, before every sample */
};

static const struct kind kinds[SW_BENCH_ADAM_KINDS] = {
    {"plain", {SW_MASTER_FP32, SW_MOMENTS_FP32, SW_BF16, SW_BF16}, 0, 0},
    {"moments of 1e-40", {SW_MASTER_FP32, SW_MOMENTS_FP32, SW_BF16, SW_BF16}, 0, 1},
    {"checksums", {SW_MASTER_FP32, SW_MOMENTS_FP32, SW_BF16, SW_BF16}, 1, 0},
    {"split master", {SW_MASTER_SPLIT, SW_MOMENTS_FP32, SW_BF16, SW_BF16}, 0, 0},
    {"8-bit moments", {SW_MASTER_FP32, SW_MOMENTS_8BIT, SW_BF16, SW_BF16}, 0, 0},
    {"split, 8-bit", {SW_MASTER_SPLIT, SW_MOMENTS_8BIT, SW_BF16, SW_BF16}, 0, 0},
};

/* A split master's half is the working weight: emitting it again would count it twice. */
static int emits(const struct kind *kind) {
    return kind->format.master == SW_MASTER_FP32;
}

static uint64_t bytes_of(uint64_t params) {
    uint64_t bytes = 2 * sw_arena_need(params * sizeof(sw_bf16)); /* gradients, and none */
    for (int k = 0; k < SW_BENCH_ADAM_KINDS; k++)
        bytes += sw_arena_need(sw_adam_record_bytes(&kinds[k].format, params)) +
                 (emits(&kinds[k]) ? sw_arena_need(params * sizeof(sw_bf16)) : 0);
    return bytes;
}

static void start(struct sw_adam_chunk *chunk) {
    float masters[FILL_ELEMENTS];
    for (uint64_t i = 0; i < FILL_ELEMENTS; i++) masters[i] = 0.5f + (float)(i % 1024) * 0x1p-11f;
    for (uint64_t at = 0; at < chunk->count; at += FILL_ELEMENTS) {
        const uint64_t left = chunk->count - at;
        sw_adam_start(chunk, at, left < FILL_ELEMENTS ? left : FILL_ELEMENTS, masters);
    }
}

static double sample(const struct sw_adam_variant *variant, const struct sw_adam_step *step,
                     const struct kind *kind, struct sw_adam_chunk *chunk, int threads) {
    if (kind->tiny)
        for (uint64_t i = 0; i < chunk->count; i++)
            chunk->momentum[i] = chunk->variance[i] = 1e-40f;
    struct sw_adam_extra extra = {.checksum = kind->checksum};
    const double begin = sw_bench_now();
    sw_adam_update(variant, step, chunk, threads, kind->checksum ? &extra : NULL);
    return sw_bench_now() - begin;
}

static int measure(const struct sw_adam_variant *variant, struct sw_adam_chunk *chunks, int threads,
                   double seconds, struct sw_bench_adam_kind *out) {
    static double times[SW_BENCH_ADAM_KINDS][SW_BENCH_ROUNDS_MAX];
    double relative[SW_BENCH_ROUNDS_MAX];
    const struct sw_adam_hyper hyper = {1e-6, 0.9, 0.95, 1e-8, 0.1, 0};
    struct sw_adam_step step;
    sw_adam_prepare(&step, &hyper, 100, 0.5f);
    const double begin = sw_bench_now();
    int n = -1; /* one round of warm-up */
    for (; n < SW_BENCH_ROUNDS_MAX && (n < SW_BENCH_ROUNDS_MIN || sw_bench_now() - begin < seconds);
         n++)
        for (int k = 0; k < SW_BENCH_ADAM_KINDS; k++) {
            const double s = sample(variant, &step, &kinds[k], &chunks[k], threads);
            if (n >= 0) times[k][n] = s;
            if (sw_bench_stopped()) return -EINTR;
        }
    for (int k = 0; k < SW_BENCH_ADAM_KINDS; k++) {
        for (int r = 0; r < n; r++) relative[r] = times[k][r] / times[0][r];
        out[k] = (struct sw_bench_adam_kind){
            .name = kinds[k].name,
            .ns_per_param = 1e9 * sw_bench_median(times[k], n) / (double)chunks[k].count,
            .relative = sw_bench_median(relative, n),
        };
    }
    return 0;
}

int sw_bench_adam_kinds(const struct sw_adam_variant *variant, uint64_t params, int threads,
                        double seconds, struct sw_bench_adam_kind out[SW_BENCH_ADAM_KINDS]) {
    assert(variant && params > 0 && threads >= 1);
    struct sw_arena arena;
    int ret = sw_arena_open(&arena, bytes_of(params));
    if (ret) return ret;
    sw_bf16 *grad = sw_arena_take(&arena, params * sizeof(*grad));
    sw_bf16 *none = sw_arena_take(&arena, params * sizeof(*none));
    for (uint64_t i = 0; i < params; i++) {
        grad[i] = sw_bf16_from_f32((i % 3 ? 1e-3f : -1e-3f) * (float)(1 + i % 7));
        none[i] = 0;
    }
    const struct sw_adam_range range = {params, 1};
    struct sw_adam_chunk chunks[SW_BENCH_ADAM_KINDS];
    for (int k = 0; k < SW_BENCH_ADAM_KINDS; k++) {
        chunks[k] = (struct sw_adam_chunk){.format = kinds[k].format,
                                           .count = params,
                                           .ranges = &range,
                                           .range_count = 1,
                                           .grad = kinds[k].tiny ? none : grad};
        sw_adam_record_map(&chunks[k],
                           sw_arena_take(&arena, sw_adam_record_bytes(&kinds[k].format, params)));
        if (emits(&kinds[k])) chunks[k].weight = sw_arena_take(&arena, params * sizeof(sw_bf16));
        start(&chunks[k]);
    }
    ret = measure(variant, chunks, threads, seconds, out);
    sw_arena_close(&arena);
    return ret;
}
