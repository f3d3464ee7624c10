/* engine/trainer_memory.c - every byte of a run: sized and allocated once. */
#include "engine/trainer_internal.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "base/log.h"
#include "base/size.h"

enum { PAGE = 4096 };

static uint64_t block_sum_bytes(const struct sw_trainer *t) {
    return sw_sizing_block_sum_bytes(&t->model, t->trained_elements);
}

static uint64_t llama_bytes(const struct sw_trainer *t, int head_whole) {
    const struct sw_train_options *o = &t->options;
    return sw_llama_workspace_bytes(&t->model, &t->ranks[0].device, o->dtype, o->micro_batch,
                                    o->seq_len, head_whole);
}

static struct sw_sizing sizing_of(const struct sw_trainer *t) {
    return (struct sw_sizing){.model = &t->model,
                              .device = &t->ranks[0].device,
                              .shards = t->shards,
                              .replicas = t->replicas,
                              .local_ranks = t->rank_count,
                              .shard_elements = t->shard_elements,
                              .trained_elements = t->trained_elements,
                              .taken_bytes = t->taken_bytes,
                              .machine_bytes = t->topology.memory_bytes};
}

int sw_trainer_try(struct sw_trainer *t, struct sw_train_options *o, struct sw_placement *placement,
                   struct sw_placement_input *input, struct sw_shortfall *shortfall) {
    const struct sw_sizing sizing = sizing_of(t);
    sw_sizing_input(&sizing, o, input);
    return sw_budget_place(placement, input, o, t->resuming, shortfall);
}

int sw_trainer_cut(struct sw_trainer *t) {
    if (sw_sizing_check_step(&t->model, &t->options) < 0) return -ENOMEM;
    return sw_sizing_cut(&t->model, &t->options, t->shards, t->replicas, &t->shard_elements,
                         &t->trained_elements);
}

int sw_trainer_size(struct sw_trainer *t) {
    const uint32_t layers = t->model.config.layers;
    if (t->options.checkpoint_every > layers) t->options.checkpoint_every = layers;
    const struct sw_train_options *o = &t->options, asked = t->options;
    t->format = (struct sw_adam_format){o->master, o->moments, o->grad_dtype, o->dtype};
    t->micro_tokens = (uint64_t)o->micro_batch * o->seq_len;
    t->rank_rows = (uint64_t)o->micro_batch * o->accumulate;
    t->step_rows = t->world_ranks * t->rank_rows;
    struct sw_shortfall shortfall;
    const int ret = sw_trainer_try(t, &t->options, &t->placement, &t->input, &shortfall);
    if (ret == -ENOSPC) return sw_trainer_refuse(t, &asked, &shortfall);
    if (ret < 0) return ret;
    const struct sw_sizing sizing = sizing_of(t);
    sw_turn_work_describe(&t->work, &sizing, &t->options, &t->placement, t->input.activation_bytes);
    return 0;
}

/* ---- device ---- */

static void *carve(struct sw_rank *r, uint64_t bytes) {
    void *p = r->device_base + r->device_used;
    r->device_used += sw_round_up(bytes, PAGE);
    assert(r->device_used <= r->device_bytes);
    return p;
}

static void carve_rings(struct sw_rank *r) {
    struct sw_trainer *t = r->t;
    const enum sw_ring rings[] = {SW_RING_WINDOW, SW_RING_ACC, SW_RING_ROUNDED, SW_RING_KEPT};
    for (size_t i = 0; i < sizeof(rings) / sizeof(rings[0]); i++) {
        const enum sw_ring ring = rings[i];
        r->rings[ring] =
            carve(r, t->placement.ring_slots[ring] * t->placement.ring_slot_bytes[ring]);
    }
}

static void carve_device(struct sw_rank *r) {
    struct sw_trainer *t = r->t;
    const struct sw_train_options *o = &t->options;
    const struct sw_placement *p = &t->placement;
    const uint32_t units = t->model.unit_count;
    const uint64_t tokens = t->micro_tokens * o->accumulate, micros = o->accumulate;
    const uint64_t inputs = micros * t->input.activation_bytes;
    r->weights = carve(r, p->weight_bytes[SW_TIER_DEVICE]);
    carve_rings(r);
    r->kept = carve(r, p->kept_bytes[SW_TIER_DEVICE]);
    r->group = carve(r, p->group_bytes);
    r->norm_input = carve(r, inputs);
    r->head_input = carve(r, inputs);
    r->between = carve(r, inputs);
    r->head_grad = carve(r, micros * sw_head_grad_bytes(t, t->micro_tokens));
    r->stats = carve(r, micros * sw_head_stats_bytes(t->micro_tokens));
    r->head_acc = carve(r, p->head_acc_offset[p->order.parts]);
    r->grads = carve(r, p->grad_bytes[SW_TIER_DEVICE]);
    r->batch_tokens = carve(r, tokens * sizeof(int32_t));
    r->batch_targets = carve(r, tokens * sizeof(int32_t));
    r->batch_mask = carve(r, tokens);
    if (o->documents) r->batch_starts = carve(r, tokens * sizeof(uint32_t));
    char *sums = carve(r, block_sum_bytes(t));
    for (uint32_t u = 0; u < units; u++) {
        r->block_sums[u] = (double *)sums;
        sums += sw_round_up(sw_sizing_blocks(t->trained_elements[u]) * sizeof(double), 64);
    }
    r->bad = carve(r, p->chunk_count * sizeof(*r->bad));
    r->loss_sums = carve(r, micros * sizeof(*r->loss_sums));
    r->device_step = carve(r, sizeof(*r->device_step));
    r->device_state = carve(r, p->state_bytes[SW_TIER_DEVICE]);
}

/* ---- host ---- */

/* What a rank keeps there, one pool behind the other. */
static void carve_host(struct sw_rank *r) {
    struct sw_trainer *t = r->t;
    struct sw_arena *a = &t->arena;
    const uint64_t tokens = t->micro_tokens * t->options.accumulate;
    const struct sw_placement *p = &t->placement;
    const enum sw_ring rings[] = {SW_RING_STATE, SW_RING_EMIT, SW_RING_WEIGHT_STAGE,
                                  SW_RING_GRAD_STAGE, SW_RING_KEPT_STAGE};
    r->host_weights = sw_arena_take(a, p->weight_bytes[SW_TIER_HOST]);
    r->host_state = sw_arena_take(a, p->state_bytes[SW_TIER_HOST]);
    r->host_grads = sw_arena_take(a, p->grad_bytes[SW_TIER_HOST]);
    r->host_kept = sw_arena_take(a, p->kept_bytes[SW_TIER_HOST]);
    r->stage_tokens = sw_arena_take(a, tokens * sizeof(int32_t));
    r->stage_targets = sw_arena_take(a, tokens * sizeof(int32_t));
    r->stage_mask = sw_arena_take(a, tokens);
    if (t->options.documents) r->stage_starts = sw_arena_take(a, tokens * sizeof(uint32_t));
    for (size_t k = 0; k < sizeof(rings) / sizeof(rings[0]); k++) {
        const enum sw_ring ring = rings[k];
        r->rings[ring] = sw_arena_take(a, p->ring_slots[ring] * p->ring_slot_bytes[ring]);
    }
}

/* Each rank's part lies on its node. */
static int allocate_host(struct sw_trainer *t, uint64_t bytes) {
    struct sw_arena_piece pieces[SW_RANKS_MAX];
    assert(bytes % t->rank_count == 0);
    for (uint32_t i = 0; i < t->rank_count; i++)
        pieces[i] = (struct sw_arena_piece){bytes / t->rank_count, t->nodes.node[t->nodes.of[i]]};
    const int ret = sw_arena_open_pieces(&t->arena, pieces, t->rank_count);
    for (uint32_t i = 0; i < t->rank_count && ret == 0; i++) carve_host(&t->ranks[i]);
    return ret;
}

/* Splits each chunk where tensors begin and end; what lies between tensors never decays. */
static void split_chunks(struct sw_rank *r) {
    struct sw_trainer *t = r->t;
    for (uint32_t c = 0; c < t->placement.chunk_count; c++) {
        const struct sw_chunk *chunk = &t->placement.chunks[c];
        const struct sw_unit *unit = &t->model.units[chunk->unit];
        struct chunk_state *state = &r->chunks[c];
        const uint64_t begin = sw_chunk_begin(r, chunk);
        const uint64_t end = begin + chunk->count;
        uint64_t at = begin;
        for (uint32_t i = 0; i <= unit->tensor_count && at < end; i++) {
            const struct sw_tensor *tensor =
                i < unit->tensor_count ? &unit->tensors[unit->order[i]] : NULL;
            const uint64_t first = tensor ? tensor->first : end;
            const uint64_t last = tensor ? tensor->first + tensor->count : end;
            const int decays = tensor && (tensor->cols > 0 || t->options.decay == SW_DECAY_ALL);
            const uint64_t borders[2] = {first < end ? first : end, last < end ? last : end};
            for (int b = 0; b < 2; b++) {
                if (borders[b] <= at) continue;
                assert(state->range_count < RANGES_MAX);
                state->ranges[state->range_count++] =
                    (struct sw_adam_range){borders[b] - begin, b == 1 && decays};
                at = borders[b];
            }
        }
    }
}

/* What the control lane reads of a step: block sums, losses, what is not finite. */
static int allocate_landing(struct sw_rank *r) {
    const struct sw_trainer *t = r->t;
    const uint64_t bad = sw_round_up(t->placement.chunk_count * sizeof(*r->host_bad), 64);
    const uint64_t losses = sw_round_up(t->options.accumulate * sizeof(*r->host_loss_sums), 64);
    const uint64_t bytes = sw_round_up(bad + losses + block_sum_bytes(t), PAGE);
    r->landing = aligned_alloc(PAGE, bytes);
    if (!r->landing) return -ENOMEM;
    memset(r->landing, 0, bytes);
    r->host_bad = (struct sw_nonfinite *)r->landing;
    r->host_loss_sums = (double *)(r->landing + bad);
    char *sums = r->landing + bad + losses;
    for (uint32_t u = 0; u < t->model.unit_count; u++) {
        const uint64_t count = sw_sizing_blocks(t->trained_elements[u]);
        r->norms[u] = (struct unit_norms){(double *)sums, count};
        sums += sw_round_up(count * sizeof(double), 64);
    }
    r->landing_bytes = bytes;
    return 0;
}

/* A rank's tables by unit and chunk. */
static int allocate_tables(struct sw_rank *r) {
    const struct sw_trainer *t = r->t;
    const uint32_t units = t->model.unit_count, chunks = t->placement.chunk_count;
    r->block_sums = calloc(units, sizeof(*r->block_sums));
    r->norms = calloc(units, sizeof(*r->norms));
    r->chunks = calloc(chunks, sizeof(*r->chunks));
    if (!r->block_sums || !r->norms || !r->chunks) return -ENOMEM;
    split_chunks(r);
    return allocate_landing(r);
}

/* The buffer of loading and saving. */
static int allocate_buffer(struct sw_trainer *t) {
    uint64_t largest = 0;
    for (uint32_t c = 0; c < t->placement.chunk_count; c++)
        if (sw_trainer_weight_bytes(t, c) > largest) largest = sw_trainer_weight_bytes(t, c);
    t->weight_buffer =
        aligned_alloc(SW_NVME_ALIGN_BYTES, sw_round_up(largest, SW_NVME_ALIGN_BYTES));
    t->fetched_chunk = UINT32_MAX;
    return t->weight_buffer ? 0 : -ENOMEM;
}

/* What copies run from and to, each rank's next to its device. */
static int pin_host(struct sw_trainer *t) {
    struct sw_pin_part parts[2 * SW_RANKS_MAX];
    const uint64_t each = t->arena.bytes / t->rank_count;
    for (uint32_t i = 0; i < t->rank_count; i++) {
        const struct sw_rank *r = &t->ranks[i];
        const int node = t->nodes.of[i];
        parts[2 * i] = (struct sw_pin_part){&r->device, r->landing, r->landing_bytes, node};
        parts[2 * i + 1] = (struct sw_pin_part){&r->device, t->arena.base + i * each, each, node};
    }
    return sw_pins_open(&t->pins, parts, 2 * t->rank_count);
}

/* One allocation. What the device's libraries have taken stands in the table, too. */
static int allocate_device(struct sw_rank *r, const struct sw_byte_row *rows, int row_count) {
    r->device_bytes = sw_placement_bytes(rows, row_count, SW_TIER_DEVICE) - r->t->taken_bytes;
    const int ret =
        r->device.ops->alloc(r->device.device, r->device_bytes, (void **)&r->device_base);
    if (ret == 0) carve_device(r);
    return ret;
}

static int open_llama(struct sw_rank *r) {
    const struct sw_trainer *t = r->t;
    const int whole = t->placement.head_whole;
    return sw_llama_open(&r->llama, &t->model, &r->device, t->options.dtype, t->options.micro_batch,
                         t->options.seq_len, whole, carve(r, llama_bytes(t, whole)), r->stream);
}

int sw_trainer_allocate(struct sw_trainer *t) {
    struct sw_byte_row rows[SW_BYTE_ROWS_MAX];
    const int count = sw_placement_table(&t->placement, &t->input, rows);
    int ret = allocate_buffer(t);
    for (uint32_t i = 0; i < t->rank_count && ret == 0; i++) ret = allocate_tables(&t->ranks[i]);
    for (uint32_t i = 0; i < t->rank_count && ret == 0; i++)
        ret = allocate_device(&t->ranks[i], rows, count);
    if (ret < 0) return ret;
    ret = allocate_host(t, sw_placement_bytes(rows, count, SW_TIER_HOST) -
                               sw_placement_program_bytes(&t->placement, &t->input));
    if (ret == 0) ret = pin_host(t);
    for (uint32_t i = 0; i < t->rank_count && ret == 0; i++) ret = open_llama(&t->ranks[i]);
    return ret;
}

static void free_rank(struct sw_rank *r) {
    if (r->device_base) r->device.ops->free(r->device.device, r->device_base, r->device_bytes);
    void *const blocks[] = {r->block_sums, r->norms, r->chunks, r->landing};
    for (size_t i = 0; i < sizeof(blocks) / sizeof(blocks[0]); i++) free(blocks[i]);
}

void sw_trainer_free_memory(struct sw_trainer *t) {
    sw_trainer_close_store(t);
    sw_trainer_close_spills(t);
    sw_pins_close(&t->pins);
    sw_arena_close(&t->arena);
    for (uint32_t i = 0; t->ranks && i < t->rank_count; i++) free_rank(&t->ranks[i]);
    free(t->shard_elements);
    free(t->trained_elements);
    free(t->weight_buffer);
    sw_placement_free(&t->placement);
}

/* ---- where things are ---- */

uint64_t sw_trainer_weight_bytes(const struct sw_trainer *t, uint32_t c) {
    return t->placement.chunks[c].count * sw_dtype_bytes(t->options.dtype);
}

void sw_trainer_map(const struct sw_rank *r, uint32_t c, void *record, struct sw_adam_chunk *out) {
    const struct sw_trainer *t = r->t;
    const struct sw_chunk *chunk = &t->placement.chunks[c];
    const struct chunk_state *state = &r->chunks[c];
    *out = (struct sw_adam_chunk){.format = t->format,
                                  .count = chunk->count,
                                  .first =
                                      chunk->index + sw_piece_of(t, r->shard, chunk->unit, 0).first,
                                  .ranges = state->ranges,
                                  .range_count = state->range_count};
    sw_adam_record_map(out, record);
}
