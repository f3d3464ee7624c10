/* engine/trainer_compute.c - what the compute lane does for the model, and what goes with it over
 * the border: gradients that are rounded and come down, kept inputs that leave and come back. */
#include "engine/trainer_internal.h"

#include <assert.h>
#include <errno.h>
#include "base/size.h"

static const char *weights_of(const struct sw_trainer *t, const struct sw_run *run,
                              const struct sw_task *task) {
    if (task->at[SW_RING_WINDOW] >= 0) return sw_slot(t, run, task, SW_RING_WINDOW);
    return t->weights + t->placement.unit_weight_offset[task->unit];
}

/* A unit's input; position: of the ring, for one that is kept elsewhere. */
static char *input_of(const struct sw_trainer *t, const struct sw_run *run, uint32_t unit,
                      uint32_t micro, int32_t position) {
    const uint64_t bytes = t->input.activation_bytes;
    const uint32_t norm = sw_model_norm_unit(&t->model);
    if (unit > norm) return t->head_input + micro * bytes;
    if (unit == norm) return t->norm_input + micro * bytes;
    const uint32_t place = sw_placement_place(&t->placement, unit - t->model.parts);
    if (place > 0)
        return t->group + ((uint64_t)(place - 1) * t->options.accumulate + micro) * bytes;
    const struct sw_kept *kept = &t->placement.kept[sw_kept_index(t, unit, micro)];
    if (kept->tier == SW_TIER_DEVICE) return t->kept + kept->offset;
    return sw_slot_at(t, run, SW_RING_KEPT, position);
}

/* A unit's accumulator: a slot of the ring, or the head's where that is whole. */
static float *acc_of(const struct sw_trainer *t, const struct sw_run *run,
                     const struct sw_task *task) {
    if (task->at[SW_RING_ACC] >= 0) return (float *)sw_slot(t, run, task, SW_RING_ACC);
    const uint32_t norm = sw_model_norm_unit(&t->model);
    const uint32_t part = task->unit > norm ? task->unit - norm - 1 : task->unit;
    return (float *)(t->head_acc + t->placement.head_acc_offset[part]);
}

/* ---- compute ---- */

static int forward(struct sw_trainer *t, const struct sw_run *run, const struct sw_task *task,
                   struct sw_stream *stream) {
    const uint32_t u = task->unit, m = task->micro, parts = t->model.parts;
    const struct sw_unit *unit = &t->model.units[u];
    const char *weights = weights_of(t, run, task);
    char *out = input_of(t, run, u < parts ? parts : u + 1, m, task->kept_out);
    if (u < parts)
        return sw_llama_embed(&t->llama, stream, unit, weights,
                              t->batch_tokens + m * t->micro_tokens, out);
    const char *in = input_of(t, run, u, m, task->at[SW_RING_KEPT]);
    if (unit->kind == SW_UNIT_NORM) return sw_llama_norm(&t->llama, stream, unit, weights, in, out);
    return sw_llama_layer(&t->llama, stream, unit, weights, in, out);
}

/* What a part of the head works on, but for its accumulator. */
static struct sw_llama_head head_part(struct sw_trainer *t, const struct sw_run *run, uint32_t unit,
                                      const char *weights, uint32_t m) {
    const uint64_t at = m * t->micro_tokens;
    const uint64_t tokens = run->turn->kind == SW_TURN_TRAIN ? sw_record(t, run->step)->tokens : 0;
    return (struct sw_llama_head){
        .unit = &t->model.units[unit],
        .matrix = weights,
        .x = input_of(t, run, sw_model_norm_unit(&t->model) + 1, m, -1),
        .targets = t->batch_targets + at,
        .mask = t->batch_mask + at,
        .scale = tokens ? (float)(1.0 / (double)tokens) : 0,
        .stats = (float *)((char *)t->stats + m * sw_head_stats_bytes(t->micro_tokens)),
    };
}

static float *head_grad_of(const struct sw_trainer *t, uint32_t m) {
    return (float *)((char *)t->head_grad + m * sw_head_grad_bytes(t, t->micro_tokens));
}

static int head_forward(struct sw_trainer *t, const struct sw_run *run, const struct sw_task *task,
                        struct sw_stream *stream) {
    const uint32_t m = task->micro;
    const struct sw_llama_head h = head_part(t, run, task->unit, weights_of(t, run, task), m);
    const int ret =
        sw_llama_head_stats(&t->llama, stream, &h, task->unit == sw_model_head_unit(&t->model, 0));
    if (ret < 0 || task->unit != sw_model_head_unit(&t->model, t->model.parts - 1)) return ret;
    return sw_llama_head_loss(&t->llama, stream, h.stats, h.mask, t->loss_sums + m);
}

/* Zeroes what lies between the tensors of a unit: slots are shared by units of other layouts. */
static int zero_gaps(struct sw_trainer *t, uint32_t u, float *acc, struct sw_stream *stream) {
    const struct sw_unit *unit = &t->model.units[u];
    int ret = 0;
    uint64_t at = 0;
    for (uint32_t i = 0; i <= unit->tensor_count && ret == 0; i++) {
        const uint64_t next = i < unit->tensor_count ? unit->tensors[i].first : unit->count;
        if (next > at) ret = t->device.ops->zero(stream, acc + at, (next - at) * sizeof(*acc));
        if (i < unit->tensor_count) at = next + unit->tensors[i].count;
    }
    return ret;
}

static int head_whole(struct sw_trainer *t, const struct sw_run *run, const struct sw_task *task,
                      struct sw_stream *stream) {
    struct sw_llama_head parts[SW_PARTS_MAX];
    const uint32_t m = task->micro;
    int ret = 0;
    for (uint32_t part = 0; part < t->model.parts && ret == 0; part++) {
        const uint32_t unit = sw_model_head_unit(&t->model, part);
        float *acc = (float *)(t->head_acc + t->placement.head_acc_offset[part]);
        parts[part] =
            head_part(t, run, unit, t->weights + t->placement.unit_weight_offset[unit], m);
        parts[part].d_matrix = acc;
        parts[part].d_accumulate = m > 0;
        if (m == 0) ret = zero_gaps(t, unit, acc, stream);
    }
    if (ret < 0) return ret;
    return sw_llama_head_whole(&t->llama, stream, parts, t->model.parts, t->loss_sums + m,
                               head_grad_of(t, m));
}

/* The gradient of the head's input, and of the matrix where this is the visit that makes it. */
static int head_backward(struct sw_trainer *t, const struct sw_run *run, const struct sw_task *task,
                         struct sw_stream *stream) {
    const uint32_t m = task->micro, last = sw_model_head_unit(&t->model, t->model.parts - 1);
    struct sw_llama_head h = head_part(t, run, task->unit, weights_of(t, run, task), m);
    if (task->kind == SW_TASK_HEAD_BACKWARD) {
        h.dx = head_grad_of(t, m);
        h.dx_accumulate = task->unit != last;
    }
    if (task->at[SW_RING_ACC] >= 0) {
        h.d_matrix = acc_of(t, run, task);
        h.d_accumulate = m > 0;
        const int ret = m == 0 ? zero_gaps(t, task->unit, h.d_matrix, stream) : 0;
        if (ret < 0) return ret;
    }
    return sw_llama_head_backward(&t->llama, stream, &h);
}

static int backward(struct sw_trainer *t, const struct sw_run *run, const struct sw_task *task,
                    struct sw_stream *stream) {
    const uint32_t u = task->unit, m = task->micro;
    const struct sw_unit *unit = &t->model.units[u];
    char *dx = t->between + m * t->input.activation_bytes;
    float *acc = acc_of(t, run, task);
    if (u < t->model.parts) {
        /* A tied matrix has the head's gradient already. */
        const int ret = m == 0 && !t->model.config.tied ? zero_gaps(t, u, acc, stream) : 0;
        if (ret < 0) return ret;
        return sw_llama_embed_backward(&t->llama, stream, unit, acc, m > 0 || t->model.config.tied,
                                       t->batch_tokens + m * t->micro_tokens, dx);
    }
    const int ret = m == 0 ? zero_gaps(t, u, acc, stream) : 0;
    if (ret < 0) return ret;
    const char *weights = weights_of(t, run, task);
    const char *in = input_of(t, run, u, m, task->at[SW_RING_KEPT]);
    if (unit->kind == SW_UNIT_NORM)
        return sw_llama_norm_backward(&t->llama, stream, unit, weights, acc, m > 0, in,
                                      head_grad_of(t, m), dx);
    return sw_llama_layer_backward(&t->llama, stream, unit, weights, acc, m > 0, in, dx);
}

/* ---- gradients ---- */

static int reduce(struct sw_trainer *t, const struct sw_run *run, const struct sw_task *task,
                  struct sw_stream *stream) {
    const struct sw_placement *p = &t->placement;
    const struct sw_chunk *first = sw_chunk_of(t, task), *last = &p->chunks[first->span_end - 1];
    const uint64_t element = sw_dtype_bytes(t->options.grad_dtype);
    const uint64_t count = last->first + last->count - first->first;
    const int away = task->at[SW_RING_ROUNDED] >= 0;
    char *out = away ? sw_slot(t, run, task, SW_RING_ROUNDED) : t->grads + first->grad_offset;
    int ret = t->device.ops->round_norm(
        stream, out, t->options.grad_dtype, acc_of(t, run, task) + first->first, count,
        t->block_sums[task->unit] + first->first / SW_NORM_BLOCK, &t->bad[task->chunk]);
    /* Chunks of one span may wait in different tiers. */
    for (uint32_t c = first->span_first; away && c < first->span_end && ret == 0; c++)
        if (p->chunks[c].grad_tier == SW_TIER_DEVICE)
            ret = t->device.ops->copy_d2d(stream, t->grads + p->chunks[c].grad_offset,
                                          out + (p->chunks[c].first - first->first) * element,
                                          p->chunks[c].count * element);
    return ret;
}

static int grad(struct sw_trainer *t, struct sw_run *run, const struct sw_task *task,
                struct sw_stream *stream) {
    const struct sw_chunk *chunk = sw_chunk_of(t, task);
    const uint64_t element = sw_dtype_bytes(t->options.grad_dtype);
    const uint64_t bytes = sw_trainer_task_bytes(t, task);
    const char *from = t->grads + chunk->grad_offset;
    if (chunk->grad_tier != SW_TIER_DEVICE)
        from = sw_slot(t, run, task, SW_RING_ROUNDED) +
               (chunk->first - t->placement.chunks[chunk->span_first].first) * element;
    char *to = task->at[SW_RING_GRAD_STAGE] >= 0 ? sw_slot(t, run, task, SW_RING_GRAD_STAGE)
                                                 : t->host_grads + chunk->grad_offset;
    *sw_bytes_of(run, task) = bytes;
    return t->device.ops->copy_d2h(stream, to, from, bytes);
}

static int norms(struct sw_trainer *t, const struct sw_task *task, struct sw_stream *stream) {
    const struct sw_placement *p = &t->placement;
    const uint32_t u = task->unit, first = p->unit_first_chunk[u];
    const struct unit_norms *n = &t->norms[u];
    const int ret = t->device.ops->copy_d2h(stream, n->block_sums, t->block_sums[u],
                                            n->block_count * sizeof(double));
    if (ret < 0) return ret;
    return t->device.ops->copy_d2h(stream, t->host_bad + first, t->bad + first,
                                   (p->unit_first_chunk[u + 1] - first) * sizeof(*t->bad));
}

/* ---- kept inputs ---- */

static int spill_or_fetch(struct sw_trainer *t, struct sw_run *run, const struct sw_task *task,
                          struct sw_stream *stream) {
    const struct sw_kept *kept = &t->placement.kept[sw_kept_index(t, task->unit, task->micro)];
    const uint64_t bytes = sw_trainer_task_bytes(t, task);
    char *device = sw_slot(t, run, task, SW_RING_KEPT);
    char *host = kept->tier == SW_TIER_HOST ? t->host_kept + kept->offset
                                            : sw_slot(t, run, task, SW_RING_KEPT_STAGE);
    *sw_bytes_of(run, task) = bytes;
    if (task->kind == SW_TASK_SPILL) return t->device.ops->copy_d2h(stream, host, device, bytes);
    return t->device.ops->copy_h2d(stream, device, host, bytes);
}

/* ---- the table ---- */

int sw_trainer_compute(struct sw_trainer *t, struct sw_run *run, const struct sw_task *task,
                       struct sw_stream *stream) {
    switch (task->kind) {
    case SW_TASK_FORWARD:
    case SW_TASK_RECOMPUTE:
        return forward(t, run, task, stream);
    case SW_TASK_BACKWARD:
        return backward(t, run, task, stream);
    case SW_TASK_HEAD_FORWARD:
        return head_forward(t, run, task, stream);
    case SW_TASK_HEAD_WHOLE:
        return head_whole(t, run, task, stream);
    case SW_TASK_HEAD_BACKWARD:
    case SW_TASK_HEAD_GRAD:
        return head_backward(t, run, task, stream);
    case SW_TASK_REDUCE:
        return reduce(t, run, task, stream);
    case SW_TASK_GRAD:
        return grad(t, run, task, stream);
    case SW_TASK_NORMS:
        return norms(t, task, stream);
    case SW_TASK_SPILL:
    case SW_TASK_FETCH:
        return spill_or_fetch(t, run, task, stream);
    default:
        assert(!"a task of an NVMe lane");
        return -EINVAL;
    }
}

/* ---- how much it is ---- */

static enum sw_llama_pass pass_of(const struct sw_trainer *t, const struct sw_task *task) {
    const int embed = task->unit < t->model.parts;
    switch (task->kind) {
    case SW_TASK_FORWARD:
        return embed ? SW_PASS_EMBED : SW_PASS_FORWARD;
    case SW_TASK_BACKWARD:
        return embed ? SW_PASS_EMBED : SW_PASS_BACKWARD;
    case SW_TASK_RECOMPUTE:
        return SW_PASS_RECOMPUTE;
    case SW_TASK_HEAD_GRAD:
        return SW_PASS_HEAD_GRAD;
    case SW_TASK_HEAD_BACKWARD:
        return task->at[SW_RING_ACC] >= 0 ? SW_PASS_BACKWARD : SW_PASS_HEAD_DX;
    case SW_TASK_HEAD_WHOLE:
        return SW_PASS_BACKWARD;
    default:
        return SW_PASS_FORWARD;
    }
}

static double flops(const struct sw_trainer *t, const struct sw_task *task) {
    const uint32_t parts = task->kind == SW_TASK_HEAD_WHOLE ? t->model.parts : 1;
    double sum = 0;
    for (uint32_t part = 0; part < parts; part++)
        sum +=
            sw_llama_flops(&t->llama, parts > 1 ? sw_model_head_unit(&t->model, part) : task->unit,
                           pass_of(t, task));
    return sum;
}

uint64_t sw_trainer_task_bytes(const struct sw_trainer *t, const struct sw_task *task) {
    const struct sw_chunk *chunk = sw_chunk_of(t, task);
    switch (task->kind) {
    case SW_TASK_GRAD:
        return chunk->count * sw_dtype_bytes(t->options.grad_dtype);
    case SW_TASK_UPLOAD:
    case SW_TASK_LOAD:
        return sw_trainer_weight_bytes(t, task->chunk);
    case SW_TASK_SPILL:
    case SW_TASK_FETCH:
        return t->micro_tokens * t->model.config.hidden * sw_dtype_bytes(t->options.dtype);
    case SW_TASK_READ:
    case SW_TASK_WRITE:
        return chunk->record_bytes;
    case SW_TASK_READ_WEIGHT:
    case SW_TASK_WRITE_WEIGHT:
        return sw_round_up(sw_trainer_weight_bytes(t, task->chunk), SW_NVME_ALIGN_BYTES);
    case SW_TASK_READ_GRAD:
    case SW_TASK_WRITE_GRAD:
        return sw_round_up(chunk->count * sw_dtype_bytes(t->options.grad_dtype),
                           SW_NVME_ALIGN_BYTES);
    case SW_TASK_READ_KEPT:
    case SW_TASK_WRITE_KEPT:
        return t->input.activation_bytes;
    default:
        return 0;
    }
}

double sw_trainer_task_work(const struct sw_trainer *t, const struct sw_task *task) {
    if (task->lane == SW_LANE_COMPUTE && task->kind != SW_TASK_DEVICE_ADAM) return flops(t, task);
    if (task->kind != SW_TASK_ADAM) return (double)sw_trainer_task_bytes(t, task);
    const uint64_t count = sw_chunk_of(t, task)->count;
    return (double)(2 * sw_adam_record_bytes(&t->format, count) +
                    count *
                        (sw_dtype_bytes(t->options.grad_dtype) + sw_dtype_bytes(t->options.dtype)));
}
