/* offload/team_internal.h - the parts of team.c that tests feed with made-up machines. */
#ifndef OFFLOAD_TEAM_INTERNAL_H
#define OFFLOAD_TEAM_INTERNAL_H
#include <hwloc.h>
#include "offload/team.h"

/* The NUMA node (its number in the operating system) that holds all of these bytes; -1: several, or
 * not known. */
typedef int (*sw_team_locate)(hwloc_topology_t topo, const void *bytes, uint64_t count);

/* Fills `set` with the units for work on memory of `node`: the node's within the mask, or the whole
 * mask for -1, an unknown node, or a node without any in the mask. Returns the size of a team of at
 * most `threads` there. *bound: whether it is a node's. */
int sw_team_choose(hwloc_topology_t topo, hwloc_const_cpuset_t mask, int node, int threads,
                   int per_core, hwloc_cpuset_t set, int *bound);

/* Binds the calling thread and `threads` - 1 of its team to the set. 0 or an errno. */
int sw_team_bind(hwloc_topology_t topo, hwloc_const_cpuset_t set, int threads);

/* sw_team_open on a loaded topology, which the team then owns. */
int sw_team_open_on(struct sw_team **team, hwloc_topology_t topo, sw_team_locate locate,
                    int threads, int per_core);

#endif
