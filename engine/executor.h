/* engine/executor.h - runs turns on real lanes.
 *
 * Every rank of the process runs the same turns. One thread per lane - device lanes for each rank,
 * an adam lane for those of a NUMA node, the others for all of them - takes the lane's tasks in
 * order, turn after turn, and waits for each task's dependencies, which are those of the same rank;
 * a joint task waits for every rank's. Lanes run ahead into the next pushed turn as far as those
 * allow. Device lanes submit ahead: a dependency on a device task is met once that task is
 * submitted, and the stream then waits for its event; host lanes wait for the event itself, without
 * spinning. Where a device keeps times (kernels/device.h), a thread follows what is submitted: a
 * task is done and a run has ended when the work on the device is over. The NVMe lanes keep several
 * tasks in flight and complete them in order. The first error aborts: every wait ends, and push and
 * idle return it. Threads: push, wait and idle belong to one thread, the trainer's. From the first
 * push until idle or an error that thread alone may allocate (base/alloc_guard.h).
 */
#ifndef ENGINE_EXECUTOR_H
#define ENGINE_EXECUTOR_H
#include <stdatomic.h>
#include <stdint.h>
#include "engine/collective.h"
#include "engine/turn.h"
#include "kernels/device.h"

enum { SW_RUNS_ACTIVE_MAX = 2, SW_RUNS_KEPT = 4, SW_LANE_IN_FLIGHT_MAX = 8 };

/* One turn on its way. Valid until SW_RUNS_KEPT further pushes. */
struct sw_run {
    const struct sw_turn *turn;
    uint64_t step;                     /* of the turn; of the one that never began for a drain */
    uint64_t ring_base[SW_RING_COUNT]; /* uses of the rings by earlier runs */
    atomic_int cancelled;              /* sw_run_decide(); what is not late then does nothing */
    atomic_int decided;
    struct sw_run *before; /* of the same stretch, or NULL: late tasks belong to its step */
    uint32_t rank_count;
    uint64_t *start_ns, *end_ns; /* by sw_run_at(); busy time, without waiting. When work ran, not
                                    when it was submitted, once the task is done */
    uint64_t *bytes;             /* likewise; the trainer's: what it moved */

    uint64_t base[SW_LANE_COUNT], base_before[SW_LANE_COUNT]; /* the executor's */
    uint32_t *positions;      /* by task, in its lane: the step clock's scratch */
    const uint8_t *adam_lane; /* by rank, as in sw_executor_ranks; NULL: one for all */
    uint32_t lanes_left;
};

/* Where a run keeps what it knows of a task of a rank (0 for joint ones). */
static inline uint64_t sw_run_at(const struct sw_run *run, const struct sw_task *task,
                                 uint32_t rank) {
    return (uint64_t)(task - run->turn->tasks) * run->rank_count + rank;
}

/* Whether the step is cancelled before it begins: asked by every rank's first task, answered by the
 * first of them for all. */
int sw_run_decide(struct sw_run *run, int cancel);

/* rank: of the process's, counted from 0; of a joint task 0. */
struct sw_executor_ops {
    /* Once from each lane's thread, before its first task: what the thread keeps is made here, a
     * team above all. 0 or -errno. NULL: nothing is. The stream is a device lane's, else NULL; the
     * rank is the first of those that the lane is for. */
    int (*enter)(void *ctx, enum sw_lane lane, uint32_t rank, struct sw_stream *stream);
    /* Does a task of a host lane, or enqueues a device lane's on the stream. 0 or -errno. May move
     * the task's start_ns to when it stopped waiting for others. */
    int (*run)(void *ctx, struct sw_run *run, const struct sw_task *task, uint32_t rank,
               struct sw_stream *stream);
    /* NVMe lanes: starts a task. 0: in flight; 1: done at once; or -errno. */
    int (*start)(void *ctx, struct sw_run *run, const struct sw_task *task, uint32_t rank);
    /* Waits for at least one started task of the lane; the count that completed, in order. */
    int (*finish)(void *ctx, enum sw_lane lane, uint32_t max);
    /* A lane begins (1) or ends (0) to wait for a task of `other`, from its thread. NULL: unasked.
     */
    void (*waits)(void *ctx, enum sw_lane other, int begins);
    /* After each task, from its lane's thread; those of device lanes, where the device keeps times,
     * all from one thread, when they are over. */
    void (*done)(void *ctx, struct sw_run *run, const struct sw_task *task, uint32_t rank);
    /* Once, when the executor aborts: ends what tasks may be waiting for. NULL: nothing does. */
    void (*abort)(void *ctx, int error);
};

struct sw_executor;

struct sw_executor_ranks {
    uint32_t count;
    const struct sw_device_handle *devices; /* one for each, all of one back end */
    /* By rank, the adam lane that updates it: they count from 0 without gaps, in the order of ranks
     * that are their first. NULL: there is one for all. */
    const uint8_t *adam_lane;
    /* [rank][SW_DEVICE_LANES]: the device lanes' streams, which stay the caller's and outlive the
     * executor. NULL: it makes its own. */
    struct sw_stream *const *streams;
};

/* turns: those that will be pushed; they outlive the executor, and what else is passed need not.
 * Returns when every lane has entered. The threads bear their lanes' names. */
int sw_executor_open(struct sw_executor **out, const struct sw_executor_ranks *ranks,
                     const struct sw_executor_ops *ops, void *ctx,
                     const struct sw_turn *const *turns, uint32_t turn_count);
void sw_executor_close(struct sw_executor *ex); /* NULL is fine; aborts what still runs */

/* Starts a turn behind those that run. 0, -EAGAIN (SW_RUNS_ACTIVE_MAX are active: wait), or the
 * error that aborted the executor. */
int sw_executor_push(struct sw_executor *ex, const struct sw_turn *turn, uint64_t step,
                     struct sw_run *before);

/* The run that was pushed last (NULL before the first), and how many have not ended. */
struct sw_run *sw_executor_last_run(struct sw_executor *ex);
int sw_executor_active(struct sw_executor *ex);

/* Waits until a run has ended or sw_executor_nudge() was called since the last wait. 0, or the
 * error. */
int sw_executor_wait(struct sw_executor *ex);
void sw_executor_nudge(struct sw_executor *ex); /* any thread */

/* Waits until every pushed turn has ended, with its work on devices. The next turn must be one
 * built without a predecessor. */
int sw_executor_idle(struct sw_executor *ex);

void sw_executor_abort(struct sw_executor *ex, int error); /* any thread; the first error stays */

/* The step clock of a run that has ended: walks back from the task that ended last to whichever
 * predecessor ended last: what it waited for, or what its lane did before, on the host for other
 * ranks too; share[lane] is the lane's part of the path. Returns the
 * largest. The run's positions are written, so one thread at a time. */
enum sw_lane sw_run_step_clock(const struct sw_run *run, double share[SW_LANE_COUNT]);

#endif
