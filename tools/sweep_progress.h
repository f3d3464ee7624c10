/* tools/sweep_progress.h - what a person sees of a sweep that takes long: one live line on a
 * terminal's stderr, nothing elsewhere. An interrupt ends the program at once, behind the line. One
 * sweep at a time. */
#ifndef TOOLS_SWEEP_PROGRESS_H
#define TOOLS_SWEEP_PROGRESS_H
#include "plan/sweep_case.h"

/* The sweep of that range tells where it is; `range` outlives it. */
void sw_sweep_progress_begin(struct sw_sweep_range *range);
/* Takes the line away; interrupts are as they were. */
void sw_sweep_progress_end(void);

#endif
