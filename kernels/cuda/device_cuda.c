/* kernels/cuda/device_cuda.c - a CUDA device: memory, streams, events and copies; and the plugin's
 * one symbol.
 *
 * A device is opened in two parts, its context and what is loaded into it, so that a run of several
 * can do each for all. Streams do not wait for the null stream, and nothing runs there but the
 * zeroing of new memory.
 * Events do not spin: who waits for one sleeps; those that keep their time are clock_cuda.c's to
 * read. libcuda is never linked, so the plugin can be opened where there is no driver, and says so.
 */
#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cuda_profiler_api.h>
#include "base/log.h"
#include "kernels/cuda/cuda_internal.h"
#include "kernels/cuda/launchers.h"
#include "kernels/cuda_plugin.h"

enum { PAGE_BYTES = 4096 };

#ifdef SW_POISON
enum { FILL = 0xFF }; /* NaN in every type: what relies on zeros shows at once */
#else
enum { FILL = 0 };
#endif

/* What cudaMalloc gave, and the page within it that the caller has. */
struct sw_cuda_allocation {
    struct sw_cuda_allocation *next;
    void *base, *page;
};

/* ---- reports ---- */

static sw_cuda_plugin_log report;

/* base/log.h within the plugin: lines go to the program's sink. */
void sw_log(enum sw_log_level level, const char *format, ...) {
    char line[512];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof(line), format, args);
    va_end(args);
    if (report) report((int)level, line);
}

int sw_cuda_check(const struct sw_device *d, cudaError_t error, const char *what) {
    if (error == cudaSuccess) return 0;
    cudaGetLastError(); /* else the next call would find it again */
    sw_error("CUDA device %d: %s: %s (%s)", d->index, what, cudaGetErrorString(error),
             cudaGetErrorName(error));
    return error == cudaErrorMemoryAllocation ? -ENOMEM : -EIO;
}

int sw_cuda_enter(const struct sw_device *d) {
    return sw_cuda_check(d, cudaSetDevice(d->index), "the device cannot be used");
}

/* ---- memory ---- */

static int cuda_alloc(struct sw_device *d, uint64_t bytes, void **out) {
    int ret = sw_cuda_enter(d);
    if (ret < 0) return ret;
    struct sw_cuda_allocation *a = calloc(1, sizeof(*a));
    if (!a) {
        sw_error("CUDA device %d: no memory", d->index);
        return -ENOMEM;
    }
    const cudaError_t error = cudaMalloc(&a->base, bytes + PAGE_BYTES);
    if (error != cudaSuccess) {
        cudaGetLastError();
        sw_error("CUDA device %d: no memory for %" PRIu64 " bytes: %s", d->index, bytes,
                 cudaGetErrorString(error));
        ret = error == cudaErrorMemoryAllocation ? -ENOMEM : -EIO;
        goto fail_free;
    }
    a->page = (char *)a->base + -(uintptr_t)a->base % PAGE_BYTES;
    ret = sw_cuda_check(d, cudaMemset(a->page, FILL, bytes), "new memory cannot be cleared");
    if (ret == 0) /* the memset may not be over, and no stream waits for the null stream */
        ret = sw_cuda_check(d, cudaStreamSynchronize(NULL), "new memory cannot be cleared");
    if (ret < 0) goto fail_device;
    pthread_mutex_lock(&d->lock);
    a->next = d->allocations;
    d->allocations = a;
    pthread_mutex_unlock(&d->lock);
    *out = a->page;
    return 0;
fail_device:
    cudaFree(a->base);
fail_free:
    free(a);
    return ret;
}

static void cuda_free(struct sw_device *d, void *p, uint64_t bytes) {
    (void)bytes;
    if (!p || d->given_up) return;
    sw_cuda_enter(d); /* what ends goes on, whatever was reported */
    pthread_mutex_lock(&d->lock);
    struct sw_cuda_allocation **at = &d->allocations;
    while (*at && (*at)->page != p) at = &(*at)->next;
    struct sw_cuda_allocation *a = *at;
    assert(a); /* else it is not this device's */
    *at = a->next;
    pthread_mutex_unlock(&d->lock);
    sw_cuda_check(d, cudaFree(a->base), "memory cannot be given back");
    free(a);
}

static int memory_of(struct sw_device *d, size_t *available, size_t *total) {
    const int ret = sw_cuda_enter(d);
    if (ret < 0) return ret;
    return sw_cuda_check(d, cudaMemGetInfo(available, total), "how much memory it has");
}

static uint64_t cuda_free_bytes(struct sw_device *d) {
    size_t available, total;
    return memory_of(d, &available, &total) < 0 ? 0 : available;
}

static uint64_t cuda_taken_bytes(struct sw_device *d) {
    size_t available, total;
    return memory_of(d, &available, &total) < 0 ? 0 : total - available;
}

static void cuda_bus_address(struct sw_device *d, char out[SW_BUS_ADDRESS_BYTES]) {
    if (cudaDeviceGetPCIBusId(out, SW_BUS_ADDRESS_BYTES, d->index) == cudaSuccess) return;
    cudaGetLastError(); /* which remembers it, and only a hint is missing */
    out[0] = '\0';
}

/* For every device of the process. */
static int cuda_pin(struct sw_device *d, void *p, uint64_t bytes) {
    const int ret = sw_cuda_enter(d);
    if (ret < 0 || bytes == 0) return ret;
    const cudaError_t error = cudaHostRegister(p, bytes, cudaHostRegisterPortable);
    if (error != cudaErrorMemoryAllocation)
        return sw_cuda_check(d, error, "host memory cannot be pinned");
    cudaGetLastError();
    sw_error("CUDA device %d: %" PRIu64
             " bytes of host memory cannot be pinned: too much of it is, "
             "or the limit of locked memory ('ulimit -l') is too low",
             d->index, bytes);
    return -ENOMEM;
}

static void cuda_unpin(struct sw_device *d, void *p) {
    if (!p || d->given_up) return;
    sw_cuda_enter(d);
    sw_cuda_check(d, cudaHostUnregister(p), "host memory cannot be unpinned");
}

/* ---- streams and events ---- */

static int event_new(struct sw_device *d, unsigned flags, struct sw_event **out) {
    int ret = sw_cuda_enter(d);
    if (ret < 0) return ret;
    struct sw_event *e = calloc(1, sizeof(*e));
    if (!e) {
        sw_error("CUDA device %d: no memory for an event", d->index);
        return -ENOMEM;
    }
    e->device = d;
    ret = sw_cuda_check(d, cudaEventCreateWithFlags(&e->event, cudaEventBlockingSync | flags),
                        "an event cannot be made");
    if (ret < 0) {
        free(e);
        return ret;
    }
    *out = e;
    return 0;
}

static int cuda_event_create(struct sw_device *d, struct sw_event **out) {
    return event_new(d, cudaEventDisableTiming, out);
}

static int cuda_timed_event_create(struct sw_device *d, struct sw_event **out) {
    return event_new(d, 0, out);
}

static void cuda_event_destroy(struct sw_event *e) {
    if (!e) return;
    sw_cuda_enter(e->device);
    cudaEventDestroy(e->event);
    free(e);
}

static int cuda_stream_create(struct sw_device *d, struct sw_stream **out) {
    int ret = sw_cuda_enter(d);
    if (ret < 0) return ret;
    struct sw_stream *s = calloc(1, sizeof(*s));
    if (!s) {
        sw_error("CUDA device %d: no memory for a stream", d->index);
        return -ENOMEM;
    }
    s->device = d;
    ret = sw_cuda_check(d, cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking),
                        "a stream cannot be made");
    if (ret < 0) goto fail;
    ret = cuda_event_create(d, &s->synced);
    if (ret == 0) {
        *out = s;
        return 0;
    }
    cudaStreamDestroy(s->stream);
fail:
    free(s);
    return ret;
}

static void cuda_stream_destroy(struct sw_stream *s) {
    if (!s) return;
    const int lasts = s->device->given_up; /* what is queued, for ever */
    sw_cuda_enter(s->device);
    if (!lasts) sw_cuda_check(s->device, cudaStreamSynchronize(s->stream), "the end of a stream");
    cudaStreamDestroy(s->stream);
    if (!lasts) sw_cuda_check(s->device, cudaFree(s->workspace), "memory cannot be given back");
    cuda_event_destroy(s->synced);
    free(s);
}

static int cuda_event_record(struct sw_event *e, struct sw_stream *s) {
    const int ret = sw_cuda_enter(s->device);
    if (ret < 0) return ret;
    return sw_cuda_check(s->device, cudaEventRecord(e->event, s->stream), "record an event");
}

static int cuda_stream_wait(struct sw_stream *s, struct sw_event *e) {
    const int ret = sw_cuda_enter(s->device);
    if (ret < 0) return ret;
    return sw_cuda_check(s->device, cudaStreamWaitEvent(s->stream, e->event, 0),
                         "let a stream wait");
}

static int cuda_event_wait(struct sw_event *e) {
    const int ret = sw_cuda_enter(e->device);
    if (ret < 0) return ret;
    return sw_cuda_check(e->device, cudaEventSynchronize(e->event), "work on a stream");
}

static int cuda_event_done(struct sw_event *e) {
    const int ret = sw_cuda_enter(e->device);
    if (ret < 0) return ret;
    const cudaError_t error = cudaEventQuery(e->event);
    if (error == cudaSuccess) return 1;
    if (error != cudaErrorNotReady) return sw_cuda_check(e->device, error, "work on a stream");
    cudaGetLastError();
    return 0;
}

/* Through an event, because a wait for the stream itself would spin. */
int sw_cuda_stream_sync(struct sw_stream *s) {
    const int ret = cuda_event_record(s->synced, s);
    return ret < 0 ? ret : cuda_event_wait(s->synced);
}

static int cuda_prepare(struct sw_stream *s, int products) {
    const int ret = sw_cuda_enter(s->device);
    return ret < 0 || !products ? ret : sw_cuda_gemm_prepare(s);
}

/* ---- copies ---- */

static int copy(struct sw_stream *s, void *dst, const void *src, uint64_t bytes,
                enum cudaMemcpyKind kind, const char *what) {
    const int ret = sw_cuda_enter(s->device);
    if (ret < 0 || bytes == 0) return ret;
    return sw_cuda_check(s->device, cudaMemcpyAsync(dst, src, bytes, kind, s->stream), what);
}

static int copy_pieces(struct sw_stream *s, char *dst, const char *src, uint64_t bytes,
                       uint64_t piece, enum cudaMemcpyKind kind, const char *what) {
    int ret = 0;
    if (!piece) piece = bytes;
    for (uint64_t at = 0; at < bytes && ret == 0; at += piece)
        ret = copy(s, dst + at, src + at, bytes - at < piece ? bytes - at : piece, kind, what);
    return ret;
}

static void cuda_cut_copies(struct sw_device *d, uint64_t h2d_bytes, uint64_t d2h_bytes) {
    d->h2d_piece = h2d_bytes;
    d->d2h_piece = d2h_bytes;
}

static int cuda_copy_h2d(struct sw_stream *s, void *dst, const void *src, uint64_t bytes) {
    return copy_pieces(s, dst, src, bytes, s->device->h2d_piece, cudaMemcpyHostToDevice,
                       "a copy to the device");
}
static int cuda_copy_d2h(struct sw_stream *s, void *dst, const void *src, uint64_t bytes) {
    return copy_pieces(s, dst, src, bytes, s->device->d2h_piece, cudaMemcpyDeviceToHost,
                       "a copy from the device");
}
static int cuda_copy_d2d(struct sw_stream *s, void *dst, const void *src, uint64_t bytes) {
    return copy(s, dst, src, bytes, cudaMemcpyDeviceToDevice, "a copy on the device");
}

static int cuda_zero(struct sw_stream *s, void *dst, uint64_t bytes) {
    const int ret = sw_cuda_enter(s->device);
    if (ret < 0 || bytes == 0) return ret;
    return sw_cuda_check(s->device, cudaMemsetAsync(dst, 0, bytes, s->stream), "zero");
}

/* ---- the device ---- */

static const char *cuda_numerics(struct sw_device *d) {
    return d->numerics;
}

/* Memory that work which never ends may still use stays the driver's. */
static void forget_what_lasts(struct sw_device *d) {
    while (d->given_up && d->allocations) {
        struct sw_cuda_allocation *next = d->allocations->next;
        free(d->allocations);
        d->allocations = next;
    }
}

static void cuda_close(struct sw_device *d) {
    if (!d) return;
    forget_what_lasts(d);
    assert(!d->allocations); /* and no streams */
    sw_cuda_enter(d);
    sw_cuda_clock_close(d);
    sw_cuda_gemm_close(d);
    pthread_mutex_destroy(&d->lock);
    free(d);
}

static int describe(struct sw_device *d) {
    struct cudaDeviceProp properties;
    int runtime = 0;
    int ret = sw_cuda_check(d, cudaGetDeviceProperties(&properties, d->index), "what it is");
    if (ret == 0) ret = sw_cuda_check(d, cudaRuntimeGetVersion(&runtime), "what it is");
    if (ret < 0) return ret;
    if (properties.major < 8) {
        sw_error("CUDA device %d, %s, has compute capability %d.%d; 8.0 or more is needed for BF16",
                 d->index, properties.name, properties.major, properties.minor);
        return -ENOTSUP;
    }
    snprintf(d->numerics, sizeof(d->numerics),
             "cuda %s, compute capability %d.%d, CUDA %d.%d, cuBLASLt %zu, workspace %d MiB",
             properties.name, properties.major, properties.minor, runtime / 1000,
             runtime % 1000 / 10, cublasLtGetVersion(), SW_CUDA_WORKSPACE_BYTES >> 20);
    return 0;
}

static int device_count(sw_cuda_plugin_log log) {
    int count = 0; /* left alone by a call that fails */
    report = log;
    const cudaError_t error = cudaGetDeviceCount(&count);
    cudaGetLastError();
    if (error == cudaSuccess && count > 0) return count;
    if (error == cudaErrorInsufficientDriver)
        sw_error("CUDA: no NVIDIA driver here, or one older than CUDA %d.%d needs; 'nvidia-smi' "
                 "shows it, --device host does without",
                 CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    else if (error == cudaErrorNoDevice || error == cudaSuccess)
        sw_error("CUDA: the driver is here and sees no GPU; 'nvidia-smi' and CUDA_VISIBLE_DEVICES "
                 "tell which there are, --device host does without");
    else
        sw_error("CUDA cannot be used: %s (%s)", cudaGetErrorString(error),
                 cudaGetErrorName(error));
    return -ENODEV;
}

static int cuda_load(struct sw_device *d) {
    int ret = sw_cuda_enter(d);
    if (ret == 0) ret = sw_cuda_check(d, sw_cuda_load_kernels(), "its kernels");
    if (ret == 0) ret = sw_cuda_check(d, sw_cuda_attention_prepare(), "attention's kernels");
    if (ret == 0) ret = sw_cuda_check(d, sw_cuda_attention_any_prepare(), "attention's kernels");
    return ret < 0 ? ret : sw_cuda_gemm_open(d);
}

/* Profilers that are told to (nsys --capture-range=cudaProfilerApi) record what is between. To them
 * alone the result says something. */
static void cuda_settle(struct sw_device *d, int settled) {
    if (d->given_up || sw_cuda_enter(d) < 0) return;
    if (settled)
        cudaProfilerStart();
    else
        cudaProfilerStop();
    cudaGetLastError();
}

static void cuda_give_up(struct sw_device *d) {
    d->given_up = 1;
}

static struct sw_device_ops cuda_ops;
static pthread_once_t cuda_ops_once = PTHREAD_ONCE_INIT;

static void cuda_ops_fill(void) {
    cuda_ops = (struct sw_device_ops){
        .name = "cuda",
#ifdef SW_WITH_NCCL
        .group = &sw_cuda_group_ops,
#endif
        .close = cuda_close,
        .numerics = cuda_numerics,
        .alloc = cuda_alloc,
        .free = cuda_free,
        .free_bytes = cuda_free_bytes,
        .bus_address = cuda_bus_address,
        .pin = cuda_pin,
        .unpin = cuda_unpin,
        .stream_create = cuda_stream_create,
        .stream_destroy = cuda_stream_destroy,
        .stream_sync = sw_cuda_stream_sync,
        .prepare = cuda_prepare,
        .event_create = cuda_event_create,
        .event_destroy = cuda_event_destroy,
        .event_record = cuda_event_record,
        .stream_wait = cuda_stream_wait,
        .event_wait = cuda_event_wait,
        .event_done = cuda_event_done,
        .timed_event_create = cuda_timed_event_create,
        .clock_set = sw_cuda_clock_set,
        .event_ns = sw_cuda_event_ns,
        .clock_error_ns = sw_cuda_clock_error_ns,
        .load = cuda_load,
        .taken_bytes = cuda_taken_bytes,
        .settle = cuda_settle,
        .give_up = cuda_give_up,
        .cut_copies = cuda_cut_copies,
        .copy_h2d = cuda_copy_h2d,
        .copy_d2h = cuda_copy_d2h,
        .copy_d2d = cuda_copy_d2d,
        .zero = cuda_zero,
        .file_open = sw_cuda_file_open,
        .file_close = sw_cuda_file_close,
        .file_read = sw_cuda_file_read,
    };
    sw_cuda_operators(&cuda_ops);
}

static int open_device(struct sw_device_handle *out, const struct sw_cuda_device_options *options,
                       sw_cuda_plugin_log log) {
    const int count = device_count(log);
    if (count < 0) return count;
    if (options->index < 0 || options->index >= count) {
        sw_error("CUDA: there is no device %d; this machine has %d", options->index, count);
        return -ENODEV;
    }
    struct sw_device *d = calloc(1, sizeof(*d));
    if (!d) {
        sw_error("CUDA device %d: no memory", options->index);
        return -ENOMEM;
    }
    d->index = options->index;
    pthread_mutex_init(&d->lock, NULL);
    int ret = sw_cuda_enter(d);
    if (ret == 0) ret = describe(d);
    if (ret == 0 && !options->loads_later) ret = cuda_load(d);
    if (ret < 0) {
        cuda_close(d);
        return ret;
    }
    pthread_once(&cuda_ops_once, cuda_ops_fill);
    *out = (struct sw_device_handle){.device = d, .ops = &cuda_ops};
    return 0;
}

/* The one symbol that the program looks up. */
extern const struct sw_cuda_plugin sw_cuda_plugin;
const struct sw_cuda_plugin sw_cuda_plugin = {
    .version = SW_CUDA_PLUGIN_VERSION,
    .ops_bytes = sizeof(struct sw_device_ops),
    .chunk_bytes = sizeof(struct sw_device_adam_chunk),
    .device_count = device_count,
    .open = open_device,
};
