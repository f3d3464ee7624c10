/* offload/core_share.h - which cores each rank computes on: the process's own, shared out.
 *
 * Ranks whose teams run on the same cores wait for each other's turn. Every rank gets cores of its
 * own, neighbours together, all from the affinity mask of the process; where there are more ranks
 * than cores several ranks have the same one. A mask of the user's is never widened, and nothing is
 * bound where the user's environment lets OpenMP place its threads. */
#ifndef OFFLOAD_CORE_SHARE_H
#define OFFLOAD_CORE_SHARE_H
#include <stdint.h>
#include "offload/topology.h"

struct sw_core_share;

/* For `ranks` ranks; one rank has all cores and is not bound. near: by rank, the NUMA node (as the
 * system counts) that its device is next to, whose cores it then shares with the others there; -1:
 * any; NULL: any, for all. *out is NULL when nothing is to be bound. 0 or -ENOMEM. With the
 * process's own mask, before any thread is bound. */
int sw_core_share_open(struct sw_core_share **out, const struct sw_topology *topology,
                       uint32_t ranks, const int *near);
void sw_core_share_close(struct sw_core_share *share); /* NULL is fine */

/* Binds the calling thread, and with it the threads that it starts from now on. NULL: nothing is
 * done. A thread that cannot be bound runs where it may. */
void sw_core_share_bind(const struct sw_core_share *share, uint32_t rank);

/* The NUMA node that a rank's processing units are all on, as the system counts, or -1. */
int sw_core_share_node(const struct sw_core_share *share, uint32_t rank);

/* A rank's processing units as a list ("0-3,8"), or "" when nothing is bound. */
void sw_core_share_list(const struct sw_core_share *share, uint32_t rank, char *out,
                        uint32_t out_size);

#endif
