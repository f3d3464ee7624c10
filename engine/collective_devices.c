/* engine/collective_devices.c - ranks that are GPUs, of one process or of several.
 *
 * Their threads meet as ranks of the host do before each call on the devices: so a rank that stays
 * away, or calls something else, is named, and nothing is queued that could never end. What fails
 * once it is queued, a thread looks for. Control calls are the host's own. */
#include "engine/collective.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "base/clock.h"
#include "base/log.h"
#include "base/wait.h"

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
    uint32_t count; /* of ranks in this process */
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
    for (uint32_t r = 1; r < c->host.size; r++) {
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
    for (uint32_t r = 0; r < c->group->count; r++) c->group->ops->abort(c->group->ranks[r].devices);
}

static void *watch(void *arg) {
    struct group *g = arg;
    for (int error = 0; !error && !atomic_load(&g->closing);) {
        nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
        for (uint32_t r = 0; r < g->count && !error; r++) error = g->ops->poll(g->ranks[r].devices);
        if (!error || atomic_load(&g->closing)) continue;
        /* Nobody may take what comes down now for a result. */
        if (error != -ECANCELED) g->failed(g->ctx, error);
        abort_all(&g->ranks[0], error);
    }
    return NULL;
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

/* ---- opening ---- */

/* The library waits for other processes, and cannot be told for how long. */
struct opening {
    const struct sw_device_group_ops *ops;
    struct sw_device *devices[SW_DEVICE_GROUP_MAX];
    struct sw_device_group *groups[SW_DEVICE_GROUP_MAX];
    char name[SW_DEVICE_GROUP_NAME_BYTES];
    uint32_t count, first, size;
    enum sw_dtype carried;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int is_over, ret;
};

static void *open_groups(void *arg) {
    struct opening *o = arg;
    const int ret =
        o->ops->open(o->devices, o->count, o->first, o->size, o->name, o->carried, o->groups);
    pthread_mutex_lock(&o->lock);
    o->ret = ret;
    o->is_over = 1;
    pthread_cond_broadcast(&o->changed);
    pthread_mutex_unlock(&o->lock);
    return NULL;
}

static struct opening *make_opening(const struct sw_comm_devices *of) {
    struct opening *o = calloc(1, sizeof(*o));
    if (!o) return NULL;
    o->ops = of->devices[0].ops->group;
    for (uint32_t i = 0; i < of->count; i++) o->devices[i] = of->devices[i].device;
    memcpy(o->name, of->name, sizeof(o->name));
    o->count = of->count;
    o->first = of->host[0].rank;
    o->size = of->host[0].size;
    o->carried = of->carried;
    pthread_mutex_init(&o->lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&o->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return o;
}

static void free_opening(struct opening *o) {
    pthread_cond_destroy(&o->changed);
    pthread_mutex_destroy(&o->lock);
    free(o);
}

/* 0 when it is over, with its result in o->ret; or -ETIMEDOUT, and then it may go on for ever. */
static int await_opening(struct opening *o, double timeout_s) {
    struct sw_wait wait = {0};
    int ret = 0;
    pthread_mutex_lock(&o->lock);
    while (!o->is_over && ret == 0) ret = sw_wait_for(&wait, &o->changed, &o->lock, timeout_s);
    pthread_mutex_unlock(&o->lock);
    return ret;
}

/* With every signal blocked, so that the program's handlers run in the program's threads. */
static int start_thread(pthread_t *thread, void *(*run)(void *), void *arg, const char *what) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int ret = pthread_create(thread, NULL, run, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (ret) sw_error("collective: the thread that %s cannot be started", what);
    return -ret;
}

static int bring_together(const struct sw_comm_devices *of, struct sw_device_group **groups) {
    struct opening *o = make_opening(of);
    pthread_t thread;
    if (!o) return -ENOMEM;
    int ret = start_thread(&thread, open_groups, o, "brings the GPUs together");
    if (ret == 0) ret = await_opening(o, of->timeout_s);
    if (ret == -ETIMEDOUT) {
        const char *network = getenv("NCCL_SOCKET_IFNAME");
        sw_error("collective: %u GPUs, of which ranks %u to %u are here, did not come together "
                 "within %g s; NCCL_SOCKET_IFNAME (here: %s) chooses the network over which they "
                 "find each other, NCCL_DEBUG=INFO shows where it stays",
                 o->size, o->first, o->first + o->count - 1, of->timeout_s,
                 network && *network ? network : "not set");
        for (uint32_t i = 0; i < of->count; i++) of->devices[i].ops->give_up(of->devices[i].device);
        pthread_detach(thread);
        return ret; /* the thread may still use it */
    }
    if (ret == 0) {
        pthread_join(thread, NULL);
        ret = o->ret;
        memcpy(groups, o->groups, of->count * sizeof(*groups));
    }
    free_opening(o);
    return ret;
}

static void close_hosts(const struct sw_comm_devices *of) {
    for (uint32_t r = 0; r < of->count; r++) of->host[r].ops->close(of->host[r].comm);
}

int sw_comm_open_devices(struct sw_comm_handle *out, const struct sw_comm_devices *of) {
    assert(out && of->host && of->devices && of->failed && of->name && of->count >= 1 &&
           of->host[0].size <= SW_RANKS_MAX && of->host[0].size <= SW_DEVICE_GROUP_MAX);
    struct sw_device_group *groups[SW_DEVICE_GROUP_MAX];
    struct group *g = of->devices[0].ops->group ? calloc(1, sizeof(*g)) : NULL;
    int ret = g ? bring_together(of, groups) : of->devices[0].ops->group ? -ENOMEM : -ENOTSUP;
    if (ret < 0) {
        close_hosts(of);
        free(g);
        return ret;
    }
    *g = (struct group){.ops = of->devices[0].ops->group,
                        .carried = of->carried,
                        .count = of->count,
                        .failed = of->failed,
                        .ctx = of->ctx};
    atomic_store(&g->open_count, of->count);
    for (uint32_t r = 0; r < of->count; r++) {
        g->ranks[r] = (struct sw_comm){.group = g, .host = of->host[r], .devices = groups[r]};
        out[r] = (struct sw_comm_handle){&g->ranks[r], &ops, of->host[r].rank, of->host[r].size};
    }
    ret = start_thread(&g->watcher, watch, g, "watches the GPUs' calls");
    if (ret == 0) return 0;
    atomic_store(&g->closing, 1); /* there is none to join */
    for (uint32_t r = 0; r < of->count; r++) close_one(&g->ranks[r]);
    return ret;
}

int sw_comm_open_local_devices(struct sw_comm_handle *out, const struct sw_comm_devices *of) {
    struct sw_comm_handle host[SW_RANKS_MAX];
    char name[SW_DEVICE_GROUP_NAME_BYTES];
    const struct sw_device_group_ops *group = of->devices[0].ops->group;
    int ret = group ? group->make_name(name) : -ENOTSUP;
    if (ret == 0) ret = sw_comm_open_host(host, of->count, of->timeout_s);
    if (ret < 0) return ret;
    struct sw_comm_devices local = *of;
    local.host = host;
    local.name = name;
    return sw_comm_open_devices(out, &local);
}
