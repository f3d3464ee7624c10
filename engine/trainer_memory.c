/* engine/trainer_memory.c - every byte of a run: sized and allocated once. */
#include "engine/trainer_internal.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include "base/log.h"
#include "base/size.h"

enum { PAGE = 4096 };

/* What a run takes of the host's memory beyond its pools: the program with its libraries, and per
 * chunk turns, events and tables. Measured as peak private memory less the pools, rounded up. */
enum { PROGRAM_BYTES = 24000000, PROGRAM_BYTES_PER_CHUNK = 12000 };

static uint64_t blocks_of(uint64_t elements) {
    return (elements + SW_NORM_BLOCK - 1) / SW_NORM_BLOCK;
}

static uint64_t block_sum_bytes(const struct sw_trainer *t) {
    uint64_t bytes = 0;
    for (uint32_t u = 0; u < t->model.unit_count; u++)
        bytes += sw_round_up(blocks_of(t->unit_elements[u]) * sizeof(double), 64);
    return bytes;
}

/* What follows from the options, of which several are tried when a run does not fit. */
static uint64_t micro_tokens(const struct sw_train_options *o) {
    return (uint64_t)o->micro_batch * o->seq_len;
}

static uint64_t llama_bytes(const struct sw_trainer *t, const struct sw_train_options *o,
                            int head_whole) {
    return sw_llama_workspace_bytes(&t->model, &t->device, o->dtype, o->micro_batch, o->seq_len,
                                    head_whole);
}

/* Loss sums, scalars of Adam, block sums and what is not finite, by chunk. */
static uint64_t small_bytes(const struct sw_trainer *t, const struct sw_train_options *o,
                            uint64_t chunks) {
    return sw_round_up(block_sum_bytes(t), PAGE) +
           sw_round_up(chunks * sizeof(struct sw_nonfinite), PAGE) +
           sw_round_up(o->accumulate * sizeof(double), PAGE) + PAGE;
}

static struct sw_placement_input describe(const struct sw_trainer *t,
                                          const struct sw_train_options *o) {
    const uint64_t tokens = micro_tokens(o);
    struct sw_placement_input in = {
        .order = sw_model_order(&t->model),
        .micro_count = o->accumulate,
        .unit_elements = t->unit_elements,
        .format = {o->master, o->moments, o->grad_dtype, o->dtype},
        .checkpoint_every = o->checkpoint_every,
        .chunk_bytes = o->chunk_bytes,
        .activation_bytes =
            sw_round_up(tokens * t->model.config.hidden * sw_dtype_bytes(o->dtype), PAGE),
        .head_bytes = sw_head_grad_bytes(t, tokens) + sw_head_stats_bytes(tokens),
        .batch_bytes = 2 * sw_round_up(tokens * o->accumulate * sizeof(int32_t), PAGE) +
                       sw_round_up(tokens * o->accumulate, PAGE),
        .budget_bytes =
            {[SW_TIER_DEVICE] = o->device_memory_bytes, [SW_TIER_HOST] = o->host_memory_bytes},
    };
    const uint64_t chunks = sw_placement_chunks(&in);
    in.program_bytes = PROGRAM_BYTES + chunks * PROGRAM_BYTES_PER_CHUNK;
    for (int whole = 0; whole < 2; whole++)
        in.workspace_bytes[whole] = llama_bytes(t, o, whole) + small_bytes(t, o, chunks);
    return in;
}

int sw_trainer_try(struct sw_trainer *t, struct sw_train_options *o, struct sw_placement *placement,
                   struct sw_placement_input *input, struct sw_shortfall *shortfall) {
    *input = describe(t, o);
    return sw_budget_place(placement, input, o, t->resuming, t->topology.memory_bytes, shortfall);
}

int sw_trainer_size(struct sw_trainer *t) {
    const struct sw_train_options *o = &t->options, asked = t->options;
    t->format = (struct sw_adam_format){o->master, o->moments, o->grad_dtype, o->dtype};
    t->micro_tokens = micro_tokens(o);
    t->step_rows = (uint64_t)o->micro_batch * o->accumulate;
    t->unit_elements = calloc(t->model.unit_count, sizeof(*t->unit_elements));
    if (!t->unit_elements) return -ENOMEM;
    for (uint32_t u = 0; u < t->model.unit_count; u++)
        t->unit_elements[u] = t->model.units[u].count;
    struct sw_shortfall shortfall;
    const int ret = sw_trainer_try(t, &t->options, &t->placement, &t->input, &shortfall);
    return ret == -ENOSPC ? sw_trainer_refuse(t, &asked, &shortfall) : ret;
}

/* ---- device ---- */

static void *carve(struct sw_trainer *t, uint64_t bytes) {
    void *p = t->device_base + t->device_used;
    t->device_used += sw_round_up(bytes, PAGE);
    assert(t->device_used <= t->device_bytes);
    return p;
}

static void carve_rings(struct sw_trainer *t) {
    const enum sw_ring rings[] = {SW_RING_WINDOW, SW_RING_ACC, SW_RING_ROUNDED, SW_RING_KEPT};
    for (size_t i = 0; i < sizeof(rings) / sizeof(rings[0]); i++) {
        const enum sw_ring r = rings[i];
        t->rings[r] = carve(t, t->placement.ring_slots[r] * t->placement.ring_slot_bytes[r]);
    }
}

static void carve_device(struct sw_trainer *t) {
    const struct sw_train_options *o = &t->options;
    const struct sw_placement *p = &t->placement;
    const uint32_t units = t->model.unit_count;
    const uint64_t tokens = t->micro_tokens * o->accumulate, micros = o->accumulate;
    const uint64_t inputs = micros * t->input.activation_bytes;
    t->weights = carve(t, p->weight_bytes[SW_TIER_DEVICE]);
    carve_rings(t);
    t->kept = carve(t, p->kept_bytes[SW_TIER_DEVICE]);
    t->group = carve(t, p->group_bytes);
    t->norm_input = carve(t, inputs);
    t->head_input = carve(t, inputs);
    t->between = carve(t, inputs);
    t->head_grad = carve(t, micros * sw_head_grad_bytes(t, t->micro_tokens));
    t->stats = carve(t, micros * sw_head_stats_bytes(t->micro_tokens));
    t->head_acc = carve(t, p->head_acc_offset[p->order.parts]);
    t->grads = carve(t, p->grad_bytes[SW_TIER_DEVICE]);
    t->batch_tokens = carve(t, tokens * sizeof(int32_t));
    t->batch_targets = carve(t, tokens * sizeof(int32_t));
    t->batch_mask = carve(t, tokens);
    char *sums = carve(t, block_sum_bytes(t));
    for (uint32_t u = 0; u < units; u++) {
        t->block_sums[u] = (double *)sums;
        sums += sw_round_up(blocks_of(t->unit_elements[u]) * sizeof(double), 64);
    }
    t->bad = carve(t, p->chunk_count * sizeof(*t->bad));
    t->loss_sums = carve(t, micros * sizeof(*t->loss_sums));
    t->device_step = carve(t, sizeof(*t->device_step));
    t->device_state = carve(t, p->state_bytes[SW_TIER_DEVICE]);
}

/* ---- host ---- */

static int allocate_host(struct sw_trainer *t, uint64_t bytes) {
    const uint64_t tokens = t->micro_tokens * t->options.accumulate;
    const struct sw_placement *p = &t->placement;
    const enum sw_ring rings[] = {SW_RING_STATE, SW_RING_EMIT, SW_RING_WEIGHT_STAGE,
                                  SW_RING_GRAD_STAGE, SW_RING_KEPT_STAGE};
    int ret = sw_arena_open(&t->arena, bytes);
    if (ret < 0) return ret;
    t->host_weights = sw_arena_take(&t->arena, p->weight_bytes[SW_TIER_HOST]);
    t->host_state = sw_arena_take(&t->arena, p->state_bytes[SW_TIER_HOST]);
    t->host_grads = sw_arena_take(&t->arena, p->grad_bytes[SW_TIER_HOST]);
    t->host_kept = sw_arena_take(&t->arena, p->kept_bytes[SW_TIER_HOST]);
    for (size_t i = 0; i < sizeof(rings) / sizeof(rings[0]); i++)
        t->rings[rings[i]] =
            sw_arena_take(&t->arena, p->ring_slots[rings[i]] * p->ring_slot_bytes[rings[i]]);
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

/* The tables by unit and chunk, and the buffer of loading and saving. */
static int allocate_tables(struct sw_trainer *t) {
    const uint32_t units = t->model.unit_count, chunks = t->placement.chunk_count;
    uint64_t largest = 0;
    for (uint32_t c = 0; c < chunks; c++)
        if (sw_trainer_weight_bytes(t, c) > largest) largest = sw_trainer_weight_bytes(t, c);
    t->block_sums = calloc(units, sizeof(*t->block_sums));
    t->norms = calloc(units, sizeof(*t->norms));
    t->host_bad = calloc(chunks, sizeof(*t->host_bad));
    t->host_loss_sums = calloc(t->options.accumulate, sizeof(*t->host_loss_sums));
    t->chunks = calloc(chunks, sizeof(*t->chunks));
    t->weight_buffer =
        aligned_alloc(SW_NVME_ALIGN_BYTES, sw_round_up(largest, SW_NVME_ALIGN_BYTES));
    t->fetched_chunk = UINT32_MAX;
    if (!t->block_sums || !t->norms || !t->host_bad || !t->host_loss_sums || !t->chunks ||
        !t->weight_buffer)
        return -ENOMEM;
    for (uint32_t u = 0; u < units; u++) {
        t->norms[u].block_count = blocks_of(t->unit_elements[u]);
        t->norms[u].block_sums = calloc(t->norms[u].block_count, sizeof(double));
        if (!t->norms[u].block_sums) return -ENOMEM;
    }
    split_chunks(t);
    return 0;
}

int sw_trainer_allocate(struct sw_trainer *t) {
    int ret = allocate_tables(t);
    if (ret < 0) return ret;
    struct sw_byte_row rows[SW_BYTE_ROWS_MAX];
    const int count = sw_placement_table(&t->placement, &t->input, rows);
    const int whole = t->placement.head_whole;
    t->device_bytes = sw_placement_bytes(rows, count, SW_TIER_DEVICE);
    ret = t->device.ops->alloc(t->device.device, t->device_bytes, (void **)&t->device_base);
    if (ret < 0) return ret;
    carve_device(t);
    ret = sw_llama_open(&t->llama, &t->model, &t->device, t->options.dtype, t->options.micro_batch,
                        t->options.seq_len, whole, carve(t, llama_bytes(t, &t->options, whole)),
                        t->stream);
    if (ret < 0) return ret;
    const uint64_t host_bytes = sw_placement_bytes(rows, count, SW_TIER_HOST);
    return allocate_host(t, host_bytes - t->input.program_bytes);
}

void sw_trainer_free_memory(struct sw_trainer *t) {
    sw_trainer_close_store(t);
    sw_trainer_close_spills(t);
    sw_arena_close(&t->arena);
    if (t->device_base) t->device.ops->free(t->device.device, t->device_base, t->device_bytes);
    for (uint32_t u = 0; t->norms && u < t->model.unit_count; u++) free(t->norms[u].block_sums);
    void *const blocks[] = {t->block_sums,     t->norms,         t->chunks,       t->host_bad,
                            t->host_loss_sums, t->unit_elements, t->weight_buffer};
    for (size_t i = 0; i < sizeof(blocks) / sizeof(blocks[0]); i++) free(blocks[i]);
    sw_placement_free(&t->placement);
}

/* ---- where things are ---- */

uint64_t sw_trainer_weight_bytes(const struct sw_trainer *t, uint32_t c) {
    return t->placement.chunks[c].count * sw_dtype_bytes(t->options.dtype);
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
