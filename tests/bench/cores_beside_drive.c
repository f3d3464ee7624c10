/* Measures how independent the cores and the drive of this machine are: arithmetic that touches no
 * memory on every core, the store reading and writing at full speed, and both at once.
 *
 *     make bench-tools && build/release/tests/bench/cores_beside_drive FOLDER [ROUNDS]
 *
 * No schedule of any engine can hide an update behind a computation better than `together / (alone
 * + alone)` here: there is no model, no optimizer and no copy in this program. Where the drive is
 * virtual, the hypervisor moves its bytes with the same cores. */
#include <omp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/log.h"
#include "nvme/nvme.h"
#include "offload/arena.h"
#include "tests/bench/rounds.h"

enum { SLOTS = 4, CHUNKS = 400, ROUNDS_DEFAULT = 9 };
#define RECORD_BYTES (12ull << 20)

struct half { /* one direction: the first half of the chunks is read, the second written */
    struct sw_nvme_store *store;
    struct sw_arena *arena;
    uint32_t write, first, end;
};

static void say(enum sw_log_level level, const char *line, void *ctx) {
    (void)level;
    (void)ctx;
    fprintf(stderr, "%s\n", line);
}

static void need(int ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "cores_beside_drive: %s failed\n", what);
    exit(1);
}

static void *move(void *arg) {
    const struct half *h = arg;
    char *slots = h->arena->base + (h->write ? SLOTS * RECORD_BYTES : 0);
    struct sw_nvme_queue *queue;
    need(!sw_nvme_queue_open(&queue, h->store,
                             &(struct sw_nvme_queue_options){
                                 h->write, SW_NVME_DEPTH_DEFAULT, SW_NVME_BLOCK_BYTES_DEFAULT,
                                 h->arena->base, h->arena->bytes, 0, 0}),
         "opening a queue");
    struct sw_nvme_req requests[SLOTS], *done[SLOTS];
    uint32_t next = h->first, in_flight = 0;
    for (int i = 0; i < SLOTS && next < h->end; i++, in_flight++) {
        requests[i] = (struct sw_nvme_req){
            .buf = slots + (size_t)i * RECORD_BYTES, .chunk = next++, .write = h->write};
        need(!sw_nvme_submit(queue, &requests[i]), "a submission");
    }
    while (in_flight) {
        const int count = sw_nvme_reap(queue, done, 1, SLOTS);
        need(count > 0, "reaping");
        for (int i = 0; i < count; i++) {
            need(done[i]->result >= 0, "a transfer");
            in_flight--;
            if (next == h->end) continue;
            done[i]->chunk = next++;
            need(!sw_nvme_submit(queue, done[i]), "a submission");
            in_flight++;
        }
    }
    sw_nvme_queue_close(queue);
    return NULL;
}

static double drive(struct half sides[2]) {
    pthread_t reader;
    const double start = rounds_now();
    need(!pthread_create(&reader, NULL, move, &sides[0]), "starting a thread");
    move(&sides[1]);
    pthread_join(reader, NULL);
    return rounds_now() - start;
}

static volatile float sink;

/* Eight chains of multiply and add in registers, on every core. */
static double compute(uint64_t turns) {
    const double start = rounds_now();
#pragma omp parallel
    {
        float x[32];
        for (int k = 0; k < 32; k++) x[k] = (float)k;
        for (uint64_t i = 0; i < turns; i++)
#pragma GCC unroll 32
            for (int k = 0; k < 32; k++) x[k] = x[k] * 0.999f + 0.001f;
        float sum = 0;
        for (int k = 0; k < 32; k++) sum += x[k];
        sink = sum;
    }
    return rounds_now() - start;
}

struct computing {
    uint64_t turns;
    double seconds;
};

static void *compute_aside(void *arg) {
    struct computing *c = arg;
    c->seconds = compute(c->turns);
    return NULL;
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: cores_beside_drive FOLDER [ROUNDS]\n");
        return 2;
    }
    int rounds = argc > 2 ? atoi(argv[2]) : ROUNDS_DEFAULT;
    if (rounds < 1 || rounds > ROUNDS_MAX) rounds = ROUNDS_DEFAULT;
    sw_log_set_sink(say, NULL);
    uint64_t records[CHUNKS];
    for (int i = 0; i < CHUNKS; i++) records[i] = RECORD_BYTES;
    const char *const folder = argv[1];
    const struct sw_nvme_options options = {&folder, 1, "bench", records, CHUNKS, 1, NULL};
    struct sw_nvme_store *store;
    struct sw_arena arena;
    need(!sw_nvme_open(&store, &options), "opening the store");
    need(!sw_arena_open(&arena, 2 * SLOTS * RECORD_BYTES), "memory");
    struct half all = {store, &arena, 1, 0, CHUNKS};
    move(&all); /* blocks that were never written are read without the drive */
    struct half sides[2] = {{store, &arena, 0, 0, CHUNKS / 2},
                            {store, &arena, 1, CHUNKS / 2, CHUNKS}};
    struct computing c = {.turns = 1000000};
    for (int i = 0; i < 4; i++) /* as long as the drive takes */
        c.turns = (uint64_t)((double)c.turns * drive(sides) / compute(c.turns)) + 1;
    double alone[2][ROUNDS_MAX], beside[2][ROUNDS_MAX], ratio[ROUNDS_MAX];
    for (int r = 0; r < rounds; r++) {
        alone[0][r] = compute(c.turns);
        alone[1][r] = drive(sides);
        pthread_t thread;
        const double start = rounds_now();
        need(!pthread_create(&thread, NULL, compute_aside, &c), "starting a thread");
        beside[1][r] = drive(sides);
        pthread_join(thread, NULL);
        ratio[r] = (rounds_now() - start) / (alone[0][r] + alone[1][r]);
        beside[0][r] = c.seconds;
    }
    printf("{\"schema\": 1, \"rounds\": %d, \"threads\": %d, \"drive_gb_per_s\": %.2f,\n"
           " \"compute_alone_s\": %.3f, \"compute_beside_s\": %.3f,\n"
           " \"drive_alone_s\": %.3f, \"drive_beside_s\": %.3f,\n"
           " \"together_over_sum\": %.3f}\n",
           rounds, omp_get_max_threads(),
           (double)CHUNKS * (double)RECORD_BYTES / rounds_median(alone[1], rounds) * 1e-9,
           rounds_median(alone[0], rounds), rounds_median(beside[0], rounds),
           rounds_median(alone[1], rounds), rounds_median(beside[1], rounds),
           rounds_median(ratio, rounds));
    sw_nvme_close(store, 1);
    return 0;
}
