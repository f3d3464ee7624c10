/* The host arena (its exact size, its fill, its order) and the machine as this process may use it.
 * The cgroup files are made up here, so every kind of container is tested on any machine. */
#include "offload/arena.h"
#include "offload/topology.h"

#include <errno.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

#include "base/log.h"
#include "offload/topology_internal.h"

static char logged[1024];
static void keep(enum sw_log_level level, const char *line, void *ctx) {
    (void)ctx;
    if (level == SW_LOG_ERROR) snprintf(logged, sizeof(logged), "%s", line);
}

static void an_arena_is_mapped_at_its_exact_size(void **state) {
    (void)state;
    static const uint64_t sizes[] = {1, 4096, 4097, (2 << 20) - 1, 2 << 20, (129 << 20) + 5};
    for (int i = 0; i < 6; i++) {
        struct sw_arena arena;
        assert_int_equal(sw_arena_open(&arena, sizes[i]), 0);
        assert_int_equal(arena.bytes, (sizes[i] + 4095) / 4096 * 4096);
        assert_int_equal((uintptr_t)arena.base % (arena.bytes >= 2 << 20 ? 2 << 20 : 4096), 0);
        /* Every page is there before the first step, and none behind the end. */
        const uint64_t pages = arena.bytes / 4096;
        unsigned char *present = calloc(pages + 1, 1);
        assert_int_equal(mincore(arena.base, arena.bytes, present), 0);
        for (uint64_t p = 0; p < pages; p++) assert_true(present[p] & 1);
        free(present);
        sw_arena_close(&arena);
        assert_null(arena.base);
    }
}

static void an_arena_of_no_bytes_is_fine(void **state) {
    (void)state;
    struct sw_arena arena;
    assert_int_equal(sw_arena_open(&arena, 0), 0);
    assert_int_equal(arena.bytes, 0);
    sw_arena_take(&arena, 0);
    sw_arena_close(&arena);
    sw_arena_close(&arena);
}

static void pieces_are_aligned_disjoint_and_fill_the_arena(void **state) {
    (void)state;
    static const uint64_t sizes[] = {1, 4096, 0, 5000, 3 << 20, 4095};
    uint64_t need = 0;
    for (int i = 0; i < 6; i++) need += sw_arena_need(sizes[i]);
    assert_int_equal(need, 4096 + 4096 + 0 + 8192 + (3 << 20) + 4096);
    struct sw_arena arena;
    assert_int_equal(sw_arena_open(&arena, need), 0);
    char *next = arena.base;
    for (int i = 0; i < 6; i++) {
        char *p = sw_arena_take(&arena, sizes[i]);
        assert_ptr_equal(p, next);
        assert_int_equal((uintptr_t)p % 4096, 0);
        next = p + sw_arena_need(sizes[i]);
    }
    assert_ptr_equal(next, arena.base + arena.bytes);
    assert_int_equal(arena.used, arena.bytes);
    sw_arena_close(&arena);
}

static void memory_starts_as_zeros_or_in_test_builds_as_poison(void **state) {
    (void)state;
#ifdef SW_POISON
    const unsigned char want = 0xFF;
#else
    const unsigned char want = 0;
#endif
    struct sw_arena arena;
    assert_int_equal(sw_arena_open(&arena, 130 << 20), 0);
    const unsigned char *p = sw_arena_take(&arena, 130 << 20);
    for (uint64_t i = 0; i < 130 << 20; i += 509) assert_int_equal(p[i], want);
    assert_int_equal(p[(130 << 20) - 1], want);
    sw_arena_close(&arena);
}

static void more_memory_than_there_is_is_refused_with_the_size(void **state) {
    (void)state;
    struct sw_arena arena;
    logged[0] = 0;
    assert_int_equal(sw_arena_open(&arena, 1000ull << 40), -ENOMEM); /* never touched, so no kill */
    assert_non_null(strstr(logged, "1.10 PB"));
    assert_null(arena.base);
    assert_int_equal(sw_arena_open(&arena, UINT64_MAX), -ENOMEM);
    sw_arena_close(&arena);
}

static char root[] = "/tmp/spillway-cgroup-XXXXXX";

static void put(const char *path, const char *text) {
    char full[512], *at;
    snprintf(full, sizeof(full), "%s/%s", root, path);
    for (at = full + strlen(root) + 1; (at = strchr(at, '/')) != NULL; at++) {
        *at = 0;
        mkdir(full, 0700);
        *at = '/';
    }
    FILE *f = fopen(full, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void clear_root(void) {
    char command[64];
    snprintf(command, sizeof(command), "rm -rf %s/*", root);
    assert_int_equal(system(command), 0);
}

static int make_root(void **state) {
    (void)state;
    sw_log_set_sink(keep, NULL);
    return mkdtemp(root) ? 0 : -1;
}
static int remove_root(void **state) {
    (void)state;
    clear_root();
    return rmdir(root);
}

static struct sw_cgroup_limits limits_now(void) {
    struct sw_cgroup_limits limits;
    sw_cgroup_read(root, &limits);
    return limits;
}

static uint64_t inode_of(const char *folder) {
    char path[4096];
    struct stat info;
    snprintf(path, sizeof(path), "%s/%s", root, folder);
    assert_int_equal(stat(path, &info), 0);
    return info.st_ino;
}

static void without_cgroup_files_there_is_no_limit(void **state) {
    (void)state;
    clear_root();
    assert_true(limits_now().cpus == 0 && limits_now().memory_bytes == UINT64_MAX);
    put("proc/self/cgroup", "0::/\n");
    assert_true(limits_now().cpus == 0 && limits_now().memory_bytes == UINT64_MAX);
    put("sys/fs/cgroup/cpu.max", "max 100000\n");
    put("sys/fs/cgroup/memory.max", "max\n");
    assert_true(limits_now().cpus == 0 && limits_now().memory_bytes == UINT64_MAX);
}

static void a_devices_node_is_the_kernels(void **state) {
    (void)state;
    clear_root();
    put("sys/bus/pci/devices/0000:3b:00.0/numa_node", "1\n");
    put("sys/bus/pci/devices/0000:5e:00.0/numa_node", "-1\n");
    assert_int_equal(sw_bus_node(root, "0000:3B:00.0"), 1); /* as CUDA writes it */
    assert_int_equal(sw_bus_node(root, "0000:5E:00.0"), -1);
    assert_int_equal(sw_bus_node(root, "0000:AF:00.0"), -1);
    assert_int_equal(sw_bus_node(root, ""), -1);
}

static void version_2_takes_the_tightest_limit_on_the_way_up(void **state) {
    (void)state;
    clear_root();
    put("proc/self/cgroup", "0::/a/b\n");
    put("sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
    put("sys/fs/cgroup/a/cpu.max", "399000 100000\n");
    put("sys/fs/cgroup/a/b/memory.max", "3000000000\n");
    put("sys/fs/cgroup/a/memory.max", "5000000000\n");
    assert_true(limits_now().cpus == 3.99);
    assert_true(limits_now().memory_bytes == 3000000000ull);
    assert_int_equal(limits_now().memory_group, inode_of("sys/fs/cgroup/a/b"));
    put("sys/fs/cgroup/a/memory.max", "2000000000\n");
    assert_int_equal(limits_now().memory_group, inode_of("sys/fs/cgroup/a"));
    put("sys/fs/cgroup/a/b/cpu.max", "200000 100000\n");
    assert_true(limits_now().cpus == 2);
}

static void version_1_is_read_with_joined_and_single_controllers(void **state) {
    (void)state;
    clear_root();
    put("proc/self/cgroup", "5:memory:/job\n4:cpu,cpuacct:/job\n3:cpuset:/\n0::/\n");
    put("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "250000\n");
    put("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n");
    put("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "1073741824\n");
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    assert_true(limits_now().cpus == 2.5);
    assert_true(limits_now().memory_bytes == 1ull << 30);
    put("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "-1\n");
    assert_true(limits_now().cpus == 0);
}

static void a_limit_of_processes_counts_where_the_fewest_are_left(void **state) {
    (void)state;
    clear_root();
    put("proc/self/cgroup", "0::/a/b\n");
    assert_true(limits_now().threads_left == UINT64_MAX);
    put("sys/fs/cgroup/a/b/pids.max", "max\n");
    put("sys/fs/cgroup/a/b/pids.current", "5\n");
    assert_true(limits_now().threads_left == UINT64_MAX && limits_now().threads_max == UINT64_MAX);
    put("sys/fs/cgroup/a/b/pids.max", "100\n");
    assert_true(limits_now().threads_left == 95 && limits_now().threads_max == 100);
    put("sys/fs/cgroup/a/pids.max", "200\n");
    put("sys/fs/cgroup/a/pids.current", "190\n");
    assert_true(limits_now().threads_left == 10 && limits_now().threads_max == 200);
    put("sys/fs/cgroup/a/pids.max", "180\n"); /* lowered below what runs already */
    assert_true(limits_now().threads_left == 0);
    clear_root();
    put("proc/self/cgroup", "8:pids:/job\n0::/\n");
    put("sys/fs/cgroup/pids/job/pids.max", "64\n");
    put("sys/fs/cgroup/pids/job/pids.current", "60\n");
    assert_true(limits_now().threads_left == 4 && limits_now().threads_max == 64);
}

static void kills_for_memory_are_counted_by_the_nearest_group(void **state) {
    (void)state;
    clear_root();
    put("proc/self/cgroup", "0::/a/b\n");
    assert_true(limits_now().oom_kills == UINT64_MAX);
    put("sys/fs/cgroup/a/memory.events", "low 0\noom 9\noom_kill 7\noom_group_kill 1\n");
    assert_true(limits_now().oom_kills == 7);
    put("sys/fs/cgroup/a/b/memory.events", "oom_kill 3\n");
    assert_true(limits_now().oom_kills == 3);
    clear_root();
    put("proc/self/cgroup", "5:memory:/job\n0::/\n");
    put("sys/fs/cgroup/memory/job/memory.oom_control",
        "oom_kill_disable 0\nunder_oom 0\noom_kill 12\n");
    put("sys/fs/cgroup/memory/memory.oom_control", "oom_kill 40\n");
    assert_true(limits_now().oom_kills == 12);
}

static void a_fractional_quota_counts_in_nested_groups_of_both_versions(void **state) {
    (void)state;
    clear_root();
    put("proc/self/cgroup", "0::/a/b/c\n");
    put("sys/fs/cgroup/a/b/c/cpu.max", "800000 100000\n");
    put("sys/fs/cgroup/a/b/cpu.max", "199500 50000\n");
    put("sys/fs/cgroup/a/cpu.max", "600000 100000\n");
    assert_int_equal(sw_quota_cpus(limits_now().cpus, 64), 3);
    clear_root();
    put("proc/self/cgroup", "4:cpu,cpuacct:/job/part\n");
    put("sys/fs/cgroup/cpu/job/part/cpu.cfs_quota_us", "-1\n");
    put("sys/fs/cgroup/cpu/job/part/cpu.cfs_period_us", "100000\n");
    put("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "50000\n");
    put("sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n");
    assert_int_equal(sw_quota_cpus(limits_now().cpus, 64), 1);
}

/* Inside a container the group's path may be the host's; its own limits lie at the mount. */
static void a_path_of_the_host_falls_back_to_the_mount(void **state) {
    (void)state;
    clear_root();
    put("proc/self/cgroup", "4:cpu:/docker/0123\n3:cpuacct:/docker/0123\n");
    put("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "50000\n");
    put("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
    assert_true(limits_now().cpus == 0.5);
}

static void a_quota_grants_whole_cores(void **state) {
    (void)state;
    assert_int_equal(sw_quota_cpus(0, 64), 64);
    assert_int_equal(sw_quota_cpus(2, 64), 2);
    assert_int_equal(sw_quota_cpus(3.99, 64), 3);
    assert_int_equal(sw_quota_cpus(0.5, 64), 1);
    assert_int_equal(sw_quota_cpus(100, 64), 64);
}

static void the_threads_are_the_smaller_of_mask_and_quota(void **state) {
    (void)state;
    const struct sw_topology quota = {.cpus = 8, .quota_cpus = 3},
                             mask = {.cpus = 2, .quota_cpus = 6};
    assert_int_equal(sw_topology_threads(&quota), 3);
    assert_int_equal(sw_topology_threads(&mask), 2);
}

static void the_machine_is_read_within_the_affinity_mask(void **state) {
    (void)state;
    struct sw_topology t;
    assert_int_equal(sw_topology_read(&t), 0);
    cpu_set_t mask;
    assert_int_equal(sched_getaffinity(0, sizeof(mask), &mask), 0);
    assert_int_equal(t.cpus, CPU_COUNT(&mask));
    assert_in_range(t.quota_cpus, 1, t.cpus);
    assert_true(t.numa_nodes >= 1 && t.memory_bytes > 1 << 20);
    assert_true(strlen(t.cpu_name) > 0);
    const pid_t child = fork();
    if (child == 0) { /* one unit, and not the first where there are two: numbering has gaps */
        int last = 0;
        for (int i = 0; i < CPU_SETSIZE; i++)
            if (CPU_ISSET(i, &mask)) last = i;
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(last, &one);
        if (sched_setaffinity(0, sizeof(one), &one)) _exit(0); /* forbidden here */
        const int ret = sw_topology_read(&t);
        _exit(ret == 0 && t.cpus == 1 && t.quota_cpus == 1 && sw_topology_threads(&t) == 1 &&
                      sw_topology_adam_threads(&t) == 1 && atoi(t.cpu_list) == last
                  ? 0
                  : 1);
    }
    int status;
    assert_true(waitpid(child, &status, 0) == child && status == 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_arena_is_mapped_at_its_exact_size),
        cmocka_unit_test(an_arena_of_no_bytes_is_fine),
        cmocka_unit_test(pieces_are_aligned_disjoint_and_fill_the_arena),
        cmocka_unit_test(memory_starts_as_zeros_or_in_test_builds_as_poison),
        cmocka_unit_test(more_memory_than_there_is_is_refused_with_the_size),
        cmocka_unit_test(without_cgroup_files_there_is_no_limit),
        cmocka_unit_test(a_devices_node_is_the_kernels),
        cmocka_unit_test(version_2_takes_the_tightest_limit_on_the_way_up),
        cmocka_unit_test(version_1_is_read_with_joined_and_single_controllers),
        cmocka_unit_test(a_limit_of_processes_counts_where_the_fewest_are_left),
        cmocka_unit_test(kills_for_memory_are_counted_by_the_nearest_group),
        cmocka_unit_test(a_fractional_quota_counts_in_nested_groups_of_both_versions),
        cmocka_unit_test(a_path_of_the_host_falls_back_to_the_mount),
        cmocka_unit_test(a_quota_grants_whole_cores),
        cmocka_unit_test(the_threads_are_the_smaller_of_mask_and_quota),
        cmocka_unit_test(the_machine_is_read_within_the_affinity_mask),
    };
    return cmocka_run_group_tests(tests, make_root, remove_root);
}
