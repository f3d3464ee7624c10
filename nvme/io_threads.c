/* nvme/io_threads.c - the back end where io_uring is refused: a few threads with pread and pwrite.
 *
 * Two rings of fixed size under one lock, one of transfers to do and one of results; the threads
 * start at open, so nothing is allocated later. */
#include "nvme/nvme_internal.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"

enum { THREADS_MAX = 8 };

struct threads_io {
    pthread_mutex_t lock;
    pthread_cond_t work, finished;
    pthread_t threads[THREADS_MAX];
    uint32_t thread_count, entries, in_flight, todo_count, done_count, todo_head, done_head;
    int stop;
    struct sw_nvme_block *todo; /* rings of `entries` */
    struct sw_nvme_done *done;
    int fds[SW_NVME_FILES_MAX];
};

static int32_t transfer(const struct threads_io *io, const struct sw_nvme_block *b) {
    const int fd = io->fds[b->file];
    const ssize_t n = b->write ? pwrite(fd, b->buf, b->len_bytes, (off_t)b->offset_bytes)
                               : pread(fd, b->buf, b->len_bytes, (off_t)b->offset_bytes);
    return n < 0 ? -errno : (int32_t)n;
}

static void *serve(void *arg) {
    struct threads_io *io = arg;
    pthread_mutex_lock(&io->lock);
    for (;;) {
        while (!io->todo_count && !io->stop) pthread_cond_wait(&io->work, &io->lock);
        if (!io->todo_count) break;
        const struct sw_nvme_block block = io->todo[io->todo_head];
        io->todo_head = (io->todo_head + 1) % io->entries;
        io->todo_count--;
        pthread_mutex_unlock(&io->lock);
        const int32_t result = transfer(io, &block);
        pthread_mutex_lock(&io->lock);
        io->done[(io->done_head + io->done_count++) % io->entries] =
            (struct sw_nvme_done){block.tag, result};
        pthread_cond_signal(&io->finished);
    }
    pthread_mutex_unlock(&io->lock);
    return NULL;
}

static void threads_close(void *arg) {
    struct threads_io *io = arg;
    pthread_mutex_lock(&io->lock);
    io->stop = 1;
    pthread_cond_broadcast(&io->work);
    pthread_mutex_unlock(&io->lock);
    for (uint32_t i = 0; i < io->thread_count; i++) pthread_join(io->threads[i], NULL);
    pthread_cond_destroy(&io->work);
    pthread_cond_destroy(&io->finished);
    pthread_mutex_destroy(&io->lock);
    free(io->todo);
    free(io->done);
    free(io);
}

static int threads_open(void **out, const struct sw_nvme_setup *setup, struct sw_nvme_mode *mode) {
    struct threads_io *io = calloc(1, sizeof(*io));
    if (!io) return -ENOMEM;
    pthread_mutex_init(&io->lock, NULL);
    pthread_cond_init(&io->work, NULL);
    pthread_cond_init(&io->finished, NULL);
    io->entries = setup->entries;
    io->todo = calloc(io->entries, sizeof(*io->todo));
    io->done = calloc(io->entries, sizeof(*io->done));
    memcpy(io->fds, setup->fds, setup->fd_count * sizeof(int));
    int ret = io->todo && io->done ? 0 : -ENOMEM;
    const uint32_t want = setup->entries < THREADS_MAX ? setup->entries : THREADS_MAX;
    while (!ret && io->thread_count < want) {
        ret = -pthread_create(&io->threads[io->thread_count], NULL, serve, io);
        if (!ret) io->thread_count++;
    }
    if (ret && !io->thread_count) {
        sw_error("nvme: cannot start the transfer threads: %s", strerror(-ret));
        threads_close(io);
        return ret;
    }
    *mode = (struct sw_nvme_mode){0};
    *out = io;
    return 0;
}

static int threads_start(void *arg, const struct sw_nvme_block *block) {
    struct threads_io *io = arg;
    pthread_mutex_lock(&io->lock);
    assert(io->in_flight < io->entries);
    io->in_flight++;
    io->todo[(io->todo_head + io->todo_count++) % io->entries] = *block;
    pthread_cond_signal(&io->work);
    pthread_mutex_unlock(&io->lock);
    return 0;
}

static int threads_wait(void *arg, struct sw_nvme_done *done, uint32_t max, int block) {
    struct threads_io *io = arg;
    uint32_t n = 0;
    pthread_mutex_lock(&io->lock);
    while (block && !io->done_count && io->in_flight) pthread_cond_wait(&io->finished, &io->lock);
    for (; n < max && io->done_count; n++) {
        done[n] = io->done[io->done_head];
        io->done_head = (io->done_head + 1) % io->entries;
        io->done_count--;
        io->in_flight--;
    }
    pthread_mutex_unlock(&io->lock);
    return (int)n;
}

const struct sw_nvme_io_ops sw_nvme_threads_ops = {"threads", threads_open, threads_close,
                                                   threads_start, threads_wait};
