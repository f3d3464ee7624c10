/* engine/turn.h - the turn: the step program of one step, as pure data.
 *
 * A turn lists tasks in an order that is topological for the whole; each task belongs to one lane,
 * runs there after all earlier ones of that lane, and waits for at most one task per other lane, of
 * this turn or of the one before. The builder is a pure function of the shape: it does no I/O and
 * touches no device. The executor runs turns, and a simulator may play them.
 *
 * Layer-major: every micro-batch passes one unit before the next unit starts; each such passage is
 * a visit, for which the unit's weights are streamed in ahead unless they stay on the device. The
 * update of a unit happens in one of two places. LATE units are updated in the turn after their
 * gradient, beside its forward pass in the order of need; the others in the turn of their gradient,
 * as it arrives (backward mode) or after the norm (none). Slots are rings (offload/placement.h): a
 * position counts uses of a ring within a turn, the executor adds the count of earlier turns and
 * takes the remainder. Threads: read-only once built. */
#ifndef ENGINE_TURN_H
#define ENGINE_TURN_H
#include <stdint.h>
#include "engine/options.h"
#include "offload/placement.h"

enum sw_lane {
    SW_LANE_COMPUTE, /* device lanes: enqueue on a stream */
    SW_LANE_H2D,
    SW_LANE_D2H,
    SW_LANE_COMM,
    SW_LANE_ADAM, /* host lanes */
    SW_LANE_NVME_READ,
    SW_LANE_NVME_WRITE,
    SW_LANE_CONTROL, /* loss gate and norm */
    SW_LANE_COMMIT,  /* control lane that makes updates durable */
    SW_LANE_DATA,    /* control lane that fills batches ahead */
    SW_LANE_COUNT
};

enum { SW_DEVICE_LANES = SW_LANE_COMM + 1 };
static inline int sw_lane_on_device(enum sw_lane lane) {
    return lane <= SW_LANE_COMM;
}
const char *sw_lane_name(enum sw_lane lane);

enum sw_task_kind {
    SW_TASK_FILL,          /* data: rows of the step into host staging */
    SW_TASK_BATCH,         /* h2d: micro-batch m's tokens, targets, mask, documents */
    SW_TASK_FORWARD,       /* compute: unit u, micro-batch m; embedding, layers and norm */
    SW_TASK_RECOMPUTE,     /* compute: the same again, for the inputs inside a group */
    SW_TASK_BACKWARD,      /* compute: recompute and backward */
    SW_TASK_HEAD_FORWARD,  /* compute: a part of the head; the last one concludes the loss */
    SW_TASK_HEAD_WHOLE,    /* compute: the head's forward, loss and backward, all parts at once */
    SW_TASK_HEAD_BACKWARD, /* compute: a part's gradient of input and, when untied, matrix */
    SW_TASK_HEAD_GRAD,     /* compute: a tied part's gradient of the matrix */
    SW_TASK_LOSS,          /* d2h: loss sums of all micro-batches */
    SW_TASK_GATE,    /* control: is the loss finite (backward mode), or the sum of an evaluation */
    SW_TASK_GATHER,  /* comm: a unit's weights from all ranks' shards */
    SW_TASK_SCATTER, /* comm: a unit's accumulated gradient summed over ranks, each rank its shard
                      */
    SW_TASK_REDUCE,  /* comm: round the accumulated gradient of a span of chunks, block norms */
    SW_TASK_GRAD,    /* d2h: chunk c's rounded gradient */
    SW_TASK_NORMS,   /* d2h: unit u's block norms */
    SW_TASK_NORM,    /* control: global norm, clip factor, apply */
    SW_TASK_SCALARS, /* h2d: the scalars of a device Adam */
    SW_TASK_READ,    /* nvme read: chunk c's record into its slot */
    SW_TASK_ADAM,    /* adam: chunk c */
    SW_TASK_DEVICE_ADAM,  /* compute: chunk c */
    SW_TASK_WRITE,        /* nvme write: chunk c's record from its slot */
    SW_TASK_UPLOAD,       /* h2d: chunk c's updated weights to where they stay */
    SW_TASK_COMMIT,       /* commit: the update of a step, all of whose writes are over */
    SW_TASK_LOAD,         /* h2d: chunk c's weights into the window */
    SW_TASK_READ_WEIGHT,  /* nvme read: chunk c's weights into staging */
    SW_TASK_WRITE_WEIGHT, /* nvme write: chunk c's updated weights */
    SW_TASK_READ_GRAD,    /* nvme read: chunk c's waiting gradient into staging */
    SW_TASK_WRITE_GRAD,   /* nvme write: the same from staging */
    SW_TASK_SPILL,        /* d2h: a kept input leaves the device; unit u's, of micro-batch m */
    SW_TASK_WRITE_KEPT,   /* nvme write: the same from staging */
    SW_TASK_READ_KEPT,    /* nvme read: into staging */
    SW_TASK_FETCH,        /* h2d: it comes back */
    SW_TASK_KIND_COUNT
};
const char *sw_task_name(enum sw_task_kind kind);

/* Every rank runs the same turn on its own shard. Device lanes exist for each rank; the others are
 * the process's and take each task for one rank after the other, but these once for all ranks. */
static inline int sw_task_is_joint(enum sw_task_kind kind) {
    return kind == SW_TASK_FILL || kind == SW_TASK_GATE || kind == SW_TASK_NORM ||
           kind == SW_TASK_COMMIT;
}

/* Whether what a task does belongs to one unit. */
static inline int sw_task_is_of_unit(enum sw_task_kind kind) {
    return !sw_task_is_joint(kind) && kind != SW_TASK_BATCH && kind != SW_TASK_LOSS &&
           kind != SW_TASK_SCALARS;
}

struct sw_dep {
    int32_t index; /* in the lane's order within its turn; -1: what came before that turn */
    int8_t turn;   /* 0: this turn, -1: the one before */
    uint8_t lane;
};

enum { SW_DEPS_MAX = SW_LANE_COUNT };

struct sw_task {
    uint8_t kind, lane;
    uint8_t late; /* belongs to the update of the step before this turn's */
    uint8_t dep_count;
    uint32_t unit, micro, chunk;
    int32_t at[SW_RING_COUNT]; /* position in each ring that the task uses, else -1 */
    int32_t kept_out; /* in SW_RING_KEPT: what a forward fills, beside its input; else -1 */
    struct sw_dep deps[SW_DEPS_MAX];
};

struct sw_turn_shape {
    enum sw_overlap overlap; /* resolved: none, forward or backward */
    uint32_t turning_point;  /* units below it are LATE: 0 for none, all for forward */
    uint32_t late_top;       /* so are this many at the top, the last first; backward only */
    /* A step begins when the verdict over the one before is there: with it several processes agree
     * on whether they stop. */
    int stops_together;
    const struct sw_placement *placement;
};

/* Sets turning_point and late_top for units of these sizes. In backward mode NVMe must have work
 * throughout a step: during backward that of the units whose gradients are there, and while forward
 * runs to the loss that of units which this forward needs, those below in its order and those at
 * the top last. How near this comes to the best choice, tests/test_turn.c plays. */
void sw_turn_shape_pick_late(struct sw_turn_shape *shape, const uint64_t *unit_elements);

/* Likewise for backward mode, with these shares of the elements below and at the top, rounded down
 * to whole units. */
void sw_turn_shape_late_shares(struct sw_turn_shape *shape, const uint64_t *unit_elements,
                               double below, double top);

/* Whether a shape leaves any update, or this unit's, to the following turn. A unit with nothing to
 * train has no update. */
int sw_turn_shape_is_late(const struct sw_turn_shape *shape);
int sw_turn_unit_is_late(const struct sw_turn_shape *shape, uint32_t unit);

/* Whether the turns of a placement commit: where the whole optimizer state is on NVMe. */
int sw_turn_commits(const struct sw_placement *placement);

enum sw_turn_kind { SW_TURN_TRAIN, SW_TURN_DRAIN, SW_TURN_EVAL };

struct sw_track; /* who last touched what, for the turn that follows */

struct sw_turn {
    enum sw_turn_kind kind;
    int has_late; /* carries the late updates of the step before */
    uint32_t task_count, task_capacity;
    struct sw_task *tasks;
    uint32_t lane_count[SW_LANE_COUNT];
    uint32_t *lane_tasks[SW_LANE_COUNT]; /* indices into tasks */
    uint32_t ring_uses[SW_RING_COUNT];   /* positions used in each ring */
    struct sw_track *end;                /* sw_turn_settle() drops it */
};

/* Builds a turn. has_late: the turn before left late updates open (always so for a drain). prev:
 * the turn that runs before without the lanes being idle in between, not settled, or NULL. 0 or
 * -ENOMEM. */
int sw_turn_build(struct sw_turn *turn, const struct sw_turn_shape *shape, enum sw_turn_kind kind,
                  int has_late, const struct sw_turn *prev);
/* Frees what only a turn built behind this one needs. */
void sw_turn_settle(struct sw_turn *turn);
void sw_turn_free(struct sw_turn *turn);

/* Checks the invariants over a sequence of turns that run back to back from idle lanes, ending in
 * idle lanes: every read finds what an earlier task in its ancestry filled, no slot is reused
 * before its last reader, each trained parameter is updated exactly once per step, lane orders are
 * topological, only copies cross between host and device. Returns 0, or -EINVAL with the first
 * violation in `why`. */
int sw_turn_check(const struct sw_turn_shape *shape, const struct sw_turn *const *turns, int count,
                  char *why, uint32_t why_size);

#endif
