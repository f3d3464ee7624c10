/* tests/support_random.h - random numbers for tests of random shapes: the seed is printed, and can
 * be given as TEST_SEED. One generator per program. */
#ifndef TESTS_SUPPORT_RANDOM_H
#define TESTS_SUPPORT_RANDOM_H
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

static uint64_t random_state;

static inline uint32_t random_below(uint32_t n) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((random_state >> 33) % n);
}

/* Returns the seed. */
static inline unsigned long long random_begin(void) {
    const char *seed = getenv("TEST_SEED");
    random_state = seed ? strtoull(seed, NULL, 0) : (uint64_t)time(NULL);
    return random_state;
}

#endif
