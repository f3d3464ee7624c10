/* tests/bench/adam_builds.c - builds of the CPU Adam's loops beside each other and beside memory's
 * limit, in one process; tests/bench/adam_builds.py compiles it with the list of builds in BUILDS.
 *
 *     PROGRAM ISA PARAMS THREADS ROUNDS WIDE_GRAD WEIGHT
 *
 * All work on the same arrays; each round runs every build and every way of offload/stream.h once,
 * another one first each time. A line per build: ns per parameter, the median, and the median of
 * (the best way's time / its own). The last line is the best way's. */
#include <immintrin.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cpu_adam/adam_variants.h"
#include "offload/arena.h"
#include "offload/stream.h"
#include "tests/bench/rounds.h"

#define B(name) SW_ADAM_VARIANT(name);
BUILDS
#undef B
#define B(name) {#name, sw_adam_kernel_##name},
static const struct {
    const char *name;
    void (*kernel)(const struct sw_adam_step *step, const struct sw_adam_chunk *chunk,
                   uint64_t first, uint64_t end, double *update_squares);
} builds[] = {BUILDS};

enum { BUILD_COUNT = sizeof(builds) / sizeof(builds[0]), SIDES = BUILD_COUNT + SW_STREAM_WAYS };
enum { SHARE_ELEMENTS = 4096 };
/* Addresses of the arrays must not agree in their low bits. */
enum { SKEW_BYTES = 5 * 4096 + 1024 };
enum { FLUSH_SUBNORMALS = 0x8040 };

static void update(int build, const struct sw_adam_step *step, const struct sw_adam_chunk *chunk,
                   int threads) {
    const uint64_t shares = chunk->count / SHARE_ELEMENTS;
#pragma omp parallel num_threads(threads)
    {
        const uint64_t me = (uint64_t)omp_get_thread_num(), team = (uint64_t)omp_get_num_threads();
        const unsigned mode = _mm_getcsr();
        _mm_setcsr(mode | FLUSH_SUBNORMALS);
        builds[build].kernel(step, chunk, shares * me / team * SHARE_ELEMENTS,
                             shares * (me + 1) / team * SHARE_ELEMENTS, NULL);
        _mm_setcsr(mode);
    }
}

int main(int argc, char **argv) {
    if (argc != 7) return 2;
    const enum sw_isa isa = !strcmp(argv[1], "avx512") ? SW_ISA_AVX512
                            : !strcmp(argv[1], "avx2") ? SW_ISA_AVX2
                                                       : SW_ISA_SCALAR;
    const uint64_t count = strtoull(argv[2], NULL, 10) / SHARE_ELEMENTS * SHARE_ELEMENTS;
    const int threads = atoi(argv[3]), rounds = atoi(argv[4]), wide = atoi(argv[5]);
    if (!count || threads < 1 || rounds < 1 || rounds > ROUNDS_MAX) return 2;
    struct sw_arena arena;
    char *at[5];
    if (sw_arena_open(&arena, 5 * sw_arena_need(count * sizeof(float) + 5 * SKEW_BYTES))) return 1;
    for (int i = 0; i < 5; i++)
        at[i] =
            (char *)sw_arena_take(&arena, count * sizeof(float) + 5 * SKEW_BYTES) + i * SKEW_BYTES;
    float *master = (float *)at[0], *momentum = (float *)at[1], *variance = (float *)at[2];
    for (uint64_t i = 0; i < count; i++) {
        const float grad = (i % 3 ? 1e-3f : -1e-3f) * (float)(1 + i % 7);
        master[i] = 0.5f + (float)(i % 1024) * 0x1p-11f;
        momentum[i] = 1e-3f;
        variance[i] = 1e-5f;
        if (wide)
            ((float *)at[3])[i] = grad;
        else
            ((sw_bf16 *)at[3])[i] = sw_bf16_from_f32(grad);
    }
    const struct sw_adam_hyper hyper = {1e-6, 0.9, 0.95, 1e-8, 0.1, 0};
    const struct sw_adam_range range = {count, 1};
    struct sw_adam_step step;
    sw_adam_prepare(&step, &hyper, 100, 0.5f);
    const struct sw_adam_chunk chunk = {
        .format = {.grad = wide ? SW_FP32 : SW_BF16, .weight = SW_BF16},
        .count = count,
        .ranges = &range,
        .range_count = 1,
        .master = master,
        .momentum = momentum,
        .variance = variance,
        .grad = at[3],
        .weight = atoi(argv[6]) ? at[4] : NULL,
    };
    const struct sw_stream_arrays arrays = {
        count, master, momentum, variance, at[3], chunk.format.grad, chunk.weight};
    static double seconds[SIDES][ROUNDS_MAX];
    for (int r = -1; r < rounds; r++) /* the first warms up */
        for (int s = 0; s < SIDES; s++) {
            const int side = (s + r + 1) % SIDES;
            const double start = rounds_now();
            if (side < BUILD_COUNT)
                update(side, &step, &chunk, threads);
            else
                sw_stream_pass(isa, &sw_stream_ways[side - BUILD_COUNT], &arrays, threads);
            if (r >= 0) seconds[side][r] = rounds_now() - start;
        }
    const int best = BUILD_COUNT + rounds_best(seconds + BUILD_COUNT, SW_STREAM_WAYS, rounds);
    for (int s = 0; s <= BUILD_COUNT; s++) {
        const int side = s < BUILD_COUNT ? s : best;
        double ratio[ROUNDS_MAX];
        for (int r = 0; r < rounds; r++) ratio[r] = seconds[best][r] / seconds[side][r];
        printf("%s\t%.3f\t%.3f\n",
               side < BUILD_COUNT ? builds[side].name : sw_stream_ways[best - BUILD_COUNT].name,
               1e9 * rounds_median(seconds[side], rounds) / (double)count,
               rounds_median(ratio, rounds));
    }
    sw_arena_close(&arena);
    return 0;
}
