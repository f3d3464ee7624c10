/* tests/support_faulty_io.c - see the header. One owner thread, like the queue above it. */
#include "tests/support_faulty_io.h"

#include <errno.h>
#include <stdlib.h>

enum { HELD_MAX = 1024 };

struct faulty_io {
    struct faulty_plan *plan;
    void *inner;
    struct sw_nvme_done held[HELD_MAX];
    uint32_t held_count, inner_count, waits;
    int32_t reported[HELD_MAX]; /* by tag; 0: the truth */
};

static uint32_t draw(struct faulty_plan *plan) {
    plan->seed = plan->seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(plan->seed >> 33);
}
static int hit(struct faulty_plan *plan, uint32_t one_in) {
    return one_in && draw(plan) % one_in == 0;
}

static int faulty_open(void **out, const struct sw_nvme_setup *setup, struct sw_nvme_mode *mode) {
    struct faulty_io *io = calloc(1, sizeof(*io));
    if (setup->entries > HELD_MAX) abort();
    io->plan = setup->ctx;
    io->plan->low_offset = UINT64_MAX;
    *out = io;
    return sw_nvme_threads_ops.open(&io->inner, setup, mode);
}

static void faulty_close(void *arg) {
    struct faulty_io *io = arg;
    sw_nvme_threads_ops.close(io->inner);
    free(io);
}

static void hold(struct faulty_io *io, uint32_t tag, int32_t result) {
    if (io->held_count == HELD_MAX) abort();
    io->held[io->held_count++] = (struct sw_nvme_done){tag, result};
}

/* Reports `bytes`, and moves the whole pages of them alone: direct I/O can do no more, and a queue
 * that trusts the odd rest, or that trusts the whole block, loses data. */
static int cut(struct faulty_io *io, struct sw_nvme_block *b, uint32_t bytes) {
    const uint32_t whole = bytes / SW_NVME_ALIGN_BYTES * SW_NVME_ALIGN_BYTES;
    if (!whole) return hold(io, b->tag, (int32_t)bytes), 0;
    io->reported[b->tag] = (int32_t)bytes;
    b->len_bytes = whole;
    io->inner_count++;
    return sw_nvme_threads_ops.start(io->inner, b);
}

static int faulty_start(void *arg, const struct sw_nvme_block *asked) {
    struct faulty_io *io = arg;
    struct faulty_plan *plan = io->plan;
    struct sw_nvme_block b = *asked;
    plan->started++;
    plan->faults++; /* taken back below where there is none */
    if (plan->forever) return hold(io, b.tag, plan->forever), 0;
    if (plan->no_progress) return hold(io, b.tag, 0), 0;
    if (plan->error && plan->error_times && b.offset_bytes <= plan->error_offset &&
        plan->error_offset < b.offset_bytes + b.len_bytes) {
        plan->error_times--;
        return hold(io, b.tag, plan->error), 0;
    }
    if (hit(plan, plan->transient_one_in))
        return hold(io, b.tag, draw(plan) % 2 ? -EINTR : -EAGAIN), 0;
    if (hit(plan, plan->short_one_in)) return cut(io, &b, 1 + draw(plan) % b.len_bytes);
    plan->faults--;
    plan->bytes += b.len_bytes;
    if (b.len_bytes > plan->longest) plan->longest = b.len_bytes;
    if (b.offset_bytes < plan->low_offset) plan->low_offset = b.offset_bytes;
    if (b.offset_bytes + b.len_bytes > plan->high_offset)
        plan->high_offset = b.offset_bytes + b.len_bytes;
    if (plan->only_account) return hold(io, b.tag, (int32_t)b.len_bytes), 0;
    io->inner_count++;
    return sw_nvme_threads_ops.start(io->inner, &b);
}

static int faulty_wait(void *arg, struct sw_nvme_done *done, uint32_t max, int block) {
    struct faulty_io *io = arg;
    if (io->plan->wait_fails && ++io->waits == io->plan->wait_fails) return -EBADF;
    struct sw_nvme_done some[8];
    int n;
    do {
        /* To reorder, everything in flight is gathered first. */
        const int wait = block && (io->plan->reorder || !io->held_count);
        n = sw_nvme_threads_ops.wait(io->inner, some, 8, wait && io->inner_count);
        for (int i = 0; i < n; i++) {
            const int32_t lie = io->reported[some[i].tag];
            io->reported[some[i].tag] = 0;
            hold(io, some[i].tag, lie && some[i].result > 0 ? lie : some[i].result);
        }
        io->inner_count -= (uint32_t)n;
    } while (n > 0 && io->inner_count && io->plan->reorder && block);
    uint32_t count = 0;
    while (count < max && io->held_count) {
        const uint32_t at = io->plan->reorder ? draw(io->plan) % io->held_count : 0;
        done[count++] = io->held[at];
        io->held[at] = io->held[--io->held_count];
    }
    return (int)count;
}

const struct sw_nvme_io_ops faulty_io_ops = {"faulty", faulty_open, faulty_close, faulty_start,
                                             faulty_wait};
