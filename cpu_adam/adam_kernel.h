/* cpu_adam/adam_kernel.h - the loop behind every variant, compiled once per instruction set.
 *
 * Plain element-wise C: the compiler vectorises it, each element's operations stay the same IEEE
 * operations in the same order (no contraction, no reduction, no approximate root or divide), and
 * so the width of a vector cannot show in the bits. A file that includes this defines
 * SW_ADAM_KERNEL, the name of the function to make. The loops are specialised by type, so nothing
 * is decided inside. */
#include "cpu_adam/adam_variants.h"

#include <math.h>

enum emit { EMIT_NONE, EMIT_BF16, EMIT_FP32 };

/* One loop. `grad_dtype` and `emit` are constants at every call, so the branches on them fold away.
 * The scalars are copied to locals because the stores could otherwise alias them. */
static inline __attribute__((always_inline)) void
run(const struct sw_adam_step *step, float decay_in, float *restrict master,
    float *restrict momentum, float *restrict variance, const void *restrict grad,
    void *restrict weight, size_t count, enum sw_dtype grad_dtype, enum emit emit) {
    const float beta1 = step->beta1, one_minus_beta1 = step->one_minus_beta1;
    const float beta2 = step->beta2, one_minus_beta2 = step->one_minus_beta2;
    const float eps = step->eps, step_size = step->step_size;
    const float rsqrt_bias2 = step->rsqrt_bias2, grad_scale = step->grad_scale;
    const float decay = decay_in;
    for (size_t i = 0; i < count; i++) {
        const float raw = grad_dtype == SW_BF16 ? sw_f32_from_bf16(((const sw_bf16 *)grad)[i])
                                                : ((const float *)grad)[i];
        const float g = raw * grad_scale;
        const float m = beta1 * momentum[i] + one_minus_beta1 * g;
        const float v = beta2 * variance[i] + (one_minus_beta2 * g) * g;
        const float root = sqrtf(v) * rsqrt_bias2 + eps;
        const float p = master[i] * decay - step_size * (m / root);
        momentum[i] = m;
        variance[i] = v;
        master[i] = p;
        if (emit == EMIT_BF16) ((sw_bf16 *)weight)[i] = sw_bf16_from_weight(p);
        if (emit == EMIT_FP32) ((float *)weight)[i] = p;
    }
}

void SW_ADAM_KERNEL(const struct sw_adam_step *step, const struct sw_adam_span *span, size_t first,
                    size_t count) {
    float *p = span->master + first, *m = span->momentum + first, *v = span->variance + first;
    const void *g = (const char *)span->grad + first * sw_dtype_bytes(span->grad_dtype);
    void *w =
        span->weight ? (char *)span->weight + first * sw_dtype_bytes(span->weight_dtype) : NULL;
    const enum emit emit = !w ? EMIT_NONE : span->weight_dtype == SW_BF16 ? EMIT_BF16 : EMIT_FP32;
    const float d = span->decay;
    if (span->grad_dtype == SW_BF16) {
        if (emit == EMIT_NONE)
            run(step, d, p, m, v, g, w, count, SW_BF16, EMIT_NONE);
        else if (emit == EMIT_BF16)
            run(step, d, p, m, v, g, w, count, SW_BF16, EMIT_BF16);
        else
            run(step, d, p, m, v, g, w, count, SW_BF16, EMIT_FP32);
    } else {
        if (emit == EMIT_NONE)
            run(step, d, p, m, v, g, w, count, SW_FP32, EMIT_NONE);
        else if (emit == EMIT_BF16)
            run(step, d, p, m, v, g, w, count, SW_FP32, EMIT_BF16);
        else
            run(step, d, p, m, v, g, w, count, SW_FP32, EMIT_FP32);
    }
}
