/* engine/world.h - the processes of a run, started by mpirun or srun, and what they do together.
 *
 * A world owns its channels and groups: they end with it. A process without a launcher has none,
 * and pays nothing: NULL stands for it. Handles are those of collective.h, over the same memory of
 * the host; sums have the bits that one process with all the ranks would have. Data goes through
 * buffers made when a handle is opened, in blocks, so any length will do.
 *
 * An error of any call ends the whole world: every call of every handle returns it, here and in the
 * other processes. It is reported once, by the process that finds it; the others warn that it has
 * ended the run. A thread of the world's listens to the other processes: one that is not heard of
 * for the timeout is lost, whoever waits for it. Whoever waits sleeps, nothing spins. Errors: 0 or
 * -errno. Threads: open, channel, ranks, warm_up and close by one thread; abort by any. */
#ifndef ENGINE_WORLD_H
#define ENGINE_WORLD_H
#include <stdint.h>
#include "engine/collective.h"

struct sw_world;

/* Looks for a launcher in the environment. None, or one that started a single process: *out = NULL.
 * Else opens the plugin, libspillway_mpi.so beside the executable or what SPILLWAY_MPI_PLUGIN
 * names, waits until all processes are there, and tries each way between this one and each other:
 * where messages get through one way only, that is told in 10 s, and the job ends here, with status
 * 1. An error names the remedy. To be called before other threads start, so that they inherit
 * nothing of what the message library sets up. */
int sw_world_open(struct sw_world **out, double timeout_s);

/* Whether the environment is that of one process of several, or may be. */
int sw_world_is_launched(void);

uint32_t sw_world_index(const struct sw_world *w); /* of NULL: 0 */
uint32_t sw_world_size(const struct sw_world *w);  /* of NULL: 1 */

/* One rank for each process: handle.rank is the process, handle.size their number. A process that
 * comes to a call has `timeout_s` for the others to come, too; SW_WORLD_PATIENT: as long as they
 * are heard of, where a process may have files to read or write before. Handles work independently
 * of each other, in any thread each; all processes open them, and groups, in the same order. */
#define SW_WORLD_PATIENT 1e9
int sw_world_channel(struct sw_world *w, struct sw_comm_handle *out, double timeout_s);

/* A group with `local_ranks` ranks in every process: fills out[0..local_ranks) with the handles of
 * ranks index * local_ranks + i, each for a thread. The processes compare how many ranks they have;
 * SW_RANKS_MAX in all. Closing a handle does nothing: its memory is the world's. */
int sw_world_ranks(struct sw_world *w, struct sw_comm_handle *out, uint32_t local_ranks,
                   double timeout_s);

/* Lets the message library take the memory that the calls of all handles may come to need, for as
 * many messages on their way as they ever have, so that it takes none later. No call may be under
 * way. All processes call it, when all handles are open. */
int sw_world_warm_up(struct sw_world *w, double timeout_s);

/* Ends every call here and in the other processes with `error`, which the caller has reported. Does
 * not wait. NULL is fine. */
void sw_world_abort(struct sw_world *w, int error);

/* The end of this process's part; no call may be under way. With status 0 waits for the other
 * processes, which have to come within the timeout: 0, or the error that the run ended with, and
 * then this process must exit with a failure. With another status the other processes are ended,
 * too: they have half the timeout, 5 s at most, to close for their part, while their calls end with
 * errors. Where one does not, all are killed, and this process exits here with `status`: whatever
 * has to be written has to be written before. NULL is fine. */
int sw_world_close(struct sw_world *w, int status);

#endif
