/* How large thread teams are, whether they can be made, and where Adam's runs: on made-up machines,
 * with made-up limits, and with the real threads of a team bound to this machine's own CPUs. */
#include "offload/team.h"
#include "offload/thread_trial.h"
#include "offload/topology.h"

#include <dirent.h>
#include <errno.h>
#include <grp.h>
#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

#include "base/log.h"
#include "engine/teams.h"
#include "engine/turn.h"
#include "offload/arena.h"
#include "offload/team_internal.h"
#include "offload/topology_internal.h"

static char logged[2048]; /* every line since it was emptied */
static void keep(enum sw_log_level level, const char *line, void *ctx) {
    (void)ctx, (void)level;
    const size_t used = strlen(logged);
    snprintf(logged + used, sizeof(logged) - used, "%s\n", line);
}

static int set_sink(void **state) {
    (void)state;
    unsetenv("OMP_STACKSIZE");
    sw_log_set_sink(keep, NULL);
    return 0;
}

/* ---- made-up machines ---- */

/* on_this_system: its processing units are this machine's CPUs of the same numbers. */
static hwloc_topology_t machine(const char *description, int on_this_system) {
    hwloc_topology_t topo;
    assert_int_equal(hwloc_topology_init(&topo), 0);
    assert_int_equal(hwloc_topology_set_synthetic(topo, description), 0);
    if (on_this_system)
        assert_int_equal(hwloc_topology_set_flags(topo, HWLOC_TOPOLOGY_FLAG_IS_THISSYSTEM), 0);
    assert_int_equal(hwloc_topology_load(topo), 0);
    return topo;
}

static hwloc_bitmap_t mask_of(const char *list) {
    hwloc_bitmap_t mask = hwloc_bitmap_alloc();
    assert_int_equal(hwloc_bitmap_list_sscanf(mask, list), 0);
    return mask;
}

static void check_counts(const char *description, const char *list, int cores, int nodes) {
    hwloc_topology_t topo = machine(description, 0);
    hwloc_bitmap_t mask = mask_of(list);
    assert_int_equal(sw_topology_cores(topo, mask), cores);
    assert_int_equal(sw_topology_nodes(topo, mask), nodes);
    hwloc_bitmap_free(mask);
    hwloc_topology_destroy(topo);
}

static void cores_and_nodes_are_counted_within_the_mask(void **state) {
    (void)state;
    check_counts("numa:2 core:4 pu:1", "0-7", 8, 2);
    check_counts("numa:2 core:4 pu:1", "5,7", 2, 1); /* numbers with gaps */
    check_counts("numa:2 core:4 pu:1", "3,4", 2, 2);
    check_counts("numa:1 core:1 pu:1", "0", 1, 1);    /* one core */
    check_counts("numa:2 core:4 pu:2", "0-15", 8, 2); /* two threads a core */
    check_counts("numa:2 core:4 pu:2", "0,1,2", 2, 1);
    check_counts("numa:2 core:4 pu:2", "1,3,5", 3, 1); /* siblings outside the mask */
    check_counts("numa:2 pu:3", "1-4", 4, 2);          /* a machine that names no cores */
}

static void adams_default_is_a_thread_per_core_within_the_quota(void **state) {
    (void)state;
    const struct sw_topology smt = {.cpus = 16, .cores = 8, .quota_cpus = 16},
                             quota = {.cpus = 16, .cores = 8, .quota_cpus = 3},
                             huge = {.cpus = 3000, .cores = 2000, .quota_cpus = 3000};
    assert_int_equal(sw_topology_adam_threads(&smt), 8);
    assert_int_equal(sw_topology_threads(&smt), 16);
    assert_int_equal(sw_topology_adam_threads(&quota), 3);
    assert_int_equal(sw_topology_threads(&quota), 3);
    assert_int_equal(sw_topology_adam_threads(&huge), SW_TEAM_THREADS_MAX);
    assert_int_equal(sw_topology_threads(&huge), SW_TEAM_THREADS_MAX);
}

static void check_choice(const char *description, const char *list, int node, int threads,
                         int per_core, const char *want_set, int want_threads, int want_bound) {
    hwloc_topology_t topo = machine(description, 0);
    hwloc_bitmap_t mask = mask_of(list), set = hwloc_bitmap_alloc(), want = mask_of(want_set);
    int bound = -1;
    assert_int_equal(sw_team_choose(topo, mask, node, threads, per_core, set, &bound),
                     want_threads);
    assert_true(hwloc_bitmap_isequal(set, want));
    assert_true(hwloc_bitmap_isincluded(set, mask));
    assert_int_equal(bound, want_bound);
    hwloc_bitmap_free(mask);
    hwloc_bitmap_free(set);
    hwloc_bitmap_free(want);
    hwloc_topology_destroy(topo);
}

static void a_team_gets_the_nodes_cpus_within_the_mask(void **state) {
    (void)state;
    const char *two = "numa:2 core:4 pu:1", *smt = "numa:2 core:4 pu:2";
    check_choice(two, "0-7", 0, 8, 1, "0-3", 4, 1);
    check_choice(two, "0-7", 1, 8, 1, "4-7", 4, 1);
    check_choice(two, "0-7", 1, 3, 1, "4-7", 3, 1);  /* fewer than the node has */
    check_choice(two, "0-7", -1, 8, 1, "0-7", 8, 0); /* pages on several nodes */
    check_choice(two, "0-7", 9, 8, 1, "0-7", 8, 0);  /* a node without cores, or not known */
    check_choice(two, "5,7", 1, 8, 1, "5,7", 2, 1);
    check_choice(two, "5,7", 0, 2, 1, "5,7", 2, 0); /* the memory's node has no CPU in the mask */
    check_choice(two, "3,6-7", 1, 3, 1, "6-7", 2, 1);
    check_choice(smt, "0-15", 1, 16, 1, "8-15", 4, 1); /* per core */
    check_choice(smt, "0-15", 1, 16, 0, "8-15", 8, 1); /* the user named a number */
    check_choice("numa:1 core:1 pu:1", "0", 0, 1, 1, "0", 1, 1);
}

/* A node with memory alone hangs where its distance puts it; its cores are not its own. */
static void a_node_without_memory_or_without_cores_does_no_harm(void **state) {
    (void)state;
    check_choice("numa:2(memory=0) core:2 pu:1", "0-3", 1, 4, 1, "2-3", 2, 1);
    hwloc_topology_t topo = machine("numa:2 core:2 pu:1", 0);
    hwloc_bitmap_t only = mask_of("0-1");
    assert_int_equal(hwloc_topology_restrict(topo, only, 0), 0); /* node 1 is left without CPUs */
    hwloc_bitmap_t set = hwloc_bitmap_alloc();
    int bound = -1;
    assert_int_equal(sw_team_choose(topo, only, 1, 2, 1, set, &bound), 2);
    assert_true(hwloc_bitmap_isequal(set, only) && !bound);
    assert_int_equal(sw_topology_nodes(topo, only), 1);
    hwloc_bitmap_free(only);
    hwloc_bitmap_free(set);
    hwloc_topology_destroy(topo);
}

/* ---- a real team ---- */

enum { TEAM_MAX = 4 };

static int located; /* what locate_made_up answers */
static int locate_made_up(hwloc_topology_t topo, const void *bytes, uint64_t count) {
    (void)topo, (void)bytes, (void)count;
    return located;
}

static int cpu_numbers(int numbers[2]) {
    cpu_set_t mask;
    int count = 0;
    if (sched_getaffinity(0, sizeof(mask), &mask)) return 0;
    for (int i = 0; i < CPU_SETSIZE && count < 2; i++)
        if (CPU_ISSET(i, &mask)) numbers[count++] = i;
    return count;
}

/* Every thread of a team of `threads` may run on exactly the CPUs 0 and/or 1 of `want`. */
static int team_is_on(int threads, unsigned want) {
    int right = 1, team = 0;
#pragma omp parallel num_threads(threads) reduction(&& : right)
    {
        cpu_set_t mask;
        right = sched_getaffinity(0, sizeof(mask), &mask) == 0 &&
                CPU_COUNT(&mask) == __builtin_popcount(want);
        for (int i = 0; i < 2; i++) right = right && !!CPU_ISSET(i, &mask) == (int)(want >> i & 1);
#pragma omp single
        team = omp_get_num_threads();
    }
    return right && team == threads;
}

static void *run_check(void *arg) {
    int (*const *check)(void) = arg;
    return (void *)(intptr_t)(*check)();
}

/* In a child, so that this process keeps its mask and its user; there in a thread of its own, as
 * the adam lane is one: the first thread's mask stands for what the user wants. */
static int in_child(int (*check)(void)) {
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        pthread_t thread;
        void *result = (void *)(intptr_t)99;
        if (!pthread_create(&thread, NULL, run_check, &check)) pthread_join(thread, &result);
        _exit((int)(intptr_t)result);
    }
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static int place_here_and_there(void) {
    struct sw_team *team;
    if (sw_team_open_on(&team, machine("numa:2 core:1 pu:1", 1), locate_made_up, TEAM_MAX, 0))
        return 1;
    if (!team_is_on(TEAM_MAX, 3)) return 2; /* the threads exist before they are bound */
    for (int round = 0; round < 2; round++) {
        for (located = 0; located < 2; located++) {
            const int threads = sw_team_place(team, &located, sizeof(located));
            if (threads != 1) return 3; /* what the node has */
            if (!team_is_on(threads, 1u << located)) return 4;
        }
        located = -1;
        if (sw_team_place(team, &located, sizeof(located)) != TEAM_MAX) return 6;
        if (!team_is_on(TEAM_MAX, 3)) return 7;
    }
    sw_team_close(team);
    return 0;
}

/* gcc's runtime starts threads with the mask of the one that forms the team; clang's, which the
 * TSan build uses, with the process's. */
#ifdef __clang__
enum { INHERITED = 0 };
#else
enum { INHERITED = 1 };
#endif

static int bind_four_threads(void) {
    hwloc_topology_t topo = machine("numa:2 core:1 pu:1", 1);
    if (!team_is_on(TEAM_MAX, 3)) return 1;
    for (int round = 0; round < 4; round++) {
        hwloc_bitmap_t set = mask_of(round % 2 ? "1" : "0");
        if (sw_team_bind(topo, set, TEAM_MAX)) return 2;
        if (!team_is_on(TEAM_MAX, 1u << round % 2)) return 3;
        if (INHERITED && !team_is_on(TEAM_MAX + 2, 1u << round % 2)) return 4; /* later ones */
        hwloc_bitmap_free(set);
    }
    hwloc_topology_destroy(topo);
    return 0;
}

static int place_within_a_mask_of_one(void) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(1, &one);
    if (sched_setaffinity(0, sizeof(one), &one)) return 77;
    struct sw_team *team;
    if (sw_team_open_on(&team, machine("numa:2 core:1 pu:1", 1), locate_made_up, 2, 0)) return 1;
    for (located = -1; located < 2; located++) {
        if (sw_team_place(team, &located, sizeof(located)) != 2) return 2;
        if (!team_is_on(2, 2)) return 3;
    }
    sw_team_close(team);
    return 0;
}

/* An administrator narrows the mask of a run under way (taskset -p on its first thread). */
static int place_after_the_mask_shrank(void) {
    struct sw_team *team;
    if (sw_team_open_on(&team, machine("numa:2 core:1 pu:1", 1), locate_made_up, 2, 0)) return 1;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(1, &one);
    if (sched_setaffinity(getpid(), sizeof(one), &one)) return 77;
    for (located = 1; located >= -1; located--) {
        const int threads = sw_team_place(team, &located, sizeof(located));
        if (!team_is_on(threads, 2)) return 2;
    }
    sw_team_close(team);
    return 0;
}

static void need_two_cpus(void) {
    int numbers[2];
    if (cpu_numbers(numbers) < 2 || numbers[0] != 0 || numbers[1] != 1) skip();
}

static void every_thread_of_the_team_moves_to_the_chunks_node(void **state) {
    (void)state;
    need_two_cpus();
    assert_int_equal(in_child(bind_four_threads), 0);
    assert_int_equal(in_child(place_here_and_there), 0);
}

static void a_mask_is_never_widened(void **state) {
    (void)state;
    need_two_cpus();
    assert_int_equal(in_child(place_within_a_mask_of_one), 0);
    assert_int_equal(in_child(place_after_the_mask_shrank), 0);
}

/* A thread may not be bound to a CPU that is not there: the kernel refuses it. */
static int place_on_missing_cpus(void) {
    struct sw_team *team;
    if (sw_team_open_on(&team, machine("numa:3 core:1 pu:1(indexes=0,1,4095)", 1), locate_made_up,
                        2, 0))
        return 1;
    located = 2;
    logged[0] = 0;
    if (sw_team_place(team, &located, sizeof(located)) != 2) return 2;
    return team_is_on(2, 3) ? 0 : 3;
}

static void a_node_of_missing_cpus_binds_nothing(void **state) {
    (void)state;
    need_two_cpus();
    assert_int_equal(in_child(place_on_missing_cpus), 0);
}

static void with_one_node_or_the_users_own_binding_nothing_is_bound(void **state) {
    (void)state;
    struct sw_topology t;
    assert_int_equal(sw_topology_read(&t), 0);
    struct sw_team *team;
    t.numa_nodes = 1;
    t.user_binds = 0;
    assert_int_equal(sw_team_open(&team, &t, 3, 0), 0);
    logged[0] = 0;
    assert_int_equal(sw_team_place(team, &t, sizeof(t)), 3);
    sw_team_announce(team, &t, sizeof(t));
    assert_non_null(strstr(logged, "Adam: 3 threads on CPU"));
    assert_non_null(strstr(logged, t.cpu_list));
    assert_non_null(strstr(logged, "not bound: one NUMA node"));
    sw_team_close(team);
    t.numa_nodes = 2;
    t.user_binds = 1;
    assert_int_equal(sw_team_open(&team, &t, 3, 0), 0);
    logged[0] = 0;
    assert_int_equal(sw_team_place(team, &t, sizeof(t)), 3);
    sw_team_announce(team, &t, sizeof(t));
    assert_non_null(strstr(logged, "OMP_PROC_BIND"));
    sw_team_close(team);
    sw_team_close(NULL);
}

static void the_place_is_logged_with_node_and_cpus(void **state) {
    (void)state;
    need_two_cpus();
    struct sw_team *team;
    assert_int_equal(sw_team_open_on(&team, machine("numa:2 core:1 pu:1", 1), locate_made_up, 2, 0),
                     0);
    located = 1;
    logged[0] = 0;
    sw_team_announce(team, &located, sizeof(located));
    assert_string_equal(logged, "Adam: 1 thread on NUMA node 1, CPU 1\n");
    located = -1;
    logged[0] = 0;
    sw_team_announce(team, &located, sizeof(located));
    assert_string_equal(logged,
                        "Adam: 2 threads on CPUs 0-1; its memory is not on one NUMA node\n");
    sw_team_close(team);
}

static void openmps_own_variables_are_the_users_binding(void **state) {
    (void)state;
    static const char *const names[] = {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"};
    struct sw_topology t;
    for (int i = 0; i < 3; i++) unsetenv(names[i]);
    assert_int_equal(sw_topology_read(&t), 0);
    assert_int_equal(t.user_binds, 0);
    for (int i = 0; i < 3; i++) {
        setenv(names[i], i == 0 ? "false" : "0-1", 1);
        assert_int_equal(sw_topology_read(&t), 0);
        assert_int_equal(t.user_binds, 1);
        unsetenv(names[i]);
    }
}

/* ---- threads that cannot be made ---- */

enum { NOBODY = 61234 };

static rlim_t threads_now(void) {
    DIR *folder = opendir("/proc/self/task");
    rlim_t count = 0;
    for (struct dirent *entry; folder && (entry = readdir(folder)) != NULL;)
        count += entry->d_name[0] != '.';
    if (folder) closedir(folder);
    return count;
}

/* From here on a user without any other process, who may start `left` more threads. */
static int become_limited(rlim_t left) {
    if (getuid() != 0 || setgroups(0, NULL) || setgid(NOBODY) || setuid(NOBODY)) return -1;
    const struct rlimit limit = {threads_now() + left, threads_now() + left};
    return setrlimit(RLIMIT_NPROC, &limit);
}

static int try_under_a_limit(void) {
    enum { LEFT = 10 };
    if (become_limited(LEFT)) return 77;
    char why[160];
    if (sw_thread_trial(LEFT, why, sizeof(why)) != LEFT || why[0]) return 1;
    /* Again at once: the first ones count no more. */
    for (int i = 0; i < 20; i++)
        if (sw_thread_trial(LEFT, why, sizeof(why)) != LEFT) return 2;
    if (sw_thread_trial(100, why, sizeof(why)) != LEFT) return 3;
    if (!strstr(why, "RLIMIT_NPROC")) return 4;
    /* And a team of that size can really be made now. */
    int team = 0;
#pragma omp parallel num_threads(LEFT + 1)
#pragma omp single
    team = omp_get_num_threads();
    return team == LEFT + 1 ? 0 : 5;
}

static void a_trial_says_how_many_threads_there_can_be(void **state) {
    (void)state;
    char why[160];
    assert_int_equal(sw_thread_trial(0, why, sizeof(why)), 0);
    assert_int_equal(sw_thread_trial(20, why, sizeof(why)), 20);
    assert_string_equal(why, "");
    if (getuid() != 0) skip();
    assert_int_equal(in_child(try_under_a_limit), 0);
}

/* A sanitizer's shadow needs more addresses than any limit on them would leave. */
#if defined(__SANITIZE_ADDRESS__) || defined(__clang__)
enum { ADDRESSES_LIMITED = 0 };
#else
enum { ADDRESSES_LIMITED = 1 };
#endif

static int try_with_huge_stacks(void) {
    setenv("OMP_STACKSIZE", "100M", 1);
    const struct rlimit limit = {1 << 30, 1 << 30};
    if (setrlimit(RLIMIT_AS, &limit)) return 77;
    char why[160];
    const int made = sw_thread_trial(100, why, sizeof(why));
    if (made < 1 || made > 10) return 1;
    return strstr(why, "stack of 102400 KiB") ? 0 : 2;
}

static void the_stacks_are_as_large_as_openmps(void **state) {
    (void)state;
    static const struct {
        const char *text;
        size_t bytes;
    } cases[] = {{"64M", 64 << 20},
                 {"1g", 1 << 30},
                 {"2048", 2 << 20},
                 {"2048K", 2 << 20},
                 {"65536B", 65536},
                 {" 100 m ", 100 << 20},
                 {"100MB", 0},
                 {"many", 0},
                 {"", 0},
                 {"1T", 0},
                 {"99999999999999G", 0},
                 {"1B", 0}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        setenv("OMP_STACKSIZE", cases[i].text, 1);
        assert_int_equal(sw_thread_trial_stack_bytes(), cases[i].bytes);
    }
    unsetenv("OMP_STACKSIZE");
    assert_int_equal(sw_thread_trial_stack_bytes(), 0);
    if (ADDRESSES_LIMITED) assert_int_equal(in_child(try_with_huge_stacks), 0);
}

static int settle_under_a_limit(void) {
    if (become_limited(SW_LANE_COUNT + 4)) return 77; /* four for the teams */
    const struct sw_topology t = {.cpus = 64, .cores = 32, .quota_cpus = 64, .cpu_list = "0-63"};
    struct sw_train_options o;
    sw_train_defaults(&o);
    o.ranks = 1;
    logged[0] = 0;
    sw_teams_settle(&o, &t);
    if (o.threads != 1 || o.device_threads != 3) return 1;
    if (!strstr(logged, "Adam runs 1 thread instead of 32") ||
        !strstr(logged, "the host device 3 instead of 64") || !strstr(logged, "RLIMIT_NPROC"))
        return 2;
    const char *first = strstr(logged, "\n");
    return first && first[1] == 0 ? 0 : 3; /* one warning */
}

static void teams_shrink_to_what_can_be_started_with_one_warning(void **state) {
    (void)state;
    if (getuid() != 0) skip();
    assert_int_equal(in_child(settle_under_a_limit), 0);
}

static void adams_team_shrinks_first_and_neither_below_one(void **state) {
    (void)state;
    static const struct {
        struct sw_team_sizes wanted;
        int room, adam, device;
    } cases[] = {
        {{8, 4, 0, 1}, 100, 8, 4}, {{8, 4, 0, 1}, 13, 8, 4}, {{8, 4, 0, 1}, 12, 7, 4},
        {{8, 4, 0, 1}, 6, 1, 4},   {{8, 4, 0, 1}, 5, 1, 3},  {{8, 4, 0, 1}, 0, 1, 1},
        {{8, 4, 0, 1}, -9, 1, 1},  {{1, 1, 0, 1}, 0, 1, 1},  {{8, 4, 1, 1}, 10, 8, 4},
        {{8, 4, 1, 1}, 6, 8, 4},   {{2, 4, 1, 1}, 6, 2, 4},  {{2, 4, 1, 1}, 4, 2, 3},
        {{8, 4, 1, 1}, 0, 8, 1},   {{8, 4, 0, 2}, 18, 7, 4}, {{8, 4, 0, 2}, 11, 1, 3},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct sw_team_sizes sizes = cases[i].wanted;
        sw_teams_fit(&sizes, cases[i].room);
        assert_int_equal(sizes.adam, cases[i].adam);
        assert_int_equal(sizes.device, cases[i].device);
    }
}

static void sizes_come_from_the_machine_and_too_many_are_warned_about(void **state) {
    (void)state;
    const struct sw_topology t = {
        .cpus = 4, .cores = 2, .quota = 3.5, .quota_cpus = 3, .cpu_list = "5,7-9"};
    struct sw_train_options o;
    sw_train_defaults(&o);
    o.ranks = 1;
    logged[0] = 0;
    sw_teams_settle(&o, &t);
    assert_true(o.threads == 2 && o.device_threads == 3);
    assert_string_equal(logged, "");
    o.threads = 5;
    o.device_threads = 4;
    sw_teams_settle(&o, &t);
    assert_true(o.threads == 5 && o.device_threads == 4); /* the user's word holds */
    assert_non_null(strstr(logged, "--threads 5 is more than the 4 CPUs of the affinity mask"));
    assert_non_null(strstr(logged, "5,7-9"));
    assert_non_null(strstr(logged, "--device-threads 4 is more than the container's quota of 3.5"));
    o.optimizer = sw_tiers_all(SW_TIER_DEVICE);
    sw_teams_settle(&o, &t);
    assert_true(o.threads == 4 && o.device_threads == 4);
    assert_non_null(strstr(logged, "--threads 5 has no effect"));
}

/* An arena fills its pages with several threads where it can, and without where it cannot. */
static int fill_an_arena_alone(void) {
    if (become_limited(0)) return 77;
    struct sw_arena arena;
    if (sw_arena_open(&arena, 200 << 20)) return 1;
    unsigned char *present = calloc(arena.bytes / 4096, 1);
    if (!present || mincore(arena.base, arena.bytes, present)) return 2;
    for (uint64_t p = 0; p < arena.bytes / 4096; p++)
        if (!(present[p] & 1)) return 3;
    free(present);
    sw_arena_close(&arena);
    return 0;
}

static void an_arena_needs_no_second_thread(void **state) {
    (void)state;
    if (getuid() != 0) skip();
    assert_int_equal(in_child(fill_an_arena_alone), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cores_and_nodes_are_counted_within_the_mask),
        cmocka_unit_test(adams_default_is_a_thread_per_core_within_the_quota),
        cmocka_unit_test(a_team_gets_the_nodes_cpus_within_the_mask),
        cmocka_unit_test(a_node_without_memory_or_without_cores_does_no_harm),
        cmocka_unit_test(every_thread_of_the_team_moves_to_the_chunks_node),
        cmocka_unit_test(a_mask_is_never_widened),
        cmocka_unit_test(a_node_of_missing_cpus_binds_nothing),
        cmocka_unit_test(with_one_node_or_the_users_own_binding_nothing_is_bound),
        cmocka_unit_test(the_place_is_logged_with_node_and_cpus),
        cmocka_unit_test(openmps_own_variables_are_the_users_binding),
        cmocka_unit_test(a_trial_says_how_many_threads_there_can_be),
        cmocka_unit_test(the_stacks_are_as_large_as_openmps),
        cmocka_unit_test(teams_shrink_to_what_can_be_started_with_one_warning),
        cmocka_unit_test(adams_team_shrinks_first_and_neither_below_one),
        cmocka_unit_test(sizes_come_from_the_machine_and_too_many_are_warned_about),
        cmocka_unit_test(an_arena_needs_no_second_thread),
    };
    return cmocka_run_group_tests(tests, set_sink, NULL);
}
