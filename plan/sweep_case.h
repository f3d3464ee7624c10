/* plan/sweep_case.h - "what if": the quantities of a case that can be swept (plan/sweep.h), and
 * what a step of it takes at each value, by the simulator.
 *
 * Of rates and tokens the line that was chosen for the case's own value is kept. Where more tokens
 * do not fit with it, and for RAM and GPUs, which say what fits, the decision is made for the
 * point. No I/O, no device. */
#ifndef PLAN_SWEEP_CASE_H
#define PLAN_SWEEP_CASE_H
#include "plan/decide.h"
#include "plan/sweep.h"

enum sw_sweep_what {
    SW_SWEEP_TOKENS, /* of a step, of all ranks: by micro-batches */
    SW_SWEEP_NVME,   /* bytes per second read of all drives; every rate of each is scaled alike */
    SW_SWEEP_PCIE,   /* bytes per second to each GPU; from it, both ways and the switch's alike */
    SW_SWEEP_RAM,    /* bytes of a machine; a --host-memory alike */
    SW_SWEEP_GPUS,   /* of a machine */
    SW_SWEEP_ADAM,   /* bytes per second of the update on the CPU */
    SW_SWEEP_FLOPS,  /* operations per second of each rank's device */
    SW_SWEEP_WHAT_COUNT
};
const char *sw_sweep_name(enum sw_sweep_what what);

/* What is swept, and how far. 0 and 0: an eighth to eight times the case's own value. */
struct sw_sweep_range {
    enum sw_sweep_what what;
    double from, to;
    uint32_t points; /* aimed at; 0: SW_SWEEP_POINTS_USUAL */
    int no_search;   /* plans of a point's own are the rule's, as the case's is */
    /* Before each value: how many of the sweep's points are done, of so many; what is asked after
     * them is where a crossover may be. NULL: nobody is told. */
    void (*told)(void *ctx, uint32_t done, uint32_t points, double value);
    void *told_ctx;
};

/* "nvme", "tokens=16K..1M". 0 or -EINVAL, reported as one of the option's. */
int sw_sweep_parse(const char *text, struct sw_sweep_range *out);

/* The case's own value. Where a throttle (--sim-*) holds the lane, it is the throttle that is
 * swept. 0 or -EINVAL, reported: the machine's profile does not have the figure, which is named. */
int sw_sweep_own(const struct sw_plan_case *c, enum sw_sweep_what what, double *own);

/* The options of a run at a value of what is swept: the case's own but for tokens or throttles. */
void sw_sweep_options(const struct sw_plan_case *c, enum sw_sweep_what what, double own,
                      double value, struct sw_train_options *out);

/* step: the one that was chosen for the case; NULL: nothing fitted. 0 or -errno, reported. */
int sw_sweep_case(const struct sw_plan_case *c, const struct sw_plan_step *step,
                  const struct sw_sweep_range *range, struct sw_sweep *out);

#endif
