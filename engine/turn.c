/* engine/turn.c - builds turns. The dependency rules stand in the emit_* functions, one per kind of
 * task, next to the reason for each; everything else is bookkeeping. */
#include "engine/turn.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct builder {
    struct sw_turn *turn;
    const struct sw_turn_shape *shape;
    const struct sw_turn *prev;
    int failed;
};

const char *sw_lane_name(enum sw_lane lane) {
    static const char *const names[] = {"compute",   "h2d",        "d2h",     "comm",   "adam",
                                        "nvme_read", "nvme_write", "control", "commit", "data"};
    return names[lane];
}

const char *sw_task_name(enum sw_task_kind kind) {
    static const char *const names[] = {"fill",    "batch", "forward", "backward",    "eval",
                                        "loss",    "gate",  "reduce",  "grad",        "norm",
                                        "scalars", "read",  "adam",    "device adam", "write",
                                        "upload",  "commit"};
    return names[kind];
}

int sw_turn_shape_is_late(const struct sw_turn_shape *shape) {
    return shape->turning_point > 0 || shape->late_top > 0;
}

/* Units from one end of the model that together hold at most this share of the elements. */
static uint32_t units_within(const struct sw_turn_shape *shape, const uint64_t *unit_elements,
                             double share, int from_top) {
    const uint32_t units = shape->unit_count;
    double total = 0, sum = 0;
    for (uint32_t u = 0; u < units; u++) total += (double)unit_elements[u];
    for (uint32_t n = 0; n < units; n++) {
        sum += (double)unit_elements[from_top ? units - 1 - n : n];
        if (sum > total * share) return n;
    }
    return units;
}

#define LATE_SHARE     0.29
#define LATE_TOP_SHARE 0.20

void sw_turn_shape_pick_late(struct sw_turn_shape *shape, const uint64_t *unit_elements) {
    const int backward = shape->overlap == SW_OVERLAP_BACKWARD;
    shape->turning_point = backward ? units_within(shape, unit_elements, LATE_SHARE, 0)
                           : shape->overlap == SW_OVERLAP_FORWARD ? shape->unit_count
                                                                  : 0;
    shape->late_top = backward ? units_within(shape, unit_elements, LATE_TOP_SHARE, 1) : 0;
}

static int is_late(const struct builder *b, uint32_t unit) {
    return unit < b->shape->turning_point || unit >= b->shape->unit_count - b->shape->late_top;
}

/* Of a shape that has late units. */
static uint32_t last_late(const struct builder *b) {
    return b->shape->late_top ? b->shape->unit_count - 1 : b->shape->turning_point - 1;
}

static int has_early(const struct builder *b) {
    return b->shape->turning_point + b->shape->late_top < b->shape->unit_count;
}

/* Adds a dependency; -1 is "no such task". Per lane only the latest one matters, as lanes are in
 * order, and a task need not wait for its own lane. */
static void wait_for(struct sw_task *task, enum sw_lane lane, int turn, int32_t index) {
    if (index < 0 || lane == task->lane) return;
    for (uint32_t i = 0; i < task->dep_count; i++) {
        struct sw_dep *dep = &task->deps[i];
        if (dep->lane != lane) continue;
        if (turn > dep->turn || (turn == dep->turn && index > dep->index))
            *dep = (struct sw_dep){.index = index, .turn = (int8_t)turn, .lane = (uint8_t)lane};
        return;
    }
    assert(task->dep_count < SW_DEPS_MAX);
    task->deps[task->dep_count++] =
        (struct sw_dep){.index = index, .turn = (int8_t)turn, .lane = (uint8_t)lane};
}

static void wait_here(struct sw_task *task, enum sw_lane lane, int32_t index) {
    wait_for(task, lane, 0, index);
}

static void wait_before(struct sw_task *task, enum sw_lane lane, int32_t index) {
    wait_for(task, lane, -1, index);
}

static struct sw_task *new_task(enum sw_task_kind kind, enum sw_lane lane) {
    static _Thread_local struct sw_task task;
    task = (struct sw_task){.kind = (uint8_t)kind, .lane = (uint8_t)lane, .slot = -1, .emit = -1};
    return &task;
}

/* Appends the task; returns its index in its lane. */
static int32_t append(struct builder *b, const struct sw_task *task) {
    struct sw_turn *t = b->turn;
    if (t->task_count == t->task_capacity) {
        const uint32_t capacity = t->task_capacity ? t->task_capacity * 2 : 256;
        struct sw_task *grown = realloc(t->tasks, capacity * sizeof(*grown));
        if (!grown) {
            b->failed = 1;
            return 0;
        }
        t->tasks = grown;
        t->task_capacity = capacity;
    }
    t->tasks[t->task_count++] = *task;
    return (int32_t)t->lane_count[task->lane]++;
}

/* ---- the batch ---- */

static void emit_batch(struct builder *b) {
    struct sw_turn_marks *m = &b->turn->marks;
    struct sw_task *fill = new_task(SW_TASK_FILL, SW_LANE_DATA);
    if (b->prev) wait_before(fill, SW_LANE_H2D, b->prev->marks.batch_last); /* staging was read */
    m->fill = append(b, fill);
    for (uint32_t i = 0; i < b->shape->micro_count; i++) {
        struct sw_task *batch = new_task(SW_TASK_BATCH, SW_LANE_H2D);
        batch->micro = i;
        wait_here(batch, SW_LANE_DATA, m->fill);
        if (b->prev) {
            /* The embedding's backward is the last reader of the device's batch. */
            wait_before(batch, SW_LANE_COMPUTE, b->prev->marks.backward[0]);
            /* Plain serial order: a step starts when the one before is on disk. */
            if (b->shape->overlap == SW_OVERLAP_NONE)
                wait_before(batch, SW_LANE_NVME_WRITE, b->prev->marks.write_last);
        }
        m->batch_last = append(b, batch);
    }
}

/* ---- the update of one chunk ---- */

static void emit_read(struct builder *b, uint32_t chunk, int32_t position) {
    const int32_t slots = (int32_t)b->shape->placement->chunk_slots;
    struct sw_turn_marks *m = &b->turn->marks;
    struct sw_task *task = new_task(SW_TASK_READ, SW_LANE_NVME_READ);
    task->unit = b->shape->placement->chunks[chunk].unit;
    task->late = (uint8_t)is_late(b, task->unit);
    task->chunk = chunk;
    task->slot = position;
    if (position >= slots) wait_here(task, SW_LANE_NVME_WRITE, m->write_of_slot[position - slots]);
    if (b->prev) {
        const int32_t before = (int32_t)b->prev->slot_uses + position - slots;
        if (position < slots && before >= 0) /* the write that last used this slot */
            wait_before(task, SW_LANE_NVME_WRITE, b->prev->marks.write_of_slot[before]);
        wait_before(task, SW_LANE_NVME_WRITE, b->prev->marks.write_of_chunk[chunk]);
    }
    if (b->shape->overlap == SW_OVERLAP_NONE) wait_here(task, SW_LANE_CONTROL, m->norm);
    append(b, task);
}

/* What every Adam task waits for: permission (the norm of its step, or the loss gate) and the
 * gradient. */
static void wait_for_gradient(struct builder *b, struct sw_task *task) {
    const struct sw_turn_marks *m = &b->turn->marks;
    if (task->late) {
        if (b->prev) wait_before(task, SW_LANE_CONTROL, b->prev->marks.norm);
    } else if (b->shape->overlap == SW_OVERLAP_BACKWARD) {
        wait_here(task, SW_LANE_CONTROL, m->gate);
        wait_here(task, SW_LANE_D2H, m->grad[task->unit]);
    } else {
        wait_here(task, SW_LANE_CONTROL, m->norm);
    }
}

static void emit_host_chunk(struct builder *b, uint32_t chunk) {
    struct sw_turn *t = b->turn;
    struct sw_turn_marks *m = &t->marks;
    const struct sw_placement *p = b->shape->placement;
    const uint32_t unit = p->chunks[chunk].unit;
    const int late = is_late(b, unit);
    const int nvme = p->chunks[chunk].tier == SW_TIER_NVME;
    const int32_t slot = nvme ? (int32_t)t->slot_uses++ : -1;
    const int32_t emit = (int32_t)t->emit_uses++;
    const int32_t emit_slots = (int32_t)p->emit_slots;
    if (nvme) emit_read(b, chunk, slot);

    struct sw_task *adam = new_task(SW_TASK_ADAM, SW_LANE_ADAM);
    adam->unit = unit;
    adam->late = (uint8_t)late;
    adam->chunk = chunk;
    adam->slot = slot;
    adam->emit = emit;
    if (nvme) wait_here(adam, SW_LANE_NVME_READ, (int32_t)t->lane_count[SW_LANE_NVME_READ] - 1);
    wait_for_gradient(b, adam);
    if (emit >= emit_slots)
        wait_here(adam, SW_LANE_H2D, m->upload_of_emit[emit - emit_slots]);
    else if (b->prev && (int32_t)b->prev->emit_uses + emit - emit_slots >= 0)
        wait_before(adam, SW_LANE_H2D,
                    b->prev->marks.upload_of_emit[b->prev->emit_uses + emit - emit_slots]);
    const int32_t adam_index = append(b, adam);
    m->adam[unit] = adam_index;

    if (nvme) {
        struct sw_task *write = new_task(SW_TASK_WRITE, SW_LANE_NVME_WRITE);
        write->unit = unit;
        write->late = (uint8_t)late;
        write->chunk = chunk;
        write->slot = slot;
        wait_here(write, SW_LANE_ADAM, adam_index);
        /* Until the update before is durable, the home that this goes to is the committed one. */
        if (m->commit >= 0)
            wait_here(write, SW_LANE_COMMIT, m->commit);
        else if (b->prev)
            wait_before(write, SW_LANE_COMMIT, b->prev->marks.commit);
        const int32_t index = append(b, write);
        m->write_of_slot[slot] = index;
        m->write_of_chunk[chunk] = index;
        m->write_last = index;
    }

    struct sw_task *upload = new_task(SW_TASK_UPLOAD, SW_LANE_H2D);
    upload->unit = unit;
    upload->late = (uint8_t)late;
    upload->chunk = chunk;
    upload->emit = emit;
    wait_here(upload, SW_LANE_ADAM, adam_index);
    /* The last backward of the step that made the gradient still read the old weights. */
    if (!late)
        wait_here(upload, SW_LANE_COMPUTE, m->backward[unit]);
    else if (b->prev)
        wait_before(upload, SW_LANE_COMPUTE, b->prev->marks.backward[unit]);
    m->upload[unit] = append(b, upload);
    m->upload_of_emit[emit] = m->upload[unit];
}

static void emit_device_chunk(struct builder *b, uint32_t chunk) {
    const struct sw_turn_marks *m = &b->turn->marks;
    struct sw_task *adam = new_task(SW_TASK_DEVICE_ADAM, SW_LANE_COMPUTE);
    adam->unit = b->shape->placement->chunks[chunk].unit;
    adam->late = (uint8_t)is_late(b, adam->unit);
    adam->chunk = chunk;
    /* The scalars follow the norm or the gate, and so carry its permission to the device. */
    wait_here(adam, SW_LANE_H2D, m->scalars);
    if (adam->late) {
        if (b->prev) wait_before(adam, SW_LANE_COMM, b->prev->marks.reduce[adam->unit]);
    } else {
        wait_here(adam, SW_LANE_COMM, m->reduce[adam->unit]);
    }
    append(b, adam);
}

static void emit_update(struct builder *b, uint32_t unit) {
    const struct sw_placement *p = b->shape->placement;
    for (uint32_t c = p->unit_first_chunk[unit]; c < p->unit_first_chunk[unit + 1]; c++) {
        if (p->chunks[c].tier == SW_TIER_DEVICE)
            emit_device_chunk(b, c);
        else
            emit_host_chunk(b, c);
    }
}

/* `late` scalars belong to the step before. */
static void emit_scalars(struct builder *b, int late) {
    const struct sw_placement *p = b->shape->placement;
    int any = 0;
    for (uint32_t c = 0; c < p->chunk_count; c++) any |= p->chunks[c].tier == SW_TIER_DEVICE;
    if (!any) return;
    struct sw_turn_marks *m = &b->turn->marks;
    struct sw_task *task = new_task(SW_TASK_SCALARS, SW_LANE_H2D);
    task->late = (uint8_t)late;
    if (late) {
        if (b->prev) {
            wait_before(task, SW_LANE_CONTROL, b->prev->marks.norm);
            /* The last device Adam of that turn has read the scalars that this replaces. */
            wait_before(task, SW_LANE_COMPUTE, (int32_t)b->prev->lane_count[SW_LANE_COMPUTE] - 1);
        }
    } else {
        /* Late device Adams of this turn are over before any loss exists: compute is in order. */
        wait_here(task, SW_LANE_CONTROL,
                  b->shape->overlap == SW_OVERLAP_BACKWARD ? m->gate : m->norm);
    }
    m->scalars = append(b, task);
}

/* After the last write of a step's update. `late`: the step before this turn's. */
static void emit_commit(struct builder *b, int late) {
    const struct sw_placement *p = b->shape->placement;
    struct sw_turn_marks *m = &b->turn->marks;
    if (p->state_bytes[SW_TIER_NVME] == 0) return;
    struct sw_task *task = new_task(SW_TASK_COMMIT, SW_LANE_COMMIT);
    task->late = (uint8_t)late;
    if (m->write_last >= 0)
        wait_here(task, SW_LANE_NVME_WRITE, m->write_last);
    else if (b->prev)
        wait_before(task, SW_LANE_NVME_WRITE, b->prev->marks.write_last);
    m->commit = append(b, task);
}

/* ---- compute ---- */

static void emit_compute(struct builder *b, enum sw_task_kind kind, uint32_t unit) {
    struct sw_turn_marks *m = &b->turn->marks;
    const uint32_t micros = b->shape->micro_count, head = b->shape->unit_count - 1;
    for (uint32_t i = 0; i < micros; i++) {
        struct sw_task *task = new_task(kind, SW_LANE_COMPUTE);
        task->unit = unit;
        task->micro = i;
        if (unit == 0) /* tokens; the head's targets came with them */
            wait_here(task, SW_LANE_H2D, m->batch_last - (int32_t)(micros - 1 - i));
        if (m->upload[unit] >= 0 && is_late(b, unit))
            wait_here(task, SW_LANE_H2D, m->upload[unit]);
        else if (b->prev)
            wait_before(task, SW_LANE_H2D, b->prev->marks.upload[unit]);
        if (unit == head && b->prev) /* the host has taken the last loss sums */
            wait_before(task, SW_LANE_D2H, b->prev->marks.loss);
        if (kind == SW_TASK_BACKWARD && i == 0 && !(b->shape->tied && unit == 0)) {
            /* The accumulator's last user must have been reduced. */
            const uint32_t order = head - unit;
            const uint32_t units = b->shape->unit_count - (b->shape->tied ? 1 : 0);
            if (order >= SW_ACC_SLOTS) {
                wait_here(task, SW_LANE_COMM, m->reduce[unit + SW_ACC_SLOTS]);
            } else if (b->prev) {
                for (uint32_t o = units; o-- > 0;)
                    if (o % SW_ACC_SLOTS == order) {
                        wait_before(task, SW_LANE_COMM, b->prev->marks.reduce[head - o]);
                        break;
                    }
            }
        }
        if (kind == SW_TASK_BACKWARD && unit == head && b->shape->tied && b->prev)
            wait_before(task, SW_LANE_COMM, b->prev->marks.reduce[0]); /* its own accumulator */
        const int32_t index = append(b, task);
        if (kind == SW_TASK_BACKWARD) m->backward[unit] = index;
    }
}

static void emit_loss(struct builder *b) {
    struct sw_turn_marks *m = &b->turn->marks;
    struct sw_task *loss = new_task(SW_TASK_LOSS, SW_LANE_D2H);
    loss->unit = b->shape->unit_count - 1;
    wait_here(loss, SW_LANE_COMPUTE, (int32_t)b->turn->lane_count[SW_LANE_COMPUTE] - 1);
    if (b->prev) { /* the host's copy was read */
        wait_before(loss, SW_LANE_CONTROL, b->prev->marks.norm);
        wait_before(loss, SW_LANE_CONTROL, b->prev->marks.gate);
    }
    m->loss = append(b, loss);
    if (b->turn->kind != SW_TURN_EVAL && b->shape->overlap != SW_OVERLAP_BACKWARD) return;
    struct sw_task *gate = new_task(SW_TASK_GATE, SW_LANE_CONTROL);
    wait_here(gate, SW_LANE_D2H, m->loss);
    m->gate = append(b, gate);
}

static void emit_reduce(struct builder *b, uint32_t unit) {
    struct sw_turn_marks *m = &b->turn->marks;
    const uint32_t order = b->shape->unit_count - 1 - unit;
    struct sw_task *reduce = new_task(SW_TASK_REDUCE, SW_LANE_COMM);
    reduce->unit = unit;
    wait_here(reduce, SW_LANE_COMPUTE, m->backward[unit]);
    /* The copy down that last read this slot of rounded gradients, and this unit's block norms. */
    if (order >= SW_GRAD_SLOTS) wait_here(reduce, SW_LANE_D2H, m->grad[unit + SW_GRAD_SLOTS]);
    if (b->prev) {
        wait_before(reduce, SW_LANE_D2H, b->prev->marks.grad[unit]);
        for (uint32_t o = b->shape->unit_count; order < SW_GRAD_SLOTS && o-- > 0;)
            if (o % SW_GRAD_SLOTS == order) {
                wait_before(reduce, SW_LANE_D2H, b->prev->marks.grad[b->shape->unit_count - 1 - o]);
                break;
            }
    }
    m->reduce[unit] = append(b, reduce);

    struct sw_task *grad = new_task(SW_TASK_GRAD, SW_LANE_D2H);
    grad->unit = unit;
    wait_here(grad, SW_LANE_COMM, m->reduce[unit]);
    if (is_late(b, unit))
        wait_here(grad, SW_LANE_ADAM, m->adam[unit]); /* it read the host slot */
    else if (b->prev)
        wait_before(grad, SW_LANE_ADAM, b->prev->marks.adam[unit]);
    /* The host's norms were read: the loss, ahead on this lane, has waited for the norm before. */
    m->grad[unit] = append(b, grad);
}

static void emit_norm(struct builder *b) {
    struct sw_task *norm = new_task(SW_TASK_NORM, SW_LANE_CONTROL);
    wait_here(norm, SW_LANE_D2H, b->turn->marks.grad[0]);
    b->turn->marks.norm = append(b, norm);
}

/* ---- whole turns ---- */

static void build_train(struct builder *b, int has_late) {
    const uint32_t units = b->shape->unit_count, head = units - 1;
    const enum sw_overlap overlap = b->shape->overlap;
    emit_batch(b);
    if (has_late) emit_scalars(b, 1);
    for (uint32_t u = 0; u < units; u++) {
        if (has_late && is_late(b, u)) emit_update(b, u);
        if (has_late && u == last_late(b)) emit_commit(b, 1);
        if (u < head) emit_compute(b, SW_TASK_FORWARD, u);
    }
    const int arriving = overlap == SW_OVERLAP_BACKWARD;
    for (uint32_t u = units; u-- > 0;) {
        emit_compute(b, SW_TASK_BACKWARD, u);
        if (u == head) {
            emit_loss(b);
            if (arriving && has_early(b)) emit_scalars(b, 0);
        }
        emit_reduce(b, u);
        /* One unit behind, so that a device Adam does not hold up the next backward. */
        if (arriving && u + 1 < units && !is_late(b, u + 1)) emit_update(b, u + 1);
    }
    if (arriving && !is_late(b, 0)) emit_update(b, 0);
    emit_norm(b);
    if (overlap == SW_OVERLAP_NONE) {
        emit_scalars(b, 0);
        for (uint32_t u = 0; u < units; u++) emit_update(b, u);
    }
    if (!sw_turn_shape_is_late(b->shape)) emit_commit(b, 0);
}

static void build_drain(struct builder *b) {
    emit_scalars(b, 1);
    for (uint32_t u = 0; u < b->shape->unit_count; u++)
        if (is_late(b, u)) emit_update(b, u);
    emit_commit(b, 1);
}

static void build_eval(struct builder *b) {
    const uint32_t head = b->shape->unit_count - 1;
    emit_batch(b);
    for (uint32_t u = 0; u < head; u++) emit_compute(b, SW_TASK_FORWARD, u);
    emit_compute(b, SW_TASK_EVAL_HEAD, head);
    emit_loss(b);
    /* What comes next may overwrite the batch once the head is done with its targets. */
    b->turn->marks.backward[0] = (int32_t)b->turn->lane_count[SW_LANE_COMPUTE] - 1;
}

static int32_t *marks_alloc(struct builder *b, uint32_t count) {
    int32_t *marks = malloc((count ? count : 1) * sizeof(*marks));
    if (!marks) b->failed = 1;
    for (uint32_t i = 0; marks && i < count; i++) marks[i] = -1;
    return marks;
}

static void index_lanes(struct builder *b) {
    struct sw_turn *t = b->turn;
    uint32_t next[SW_LANE_COUNT] = {0};
    for (int l = 0; l < SW_LANE_COUNT; l++) {
        t->lane_tasks[l] = malloc((t->lane_count[l] ? t->lane_count[l] : 1) * sizeof(uint32_t));
        if (!t->lane_tasks[l]) b->failed = 1;
    }
    if (b->failed) return;
    for (uint32_t i = 0; i < t->task_count; i++)
        t->lane_tasks[t->tasks[i].lane][next[t->tasks[i].lane]++] = i;
}

int sw_turn_build(struct sw_turn *turn, const struct sw_turn_shape *shape, enum sw_turn_kind kind,
                  int has_late, const struct sw_turn *prev) {
    assert(shape->unit_count >= 2 && shape->micro_count >= 1);
    assert(shape->overlap != SW_OVERLAP_AUTO && shape->turning_point <= shape->unit_count);
    assert(shape->late_top == 0 || shape->overlap == SW_OVERLAP_BACKWARD);
    *turn = (struct sw_turn){.kind = kind, .has_late = has_late};
    struct builder b = {.turn = turn, .shape = shape, .prev = prev};
    struct sw_turn_marks *m = &turn->marks;
    const uint32_t units = shape->unit_count, chunks = shape->placement->chunk_count;
    m->fill = m->batch_last = m->loss = m->gate = m->norm = m->scalars = m->write_last = m->commit =
        -1;
    m->backward = marks_alloc(&b, units);
    m->reduce = marks_alloc(&b, units);
    m->grad = marks_alloc(&b, units);
    m->upload = marks_alloc(&b, units);
    m->adam = marks_alloc(&b, units);
    m->write_of_chunk = marks_alloc(&b, chunks);
    m->write_of_slot = marks_alloc(&b, chunks);
    m->upload_of_emit = marks_alloc(&b, chunks);
    if (!b.failed) {
        if (kind == SW_TURN_TRAIN)
            build_train(&b, has_late);
        else if (kind == SW_TURN_DRAIN)
            build_drain(&b);
        else
            build_eval(&b);
    }
    if (!b.failed) index_lanes(&b);
    if (!b.failed) return 0;
    sw_turn_free(turn);
    return -ENOMEM;
}

void sw_turn_free(struct sw_turn *turn) {
    struct sw_turn_marks *m = &turn->marks;
    int32_t *const marks[] = {m->backward, m->reduce,         m->grad,          m->upload,
                              m->adam,     m->write_of_chunk, m->write_of_slot, m->upload_of_emit};
    for (size_t i = 0; i < sizeof(marks) / sizeof(marks[0]); i++) free(marks[i]);
    for (int l = 0; l < SW_LANE_COUNT; l++) free(turn->lane_tasks[l]);
    free(turn->tasks);
    *turn = (struct sw_turn){0};
}
