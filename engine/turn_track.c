/* engine/turn_track.c - see the header. */
#include "engine/turn_track.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static void count_resources(struct sw_track *t, const struct sw_placement *p) {
    const uint64_t micros = p->micro_count, chunks = p->chunk_count;
    const uint64_t units = p->order.unit_count;
    const uint64_t counts[SW_RES_COUNT] = {
        [SW_RES_STAGING] = 1,
        [SW_RES_BATCH] = micros,
        [SW_RES_WEIGHT] = chunks,
        [SW_RES_FULL] = units,
        [SW_RES_STATE] = chunks,
        [SW_RES_GRAD] = chunks,
        [SW_RES_KEPT] = p->kept_groups * micros,
        [SW_RES_GROUP] = (p->checkpoint_every - 1) * micros,
        [SW_RES_NORM_INPUT] = micros,
        [SW_RES_HEAD_INPUT] = micros,
        [SW_RES_STATS] = micros,
        [SW_RES_HEAD_GRAD] = micros,
        [SW_RES_BETWEEN] = micros,
        [SW_RES_LOSS] = micros,
        [SW_RES_HEAD_ACC] = p->order.parts,
        [SW_RES_NORMS] = units,
        [SW_RES_HOST_NORMS] = units,
        [SW_RES_HOST_LOSS] = 1,
        [SW_RES_VERDICT] = SW_VERDICTS,
        [SW_RES_NORMED] = SW_VERDICTS,
        [SW_RES_SCALARS] = 1,
        [SW_RES_COMMITTED] = 1,
    };
    for (int r = 0; r < SW_RES_COUNT; r++) {
        const uint64_t count = r < SW_RES_RING ? counts[r] : p->ring_slots[r - SW_RES_RING];
        t->first[r + 1] = t->first[r] + count;
    }
}

struct sw_track *sw_track_open(const struct sw_placement *p, const struct sw_turn *prev) {
    struct sw_track *t = calloc(1, sizeof(*t));
    if (!t) return NULL;
    count_resources(t, p);
    const uint64_t count = t->first[SW_RES_COUNT];
    t->entries = calloc(count + 1, sizeof(*t->entries));
    t->open = calloc(count + 1, sizeof(*t->open));
    if (!t->entries || !t->open) {
        sw_track_close(t);
        return NULL;
    }
    if (!prev) return t;
    const struct sw_track *end = prev->end;
    assert(end && end->first[SW_RES_COUNT] == count);
    memcpy(t->entries, end->entries, count * sizeof(*t->entries));
    t->number = end->number + 1;
    for (int l = 0; l < SW_LANE_COUNT; l++) {
        t->earlier[l] = end->before[l];
        t->before[l] = end->base[l];
        t->base[l] = end->base[l] + prev->lane_count[l];
    }
    for (int r = 0; r < SW_RING_COUNT; r++) t->ring_base[r] = end->ring_base[r] + end->ring_uses[r];
    return t;
}

void sw_track_close(struct sw_track *t) {
    if (!t) return;
    free(t->entries);
    free(t->open);
    free(t);
}

static struct sw_track_entry *entry_of(struct sw_track *t, enum sw_resource resource,
                                       uint64_t index) {
    assert(t->first[resource] + index < t->first[resource + 1]);
    return &t->entries[t->first[resource] + index];
}

static void wait_for(struct sw_waits *waits, uint32_t lane, uint32_t count) {
    if (count > waits->count[lane]) waits->count[lane] = count;
}

void sw_track_read(struct sw_track *t, struct sw_waits *waits, const uint32_t *lane_count,
                   enum sw_lane lane, enum sw_resource resource, uint64_t index) {
    struct sw_track_entry *e = entry_of(t, resource, index);
    wait_for(waits, e->write_lane, e->write);
    e->read[lane] = t->base[lane] + lane_count[lane] + 1;
}

void sw_track_write(struct sw_track *t, struct sw_waits *waits, const uint32_t *lane_count,
                    enum sw_lane lane, enum sw_resource resource, uint64_t index) {
    struct sw_track_entry *e = entry_of(t, resource, index);
    wait_for(waits, e->write_lane, e->write);
    for (uint32_t l = 0; l < SW_LANE_COUNT; l++) wait_for(waits, l, e->read[l]);
    *e = (struct sw_track_entry){.write = t->base[lane] + lane_count[lane] + 1,
                                 .write_lane = (uint32_t)lane};
}

static uint32_t slots_of(const struct sw_track *t, enum sw_ring ring) {
    return (uint32_t)(t->first[SW_RES_RING + ring + 1] - t->first[SW_RES_RING + ring]);
}

uint64_t sw_track_slot(const struct sw_track *t, enum sw_ring ring, int32_t position) {
    assert(position >= 0 && slots_of(t, ring) > 0);
    return (t->ring_base[ring] + (uint32_t)position) % slots_of(t, ring);
}

uint32_t sw_track_room(const struct sw_track *t, enum sw_ring ring) {
    const uint32_t slots = slots_of(t, ring);
    uint32_t room = 0;
    while (room < slots && !t->open[t->first[SW_RES_RING + ring] +
                                    sw_track_slot(t, ring, (int32_t)(t->ring_uses[ring] + room))])
        room++;
    return room;
}

int32_t sw_track_take(struct sw_track *t, enum sw_ring ring) {
    const int32_t position = (int32_t)t->ring_uses[ring]++;
    uint8_t *open = &t->open[t->first[SW_RES_RING + ring] + sw_track_slot(t, ring, position)];
    assert(!*open);
    *open = 1;
    return position;
}

void sw_track_release(struct sw_track *t, enum sw_ring ring, int32_t position) {
    uint8_t *open = &t->open[t->first[SW_RES_RING + ring] + sw_track_slot(t, ring, position)];
    assert(*open);
    *open = 0;
}

void sw_track_deps(const struct sw_track *t, const struct sw_waits *waits, struct sw_task *task) {
    for (uint32_t l = 0; l < SW_LANE_COUNT; l++) {
        const uint32_t count = waits->count[l];
        const int over = !sw_lane_on_device((enum sw_lane)l);
        if (l == task->lane || count <= (over ? t->before[l] : t->earlier[l])) continue;
        const int here = count > t->base[l], old = count <= t->before[l];
        const uint32_t from = here ? t->base[l] : t->before[l];
        task->deps[task->dep_count++] =
            (struct sw_dep){.index = old ? -1 : (int32_t)(count - from - 1),
                            .turn = (int8_t)(here ? 0 : -1),
                            .lane = (uint8_t)l};
    }
}
