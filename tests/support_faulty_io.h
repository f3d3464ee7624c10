/* tests/support_faulty_io.h - a disk that misbehaves on purpose, behind the store's queue.
 *
 * It moves real bytes (by the threads back end) and lies about some of them, by a seeded draw:
 *   short       part of the transfer is done, and reported so
 *   late        a completion is held back while others pass it
 *   reordered   completions are held and given back in any order
 *   EINTR, EAGAIN, EBUSY   nothing is moved, and reported so
 *   refused     the transfer is not even taken (EAGAIN, EBUSY)
 *   EIO         nothing is moved
 *   torn, lost  a part of a write reaches the disk, or nothing; success is reported
 *   stale       a read brings what the other home of the place holds
 *   flips       one bit of what is read, or of what is written, is another one
 * The last five damage bytes in silence; one that would change nothing, because both contents are
 * the same, is left out and not counted. */
#ifndef TESTS_SUPPORT_FAULTY_IO_H
#define TESTS_SUPPORT_FAULTY_IO_H
#include <stdint.h>
#include "nvme/nvme_internal.h"

enum fault {
    FAULT_SHORT,
    FAULT_LATE,
    FAULT_REORDERED,
    FAULT_EINTR,
    FAULT_EAGAIN,
    FAULT_EBUSY,
    FAULT_REFUSED,
    FAULT_EIO,
    FAULT_TORN,
    FAULT_LOST,
    FAULT_STALE,
    FAULT_FLIP_READ,
    FAULT_FLIP_WRITE,
    FAULT_KINDS
};
extern const char *const fault_names[FAULT_KINDS];

struct faulty_plan { /* the test's; "one in" 0: never */
    uint64_t seed;
    uint32_t short_one_in;     /* cut at any byte, 1 included */
    uint32_t transient_one_in; /* EINTR, EAGAIN or EBUSY, nothing moved */
    uint32_t refused_one_in;
    uint32_t late_one_in;
    uint32_t reorder; /* 1: always */
    uint32_t eio_one_in, torn_one_in, lost_one_in, stale_one_in, flip_one_in;
    const struct sw_nvme_store *store; /* for stale reads: where the other home lies */
    int forever;                       /* every transfer ends with this error */
    int error; /* the transfer that covers error_offset ends with this error */
    uint64_t error_offset;
    uint32_t error_times;  /* so often, then it works */
    uint32_t no_progress;  /* every transfer moves 0 bytes */
    uint32_t wait_fails;   /* the back end itself fails at this call of wait(), counted from 1 */
    uint32_t only_account; /* moves nothing: buffers may be address space alone */

    /* What happened. */
    uint64_t started, faults, bytes, low_offset, high_offset;
    uint32_t longest;
    uint64_t reached[FAULT_KINDS]; /* a transfer that was pending */
    uint64_t damaged_offset;       /* of the last transfer that ended in EIO or was damaged */
    uint32_t damaged_file;
};

extern const struct sw_nvme_io_ops faulty_io_ops; /* its ctx is a struct faulty_plan */

#endif
