/* engine/trainer_load.c - what the pools begin with, and a chunk's weights in and out of their tier
 * while lanes are idle. */
#include "engine/trainer_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "base/log.h"
#include "base/size.h"
#include "engine/model_internal.h"

/* ---- weights in and out ---- */

int sw_trainer_put_weights(struct sw_rank *r, uint32_t c) {
    struct sw_trainer *t = r->t;
    const struct sw_chunk *chunk = &t->placement.chunks[c];
    const uint64_t bytes = sw_trainer_weight_bytes(t, c);
    t->fetched_chunk = UINT32_MAX;
    if (chunk->weight_tier == SW_TIER_NVME)
        return sw_spill_move(t, SPILL_WEIGHTS, sw_spill_index(r, c), 1, t->weight_buffer);
    if (chunk->weight_tier == SW_TIER_HOST) {
        memcpy(r->host_weights + chunk->weight_offset, t->weight_buffer, bytes);
        return 0;
    }
    const int ret =
        r->device.ops->copy_h2d(r->stream, sw_weights_at(r, chunk), t->weight_buffer, bytes);
    return ret < 0 ? ret : r->device.ops->stream_sync(r->stream);
}

/* Elements [first, first + count) of a chunk. */
static int get_weights(struct sw_rank *r, uint32_t c, uint64_t first, uint64_t count, void *out) {
    struct sw_trainer *t = r->t;
    const struct sw_chunk *chunk = &t->placement.chunks[c];
    const uint64_t element = sw_dtype_bytes(t->options.dtype);
    const uint64_t at = first * element, bytes = count * element;
    if (chunk->weight_tier == SW_TIER_HOST) {
        memcpy(out, r->host_weights + chunk->weight_offset + at, bytes);
        return 0;
    }
    if (chunk->weight_tier == SW_TIER_DEVICE) {
        const int ret =
            r->device.ops->copy_d2h(r->stream, out, sw_weights_at(r, chunk) + at, bytes);
        return ret < 0 ? ret : r->device.ops->stream_sync(r->stream);
    }
    if (t->fetched_chunk != sw_store_chunk(r, c)) {
        t->fetched_chunk = UINT32_MAX;
        const int ret = sw_spill_move(t, SPILL_WEIGHTS, sw_spill_index(r, c), 0, t->weight_buffer);
        if (ret < 0) return ret;
        t->fetched_chunk = sw_store_chunk(r, c);
    }
    memcpy(out, t->weight_buffer + at, bytes);
    return 0;
}

int sw_trainer_fetch_shard(struct sw_rank *r, uint32_t unit, uint64_t first, uint64_t end,
                           void *out) {
    const struct sw_placement *p = &r->t->placement;
    const uint64_t element = sw_dtype_bytes(r->t->options.dtype);
    int ret = 0;
    for (uint32_t c = p->unit_first_chunk[unit]; c < p->unit_first_chunk[unit + 1] && ret == 0;
         c++) {
        const uint64_t begins = p->chunks[c].first, ends = begins + p->chunks[c].count;
        if (ends <= first || begins >= end) continue;
        const uint64_t from = first > begins ? first : begins, to = end < ends ? end : ends;
        ret = get_weights(r, c, from - begins, to - from, (char *)out + (from - first) * element);
    }
    return ret;
}

int sw_trainer_fetch(void *ctx, uint32_t unit, uint64_t first, uint64_t count, enum sw_dtype dtype,
                     void *out) {
    struct sw_trainer *t = ctx;
    const uint64_t end = first + count, element = sw_dtype_bytes(t->options.dtype);
    if (dtype != t->options.dtype) return -EINVAL;
    int ret = 0;
    for (uint32_t i = 0; i < SW_PIECES * t->shards && ret == 0; i++) {
        const uint32_t shard = i / SW_PIECES;
        const struct sw_piece piece = sw_piece_of(t, shard, unit, (int)(i % SW_PIECES));
        const uint64_t begins = piece.first, ends = begins + piece.count;
        if (ends <= first || begins >= end) continue;
        const uint64_t from = first > begins ? first : begins, to = end < ends ? end : ends;
        const uint64_t at = piece.local + from - begins;
        char *place = (char *)out + (from - first) * element;
        ret = shard < t->rank_count /* the first process's */
                  ? sw_trainer_fetch_shard(&t->ranks[shard], unit, at, at + to - from, place)
                  : sw_trainer_fetch_remote(t, shard, unit, at, at + to - from, place);
    }
    return ret;
}

/* ---- records ---- */

/* The model's values of a chunk's elements [first, first + count); padding of shards is zero. */
static void read_model(const struct sw_rank *r, uint32_t c, uint64_t first, uint64_t count,
                       float *out) {
    const struct sw_model *model = &r->t->model;
    const struct sw_chunk *chunk = &r->t->placement.chunks[c];
    sw_model_read_places(model, model->weights->places, chunk->unit,
                         sw_chunk_begin(r, chunk) + first, count, out);
}

void sw_trainer_start_chunk(const struct sw_rank *r, uint32_t c, void *record) {
    const struct sw_trainer *t = r->t;
    const struct sw_chunk *placed = &t->placement.chunks[c];
    struct sw_adam_chunk chunk;
    sw_trainer_map(r, c, record, &chunk);
    float masters[4 * SW_ADAM_BLOCK];
    for (uint64_t first = 0; first < chunk.count; first += 4 * SW_ADAM_BLOCK) {
        const uint64_t left = chunk.count - first;
        const uint64_t count = left < 4 * SW_ADAM_BLOCK ? left : 4 * SW_ADAM_BLOCK;
        read_model(r, c, first, count, masters);
        sw_adam_start(&chunk, first, count, masters);
    }
    const uint64_t used = sw_adam_record_bytes(&chunk.format, chunk.count);
    memset((char *)record + used, 0, placed->record_bytes - used);
}

static void round_weights(const struct sw_trainer *t, const float *values, uint64_t first,
                          uint64_t count, void *weights) {
    if (t->options.dtype == SW_FP32) {
        memcpy((float *)weights + first, values, count * sizeof(*values));
        return;
    }
    for (uint64_t i = 0; i < count; i++)
        ((sw_bf16 *)weights)[first + i] = sw_bf16_from_weight(values[i]);
}

void sw_trainer_round_masters(const struct sw_rank *r, uint32_t c, void *record, void *weights) {
    const struct sw_trainer *t = r->t;
    struct sw_adam_chunk chunk;
    float values[SW_ADAM_BLOCK];
    sw_trainer_map(r, c, record, &chunk);
    for (uint64_t first = 0; first < chunk.count; first += SW_ADAM_BLOCK) {
        const uint64_t left = chunk.count - first;
        const uint64_t count = left < SW_ADAM_BLOCK ? left : SW_ADAM_BLOCK;
        sw_adam_read(&chunk, first, count, values, NULL, NULL);
        round_weights(t, values, first, count, weights);
    }
}

/* ---- load ---- */

/* Accumulators have gaps between tensors that no operator writes; slots are shared by units, so
 * only what every unit leaves alone may be trusted: all is zeroed once here and gaps again with
 * each unit. */
static int zero_slots(struct sw_rank *r) {
    struct sw_trainer *t = r->t;
    const struct sw_placement *p = &t->placement;
    const uint64_t ring = p->ring_slots[SW_RING_ACC] * p->ring_slot_bytes[SW_RING_ACC];
    const int ret = r->device.ops->zero(r->stream, r->rings[SW_RING_ACC], ring);
    if (ret < 0) return ret;
    return r->device.ops->zero(r->stream, r->head_acc, p->head_acc_offset[p->order.parts]);
}

static int load_weights(struct sw_rank *r, uint32_t c) {
    struct sw_trainer *t = r->t;
    const struct sw_chunk *chunk = &t->placement.chunks[c];
    float values[4 * SW_ADAM_BLOCK];
    for (uint64_t first = 0; first < chunk->count; first += 4 * SW_ADAM_BLOCK) {
        const uint64_t left = chunk->count - first;
        const uint64_t count = left < 4 * SW_ADAM_BLOCK ? left : 4 * SW_ADAM_BLOCK;
        read_model(r, c, first, count, values);
        round_weights(t, values, first, count, t->weight_buffer);
    }
    return sw_trainer_put_weights(r, c);
}

/* A record of the host tier is filled in place, one of the device through the buffer. */
static int load_record(struct sw_rank *r, uint32_t c, void *buffer) {
    struct sw_trainer *t = r->t;
    const struct sw_chunk *chunk = &t->placement.chunks[c];
    if (chunk->frozen) return 0;
    if (chunk->tier == SW_TIER_HOST)
        sw_trainer_start_chunk(r, c, r->host_state + chunk->record_offset);
    if (chunk->tier != SW_TIER_DEVICE) return 0;
    sw_trainer_start_chunk(r, c, buffer);
    const int ret = r->device.ops->copy_h2d(r->stream, r->device_state + chunk->record_offset,
                                            buffer, chunk->record_bytes);
    return ret < 0 ? ret : r->device.ops->stream_sync(r->stream);
}

/* What a chunk puts into tiers at load; an NVMe record that is not imported is written by its first
 * update. */
static uint64_t load_bytes(const struct sw_trainer *t, uint32_t c) {
    const struct sw_chunk *chunk = &t->placement.chunks[c];
    const int later = chunk->tier == SW_TIER_NVME && !t->import;
    return sw_trainer_weight_bytes(t, c) + (later ? 0 : chunk->record_bytes);
}

static int load_chunk(struct sw_rank *r, uint32_t c, void *record) {
    if (sw_trainer_is_committed(r, c)) return sw_trainer_restore_chunk(r, c, record);
    if (r->t->import && !r->t->placement.chunks[c].frozen)
        return sw_trainer_import_chunk(r, c, record);
    const int ret = load_weights(r, c);
    return ret < 0 ? ret : load_record(r, c, record);
}

int sw_trainer_load(struct sw_trainer *t) {
    const uint64_t chunks = (uint64_t)t->placement.chunk_count * t->rank_count;
    uint64_t total = 0;
    int ret = 0;
    void *record = aligned_alloc(SW_NVME_ALIGN_BYTES, t->placement.ring_slot_bytes[SW_RING_STATE]);
    if (!record) return -ENOMEM;
    for (uint32_t i = 0; i < t->rank_count && ret == 0; i++) ret = zero_slots(&t->ranks[i]);
    for (uint32_t c = 0; c < t->placement.chunk_count; c++)
        total += t->rank_count * load_bytes(t, c);
    for (uint64_t i = 0; i < chunks && ret == 0; i++) {
        const uint32_t c = (uint32_t)(i / t->rank_count);
        ret = load_chunk(&t->ranks[i % t->rank_count], c, record);
        t->loaded_bytes += load_bytes(t, c);
        sw_trainer_progress(t, SW_LOADING, t->loaded_bytes, total);
        if (ret == 0 && !t->world && sw_stop_asked(t)) ret = 1;
    }
    free(record);
    for (uint32_t i = 0; i < t->rank_count && ret == 0; i++)
        ret = t->ranks[i].device.ops->stream_sync(t->ranks[i].stream);
    return ret;
}
