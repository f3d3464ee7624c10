/* tools/progress.h - what a person sees of a run: one live line on a terminal, otherwise a plain
 * line every few seconds. One thread. */
#ifndef TOOLS_PROGRESS_H
#define TOOLS_PROGRESS_H
#include <math.h>
#include "engine/trainer.h"

/* printf() writes the sign of what is no number. */
static inline double sw_unsigned_nan(double value) {
    return isnan(value) ? (double)NAN : value;
}

struct sw_progress {
    int live, line_open; /* a terminal; an unfinished live line stands on it */
    uint64_t last_print_ns;
    double step_s_mean; /* recent */
};

void sw_progress_begin(struct sw_progress *p);
void sw_progress_step(struct sw_progress *p, const struct sw_step_report *report);
/* What takes long beside the steps: nothing is seen of what does not. */
void sw_progress_beside(struct sw_progress *p, enum sw_beside_steps work, uint64_t done,
                        uint64_t total);
/* Ends a live line, so that something else can be printed. */
void sw_progress_clear(struct sw_progress *p);

#endif
