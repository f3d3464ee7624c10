/* kernels/cuda_plugin.h - what libspillway_cuda.so offers and all it is asked for: one symbol.
 *
 * The plugin links CUDA's libraries and nothing of this program, and the program links no CUDA. It
 * reports through the function it is given. */
#ifndef KERNELS_CUDA_PLUGIN_H
#define KERNELS_CUDA_PLUGIN_H
#include "kernels/device.h"

#define SW_CUDA_PLUGIN_SYMBOL "sw_cuda_plugin"

/* To be raised with every change of kernels/device.h that its sizes below do not show. */
enum { SW_CUDA_PLUGIN_VERSION = 4 };

/* level: enum sw_log_level. */
typedef void (*sw_cuda_plugin_log)(int level, const char *line);

struct sw_cuda_plugin {
    uint32_t version; /* SW_CUDA_PLUGIN_VERSION of the header it was built with */
    uint32_t ops_bytes, chunk_bytes;
    /* How many devices there are, or -errno: -ENODEV where there is no driver or no device. */
    int (*device_count)(sw_cuda_plugin_log log);
    int (*open)(struct sw_device_handle *out, const struct sw_cuda_device_options *options,
                sw_cuda_plugin_log log);
};

#endif
