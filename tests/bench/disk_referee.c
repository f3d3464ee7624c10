/* What a drive gives to the plainest program: one ring for a direction, registered huge-page
 * buffers and file, direct I/O, as many blocks in flight as asked, nothing between ring and kernel.
 * It shares no code with the library, whose store is compared with it (nvme_peers.py).
 *
 *     disk_referee FILE read|write|mixed BLOCK_BYTES DEPTH SECONDS
 *
 * The file exists and was written. mixed: a thread reads the first half, one writes the second. */
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "tests/bench/rounds.h"

#define HUGE_BYTES (2ull << 20)
enum { DEPTH_MAX = 1024 };

struct direction {
    const char *path;
    uint64_t first, end, block; /* bytes of the file */
    unsigned depth, write;
    double seconds;
    pthread_barrier_t *begin;
    double rate;
};

static void need(int ok, const char *what, int err) {
    if (ok) return;
    fprintf(stderr, "disk_referee: %s: %s\n", what, strerror(err));
    exit(1);
}

static char *huge_pages(uint64_t bytes) {
    char *base =
        mmap(NULL, bytes + HUGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    need(base != MAP_FAILED, "memory", errno);
    base += HUGE_BYTES - (uintptr_t)base % HUGE_BYTES;
    madvise(base, bytes, MADV_HUGEPAGE);
    uint64_t x = 1;
    for (uint64_t i = 0; i < bytes / sizeof(x); i++)
        ((uint64_t *)base)[i] = x = x * 6364136223846793005u + 1442695040888963407u;
    return base;
}

static void start(struct io_uring *ring, const struct direction *d, char *base, unsigned slot,
                  uint64_t *at) {
    struct io_uring_sqe *sqe = io_uring_get_sqe(ring);
    char *buf = base + slot * d->block;
    if (d->write)
        io_uring_prep_write_fixed(sqe, 0, buf, (unsigned)d->block, *at, 0);
    else
        io_uring_prep_read_fixed(sqe, 0, buf, (unsigned)d->block, *at, 0);
    sqe->flags |= IOSQE_FIXED_FILE;
    sqe->user_data = slot;
    *at += d->block;
    if (*at + d->block > d->end) *at = d->first;
}

static void *move(void *arg) {
    struct direction *d = arg;
    const uint64_t bytes = d->depth * d->block;
    struct io_uring ring;
    int fd = open(d->path, O_RDWR | O_DIRECT | O_CLOEXEC);
    need(fd >= 0, d->path, errno);
    char *base = huge_pages(bytes);
    const struct iovec whole = {base, bytes};
    int ret = io_uring_queue_init(d->depth, &ring, IORING_SETUP_COOP_TASKRUN);
    need(ret == 0, "io_uring", -ret);
    ret = io_uring_register_buffers(&ring, &whole, 1);
    need(ret == 0, "registering buffers", -ret);
    ret = io_uring_register_files(&ring, &fd, 1);
    need(ret == 0, "registering the file", -ret);
    if (d->begin) pthread_barrier_wait(d->begin);
    const double begin = rounds_now();
    double took = 0;
    uint64_t at = d->first, done = 0;
    unsigned in_flight = 0;
    for (; in_flight < d->depth; in_flight++) start(&ring, d, base, in_flight, &at);
    while (in_flight) {
        ret = io_uring_submit_and_wait(&ring, 1);
        need(ret >= 0, "submitting", -ret);
        const int over = took >= d->seconds;
        struct io_uring_cqe *cqe;
        while (!io_uring_peek_cqe(&ring, &cqe)) {
            need(cqe->res == (int)d->block, "a transfer", cqe->res < 0 ? -cqe->res : EIO);
            const unsigned slot = (unsigned)cqe->user_data;
            io_uring_cqe_seen(&ring, cqe);
            in_flight--;
            if (over) continue;
            done += d->block;
            start(&ring, d, base, slot, &at);
            in_flight++;
        }
        if (!over) took = rounds_now() - begin;
    }
    d->rate = (double)done / took;
    io_uring_queue_exit(&ring);
    close(fd);
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 6) {
        fprintf(stderr, "usage: disk_referee FILE read|write|mixed BLOCK_BYTES DEPTH SECONDS\n");
        return 2;
    }
    const uint64_t block = strtoull(argv[3], NULL, 10);
    const unsigned depth = (unsigned)atoi(argv[4]);
    const int mixed = !strcmp(argv[2], "mixed");
    struct stat st;
    need(stat(argv[1], &st) == 0, argv[1], errno);
    need(block > 0 && depth > 0 && depth <= DEPTH_MAX, "BLOCK_BYTES and DEPTH", EINVAL);
    const uint64_t half = (uint64_t)st.st_size / 2 / block * block;
    need(half > 0, "the file's size", EINVAL);
    pthread_barrier_t begin;
    pthread_barrier_init(&begin, NULL, 2);
    struct direction reader = {argv[1], 0, 2 * half, block, depth, 0, atof(argv[5]), NULL, 0};
    struct direction writer = reader;
    writer.write = 1;
    if (mixed) {
        pthread_t thread;
        reader.end = writer.first = half;
        reader.begin = writer.begin = &begin;
        need(pthread_create(&thread, NULL, move, &reader) == 0, "a thread", EAGAIN);
        move(&writer);
        pthread_join(thread, NULL);
    } else {
        move(strcmp(argv[2], "write") ? &reader : &writer);
    }
    printf("{\"read\": %.0f, \"write\": %.0f}\n", reader.rate, writer.rate);
    return 0;
}
