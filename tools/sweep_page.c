/* tools/sweep_page.c - a sweep as one HTML file: sentences, an SVG chart, the table. No script, no
 * network; the style sheet of `spillway report` with a few rules of its own. */
#include "tools/plan_sweep.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "tools/page_file.h"
#include "tools/plan.h"
#include "tools/report.h"

/* The chart's own units: as wide as a phone, whose letters then have their usual size. */
enum { WIDTH = 360, HEIGHT = 250, LEFT = 54, RIGHT = 350, TOP = 22, BOTTOM = 206 };

static const char own_css[] =
    "svg { display: block; width: 100%; max-width: 46rem; height: auto; margin: 1rem 0;\n"
    "    font-size: 10px; }\n"
    "svg text { fill: var(--quiet); }\n"
    ".grid { stroke: var(--line); stroke-width: 1; }\n"
    ".crossover { stroke: var(--quiet); stroke-width: 1; stroke-dasharray: 3 3; }\n"
    ".curve { fill: none; stroke: var(--quiet); stroke-width: 1.5; }\n"
    ".curve.measured { stroke-dasharray: 2 2; }\n"
    ".band { opacity: .13; }\n"
    ".misfit { stroke: var(--warn); stroke-width: 2; }\n"
    ".own { stroke: var(--ink); stroke-width: 2; }\n"
    "tr.own th, tr.own td { font-weight: 700; background: var(--track); }\n"
    "@media (max-width: 46rem) { tr.own { background: var(--track); } }\n"
    "#legend { margin-bottom: 1rem; }\n";

struct frame {
    const struct sw_sweep_view *v;
    FILE *out;
    double first, last;              /* values */
    double left, right, bottom, top; /* logarithms */
};

static void put_text(const char *text, FILE *out) {
    for (; *text; text++) {
        if (*text == '<')
            fputs("&lt;", out);
        else if (*text == '&')
            fputs("&amp;", out);
        else if (*text == '"')
            fputs("&quot;", out);
        else
            fputc(*text, out);
    }
}

/* ---- the chart ---- */

static void take_range(struct frame *f, const struct sw_sweep *s) {
    if (s->point_count == 0) return;
    f->first = fmin(f->first, s->points[0].value);
    f->last = fmax(f->last, s->points[s->point_count - 1].value);
    f->left = log(f->first);
    f->right = log(f->last);
    for (uint32_t i = 0; i < s->point_count; i++) {
        const struct sw_sweep_point *p = &s->points[i];
        if (!p->fits) continue;
        f->bottom = fmin(f->bottom, log(p->step_s));
        f->top = fmax(f->top, log(p->step_s));
    }
}

/* A curve that is flat, or nowhere, runs through the middle. */
static double between(double at, double low, double high, double first, double last) {
    return high > low ? first + (at - low) / (high - low) * (last - first) : (first + last) / 2;
}

static double x_of(const struct frame *f, double value) {
    return between(log(value), f->left, f->right, LEFT, RIGHT);
}

static double y_of(const struct frame *f, double step_s) {
    return between(log(step_s), f->bottom, f->top, BOTTOM, TOP + 10);
}

static void put_band(const struct frame *f, double from, double to,
                     const struct sw_sweep_point *p) {
    if (!p->fits) return;
    const char *lane = sw_lane_name(p->step_clock);
    fprintf(f->out,
            "<rect class=\"band\" x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"%d\" "
            "fill=\"var(--%s)\"/>\n",
            from, TOP, to - from, BOTTOM - TOP, lane);
    if (to - from > 6.0 * (double)strlen(lane))
        fprintf(f->out, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%s</text>\n",
                (from + to) / 2, TOP - 6, lane);
}

/* What is the clock between crossovers, as the simulator says. */
static void put_bands(const struct frame *f) {
    const struct sw_sweep *s = f->v->predicted;
    double from = LEFT;
    for (uint32_t i = 0; i < s->crossover_count; i++) {
        const struct sw_sweep_crossover *x = &s->crossovers[i];
        const double to = x_of(f, x->above.value);
        put_band(f, from, to, &x->below);
        fprintf(f->out, "<line class=\"crossover\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%d\" y2=\"%d\"/>\n",
                to, to, TOP, BOTTOM);
        from = to;
    }
    if (s->point_count) put_band(f, from, RIGHT, &s->points[s->point_count - 1]);
}

/* Through neighbours that fit: where a point does not, the line ends. */
static void put_curve(const struct frame *f, const struct sw_sweep *s, const char *class) {
    int is_open = 0;
    for (uint32_t i = 0; i < s->point_count; i++) {
        const struct sw_sweep_point *p = &s->points[i];
        if (is_open && !p->fits) fprintf(f->out, "\"/>\n");
        if (!is_open && p->fits) fprintf(f->out, "<polyline class=\"%s\" points=\"", class);
        if (p->fits) fprintf(f->out, "%.1f,%.1f ", x_of(f, p->value), y_of(f, p->step_s));
        is_open = p->fits;
    }
    if (is_open) fprintf(f->out, "\"/>\n");
}

static void put_tip(const struct frame *f, const struct sw_sweep_point *p) {
    char value[40], step[32];
    fprintf(f->out,
            "<title>%s %s: ", sw_sweep_value_text(f->v->what, p->value, value, sizeof(value)),
            sw_sweep_unit_words(f->v->what));
    if (p->fits)
        fprintf(f->out, "%s, %s", sw_plan_duration(p->step_s, step, sizeof(step)),
                sw_lane_name(p->step_clock));
    else
        fputs("does not fit", f->out);
    fputs("</title>", f->out);
}

static void put_point(const struct frame *f, const struct sw_sweep_point *p, int measured) {
    const double x = x_of(f, p->value);
    const char *class = p->is_own ? " class=\"own\"" : "";
    if (!p->fits) {
        fprintf(f->out, "<path class=\"misfit\" d=\"M%.1f %d l8 8 m0 -8 l-8 8\">", x - 4,
                BOTTOM - 4);
        put_tip(f, p);
        fputs("</path>\n", f->out);
        return;
    }
    const double y = y_of(f, p->step_s);
    const char *lane = sw_lane_name(p->step_clock);
    if (measured)
        fprintf(f->out,
                "<rect%s x=\"%.1f\" y=\"%.1f\" width=\"7\" height=\"7\" fill=\"var(--%s)\">", class,
                x - 3.5, y - 3.5, lane);
    else
        fprintf(f->out, "<circle%s cx=\"%.1f\" cy=\"%.1f\" r=\"4\" fill=\"var(--%s)\">", class, x,
                y, lane);
    put_tip(f, p);
    fputs(measured ? "</rect>\n" : "</circle>\n", f->out);
}

static void put_step_labels(const struct frame *f) {
    char label[32];
    if (!isfinite(f->top)) return;
    const int count = f->top > f->bottom ? 3 : 1;
    for (int i = 0; i < count; i++) {
        const double at = f->bottom + i * (f->top - f->bottom) / 2, y = y_of(f, exp(at));
        fprintf(f->out,
                "<line class=\"grid\" x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\"/>\n"
                "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%s</text>\n",
                LEFT, RIGHT, y, y, LEFT - 4, y + 3.5,
                sw_plan_duration(exp(at), label, sizeof(label)));
    }
}

static void put_value_labels(const struct frame *f) {
    char label[40];
    const double ends[] = {f->first, f->last};
    for (int i = 0; i < 2; i++)
        fprintf(f->out, "<text x=\"%d\" y=\"%d\" text-anchor=\"%s\">%s</text>\n", i ? RIGHT : LEFT,
                BOTTOM + 16, i ? "end" : "start",
                sw_sweep_value_text(f->v->what, ends[i], label, sizeof(label)));
    fprintf(f->out, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">%s</text>\n",
            (LEFT + RIGHT) / 2, BOTTOM + 34, sw_sweep_title(f->v->what));
}

static void put_chart(const struct sw_sweep_view *v, const char *sentence, FILE *out) {
    struct frame f = {.v = v,
                      .out = out,
                      .first = INFINITY,
                      .last = -INFINITY,
                      .bottom = INFINITY,
                      .top = -INFINITY};
    take_range(&f, v->predicted);
    if (v->measured) take_range(&f, v->measured);
    fprintf(out, "<svg viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"", WIDTH, HEIGHT);
    put_text(sentence, out);
    fputs("\">\n", out);
    put_bands(&f);
    put_step_labels(&f);
    put_value_labels(&f);
    put_curve(&f, v->predicted, "curve");
    if (v->measured) put_curve(&f, v->measured, "curve measured");
    for (uint32_t i = 0; i < v->predicted->point_count; i++)
        put_point(&f, &v->predicted->points[i], 0);
    for (uint32_t i = 0; v->measured && i < v->measured->point_count; i++)
        put_point(&f, &v->measured->points[i], 1);
    fputs("</svg>\n", out);
}

/* ---- the rest ---- */

static int is_clock(const struct sw_sweep *s, int lane) {
    for (uint32_t i = 0; s && i < s->point_count; i++)
        if (s->points[i].fits && (int)s->points[i].step_clock == lane) return 1;
    return 0;
}

static int has_misfit(const struct sw_sweep *s) {
    for (uint32_t i = 0; i < s->point_count; i++)
        if (!s->points[i].fits) return 1;
    return 0;
}

static void put_legend(const struct sw_sweep_view *v, FILE *out) {
    fputs("<ul id=\"legend\">\n", out);
    for (int l = 0; l < SW_LANE_COUNT; l++)
        if (is_clock(v->predicted, l) || is_clock(v->measured, l))
            fprintf(out,
                    "<li><span class=\"swatch\" style=\"--swatch: var(--%s)\"></span>%s</li>\n",
                    sw_lane_name((enum sw_lane)l), sw_lane_name((enum sw_lane)l));
    fputs(v->measured ? "<li>circles: simulated, squares: measured</li>\n" : "", out);
    fputs(has_misfit(v->predicted) ? "<li>crosses: does not fit</li>\n" : "", out);
    fputs("<li>outlined: the case's own value</li>\n</ul>\n", out);
}

/* text: NULL: a dash, which a narrow screen leaves out. */
static void put_cell(const char *label, const char *text, FILE *out) {
    fprintf(out, "<td%s data-label=\"%s\">", text ? "" : " class=\"empty\"", label);
    put_text(text ? text : "-", out);
    fputs("</td>", out);
}

static void put_row(const struct sw_sweep_view *v, uint32_t i, FILE *out) {
    const struct sw_sweep_point *p = &v->predicted->points[i];
    char text[256];
    fprintf(out, "<tr%s><th scope=\"row\">%s</th>", p->is_own ? " class=\"own\"" : "",
            sw_sweep_value_text(v->what, p->value, text, sizeof(text)));
    put_cell("step time", p->fits ? sw_plan_duration(p->step_s, text, sizeof(text)) : NULL, out);
    put_cell("tokens/s",
             p->fits ? sw_plan_commas((uint64_t)llround(p->tokens_per_s), text, sizeof(text))
                     : NULL,
             out);
    put_cell("step clock", p->fits ? sw_lane_name(p->step_clock) : NULL, out);
    if (v->measured) {
        const struct sw_sweep_point *m = &v->measured->points[i];
        const int there = i < v->measured->point_count;
        put_cell("measured", there ? sw_plan_duration(m->step_s, text, sizeof(text)) : NULL, out);
        put_cell("its clock", there ? sw_lane_name(m->step_clock) : NULL, out);
    } else {
        put_cell("fits", p->fits ? "yes" : "no", out);
        if (p->anew) sw_sweep_line_text(p, text, sizeof(text));
        put_cell("decided anew", p->anew ? text : NULL, out);
    }
    fputs("</tr>\n", out);
}

static void put_table(const struct sw_sweep_view *v, FILE *out) {
    fprintf(out,
            "<table>\n<thead><tr><th scope=\"col\">%s</th><th scope=\"col\">step time</th>"
            "<th scope=\"col\">tokens/s</th><th scope=\"col\">step clock</th>"
            "<th scope=\"col\">%s</th><th scope=\"col\">%s</th></tr></thead>\n<tbody>\n",
            sw_sweep_name(v->what), v->measured ? "measured" : "fits",
            v->measured ? "its clock" : "decided anew");
    for (uint32_t i = 0; i < v->predicted->point_count; i++) put_row(v, i, out);
    fputs("</tbody>\n</table>\n", out);
}

static int put_page(void *ctx, FILE *out) {
    const struct sw_sweep_view *v = ctx;
    char sentence[1024];
    sw_sweep_sentence(v, 0, sentence, sizeof(sentence));
    fputs("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
          "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
          "<meta name=\"color-scheme\" content=\"light dark\">\n<title>Spillway sweep: ",
          out);
    put_text(sw_sweep_name(v->what), out);
    fprintf(out, "</title>\n<style>\n%s%s</style>\n</head>\n<body>\n<header>\n", sw_report_css,
            own_css);
    fputs("<p class=\"program\">Spillway sweep: ", out);
    put_text(v->about, out);
    fputs("</p>\n<h1>", out);
    put_text(sentence, out);
    fputs("</h1>\n", out);
    if (v->measured) {
        char measured[1024];
        sw_sweep_sentence(v, 1, measured, sizeof(measured));
        fputs("<p>Measured: ", out);
        put_text(measured, out);
        fputs("</p>\n", out);
    }
    fputs("</header>\n<main>\n<section aria-label=\"Step time\">\n", out);
    put_chart(v, sentence, out);
    put_legend(v, out);
    fputs("</section>\n<section aria-label=\"All points\">\n", out);
    put_table(v, out);
    fputs("</section>\n</main>\n</body>\n</html>\n", out);
    return 0;
}

int sw_sweep_page(const struct sw_sweep_view *v, const char *option, const char *path) {
    struct sw_sweep_view copy = *v;
    return sw_page_write(option, path, put_page, &copy);
}
