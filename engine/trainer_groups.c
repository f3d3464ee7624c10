/* engine/trainer_groups.c - which ranks work together, and over what: the host's ranks by memory or
 * messages, GPUs by NCCL, of one process or of several. Processes of a machine part its GPUs. */
#include "engine/trainer_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "base/log.h"
#include "engine/collective_try.h"
#include "engine/neighbours.h"
#include "engine/networks.h"

/* ---- GPUs of several processes ---- */

/* Processes that see as many GPUs as they have ranks drive all of them; else a machine's GPUs are
 * for its processes in their order. */
int sw_trainer_choose_gpus(struct sw_trainer *t, uint32_t count) {
    const uint32_t ranks = t->options.ranks, mine = sw_world_index(t->world);
    uint64_t machines[SW_RANKS_MAX];
    const uint64_t machine = sw_neighbours_machine();
    const int ret = sw_trainer_share(t, CHANNEL_MAIN, machines, &machine, sizeof(machine));
    if (ret < 0) return ret;
    uint32_t here = 0, before = 0;
    for (uint32_t p = 0; p < sw_world_size(t->world); p++) {
        here += machines[p] == machine;
        before += p < mine && machines[p] == machine;
        uint32_t same = 0;
        while (machines[same] != machines[p]) same++;
        t->machines += same == p;
    }
    t->first_gpu = count == ranks ? 0 : before * ranks;
    if (ranks <= count && t->first_gpu + ranks <= count) return 0;
    sw_error("--ranks %u: process %u sees %u GPU%s, and of %u processes on this machine each has a "
             "GPU for every rank: let each see its own (srun --gpus-per-task, "
             "CUDA_VISIBLE_DEVICES), or start fewer",
             ranks, mine, count, count == 1 ? "" : "s", here);
    return -EINVAL;
}

/* What is a GPU to one process is one to all. */
int sw_trainer_agree_on_kind(struct sw_trainer *t) {
    int all[SW_RANKS_MAX] = {0}, mine = (int)t->options.device;
    const int ret = sw_trainer_share(t, CHANNEL_MAIN, all, &mine, sizeof(mine));
    if (ret < 0) return ret;
    uint32_t p = 0;
    while (p < sw_world_size(t->world) && all[p] == all[0]) p++;
    if (p == sw_world_size(t->world)) return 0;
    if (t->first_rank == 0)
        sw_error("process %u trains on %s and process 0 on %s: name the one that all of them have "
                 "(--device host, --device cuda)",
                 p, all[p] == SW_DEVICE_HOST ? "the host" : "GPUs",
                 all[0] == SW_DEVICE_HOST ? "the host" : "GPUs");
    return -EINVAL;
}

/* A GPU has one rank: NCCL, too, refuses what follows from two. */
int sw_trainer_compare_gpus(struct sw_trainer *t) {
    struct gpu {
        uint64_t machine;
        char address[SW_BUS_ADDRESS_BYTES];
    } mine[SW_RANKS_MAX] = {{0}}, *all;
    if (!t->world || t->options.device == SW_DEVICE_HOST) return 0;
    for (uint32_t i = 0; i < t->rank_count; i++) {
        const struct sw_device_handle *d = &t->ranks[i].device;
        mine[i].machine = sw_neighbours_machine();
        d->ops->bus_address(d->device, mine[i].address);
    }
    all = calloc(t->world_ranks, sizeof(*all));
    if (!all) return -ENOMEM;
    int ret = sw_trainer_share(t, CHANNEL_MAIN, all, mine, t->rank_count * sizeof(*all));
    for (uint32_t a = 0; a < t->world_ranks && ret == 0; a++)
        for (uint32_t b = 0; b < a && ret == 0; b++)
            if (all[a].address[0] && memcmp(&all[a], &all[b], sizeof(*all)) == 0) {
                if (t->first_rank == 0)
                    sw_error("ranks %u and %u of processes %u and %u would both be GPU %s: let "
                             "each process see GPUs of its own (srun --gpus-per-task, "
                             "CUDA_VISIBLE_DEVICES)",
                             b, a, b / t->rank_count, a / t->rank_count, all[a].address);
                ret = -EINVAL;
            }
    free(all);
    return ret;
}

/* ---- groups of GPUs ---- */

/* From a thread of the group's. */
static void gpus_failed(void *ctx, int error) {
    struct sw_trainer *t = ctx;
    pthread_mutex_lock(&t->executor_lock);
    if (t->executor && !t->executor_closes) sw_executor_abort(t->executor, error);
    pthread_mutex_unlock(&t->executor_lock);
}

/* A name of each process's `count` groups that are opened next, made by the first one. */
static int share_names(struct sw_trainer *t, char names[][SW_DEVICE_GROUP_NAME_BYTES],
                       uint32_t count) {
    const struct sw_device_group_ops *group = t->ranks[0].device.ops->group;
    int ret = 0;
    for (uint32_t i = 0; i < count && t->first_rank == 0 && ret == 0; i++)
        ret = group->make_name(names[i]);
    if (ret < 0) return ret;
    return sw_comm_broadcast(&t->channels[CHANNEL_MAIN], names,
                             (uint64_t)count * SW_DEVICE_GROUP_NAME_BYTES, 0);
}

/* The ranks that share out every unit. */
static int open_shards(struct sw_trainer *t, struct sw_comm_devices *of) {
    struct sw_comm_handle handles[SW_RANKS_MAX], host[SW_RANKS_MAX];
    char name[1][SW_DEVICE_GROUP_NAME_BYTES];
    int ret;
    if (t->shards == 1) return 0;
    of->count = t->rank_count;
    if (t->shards == t->rank_count) {
        ret = sw_comm_open_local_devices(handles, of);
    } else {
        ret = share_names(t, name, 1);
        if (ret == 0) ret = sw_world_ranks(t->world, host, t->rank_count, of->timeout_s);
        of->host = host;
        of->name = name[0];
        if (ret == 0) ret = sw_comm_open_devices(handles, of);
    }
    for (uint32_t i = 0; i < t->rank_count && ret == 0; i++) t->ranks[i].comm = handles[i];
    return ret;
}

/* And those with the same shard, in other processes. */
static int open_replicas(struct sw_trainer *t, struct sw_comm_devices *of) {
    const struct sw_device_handle *devices = of->devices;
    struct sw_comm_handle host;
    char names[SW_RANKS_MAX][SW_DEVICE_GROUP_NAME_BYTES];
    if (t->replicas == 1) return 0;
    int ret = share_names(t, names, t->rank_count);
    of->host = &host;
    of->count = 1;
    for (uint32_t i = 0; i < t->rank_count && ret == 0; i++) {
        of->devices = &devices[i];
        of->name = names[i];
        ret = sw_world_ranks(t->world, &host, 1, of->timeout_s);
        if (ret == 0) ret = sw_comm_open_devices(&t->ranks[i].across, of);
    }
    return ret;
}

/* One that NCCL does not trust is a way that none of its processes takes. */
static int agree_on_detour(struct sw_trainer *t) {
    int all[SW_RANKS_MAX], any = 0;
    const char *text = getenv("NCCL_P2P_DISABLE");
    const int mine = text && strtol(text, NULL, 10) != 0;
    int ret = sw_trainer_share(t, CHANNEL_MAIN, all, &mine, sizeof(mine));
    if (ret < 0) return ret;
    for (uint32_t p = 0; p < sw_world_size(t->world); p++) any |= all[p];
    return any && !mine && setenv("NCCL_P2P_DISABLE", "1", 1) < 0 ? -errno : 0;
}

static int open_gpus(struct sw_trainer *t) {
    struct sw_device_handle devices[SW_RANKS_MAX];
    struct sw_comm_devices of = {.devices = devices,
                                 .carried = t->options.reduce_dtype,
                                 .timeout_s = t->options.rank_timeout_s,
                                 .failed = gpus_failed,
                                 .ctx = t};
    sw_trainer_list_devices(t, devices);
    if (!devices[0].ops->group) {
        sw_error("--ranks %u: the CUDA plugin was built without NCCL, which GPUs need to train "
                 "together; install it and build again",
                 t->options.ranks);
        return -ENOTSUP;
    }
    int ret = agree_on_detour(t);
    if (ret == 0 && t->world) ret = sw_networks_choose(&t->channels[CHANNEL_MAIN]);
    if (ret == 0) ret = open_shards(t, &of);
    return ret < 0 ? ret : open_replicas(t, &of);
}

/* Of what one call of a step moves, the most. */
static uint64_t largest_call(const struct sw_trainer *t) {
    uint64_t most = 0;
    for (uint32_t u = 0; u < t->model.unit_count; u++) {
        const uint64_t weights = t->shard_elements[u] * sw_dtype_bytes(t->options.dtype);
        const uint64_t sums = t->trained_elements[u] * sizeof(float);
        if (weights > most) most = weights;
        if (sums > most) most = sums;
    }
    return most * t->shards;
}

/* across: what is summed over replicas is a rank's shard. */
static int try_group(struct sw_trainer *t, int across) {
    struct sw_comm_handle handles[SW_RANKS_MAX];
    struct sw_device_handle devices[SW_RANKS_MAX];
    struct sw_stream *streams[SW_RANKS_MAX];
    sw_trainer_list_devices(t, devices);
    for (uint32_t i = 0; i < t->rank_count; i++) {
        handles[i] = across ? t->ranks[i].across : t->ranks[i].comm;
        streams[i] = t->ranks[i].lanes[SW_LANE_COMM];
    }
    return sw_try_collectives(handles, devices, streams, t->rank_count, t->options.reduce_dtype,
                              across ? largest_call(t) / t->shards : largest_call(t));
}

int sw_trainer_open_gpu_group(struct sw_trainer *t) {
    if (t->options.device == SW_DEVICE_HOST || t->world_ranks == 1) return 0;
    int ret = open_gpus(t);
    if (ret == 0 && t->shards > 1) ret = try_group(t, 0);
    return ret < 0 || t->replicas == 1 ? ret : try_group(t, 1);
}

int sw_trainer_open_group(struct sw_trainer *t) {
    struct sw_comm_handle handles[SW_RANKS_MAX];
    const double timeout_s = t->options.rank_timeout_s;
    int ret = 0;
    if (t->options.device != SW_DEVICE_HOST) /* theirs is there already */
        return sw_world_warm_up(t->world, timeout_s);
    if (t->shards > 1) {
        ret = t->shards > t->rank_count
                  ? sw_world_ranks(t->world, handles, t->rank_count, timeout_s)
                  : sw_comm_open_host(handles, t->rank_count, timeout_s);
        for (uint32_t i = 0; i < t->rank_count && ret == 0; i++) t->ranks[i].comm = handles[i];
    }
    for (uint32_t i = 0; i < t->rank_count && t->replicas > 1 && ret == 0; i++)
        ret = sw_world_ranks(t->world, &t->ranks[i].across, 1, timeout_s);
    return ret < 0 ? ret : sw_world_warm_up(t->world, timeout_s);
}

/* After a failure some other process may not come to the end of a group of GPUs any more. */
static void close_comm(const struct sw_trainer *t, const struct sw_comm_handle *c) {
    if (!c->comm) return;
    if (t->failed && t->world && t->options.device != SW_DEVICE_HOST)
        c->ops->abort(c->comm, -ECANCELED);
    c->ops->close(c->comm);
}

void sw_trainer_close_groups(const struct sw_rank *r) {
    close_comm(r->t, &r->across);
    close_comm(r->t, &r->comm);
}
