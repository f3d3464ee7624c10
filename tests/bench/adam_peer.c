/* tests/bench/adam_peer.c - the CPU Adam as one call, for tests/bench/adam_peers.py, which builds
 * it with base/ and cpu_adam/ into a shared library and drives it through ctypes. */
#include <stdint.h>

#include "cpu_adam/adam.h"

const char *peer_variant(void);
int peer_update(float *master, float *momentum, float *variance, const void *grad, int wide_grad,
                void *weight, uint64_t count, int threads, uint64_t t, double lr, double beta1,
                double beta2, double eps, double weight_decay, float scale);

/* "avx2", or NULL when SPILLWAY_ISA forces what cannot run. */
const char *peer_variant(void) {
    const struct sw_adam_variant *variant;
    return sw_adam_pick(&variant) < 0 ? NULL : sw_isa_name(variant->isa);
}

/* One update of FP32 state; a BF16 weight where one is given. 0 or -errno. */
int peer_update(float *master, float *momentum, float *variance, const void *grad, int wide_grad,
                void *weight, uint64_t count, int threads, uint64_t t, double lr, double beta1,
                double beta2, double eps, double weight_decay, float scale) {
    const struct sw_adam_variant *variant;
    const int ret = sw_adam_pick(&variant);
    if (ret < 0) return ret;
    const struct sw_adam_hyper hyper = {lr, beta1, beta2, eps, weight_decay, 0};
    const struct sw_adam_range range = {count, 1};
    const struct sw_adam_chunk chunk = {
        .format = {.grad = wide_grad ? SW_FP32 : SW_BF16, .weight = SW_BF16},
        .count = count,
        .ranges = &range,
        .range_count = 1,
        .master = master,
        .momentum = momentum,
        .variance = variance,
        .grad = grad,
        .weight = weight,
    };
    struct sw_adam_step step;
    sw_adam_prepare(&step, &hyper, t, scale);
    sw_adam_update(variant, &step, &chunk, threads, NULL);
    return 0;
}
