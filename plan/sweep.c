/* plan/sweep.c - see the header. */
#include "plan/sweep.h"

#include <assert.h>
#include <math.h>

int sw_sweep_alike(const struct sw_sweep_point *a, const struct sw_sweep_point *b) {
    return a->fits == b->fits && (!a->fits || a->step_clock == b->step_clock);
}

/* ---- values ---- */

static double on_grain(double value, double grain) {
    if (grain <= 0) return value;
    const double count = round(value / grain);
    return grain * (count < 1 ? 1 : count);
}

/* Values that are one but for rounding. */
static int is_same(double a, double b) {
    return fabs(a - b) <= 1e-9 * fabs(b);
}

static uint32_t append(double *out, uint32_t n, double value) {
    if (n < SW_SWEEP_POINTS_MAX && (n == 0 || (!is_same(value, out[n - 1]) && value > out[n - 1])))
        out[n++] = value;
    return n;
}

uint32_t sw_sweep_values(double from, double to, double own, double grain, uint32_t points,
                         double out[SW_SWEEP_POINTS_MAX]) {
    uint32_t n = 0;
    int own_due = own >= from && own <= to;
    assert(points >= 2 && from > 0 && to >= from);
    for (uint32_t i = 0; i < points; i++) {
        const double at = from * pow(to / from, i / (points - 1.0));
        const double value = on_grain(at, grain);
        if (own_due && (value > own || is_same(value, own))) {
            n = append(out, n, own); /* as it is, not as the powers come out */
            own_due = 0;
        }
        n = append(out, n, value);
    }
    return n;
}

/* ---- crossovers ---- */

struct asked {
    struct sw_sweep *sweep;
    sw_sweep_answer answer;
    void *ctx;
};

static int ask(const struct asked *a, double value, struct sw_sweep_point *out) {
    *out = (struct sw_sweep_point){.value = value};
    return a->answer(a->ctx, value, out);
}

static void note(struct sw_sweep *s, const struct sw_sweep_point *below,
                 const struct sw_sweep_point *above) {
    if (s->crossover_count < SW_SWEEP_CROSSOVERS_MAX)
        s->crossovers[s->crossover_count++] = (struct sw_sweep_crossover){*below, *above};
}

/* A value between the two, or 0 where they are close enough. */
static double between(const struct sw_sweep *s, double below, double above) {
    if (above <= below * (1 + SW_SWEEP_CLOSE)) return 0;
    const double middle = on_grain(sqrt(below * above), s->grain);
    if (middle > below && middle < above && !is_same(middle, below) && !is_same(middle, above))
        return middle;
    /* Of few grains the root may be rounded to an end. */
    const double next = below + s->grain;
    return s->grain > 0 && next < above && !is_same(next, above) ? next : 0;
}

/* Halves until the sides are close. Where the middle is neither side's, both halves have one. */
static int narrow(const struct asked *a, const struct sw_sweep_point *below,
                  const struct sw_sweep_point *above) {
    if (sw_sweep_alike(below, above)) return 0;
    const double value = between(a->sweep, below->value, above->value);
    struct sw_sweep_point middle;
    if (value == 0) {
        note(a->sweep, below, above);
        return 0;
    }
    int ret = ask(a, value, &middle);
    if (ret == 0) ret = narrow(a, below, &middle);
    if (ret == 0) ret = narrow(a, &middle, above);
    return ret;
}

int sw_sweep_run(struct sw_sweep *out, const double *values, uint32_t count, double own,
                 sw_sweep_answer answer, void *ctx) {
    const struct asked a = {out, answer, ctx};
    assert(count <= SW_SWEEP_POINTS_MAX);
    out->point_count = out->crossover_count = 0;
    for (uint32_t i = 0; i < count; i++) {
        struct sw_sweep_point *point = &out->points[out->point_count];
        const int ret = ask(&a, values[i], point);
        if (ret < 0) return ret;
        point->is_own = is_same(values[i], own);
        out->point_count++;
    }
    for (uint32_t i = 1; i < count; i++) {
        const int ret = narrow(&a, &out->points[i - 1], &out->points[i]);
        if (ret < 0) return ret;
    }
    return 0;
}

void sw_sweep_between(struct sw_sweep *s) {
    s->crossover_count = 0;
    for (uint32_t i = 1; i < s->point_count; i++)
        if (!sw_sweep_alike(&s->points[i - 1], &s->points[i]))
            note(s, &s->points[i - 1], &s->points[i]);
}
