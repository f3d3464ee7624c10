/* engine/trace.c - writes the trace. */
#include "engine/trace.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/log.h"

struct sw_trace {
    pthread_mutex_t lock;
    FILE *file;
    uint64_t first_ns; /* of the first event: times start there */
    char path[PATH_MAX], partial[PATH_MAX];
};

int sw_trace_open(struct sw_trace **out, const char *path) {
    *out = NULL;
    if (!path) return 0;
    struct sw_trace *trace = calloc(1, sizeof(*trace));
    if (!trace) return -ENOMEM;
    int ret = 0;
    const int n = snprintf(trace->partial, sizeof(trace->partial), "%s.partial", path);
    snprintf(trace->path, sizeof(trace->path), "%s", path);
    if (n >= (int)sizeof(trace->partial)) ret = -ENAMETOOLONG;
    if (ret == 0 && !(trace->file = fopen(trace->partial, "we"))) ret = -errno;
    if (ret < 0) {
        sw_error("--trace %s: %s", path, strerror(-ret));
        free(trace);
        return ret;
    }
    pthread_mutex_init(&trace->lock, NULL);
    fprintf(trace->file, "{\"schema\":1,\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n");
    for (int l = 0; l < SW_LANE_COUNT; l++)
        fprintf(trace->file,
                "%s{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":0,\"tid\":%d,\"args\":{\"name\":"
                "\"%s\"}}",
                l ? ",\n" : "", l, sw_lane_name((enum sw_lane)l));
    *out = trace;
    return 0;
}

void sw_trace_add(struct sw_trace *trace, const struct sw_trace_event *e) {
    if (!trace) return;
    const char *lane = sw_lane_name(e->lane), *unit = e->unit ? e->unit : "";
    pthread_mutex_lock(&trace->lock);
    if (!trace->first_ns) trace->first_ns = e->start_ns;
    /* A task that started before the first one to end has a negative time, which viewers accept. */
    const double start_us = ((double)e->start_ns - (double)trace->first_ns) * 1e-3;
    fprintf(trace->file,
            ",\n{\"ph\":\"X\",\"name\":\"%s%s%s\",\"pid\":0,\"tid\":%d,\"ts\":%.3f,\"dur\":%.3f,"
            "\"args\":{\"lane\":\"%s\",\"unit\":\"%s\",\"micro\":%u,\"bytes\":%llu,\"step\":%llu}}",
            sw_task_name(e->kind), e->unit ? " " : "", unit, (int)e->lane, start_us,
            (double)(e->end_ns - e->start_ns) * 1e-3, lane, unit, e->micro,
            (unsigned long long)e->bytes, (unsigned long long)e->step);
    pthread_mutex_unlock(&trace->lock);
}

int sw_trace_close(struct sw_trace *trace) {
    if (!trace) return 0;
    errno = 0;
    int failed = fputs("\n]}\n", trace->file) < 0 || ferror(trace->file);
    failed |= fclose(trace->file) != 0;
    if (!failed) failed = rename(trace->partial, trace->path) != 0;
    const int ret = failed ? (errno ? -errno : -EIO) : 0;
    if (ret < 0) sw_error("--trace %s: %s", trace->path, strerror(-ret));
    pthread_mutex_destroy(&trace->lock);
    free(trace);
    return ret;
}
