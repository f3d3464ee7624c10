/* engine/sizing.c - see the header. */
#include "engine/sizing.h"

#include <errno.h>
#include <stdlib.h>
#include "base/log.h"
#include "base/size.h"

enum { PAGE = 4096 };

/* What a run takes of the host's memory beyond its pools: the program with its libraries, and per
 * chunk turns, events and tables. Measured as peak private memory less the pools, rounded up. */
enum { PROGRAM_BYTES = 24000000, PROGRAM_BYTES_PER_CHUNK = 12000 };
/* And what the matrix library and the teams of each further rank keep. */
enum { PROGRAM_BYTES_PER_RANK = 13000000 };

/* Likewise for a task that each micro-batch has: in a turn, and for each rank its events and the
 * times of the runs that are kept. A run has three turns that train, and two that evaluate. */
enum { TASK_BYTES_PER_TURN = 140, TASK_BYTES_PER_RANK = 480, TRAIN_TURNS = 3, EVAL_TURNS = 2 };

uint64_t sw_sizing_block_sum_bytes(const struct sw_model *model, const uint64_t *trained_elements) {
    uint64_t bytes = 0;
    for (uint32_t u = 0; u < model->unit_count; u++)
        bytes += sw_round_up(sw_sizing_blocks(trained_elements[u]) * sizeof(double), 64);
    return bytes;
}

uint64_t sw_sizing_head_grad_bytes(const struct sw_model *model, uint64_t tokens) {
    return sw_round_up(tokens * model->config.hidden * sizeof(float), PAGE);
}

uint64_t sw_sizing_head_stats_bytes(uint64_t tokens) {
    return sw_round_up(tokens * 3 * sizeof(float), PAGE);
}

static uint64_t micro_tokens(const struct sw_train_options *o) {
    return (uint64_t)o->micro_batch * o->seq_len;
}

/* Loss sums, scalars of Adam, block sums and what is not finite, by chunk. */
static uint64_t small_bytes(const struct sw_sizing *s, const struct sw_train_options *o,
                            uint64_t chunks) {
    return sw_round_up(sw_sizing_block_sum_bytes(s->model, s->trained_elements), PAGE) +
           sw_round_up(chunks * sizeof(struct sw_nonfinite), PAGE) +
           sw_round_up(o->accumulate * sizeof(double), PAGE) + PAGE;
}

/* The turns of an evaluation: the batch, and every unit forward, a tied matrix as head as well. */
static uint64_t eval_bytes(const struct sw_sizing *s, const struct sw_train_options *o) {
    const uint64_t tasks = 1 + 2 * (uint64_t)s->model->parts + s->model->config.layers + 1;
    return o->val ? EVAL_TURNS * o->accumulate * tasks * TASK_BYTES_PER_TURN : 0;
}

void sw_sizing_input(const struct sw_sizing *s, const struct sw_train_options *o,
                     struct sw_placement_input *out) {
    const uint64_t tokens = micro_tokens(o);
    struct sw_placement_input in = {
        .order = sw_model_order(s->model),
        .micro_count = o->accumulate,
        .shards = s->shards,
        .replicas = s->replicas,
        .local_ranks = s->local_ranks,
        .whole_weights = o->zero < 3,
        .unit_elements = s->shard_elements,
        .unit_trained = s->trained_elements,
        .format = {o->master, o->moments, o->grad_dtype, o->dtype},
        .checkpoint_every = o->checkpoint_every,
        .chunk_bytes = o->chunk_bytes,
        .activation_bytes =
            sw_round_up(tokens * s->model->config.hidden * sw_dtype_bytes(o->dtype), PAGE),
        .head_bytes =
            sw_sizing_head_grad_bytes(s->model, tokens) + sw_sizing_head_stats_bytes(tokens),
        .batch_bytes =
            (o->documents ? 3 : 2) * sw_round_up(tokens * o->accumulate * sizeof(int32_t), PAGE) +
            sw_round_up(tokens * o->accumulate, PAGE),
        .layers_read_batch = o->documents != NULL,
        .budget_bytes =
            {[SW_TIER_DEVICE] = o->device_memory_bytes, [SW_TIER_HOST] = o->host_memory_bytes},
        .taken_bytes = s->taken_bytes,
        .machine_bytes = s->machine_bytes,
        .device_is_apart = o->device != SW_DEVICE_HOST,
    };
    const uint64_t chunks = sw_placement_chunks(&in);
    in.program_bytes = PROGRAM_BYTES + chunks * PROGRAM_BYTES_PER_CHUNK + eval_bytes(s, o) +
                       (s->local_ranks - 1) * (uint64_t)PROGRAM_BYTES_PER_RANK;
    in.task_bytes = TRAIN_TURNS * TASK_BYTES_PER_TURN + s->local_ranks * TASK_BYTES_PER_RANK;
    for (int whole = 0; whole < 2; whole++)
        in.workspace_bytes[whole] = sw_llama_workspace_bytes(s->model, s->device, o->dtype,
                                                             o->micro_batch, o->seq_len, whole) +
                                    small_bytes(s, o, chunks);
    *out = in;
}

int sw_sizing_check_step(const struct sw_model *model, const struct sw_train_options *o) {
    const struct sw_model_config *c = &model->config;
    const double tokens = (double)micro_tokens(o) * o->accumulate;
    const double widths = (double)c->hidden + c->intermediate + c->vocab +
                          (double)(c->heads + c->kv_heads) * c->head_dim;
    if (tokens * widths * (c->layers + 16.0) * sizeof(float) < 0x1p60) return 0;
    sw_error("--micro-batch %u x --accumulate %u x --seq-len %u are %.3g tokens for each rank and "
             "step, whose bytes are beyond any memory",
             o->micro_batch, o->accumulate, o->seq_len, tokens);
    return -ENOMEM;
}

int sw_sizing_cut(struct sw_model *model, const struct sw_train_options *o, uint32_t shards,
                  uint32_t replicas, uint64_t **shard_elements, uint64_t **trained_elements) {
    const int ret = o->freeze ? sw_model_freeze(model, o->freeze, shards, replicas) : 0;
    if (ret < 0) return ret;
    *shard_elements = calloc(model->unit_count, sizeof(**shard_elements));
    *trained_elements = calloc(model->unit_count, sizeof(**trained_elements));
    if (!*shard_elements || !*trained_elements) return -ENOMEM;
    sw_model_shards(model, shards, replicas, *shard_elements, *trained_elements);
    return 0;
}
