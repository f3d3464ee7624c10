/* plan/decide.h - the scheme for a case, by one rule, with the steps that led there.
 *
 *     Fits with data parallel: use it. The optimizer state is what hurts: stages 1 and 2. The
 *     parameters do not fit: stage 3. Still not: offload, RAM first, then NVMe. Activations bind:
 *     checkpoint, then offload them.
 *
 * Stages are held to the textbook's bytes for weights, gradients and optimizer state
 * (plan/arithmetic.h), which a run never exceeds, and to its own for the rest. What is offloaded is
 * held to the run's own bytes. What the user placed stays there. */
#ifndef PLAN_DECIDE_H
#define PLAN_DECIDE_H
#include "plan/arithmetic.h"
#include "plan/fit.h"

/* A scheme that was tried: with the least that its activations can take, where nothing fits. */
struct sw_plan_step {
    enum sw_scheme scheme;
    struct sw_fit fit;
    double gpu_state_bytes; /* that the verdict is about: the textbook's, or the run's own */
    double gpu_need_bytes;  /* with all the rest */
    int state_fits;         /* on the GPU, whatever activations take */
    int fits;
    /* Activations as they came would not have fitted: K was raised, or they leave the device. */
    int activations_bound;
};

enum { SW_PLAN_STEPS_MAX = 16 };
struct sw_plan_decision {
    struct sw_plan_step steps[SW_PLAN_STEPS_MAX];
    int step_count;
    int chosen; /* the step that fits, which is the last one; -1: none does */
};

/* The numbers that the textbook's rows need, of a case. */
void sw_plan_numbers(const struct sw_plan_case *c, struct sw_arithmetic_in *out);

/* The verdict of the rule on options whose placements are all chosen. `step` comes with its scheme.
 * 0 (whether it fits or not) or -errno, reported. */
int sw_plan_weigh(const struct sw_plan_case *c, const struct sw_train_options *o,
                  struct sw_plan_step *step);

/* 0 or -errno, reported. Nothing that fits is no error. */
int sw_plan_decide(const struct sw_plan_case *c, struct sw_plan_decision *out);

/* Options of `spillway train` that make it so, in the place of those that the user gave of them.
 * Their count. */
struct sw_plan_option {
    char name[24], value[1024];
};
enum { SW_PLAN_OPTIONS_MAX = 20 };
int sw_plan_options(const struct sw_plan_case *c, const struct sw_plan_step *step,
                    struct sw_plan_option out[SW_PLAN_OPTIONS_MAX]);

#endif
