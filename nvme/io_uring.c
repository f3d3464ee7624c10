/* nvme/io_uring.c - the ring back end: batched submission, registered files and buffers.
 *
 * A feature that the kernel or the container refuses is left out alone and said once; only a ring
 * that cannot be made, or through which nothing comes back, sends the queue to the threads. Polling
 * is used only where it is asked for: on a machine with few cores it starves what it serves. */
#include "nvme/nvme_internal.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <liburing.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"
#include "base/size.h"

#define PIECE_BYTES    (1ull << 30) /* the kernel's limit for one registered buffer */
#define PIECES_MAX     1024u        /* older kernels' limit for one registration */
#define INTERRUPTS_MAX (1u << 16)   /* of one wait; signals may be many, but not without end */
#define SQPOLL_IDLE    20u          /* ms without work until the kernel's thread sleeps */

struct ring_io {
    struct io_uring ring;
    uint32_t in_flight;
    int fixed_files, fixed_buffers;
    char *base;
    uint64_t bytes;
    int fds[SW_NVME_FILES_MAX];
};

static void pause_ms(long ms) {
    const struct timespec wait = {0, ms * 1000000L};
    nanosleep(&wait, NULL);
}

/* What would bring a refused feature back. */
static const char *remedy(int err) {
    switch (err) {
    case -ENOSYS:
        return "the kernel has none: boot one from 5.10 on, built with io_uring";
    case -EPERM:
    case -EACCES:
        return "forbidden by a container's seccomp profile, which must admit io_uring, or by "
               "kernel.io_uring_disabled, which must be 0";
    case -ENOMEM:
        return "raise the limit of locked memory (ulimit -l), or free memory";
    case -EMFILE:
    case -ENFILE:
        return "raise the limit of open files (ulimit -n)";
    case -EINVAL:
    case -EOPNOTSUPP:
    case -E2BIG:
        return "the kernel is too old for it, or a sandbox answers so: boot a newer one, or leave "
               "the sandbox";
    case -EAGAIN:
    case -EBUSY:
    case -EINTR:
        return "the kernel is busy or short of memory: free some and start again";
    default:
        return "no usual answer of a kernel: a sandbox may give it, outside of it io_uring works";
    }
}

/* The reason and the remedy, until this thread's next call. */
static const char *refusal(int err) {
    static _Thread_local char text[256];
    snprintf(text, sizeof(text), "%s: %s", strerror(-err), remedy(err));
    return text;
}

static int register_buffers(struct ring_io *io) {
    struct iovec pieces[PIECES_MAX];
    uint32_t count = 0;
    for (uint64_t at = 0; at < io->bytes; at += PIECE_BYTES) {
        if (count == PIECES_MAX) return -E2BIG;
        const uint64_t left = io->bytes - at;
        pieces[count].iov_base = io->base + at;
        pieces[count++].iov_len = left < PIECE_BYTES ? left : PIECE_BYTES;
    }
    int ret = 0;
    /* The kernel gives locked memory back some time after another ring was closed. */
    for (int attempt = 0; attempt < 3; attempt++) {
        ret = io_uring_register_buffers(&io->ring, pieces, count);
        if (ret != -ENOMEM && ret != -EINTR) break;
        pause_ms(5);
    }
    return ret;
}

static void say_buffers_refused(uint64_t bytes, int err) {
    static atomic_int said;
    if (atomic_exchange(&said, 1)) return;
    char need[32], have[32] = "unlimited";
    struct rlimit limit;
    if (!getrlimit(RLIMIT_MEMLOCK, &limit) && limit.rlim_cur != RLIM_INFINITY)
        sw_size_print(limit.rlim_cur, have, sizeof(have));
    sw_warning(
        "nvme: buffers are not registered with io_uring (%s); needed %s each way, the limit of "
        "locked memory is %s; going on with plain buffers",
        err == -ENOMEM ? "the limit of locked memory is too small: raise ulimit -l" : refusal(err),
        sw_size_print(bytes, need, sizeof(need)), have);
}

static void ring_close(void *arg) {
    struct ring_io *io = arg;
    /* The kernel takes a ring down some time later; files and locked memory are given back now. */
    if (io->fixed_files) io_uring_unregister_files(&io->ring);
    if (io->fixed_buffers) io_uring_unregister_buffers(&io->ring);
    io_uring_queue_exit(&io->ring);
    free(io);
}

/* One request through the ring and back: its result, the ring's error, or -ETIME: it has not come
 * back, and its buffer is the kernel's for ever. */
static int round_trip(struct io_uring *ring) {
    struct io_uring_cqe *cqe;
    int submitted = 0, ret = 0;
    for (int attempt = 0; attempt < 1000; attempt++) {
        ret = io_uring_submit_and_wait(ring, 1);
        if (ret < 0 && !sw_nvme_transient(ret)) return submitted ? -ETIME : ret;
        if (ret < 0 && !submitted && attempt == 16) return ret;
        if (ret > 0) submitted = 1;
        if (io_uring_peek_cqe(ring, &cqe) == 0) {
            ret = cqe->res;
            io_uring_cqe_seen(ring, cqe);
            return ret;
        }
        pause_ms(1); /* refused at this moment, or a poll that found nothing */
    }
    return -ETIME;
}

/* One block that lies on the drive of an open file: a file without a name in its folder. Space that
 * is only reserved would be read without the drive. The new descriptor or -errno. */
static int scratch_beside(int fd, void *page) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    const ssize_t length = readlink(link, path, sizeof(path) - 1);
    if (length <= 0) return -ENOENT;
    path[length] = 0;
    char *slash = strrchr(path, '/');
    if (!slash) return -ENOENT;
    *slash = 0;
    const int scratch = open(path, O_TMPFILE | O_RDWR | O_DIRECT | O_CLOEXEC, 0600);
    if (scratch < 0) return -errno;
    if (pwrite(scratch, page, SW_NVME_ALIGN_BYTES, 0) == SW_NVME_ALIGN_BYTES && !fsync(scratch))
        return scratch;
    close(scratch);
    return -EIO;
}

/* Reads a block of every drive, polling for it. */
static int try_polling(struct io_uring *ring, const struct sw_nvme_setup *setup) {
    void *page = NULL;
    if (posix_memalign(&page, SW_NVME_ALIGN_BYTES, SW_NVME_ALIGN_BYTES)) return -ENOMEM;
    memset(page, 0, SW_NVME_ALIGN_BYTES);
    int ret = 0;
    for (uint32_t i = 0; i < setup->fd_count && ret >= 0; i++) {
        const int scratch = scratch_beside(setup->fds[i], page);
        if (scratch < 0) {
            ret = scratch;
            break;
        }
        io_uring_prep_read(io_uring_get_sqe(ring), scratch, page, SW_NVME_ALIGN_BYTES, 0);
        ret = round_trip(ring);
        close(scratch);
    }
    if (ret != -ETIME) free(page);
    return ret;
}

/* A ring may be made and yet refuse to be entered, or to poll a drive: so something goes round. */
static int try_ring(struct io_uring *ring, const struct sw_nvme_setup *setup) {
    if (ring->flags & IORING_SETUP_IOPOLL) return try_polling(ring, setup);
    io_uring_prep_nop(io_uring_get_sqe(ring));
    return round_trip(ring);
}

/* A ring of which it is known that it works, with exactly these features. 0 or -errno. */
static int make_ring(struct io_uring *ring, const struct sw_nvme_setup *setup, unsigned polling) {
    struct io_uring_params params = {.flags = polling, .sq_thread_idle = SQPOLL_IDLE};
    if (!(polling & IORING_SETUP_SQPOLL)) params.flags |= IORING_SETUP_COOP_TASKRUN;
    int ret = io_uring_queue_init_params(setup->entries, ring, &params);
    if (ret == -EINVAL) { /* before 5.19 */
        params = (struct io_uring_params){.flags = polling, .sq_thread_idle = SQPOLL_IDLE};
        ret = io_uring_queue_init_params(setup->entries, ring, &params);
    }
    if (ret < 0) return ret;
    ret = try_ring(ring, setup);
    if (ret >= 0) return 0;
    io_uring_queue_exit(ring);
    return ret;
}

/* The ring with as much of the polling that was asked for as works here. */
static int choose_ring(struct ring_io *io, const struct sw_nvme_setup *setup) {
    static atomic_int said_iopoll, said_sqpoll, said_ring;
    unsigned polling = (setup->sqpoll ? IORING_SETUP_SQPOLL : 0) |
                       (setup->iopoll && setup->direct ? IORING_SETUP_IOPOLL : 0);
    if (setup->iopoll && !setup->direct && !atomic_exchange(&said_iopoll, 1))
        sw_warning("nvme: completions are not polled for: that needs direct I/O");
    for (;;) {
        const int ret = make_ring(&io->ring, setup, polling);
        if (ret == 0) return 0;
        if (polling & IORING_SETUP_IOPOLL) {
            polling &= ~IORING_SETUP_IOPOLL;
            if (!atomic_exchange(&said_iopoll, 1))
                sw_warning("nvme: completions are not polled for (%s): the drive or its driver has "
                           "no queues for that (nvme.poll_queues); going on with interrupts",
                           strerror(-ret));
        } else if (polling & IORING_SETUP_SQPOLL) {
            polling &= ~IORING_SETUP_SQPOLL;
            if (!atomic_exchange(&said_sqpoll, 1))
                sw_warning("nvme: no kernel thread submits (%s); going on without", refusal(ret));
        } else {
            if (!atomic_exchange(&said_ring, 1))
                sw_warning("nvme: no io_uring (%s); going on with threads", refusal(ret));
            return ret;
        }
    }
}

static int ring_open(void **out, const struct sw_nvme_setup *setup, struct sw_nvme_mode *mode) {
    struct ring_io *io = calloc(1, sizeof(*io));
    if (!io) return -ENOMEM;
    int ret = choose_ring(io, setup);
    if (ret < 0) {
        free(io);
        return ret;
    }
    memcpy(io->fds, setup->fds, setup->fd_count * sizeof(int));
    io->base = setup->base;
    io->bytes = setup->base ? setup->bytes : 0;
    ret = io_uring_register_files(&io->ring, io->fds, setup->fd_count);
    io->fixed_files = ret == 0;
    if (ret < 0) {
        static atomic_int said;
        if (!atomic_exchange(&said, 1))
            sw_warning(
                "nvme: files are not registered with io_uring (%s); going on with plain ones",
                refusal(ret));
    }
    if (io->bytes) {
        ret = register_buffers(io);
        io->fixed_buffers = ret == 0;
        if (ret < 0) say_buffers_refused(io->bytes, ret);
    }
    mode->io_uring = 1;
    mode->fixed_files = io->fixed_files;
    mode->fixed_buffers = io->fixed_buffers;
    mode->sqpoll = (io->ring.flags & IORING_SETUP_SQPOLL) != 0;
    mode->iopoll = (io->ring.flags & IORING_SETUP_IOPOLL) != 0;
    *out = io;
    return 0;
}

/* Index of the registered piece that holds the whole transfer, or -1. */
static int piece_of(const struct ring_io *io, const struct sw_nvme_block *b) {
    if (!io->fixed_buffers || b->buf < io->base) return -1;
    const uint64_t at = (uint64_t)(b->buf - io->base);
    if (at + b->len_bytes > io->bytes) return -1;
    const uint64_t piece = at / PIECE_BYTES;
    return (at + b->len_bytes - 1) / PIECE_BYTES == piece ? (int)piece : -1;
}

static int ring_start(void *arg, const struct sw_nvme_block *b) {
    struct ring_io *io = arg;
    struct io_uring_sqe *sqe = io_uring_get_sqe(&io->ring);
    if (!sqe) return -EAGAIN; /* cannot be: the ring has an entry per block in flight */
    const int fd = io->fixed_files ? (int)b->file : io->fds[b->file];
    const int piece = piece_of(io, b);
    if (b->write) {
        if (piece >= 0)
            io_uring_prep_write_fixed(sqe, fd, b->buf, b->len_bytes, b->offset_bytes, piece);
        else
            io_uring_prep_write(sqe, fd, b->buf, b->len_bytes, b->offset_bytes);
    } else {
        if (piece >= 0)
            io_uring_prep_read_fixed(sqe, fd, b->buf, b->len_bytes, b->offset_bytes, piece);
        else
            io_uring_prep_read(sqe, fd, b->buf, b->len_bytes, b->offset_bytes);
    }
    if (io->fixed_files) sqe->flags |= IOSQE_FIXED_FILE;
    io_uring_sqe_set_data64(sqe, b->tag);
    io->in_flight++;
    return 0;
}

static int ring_wait(void *arg, struct sw_nvme_done *done, uint32_t max, int block) {
    struct ring_io *io = arg;
    if (!io->in_flight) return 0;
    for (uint32_t attempt = 0, interrupts = 0;;) {
        /* A completion that is already there must not wait for the next one. */
        const int ready = io_uring_cq_ready(&io->ring) > 0;
        const int ret =
            block && !ready ? io_uring_submit_and_wait(&io->ring, 1) : io_uring_submit(&io->ring);
        uint32_t n = 0;
        struct io_uring_cqe *cqe;
        while (n < max && !io_uring_peek_cqe(&io->ring, &cqe)) {
            done[n++] = (struct sw_nvme_done){(uint32_t)cqe->user_data, cqe->res};
            io_uring_cqe_seen(&io->ring, cqe);
            io->in_flight--;
        }
        /* The kernel could not take the batch now; its entries stay queued for the next attempt. */
        if (ret < 0 && !sw_nvme_transient(ret)) return ret;
        if (n || !block) return (int)n;
        if (ret >= 0) continue;
        if (ret == -EINTR) {
            if (++interrupts > INTERRUPTS_MAX) return ret;
            continue;
        }
        if (++attempt > SW_NVME_RETRIES_MAX) return ret;
        pause_ms(attempt < 10 ? 1 : 20);
    }
}

const struct sw_nvme_io_ops sw_nvme_uring_ops = {"io_uring", ring_open, ring_close, ring_start,
                                                 ring_wait};
