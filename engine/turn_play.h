/* engine/turn_play.h - plays turns on made-up times, event by event: a task starts when its lane
 * and everything it waits for are done, as in the executor, and takes what the caller says, longer
 * where it shares a resource with others. No I/O, no device.
 *
 * As in the executor every rank runs the same turns. Device lanes exist for each rank, an adam lane
 * for those of a NUMA node; the others take each task for one rank after the other, and joint ones
 * once for all. What ranks do together begins when the last one has come. A turn begins when the
 * one before the last has ended (SW_RUNS_ACTIVE_MAX). */
#ifndef ENGINE_TURN_PLAY_H
#define ENGINE_TURN_PLAY_H
#include "engine/turn.h"

/* Something that several lanes draw on at once: a memory's bandwidth, a link, drives. Tasks take
 * shares of it; where they come to more than there is, all of them are slowed down alike. */
struct sw_play_resource {
    /* Shares that there are. mixed: while tasks of both sides (directions) use it. */
    double alone, mixed;
};

enum { SW_PLAY_USES_MAX = 12 };
struct sw_play_cost {
    double seconds; /* at full speed */
    uint32_t use_count;
    struct sw_play_use {
        uint32_t resource;
        uint8_t side;
        double share; /* taken at full speed: 1 is what the resource can do in one direction */
    } uses[SW_PLAY_USES_MAX];
};

struct sw_play {
    uint32_t ranks;
    const uint8_t *adam_lane; /* by rank, counted from 0 without gaps; NULL: one for all */
    uint32_t resource_count;
    const struct sw_play_resource *resources;
    /* turn: which of the sequence. `cost` comes with 0 seconds and no uses. */
    void (*cost)(void *ctx, uint32_t turn, const struct sw_task *task, uint32_t rank,
                 struct sw_play_cost *cost);
    /* After each task, lane by lane in order. NULL: nobody looks. */
    void (*done)(void *ctx, uint32_t turn, const struct sw_task *task, uint32_t rank,
                 double start_s, double end_s);
    void *ctx;
};

/* Plays the turns back to back from idle lanes; ends[i]: when the last task of turn i ends, in
 * seconds. 0 or -ENOMEM. */
int sw_play_turns(const struct sw_play *play, const struct sw_turn *const *turns, uint32_t count,
                  double *ends);

/* Seconds that a task keeps its lane busy. */
typedef double (*sw_task_cost)(void *ctx, const struct sw_task *task);

/* Seconds of a step when turns of this shape follow each other, for one rank that shares nothing:
 * builds them and plays a few, until their ends are regularly spaced. Negative: -errno. */
double sw_turn_steady_step(const struct sw_turn_shape *shape, sw_task_cost cost, void *ctx);

#endif
