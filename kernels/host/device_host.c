/* kernels/host/device_host.c - the CPU as a device: memory, streams, events and copies.
 *
 * A stream has no thread and no queue: whatever is submitted runs inline in the calling thread, so
 * a stream is always idle between calls and an event is recorded as soon as it is asked for. What
 * is left of an event is the hand-over between threads: it orders all that the recorder did
 * before all that the waiter does after. */
#include "kernels/host/host.h"
#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "base/library_memory.h"
#include "base/log.h"
#include "base/size.h"

enum { PAGE_BYTES = 4096, HUGE_BYTES = 2 << 20 };

/* oneDNN packs into at most 9,984 x 384 floats a thread, 14.6 MiB, and shares a few small blocks.
 */
enum { LIBRARY_BYTES_PER_THREAD = 16 << 20, LIBRARY_BYTES_SHARED = 32 << 20 };

/* Small, as a run has several for each of its tasks. */
struct sw_event {
    struct sw_device *device;
    atomic_int recorded, waiters;
};

#ifdef SW_POISON
enum { FILL = 0xFF }; /* NaN in every type: what relies on zeros shows at once */
#else
enum { FILL = 0 };
#endif

static uint64_t host_free_bytes(struct sw_device *d) {
    (void)d;
    return UINT64_MAX;
}

static void host_bus_address(struct sw_device *d, char out[SW_BUS_ADDRESS_BYTES]) {
    (void)d;
    out[0] = '\0';
}

static uint64_t mapped_bytes(uint64_t bytes) {
    return sw_round_up(bytes ? bytes : 1, PAGE_BYTES);
}

/* Large blocks start on a huge page; what is mapped beyond them for that is given back. */
static int host_alloc(struct sw_device *d, uint64_t bytes, void **out) {
    (void)d;
    const uint64_t size = mapped_bytes(bytes);
    const uint64_t slack = size >= HUGE_BYTES ? HUGE_BYTES : 0;
    char *map =
        mmap(NULL, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) {
        char text[32];
        const int ret = -errno;
        sw_error("host device: no memory for %s: %s", sw_size_print(bytes, text, sizeof(text)),
                 strerror(-ret));
        return ret;
    }
    if (slack) {
        const uint64_t head = -(uintptr_t)map % HUGE_BYTES;
        if (head) munmap(map, head);
        if (slack - head) munmap(map + head + size, slack - head);
        map += head;
        madvise(map, size, MADV_HUGEPAGE); /* a wish: without it the pages are small */
    }
    if (FILL) memset(map, FILL, size);
    *out = map;
    return 0;
}

static void host_free(struct sw_device *d, void *p, uint64_t bytes) {
    (void)d;
    if (p) munmap(p, mapped_bytes(bytes));
}

/* The CPU copies from anywhere, inside the call. */
static int host_pin(struct sw_device *d, void *p, uint64_t bytes) {
    (void)d, (void)p, (void)bytes;
    return 0;
}
static void host_unpin(struct sw_device *d, void *p) {
    (void)d, (void)p;
}

static int host_stream_create(struct sw_device *d, struct sw_stream **out) {
    struct sw_stream *s = calloc(1, sizeof(*s));
    if (!s) {
        sw_error("host device: no memory for a stream");
        return -ENOMEM;
    }
    s->device = d;
    *out = s;
    return 0;
}

static void host_stream_destroy(struct sw_stream *s) {
    free(s);
}

static int host_stream_sync(struct sw_stream *s) {
    (void)s;
    return 0;
}

static int host_prepare(struct sw_stream *s, int products) {
    atomic_int together = 0; /* a region with nothing in it would not be one */
#pragma omp parallel num_threads(s->device->threads)
    atomic_fetch_add(&together, 1);
    return products ? sw_host_gemm_prepare(s) : 0;
}

static int host_event_create(struct sw_device *d, struct sw_event **out) {
    struct sw_event *e = calloc(1, sizeof(*e));
    if (!e) {
        sw_error("host device: no memory for an event");
        return -ENOMEM;
    }
    e->device = d;
    *out = e;
    return 0;
}

static void host_event_destroy(struct sw_event *e) {
    free(e);
}

static int host_event_record(struct sw_event *e, struct sw_stream *s) {
    (void)s;
    atomic_store(&e->recorded, 1);
    if (atomic_load(&e->waiters) == 0) return 0; /* who comes from now on sees that it is */
    pthread_mutex_lock(&e->device->event_lock);
    pthread_cond_broadcast(&e->device->event_recorded);
    pthread_mutex_unlock(&e->device->event_lock);
    return 0;
}

static int host_event_wait(struct sw_event *e) {
    if (atomic_load(&e->recorded)) return 0;
    pthread_mutex_lock(&e->device->event_lock);
    atomic_fetch_add(&e->waiters, 1);
    while (!atomic_load(&e->recorded))
        pthread_cond_wait(&e->device->event_recorded, &e->device->event_lock);
    atomic_fetch_sub(&e->waiters, 1);
    pthread_mutex_unlock(&e->device->event_lock);
    return 0;
}

static int host_stream_wait(struct sw_stream *s, struct sw_event *e) {
    (void)s;
    return host_event_wait(e);
}

static int host_copy(struct sw_stream *s, void *dst, const void *src, uint64_t bytes) {
    (void)s;
    if (bytes) memcpy(dst, src, bytes);
    return 0;
}

static int host_zero(struct sw_stream *s, void *dst, uint64_t bytes) {
    (void)s;
    if (bytes) memset(dst, 0, bytes);
    return 0;
}

static const char *host_numerics(struct sw_device *d) {
    return d->numerics;
}

static void host_close(struct sw_device *d) {
    if (!d) return;
    for (int i = 0; i < SW_HOST_PANELS; i++)
        host_free(d, d->panels[i], SW_HOST_PANEL_ELEMENTS * sizeof(float));
    pthread_mutex_destroy(&d->panel_lock);
    pthread_cond_destroy(&d->event_recorded);
    pthread_mutex_destroy(&d->event_lock);
    free(d);
}

static struct sw_device_ops host_ops;
static pthread_once_t host_ops_once = PTHREAD_ONCE_INIT;

static void host_ops_fill(void) {
    host_ops = (struct sw_device_ops){
        .name = "host",
        .close = host_close,
        .numerics = host_numerics,
        .alloc = host_alloc,
        .free = host_free,
        .free_bytes = host_free_bytes,
        .bus_address = host_bus_address,
        .pin = host_pin,
        .unpin = host_unpin,
        .stream_create = host_stream_create,
        .stream_destroy = host_stream_destroy,
        .stream_sync = host_stream_sync,
        .prepare = host_prepare,
        .event_create = host_event_create,
        .event_destroy = host_event_destroy,
        .event_record = host_event_record,
        .stream_wait = host_stream_wait,
        .event_wait = host_event_wait,
        .copy_h2d = host_copy,
        .copy_d2h = host_copy,
        .copy_d2d = host_copy,
        .zero = host_zero,
    };
    sw_host_operators(&host_ops);
}

int sw_device_host_open(struct sw_device_handle *out,
                        const struct sw_host_device_options *options) {
    assert(out && options && options->threads >= 1);
    const struct sw_host_isa *isa;
    int ret = sw_host_pick(&isa);
    if (ret < 0) return ret;
    struct sw_device *d = calloc(1, sizeof(*d));
    if (!d) {
        sw_error("host device: no memory");
        return -ENOMEM;
    }
    pthread_mutex_init(&d->panel_lock, NULL);
    pthread_mutex_init(&d->event_lock, NULL);
    pthread_cond_init(&d->event_recorded, NULL);
    d->threads = options->threads;
    d->isa = isa;
    d->adam = options->adam;
    d->adam_ctx = options->adam_ctx;
    for (int i = 0; i < SW_HOST_PANELS; i++) {
        void *panel = NULL;
        ret = host_alloc(d, SW_HOST_PANEL_ELEMENTS * sizeof(float), &panel);
        if (ret < 0) goto fail_close;
        d->panels[i] = panel;
    }
    sw_library_memory_open((size_t)d->threads * LIBRARY_BYTES_PER_THREAD + LIBRARY_BYTES_SHARED);
    if (getenv("SPILLWAY_ISA")) sw_host_gemm_limit(isa->name);
    char library[64];
    sw_host_gemm_describe(library, sizeof(library));
    snprintf(d->numerics, sizeof(d->numerics), "host %s, %s, attention block %d, %d thread%s",
             isa->name, library, SW_HOST_ATTENTION_BLOCK, d->threads, d->threads == 1 ? "" : "s");
    pthread_once(&host_ops_once, host_ops_fill);
    *out = (struct sw_device_handle){.device = d, .ops = &host_ops};
    return 0;
fail_close:
    host_close(d);
    return ret;
}
