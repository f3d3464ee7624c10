/* tools/bench_commit.c - see the header. */
#include "tools/bench_commit.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "nvme/homes.h"
#include "nvme/nvme.h"
#include "offload/arena.h"
#include "tools/bench.h"

/* Enough for each drive to have something to sync; what a record of more chunks takes longer is
 * little beside the drives' own answers. */
enum { CHUNKS_PER_FOLDER = 16, CHUNKS_MAX = CHUNKS_PER_FOLDER * 64, CHUNK_BYTES = 1 << 18 };
enum { COMMITS_MIN = 5, COMMITS_MAX = 101 };

struct bench {
    const char *const *folders;
    uint32_t folder_count, chunk_count;
    char name[64];
    struct sw_arena arena; /* a chunk for each request */
    struct sw_nvme_store *store;
    struct sw_nvme_queue *queue;
    struct sw_journal *journal;
    struct sw_homes homes;
    struct sw_nvme_req reqs[SW_NVME_REQS_MAX];
};

/* The files stay while they are open, whatever ends the process. */
static void forget_names(const struct bench *b) {
    for (uint32_t f = 0; f < b->folder_count; f++) {
        uint64_t offset; /* equal records go round robin: record f lies in folder f */
        unlink(sw_nvme_where(b->store, f, 0, &offset));
    }
    sw_commit_remove(b->folders[0], b->name);
}

static int open_store(struct bench *b) {
    uint64_t bytes[CHUNKS_MAX];
    for (uint32_t c = 0; c < b->chunk_count; c++) bytes[c] = CHUNK_BYTES;
    const struct sw_nvme_options options = {.folders = b->folders,
                                            .folder_count = b->folder_count,
                                            .name = b->name,
                                            .record_bytes = bytes,
                                            .chunk_count = b->chunk_count,
                                            .homes = 2};
    const struct sw_nvme_queue_options writes = {
        .write = 1, .base = b->arena.base, .bytes = b->arena.bytes};
    int ret = sw_nvme_open(&b->store, &options);
    if (ret == 0) ret = sw_nvme_queue_open(&b->queue, b->store, &writes);
    if (ret == 0) ret = sw_journal_open(&b->journal, b->folders[0], b->name, b->chunk_count, 1);
    if (ret == 0) ret = sw_homes_open(&b->homes, b->chunk_count, NULL);
    if (ret == 0) forget_names(b);
    return ret;
}

static void close_store(struct bench *b) {
    sw_homes_close(&b->homes);
    sw_journal_close(b->journal, 1);
    sw_nvme_queue_close(b->queue);
    sw_nvme_close(b->store, 1);
    sw_arena_close(&b->arena);
}

static int start_write(struct bench *b, struct sw_nvme_req *req, uint32_t chunk) {
    req->chunk = chunk;
    req->home = sw_homes_next(&b->homes, chunk);
    sw_homes_wrote(&b->homes, chunk, req->home, 0);
    return sw_nvme_submit(b->queue, req);
}

/* A step's writes: every chunk to the home that is not committed, all of them reaped. */
static int write_all(struct bench *b) {
    struct sw_nvme_req *done[SW_NVME_REQS_MAX];
    uint32_t next = 0, in_flight = 0;
    int ret = 0;
    for (; in_flight < SW_NVME_REQS_MAX && next < b->chunk_count && ret == 0; in_flight++) {
        b->reqs[in_flight] = (struct sw_nvme_req){
            .buf = b->arena.base + (uint64_t)in_flight * CHUNK_BYTES, .write = 1};
        ret = start_write(b, &b->reqs[in_flight], next++);
    }
    while (in_flight > 0 && ret == 0) {
        const int count = sw_nvme_reap(b->queue, done, 1, SW_NVME_REQS_MAX);
        if (count < 0) return count;
        in_flight -= (uint32_t)count;
        for (int i = 0; i < count && ret == 0; i++) {
            ret = done[i]->result;
            if (ret < 0 || next == b->chunk_count) continue;
            ret = start_write(b, done[i], next++);
            in_flight++;
        }
    }
    return ret;
}

/* Other bytes each time: a drive may see that nothing changed. */
static void change_bytes(struct bench *b, uint64_t round) {
    uint64_t *at = (uint64_t *)(void *)b->arena.base;
    for (uint64_t i = 0; i < (uint64_t)SW_NVME_REQS_MAX * CHUNK_BYTES / sizeof(*at); i++)
        at[i] = (i + round * 0x9E3779B97F4A7C15u) * 0xBF58476D1CE4E5B9u;
}

/* The first is not counted: it allocates what the others write over. */
static int measure(struct bench *b, double seconds, double *commit_s) {
    double times[COMMITS_MAX];
    int count = -1, ret = 0;
    const double begin = sw_bench_now();
    while (count < COMMITS_MIN || (count < COMMITS_MAX && sw_bench_now() - begin < seconds)) {
        struct sw_commit commit = {.step = (uint64_t)(count + 1)};
        if (sw_bench_stopped()) return -EINTR;
        change_bytes(b, (uint64_t)(count + 1));
        ret = write_all(b);
        if (ret < 0) return ret;
        const double before = sw_bench_now();
        ret = sw_homes_commit(&b->homes, b->store, b->journal, &commit);
        if (ret < 0) return ret;
        if (count >= 0) times[count] = sw_bench_now() - before;
        count++;
    }
    *commit_s = sw_bench_median(times, count);
    return 0;
}

int sw_bench_commit(const char *const *folders, uint32_t folder_count, double seconds,
                    double *commit_s) {
    struct bench b = {.folders = folders,
                      .folder_count = folder_count,
                      .chunk_count = folder_count * CHUNKS_PER_FOLDER};
    snprintf(b.name, sizeof(b.name), "spillway-bench-commit-%ld", (long)getpid());
    int ret = sw_arena_open(&b.arena, (uint64_t)SW_NVME_REQS_MAX * CHUNK_BYTES);
    if (ret == 0) ret = open_store(&b);
    if (ret == 0) ret = measure(&b, seconds, commit_s);
    close_store(&b);
    return ret;
}
