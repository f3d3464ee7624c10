/* tools/report_path.c - the arithmetic: steps, busy time, critical path. */
#include "tools/report.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"

/* Tasks that end together are looked through for one of the same lane, this many at most. */
enum { TIES_MAX = SW_REPORT_LANES_MAX };

static int by_lane_and_start(const void *a, const void *b) {
    const struct sw_report_task *x = a, *y = b;
    if (x->lane != y->lane) return x->lane < y->lane ? -1 : 1;
    if (x->start_ns != y->start_ns) return x->start_ns < y->start_ns ? -1 : 1;
    if (x->end_ns != y->end_ns) return x->end_ns < y->end_ns ? -1 : 1;
    return (x->step > y->step) - (x->step < y->step);
}

static int by_time(const void *a, const void *b) {
    const struct sw_report_sample *x = a, *y = b;
    return (x->at_ns > y->at_ns) - (x->at_ns < y->at_ns);
}

static int by_number(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Places of tasks by end, then start. */
static int by_end(const void *a, const void *b, void *ctx) {
    const struct sw_report_task *tasks = ctx;
    const uint32_t p = *(const uint32_t *)a, q = *(const uint32_t *)b;
    const struct sw_report_task *x = &tasks[p], *y = &tasks[q];
    if (x->end_ns != y->end_ns) return x->end_ns < y->end_ns ? -1 : 1;
    if (x->start_ns != y->start_ns) return x->start_ns < y->start_ns ? -1 : 1;
    return (p > q) - (p < q);
}

/* ---- the critical path ---- */

struct walk {
    struct sw_report_task *tasks;
    const uint32_t *order; /* places by end; evaluations are left out */
    const uint32_t *rank;  /* the inverse */
    uint32_t count;
};

/* How many tasks ended at or before this moment. */
static uint32_t ended_by(const struct walk *w, int64_t ns) {
    uint32_t low = 0, high = w->count;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (w->tasks[w->order[middle]].end_ns <= ns)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The task before this one on its path, or -1. Ranks fall along a path, so that every walk ends,
 * tasks without a duration included. */
static int64_t before(const struct walk *w, uint32_t task) {
    uint32_t ended = ended_by(w, w->tasks[task].start_ns);
    if (ended > w->rank[task]) ended = w->rank[task];
    if (ended == 0) return -1;
    const struct sw_report_task *last = &w->tasks[w->order[ended - 1]];
    for (uint32_t i = 1; i <= TIES_MAX && i <= ended; i++) {
        const uint32_t other = w->order[ended - i];
        if (w->tasks[other].end_ns != last->end_ns) break;
        if (w->tasks[other].lane == w->tasks[task].lane) return other;
    }
    return w->order[ended - 1];
}

static void walk_step(const struct walk *w, struct sw_report_step *step,
                      struct sw_report_part *parts) {
    int64_t until = step->end_ns; /* what lies behind is accounted for */
    int64_t task = step->last;
    while (task >= 0 && until > step->begin_ns) {
        struct sw_report_task *t = &w->tasks[task];
        const int64_t end = t->end_ns > step->begin_ns ? t->end_ns : step->begin_ns;
        const int64_t start = t->start_ns > step->begin_ns ? t->start_ns : step->begin_ns;
        step->gap_ns += (uint64_t)(until - end);
        if (t->end_ns > step->begin_ns) {
            parts[t->lane].path_ns += (uint64_t)(end - start);
            step->path_ns += (uint64_t)(end - start);
            t->on_path = 1;
        }
        until = start;
        task = before(w, (uint32_t)task);
    }
    step->gap_ns += (uint64_t)(until - step->begin_ns);
}

static uint32_t clock_of(const struct sw_report_part *parts, uint32_t lane_count) {
    uint32_t clock = 0;
    for (uint32_t l = 1; l < lane_count; l++)
        if (parts[l].path_ns > parts[clock].path_ns) clock = l;
    return clock;
}

/* ---- steps ---- */

/* Sums of what a trace says stop where a JSON integer does; terms are no larger. */
static void add(uint64_t *sum, uint64_t term) {
    *sum = *sum > INT64_MAX - term ? INT64_MAX : *sum + term;
}

/* The steps that have tasks, ascending. Returns how many, or -ENOMEM. */
static int64_t find_steps(const struct sw_report_trace *trace, struct sw_report_figures *f) {
    uint64_t *numbers = malloc((trace->task_count + (size_t)1) * sizeof(*numbers));
    if (!numbers) return -ENOMEM;
    uint32_t count = 0, unique = 0;
    for (uint32_t i = 0; i < trace->task_count; i++) {
        const struct sw_report_task *t = &trace->tasks[i];
        if (t->eval || (count && numbers[count - 1] == t->step)) continue;
        numbers[count++] = t->step;
    }
    qsort(numbers, count, sizeof(*numbers), by_number);
    for (uint32_t i = 0; i < count; i++)
        if (unique == 0 || numbers[unique - 1] != numbers[i]) numbers[unique++] = numbers[i];
    f->steps = calloc(unique + (size_t)1, sizeof(*f->steps));
    f->parts = calloc((size_t)unique * f->lane_count + 1, sizeof(*f->parts));
    for (uint32_t i = 0; f->steps && i < unique; i++)
        f->steps[i] =
            (struct sw_report_step){.step = numbers[i], .begin_ns = INT64_MAX, .end_ns = INT64_MIN};
    free(numbers);
    return f->steps && f->parts ? (int64_t)unique : -ENOMEM;
}

static uint32_t step_place(const struct sw_report_figures *f, uint64_t step) {
    uint32_t low = 0, high = f->step_count - 1;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (f->steps[middle].step < step)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Sums up each step's tasks; begin is that of its first task so far. Ends come in order of `order`,
 * so the last task is the one that is met last. */
static void add_tasks(const struct walk *w, struct sw_report_figures *f) {
    for (uint32_t i = 0; i < w->count; i++) {
        const struct sw_report_task *t = &w->tasks[w->order[i]];
        const uint32_t place = step_place(f, t->step);
        struct sw_report_step *step = &f->steps[place];
        struct sw_report_part *part = &f->parts[(size_t)place * f->lane_count + t->lane];
        if (t->start_ns < step->begin_ns) step->begin_ns = t->start_ns;
        step->end_ns = t->end_ns;
        step->last = w->order[i];
        add(&part->busy_ns, (uint64_t)(t->end_ns - t->start_ns));
        add(&part->bytes, t->bytes);
        part->tasks++;
    }
}

static void compute_steps(const struct walk *w, struct sw_report_figures *f) {
    for (uint32_t s = 0; s < f->step_count; s++) {
        struct sw_report_step *step = &f->steps[s];
        struct sw_report_part *parts = &f->parts[(size_t)s * f->lane_count];
        if (s > 0 && f->steps[s - 1].end_ns > step->begin_ns)
            step->begin_ns = f->steps[s - 1].end_ns;
        if (step->end_ns < step->begin_ns) step->end_ns = step->begin_ns;
        walk_step(w, step, parts);
        step->clock = clock_of(parts, f->lane_count);
    }
}

static int compute_steady(struct sw_report_figures *f) {
    const uint32_t all = f->step_count;
    f->steady_first = all < 4 ? 0 : 2;
    f->steady_count = all < 4 ? all : all - 3;
    f->steady_parts = calloc(f->lane_count + (size_t)1, sizeof(*f->steady_parts));
    if (!f->steady_parts) return -ENOMEM;
    for (uint32_t s = f->steady_first; s < f->steady_first + f->steady_count; s++) {
        const struct sw_report_step *step = &f->steps[s];
        f->steady.end_ns += step->end_ns - step->begin_ns;
        f->steady.gap_ns += step->gap_ns;
        f->steady.path_ns += step->path_ns;
        for (uint32_t l = 0; l < f->lane_count; l++) {
            const struct sw_report_part *part = &f->parts[(size_t)s * f->lane_count + l];
            add(&f->steady_parts[l].busy_ns, part->busy_ns);
            f->steady_parts[l].path_ns += part->path_ns;
            add(&f->steady_parts[l].bytes, part->bytes);
            f->steady_parts[l].tasks += part->tasks;
        }
    }
    f->steady.clock = clock_of(f->steady_parts, f->lane_count);
    return 0;
}

/* ---- all of it ---- */

static void find_extent(const struct sw_report_trace *trace, struct sw_report_figures *f) {
    int64_t begin = INT64_MAX, end = INT64_MIN;
    for (uint32_t i = 0; i < trace->task_count; i++) {
        if (trace->tasks[i].start_ns < begin) begin = trace->tasks[i].start_ns;
        if (trace->tasks[i].end_ns > end) end = trace->tasks[i].end_ns;
    }
    for (uint32_t t = 0; t < trace->tier_count; t++) {
        const struct sw_report_tier *tier = &trace->tiers[t];
        if (tier->count && tier->samples[0].at_ns < begin) begin = tier->samples[0].at_ns;
        if (tier->count && tier->samples[tier->count - 1].at_ns > end)
            end = tier->samples[tier->count - 1].at_ns;
    }
    f->begin_ns = begin <= end ? begin : 0;
    f->end_ns = begin <= end ? end : 0;
}

static int compute(struct sw_report_trace *trace, struct sw_report_figures *f) {
    uint32_t *order = malloc((trace->task_count + (size_t)1) * sizeof(*order));
    uint32_t *rank = malloc((trace->task_count + (size_t)1) * sizeof(*rank));
    int64_t ret = order && rank ? find_steps(trace, f) : -ENOMEM;
    if (ret >= 0) {
        struct walk w = {.tasks = trace->tasks, .order = order, .rank = rank};
        for (uint32_t i = 0; i < trace->task_count; i++)
            if (!trace->tasks[i].eval) order[w.count++] = i;
        qsort_r(order, w.count, sizeof(*order), by_end, trace->tasks);
        for (uint32_t i = 0; i < w.count; i++) rank[order[i]] = i;
        f->step_count = (uint32_t)ret;
        add_tasks(&w, f);
        compute_steps(&w, f);
        ret = compute_steady(f);
    }
    free(order);
    free(rank);
    return (int)ret;
}

int sw_report_compute(struct sw_report_trace *trace, struct sw_report_figures *f) {
    memset(f, 0, sizeof(*f));
    f->lane_count = trace->lane_count;
    if (trace->task_count)
        qsort(trace->tasks, trace->task_count, sizeof(*trace->tasks), by_lane_and_start);
    for (uint32_t t = 0; t < trace->tier_count; t++)
        qsort(trace->tiers[t].samples, trace->tiers[t].count, sizeof(*trace->tiers[t].samples),
              by_time);
    find_extent(trace, f);
    const int ret = compute(trace, f);
    if (ret < 0)
        sw_error("not enough memory for the figures of %u task%s", trace->task_count,
                 trace->task_count == 1 ? "" : "s");
    return ret;
}

void sw_report_figures_free(struct sw_report_figures *f) {
    free(f->steps);
    free(f->parts);
    free(f->steady_parts);
    memset(f, 0, sizeof(*f));
}

/* ---- in words ---- */

/* What a lane does, as the subject of the sentence; the number of its rank may follow its name. */
static const char *subject_of(const char *lane) {
    static const char *const known[][2] = {
        {"compute", "Compute sets"},
        {"h2d", "Copies to the device set"},
        {"d2h", "Copies from the device set"},
        {"comm", "Sums over ranks, gathers and rounding set"},
        {"adam", "Adam on the CPU sets"},
        {"nvme_read", "NVMe reads set"},
        {"nvme_write", "NVMe writes set"},
        {"control", "The norm sets"},
        {"commit", "Commits set"},
        {"data", "Reading data sets"},
    };
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
        if (strcspn(lane, " ") == strlen(known[i][0]) &&
            !strncmp(lane, known[i][0], strlen(known[i][0])))
            return known[i][1];
    return NULL;
}

void sw_report_sentence(const struct sw_report_trace *trace, const struct sw_report_step *step,
                        const struct sw_report_part *parts, char *out, size_t out_size) {
    if (step->path_ns == 0) {
        snprintf(out, out_size, "No task took any time.");
        return;
    }
    const char *lane = trace->lanes[step->clock].name, *subject = subject_of(lane);
    const double share = 100 * (double)parts[step->clock].path_ns / (double)step->path_ns;
    if (subject)
        snprintf(out, out_size, "%s the step: %.0f%% of the critical path.", subject, share);
    else
        snprintf(out, out_size, "%s sets the step: %.0f%% of the critical path.", lane, share);
}
