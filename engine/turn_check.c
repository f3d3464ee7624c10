/* engine/turn_check.c - proves a sequence of turns right, by following every task's reads and
 * writes.
 *
 * Each task gets a vector clock: per lane, how many tasks are surely over when it starts. A
 * resource (a slot, a weight, a record) remembers who wrote it last, what it holds (a tag: chunk
 * and update count, or turn and unit), and who has read it since. A read must find the tag it
 * expects from a writer in its ancestry; a write must have the last writer and every reader in its
 * ancestry. */
#include "engine/turn.h"

#include <assert.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "engine/turn_families.h"

struct resource {
    uint64_t tag;
    int64_t write_index; /* in the writer's lane, counted from 1 over all turns; 0: never */
    int write_lane;
    int64_t read_index[SW_LANE_COUNT];
};

struct clock {
    int64_t over[SW_LANE_COUNT];
};

struct checker {
    const struct sw_turn_shape *shape;
    struct resource *resources;
    uint64_t family_first[FAMILY_COUNT + 1];
    struct clock *clocks[2];     /* by task, of this turn and the one before */
    int64_t base[SW_LANE_COUNT]; /* tasks of earlier turns */
    uint64_t ring_base[SW_RING_COUNT];
    uint64_t step; /* of the turn at hand; the last one trained for drains and evaluations */
    uint64_t turn_number;
    int is_eval;
    int failed;
    char *why;
    uint32_t why_size;
    const struct sw_task *task;
    struct clock now;
    int64_t index;
};

__attribute__((format(printf, 2, 3))) static void fail(struct checker *c, const char *format, ...) {
    if (c->failed) return;
    c->failed = 1;
    int used = 0;
    if (c->task)
        used = snprintf(c->why, c->why_size, "turn %llu, %s unit %u micro %u chunk %u: ",
                        (unsigned long long)c->turn_number,
                        sw_task_name((enum sw_task_kind)c->task->kind), c->task->unit,
                        c->task->micro, c->task->chunk);
    if (used < 0 || (uint32_t)used >= c->why_size) return;
    va_list args;
    va_start(args, format);
    vsnprintf(c->why + used, c->why_size - (uint32_t)used, format, args);
    va_end(args);
}

static struct resource *find(struct checker *c, enum family f, uint64_t i) {
    assert(c->family_first[f] + i < c->family_first[f + 1]);
    return &c->resources[c->family_first[f] + i];
}

static void check_side(struct checker *c, enum family f) {
    const int copy = c->task->lane == SW_LANE_H2D || c->task->lane == SW_LANE_D2H;
    const int device = sw_lane_on_device((enum sw_lane)c->task->lane);
    if (!copy && family_side[f] == (device ? HOST : DEVICE))
        fail(c, "touches %s across the border", family_names[f]);
}

static void reads(struct checker *c, enum family f, uint64_t i, uint64_t tag) {
    check_side(c, f);
    struct resource *r = find(c, f, i);
    if (r->tag != tag)
        fail(c, "reads %s %llu holding %llx, expected %llx", family_names[f], (unsigned long long)i,
             (unsigned long long)r->tag, (unsigned long long)tag);
    else if (c->now.over[r->write_lane] < r->write_index)
        fail(c, "reads %s %llu without waiting for its writer on lane %s", family_names[f],
             (unsigned long long)i, sw_lane_name((enum sw_lane)r->write_lane));
    if (c->index > r->read_index[c->task->lane]) r->read_index[c->task->lane] = c->index;
}

static void writes(struct checker *c, enum family f, uint64_t i, uint64_t tag) {
    check_side(c, f);
    struct resource *r = find(c, f, i);
    if (c->now.over[r->write_lane] < r->write_index)
        fail(c, "overwrites %s %llu while lane %s may still write it", family_names[f],
             (unsigned long long)i, sw_lane_name((enum sw_lane)r->write_lane));
    for (int l = 0; l < SW_LANE_COUNT; l++)
        if (l != c->task->lane && c->now.over[l] < r->read_index[l])
            fail(c, "overwrites %s %llu before its last reader on lane %s", family_names[f],
                 (unsigned long long)i, sw_lane_name((enum sw_lane)l));
    *r = (struct resource){.tag = tag, .write_index = c->index, .write_lane = c->task->lane};
}

/* ---- tags: what a resource holds ---- */

/* Zero is "never filled". */
static uint64_t tag_of(uint64_t a, uint64_t b, uint64_t c) {
    uint64_t tag = 0x9E3779B97F4A7C15u;
    const uint64_t parts[] = {a, b, c};
    for (int i = 0; i < 3; i++) tag = (tag ^ parts[i]) * 0xD6E8FEB86659FD93u, tag ^= tag >> 32;
    return tag | 1;
}

static uint64_t turn_tag(const struct checker *c) {
    return tag_of(c->turn_number, 0, 0);
}
/* `count` pieces of `what` are there, made in this turn. */
static uint64_t part_tag(const struct checker *c, uint64_t what, uint64_t count) {
    return tag_of(c->turn_number, what + 1, count);
}
/* A chunk's record or weights after the update of a step. */
static uint64_t chunk_tag(uint64_t chunk, uint64_t step) {
    return tag_of(UINT64_MAX, chunk, step);
}
/* Every rank's weights of a unit after the update of a step. */
static uint64_t full_tag(uint64_t unit, uint64_t step) {
    return tag_of(UINT64_MAX - 2, unit, step);
}
static uint64_t step_tag(uint64_t step) {
    return tag_of(UINT64_MAX - 1, step, 0);
}
static uint64_t grad_tag(const struct checker *c, uint64_t chunk, int late) {
    return tag_of(c->turn_number - (uint64_t)late, UINT64_MAX, chunk);
}

/* A chunk's weights as this step finds them; frozen ones stay what they were. */
static uint64_t weight_tag(const struct checker *c, uint32_t chunk) {
    return chunk_tag(chunk, c->shape->placement->chunks[chunk].frozen ? 0 : c->step - 1);
}

static uint64_t task_step(const struct checker *c) {
    return c->step - c->task->late;
}

static int trains(const struct checker *c, uint32_t unit) {
    for (uint32_t i = c->shape->placement->unit_first_chunk[unit];
         i < c->shape->placement->unit_first_chunk[unit + 1]; i++)
        if (!c->shape->placement->chunks[i].frozen) return 1;
    return 0;
}

/* Whether anything below the head trains, so that the gradient of its input is needed; a tied head
 * is below itself. */
static int has_dx(const struct checker *c) {
    for (uint32_t u = 0; u <= sw_order_norm(&c->shape->placement->order); u++)
        if (trains(c, u)) return 1;
    return 0;
}

static uint64_t slot_of(const struct checker *c, enum sw_ring ring, int32_t position) {
    return (c->ring_base[ring] + (uint64_t)position) % c->shape->placement->ring_slots[ring];
}

static void reads_slot(struct checker *c, enum sw_ring ring, int32_t position, uint64_t tag) {
    if (position < 0)
        fail(c, "has no slot");
    else
        reads(c, (enum family)(RING + ring), slot_of(c, ring, position), tag);
}

static void writes_slot(struct checker *c, enum sw_ring ring, int32_t position, uint64_t tag) {
    if (position < 0)
        fail(c, "has no slot");
    else
        writes(c, (enum family)(RING + ring), slot_of(c, ring, position), tag);
}

/* The next piece of what is filled piece by piece; the first may find anything. */
static void adds(struct checker *c, enum family f, uint64_t i, uint64_t what, uint64_t had) {
    if (had > 0) reads(c, f, i, part_tag(c, what, had));
    writes(c, f, i, part_tag(c, what, had + 1));
}

/* How many chunks of a unit come into the window by loads: all, or none where they are gathered
 * from the device. */
static uint32_t loads_of(const struct sw_placement *p, uint32_t unit) {
    const uint32_t first = p->unit_first_chunk[unit];
    return p->chunks[first].weight_tier == SW_TIER_DEVICE ? 0
                                                          : p->unit_first_chunk[unit + 1] - first;
}

/* ---- compute ---- */

/* The weights that this step is computed with: those after the step before. */
static void reads_weights(struct checker *c, uint32_t unit) {
    const struct sw_placement *p = c->shape->placement;
    if (p->ring_slots[SW_RING_WINDOW]) {
        reads_slot(c, SW_RING_WINDOW, c->task->at[SW_RING_WINDOW],
                   part_tag(c, unit, loads_of(p, unit) + (p->shards > 1)));
        return;
    }
    if (p->shards > 1) reads(c, FULL, unit, full_tag(unit, c->step - 1));
    for (uint32_t i = p->unit_first_chunk[unit]; i < p->unit_first_chunk[unit + 1]; i++)
        reads(c, WEIGHT, i, weight_tag(c, i));
}

enum { INPUT = 1 << 20, STATISTICS = 2 << 20, TO_HEAD = 3 << 20, ACC = 4 << 20, SPAN = 5 << 20 };

/* The tag of a unit's whole input of one micro-batch: the first layer's has as many writers as the
 * embedding has parts. */
static uint64_t input_tag(const struct checker *c, uint32_t unit, uint32_t m) {
    const struct sw_unit_order *o = &c->shape->placement->order;
    return part_tag(c, INPUT + ((uint64_t)m << 32) + unit, unit == o->parts ? o->parts : 1);
}

static void reads_input(struct checker *c, uint32_t unit, uint32_t m) {
    const struct sw_placement *p = c->shape->placement;
    const uint64_t tag = input_tag(c, unit, m);
    if (unit == sw_order_norm(&p->order)) {
        reads(c, NORM_INPUT, m, tag);
        return;
    }
    const uint32_t layer = unit - p->order.parts, place = sw_placement_place(p, layer);
    const uint64_t kept = (uint64_t)sw_placement_group(p, layer) * p->micro_count + m;
    if (place > 0)
        reads(c, GROUP, (uint64_t)(place - 1) * p->micro_count + m, tag);
    else if (sw_placement_kept(p, kept).tier == SW_TIER_DEVICE)
        reads(c, KEPT, kept, tag);
    else
        reads_slot(c, SW_RING_KEPT, c->task->at[SW_RING_KEPT], tag);
}

/* `had`: pieces of it that are there. */
static void adds_input(struct checker *c, uint32_t unit, uint32_t m, uint64_t had) {
    const struct sw_placement *p = c->shape->placement;
    const uint64_t what = INPUT + ((uint64_t)m << 32) + unit;
    if (unit >= sw_order_norm(&p->order)) {
        adds(c, unit == sw_order_norm(&p->order) ? NORM_INPUT : HEAD_INPUT, m, what, had);
        return;
    }
    const uint32_t layer = unit - p->order.parts, place = sw_placement_place(p, layer);
    const uint64_t kept = (uint64_t)sw_placement_group(p, layer) * p->micro_count + m;
    if (place > 0)
        adds(c, GROUP, (uint64_t)(place - 1) * p->micro_count + m, what, had);
    else if (sw_placement_kept(p, kept).tier == SW_TIER_DEVICE)
        adds(c, KEPT, kept, what, had);
    else if (c->task->kept_out < 0)
        fail(c, "has no slot for the input that it makes");
    else
        adds(c, (enum family)(RING + SW_RING_KEPT), slot_of(c, SW_RING_KEPT, c->task->kept_out),
             what, had);
}

/* Tokens, or where documents begin. */
static int reads_batch(const struct checker *c, uint32_t unit) {
    const struct sw_placement *p = c->shape->placement;
    return unit < p->order.parts || (p->layers_read_batch && unit < sw_order_norm(&p->order));
}

static void follow_forward(struct checker *c) {
    const uint32_t u = c->task->unit, m = c->task->micro;
    const uint32_t parts = c->shape->placement->order.parts;
    reads_weights(c, u);
    if (reads_batch(c, u)) reads(c, BATCH, m, turn_tag(c));
    if (u >= parts) reads_input(c, u, m);
    adds_input(c, u < parts ? parts : u + 1, m, u < parts ? u : 0);
}

static void reads_head(struct checker *c) {
    const uint32_t m = c->task->micro, norm = sw_order_norm(&c->shape->placement->order);
    reads(c, BATCH, m, turn_tag(c));
    reads(c, HEAD_INPUT, m, part_tag(c, INPUT + ((uint64_t)m << 32) + norm + 1, 1));
}

/* Which part of the head a unit is. */
static uint32_t part_of(const struct checker *c, uint32_t unit) {
    const struct sw_unit_order *o = &c->shape->placement->order;
    return o->tied ? unit : unit - sw_order_norm(o) - 1;
}

/* A unit's accumulator after `count` of its contributions. */
static void accumulates(struct checker *c, uint32_t unit, uint64_t had) {
    const struct sw_unit_order *o = &c->shape->placement->order;
    const int32_t position = c->task->at[SW_RING_ACC];
    if (position >= 0)
        adds(c, (enum family)(RING + SW_RING_ACC), slot_of(c, SW_RING_ACC, position), ACC + unit,
             had);
    else if (unit < o->parts || unit > sw_order_norm(o))
        adds(c, HEAD_ACC, part_of(c, unit), ACC + unit, had);
    else
        fail(c, "has no accumulator");
}

/* Contributions that a unit's gradient has in all. */
static uint64_t contributions(const struct checker *c, uint32_t unit) {
    const struct sw_placement *p = c->shape->placement;
    return p->micro_count * (p->order.tied && unit < p->order.parts ? 2 : 1);
}

static void follow_head(struct checker *c) {
    const struct sw_placement *p = c->shape->placement;
    const struct sw_unit_order *o = &p->order;
    const uint32_t m = c->task->micro, u = c->task->unit;
    const uint64_t statistics = STATISTICS + m, to_head = TO_HEAD + m;
    reads_head(c);
    if (c->task->kind == SW_TASK_HEAD_WHOLE) {
        for (uint32_t part = 0; part < o->parts; part++) {
            reads_weights(c, sw_order_head(o, part));
            if (trains(c, sw_order_head(o, part))) accumulates(c, sw_order_head(o, part), m);
        }
        writes(c, STATS, m, part_tag(c, statistics, o->parts));
        if (has_dx(c)) writes(c, HEAD_GRAD, m, part_tag(c, to_head, o->parts));
        writes(c, LOSS, m, turn_tag(c));
        return;
    }
    reads_weights(c, u);
    if (c->task->kind == SW_TASK_HEAD_FORWARD) {
        adds(c, STATS, m, statistics, part_of(c, u));
        if (part_of(c, u) == o->parts - 1) writes(c, LOSS, m, turn_tag(c));
        return;
    }
    reads(c, STATS, m, part_tag(c, statistics, o->parts));
    if (c->task->kind == SW_TASK_HEAD_BACKWARD && has_dx(c))
        adds(c, HEAD_GRAD, m, to_head, o->parts - 1 - part_of(c, u));
    if (trains(c, u) && (c->task->kind == SW_TASK_HEAD_GRAD || !o->tied)) accumulates(c, u, m);
}

static void follow_backward(struct checker *c) {
    const struct sw_placement *p = c->shape->placement;
    const uint32_t u = c->task->unit, m = c->task->micro, norm = sw_order_norm(&p->order);
    const uint32_t above = u < p->order.parts ? p->order.parts : u + 1;
    if (reads_batch(c, u)) reads(c, BATCH, m, turn_tag(c));
    if (u >= p->order.parts) reads_weights(c, u);
    if (u >= p->order.parts) reads_input(c, u, m);
    if (u == norm)
        reads(c, HEAD_GRAD, m, part_tag(c, TO_HEAD + m, p->order.parts));
    else
        reads(c, BETWEEN, m, part_tag(c, above, 0));
    if (u >= p->order.parts) writes(c, BETWEEN, m, part_tag(c, u, 0));
    if (trains(c, u)) accumulates(c, u, contributions(c, u) - p->micro_count + m);
}

/* ---- gradients and updates ---- */

static uint64_t spans_before(const struct sw_placement *p, uint32_t unit, uint32_t end) {
    uint64_t count = 0;
    for (uint32_t i = p->unit_first_chunk[unit]; i < end && !p->chunks[i].frozen;
         i = p->chunks[i].span_end)
        count++;
    return count;
}

/* All ranks' weights of a unit come together: one more piece after what was loaded. */
static void follow_gather(struct checker *c) {
    const struct sw_placement *p = c->shape->placement;
    const uint32_t u = c->task->unit;
    for (uint32_t i = p->unit_first_chunk[u]; i < p->unit_first_chunk[u + 1]; i++)
        if (p->chunks[i].weight_tier == SW_TIER_DEVICE) reads(c, WEIGHT, i, weight_tag(c, i));
    if (!p->ring_slots[SW_RING_WINDOW])
        writes(c, FULL, u, full_tag(u, c->step - 1));
    else if (c->task->at[SW_RING_WINDOW] < 0)
        fail(c, "has no window");
    else
        adds(c, (enum family)(RING + SW_RING_WINDOW),
             slot_of(c, SW_RING_WINDOW, c->task->at[SW_RING_WINDOW]), u, loads_of(p, u));
}

static void follow_reduce(struct checker *c) {
    const struct sw_placement *p = c->shape->placement;
    const uint32_t u = c->task->unit, first = c->task->chunk;
    const int sums = p->shards * p->replicas > 1;
    const uint64_t whole = part_tag(c, ACC + u, contributions(c, u) + sums);
    if (c->task->at[SW_RING_ACC] >= 0)
        reads_slot(c, SW_RING_ACC, c->task->at[SW_RING_ACC], whole);
    else
        reads(c, HEAD_ACC, part_of(c, u), whole);
    int away = 0;
    for (uint32_t i = first; i < p->chunks[first].span_end; i++) {
        if (p->chunks[i].grad_tier == SW_TIER_DEVICE)
            writes(c, GRAD, i, grad_tag(c, i, 0));
        else
            away = 1;
    }
    if (away)
        writes_slot(c, SW_RING_ROUNDED, c->task->at[SW_RING_ROUNDED], part_tag(c, SPAN + first, 0));
    adds(c, NORMS, u, u, spans_before(p, u, first));
}

/* A gradient's ways: from the device's slot or place, to its place or a slot for Adam or NVMe. */
static void follow_grad(struct checker *c) {
    const struct sw_task *t = c->task;
    const struct sw_chunk *chunk = &c->shape->placement->chunks[t->chunk];
    const uint64_t tag = grad_tag(c, t->chunk, t->late);
    if (t->kind == SW_TASK_GRAD && chunk->grad_tier != SW_TIER_DEVICE)
        reads_slot(c, SW_RING_ROUNDED, t->at[SW_RING_ROUNDED],
                   part_tag(c, SPAN + chunk->span_first, 0));
    else if (t->kind == SW_TASK_WRITE_GRAD)
        reads_slot(c, SW_RING_GRAD_STAGE, t->at[SW_RING_GRAD_STAGE], tag);
    else
        reads(c, GRAD, t->chunk, tag);
    if (t->kind == SW_TASK_WRITE_GRAD || t->at[SW_RING_GRAD_STAGE] < 0)
        writes(c, GRAD, t->chunk, tag);
    else
        writes_slot(c, SW_RING_GRAD_STAGE, t->at[SW_RING_GRAD_STAGE], tag);
}

static void reads_verdict(struct checker *c) {
    const uint64_t step = task_step(c);
    reads(c, VERDICT, step % 4, step_tag(step));
    if (c->task->late) reads(c, NORMED, step % 4, step_tag(step));
}

static void follow_adam(struct checker *c) {
    const struct sw_task *t = c->task;
    const uint64_t before = chunk_tag(t->chunk, task_step(c) - 1);
    const uint64_t after = chunk_tag(t->chunk, task_step(c));
    reads_verdict(c);
    if (t->at[SW_RING_GRAD_STAGE] >= 0)
        reads_slot(c, SW_RING_GRAD_STAGE, t->at[SW_RING_GRAD_STAGE],
                   grad_tag(c, t->chunk, t->late));
    else
        reads(c, GRAD, t->chunk, grad_tag(c, t->chunk, t->late));
    if (t->at[SW_RING_STATE] >= 0) {
        reads_slot(c, SW_RING_STATE, t->at[SW_RING_STATE], before);
        writes_slot(c, SW_RING_STATE, t->at[SW_RING_STATE], after);
    } else {
        reads(c, STATE, t->chunk, before);
        writes(c, STATE, t->chunk, after);
    }
    if (t->at[SW_RING_EMIT] >= 0)
        writes_slot(c, SW_RING_EMIT, t->at[SW_RING_EMIT], after);
    else
        writes(c, WEIGHT, t->chunk, after);
}

/* A chunk's weights come into the window piece by piece, in order. */
static void follow_load(struct checker *c) {
    const struct sw_task *t = c->task;
    const struct sw_placement *p = c->shape->placement;
    const uint64_t tag = weight_tag(c, t->chunk);
    if (t->at[SW_RING_EMIT] >= 0)
        reads_slot(c, SW_RING_EMIT, t->at[SW_RING_EMIT], tag);
    else if (t->at[SW_RING_WEIGHT_STAGE] >= 0)
        reads_slot(c, SW_RING_WEIGHT_STAGE, t->at[SW_RING_WEIGHT_STAGE], tag);
    else
        reads(c, WEIGHT, t->chunk, tag);
    if (t->at[SW_RING_WINDOW] < 0)
        fail(c, "has no window");
    else
        adds(c, (enum family)(RING + SW_RING_WINDOW),
             slot_of(c, SW_RING_WINDOW, t->at[SW_RING_WINDOW]), t->unit,
             t->chunk - p->unit_first_chunk[t->unit]);
}

static void follow_update(struct checker *c) {
    const struct sw_task *t = c->task;
    const struct sw_placement *p = c->shape->placement;
    const uint64_t step = task_step(c);
    const uint64_t before = chunk_tag(t->chunk, step - 1), after = chunk_tag(t->chunk, step);
    switch (t->kind) {
    case SW_TASK_READ:
        reads(c, STATE, t->chunk, before);
        writes_slot(c, SW_RING_STATE, t->at[SW_RING_STATE], before);
        break;
    case SW_TASK_DEVICE_ADAM:
        reads(c, SCALARS, 0, step_tag(step));
        reads(c, GRAD, t->chunk, grad_tag(c, t->chunk, t->late));
        reads(c, STATE, t->chunk, before);
        writes(c, STATE, t->chunk, after);
        writes(c, WEIGHT, t->chunk, after);
        break;
    case SW_TASK_WRITE:
        reads_slot(c, SW_RING_STATE, t->at[SW_RING_STATE], after);
        if (sw_turn_commits(p)) /* so this home is not the committed one */
            reads(c, COMMITTED, 0, step_tag(step - 1));
        writes(c, STATE, t->chunk, after);
        break;
    case SW_TASK_COMMIT:
        reads(c, NORMED, step % 4, step_tag(step));
        for (uint32_t i = 0; i < p->chunk_count; i++)
            if (!p->chunks[i].frozen) reads(c, STATE, i, chunk_tag(i, step));
        writes(c, COMMITTED, 0, step_tag(step));
        break;
    case SW_TASK_READ_WEIGHT:
        reads(c, WEIGHT, t->chunk, weight_tag(c, t->chunk));
        writes_slot(c, SW_RING_WEIGHT_STAGE, t->at[SW_RING_WEIGHT_STAGE], weight_tag(c, t->chunk));
        break;
    default: /* upload, write weight */
        reads_slot(c, SW_RING_EMIT, t->at[SW_RING_EMIT], after);
        writes(c, WEIGHT, t->chunk, after);
        break;
    }
}

/* A kept input leaves the device and comes back. */
static void follow_kept(struct checker *c) {
    const struct sw_task *t = c->task;
    const struct sw_placement *p = c->shape->placement;
    const uint64_t tag = input_tag(c, t->unit, t->micro);
    const uint64_t kept =
        (uint64_t)sw_placement_group(p, t->unit - p->order.parts) * p->micro_count + t->micro;
    const int32_t stage = t->at[SW_RING_KEPT_STAGE];
    const int out = t->kind == SW_TASK_SPILL || t->kind == SW_TASK_FETCH;
    if (t->kind == SW_TASK_SPILL)
        reads_slot(c, SW_RING_KEPT, t->at[SW_RING_KEPT], tag);
    else if (t->kind == SW_TASK_WRITE_KEPT || (t->kind == SW_TASK_FETCH && stage >= 0))
        reads_slot(c, SW_RING_KEPT_STAGE, stage, tag);
    else
        reads(c, KEPT, kept, tag);
    if (t->kind == SW_TASK_FETCH)
        writes_slot(c, SW_RING_KEPT, t->at[SW_RING_KEPT], tag);
    else if (t->kind == SW_TASK_READ_KEPT || (out && stage >= 0))
        writes_slot(c, SW_RING_KEPT_STAGE, stage, tag);
    else
        writes(c, KEPT, kept, tag);
}

static void follow_control(struct checker *c) {
    const struct sw_placement *p = c->shape->placement;
    if (c->task->kind == SW_TASK_GATE) {
        reads(c, HOST_LOSS, 0, turn_tag(c));
        if (!c->is_eval) writes(c, VERDICT, c->step % 4, step_tag(c->step));
        return;
    }
    for (uint32_t u = 0; u < p->order.unit_count; u++)
        if (trains(c, u)) reads(c, HOST_NORMS, u, turn_tag(c));
    reads(c, HOST_LOSS, 0, turn_tag(c));
    writes(c, NORMED, c->step % 4, step_tag(c->step));
    /* Behind a gate the norm is reported, and decides only what is late. */
    if (c->shape->overlap != SW_OVERLAP_BACKWARD)
        writes(c, VERDICT, c->step % 4, step_tag(c->step));
}

static void follow(struct checker *c) {
    const struct sw_task *t = c->task;
    const struct sw_placement *p = c->shape->placement;
    const uint32_t u = t->unit, m = t->micro;
    switch (t->kind) {
    case SW_TASK_FILL:
        writes(c, STAGING, 0, turn_tag(c));
        break;
    case SW_TASK_BATCH:
        reads(c, STAGING, 0, turn_tag(c));
        if (c->shape->stops_together && !c->is_eval && c->step > 1)
            reads(c, VERDICT, (c->step - 1) % 4, step_tag(c->step - 1));
        writes(c, BATCH, m, turn_tag(c));
        break;
    case SW_TASK_FORWARD:
    case SW_TASK_RECOMPUTE:
        follow_forward(c);
        break;
    case SW_TASK_BACKWARD:
        follow_backward(c);
        break;
    case SW_TASK_HEAD_FORWARD:
    case SW_TASK_HEAD_WHOLE:
    case SW_TASK_HEAD_BACKWARD:
    case SW_TASK_HEAD_GRAD:
        follow_head(c);
        break;
    case SW_TASK_LOSS:
        for (uint32_t i = 0; i < c->shape->placement->micro_count; i++)
            reads(c, LOSS, i, turn_tag(c));
        writes(c, HOST_LOSS, 0, turn_tag(c));
        break;
    case SW_TASK_GATE:
    case SW_TASK_NORM:
        follow_control(c);
        break;
    case SW_TASK_GATHER:
        follow_gather(c);
        break;
    case SW_TASK_SCATTER:
        accumulates(c, u, contributions(c, u));
        break;
    case SW_TASK_REDUCE:
        follow_reduce(c);
        break;
    case SW_TASK_GRAD:
    case SW_TASK_READ_GRAD:
    case SW_TASK_WRITE_GRAD:
        follow_grad(c);
        break;
    case SW_TASK_NORMS:
        reads(c, NORMS, u, part_tag(c, u, spans_before(p, u, p->unit_first_chunk[u + 1])));
        writes(c, HOST_NORMS, u, turn_tag(c));
        break;
    case SW_TASK_SCALARS:
        reads_verdict(c);
        writes(c, SCALARS, 0, step_tag(task_step(c)));
        break;
    case SW_TASK_ADAM:
        follow_adam(c);
        break;
    case SW_TASK_LOAD:
        follow_load(c);
        break;
    case SW_TASK_SPILL:
    case SW_TASK_WRITE_KEPT:
    case SW_TASK_READ_KEPT:
    case SW_TASK_FETCH:
        follow_kept(c);
        break;
    default:
        follow_update(c);
        break;
    }
}

static int allowed(enum sw_lane waiter, enum sw_lane waited) {
    if (waiter == SW_LANE_H2D || waiter == SW_LANE_D2H) return 1;
    if (sw_lane_on_device(waiter)) return sw_lane_on_device(waited);
    return waited != SW_LANE_COMPUTE && waited != SW_LANE_COMM;
}

/* The clock of the task at hand: its lane's predecessor and every dependency, with all before them.
 */
static void take_clock(struct checker *c, const struct sw_turn *turn, const struct sw_turn *prev,
                       const int64_t next[SW_LANE_COUNT]) {
    const struct sw_task *t = c->task;
    struct clock *now = &c->now;
    const int64_t lane_index = next[t->lane];
    memset(now, 0, sizeof(*now));
    if (lane_index > 0)
        *now = c->clocks[0][turn->lane_tasks[t->lane][lane_index - 1]];
    else if (prev && prev->lane_count[t->lane] > 0)
        *now = c->clocks[1][prev->lane_tasks[t->lane][prev->lane_count[t->lane] - 1]];
    /* Turns before the last one have ended: on host lanes their tasks are over. */
    for (int l = 0; l < SW_LANE_COUNT && prev; l++) {
        const int64_t ended = c->base[l] - prev->lane_count[l];
        if (!sw_lane_on_device((enum sw_lane)l) && ended > now->over[l]) now->over[l] = ended;
    }
    for (uint32_t d = 0; d < t->dep_count; d++) {
        const struct sw_dep *dep = &t->deps[d];
        const struct sw_turn *in = dep->turn == 0 ? turn : prev;
        if (in && dep->index < 0) {
            const int64_t before = c->base[dep->lane] - (dep->turn ? in->lane_count[dep->lane] : 0);
            if (before > now->over[dep->lane]) now->over[dep->lane] = before;
            continue;
        }
        if (!allowed((enum sw_lane)t->lane, (enum sw_lane)dep->lane)) {
            fail(c, "waits across the border for lane %s", sw_lane_name((enum sw_lane)dep->lane));
            return;
        }
        if (!in || (uint32_t)dep->index >= in->lane_count[dep->lane] ||
            (dep->turn == 0 && dep->index >= next[dep->lane])) {
            fail(c, "waits for a task of lane %s that is not before it",
                 sw_lane_name((enum sw_lane)dep->lane));
            return;
        }
        const uint32_t task = in->lane_tasks[dep->lane][dep->index];
        const struct clock *other = &c->clocks[dep->turn == 0 ? 0 : 1][task];
        for (int l = 0; l < SW_LANE_COUNT; l++)
            if (other->over[l] > now->over[l]) now->over[l] = other->over[l];
    }
}

static void check_turn(struct checker *c, const struct sw_turn *turn, const struct sw_turn *prev) {
    int64_t next[SW_LANE_COUNT] = {0};
    for (uint32_t i = 0; i < turn->task_count && !c->failed; i++) {
        c->task = &turn->tasks[i];
        const int lane = c->task->lane;
        if (turn->lane_tasks[lane][next[lane]] != i) fail(c, "stands out of order in its lane");
        take_clock(c, turn, prev, next);
        c->index = c->base[lane] + next[lane] + 1;
        if (c->now.over[lane] < c->index - 1) c->now.over[lane] = c->index - 1;
        follow(c);
        c->clocks[0][i] = c->now;
        c->clocks[0][i].over[lane] = c->index; /* for those who wait for this task */
        next[lane]++;
    }
}

static int open_checker(struct checker *c, uint32_t tasks_max) {
    const struct sw_placement *p = c->shape->placement;
    const uint64_t units = p->order.unit_count, micros = p->micro_count, chunks = p->chunk_count;
    const uint64_t counts[RING] = {[STAGING] = 1,
                                   [BATCH] = micros,
                                   [WEIGHT] = chunks,
                                   [FULL] = units,
                                   [KEPT] = p->kept_groups * micros,
                                   [GROUP] = (p->checkpoint_every - 1) * micros,
                                   [NORM_INPUT] = micros,
                                   [HEAD_INPUT] = micros,
                                   [STATS] = micros,
                                   [HEAD_GRAD] = micros,
                                   [BETWEEN] = micros,
                                   [HEAD_ACC] = p->order.parts,
                                   [GRAD] = chunks,
                                   [NORMS] = units,
                                   [HOST_NORMS] = units,
                                   [LOSS] = micros,
                                   [HOST_LOSS] = 1,
                                   [VERDICT] = 4,
                                   [NORMED] = 4,
                                   [SCALARS] = 1,
                                   [STATE] = chunks,
                                   [COMMITTED] = 1};
    for (int f = 0; f < FAMILY_COUNT; f++)
        c->family_first[f + 1] =
            c->family_first[f] + (f < RING ? counts[f] : p->ring_slots[f - RING]);
    c->resources = calloc(c->family_first[FAMILY_COUNT], sizeof(*c->resources));
    c->clocks[0] = calloc(tasks_max + 1, sizeof(struct clock));
    c->clocks[1] = calloc(tasks_max + 1, sizeof(struct clock));
    if (!c->resources || !c->clocks[0] || !c->clocks[1]) return -ENOMEM;
    for (uint32_t i = 0; i < p->chunk_count; i++) { /* before the first step */
        find(c, WEIGHT, i)->tag = chunk_tag(i, 0);
        find(c, STATE, i)->tag = chunk_tag(i, 0);
    }
    find(c, COMMITTED, 0)->tag = step_tag(0);
    return 0;
}

static void check_end(struct checker *c, uint64_t steps) {
    c->task = NULL;
    for (uint32_t i = 0; i < c->shape->placement->chunk_count && !c->failed; i++) {
        const uint64_t want = chunk_tag(i, c->shape->placement->chunks[i].frozen ? 0 : steps);
        if (find(c, WEIGHT, i)->tag != want)
            fail(c, "chunk %u: the weights did not get every update", i);
        else if (find(c, STATE, i)->tag != want)
            fail(c, "chunk %u: the record did not get every update", i);
    }
    if (sw_turn_commits(c->shape->placement) && !c->failed &&
        find(c, COMMITTED, 0)->tag != step_tag(steps))
        fail(c, "the last update was not committed");
}

int sw_turn_check(const struct sw_turn_shape *shape, const struct sw_turn *const *turns, int count,
                  char *why, uint32_t why_size) {
    struct checker c = {.shape = shape, .why = why, .why_size = why_size};
    uint32_t tasks_max = 0;
    for (int t = 0; t < count; t++)
        if (turns[t]->task_count > tasks_max) tasks_max = turns[t]->task_count;
    int ret = open_checker(&c, tasks_max);
    uint64_t steps = 0;
    for (int t = 0; ret == 0 && t < count && !c.failed; t++) {
        const struct sw_turn *turn = turns[t];
        if (turn->kind == SW_TURN_TRAIN) steps++;
        /* Tasks of a drain are late: they belong to the step before the one that never began. */
        c.step = turn->kind == SW_TURN_TRAIN ? steps : steps + 1;
        c.turn_number = (uint64_t)t;
        c.is_eval = turn->kind == SW_TURN_EVAL;
        check_turn(&c, turn, t > 0 ? turns[t - 1] : NULL);
        struct clock *swap = c.clocks[0];
        c.clocks[0] = c.clocks[1];
        c.clocks[1] = swap;
        for (int l = 0; l < SW_LANE_COUNT; l++) c.base[l] += turn->lane_count[l];
        for (int r = 0; r < SW_RING_COUNT; r++) c.ring_base[r] += turn->ring_uses[r];
    }
    if (ret == 0 && !c.failed) check_end(&c, steps);
    free(c.resources);
    free(c.clocks[0]);
    free(c.clocks[1]);
    if (ret < 0) snprintf(why, why_size, "out of memory");
    return ret < 0 ? ret : c.failed ? -EINVAL : 0;
}
