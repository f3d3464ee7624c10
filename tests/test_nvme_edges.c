/* What broke the I/O of other tools: sizes at the borders of blocks and of 32 bits, results that
 * are cut, errors at the first transfer and under load, a refusal that comes after everything
 * worked, a file with an odd end, queues opened a thousand times. */
#include "nvme/nvme_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

#include "tests/support_nvme.h"

/* ---- a back end that is late: it moves a block's bytes when it reports them, the newest first, so
 * that a buffer which comes back too early is one that is written to afterwards ---- */

enum { HELD_MAX = 64 };

struct late_io {                 /* its ctx */
    uint32_t cut_every;          /* every so many transfers one is cut */
    uint32_t fail_first, fail_n; /* these transfers, counted from 1, end with fail_code */
    int fail_code, fail_at_start;
    uint64_t started, cut, failed;
    uint32_t held_count;
    struct sw_nvme_block held[HELD_MAX];
    int fds[SW_NVME_FILES_MAX];
};

static int late_open(void **out, const struct sw_nvme_setup *setup, struct sw_nvme_mode *mode) {
    struct late_io *io = setup->ctx;
    assert_true(setup->entries <= HELD_MAX);
    memcpy(io->fds, setup->fds, setup->fd_count * sizeof(int));
    *mode = (struct sw_nvme_mode){0};
    *out = io;
    return 0;
}

static void late_close(void *arg) {
    struct late_io *io = arg;
    assert_int_equal(io->held_count, 0); /* idle before anybody frees the buffers */
}

static int fails_now(struct late_io *io) {
    const int fails = io->started >= io->fail_first && io->started < io->fail_first + io->fail_n;
    io->failed += (uint64_t)fails;
    return fails;
}

static int late_start(void *arg, const struct sw_nvme_block *block) {
    struct late_io *io = arg;
    if (io->fail_at_start) {
        io->started++;
        if (fails_now(io)) return io->fail_code;
    }
    assert_true(io->held_count < HELD_MAX);
    io->held[io->held_count++] = *block;
    return 0;
}

static int32_t late_transfer(struct late_io *io, const struct sw_nvme_block *b) {
    uint32_t len = b->len_bytes, told = len;
    if (!io->fail_at_start) {
        io->started++;
        if (fails_now(io)) return io->fail_code;
    }
    if (io->cut_every && io->started % io->cut_every == 0 && len > PAGE) {
        /* Direct I/O moves whole pages; what is told beyond them must not be believed. */
        told = PAGE + (uint32_t)(io->started * 977 % (len - PAGE));
        len = told / PAGE * PAGE;
        io->cut++;
    }
    const int fd = io->fds[b->file];
    const ssize_t n = b->write ? pwrite(fd, b->buf, len, (off_t)b->offset_bytes)
                               : pread(fd, b->buf, len, (off_t)b->offset_bytes);
    if (n < 0) return -errno;
    return n == (ssize_t)len ? (int32_t)told : (int32_t)n;
}

static int late_wait(void *arg, struct sw_nvme_done *done, uint32_t max, int block) {
    struct late_io *io = arg;
    uint32_t n = 0;
    if (!block) return 0;
    for (; n < max && n < 3 && io->held_count; n++) {
        const struct sw_nvme_block b = io->held[--io->held_count];
        done[n] = (struct sw_nvme_done){b.tag, late_transfer(io, &b)};
    }
    return (int)n;
}

static const struct sw_nvme_io_ops late_ops = {"late", late_open, late_close, late_start,
                                               late_wait};

static void open_late(struct sw_nvme_queue **q, struct sw_nvme_store *store, int write,
                      uint32_t block_bytes, struct late_io *io) {
    const struct sw_nvme_queue_options o = {
        .write = (uint32_t)write, .depth = 6, .block_bytes = block_bytes};
    assert_int_equal(sw_nvme_queue_open_on(q, store, &o, &late_ops, io), 0);
}

static void write_all(struct sw_nvme_queue *q, uint32_t version) {
    char *buf = pages(RECORD_MAX);
    for (uint32_t c = 0; c < CHUNKS; c++) {
        pattern(buf, odd_records[c], c, 0, version);
        assert_int_equal(one(q, 1, buf, c, 0), 0);
    }
    free(buf);
}

static void read_all(struct sw_nvme_queue *q, uint32_t version) {
    char *buf = pages(RECORD_MAX);
    for (uint32_t c = 0; c < CHUNKS; c++) {
        memset(buf, 0x11, RECORD_MAX);
        assert_int_equal(one(q, 0, buf, c, 0), 0);
        if (!matches(buf, odd_records[c], c, 0, version)) fail_msg("chunk %u is wrong", c);
    }
    free(buf);
}

/* ---- sizes ---- */

enum { BLOCK_PAGES = 4, SIZES = 13 };

/* Records of k blocks and r pages, written and read by one kind of queue. */
static void sizes_round_trip(struct sw_nvme_store *store, const uint64_t *records,
                             const struct sw_nvme_io_ops *ops, int registered, uint32_t version) {
    const uint64_t most = records[SIZES - 1];
    char *slab = pages((SIZES + 1) * most);
    for (int write = 1; write >= 0; write--) {
        const struct sw_nvme_queue_options o = {.write = (uint32_t)write,
                                                .depth = 3,
                                                .block_bytes = BLOCK_PAGES * PAGE,
                                                .base = registered ? slab : NULL,
                                                .bytes = registered ? SIZES * most : 0};
        struct sw_nvme_queue *q;
        assert_int_equal(sw_nvme_queue_open_on(&q, store, &o, ops, NULL), 0);
        for (uint32_t c = 0; c < SIZES; c++) {
            char *buf = slab + c * most;
            if (write)
                pattern(buf, records[c], c, 0, version);
            else
                memset(buf, 0x11, most + PAGE);
            assert_int_equal(one(q, write, buf, c, 0), 0);
            if (!write && !matches(buf, records[c], c, 0, version))
                fail_msg("%llu bytes came back wrong", (unsigned long long)records[c]);
            for (uint32_t i = 0; !write && i < PAGE; i++)
                assert_int_equal(buf[records[c] + i], 0x11);
        }
        sw_nvme_queue_close(q);
    }
    free(slab);
}

static void sizes_at_every_border_of_a_block_come_back_by_every_path(void **state) {
    (void)state;
    uint64_t records[SIZES];
    for (uint64_t i = 0; i < SIZES; i++) records[i] = (i + 1) * PAGE; /* 1 page to 3 blocks and 1 */
    const struct sw_nvme_options o = {three_folders, 2, "sizes", records, SIZES, 1, NULL};
    for (uint32_t direct = 0; direct < 2; direct++) {
        struct sw_nvme_store *store;
        assert_int_equal(sw_nvme_open(&store, &o), 0);
        for (uint32_t f = 0; f < 2 && !direct; f++) sw_nvme_drop_direct(store, f, "asked for");
        sizes_round_trip(store, records, NULL, 0, 1 + direct);
        sizes_round_trip(store, records, NULL, 1, 3 + direct);
        sizes_round_trip(store, records, &sw_nvme_threads_ops, 0, 5 + direct);
        sw_nvme_close(store, 1);
    }
}

/* Address space of which every 1 MiB is the same memory, with pages of their own at both ends. */
static char *folded(uint64_t bytes) {
    enum { FOLD = 1 << 20 };
    const int fd = memfd_create("folded", MFD_CLOEXEC);
    assert_true(fd >= 0 && ftruncate(fd, FOLD) == 0);
    char *space = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_true(space != MAP_FAILED);
    for (uint64_t at = 0; at < bytes; at += FOLD) {
        const uint64_t len = bytes - at < FOLD ? bytes - at : FOLD;
        assert_true(mmap(space + at, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) !=
                    MAP_FAILED);
    }
    close(fd);
    for (int end = 0; end < 2; end++)
        assert_true(mmap(space + (end ? bytes - PAGE : 0), PAGE, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED);
    return space;
}

static void regions_of_2_and_4_gib_come_back_at_both_ends(void **state) {
    (void)state;
    const uint64_t records[2] = {(1ull << 31) + PAGE, 1ull << 32};
    const struct sw_nvme_options o = {three_folders, 1, "large", records, 2, 1, NULL};
    struct sw_nvme_store *store;
    const int ret = sw_nvme_open(&store, &o);
    if (ret == -ENOSPC) {
        print_message("%s", logged);
        skip();
    }
    assert_int_equal(ret, 0);
    struct sw_nvme_queue *q;
    assert_int_equal(open_queue(&q, store, 0, 2, 0xFFFFF000u, NULL, 0), 0);
    char *mark = pages(PAGE);
    for (uint32_t c = 0; c < 2; c++) {
        uint64_t at;
        const char *path = sw_nvme_where(store, c, 0, &at);
        const int fd = open(path, O_WRONLY | O_CLOEXEC);
        for (uint32_t end = 0; end < 2; end++) {
            pattern(mark, PAGE, c, end, 1);
            assert_int_equal(pwrite(fd, mark, PAGE, (off_t)(at + (end ? records[c] - PAGE : 0))),
                             PAGE);
        }
        assert_int_equal(fsync(fd) | close(fd), 0);
        char *space = folded(records[c]);
        assert_int_equal(one(q, 0, space, c, 0), 0);
        assert_true(matches(space, PAGE, c, 0, 1));
        assert_true(matches(space + records[c] - PAGE, PAGE, c, 1, 1));
        munmap(space, records[c]);
    }
    free(mark);
    sw_nvme_queue_close(q);
    sw_nvme_close(store, 1);
}

/* ---- results ---- */

enum { BLOCKS = 20 }; /* of 8 pages, in the odd records */

static void every_nth_result_cut_loses_nothing_and_ends(void **state) {
    (void)state;
    for (uint32_t nth = 1; nth <= 5; nth++) {
        struct sw_nvme_store *store = open_store("cuts", 2, 1);
        struct late_io out = {.cut_every = nth}, in = {.cut_every = nth};
        struct sw_nvme_queue *w, *r;
        open_late(&w, store, 1, 8 * PAGE, &out);
        open_late(&r, store, 0, 8 * PAGE, &in);
        write_all(w, nth);
        assert_int_equal(sw_nvme_sync(store), 0);
        read_all(r, nth);
        assert_true(out.cut > 2 && in.cut > 2);
        assert_true(out.started == BLOCKS + out.cut && in.started == BLOCKS + in.cut);
        sw_nvme_queue_close(w);
        sw_nvme_queue_close(r);
        assert_int_equal(open_queue(&r, store, 0, 4, 8 * PAGE, NULL, 0), 0);
        read_all(r, nth); /* a disk that does not lie agrees */
        sw_nvme_queue_close(r);
        sw_nvme_close(store, 1);
    }
    assert_int_equal(log_errors, 0);
}

static const int codes[] = {EAGAIN, EINTR,  EBUSY,      EIO,    ENOSPC,   EPERM,
                            EBADF,  ENOMEM, EOPNOTSUPP, ENODEV, ECANCELED};
enum { CODES = sizeof(codes) / sizeof(codes[0]) };

/* All records at once; the transfer number `at` fails once. */
static void error_at(uint32_t at, int code, int at_start, int write) {
    struct sw_nvme_store *store = open_store("codes", 1, 1);
    struct late_io io = {
        .fail_first = at, .fail_n = 1, .fail_code = -code, .fail_at_start = at_start};
    struct sw_nvme_queue *q, *plain;
    assert_int_equal(open_queue(&plain, store, !write, 4, 8 * PAGE, NULL, 0), 0);
    if (!write) write_all(plain, 7);
    forget_log();
    open_late(&q, store, write, 8 * PAGE, &io);
    struct sw_nvme_req reqs[CHUNKS], *done[CHUNKS];
    for (uint32_t c = 0; c < CHUNKS; c++) {
        reqs[c] = (struct sw_nvme_req){.buf = pages(RECORD_MAX), .chunk = c};
        reqs[c].write = (uint32_t)write;
        if (write) pattern(reqs[c].buf, odd_records[c], c, 0, 7);
        assert_int_equal(sw_nvme_submit(q, &reqs[c]), 0);
    }
    assert_int_equal(sw_nvme_reap(q, done, CHUNKS, CHUNKS), CHUNKS);
    int failures = 0;
    for (uint32_t c = 0; c < CHUNKS; c++) {
        if (reqs[c].result) {
            assert_int_equal(reqs[c].result, -code);
            failures++;
        }
        /* Whatever is told to have worked did. */
        if (!reqs[c].result && write) assert_int_equal(one(plain, 0, reqs[c].buf, c, 0), 0);
        if (!reqs[c].result) assert_true(matches(reqs[c].buf, odd_records[c], c, 0, 7));
        free(reqs[c].buf);
    }
    assert_int_equal(io.failed, 1);
    const int retried = code == EAGAIN || code == EINTR || code == EBUSY;
    assert_int_equal(failures, retried ? 0 : 1);
    assert_int_equal(log_errors, failures);
    if (failures) assert_logged(strerror(code));
    sw_nvme_queue_close(q);
    sw_nvme_queue_close(plain);
    sw_nvme_close(store, 1);
}

static void each_error_at_the_first_transfer_and_under_load_has_its_answer(void **state) {
    (void)state;
    for (uint32_t i = 0; i < CODES; i++)
        for (int at_start = 0; at_start < 2; at_start++)
            for (int write = 0; write < 2; write++) {
                error_at(1, codes[i], at_start, write);
                error_at(9, codes[i], at_start, write);
            }
}

/* Runs in a child: a ring that has worked refuses to be entered from now on. 0: all well. */
static int refused_from_now_on(int code) {
    alarm(20); /* a hang ends in a signal */
    struct sw_nvme_store *store = open_store("later", 1, 1);
    struct sw_nvme_queue *q;
    struct sw_nvme_mode mode;
    if (open_queue(&q, store, 1, 4, 2 * PAGE, NULL, 0)) return 3;
    sw_nvme_queue_mode(q, &mode);
    if (!mode.io_uring) return 2;
    write_all(q, 1);
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_enter, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)code),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog program = {4, filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return 2;
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) return 2;
    forget_log();
    char *buf = pages(RECORD_MAX);
    if (one(q, 1, buf, 4, 0) != -code) return 4;
    if (one(q, 1, buf, 0, 0) != -code) return 5; /* at once, and said no second time */
    if (log_errors != 1 || !strstr(logged, strerror(code))) return 6;
    sw_nvme_queue_close(q);
    free(buf);
    sw_nvme_close(store, 1);
    return 0;
}

static void a_ring_refused_after_it_worked_ends_its_queue_and_never_hangs(void **state) {
    (void)state;
    for (uint32_t i = 0; i < CODES; i++) {
        const pid_t child = fork();
        if (child == 0) _exit(refused_from_now_on(codes[i]));
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        if (!WIFEXITED(status)) fail_msg("%s: signal %d", strerror(codes[i]), WTERMSIG(status));
        if (WEXITSTATUS(status) == 2) skip();
        if (WEXITSTATUS(status)) fail_msg("%s: %d", strerror(codes[i]), WEXITSTATUS(status));
    }
}

/* A buffer with a page on both sides that nobody may touch. */
static char *guarded(uint64_t bytes) {
    char *space =
        mmap(NULL, bytes + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_true(space != MAP_FAILED);
    assert_int_equal(mprotect(space + PAGE, bytes, PROT_READ | PROT_WRITE), 0);
    return space + PAGE;
}

/* Requests at once: SW_NVME_REQS_MAX; a buffer is gone, not only free, as soon as it is back. */
static void a_failed_request_of_64_gives_its_buffer_back_idle(void **state) {
    (void)state;
    enum { N = 64, FAILS = 3 };
    uint64_t records[N];
    for (uint64_t i = 0; i < N; i++) records[i] = (1 + i % 5) * 3 * PAGE;
    const struct sw_nvme_options o = {three_folders, 1, "guard", records, N, 1, NULL};
    struct sw_nvme_store *store;
    assert_int_equal(sw_nvme_open(&store, &o), 0);
    for (int write = 1; write >= 0; write--) {
        /* The blocks of requests 0 to 2 are 3, 6 and 9; a depth of 6 is in flight from the newest,
         * so whole parts of the failed one are still held when its first error is known. */
        struct late_io io = {.fail_first = 8, .fail_n = 1, .fail_code = -EIO};
        struct sw_nvme_queue *q;
        open_late(&q, store, write, PAGE, &io);
        struct sw_nvme_req reqs[N], *done[SW_NVME_REQS_MAX];
        uint32_t sent = 0, back = 0, failures = 0;
        while (back < N) {
            for (; sent < N && sent - back < SW_NVME_REQS_MAX; sent++) {
                reqs[sent] = (struct sw_nvme_req){.buf = guarded(records[sent]), .chunk = sent};
                reqs[sent].write = (uint32_t)write;
                if (write) pattern(reqs[sent].buf, records[sent], sent, 0, 5);
                assert_int_equal(sw_nvme_submit(q, &reqs[sent]), 0);
            }
            const int n = sw_nvme_reap(q, done, 1, SW_NVME_REQS_MAX);
            assert_true(n >= 1);
            for (int i = 0; i < n; i++, back++) {
                const struct sw_nvme_req *req = done[i];
                const uint64_t bytes = records[req->chunk];
                if (req->result)
                    failures++;
                else if (!write)
                    assert_true(matches(req->buf, bytes, req->chunk, 0, 5));
                for (uint32_t h = 0; h < io.held_count; h++)
                    assert_true(io.held[h].buf < (char *)req->buf ||
                                io.held[h].buf >= (char *)req->buf + bytes);
                assert_int_equal(munmap((char *)req->buf - PAGE, bytes + 2 * PAGE), 0);
            }
        }
        assert_int_equal(io.failed, 1);
        assert_int_equal(failures, 1);
        sw_nvme_queue_close(q);
        if (!write) continue;
        assert_int_equal(open_queue(&q, store, 1, 4, PAGE, NULL, 0), 0);
        for (uint32_t c = 0; c < N; c++) { /* the failed one once more, for the reader */
            char *buf = pages(records[c]);
            pattern(buf, records[c], c, 0, 5);
            assert_int_equal(one(q, 1, buf, c, 0), 0);
            free(buf);
        }
        sw_nvme_queue_close(q);
    }
    assert_int_equal(log_errors, 2);
    sw_nvme_close(store, 1);
}

/* ---- files and queues ---- */

static void a_refused_first_read_and_an_odd_end_are_clear_on_both_paths(void **state) {
    (void)state;
    for (int buffered = 0; buffered < 2; buffered++) {
        struct sw_nvme_store *store = open_store("end", 1, 1);
        struct sw_nvme_queue *q;
        struct sw_nvme_mode mode;
        struct late_io io = {.fail_first = 1, .fail_n = 1, .fail_code = -EINVAL};
        assert_int_equal(open_queue(&q, store, 1, 4, 8 * PAGE, NULL, 0), 0);
        write_all(q, 2);
        sw_nvme_queue_mode(q, &mode);
        sw_nvme_queue_close(q);
        const int direct = mode.direct;
        if (buffered) { /* the refusal sends the folder through the page cache, with the bytes */
            forget_log();
            open_late(&q, store, 0, 8 * PAGE, &io);
            read_all(q, 2);
            sw_nvme_queue_close(q);
            assert_int_equal(log_warnings, direct);
            if (direct) assert_logged("page cache");
        }
        /* Chunks 0 and 1 are whole, chunk 2 ends 1234 bytes behind a page. */
        char path[128], *buf = pages(RECORD_MAX);
        snprintf(path, sizeof(path), "%s/end.0.state", dir_a);
        assert_int_equal(truncate(path, 12 * PAGE + 1234), 0);
        forget_log();
        assert_int_equal(open_queue(&q, store, 0, 4, 8 * PAGE, NULL, 0), 0);
        sw_nvme_queue_mode(q, &mode);
        assert_int_equal(mode.direct, direct && !buffered);
        for (uint32_t c = 0; c < 2; c++) {
            assert_int_equal(one(q, 0, buf, c, 0), 0);
            assert_true(matches(buf, odd_records[c], c, 0, 2));
        }
        assert_int_equal(one(q, 0, buf, 2, 0), -EIO);
        assert_int_equal(log_errors, 1);
        assert_logged("chunk 2");
        free(buf);
        sw_nvme_queue_close(q);
        sw_nvme_close(store, 1);
    }
}

/* Runs in a child without the right to lock memory beyond the limit. 0: all well. */
static int a_thousand_queues(void) {
    const struct rlimit limit = {4 << 20, 4 << 20};
    if (chmod(nvme_root, 0777) || chmod(dir_c, 0777)) return 2;
    if (setrlimit(RLIMIT_MEMLOCK, &limit) || setgid(65533) || setuid(65533)) return 2;
    const char *folder = dir_c;
    const struct sw_nvme_options o = {&folder, 1, "cycles", odd_records, CHUNKS, 1, NULL};
    struct sw_nvme_store *store;
    if (sw_nvme_open(&store, &o)) return 3;
    char *slab = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (slab == MAP_FAILED) return 3;
    for (int i = 0; i < 1000; i++) {
        struct sw_nvme_queue *q;
        struct sw_nvme_mode mode;
        if (open_queue(&q, store, 1, 8, PAGE, slab, 1 << 20)) return 4;
        sw_nvme_queue_mode(q, &mode);
        if (i == 0 && !mode.io_uring) return 2; /* older kernels charge the ring itself */
        if (!mode.io_uring || !mode.fixed_buffers || !mode.fixed_files) return 5;
        pattern(slab, odd_records[1], 1, 0, (uint32_t)i);
        if (i % 100 == 0 && one(q, 1, slab, 1, 0)) return 6;
        sw_nvme_queue_close(q);
    }
    sw_nvme_close(store, 1);
    return log_warnings || log_errors ? 7 : 0;
}

static void a_thousand_queues_give_their_locked_memory_back(void **state) {
    (void)state;
    if (getuid() != 0) skip(); /* a user of its own is needed, without the right to lock */
    const pid_t child = fork();
    if (child == 0) _exit(a_thousand_queues());
    int status;
    assert_true(waitpid(child, &status, 0) == child && WIFEXITED(status));
    if (WEXITSTATUS(status) == 2) skip();
    assert_int_equal(WEXITSTATUS(status), 0);
}

/* A lock whose taker is dead while another holds its descriptor for a while: how a killed process
 * looks whose ring the kernel has not yet let go of. What a living process keeps is left. */
static void what_a_dead_process_held_is_removed_and_what_a_living_one_holds_is_not(void **state) {
    (void)state;
    char path[4200];
    int ready[2];
    snprintf(path, sizeof(path), "%s/held.0.state", dir_a);
    for (int lives = 0; lives < 2; lives++) {
        assert_int_equal(pipe(ready), 0);
        const pid_t taker = fork();
        if (taker == 0) {
            const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
            if (fd < 0 || flock(fd, LOCK_EX) || write(ready[1], "", 1) != 1) _exit(1);
            if (lives) pause();
            if (fork() == 0) usleep(300000);
            _exit(0);
        }
        char byte;
        assert_int_equal(read(ready[0], &byte, 1), 1);
        if (!lives) assert_int_equal(waitpid(taker, NULL, 0), taker);
        assert_int_equal(sw_nvme_remove(three_folders, 1, "held"), lives ? -EBUSY : 0);
        assert_int_equal(access(path, F_OK), lives ? 0 : -1);
        if (lives) {
            kill(taker, SIGKILL);
            assert_int_equal(waitpid(taker, NULL, 0), taker);
            assert_int_equal(sw_nvme_remove(three_folders, 1, "held"), 0);
        }
        close(ready[0]);
        close(ready[1]);
    }
}

#define T(name) cmocka_unit_test_setup(name, setup)
int main(void) {
    const struct CMUnitTest tests[] = {
        /* First, while no thread was ever started: their children start some after the fork. */
        T(a_ring_refused_after_it_worked_ends_its_queue_and_never_hangs),
        T(a_thousand_queues_give_their_locked_memory_back),
        T(what_a_dead_process_held_is_removed_and_what_a_living_one_holds_is_not),
        T(sizes_at_every_border_of_a_block_come_back_by_every_path),
        T(regions_of_2_and_4_gib_come_back_at_both_ends),
        T(every_nth_result_cut_loses_nothing_and_ends),
        T(each_error_at_the_first_transfer_and_under_load_has_its_answer),
        T(a_failed_request_of_64_gives_its_buffer_back_idle),
        T(a_refused_first_read_and_an_odd_end_are_clear_on_both_paths),
    };
    return cmocka_run_group_tests(tests, make_folders, remove_folders);
}
