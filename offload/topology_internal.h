/* offload/topology_internal.h - the parts of topology.c that tests feed with made-up files. */
#ifndef OFFLOAD_TOPOLOGY_INTERNAL_H
#define OFFLOAD_TOPOLOGY_INTERNAL_H
#include <hwloc.h>
#include <stdint.h>

struct sw_cgroup_limits {
    double cpus;           /* quota / period; 0: no quota */
    uint64_t memory_bytes; /* UINT64_MAX: no limit */
    uint64_t memory_group; /* whose that is: its folder's inode, the same in every container */
    uint64_t threads_max;  /* pids.max of the group with the fewest left; UINT64_MAX: no limit */
    uint64_t threads_left; /* how many that group may still start */
    uint64_t oom_kills;    /* processes killed for memory, as the nearest group that counts them
                              says; UINT64_MAX: no group does */
};

/* Reads ROOT/proc/self/cgroup and the controller files under ROOT/sys/fs/cgroup, version 1 and 2:
 * the tightest limit of the process's group and its ancestors. Files that are not there set no
 * limit. */
void sw_cgroup_read(const char *root, struct sw_cgroup_limits *limits);

/* The NUMA node that ROOT/sys names for a PCI address, or -1. */
int sw_bus_node(const char *root, const char *address);

/* Whole processing units that a quota grants among `cpus`: its floor, at least 1, at most cpus. */
int sw_quota_cpus(double quota, int cpus);

/* This machine as hwloc sees it, without binding a thread to find out; NULL when it cannot be read.
 * The caller destroys it. */
hwloc_topology_t sw_topology_load(void);

/* Cores with a processing unit in the set: each unit counts where the machine names no cores. */
int sw_topology_cores(hwloc_topology_t topo, hwloc_const_cpuset_t set);

/* Nodes with a processing unit in the set; a node without memory or without cores is no surprise.
 */
int sw_topology_nodes(hwloc_topology_t topo, hwloc_const_cpuset_t set);

#endif
