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

/* Core i of n goes to rank i * ranks / n, or rank r gets core r * n / ranks. */
static void share_out(struct sw_core_share *share, hwloc_const_cpuset_t mask) {
    const int cores = sw_topology_cores(share->topo, mask);
    hwloc_obj_t core = NULL;
    for (int i = 0; i < cores;) {
        core = hwloc_get_next_obj_by_type(share->topo, HWLOC_OBJ_CORE, core);
        if (!core) break;
        if (!core->cpuset || !hwloc_bitmap_intersects(core->cpuset, mask)) continue;
        for (uint32_t r = 0; r < share->ranks; r++) {
            const uint64_t n = (uint64_t)cores, ranks = share->ranks;
            const int own =
                ranks <= n ? (uint64_t)i * ranks / n == r : r * n / ranks == (uint64_t)i;
            if (own) hwloc_bitmap_or(share->sets[r], share->sets[r], core->cpuset);
        }
        i++;
    }
    for (uint32_t r = 0; r < share->ranks; r++) {
        hwloc_bitmap_and(share->sets[r], share->sets[r], mask);
        /* A machine that names no cores. */
        if (hwloc_bitmap_iszero(share->sets[r])) hwloc_bitmap_copy(share->sets[r], mask);
    }
}

int sw_core_share_open(struct sw_core_share **out, const struct sw_topology *topology,
                       uint32_t ranks) {
    assert(out && topology && ranks >= 1);
    *out = NULL;
    if (ranks == 1 || topology->user_binds) return 0;
    struct sw_core_share *share = calloc(1, sizeof(*share) + ranks * sizeof(share->sets[0]));
    hwloc_cpuset_t mask = hwloc_bitmap_alloc();
    int ret = share && mask ? 0 : -ENOMEM;
    if (ret == 0) {
        share->ranks = ranks;
        share->topo = sw_topology_load();
        for (uint32_t r = 0; r < ranks && ret == 0; r++)
            if (!(share->sets[r] = hwloc_bitmap_alloc())) ret = -ENOMEM;
    }
    const int known =
        ret == 0 && share->topo && hwloc_get_cpubind(share->topo, mask, HWLOC_CPUBIND_THREAD) == 0;
    if (known) {
        share_out(share, mask);
        *out = share;
    } else {
        sw_core_share_close(share);
    }
    hwloc_bitmap_free(mask);
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

void sw_core_share_list(const struct sw_core_share *share, uint32_t rank, char *out,
                        uint32_t out_size) {
    assert(out_size > 0);
    out[0] = 0;
    if (share) hwloc_bitmap_list_snprintf(out, out_size, share->sets[rank]);
}
