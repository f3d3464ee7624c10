/* kernels/cuda/clock_cuda.c - when work ran on a GPU, by the host's clock.
 *
 * CUDA tells how many milliseconds lie between two events, as a float, and nothing of the host's
 * time. So now and then a base is made: an event on a stream with nothing else on it, with the
 * host's clock read before it is recorded and after it is known to be over. The host's time of the
 * base is the middle of the two readings, and wrong by half their distance at most; of several
 * attempts the best one counts. An event's time is that of the last base before it, and what CUDA
 * says lies between.
 *
 * How exact. Below 2^13 ms, 8.2 s, a float of milliseconds has steps of at most 2^-11 ms: it is
 * rounded by 0.24 us at most, and below 2^8 ms, the time between two bases, by 0.008 us; CUDA's
 * events themselves count in steps of about 0.5 us. To that comes the error of the base
 * (sw_cuda_clock_error_ns()), and what the two clocks drift apart after it: within 250 ms and 50
 * parts in a million, 12.5 us.
 *
 * Times may be asked for late: 512 bases are kept, two minutes at least. Which of them is the last
 * one before an event, the oldest one tells. */
#include <assert.h>
#include <errno.h>
#include <math.h>
#include "base/clock.h"
#include "kernels/cuda/cuda_internal.h"

enum {
    ATTEMPTS = 4,
    GOOD_NS = 10000,      /* no further attempt after one that is so exact */
    POOR_NS = 100000,     /* a base that is less exact than that waits for a better one ... */
    POOR_AFTER_TIMES = 16 /* ... but no longer than so many times as usual */
};

/* The distance from the oldest base is rounded, by 4 us after two minutes; and so are the bases'.
 */
#define NEAR_BASE_MS 0.5

static int open_clock(struct sw_device *d) {
    struct sw_cuda_clock *c = &d->clock;
    int ret = sw_cuda_check(d, cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking),
                            "a stream for its clock");
    for (int i = 0; i <= SW_CUDA_BASES && ret == 0; i++) {
        cudaEvent_t *event = i < SW_CUDA_BASES ? &c->bases[i].event : &c->spare;
        ret = sw_cuda_check(d, cudaEventCreateWithFlags(event, cudaEventDefault),
                            "an event for its clock");
    }
    return ret;
}

void sw_cuda_clock_close(struct sw_device *d) {
    struct sw_cuda_clock *c = &d->clock;
    for (int i = 0; i < SW_CUDA_BASES; i++)
        if (c->bases[i].event) cudaEventDestroy(c->bases[i].event);
    if (c->spare) cudaEventDestroy(c->spare);
    if (c->stream) cudaStreamDestroy(c->stream);
}

/* The stream is idle, so that its end comes at once, and is waited for without sleeping. */
static int attempt(struct sw_device *d, struct sw_cuda_base *best) {
    struct sw_cuda_clock *c = &d->clock;
    const uint64_t before_ns = sw_now_ns();
    int ret = sw_cuda_check(d, cudaEventRecord(c->spare, c->stream), "record its clock");
    if (ret == 0) ret = sw_cuda_check(d, cudaStreamSynchronize(c->stream), "read its clock");
    const uint64_t after_ns = sw_now_ns();
    const uint64_t error_ns = (after_ns - before_ns + 1) / 2;
    if (ret < 0 || error_ns >= best->error_ns) return ret;
    const cudaEvent_t event = c->spare;
    c->spare = best->event;
    best->event = event;
    best->host_ns = before_ns + (after_ns - before_ns) / 2;
    best->error_ns = error_ns;
    return 0;
}

static int elapsed(const struct sw_device *d, cudaEvent_t from, cudaEvent_t to, double *ms) {
    float between = 0.0f;
    const cudaError_t error = cudaEventElapsedTime(&between, from, to);
    *ms = (double)between;
    if (error != cudaErrorNotReady) return sw_cuda_check(d, error, "the time between two events");
    cudaGetLastError();
    return -EAGAIN;
}

int sw_cuda_clock_set(struct sw_device *d) {
    struct sw_cuda_clock *c = &d->clock;
    const struct sw_cuda_base *last = &c->bases[(c->count + SW_CUDA_BASES - 1) % SW_CUDA_BASES];
    struct sw_cuda_base *next = &c->bases[c->count % SW_CUDA_BASES];
    const uint64_t now_ns = sw_now_ns();
    if (c->tried_ns && now_ns - c->tried_ns < SW_CLOCK_NS) return 0;
    c->tried_ns = now_ns;
    int ret = sw_cuda_enter(d);
    if (ret == 0 && !c->stream) ret = open_clock(d);
    next->error_ns = UINT64_MAX;
    for (int i = 0; i < ATTEMPTS && ret == 0 && next->error_ns > GOOD_NS; i++)
        ret = attempt(d, next);
    if (ret < 0) return ret;
    if (next->error_ns > POOR_NS && c->count > 0 &&
        now_ns - last->host_ns < (uint64_t)POOR_AFTER_TIMES * SW_CLOCK_NS)
        return 0;
    next->device_ms = 0;
    if (c->count > 0) {
        ret = elapsed(d, last->event, next->event, &next->device_ms);
        next->device_ms += last->device_ms;
    }
    if (ret < 0) return ret;
    c->count++;
    if (next->error_ns > c->error_ns_max) c->error_ns_max = next->error_ns;
    return 1;
}

/* The last base before a moment, or the oldest one there is. */
static const struct sw_cuda_base *base_before(const struct sw_cuda_clock *c, uint64_t oldest,
                                              double device_ms) {
    uint64_t at = c->count - 1;
    while (at > oldest && c->bases[at % SW_CUDA_BASES].device_ms + NEAR_BASE_MS > device_ms) at--;
    return &c->bases[at % SW_CUDA_BASES];
}

int sw_cuda_event_ns(struct sw_event *e, uint64_t *ns) {
    struct sw_device *d = e->device;
    const struct sw_cuda_clock *c = &d->clock;
    assert(c->count > 0);
    int ret = sw_cuda_enter(d);
    if (ret < 0) return ret;
    /* The place of the next base may have been written by an attempt that came to nothing. */
    const uint64_t oldest = c->count < SW_CUDA_BASES ? 0 : c->count - SW_CUDA_BASES + 1;
    const struct sw_cuda_base *base = &c->bases[oldest % SW_CUDA_BASES];
    double ms;
    ret = elapsed(d, base->event, e->event, &ms);
    if (ret < 0) return ret;
    const struct sw_cuda_base *nearer = base_before(c, oldest, base->device_ms + ms);
    if (nearer != base) ret = elapsed(d, nearer->event, e->event, &ms);
    if (ret == 0) *ns = nearer->host_ns + (uint64_t)llrint(ms * 1e6);
    return ret;
}

uint64_t sw_cuda_clock_error_ns(struct sw_device *d) {
    return d->clock.error_ns_max;
}
