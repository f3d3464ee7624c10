/* engine/neighbours.c - see the header. */
#include "engine/neighbours.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>
#include "base/log.h"
#include "base/size.h"
#include "offload/core_share.h"

/* Containers of a machine have names of their own, and its cores in common. */
uint64_t sw_neighbours_machine(void) {
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
    int ret = sw_core_share_open(&share, topology, parts, NULL);
    if (ret < 0 || !share) return ret;
    memcpy(whole, topology->cpu_list, sizeof(whole));
    sw_core_share_bind(share, part);
    sw_core_share_list(share, part, list, sizeof(list));
    sw_core_share_close(share);
    sw_info("process %u: CPUs %s of %s, which %u processes part", process, list, whole, parts);
    return sw_topology_read(topology);
}

uint64_t sw_neighbours_memory(const struct sw_neighbour *all, uint32_t count, uint32_t mine,
                              const struct sw_topology *topology) {
    uint32_t here = 0, in_group = 0;
    for (uint32_t p = 0; p < count; p++) {
        if (all[p].machine != all[mine].machine) continue;
        here++;
        in_group += all[p].memory_group == all[mine].memory_group;
    }
    const uint64_t share_bytes = topology->machine_bytes / here;
    const uint64_t group_bytes = topology->memory_bytes / in_group;
    return group_bytes < share_bytes ? group_bytes : share_bytes;
}

static void part_memory(const struct sw_neighbour *all, uint32_t count, uint32_t mine,
                        struct sw_topology *topology) {
    char part[32], whole[32];
    const uint64_t whole_bytes = topology->memory_bytes;
    topology->memory_bytes = sw_neighbours_memory(all, count, mine, topology);
    if (topology->memory_bytes == whole_bytes) return;
    sw_info("process %u: %s of memory, of %s that the processes here part", mine,
            sw_size_print(topology->memory_bytes, part, sizeof(part)),
            sw_size_print(whole_bytes, whole, sizeof(whole)));
}

int sw_neighbours_part(const struct sw_comm_handle *channel, struct sw_topology *topology) {
    struct sw_neighbour all[SW_RANKS_MAX];
    const struct sw_neighbour mine = {sw_neighbours_machine(),
                                      XXH3_64bits(topology->cpu_list, strlen(topology->cpu_list)),
                                      topology->memory_group};
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
    if (ret == 0) part_memory(all, channel->size, channel->rank, topology);
    if (ret == 0 && topology->quota > 0 && here > 1) {
        const int quota = topology->quota_cpus / (int)here;
        topology->quota_cpus = quota > 1 ? quota : 1;
    }
    return ret;
}
