/* tests/test_networks.c - interfaces at which processes find each other, with threads for processes
 * and addresses of the loopback network for interfaces. */
#include "engine/networks.h"

#include <arpa/inet.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

enum { PROCESSES = 3, NETWORKS = 4 };
/* No connection goes to a multicast address. */
#define NOWHERE "224.0.0.1"

struct process {
    struct sw_comm_handle channel;
    struct sw_network networks[NETWORKS];
    char names[SW_NETWORKS_NAMES_BYTES];
    pthread_t thread;
    int ret;
};
static struct process processes[PROCESSES];

static void *try_one(void *arg) {
    struct process *p = arg;
    p->ret = sw_networks_try(&p->channel, p->networks, NETWORKS, p->names);
    return NULL;
}

static void try_all(void) {
    for (int i = 0; i < PROCESSES; i++)
        pthread_create(&processes[i].thread, NULL, try_one, &processes[i]);
    for (int i = 0; i < PROCESSES; i++) {
        pthread_join(processes[i].thread, NULL);
        assert_int_equal(processes[i].ret, 0);
    }
}

static void set(int process, int network, const char *name, const char *address) {
    struct sw_network *n = &processes[process].networks[network];
    memset(n, 0, sizeof(*n));
    strcpy(n->name, name);
    assert_int_equal(inet_pton(AF_INET, address, &n->address), 1);
}

static int open_processes(void **state) {
    (void)state;
    struct sw_comm_handle handles[PROCESSES];
    assert_int_equal(sw_comm_open_host(handles, PROCESSES, 30), 0);
    for (int p = 0; p < PROCESSES; p++) {
        processes[p].channel = handles[p];
        set(p, 0, "docker0", "127.0.0.1");
        set(p, 1, "eth0", "127.0.0.2");
        set(p, 2, "ib0", "127.0.0.3");
        set(p, 3, "eth1", "127.0.0.4");
    }
    return 0;
}

static int close_processes(void **state) {
    (void)state;
    for (int p = 0; p < PROCESSES; p++) processes[p].channel.ops->close(processes[p].channel.comm);
    return 0;
}

static void expect(const char *first, const char *second, const char *third) {
    const char *const want[] = {first, second, third};
    try_all();
    for (int p = 0; p < PROCESSES; p++) assert_string_equal(processes[p].names, want[p]);
}

static void the_first_kind_is_taken_as_nccl_takes_it(void **state) {
    (void)state;
    expect("=ib0", "=ib0", "=ib0");
}

static void another_kind_follows_where_none_leads_anywhere(void **state) {
    (void)state;
    set(1, 2, "ib0", NOWHERE);
    expect("=ib0", "=eth0,eth1", "=ib0");
    set(1, 1, "eth0", NOWHERE);
    expect("=ib0", "=eth1", "=ib0");
    set(1, 3, "eth1", NOWHERE);
    expect("=ib0", "=docker0", "=ib0");
    set(1, 0, "docker0", NOWHERE);
    expect("=ib0", "", "=ib0");
}

/* What one interface's name tells does not depend on its place in the list. */
static void kinds_are_told_by_names(void **state) {
    (void)state;
    for (int p = 0; p < PROCESSES; p++) {
        set(p, 0, "virbr0", "127.0.0.1");
        set(p, 1, "lo", "127.0.0.2");
        set(p, 2, "lan", "127.0.0.3");
        set(p, 3, "docker1", "127.0.0.4");
    }
    expect("=lan", "=lan", "=lan");
    for (int p = 0; p < PROCESSES; p++) set(p, 2, "lan", NOWHERE);
    expect("=docker1", "=docker1", "=docker1");
    for (int p = 0; p < PROCESSES; p++) set(p, 3, "docker1", NOWHERE);
    expect("=lo", "=lo", "=lo");
    for (int p = 0; p < PROCESSES; p++) set(p, 1, "lo", NOWHERE);
    expect("=virbr0", "=virbr0", "=virbr0");
}

static void this_machine_has_some(void **state) {
    (void)state;
    struct sw_network list[SW_NETWORKS_MAX];
    const uint32_t count = sw_networks_list(list);
    assert_in_range(count, 1, SW_NETWORKS_MAX);
    for (uint32_t i = 0; i < count; i++) {
        assert_int_not_equal(list[i].name[0], 0);
        for (uint32_t k = 0; k < i; k++) assert_string_not_equal(list[i].name, list[k].name);
    }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, open_processes, close_processes)
int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(the_first_kind_is_taken_as_nccl_takes_it),
        TEST(another_kind_follows_where_none_leads_anywhere),
        TEST(kinds_are_told_by_names),
        cmocka_unit_test(this_machine_has_some),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
