/* tests/gpu/rates.h - what gpu_rates.c and bare_rates.c share, so that both time the same work in
 * the same way: the products of a model of eight billion parameters, their operands, and rounds of
 * calls of which the median counts. */
#ifndef TESTS_GPU_RATES_H
#define TESTS_GPU_RATES_H
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "kernels/products.h"

enum { ROUNDS = 5, CALLS_MAX = 1000, DIRECTIONS = SW_PRODUCT_COUNT };
#define WARM_UP_S 0.5

/* A matrix of the model, [out][in], and the tokens that go through it at once. */
struct rates_matrix {
    const char *name;
    uint64_t out, in, tokens;
};
static const struct rates_matrix rates_matrices[] = {
    {"q and o", 4096, 4096, 4096},      {"k and v", 1024, 4096, 4096},
    {"gate and up", 14336, 4096, 4096}, {"down", 4096, 14336, 4096},
    {"head", 42752, 4096, 499}, /* a third of the vocabulary; sw_llama_head_slice() of all of it */
};
enum { MATRICES = sizeof(rates_matrices) / sizeof(rates_matrices[0]) };

/* Everything sixty-four times smaller, and one call a round: whether it runs, not how fast. */
static int rates_tiny;

static inline uint64_t rates_size(uint64_t n) {
    return !rates_tiny ? n : n < 64 ? 1 : n / 64;
}

static inline const char *rates_direction(int direction) {
    static const char *const names[DIRECTIONS] = {"forward", "input gradient", "weight gradient"};
    return names[direction];
}

/* The product of a matrix in a direction, without its pointers. */
static inline struct sw_gemm rates_product(const struct rates_matrix *matrix, int direction) {
    return sw_product_of((enum sw_product)direction, rates_size(matrix->out),
                         rates_size(matrix->in), rates_size(matrix->tokens));
}

/* Values in [-1, 1): a card is faster on zeros. */
static inline void rates_fill(sw_bf16 *out, uint64_t count, uint64_t seed) {
    uint64_t x = seed * 0x9E3779B97F4A7C15u + 1;
    for (uint64_t i = 0; i < count; i++) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        out[i] = sw_bf16_from_f32((float)(int32_t)(x >> 32) * 0x1p-31f);
    }
}

static inline double rates_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static inline int rates_compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Seconds that a call takes: queued so often that a round lasts about 40 ms, waited for at its end,
 * the median of ROUNDS; negative when a call fails. A first call warms up, and so long as a card
 * that has idled needs to reach its clock. */
static inline double rates_time(int (*call)(void *ctx), int (*wait)(void *ctx), void *ctx) {
    double rounds[ROUNDS];
    static int warm;
    double start = rates_now();
    do {
        if (call(ctx) < 0 || wait(ctx) < 0) return -1.0;
    } while (!warm && !rates_tiny && rates_now() - start < WARM_UP_S);
    warm = 1;
    start = rates_now();
    if (call(ctx) < 0 || wait(ctx) < 0) return -1.0;
    const double once = rates_now() - start;
    int calls = once > 0.0 ? (int)(0.04 / once) + 1 : 1;
    if (calls > CALLS_MAX) calls = CALLS_MAX;
    if (rates_tiny) calls = 1;
    for (int r = 0; r < ROUNDS; r++) {
        start = rates_now();
        for (int i = 0; i < calls; i++)
            if (call(ctx) < 0) return -1.0;
        if (wait(ctx) < 0) return -1.0;
        rounds[r] = (rates_now() - start) / calls;
    }
    qsort(rounds, ROUNDS, sizeof(rounds[0]), rates_compare);
    return rounds[ROUNDS / 2];
}

/* Buffers of copies to the device (0) and from it (1), and which of the two are made. */
struct rates_copies {
    void *host[2], *device[2];
    uint64_t bytes;
    int up, down;
};

/* A line of result. */
static inline void rates_say(const char *what, const char *name, double per_s, const char *unit) {
    printf("{\"what\": \"%s\", \"name\": \"%s\", \"value\": %.6g, \"unit\": \"%s\"}\n", what, name,
           per_s, unit);
    fflush(stdout);
}

/* Times each way alone, then both at once; copy and wait as of rates_time(), with the copies. */
static inline void rates_say_copies(int (*copy)(void *ctx), int (*wait)(void *ctx),
                                    struct rates_copies *c) {
    static const char *const names[] = {"", "to the device", "from the device", "both at once"};
    for (int which = 1; which <= 3; which++) {
        c->up = which & 1;
        c->down = which >> 1;
        const double seconds = rates_time(copy, wait, c);
        rates_say("copy", names[which], 1e-9 * (double)c->bytes * (c->up + c->down) / seconds,
                  "GB/s");
    }
}

static inline void rates_say_product(const struct rates_matrix *matrix, int direction,
                                     const struct sw_gemm *g, double seconds) {
    char name[64];
    snprintf(name, sizeof(name), "%s, %s", matrix->name, rates_direction(direction));
    rates_say("product", name, 2e-12 * (double)(g->m * g->n * g->k) / seconds, "TFLOP/s");
}

#endif
