/* engine/trainer_load.c - what the pools begin with, and a chunk's weights in and out of their tier
 * while lanes are idle. */
#include "engine/trainer_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "base/log.h"
#include "base/size.h"

/* ---- weights in and out ---- */

int sw_trainer_put_weights(struct sw_trainer *t, uint32_t c) {
    const struct sw_chunk *chunk = &t->placement.chunks[c];
    const uint64_t bytes = sw_trainer_weight_bytes(t, c);
    t->fetched_chunk = UINT32_MAX;
    if (chunk->weight_tier == SW_TIER_NVME)
        return sw_spill_move(t, SPILL_WEIGHTS, c, 1, t->weight_buffer);
    if (chunk->weight_tier == SW_TIER_HOST) {
        memcpy(t->host_weights + chunk->weight_offset, t->weight_buffer, bytes);
        return 0;
    }
    const int ret = t->device.ops->copy_h2d(t->stream, t->weights + chunk->weight_offset,
                                            t->weight_buffer, bytes);
    return ret < 0 ? ret : t->device.ops->stream_sync(t->stream);
}

/* Elements [first, first + count) of a chunk. */
static int get_weights(struct sw_trainer *t, uint32_t c, uint64_t first, uint64_t count,
                       void *out) {
    const struct sw_chunk *chunk = &t->placement.chunks[c];
    const uint64_t element = sw_dtype_bytes(t->options.dtype);
    const uint64_t at = first * element, bytes = count * element;
    if (chunk->weight_tier == SW_TIER_HOST) {
        memcpy(out, t->host_weights + chunk->weight_offset + at, bytes);
        return 0;
    }
    if (chunk->weight_tier == SW_TIER_DEVICE) {
        const int ret =
            t->device.ops->copy_d2h(t->stream, out, t->weights + chunk->weight_offset + at, bytes);
        return ret < 0 ? ret : t->device.ops->stream_sync(t->stream);
    }
    if (t->fetched_chunk != c) {
        t->fetched_chunk = UINT32_MAX;
        const int ret = sw_spill_move(t, SPILL_WEIGHTS, c, 0, t->weight_buffer);
        if (ret < 0) return ret;
        t->fetched_chunk = c;
    }
    memcpy(out, t->weight_buffer + at, bytes);
    return 0;
}

int sw_trainer_fetch(void *ctx, uint32_t unit, uint64_t first, uint64_t count, enum sw_dtype dtype,
                     void *out) {
    struct sw_trainer *t = ctx;
    const struct sw_placement *p = &t->placement;
    const uint64_t element = sw_dtype_bytes(t->options.dtype), end = first + count;
    if (dtype != t->options.dtype) return -EINVAL;
    int ret = 0;
    for (uint32_t c = p->unit_first_chunk[unit]; c < p->unit_first_chunk[unit + 1] && ret == 0;
         c++) {
        const uint64_t begins = p->chunks[c].first, ends = begins + p->chunks[c].count;
        if (ends <= first || begins >= end) continue;
        const uint64_t from = first > begins ? first : begins, to = end < ends ? end : ends;
        ret = get_weights(t, c, from - begins, to - from, (char *)out + (from - first) * element);
    }
    return ret;
}

/* ---- records ---- */

void sw_trainer_start_chunk(const struct sw_trainer *t, uint32_t c, void *record) {
    const struct sw_chunk *placed = &t->placement.chunks[c];
    struct sw_adam_chunk chunk;
    sw_trainer_map(t, c, record, &chunk);
    float masters[4 * SW_ADAM_BLOCK];
    for (uint64_t first = 0; first < chunk.count; first += 4 * SW_ADAM_BLOCK) {
        const uint64_t left = chunk.count - first;
        const uint64_t count = left < 4 * SW_ADAM_BLOCK ? left : 4 * SW_ADAM_BLOCK;
        sw_model_read(&t->model, placed->unit, placed->first + first, count, masters);
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

void sw_trainer_round_masters(const struct sw_trainer *t, uint32_t c, void *record, void *weights) {
    struct sw_adam_chunk chunk;
    float values[SW_ADAM_BLOCK];
    sw_trainer_map(t, c, record, &chunk);
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
static int zero_slots(struct sw_trainer *t) {
    const struct sw_placement *p = &t->placement;
    const uint64_t ring = p->ring_slots[SW_RING_ACC] * p->ring_slot_bytes[SW_RING_ACC];
    const int ret = t->device.ops->zero(t->stream, t->rings[SW_RING_ACC], ring);
    if (ret < 0) return ret;
    return t->device.ops->zero(t->stream, t->head_acc, p->head_acc_offset[p->order.parts]);
}

static int load_weights(struct sw_trainer *t, uint32_t c) {
    const struct sw_chunk *chunk = &t->placement.chunks[c];
    float values[4 * SW_ADAM_BLOCK];
    for (uint64_t first = 0; first < chunk->count; first += 4 * SW_ADAM_BLOCK) {
        const uint64_t left = chunk->count - first;
        const uint64_t count = left < 4 * SW_ADAM_BLOCK ? left : 4 * SW_ADAM_BLOCK;
        sw_model_read(&t->model, chunk->unit, chunk->first + first, count, values);
        round_weights(t, values, first, count, t->weight_buffer);
    }
    return sw_trainer_put_weights(t, c);
}

/* A record of the host tier is filled in place, one of the device through the buffer. */
static int load_record(struct sw_trainer *t, uint32_t c, void *buffer) {
    const struct sw_chunk *chunk = &t->placement.chunks[c];
    if (chunk->tier == SW_TIER_HOST)
        sw_trainer_start_chunk(t, c, t->host_state + chunk->record_offset);
    if (chunk->tier != SW_TIER_DEVICE) return 0;
    sw_trainer_start_chunk(t, c, buffer);
    const int ret = t->device.ops->copy_h2d(t->stream, t->device_state + chunk->record_offset,
                                            buffer, chunk->record_bytes);
    return ret < 0 ? ret : t->device.ops->stream_sync(t->stream);
}

/* What a chunk puts into tiers at load; an NVMe record is written by its first update. */
static uint64_t load_bytes(const struct sw_trainer *t, uint32_t c) {
    const struct sw_chunk *chunk = &t->placement.chunks[c];
    return sw_trainer_weight_bytes(t, c) + (chunk->tier == SW_TIER_NVME ? 0 : chunk->record_bytes);
}

int sw_trainer_load(struct sw_trainer *t) {
    const uint32_t chunks = t->placement.chunk_count;
    uint64_t total = 0;
    int ret = zero_slots(t);
    void *record = aligned_alloc(SW_NVME_ALIGN_BYTES, t->placement.ring_slot_bytes[SW_RING_STATE]);
    if (!record && ret == 0) ret = -ENOMEM;
    for (uint32_t c = 0; c < chunks; c++) total += load_bytes(t, c);
    for (uint32_t c = 0; c < chunks && ret == 0; c++) {
        if (sw_trainer_is_committed(t, c)) {
            ret = sw_trainer_restore_chunk(t, c, record);
        } else {
            ret = load_weights(t, c);
            if (ret == 0) ret = load_record(t, c, record);
        }
        t->loaded_bytes += load_bytes(t, c);
        sw_trainer_progress(t, SW_LOADING, t->loaded_bytes, total);
        if (ret == 0 && sw_stop_asked(t)) ret = 1;
    }
    free(record);
    if (ret == 0) ret = t->device.ops->stream_sync(t->stream);
    return ret;
}
