/* tests/bench/stream_referee.c - is the limit a limit? Streams of the CPU Adam's mix, written with
 * intrinsics and sharing no code with offload/stream_isa.c, beside every way of offload/stream.h.
 *
 *     build/release/tests/bench/stream_referee PARAMS THREADS ROUNDS
 *
 * Four arrays are read (gradient and three states), three written in place, and a BF16 weight where
 * the mix has one; plain, with prefetches, and with non-temporal stores of the weight or of all.
 * Each round runs all of both sides on the same memory. Per mix one JSON object: the best of each
 * side by its median, and the median over rounds of (referee's best time / ours). */
#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "offload/arena.h"
#include "offload/stream.h"
#include "tests/bench/rounds.h"

#define AVX2   __attribute__((target("avx2,fma")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))
#define INLINE static inline __attribute__((always_inline))

enum { TRIALS_MAX = 16 };
enum around { NOTHING, WEIGHT, ALL };

struct stream {
    float *p, *m, *v;
    const void *g;
    uint16_t *w;
    int wide_grad; /* FP32 gradients */
};

/* 16 elements by AVX2. The arithmetic is three multiply-adds that keep values bounded. */
AVX2 INLINE void step_avx2(const struct stream *s, uint64_t at, int wide, int weight,
                           enum around around) {
    const __m256 keep = _mm256_set1_ps(0.9f), little = _mm256_set1_ps(1e-6f);
    __m256i top[2];
    for (int u = 0; u < 2; u++) {
        const uint64_t i = at + 8 * (uint64_t)u;
        const __m256 g = wide ? _mm256_load_ps((const float *)s->g + i)
                              : _mm256_castsi256_ps(_mm256_slli_epi32(
                                    _mm256_cvtepu16_epi32(_mm_load_si128(
                                        (const __m128i *)((const uint16_t *)s->g + i))),
                                    16));
        const __m256 m = _mm256_fmadd_ps(_mm256_load_ps(s->m + i), keep, g);
        const __m256 v = _mm256_fmadd_ps(_mm256_load_ps(s->v + i), keep, g);
        const __m256 p = _mm256_fmadd_ps(m, little, _mm256_load_ps(s->p + i));
        if (around == ALL) {
            _mm256_stream_ps(s->m + i, m);
            _mm256_stream_ps(s->v + i, v);
            _mm256_stream_ps(s->p + i, p);
        } else {
            _mm256_store_ps(s->m + i, m);
            _mm256_store_ps(s->v + i, v);
            _mm256_store_ps(s->p + i, p);
        }
        top[u] = _mm256_srli_epi32(_mm256_castps_si256(p), 16);
    }
    if (!weight) return;
    const __m256i w = _mm256_permute4x64_epi64(_mm256_packus_epi32(top[0], top[1]), 0xD8);
    if (around == NOTHING)
        _mm256_store_si256((__m256i *)(s->w + at), w);
    else
        _mm256_stream_si256((__m256i *)(s->w + at), w);
}

/* 32 elements by AVX-512. */
AVX512 INLINE void step_avx512(const struct stream *s, uint64_t at, int wide, int weight,
                               enum around around) {
    const __m512 keep = _mm512_set1_ps(0.9f), little = _mm512_set1_ps(1e-6f);
    __m256i top[2];
    for (int u = 0; u < 2; u++) {
        const uint64_t i = at + 16 * (uint64_t)u;
        const __m512 g = wide ? _mm512_load_ps((const float *)s->g + i)
                              : _mm512_castsi512_ps(_mm512_slli_epi32(
                                    _mm512_cvtepu16_epi32(_mm256_load_si256(
                                        (const __m256i *)((const uint16_t *)s->g + i))),
                                    16));
        const __m512 m = _mm512_fmadd_ps(_mm512_load_ps(s->m + i), keep, g);
        const __m512 v = _mm512_fmadd_ps(_mm512_load_ps(s->v + i), keep, g);
        const __m512 p = _mm512_fmadd_ps(m, little, _mm512_load_ps(s->p + i));
        if (around == ALL) {
            _mm512_stream_ps(s->m + i, m);
            _mm512_stream_ps(s->v + i, v);
            _mm512_stream_ps(s->p + i, p);
        } else {
            _mm512_store_ps(s->m + i, m);
            _mm512_store_ps(s->v + i, v);
            _mm512_store_ps(s->p + i, p);
        }
        top[u] = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(p), 16));
    }
    if (!weight) return;
    const __m512i w = _mm512_inserti64x4(_mm512_castsi256_si512(top[0]), top[1], 1);
    if (around == NOTHING)
        _mm512_store_si512(s->w + at, w);
    else
        _mm512_stream_si512((void *)(s->w + at), w);
}

/* Whole lines of each array, `ahead` bytes before their turn. */
#define ASK(hint, s, at, ahead, wide, weight, around)                                              \
    do {                                                                                           \
        for (uint64_t line = 0; line < 2; line++) {                                                \
            _mm_prefetch((const char *)((s)->p + (at)) + 64 * line + (ahead), hint);               \
            _mm_prefetch((const char *)((s)->m + (at)) + 64 * line + (ahead), hint);               \
            _mm_prefetch((const char *)((s)->v + (at)) + 64 * line + (ahead), hint);               \
            if (wide) _mm_prefetch((const char *)(s)->g + 4 * (at) + 64 * line + (ahead), hint);   \
        }                                                                                          \
        if (!(wide)) _mm_prefetch((const char *)(s)->g + 2 * (at) + (ahead), hint);                \
        if ((weight) && (around) == NOTHING)                                                       \
            _mm_prefetch((const char *)((s)->w + (at)) + (ahead), hint);                           \
    } while (0)

/* [first, end), both multiples of 32; `wide`, `weight` and `around` are constants at every call. */
#define LOOP(isa, target, step, width)                                                             \
    target INLINE void loop_##isa(const struct stream *stream, uint64_t first, uint64_t end,       \
                                  uint64_t ahead, int wide, int weight, enum around around) {      \
        const struct stream s = *stream;                                                           \
        for (uint64_t at = first; at < end; at += 32) {                                            \
            if (ahead) ASK(_MM_HINT_T0, &s, at, ahead, wide, weight, around);                      \
            for (uint64_t u = 0; u < 32; u += (width)) step(&s, at + u, wide, weight, around);     \
        }                                                                                          \
        _mm_sfence();                                                                              \
    }                                                                                              \
    target static void part_##isa(const struct stream *s, uint64_t first, uint64_t end,            \
                                  uint64_t ahead, enum around around) {                            \
        const int which = (s->wide_grad ? 6 : 0) + (s->w ? 3 : 0) + (int)around;                   \
        switch (which) {                                                                           \
        case 0:                                                                                    \
        case 1:                                                                                    \
            loop_##isa(s, first, end, ahead, 0, 0, NOTHING);                                       \
            break;                                                                                 \
        case 2:                                                                                    \
            loop_##isa(s, first, end, ahead, 0, 0, ALL);                                           \
            break;                                                                                 \
        case 3:                                                                                    \
            loop_##isa(s, first, end, ahead, 0, 1, NOTHING);                                       \
            break;                                                                                 \
        case 4:                                                                                    \
            loop_##isa(s, first, end, ahead, 0, 1, WEIGHT);                                        \
            break;                                                                                 \
        case 5:                                                                                    \
            loop_##isa(s, first, end, ahead, 0, 1, ALL);                                           \
            break;                                                                                 \
        case 6:                                                                                    \
        case 7:                                                                                    \
            loop_##isa(s, first, end, ahead, 1, 0, NOTHING);                                       \
            break;                                                                                 \
        case 8:                                                                                    \
            loop_##isa(s, first, end, ahead, 1, 0, ALL);                                           \
            break;                                                                                 \
        case 9:                                                                                    \
            loop_##isa(s, first, end, ahead, 1, 1, NOTHING);                                       \
            break;                                                                                 \
        case 10:                                                                                   \
            loop_##isa(s, first, end, ahead, 1, 1, WEIGHT);                                        \
            break;                                                                                 \
        default:                                                                                   \
            loop_##isa(s, first, end, ahead, 1, 1, ALL);                                           \
            break;                                                                                 \
        }                                                                                          \
    }
LOOP(avx2, AVX2, step_avx2, 16)
LOOP(avx512, AVX512, step_avx512, 32)

static const struct trial {
    const char *name;
    uint64_t ahead;
    enum around around;
} trials[] = {
    {"plain", 0, NOTHING},
    {"prefetch 512", 512, NOTHING},
    {"prefetch 1024", 1024, NOTHING},
    {"prefetch 2048", 2048, NOTHING},
    {"weight around", 0, WEIGHT},
    {"prefetch 1024, weight around", 1024, WEIGHT},
    {"all around", 0, ALL},
    {"prefetch 1024, all around", 1024, ALL},
};
enum { TRIALS = sizeof(trials) / sizeof(trials[0]) };

static double referee_pass(const struct stream *s, uint64_t count, int threads, int wide_vectors,
                           const struct trial *trial) {
    const double start = rounds_now();
#pragma omp parallel num_threads(threads)
    {
        const uint64_t team = (uint64_t)omp_get_num_threads(), me = (uint64_t)omp_get_thread_num();
        const uint64_t first = count / 32 * me / team * 32, end = count / 32 * (me + 1) / team * 32;
        if (wide_vectors)
            part_avx512(s, first, end, trial->ahead, trial->around);
        else
            part_avx2(s, first, end, trial->ahead, trial->around);
    }
    return rounds_now() - start;
}

static void judge(const struct stream *s, uint64_t count, int threads, int rounds,
                  enum sw_isa isa) {
    static double theirs[TRIALS_MAX][ROUNDS_MAX], ours[TRIALS_MAX][ROUNDS_MAX];
    const struct sw_stream_arrays arrays = {
        .count = count,
        .master = s->p,
        .momentum = s->m,
        .variance = s->v,
        .grad = s->g,
        .grad_dtype = s->wide_grad ? SW_FP32 : SW_BF16,
        .weight = s->w,
    };
    for (int r = -1; r < rounds; r++) {
        const int at = r < 0 ? 0 : r; /* round -1 warms up and is overwritten */
        for (int i = 0; i < TRIALS; i++)
            theirs[i][at] = referee_pass(s, count, threads, isa == SW_ISA_AVX512, &trials[i]);
        for (int i = 0; i < SW_STREAM_WAYS; i++) {
            const double start = rounds_now();
            sw_stream_pass(isa, &sw_stream_ways[i], &arrays, threads);
            ours[i][at] = rounds_now() - start;
        }
    }
    const int a = rounds_best(theirs, TRIALS, rounds),
              b = rounds_best(ours, SW_STREAM_WAYS, rounds);
    double ratio[ROUNDS_MAX];
    for (int r = 0; r < rounds; r++) ratio[r] = theirs[a][r] / ours[b][r];
    const double bytes = (double)count * (double)sw_stream_bytes(arrays.grad_dtype, s->w != NULL);
    printf("{\"params\": %llu, \"threads\": %d, \"variant\": \"%s\", \"grad\": \"%s\", "
           "\"weight_out\": \"%s\", \"referee\": \"%s\", \"referee_gb_per_s\": %.3f, "
           "\"limit\": \"%s\", \"limit_gb_per_s\": %.3f, \"ratio\": %.4f}\n",
           (unsigned long long)count, threads, sw_isa_name(isa), s->wide_grad ? "fp32" : "bf16",
           s->w ? "bf16" : "none", trials[a].name, 1e-9 * bytes / rounds_median(theirs[a], rounds),
           sw_stream_ways[b].name, 1e-9 * bytes / rounds_median(ours[b], rounds),
           rounds_median(ratio, rounds));
    fflush(stdout);
}

int main(int argc, char **argv) {
    const uint64_t count = argc == 4 ? strtoull(argv[1], NULL, 10) / 32 * 32 : 0;
    const int threads = argc == 4 ? atoi(argv[2]) : 0, rounds = argc == 4 ? atoi(argv[3]) : 0;
    enum sw_isa isa = sw_isa_supported(SW_ISA_AVX512) ? SW_ISA_AVX512 : SW_ISA_AVX2;
    if (count < 32 || threads < 1 || rounds < 1 || rounds > ROUNDS_MAX || !sw_isa_supported(isa)) {
        fprintf(stderr, "usage: stream_referee PARAMS THREADS ROUNDS (1 to %d); needs AVX2\n",
                ROUNDS_MAX);
        return 2;
    }
    /* The arrays' addresses must not agree in their low bits. */
    const uint64_t skew = 5 * 4096 + 1024;
    struct sw_arena arena;
    if (sw_arena_open(&arena, 4 * (count * 4 + skew) + count * 2 + (1 << 16)) < 0) {
        fprintf(stderr, "stream_referee: no memory for %llu parameters\n",
                (unsigned long long)count);
        return 1;
    }
    char *at = arena.base;
    struct stream s = {.p = (float *)at, .m = (float *)(at + count * 4 + skew)};
    s.v = (float *)(at + 2 * (count * 4 + skew));
    float *g = (float *)(at + 3 * (count * 4 + skew));
    uint16_t *w = (uint16_t *)(at + 4 * (count * 4 + skew));
    for (uint64_t i = 0; i < count; i++) {
        s.p[i] = 0.5f;
        s.m[i] = s.v[i] = g[i] = 1e-3f;
    }
    s.g = g;
    for (int mix = 0; mix < 4; mix++) {
        s.wide_grad = mix < 2; /* FP32 first: the BF16 readings of those bytes are tame as well */
        s.w = mix % 2 ? NULL : w;
        judge(&s, count, threads, rounds, isa);
    }
    sw_arena_close(&arena);
    return 0;
}
