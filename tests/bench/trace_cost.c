/* tests/bench/trace_cost.c - what an event of the trace costs, in nanoseconds of the lane that adds
 * it and of all cores together, beside a formatted print under a lock.
 *
 *     build/release/tests/bench/trace_cost [PATH]     PATH: where the trace goes, /tmp/trace_cost
 *
 * Bursts of events with pauses in between, as a step makes them; the pauses do not count. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/clock.h"
#include "engine/trace.h"

enum { BURSTS = 400, BURST = 500, PAUSE_US = 5000 };

static FILE *plain;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void add_plain(struct sw_trace *trace, const struct sw_trace_event *e) {
    (void)trace;
    pthread_mutex_lock(&lock);
    fprintf(plain,
            ",\n{\"ph\":\"X\",\"name\":\"%s %s\",\"pid\":0,\"tid\":%d,\"ts\":%.3f,\"dur\":%.3f,"
            "\"args\":{\"lane\":\"%s\",\"unit\":\"%s\",\"micro\":%u,\"bytes\":%llu,\"step\":%llu}}",
            sw_task_name(e->kind), e->unit, (int)e->lane, (double)e->start_ns * 1e-3,
            (double)(e->end_ns - e->start_ns) * 1e-3, sw_lane_name(e->lane), e->unit, e->micro,
            (unsigned long long)e->bytes, (unsigned long long)e->step);
    pthread_mutex_unlock(&lock);
}

static uint64_t cpu_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int by_size(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Prints the adding thread's median over the bursts. Returns the time of all cores for an event up
 * to now; the caller adds what closing takes. */
static uint64_t measure(void (*add)(struct sw_trace *, const struct sw_trace_event *),
                        struct sw_trace *trace, const char *name) {
    static double burst_ns[BURSTS];
    const uint64_t cpu = cpu_ns();
    for (int b = 0; b < BURSTS; b++) {
        const uint64_t start = sw_now_ns();
        for (uint32_t i = 0; i < BURST; i++) {
            const struct sw_trace_event event = {.kind = SW_TASK_READ,
                                                 .lane = SW_LANE_NVME_READ,
                                                 .unit = "layer.12",
                                                 .micro = i % 8,
                                                 .step = (uint64_t)b,
                                                 .bytes = 12582912,
                                                 .start_ns = start + 1000 * i,
                                                 .end_ns = start + 1000 * i + 700};
            add(trace, &event);
        }
        burst_ns[b] = (double)(sw_now_ns() - start) / BURST;
        usleep(PAUSE_US);
    }
    qsort(burst_ns, BURSTS, sizeof(burst_ns[0]), by_size);
    printf("%-24s %6.0f ns an event on the lane (median of %d bursts of %d)", name,
           burst_ns[BURSTS / 2], BURSTS, BURST);
    return cpu;
}

static void print_cpu(uint64_t from) {
    printf(", %6.0f ns of all cores\n", (double)(cpu_ns() - from) / (BURSTS * BURST));
}

int main(int argc, char **argv) {
    const char *path = argc > 1 ? argv[1] : "/tmp/trace_cost";
    struct sw_trace *trace;
    plain = fopen(path, "we");
    if (!plain) {
        perror(path);
        return 1;
    }
    uint64_t cpu = measure(add_plain, NULL, "fprintf under a lock");
    fclose(plain);
    print_cpu(cpu);
    if (sw_trace_open(&trace, path, 0, 1, NULL) < 0) return 1;
    cpu = measure(sw_trace_add, trace, "sw_trace_add");
    if (sw_trace_close(trace) < 0) return 1;
    print_cpu(cpu);
    unlink(path);
    return 0;
}
