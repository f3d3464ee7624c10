/* engine/turn_emit_update.c - emits what moves gradients, optimizer records and weights. */
#include "engine/turn_emit.h"

/* ---- the update of one chunk ---- */

static void emit_read_weight(struct sw_builder *b, uint32_t c, int32_t stage) {
    begin_chunk(b, SW_TASK_READ_WEIGHT, SW_LANE_NVME_READ, c, 0);
    reads(b, SW_RES_WEIGHT, c);
    writes_slot(b, SW_RING_WEIGHT_STAGE, stage);
    sw_emit_append(b);
}

/* Into the window from where the weights are kept, or from the slot that Adam left them in. */
void sw_emit_load(struct sw_builder *b, uint32_t c, int32_t window, int32_t emit) {
    if (b->p->chunks[c].weight_tier == SW_TIER_DEVICE) return; /* it is gathered from there */
    const int staged = b->p->chunks[c].weight_tier == SW_TIER_NVME && emit == NONE;
    const int32_t stage = staged ? take(b, SW_RING_WEIGHT_STAGE) : NONE;
    if (staged) emit_read_weight(b, c, stage);
    begin_chunk(b, SW_TASK_LOAD, SW_LANE_H2D, c, 0);
    if (emit != NONE)
        reads_slot(b, SW_RING_EMIT, emit);
    else if (staged)
        reads_slot(b, SW_RING_WEIGHT_STAGE, stage);
    else
        reads(b, SW_RES_WEIGHT, c);
    writes_slot(b, SW_RING_WINDOW, window);
    sw_emit_append(b);
    if (staged) release(b, SW_RING_WEIGHT_STAGE, stage);
}

void sw_emit_gather(struct sw_builder *b, uint32_t unit, int32_t window) {
    if (b->p->shards == 1 || (window == NONE && b->gathered[unit])) return;
    b->gathered[unit] = 1;
    begin(b, SW_TASK_GATHER, SW_LANE_COMM)->unit = unit;
    for (uint32_t c = b->p->unit_first_chunk[unit]; c < b->p->unit_first_chunk[unit + 1]; c++)
        if (b->p->chunks[c].weight_tier == SW_TIER_DEVICE) reads(b, SW_RES_WEIGHT, c);
    if (window == NONE)
        writes(b, SW_RES_FULL, unit);
    else
        writes_slot(b, SW_RING_WINDOW, window);
    sw_emit_append(b);
}

/* The gradient of a chunk from where it waits; its position in the staging ring, or NONE. */
static int32_t emit_grad_back(struct sw_builder *b, uint32_t c, int late) {
    const struct sw_chunk *chunk = &b->p->chunks[c];
    if (chunk->grad_tier == SW_TIER_HOST) return NONE;
    const int device = chunk->grad_tier == SW_TIER_DEVICE;
    const int32_t stage = take(b, SW_RING_GRAD_STAGE);
    begin_chunk(b, device ? SW_TASK_GRAD : SW_TASK_READ_GRAD,
                device ? SW_LANE_D2H : SW_LANE_NVME_READ, c, late);
    reads(b, SW_RES_GRAD, c);
    writes_slot(b, SW_RING_GRAD_STAGE, stage);
    sw_emit_append(b);
    return stage;
}

static void emit_read(struct sw_builder *b, uint32_t c, int32_t slot, int late) {
    begin_chunk(b, SW_TASK_READ, SW_LANE_NVME_READ, c, late);
    reads(b, SW_RES_STATE, c);
    writes_slot(b, SW_RING_STATE, slot);
    if (b->shape->overlap == SW_OVERLAP_NONE) reads(b, SW_RES_VERDICT, verdict(b, late));
    sw_emit_append(b);
}

static void emit_adam(struct sw_builder *b, uint32_t c, int late, int32_t slot, int32_t grad,
                      int32_t emit) {
    begin_chunk(b, SW_TASK_ADAM, SW_LANE_ADAM, c, late);
    reads_verdict(b, late);
    if (grad == NONE)
        reads(b, SW_RES_GRAD, c);
    else
        reads_slot(b, SW_RING_GRAD_STAGE, grad);
    if (slot == NONE)
        writes(b, SW_RES_STATE, c);
    else
        writes_slot(b, SW_RING_STATE, slot);
    if (emit == NONE)
        writes(b, SW_RES_WEIGHT, c); /* where the window is loaded from */
    else
        writes_slot(b, SW_RING_EMIT, emit);
    sw_emit_append(b);
}

static void emit_write(struct sw_builder *b, uint32_t c, int late, int32_t slot) {
    begin_chunk(b, SW_TASK_WRITE, SW_LANE_NVME_WRITE, c, late);
    reads_slot(b, SW_RING_STATE, slot);
    /* Until the update before is durable, the home that this goes to is the committed one. */
    if (sw_turn_commits(b->p)) reads(b, SW_RES_COMMITTED, 0);
    writes(b, SW_RES_STATE, c);
    sw_emit_append(b);
}

/* What Adam emitted goes where the weights are kept. */
static void emit_weight_away(struct sw_builder *b, uint32_t c, int late, int32_t emit) {
    const int device = b->p->chunks[c].weight_tier == SW_TIER_DEVICE;
    begin_chunk(b, device ? SW_TASK_UPLOAD : SW_TASK_WRITE_WEIGHT,
                device ? SW_LANE_H2D : SW_LANE_NVME_WRITE, c, late);
    reads_slot(b, SW_RING_EMIT, emit);
    writes(b, SW_RES_WEIGHT, c);
    sw_emit_append(b);
}

/* grad: where the gradient is in the staging ring, or NONE. window: where the new weights are
 * needed next, or NONE. */
static void emit_host_chunk(struct sw_builder *b, uint32_t c, int late, int32_t grad,
                            int32_t window) {
    const struct sw_chunk *chunk = &b->p->chunks[c];
    const int nvme = chunk->tier == SW_TIER_NVME;
    const int32_t slot = nvme ? take(b, SW_RING_STATE) : NONE;
    const int32_t emit = chunk->weight_tier != SW_TIER_HOST ? take(b, SW_RING_EMIT) : NONE;
    if (nvme) emit_read(b, c, slot, late);
    emit_adam(b, c, late, slot, grad, emit);
    if (grad != NONE) release(b, SW_RING_GRAD_STAGE, grad);
    if (nvme) {
        emit_write(b, c, late, slot);
        release(b, SW_RING_STATE, slot);
    }
    if (window != NONE) sw_emit_load(b, c, window, emit);
    if (emit == NONE) return;
    emit_weight_away(b, c, late, emit);
    release(b, SW_RING_EMIT, emit);
}

static void emit_device_chunk(struct sw_builder *b, uint32_t c, int late) {
    begin_chunk(b, SW_TASK_DEVICE_ADAM, SW_LANE_COMPUTE, c, late);
    /* The scalars follow the norm or the gate, and so carry its permission to the device. */
    reads(b, SW_RES_SCALARS, 0);
    reads(b, SW_RES_GRAD, c);
    writes(b, SW_RES_STATE, c);
    writes(b, SW_RES_WEIGHT, c);
    sw_emit_append(b);
}

/* Of gradients that wait. */
void sw_emit_update(struct sw_builder *b, uint32_t unit, int late, int32_t window) {
    for (uint32_t c = b->p->unit_first_chunk[unit]; c < b->p->unit_trained_end[unit]; c++) {
        if (b->p->chunks[c].tier == SW_TIER_DEVICE)
            emit_device_chunk(b, c, late);
        else
            emit_host_chunk(b, c, late, emit_grad_back(b, c, late), window);
    }
}

void sw_emit_scalars(struct sw_builder *b, int late) {
    if (!b->p->state_bytes[SW_TIER_DEVICE]) return;
    begin(b, SW_TASK_SCALARS, SW_LANE_H2D)->late = (uint8_t)late;
    reads_verdict(b, late);
    writes(b, SW_RES_SCALARS, 0);
    sw_emit_append(b);
}

void sw_emit_commit(struct sw_builder *b, int late) {
    if (!sw_turn_commits(b->p)) return;
    begin(b, SW_TASK_COMMIT, SW_LANE_COMMIT)->late = (uint8_t)late;
    reads(b, SW_RES_NORMED, verdict(b, late));
    writes(b, SW_RES_COMMITTED, 0);
    sw_emit_append(b);
}

/* ---- gradients ---- */

static void emit_span(struct sw_builder *b, uint32_t span, int32_t acc, uint32_t part,
                      int32_t *rounded) {
    const struct sw_chunk *first = &b->p->chunks[span];
    int away = 0;
    begin_chunk(b, SW_TASK_REDUCE, SW_LANE_COMM, span, 0);
    if (acc == NONE)
        reads(b, SW_RES_HEAD_ACC, part);
    else
        reads_slot(b, SW_RING_ACC, acc);
    for (uint32_t c = span; c < first->span_end; c++) {
        if (b->p->chunks[c].grad_tier == SW_TIER_DEVICE)
            writes(b, SW_RES_GRAD, c);
        else
            away = 1;
    }
    *rounded = away ? take(b, SW_RING_ROUNDED) : NONE;
    if (away) writes_slot(b, SW_RING_ROUNDED, *rounded);
    writes(b, SW_RES_NORMS, first->unit);
    sw_emit_append(b);
}

/* Down to where the gradient waits or, in an early update, is used. Its position in staging. */
static int32_t emit_grad(struct sw_builder *b, uint32_t c, int32_t rounded, int early) {
    const struct sw_chunk *chunk = &b->p->chunks[c];
    const int device = chunk->grad_tier == SW_TIER_DEVICE;
    const int host = chunk->grad_tier == SW_TIER_HOST;
    if (device) return early ? emit_grad_back(b, c, 0) : NONE;
    const int32_t stage = host ? NONE : take(b, SW_RING_GRAD_STAGE);
    begin_chunk(b, SW_TASK_GRAD, SW_LANE_D2H, c, 0);
    reads_slot(b, SW_RING_ROUNDED, rounded);
    if (host)
        writes(b, SW_RES_GRAD, c);
    else
        writes_slot(b, SW_RING_GRAD_STAGE, stage);
    sw_emit_append(b);
    if (host || early) return stage;
    begin_chunk(b, SW_TASK_WRITE_GRAD, SW_LANE_NVME_WRITE, c, 0);
    reads_slot(b, SW_RING_GRAD_STAGE, stage);
    writes(b, SW_RES_GRAD, c);
    sw_emit_append(b);
    release(b, SW_RING_GRAD_STAGE, stage);
    return NONE;
}

/* Every rank's gradient of a unit becomes the sum of its own shard, in place. */
static void emit_scatter(struct sw_builder *b, uint32_t unit, int32_t acc, uint32_t part) {
    if (b->p->shards * b->p->replicas == 1) return;
    begin(b, SW_TASK_SCATTER, SW_LANE_COMM)->unit = unit;
    if (acc == NONE)
        writes(b, SW_RES_HEAD_ACC, part);
    else
        writes_slot(b, SW_RING_ACC, acc);
    sw_emit_append(b);
}

/* Rounds a unit's gradient and brings it to where it waits, or straight through the update. */
static void emit_unit_gradient(struct sw_builder *b, uint32_t unit, int32_t acc, uint32_t part) {
    const int early = b->shape->overlap == SW_OVERLAP_BACKWARD && !is_late(b, unit);
    emit_scatter(b, unit, acc, part);
    for (uint32_t c = b->p->unit_first_chunk[unit]; c < b->p->unit_trained_end[unit];) {
        int32_t rounded;
        const uint32_t end = b->p->chunks[c].span_end;
        emit_span(b, c, acc, part, &rounded);
        for (; c < end; c++) {
            const int on_device = b->p->chunks[c].tier == SW_TIER_DEVICE;
            const int32_t stage = emit_grad(b, c, rounded, early && !on_device);
            if (early && !on_device) emit_host_chunk(b, c, 0, stage, NONE);
        }
        if (rounded != NONE) release(b, SW_RING_ROUNDED, rounded);
    }
    begin(b, SW_TASK_NORMS, SW_LANE_D2H)->unit = unit;
    reads(b, SW_RES_NORMS, unit);
    writes(b, SW_RES_HOST_NORMS, unit);
    sw_emit_append(b);
}

/* Adam on the device, one visit behind, so that it does not hold up the next backward. */
void sw_emit_deferred(struct sw_builder *b, int64_t next) {
    if (b->deferred_unit >= 0) {
        const uint32_t unit = (uint32_t)b->deferred_unit;
        for (uint32_t c = b->p->unit_first_chunk[unit]; c < b->p->unit_trained_end[unit]; c++)
            if (b->p->chunks[c].tier == SW_TIER_DEVICE) emit_device_chunk(b, c, 0);
    }
    b->deferred_unit = next;
}

void sw_emit_gradient(struct sw_builder *b, uint32_t unit, int32_t acc, uint32_t part) {
    emit_unit_gradient(b, unit, acc, part);
    const int early = b->shape->overlap == SW_OVERLAP_BACKWARD && !is_late(b, unit);
    sw_emit_deferred(b, early ? (int64_t)unit : NONE);
}
