/* engine/turn_build.c - builds turns.
 *
 * A turn is a row of visits: passages of all micro-batches through one unit. For each visit come
 * the loads that it needs, ahead of time as far as rings have room, then its compute tasks, then
 * what they give rise to: kept inputs that leave, gradients, updates. Each task names what it reads
 * and writes, and its waits follow (turn_track.h); what is left to say here is the order. */
#include "engine/turn.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "engine/turn_emit.h"

void sw_emit_append(struct sw_builder *b) {
    struct sw_turn *t = b->turn;
    if (t->task_count == t->task_capacity) {
        const uint32_t capacity = t->task_capacity ? t->task_capacity * 2 : 256;
        struct sw_task *grown = realloc(t->tasks, capacity * sizeof(*grown));
        if (!grown) {
            b->failed = 1;
            return;
        }
        t->tasks = grown;
        t->task_capacity = capacity;
    }
    sw_track_deps(b->track, &b->waits, &b->task);
    t->tasks[t->task_count++] = b->task;
    t->lane_count[b->task.lane]++;
}

/* ---- the batch ---- */

static void emit_batch(struct sw_builder *b) {
    begin(b, SW_TASK_FILL, SW_LANE_DATA);
    writes(b, SW_RES_STAGING, 0);
    sw_emit_append(b);
    for (uint32_t m = 0; m < b->p->micro_count; m++) {
        struct sw_task *task = begin(b, SW_TASK_BATCH, SW_LANE_H2D);
        task->micro = m;
        reads(b, SW_RES_STAGING, 0);
        writes(b, SW_RES_BATCH, m);
        /* This holds up nothing but frozen units at the bottom: the others' updates, which forward
         * needs, wait for the same. */
        if (b->shape->stops_together && b->turn->kind == SW_TURN_TRAIN)
            reads(b, SW_RES_VERDICT, verdict(b, 1));
        /* Plain serial order: a step starts when the one before is updated and on disk. */
        const enum sw_lane all[] = {SW_LANE_ADAM, SW_LANE_NVME_WRITE};
        for (int i = 0; i < 2 && b->shape->overlap == SW_OVERLAP_NONE; i++)
            b->waits.count[all[i]] = b->track->base[all[i]];
        sw_emit_append(b);
    }
}

/* ---- loads ---- */

/* Everything that forward needs of a unit: its late update, which leaves the weights in the window.
 */
static void emit_late_update(struct sw_builder *b, uint32_t unit, int32_t window) {
    assert(!b->updated[unit]);
    sw_emit_update(b, unit, 1, window);
    b->updated[unit] = 1;
    if (--b->late_left == 0) sw_emit_commit(b, 1);
}

static int is_due(const struct sw_builder *b, uint32_t unit) {
    return b->turn->has_late && is_late(b, unit) && !b->updated[unit];
}

static uint32_t fetched(const struct sw_builder *b, const struct sw_visit *v) {
    uint32_t count = 0;
    for (uint32_t m = 0; v->fetches && m < b->p->micro_count; m++)
        count +=
            sw_placement_kept(b->p, kept_index(b, group_of(b, v->unit), m)).tier != SW_TIER_DEVICE;
    return count;
}

/* The embedding's backward needs no weights of its own. */
static int needs_weights(const struct sw_builder *b, const struct sw_visit *v) {
    return v->kind != SW_TASK_BACKWARD || v->unit >= b->p->order.parts || v->with_head;
}

/* Whether a visit finds its weights in the window because the one before had the same. */
static int shares_window(const struct sw_builder *b, uint32_t i) {
    if (!streamed(b) || i == 0 || i >= b->visit_count) return 0;
    const struct sw_visit *v = &b->visits[i], *before = &b->visits[i - 1];
    return v->unit == before->unit && needs_weights(b, v) && needs_weights(b, before);
}

/* Whether the loads of a visit can be emitted now: their slots have no readers to come. */
static int has_room(const struct sw_builder *b, uint32_t i) {
    const struct sw_visit *v = &b->visits[i];
    if (streamed(b) && needs_weights(b, v) && !shares_window(b, i) &&
        sw_track_room(b->track, SW_RING_WINDOW) == 0)
        return 0;
    const uint32_t kept = fetched(b, v);
    return kept == 0 || (b->all_kept && sw_track_room(b->track, SW_RING_KEPT) >= kept);
}

static void load_weights(struct sw_builder *b, uint32_t i) {
    struct sw_visit *v = &b->visits[i];
    const uint32_t unit = v->unit;
    if (!streamed(b)) {
        if (is_due(b, unit)) emit_late_update(b, unit, NONE);
        sw_emit_gather(b, unit, NONE);
        return;
    }
    if (shares_window(b, i)) {
        v->window = b->visits[i - 1].window;
        return;
    }
    v->window = take(b, SW_RING_WINDOW);
    const int due = is_due(b, unit);
    if (due) emit_late_update(b, unit, v->window);
    for (uint32_t c = due ? b->p->unit_trained_end[unit] : b->p->unit_first_chunk[unit];
         c < b->p->unit_first_chunk[unit + 1]; c++)
        sw_emit_load(b, c, v->window, NONE);
    sw_emit_gather(b, unit, v->window);
}

static void emit_loads(struct sw_builder *b, uint32_t i) {
    struct sw_visit *v = &b->visits[i];
    if (v->loaded) return;
    v->loaded = 1;
    if (v->kind == SW_TASK_HEAD_WHOLE)
        for (uint32_t part = 0; part < b->p->order.parts; part++) {
            const uint32_t unit = sw_order_head(&b->p->order, part);
            if (is_due(b, unit)) emit_late_update(b, unit, NONE);
            sw_emit_gather(b, unit, NONE);
        }
    else if (needs_weights(b, v))
        load_weights(b, i);
    for (uint32_t m = 0; v->fetches && m < b->p->micro_count; m++) sw_emit_fetch(b, v->unit, m);
}

/* As far ahead as the window is wide, so that lanes that other tasks hold up have loaded before. */
static void emit_loads_ahead(struct sw_builder *b, uint32_t i) {
    uint32_t ahead =
        streamed(b) ? b->p->ring_slots[SW_RING_WINDOW] - 1 : b->p->ring_slots[SW_RING_KEPT] > 0;
    emit_loads(b, i);
    for (uint32_t next = i + 1; next < b->visit_count && ahead > 0; next++, ahead--) {
        if (!b->visits[next].loaded && !has_room(b, next)) return;
        emit_loads(b, next);
    }
}

/* ---- verdicts ---- */

static int has_early(const struct sw_builder *b) {
    for (uint32_t u = 0; u < b->p->order.unit_count; u++)
        if (b->shape->overlap == SW_OVERLAP_BACKWARD && trains(b, u) && !is_late(b, u)) return 1;
    return 0;
}

static void emit_loss(struct sw_builder *b) {
    begin(b, SW_TASK_LOSS, SW_LANE_D2H);
    for (uint32_t m = 0; m < b->p->micro_count; m++) reads(b, SW_RES_LOSS, m);
    writes(b, SW_RES_HOST_LOSS, 0);
    sw_emit_append(b);
    if (b->turn->kind != SW_TURN_EVAL && b->shape->overlap != SW_OVERLAP_BACKWARD) return;
    begin(b, SW_TASK_GATE, SW_LANE_CONTROL);
    reads(b, SW_RES_HOST_LOSS, 0);
    if (b->turn->kind != SW_TURN_EVAL) writes(b, SW_RES_VERDICT, verdict(b, 0));
    sw_emit_append(b);
    if (b->turn->kind != SW_TURN_EVAL && has_early(b)) sw_emit_scalars(b, 0);
}

static void emit_norm(struct sw_builder *b) {
    begin(b, SW_TASK_NORM, SW_LANE_CONTROL);
    for (uint32_t u = 0; u < b->p->order.unit_count; u++)
        if (trains(b, u)) reads(b, SW_RES_HOST_NORMS, u);
    reads(b, SW_RES_HOST_LOSS, 0);
    writes(b, SW_RES_NORMED, verdict(b, 0));
    /* Behind a gate it lets pass what is late, and changes nothing. */
    if (b->shape->overlap != SW_OVERLAP_BACKWARD) writes(b, SW_RES_VERDICT, verdict(b, 0));
    sw_emit_append(b);
}

/* ---- visits ---- */

static void visit(struct sw_builder *b, enum sw_task_kind kind, uint32_t unit) {
    b->visits[b->visit_count++] = (struct sw_visit){.kind = kind, .unit = unit, .window = NONE};
}

static void plan_forward(struct sw_builder *b, int head_too) {
    const struct sw_unit_order *o = &b->p->order;
    for (uint32_t u = 0; u <= sw_order_norm(o); u++) visit(b, SW_TASK_FORWARD, u);
    for (uint32_t part = 0; head_too && part < o->parts; part++)
        visit(b, SW_TASK_HEAD_FORWARD, sw_order_head(o, part));
}

/* The layers of a group again, up to its last one, whose own backward recomputes it; forward has
 * just left the inputs of the last group. */
static void plan_group(struct sw_builder *b, uint32_t group) {
    uint32_t layer, count, backward;
    sw_placement_group_layers(b->p, group, &layer, &count, &backward);
    const uint32_t first = b->p->order.parts + layer, end = layer + count;
    const int again = group + 1 < b->p->kept_groups && count > 1;
    if (backward == end) return;
    for (uint32_t i = 0; again && i + 1 < count; i++) {
        visit(b, SW_TASK_RECOMPUTE, first + i);
        b->visits[b->visit_count - 1].fetches = i == 0;
    }
    for (uint32_t l = end; l-- > backward;) visit(b, SW_TASK_BACKWARD, first + (l - layer));
    if (!again && backward == layer) b->visits[b->visit_count - 1].fetches = 1;
}

static void plan_backward(struct sw_builder *b) {
    const struct sw_unit_order *o = &b->p->order;
    if (b->p->head_whole) visit(b, SW_TASK_HEAD_WHOLE, sw_order_head(o, 0));
    const int dx = sw_placement_head_has_dx(b->p);
    for (uint32_t part = o->parts; !b->p->head_whole && part-- > 0;)
        if (dx || trains(b, sw_order_head(o, part)))
            visit(b, SW_TASK_HEAD_BACKWARD, sw_order_head(o, part));
    if (!dx) return;
    visit(b, SW_TASK_BACKWARD, sw_order_norm(o));
    for (uint32_t g = b->p->kept_groups; g-- > 0;) plan_group(b, g);
    for (uint32_t part = o->parts; part-- > 0;) {
        if (!trains(b, part)) continue;
        visit(b, SW_TASK_BACKWARD, part);
        b->visits[b->visit_count - 1].with_head = o->tied && !b->p->head_whole;
    }
}

static void emit_gradients_of(struct sw_builder *b, const struct sw_visit *v, int32_t acc) {
    const struct sw_unit_order *o = &b->p->order;
    if (v->kind == SW_TASK_HEAD_WHOLE) {
        for (uint32_t part = o->parts; !o->tied && part-- > 0;)
            if (trains(b, sw_order_head(o, part)))
                sw_emit_gradient(b, sw_order_head(o, part), NONE, part);
    } else if ((v->kind == SW_TASK_BACKWARD && trains(b, v->unit)) || acc != NONE) {
        sw_emit_gradient(b, v->unit, acc, v->unit);
    }
    if (acc != NONE) release(b, SW_RING_ACC, acc);
}

/* Whether a visit's gradient goes into an accumulator of the ring. */
static int accumulates(const struct sw_builder *b, const struct sw_visit *v) {
    const struct sw_unit_order *o = &b->p->order;
    if (!trains(b, v->unit)) return 0;
    if (v->kind == SW_TASK_HEAD_BACKWARD) return !o->tied;
    if (v->kind != SW_TASK_BACKWARD) return 0;
    return v->unit >= o->parts || !o->tied || v->with_head;
}

static void emit_visit(struct sw_builder *b, uint32_t i) {
    const struct sw_visit *v = &b->visits[i];
    const int32_t acc = accumulates(b, v) ? take(b, SW_RING_ACC) : NONE;
    switch (v->kind) {
    case SW_TASK_HEAD_FORWARD:
        sw_emit_head_forward(b, v);
        break;
    case SW_TASK_HEAD_BACKWARD:
        sw_emit_head_backward(b, v, acc);
        break;
    case SW_TASK_BACKWARD:
        sw_emit_backward(b, v, acc);
        break;
    default:
        sw_emit_forward(b, v);
        break;
    }
    if (v->window != NONE && !shares_window(b, i + 1)) release(b, SW_RING_WINDOW, v->window);
    if (v->kind == SW_TASK_FORWARD && v->unit == sw_order_norm(&b->p->order)) b->all_kept = 1;
    emit_gradients_of(b, v, acc);
}

/* The loss is known after the head's last forward. */
static int concludes_loss(const struct sw_builder *b, const struct sw_visit *v) {
    const uint32_t last = sw_order_head(&b->p->order, b->p->order.parts - 1);
    return v->kind == SW_TASK_HEAD_WHOLE || (v->kind == SW_TASK_HEAD_FORWARD && v->unit == last);
}

static void emit_visits(struct sw_builder *b) {
    for (uint32_t i = 0; i < b->visit_count; i++) {
        emit_loads_ahead(b, i);
        if (b->visits[i].kind == SW_TASK_HEAD_WHOLE) {
            /* Its gradients follow the gate. */
            sw_emit_head_whole(b, &b->visits[i]);
            emit_loss(b);
            emit_gradients_of(b, &b->visits[i], NONE);
            continue;
        }
        emit_visit(b, i);
        if (concludes_loss(b, &b->visits[i])) emit_loss(b);
    }
}

/* ---- whole turns ---- */

static void build_train(struct sw_builder *b) {
    emit_batch(b);
    if (b->turn->has_late) sw_emit_scalars(b, 1);
    plan_forward(b, !b->p->head_whole);
    plan_backward(b);
    emit_visits(b);
    sw_emit_deferred(b, NONE);
    emit_norm(b);
    if (b->shape->overlap == SW_OVERLAP_NONE) {
        sw_emit_scalars(b, 0);
        for (uint32_t u = 0; u < b->p->order.unit_count; u++) sw_emit_update(b, u, 0, NONE);
    }
    if (!sw_turn_shape_is_late(b->shape)) sw_emit_commit(b, 0);
}

static void build_drain(struct sw_builder *b) {
    sw_emit_scalars(b, 1);
    for (uint32_t u = 0; u < b->p->order.unit_count; u++)
        if (is_late(b, u)) emit_late_update(b, u, NONE);
}

static void build_eval(struct sw_builder *b) {
    emit_batch(b);
    plan_forward(b, 1);
    emit_visits(b);
}

static void index_lanes(struct sw_builder *b) {
    struct sw_turn *t = b->turn;
    uint32_t next[SW_LANE_COUNT] = {0};
    for (int l = 0; l < SW_LANE_COUNT; l++) {
        t->lane_tasks[l] = malloc((t->lane_count[l] ? t->lane_count[l] : 1) * sizeof(uint32_t));
        if (!t->lane_tasks[l]) b->failed = 1;
    }
    struct sw_task *exact = realloc(t->tasks, (t->task_count + 1) * sizeof(*exact));
    if (exact) t->tasks = exact;
    if (b->failed) return;
    for (uint32_t i = 0; i < t->task_count; i++)
        t->lane_tasks[t->tasks[i].lane][next[t->tasks[i].lane]++] = i;
}

static int open_builder(struct sw_builder *b, const struct sw_turn *prev) {
    const uint32_t units = b->p->order.unit_count;
    const uint64_t kept = (uint64_t)b->p->kept_groups * b->p->micro_count;
    b->track = sw_track_open(b->p, prev);
    b->visits = calloc(4 * (uint64_t)units + 4, sizeof(*b->visits));
    b->updated = calloc(units, sizeof(*b->updated));
    b->gathered = calloc(units, sizeof(*b->gathered));
    b->kept_use = malloc((kept + 1) * sizeof(*b->kept_use));
    if (!b->track || !b->visits || !b->updated || !b->gathered || !b->kept_use) return -ENOMEM;
    for (uint64_t i = 0; i < kept; i++) b->kept_use[i] = NONE;
    for (uint32_t u = 0; u < units; u++) b->late_left += (uint32_t)is_late(b, u);
    return 0;
}

int sw_turn_build(struct sw_turn *turn, const struct sw_turn_shape *shape, enum sw_turn_kind kind,
                  int has_late, const struct sw_turn *prev) {
    assert(shape->overlap != SW_OVERLAP_AUTO);
    assert(shape->turning_point + shape->late_top <= shape->placement->order.unit_count);
    assert(shape->late_top == 0 || shape->overlap == SW_OVERLAP_BACKWARD);
    *turn = (struct sw_turn){.kind = kind, .has_late = has_late};
    struct sw_builder b = {
        .turn = turn, .shape = shape, .p = shape->placement, .deferred_unit = NONE};
    b.failed = open_builder(&b, prev) < 0;
    if (!b.failed) {
        if (kind == SW_TURN_TRAIN)
            build_train(&b);
        else if (kind == SW_TURN_DRAIN)
            build_drain(&b);
        else
            build_eval(&b);
    }
    if (!b.failed) index_lanes(&b);
    turn->end = b.track;
    if (turn->end) memcpy(turn->ring_uses, turn->end->ring_uses, sizeof(turn->ring_uses));
    free(b.visits);
    free(b.updated);
    free(b.gathered);
    free(b.kept_use);
    if (!b.failed) return 0;
    sw_turn_free(turn);
    return -ENOMEM;
}
