/* engine/turn_emit.h - what the files of the turn's builder share, and no one else: a turn under
 * construction, and how one task names what it touches.
 *
 * turn_build.c puts visits in order; turn_emit_compute.c emits what computes and moves inputs,
 * turn_emit_update.c what moves gradients, records and weights. */
#ifndef ENGINE_TURN_EMIT_H
#define ENGINE_TURN_EMIT_H
#include "engine/turn_track.h"

enum { NONE = -1 }; /* no position, no unit */

struct sw_visit {
    enum sw_task_kind kind; /* of its compute tasks */
    uint32_t unit;
    int32_t window;    /* position of its weights, or NONE where they stay on the device */
    uint8_t loaded;    /* loads are emitted */
    uint8_t fetches;   /* needs the kept inputs of its group from where they are kept */
    uint8_t with_head; /* a tied embedding's backward that makes the head's gradient, too */
};

struct sw_builder {
    struct sw_turn *turn;
    const struct sw_turn_shape *shape;
    const struct sw_placement *p;
    struct sw_track *track;
    struct sw_task task; /* under construction */
    struct sw_waits waits;
    int failed;

    struct sw_visit *visits;
    uint32_t visit_count;
    uint8_t *updated;      /* by unit: its late update is emitted */
    uint8_t *gathered;     /* by unit: its whole weights, where they stay, are of this step */
    uint32_t late_left;    /* units */
    int32_t *kept_use;     /* by group and micro-batch: open use of the ring, or NONE */
    int all_kept;          /* forward has come past the last layer */
    int64_t deferred_unit; /* whose device Adam comes after the next visit, or NONE */
};

/* ---- one task ---- */

/* Ends the task: its waits become dependencies, and it stands last in its lane. */
void sw_emit_append(struct sw_builder *b);

static inline struct sw_task *begin(struct sw_builder *b, enum sw_task_kind kind,
                                    enum sw_lane lane) {
    b->task = (struct sw_task){.kind = (uint8_t)kind, .lane = (uint8_t)lane, .kept_out = NONE};
    for (int r = 0; r < SW_RING_COUNT; r++) b->task.at[r] = NONE;
    b->waits = (struct sw_waits){{0}};
    return &b->task;
}

static inline void reads(struct sw_builder *b, enum sw_resource resource, uint64_t index) {
    sw_track_read(b->track, &b->waits, b->turn->lane_count, (enum sw_lane)b->task.lane, resource,
                  index);
}

static inline void writes(struct sw_builder *b, enum sw_resource resource, uint64_t index) {
    sw_track_write(b->track, &b->waits, b->turn->lane_count, (enum sw_lane)b->task.lane, resource,
                   index);
}

static inline void reads_slot(struct sw_builder *b, enum sw_ring ring, int32_t position) {
    b->task.at[ring] = position;
    reads(b, (enum sw_resource)(SW_RES_RING + ring), sw_track_slot(b->track, ring, position));
}

static inline void writes_slot(struct sw_builder *b, enum sw_ring ring, int32_t position) {
    b->task.at[ring] = position;
    writes(b, (enum sw_resource)(SW_RES_RING + ring), sw_track_slot(b->track, ring, position));
}

static inline int32_t take(struct sw_builder *b, enum sw_ring ring) {
    return sw_track_take(b->track, ring);
}

static inline void release(struct sw_builder *b, enum sw_ring ring, int32_t position) {
    sw_track_release(b->track, ring, position);
}

static inline struct sw_task *begin_chunk(struct sw_builder *b, enum sw_task_kind kind,
                                          enum sw_lane lane, uint32_t chunk, int late) {
    struct sw_task *task = begin(b, kind, lane);
    task->chunk = chunk;
    task->unit = b->p->chunks[chunk].unit;
    task->late = (uint8_t)late;
    return task;
}

static inline uint32_t verdict(const struct sw_builder *b, int late) {
    return (b->track->number + SW_VERDICTS - (uint32_t)late) % SW_VERDICTS;
}

/* What an update needs to know of its step: what the gate or the norm decided and, when the norm
 * has come, that it found nothing to stop for. */
static inline void reads_verdict(struct sw_builder *b, int late) {
    reads(b, SW_RES_VERDICT, verdict(b, late));
    if (late) reads(b, SW_RES_NORMED, verdict(b, late));
}

static inline int trains(const struct sw_builder *b, uint32_t unit) {
    return sw_placement_trains(b->p, unit);
}

static inline int is_late(const struct sw_builder *b, uint32_t unit) {
    return sw_turn_unit_is_late(b->shape, unit);
}

static inline int streamed(const struct sw_builder *b) {
    return b->p->ring_slots[SW_RING_WINDOW] > 0;
}

static inline uint64_t kept_index(const struct sw_builder *b, uint32_t group, uint32_t micro) {
    return (uint64_t)group * b->p->micro_count + micro;
}

static inline uint32_t layer_of(const struct sw_builder *b, uint32_t unit) {
    return unit - b->p->order.parts;
}

static inline uint32_t group_of(const struct sw_builder *b, uint32_t unit) {
    return sw_placement_group(b->p, layer_of(b, unit));
}

/* ---- turn_emit_update.c ---- */

/* Into the window from where the weights are kept, or from the slot that Adam left them in. */
void sw_emit_load(struct sw_builder *b, uint32_t chunk, int32_t window, int32_t emit);
/* A unit's weights of all ranks: into the window, or where they stay. */
void sw_emit_gather(struct sw_builder *b, uint32_t unit, int32_t window);
/* The update of a unit whose gradient waits. window: where the new weights are needed next. */
void sw_emit_update(struct sw_builder *b, uint32_t unit, int late, int32_t window);
void sw_emit_scalars(struct sw_builder *b, int late);
/* After all writes of a step's update, each of which waited for the commit before, and after the
 * step's norm found no gradient that is not finite. */
void sw_emit_commit(struct sw_builder *b, int late);
/* A unit's gradient to where it waits, or straight through its update. acc: its accumulator, or
 * NONE where it is a part of the head's. */
void sw_emit_gradient(struct sw_builder *b, uint32_t unit, int32_t acc, uint32_t part);
/* Adam on the device for the unit before, and next: which one it will be for. */
void sw_emit_deferred(struct sw_builder *b, int64_t next);

/* ---- turn_emit_compute.c ---- */

/* A layer's kept input of one micro-batch comes back to the device. */
void sw_emit_fetch(struct sw_builder *b, uint32_t unit, uint32_t micro);
void sw_emit_forward(struct sw_builder *b, const struct sw_visit *v);
void sw_emit_backward(struct sw_builder *b, const struct sw_visit *v, int32_t acc);
void sw_emit_head_forward(struct sw_builder *b, const struct sw_visit *v);
void sw_emit_head_whole(struct sw_builder *b, const struct sw_visit *v);
void sw_emit_head_backward(struct sw_builder *b, const struct sw_visit *v, int32_t acc);

#endif
