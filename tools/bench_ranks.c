/* tools/bench_ranks.c - all-gather and reduce-scatter of several ranks, each with a thread of its
 * own, as in a run. The first rank's clock tells when to end; all ask it after each batch. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "engine/collective.h"
#include "tools/bench.h"
#include "tools/bench_device.h"

#define TIMEOUT_S 60.0
enum { CALLS = 4 }; /* of a batch */

struct rank {
    const struct sw_device_handle *device;
    struct sw_comm_handle comm;
    struct sw_stream *stream;
    float *whole, *part, *host;
    uint64_t count; /* floats of a rank's part */
    double seconds, rate[2];
    int ret;
};

static int call(const struct rank *r, int scatter) {
    const struct sw_comm_ops *ops = r->comm.ops;
    return scatter
               ? ops->reduce_scatter(r->comm.comm, r->stream, r->part, r->whole, SW_FP32, r->count)
               : ops->all_gather(r->comm.comm, r->stream, r->whole, r->part,
                                 r->count * sizeof(float));
}

/* Whether all ranks go on: what the first one says, unless somebody was interrupted. */
static int go_on(const struct rank *r, int wanted, int *out) {
    int all[SW_RANKS_MAX];
    const int ret = r->comm.ops->exchange(r->comm.comm, all, &wanted, sizeof(wanted));
    *out = ret == 0 && all[0];
    return ret;
}

static int time_calls(struct rank *r, int scatter) {
    const double start = sw_bench_now();
    double passed = 0;
    uint64_t calls = 0;
    int more = 1, ret = 0;
    while (more && ret == 0) {
        for (int i = 0; i < CALLS && ret == 0; i++) ret = call(r, scatter);
        if (ret == 0) ret = r->device->ops->stream_sync(r->stream);
        calls += CALLS;
        passed = sw_bench_now() - start;
        if (ret == 0) ret = go_on(r, passed < r->seconds && !sw_bench_stopped(), &more);
    }
    const uint64_t sent = scatter ? sw_comm_scatter_bytes(&r->comm, SW_FP32, r->count)
                                  : sw_comm_gather_bytes(&r->comm, r->count * sizeof(float));
    r->rate[scatter] = (double)calls * (double)sent / passed;
    return ret;
}

/* Each rank brings its number; all have all of them, and each the sum. */
static int check(struct rank *r) {
    const struct sw_device_ops *ops = r->device->ops;
    const uint64_t bytes = r->count * sizeof(float), size = r->comm.size;
    for (uint64_t i = 0; i < r->count; i++) r->host[i] = (float)(r->comm.rank + 1);
    int ret = ops->copy_h2d(r->stream, r->part, r->host, bytes);
    if (ret == 0) ret = call(r, 0);
    if (ret == 0) ret = ops->copy_d2h(r->stream, r->host, r->whole, size * bytes);
    if (ret == 0) ret = ops->stream_sync(r->stream);
    int wrong = 0;
    for (uint64_t i = 0; i < size * r->count && ret == 0; i++)
        wrong |= r->host[i] != (float)(i / r->count + 1);
    for (uint64_t i = 0; i < size * r->count; i++) r->host[i] = (float)(r->comm.rank + 1);
    if (ret == 0) ret = ops->copy_h2d(r->stream, r->whole, r->host, size * bytes);
    if (ret == 0) ret = call(r, 1);
    if (ret == 0) ret = ops->copy_d2h(r->stream, r->host, r->part, bytes);
    if (ret == 0) ret = ops->stream_sync(r->stream);
    for (uint64_t i = 0; i < r->count && ret == 0; i++)
        wrong |= r->host[i] != (float)(size * (size + 1) / 2);
    if (ret == 0 && wrong) {
        sw_error("bench: what rank %u has after an all-gather or a reduce-scatter is wrong",
                 r->comm.rank);
        ret = -EIO;
        r->comm.ops->abort(r->comm.comm, ret);
    }
    return ret;
}

static void *run(void *arg) {
    struct rank *r = arg;
    r->ret = check(r);
    for (int scatter = 0; scatter < 2 && r->ret == 0; scatter++) r->ret = time_calls(r, scatter);
    return NULL;
}

static void failed(void *ctx, int error) {
    (void)ctx, (void)error; /* calls end by themselves */
}

static int open_memory(struct rank *r, uint32_t ranks) {
    const struct sw_device_handle *d = r->device;
    const uint64_t bytes = r->count * sizeof(float);
    void *p[2] = {0};
    int ret = d->ops->stream_create(d->device, &r->stream);
    if (ret == 0) ret = d->ops->prepare(r->stream, 0);
    if (ret == 0) ret = d->ops->alloc(d->device, ranks * bytes, &p[0]);
    if (ret == 0) ret = d->ops->alloc(d->device, bytes, &p[1]);
    r->whole = p[0];
    r->part = p[1];
    r->host = malloc(ranks * bytes);
    if (ret == 0 && !r->host) {
        sw_error("bench: no memory for ranks");
        ret = -ENOMEM;
    }
    return ret;
}

static void close_rank(struct rank *r, uint32_t ranks) {
    const struct sw_device_handle *d = r->device;
    if (r->comm.ops) r->comm.ops->close(r->comm.comm);
    if (r->whole) d->ops->free(d->device, r->whole, ranks * r->count * sizeof(float));
    if (r->part) d->ops->free(d->device, r->part, r->count * sizeof(float));
    if (r->stream) d->ops->stream_destroy(r->stream);
    free(r->host);
}

static int run_all(struct rank *all, uint32_t ranks) {
    pthread_t threads[SW_RANKS_MAX];
    uint32_t started = 1;
    int ret = 0;
    while (started < ranks && ret == 0) {
        ret = -pthread_create(&threads[started], NULL, run, &all[started]);
        if (ret == 0) started++;
    }
    if (ret < 0) {
        sw_error("bench: a thread for a rank cannot be started: %s", strerror(-ret));
        all[0].comm.ops->abort(all[0].comm.comm, ret);
    } else {
        run(&all[0]);
    }
    for (uint32_t i = 1; i < started; i++) pthread_join(threads[i], NULL);
    for (uint32_t i = 0; i < ranks && ret == 0; i++) ret = all[i].ret;
    return sw_bench_stopped() ? -EINTR : ret;
}

int sw_bench_ranks(const struct sw_device_handle *devices, uint32_t ranks, int on_gpus,
                   uint64_t bytes, double seconds, double *gather, double *scatter) {
    struct sw_comm_handle comms[SW_RANKS_MAX] = {{0}};
    const struct sw_comm_devices gpus = {.devices = devices,
                                         .count = ranks,
                                         .carried = SW_FP32,
                                         .timeout_s = TIMEOUT_S,
                                         .failed = failed};
    struct rank *all = calloc(ranks, sizeof(*all));
    int ret = all ? 0 : -ENOMEM;
    if (ret == 0)
        ret = on_gpus ? sw_comm_open_local_devices(comms, &gpus)
                      : sw_comm_open_host(comms, ranks, TIMEOUT_S);
    if (ret == -ENOTSUP) sw_error("bench: the devices form no group, so no ranks are measured");
    for (uint32_t i = 0; all && i < ranks; i++) {
        all[i].device = &devices[i];
        all[i].comm = comms[i];
        all[i].count = bytes / sizeof(float) / ranks;
        all[i].seconds = seconds / 2;
        if (ret == 0) ret = open_memory(&all[i], ranks);
    }
    if (ret == 0) ret = run_all(all, ranks);
    if (ret == 0) {
        *gather = all[0].rate[0];
        *scatter = all[0].rate[1];
    }
    for (uint32_t i = ranks; all && i-- > 0;) close_rank(&all[i], ranks);
    free(all);
    return ret;
}
