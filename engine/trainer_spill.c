/* engine/trainer_spill.c - weights, gradients and kept inputs on NVMe.
 *
 * Each lies in a store of its own with one home per record: they are made anew by whoever goes on
 * from a commit, so no crash can hurt. Every record's checksum is taken when it is written and
 * compared when it is read. */
#include "engine/trainer_internal.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "base/crc32c.h"
#include "base/log.h"
#include "base/size.h"
#include "engine/output.h"

static const char *const names[SPILL_COUNT] = {SW_STORE_WEIGHTS, SW_STORE_GRADIENTS,
                                               SW_STORE_INPUTS};

/* What one rank has of it comes behind each other, so that records of the same place lie together.
 */
static uint64_t index_count(const struct sw_trainer *t, enum spill spill) {
    const struct sw_placement *p = &t->placement;
    return t->rank_count *
           (spill == SPILL_KEPT ? (uint64_t)p->kept_groups * p->micro_count : p->chunk_count);
}

uint64_t sw_spill_index(const struct sw_rank *r, uint64_t index) {
    return index * r->t->rank_count + r->index;
}

/* Bytes of what belongs to an index on NVMe; 0: it is elsewhere. */
static uint64_t bytes_on_nvme(const struct sw_trainer *t, enum spill spill, uint64_t spilled) {
    const struct sw_placement *p = &t->placement;
    const uint64_t index = spilled / t->rank_count;
    if (spill == SPILL_KEPT)
        return sw_placement_kept(p, index).tier == SW_TIER_NVME ? t->input.activation_bytes : 0;
    const struct sw_chunk *chunk = &p->chunks[index];
    if (spill == SPILL_WEIGHTS)
        return chunk->weight_tier == SW_TIER_NVME ? chunk->count * sw_dtype_bytes(t->options.dtype)
                                                  : 0;
    return chunk->grad_tier == SW_TIER_NVME ? chunk->count * sw_dtype_bytes(t->options.grad_dtype)
                                            : 0;
}

/* The slots that a lane's transfers come from and go to. */
static void slots_of(const struct sw_trainer *t, enum spill spill, int write, char **base,
                     uint64_t *bytes) {
    static const enum sw_ring rings[SPILL_COUNT][2] = {
        [SPILL_WEIGHTS] = {SW_RING_WEIGHT_STAGE, SW_RING_EMIT},
        [SPILL_GRADS] = {SW_RING_GRAD_STAGE, SW_RING_GRAD_STAGE},
        [SPILL_KEPT] = {SW_RING_KEPT_STAGE, SW_RING_KEPT_STAGE},
    };
    const enum sw_ring ring = rings[spill][write];
    *base = t->ranks[0].rings[ring];
    *bytes = t->rank_count * t->placement.ring_slots[ring] * t->placement.ring_slot_bytes[ring];
}

static int open_files(struct sw_trainer *t, enum spill spill, uint32_t records) {
    struct spill_store *s = &t->spills[spill];
    uint64_t *rounded = malloc(records * sizeof(*rounded));
    s->checksums = calloc(records, sizeof(*s->checksums));
    s->bytes = calloc(records, sizeof(*s->bytes));
    int ret = rounded && s->checksums && s->bytes ? 0 : -ENOMEM;
    uint32_t record = 0;
    for (uint64_t i = 0; i < index_count(t, spill) && ret == 0; i++) {
        const uint64_t bytes = bytes_on_nvme(t, spill, i);
        if (!bytes) continue;
        rounded[record] = sw_round_up(bytes, SW_NVME_ALIGN_BYTES);
        s->bytes[record] = bytes;
        s->record_of[i] = record++;
    }
    uint32_t folder_count;
    char name[SW_PROCESS_NAME_BYTES];
    const struct sw_nvme_options options = {
        .folders = sw_trainer_folders(t, &folder_count),
        .folder_count = folder_count,
        .name = sw_trainer_name(t, names[spill], name),
        .record_bytes = rounded,
        .chunk_count = records,
        .homes = 1,
        .shares = t->drives.striped ? t->drives.shares : NULL,
    };
    if (ret == 0) ret = sw_nvme_open(&s->store, &options);
    free(rounded);
    return ret;
}

static int open_queues(struct sw_trainer *t, enum spill spill) {
    struct spill_store *s = &t->spills[spill];
    int ret = 0;
    for (int write = 0; write < 2 && ret == 0; write++) {
        char *base;
        struct sw_nvme_queue_options lane, idle = {.write = (uint32_t)write, .depth = 4};
        sw_trainer_lane_options(t, write, &lane);
        slots_of(t, spill, write, &base, &lane.bytes);
        lane.base = base;
        ret = sw_nvme_queue_open(write ? &s->writer : &s->reader, s->store, &lane);
        if (ret == 0 && spill == SPILL_WEIGHTS)
            ret = sw_nvme_queue_open(&s->idle[write], s->store, &idle);
    }
    return ret;
}

int sw_trainer_open_spills(struct sw_trainer *t) {
    for (int spill = 0; spill < SPILL_COUNT; spill++) {
        uint32_t records = 0;
        const uint64_t count = index_count(t, (enum spill)spill);
        for (uint64_t i = 0; i < count; i++) records += bytes_on_nvme(t, (enum spill)spill, i) > 0;
        if (records == 0) continue;
        t->spills[spill].record_of = calloc(count, sizeof(uint32_t));
        int ret = t->spills[spill].record_of ? 0 : -ENOMEM;
        if (ret == 0) ret = open_files(t, (enum spill)spill, records);
        if (ret == 0) ret = open_queues(t, (enum spill)spill);
        if (ret == 0 && spill == SPILL_WEIGHTS) ret = sw_trainer_open_direct(t, records);
        if (ret < 0) return ret;
    }
    return 0;
}

void sw_trainer_close_spills(struct sw_trainer *t) {
    sw_trainer_close_direct(t);
    for (int spill = 0; spill < SPILL_COUNT; spill++) {
        struct spill_store *s = &t->spills[spill];
        struct sw_nvme_queue *const queues[] = {s->reader, s->writer, s->idle[0], s->idle[1]};
        for (int i = 0; i < 4; i++) sw_nvme_queue_close(queues[i]);
        sw_nvme_close(s->store, 1);
        free(s->record_of);
        free(s->checksums);
        free(s->bytes);
        *s = (struct spill_store){0};
    }
}

void sw_trainer_drop_scratch(const struct sw_trainer *t) {
    uint32_t count;
    char name[SW_PROCESS_NAME_BYTES];
    const char *const *folders = sw_trainer_folders(t, &count);
    for (int spill = 0; spill < SPILL_COUNT; spill++)
        if (!t->spills[spill].store)
            sw_nvme_remove(folders, count, sw_trainer_name(t, names[spill], name));
}

static int refuse(const struct spill_store *s, uint32_t record, const char *what, uint64_t step,
                  uint32_t have) {
    uint64_t offset;
    const char *path = sw_nvme_where(s->store, record, 0, &offset);
    sw_error("step %llu: %s in %s at byte %llu are not what was written: CRC-32C %08x, expected "
             "%08x; the drive or its path lost or changed bytes, and nothing was trained on them",
             (unsigned long long)step, what, path, (unsigned long long)offset, have,
             s->checksums[record]);
    return -EIO;
}

int sw_spill_check(const struct sw_trainer *t, const struct lane_request *r) {
    const uint32_t record = r->req.chunk;
    const uint32_t have = sw_crc32c(0, r->req.buf, r->spill->bytes[record]);
    if (have == r->spill->checksums[record]) return 0;
    return refuse(r->spill, record, names[r->spill - t->spills], r->record->step, have);
}

int sw_spill_move(struct sw_trainer *t, enum spill spill, uint64_t index, int write, void *buffer) {
    struct spill_store *s = &t->spills[spill];
    const uint32_t record = s->record_of[index];
    struct sw_nvme_req req = {.buf = buffer, .chunk = record, .write = (uint32_t)write}, *done;
    assert(s->store && s->idle[write]);
    if (write) s->checksums[record] = sw_crc32c(0, buffer, s->bytes[record]);
    if (write && spill == SPILL_WEIGHTS) sw_direct_wrote(t, record, buffer);
    int ret = sw_nvme_submit(s->idle[write], &req);
    if (ret == 0) ret = sw_nvme_reap(s->idle[write], &done, 1, 1);
    if (ret >= 0) ret = req.result;
    if (ret < 0) {
        sw_error("%s could not be %s: %s", names[spill], write ? "written" : "read",
                 strerror(-ret));
        return ret;
    }
    if (write)
        atomic_fetch_add(&t->written_bytes, sw_round_up(s->bytes[record], SW_NVME_ALIGN_BYTES));
    const uint32_t have = write ? s->checksums[record] : sw_crc32c(0, buffer, s->bytes[record]);
    return have == s->checksums[record] ? 0 : refuse(s, record, names[spill], t->reported, have);
}
