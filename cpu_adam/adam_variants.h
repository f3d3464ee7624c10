/* cpu_adam/adam_variants.h - the kernels that the variant table names; inside cpu_adam/ only. */
#ifndef CPU_ADAM_ADAM_VARIANTS_H
#define CPU_ADAM_ADAM_VARIANTS_H
#include "cpu_adam/adam.h"

void sw_adam_kernel_scalar(const struct sw_adam_step *step, const struct sw_adam_span *span,
                           size_t first, size_t count);
void sw_adam_kernel_avx2(const struct sw_adam_step *step, const struct sw_adam_span *span,
                         size_t first, size_t count);
void sw_adam_kernel_avx512(const struct sw_adam_step *step, const struct sw_adam_span *span,
                           size_t first, size_t count);

#endif
