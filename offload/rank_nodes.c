/* offload/rank_nodes.c - see the header. */
#include "offload/rank_nodes.h"

#include <assert.h>
#include <string.h>

void sw_rank_nodes_group(struct sw_rank_nodes *nodes, const int *near, uint32_t ranks,
                         int numa_nodes) {
    assert(ranks >= 1 && ranks <= SW_NODE_RANKS_MAX);
    struct sw_rank_nodes found = {0};
    int known = numa_nodes > 1 && numa_nodes <= SW_NODES_MAX;
    for (uint32_t r = 0; r < ranks && known; r++) {
        uint32_t g = 0;
        while (g < found.count && found.node[g] != near[r]) g++;
        known = near[r] >= 0 && g < (uint32_t)numa_nodes;
        if (!known) break;
        found.of[r] = (uint8_t)g;
        found.node[g] = near[r];
        if (g == found.count) found.count++;
    }
    *nodes = found;
    if (known && found.count == (uint32_t)numa_nodes) return;
    memset(nodes, 0, sizeof(*nodes));
    nodes->count = 1;
    nodes->node[0] = -1;
}
