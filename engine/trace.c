/* engine/trace.c - records in a buffer per lane, and the thread that writes them out.
 *
 * A lane's buffer is two halves: one is filled while the other is written. They change places under
 * the buffer's lock, which its lane and the writer alone take, so that adding an event is an
 * uncontended lock and a copy. Text is put together by hand: a formatted print costs ten times as
 * much, and the cores are the run's. */
#include "engine/trace.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "base/log.h"
#include "engine/process_name.h"
#include "engine/collective.h"

enum {
    RECORDS_MAX = 1024,          /* of a half */
    BUFFERS = SW_LANE_COUNT + 1, /* the last one is for what belongs to no lane */
    TEXT_BYTES = 1 << 16,
    LINE_BYTES_MAX = 512,
    NAME_BYTES_MAX = 96,
    ROUND_MS = 200
};

enum record_type { RECORD_TASK, RECORD_EVAL_TASK, RECORD_MEMORY, RECORD_PEAK };

struct record {
    uint64_t start_ns, end_ns; /* of memory: start is the moment, end the budget in bytes */
    uint64_t bytes, step;
    const char *unit;
    uint32_t micro;
    uint8_t type, kind, lane, rank; /* of memory: lane is the tier */
};
static_assert(sizeof(struct record) == 48, "a task fits into a cache line");

struct buffer {
    pthread_mutex_t lock;
    pthread_cond_t room;
    uint32_t count, filling; /* records in the half that is filled, and which one that is */
    struct record halves[2][RECORDS_MAX];
};

struct sw_trace {
    uint32_t process, first_rank;
    uint8_t adam_lane[SW_RANKS_MAX]; /* by rank of this process */
    _Atomic uint64_t first_ns;       /* times start there */
    struct buffer buffers[BUFFERS];
    /* The writer's alone, from its start to its end. */
    int fd, error;
    uint64_t offset; /* where the next event goes: over the end that was written last */
    uint32_t text_used;
    char text[TEXT_BYTES];
    /* Between the lanes and the writer. */
    pthread_t writer;
    pthread_mutex_t lock;
    pthread_cond_t call;
    int called, closing;
    const char *given; /* the caller's path; stays until close */
    char path[PATH_MAX], partial[PATH_MAX];
};

/* ---- text ---- */

static char *put(char *at, const char *text) {
    const size_t length = strlen(text);
    memcpy(at, text, length);
    return at + length;
}

/* What a JSON string may hold as it is; other characters become '_'. */
static char *put_name(char *at, const char *name) {
    for (int i = 0; name[i] && i < NAME_BYTES_MAX; i++)
        *at++ = (unsigned char)name[i] < 0x20 || name[i] == '"' || name[i] == '\\' ? '_' : name[i];
    return at;
}

static char *put_number(char *at, uint64_t value) {
    char digits[20];
    int count = 0;
    do digits[count++] = (char)('0' + value % 10);
    while (value /= 10);
    while (count) *at++ = digits[--count];
    return at;
}

/* Microseconds with the nanoseconds behind the point. */
static char *put_us(char *at, int64_t ns) {
    if (ns < 0) *at++ = '-';
    const uint64_t size = ns < 0 ? 0 - (uint64_t)ns : (uint64_t)ns;
    at = put_number(at, size / 1000);
    *at++ = '.';
    *at++ = (char)('0' + size / 100 % 10);
    *at++ = (char)('0' + size / 10 % 10);
    *at++ = (char)('0' + size % 10);
    return at;
}

/* Which of the lanes of one kind has a rank's tasks: device lanes have the rank's number. */
static uint32_t lane_number(const struct sw_trace *trace, enum sw_lane lane, uint32_t rank) {
    if (sw_lane_on_device(lane)) return rank;
    return lane == SW_LANE_ADAM ? trace->adam_lane[rank - trace->first_rank] : 0;
}

/* Other lanes than the first of a kind have their number behind their name. */
static char *put_lane(char *at, const struct sw_trace *trace, enum sw_lane lane, uint32_t rank) {
    const uint32_t number = lane_number(trace, lane, rank);
    at = put(at, sw_lane_name(lane));
    if (number == 0) return at;
    *at++ = ' ';
    return put_number(at, number);
}

/* The process, and the thread that stands for a lane. */
static char *put_thread(char *at, const struct sw_trace *trace, enum sw_lane lane, uint32_t rank) {
    at = put(at, "\"pid\":");
    at = put_number(at, trace->process);
    at = put(at, ",\"tid\":");
    return put_number(at, lane_number(trace, lane, rank) * SW_LANE_COUNT + lane);
}

static char *put_task(char *at, const struct sw_trace *trace, const struct record *r,
                      uint64_t first_ns) {
    at = put(at, ",\n{\"ph\":\"X\",\"name\":\"");
    at = put(at, sw_task_name((enum sw_task_kind)r->kind));
    if (r->unit) {
        *at++ = ' ';
        at = put_name(at, r->unit);
    }
    if (r->type == RECORD_EVAL_TASK) at = put(at, "\",\"cat\":\"eval");
    at = put(at, "\",");
    at = put_thread(at, trace, (enum sw_lane)r->lane, r->rank);
    at = put(at, ",\"ts\":");
    at = put_us(at, (int64_t)(r->start_ns - first_ns));
    at = put(at, ",\"dur\":");
    at = put_us(at, (int64_t)(r->end_ns - r->start_ns));
    at = put(at, ",\"args\":{\"lane\":\"");
    at = put_lane(at, trace, (enum sw_lane)r->lane, r->rank);
    at = put(at, "\",\"unit\":\"");
    if (r->unit) at = put_name(at, r->unit);
    at = put(at, "\",\"micro\":");
    at = put_number(at, r->micro);
    at = put(at, ",\"bytes\":");
    at = put_number(at, r->bytes);
    at = put(at, ",\"rank\":");
    at = put_number(at, r->rank);
    at = put(at, ",\"step\":");
    at = put_number(at, r->step);
    return put(at, "}}");
}

static char *put_memory(char *at, const struct sw_trace *trace, const struct record *r,
                        uint64_t first_ns) {
    at = put(at, ",\n{\"ph\":\"C\",\"name\":\"memory ");
    at = put(at, sw_tier_name((enum sw_tier)r->lane));
    at = put(at, "\",\"pid\":");
    at = put_number(at, trace->process);
    at = put(at, ",\"ts\":");
    at = put_us(at, (int64_t)(r->start_ns - first_ns));
    at = put(at, ",\"args\":{\"used\":");
    at = put_number(at, r->bytes);
    at = put(at, ",\"budget\":");
    at = put_number(at, r->end_ns);
    return put(at, "}}");
}

/* Of a device lane that of the process's first rank. */
static char *put_peak(char *at, const struct sw_trace *trace, const struct record *r) {
    at = put(at, ",\n{\"ph\":\"M\",\"name\":\"peak_bandwidth\",");
    at = put_thread(at, trace, (enum sw_lane)r->lane, trace->first_rank);
    at = put(at, ",\"args\":{\"lane\":\"");
    at = put_lane(at, trace, (enum sw_lane)r->lane, trace->first_rank);
    at = put(at, "\",\"bytes_per_s\":");
    at = put_number(at, r->bytes);
    return put(at, "}}");
}

/* ---- the writer ---- */

static void write_at(struct sw_trace *trace, const char *text, size_t bytes, uint64_t offset) {
    while (bytes > 0 && !trace->error) {
        const ssize_t done = pwrite(trace->fd, text, bytes, (off_t)offset);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) {
            trace->error = done < 0 ? -errno : -EIO;
            return;
        }
        text += done;
        bytes -= (size_t)done;
        offset += (uint64_t)done;
    }
}

static void write_text(struct sw_trace *trace) {
    write_at(trace, trace->text, trace->text_used, trace->offset);
    trace->offset += trace->text_used;
    trace->text_used = 0;
}

static void write_record(struct sw_trace *trace, const struct record *r) {
    if (trace->text_used + LINE_BYTES_MAX > TEXT_BYTES) write_text(trace);
    const uint64_t first_ns = atomic_load_explicit(&trace->first_ns, memory_order_relaxed);
    char *const from = trace->text + trace->text_used;
    char *to = from;
    if (r->type <= RECORD_EVAL_TASK)
        to = put_task(from, trace, r, first_ns);
    else if (r->type == RECORD_MEMORY)
        to = put_memory(from, trace, r, first_ns);
    else
        to = put_peak(from, trace, r);
    assert(to - from <= LINE_BYTES_MAX);
    trace->text_used += (uint32_t)(to - from);
}

static void write_buffer(struct sw_trace *trace, struct buffer *b) {
    pthread_mutex_lock(&b->lock);
    const uint32_t count = b->count, half = b->filling;
    b->count = 0;
    b->filling = 1 - half;
    if (count == RECORDS_MAX) pthread_cond_broadcast(&b->room);
    pthread_mutex_unlock(&b->lock);
    for (uint32_t i = 0; i < count; i++) write_record(trace, &b->halves[half][i]);
}

/* All that is there, and the end of the object, which the next round writes over. */
static void write_round(struct sw_trace *trace) {
    static const char end[] = "\n]}\n";
    for (int i = 0; i < BUFFERS; i++) write_buffer(trace, &trace->buffers[i]);
    write_text(trace);
    write_at(trace, end, sizeof(end) - 1, trace->offset);
}

static void *writer_main(void *arg) {
    struct sw_trace *trace = arg;
    for (int closing = 0; !closing;) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += ROUND_MS * 1000000l;
        until.tv_sec += until.tv_nsec / 1000000000l;
        until.tv_nsec %= 1000000000l;
        pthread_mutex_lock(&trace->lock);
        int late = 0;
        while (!trace->called && !trace->closing && !late)
            late = pthread_cond_timedwait(&trace->call, &trace->lock, &until) != 0;
        trace->called = 0;
        closing = trace->closing;
        pthread_mutex_unlock(&trace->lock);
        write_round(trace);
    }
    return NULL;
}

static void call_writer(struct sw_trace *trace) {
    pthread_mutex_lock(&trace->lock);
    trace->called = 1;
    pthread_cond_signal(&trace->call);
    pthread_mutex_unlock(&trace->lock);
}

/* ---- adding ---- */

static void add(struct sw_trace *trace, struct buffer *b, const struct record *record) {
    pthread_mutex_lock(&b->lock);
    while (b->count == RECORDS_MAX) {
        call_writer(trace);
        pthread_cond_wait(&b->room, &b->lock);
    }
    b->halves[b->filling][b->count++] = *record;
    const int call = b->count == RECORDS_MAX / 2;
    pthread_mutex_unlock(&b->lock);
    if (call) call_writer(trace);
}

static void begin_at(struct sw_trace *trace, uint64_t ns) {
    uint64_t none = 0;
    if (atomic_load_explicit(&trace->first_ns, memory_order_relaxed) == 0)
        atomic_compare_exchange_strong(&trace->first_ns, &none, ns);
}

void sw_trace_begin(struct sw_trace *trace, uint64_t at_ns) {
    if (trace) begin_at(trace, at_ns);
}

void sw_trace_add(struct sw_trace *trace, const struct sw_trace_event *e) {
    if (!trace) return;
    begin_at(trace, e->start_ns);
    const struct record record = {.type = e->eval ? RECORD_EVAL_TASK : RECORD_TASK,
                                  .kind = (uint8_t)e->kind,
                                  .lane = (uint8_t)e->lane,
                                  .rank = (uint8_t)e->rank,
                                  .micro = e->micro,
                                  .unit = e->unit,
                                  .step = e->step,
                                  .bytes = e->bytes,
                                  .start_ns = e->start_ns,
                                  .end_ns = e->end_ns};
    add(trace, &trace->buffers[e->lane], &record);
}

void sw_trace_memory(struct sw_trace *trace, enum sw_tier tier, uint64_t used_bytes,
                     uint64_t budget_bytes, uint64_t at_ns) {
    if (!trace) return;
    begin_at(trace, at_ns);
    const struct record record = {.type = RECORD_MEMORY,
                                  .lane = (uint8_t)tier,
                                  .bytes = used_bytes,
                                  .start_ns = at_ns,
                                  .end_ns = budget_bytes};
    add(trace, &trace->buffers[SW_LANE_COUNT], &record);
}

void sw_trace_peak(struct sw_trace *trace, enum sw_lane lane, uint64_t bytes_per_s) {
    if (!trace) return;
    const struct record record = {.type = RECORD_PEAK, .lane = (uint8_t)lane, .bytes = bytes_per_s};
    add(trace, &trace->buffers[SW_LANE_COUNT], &record);
}

/* ---- life ---- */

/* A thread for each lane; device lanes have one for each rank, Adam one for each of its lanes. */
static void begin_text(struct sw_trace *trace, uint32_t ranks) {
    char *at = put(trace->text, "{\"schema\":1,\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n");
    uint32_t named[SW_LANE_COUNT] = {0}; /* of each kind; their numbers go up with the ranks */
    for (uint32_t i = 0; i < ranks * SW_LANE_COUNT; i++) {
        const enum sw_lane lane = (enum sw_lane)(i % SW_LANE_COUNT);
        const uint32_t rank = trace->first_rank + i / SW_LANE_COUNT;
        const uint32_t first = sw_lane_on_device(lane) ? trace->first_rank : 0;
        if (lane_number(trace, lane, rank) != first + named[lane]) continue;
        named[lane]++;
        if (i) at = put(at, ",\n");
        at = put(at, "{\"ph\":\"M\",\"name\":\"thread_name\",");
        at = put_thread(at, trace, lane, rank);
        at = put(at, ",\"args\":{\"name\":\"");
        at = put_lane(at, trace, lane, rank);
        at = put(at, "\"}}");
    }
    trace->text_used = (uint32_t)(at - trace->text);
}

static void init_locks(struct sw_trace *trace) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&trace->lock, NULL);
    pthread_cond_init(&trace->call, &monotonic);
    pthread_condattr_destroy(&monotonic);
    for (int i = 0; i < BUFFERS; i++) {
        pthread_mutex_init(&trace->buffers[i].lock, NULL);
        pthread_cond_init(&trace->buffers[i].room, NULL);
    }
}

static void destroy(struct sw_trace *trace) {
    for (int i = 0; i < BUFFERS; i++) {
        pthread_mutex_destroy(&trace->buffers[i].lock);
        pthread_cond_destroy(&trace->buffers[i].room);
    }
    pthread_mutex_destroy(&trace->lock);
    pthread_cond_destroy(&trace->call);
    free(trace);
}

static void tell(const struct sw_trace *trace, int ret) {
    if (trace->process == 0)
        sw_error("--trace %s: %s", trace->given, strerror(-ret));
    else
        sw_error("--trace %s: process %u writes %s: %s", trace->given, trace->process, trace->path,
                 strerror(-ret));
}

int sw_trace_open(struct sw_trace **out, const char *path, uint32_t process, uint32_t ranks,
                  const uint8_t *adam_lane) {
    assert(ranks <= SW_RANKS_MAX);
    *out = NULL;
    if (!path) return 0;
    struct sw_trace *trace = malloc(sizeof(*trace));
    if (!trace) return -ENOMEM;
    memset(trace, 0, sizeof(*trace)); /* the pages are there before the first step */
    trace->process = process;
    trace->first_rank = process * ranks; /* as many in each */
    if (adam_lane) memcpy(trace->adam_lane, adam_lane, ranks);
    init_locks(trace);
    trace->given = path;
    int ret = sw_process_path(path, process, trace->path, sizeof(trace->path));
    if (ret == 0 && snprintf(trace->partial, sizeof(trace->partial), "%s.partial", trace->path) >=
                        (int)sizeof(trace->partial))
        ret = -ENAMETOOLONG;
    trace->fd = ret < 0 ? -1 : open(trace->partial, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (ret == 0 && trace->fd < 0) ret = -errno;
    if (ret == 0) begin_text(trace, ranks);
    if (ret == 0) ret = -pthread_create(&trace->writer, NULL, writer_main, trace);
    if (ret == 0) {
        *out = trace;
        return 0;
    }
    tell(trace, ret);
    if (trace->fd >= 0) close(trace->fd);
    destroy(trace);
    return ret;
}

int sw_trace_close(struct sw_trace *trace) {
    if (!trace) return 0;
    pthread_mutex_lock(&trace->lock);
    trace->closing = 1;
    pthread_cond_signal(&trace->call);
    pthread_mutex_unlock(&trace->lock);
    pthread_join(trace->writer, NULL);
    int ret = trace->error;
    if (ret == 0 && fdatasync(trace->fd) < 0 && errno != EINVAL) ret = -errno;
    if (close(trace->fd) < 0 && ret == 0) ret = -errno;
    if (ret == 0 && rename(trace->partial, trace->path) < 0) ret = -errno;
    if (ret < 0) tell(trace, ret);
    destroy(trace);
    return ret;
}
