/* nvme/queue.c - requests above single transfers: splitting, depth, judging results, order.
 *
 * Requests are split into blocks. Each drive has `depth` slots, one per block in flight, so pending
 * requests on different drives run side by side while the blocks of one drive stay in order of
 * submission. Whatever a back end reports is compared with what was asked: a short transfer goes on
 * behind its last whole 4 KiB, a transient error is tried again to a bound, any other error ends
 * the request once its blocks in flight are back. So no buffer is returned while the kernel may use
 * it. */
#include "nvme/nvme_internal.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/log.h"

enum { DONE_BATCH = 32 };

/* The fields of sw_nvme_req.private_ while the queue holds it. */
enum { ISSUED, COMPLETED, IN_FLIGHT };

struct slot {
    struct sw_nvme_block block; /* what is in flight */
    struct sw_nvme_req *req;    /* NULL: free */
    uint32_t left_bytes, tries; /* of the block, counted from block.buf */
};

struct sw_nvme_queue {
    struct sw_nvme_store *store;
    const struct sw_nvme_io_ops *ops;
    void *io;
    struct sw_nvme_mode mode;
    int write, failed; /* failed: the back end's own error, for ever */
    uint32_t depth, block_bytes, in_flight;
    uint32_t req_head, req_count;
    struct sw_nvme_req *reqs[SW_NVME_REQS_MAX];
    uint32_t busy[SW_NVME_FILES_MAX]; /* slots in use, per drive */
    struct slot *slots;               /* [drive][depth] */
};

int sw_nvme_queue_open_on(struct sw_nvme_queue **out, struct sw_nvme_store *store,
                          const struct sw_nvme_queue_options *o, const struct sw_nvme_io_ops *ops,
                          void *ctx) {
    assert(out && store && o);
    const uint32_t depth = o->depth ? o->depth : SW_NVME_DEPTH_DEFAULT;
    const uint32_t block_bytes = o->block_bytes ? o->block_bytes : SW_NVME_BLOCK_BYTES_DEFAULT;
    assert(block_bytes % SW_NVME_ALIGN_BYTES == 0);
    const uint32_t slot_count = depth * store->file_count;
    struct sw_nvme_queue *q = calloc(1, sizeof(*q));
    if (q) q->slots = calloc(slot_count, sizeof(*q->slots));
    if (!q || !q->slots) {
        free(q);
        return -ENOMEM;
    }
    q->store = store;
    q->write = o->write != 0;
    q->depth = depth;
    q->block_bytes = block_bytes < SW_NVME_BLOCK_MAX_BYTES ? block_bytes : SW_NVME_BLOCK_MAX_BYTES;
    int fds[SW_NVME_FILES_MAX];
    for (uint32_t i = 0; i < store->file_count; i++) fds[i] = store->files[i].fd;
    const struct sw_nvme_setup setup = {.fds = fds,
                                        .fd_count = store->file_count,
                                        .entries = slot_count,
                                        .base = o->base,
                                        .bytes = o->bytes,
                                        .sqpoll = o->sqpoll,
                                        .iopoll = o->iopoll,
                                        .direct = (uint32_t)sw_nvme_all_direct(store),
                                        .ctx = ctx};
    q->ops = ops ? ops : &sw_nvme_uring_ops;
    int ret = q->ops->open(&q->io, &setup, &q->mode);
    if (ret < 0 && !ops) {
        q->ops = &sw_nvme_threads_ops;
        ret = q->ops->open(&q->io, &setup, &q->mode);
    }
    if (ret < 0) {
        free(q->slots);
        free(q);
        return ret;
    }
    *out = q;
    return 0;
}

int sw_nvme_queue_open(struct sw_nvme_queue **out, struct sw_nvme_store *store,
                       const struct sw_nvme_queue_options *options) {
    return sw_nvme_queue_open_on(out, store, options, NULL, NULL);
}

void sw_nvme_queue_mode(const struct sw_nvme_queue *q, struct sw_nvme_mode *mode) {
    assert(q && mode);
    *mode = q->mode;
    mode->direct = sw_nvme_all_direct(q->store);
    mode->align_bytes = SW_NVME_ALIGN_BYTES;
    mode->block_bytes = q->block_bytes;
    mode->depth = q->depth;
    for (uint32_t i = 0; i < q->store->file_count; i++) {
        const uint32_t align_bytes = q->store->files[i].align_bytes;
        if (align_bytes > mode->align_bytes) mode->align_bytes = align_bytes;
    }
}

static const struct sw_nvme_place *place_of(const struct sw_nvme_queue *q,
                                            const struct sw_nvme_req *req) {
    return &q->store->places[req->chunk];
}

/* The first error of a request is the one that is reported; the rest follow from it. */
static void fail(struct sw_nvme_queue *q, struct sw_nvme_req *req, const struct sw_nvme_block *b,
                 int err, const char *why) {
    if (req->result) return;
    req->result = err;
    sw_error("nvme: %s of chunk %u (home %u) failed: '%s', %u bytes at offset %llu: %s",
             q->write ? "write" : "read", req->chunk, req->home, q->store->files[b->file].path,
             b->len_bytes, (unsigned long long)b->offset_bytes, why ? why : strerror(-err));
}

static void release(struct sw_nvme_queue *q, struct slot *slot) {
    slot->req->private_[IN_FLIGHT]--;
    q->busy[slot->block.file]--;
    if (!q->write) atomic_fetch_sub(&q->store->files[slot->block.file].reading, 1);
    q->in_flight--;
    slot->req = NULL;
}

/* Tries a block again that made no progress. A refusal that persists deserves some patience. */
static int retry(struct slot *slot) {
    if (++slot->tries > SW_NVME_RETRIES_MAX) return 0;
    if (slot->tries > SW_NVME_RETRIES_MAX / 4) {
        const struct timespec wait = {0, 5000000L};
        nanosleep(&wait, NULL);
    }
    return 1;
}

static void start(struct sw_nvme_queue *q, struct slot *slot) {
    int ret;
    do ret = q->ops->start(q->io, &slot->block);
    while (sw_nvme_transient(ret) && retry(slot));
    if (ret == 0) return;
    fail(q, slot->req, &slot->block, ret, NULL);
    release(q, slot);
}

/* Blocks that may be in flight on a drive now. A writer keeps back while somebody waits for reads
 * of that drive, but never stops: the reader may wait for a slot that its write frees. */
static uint32_t depth_now(const struct sw_nvme_queue *q, uint32_t file) {
    if (!q->write || !atomic_load(&q->store->reads_awaited) ||
        !atomic_load(&q->store->files[file].reading))
        return q->depth;
    return (q->depth + 3) / 4;
}

static struct slot *free_slot(struct sw_nvme_queue *q, uint32_t file) {
    if (q->busy[file] >= depth_now(q, file)) return NULL;
    struct slot *slot = &q->slots[(uint64_t)file * q->depth];
    while (slot->req) slot++;
    return slot;
}

/* Starts blocks of the pending requests, oldest first, as far as each drive's depth admits. */
static void issue(struct sw_nvme_queue *q) {
    for (uint32_t i = 0; i < q->req_count; i++) {
        struct sw_nvme_req *req = q->reqs[(q->req_head + i) % SW_NVME_REQS_MAX];
        const struct sw_nvme_place *place = place_of(q, req);
        const uint64_t start_bytes =
            place->offset_bytes + req->home * q->store->files[place->file].bytes;
        struct slot *slot;
        while (!req->result && req->private_[ISSUED] < place->bytes &&
               (slot = free_slot(q, place->file)) != NULL) {
            const uint64_t at = req->private_[ISSUED], left = place->bytes - at;
            const uint32_t len = left < q->block_bytes ? (uint32_t)left : q->block_bytes;
            slot->req = req;
            slot->tries = 0;
            slot->left_bytes = len;
            slot->block = (struct sw_nvme_block){
                .buf = (char *)req->buf + at,
                .offset_bytes = start_bytes + at,
                .len_bytes = len,
                .file = place->file,
                .tag = (uint32_t)(slot - q->slots),
                .write = (uint32_t)q->write,
            };
            req->private_[ISSUED] += len;
            req->private_[IN_FLIGHT]++;
            q->busy[place->file]++;
            if (!q->write) atomic_fetch_add(&q->store->files[place->file].reading, 1);
            q->in_flight++;
            start(q, slot);
        }
    }
}

/* Judges one completion. The slot is started again, or released. */
static void complete(struct sw_nvme_queue *q, const struct sw_nvme_done *done) {
    assert(done->tag < q->depth * q->store->file_count);
    struct slot *slot = &q->slots[done->tag];
    struct sw_nvme_block *b = &slot->block;
    assert(slot->req);
    struct sw_nvme_req *req = slot->req;
    const int res = done->result;
    if (res >= 0 && (uint32_t)res > b->len_bytes) {
        fail(q, req, b, -EIO, "the kernel reports more bytes than were asked for");
    } else if (res >= 0 && (uint32_t)res == b->len_bytes) {
        req->private_[COMPLETED] += slot->left_bytes;
        slot->left_bytes = 0;
    } else if (res > 0) {
        /* Direct I/O can go on at whole blocks only, so an odd tail is moved again. */
        const uint32_t whole = (uint32_t)res / SW_NVME_ALIGN_BYTES * SW_NVME_ALIGN_BYTES;
        b->buf += whole;
        b->offset_bytes += whole;
        b->len_bytes -= whole;
        slot->left_bytes -= whole;
        req->private_[COMPLETED] += whole;
        if (whole)
            slot->tries = 0;
        else if (!retry(slot))
            fail(q, req, b, -EIO, "short transfers without progress");
    } else if (res == 0) {
        if (!q->write)
            fail(q, req, b, -EIO, "the file ends before the record does");
        else if (!retry(slot))
            fail(q, req, b, -EIO, "the file takes no more bytes");
    } else if (sw_nvme_transient(res)) {
        if (!retry(slot)) fail(q, req, b, res, NULL);
    } else if (res != -EINVAL ||
               !sw_nvme_drop_direct(q->store, b->file, "it refuses a direct transfer")) {
        /* A queue whose transfer overtook the change sees direct already off, and tries again. */
        if (res != -EINVAL || slot->tries++) fail(q, req, b, res, NULL);
    }
    if (!slot->left_bytes || req->result)
        release(q, slot);
    else
        start(q, slot);
}

static int is_done(const struct sw_nvme_queue *q, const struct sw_nvme_req *req) {
    if (req->private_[IN_FLIGHT]) return 0;
    return req->result || req->private_[COMPLETED] == place_of(q, req)->bytes;
}

static int broken(struct sw_nvme_queue *q, int err) {
    q->failed = err;
    sw_error("nvme: %s itself failed: %s", q->ops->name, strerror(-err));
    return err;
}

/* Takes one batch of completions and starts what they make room for. 0 or -errno. */
static int turn(struct sw_nvme_queue *q, int block) {
    struct sw_nvme_done done[DONE_BATCH];
    const int n = q->ops->wait(q->io, done, DONE_BATCH, block);
    if (n < 0) return broken(q, n);
    for (int i = 0; i < n; i++) complete(q, &done[i]);
    issue(q);
    return 0;
}

/* Nothing that was started may wait in the ring for the caller's next call. */
static int flush(struct sw_nvme_queue *q) {
    const int ret = q->in_flight ? q->ops->wait(q->io, NULL, 0, 0) : 0;
    return ret < 0 ? broken(q, ret) : 0;
}

void sw_nvme_reads_first(struct sw_nvme_store *store, int waiting) {
    assert(store);
    atomic_fetch_add(&store->reads_awaited, waiting ? 1 : -1);
}

int sw_nvme_submit(struct sw_nvme_queue *q, struct sw_nvme_req *req) {
    assert(q && req && req->buf);
    assert((req->write != 0) == q->write);
    assert(req->chunk < q->store->chunk_count && req->home < q->store->homes);
    assert((uintptr_t)req->buf % SW_NVME_ALIGN_BYTES == 0);
    if (q->failed) return q->failed;
    if (q->req_count == SW_NVME_REQS_MAX) return -EAGAIN;
    memset(req->private_, 0, sizeof(req->private_));
    req->result = 0;
    q->reqs[(q->req_head + q->req_count++) % SW_NVME_REQS_MAX] = req;
    issue(q);
    return flush(q);
}

static uint32_t take(struct sw_nvme_queue *q, struct sw_nvme_req **done, uint32_t max) {
    uint32_t n = 0;
    while (n < max && q->req_count && is_done(q, q->reqs[q->req_head])) {
        done[n++] = q->reqs[q->req_head];
        q->req_head = (q->req_head + 1) % SW_NVME_REQS_MAX;
        q->req_count--;
    }
    return n;
}

int sw_nvme_reap(struct sw_nvme_queue *q, struct sw_nvme_req **done, uint32_t want, uint32_t max) {
    assert(q && done && want <= max);
    if (q->failed) return q->failed;
    if (want > q->req_count) want = q->req_count;
    int ret = q->in_flight ? turn(q, 0) : 0;
    uint32_t n = ret ? 0 : take(q, done, max);
    while (!ret && n < want) {
        assert(q->in_flight);
        ret = turn(q, 1);
        n += take(q, done + n, max - n);
    }
    if (!ret) ret = flush(q);
    return ret ? ret : (int)n;
}

void sw_nvme_queue_close(struct sw_nvme_queue *q) {
    if (!q) return;
    /* Requests that were never started stay so; the kernel gives every buffer back first. */
    for (uint32_t i = 0; i < q->req_count; i++) {
        struct sw_nvme_req *req = q->reqs[(q->req_head + i) % SW_NVME_REQS_MAX];
        if (!is_done(q, req) && !req->result) req->result = -ECANCELED;
    }
    while (q->in_flight && !q->failed && turn(q, 1) == 0) continue;
    q->ops->close(q->io);
    free(q->slots);
    free(q);
}
