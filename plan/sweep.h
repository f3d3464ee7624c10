/* plan/sweep.h - a quantity swept over a range: what a step takes at each value, and between which
 * values the step clock changes.
 *
 * Knows nothing of what is swept: the caller answers for one value at a time. Every point is an
 * answer, nothing is interpolated. One thread. Errors: 0 or -errno, whoever answers reports. */
#ifndef PLAN_SWEEP_H
#define PLAN_SWEEP_H
#include "engine/turn.h"
#include "offload/tiers.h"
#include "plan/arithmetic.h"

/* usual: two for each doubling from an eighth to eight times. */
enum { SW_SWEEP_POINTS_MAX = 64, SW_SWEEP_CROSSOVERS_MAX = 32, SW_SWEEP_POINTS_USUAL = 13 };

/* So close are the two sides of a crossover, as a share of the value. */
#define SW_SWEEP_CLOSE 0.01

struct sw_sweep_point {
    double value;
    int is_own; /* the case's own value */
    int fits;   /* where it does not, what stands below is 0 */
    int anew;   /* decided for this point: another line than that of the case's own value */
    enum sw_scheme scheme;
    struct sw_tiers params, optimizer; /* where weights and state lie */
    double step_s, tokens_per_s;
    enum sw_lane step_clock;
    double clock_share; /* of the critical path */
};

/* Two values that were both asked for, with nothing asked between them: the clocks differ, or one
 * side does not fit. */
struct sw_sweep_crossover {
    struct sw_sweep_point below, above;
};

struct sw_sweep {
    double grain; /* values are its multiples; 0: they are any */
    uint32_t point_count, crossover_count;
    struct sw_sweep_point points[SW_SWEEP_POINTS_MAX];             /* ascending */
    struct sw_sweep_crossover crossovers[SW_SWEEP_CROSSOVERS_MAX]; /* likewise */
};

/* Answers for one value. `out` comes with its value and zeros. */
typedef int (*sw_sweep_answer)(void *ctx, double value, struct sw_sweep_point *out);

/* Values from the one to the other, each as many times as large as the one before, on the grain
 * and without repeats, and `own` among them where it lies between. Their count, at most
 * SW_SWEEP_POINTS_MAX. points: how many are aimed at, from 2. */
uint32_t sw_sweep_values(double from, double to, double own, double grain, uint32_t points,
                         double out[SW_SWEEP_POINTS_MAX]);

/* Asks for all values, which ascend, then between neighbours that differ until the two sides of
 * each crossover are SW_SWEEP_CLOSE to each other, or one grain apart. A clock that comes and goes
 * between two points of the same clock stays unseen. out->grain is set by the caller. */
int sw_sweep_run(struct sw_sweep *out, const double *values, uint32_t count, double own,
                 sw_sweep_answer answer, void *ctx);

/* The crossovers of points that are there, one between each two neighbours that differ: for
 * measured ones, where asking more is dear. */
void sw_sweep_between(struct sw_sweep *sweep);

/* Whether nothing is crossed from one to the other. */
int sw_sweep_alike(const struct sw_sweep_point *a, const struct sw_sweep_point *b);

#endif
