/* offload/thread_trial.h - whether a thread team can be made, found out before it must be.
 *
 * OpenMP runtimes end the process when a thread of a team cannot be created. So whoever is about to
 * form teams first holds as many threads as they will have, all at once and with the same stacks,
 * and makes the teams smaller where that fails. */
#ifndef OFFLOAD_THREAD_TRIAL_H
#define OFFLOAD_THREAD_TRIAL_H
#include <stddef.h>

/* Starts `wanted` threads beside the caller, holds them together, and ends them again. Returns how
 * many there were; when fewer than wanted, `why` names the likely limit. The threads no longer
 * count against any limit when it returns. */
int sw_thread_trial(int wanted, char *why, size_t why_size);

/* The stack that OpenMP gives its threads, from OMP_STACKSIZE and its kin; 0: the system's. */
size_t sw_thread_trial_stack_bytes(void);

#endif
