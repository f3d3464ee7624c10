/* tools/report_trace.c - a trace's events become tasks, samples and peaks as they are read. */
#include "tools/report.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "tools/report_scan.h"

enum { SCHEMA = 1, NAMES_MAX = 1 << 24, WHY_BYTES = 160 };

/* ---- names ---- */

/* Open addressing over a power of two that is at most half full. */
struct sw_report_names {
    char **texts;
    uint32_t count, capacity;
    uint32_t *table, table_size; /* place + 1; 0: free */
};

static uint32_t hash_of(const char *text) {
    uint32_t hash = 2166136261u; /* FNV-1a */
    for (; *text; text++) hash = (hash ^ (unsigned char)*text) * 16777619u;
    return hash;
}

static uint32_t *entry_of(const struct sw_report_names *names, const char *text) {
    uint32_t at = hash_of(text) & (names->table_size - 1);
    while (names->table[at] && strcmp(names->texts[names->table[at] - 1], text) != 0)
        at = (at + 1) & (names->table_size - 1);
    return &names->table[at];
}

static int grow_names(struct sw_report_names *names) {
    const uint32_t capacity = names->capacity ? 2 * names->capacity : 256;
    if (capacity > NAMES_MAX) return -ENOSPC;
    char **texts = realloc(names->texts, capacity * sizeof(*texts));
    if (texts) names->texts = texts;
    uint32_t *table = calloc(2 * (size_t)capacity, sizeof(*table));
    if (!texts || !table) {
        free(table);
        return -ENOMEM;
    }
    free(names->table);
    names->table = table;
    names->table_size = 2 * capacity;
    names->capacity = capacity;
    for (uint32_t i = 0; i < names->count; i++) *entry_of(names, names->texts[i]) = i + 1;
    return 0;
}

int64_t sw_report_intern(struct sw_report_trace *trace, const char *name) {
    if (!trace->names && !(trace->names = calloc(1, sizeof(*trace->names)))) return -ENOMEM;
    struct sw_report_names *names = trace->names;
    if (names->count == names->capacity) {
        const int ret = grow_names(names);
        if (ret < 0) return ret;
    }
    uint32_t *entry = entry_of(names, name);
    if (*entry) return *entry - 1;
    if (!(names->texts[names->count] = strdup(name))) return -ENOMEM;
    *entry = ++names->count;
    return names->count - 1;
}

uint32_t sw_report_name_count(const struct sw_report_trace *trace) {
    return trace->names ? trace->names->count : 0;
}

const char *sw_report_name(const struct sw_report_trace *trace, uint32_t name) {
    assert(name < sw_report_name_count(trace));
    return trace->names->texts[name];
}

/* ---- a trace's parts ---- */

void sw_report_init(struct sw_report_trace *trace) {
    memset(trace, 0, sizeof(*trace));
}

void sw_report_close(struct sw_report_trace *trace) {
    for (uint32_t i = 0; i < trace->tier_count; i++) free(trace->tiers[i].samples);
    for (uint32_t i = 0; i < sw_report_name_count(trace); i++) free(trace->names->texts[i]);
    if (trace->names) {
        free(trace->names->texts);
        free(trace->names->table);
    }
    free(trace->names);
    free(trace->tasks);
    memset(trace, 0, sizeof(*trace));
}

int sw_report_lane(struct sw_report_trace *trace, const char *name) {
    for (uint32_t i = 0; i < trace->lane_count; i++)
        if (!strcmp(trace->lanes[i].name, name)) return (int)i;
    if (trace->lane_count == SW_REPORT_LANES_MAX) return -ENOSPC;
    struct sw_report_lane *lane = &trace->lanes[trace->lane_count];
    snprintf(lane->name, sizeof(lane->name), "%s", name);
    return (int)trace->lane_count++;
}

int sw_report_tier(struct sw_report_trace *trace, const char *name) {
    for (uint32_t i = 0; i < trace->tier_count; i++)
        if (!strcmp(trace->tiers[i].name, name)) return (int)i;
    if (trace->tier_count == SW_REPORT_TIERS_MAX) return -ENOSPC;
    struct sw_report_tier *tier = &trace->tiers[trace->tier_count];
    snprintf(tier->name, sizeof(tier->name), "%s", name);
    return (int)trace->tier_count++;
}

int sw_report_add_task(struct sw_report_trace *trace, const struct sw_report_task *task) {
    if (trace->task_count == trace->task_capacity) {
        if (trace->task_capacity > UINT32_MAX / 4) return -ENOSPC;
        const uint32_t capacity = trace->task_capacity ? 2 * trace->task_capacity : 4096;
        void *tasks = realloc(trace->tasks, capacity * sizeof(*trace->tasks));
        if (!tasks) return -ENOMEM;
        trace->tasks = tasks;
        trace->task_capacity = capacity;
    }
    trace->tasks[trace->task_count++] = *task;
    return 0;
}

int sw_report_add_sample(struct sw_report_tier *tier, const struct sw_report_sample *sample) {
    if (tier->count == tier->capacity) {
        if (tier->capacity > UINT32_MAX / 4) return -ENOSPC;
        const uint32_t capacity = tier->capacity ? 2 * tier->capacity : 64;
        void *samples = realloc(tier->samples, capacity * sizeof(*tier->samples));
        if (!samples) return -ENOMEM;
        tier->samples = samples;
        tier->capacity = capacity;
    }
    tier->samples[tier->count++] = *sample;
    return 0;
}

/* ---- events ---- */

struct event {
    char phase[4], name[SW_REPORT_NAME_BYTES], category[16], lane[SW_REPORT_NAME_BYTES];
    char thread[SW_REPORT_NAME_BYTES];
    int64_t ts_ns, dur_ns;
    uint64_t micro, bytes, step, used, budget, bytes_per_s;
    int has_ts, has_dur, has_lane, has_step;
};

struct reader {
    struct sw_report_trace *trace;
    struct sw_scan scan;
    uint64_t events, event_offset; /* of the event at hand */
    int found_schema, found_events;
    uint64_t schema;
    char why[WHY_BYTES]; /* what is wrong with the file */
};

static int read_args(struct reader *r, struct event *e) {
    static const char *const counts[] = {"micro", "bytes", "step", "used", "budget", "bytes_per_s"};
    uint64_t *const places[] = {&e->micro, &e->bytes,  &e->step,
                                &e->used,  &e->budget, &e->bytes_per_s};
    enum { COUNTS = sizeof(counts) / sizeof(counts[0]) };
    char key[16];
    int first = 1, ret;
    while ((ret = sw_scan_member(&r->scan, &first, key, sizeof(key))) == 1) {
        int i = 0;
        while (i < COUNTS && strcmp(key, counts[i]) != 0) i++;
        if (i < COUNTS) {
            ret = sw_scan_count(&r->scan, places[i]);
            if (places[i] == &e->step) e->has_step = 1;
        } else if (!strcmp(key, "lane")) {
            ret = sw_scan_string(&r->scan, e->lane, sizeof(e->lane));
            e->has_lane = 1;
        } else if (!strcmp(key, "name") && sw_scan_peek(&r->scan) == '"') {
            ret = sw_scan_string(&r->scan, e->thread, sizeof(e->thread));
        } else {
            ret = sw_scan_skip(&r->scan);
        }
        if (ret == -EINVAL && !r->why[0])
            snprintf(r->why, sizeof(r->why), "its args.%s cannot be read", key);
        if (ret < 0) return ret;
    }
    return ret;
}

static int read_fields(struct reader *r, struct event *e) {
    char key[16];
    int first = 1, ret;
    while ((ret = sw_scan_member(&r->scan, &first, key, sizeof(key))) == 1) {
        if (!strcmp(key, "ph")) {
            ret = sw_scan_string(&r->scan, e->phase, sizeof(e->phase));
        } else if (!strcmp(key, "name")) {
            ret = sw_scan_string(&r->scan, e->name, sizeof(e->name));
        } else if (!strcmp(key, "cat")) {
            ret = sw_scan_string(&r->scan, e->category, sizeof(e->category));
        } else if (!strcmp(key, "ts")) {
            ret = sw_scan_thousandths(&r->scan, &e->ts_ns);
            e->has_ts = 1;
        } else if (!strcmp(key, "dur")) {
            ret = sw_scan_thousandths(&r->scan, &e->dur_ns);
            e->has_dur = 1;
        } else if (!strcmp(key, "args") && sw_scan_peek(&r->scan) == '{') {
            ret = read_args(r, e);
        } else {
            ret = sw_scan_skip(&r->scan);
        }
        if (ret == -ERANGE) {
            snprintf(r->why, sizeof(r->why), "its %s is beyond 2^62 ns", key);
            ret = -EINVAL;
        }
        if (ret == -EINVAL && !r->why[0])
            snprintf(r->why, sizeof(r->why), "its %s cannot be read", key);
        if (ret < 0) return ret;
    }
    return ret;
}

static int foreign(struct reader *r, const char *why) {
    snprintf(r->why, sizeof(r->why), "%s", why);
    return -EINVAL;
}

static int take_task(struct reader *r, const struct event *e) {
    if (!e->has_lane || !e->has_step)
        return foreign(r, "it has no args.lane and args.step: another program's trace?");
    if (!e->has_ts || !e->has_dur || e->dur_ns < 0) return foreign(r, "it has no ts and dur");
    if (e->ts_ns + e->dur_ns >= SW_SCAN_TIME_MAX)
        return foreign(r, "its ts and dur end beyond 2^62 ns");
    if (e->micro > UINT32_MAX) return foreign(r, "its args.micro cannot be read");
    const int lane = sw_report_lane(r->trace, e->lane);
    if (lane < 0) return foreign(r, "there are more than 255 lanes");
    const int64_t name = sw_report_intern(r->trace, e->name);
    if (name < 0) return (int)name;
    const struct sw_report_task task = {.start_ns = e->ts_ns,
                                        .end_ns = e->ts_ns + e->dur_ns,
                                        .bytes = e->bytes,
                                        .step = e->step,
                                        .name = (uint32_t)name,
                                        .micro = (uint32_t)e->micro,
                                        .lane = (uint8_t)lane,
                                        .eval = !strcmp(e->category, "eval")};
    return sw_report_add_task(r->trace, &task);
}

static int take_event(struct reader *r, const struct event *e) {
    static const char memory[] = "memory ";
    const size_t prefix = sizeof(memory) - 1;
    if (!strcmp(e->phase, "X")) return take_task(r, e);
    if (!strcmp(e->phase, "C") && !strncmp(e->name, memory, prefix) && e->has_ts) {
        const int tier = sw_report_tier(r->trace, e->name + prefix);
        if (tier < 0) return foreign(r, "there are more than 8 tiers");
        const struct sw_report_sample sample = {e->ts_ns, e->used, e->budget};
        return sw_report_add_sample(&r->trace->tiers[tier], &sample);
    }
    if (strcmp(e->phase, "M") != 0) return 0;
    const int is_peak = !strcmp(e->name, "peak_bandwidth") && e->has_lane;
    const int is_lane = !strcmp(e->name, "thread_name") && e->thread[0];
    if (!is_peak && !is_lane) return 0;
    const int lane = sw_report_lane(r->trace, is_peak ? e->lane : e->thread);
    if (lane < 0) return foreign(r, "there are more than 255 lanes");
    if (is_peak) r->trace->lanes[lane].peak_bytes_per_s = e->bytes_per_s;
    return 0;
}

static int read_events(struct reader *r) {
    int first = 1, ret;
    r->found_events = sw_scan_peek(&r->scan) == '[';
    while ((ret = sw_scan_element(&r->scan, &first)) == 1) {
        struct event event = {0};
        sw_scan_peek(&r->scan); /* the offset is the event's, not the blanks' before it */
        r->event_offset = sw_scan_offset(&r->scan);
        r->events++;
        ret = read_fields(r, &event);
        if (ret == 0) ret = take_event(r, &event);
        if (ret < 0) return ret;
    }
    if (ret == 0) r->events = 0;
    return ret;
}

static int read_object(struct reader *r) {
    char key[32];
    int first = 1, ret;
    while ((ret = sw_scan_member(&r->scan, &first, key, sizeof(key))) == 1) {
        if (!strcmp(key, "schema")) {
            ret = sw_scan_count(&r->scan, &r->schema);
            r->found_schema = ret == 0;
        } else if (!strcmp(key, "traceEvents")) {
            if (!r->found_schema) return foreign(r, "no \"schema\" in front of its events");
            if (r->schema != SCHEMA) return foreign(r, "its schema is not 1");
            ret = read_events(r);
        } else {
            ret = sw_scan_skip(&r->scan);
        }
        if (ret < 0) return ret;
    }
    if (ret == 0 && sw_scan_peek(&r->scan) != -ENODATA) return foreign(r, "more behind its end");
    if (ret == 0 && !r->found_events) return foreign(r, "it has no traceEvents");
    return ret;
}

/* ---- the file ---- */

static int open_file(const char *path, int *fd) {
    struct stat st;
    *fd = open(path, O_RDONLY | O_CLOEXEC);
    int ret = *fd < 0 ? -errno : 0;
    if (ret == 0 && fstat(*fd, &st) == 0 && S_ISDIR(st.st_mode)) ret = -EISDIR;
    if (ret == 0) return 0;
    char partial[PATH_MAX];
    snprintf(partial, sizeof(partial), "%s.partial", path);
    if (ret == -ENOENT && access(partial, F_OK) == 0)
        sw_error("%s: %s; the run that wrote %s has not ended or was killed: name that file", path,
                 strerror(ENOENT), partial);
    else
        sw_error("%s: %s", path, strerror(-ret));
    if (*fd >= 0) close(*fd);
    return ret;
}

/* Reports what read_object() returned; 0 where the trace is good all the same. */
static int judge(struct reader *r, int ret, const char *path) {
    if (ret == 0) return 0;
    if (ret == -ENODATA && r->found_events) {
        r->trace->truncated = 1;
        sw_warning("%s ends in the middle, as the trace of a run that was killed: %" PRIu32
                   " task%s there",
                   path, r->trace->task_count, r->trace->task_count == 1 ? " is" : "s are");
        return 0;
    }
    if (ret == -ENODATA) {
        sw_error("%s is not a trace of spillway: it ends after %" PRIu64 " bytes, before any event",
                 path, sw_scan_offset(&r->scan));
    } else if (ret == -EINVAL && r->events) {
        sw_error("%s: event %" PRIu64 ", at byte %" PRIu64 ": %s", path, r->events, r->event_offset,
                 r->why[0] ? r->why : "this is not JSON");
    } else if (ret == -EINVAL) {
        sw_error("%s is not a trace of spillway: %s (byte %" PRIu64 ")", path,
                 r->why[0] ? r->why : "it is not a JSON object", sw_scan_offset(&r->scan));
    } else {
        sw_error("%s: %s", path, strerror(-ret));
    }
    return ret == -ENODATA ? -EINVAL : ret;
}

int sw_report_open(struct sw_report_trace *trace, const char *path) {
    int fd;
    int ret = open_file(path, &fd);
    if (ret < 0) return ret;
    struct reader *r = calloc(1, sizeof(*r));
    sw_report_init(trace);
    if (r) {
        r->trace = trace;
        sw_scan_init(&r->scan, fd);
        ret = judge(r, read_object(r), path);
    } else {
        ret = -ENOMEM;
        sw_error("%s: %s", path, strerror(ENOMEM));
    }
    free(r);
    close(fd);
    if (ret < 0) sw_report_close(trace);
    return ret;
}
