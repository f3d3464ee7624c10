/* The store's own cost: the queue's bookkeeping on a device that completes everything at once and
 * moves nothing, so that whatever time passes is the frame's; alone, and with the CRC-32C of every
 * record beside it.
 *
 *     nvme_frame [BLOCK_BYTES [DEPTH]]
 *
 * Prints nanoseconds of CPU time per GB moved, and GB/s that one core drives. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/crc32c.h"
#include "nvme/nvme_internal.h"
#include "offload/arena.h"

enum { RECORDS = 8, ROUNDS = 9, IN_FLIGHT_MAX = 1024 };
#define RECORD_BYTES (12ull << 20)
#define FRAME_BYTES  (256ull << 30) /* of one round */
#define CRC_BYTES    (2ull << 30)

/* ---- the null device ---- */

struct null_device {
    struct sw_nvme_done done[IN_FLIGHT_MAX];
    uint32_t count;
};

static int null_open(void **io, const struct sw_nvme_setup *setup, struct sw_nvme_mode *mode) {
    (void)mode;
    *io = setup->ctx;
    return 0;
}

static void null_close(void *io) {
    (void)io;
}

static int null_start(void *io, const struct sw_nvme_block *block) {
    struct null_device *d = io;
    d->done[d->count++] = (struct sw_nvme_done){block->tag, (int32_t)block->len_bytes};
    return 0;
}

static int null_wait(void *io, struct sw_nvme_done *done, uint32_t max, int block) {
    struct null_device *d = io;
    (void)block;
    uint32_t n = 0;
    while (n < max && d->count) done[n++] = d->done[--d->count];
    return (int)n;
}

static const struct sw_nvme_io_ops null_ops = {"null", null_open, null_close, null_start,
                                               null_wait};

/* ---- the measurement ---- */

static double cpu_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

static void need(int ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "nvme_frame: %s failed\n", what);
    exit(1);
}

static volatile uint32_t sink;

/* CPU nanoseconds to move `bytes` through the queue as a lane does: SLOTS requests pending. */
static double frame_ns(struct sw_nvme_queue *queue, char *base, uint64_t bytes, int with_crc) {
    enum { SLOTS = 4 };
    struct sw_nvme_req reqs[SLOTS], *done[SLOTS];
    uint64_t moved = 0;
    uint32_t next = 0;
    const double begin = cpu_ns();
    for (int i = 0; i < SLOTS; i++, next++) {
        reqs[i] = (struct sw_nvme_req){.buf = base + (uint64_t)i * RECORD_BYTES, .chunk = next};
        need(!sw_nvme_submit(queue, &reqs[i]), "a submission");
    }
    while (moved < bytes) {
        const int count = sw_nvme_reap(queue, done, 1, SLOTS);
        need(count > 0, "reaping");
        for (int i = 0; i < count; i++) {
            need(done[i]->result == 0, "a transfer");
            moved += RECORD_BYTES;
            if (with_crc) sink = sw_crc32c(0, done[i]->buf, RECORD_BYTES);
            done[i]->chunk = next++ % RECORDS;
            need(!sw_nvme_submit(queue, done[i]), "a submission");
        }
    }
    const double took = cpu_ns() - begin;
    for (int left = SLOTS; left > 0;) left -= sw_nvme_reap(queue, done, 1, SLOTS);
    return took * 1e9 / (double)moved;
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    const uint32_t block = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 0;
    const uint32_t depth = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 0;
    struct sw_nvme_place places[RECORDS];
    struct sw_nvme_store store = {
        .file_count = 1, .chunk_count = RECORDS, .homes = 1, .places = places};
    for (uint32_t r = 0; r < RECORDS; r++)
        places[r] = (struct sw_nvme_place){r * RECORD_BYTES, RECORD_BYTES, 0};
    struct null_device device = {.count = 0};
    struct sw_nvme_queue *queue;
    struct sw_arena arena;
    need(depth <= IN_FLIGHT_MAX && block % SW_NVME_ALIGN_BYTES == 0, "BLOCK_BYTES or DEPTH");
    need(!sw_arena_open(&arena, 4 * RECORD_BYTES), "memory");
    const struct sw_nvme_queue_options options = {.depth = depth, .block_bytes = block};
    need(!sw_nvme_queue_open_on(&queue, &store, &options, &null_ops, &device), "opening a queue");
    double alone[ROUNDS], with_crc[ROUNDS];
    for (int r = 0; r < ROUNDS; r++) {
        alone[r] = frame_ns(queue, arena.base, FRAME_BYTES, 0);
        with_crc[r] = frame_ns(queue, arena.base, CRC_BYTES, 1);
    }
    qsort(alone, ROUNDS, sizeof(*alone), ascending);
    qsort(with_crc, ROUNDS, sizeof(*with_crc), ascending);
    printf("{\"schema\": 1, \"block_bytes\": %u, \"depth\": %u, \"rounds\": %d,\n"
           " \"frame_ns_per_gb\": %.0f, \"frame_gb_per_s_per_core\": %.0f,\n"
           " \"with_crc_ns_per_gb\": %.0f, \"with_crc_gb_per_s_per_core\": %.2f}\n",
           block ? block : SW_NVME_BLOCK_BYTES_DEFAULT, depth ? depth : SW_NVME_DEPTH_DEFAULT,
           ROUNDS, alone[ROUNDS / 2], 1e9 / alone[ROUNDS / 2], with_crc[ROUNDS / 2],
           1e9 / with_crc[ROUNDS / 2]);
    sw_nvme_queue_close(queue);
    sw_arena_close(&arena);
    return 0;
}
