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
    const uint32_t units = t->model.unit_count;
    const char *freeze = t->options.freeze;
    if (sw_sizing_check_step(&t->model, &t->options) < 0) return -ENOMEM;
    const int ret = freeze ? sw_model_freeze(&t->model, freeze, t->shards, t->replicas) : 0;
    if (ret < 0) return ret;
    t->shard_elements = calloc(units, sizeof(*t->shard_elements));
    t->trained_elements = calloc(units, sizeof(*t->trained_elements));
    if (!t->shard_elements || !t->trained_elements) return -ENOMEM;
    sw_model_shards(&t->model, t->shards, t->replicas, t->shard_elements, t->trained_elements);
    return 0;
}

int sw_trainer_size(struct sw_trainer *t) {
    const uint32_t layers = t->model.config.layers;
    if (t->options.checkpoint_every > layers) t->options.checkpoint_every = layers;
    const struct sw_train_options *o = &t->options, asked = t->options;
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
