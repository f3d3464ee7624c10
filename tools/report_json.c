/* tools/report_json.c - the figures as an object: of each step and of the steady ones, a list per
 * figure with an entry for each lane. */
#include "tools/report.h"

#include <math.h>
#include <string.h>

static json_t *whole(double value) {
    return json_integer(value < 0x1p63 ? (json_int_t)llround(value) : INT64_MAX);
}

/* a / b, or null where b is 0. */
static json_t *ratio(double a, double b) {
    return b > 0 ? json_real(a / b) : json_null();
}

/* `steps` is what the sums are of: 1, or the number of steady steps. */
static json_t *step_json(const struct sw_report_trace *trace, const struct sw_report_step *step,
                         const struct sw_report_part *parts, double steps) {
    const double step_ns = (double)(step->end_ns - step->begin_ns);
    json_t *busy = json_array(), *busy_share = json_array(), *path = json_array(),
           *path_share = json_array(), *bytes = json_array(), *tasks = json_array(),
           *while_busy = json_array(), *overall = json_array();
    for (uint32_t l = 0; l < trace->lane_count; l++) {
        const struct sw_report_part *p = &parts[l];
        json_array_append_new(busy, whole((double)p->busy_ns / steps));
        json_array_append_new(busy_share, ratio((double)p->busy_ns, step_ns));
        json_array_append_new(path, whole((double)p->path_ns / steps));
        json_array_append_new(path_share, ratio((double)p->path_ns, (double)step->path_ns));
        json_array_append_new(bytes, whole((double)p->bytes / steps));
        json_array_append_new(tasks, ratio((double)p->tasks, steps));
        json_array_append_new(while_busy, ratio((double)p->bytes * 1e9, (double)p->busy_ns));
        json_array_append_new(overall, ratio((double)p->bytes * 1e9, step_ns));
    }
    char sentence[256];
    sw_report_sentence(trace, step, parts, sentence, sizeof(sentence));
    json_t *clock = step->path_ns ? json_string(trace->lanes[step->clock].name) : json_null();
    return json_pack("{s:o,s:s,s:o,s:o,s:o,s:o,s:o,s:o,s:o,s:o,s:o,s:o,s:o}", "step_clock", clock,
                     "sentence", sentence, "step_ns", whole(step_ns / steps), "path_ns",
                     whole((double)step->path_ns / steps), "gap_ns",
                     whole((double)step->gap_ns / steps), "tasks", tasks, "busy_ns", busy,
                     "busy_share", busy_share, "lane_path_ns", path, "path_share", path_share,
                     "bytes", bytes, "bytes_per_busy_s", while_busy, "bytes_per_s", overall);
}

static json_t *steps_json(const struct sw_report_trace *trace, const struct sw_report_figures *f) {
    json_t *steps = json_array();
    for (uint32_t s = 0; s < f->step_count; s++) {
        const struct sw_report_step *step = &f->steps[s];
        json_t *entry = step_json(trace, step, &f->parts[(size_t)s * f->lane_count], 1);
        json_object_set_new(entry, "step", json_integer((json_int_t)step->step));
        json_object_set_new(entry, "begin_ns", json_integer(step->begin_ns));
        json_object_set_new(entry, "end_ns", json_integer(step->end_ns));
        json_array_append_new(steps, entry);
    }
    return steps;
}

static json_t *steady_json(const struct sw_report_trace *trace, const struct sw_report_figures *f) {
    if (!f->steady_count) return json_null();
    json_t *steady = step_json(trace, &f->steady, f->steady_parts, f->steady_count);
    const struct sw_report_step *first = &f->steps[f->steady_first];
    json_object_set_new(steady, "first_step", json_integer((json_int_t)first->step));
    json_object_set_new(steady, "last_step",
                        json_integer((json_int_t)first[f->steady_count - 1].step));
    json_object_set_new(steady, "steps", json_integer(f->steady_count));
    return steady;
}

static json_t *lanes_json(const struct sw_report_trace *trace) {
    json_t *lanes = json_array();
    for (uint32_t l = 0; l < trace->lane_count; l++) {
        const struct sw_report_lane *lane = &trace->lanes[l];
        json_t *peak =
            lane->peak_bytes_per_s ? json_integer((json_int_t)lane->peak_bytes_per_s) : json_null();
        json_array_append_new(lanes,
                              json_pack("{s:s,s:o}", "lane", lane->name, "peak_bytes_per_s", peak));
    }
    return lanes;
}

/* The highest use and the budget that came with it. */
static json_t *memory_json(const struct sw_report_trace *trace) {
    json_t *tiers = json_array();
    for (uint32_t t = 0; t < trace->tier_count; t++) {
        const struct sw_report_tier *tier = &trace->tiers[t];
        if (!tier->count) continue;
        const struct sw_report_sample *top = tier->samples;
        for (uint32_t i = 1; i < tier->count; i++)
            if (tier->samples[i].used > top->used) top = &tier->samples[i];
        json_array_append_new(tiers, json_pack("{s:s,s:I,s:I,s:I}", "tier", tier->name,
                                               "used_bytes_max", (json_int_t)top->used,
                                               "budget_bytes", (json_int_t)top->budget, "samples",
                                               (json_int_t)tier->count));
    }
    return tiers;
}

json_t *sw_report_json(const struct sw_report_trace *trace, const struct sw_report_figures *f,
                       const char *path) {
    char ascii[512]; /* a path may hold bytes that are not UTF-8 */
    size_t i = 0;
    for (; path[i] && i + 1 < sizeof(ascii); i++)
        ascii[i] = (unsigned char)path[i] < 0x80 ? path[i] : '?';
    ascii[i] = 0;
    return json_pack("{s:i,s:s,s:b,s:I,s:I,s:I,s:o,s:o,s:o,s:o}", "schema", 1, "trace", ascii,
                     "truncated", trace->truncated, "tasks", (json_int_t)trace->task_count,
                     "begin_ns", (json_int_t)f->begin_ns, "end_ns", (json_int_t)f->end_ns, "lanes",
                     lanes_json(trace), "memory", memory_json(trace), "steady",
                     steady_json(trace, f), "steps", steps_json(trace, f));
}
