/* engine/trace_machine.h - what a run knows of its machine before it starts, for its trace. */
#ifndef ENGINE_TRACE_MACHINE_H
#define ENGINE_TRACE_MACHINE_H
#include "engine/options.h"
#include "engine/trace.h"

/* Adds the peak of every lane that has a known one: of the NVMe lanes what the machine profile says
 * of their drives, all together, and of lanes held to a rate at most that rate. Nothing is known of
 * drives that were never measured. trace NULL: does nothing. */
void sw_trace_machine(struct sw_trace *trace, const struct sw_train_options *options);

#endif
