/* tests/support_turns.c - see the header. */
#include "tests/support_turns.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

void test_turns_build(struct test_turns *t, enum sw_overlap overlap, enum sw_tier tier,
                      uint32_t ranks) {
    uint64_t elements[TURNS_UNITS];
    for (int u = 0; u < TURNS_UNITS; u++) elements[u] = 128u * (10 + 7u * (unsigned)u);
    /* On NVMe is everything that can be; on the device, likewise. */
    const struct sw_tiers all = sw_tiers_all(tier);
    const struct sw_placement_input input = {
        .order = {.unit_count = TURNS_UNITS, .parts = 1, .tied = 1},
        .micro_count = 2,
        .shards = ranks,
        .replicas = 1,
        .local_ranks = ranks,
        .unit_elements = elements,
        .optimizer = all,
        .params = tier == SW_TIER_HOST ? sw_tiers_all(SW_TIER_DEVICE) : all,
        .gradients = all,
        .activations = all,
        .checkpoint_every = tier == SW_TIER_NVME ? 2 : 1,
        .chunk_bytes = 30000,
        .activation_bytes = 4096};
    assert_int_equal(sw_placement_build(&t->placement, &input), 0);
    assert_int_equal(t->placement.head_whole, ranks == 1 && tier != SW_TIER_NVME);
    t->shape = (struct sw_turn_shape){.overlap = overlap,
                                      .turning_point = overlap == SW_OVERLAP_NONE      ? 0
                                                       : overlap == SW_OVERLAP_FORWARD ? TURNS_UNITS
                                                                                       : 2,
                                      .placement = &t->placement};
    const int late = sw_turn_shape_is_late(&t->shape);
    assert_int_equal(sw_turn_build(&t->first, &t->shape, SW_TURN_TRAIN, 0, NULL), 0);
    assert_int_equal(sw_turn_build(&t->second, &t->shape, SW_TURN_TRAIN, late, &t->first), 0);
    assert_int_equal(sw_turn_build(&t->steady, &t->shape, SW_TURN_TRAIN, late, &t->second), 0);
    assert_int_equal(sw_turn_build(&t->drain, &t->shape, SW_TURN_DRAIN, late, &t->steady), 0);
}

void test_turns_free(struct test_turns *t) {
    struct sw_turn *const turns[] = {&t->first, &t->second, &t->steady, &t->drain};
    for (int i = 0; i < 4; i++) sw_turn_free(turns[i]);
    sw_placement_free(&t->placement);
}
