/* engine/neighbours.h - the processes of a run that are on one machine, and how they part it.
 *
 * A launcher may give several processes the same affinity mask: all cores, or those of a socket.
 * Each would compute on all of them and wait for the others' turns. So they part the mask, cores
 * that are neighbours together, as ranks of one process do (offload/core_share.h). Masks that
 * differ are the launcher's choice and stay, and so does everything where the user's environment
 * lets OpenMP place its threads. Memory is parted equally: the machine's among all that are on it,
 * a control group's limit among those in the group. */
#ifndef ENGINE_NEIGHBOURS_H
#define ENGINE_NEIGHBOURS_H
#include "engine/collective.h"
#include "offload/topology.h"

/* Of the machine: the same for all processes on it. */
uint64_t sw_neighbours_machine(void);

/* What a process tells the others of itself. */
struct sw_neighbour {
    uint64_t machine, mask, memory_group;
};

/* How much memory each may use that is on a machine with this one, of what is in the topology. */
uint64_t sw_neighbours_memory(const struct sw_neighbour *all, uint32_t count, uint32_t mine,
                              const struct sw_topology *topology);

/* Among the processes of this channel; binds the calling thread, and with it the threads that it
 * starts from now on, to its part, says so, and reads the topology anew; its memory is then this
 * process's part. A CPU quota is taken for that of all processes on the machine. Control call; 0 or
 * -errno, reported. */
int sw_neighbours_part(const struct sw_comm_handle *channel, struct sw_topology *topology);

#endif
