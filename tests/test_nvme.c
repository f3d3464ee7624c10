/* Records through queues: bytes come back from where they were written, in order, whatever the disk
 * does in between, and every error has its own clear answer. */
#include "nvme/nvme.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cmocka.h>

#include "tests/support_faulty_io.h"
#include "tests/support_nvme.h"

static void write_all(struct sw_nvme_queue *q, uint32_t homes, uint32_t version) {
    char *buf = pages(RECORD_MAX);
    for (uint32_t c = 0; c < CHUNKS; c++)
        for (uint32_t h = 0; h < homes; h++) {
            pattern(buf, odd_records[c], c, h, version);
            assert_int_equal(one(q, 1, buf, c, h), 0);
        }
    free(buf);
}
static void check_all(struct sw_nvme_queue *q, uint32_t homes, uint32_t version) {
    char *buf = pages(RECORD_MAX + PAGE);
    for (uint32_t c = 0; c < CHUNKS; c++)
        for (uint32_t h = 0; h < homes; h++) {
            memset(buf, 0x11, RECORD_MAX + PAGE);
            assert_int_equal(one(q, 0, buf, c, h), 0);
            if (!matches(buf, odd_records[c], c, h, version))
                fail_msg("chunk %u home %u came back wrong", c, h);
            for (uint64_t i = 0; i < PAGE; i++) /* nothing behind the record was touched */
                assert_int_equal(buf[odd_records[c] + i], 0x11);
        }
    free(buf);
}

static void records_of_odd_sizes_come_back_from_every_place(void **state) {
    (void)state;
    static const uint32_t blocks[] = {PAGE, 3 * PAGE, 64 * PAGE, 1 << 20};
    for (uint32_t folders = 1; folders <= 3; folders += 2)
        for (uint32_t homes = 1; homes <= 2; homes++)
            for (int b = 0; b < 4; b++)
                for (uint32_t depth = 1; depth <= 5; depth += 4) {
                    struct sw_nvme_store *store = open_store("odd", folders, homes);
                    struct sw_nvme_queue *w, *r;
                    assert_int_equal(open_queue(&w, store, 1, depth, blocks[b], NULL, 0), 0);
                    assert_int_equal(open_queue(&r, store, 0, depth, blocks[b], NULL, 0), 0);
                    write_all(w, homes, depth);
                    check_all(r, homes, depth);
                    sw_nvme_queue_close(w);
                    sw_nvme_queue_close(r);
                    sw_nvme_close(store, 1);
                }
}

static void a_write_to_one_home_leaves_the_other(void **state) {
    (void)state;
    struct sw_nvme_store *store = open_store("homes", 2, 2);
    struct sw_nvme_queue *w, *r;
    assert_int_equal(open_queue(&w, store, 1, 4, 4 * PAGE, NULL, 0), 0);
    assert_int_equal(open_queue(&r, store, 0, 4, 4 * PAGE, NULL, 0), 0);
    write_all(w, 2, 1);
    char *buf = pages(RECORD_MAX);
    for (uint32_t c = 0; c < CHUNKS; c++) {
        pattern(buf, odd_records[c], c, c % 2, 2);
        assert_int_equal(one(w, 1, buf, c, c % 2), 0);
    }
    for (uint32_t c = 0; c < CHUNKS; c++)
        for (uint32_t h = 0; h < 2; h++) {
            assert_int_equal(one(r, 0, buf, c, h), 0);
            assert_true(matches(buf, odd_records[c], c, h, h == c % 2 ? 2 : 1));
        }
    assert_int_equal(sw_nvme_sync(store), 0);
    free(buf);
    sw_nvme_queue_close(w);
    sw_nvme_queue_close(r);
    sw_nvme_close(store, 1);
}

static void registered_buffers_give_the_same_bytes(void **state) {
    (void)state;
    struct sw_nvme_store *store = open_store("fixed", 1, 1);
    struct sw_nvme_queue *w, *r;
    char *slab =
        mmap(NULL, 4 * RECORD_MAX, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(slab != MAP_FAILED);
    assert_int_equal(open_queue(&w, store, 1, 4, 8 * PAGE, slab, 4 * RECORD_MAX), 0);
    assert_int_equal(open_queue(&r, store, 0, 4, 8 * PAGE, slab, 4 * RECORD_MAX), 0);
    for (uint32_t c = 0; c < CHUNKS; c++) {
        char *out = slab + (c % 3) * RECORD_MAX, *in = slab + 3 * RECORD_MAX;
        pattern(out, odd_records[c], c, 0, 9);
        assert_int_equal(one(w, 1, out, c, 0), 0);
        assert_int_equal(one(r, 0, in, c, 0), 0);
        assert_memory_equal(in, out, odd_records[c]);
    }
    write_all(w, 1, 4); /* buffers outside the registered memory are served too */
    check_all(r, 1, 4);
    sw_nvme_queue_close(w);
    sw_nvme_queue_close(r);
    sw_nvme_close(store, 1);
    munmap(slab, 4 * RECORD_MAX);
}

static void requests_come_back_in_the_order_of_submission(void **state) {
    (void)state;
    struct faulty_plan plan = {.seed = 1, .reorder = 1};
    struct sw_nvme_store *store = open_store("order", 3, 1);
    struct sw_nvme_queue *q;
    assert_int_equal(open_faulty(&q, store, 1, 4, PAGE, &plan), 0);
    static struct sw_nvme_req reqs[200];
    char *buf = pages(RECORD_MAX);
    pattern(buf, RECORD_MAX, 0, 0, 0);
    uint32_t sent = 0, back = 0;
    while (back < 200) {
        while (sent < 200) {
            reqs[sent] = (struct sw_nvme_req){.buf = buf, .chunk = sent % CHUNKS, .write = 1};
            const int ret = sw_nvme_submit(q, &reqs[sent]);
            if (ret == -EAGAIN) break;
            assert_int_equal(ret, 0);
            sent++;
        }
        assert_true(sent - back <= SW_NVME_REQS_MAX);
        if (sent < 200) assert_int_equal(sent - back, SW_NVME_REQS_MAX);
        struct sw_nvme_req *done[SW_NVME_REQS_MAX];
        const uint32_t want = back % 3;
        const int n = sw_nvme_reap(q, done, want, 5);
        assert_true(n <= 5 && (n >= (int)want || (uint32_t)n == sent - back));
        for (int i = 0; i < n; i++) {
            assert_ptr_equal(done[i], &reqs[back++]);
            assert_int_equal(done[i]->result, 0);
        }
    }
    struct sw_nvme_req *done[1];
    assert_int_equal(sw_nvme_reap(q, done, 1, 1), 0); /* nothing pending: no endless wait */
    free(buf);
    sw_nvme_queue_close(q);
    sw_nvme_close(store, 1);
}

static void a_full_ring_moves_every_byte(void **state) {
    (void)state;
    enum { N = 32, RECORD = 1 << 20 };
    uint64_t records[N];
    for (int i = 0; i < N; i++) records[i] = RECORD;
    const struct sw_nvme_options o = {three_folders, 2, "load", records, N, 1, NULL};
    struct sw_nvme_store *store;
    assert_int_equal(sw_nvme_open(&store, &o), 0);
    char *slab = pages(8ull * RECORD);
    for (int write = 1; write >= 0; write--) {
        struct sw_nvme_queue *q;
        assert_int_equal(open_queue(&q, store, write, 128, PAGE, slab, 8ull * RECORD), 0);
        struct sw_nvme_req reqs[8], *done[8];
        for (uint32_t base = 0; base < N; base += 8) {
            for (uint32_t i = 0; i < 8; i++) {
                char *buf = slab + (uint64_t)i * RECORD;
                if (write)
                    pattern(buf, RECORD, base + i, 0, 1);
                else
                    memset(buf, 0, RECORD);
                reqs[i] =
                    (struct sw_nvme_req){.buf = buf, .chunk = base + i, .write = (uint32_t)write};
                assert_int_equal(sw_nvme_submit(q, &reqs[i]), 0);
            }
            assert_int_equal(sw_nvme_reap(q, done, 8, 8), 8);
            for (uint32_t i = 0; i < 8; i++) {
                assert_int_equal(reqs[i].result, 0);
                if (!write) assert_true(matches(reqs[i].buf, RECORD, base + i, 0, 1));
            }
        }
        sw_nvme_queue_close(q);
    }
    free(slab);
    sw_nvme_close(store, 1);
}

/* A writer and a reader at once, each with its own queue and its own half of the chunks. */
struct side {
    struct sw_nvme_store *store;
    uint32_t home;
    int rounds, bad;
};
static void *read_and_write(void *arg) {
    struct side *side = arg;
    struct sw_nvme_queue *w, *r;
    side->bad = 1;
    if (open_queue(&w, side->store, 1, 4, 2 * PAGE, NULL, 0)) return NULL;
    if (open_queue(&r, side->store, 0, 4, 2 * PAGE, NULL, 0)) return NULL;
    void *buf = NULL;
    int ok = posix_memalign(&buf, PAGE, RECORD_MAX) == 0;
    for (int round = 0; round < side->rounds && ok; round++)
        for (int write = 1; write >= 0; write--)
            for (uint32_t c = 0; c < CHUNKS && ok; c++) {
                struct sw_nvme_req req = {
                    .buf = buf, .chunk = c, .home = side->home, .write = (uint32_t)write};
                struct sw_nvme_req *done;
                if (write) pattern(buf, odd_records[c], c, side->home, (uint32_t)round);
                struct sw_nvme_queue *q = write ? w : r;
                ok = !sw_nvme_submit(q, &req) && sw_nvme_reap(q, &done, 1, 1) == 1 && !req.result;
                if (ok && !write) ok = matches(buf, odd_records[c], c, side->home, (uint32_t)round);
            }
    free(buf);
    sw_nvme_queue_close(w);
    sw_nvme_queue_close(r);
    side->bad = !ok;
    return NULL;
}
static void queues_of_two_threads_do_not_disturb_each_other(void **state) {
    (void)state;
    struct sw_nvme_store *store = open_store("threads", 2, 2);
    struct side sides[2] = {{store, 0, 10, 0}, {store, 1, 10, 0}};
    pthread_t threads[2];
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, read_and_write, &sides[i]), 0);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    assert_false(sides[0].bad || sides[1].bad);
    sw_nvme_close(store, 1);
}

static void short_and_transient_results_lose_nothing(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 12; seed++) {
        struct faulty_plan plans[2] = {
            {.seed = seed,
             .short_one_in = 2 + seed % 3,
             .transient_one_in = 3,
             .reorder = seed % 2},
            {.seed = seed + 99, .short_one_in = 3, .transient_one_in = 2 + seed % 4, .reorder = 1}};
        struct sw_nvme_store *store = open_store("faults", 1 + seed % 3, 2);
        struct sw_nvme_queue *q[2];
        for (int write = 0; write < 2; write++)
            assert_int_equal(open_faulty(&q[write], store, write, 5, 4 * PAGE, &plans[write]), 0);
        write_all(q[1], 2, (uint32_t)seed);
        check_all(q[0], 2, (uint32_t)seed);
        assert_true(plans[0].faults > 10 && plans[1].faults > 10);
        sw_nvme_queue_close(q[0]);
        sw_nvme_queue_close(q[1]);
        sw_nvme_close(store, 1);
    }
    assert_int_equal(log_errors, 0);
}

static void a_refusal_that_lasts_ends_in_an_error(void **state) {
    (void)state;
    const struct faulty_plan plans[] = {
        {.forever = -EAGAIN}, {.forever = -EINTR}, {.no_progress = 1}};
    for (int i = 0; i < 3; i++) {
        forget_log();
        struct faulty_plan plan = plans[i];
        struct sw_nvme_store *store = open_store("forever", 1, 1);
        struct sw_nvme_queue *q;
        assert_int_equal(open_faulty(&q, store, 1, 2, PAGE, &plan), 0);
        char *buf = pages(RECORD_MAX);
        assert_int_equal(one(q, 1, buf, 1, 0), i == 2 ? -EIO : plan.forever);
        assert_int_equal(log_errors, 1);
        assert_true(plan.started <= 2 * (SW_NVME_RETRIES_MAX + 2));
        free(buf);
        sw_nvme_queue_close(q);
        sw_nvme_close(store, 1);
    }
}

static void an_io_error_names_its_place_and_fails_its_request_alone(void **state) {
    (void)state;
    struct sw_nvme_store *store = open_store("eio", 1, 2);
    const uint64_t home_bytes = sw_nvme_bytes(&(struct sw_nvme_options){
                                    three_folders, 1, "eio", odd_records, CHUNKS, 2, NULL}) /
                                2;
    /* The third page of chunk 2 in home 1: chunks 0 and 1 (4 pages) lie before it. */
    struct faulty_plan plan = {.reorder = 1,
                               .error = -EIO,
                               .error_times = 1000,
                               .error_offset = home_bytes + (4 + 2) * PAGE};
    struct sw_nvme_queue *q;
    assert_int_equal(open_faulty(&q, store, 1, 3, PAGE, &plan), 0);
    char *bufs[4];
    struct sw_nvme_req reqs[4], *done[4];
    for (uint32_t i = 0; i < 4; i++) {
        bufs[i] = pages(RECORD_MAX);
        reqs[i] = (struct sw_nvme_req){.buf = bufs[i], .chunk = i, .home = 1, .write = 1};
        pattern(bufs[i], odd_records[i], i, 1, 3);
        assert_int_equal(sw_nvme_submit(q, &reqs[i]), 0);
    }
    assert_int_equal(sw_nvme_reap(q, done, 4, 4), 4);
    for (uint32_t i = 0; i < 4; i++) {
        assert_ptr_equal(done[i], &reqs[i]);
        assert_int_equal(reqs[i].result, i == 2 ? -EIO : 0);
    }
    sw_nvme_queue_close(q);
    char offset[64];
    snprintf(offset, sizeof(offset), "offset %llu", (unsigned long long)plan.error_offset);
    assert_int_equal(log_errors, 1);
    assert_logged("write of chunk 2 (home 1)");
    assert_logged("eio.0.state");
    assert_logged(offset);
    assert_logged(strerror(EIO));
    assert_int_equal(open_queue(&q, store, 0, 3, PAGE, NULL, 0), 0);
    for (uint32_t i = 0; i < 4; i++) {
        if (i == 2) continue;
        assert_int_equal(one(q, 0, bufs[i], i, 1), 0);
        assert_true(matches(bufs[i], odd_records[i], i, 1, 3));
    }
    for (int i = 0; i < 4; i++) free(bufs[i]);
    sw_nvme_queue_close(q);
    sw_nvme_close(store, 1);
}

static void a_refused_direct_transfer_goes_on_through_the_page_cache(void **state) {
    (void)state;
    struct sw_nvme_store *store = open_store("einval", 1, 1);
    struct faulty_plan plan = {.error = -EINVAL, .error_times = 1, .error_offset = 0};
    struct sw_nvme_queue *w, *r;
    assert_int_equal(open_faulty(&w, store, 1, 3, PAGE, &plan), 0);
    assert_int_equal(open_queue(&r, store, 0, 3, PAGE, NULL, 0), 0);
    struct sw_nvme_mode mode;
    sw_nvme_queue_mode(w, &mode);
    const int was_direct = mode.direct;
    forget_log();
    write_all(w, 1, 6);
    check_all(r, 1, 6);
    sw_nvme_queue_mode(w, &mode);
    assert_int_equal(mode.direct, 0);
    assert_int_equal(log_errors, 0);
    assert_int_equal(log_warnings, was_direct ? 1 : 0);
    if (was_direct) assert_logged("page cache");
    sw_nvme_queue_close(w);
    sw_nvme_queue_close(r);
    sw_nvme_close(store, 1);
}

static void an_invalid_transfer_is_not_tried_for_ever(void **state) {
    (void)state;
    struct sw_nvme_store *store = open_store("invalid", 1, 1);
    struct faulty_plan plan = {.forever = -EINVAL};
    struct sw_nvme_queue *q;
    assert_int_equal(open_faulty(&q, store, 1, 3, PAGE, &plan), 0);
    char *buf = pages(RECORD_MAX);
    assert_int_equal(one(q, 1, buf, 0, 0), -EINVAL);
    assert_true(plan.started <= 3);
    free(buf);
    sw_nvme_queue_close(q);
    sw_nvme_close(store, 1);
}

static void a_file_cut_behind_our_back_is_an_error(void **state) {
    (void)state;
    struct sw_nvme_store *store = open_store("cut", 1, 1);
    struct sw_nvme_queue *r;
    assert_int_equal(open_queue(&r, store, 0, 3, 4 * PAGE, NULL, 0), 0);
    char path[128], *buf = pages(RECORD_MAX);
    snprintf(path, sizeof(path), "%s/cut.0.state", dir_a);
    assert_int_equal(truncate(path, 5 * PAGE), 0); /* chunk 2 begins at page 4 */
    assert_int_equal(one(r, 0, buf, 1, 0), 0);
    assert_int_equal(one(r, 0, buf, 2, 0), -EIO);
    assert_logged("chunk 2");
    assert_int_equal(log_errors, 1);
    free(buf);
    sw_nvme_queue_close(r);
    sw_nvme_close(store, 1);
}

static void a_failing_back_end_ends_the_queue(void **state) {
    (void)state;
    struct sw_nvme_store *store = open_store("backend", 1, 1);
    struct faulty_plan plan = {.wait_fails = 3, .only_account = 1};
    struct sw_nvme_queue *q;
    assert_int_equal(open_faulty(&q, store, 1, 1, PAGE, &plan), 0);
    char *buf = pages(RECORD_MAX);
    assert_int_equal(one(q, 1, buf, 4, 0), -EBADF);
    assert_int_equal(one(q, 1, buf, 0, 0), -EBADF);
    assert_int_equal(log_errors, 1);
    free(buf);
    sw_nvme_queue_close(q);
    sw_nvme_close(store, 1);
}

/* Records beyond 2 and 4 GiB: only their arithmetic, over address space without memory. */
static void records_above_4_gib_are_split_below_2_gib(void **state) {
    (void)state;
    const uint64_t records[2] = {(1ull << 31) + PAGE, 1ull << 32};
    const struct sw_nvme_options o = {three_folders, 1, "huge", records, 2, 1, NULL};
    struct sw_nvme_store *store;
    const int ret = sw_nvme_open(&store, &o);
    if (ret == -ENOSPC) skip();
    assert_int_equal(ret, 0);
    char *space =
        mmap(NULL, 1ull << 32, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_true(space != MAP_FAILED);
    for (uint32_t c = 0; c < 2; c++) {
        struct faulty_plan plan = {.only_account = 1};
        struct sw_nvme_queue *q;
        assert_int_equal(open_faulty(&q, store, 0, 2, 0xFFFFF000u, &plan), 0);
        assert_int_equal(one(q, 0, space, c, 0), 0);
        assert_true(plan.bytes == records[c]);
        assert_true(plan.longest <= 0x7FFFF000u);
        assert_true(plan.low_offset == (c ? records[0] : 0));
        assert_true(plan.high_offset == plan.low_offset + records[c]);
        sw_nvme_queue_close(q);
    }
    munmap(space, 1ull << 32);
    sw_nvme_close(store, 1);
}

static void queues_can_be_opened_and_closed_again_and_again(void **state) {
    (void)state;
    struct sw_nvme_store *store = open_store("cycle", 1, 1);
    char *slab = pages(1 << 20);
    struct sw_nvme_mode first, last;
    for (int i = 0; i < 300; i++) {
        struct sw_nvme_queue *q;
        assert_int_equal(open_queue(&q, store, 0, 8, PAGE, slab, 1 << 20), 0);
        sw_nvme_queue_mode(q, i ? &last : &first);
        sw_nvme_queue_close(q);
    }
    assert_memory_equal(&first, &last, sizeof(first));
    free(slab);
    sw_nvme_close(store, 1);
}

static uint64_t proc_io(const char *key) {
    FILE *f = fopen("/proc/self/io", "r");
    char line[128];
    unsigned long long value = 0;
    const size_t len = strlen(key);
    while (f && fgets(line, sizeof(line), f))
        if (!strncmp(line, key, len)) sscanf(line + len, ": %llu", &value);
    if (f) fclose(f);
    return value;
}
static void the_kernel_counts_the_bytes_that_were_moved(void **state) {
    (void)state;
    enum { N = 16, RECORD = 1 << 20 };
    uint64_t records[N];
    for (int i = 0; i < N; i++) records[i] = RECORD;
    const struct sw_nvme_options o = {three_folders, 1, "count", records, N, 1, NULL};
    struct sw_nvme_store *store;
    assert_int_equal(sw_nvme_open(&store, &o), 0);
    struct sw_nvme_mode mode;
    char *buf = pages(RECORD);
    uint64_t moved[2];
    int counted = 1;
    for (int write = 1; write >= 0; write--) {
        struct sw_nvme_queue *q;
        assert_int_equal(open_queue(&q, store, write, 8, 1 << 18, buf, RECORD), 0);
        sw_nvme_queue_mode(q, &mode);
        const char *key = write ? "write_bytes" : "read_bytes";
        const uint64_t before = proc_io(key);
        for (uint32_t c = 0; c < N; c++) assert_int_equal(one(q, write, buf, c, 0), 0);
        moved[write] = proc_io(key) - before;
        counted &= mode.direct && proc_io(key) > 0;
        sw_nvme_queue_close(q);
    }
    free(buf);
    sw_nvme_close(store, 1);
    if (!counted) skip(); /* no direct I/O, or no accounting in this kernel or file system */
    for (int i = 0; i < 2; i++) {
        assert_true(moved[i] >= (uint64_t)N * RECORD);
        assert_true(moved[i] <= (uint64_t)N * RECORD / 100 * 101);
    }
}

#define T(name) cmocka_unit_test_setup(name, setup)
int main(void) {
    const struct CMUnitTest tests[] = {
        T(records_of_odd_sizes_come_back_from_every_place),
        T(a_write_to_one_home_leaves_the_other),
        T(registered_buffers_give_the_same_bytes),
        T(requests_come_back_in_the_order_of_submission),
        T(a_full_ring_moves_every_byte),
        T(queues_of_two_threads_do_not_disturb_each_other),
        T(short_and_transient_results_lose_nothing),
        T(a_refusal_that_lasts_ends_in_an_error),
        T(an_io_error_names_its_place_and_fails_its_request_alone),
        T(a_refused_direct_transfer_goes_on_through_the_page_cache),
        T(an_invalid_transfer_is_not_tried_for_ever),
        T(a_file_cut_behind_our_back_is_an_error),
        T(a_failing_back_end_ends_the_queue),
        T(records_above_4_gib_are_split_below_2_gib),
        T(queues_can_be_opened_and_closed_again_and_again),
        T(the_kernel_counts_the_bytes_that_were_moved),
    };
    return cmocka_run_group_tests(tests, make_folders, remove_folders);
}
