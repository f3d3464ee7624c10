/* tests/support_cuda.c - see support_cuda.h. */
#include "tests/support_cuda.h"
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>
#include "tests/support_reference.h"

/* This program is build/CONFIG/tests/NAME; the stand-in is build/standin/ for release, else
 * build/CONFIG/standin/. */
static const char *standin_path(void) {
    static char path[PATH_MAX + 64];
    const char *wanted = getenv("SPILLWAY_CUDA_PLUGIN");
    if (wanted && *wanted) return wanted;
    char self[PATH_MAX];
    const ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);
    assert_true(length > 0);
    self[length] = '\0';
    for (int up = 0; up < 2; up++) *strrchr(self, '/') = '\0';
    char *config = strrchr(self, '/') + 1;
    if (strcmp(config, "release") == 0) *(config - 1) = '\0';
    snprintf(path, sizeof(path), "%s/standin/libspillway_cuda.so", self);
    return path;
}

void cuda_device_open(struct cuda_device *d, int index) {
    const struct sw_cuda_device_options options = {.index = index};
    setenv("SPILLWAY_CUDA_PLUGIN", standin_path(), 1);
    assert_int_equal(sw_device_cuda_open(&d->handle, &options), 0);
    d->ops = d->handle.ops;
    d->device = d->handle.device;
    assert_int_equal(d->ops->stream_create(d->device, &d->stream), 0);
}

void cuda_device_close(struct cuda_device *d) {
    if (!d->ops) return;
    d->ops->stream_destroy(d->stream);
    d->ops->close(d->device);
}

int cuda_use_cufile(void) {
    char path[600], self[512];
    const ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);
    assert_true(length > 0);
    self[length] = '\0';
    *strrchr(self, '/') = '\0';
    snprintf(path, sizeof(path), "%s/preload/cufile.so", self);
    return access(path, R_OK) == 0 && setenv("SPILLWAY_CUFILE", path, 1) == 0;
}

int cuda_is_standin(const struct cuda_device *d) {
    return strstr(d->ops->numerics(d->device), "CPU stand-in") != NULL;
}

void cuda_standin_only(const struct cuda_device *d, const char *what) {
    if (cuda_is_standin(d)) return;
    print_message("a GPU: %s\n", what);
    skip();
}

struct cuda_device cuda_dev;

int cuda_open(void **state) {
    (void)state;
    cuda_device_open(&cuda_dev, 0);
    return 0;
}

int cuda_close(void **state) {
    (void)state;
    cuda_device_close(&cuda_dev);
    return 0;
}

void *cuda_bytes_new(struct cuda_device *d, const void *from, uint64_t bytes) {
    void *data = NULL;
    assert_int_equal(d->ops->alloc(d->device, bytes, &data), 0);
    if (from) assert_int_equal(d->ops->copy_h2d(d->stream, data, from, bytes), 0);
    assert_int_equal(d->ops->stream_sync(d->stream), 0);
    return data;
}

void cuda_bytes_get(struct cuda_device *d, void *to, const void *from, uint64_t bytes) {
    assert_int_equal(d->ops->copy_d2h(d->stream, to, from, bytes), 0);
    assert_int_equal(d->ops->stream_sync(d->stream), 0);
}

static uint64_t bytes_of(const struct cuda_tensor *t) {
    return t->count * sw_dtype_bytes(t->dtype);
}

struct cuda_tensor cuda_tensor_new(struct cuda_device *d, enum sw_dtype dtype, uint64_t count,
                                   double size) {
    struct cuda_tensor t = {.d = d, .dtype = dtype, .count = count};
    t.host = calloc(count + 1, sizeof(float));
    t.exact = calloc(count + 1, sizeof(double));
    for (uint64_t i = 0; i < count && size != 0.0; i++) {
        const float x = (float)(((double)ref_random() / 0x1p31 - 1.0) * size);
        if (dtype == SW_FP32)
            ((float *)t.host)[i] = x;
        else
            ((sw_bf16 *)t.host)[i] = sw_bf16_from_f32(x);
    }
    assert_int_equal(d->ops->alloc(d->device, bytes_of(&t), &t.data), 0);
    cuda_tensor_put(&t);
    return t;
}

void cuda_tensor_free(struct cuda_tensor *t) {
    t->d->ops->free(t->d->device, t->data, bytes_of(t));
    free(t->host);
    free(t->exact);
}

void cuda_tensor_put(struct cuda_tensor *t) {
    for (uint64_t i = 0; i < t->count; i++) t->exact[i] = ref_value(t->dtype, t->host, i);
    assert_int_equal(t->d->ops->copy_h2d(t->d->stream, t->data, t->host, bytes_of(t)), 0);
}

void cuda_tensor_get(struct cuda_tensor *t) {
    cuda_bytes_get(t->d, t->host, t->data, bytes_of(t));
}
