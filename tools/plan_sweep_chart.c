/* tools/plan_sweep_chart.c - the chart of a sweep in plain ASCII. */
#include "tools/plan_sweep.h"

#include <ctype.h>
#include <math.h>
#include <string.h>

#include "tools/plan.h"

enum { COLUMNS = 61, ROWS = 13, LABEL = 9 };

/* Of a lane's points: its first letter, or where that is taken another one of its name. */
static const char letters[SW_LANE_COUNT + 1] = "cudmarwntf";

struct chart {
    double first, last;                /* values */
    double left, right, bottom, top;   /* logarithms */
    char cells[ROWS + 1][COLUMNS + 1]; /* the last row is the axis */
    int used[SW_LANE_COUNT], misfit;
};

static void take_range(struct chart *c, const struct sw_sweep *s) {
    if (s->point_count == 0) return;
    c->first = fmin(c->first, s->points[0].value);
    c->last = fmax(c->last, s->points[s->point_count - 1].value);
    c->left = log(c->first);
    c->right = log(c->last);
    for (uint32_t i = 0; i < s->point_count; i++) {
        const struct sw_sweep_point *p = &s->points[i];
        if (!p->fits) continue;
        c->bottom = fmin(c->bottom, log(p->step_s));
        c->top = fmax(c->top, log(p->step_s));
    }
}

static int place(double at, double low, double high, int count) {
    return high > low ? (int)lround((at - low) / (high - low) * (count - 1)) : count / 2;
}

static int column_of(const struct chart *c, double value) {
    return place(log(value), c->left, c->right, COLUMNS);
}

static void draw_crossovers(struct chart *c, const struct sw_sweep *s) {
    for (uint32_t i = 0; i < s->crossover_count; i++)
        for (int row = 0; row < ROWS; row++)
            c->cells[row][column_of(c, s->crossovers[i].above.value)] = ':';
}

static void draw_points(struct chart *c, const struct sw_sweep *s, int capitals) {
    for (uint32_t i = 0; i < s->point_count; i++) {
        const struct sw_sweep_point *p = &s->points[i];
        const int column = column_of(c, p->value);
        if (!p->fits) {
            c->cells[ROWS][column] = 'x';
            c->misfit = 1;
            continue;
        }
        const int row = ROWS - 1 - place(log(p->step_s), c->bottom, c->top, ROWS);
        const char letter = letters[p->step_clock];
        c->cells[row][column] = (char)(capitals ? toupper(letter) : letter);
        c->used[p->step_clock] = 1;
    }
}

static void print_legend(const struct chart *c, const struct sw_sweep_view *v, FILE *out) {
    const char *between = "";
    fprintf(out, "%*s ", LABEL, "");
    for (int l = 0; l < SW_LANE_COUNT; l++) {
        if (!c->used[l]) continue;
        fprintf(out, "%s%c %s", between, letters[l], sw_lane_name((enum sw_lane)l));
        between = ", ";
    }
    if (c->misfit) fprintf(out, "%sx does not fit", between);
    fprintf(out, "; : another clock%s\n", v->measured ? "; capitals: measured" : "");
}

/* The ends below the axis, and what is swept between them. */
static void print_axis(const struct sw_sweep_view *v, const struct chart *c, FILE *out) {
    char left[40], right[40];
    sw_sweep_value_text(v->what, c->first, left, sizeof(left));
    sw_sweep_value_text(v->what, c->last, right, sizeof(right));
    const char *title = sw_sweep_title(v->what);
    const int room = COLUMNS - (int)strlen(left) - (int)strlen(right);
    const int before = (room - (int)strlen(title)) / 2;
    fprintf(out, "%*s  %s%*s%s%*s%s\n", LABEL, "", left, before, "", title,
            room - before - (int)strlen(title), "", right);
}

void sw_sweep_chart(const struct sw_sweep_view *v, FILE *out) {
    struct chart c = {.first = INFINITY, .last = -INFINITY, .bottom = INFINITY, .top = -INFINITY};
    for (int row = 0; row <= ROWS; row++) memset(c.cells[row], row < ROWS ? ' ' : '-', COLUMNS);
    take_range(&c, v->predicted);
    if (v->measured) take_range(&c, v->measured);
    draw_crossovers(&c, v->predicted);
    draw_points(&c, v->predicted, 0);
    if (v->measured) draw_points(&c, v->measured, 1);
    for (int row = 0; row < ROWS; row++) {
        char label[32] = "";
        const double share = 1 - row / (ROWS - 1.0);
        const int is_flat = !(c.top > c.bottom);
        if ((is_flat ? row == ROWS / 2 : row % (ROWS / 2) == 0) && isfinite(c.top))
            sw_plan_duration(exp(c.bottom + share * (c.top - c.bottom)), label, sizeof(label));
        int length = COLUMNS;
        while (length > 0 && c.cells[row][length - 1] == ' ') length--;
        fprintf(out, "%*s |%.*s\n", LABEL, label, length, c.cells[row]);
    }
    fprintf(out, "%*s +%s\n", LABEL, "", c.cells[ROWS]);
    print_axis(v, &c, out);
    print_legend(&c, v, out);
}
