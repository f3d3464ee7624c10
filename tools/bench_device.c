/* tools/bench_device.c - opens the device that a benchmark is about. */
#include "tools/bench_device.h"

static void no_adam(const struct sw_device_adam_step *step,
                    const struct sw_device_adam_chunk *chunk, void *ctx) {
    (void)step, (void)chunk, (void)ctx;
}

int sw_bench_device_threads(const struct sw_topology *topology, uint32_t ranks) {
    const int each = sw_topology_threads(topology) / (int)ranks;
    return each > 0 ? each : 1;
}

int sw_bench_device_open(const struct sw_topology *topology, int on_gpu, uint32_t index,
                         uint32_t ranks, struct sw_device_handle *out) {
    const struct sw_cuda_device_options cuda = {.index = (int)index};
    const struct sw_host_device_options host = {.threads = sw_bench_device_threads(topology, ranks),
                                                .adam = no_adam};
    return on_gpu ? sw_device_cuda_open(out, &cuda) : sw_device_host_open(out, &host);
}
