/* tests/test_rank_nodes.c - which NUMA node each rank is on, and which of its cores it has. */
#include "offload/rank_nodes.h"

#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <cmocka.h>
#include "offload/core_share.h"

static void check_groups(const int *near, uint32_t ranks, int numa_nodes, uint32_t count,
                         const char *groups) {
    struct sw_rank_nodes nodes;
    sw_rank_nodes_group(&nodes, near, ranks, numa_nodes);
    assert_int_equal(nodes.count, count);
    for (uint32_t r = 0; r < ranks; r++) {
        assert_int_equal(nodes.of[r], groups[r] - '0');
        assert_int_equal(nodes.node[nodes.of[r]], count > 1 ? near[r] : -1);
    }
}

static void ranks_are_grouped_by_node(void **state) {
    (void)state;
    check_groups((const int[]){0, 0, 1, 1}, 4, 2, 2, "0011");
    check_groups((const int[]){3, 1, 3, 1, 1}, 5, 2, 2, "01011");
    check_groups((const int[]){0, 2, 4, 6, 0, 2, 4, 6}, 8, 4, 4, "01230123");
}

static void where_a_node_would_lie_idle_there_is_one_group(void **state) {
    (void)state;
    check_groups((const int[]){0, 0, 0}, 3, 1, 1, "000");
    check_groups((const int[]){1, 1, 1}, 3, 2, 1, "000"); /* all GPUs on one socket of two */
    check_groups((const int[]){0, 1, -1}, 3, 2, 1, "000");
    check_groups((const int[]){0, 1, 2}, 3, 2, 1, "000");
    check_groups((const int[]){5}, 1, 2, 1, "0");
    check_groups((const int[]){0, 1}, 2, 100, 1, "00");
}

static void check_cores(const int *near, uint32_t ranks, const char *const *lists,
                        const int *nodes) {
    const struct sw_topology topology = {.numa_nodes = 2};
    struct sw_core_share *share;
    assert_int_equal(sw_core_share_open(&share, &topology, ranks, near), 0);
    assert_non_null(share);
    for (uint32_t r = 0; r < ranks; r++) {
        char list[64];
        sw_core_share_list(share, r, list, sizeof(list));
        assert_string_equal(list, lists[r]);
        assert_int_equal(sw_core_share_node(share, r), nodes[r]);
    }
    sw_core_share_close(share);
}

/* hwloc takes this machine for one with a node for each of the CPUs 0 and 1. */
static void a_rank_has_cores_of_the_node_that_it_is_near(void **state) {
    (void)state;
    cpu_set_t mask;
    CPU_ZERO(&mask);
    assert_int_equal(sched_getaffinity(0, sizeof(mask), &mask), 0);
    if (CPU_COUNT(&mask) != 2 || !CPU_ISSET(0, &mask) || !CPU_ISSET(1, &mask)) skip();
    setenv("HWLOC_SYNTHETIC", "numa:2 core:1 pu:1", 1);
    setenv("HWLOC_THISSYSTEM", "1", 1);
    check_cores(NULL, 2, (const char *const[]){"0", "1"}, (const int[]){0, 1});
    check_cores((const int[]){1, 0}, 2, (const char *const[]){"1", "0"}, (const int[]){1, 0});
    check_cores((const int[]){1, 0, 1, 0}, 4, (const char *const[]){"1", "0", "1", "0"},
                (const int[]){1, 0, 1, 0});
    /* A node without cores in the mask, or one that hwloc does not know, is near nothing. */
    check_cores((const int[]){7, 7}, 2, (const char *const[]){"0", "1"}, (const int[]){0, 1});
    unsetenv("HWLOC_SYNTHETIC");
    unsetenv("HWLOC_THISSYSTEM");
    assert_int_equal(sw_core_share_node(NULL, 0), -1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_are_grouped_by_node),
        cmocka_unit_test(where_a_node_would_lie_idle_there_is_one_group),
        cmocka_unit_test(a_rank_has_cores_of_the_node_that_it_is_near),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
