/* nvme/measure.h - what the drives of a set of folders give, measured through the store's own
 * queues: scratch records are written, checked, and moved in a pattern for a while.
 *
 * The scratch files lose their names as soon as they are open, so nothing stays behind whatever
 * ends the process; `keep` leaves them, for peers that measure the same files. Buffers are the
 * caller's (huge pages are worth up to twice the rate) and in use during calls only. Threads: one
 * at a time; a mixed run starts one more for its length. Errors: 0 or -errno, reported; -EINTR,
 * which is not, when `stopped` says so. Rates are bytes per second. */
#ifndef NVME_MEASURE_H
#define NVME_MEASURE_H
#include <stdint.h>

struct sw_nvme_measure;

/* MIXED is a training step's: a reader and a writer thread side by side. */
enum sw_nvme_pattern { SW_NVME_READ, SW_NVME_WRITE, SW_NVME_MIXED };

/* Of the buffer: enough for the deepest setting that a bench tries, and the least. */
#define SW_NVME_MEASURE_BUF_BYTES     (64ull << 20)
#define SW_NVME_MEASURE_BUF_MIN_BYTES (1ull << 20)
/* Of the scratch files of one folder, the least. */
#define SW_NVME_MEASURE_MIN_BYTES (1ull << 20)

struct sw_nvme_measure_options {
    const char *const *folders;
    uint32_t folder_count;
    const char *name; /* of the scratch files */
    uint64_t bytes;   /* of scratch in each folder; the next smaller possible size is taken */
    void *buf;        /* aligned to SW_NVME_ALIGN_BYTES */
    uint64_t buf_bytes;
    int keep;             /* the files stay, with their names */
    int (*stopped)(void); /* asked now and then; NULL: never */
};

struct sw_nvme_rates {
    double read, write; /* 0 for a direction that the pattern has not */
    double seconds;     /* measured for so long */
};

int sw_nvme_measure_open(struct sw_nvme_measure **out, const struct sw_nvme_measure_options *o);
void sw_nvme_measure_close(struct sw_nvme_measure *m);           /* NULL is fine */
uint64_t sw_nvme_measure_bytes(const struct sw_nvme_measure *m); /* of scratch, in all folders */

/* Writes every record: each 8 bytes name their record and place. Due once before a run, too, as
 * blocks that were never written are read without the drive. */
int sw_nvme_measure_fill(struct sw_nvme_measure *m);
/* Reads every record and compares. -EIO names file and offset of the first difference. Only after a
 * fill with no writing run since. */
int sw_nvme_measure_check(struct sw_nvme_measure *m);

/* Moves records for about `seconds`; block_bytes and depth as in struct sw_nvme_queue_options. */
int sw_nvme_measure_run(struct sw_nvme_measure *m, enum sw_nvme_pattern pattern,
                        uint32_t block_bytes, uint32_t depth, double seconds,
                        struct sw_nvme_rates *rates);

/* The rate of one folder's drive in the mixed pattern, both directions together, at the default
 * block size and depth: fills a little scratch and measures for `seconds`. A training run takes it
 * for the shares of unequal drives. */
int sw_nvme_measure_speed(const char *folder, void *buf, uint64_t buf_bytes, double seconds,
                          uint64_t *bytes_per_s);

#endif
