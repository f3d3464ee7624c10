/* tools/plan_sweep.c - a sweep in words, as a table and as JSON. */
#include "tools/plan_sweep.h"

#include <math.h>
#include <string.h>

#include "base/size.h"
#include "tools/plan.h"

/* ---- words ---- */

static const struct {
    const char *title, *head, *unit; /* of the sweep, of the column, of a value in a sentence */
} words[SW_SWEEP_WHAT_COUNT] = {
    [SW_SWEEP_TOKENS] = {"tokens a step", "tokens", "tokens a step"},
    [SW_SWEEP_NVME] = {"NVMe reads, writes alike", "NVMe reads", "of NVMe reads"},
    [SW_SWEEP_PCIE] = {"PCIe to the device, from it alike", "PCIe", "of PCIe"},
    [SW_SWEEP_RAM] = {"RAM", "RAM", "of RAM"},
    [SW_SWEEP_GPUS] = {"GPUs", "GPUs", "GPUs"},
    [SW_SWEEP_ADAM] = {"the update on the CPU", "update", "of the update"},
    [SW_SWEEP_FLOPS] = {"operations", "operations", "of operations"},
};

/* Of a lane, in the middle of a sentence, and whether there are many of it. */
static const struct {
    const char *name;
    int many;
} lanes[SW_LANE_COUNT] = {
    [SW_LANE_COMPUTE] = {"compute", 0},
    [SW_LANE_H2D] = {"copies to the device", 1},
    [SW_LANE_D2H] = {"copies from the device", 1},
    [SW_LANE_COMM] = {"sums over ranks, gathers and rounding", 1},
    [SW_LANE_ADAM] = {"Adam on the CPU", 0},
    [SW_LANE_NVME_READ] = {"NVMe reads", 1},
    [SW_LANE_NVME_WRITE] = {"NVMe writes", 1},
    [SW_LANE_CONTROL] = {"the norm", 0},
    [SW_LANE_COMMIT] = {"commits", 1},
    [SW_LANE_DATA] = {"reading data", 0},
};

const char *sw_sweep_title(enum sw_sweep_what what) {
    return words[what].title;
}

const char *sw_sweep_unit_words(enum sw_sweep_what what) {
    return words[what].unit;
}

static const char *flops_text(double flops, char *out, size_t out_size) {
    const int tera = flops >= 1e12;
    snprintf(out, out_size, "%.3g %s", flops / (tera ? 1e12 : 1e9), tera ? "TFLOP/s" : "GFLOP/s");
    return out;
}

const char *sw_sweep_value_text(enum sw_sweep_what what, double value, char *out, size_t out_size) {
    if (what == SW_SWEEP_TOKENS || what == SW_SWEEP_GPUS)
        return sw_plan_commas((uint64_t)llround(value), out, out_size);
    if (what == SW_SWEEP_FLOPS) return flops_text(value, out, out_size);
    sw_size_print((uint64_t)llround(value), out, out_size);
    const size_t used = strlen(out);
    if (what != SW_SWEEP_RAM) snprintf(out + used, out_size - used, "/s");
    return out;
}

/* "NVMe reads are the clock", and where the verb was there before, "NVMe reads". */
static void say_clock(const struct sw_sweep_point *p, int *has_verb, const char *before, char *out,
                      size_t out_size) {
    if (!p->fits) {
        sw_plan_say(out, out_size, "%snothing fits", before);
        return;
    }
    sw_plan_say(out, out_size, "%s%s", before, lanes[p->step_clock].name);
    if (!*has_verb)
        sw_plan_say(out, out_size, " %s the clock", lanes[p->step_clock].many ? "are" : "is");
    *has_verb = 1;
}

static void say_one_clock(const struct sw_sweep *s, char *out, size_t out_size) {
    int has_verb = 0;
    if (s->point_count == 0) return;
    say_clock(&s->points[0], &has_verb, "From end to end, ", out, out_size);
    sw_plan_say(out, out_size, ".");
}

void sw_sweep_sentence(const struct sw_sweep_view *v, int measured, char *out, size_t out_size) {
    const struct sw_sweep *s = measured ? v->measured : v->predicted;
    const char *unit = words[v->what].unit;
    char value[40];
    int has_verb = 0;
    *out = 0;
    if (s->crossover_count == 0) {
        say_one_clock(s, out, out_size);
        return;
    }
    for (uint32_t i = 0; i < s->crossover_count; i++) {
        const struct sw_sweep_crossover *x = &s->crossovers[i];
        const double end = measured ? x->below.value : x->above.value;
        sw_sweep_value_text(v->what, end, value, sizeof(value));
        if (i == 0)
            sw_plan_say(out, out_size, "%s %s %s,", measured ? "Up to" : "Below", value, unit);
        else
            sw_plan_say(out, out_size, "%s to %s,", measured ? "" : "; from there", value);
        say_clock(&x->below, &has_verb, " ", out, out_size);
        sw_sweep_value_text(v->what, x->above.value, value, sizeof(value));
        if (measured) sw_plan_say(out, out_size, "; from %s", value);
    }
    sw_plan_say(out, out_size, measured ? " on," : "; from there on,");
    say_clock(&s->crossovers[s->crossover_count - 1].above, &has_verb, " ", out, out_size);
    sw_plan_say(out, out_size, ".");
}

void sw_sweep_line_text(const struct sw_sweep_point *p, char *out, size_t out_size) {
    char params[64], optimizer[64];
    snprintf(out, out_size, "%s, weights %s, optimizer %s", sw_scheme_name(p->scheme),
             sw_tiers_print(p->params, params, sizeof(params)),
             sw_tiers_print(p->optimizer, optimizer, sizeof(optimizer)));
}

/* ---- the table ---- */

static void print_times(const struct sw_sweep_point *p, FILE *out) {
    char step[32], rate[40];
    if (!p->fits) {
        fprintf(out, " %10s %12s  %-11s     ", "-", "-", "-");
        return;
    }
    fprintf(out, " %10s %12s  %-11s %3.0f%%", sw_plan_duration(p->step_s, step, sizeof(step)),
            sw_plan_commas((uint64_t)llround(p->tokens_per_s), rate, sizeof(rate)),
            sw_lane_name(p->step_clock), 100 * p->clock_share);
}

static void print_measured(const struct sw_sweep_view *v, uint32_t i, FILE *out) {
    char step[32];
    if (!v->measured || i >= v->measured->point_count) return;
    const struct sw_sweep_point *m = &v->measured->points[i], *p = &v->predicted->points[i];
    fprintf(out, "  %10s %+6.1f%%  %s", sw_plan_duration(m->step_s, step, sizeof(step)),
            100 * (p->step_s / m->step_s - 1), sw_lane_name(m->step_clock));
}

static void print_table(const struct sw_sweep_view *v, FILE *out) {
    const struct sw_sweep *s = v->predicted;
    int anew = 0;
    fprintf(out, "  %14s %10s %12s  %-11s %4s  %s", words[v->what].head, "step time", "tokens/s",
            "step clock", "", v->measured ? "  measured   error  its clock" : "fits");
    fputc('\n', out);
    for (uint32_t i = 0; i < s->point_count; i++) {
        const struct sw_sweep_point *p = &s->points[i];
        char value[40], line[256];
        fprintf(out, "%c %14s", p->is_own ? '>' : ' ',
                sw_sweep_value_text(v->what, p->value, value, sizeof(value)));
        print_times(p, out);
        if (!v->measured) fprintf(out, "  %s", p->fits ? "yes" : "no");
        print_measured(v, i, out);
        if (p->anew) {
            sw_sweep_line_text(p, line, sizeof(line));
            fprintf(out, "*  %s", line);
            anew = 1;
        }
        fputc('\n', out);
    }
    fprintf(out, "  > the case's own value\n");
    if (anew)
        fprintf(out, "  * decided anew for this point: not the line of the case's own value\n");
}

void sw_sweep_print(const struct sw_sweep_view *v, FILE *out) {
    char text[1024];
    fprintf(out, "\nsweep of %s: %s\n", words[v->what].title, v->about);
    sw_sweep_sentence(v, 0, text, sizeof(text));
    fprintf(out, "%s%s\n", v->measured ? "simulator: " : "", text);
    if (v->measured) {
        sw_sweep_sentence(v, 1, text, sizeof(text));
        fprintf(out, "measured:  %s\n", text);
    }
    fputc('\n', out);
    sw_sweep_chart(v, out);
    fputc('\n', out);
    print_table(v, out);
}

/* ---- JSON ---- */

static json_t *point_json(const struct sw_sweep_point *p) {
    char params[64], optimizer[64];
    json_t *o = json_pack("{s:f, s:b, s:b, s:b}", "value", p->value, "own", p->is_own, "fits",
                          p->fits, "decided_anew", p->anew);
    if (!p->fits) return o;
    json_object_set_new(o, "scheme", json_string(sw_scheme_name(p->scheme)));
    json_object_set_new(o, "params",
                        json_string(sw_tiers_print(p->params, params, sizeof(params))));
    json_object_set_new(o, "optimizer",
                        json_string(sw_tiers_print(p->optimizer, optimizer, sizeof(optimizer))));
    json_object_set_new(o, "step_s", json_real(p->step_s));
    json_object_set_new(o, "tokens_per_s", json_real(p->tokens_per_s));
    json_object_set_new(o, "step_clock", json_string(sw_lane_name(p->step_clock)));
    json_object_set_new(o, "clock_share", json_real(p->clock_share));
    return o;
}

static json_t *clock_json(const struct sw_sweep_point *p) {
    return p->fits ? json_string(sw_lane_name(p->step_clock)) : json_null();
}

static json_t *curve_json(const struct sw_sweep_view *v, int measured) {
    const struct sw_sweep *s = measured ? v->measured : v->predicted;
    json_t *points = json_array(), *crossovers = json_array();
    char text[1024];
    for (uint32_t i = 0; i < s->point_count; i++)
        json_array_append_new(points, point_json(&s->points[i]));
    for (uint32_t i = 0; i < s->crossover_count; i++) {
        const struct sw_sweep_crossover *x = &s->crossovers[i];
        json_array_append_new(crossovers,
                              json_pack("{s:f, s:f, s:o, s:o}", "below", x->below.value, "above",
                                        x->above.value, "clock_below", clock_json(&x->below),
                                        "clock_above", clock_json(&x->above)));
    }
    sw_sweep_sentence(v, measured, text, sizeof(text));
    return json_pack("{s:s, s:o, s:o}", "sentence", text, "points", points, "crossovers",
                     crossovers);
}

json_t *sw_sweep_json(const struct sw_sweep_view *v) {
    json_t *root = curve_json(v, 0);
    if (!root) return NULL;
    json_object_set_new(root, "what", json_string(sw_sweep_name(v->what)));
    if (v->measured) json_object_set_new(root, "measured", curve_json(v, 1));
    return root;
}
