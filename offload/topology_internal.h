/* offload/topology_internal.h - the parts of topology.c that tests feed with made-up files. */
#ifndef OFFLOAD_TOPOLOGY_INTERNAL_H
#define OFFLOAD_TOPOLOGY_INTERNAL_H
#include <stdint.h>

struct sw_cgroup_limits {
    double cpus;           /* quota / period; 0: no quota */
    uint64_t memory_bytes; /* UINT64_MAX: no limit */
};

/* Reads ROOT/proc/self/cgroup and the controller files under ROOT/sys/fs/cgroup, version 1 and 2:
 * the tightest limit of the process's group and its ancestors. Files that are not there set no
 * limit. */
void sw_cgroup_read(const char *root, struct sw_cgroup_limits *limits);

/* Whole processing units that a quota grants among `cpus`: its floor, at least 1, at most cpus. */
int sw_quota_cpus(double quota, int cpus);

#endif
