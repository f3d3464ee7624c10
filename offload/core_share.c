/* offload/core_share.c - see the header. */
#include "offload/core_share.h"

#include <assert.h>
#include <errno.h>
#include <hwloc.h>
#include <stdlib.h>

#include "offload/topology_internal.h"

struct sw_core_share {
    hwloc_topology_t topo;
    uint32_t ranks;
    hwloc_cpuset_t sets[]; /* by rank */
};

/* Place `place` of `places` has core i of n with i * places / n == place, or core place * n /
 * places where there are fewer cores. */
static void share_out(struct sw_core_share *share, hwloc_const_cpuset_t from, uint32_t rank,
                      uint64_t place, uint64_t places) {
    const uint64_t n = (uint64_t)sw_topology_cores(share->topo, from);
    hwloc_obj_t core = NULL;
    for (uint64_t i = 0; i < n;) {
        core = hwloc_get_next_obj_by_type(share->topo, HWLOC_OBJ_CORE, core);
        if (!core) break;
        if (!core->cpuset || !hwloc_bitmap_intersects(core->cpuset, from)) continue;
        const int own = places <= n ? i * places / n == place : place * n / places == i;
        if (own) hwloc_bitmap_or(share->sets[rank], share->sets[rank], core->cpuset);
        i++;
    }
    hwloc_bitmap_and(share->sets[rank], share->sets[rank], from);
    /* A machine that names no cores. */
    if (hwloc_bitmap_iszero(share->sets[rank])) hwloc_bitmap_copy(share->sets[rank], from);
}

/* Each rank shares with those that are near the same node. */
static void share_out_all(struct sw_core_share *share, hwloc_const_cpuset_t mask, const int *near,
                          hwloc_cpuset_t from) {
    for (uint32_t r = 0; r < share->ranks; r++) {
        const int node = near ? near[r] : -1;
        uint64_t place = 0, places = 0;
        for (uint32_t o = 0; o < share->ranks; o++) {
            if (near && near[o] != node) continue;
            place += o < r;
            places++;
        }
        const hwloc_obj_t where =
            node < 0 ? NULL : hwloc_get_numanode_obj_by_os_index(share->topo, (unsigned)node);
        hwloc_bitmap_copy(from, mask);
        if (where && where->cpuset && hwloc_bitmap_intersects(where->cpuset, mask))
            hwloc_bitmap_and(from, mask, where->cpuset);
        share_out(share, from, r, place, places);
    }
}

int sw_core_share_open(struct sw_core_share **out, const struct sw_topology *topology,
                       uint32_t ranks, const int *near) {
    assert(out && topology && ranks >= 1);
    *out = NULL;
    if (ranks == 1 || topology->user_binds) return 0;
    struct sw_core_share *share = calloc(1, sizeof(*share) + ranks * sizeof(share->sets[0]));
    hwloc_cpuset_t mask = hwloc_bitmap_alloc(), from = hwloc_bitmap_alloc();
    int ret = share && mask && from ? 0 : -ENOMEM;
    if (ret == 0) {
        share->ranks = ranks;
        share->topo = sw_topology_load();
        for (uint32_t r = 0; r < ranks && ret == 0; r++)
            if (!(share->sets[r] = hwloc_bitmap_alloc())) ret = -ENOMEM;
    }
    const int known =
        ret == 0 && share->topo && hwloc_get_cpubind(share->topo, mask, HWLOC_CPUBIND_THREAD) == 0;
    if (known) {
        share_out_all(share, mask, near, from);
        *out = share;
    } else {
        sw_core_share_close(share);
    }
    hwloc_bitmap_free(mask);
    hwloc_bitmap_free(from);
    return ret;
}

void sw_core_share_close(struct sw_core_share *share) {
    if (!share) return;
    for (uint32_t r = 0; r < share->ranks; r++) hwloc_bitmap_free(share->sets[r]);
    if (share->topo) hwloc_topology_destroy(share->topo);
    free(share);
}

void sw_core_share_bind(const struct sw_core_share *share, uint32_t rank) {
    if (!share) return;
    assert(rank < share->ranks);
    hwloc_set_cpubind(share->topo, share->sets[rank], HWLOC_CPUBIND_THREAD);
}

int sw_core_share_node(const struct sw_core_share *share, uint32_t rank) {
    if (!share) return -1;
    for (hwloc_obj_t node = NULL;
         (node = hwloc_get_next_obj_by_type(share->topo, HWLOC_OBJ_NUMANODE, node)) != NULL;)
        if (node->cpuset && hwloc_bitmap_isincluded(share->sets[rank], node->cpuset))
            return (int)node->os_index;
    return -1;
}

void sw_core_share_list(const struct sw_core_share *share, uint32_t rank, char *out,
                        uint32_t out_size) {
    assert(out_size > 0);
    out[0] = 0;
    if (share) hwloc_bitmap_list_snprintf(out, out_size, share->sets[rank]);
}
