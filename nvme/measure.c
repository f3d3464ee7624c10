/* nvme/measure.c - scratch records, and one loop per direction that keeps a queue's requests
 * pending.
 *
 * A loop counts what was complete when its time was over; what is still in flight then is waited
 * for and not counted, as the first requests were in flight when nothing was complete yet. */
#include "nvme/measure.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "nvme/nvme.h"

enum { SLOTS = SW_NVME_REQS_MAX };
#define SPEED_BYTES (128ull << 20)

struct sw_nvme_measure {
    struct sw_nvme_store *store;
    int (*stopped)(void);
    char *buf; /* SLOTS records to read into, then SLOTS to write from */
    uint64_t buf_bytes, record_bytes, salt;
    uint32_t records;
};

/* One direction under way. */
struct side {
    struct sw_nvme_measure *m;
    uint32_t write, first, end; /* records [first, end), again and again */
    uint32_t block_bytes, depth;
    double seconds; /* 0: each record once, filled or compared */
    pthread_barrier_t *begin;
    struct sw_nvme_req reqs[SLOTS]; /* until the queue is closed */
    double rate, took;
    int ret;
};

static double now(void) {
    return 1e-9 * (double)sw_now_ns();
}

/* ---- what records hold ---- */

/* Unique for record and place, and for every fill, so that nothing stale or displaced passes. */
static uint64_t word(const struct sw_nvme_measure *m, uint32_t record, uint64_t place) {
    return (((uint64_t)record << 32 | place) + m->salt) * 0x9E3779B97F4A7C15u;
}

static void write_words(const struct sw_nvme_measure *m, uint32_t record, uint64_t *at) {
    for (uint64_t i = 0; i < m->record_bytes / sizeof(*at); i++) at[i] = word(m, record, i);
}

static int compare_words(const struct sw_nvme_measure *m, uint32_t record, const uint64_t *at) {
    for (uint64_t i = 0; i < m->record_bytes / sizeof(*at); i++) {
        if (at[i] == word(m, record, i)) continue;
        uint64_t offset;
        const char *path = sw_nvme_where(m->store, record, 0, &offset);
        sw_error("nvme: '%s' at offset %llu: what is read is not what was written", path,
                 (unsigned long long)(offset + i * sizeof(*at)));
        return -EIO;
    }
    return 0;
}

/* ---- moving ---- */

static int submit(struct side *s, struct sw_nvme_queue *queue, struct sw_nvme_req *req,
                  uint32_t *next) {
    req->chunk = (*next)++;
    if (*next == s->end && s->seconds > 0) *next = s->first;
    if (s->write && s->seconds == 0) write_words(s->m, req->chunk, req->buf);
    return sw_nvme_submit(queue, req);
}

/* The loop. On an error the queue, closing, waits for what is in flight. */
static int pump(struct side *s, struct sw_nvme_queue *queue) {
    struct sw_nvme_measure *m = s->m;
    struct sw_nvme_req *done[SLOTS];
    uint32_t next = s->first, in_flight = 0;
    uint64_t bytes = 0;
    int ret = 0, over = 0;
    const double begin = now();
    for (; in_flight < SLOTS && next < s->end && !ret; in_flight++) {
        s->reqs[in_flight] = (struct sw_nvme_req){
            .buf = m->buf + ((s->write ? SLOTS : 0) + in_flight) * m->record_bytes,
            .write = s->write};
        ret = submit(s, queue, &s->reqs[in_flight], &next);
    }
    while (in_flight && !ret) {
        const int count = sw_nvme_reap(queue, done, 1, SLOTS);
        if (count < 0) return count;
        const double took = now() - begin;
        in_flight -= (uint32_t)count;
        if (!over) {
            bytes += (uint64_t)count * m->record_bytes;
            s->took = took;
        }
        if (s->seconds > 0 && took >= s->seconds) over = 1;
        if (m->stopped && m->stopped()) return -EINTR;
        for (int i = 0; i < count && !ret; i++) {
            ret = done[i]->result;
            if (!ret && s->seconds == 0 && !s->write)
                ret = compare_words(m, done[i]->chunk, done[i]->buf);
            if (ret || over || next == s->end) continue;
            ret = submit(s, queue, done[i], &next);
            in_flight++;
        }
    }
    s->rate = (double)bytes / s->took;
    return ret;
}

static void *move(void *arg) {
    struct side *s = arg;
    const struct sw_nvme_queue_options options = {.write = s->write,
                                                  .depth = s->depth,
                                                  .block_bytes = s->block_bytes,
                                                  .base = s->m->buf,
                                                  .bytes = s->m->buf_bytes};
    struct sw_nvme_queue *queue = NULL;
    s->ret = sw_nvme_queue_open(&queue, s->m->store, &options);
    if (s->begin) pthread_barrier_wait(s->begin); /* after a failure, too: the other side waits */
    if (!s->ret) s->ret = pump(s, queue);
    sw_nvme_queue_close(queue);
    return NULL;
}

static int move_both(struct side *reader, struct side *writer) {
    pthread_barrier_t begin;
    pthread_t thread;
    int ret = -pthread_barrier_init(&begin, NULL, 2);
    if (ret) return ret;
    reader->begin = writer->begin = &begin;
    ret = -pthread_create(&thread, NULL, move, reader);
    if (ret) {
        sw_error("nvme: no thread for the reader: %s", strerror(-ret));
    } else {
        move(writer);
        pthread_join(thread, NULL);
        ret = reader->ret ? reader->ret : writer->ret;
    }
    pthread_barrier_destroy(&begin);
    return ret;
}

/* ---- the interface ---- */

static int open_store(struct sw_nvme_measure *m, const struct sw_nvme_measure_options *o) {
    char name[256];
    uint64_t *bytes = calloc(m->records, sizeof(*bytes));
    if (!bytes) return -ENOMEM;
    for (uint32_t r = 0; r < m->records; r++) bytes[r] = m->record_bytes;
    /* Another process in the same folder has its own files. */
    snprintf(name, sizeof(name), o->keep ? "%s" : "%s-%ld", o->name, (long)getpid());
    const struct sw_nvme_options options = {.folders = o->folders,
                                            .folder_count = o->folder_count,
                                            .name = name,
                                            .record_bytes = bytes,
                                            .chunk_count = m->records,
                                            .homes = 1};
    const int ret = sw_nvme_open(&m->store, &options);
    free(bytes);
    for (uint32_t f = 0; f < o->folder_count && !ret && !o->keep; f++) {
        uint64_t offset; /* equal records go round robin: record f lies in folder f */
        unlink(sw_nvme_where(m->store, f, 0, &offset));
    }
    return ret;
}

int sw_nvme_measure_open(struct sw_nvme_measure **out, const struct sw_nvme_measure_options *o) {
    assert(out && o && o->name && o->folder_count > 0);
    assert(o->buf && (uintptr_t)o->buf % SW_NVME_ALIGN_BYTES == 0);
    assert(o->buf_bytes >= SW_NVME_MEASURE_BUF_MIN_BYTES && o->bytes >= SW_NVME_MEASURE_MIN_BYTES);
    struct sw_nvme_measure *m = calloc(1, sizeof(*m));
    if (!m) return -ENOMEM;
    /* At least four records in a folder: two to read and two to write. */
    const uint64_t of_buf = o->buf_bytes / (2 * SLOTS), of_folder = o->bytes / 4;
    m->record_bytes = of_buf < of_folder ? of_buf : of_folder;
    m->record_bytes -= m->record_bytes % SW_NVME_ALIGN_BYTES;
    m->records = (uint32_t)(o->bytes / m->record_bytes / 2 * 2) * o->folder_count;
    m->buf = o->buf;
    m->buf_bytes = o->buf_bytes;
    m->stopped = o->stopped;
    m->salt = sw_now_ns() ^ (uint64_t)getpid() << 40;
    const int ret = open_store(m, o);
    if (ret) {
        free(m);
        return ret;
    }
    *out = m;
    return 0;
}

void sw_nvme_measure_close(struct sw_nvme_measure *m) {
    if (!m) return;
    sw_nvme_close(m->store, 0);
    free(m);
}

uint64_t sw_nvme_measure_bytes(const struct sw_nvme_measure *m) {
    assert(m);
    return m->records * m->record_bytes;
}

static int once(struct sw_nvme_measure *m, uint32_t write) {
    assert(m);
    struct side s = {.m = m, .write = write, .end = m->records};
    move(&s);
    return s.ret;
}

int sw_nvme_measure_fill(struct sw_nvme_measure *m) {
    assert(m);
    m->salt += 1ull << 56;
    return once(m, 1);
}

int sw_nvme_measure_check(struct sw_nvme_measure *m) {
    return once(m, 0);
}

int sw_nvme_measure_run(struct sw_nvme_measure *m, enum sw_nvme_pattern pattern,
                        uint32_t block_bytes, uint32_t depth, double seconds,
                        struct sw_nvme_rates *rates) {
    assert(m && rates && seconds > 0);
    struct side reader = {
        .m = m, .end = m->records, .block_bytes = block_bytes, .depth = depth, .seconds = seconds};
    struct side writer = reader;
    writer.write = 1;
    int ret;
    if (pattern == SW_NVME_MIXED) {
        reader.end = writer.first = m->records / 2;
        ret = move_both(&reader, &writer);
    } else {
        struct side *one = pattern == SW_NVME_READ ? &reader : &writer;
        move(one);
        ret = one->ret;
    }
    if (ret) return ret;
    rates->read = reader.rate;
    rates->write = writer.rate;
    rates->seconds = reader.took > writer.took ? reader.took : writer.took;
    return 0;
}

int sw_nvme_measure_speed(const char *folder, void *buf, uint64_t buf_bytes, double seconds,
                          uint64_t *bytes_per_s) {
    assert(folder && bytes_per_s);
    const struct sw_nvme_measure_options options = {.folders = &folder,
                                                    .folder_count = 1,
                                                    .name = "spillway-speed",
                                                    .bytes = SPEED_BYTES,
                                                    .buf = buf,
                                                    .buf_bytes = buf_bytes};
    struct sw_nvme_measure *m;
    struct sw_nvme_rates rates;
    int ret = sw_nvme_measure_open(&m, &options);
    if (ret) return ret;
    ret = sw_nvme_measure_fill(m);
    if (!ret) ret = sw_nvme_measure_run(m, SW_NVME_MIXED, 0, 0, seconds, &rates);
    sw_nvme_measure_close(m);
    if (!ret) *bytes_per_s = (uint64_t)(rates.read + rates.write);
    return ret;
}
