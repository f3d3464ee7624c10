/* tests/bench/rounds.h - the clock and the medians of benchmarks that interleave their sides. */
#ifndef TESTS_BENCH_ROUNDS_H
#define TESTS_BENCH_ROUNDS_H
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ROUNDS_MAX = 999 };

static inline double rounds_now(void) { /* seconds, monotonic */
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline int rounds_compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static inline double rounds_median(const double *values, int count) {
    double sorted[ROUNDS_MAX];
    memcpy(sorted, values, (size_t)count * sizeof(*values));
    qsort(sorted, (size_t)count, sizeof(*sorted), rounds_compare);
    return sorted[count / 2];
}

/* The side with the least median. */
static inline int rounds_best(double times[][ROUNDS_MAX], int sides, int rounds) {
    int best = 0;
    for (int i = 1; i < sides; i++)
        if (rounds_median(times[i], rounds) < rounds_median(times[best], rounds)) best = i;
    return best;
}

#endif
