/* plan/played.h - steps that were played before, of cases that differ in the memory of their
 * machines alone, of which a step's time knows nothing but what its rings are: a sweep of RAM comes
 * to the same placements again and again. One thread. */
#ifndef PLAN_PLAYED_H
#define PLAN_PLAYED_H
#include "plan/simulate.h"

struct sw_played;

/* NULL: no memory. */
struct sw_played *sw_played_open(void);
/* NULL is ignored. */
void sw_played_close(struct sw_played *played);

/* A run as it would be played, with one rank for all or with every rank. 1: `out` is what was kept
 * of it; 0: nothing was. */
int sw_played_find(struct sw_played *played, const struct sw_plan_run *run, int one_for_all,
                   struct sw_simulation *out);
/* Without memory nothing is kept. */
void sw_played_keep(struct sw_played *played, const struct sw_plan_run *run, int one_for_all,
                    const struct sw_simulation *times);

/* How often something was found, and how much is kept. */
void sw_played_count(const struct sw_played *played, uint64_t *found, uint64_t *kept);

#endif
