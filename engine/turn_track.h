/* engine/turn_track.h - who last wrote and read what, while turns are built: from it follows for
 * which tasks a task must wait.
 *
 * A resource is something that tasks hand over: a slot, a buffer, the weights of a chunk. A reader
 * waits for the last writer, a writer for the last writer and every reader since. Lanes are in
 * order, so that the last access of each lane is enough. The state at a turn's end is where the
 * next one starts. Internal to the builder of turns. */
#ifndef ENGINE_TURN_TRACK_H
#define ENGINE_TURN_TRACK_H
#include "engine/turn.h"

enum sw_resource {
    SW_RES_STAGING,    /* the host's batch */
    SW_RES_BATCH,      /* by micro-batch: on the device */
    SW_RES_WEIGHT,     /* by chunk, where it stays */
    SW_RES_FULL,       /* by unit: other ranks' weights beside one's own, where all stay */
    SW_RES_STATE,      /* by chunk */
    SW_RES_GRAD,       /* by chunk, where it waits */
    SW_RES_KEPT,       /* by group and micro-batch, where it is kept */
    SW_RES_GROUP,      /* by place in a group but the first, and micro-batch */
    SW_RES_NORM_INPUT, /* by micro-batch, as the following */
    SW_RES_HEAD_INPUT,
    SW_RES_STATS,      /* of the softmax */
    SW_RES_HEAD_GRAD,  /* FP32 gradient of the head's input */
    SW_RES_BETWEEN,    /* gradient between units */
    SW_RES_LOSS,       /* loss sums on the device */
    SW_RES_HEAD_ACC,   /* by part: FP32 gradient of the head's matrix when it is whole */
    SW_RES_NORMS,      /* by unit: block norms on the device */
    SW_RES_HOST_NORMS, /* by unit */
    SW_RES_HOST_LOSS,
    SW_RES_VERDICT, /* by step, modulo SW_VERDICTS: what the gate or the norm decided */
    SW_RES_NORMED,  /* likewise: the norm was looked at */
    SW_RES_SCALARS, /* of a device Adam */
    SW_RES_COMMITTED,
    SW_RES_RING, /* the slots of the rings follow */
    SW_RES_COUNT = SW_RES_RING + SW_RING_COUNT
};

enum { SW_VERDICTS = 4 };

struct sw_track_entry {
    uint32_t write; /* tasks of the lane up to the last writer, over all turns; 0: none */
    uint32_t write_lane;
    uint32_t read[SW_LANE_COUNT]; /* likewise, since then */
};

struct sw_track {
    uint32_t number; /* of the turn in its sequence */
    /* Tasks before this turn, before the last one, and before the one before that. */
    uint32_t base[SW_LANE_COUNT], before[SW_LANE_COUNT], earlier[SW_LANE_COUNT];
    uint32_t ring_base[SW_RING_COUNT]; /* uses before this turn */
    uint32_t ring_uses[SW_RING_COUNT]; /* in it */
    uint64_t first[SW_RES_COUNT + 1];
    struct sw_track_entry *entries;
    uint8_t *open; /* by entry: a use of a slot that has readers to come */
};

/* A task under construction: per lane, the count that it waits for. */
struct sw_waits {
    uint32_t count[SW_LANE_COUNT];
};

/* The state before a turn: fresh (from NULL) or behind `prev`, whose end it copies. NULL: no
 * memory.
 */
struct sw_track *sw_track_open(const struct sw_placement *placement, const struct sw_turn *prev);
void sw_track_close(struct sw_track *track); /* NULL is fine */

/* The task that is next on `lane` of a turn with these counts accesses a resource. */
void sw_track_read(struct sw_track *t, struct sw_waits *waits, const uint32_t *lane_count,
                   enum sw_lane lane, enum sw_resource resource, uint64_t index);
void sw_track_write(struct sw_track *t, struct sw_waits *waits, const uint32_t *lane_count,
                    enum sw_lane lane, enum sw_resource resource, uint64_t index);

/* How many more uses a ring has room for before one must be closed. */
uint32_t sw_track_room(const struct sw_track *t, enum sw_ring ring);
/* The next use of a ring, which must have room; its position. */
int32_t sw_track_take(struct sw_track *t, enum sw_ring ring);
/* A use has its last reader. */
void sw_track_release(struct sw_track *t, enum sw_ring ring, int32_t position);
/* The slot's resource of a position. */
uint64_t sw_track_slot(const struct sw_track *t, enum sw_ring ring, int32_t position);

/* Writes the waits as dependencies of this turn and the one before. Turns before that have ended,
 * but on device lanes this means submitted: a wait for one of them becomes a wait for all of the
 * lane's tasks before the last turn. */
void sw_track_deps(const struct sw_track *t, const struct sw_waits *waits, struct sw_task *task);

#endif
