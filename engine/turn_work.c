/* engine/turn_work.c - see the header. */
#include "engine/turn_work.h"

#include <errno.h>
#include <math.h>

#include "base/size.h"
#include "engine/throttle.h"
#include "engine/turn_play.h"
#include "nvme/nvme.h"

void sw_turn_work_describe(struct sw_turn_work *out, const struct sw_sizing *s,
                           const struct sw_train_options *o, const struct sw_placement *p,
                           uint64_t activation_bytes) {
    *out = (struct sw_turn_work){.placement = p,
                                 .model = s->model,
                                 .shard_elements = s->shard_elements,
                                 .trained_elements = s->trained_elements,
                                 .shards = s->shards,
                                 .replicas = s->replicas,
                                 .format = {o->master, o->moments, o->grad_dtype, o->dtype},
                                 .dtype = o->dtype,
                                 .grad_dtype = o->grad_dtype,
                                 .reduce_dtype = o->reduce_dtype,
                                 .micro_tokens = (uint64_t)o->micro_batch * o->seq_len,
                                 .activation_bytes = activation_bytes};
    sw_llama_describe(&out->llama, s->model, s->device, o->dtype, o->micro_batch, o->seq_len,
                      p->head_whole);
}

/* ---- operations ---- */

static enum sw_llama_pass pass_of(const struct sw_turn_work *w, const struct sw_task *task) {
    const int embed = task->unit < w->model->parts;
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
        if (task->at[SW_RING_ACC] < 0) return SW_PASS_HEAD_DX;
        return sw_placement_head_has_dx(w->placement) ? SW_PASS_BACKWARD : SW_PASS_HEAD_GRAD;
    case SW_TASK_HEAD_WHOLE:
        return sw_placement_head_has_dx(w->placement) ? SW_PASS_BACKWARD : SW_PASS_HEAD_GRAD;
    default:
        return SW_PASS_FORWARD;
    }
}

static double flops(const struct sw_turn_work *w, const struct sw_task *task) {
    const uint32_t parts = task->kind == SW_TASK_HEAD_WHOLE ? w->model->parts : 1;
    double sum = 0;
    for (uint32_t part = 0; part < parts; part++)
        sum +=
            sw_llama_flops(&w->llama, parts > 1 ? sw_model_head_unit(w->model, part) : task->unit,
                           pass_of(w, task));
    return sum;
}

/* ---- bytes ---- */

/* What a rank sends: all shards but its own, then its pieces to and from the replicas. */
static uint64_t scatter_bytes(const struct sw_turn_work *w, uint64_t count) {
    const uint64_t carried = sw_dtype_bytes(w->reduce_dtype);
    const uint64_t pieces = (w->replicas - 1) * (count / w->replicas);
    return (w->shards - 1) * count * carried + pieces * (carried + sizeof(float));
}

uint64_t sw_turn_work_bytes(const struct sw_turn_work *w, const struct sw_task *task) {
    const struct sw_chunk *chunk = &w->placement->chunks[task->chunk];
    const uint64_t weight_bytes = chunk->count * sw_dtype_bytes(w->dtype);
    const uint64_t grad_bytes = chunk->count * sw_dtype_bytes(w->grad_dtype);
    switch (task->kind) {
    case SW_TASK_GATHER:
        return (w->placement->shards - 1) * w->shard_elements[task->unit] *
               sw_dtype_bytes(w->dtype);
    case SW_TASK_SCATTER:
        return scatter_bytes(w, w->trained_elements[task->unit]);
    case SW_TASK_GRAD:
        return grad_bytes;
    case SW_TASK_UPLOAD:
    case SW_TASK_LOAD:
        return weight_bytes;
    case SW_TASK_SPILL:
    case SW_TASK_FETCH:
        return w->micro_tokens * w->model->config.hidden * sw_dtype_bytes(w->dtype);
    case SW_TASK_READ:
    case SW_TASK_WRITE:
        return chunk->record_bytes;
    case SW_TASK_READ_WEIGHT:
    case SW_TASK_WRITE_WEIGHT:
        return sw_round_up(weight_bytes, SW_NVME_ALIGN_BYTES);
    case SW_TASK_READ_GRAD:
    case SW_TASK_WRITE_GRAD:
        return sw_round_up(grad_bytes, SW_NVME_ALIGN_BYTES);
    case SW_TASK_READ_KEPT:
    case SW_TASK_WRITE_KEPT:
        return w->activation_bytes;
    default:
        return 0;
    }
}

double sw_turn_work(const struct sw_turn_work *w, const struct sw_task *task) {
    if (task->lane == SW_LANE_COMPUTE && task->kind != SW_TASK_DEVICE_ADAM) return flops(w, task);
    if (task->kind != SW_TASK_ADAM && task->kind != SW_TASK_DEVICE_ADAM)
        return (double)sw_turn_work_bytes(w, task);
    const uint64_t count = w->placement->chunks[task->chunk].count;
    return (double)(2 * sw_adam_record_bytes(&w->format, count) +
                    count * (sw_dtype_bytes(w->grad_dtype) + sw_dtype_bytes(w->dtype)));
}

/* ---- which units are late ---- */

struct held {
    const struct sw_turn_work *work;
    const struct sw_sim_rates *rates;
};

static double cost_of(void *ctx, const struct sw_task *task) {
    const struct held *h = ctx;
    const uint64_t rate = sw_sim_rate(h->rates, task);
    return rate ? sw_turn_work(h->work, task) / (double)rate : 0;
}

static int pick_by_rates(struct sw_turn_shape *best, const struct sw_turn_work *w,
                         const struct sw_sim_rates *rates) {
    static const double shares[] = {0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6};
    struct held held = {w, rates};
    const struct sw_turn_shape plain = *best;
    double best_s = sw_turn_steady_step(best, cost_of, &held);
    for (size_t below = 0; below < sizeof(shares) / sizeof(shares[0]); below++)
        for (size_t top = 0; shares[below] + shares[top] <= 0.9 && top < 7; top++) {
            struct sw_turn_shape shape = plain;
            sw_turn_shape_late_shares(&shape, w->trained_elements, shares[below], shares[top]);
            const double step_s = sw_turn_steady_step(&shape, cost_of, &held);
            if (step_s < 0 || best_s < 0) return -ENOMEM;
            if (step_s >= best_s * 0.999) continue;
            *best = shape;
            best_s = step_s;
        }
    return 0;
}

int sw_turn_work_shape(struct sw_turn_shape *out, const struct sw_turn_work *w,
                       const struct sw_train_options *o, int stops_together) {
    *out = (struct sw_turn_shape){
        .overlap = sw_overlap_of(o), .placement = w->placement, .stops_together = stops_together};
    sw_turn_shape_pick_late(out, w->trained_elements);
    if (out->overlap != SW_OVERLAP_BACKWARD) return 0;
    if (o->late_below >= 0 || o->late_top >= 0) {
        sw_turn_shape_late_shares(out, w->trained_elements, fmax((double)o->late_below, 0) / 100,
                                  fmax((double)o->late_top, 0) / 100);
        return 0;
    }
    if (!o->sim.flops) return 0;
    return pick_by_rates(out, w, &o->sim);
}
