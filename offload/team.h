/* offload/team.h - where Adam's thread team runs: on the NUMA node that holds the chunk at hand.
 *
 * A team belongs to the one thread that opens its parallel regions. Its threads are bound (hwloc)
 * to the processing units that the node has in the process's affinity mask, never to others. None
 * is bound when the mask lies in one node, when the chunk's pages lie on several nodes or on one
 * without cores in the mask (then the team runs wherever the mask lets it), and when the user's
 * environment lets OpenMP place its threads. */
#ifndef OFFLOAD_TEAM_H
#define OFFLOAD_TEAM_H
#include <stdint.h>
#include "offload/topology.h"

struct sw_team;

/* A team of at most `threads`; on a node at most what the node has in the mask: processing units
 * where the user named the number, else (per_core) cores. 0, or -ENOMEM, reported. Called with the
 * process's own mask, before any thread is bound. */
int sw_team_open(struct sw_team **team, const struct sw_topology *topology, int threads,
                 int per_core);
void sw_team_close(struct sw_team *team); /* NULL is fine */

/* Binds the calling thread and its team for work on these bytes, unless they are bound so already.
 * Returns the threads to use, from 1 to the team's. */
int sw_team_place(struct sw_team *team, const void *bytes, uint64_t count);

/* Starts the calling thread's team, so that its first work starts no thread. */
void sw_team_start(const struct sw_team *team);
/* The same for one of so many threads that nobody places. */
void sw_team_form(int threads);

/* Logs where the team will run for work on these bytes. Before the first placing, by any thread. */
void sw_team_announce(struct sw_team *team, const void *bytes, uint64_t count);

#endif
