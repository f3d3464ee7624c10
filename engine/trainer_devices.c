/* engine/trainer_devices.c - the devices of a run, made ready in an order, each step on all ranks
 * before the next: contexts, and the ways between them; kernels and libraries; streams, and one
 * product of each shape; the group, and its first calls. What all this takes of a device's memory
 * is only known then, and only then the rest is measured and shared out (trainer_memory.c). */
#include "engine/trainer_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "base/log.h"
#include "engine/collective_try.h"
#include "engine/llama_warm_up.h"
#include "engine/neighbours.h"
#include "engine/teams.h"
#include "offload/profile.h"

/* A GPU where there is one that can be used, unless the user has chosen. */
static int choose_device(struct sw_trainer *t) {
    struct sw_train_options *o = &t->options;
    sw_train_settle_device(o, 1);
    const int ret = sw_trainer_agree_on_kind(t);
    if (ret < 0 || o->device == SW_DEVICE_HOST) return ret;
    const int count = sw_device_cuda_count();
    if (count < 0) return count;
    if (t->world) return sw_trainer_choose_gpus(t, (uint32_t)count);
    if (o->ranks > (uint32_t)count) {
        sw_error("--ranks %u: there %s %d GPU%s, one for each rank", o->ranks,
                 count == 1 ? "is" : "are", count, count == 1 ? "" : "s");
        return -EINVAL;
    }
    return 0;
}

/* ---- the steps, each for one rank ---- */

/* As the user's profile has it of such a device. */
static void cut_copies(const struct sw_rank *r) {
    const struct sw_device_ops *ops = r->device.ops;
    uint64_t up, down;
    char size[2][32];
    if (!ops->cut_copies || !sw_profile_copies(ops->numerics(r->device.device), &up, &down)) return;
    ops->cut_copies(r->device.device, up, down);
    if (r->index == 0 && (up || down))
        sw_info("copies in pieces of %s up and %s down (0: whole), from the machine profile",
                sw_size_print(up, size[0], sizeof(size[0])),
                sw_size_print(down, size[1], sizeof(size[1])));
}

static int open_context(struct sw_rank *r) {
    const struct sw_trainer *t = r->t;
    const struct sw_host_device_options host = {
        .threads = t->options.device_threads, .adam = sw_trainer_host_adam, .adam_ctx = r->t};
    const struct sw_cuda_device_options cuda = {.index = (int)(t->first_gpu + r->index),
                                                .loads_later = 1};
    const int ret = t->options.device == SW_DEVICE_HOST ? sw_device_host_open(&r->device, &host)
                                                        : sw_device_cuda_open(&r->device, &cuda);
    if (ret < 0) return ret;
    cut_copies(r);
    return r->device.ops->stream_create(r->device.device, &r->stream);
}

static int load(struct sw_rank *r) {
    return r->device.ops->load ? r->device.ops->load(r->device.device) : 0;
}

static int open_streams(struct sw_rank *r) {
    int ret = 0;
    for (int lane = 0; lane < SW_DEVICE_LANES && ret == 0; lane++)
        ret = r->device.ops->stream_create(r->device.device, &r->lanes[lane]);
    return ret;
}

/* The host device's products are made ready by the thread that makes them (trainer_enter.c). */
static int make_products(struct sw_rank *r) {
    const struct sw_train_options *o = &r->t->options;
    struct sw_stream *stream = r->lanes[SW_LANE_COMPUTE];
    if (!r->device.ops->load) return 0;
    const int ret = r->device.ops->prepare(stream, 1);
    if (ret < 0) return ret;
    return sw_llama_warm_up(&r->t->model, &r->device, o->dtype, o->micro_batch, o->seq_len,
                            o->accumulate > 1, stream);
}

static int on_all_ranks(struct sw_trainer *t, int (*step)(struct sw_rank *)) {
    int ret = 0;
    for (uint32_t i = 0; i < t->rank_count && ret == 0; i++) ret = step(&t->ranks[i]);
    return ret;
}

/* ---- between ranks ---- */

void sw_trainer_list_devices(const struct sw_trainer *t, struct sw_device_handle *devices) {
    for (uint32_t i = 0; i < t->rank_count; i++) devices[i] = t->ranks[i].device;
}

static int try_peers(const struct sw_trainer *t) {
    struct sw_device_handle devices[SW_RANKS_MAX];
    struct sw_stream *streams[SW_RANKS_MAX];
    sw_trainer_list_devices(t, devices);
    for (uint32_t i = 0; i < t->rank_count; i++) streams[i] = t->ranks[i].stream;
    const int ret = sw_try_peers(devices, streams, t->rank_count);
    if (ret != -ERESTART || !t->world) return ret;
    sw_error("process %u cannot be started again by itself, as the others hold on to it: start the "
             "run with NCCL_P2P_DISABLE=1 in the environment of all processes (mpirun -x "
             "NCCL_P2P_DISABLE=1)",
             sw_world_index(t->world));
    return -ETIMEDOUT;
}

/* ---- what is left ---- */

/* Each rank's is that of the fullest GPU, of all processes. A part stays free: to register host
 * memory takes some, for the tables in which the device finds it. */
static int measure_memory(struct sw_trainer *t) {
    struct {
        uint64_t least, taken;
    } all[SW_RANKS_MAX], mine;
    uint64_t least = UINT64_MAX;
    for (uint32_t i = 0; i < t->rank_count; i++) {
        const struct sw_device_handle *d = &t->ranks[i].device;
        const uint64_t available = d->ops->free_bytes(d->device);
        const uint64_t taken = d->ops->taken_bytes ? d->ops->taken_bytes(d->device) : 0;
        if (available < least) least = available;
        if (taken > t->taken_bytes) t->taken_bytes = taken;
    }
    mine.least = least;
    mine.taken = t->taken_bytes;
    const int ret = sw_trainer_share(t, CHANNEL_MAIN, all, &mine, sizeof(mine));
    if (ret < 0) return ret;
    for (uint32_t p = 0; p < sw_world_size(t->world); p++) {
        if (all[p].least < least) least = all[p].least;
        if (all[p].taken > t->taken_bytes) t->taken_bytes = all[p].taken;
    }
    if (t->options.device_memory_bytes == 0 && least < UINT64_MAX)
        t->options.device_memory_bytes = t->taken_bytes + least - least / 16;
    return 0;
}

static_assert((int)SW_NODE_RANKS_MAX >= (int)SW_RANKS_MAX, "any rank has a node");

/* Cores, memory and Adam of each rank next to its device. */
static int share_nodes(struct sw_trainer *t, int per_core) {
    int near[SW_RANKS_MAX];
    for (uint32_t i = 0; i < t->rank_count; i++) {
        const struct sw_device_handle *d = &t->ranks[i].device;
        char address[SW_BUS_ADDRESS_BYTES];
        d->ops->bus_address(d->device, address);
        near[i] = sw_topology_bus_node(address);
    }
    int ret = sw_core_share_open(&t->cores, &t->topology, t->rank_count, near);
    for (uint32_t i = 0; i < t->rank_count; i++) near[i] = sw_core_share_node(t->cores, i);
    sw_rank_nodes_group(&t->nodes, near, t->rank_count, t->topology.numa_nodes);
    const int nodes = (int)t->nodes.count;
    for (int i = 0; i < nodes && ret == 0; i++) {
        const int threads = (t->options.threads + nodes - 1 - i) / nodes;
        ret = sw_team_open(&t->teams[i], &t->topology, threads > 0 ? threads : 1, per_core);
    }
    return ret;
}

/* ---- life ---- */

static int open_ranks(struct sw_trainer *t) {
    t->ranks = calloc(t->options.ranks, sizeof(*t->ranks));
    if (!t->ranks) return -ENOMEM;
    t->rank_count = t->options.ranks;
    for (uint32_t i = 0; i < t->rank_count; i++) {
        t->ranks[i].t = t;
        t->ranks[i].index = i;
        t->ranks[i].shard = (t->first_rank + i) % t->shards;
    }
    int ret = on_all_ranks(t, open_context);
    if (ret == 0) ret = sw_trainer_compare_gpus(t);
    if (ret == 0) ret = try_peers(t);
    if (ret == 0) ret = on_all_ranks(t, load);
    if (ret == 0) ret = on_all_ranks(t, open_streams);
    if (ret == 0) ret = on_all_ranks(t, make_products);
    if (ret == 0) ret = sw_trainer_open_gpu_group(t);
    return ret < 0 ? ret : measure_memory(t);
}

int sw_trainer_open_devices(struct sw_trainer *t) {
    int ret = sw_topology_read(&t->topology);
    if (ret == 0) ret = choose_device(t);
    if (ret == 0 && t->world) ret = sw_neighbours_part(&t->channels[CHANNEL_MAIN], &t->topology);
    if (ret < 0) return ret;
    const int per_core = t->options.threads == 0;
    sw_teams_settle(&t->options, &t->topology);
    ret = sw_adam_pick(&t->adam_variant);
    if (ret == 0) ret = open_ranks(t);
    return ret == 0 ? share_nodes(t, per_core) : ret;
}

void sw_trainer_settle(struct sw_trainer *t, int settled) {
    for (uint32_t i = 0; t->ranks && i < t->rank_count; i++) {
        const struct sw_device_handle *d = &t->ranks[i].device;
        if (d->device && d->ops->settle) d->ops->settle(d->device, settled);
    }
}

void sw_trainer_close_devices(struct sw_trainer *t) {
    for (uint32_t i = 0; t->ranks && i < t->rank_count; i++) {
        struct sw_rank *r = &t->ranks[i];
        sw_trainer_close_groups(r);
        if (!r->device.device) continue;
        if (r->stream) r->device.ops->stream_destroy(r->stream);
        for (int lane = 0; lane < SW_DEVICE_LANES; lane++)
            if (r->lanes[lane]) r->device.ops->stream_destroy(r->lanes[lane]);
        r->device.ops->close(r->device.device);
    }
}
