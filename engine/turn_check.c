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

enum family {
    STAGING,
    BATCH,
    WEIGHT,
    KEPT,
    GRAD_X,
    ACC,
    GRAD_DEVICE,
    NORM_DEVICE,
    GRAD_HOST,
    NORM_HOST,
    LOSS_DEVICE,
    LOSS_HOST,
    VERDICT,
    SCALARS,
    SLOT,
    EMIT,
    STATE,
    COMMITTED,
    FAMILY_COUNT
};

static const char *const family_names[] = {"staging",
                                           "batch",
                                           "weights of chunk",
                                           "kept input",
                                           "gradient between units",
                                           "accumulator",
                                           "rounded gradient",
                                           "block norms",
                                           "host gradient",
                                           "host norms",
                                           "loss sums",
                                           "host loss sums",
                                           "verdict",
                                           "scalars",
                                           "chunk slot",
                                           "emit slot",
                                           "record",
                                           "commit"};

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
    uint64_t slot_base, emit_base;
    uint64_t step; /* of the turn at hand; the last one trained for drains and evaluations */
    uint64_t turn_number;
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

static void reads(struct checker *c, enum family f, uint64_t i, uint64_t tag) {
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

/* Tags. Zero is "never filled", so every other tag is at least 1. */
static uint64_t turn_tag(const struct checker *c) {
    return c->turn_number + 1;
}
static uint64_t unit_tag(const struct checker *c, uint64_t unit) {
    return (turn_tag(c) << 24) | (unit + 1);
}
static uint64_t micro_tag(const struct checker *c, uint64_t unit, uint64_t micro) {
    return (unit_tag(c, unit) << 16) | (micro + 1);
}
static uint64_t chunk_tag(uint64_t chunk, uint64_t step) {
    return ((chunk + 1) << 24) | (step + 1);
}
static uint64_t step_tag(uint64_t step) {
    return step + 1;
}

static uint64_t task_step(const struct checker *c) {
    return c->step - c->task->late;
}

static void reads_weights(struct checker *c, uint32_t unit) {
    const struct sw_placement *p = c->shape->placement;
    for (uint32_t i = p->unit_first_chunk[unit]; i < p->unit_first_chunk[unit + 1]; i++)
        reads(c, WEIGHT, i, step_tag(c->step - 1));
}

static uint64_t acc_of(const struct checker *c, uint32_t unit) {
    if (c->shape->tied && unit == 0) return SW_ACC_SLOTS;
    return (c->shape->unit_count - 1 - unit) % SW_ACC_SLOTS;
}

static uint64_t grad_slot_of(const struct checker *c, uint32_t unit) {
    const struct sw_placement *p = c->shape->placement;
    if (p->grad_resident_bytes) return unit;
    return (c->shape->unit_count - 1 - unit) % SW_GRAD_SLOTS;
}

static void accumulates(struct checker *c, uint32_t unit, uint64_t acc) {
    const uint32_t m = c->task->micro, micros = c->shape->micro_count;
    const int shared = c->shape->tied && acc == SW_ACC_SLOTS;
    if (m > 0)
        reads(c, ACC, acc, micro_tag(c, unit, m - 1));
    else if (shared && unit == 0)
        reads(c, ACC, acc, micro_tag(c, c->shape->unit_count - 1, micros - 1));
    writes(c, ACC, acc, micro_tag(c, unit, m));
}

static void follow_backward(struct checker *c) {
    const uint32_t u = c->task->unit, m = c->task->micro, head = c->shape->unit_count - 1;
    if (u == 0 || u == head) reads(c, BATCH, m, turn_tag(c));
    if (u > 0) reads(c, KEPT, u * c->shape->micro_count + m, turn_tag(c));
    if (u > 0) reads_weights(c, u);
    if (u == head && c->shape->tied) reads_weights(c, 0);
    if (u < head) reads(c, GRAD_X, m, unit_tag(c, u + 1));
    if (u > 0) writes(c, GRAD_X, m, unit_tag(c, u));
    accumulates(c, u, acc_of(c, u));
    if (u == head && c->shape->tied) accumulates(c, u, SW_ACC_SLOTS);
    if (u == head) writes(c, LOSS_DEVICE, m, turn_tag(c));
}

static void follow_update(struct checker *c) {
    const struct sw_task *t = c->task;
    const struct sw_placement *p = c->shape->placement;
    const uint64_t step = task_step(c), grad_turn = turn_tag(c) - t->late;
    const uint64_t slot = t->slot < 0 ? 0 : (c->slot_base + (uint64_t)t->slot) % p->chunk_slots;
    const uint64_t emit = t->emit < 0 ? 0 : (c->emit_base + (uint64_t)t->emit) % p->emit_slots;
    const uint64_t before = chunk_tag(t->chunk, step - 1), after = chunk_tag(t->chunk, step);
    switch (t->kind) {
    case SW_TASK_READ:
        reads(c, STATE, t->chunk, before);
        writes(c, SLOT, slot, before);
        break;
    case SW_TASK_ADAM:
        reads(c, VERDICT, step % 4, step_tag(step));
        reads(c, GRAD_HOST, t->unit, grad_turn);
        if (t->slot >= 0) {
            reads(c, SLOT, slot, before);
            writes(c, SLOT, slot, after);
        } else {
            reads(c, STATE, t->chunk, before);
            writes(c, STATE, t->chunk, after);
        }
        writes(c, EMIT, emit, after);
        break;
    case SW_TASK_DEVICE_ADAM:
        reads(c, SCALARS, 0, step_tag(step));
        reads(c, GRAD_DEVICE, grad_slot_of(c, t->unit), (grad_turn << 24) | (t->unit + 1));
        reads(c, STATE, t->chunk, before);
        writes(c, STATE, t->chunk, after);
        writes(c, WEIGHT, t->chunk, step_tag(step));
        break;
    case SW_TASK_WRITE:
        reads(c, SLOT, slot, after);
        reads(c, COMMITTED, 0, step_tag(step - 1)); /* so this home is not the committed one */
        writes(c, STATE, t->chunk, after);
        break;
    case SW_TASK_COMMIT:
        for (uint32_t i = 0; i < p->chunk_count; i++)
            if (p->chunks[i].tier == SW_TIER_NVME) reads(c, STATE, i, chunk_tag(i, step));
        writes(c, COMMITTED, 0, step_tag(step));
        break;
    default:
        reads(c, EMIT, emit, after);
        writes(c, WEIGHT, t->chunk, step_tag(step));
        break;
    }
}

static void follow(struct checker *c) {
    const struct sw_task *t = c->task;
    const uint32_t u = t->unit, m = t->micro, micros = c->shape->micro_count;
    switch (t->kind) {
    case SW_TASK_FILL:
        writes(c, STAGING, 0, turn_tag(c));
        break;
    case SW_TASK_BATCH:
        reads(c, STAGING, 0, turn_tag(c));
        writes(c, BATCH, m, turn_tag(c));
        break;
    case SW_TASK_FORWARD:
        if (u == 0)
            reads(c, BATCH, m, turn_tag(c));
        else
            reads(c, KEPT, u * micros + m, turn_tag(c));
        reads_weights(c, u);
        writes(c, KEPT, (u + 1) * micros + m, turn_tag(c));
        break;
    case SW_TASK_BACKWARD:
        follow_backward(c);
        break;
    case SW_TASK_EVAL_HEAD:
        reads(c, BATCH, m, turn_tag(c));
        reads(c, KEPT, u * micros + m, turn_tag(c));
        reads_weights(c, u);
        if (c->shape->tied) reads_weights(c, 0);
        writes(c, LOSS_DEVICE, m, turn_tag(c));
        break;
    case SW_TASK_LOSS:
        for (uint32_t i = 0; i < micros; i++) reads(c, LOSS_DEVICE, i, turn_tag(c));
        writes(c, LOSS_HOST, 0, turn_tag(c));
        break;
    case SW_TASK_GATE:
        reads(c, LOSS_HOST, 0, turn_tag(c));
        writes(c, VERDICT, c->step % 4, step_tag(c->step));
        break;
    case SW_TASK_REDUCE:
        reads(c, ACC, acc_of(c, u), micro_tag(c, u, micros - 1));
        writes(c, GRAD_DEVICE, grad_slot_of(c, u), unit_tag(c, u));
        writes(c, NORM_DEVICE, u, unit_tag(c, u));
        break;
    case SW_TASK_GRAD:
        reads(c, GRAD_DEVICE, grad_slot_of(c, u), unit_tag(c, u));
        reads(c, NORM_DEVICE, u, unit_tag(c, u));
        writes(c, GRAD_HOST, u, turn_tag(c));
        writes(c, NORM_HOST, u, turn_tag(c));
        break;
    case SW_TASK_NORM:
        for (uint32_t i = 0; i < c->shape->unit_count; i++) reads(c, NORM_HOST, i, turn_tag(c));
        reads(c, LOSS_HOST, 0, turn_tag(c));
        /* Behind a gate the norm is reported, and decides only what is late. */
        if (c->shape->overlap != SW_OVERLAP_BACKWARD)
            writes(c, VERDICT, c->step % 4, step_tag(c->step));
        break;
    case SW_TASK_SCALARS:
        reads(c, VERDICT, task_step(c) % 4, step_tag(task_step(c)));
        writes(c, SCALARS, 0, step_tag(task_step(c)));
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
    for (uint32_t d = 0; d < t->dep_count; d++) {
        const struct sw_dep *dep = &t->deps[d];
        const struct sw_turn *in = dep->turn == 0 ? turn : prev;
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
    const struct sw_turn_shape *s = c->shape;
    const struct sw_placement *p = s->placement;
    const uint64_t units = s->unit_count, micros = s->micro_count, chunks = p->chunk_count;
    const uint64_t counts[FAMILY_COUNT] = {[STAGING] = 1,
                                           [BATCH] = micros,
                                           [WEIGHT] = chunks,
                                           [KEPT] = (units + 1) * micros,
                                           [GRAD_X] = micros,
                                           [ACC] = SW_ACC_SLOTS + 1,
                                           [GRAD_DEVICE] = units + SW_GRAD_SLOTS,
                                           [NORM_DEVICE] = units,
                                           [GRAD_HOST] = units,
                                           [NORM_HOST] = units,
                                           [LOSS_DEVICE] = micros,
                                           [LOSS_HOST] = 1,
                                           [VERDICT] = 4,
                                           [SCALARS] = 1,
                                           [SLOT] = p->chunk_slots,
                                           [EMIT] = p->emit_slots,
                                           [STATE] = chunks,
                                           [COMMITTED] = 1};
    for (int f = 0; f < FAMILY_COUNT; f++) c->family_first[f + 1] = c->family_first[f] + counts[f];
    c->resources = calloc(c->family_first[FAMILY_COUNT], sizeof(*c->resources));
    c->clocks[0] = calloc(tasks_max + 1, sizeof(struct clock));
    c->clocks[1] = calloc(tasks_max + 1, sizeof(struct clock));
    if (!c->resources || !c->clocks[0] || !c->clocks[1]) return -ENOMEM;
    for (uint32_t i = 0; i < p->chunk_count; i++) { /* before the first step */
        find(c, WEIGHT, i)->tag = step_tag(0);
        find(c, STATE, i)->tag = chunk_tag(i, 0);
    }
    find(c, COMMITTED, 0)->tag = step_tag(0);
    return 0;
}

static void check_end(struct checker *c, uint64_t steps) {
    c->task = NULL;
    for (uint32_t i = 0; i < c->shape->placement->chunk_count && !c->failed; i++) {
        if (find(c, WEIGHT, i)->tag != step_tag(steps))
            fail(c, "chunk %u: the weights did not get every update", i);
        else if (find(c, STATE, i)->tag != chunk_tag(i, steps))
            fail(c, "chunk %u: the record did not get every update", i);
    }
    if (c->shape->placement->state_bytes[SW_TIER_NVME] && !c->failed &&
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
        check_turn(&c, turn, t > 0 ? turns[t - 1] : NULL);
        struct clock *swap = c.clocks[0];
        c.clocks[0] = c.clocks[1];
        c.clocks[1] = swap;
        for (int l = 0; l < SW_LANE_COUNT; l++) c.base[l] += turn->lane_count[l];
        c.slot_base += turn->slot_uses;
        c.emit_base += turn->emit_uses;
    }
    if (ret == 0 && !c.failed) check_end(&c, steps);
    free(c.resources);
    free(c.clocks[0]);
    free(c.clocks[1]);
    if (ret < 0) snprintf(why, why_size, "out of memory");
    return ret < 0 ? ret : c.failed ? -EINVAL : 0;
}
