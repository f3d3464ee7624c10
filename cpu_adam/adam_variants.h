/* cpu_adam/adam_variants.h - what each instruction set's file offers; inside cpu_adam/ only. */
#ifndef CPU_ADAM_ADAM_VARIANTS_H
#define CPU_ADAM_ADAM_VARIANTS_H
#include "cpu_adam/adam.h"

/* Squares of gradients [0, count) summed in eight lanes; adds the Inf and NaN to *nonfinite. */
typedef double (*sw_adam_norm_kernel)(const void *grad, enum sw_dtype dtype, uint64_t count,
                                      uint64_t *nonfinite);

#define SW_ADAM_VARIANT(isa)                                                                       \
    void sw_adam_kernel_##isa(const struct sw_adam_step *step, const struct sw_adam_chunk *chunk,  \
                              uint64_t first, uint64_t end, double *update_squares);               \
    double sw_adam_norm_##isa(const void *grad, enum sw_dtype dtype, uint64_t count,               \
                              uint64_t *nonfinite)

SW_ADAM_VARIANT(scalar);
SW_ADAM_VARIANT(avx2);
SW_ADAM_VARIANT(avx512);

#endif
