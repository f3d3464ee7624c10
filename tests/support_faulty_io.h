/* tests/support_faulty_io.h - a disk that misbehaves on purpose, behind the store's queue.
 *
 * It moves real bytes (by the threads back end) and lies about some of them, by a seeded draw:
 * short transfers, EINTR, EAGAIN, errors, completions late and in any order. */
#ifndef TESTS_SUPPORT_FAULTY_IO_H
#define TESTS_SUPPORT_FAULTY_IO_H
#include <stdint.h>
#include "nvme/nvme_internal.h"

struct faulty_plan { /* the test's; "one in" 0: never */
    uint64_t seed;
    uint32_t short_one_in;     /* cut at any byte, 1 included */
    uint32_t transient_one_in; /* EINTR or EAGAIN, nothing moved */
    uint32_t reorder;          /* completions are held and given back in any order */
    int forever;               /* every transfer ends with this error */
    int error;                 /* the transfer that covers error_offset ends with this error */
    uint64_t error_offset;
    uint32_t error_times;  /* so often, then it works */
    uint32_t no_progress;  /* every transfer moves 0 bytes */
    uint32_t wait_fails;   /* the back end itself fails at this call of wait(), counted from 1 */
    uint32_t only_account; /* moves nothing: buffers may be address space alone */

    /* What happened. */
    uint64_t started, faults, bytes, low_offset, high_offset;
    uint32_t longest;
};

extern const struct sw_nvme_io_ops faulty_io_ops; /* its ctx is a struct faulty_plan */

#endif
