/* cpu_adam/adam.h - one Adam step on the CPU, over memory that the caller owns.
 *
 * One pass: reads gradient, master, momentum and variance, writes the three back and emits the
 * working weight. Every variant (AVX-512, AVX2, scalar), thread count and split of the elements
 * gives the same bits: the arithmetic is element by element, without contraction, and divide and
 * square root are IEEE's. Nothing is allocated; nothing is printed.
 *
 * The rule is torch.optim.AdamW's (decoupled decay; Loshchilov & Hutter, arXiv:1711.05101,
 * Algorithm 2) or torch.optim.Adam's (coupled: L2 in the gradient), bias correction as in Kingma &
 * Ba, arXiv:1412.6980, section 3. With g the gradient times grad_scale, at update t = 1, 2, ...:
 *     g = g + weight_decay * p                     (coupled, where the range decays)
 *     p = p * (1 - lr * weight_decay)              (decoupled, where the range decays)
 *     m = beta1 * m + (1 - beta1) * g
 *     v = beta2 * v + (1 - beta2) * g * g
 *     p = p - lr / (1 - beta1^t) * (m / (sqrt(v) / sqrt(1 - beta2^t) + eps))
 * Subnormal operands and results count as zero in every variant and thread: a moment below 1.2e-38
 * becomes 0 instead of costing a hundred cycles each step. docs/cpu-adam.md says what that changes.
 *
 * Threads: any number of callers at once on disjoint chunks. */
#ifndef CPU_ADAM_ADAM_H
#define CPU_ADAM_ADAM_H
#include <stddef.h>
#include <stdint.h>
#include "base/bf16.h"
#include "base/block_norm.h"
#include "base/isa.h"

/* How the master is kept. Split: the working weight's 16 bits and a signed 16-bit remainder,
 * master = weight + remainder as integers: the same bits for every finite value. */
enum sw_adam_master { SW_MASTER_FP32, SW_MASTER_SPLIT };

/* How the moments are kept. 8-bit is lossy: blocks of SW_ADAM_BLOCK elements with one FP32 scale
 * each, codes as base/moments8.h says. */
enum sw_adam_moments { SW_MOMENTS_FP32, SW_MOMENTS_8BIT };

struct sw_adam_format {
    enum sw_adam_master master;
    enum sw_adam_moments moments;
    enum sw_dtype grad, weight;
};

struct sw_adam_hyper {
    double lr, beta1, beta2, eps, weight_decay;
    int coupled; /* 1: weight decay enters the gradient (Adam), 0: the weight (AdamW) */
};

/* The scalars of one update, computed once in double and rounded once to float. */
struct sw_adam_step {
    float beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
    float step_size;    /* lr / (1 - beta1^t) */
    float rsqrt_bias2;  /* 1 / sqrt(1 - beta2^t) */
    float grad_scale;   /* clip factor times loss unscale; 1 changes no bit */
    float decay_factor; /* 1 - lr * weight_decay; 1 when coupled */
    float decay_grad;   /* weight_decay when coupled, else 0 */
    uint32_t coupled;
    uint32_t seed; /* of this update's stochastic rounding (8-bit moments): the low bits of t */
};

/* Elements of a chunk that decay alike: from the end of the range before it up to `end`. */
struct sw_adam_range {
    uint64_t end; /* exclusive, ascending; the last one's is the chunk's count */
    int decays;
};

enum {
    SW_ADAM_BLOCK = 256, /* elements with one scale, and of one entry of update_squares */
    SW_ADAM_THREADS_MAX = 1024
};

/* A contiguous run of optimizer state. Its buffers are the caller's and do not overlap; any
 * alignment of the elements' own size is fine. count may be 0, then the pointers are not used. */
struct sw_adam_chunk {
    struct sw_adam_format format;
    uint64_t count;
    uint64_t first; /* the first element's index in the model, a multiple of SW_ADAM_BLOCK for 8-bit
                       moments: it seeds their rounding, so that chunk sizes do not show in it */
    const struct sw_adam_range *ranges; /* they tile the chunk */
    int range_count;

    float *master;      /* SW_MASTER_FP32 */
    sw_bf16 *half;      /* SW_MASTER_SPLIT */
    int16_t *remainder; /* SW_MASTER_SPLIT */

    float *momentum, *variance;               /* SW_MOMENTS_FP32 */
    uint8_t *momentum_codes, *variance_codes; /* SW_MOMENTS_8BIT; one scale per block: */
    float *momentum_scales, *variance_scales; /* count / SW_ADAM_BLOCK, rounded up */

    const void *grad; /* count of format.grad */
    void *weight;     /* count of format.weight, BF16 rounded as base/bf16.h says; NULL: none */
};

/* What an update may also return, in the same pass. */
struct sw_adam_extra {
    /* In: NULL, or room for one double per SW_ADAM_BLOCK elements of the chunk, rounded up. Out:
     * the squared change of the master in each block, summed in 16 fixed lanes. */
    double *update_squares;
    double update_square; /* out: their sum in order; its root is the update's norm */

    int checksum; /* in: 1 computes both of these, CRC-32C over the record's bytes (see below) */
    uint32_t checksum_before, checksum_after;
};

typedef void (*sw_adam_kernel)(const struct sw_adam_step *step, const struct sw_adam_chunk *chunk,
                               uint64_t first, uint64_t end, double *update_squares);

struct sw_adam_variant {
    enum sw_isa isa;
    sw_adam_kernel kernel; /* elements [first, end) of a chunk; first a multiple of SW_ADAM_BLOCK */
};

/* By enum sw_isa. */
extern const struct sw_adam_variant sw_adam_variants[SW_ISA_COUNT];

/* The variant of sw_isa_pick()'s instruction set, logged; errors as there. */
int sw_adam_pick(const struct sw_adam_variant **variant);

/* Fills step for update t >= 1. lr, eps, weight_decay >= 0, 0 <= beta < 1 (asserted). */
void sw_adam_prepare(struct sw_adam_step *step, const struct sw_adam_hyper *hyper, uint64_t t,
                     float grad_scale);

/* Updates the chunk with a team of `threads` OpenMP threads (1 to SW_ADAM_THREADS_MAX, the caller
 * among them). extra may be NULL. With a checksum asked for, the caller compares checksum_before
 * with the expected one and throws the chunk away when they differ. */
void sw_adam_update(const struct sw_adam_variant *variant, const struct sw_adam_step *step,
                    const struct sw_adam_chunk *chunk, int threads, struct sw_adam_extra *extra);

/* ---- the record: a chunk's state as one piece of memory, as it lies on disk ----
 *
 * [master | momentum | variance]; a split master is [half | remainder]; 8-bit moments are [momentum
 * scales | variance scales | momentum codes | variance codes]. No padding. */

uint64_t sw_adam_record_bytes(const struct sw_adam_format *format, uint64_t count);

/* Points the chunk's state into a record of its format and count; 4-byte aligned. */
void sw_adam_record_map(struct sw_adam_chunk *chunk, void *record);

/* Start of training: elements [first, first + count) get these masters and moments of zero.
 * With 8-bit moments call it for whole blocks. */
void sw_adam_start(const struct sw_adam_chunk *chunk, uint64_t first, uint64_t count,
                   const float *masters);

/* Gives elements [first, first + count) these values; with 8-bit moments whole blocks. A block of
 * values that codes stand for gets such codes again, others are rounded to the nearest code.
 * Returns how many moments were changed by that, or -EDOM: a variance is negative or not a number,
 * or a value is not finite where the form has none such (split masters, codes). */
int64_t sw_adam_write(const struct sw_adam_chunk *chunk, uint64_t first, uint64_t count,
                      const float *masters, const float *momentum, const float *variance);

/* Reads back elements [first, first + count) as FP32; out pointers may be NULL. */
void sw_adam_read(const struct sw_adam_chunk *chunk, uint64_t first, uint64_t count, float *master,
                  float *momentum, float *variance);

/* ---- the norm of gradients ---- */

struct sw_adam_nonfinite {
    uint64_t count;   /* elements that are Inf or NaN */
    uint64_t first;   /* index of the first, when count > 0 */
    uint32_t is_nan;  /* that first one is a NaN */
    uint32_t padding; /* 0 */
};

/* Squares summed in double: within each block in eight fixed lanes, then the blocks in order, so
 * neither variant nor thread count enters. block_sums: room for one double per SW_NORM_BLOCK
 * elements, rounded up. Returns the sum. */
double sw_adam_grad_norm(const struct sw_adam_variant *variant, const void *grad,
                         enum sw_dtype dtype, uint64_t count, int threads, double *block_sums,
                         struct sw_adam_nonfinite *bad);

#endif
