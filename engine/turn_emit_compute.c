/* engine/turn_emit_compute.c - emits what computes, and what moves kept inputs. */
#include "engine/turn_emit.h"

/* ---- compute ---- */

static void reads_resident(struct sw_builder *b, uint32_t unit) {
    if (b->p->shards > 1) reads(b, SW_RES_FULL, unit);
    for (uint32_t c = b->p->unit_first_chunk[unit]; c < b->p->unit_first_chunk[unit + 1]; c++)
        reads(b, SW_RES_WEIGHT, c);
}

static void reads_weights(struct sw_builder *b, const struct sw_visit *v) {
    if (v->window != NONE)
        reads_slot(b, SW_RING_WINDOW, v->window);
    else
        reads_resident(b, v->unit);
}

/* A unit's input of one micro-batch, layers and norm. */
static void reads_input(struct sw_builder *b, uint32_t unit, uint32_t m) {
    if (unit == sw_order_norm(&b->p->order)) {
        reads(b, SW_RES_NORM_INPUT, m);
        return;
    }
    const uint32_t place = sw_placement_place(b->p, layer_of(b, unit));
    const uint64_t kept = kept_index(b, group_of(b, unit), m);
    if (place > 0)
        reads(b, SW_RES_GROUP, (uint64_t)(place - 1) * b->p->micro_count + m);
    else if (sw_placement_kept(b->p, kept).tier == SW_TIER_DEVICE)
        reads(b, SW_RES_KEPT, kept);
    else
        reads_slot(b, SW_RING_KEPT, b->kept_use[kept]);
}

/* Where documents begin, for a layer's attention. */
static void reads_starts(struct sw_builder *b, uint32_t unit, uint32_t m) {
    if (b->p->layers_read_batch && unit < sw_order_norm(&b->p->order)) reads(b, SW_RES_BATCH, m);
}

/* Where a forward leaves its result: the next unit's input. */
static void writes_input(struct sw_builder *b, uint32_t unit, uint32_t m) {
    const uint32_t norm = sw_order_norm(&b->p->order);
    if (unit > norm) {
        writes(b, SW_RES_HEAD_INPUT, m);
        return;
    }
    if (unit == norm) {
        writes(b, SW_RES_NORM_INPUT, m);
        return;
    }
    const uint32_t place = sw_placement_place(b->p, layer_of(b, unit));
    const uint64_t kept = kept_index(b, group_of(b, unit), m);
    if (place > 0) {
        writes(b, SW_RES_GROUP, (uint64_t)(place - 1) * b->p->micro_count + m);
    } else if (sw_placement_kept(b->p, kept).tier == SW_TIER_DEVICE) {
        writes(b, SW_RES_KEPT, kept);
    } else {
        if (b->kept_use[kept] == NONE) b->kept_use[kept] = take(b, SW_RING_KEPT);
        b->task.kept_out = b->kept_use[kept];
        writes(b, (enum sw_resource)(SW_RES_RING + SW_RING_KEPT),
               sw_track_slot(b->track, SW_RING_KEPT, b->kept_use[kept]));
    }
}

/* The unit whose input a forward makes; the parts of the embedding make the first layer's. */
static uint32_t unit_after(const struct sw_builder *b, uint32_t unit) {
    return unit < b->p->order.parts ? b->p->order.parts : unit + 1;
}

static struct sw_task *begin_compute(struct sw_builder *b, enum sw_task_kind kind,
                                     const struct sw_visit *v, uint32_t m) {
    struct sw_task *task = begin(b, kind, SW_LANE_COMPUTE);
    task->unit = v->unit;
    task->micro = m;
    return task;
}

/* ---- kept inputs ---- */

/* The kept input has left for where it is kept; not in an evaluation. */
static void emit_spill(struct sw_builder *b, uint32_t unit, uint32_t m) {
    const uint64_t kept = kept_index(b, group_of(b, unit), m);
    const int nvme = sw_placement_kept(b->p, kept).tier == SW_TIER_NVME;
    const int32_t stage = nvme ? take(b, SW_RING_KEPT_STAGE) : NONE;
    struct sw_task *task = begin(b, SW_TASK_SPILL, SW_LANE_D2H);
    task->unit = unit;
    task->micro = m;
    reads_slot(b, SW_RING_KEPT, b->kept_use[kept]);
    if (nvme)
        writes_slot(b, SW_RING_KEPT_STAGE, stage);
    else
        writes(b, SW_RES_KEPT, kept);
    sw_emit_append(b);
    if (!nvme) return;
    task = begin(b, SW_TASK_WRITE_KEPT, SW_LANE_NVME_WRITE);
    task->unit = unit;
    task->micro = m;
    reads_slot(b, SW_RING_KEPT_STAGE, stage);
    writes(b, SW_RES_KEPT, kept);
    sw_emit_append(b);
    release(b, SW_RING_KEPT_STAGE, stage);
}

/* Whether a unit's input is kept, and not on the device. */
static int spills(const struct sw_builder *b, uint32_t unit, uint32_t m) {
    if (unit < b->p->order.parts || unit >= sw_order_norm(&b->p->order)) return 0;
    return sw_placement_place(b->p, layer_of(b, unit)) == 0 &&
           sw_placement_kept(b->p, kept_index(b, group_of(b, unit), m)).tier != SW_TIER_DEVICE;
}

/* The last task of this pass that needs a kept input from the ring is emitted. */
static void release_kept(struct sw_builder *b, uint32_t unit, uint32_t m) {
    if (!spills(b, unit, m)) return;
    const uint64_t kept = kept_index(b, group_of(b, unit), m);
    release(b, SW_RING_KEPT, b->kept_use[kept]);
    b->kept_use[kept] = NONE;
}

void sw_emit_fetch(struct sw_builder *b, uint32_t unit, uint32_t m) {
    const uint64_t kept = kept_index(b, group_of(b, unit), m);
    const enum sw_tier tier = sw_placement_kept(b->p, kept).tier;
    if (tier == SW_TIER_DEVICE) return;
    const int nvme = tier == SW_TIER_NVME;
    const int32_t stage = nvme ? take(b, SW_RING_KEPT_STAGE) : NONE;
    if (nvme) {
        struct sw_task *task = begin(b, SW_TASK_READ_KEPT, SW_LANE_NVME_READ);
        task->unit = unit;
        task->micro = m;
        reads(b, SW_RES_KEPT, kept);
        writes_slot(b, SW_RING_KEPT_STAGE, stage);
        sw_emit_append(b);
    }
    struct sw_task *task = begin(b, SW_TASK_FETCH, SW_LANE_H2D);
    task->unit = unit;
    task->micro = m;
    if (nvme)
        reads_slot(b, SW_RING_KEPT_STAGE, stage);
    else
        reads(b, SW_RES_KEPT, kept);
    b->kept_use[kept] = take(b, SW_RING_KEPT);
    writes_slot(b, SW_RING_KEPT, b->kept_use[kept]);
    sw_emit_append(b);
    if (nvme) release(b, SW_RING_KEPT_STAGE, stage);
}

/* ---- visits ---- */

void sw_emit_forward(struct sw_builder *b, const struct sw_visit *v) {
    const uint32_t parts = b->p->order.parts, after = unit_after(b, v->unit);
    const int last_part = v->unit + 1 >= parts;
    for (uint32_t m = 0; m < b->p->micro_count; m++) {
        begin_compute(b, v->kind, v, m);
        reads_weights(b, v);
        if (v->unit < parts) {
            reads(b, SW_RES_BATCH, m);
        } else {
            reads_input(b, v->unit, m);
            reads_starts(b, v->unit, m);
        }
        writes_input(b, after, m);
        sw_emit_append(b);
        if (v->kind == SW_TASK_RECOMPUTE) continue;
        release_kept(b, v->unit, m);
        if (last_part && spills(b, after, m) && b->turn->kind == SW_TURN_TRAIN &&
            group_of(b, after) >= sw_placement_first_needed(b->p))
            emit_spill(b, after, m);
    }
}

static void reads_head(struct sw_builder *b, uint32_t m) {
    reads(b, SW_RES_HEAD_INPUT, m);
    reads(b, SW_RES_BATCH, m);
}

void sw_emit_head_forward(struct sw_builder *b, const struct sw_visit *v) {
    const uint32_t last = sw_order_head(&b->p->order, b->p->order.parts - 1);
    for (uint32_t m = 0; m < b->p->micro_count; m++) {
        begin_compute(b, v->kind, v, m);
        reads_weights(b, v);
        reads_head(b, m);
        writes(b, SW_RES_STATS, m);
        if (v->unit == last) writes(b, SW_RES_LOSS, m);
        sw_emit_append(b);
    }
}

void sw_emit_head_whole(struct sw_builder *b, const struct sw_visit *v) {
    for (uint32_t m = 0; m < b->p->micro_count; m++) {
        begin_compute(b, v->kind, v, m);
        for (uint32_t part = 0; part < b->p->order.parts; part++) {
            reads_resident(b, sw_order_head(&b->p->order, part));
            if (trains(b, sw_order_head(&b->p->order, part))) writes(b, SW_RES_HEAD_ACC, part);
        }
        reads_head(b, m);
        writes(b, SW_RES_STATS, m);
        if (sw_placement_head_has_dx(b->p)) writes(b, SW_RES_HEAD_GRAD, m);
        writes(b, SW_RES_LOSS, m);
        sw_emit_append(b);
    }
}

/* acc: the unit's accumulator, or NONE where the head's are whole. */
static void writes_acc(struct sw_builder *b, uint32_t part, int32_t acc) {
    if (acc == NONE)
        writes(b, SW_RES_HEAD_ACC, part);
    else
        writes_slot(b, SW_RING_ACC, acc);
}

void sw_emit_head_backward(struct sw_builder *b, const struct sw_visit *v, int32_t acc) {
    for (uint32_t m = 0; m < b->p->micro_count; m++) {
        begin_compute(b, v->kind, v, m);
        reads_weights(b, v);
        reads_head(b, m);
        reads(b, SW_RES_STATS, m);
        if (sw_placement_head_has_dx(b->p)) writes(b, SW_RES_HEAD_GRAD, m);
        if (acc != NONE) writes_slot(b, SW_RING_ACC, acc);
        sw_emit_append(b);
    }
}

static void emit_head_grad(struct sw_builder *b, const struct sw_visit *v, int32_t acc) {
    for (uint32_t m = 0; m < b->p->micro_count; m++) {
        begin_compute(b, SW_TASK_HEAD_GRAD, v, m);
        reads_weights(b, v);
        reads_head(b, m);
        reads(b, SW_RES_STATS, m);
        writes_slot(b, SW_RING_ACC, acc);
        sw_emit_append(b);
    }
}

void sw_emit_backward(struct sw_builder *b, const struct sw_visit *v, int32_t acc) {
    const uint32_t parts = b->p->order.parts, norm = sw_order_norm(&b->p->order);
    if (v->with_head) emit_head_grad(b, v, acc);
    for (uint32_t m = 0; m < b->p->micro_count; m++) {
        begin_compute(b, v->kind, v, m);
        if (v->unit < parts) {
            reads(b, SW_RES_BATCH, m);
            reads(b, SW_RES_BETWEEN, m);
        } else {
            reads_weights(b, v);
            reads_input(b, v->unit, m);
            reads_starts(b, v->unit, m);
            if (v->unit == norm) reads(b, SW_RES_HEAD_GRAD, m);
            writes(b, SW_RES_BETWEEN, m);
        }
        if (trains(b, v->unit)) writes_acc(b, v->unit, acc);
        sw_emit_append(b);
        release_kept(b, v->unit, m);
    }
}
