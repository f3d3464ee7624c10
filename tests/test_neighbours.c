/* tests/test_neighbours.c - what processes on one machine may use of its memory. */
#include "engine/neighbours.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

static uint64_t part(const struct sw_neighbour *all, uint32_t count, uint32_t mine,
                     uint64_t limit_bytes) {
    const struct sw_topology topology = {.memory_bytes = limit_bytes, .machine_bytes = 1200};
    return sw_neighbours_memory(all, count, mine, &topology);
}

static void a_machine_is_parted_among_all_on_it(void **state) {
    (void)state;
    const struct sw_neighbour all[] = {{7, 1, 0}, {8, 1, 0}, {7, 2, 0}, {7, 1, 0}};
    assert_int_equal(part(all, 4, 0, 1200), 400);
    assert_int_equal(part(all, 4, 1, 1200), 1200);
    assert_int_equal(part(all, 1, 0, 1200), 1200);
}

static void a_limit_is_parted_among_those_that_share_it(void **state) {
    (void)state;
    /* Two in one group, one in a container of its own, and one of another machine. */
    const struct sw_neighbour all[] = {{7, 1, 33}, {7, 1, 33}, {7, 1, 44}, {8, 1, 33}};
    assert_int_equal(part(all, 4, 0, 500), 250);
    assert_int_equal(part(all, 4, 2, 300), 300);
    assert_int_equal(part(all, 4, 2, 1000), 400);
    assert_int_equal(part(all, 4, 3, 500), 500);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_machine_is_parted_among_all_on_it),
        cmocka_unit_test(a_limit_is_parted_among_those_that_share_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
