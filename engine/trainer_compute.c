/* engine/trainer_compute.c - what the compute lane does for the model, and what goes with it over
 * the border: gradients that are rounded and come down, kept inputs that leave and come back. */
#include "engine/trainer_internal.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include "base/size.h"

static const char *weights_of(const struct sw_rank *r, const struct sw_run *run,
                              const struct sw_task *task) {
    const struct sw_trainer *t = r->t;
    if (task->at[SW_RING_WINDOW] >= 0) return sw_slot(r, run, task, SW_RING_WINDOW);
    return r->weights + t->placement.unit_weight_offset[task->unit];
}

/* A unit's input; position: of the ring, for one that is kept elsewhere. */
static char *input_of(const struct sw_rank *r, const struct sw_run *run, uint32_t unit,
                      uint32_t micro, int32_t position) {
    const struct sw_trainer *t = r->t;
    const uint64_t bytes = t->input.activation_bytes;
    const uint32_t norm = sw_model_norm_unit(&t->model);
    if (unit > norm) return r->head_input + micro * bytes;
    if (unit == norm) return r->norm_input + micro * bytes;
    const uint32_t place = sw_placement_place(&t->placement, unit - t->model.parts);
    if (place > 0)
        return r->group + ((uint64_t)(place - 1) * t->options.accumulate + micro) * bytes;
    const struct sw_kept kept = sw_placement_kept(&t->placement, sw_kept_index(t, unit, micro));
    if (kept.tier == SW_TIER_DEVICE) return r->kept + kept.offset;
    return sw_slot_at(r, run, SW_RING_KEPT, position);
}

/* A unit's accumulator: a slot of the ring, or the head's where that is whole. */
static float *acc_of(const struct sw_rank *r, const struct sw_run *run,
                     const struct sw_task *task) {
    const struct sw_trainer *t = r->t;
    if (task->at[SW_RING_ACC] >= 0) return (float *)sw_slot(r, run, task, SW_RING_ACC);
    const uint32_t norm = sw_model_norm_unit(&t->model);
    const uint32_t part = task->unit > norm ? task->unit - norm - 1 : task->unit;
    return (float *)(r->head_acc + t->placement.head_acc_offset[part]);
}

/* Where the documents of a micro-batch begin; NULL: each row is one. */
static const uint32_t *starts_of(const struct sw_rank *r, uint32_t m) {
    return r->batch_starts ? r->batch_starts + m * r->t->micro_tokens : NULL;
}

/* ---- compute ---- */

static int forward(struct sw_rank *r, const struct sw_run *run, const struct sw_task *task,
                   struct sw_stream *stream) {
    struct sw_trainer *t = r->t;
    const uint32_t u = task->unit, m = task->micro, parts = t->model.parts;
    const struct sw_unit *unit = &t->model.units[u];
    const char *weights = weights_of(r, run, task);
    char *out = input_of(r, run, u < parts ? parts : u + 1, m, task->kept_out);
    if (u < parts)
        return sw_llama_embed(&r->llama, stream, unit, weights,
                              r->batch_tokens + m * t->micro_tokens, out);
    const char *in = input_of(r, run, u, m, task->at[SW_RING_KEPT]);
    if (unit->kind == SW_UNIT_NORM) return sw_llama_norm(&r->llama, stream, unit, weights, in, out);
    return sw_llama_layer(&r->llama, stream, unit, weights, starts_of(r, m), in, out);
}

/* What a part of the head works on, but for its accumulator. */
static struct sw_llama_head head_part(struct sw_rank *r, const struct sw_run *run, uint32_t unit,
                                      const char *weights, uint32_t m) {
    struct sw_trainer *t = r->t;
    const uint64_t at = m * t->micro_tokens;
    const uint64_t tokens = run->turn->kind == SW_TURN_TRAIN ? sw_record(t, run->step)->tokens : 0;
    return (struct sw_llama_head){
        .unit = &t->model.units[unit],
        .matrix = weights,
        .x = input_of(r, run, sw_model_norm_unit(&t->model) + 1, m, -1),
        .targets = r->batch_targets + at,
        .mask = r->batch_mask + at,
        .scale = tokens ? (float)(1.0 / (double)tokens) : 0,
        .stats = (float *)((char *)r->stats + m * sw_head_stats_bytes(t->micro_tokens)),
    };
}

static float *head_grad_of(const struct sw_rank *r, uint32_t m) {
    const struct sw_trainer *t = r->t;
    return (float *)((char *)r->head_grad + m * sw_head_grad_bytes(t, t->micro_tokens));
}

static int head_forward(struct sw_rank *r, const struct sw_run *run, const struct sw_task *task,
                        struct sw_stream *stream) {
    struct sw_trainer *t = r->t;
    const uint32_t m = task->micro;
    const struct sw_llama_head h = head_part(r, run, task->unit, weights_of(r, run, task), m);
    const int ret =
        sw_llama_head_stats(&r->llama, stream, &h, task->unit == sw_model_head_unit(&t->model, 0));
    if (ret < 0 || task->unit != sw_model_head_unit(&t->model, t->model.parts - 1)) return ret;
    return sw_llama_head_loss(&r->llama, stream, h.stats, h.mask, r->loss_sums + m);
}

/* Zeroes what lies between the trained tensors of a unit: slots are shared by units of other
 * layouts. */
static int zero_gaps(struct sw_rank *r, uint32_t u, float *acc, struct sw_stream *stream) {
    struct sw_trainer *t = r->t;
    const struct sw_unit *unit = &t->model.units[u];
    int ret = 0;
    uint64_t at = 0;
    const uint64_t end = t->placement.shards * t->trained_elements[u];
    for (uint32_t i = 0; at < end && ret == 0; i++) {
        const struct sw_tensor *tensor =
            i < unit->tensor_count ? &unit->tensors[unit->order[i]] : NULL;
        const uint64_t next = tensor && !tensor->frozen ? tensor->first : end;
        if (next > at) ret = r->device.ops->zero(stream, acc + at, (next - at) * sizeof(*acc));
        at = next < end ? next + tensor->count : end;
    }
    return ret;
}

static int head_whole(struct sw_rank *r, const struct sw_run *run, const struct sw_task *task,
                      struct sw_stream *stream) {
    struct sw_trainer *t = r->t;
    struct sw_llama_head parts[SW_PARTS_MAX];
    const uint32_t m = task->micro;
    int ret = 0;
    for (uint32_t part = 0; part < t->model.parts && ret == 0; part++) {
        const uint32_t unit = sw_model_head_unit(&t->model, part);
        float *acc = (float *)(r->head_acc + t->placement.head_acc_offset[part]);
        parts[part] =
            head_part(r, run, unit, r->weights + t->placement.unit_weight_offset[unit], m);
        if (!sw_placement_trains(&t->placement, unit)) continue;
        parts[part].d_matrix = acc;
        parts[part].d_accumulate = m > 0;
        if (m == 0) ret = zero_gaps(r, unit, acc, stream);
    }
    if (ret < 0) return ret;
    return sw_llama_head_whole(&r->llama, stream, parts, t->model.parts, r->loss_sums + m,
                               sw_placement_head_has_dx(&t->placement) ? head_grad_of(r, m) : NULL);
}

/* The gradient of the head's input, and of the matrix where this is the visit that makes it. */
static int head_backward(struct sw_rank *r, const struct sw_run *run, const struct sw_task *task,
                         struct sw_stream *stream) {
    struct sw_trainer *t = r->t;
    const uint32_t m = task->micro, last = sw_model_head_unit(&t->model, t->model.parts - 1);
    struct sw_llama_head h = head_part(r, run, task->unit, weights_of(r, run, task), m);
    if (task->kind == SW_TASK_HEAD_BACKWARD && sw_placement_head_has_dx(&t->placement)) {
        h.dx = head_grad_of(r, m);
        h.dx_accumulate = task->unit != last;
    }
    if (task->at[SW_RING_ACC] >= 0) {
        h.d_matrix = acc_of(r, run, task);
        h.d_accumulate = m > 0;
        const int ret = m == 0 ? zero_gaps(r, task->unit, h.d_matrix, stream) : 0;
        if (ret < 0) return ret;
    }
    return sw_llama_head_backward(&r->llama, stream, &h);
}

static int backward(struct sw_rank *r, const struct sw_run *run, const struct sw_task *task,
                    struct sw_stream *stream) {
    struct sw_trainer *t = r->t;
    const uint32_t u = task->unit, m = task->micro;
    const struct sw_unit *unit = &t->model.units[u];
    char *dx = r->between + m * t->input.activation_bytes;
    float *acc = sw_placement_trains(&t->placement, u) ? acc_of(r, run, task) : NULL;
    if (u < t->model.parts) {
        /* A tied matrix has the head's gradient already. */
        const int ret = m == 0 && !t->model.config.tied ? zero_gaps(r, u, acc, stream) : 0;
        if (ret < 0) return ret;
        return sw_llama_embed_backward(&r->llama, stream, unit, acc, m > 0 || t->model.config.tied,
                                       r->batch_tokens + m * t->micro_tokens, dx);
    }
    const int ret = m == 0 && acc ? zero_gaps(r, u, acc, stream) : 0;
    if (ret < 0) return ret;
    const char *weights = weights_of(r, run, task);
    const char *in = input_of(r, run, u, m, task->at[SW_RING_KEPT]);
    if (unit->kind == SW_UNIT_NORM)
        return sw_llama_norm_backward(&r->llama, stream, unit, weights, acc, m > 0, in,
                                      head_grad_of(r, m), dx);
    return sw_llama_layer_backward(&r->llama, stream, unit, weights, starts_of(r, m), acc, m > 0,
                                   in, dx);
}

/* ---- between ranks ---- */

/* Test builds make NaN of what a rank does not hold: the other ranks' pieces of a buffer of a whole
 * unit, or of its trained part alone (pieces: 1). The host device's memory is the host's. */
static void forget_others(const struct sw_rank *r, uint32_t unit, char *whole, uint64_t element,
                          int pieces) {
#ifdef SW_POISON
    if (r->t->options.device != SW_DEVICE_HOST) return;
    for (int frozen = 0; frozen < pieces; frozen++)
        for (uint32_t shard = 0; shard < r->t->shards; shard++) {
            const struct sw_piece piece = sw_piece_of(r->t, shard, unit, frozen);
            if (shard != r->shard)
                memset(whole + piece.first * element, 0xFF, piece.count * element);
        }
#else
    (void)r, (void)unit, (void)whole, (void)element, (void)pieces;
#endif
}

/* A collective is busy from when the last rank has come. */
static void began(const struct sw_rank *r, struct sw_run *run, const struct sw_task *task) {
    const uint64_t met_ns = r->comm.ops->met_ns(r->comm.comm);
    if (met_ns) run->start_ns[sw_run_at(run, task, r->index)] = met_ns;
}

/* A unit's weights of all ranks: from the shards on the devices, or from what was loaded into this
 * rank's place in the window; in place where the weights stay. */
static int gather(struct sw_rank *r, struct sw_run *run, const struct sw_task *task,
                  struct sw_stream *stream) {
    const struct sw_trainer *t = r->t;
    const struct sw_placement *p = &t->placement;
    const uint64_t element = sw_dtype_bytes(t->options.dtype);
    const uint32_t chunks[SW_PIECES] = {p->unit_first_chunk[task->unit],
                                        p->unit_trained_end[task->unit]};
    char *out = task->at[SW_RING_WINDOW] >= 0 ? sw_slot(r, run, task, SW_RING_WINDOW)
                                              : r->weights + p->unit_weight_offset[task->unit];
    int ret = 0;
    *sw_bytes_of(r, run, task) = sw_turn_work_bytes(&t->work, task);
    forget_others(r, task->unit, out, element, SW_PIECES);
    for (int frozen = 0; frozen < SW_PIECES && ret == 0; frozen++) {
        const struct sw_piece piece = sw_piece_of(t, r->shard, task->unit, frozen);
        if (piece.count == 0) continue;
        const struct sw_chunk *first = &p->chunks[chunks[frozen]];
        const char *in = first->weight_tier == SW_TIER_DEVICE ? sw_weights_at(r, first)
                                                              : out + piece.first * element;
        char *all = out + sw_piece_of(t, 0, task->unit, frozen).first * element;
        ret = r->comm.ops->all_gather(r->comm.comm, stream, all, in, piece.count * element);
        if (frozen == 0 || sw_placement_trains(p, task->unit) == 0) began(r, run, task);
    }
    return ret;
}

/* The sum of a shard over its replicas: each sums its piece of it, and all take all pieces. */
static int sum_replicas(struct sw_rank *r, float *shard, uint64_t count, struct sw_stream *stream) {
    const struct sw_comm_handle *c = &r->across;
    if (!c->comm) return 0;
    const uint64_t piece = count / c->size;
    float *own = shard + c->rank * piece;
    const int ret =
        c->ops->reduce_scatter(c->comm, stream, own, shard, r->t->options.reduce_dtype, piece);
    return ret < 0 ? ret : c->ops->all_gather(c->comm, stream, shard, own, piece * sizeof(*shard));
}

static int scatter(struct sw_rank *r, struct sw_run *run, const struct sw_task *task,
                   struct sw_stream *stream) {
    const struct sw_trainer *t = r->t;
    const struct sw_piece piece = sw_piece_of(t, r->shard, task->unit, 0);
    const uint64_t count = piece.count;
    float *acc = acc_of(r, run, task), *own = acc + piece.first;
    int ret = 0;
    *sw_bytes_of(r, run, task) = sw_turn_work_bytes(&t->work, task);
    if (r->comm.comm) {
        ret = r->comm.ops->reduce_scatter(r->comm.comm, stream, own, acc, t->options.reduce_dtype,
                                          count);
        began(r, run, task);
    }
    if (ret == 0) ret = sum_replicas(r, own, count, stream);
    if (ret == 0) forget_others(r, task->unit, (char *)acc, sizeof(*acc), 1);
    return ret;
}

/* ---- gradients ---- */

static int reduce(struct sw_rank *r, const struct sw_run *run, const struct sw_task *task,
                  struct sw_stream *stream) {
    struct sw_trainer *t = r->t;
    const struct sw_placement *p = &t->placement;
    const struct sw_chunk *first = sw_chunk_of(t, task), *last = &p->chunks[first->span_end - 1];
    const uint64_t element = sw_dtype_bytes(t->options.grad_dtype);
    const uint64_t count = last->first + last->count - first->first;
    const int away = task->at[SW_RING_ROUNDED] >= 0;
    char *out = away ? sw_slot(r, run, task, SW_RING_ROUNDED) : r->grads + first->grad_offset;
    int ret = r->device.ops->round_norm(
        stream, out, t->options.grad_dtype, acc_of(r, run, task) + sw_chunk_begin(r, first), count,
        r->block_sums[task->unit] + first->first / SW_NORM_BLOCK, &r->bad[task->chunk]);
    /* Chunks of one span may wait in different tiers. */
    for (uint32_t c = first->span_first; away && c < first->span_end && ret == 0; c++)
        if (p->chunks[c].grad_tier == SW_TIER_DEVICE)
            ret = r->device.ops->copy_d2d(stream, r->grads + p->chunks[c].grad_offset,
                                          out + (p->chunks[c].first - first->first) * element,
                                          p->chunks[c].count * element);
    return ret;
}

static int grad(struct sw_rank *r, struct sw_run *run, const struct sw_task *task,
                struct sw_stream *stream) {
    struct sw_trainer *t = r->t;
    const struct sw_chunk *chunk = sw_chunk_of(t, task);
    const uint64_t element = sw_dtype_bytes(t->options.grad_dtype);
    const uint64_t bytes = sw_turn_work_bytes(&t->work, task);
    const char *from = r->grads + chunk->grad_offset;
    if (chunk->grad_tier != SW_TIER_DEVICE)
        from = sw_slot(r, run, task, SW_RING_ROUNDED) +
               (chunk->first - t->placement.chunks[chunk->span_first].first) * element;
    char *to = task->at[SW_RING_GRAD_STAGE] >= 0 ? sw_slot(r, run, task, SW_RING_GRAD_STAGE)
                                                 : r->host_grads + chunk->grad_offset;
    *sw_bytes_of(r, run, task) = bytes;
    return r->device.ops->copy_d2h(stream, to, from, bytes);
}

static int norms(struct sw_rank *r, const struct sw_task *task, struct sw_stream *stream) {
    struct sw_trainer *t = r->t;
    const struct sw_placement *p = &t->placement;
    const uint32_t u = task->unit, first = p->unit_first_chunk[u];
    const struct unit_norms *n = &r->norms[u];
    const int ret = r->device.ops->copy_d2h(stream, n->block_sums, r->block_sums[u],
                                            n->block_count * sizeof(double));
    if (ret < 0) return ret;
    return r->device.ops->copy_d2h(stream, r->host_bad + first, r->bad + first,
                                   (p->unit_first_chunk[u + 1] - first) * sizeof(*r->bad));
}

/* ---- kept inputs ---- */

static int spill_or_fetch(struct sw_rank *r, struct sw_run *run, const struct sw_task *task,
                          struct sw_stream *stream) {
    struct sw_trainer *t = r->t;
    const struct sw_kept kept =
        sw_placement_kept(&t->placement, sw_kept_index(t, task->unit, task->micro));
    const uint64_t bytes = sw_turn_work_bytes(&t->work, task);
    char *device = sw_slot(r, run, task, SW_RING_KEPT);
    char *host = kept.tier == SW_TIER_HOST ? r->host_kept + kept.offset
                                           : sw_slot(r, run, task, SW_RING_KEPT_STAGE);
    *sw_bytes_of(r, run, task) = bytes;
    if (task->kind == SW_TASK_SPILL) return r->device.ops->copy_d2h(stream, host, device, bytes);
    return r->device.ops->copy_h2d(stream, device, host, bytes);
}

/* ---- the table ---- */

int sw_trainer_compute(struct sw_rank *r, struct sw_run *run, const struct sw_task *task,
                       struct sw_stream *stream) {
    switch (task->kind) {
    case SW_TASK_FORWARD:
    case SW_TASK_RECOMPUTE:
        return forward(r, run, task, stream);
    case SW_TASK_BACKWARD:
        return backward(r, run, task, stream);
    case SW_TASK_HEAD_FORWARD:
        return head_forward(r, run, task, stream);
    case SW_TASK_HEAD_WHOLE:
        return head_whole(r, run, task, stream);
    case SW_TASK_HEAD_BACKWARD:
    case SW_TASK_HEAD_GRAD:
        return head_backward(r, run, task, stream);
    case SW_TASK_GATHER:
        return gather(r, run, task, stream);
    case SW_TASK_SCATTER:
        return scatter(r, run, task, stream);
    case SW_TASK_REDUCE:
        return reduce(r, run, task, stream);
    case SW_TASK_GRAD:
        return grad(r, run, task, stream);
    case SW_TASK_NORMS:
        return norms(r, task, stream);
    case SW_TASK_SPILL:
    case SW_TASK_FETCH:
        return spill_or_fetch(r, run, task, stream);
    default:
        assert(!"a task of an NVMe lane");
        return -EINVAL;
    }
}
