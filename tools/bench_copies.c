/* tools/bench_copies.c - copies to and from a device, each way alone and both at once, from pinned
 * and from other memory. Each way has a thread and a stream, as the lanes of a run have. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "tools/bench.h"
#include "tools/bench_device.h"

/* Six rates; and up and down in four sizes of pieces, each with half a rate's time. */
enum { CASES = 6, PIECE_CASES = 4, PIECES = 4, PAGE = 4096 };
static const uint64_t pieces[PIECES] = {256 << 10, 1 << 20, 4 << 20, 16 << 20};

/* By how much a rate has to be better to be one. */
#define FASTER 1.03

struct lane {
    const struct sw_device_handle *device;
    struct sw_stream *stream;
    char *host, *there, *aside; /* aside: more of the device's memory */
    uint64_t bytes;
    int up, inside;
    double seconds;
    double rate; /* the result */
    int ret;
};

static int copy_once(const struct lane *l) {
    const struct sw_device_ops *ops = l->device->ops;
    int ret;
    if (l->inside)
        ret = ops->copy_d2d(l->stream, l->aside, l->there, l->bytes);
    else if (l->up)
        ret = ops->copy_h2d(l->stream, l->there, l->host, l->bytes);
    else
        ret = ops->copy_d2h(l->stream, l->host, l->there, l->bytes);
    return ret < 0 ? ret : ops->stream_sync(l->stream);
}

static void *run_lane(void *arg) {
    struct lane *l = arg;
    uint64_t copied = 0;
    l->ret = copy_once(l); /* warm-up */
    const double start = sw_bench_now();
    double passed = 0;
    while (l->ret == 0 && passed < l->seconds && !sw_bench_stopped()) {
        l->ret = copy_once(l);
        copied += l->bytes;
        passed = sw_bench_now() - start;
    }
    l->rate = passed > 0 ? (double)copied / passed : 0;
    return NULL;
}

/* One lane, or two at the same time. */
static int run_lanes(struct lane *a, struct lane *b) {
    pthread_t thread;
    if (b && pthread_create(&thread, NULL, run_lane, b)) {
        sw_error("bench: a thread for copies cannot be started");
        return -EAGAIN;
    }
    run_lane(a);
    if (b) pthread_join(thread, NULL);
    if (sw_bench_stopped()) return -EINTR;
    return a->ret < 0 ? a->ret : b ? b->ret : 0;
}

/* What went up comes back as it was. */
static int check(struct lane *up, struct lane *down) {
    for (uint64_t i = 0; i < up->bytes; i++) up->host[i] = (char)(i * 31 + (i >> 12));
    memset(down->host, 0, down->bytes);
    char *const there = down->there;
    down->there = up->there;
    int ret = copy_once(up);
    if (ret == 0) ret = copy_once(down);
    down->there = there;
    if (ret == 0 && memcmp(up->host, down->host, up->bytes)) {
        sw_error("bench: what was copied to the device and back is not what it was");
        ret = -EIO;
    }
    return ret;
}

/* In which pieces this way is fastest, both ends pinned. */
static int choose_piece(struct lane *l, double whole, uint64_t *out) {
    const struct sw_device_ops *ops = l->device->ops;
    struct lane short_one = *l;
    double best = FASTER * whole;
    int ret = 0;
    *out = 0;
    short_one.seconds /= 2;
    for (int i = 0; i < PIECES && ops->cut_copies && ret == 0; i++) {
        if (pieces[i] >= l->bytes) break;
        ops->cut_copies(l->device->device, pieces[i], pieces[i]);
        ret = run_lanes(&short_one, NULL);
        if (ret < 0 || short_one.rate <= best) continue;
        best = short_one.rate;
        *out = pieces[i];
    }
    if (ops->cut_copies) ops->cut_copies(l->device->device, 0, 0);
    return ret;
}

static int measure(struct lane *up, struct lane *down, struct sw_bench_copies *out) {
    const struct sw_device_ops *ops = up->device->ops;
    struct sw_device *device = up->device->device;
    int ret = check(up, down);
    if (ret == 0) ret = run_lanes(up, NULL);
    out->h2d_pageable = up->rate;
    if (ret == 0) ret = run_lanes(down, NULL);
    out->d2h_pageable = down->rate;
    if (ret == 0) ret = ops->pin(device, up->host, up->bytes);
    if (ret < 0) return ret;
    ret = ops->pin(device, down->host, down->bytes);
    if (ret == 0) {
        ret = run_lanes(up, NULL);
        out->h2d = up->rate;
        if (ret == 0) ret = run_lanes(down, NULL);
        out->d2h = down->rate;
        if (ret == 0) ret = run_lanes(up, down);
        out->both = up->rate + down->rate;
        if (ret == 0) ret = choose_piece(up, out->h2d, &out->h2d_piece);
        if (ret == 0) ret = choose_piece(down, out->d2h, &out->d2h_piece);
        ops->unpin(device, down->host);
    }
    ops->unpin(device, up->host);
    if (ret < 0) return ret;
    struct lane inside = *up;
    inside.inside = 1;
    inside.aside = down->there;
    ret = run_lanes(&inside, NULL);
    out->inside = 2 * inside.rate;
    return ret;
}

static int open_lane(struct lane *l, const struct sw_device_handle *d, uint64_t bytes) {
    void *there = NULL;
    l->device = d;
    l->bytes = bytes;
    l->host = aligned_alloc(PAGE, bytes);
    if (!l->host) return -ENOMEM;
    memset(l->host, 1, bytes);
    int ret = d->ops->alloc(d->device, bytes, &there);
    l->there = there;
    if (ret == 0) ret = d->ops->stream_create(d->device, &l->stream);
    return ret < 0 ? ret : d->ops->prepare(l->stream, 0);
}

static void close_lane(struct lane *l, const struct sw_device_handle *d) {
    if (l->stream) d->ops->stream_destroy(l->stream);
    if (l->there) d->ops->free(d->device, l->there, l->bytes);
    free(l->host);
}

int sw_bench_copies(const struct sw_device_handle *d, uint64_t bytes, double seconds,
                    struct sw_bench_copies *out) {
    const double share = seconds / (d->ops->cut_copies ? CASES + PIECE_CASES : CASES);
    struct lane up = {.up = 1, .seconds = share}, down = {.seconds = share};
    *out = (struct sw_bench_copies){0};
    int ret = open_lane(&up, d, bytes / PAGE * PAGE);
    if (ret == 0) ret = open_lane(&down, d, bytes / PAGE * PAGE);
    if (ret == -ENOMEM) sw_error("bench: no memory for copies");
    if (ret == 0) ret = measure(&up, &down, out);
    close_lane(&down, d);
    close_lane(&up, d);
    return ret;
}
