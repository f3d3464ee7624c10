/* tests/support_faulty_io.c - see the header. One owner thread, like the queue above it. */
#include "tests/support_faulty_io.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { HELD_MAX = 1024, LATE_WAITS = 4, SECTOR_BYTES = 512 };

const char *const fault_names[FAULT_KINDS] = {"short",
                                              "late",
                                              "reordered",
                                              "EINTR",
                                              "EAGAIN",
                                              "EBUSY",
                                              "refused",
                                              "EIO",
                                              "torn",
                                              "lost",
                                              "stale",
                                              "flipped in a read",
                                              "flipped in a write"};

struct held {
    struct sw_nvme_done done;
    uint64_t number; /* of the transfer, in the order of their starts */
    uint32_t late;   /* calls of wait() that it is still kept from */
    int was_late;
};

struct faulty_io {
    struct faulty_plan *plan;
    void *inner;
    struct held held[HELD_MAX];
    uint32_t held_count, inner_count, waits;
    int32_t reported[HELD_MAX]; /* by tag; 0: the truth */
    uint64_t number[HELD_MAX];  /* by tag */
    uint32_t late[HELD_MAX];    /* by tag */
    uint64_t numbers;
    int fds[SW_NVME_FILES_MAX];
    char *scratch; /* of scratch_bytes, aligned: what the disk holds now */
    size_t scratch_bytes;
};

static uint32_t draw(struct faulty_plan *plan) {
    plan->seed = plan->seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(plan->seed >> 33);
}
static int hit(struct faulty_plan *plan, uint32_t one_in) {
    return one_in && draw(plan) % one_in == 0;
}
static void count(struct faulty_plan *plan, enum fault kind) {
    plan->faults++;
    plan->reached[kind]++;
}

static int faulty_open(void **out, const struct sw_nvme_setup *setup, struct sw_nvme_mode *mode) {
    struct faulty_io *io = calloc(1, sizeof(*io));
    if (!io || setup->entries > HELD_MAX) abort();
    io->plan = setup->ctx;
    io->plan->low_offset = UINT64_MAX;
    memcpy(io->fds, setup->fds, setup->fd_count * sizeof(*io->fds));
    *out = io;
    return sw_nvme_threads_ops.open(&io->inner, setup, mode);
}

static void faulty_close(void *arg) {
    struct faulty_io *io = arg;
    sw_nvme_threads_ops.close(io->inner);
    free(io->scratch);
    free(io);
}

static int hold(struct faulty_io *io, uint32_t tag, int32_t result) {
    if (io->held_count == HELD_MAX) abort();
    io->held[io->held_count++] = (struct held){{tag, result}, io->number[tag], io->late[tag], 0};
    return 0;
}

/* Reports `bytes`, and moves the whole pages of them alone: direct I/O can do no more, and a queue
 * that trusts the odd rest, or that trusts the whole block, loses data. */
static int cut(struct faulty_io *io, struct sw_nvme_block *b, uint32_t bytes) {
    const uint32_t whole = bytes / SW_NVME_ALIGN_BYTES * SW_NVME_ALIGN_BYTES;
    if (bytes < b->len_bytes) count(io->plan, FAULT_SHORT);
    if (!whole) return hold(io, b->tag, (int32_t)bytes);
    io->reported[b->tag] = (int32_t)bytes;
    b->len_bytes = whole;
    io->inner_count++;
    return sw_nvme_threads_ops.start(io->inner, b);
}

/* ---- damage: done at once, by the owner's thread ---- */

static void move(const struct faulty_io *io, const struct sw_nvme_block *b, void *buf,
                 uint64_t offset, int write) {
    const int fd = io->fds[b->file];
    const ssize_t n = write ? pwrite(fd, buf, b->len_bytes, (off_t)offset)
                            : pread(fd, buf, b->len_bytes, (off_t)offset);
    if (n != (ssize_t)b->len_bytes) abort();
}

/* What the disk holds at this place of the block's length, until the next call. */
static char *disk_holds(struct faulty_io *io, const struct sw_nvme_block *b, uint64_t offset) {
    if (io->scratch_bytes < b->len_bytes) {
        free(io->scratch);
        io->scratch = aligned_alloc(SW_NVME_ALIGN_BYTES, b->len_bytes);
        if (!io->scratch) abort();
        io->scratch_bytes = b->len_bytes;
    }
    move(io, b, io->scratch, offset, 0);
    return io->scratch;
}

static void flip(struct faulty_plan *plan, char *buf, uint32_t bytes) {
    buf[draw(plan) % bytes] ^= (char)(1u << draw(plan) % 8);
}

/* A write that damages the disk: 1 when it was done so, 0 when the truth would have been the same.
 */
static int damage_disk(struct faulty_io *io, const struct sw_nvme_block *b, enum fault kind) {
    char *content = disk_holds(io, b, b->offset_bytes);
    if (kind == FAULT_FLIP_WRITE) {
        memcpy(content, b->buf, b->len_bytes);
        flip(io->plan, content, b->len_bytes);
    } else {
        const uint32_t sectors = b->len_bytes / SECTOR_BYTES;
        const uint32_t kept =
            kind == FAULT_TORN ? (1 + draw(io->plan) % (sectors - 1)) * SECTOR_BYTES : 0;
        memcpy(content, b->buf, kept);
        if (!memcmp(content, b->buf, b->len_bytes)) return 0;
    }
    move(io, b, content, b->offset_bytes, 1);
    return 1;
}

static int damage_read(struct faulty_io *io, const struct sw_nvme_block *b, enum fault kind) {
    if (kind == FAULT_FLIP_READ) {
        move(io, b, b->buf, b->offset_bytes, 0);
        flip(io->plan, b->buf, b->len_bytes);
        return 1;
    }
    const uint64_t home = io->plan->store->files[b->file].bytes;
    const uint64_t other = b->offset_bytes < home ? b->offset_bytes + home : b->offset_bytes - home;
    const char *truth = disk_holds(io, b, b->offset_bytes);
    move(io, b, b->buf, other, 0);
    return memcmp(truth, b->buf, b->len_bytes) != 0;
}

/* Reports success for a transfer that was not done as asked; 0: none was drawn. */
static int damage(struct faulty_io *io, const struct sw_nvme_block *b) {
    struct faulty_plan *plan = io->plan;
    int kind = -1;
    if (b->write) {
        if (hit(plan, plan->torn_one_in)) kind = FAULT_TORN;
        if (kind < 0 && hit(plan, plan->lost_one_in)) kind = FAULT_LOST;
        if (kind < 0 && hit(plan, plan->flip_one_in)) kind = FAULT_FLIP_WRITE;
    } else {
        if (hit(plan, plan->stale_one_in)) kind = FAULT_STALE;
        if (kind < 0 && hit(plan, plan->flip_one_in)) kind = FAULT_FLIP_READ;
    }
    if (kind < 0) return 0;
    if (!(b->write ? damage_disk : damage_read)(io, b, (enum fault)kind)) return 0;
    count(plan, (enum fault)kind);
    plan->damaged_file = b->file;
    plan->damaged_offset = b->offset_bytes;
    hold(io, b->tag, (int32_t)b->len_bytes);
    return 1;
}

/* ---- the back end ---- */

static int lie(struct faulty_io *io, const struct sw_nvme_block *b, int result) {
    io->plan->faults++;
    return hold(io, b->tag, result);
}

static int transient(struct faulty_io *io, const struct sw_nvme_block *b) {
    static const struct {
        int error;
        enum fault kind;
    } kinds[] = {{-EINTR, FAULT_EINTR}, {-EAGAIN, FAULT_EAGAIN}, {-EBUSY, FAULT_EBUSY}};
    const uint32_t which = draw(io->plan) % 3;
    count(io->plan, kinds[which].kind);
    return hold(io, b->tag, kinds[which].error);
}

static int faulty_start(void *arg, const struct sw_nvme_block *asked) {
    struct faulty_io *io = arg;
    struct faulty_plan *plan = io->plan;
    struct sw_nvme_block b = *asked;
    plan->started++;
    if (hit(plan, plan->refused_one_in)) {
        count(plan, FAULT_REFUSED);
        return draw(plan) % 2 ? -EBUSY : -EAGAIN;
    }
    io->number[b.tag] = ++io->numbers;
    io->late[b.tag] = hit(plan, plan->late_one_in) ? 1 + draw(plan) % LATE_WAITS : 0;
    if (plan->forever) return lie(io, &b, plan->forever);
    if (plan->no_progress) return lie(io, &b, 0);
    if (plan->error && plan->error_times && b.offset_bytes <= plan->error_offset &&
        plan->error_offset < b.offset_bytes + b.len_bytes) {
        plan->error_times--;
        return lie(io, &b, plan->error);
    }
    if (hit(plan, plan->transient_one_in)) return transient(io, &b);
    if (hit(plan, plan->short_one_in)) return cut(io, &b, 1 + draw(plan) % b.len_bytes);
    if (hit(plan, plan->eio_one_in)) {
        count(plan, FAULT_EIO);
        plan->damaged_file = b.file;
        plan->damaged_offset = b.offset_bytes;
        return hold(io, b.tag, -EIO);
    }
    if (damage(io, &b)) return 0;
    plan->bytes += b.len_bytes;
    if (b.len_bytes > plan->longest) plan->longest = b.len_bytes;
    if (b.offset_bytes < plan->low_offset) plan->low_offset = b.offset_bytes;
    if (b.offset_bytes + b.len_bytes > plan->high_offset)
        plan->high_offset = b.offset_bytes + b.len_bytes;
    if (plan->only_account) return hold(io, b.tag, (int32_t)b.len_bytes);
    io->inner_count++;
    return sw_nvme_threads_ops.start(io->inner, &b);
}

/* What is reported of a transfer that the inner back end has done. */
static int32_t result_of(struct faulty_io *io, const struct sw_nvme_done *done) {
    const int32_t reported = io->reported[done->tag];
    io->reported[done->tag] = 0;
    return reported && done->result > 0 ? reported : done->result;
}

/* Gathers what the inner back end has; waits for it where nothing else can be given back, and for
 * all of it where completions are to be reordered. */
static int gather(struct faulty_io *io, int block) {
    struct sw_nvme_done some[8];
    int n;
    do {
        const int wait = block && (io->plan->reorder || !io->held_count);
        n = sw_nvme_threads_ops.wait(io->inner, some, 8, wait && io->inner_count);
        for (int i = 0; i < n; i++) hold(io, some[i].tag, result_of(io, &some[i]));
        if (n > 0) io->inner_count -= (uint32_t)n;
    } while (n > 0 && io->inner_count && io->plan->reorder && block);
    return n < 0 ? n : 0;
}

/* Takes one held completion out: any of them, or the first, among those that are not late. */
static int give_back(struct faulty_io *io, struct sw_nvme_done *done, int late_too) {
    uint32_t ready[HELD_MAX], ready_count = 0;
    for (uint32_t i = 0; i < io->held_count; i++)
        if (!io->held[i].late || late_too) ready[ready_count++] = i;
    if (!ready_count) return 0;
    const uint32_t at = ready[io->plan->reorder ? draw(io->plan) % ready_count : 0];
    const struct held one = io->held[at];
    io->held[at] = io->held[--io->held_count];
    if (one.was_late) count(io->plan, FAULT_LATE);
    int overtakes = 0;
    for (uint32_t i = 0; i < io->held_count; i++) overtakes |= io->held[i].number < one.number;
    if (overtakes) count(io->plan, FAULT_REORDERED);
    *done = one.done;
    return 1;
}

static int faulty_wait(void *arg, struct sw_nvme_done *done, uint32_t max, int block) {
    struct faulty_io *io = arg;
    if (io->plan->wait_fails && ++io->waits == io->plan->wait_fails) return -EBADF;
    int ret = gather(io, block);
    if (ret < 0) return ret;
    uint32_t n = 0;
    while (n < max && give_back(io, &done[n], 0)) n++;
    if (!n && block && io->inner_count) { /* what was there is late */
        ret = sw_nvme_threads_ops.wait(io->inner, done, 1, 1);
        if (ret < 0) return ret;
        io->inner_count -= (uint32_t)ret;
        done->result = result_of(io, done);
        n = (uint32_t)ret;
    }
    if (!n && max && block) n = (uint32_t)give_back(io, done, 1);
    for (uint32_t i = 0; i < io->held_count && max; i++) {
        io->held[i].was_late |= io->held[i].late > 0;
        if (io->held[i].late) io->held[i].late--;
    }
    return (int)n;
}

const struct sw_nvme_io_ops faulty_io_ops = {"faulty", faulty_open, faulty_close, faulty_start,
                                             faulty_wait};
