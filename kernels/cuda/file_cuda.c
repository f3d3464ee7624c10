/* kernels/cuda/file_cuda.c - files that a GPU reads by itself: NVIDIA's cuFile (GPUDirect Storage),
 * opened where it is installed.
 *
 * cuFile would read through the host's memory, too, where a drive, a file system or the machine has
 * no direct way: then this back end refuses, as the engine's own way is the better one for that,
 * with checksums on its side; CUFILE_ALLOW_COMPAT_MODE=true lets it. The few calls are declared
 * here as the library's interface has them, so that a build needs no header of it. */
#include <assert.h>
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include "base/log.h"
#include "kernels/cuda/cuda_internal.h"
#include "kernels/cuda/launchers.h"

/* ---- the library ---- */

struct cufile_error {
    int code, cuda; /* 0: success */
};
struct cufile_descriptor {
    int type;
    union {
        int fd;
        void *other;
    } handle;
    const void *operations;
};
enum { CUFILE_IS_FD = 1 };

static struct {
    struct cufile_error (*open)(void);
    struct cufile_error (*add)(void **handle, struct cufile_descriptor *descriptor);
    void (*remove)(void *handle);
    struct cufile_error (*add_memory)(const void *base, size_t bytes, int flags);
    struct cufile_error (*remove_memory)(const void *base);
    ssize_t (*read)(void *handle, void *base, size_t bytes, off_t from, off_t to);
    char why[256]; /* it cannot be used; "": it can */
} cufile;
static pthread_once_t cufile_once = PTHREAD_ONCE_INIT;

static void open_library(void) {
    const char *wanted = getenv("SPILLWAY_CUFILE");
    const char *name = wanted && *wanted ? wanted : "libcufile.so.0";
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL); /* for as long as the program runs */
    if (!library) {
        snprintf(cufile.why, sizeof(cufile.why), "%s is not installed", name);
        return;
    }
    const struct {
        void *call;
        const char *name;
    } calls[] = {{&cufile.open, "cuFileDriverOpen"},
                 {&cufile.add, "cuFileHandleRegister"},
                 {&cufile.remove, "cuFileHandleDeregister"},
                 {&cufile.add_memory, "cuFileBufRegister"},
                 {&cufile.remove_memory, "cuFileBufDeregister"},
                 {&cufile.read, "cuFileRead"}};
    for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
        void *found = dlsym(library, calls[i].name);
        memcpy(calls[i].call, &found, sizeof(found));
        if (found) continue;
        snprintf(cufile.why, sizeof(cufile.why), "%s has no %s", name, calls[i].name);
        return;
    }
    setenv("CUFILE_ALLOW_COMPAT_MODE", "false", 0);
    const struct cufile_error error = cufile.open();
    if (error.code)
        snprintf(cufile.why, sizeof(cufile.why),
                 "%s does not start: error %d of cuFile, %d of CUDA; is nvidia-fs loaded?", name,
                 error.code, error.cuda);
}

struct sw_device_file {
    struct sw_device *device;
    void *handle;
    uint64_t *parts; /* SW_CUDA_WORD_PARTS */
    int is_open;     /* and counts among the device's files */
};

/* ---- memory that files are read into ---- */

/* Once for all files of a device. What the library does not know it reads into by a detour on the
 * device, which is no error. */
static void add_memory(struct sw_device *d, void *base, uint64_t bytes) {
    if (d->file_count++ > 0 || cufile.add_memory(base, bytes, 0).code) return;
    d->file_base = base;
    d->file_bytes = bytes;
}

static void remove_memory(struct sw_device *d) {
    if (--d->file_count > 0 || !d->file_base) return;
    cufile.remove_memory(d->file_base);
    d->file_base = NULL;
}

/* ---- files ---- */

static int refuse(struct sw_device_file *f, char *why, size_t size, const char *text) {
    snprintf(why, size, "%s", text);
    sw_cuda_file_close(f);
    return -ENOTSUP;
}

int sw_cuda_file_open(struct sw_device *d, int fd, void *base, uint64_t bytes,
                      struct sw_device_file **out, char *why, size_t size) {
    pthread_once(&cufile_once, open_library);
    if (cufile.why[0]) return refuse(NULL, why, size, cufile.why);
    int ret = sw_cuda_enter(d);
    if (ret < 0) return ret;
    struct sw_device_file *f = calloc(1, sizeof(*f));
    if (!f) {
        sw_error("CUDA device %d: no memory for a file", d->index);
        return -ENOMEM;
    }
    f->device = d;
    struct cufile_descriptor descriptor = {.type = CUFILE_IS_FD, .handle.fd = fd};
    const struct cufile_error error = cufile.add(&f->handle, &descriptor);
    if (error.code) {
        char text[160];
        snprintf(text, sizeof(text), "cuFile has no direct way to such a file: its error %d",
                 error.code);
        f->handle = NULL;
        return refuse(f, why, size, text);
    }
    ret = sw_cuda_check(d, cudaMalloc((void **)&f->parts, SW_CUDA_WORD_PARTS * sizeof(*f->parts)),
                        "memory for the sums of a file");
    if (ret < 0) {
        sw_cuda_file_close(f);
        return ret;
    }
    f->is_open = 1;
    add_memory(d, base, bytes);
    *out = f;
    return 0;
}

void sw_cuda_file_close(struct sw_device_file *f) {
    if (!f) return;
    sw_cuda_enter(f->device); /* what ends goes on, whatever was reported */
    if (f->is_open) remove_memory(f->device);
    if (!f->device->given_up)
        sw_cuda_check(f->device, cudaFree(f->parts), "memory cannot be given back");
    if (f->handle) cufile.remove(f->handle);
    free(f);
}

static int read_all(const struct sw_device_file *f, char *dst, uint64_t offset, uint64_t bytes) {
    const struct sw_device *d = f->device;
    const int known =
        d->file_base && dst >= d->file_base && dst + bytes <= d->file_base + d->file_bytes;
    char *base = known ? d->file_base : dst;
    for (uint64_t done = 0; done < bytes;) {
        errno = 0;
        const ssize_t got = cufile.read(f->handle, base, bytes - done, (off_t)(offset + done),
                                        dst - base + (off_t)done);
        if (got > 0 && (uint64_t)got <= bytes - done) {
            done += (uint64_t)got;
            continue;
        }
        sw_error("CUDA device %d: cuFile has read %llu of %llu bytes from byte %llu on, and then "
                 "ended with %lld (%s)",
                 f->device->index, (unsigned long long)done, (unsigned long long)bytes,
                 (unsigned long long)offset, (long long)got, errno ? strerror(errno) : "its own");
        return -EIO;
    }
    return 0;
}

int sw_cuda_file_read(struct sw_stream *s, struct sw_device_file *f, void *dst, uint64_t offset,
                      uint64_t bytes, uint64_t *sum) {
    static const char what[] = "the sum of what was read";
    uint64_t parts[SW_CUDA_WORD_PARTS];
    assert(s->device == f->device);
    int ret = sw_cuda_stream_sync(s); /* what still uses that memory */
    if (ret == 0) ret = read_all(f, dst, offset, bytes);
    if (ret == 0)
        ret = sw_cuda_check(f->device, sw_cuda_word_parts(s->stream, f->parts, dst, bytes), what);
    if (ret == 0)
        ret = sw_cuda_check(
            f->device,
            cudaMemcpyAsync(parts, f->parts, sizeof(parts), cudaMemcpyDeviceToHost, s->stream),
            what);
    if (ret == 0) ret = sw_cuda_stream_sync(s);
    if (ret < 0) return ret;
    *sum = 0;
    for (int i = 0; i < SW_CUDA_WORD_PARTS; i++) *sum += parts[i];
    return 0;
}
