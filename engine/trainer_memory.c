/* engine/trainer_memory.c - every byte of a run: sized, allocated once, filled. */
#include "engine/trainer_internal.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/log.h"
#include "base/size.h"

enum { PAGE = 4096, READ_PIECE = 1 << 18 };

static uint64_t blocks_of(uint64_t elements) {
    return (elements + SW_NORM_BLOCK - 1) / SW_NORM_BLOCK;
}

static uint64_t norm_bytes(const struct sw_trainer *t) {
    uint64_t bytes = 0;
    for (uint32_t u = 0; u < t->model.unit_count; u++)
        bytes += sw_round_up(blocks_of(t->unit_elements[u]) * sizeof(double), 64);
    return sw_round_up(bytes, PAGE) +
           sw_round_up(t->model.unit_count * sizeof(struct sw_nonfinite), PAGE) +
           sw_round_up(t->options.accumulate * sizeof(double), PAGE);
}

int sw_trainer_size(struct sw_trainer *t) {
    const struct sw_train_options *o = &t->options;
    t->format = (struct sw_adam_format){o->master, o->moments, o->grad_dtype, o->dtype};
    t->micro_tokens = (uint64_t)o->micro_batch * o->seq_len;
    t->step_rows = (uint64_t)o->micro_batch * o->accumulate;
    t->unit_elements = calloc(t->model.unit_count, sizeof(*t->unit_elements));
    if (!t->unit_elements) return -ENOMEM;
    for (uint32_t u = 0; u < t->model.unit_count; u++)
        t->unit_elements[u] = t->model.units[u].count;
    t->input = (struct sw_placement_input){
        .unit_count = t->model.unit_count,
        .micro_count = o->accumulate,
        .unit_elements = t->unit_elements,
        .tied = t->model.config.tied,
        .format = t->format,
        .optimizer = o->optimizer,
        /* A commit that a run goes on from stays whole, also where the run makes none. */
        .homes = o->commit_every || t->resuming ? 2 : o->optimizer == SW_TIER_NVME,
        .chunk_bytes = o->chunk_bytes,
        .activation_bytes =
            sw_round_up(t->micro_tokens * t->model.config.hidden * sw_dtype_bytes(o->dtype), PAGE),
        .workspace_bytes =
            sw_llama_workspace_bytes(&t->model, &t->device, o->dtype, o->micro_batch, o->seq_len) +
            norm_bytes(t) + PAGE,
        .batch_bytes = 2 * sw_round_up(t->micro_tokens * o->accumulate * sizeof(int32_t), PAGE) +
                       sw_round_up(t->micro_tokens * o->accumulate, PAGE),
    };
    return sw_placement_build(&t->placement, &t->input);
}

static void *carve(struct sw_trainer *t, uint64_t bytes) {
    void *p = t->device_base + t->device_used;
    t->device_used += sw_round_up(bytes, PAGE);
    assert(t->device_used <= t->device_bytes);
    return p;
}

static void carve_device(struct sw_trainer *t) {
    const struct sw_train_options *o = &t->options;
    const uint32_t units = t->model.unit_count;
    const uint64_t tokens = t->micro_tokens * o->accumulate;
    for (uint32_t u = 0; u < units; u++)
        t->weights[u] = carve(t, t->unit_elements[u] * sw_dtype_bytes(o->dtype));
    t->kept = carve(t, (uint64_t)(units - 1) * o->accumulate * t->input.activation_bytes);
    t->between = carve(t, o->accumulate * t->input.activation_bytes);
    for (int i = 0; i < SW_ACC_SLOTS; i++) t->acc[i] = carve(t, t->placement.acc_slot_bytes);
    if (t->placement.tied_acc_bytes) t->acc[SW_ACC_SLOTS] = carve(t, t->placement.tied_acc_bytes);
    for (int i = 0; i < SW_GRAD_SLOTS && t->placement.grad_slot_bytes; i++)
        t->grad_slots[i] = carve(t, t->placement.grad_slot_bytes);
    for (uint32_t u = 0; u < units && t->placement.grad_resident_bytes; u++)
        t->grad_resident[u] = carve(t, t->unit_elements[u] * sw_dtype_bytes(o->grad_dtype));
    t->batch_tokens = carve(t, tokens * sizeof(int32_t));
    t->batch_targets = carve(t, tokens * sizeof(int32_t));
    t->batch_mask = carve(t, tokens);
    char *sums = carve(t, norm_bytes(t));
    for (uint32_t u = 0; u < units; u++) {
        t->block_sums[u] = (double *)sums;
        sums += sw_round_up(blocks_of(t->unit_elements[u]) * sizeof(double), 64);
    }
    t->bad = (struct sw_nonfinite *)sums;
    t->loss_sums = (double *)(sums + sw_round_up(units * sizeof(*t->bad), 64));
    t->device_step = carve(t, sizeof(*t->device_step));
    t->device_state = carve(t, t->placement.state_bytes[SW_TIER_DEVICE]);
}

static int allocate_host(struct sw_trainer *t, uint64_t bytes) {
    const uint32_t units = t->model.unit_count;
    const uint64_t tokens = t->micro_tokens * t->options.accumulate;
    const struct sw_placement *p = &t->placement;
    int ret = sw_arena_open(&t->arena, bytes);
    if (ret < 0) return ret;
    t->host_state = sw_arena_take(&t->arena, p->state_bytes[SW_TIER_HOST]);
    for (uint32_t u = 0; u < units && !p->grad_resident_bytes; u++)
        t->host_grads[u] =
            sw_arena_take(&t->arena, t->unit_elements[u] * sw_dtype_bytes(t->options.grad_dtype));
    t->chunk_slots = sw_arena_take(&t->arena, p->chunk_slots * p->chunk_slot_bytes);
    t->emit_slots = sw_arena_take(&t->arena, p->emit_slots * p->emit_slot_bytes);
    t->stage_tokens = sw_arena_take(&t->arena, tokens * sizeof(int32_t));
    t->stage_targets = sw_arena_take(&t->arena, tokens * sizeof(int32_t));
    t->stage_mask = sw_arena_take(&t->arena, tokens);
    return 0;
}

/* Splits each chunk where tensors begin and end; what lies between tensors never decays. */
static void split_chunks(struct sw_trainer *t) {
    for (uint32_t c = 0; c < t->placement.chunk_count; c++) {
        const struct sw_chunk *chunk = &t->placement.chunks[c];
        const struct sw_unit *unit = &t->model.units[chunk->unit];
        struct chunk_state *state = &t->chunks[c];
        uint64_t at = chunk->first;
        const uint64_t end = chunk->first + chunk->count;
        for (uint32_t i = 0; i <= unit->tensor_count && at < end; i++) {
            const struct sw_tensor *tensor = i < unit->tensor_count ? &unit->tensors[i] : NULL;
            const uint64_t first = tensor ? tensor->first : end;
            const uint64_t last = tensor ? tensor->first + tensor->count : end;
            const int decays = tensor && (tensor->cols > 0 || t->options.decay == SW_DECAY_ALL);
            const uint64_t borders[2] = {first < end ? first : end, last < end ? last : end};
            for (int b = 0; b < 2; b++) {
                if (borders[b] <= at) continue;
                assert(state->range_count < RANGES_MAX);
                state->ranges[state->range_count++] =
                    (struct sw_adam_range){borders[b] - chunk->first, b == 1 && decays};
                at = borders[b];
            }
        }
    }
}

int sw_trainer_allocate(struct sw_trainer *t) {
    const uint32_t units = t->model.unit_count;
    t->weights = calloc(units, sizeof(*t->weights));
    t->grad_resident = calloc(units, sizeof(*t->grad_resident));
    t->block_sums = calloc(units, sizeof(*t->block_sums));
    t->host_grads = calloc(units, sizeof(*t->host_grads));
    t->norms = calloc(units, sizeof(*t->norms));
    t->host_loss_sums = calloc(t->options.accumulate, sizeof(*t->host_loss_sums));
    t->chunks = calloc(t->placement.chunk_count, sizeof(*t->chunks));
    if (!t->weights || !t->grad_resident || !t->block_sums || !t->host_grads || !t->norms ||
        !t->host_loss_sums || !t->chunks)
        return -ENOMEM;
    for (uint32_t u = 0; u < units; u++) {
        t->norms[u].block_count = blocks_of(t->unit_elements[u]);
        t->norms[u].block_sums = calloc(t->norms[u].block_count, sizeof(double));
        if (!t->norms[u].block_sums) return -ENOMEM;
    }
    split_chunks(t);
    struct sw_byte_row rows[SW_BYTE_ROWS_MAX];
    const int count = sw_placement_table(&t->placement, &t->input, rows);
    t->device_bytes = sw_placement_bytes(rows, count, SW_TIER_DEVICE);
    int ret = t->device.ops->alloc(t->device.device, t->device_bytes, (void **)&t->device_base);
    if (ret < 0) return ret;
    const uint64_t llama_bytes = sw_llama_workspace_bytes(
        &t->model, &t->device, t->options.dtype, t->options.micro_batch, t->options.seq_len);
    carve_device(t);
    ret = sw_llama_open(&t->llama, &t->model, &t->device, t->options.dtype, t->options.micro_batch,
                        t->options.seq_len, carve(t, llama_bytes), t->stream);
    if (ret < 0) return ret;
    return allocate_host(t, sw_placement_bytes(rows, count, SW_TIER_HOST));
}

/* Accumulators and gradients have gaps between tensors that no operator writes; slots are shared by
 * units, so only what every unit leaves alone may be trusted: all is zeroed once here and gaps
 * again with each reduction. */
static int zero_slots(struct sw_trainer *t) {
    const struct sw_device_ops *ops = t->device.ops;
    int ret = 0;
    for (int i = 0; i <= SW_ACC_SLOTS && ret == 0; i++) {
        const uint64_t bytes =
            i < SW_ACC_SLOTS ? t->placement.acc_slot_bytes : t->placement.tied_acc_bytes;
        if (bytes) ret = ops->zero(t->stream, t->acc[i], bytes);
    }
    return ret;
}

/* Converts one piece of FP32 weights and sends it up. */
int sw_trainer_upload_piece(struct sw_trainer *t, uint32_t unit, uint64_t first, uint64_t count,
                            const float *values, sw_bf16 *rounded) {
    const uint64_t element = sw_dtype_bytes(t->options.dtype);
    const void *source = values;
    if (t->options.dtype == SW_BF16) {
        for (uint64_t i = 0; i < count; i++) rounded[i] = sw_bf16_from_weight(values[i]);
        source = rounded;
    }
    const int ret = t->device.ops->copy_h2d(t->stream, t->weights[unit] + first * element, source,
                                            count * element);
    return ret < 0 ? ret : t->device.ops->stream_sync(t->stream);
}

static int load_weights(struct sw_trainer *t, float *values, sw_bf16 *rounded) {
    for (uint32_t u = 0; u < t->model.unit_count; u++)
        for (uint64_t first = 0; first < t->unit_elements[u]; first += READ_PIECE) {
            const uint64_t left = t->unit_elements[u] - first;
            const uint64_t count = left < READ_PIECE ? left : READ_PIECE;
            sw_model_read(&t->model, u, first, count, values);
            const int ret = sw_trainer_upload_piece(t, u, first, count, values, rounded);
            if (ret < 0) return ret;
        }
    return 0;
}

void sw_trainer_map(const struct sw_trainer *t, uint32_t c, void *record,
                    struct sw_adam_chunk *out) {
    const struct sw_chunk *chunk = &t->placement.chunks[c];
    const struct chunk_state *state = &t->chunks[c];
    *out = (struct sw_adam_chunk){.format = t->format,
                                  .count = chunk->count,
                                  .first = chunk->index,
                                  .ranges = state->ranges,
                                  .range_count = state->range_count};
    sw_adam_record_map(out, record);
}

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

/* Records of the host tier are filled in place, those of the device through `staging`. */
static int load_records(struct sw_trainer *t, char *staging) {
    for (uint32_t c = 0; c < t->placement.chunk_count; c++) {
        const struct sw_chunk *chunk = &t->placement.chunks[c];
        if (chunk->tier == SW_TIER_NVME) continue;
        if (chunk->tier == SW_TIER_HOST) {
            sw_trainer_start_chunk(t, c, t->host_state + chunk->record_offset);
            continue;
        }
        sw_trainer_start_chunk(t, c, staging);
        int ret = t->device.ops->copy_h2d(t->stream, t->device_state + chunk->record_offset,
                                          staging, chunk->record_bytes);
        if (ret == 0) ret = t->device.ops->stream_sync(t->stream);
        if (ret < 0) return ret;
    }
    return 0;
}

int sw_trainer_load(struct sw_trainer *t) {
    float *values = malloc(READ_PIECE * sizeof(*values));
    sw_bf16 *rounded = malloc(READ_PIECE * sizeof(*rounded));
    char *staging = malloc(t->placement.chunk_slot_bytes);
    int ret = values && rounded && staging ? zero_slots(t) : -ENOMEM;
    if (ret == 0) ret = load_weights(t, values, rounded);
    if (ret == 0) ret = load_records(t, staging);
    if (ret == 0) ret = sw_trainer_restore(t, values, rounded, READ_PIECE);
    if (ret == 0) ret = t->device.ops->stream_sync(t->stream);
    free(values);
    free(rounded);
    free(staging);
    return ret;
}

void sw_trainer_free_memory(struct sw_trainer *t) {
    sw_trainer_close_store(t);
    sw_arena_close(&t->arena);
    if (t->device_base) t->device.ops->free(t->device.device, t->device_base, t->device_bytes);
    for (uint32_t u = 0; t->norms && u < t->model.unit_count; u++) free(t->norms[u].block_sums);
    void *const blocks[] = {t->weights, t->grad_resident, t->block_sums,     t->host_grads,
                            t->norms,   t->chunks,        t->host_loss_sums, t->unit_elements};
    for (size_t i = 0; i < sizeof(blocks) / sizeof(blocks[0]); i++) free(blocks[i]);
    sw_placement_free(&t->placement);
}
