/* offload/rank_nodes.h - the NUMA node of each rank: where its host memory lies and Adam updates
 * it.
 *
 * A rank's chunks lie next to its device, so its copies cross no socket, and each node's cores run
 * an Adam of their own on what is near them, all nodes at the same time. */
#ifndef OFFLOAD_RANK_NODES_H
#define OFFLOAD_RANK_NODES_H
#include <stdint.h>

enum { SW_NODES_MAX = 16, SW_NODE_RANKS_MAX = 64 };

struct sw_rank_nodes {
    uint32_t count;                /* groups of ranks, each on a node of its own; at least 1 */
    int node[SW_NODES_MAX];        /* of a group, as the system counts; -1: all nodes in turn */
    uint8_t of[SW_NODE_RANKS_MAX]; /* of a rank: its group; groups begin in the order of ranks */
};

/* near: by rank, the node that its device and cores are next to, or -1. Ranks are grouped only
 * where they are on as many nodes as the process has: what lies on fewer would leave the memory of
 * the others idle. */
void sw_rank_nodes_group(struct sw_rank_nodes *nodes, const int *near, uint32_t ranks,
                         int numa_nodes);

#endif
