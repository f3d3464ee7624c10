/* tools/bench_commit.h - what a step's commit takes on drives, by the store's own commits. */
#ifndef TOOLS_BENCH_COMMIT_H
#define TOOLS_BENCH_COMMIT_H
#include <stdint.h>

/* Makes a small store over the folders and commits it as a run does, each time behind writes of all
 * its chunks that are over; *commit_s: the median, of at most so many, in about `seconds`. Nothing
 * is left behind. 0; -errno, reported; -EINTR, which is not, when sw_bench_stopped() says so. One
 * thread. */
int sw_bench_commit(const char *const *folders, uint32_t folder_count, double seconds,
                    double *commit_s);

#endif
