/* plan/gpu_sizes.c - see the header. */
#include "plan/gpu_sizes.h"

#include <string.h>

#include "kernels/cuda_sizes.h"

static uint64_t gpu_free_bytes(struct sw_device *d) {
    (void)d;
    return 0; /* not the host's, which is all that is asked */
}

static uint64_t gpu_attention(struct sw_device *d, const struct sw_attention *shape) {
    (void)d;
    return sw_cuda_sizes_attention(shape);
}

static uint64_t gpu_rmsnorm(struct sw_device *d, uint64_t n, uint64_t width) {
    (void)d;
    return sw_cuda_sizes_rmsnorm(n, width);
}

static const struct sw_device_ops gpu_ops = {.name = "cuda",
                                             .free_bytes = gpu_free_bytes,
                                             .attention_scratch_bytes = gpu_attention,
                                             .rmsnorm_scratch_bytes = gpu_rmsnorm};

static void no_adam(const struct sw_device_adam_step *step,
                    const struct sw_device_adam_chunk *chunk, void *ctx) {
    (void)step, (void)chunk, (void)ctx;
}

int sw_plan_device_open(struct sw_device_handle *out, const struct sw_plan_case *c,
                        const struct sw_train_options *o) {
    if (o->device == SW_DEVICE_CUDA) {
        *out = (struct sw_device_handle){.ops = &gpu_ops};
        return 0;
    }
    /* As the trainer shares them out. */
    const double all = c->machine->cpus > 0 ? c->machine->cpus : c->machine->cores;
    const int each = (int)all / (int)o->ranks;
    const int threads = o->device_threads ? o->device_threads : each > 0 ? each : 1;
    const struct sw_host_device_options options = {.threads = threads, .adam = no_adam};
    return sw_device_host_open(out, &options);
}

void sw_plan_device_close(struct sw_device_handle *device) {
    if (device->ops != &gpu_ops) device->ops->close(device->device);
}
