/* tools/step_run.h - one training by this program itself, as a process of its own, and what its log
 * says of its steps. */
#ifndef TOOLS_STEP_RUN_H
#define TOOLS_STEP_RUN_H
#include "engine/turn.h"

struct sw_step_run {
    double step_s, tokens;   /* the median of the steps that count; tokens of each */
    enum sw_lane step_clock; /* of most of them, of several the first in the lanes' order */
    int steps;               /* that count: all but the first two and the last */
};

/* Runs `spillway WORDS`, which end with NULL and name `log` as their --log. Its output goes to the
 * file `said`, both are written over. It ends at once when this process does, or when
 * sw_bench_stopped(). 0, -EINTR (stopped) or -errno, reported. */
int sw_step_run(char *const *words, const char *log, const char *said, struct sw_step_run *out);

#endif
