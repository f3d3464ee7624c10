/* A run's turns over a small made-up model, for tests of what executes them. */
#ifndef TESTS_SUPPORT_TURNS_H
#define TESTS_SUPPORT_TURNS_H
#include "engine/turn.h"

enum { TURNS_UNITS = 5 };

struct test_turns {
    struct sw_placement placement;
    struct sw_turn_shape shape;
    struct sw_turn first, second, steady, drain;
};

/* All states in one tier, or as near to it as they may be. The shape is pointed to. */
void test_turns_build(struct test_turns *t, enum sw_overlap overlap, enum sw_tier tier,
                      uint32_t ranks);
void test_turns_free(struct test_turns *t);

#endif
