/* nvme/nvme_internal.h - the border between a queue and whatever moves its blocks; nvme/ and tests.
 *
 * A back end starts single transfers and reports their raw results, short ones and errors included;
 * every judgement about a result is the queue's (queue.c). So a test can stand a faulty disk here.
 */
#ifndef NVME_NVME_INTERNAL_H
#define NVME_NVME_INTERNAL_H
#include <errno.h>
#include <stdatomic.h>
#include "nvme/nvme.h"

#define SW_NVME_FILES_MAX 64u
/* One transfer stays below the kernel's limit of 2 GiB, where results become short. */
#define SW_NVME_BLOCK_MAX_BYTES (1u << 30)
#define SW_NVME_RETRIES_MAX     32u /* of one block, in a row, without progress */

struct sw_nvme_file {
    char *path, *folder;
    int fd;
    int created;           /* this open made it: a failed open takes it away again */
    atomic_int direct;     /* O_DIRECT is on; cleared when the file system refuses a transfer */
    uint64_t bytes;        /* of one home of all its chunks */
    uint64_t needed_bytes; /* beyond what the file already occupies */
    uint64_t device;
    uint32_t align_bytes;
    atomic_uint reading; /* read blocks in flight, of all queues */
};

struct sw_nvme_place { /* of a chunk */
    uint64_t offset_bytes, bytes;
    uint32_t file;
};

struct sw_nvme_store {
    struct sw_nvme_file files[SW_NVME_FILES_MAX];
    uint32_t file_count, chunk_count, homes;
    struct sw_nvme_place *places;
    atomic_int reads_awaited; /* by how many */
};

/* Makes the names in a folder durable; a file system that cannot is left alone. */
void sw_nvme_sync_folder(const char *folder);

/* Every file of the store is moved past the page cache. */
static inline int sw_nvme_all_direct(struct sw_nvme_store *store) {
    int all = 1;
    for (uint32_t i = 0; i < store->file_count; i++) all &= atomic_load(&store->files[i].direct);
    return all;
}

/* A refusal or a result that means: try again. */
static inline int sw_nvme_transient(int result) {
    return result == -EINTR || result == -EAGAIN || result == -EBUSY;
}

/* Turns O_DIRECT off for a file after a transfer was refused with EINVAL. 1: it was on. */
int sw_nvme_drop_direct(struct sw_nvme_store *store, uint32_t file, const char *why);

struct sw_nvme_block { /* one transfer */
    char *buf;
    uint64_t offset_bytes;
    uint32_t len_bytes, file, tag, write;
};

struct sw_nvme_done {
    uint32_t tag;
    int32_t result; /* bytes moved or -errno */
};

struct sw_nvme_setup { /* what a back end is opened with; pointers live for the call alone */
    const int *fds;
    uint32_t fd_count, entries; /* entries: blocks in flight at most */
    char *base;
    uint64_t bytes;
    uint32_t sqpoll, iopoll, direct; /* direct: all files are */
    void *ctx;
};

struct sw_nvme_io_ops {
    const char *name;
    /* Allocates everything. mode is filled in but for direct and align_bytes. */
    int (*open)(void **io, const struct sw_nvme_setup *setup, struct sw_nvme_mode *mode);
    void (*close)(void *io); /* nothing is in flight */
    /* Takes a transfer; it may wait for wait() before it starts. 0 or -errno: not taken. */
    int (*start)(void *io, const struct sw_nvme_block *block);
    /* Submits what start() took and returns up to max completions in any order, at least one if
     * `block` is set and something is in flight. Count or -errno (the back end itself failed). */
    int (*wait)(void *io, struct sw_nvme_done *done, uint32_t max, int block);
};

extern const struct sw_nvme_io_ops sw_nvme_uring_ops, sw_nvme_threads_ops;

/* sw_nvme_queue_open with a chosen back end; ops NULL: io_uring, else threads. */
int sw_nvme_queue_open_on(struct sw_nvme_queue **out, struct sw_nvme_store *store,
                          const struct sw_nvme_queue_options *options,
                          const struct sw_nvme_io_ops *ops, void *ctx);

#endif
