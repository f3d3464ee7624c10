/* tools/plan_sweep.h - a sweep in words, as a table with a chart, as JSON and as a page. Beside
 * what the simulator says may stand what runs have measured at the same values. */
#ifndef TOOLS_PLAN_SWEEP_H
#define TOOLS_PLAN_SWEEP_H
#include <jansson.h>
#include <stdio.h>
#include "plan/sweep_case.h"

struct sw_sweep_view {
    enum sw_sweep_what what;
    const char *about; /* whose sweep it is: "llama-3-70b on 8xh100" */
    const struct sw_sweep *predicted;
    const struct sw_sweep *measured; /* at the first of the same values; NULL: nothing was */
};

/* "98,304", "6.50 GB/s", "512 GB", "40 GFLOP/s". */
const char *sw_sweep_value_text(enum sw_sweep_what what, double value, char *out, size_t out_size);
/* What is swept: "tokens a step". */
const char *sw_sweep_title(enum sw_sweep_what what);
/* What follows such a value in a sentence: "tokens a step". */
const char *sw_sweep_unit_words(enum sw_sweep_what what);

/* "Below 98,304 tokens a step NVMe reads are the clock; from there on, compute." Of measured
 * points, between which nothing is known: "Up to ...; from ... on, ...". */
void sw_sweep_sentence(const struct sw_sweep_view *v, int measured, char *out, size_t out_size);

/* What a point that was decided anew takes: "offload all, weights in RAM, ...". */
void sw_sweep_line_text(const struct sw_sweep_point *point, char *out, size_t out_size);

/* Sentences, chart, table. */
void sw_sweep_print(const struct sw_sweep_view *v, FILE *out);
/* Plain ASCII, both axes logarithmic; a point is the letter of its step clock, a capital where it
 * was measured, an x on the axis where it does not fit. */
void sw_sweep_chart(const struct sw_sweep_view *v, FILE *out);

/* NULL without memory. */
json_t *sw_sweep_json(const struct sw_sweep_view *v);

/* One HTML file that needs nothing else, in the place of what is there. option: whose argument the
 * path is. 0 or -errno, reported. */
int sw_sweep_page(const struct sw_sweep_view *v, const char *option, const char *path);

#endif
