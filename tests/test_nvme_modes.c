/* tests/test_nvme_modes.c - what the caller may choose: the drives' shares, polling, and reads
 * ahead of writes. */
#include "tests/support_nvme.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <cmocka.h>

#include "nvme/nvme_internal.h"

static uint32_t folder_of(struct sw_nvme_store *store, uint32_t chunk) {
    uint64_t offset;
    const char *path = sw_nvme_where(store, chunk, 0, &offset);
    for (uint32_t f = 0; f < 3; f++)
        if (!strncmp(path, three_folders[f], strlen(three_folders[f]))) return f;
    fail_msg("'%s' lies in no folder", path);
    return 3;
}

static void chunks_are_striped_in_the_proportions_of_the_shares(void **state) {
    (void)state;
    enum { N = 60 };
    const uint32_t shares[][3] = {{1, 2, 3}, {3000, 1000, 1000}, {7, 7, 7}, {4000000000u, 1, 1}};
    uint64_t records[N];
    for (int i = 0; i < N; i++) records[i] = 2 * PAGE;
    for (size_t s = 0; s < sizeof(shares) / sizeof(shares[0]); s++) {
        const struct sw_nvme_options o = {three_folders, 3, "shared", records, N, 1, shares[s]};
        struct sw_nvme_store *store;
        assert_int_equal(sw_nvme_open(&store, &o), 0);
        int chunks[3] = {0};
        for (uint32_t c = 0; c < N; c++) chunks[folder_of(store, c)]++;
        const double sum = (double)shares[s][0] + shares[s][1] + shares[s][2];
        /* Never more than a chunk from the exact part, and a chunk more on whoever comes first. */
        for (int f = 0; f < 3; f++)
            if (abs(chunks[f] - (int)((double)N * shares[s][f] / sum)) > 1)
                fail_msg("shares %zu: folder %d has %d chunks", s, f, chunks[f]);
        sw_nvme_close(store, 1);
    }
}

static void even_shares_are_no_shares(void **state) {
    (void)state;
    const uint32_t even[3] = {5, 5, 5};
    struct sw_nvme_options o = {three_folders, 3, "even", odd_records, CHUNKS, 2, NULL};
    struct sw_nvme_store *store;
    uint32_t folder[CHUNKS];
    uint64_t offset[2][CHUNKS];
    for (int shared = 0; shared < 2; shared++) {
        o.shares = shared ? even : NULL;
        assert_int_equal(sw_nvme_open(&store, &o), 0);
        for (uint32_t c = 0; c < CHUNKS; c++) {
            if (shared) assert_int_equal(folder_of(store, c), folder[c]);
            folder[c] = folder_of(store, c);
            sw_nvme_where(store, c, 1, &offset[shared][c]);
        }
        sw_nvme_close(store, 1);
    }
    assert_memory_equal(offset[0], offset[1], sizeof(offset[0]));
}

/* Every record through queues with these options. */
static void move_all(struct sw_nvme_store *store, struct sw_nvme_queue_options options,
                     struct sw_nvme_mode *mode) {
    struct sw_nvme_queue *queue;
    char *buf = pages(RECORD_MAX);
    options.base = buf;
    options.bytes = RECORD_MAX;
    for (int write = 1; write >= 0; write--) {
        options.write = (uint32_t)write;
        assert_int_equal(sw_nvme_queue_open(&queue, store, &options), 0);
        sw_nvme_queue_mode(queue, mode);
        for (uint32_t c = 0; c < CHUNKS; c++) {
            if (write) pattern(buf, odd_records[c], c, 0, 1 + options.sqpoll + 2 * options.iopoll);
            assert_int_equal(one(queue, write, buf, c, 0), 0);
            if (!write)
                assert_true(
                    matches(buf, odd_records[c], c, 0, 1 + options.sqpoll + 2 * options.iopoll));
        }
        sw_nvme_queue_close(queue);
    }
    free(buf);
}

static void polling_is_off_unless_asked_for_and_moves_the_same_bytes(void **state) {
    (void)state;
    struct sw_nvme_store *store = open_store("poll", 2, 1);
    for (uint32_t p = 0; p < 4; p++) {
        const struct sw_nvme_queue_options options = {
            .block_bytes = 4 * PAGE, .sqpoll = p & 1, .iopoll = p >> 1};
        struct sw_nvme_mode mode;
        forget_log();
        move_all(store, options, &mode);
        assert_true(mode.sqpoll <= (int)options.sqpoll && mode.iopoll <= (int)options.iopoll);
        /* Asked for and not in use: the log said why, here or in an earlier turn of this loop. */
        if (p == 1 && mode.io_uring && !mode.sqpoll) assert_logged("no kernel thread submits");
        if (p == 2 && mode.io_uring && !mode.iopoll) assert_logged("not polled for");
    }
    sw_nvme_close(store, 1);
}

/* CPU time of the whole process and of the kernel threads it started, as far as they count here. */
static double cpu_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void open_queues_that_wait_cost_no_cpu(void **state) {
    (void)state;
    struct sw_nvme_store *store = open_store("idle", 1, 1);
    struct sw_nvme_queue *queues[2];
    for (uint32_t write = 0; write < 2; write++) {
        const struct sw_nvme_queue_options options = {.write = write};
        assert_int_equal(sw_nvme_queue_open(&queues[write], store, &options), 0);
    }
    const double before = cpu_seconds();
    nanosleep(&(struct timespec){.tv_nsec = 300000000}, NULL);
    /* A thread that polls would take 0.3 s; a tenth of that is far above what waking takes. */
    assert_true(cpu_seconds() - before < 0.03);
    for (int i = 0; i < 2; i++) sw_nvme_queue_close(queues[i]);
    sw_nvme_close(store, 1);
}

/* ---- reads first: a back end that holds what it was given ---- */

struct held_io {
    struct sw_nvme_block blocks[64];
    uint32_t count, most;
    int hold;
};

static int held_open(void **io, const struct sw_nvme_setup *setup, struct sw_nvme_mode *mode) {
    *mode = (struct sw_nvme_mode){0};
    *io = setup->ctx;
    return 0;
}

static void held_close(void *io) {
    assert_int_equal(((struct held_io *)io)->count, 0);
}

static int held_start(void *arg, const struct sw_nvme_block *block) {
    struct held_io *io = arg;
    io->blocks[io->count++] = *block;
    if (io->count > io->most) io->most = io->count;
    return 0;
}

static int held_wait(void *arg, struct sw_nvme_done *done, uint32_t max, int block) {
    struct held_io *io = arg;
    if (io->hold && !block) return 0;
    uint32_t n = 0;
    for (; n < max && io->count; n++) {
        io->count--;
        done[n] = (struct sw_nvme_done){io->blocks[io->count].tag,
                                        (int32_t)io->blocks[io->count].len_bytes};
    }
    return (int)n;
}

static const struct sw_nvme_io_ops held_ops = {"held", held_open, held_close, held_start,
                                               held_wait};

static void finish(struct sw_nvme_queue *queue, struct held_io *io) {
    struct sw_nvme_req *done;
    io->hold = 0;
    assert_int_equal(sw_nvme_reap(queue, &done, 1, 1), 1);
    assert_int_equal(done->result, 0);
}

/* Blocks of a write that are in flight at once; `drive` has the read's chunk or another. */
static uint32_t writes_at_once(struct sw_nvme_store *store, int awaited, uint32_t read_chunk,
                               int reading) {
    enum { DEPTH = 8, LARGE = 4 };
    struct held_io read_io = {.hold = 1}, write_io = {.hold = 1};
    struct sw_nvme_queue *reader, *writer;
    const struct sw_nvme_queue_options options = {.depth = DEPTH, .block_bytes = PAGE};
    struct sw_nvme_queue_options out = options;
    out.write = 1;
    assert_int_equal(sw_nvme_queue_open_on(&reader, store, &options, &held_ops, &read_io), 0);
    assert_int_equal(sw_nvme_queue_open_on(&writer, store, &out, &held_ops, &write_io), 0);
    char *bufs[2] = {pages(RECORD_MAX), pages(RECORD_MAX)};
    struct sw_nvme_req read = {.buf = bufs[0], .chunk = read_chunk};
    struct sw_nvme_req write = {.buf = bufs[1], .chunk = LARGE, .write = 1};
    if (reading) assert_int_equal(sw_nvme_submit(reader, &read), 0);
    if (awaited) sw_nvme_reads_first(store, 1);
    assert_int_equal(sw_nvme_submit(writer, &write), 0);
    const uint32_t at_once = write_io.count;
    if (awaited) sw_nvme_reads_first(store, 0);
    finish(writer, &write_io); /* nobody waits any more: the rest goes at full depth */
    assert_int_equal(write_io.most, DEPTH);
    if (reading) finish(reader, &read_io);
    sw_nvme_queue_close(reader);
    sw_nvme_queue_close(writer);
    for (int i = 0; i < 2; i++) free(bufs[i]);
    return at_once;
}

static void a_writer_keeps_back_while_a_read_of_its_drive_is_awaited(void **state) {
    (void)state;
    struct sw_nvme_store *store = open_store("first", 2, 1);
    uint32_t same = CHUNKS, other = CHUNKS;
    for (uint32_t c = 0; c < CHUNKS; c++) {
        if (c == 4) continue;
        if (folder_of(store, c) == folder_of(store, 4))
            same = c;
        else
            other = c;
    }
    assert_true(same < CHUNKS && other < CHUNKS);
    assert_int_equal(writes_at_once(store, 0, same, 1), 8);  /* nobody waits */
    assert_int_equal(writes_at_once(store, 1, same, 0), 8);  /* nothing is being read */
    assert_int_equal(writes_at_once(store, 1, other, 1), 8); /* of another drive */
    assert_int_equal(writes_at_once(store, 1, same, 1), 2);
    sw_nvme_close(store, 1);
}

#define T(name) cmocka_unit_test_setup(name, setup)
int main(void) {
    const struct CMUnitTest tests[] = {
        T(chunks_are_striped_in_the_proportions_of_the_shares),
        T(even_shares_are_no_shares),
        T(open_queues_that_wait_cost_no_cpu), /* before a kernel thread of ours ever polled */
        T(polling_is_off_unless_asked_for_and_moves_the_same_bytes),
        T(a_writer_keeps_back_while_a_read_of_its_drive_is_awaited),
    };
    return cmocka_run_group_tests(tests, make_folders, remove_folders);
}
