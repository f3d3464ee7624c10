/* tools/report.h - `spillway report`: a trace read into tasks, the figures computed from them, and
 * the page that shows both.
 *
 * report_scan.c takes JSON apart piece by piece, report_trace.c makes tasks of it, report_path.c
 * computes (critical path, busy time, bytes), report_json.c and report_page.c write. Times are
 * nanoseconds of the trace's own clock, sizes bytes. Threads: one at a time. */
#ifndef TOOLS_REPORT_H
#define TOOLS_REPORT_H
#include <jansson.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum { SW_REPORT_LANES_MAX = 255, SW_REPORT_TIERS_MAX = 8, SW_REPORT_NAME_BYTES = 128 };

/* ---- a trace ---- */

struct sw_report_task {
    int64_t start_ns, end_ns;
    uint64_t bytes, step;
    uint32_t name, micro; /* name: place in the trace's names */
    uint8_t lane;         /* place in the trace's lanes */
    uint8_t eval;         /* of an evaluation: in no step's figures */
    uint8_t on_path;      /* set by sw_report_compute() */
};

struct sw_report_sample {
    int64_t at_ns;
    uint64_t used, budget;
};

struct sw_report_lane {
    char name[SW_REPORT_NAME_BYTES];
    uint64_t peak_bytes_per_s; /* 0: the trace does not say */
};

struct sw_report_tier {
    char name[SW_REPORT_NAME_BYTES];
    struct sw_report_sample *samples; /* by time, once computed */
    uint32_t count, capacity;
};

struct sw_report_names; /* texts, each once: tools/report_trace.c */

struct sw_report_trace {
    struct sw_report_task *tasks; /* as the file has them; by lane and start once computed */
    uint32_t task_count, task_capacity;
    struct sw_report_lane lanes[SW_REPORT_LANES_MAX];
    uint32_t lane_count;
    struct sw_report_tier tiers[SW_REPORT_TIERS_MAX];
    uint32_t tier_count;
    struct sw_report_names *names;
    int truncated; /* the file ended before the object did */
};

/* Reads a trace that this program wrote, whole or cut off anywhere behind its first line. 0, or
 * -errno, reported with the file and where in it. Memory: 48 bytes for each task, whatever the
 * file's size. sw_report_close() is due after success alone. */
int sw_report_open(struct sw_report_trace *trace, const char *path);
void sw_report_close(struct sw_report_trace *trace);

uint32_t sw_report_name_count(const struct sw_report_trace *trace);
const char *sw_report_name(const struct sw_report_trace *trace, uint32_t name);

/* What reading is made of, for traces that come from elsewhere (tests). The lane's or tier's place,
 * made where it is new; -ENOSPC: too many. A task's name likewise, or -ENOMEM. */
void sw_report_init(struct sw_report_trace *trace);
int sw_report_lane(struct sw_report_trace *trace, const char *name);
int sw_report_tier(struct sw_report_trace *trace, const char *name);
int64_t sw_report_intern(struct sw_report_trace *trace, const char *name);
int sw_report_add_task(struct sw_report_trace *trace, const struct sw_report_task *task);
int sw_report_add_sample(struct sw_report_tier *tier, const struct sw_report_sample *sample);

/* ---- figures ---- */

struct sw_report_part { /* of one lane in one step */
    uint64_t busy_ns;   /* the step's tasks, whole */
    uint64_t path_ns;   /* on the critical path, within the step's time */
    uint64_t bytes, tasks;
};

struct sw_report_step {
    uint64_t step;
    int64_t begin_ns, end_ns;
    uint64_t gap_ns;  /* on the critical path, but nothing that the next task could wait for ran */
    uint64_t path_ns; /* of all lanes; path_ns + gap_ns = end_ns - begin_ns */
    uint32_t clock;   /* the lane with the largest part of path_ns */
    uint32_t last;    /* place of the task that ended last */
};

struct sw_report_figures {
    uint32_t lane_count, step_count;
    struct sw_report_step *steps;        /* ascending */
    struct sw_report_part *parts;        /* [step][lane] */
    uint32_t steady_first, steady_count; /* places in steps */
    struct sw_report_step steady;        /* sums over the steady steps, step is 0 */
    struct sw_report_part *steady_parts; /* [lane], sums */
    int64_t begin_ns, end_ns;            /* of all tasks and samples */
};

/* Sorts the trace and computes.
 *
 * A step ends when its last task does. It begins when the step before it ended or, where the run
 * did something else in between (an evaluation, a save), when its own first task started.
 *
 * The critical path of a step is walked backwards from its last task (of several, the one that
 * started last): before a task comes whichever task of any lane and step ended last at or before
 * its start; of several, one of the same lane. The time between that end and the start is a gap.
 * The walk ends where the step begins; what lies before is cut off. So gaps and tasks on the path
 * add up to the step's time exactly. Tasks of evaluations are on no path.
 *
 * Steady steps: all but the first two (the pipeline fills, state is read for the first time) and
 * the last (it drains); all steps where there are fewer than four.
 *
 * 0 or -ENOMEM, reported. sw_report_figures_free() is due after any result. */
int sw_report_compute(struct sw_report_trace *trace, struct sw_report_figures *figures);
void sw_report_figures_free(struct sw_report_figures *figures);

/* "NVMe writes set the step: 62% of the critical path." of a step, or of the steady ones. */
void sw_report_sentence(const struct sw_report_trace *trace, const struct sw_report_step *step,
                        const struct sw_report_part *parts, char *out, size_t out_size);

/* ---- what is written ---- */

/* All figures as one object with "schema": 1 (docs/report.md); NULL without memory. */
json_t *sw_report_json(const struct sw_report_trace *trace, const struct sw_report_figures *figures,
                       const char *path);

/* The page. 0 or -ENOMEM; a failed write shows in ferror(). */
int sw_report_page(const struct sw_report_trace *trace, const struct sw_report_figures *figures,
                   const char *path, FILE *out);

/* The page's parts, tools/report.{html,css,js}, each ending with a zero byte. */
extern const char sw_report_html[], sw_report_css[], sw_report_js[];

#endif
