/* The CUDA back end in tests, opened as the program opens it: on the CPU stand-in, or on a GPU
 * where SPILLWAY_CUDA_PLUGIN names the plugin that has one. */
#ifndef TESTS_SUPPORT_CUDA_H
#define TESTS_SUPPORT_CUDA_H
#include "kernels/device.h"

/* An open CUDA device with a stream. */
struct cuda_device {
    struct sw_device_handle handle;
    const struct sw_device_ops *ops;
    struct sw_device *device;
    struct sw_stream *stream;
};

/* On the stand-in of this configuration, or what SPILLWAY_CUDA_PLUGIN names. Where there is none,
 * as CUDA's headers are missing, the runner leaves these tests out. */
void cuda_device_open(struct cuda_device *d, int index);
void cuda_device_close(struct cuda_device *d);

/* Names the stand-in's cuFile (tests/preload/cufile.c) for files that devices read: 1; 0: it is not
 * here, as in a bundle for GPUs. Before the first one is opened. */
int cuda_use_cufile(void);

int cuda_is_standin(const struct cuda_device *d);
/* Skips the test that calls it on a GPU, as it needs something of the stand-in's. */
void cuda_standin_only(const struct cuda_device *d, const char *what);

/* The first device, for groups of tests that want one: their set-up and tear-down. */
extern struct cuda_device cuda_dev;
int cuda_open(void **state);
int cuda_close(void **state);

/* Device memory and what the test knows of it. The host's copies are exchanged by copies alone, as
 * with a real device. `exact` has the values of `host`. */
struct cuda_tensor {
    struct cuda_device *d;
    enum sw_dtype dtype;
    uint64_t count;
    void *data, *host;
    double *exact;
};
/* Values uniform in [-size, size] from ref_random(), representable in dtype; size 0: zeros. */
struct cuda_tensor cuda_tensor_new(struct cuda_device *d, enum sw_dtype dtype, uint64_t count,
                                   double size);
void cuda_tensor_free(struct cuda_tensor *t);
void cuda_tensor_put(struct cuda_tensor *t); /* host to device; exact follows host */
void cuda_tensor_get(struct cuda_tensor *t); /* device to host; exact stays */

/* Plain bytes to and from the device, waited for. */
void *cuda_bytes_new(struct cuda_device *d, const void *from, uint64_t bytes);
void cuda_bytes_get(struct cuda_device *d, void *to, const void *from, uint64_t bytes);

#endif
