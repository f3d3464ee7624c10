/* engine/turn_play.h - plays turns on made-up times: a task starts when its lane and everything it
 * waits for are done, and takes what the caller says. No I/O, no device. */
#ifndef ENGINE_TURN_PLAY_H
#define ENGINE_TURN_PLAY_H
#include "engine/turn.h"

/* Seconds that a task keeps its lane busy. */
typedef double (*sw_task_cost)(void *ctx, const struct sw_task *task);

/* Plays the turns back to back from idle lanes; ends[i]: when the last task of turn i ends, in
 * seconds. 0 or -ENOMEM. */
int sw_turn_play(const struct sw_turn *const *turns, int count, sw_task_cost cost, void *ctx,
                 double *ends);

/* Seconds of a step when turns of this shape follow each other: builds them and plays a few, until
 * their ends are regularly spaced. Negative: -errno. */
double sw_turn_steady_step(const struct sw_turn_shape *shape, sw_task_cost cost, void *ctx);

#endif
