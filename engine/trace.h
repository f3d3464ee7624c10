/* engine/trace.h - the tasks of a run as a Chrome trace (one "X" event per task, a thread per
 * lane), for chrome://tracing and Perfetto.
 *
 * Events are written as they end, through a buffered file under a lock; the file gets its name when
 * it is closed. args: {lane, unit, bytes, step}. Threads: any may add events. */
#ifndef ENGINE_TRACE_H
#define ENGINE_TRACE_H
#include <stdint.h>
#include "engine/turn.h"

struct sw_trace; /* NULL is a trace that goes nowhere, everywhere */

int sw_trace_open(struct sw_trace **out, const char *path); /* path NULL: *out = NULL */
int sw_trace_close(struct sw_trace *trace);                 /* 0 or -errno, reported */

struct sw_trace_event {
    enum sw_task_kind kind;
    enum sw_lane lane;
    const char *unit; /* NULL: of no unit */
    uint32_t micro;
    uint64_t step, bytes, start_ns, end_ns;
};
void sw_trace_add(struct sw_trace *trace, const struct sw_trace_event *event);

#endif
