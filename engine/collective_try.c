/* engine/collective_try.c - see the header. */
#include "engine/collective_try.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "base/log.h"

/* A second, of looks that each come a millisecond after the one before, or later where the machine
 * is busy: who is not run has not waited. Other processes have more, as nobody here sees whether
 * they are run. */
enum { LOOKS_MAX = 1000, LOOKS_MAX_OTHERS = 10 * LOOKS_MAX, LOOK_NS = 1000000 };
enum { PEER_BYTES = 1 << 20 };

#define CAUSES "the usual causes are PCIe's access control (ACS) and the IOMMU: "
static const char causes[] = CAUSES "switch ACS off in the BIOS, or boot with iommu=pt";
static const char remedy[] =
    CAUSES "switch ACS off in the BIOS, boot with iommu=pt, or set NCCL_P2P_DISABLE=1, which takes "
           "the way through the host's memory";

/* 0 once all that is on the stream is over; -ETIMEDOUT, not reported. */
static int patient_wait(const struct sw_device_ops *ops, struct sw_event *event,
                        struct sw_stream *s, int looks_max) {
    int ret = ops->event_record(event, s);
    if (ret < 0) return ret;
    for (int looks = 0; looks < looks_max; looks++) {
        ret = ops->event_done(event);
        if (ret != 0) return ret < 0 ? ret : 0;
        nanosleep(&(struct timespec){.tv_nsec = LOOK_NS}, NULL);
    }
    return -ETIMEDOUT;
}

/* ---- pairs ---- */

struct peers {
    const struct sw_device_ops *ops;
    const struct sw_device_handle *devices;
    struct sw_device *list[SW_RANKS_MAX];
    struct sw_stream *const *streams;
    uint32_t size;
    char *memory[SW_RANKS_MAX]; /* PEER_BYTES to send, and as many to receive */
    struct sw_event *events[SW_RANKS_MAX];
    uint32_t *want, *got; /* host, PEER_BYTES each */
    uint8_t direct[SW_RANKS_MAX * SW_RANKS_MAX];
};

static void fill_words(uint32_t *words, uint64_t count, uint32_t seed) {
    for (uint64_t i = 0; i < count; i++) words[i] = (uint32_t)(i * 2654435761u) ^ seed;
}

/* 1: the bytes are right; 0: they are not. -ETIMEDOUT is not reported. */
static int try_pair(struct peers *p, uint32_t from, uint32_t to) {
    const struct sw_device_ops *ops = p->ops;
    char *target = p->memory[to] + PEER_BYTES;
    fill_words(p->want, PEER_BYTES / sizeof(*p->want), from * SW_RANKS_MAX + to + 1);
    int ret = ops->zero(p->streams[to], target, PEER_BYTES);
    if (ret == 0) ret = ops->stream_sync(p->streams[to]);
    if (ret == 0) ret = ops->copy_h2d(p->streams[from], p->memory[from], p->want, PEER_BYTES);
    if (ret == 0)
        ret = ops->group->copy(p->streams[from], p->devices[to].device, target, p->memory[from],
                               PEER_BYTES);
    if (ret == 0) ret = patient_wait(ops, p->events[from], p->streams[from], LOOKS_MAX);
    if (ret == 0) ret = ops->copy_d2h(p->streams[to], p->got, target, PEER_BYTES);
    if (ret == 0) ret = ops->stream_sync(p->streams[to]);
    return ret < 0 ? ret : memcmp(p->want, p->got, PEER_BYTES) == 0;
}

/* All pairs, or up to the first where it is not 1. */
static int try_pairs(struct peers *p, uint32_t *from, uint32_t *to) {
    for (*from = 0; *from < p->size; ++*from)
        for (*to = 0; *to < p->size; ++*to) {
            if (*from == *to) continue;
            const int ret = try_pair(p, *from, *to);
            if (ret != 1) return ret;
        }
    return 1;
}

static int open_peers(struct peers *p) {
    p->want = malloc(PEER_BYTES);
    p->got = malloc(PEER_BYTES);
    int ret = p->want && p->got ? 0 : -ENOMEM;
    for (uint32_t i = 0; i < p->size && ret == 0; i++) {
        void *memory;
        ret = p->ops->alloc(p->devices[i].device, 2 * PEER_BYTES, &memory);
        if (ret < 0) break;
        p->memory[i] = memory;
        ret = p->ops->event_create(p->devices[i].device, &p->events[i]);
    }
    return ret;
}

static void close_peers(struct peers *p) {
    for (uint32_t i = 0; i < p->size; i++) {
        p->ops->event_destroy(p->events[i]);
        p->ops->free(p->devices[i].device, p->memory[i], 2 * PEER_BYTES);
    }
    free(p->want);
    free(p->got);
}

static int is_direct(const struct peers *p, uint32_t from, uint32_t to) {
    return p->direct[from * p->size + to] || p->direct[to * p->size + from];
}

/* CUDA ends no copy that is under way but with the process. A call for any of these devices might
 * wait for it, as they may see each other's memory. */
static int judge_endless(struct peers *p, uint32_t from, uint32_t to) {
    for (uint32_t i = 0; i < p->size; i++) p->ops->give_up(p->list[i]);
    if (is_direct(p, from, to)) {
        sw_warning("GPU %u: a copy of its memory to GPU %u has not ended within a second; %s", from,
                   to, remedy);
        return setenv("NCCL_P2P_DISABLE", "1", 1) < 0 ? -errno : -ERESTART;
    }
    sw_error("GPU %u: a copy of its memory to GPU %u has not ended within a second, on the way "
             "through the host's memory; %s. --ranks 1 does without",
             from, to, causes);
    return -ETIMEDOUT;
}

static int judge_pairs(struct peers *p) {
    uint32_t from, to;
    int ret = try_pairs(p, &from, &to);
    if (ret == 0 && is_direct(p, from, to)) {
        sw_warning("GPU %u brings wrong bytes into the memory of GPU %u, so what the GPUs exchange "
                   "goes through the host's memory in this run, and slower; %s",
                   from, to, remedy);
        ret = p->ops->group->detour(p->list, p->size, p->direct);
        memset(p->direct, 0, sizeof(p->direct));
        if (ret == 0) ret = try_pairs(p, &from, &to);
    }
    if (ret == -ETIMEDOUT) return judge_endless(p, from, to);
    if (ret != 0) return ret < 0 ? ret : 0;
    sw_error("GPU %u brings wrong bytes into the memory of GPU %u, on the way through the host's "
             "memory, too; %s. --ranks 1 does without",
             from, to, causes);
    return -EIO;
}

int sw_try_peers(const struct sw_device_handle *devices, struct sw_stream *const *streams,
                 uint32_t size) {
    assert(devices && streams && size >= 1 && size <= SW_RANKS_MAX);
    if (size < 2 || !devices[0].ops->group) return 0;
    struct peers *p = calloc(1, sizeof(*p));
    if (!p) return -ENOMEM;
    p->ops = devices[0].ops;
    p->devices = devices;
    p->streams = streams;
    p->size = size;
    for (uint32_t i = 0; i < size; i++) p->list[i] = devices[i].device;
    int ret = p->ops->group->connect(p->list, size, p->direct);
    if (ret == 0) ret = open_peers(p);
    if (ret == 0) ret = judge_pairs(p);
    close_peers(p);
    free(p);
    return ret;
}

/* ---- groups ---- */

enum { KINDS = 2, SIZES = 3 };
static const char *const kinds[KINDS] = {"all-gather", "reduce-scatter"};
/* NCCL has a protocol each for short, middling and long calls. */
static const uint64_t sizes_bytes[SIZES] = {1 << 12, 1 << 20, 1 << 26};
enum { PIECE_STEP = 64, VALUES = 61 };

struct trial {
    uint32_t size;
    enum sw_dtype carried;
    uint64_t bytes_max;
    int looks_max;
    atomic_int told; /* what failed has been reported */
};

struct trial_rank {
    struct trial *t;
    const struct sw_comm_handle *c;
    const struct sw_device_handle *device;
    struct sw_stream *stream;
    struct sw_event *event;
    char *whole, *piece; /* device, [size][piece_max] and [piece_max] */
    char *host;          /* as the former */
    uint64_t piece_max;
    pthread_t thread;
    int started, ret;
};

static uint64_t piece_of(const struct trial *t, int size) {
    const uint64_t bytes = sizes_bytes[size] < t->bytes_max ? sizes_bytes[size] : t->bytes_max;
    const uint64_t piece = bytes / t->size / PIECE_STEP * PIECE_STEP;
    return piece ? piece : PIECE_STEP;
}

/* Small whole numbers, which BF16 has exactly and any order of FP32 sums, too. */
static float value_of(uint32_t rank, uint64_t i) {
    return (float)((i + rank * 17u) % VALUES) - (VALUES / 2);
}

static int queue(struct trial_rank *r, int kind, uint64_t piece) {
    const struct sw_device_ops *ops = r->device->ops;
    const uint64_t values = piece / sizeof(float), size = r->t->size;
    int ret;
    if (kind == 0) {
        fill_words((uint32_t *)r->host, piece / sizeof(uint32_t), r->c->rank + 1);
        ret = ops->zero(r->stream, r->whole, size * piece);
        if (ret == 0) ret = ops->copy_h2d(r->stream, r->piece, r->host, piece);
        return ret < 0 ? ret
                       : r->c->ops->all_gather(r->c->comm, r->stream, r->whole, r->piece, piece);
    }
    for (uint64_t i = 0; i < size * values; i++) ((float *)r->host)[i] = value_of(r->c->rank, i);
    ret = ops->zero(r->stream, r->piece, piece);
    if (ret == 0) ret = ops->copy_h2d(r->stream, r->whole, r->host, size * piece);
    return ret < 0 ? ret
                   : r->c->ops->reduce_scatter(r->c->comm, r->stream, (float *)r->piece,
                                               (const float *)r->whole, r->t->carried, values);
}

/* Whether what has come is what was sent: 1 or 0, or -errno. */
static int compare(struct trial_rank *r, int kind, uint64_t piece) {
    const struct sw_device_ops *ops = r->device->ops;
    const uint64_t size = r->t->size, words = piece / sizeof(uint32_t);
    int ret = ops->copy_d2h(r->stream, r->host, kind == 0 ? r->whole : r->piece,
                            kind == 0 ? size * piece : piece);
    if (ret == 0) ret = ops->stream_sync(r->stream);
    if (ret < 0) return ret;
    for (uint64_t i = 0; kind == 0 && i < size * words; i++)
        if (((uint32_t *)r->host)[i] !=
            ((uint32_t)(i % words * 2654435761u) ^ (uint32_t)(i / words + 1)))
            return 0;
    for (uint64_t i = 0; kind == 1 && i < words; i++) {
        float sum = 0;
        for (uint32_t k = 0; k < size; k++) sum += value_of(k, r->c->rank * words + i);
        if (((float *)r->host)[i] != sum) return 0;
    }
    return 1;
}

/* Of all ranks that find something only the first one says so. */
static int tell(struct trial_rank *r, int kind, int error) {
    if (atomic_exchange(&r->t->told, 1)) return error;
    if (error == -ETIMEDOUT)
        sw_error("GPU %u: the first %s of the GPUs has not ended within %s; %s. NCCL_DEBUG=INFO "
                 "shows where it stays; --ranks 1 does without",
                 r->c->rank, kinds[kind], r->t->looks_max == LOOKS_MAX ? "a second" : "10 s",
                 remedy);
    else
        sw_error("GPU %u: the first %s of the GPUs brings wrong values; %s. --ranks 1 does without",
                 r->c->rank, kinds[kind], remedy);
    return error;
}

static int try_call(struct trial_rank *r, int kind, uint64_t piece) {
    int ret = queue(r, kind, piece);
    /* The first call of a kind may take the library seconds, on each rank others. */
    if (ret == 0) ret = r->c->ops->exchange(r->c->comm, NULL, NULL, 0);
    if (ret < 0) return ret;
    ret = patient_wait(r->device->ops, r->event, r->stream, r->t->looks_max);
    if (ret == -ETIMEDOUT) return tell(r, kind, ret);
    /* What an abort has ended, which whoever aborted has reported, is over as well. */
    if (ret == 0) ret = r->c->ops->exchange(r->c->comm, NULL, NULL, 0);
    if (ret < 0) return ret;
    ret = compare(r, kind, piece);
    return ret == 0 ? tell(r, kind, -EIO) : ret < 0 ? ret : 0;
}

static void *try_rank(void *arg) {
    struct trial_rank *r = arg;
    for (int size = 0; size < SIZES && r->ret == 0; size++) {
        for (int kind = 0; kind < KINDS && r->ret == 0; kind++)
            r->ret = try_call(r, kind, piece_of(r->t, size));
        if (sizes_bytes[size] >= r->t->bytes_max) break;
    }
    if (r->ret < 0) r->c->ops->abort(r->c->comm, r->ret);
    return NULL;
}

static int open_trial(struct trial_rank *r) {
    const struct sw_device_handle *d = r->device;
    void *memory;
    r->piece_max = piece_of(r->t, SIZES - 1);
    r->host = malloc(r->t->size * r->piece_max);
    if (!r->host) return -ENOMEM;
    const int ret = d->ops->alloc(d->device, (r->t->size + 1) * r->piece_max, &memory);
    if (ret < 0) return ret;
    r->whole = memory;
    r->piece = r->whole + r->t->size * r->piece_max;
    return d->ops->event_create(d->device, &r->event);
}

static void close_trial(struct trial_rank *r) {
    if (!r->device) return;
    r->device->ops->event_destroy(r->event);
    r->device->ops->free(r->device->device, r->whole, (r->t->size + 1) * r->piece_max);
    free(r->host);
}

static int start_trial(struct trial_rank *r) {
    const int ret = -pthread_create(&r->thread, NULL, try_rank, r);
    r->started = ret == 0;
    if (ret < 0) sw_error("a thread for the first calls between GPUs: %s", strerror(-ret));
    return ret;
}

int sw_try_collectives(const struct sw_comm_handle *handles, const struct sw_device_handle *devices,
                       struct sw_stream *const *streams, uint32_t count, enum sw_dtype carried,
                       uint64_t bytes_max) {
    assert(handles && devices && streams && count >= 1 && count <= SW_RANKS_MAX);
    struct trial trial = {.size = handles[0].size, .carried = carried, .bytes_max = bytes_max};
    struct trial_rank *ranks = calloc(count, sizeof(*ranks));
    if (!ranks) return -ENOMEM;
    trial.looks_max = count < trial.size ? LOOKS_MAX_OTHERS : LOOKS_MAX;
    int ret = 0;
    for (uint32_t i = 0; i < count && ret == 0; i++) {
        ranks[i] = (struct trial_rank){
            .t = &trial, .c = &handles[i], .device = &devices[i], .stream = streams[i]};
        ret = open_trial(&ranks[i]);
    }
    for (uint32_t i = 0; i < count && ret == 0; i++) ret = start_trial(&ranks[i]);
    if (ret < 0) handles[0].ops->abort(handles[0].comm, ret);
    for (uint32_t i = 0; i < count; i++) {
        if (!ranks[i].started) continue;
        pthread_join(ranks[i].thread, NULL);
        if (ret == 0) ret = ranks[i].ret;
    }
    for (uint32_t i = 0; i < count; i++) close_trial(&ranks[i]);
    free(ranks);
    return ret;
}
