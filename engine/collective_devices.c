/* engine/collective_devices.c - ranks that are GPUs of one process.
 *
 * Their threads meet in host memory before each call on the devices: so a rank that stays away, or
 * calls something else, is named, and nothing is queued that could never end. What fails once it is
 * queued, a thread looks for. Control calls are the host's own. */
#include "engine/collective.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include "base/clock.h"
#include "base/log.h"

enum { POLL_NS = 100000000 };

struct group;

struct sw_comm {
    struct group *group;
    struct sw_comm_handle host;
    struct sw_device_group *devices;
    uint64_t met_ns; /* when all ranks were about to queue the last call */
};

struct group {
    const struct sw_device_group_ops *ops;
    enum sw_dtype carried;
    atomic_uint open_count;
    uint32_t size;
    void (*failed)(void *ctx, int error);
    void *ctx;
    pthread_t watcher;
    atomic_int closing;
    struct sw_comm ranks[SW_RANKS_MAX];
};

/* What a rank is about to queue. */
struct said {
    uint64_t kind, amount;
};
enum { GATHER, SCATTER };

static int meet(struct sw_comm *c, uint64_t kind, uint64_t amount) {
    static const char *const names[] = {"all_gather", "reduce_scatter"};
    const struct said mine = {kind, amount};
    struct said all[SW_RANKS_MAX];
    const int ret = c->host.ops->exchange(c->host.comm, all, &mine, sizeof(mine));
    if (ret < 0) return ret;
    for (uint32_t r = 1; r < c->group->size; r++) {
        if (all[r].kind == all[0].kind && all[r].amount == all[0].amount) continue;
        if (c->host.rank == 0)
            sw_error("collective: rank %u calls %s of %llu while rank 0 calls %s of %llu; all "
                     "ranks must make the same calls",
                     r, names[all[r].kind], (unsigned long long)all[r].amount, names[all[0].kind],
                     (unsigned long long)all[0].amount);
        return -EINVAL;
    }
    c->met_ns = sw_now_ns();
    return 0;
}

static int all_gather(struct sw_comm *c, struct sw_stream *s, void *out, const void *in,
                      uint64_t bytes) {
    const int ret = meet(c, GATHER, bytes);
    return ret < 0 ? ret : c->group->ops->all_gather(c->devices, s, out, in, bytes);
}

static int reduce_scatter(struct sw_comm *c, struct sw_stream *s, float *out, const float *in,
                          enum sw_dtype carried, uint64_t count) {
    assert(carried == c->group->carried);
    (void)carried;
    const int ret = meet(c, SCATTER, count);
    return ret < 0 ? ret : c->group->ops->reduce_scatter(c->devices, s, out, in, count);
}

static int exchange(struct sw_comm *c, void *out, const void *in, uint64_t bytes) {
    return c->host.ops->exchange(c->host.comm, out, in, bytes);
}

static uint64_t met_ns(const struct sw_comm *c) {
    return c->met_ns;
}

static void abort_all(struct sw_comm *c, int error) {
    c->host.ops->abort(c->host.comm, error);
    for (uint32_t r = 0; r < c->group->size; r++) c->group->ops->abort(c->group->ranks[r].devices);
}

static void *watch(void *arg) {
    struct group *g = arg;
    for (int error = 0; !error && !atomic_load(&g->closing);) {
        nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
        for (uint32_t r = 0; r < g->size && !error; r++) error = g->ops->poll(g->ranks[r].devices);
        if (!error || atomic_load(&g->closing)) continue;
        /* Nobody may take what comes down now for a result. */
        if (error != -ECANCELED) g->failed(g->ctx, error);
        abort_all(&g->ranks[0], error);
    }
    return NULL;
}

/* With every signal blocked, so that the program's handlers run in the program's threads. */
static int start_watcher(struct group *g) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int ret = pthread_create(&g->watcher, NULL, watch, g);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (ret) sw_error("collective: the thread that watches the GPUs' calls cannot be started");
    return -ret;
}

static void close_one(struct sw_comm *c) {
    if (!c) return;
    struct group *g = c->group;
    if (!atomic_exchange(&g->closing, 1)) pthread_join(g->watcher, NULL);
    c->host.ops->close(c->host.comm);
    g->ops->close(c->devices);
    if (atomic_fetch_sub(&g->open_count, 1) == 1) free(g);
}

static const struct sw_comm_ops ops = {
    .name = "nccl",
    .all_gather = all_gather,
    .reduce_scatter = reduce_scatter,
    .exchange = exchange,
    .met_ns = met_ns,
    .abort = abort_all,
    .close = close_one,
};

int sw_comm_open_devices(struct sw_comm_handle *out, const struct sw_device_handle *devices,
                         uint32_t size, enum sw_dtype carried, double timeout_s,
                         void (*failed)(void *ctx, int error), void *ctx) {
    assert(out && devices && failed && size >= 1 && size <= SW_RANKS_MAX &&
           size <= SW_DEVICE_GROUP_MAX);
    const struct sw_device_group_ops *group_ops = devices[0].ops->group;
    struct sw_device *list[SW_DEVICE_GROUP_MAX];
    struct sw_device_group *groups[SW_DEVICE_GROUP_MAX];
    struct sw_comm_handle host[SW_RANKS_MAX];
    if (!group_ops) return -ENOTSUP;
    struct group *g = calloc(1, sizeof(*g));
    if (!g) return -ENOMEM;
    int ret = sw_comm_open_host(host, size, timeout_s);
    if (ret < 0) {
        free(g);
        return ret;
    }
    for (uint32_t r = 0; r < size; r++) list[r] = devices[r].device;
    ret = group_ops->open(list, size, carried, groups);
    if (ret < 0) {
        for (uint32_t r = 0; r < size; r++) host[r].ops->close(host[r].comm);
        free(g);
        return ret;
    }
    *g = (struct group){
        .ops = group_ops, .carried = carried, .size = size, .failed = failed, .ctx = ctx};
    atomic_store(&g->open_count, size);
    for (uint32_t r = 0; r < size; r++) {
        g->ranks[r] = (struct sw_comm){.group = g, .host = host[r], .devices = groups[r]};
        out[r] = (struct sw_comm_handle){&g->ranks[r], &ops, r, size};
    }
    ret = start_watcher(g);
    if (ret == 0) return 0;
    atomic_store(&g->closing, 1); /* there is none to join */
    for (uint32_t r = 0; r < size; r++) close_one(&g->ranks[r]);
    return ret;
}
