/* tools/plan_times.c - what a plan says of the time of a step: which lane sets it, how busy each
 * is, what is written to drives; as text and as JSON. */
#include <inttypes.h>
#include <string.h>

#include "tools/plan.h"

static const char *const phases[] = {"load", "train", "save", "resume"};
enum { PHASES = sizeof(phases) / sizeof(phases[0]) };

const char *sw_plan_duration(double seconds, char *out, size_t out_size) {
    static const struct {
        double seconds;
        const char *name;
    } units[] = {{1, "s"}, {1e-3, "ms"}, {1e-6, "us"}};
    int i = 0;
    while (i < 2 && seconds < units[i].seconds) i++;
    snprintf(out, out_size, "%.3g %s", seconds / units[i].seconds, units[i].name);
    if (seconds >= 1000) snprintf(out, out_size, "%.0f s", seconds);
    return out;
}

static void print_lanes(const struct sw_simulation *s, FILE *out) {
    char busy[32], bytes[32];
    fprintf(out, "  %-12s %10s %8s %9s %12s\n", "lane", "busy", "of step", "critical", "moved");
    for (int l = 0; l < SW_LANE_COUNT; l++) {
        if (s->busy_s[l] <= 0) continue;
        fprintf(out, "  %-12s %10s %7.0f%% %8.0f%%", sw_lane_name((enum sw_lane)l),
                sw_plan_duration(s->busy_s[l], busy, sizeof(busy)), 100 * s->busy_s[l] / s->step_s,
                100 * s->share[l]);
        if (s->bytes[l] > 0) fprintf(out, " %12s", sw_plan_size(s->bytes[l], bytes, sizeof(bytes)));
        fputc('\n', out);
    }
}

static void print_missing(const struct sw_simulation *s, FILE *out) {
    if (s->missing_count == 0) return;
    fprintf(out, "  The profile does not tell");
    for (uint32_t i = 0; i < s->missing_count; i++)
        fprintf(out, "%s %s", i ? "," : "", s->missing[i]);
    fprintf(out, ":\n  what needs %s takes no time here, and a real step is longer.\n",
            s->missing_count == 1 ? "it" : "them");
}

/* What a run holds is allocated before anything is loaded, and stays to its end. */
static void print_peaks(const struct sw_fit *f, FILE *out) {
    char need[32], have[32];
    const char *between = " ";
    fprintf(out, "  peak of load, train, save and resume, each:");
    for (int t = 0; t < SW_TIER_COUNT; t++) {
        if (f->need_bytes[t] <= 0) continue;
        fprintf(out, "%s%s %s", between, sw_tier_name((enum sw_tier)t),
                sw_plan_size(f->need_bytes[t], need, sizeof(need)));
        if (f->budget_bytes[t] > 0)
            fprintf(out, " of %s", sw_plan_size(f->budget_bytes[t], have, sizeof(have)));
        between = ", ";
    }
    fputc('\n', out);
}

void sw_plan_print_times(const struct sw_plan_case *c, const struct sw_fit *f,
                         const struct sw_simulation *s, FILE *out) {
    char a[32], b[32];
    fprintf(out,
            "\nwhat a step would take, by playing its %" PRIu32 " tasks at the machine's rates",
            s->tasks);
    if (c->subject->kind == SW_SUBJECT_COUNT) fprintf(out, " (of %s)", c->subject->shape);
    fprintf(out, ":\n");
    if (s->step_s <= 0) {
        fprintf(out, "  no time: no rate of this machine is known; `spillway bench all` measures "
                     "them\n");
        return;
    }
    fprintf(out, "  step time  %s, %.0f tokens/s", sw_plan_duration(s->step_s, a, sizeof(a)),
            s->tokens_per_s);
    if (!s->is_steady) fprintf(out, " (steps still differ after %" PRIu32 ")", s->steps);
    fprintf(out, "\n  step clock %s, %.0f%% of the critical path\n", sw_lane_name(s->step_clock),
            100 * s->share[s->step_clock]);
    print_lanes(s, out);
    if (s->written_bytes > 0)
        fprintf(out, "  to the drives of a machine: %s a step, %s a day\n",
                sw_plan_size(s->written_bytes, a, sizeof(a)),
                sw_plan_size(s->written_bytes_per_day, b, sizeof(b)));
    print_peaks(f, out);
    print_missing(s, out);
}

static json_t *lanes_json(const struct sw_simulation *s) {
    json_t *lanes = json_array();
    for (int l = 0; l < SW_LANE_COUNT; l++)
        json_array_append_new(lanes,
                              json_pack("{s:s, s:f, s:f, s:f}", "lane",
                                        sw_lane_name((enum sw_lane)l), "busy_s", s->busy_s[l],
                                        "critical_share", s->share[l], "bytes", s->bytes[l]));
    return lanes;
}

static json_t *peaks_json(const struct sw_fit *f) {
    json_t *peaks = json_object();
    for (int i = 0; i < PHASES; i++) {
        json_t *o = json_object();
        for (int t = 0; t < SW_TIER_COUNT; t++)
            json_object_set_new(o, sw_tier_name((enum sw_tier)t),
                                json_integer((json_int_t)f->need_bytes[t]));
        json_object_set_new(peaks, phases[i], o);
    }
    return peaks;
}

json_t *sw_plan_times_json(const struct sw_fit *f, const struct sw_simulation *s) {
    json_t *missing = json_array();
    for (uint32_t i = 0; i < s->missing_count; i++)
        json_array_append_new(missing, json_string(s->missing[i]));
    return json_pack("{s:f, s:f, s:f, s:b, s:s, s:f, s:o, s:f, s:f, s:i, s:o, s:o}", "step_s",
                     s->step_s, "tokens", s->tokens, "tokens_per_s", s->tokens_per_s, "steady",
                     s->is_steady, "step_clock", sw_lane_name(s->step_clock), "clock_share",
                     s->share[s->step_clock], "lanes", lanes_json(s), "written_bytes",
                     s->written_bytes, "written_bytes_per_day", s->written_bytes_per_day, "tasks",
                     (int)s->tasks, "peak_bytes", peaks_json(f), "missing", missing);
}
