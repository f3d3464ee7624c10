/* nvme/nvme.h - the store: chunk records on NVMe, moved by io_uring past the page cache.
 *
 * A store is a set of folders (one per drive) with chunks striped over them, evenly or in the
 * proportions of the drives' speeds. Each chunk is one
 * contiguous record with one or two homes (places); which home holds the latest or the committed
 * bytes is the caller's knowledge. Files are created and preallocated at open, so that a full disk
 * is an error at start.
 *
 * A queue moves records in one direction. It has its own ring and one owner thread; several queues
 * may work on one store at once. A request is the caller's and keeps its address, its buffer
 * untouched, from sw_nvme_submit() until sw_nvme_reap() returns it. Records are split into blocks
 * with few bytes in flight; every completion is compared with what was asked, short ones are
 * resumed, EINTR, EAGAIN and EBUSY retried to a bound. Nothing is allocated after open.
 *
 * Features the machine refuses (io_uring, O_DIRECT, registered buffers or files) are replaced one
 * at a time, each said once through base/log.h; sw_nvme_queue_mode() tells what is in use.
 * Errors: 0, a count, or -errno, reported with file, offset and chunk. */
#ifndef NVME_NVME_H
#define NVME_NVME_H
#include <stddef.h>
#include <stdint.h>

#define SW_NVME_ALIGN_BYTES 4096u /* of buffers and of record lengths */

struct sw_nvme_store;
struct sw_nvme_queue;

struct sw_nvme_options {
    const char *const *folders;   /* existing, writable directories; copied */
    uint32_t folder_count;        /* 1..64 */
    const char *name;             /* base name of the files, copied */
    const uint64_t *record_bytes; /* per chunk; multiples of SW_NVME_ALIGN_BYTES */
    uint32_t chunk_count;
    uint32_t homes; /* 1 or 2 places per chunk */
    /* Per folder, > 0: its part of the bytes, such as its speed in MB/s. NULL: even. Part of the
     * layout: the records are found again with the same shares only. */
    const uint32_t *shares;
};

struct sw_nvme_req {
    void *buf; /* record_bytes[chunk], aligned to SW_NVME_ALIGN_BYTES */
    uint32_t chunk, home;
    int32_t result;       /* set by reap: 0 or -errno */
    uint32_t write;       /* direction; must match the queue's */
    void *user;           /* the caller's */
    uint64_t private_[4]; /* the queue's while in flight */
};

/* What a queue uses, for logs and doctor. */
struct sw_nvme_mode {
    int io_uring, direct, fixed_files, fixed_buffers; /* 1 in use, 0 fallen back */
    int sqpoll, iopoll;                               /* 1 in use: they were asked for */
    uint32_t align_bytes;                             /* what statx (or the page size) asks for */
    uint32_t block_bytes, depth;                      /* of the queue, per drive */
};

/* Creates the files and preallocates them. -ENOSPC names needed and free bytes, -ENOENT, -EROFS,
 * -EACCES name the folder, -EEXIST a store of that name that another process holds. */
int sw_nvme_open(struct sw_nvme_store **out, const struct sw_nvme_options *options);

/* The same for a store that is there: it is locked, to be read alone, and no file is made or sized.
 * -EINVAL: one is too short for the layout. */
int sw_nvme_open_existing(struct sw_nvme_store **out, const struct sw_nvme_options *options);

/* The path of a file of the store that was removed or replaced under it; NULL: all are there. */
const char *sw_nvme_missing(const struct sw_nvme_store *store);

/* Who holds the lock (flock) on an open file, as /proc/locks tells it: "process 17", or "another
 * process". */
enum { SW_NVME_OWNER_BYTES = 48 };
const char *sw_nvme_lock_owner(int fd, char text[SW_NVME_OWNER_BYTES]);

/* Whether no process has the files of such a store: 0, or -EEXIST, reported with the process. */
int sw_nvme_check_free(const char *const *folders, uint32_t folder_count, const char *name);

/* Closes; NULL is fine; queues must be closed before. unlink_files removes the store's files. */
void sw_nvme_close(struct sw_nvme_store *store, int unlink_files);
/* Likewise for one that nothing was written to: of its files those go that opening it made. */
void sw_nvme_abandon(struct sw_nvme_store *store);

/* What is free on a folder's file system; UINT64_MAX where it does not say. */
uint64_t sw_nvme_free_bytes(const char *folder);

/* Removes the files of a store; absent ones are fine. -EBUSY: somebody has one open, it is left. */
int sw_nvme_remove(const char *const *folders, uint32_t folder_count, const char *name);

/* Bytes on disk for the given options: what open preallocates. */
uint64_t sw_nvme_bytes(const struct sw_nvme_options *options);

/* Few bytes in flight keep a drive busy and latency low; 8 MiB a direction are enough. */
#define SW_NVME_BLOCK_BYTES_DEFAULT (1u << 20)
#define SW_NVME_DEPTH_DEFAULT       8u

struct sw_nvme_queue_options {
    uint32_t write;       /* direction */
    uint32_t depth;       /* blocks in flight per drive; 0: the default */
    uint32_t block_bytes; /* a multiple of SW_NVME_ALIGN_BYTES; 0: the default */
    /* The memory all buffers come from, to be registered; NULL: not registered. */
    void *base;
    uint64_t bytes;
    /* IORING_SETUP_SQPOLL: a kernel thread submits, and spins while there is work. IOPOLL:
     * completions are polled for, where drive and driver can. Both cost cores; off by default. */
    uint32_t sqpoll, iopoll;
};

int sw_nvme_queue_open(struct sw_nvme_queue **out, struct sw_nvme_store *store,
                       const struct sw_nvme_queue_options *options);
void sw_nvme_queue_close(struct sw_nvme_queue *queue); /* NULL is fine; drains what is in flight */
void sw_nvme_queue_mode(const struct sw_nvme_queue *queue, struct sw_nvme_mode *mode);

/* Starts as many blocks of the request as the depth admits; the rest follow during reap. Requests
 * are served in order. 0, -EAGAIN (SW_NVME_REQS_MAX pending: reap first) or -errno. */
#define SW_NVME_REQS_MAX 8u
int sw_nvme_submit(struct sw_nvme_queue *queue, struct sw_nvme_req *req);

/* Waits until at least `want` (0: do not wait) of the pending requests are complete, returns up to
 * max of them in the order of submission. Returns the count, or -errno when the ring itself fails.
 */
int sw_nvme_reap(struct sw_nvme_queue *queue, struct sw_nvme_req **done, uint32_t want,
                 uint32_t max);

/* Somebody waits for a read of this store (1), or no longer (0); calls nest, from any thread. While
 * one waits and a drive has reads in flight, that drive's writers keep a quarter of their depth. */
void sw_nvme_reads_first(struct sw_nvme_store *store, int waiting);

/* Where a chunk's home lies: the file's path, the store's, and the byte in it. For reports. */
const char *sw_nvme_where(const struct sw_nvme_store *store, uint32_t chunk, uint32_t home,
                          uint64_t *offset_bytes);

/* fdatasync of every file of the store, in parallel. The caller has reaped its writes. */
int sw_nvme_sync(struct sw_nvme_store *store);

#endif
