/* offload/topology.h - the machine as this process may use it (hwloc): cores, nodes, quota. */
#ifndef OFFLOAD_TOPOLOGY_H
#define OFFLOAD_TOPOLOGY_H
#include <stdint.h>

struct sw_topology {
    int cpus;       /* processing units in the affinity mask */
    int quota_cpus; /* floor of the cgroup's CPU quota, at least 1; cpus when there is none */
    int numa_nodes;
    uint64_t memory_bytes; /* what may be used: the machine's, or the cgroup's limit if smaller */
    char cpu_name[96];
};

/* 0 or -errno, reported. Read once; cheap. */
int sw_topology_read(struct sw_topology *topology);

/* min(mask, quota): the default size of a thread team. */
int sw_topology_threads(const struct sw_topology *topology);

#endif
