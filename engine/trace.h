/* engine/trace.h - the tasks of a run as a Chrome trace (one "X" event per task, a thread per
 * lane), for `spillway report`, chrome://tracing and Perfetto.
 *
 * Adding an event copies a small record into its lane's buffer; a thread of the trace's own turns
 * the records into text, several times a second. Where it cannot keep up, adding waits: nothing is
 * lost, and nothing is allocated after open. The file is a whole JSON object after each round, so
 * that a killed run leaves a readable PATH.partial, or one whose end is missing; it gets its name
 * when it is closed. Times start where sw_trace_begin() says, or at the first event added; those
 * before are negative.
 *
 *     {"schema":1,"displayTimeUnit":"ms","traceEvents":[
 *      {"ph":"M","name":"thread_name","pid":0,"tid":0,"args":{"name":"compute"}},
 *      {"ph":"M","name":"peak_bandwidth","pid":0,"tid":5,
 *       "args":{"lane":"nvme_read","bytes_per_s":2600000000}},
 *      {"ph":"C","name":"memory host","pid":0,"ts":0.000,"args":{"used":4096,"budget":8192}},
 *      {"ph":"X","name":"read layer.1","pid":0,"tid":5,"ts":1.250,"dur":40.125,
 *       "args":{"lane":"nvme_read","unit":"layer.1","micro":0,"bytes":12288,"rank":0,"step":3}}]}
 *
 * ts and dur are microseconds. A task of an evaluation has "cat":"eval". Of several processes each
 * has a file of its own, and pid is its number. Threads: any may add. */
#ifndef ENGINE_TRACE_H
#define ENGINE_TRACE_H
#include <stdint.h>
#include "engine/turn.h"

struct sw_trace; /* NULL is a trace that goes nowhere, everywhere */

/* Of the run's process with this number: the first one's goes to `path`, another's to what
 * sw_process_path() makes of it, which errors name both. For so many ranks, of which each has its
 * own device lanes, and by rank the adam lane that updates it (NULL: one does all; copied). path
 * NULL: *out = NULL. 0 or -errno, reported. */
int sw_trace_open(struct sw_trace **out, const char *path, uint32_t process, uint32_t ranks,
                  const uint8_t *adam_lane);
/* Times start here, unless an event was added before. */
void sw_trace_begin(struct sw_trace *trace, uint64_t at_ns);
/* Call it when nobody adds any more. 0 or -errno of any write since open, reported. */
int sw_trace_close(struct sw_trace *trace);

struct sw_trace_event {
    enum sw_task_kind kind;
    enum sw_lane lane;
    const char *unit;     /* stays the caller's, until close; NULL: of no unit */
    uint32_t micro, rank; /* rank: of the run's */
    int eval;             /* of an evaluation: belongs to no step's time */
    uint64_t step, bytes, start_ns, end_ns;
};
void sw_trace_add(struct sw_trace *trace, const struct sw_trace_event *event);

/* What a tier holds from this moment on, and what it may hold. */
void sw_trace_memory(struct sw_trace *trace, enum sw_tier tier, uint64_t used_bytes,
                     uint64_t budget_bytes, uint64_t at_ns);

/* What the resource in front of a lane can move at best. */
void sw_trace_peak(struct sw_trace *trace, enum sw_lane lane, uint64_t bytes_per_s);

#endif
