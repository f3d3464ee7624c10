/* tools/run_log.h - the log of a run: one JSON object per line, flushed line by line.
 *
 * The first line holds the effective options; a line with "loss" is a step, the others are events
 * and have an "event" instead. Numbers that are not finite are null, as JSON has no others. */
#ifndef TOOLS_RUN_LOG_H
#define TOOLS_RUN_LOG_H
#include <jansson.h>
#include "engine/trainer.h"

struct sw_run_log; /* NULL is a log that goes nowhere, everywhere */

int sw_run_log_open(struct sw_run_log **out, const char *path,
                    int append);              /* path NULL: *out = NULL */
int sw_run_log_close(struct sw_run_log *log); /* -errno when a line could not be written */

void sw_run_log_step(struct sw_run_log *log, const struct sw_step_report *report);
/* {"event": name, "step": step, fields...}; takes over fields. */
void sw_run_log_event(struct sw_run_log *log, const char *name, uint64_t step, json_t *fields);
void sw_run_log_object(struct sw_run_log *log, json_t *object); /* takes over object */

#endif
