/* cpu_adam/adam.h - one AdamW step on the CPU, over memory that the caller owns.
 *
 * One pass: reads gradient, master, momentum and variance, writes the three back and emits the
 * working weight. Every variant (AVX-512, AVX2, scalar), thread count and split of the elements
 * gives the same bits: the arithmetic is element by element, without contraction, and divide and
 * square root are IEEE's. Nothing is allocated; nothing is printed.
 *
 * The rule is torch.optim.AdamW's (decoupled decay; Loshchilov & Hutter, arXiv:1711.05101,
 * Algorithm 2; bias correction as in Kingma & Ba, arXiv:1412.6980, section 3). With the gradient
 * g already multiplied by grad_scale, at update t = 1, 2, ...:
 *     p = p * (1 - lr * weight_decay)
 *     m = beta1 * m + (1 - beta1) * g
 *     v = beta2 * v + (1 - beta2) * g * g
 *     p = p - lr / (1 - beta1^t) * (m / (sqrt(v) / sqrt(1 - beta2^t) + eps))
 * Threads: any number of callers at once on disjoint spans. */
#ifndef CPU_ADAM_ADAM_H
#define CPU_ADAM_ADAM_H
#include <stddef.h>
#include <stdint.h>
#include "base/bf16.h"

struct sw_adam_hyper {
    double lr, beta1, beta2, eps;
};

/* The scalars of one update, computed once in double and rounded once to float. */
struct sw_adam_step {
    float beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
    float step_size;   /* lr / (1 - beta1^t) */
    float rsqrt_bias2; /* 1 / sqrt(1 - beta2^t) */
    float grad_scale;  /* clip factor times loss unscale; 1 changes no bit */
};

/* A contiguous run of elements with one decay. Buffers do not overlap; any alignment is fine.
 * weight may be NULL (nothing is emitted). */
struct sw_adam_span {
    float *master, *momentum, *variance; /* count floats each, updated in place */
    const void *grad;                    /* count of grad_dtype */
    void *weight; /* count of weight_dtype: BF16 rounded as base/bf16.h says */
    size_t count;
    float decay; /* 1 - lr * weight_decay, rounded once from double; 1 changes no bit */
    enum sw_dtype grad_dtype, weight_dtype;
};

typedef void (*sw_adam_kernel)(const struct sw_adam_step *step, const struct sw_adam_span *span,
                               size_t first, size_t count);

struct sw_adam_variant {
    const char *name;       /* "avx512", "avx2", "scalar" */
    int (*supported)(void); /* CPU and operating system both */
    sw_adam_kernel kernel;
};

/* Best first; the last one always runs. */
extern const struct sw_adam_variant sw_adam_variants[];
extern const int sw_adam_variant_count;

/* The variant for this machine, decided once: the one that SPILLWAY_ISA names, else the best
 * supported one. 0, or -EINVAL (unknown name) or -ENOTSUP (this CPU cannot run it). */
int sw_adam_pick(const struct sw_adam_variant **variant);

/* Fills step for update t >= 1. lr >= 0, 0 <= beta < 1, eps >= 0 (asserted). */
void sw_adam_prepare(struct sw_adam_step *step, const struct sw_adam_hyper *hyper, uint64_t t,
                     float grad_scale);

/* Updates every span with a team of `threads` OpenMP threads (>= 1, the caller among them). */
void sw_adam_update(const struct sw_adam_variant *variant, const struct sw_adam_step *step,
                    const struct sw_adam_span *spans, int span_count, int threads);

#endif
