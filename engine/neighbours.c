/* engine/neighbours.c - see the header. */
#include "engine/neighbours.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>
#include "base/log.h"
#include "offload/core_share.h"

struct place {
    uint64_t machine, mask;
};

/* Containers of a machine have names of their own, and its cores in common. */
static uint64_t hash_machine(void) {
    char text[256] = "";
    const int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    const ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);
    if (fd >= 0) close(fd);
    if (got <= 0) gethostname(text, sizeof(text) - 1);
    return XXH3_64bits(text, strlen(text));
}

static int bind_part(struct sw_topology *topology, uint32_t process, uint32_t part,
                     uint32_t parts) {
    struct sw_core_share *share;
    char list[128], whole[sizeof(topology->cpu_list)];
    int ret = sw_core_share_open(&share, topology, parts);
    if (ret < 0 || !share) return ret;
    memcpy(whole, topology->cpu_list, sizeof(whole));
    sw_core_share_bind(share, part);
    sw_core_share_list(share, part, list, sizeof(list));
    sw_core_share_close(share);
    sw_info("process %u: CPUs %s of %s, which %u processes part", process, list, whole, parts);
    return sw_topology_read(topology);
}

int sw_neighbours_part(const struct sw_comm_handle *channel, struct sw_topology *topology) {
    struct place all[SW_RANKS_MAX];
    const struct place mine = {hash_machine(),
                               XXH3_64bits(topology->cpu_list, strlen(topology->cpu_list))};
    int ret = channel->ops->exchange(channel->comm, all, &mine, sizeof(mine));
    if (ret < 0) return ret;
    uint32_t here = 0, part = 0, parts = 0;
    for (uint32_t p = 0; p < channel->size; p++) {
        if (all[p].machine != mine.machine) continue;
        here++;
        if (all[p].mask != mine.mask) continue;
        part += p < channel->rank;
        parts++;
    }
    if (parts > 1) ret = bind_part(topology, channel->rank, part, parts);
    if (ret == 0 && topology->quota > 0 && here > 1) {
        const int quota = topology->quota_cpus / (int)here;
        topology->quota_cpus = quota > 1 ? quota : 1;
    }
    return ret;
}
