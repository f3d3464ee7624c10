/* tools/run_log.c - builds and writes log lines. */
#include "tools/run_log.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/log.h"

struct sw_run_log {
    FILE *file;
    char path[4096];
    int error; /* the first -errno; reported once */
};

/* Cuts a last line that a crash left unfinished, so that every line stays one object. */
static int cut_last_line(FILE *file) {
    if (fseek(file, 0, SEEK_END) != 0) return 0; /* a pipe or a terminal */
    long end = ftell(file);
    while (end > 0) {
        if (fseek(file, end - 1, SEEK_SET) != 0) return -errno;
        if (fgetc(file) == '\n') break;
        end--;
    }
    if (ftruncate(fileno(file), end) < 0) return -errno;
    return fseek(file, 0, SEEK_END) ? -errno : 0;
}

int sw_run_log_open(struct sw_run_log **out, const char *path, int append) {
    *out = NULL;
    if (!path) return 0;
    struct sw_run_log *log = calloc(1, sizeof(*log));
    if (!log) return -ENOMEM;
    snprintf(log->path, sizeof(log->path), "%s", path);
    log->file = append ? fopen(path, "r+e") : NULL;
    int ret = log->file ? cut_last_line(log->file) : 0;
    if (!log->file && ret == 0) log->file = fopen(path, "we");
    if (!log->file) ret = -errno;
    if (ret < 0) {
        sw_error("--log %s: %s", path, strerror(-ret));
        if (log->file) fclose(log->file);
        free(log);
        return ret;
    }
    *out = log;
    return 0;
}

int sw_run_log_close(struct sw_run_log *log) {
    if (!log) return 0;
    int ret = log->error;
    if (fclose(log->file) != 0 && ret == 0) {
        ret = -errno;
        sw_error("--log %s: %s", log->path, strerror(-ret));
    }
    free(log);
    return ret;
}

void sw_run_log_object(struct sw_run_log *log, json_t *object) {
    if (log && !log->error) {
        const int failed = json_dumpf(object, log->file, JSON_COMPACT | JSON_REAL_PRECISION(17)) ||
                           fputc('\n', log->file) == EOF || fflush(log->file) != 0;
        if (failed) {
            log->error = errno ? -errno : -EIO;
            sw_error("--log %s: %s; the run goes on without it", log->path, strerror(-log->error));
        }
    }
    json_decref(object);
}

void sw_run_log_event(struct sw_run_log *log, const char *name, uint64_t step, json_t *fields) {
    json_t *line = json_pack("{s:s, s:I}", "event", name, "step", (json_int_t)step);
    if (fields) json_object_update(line, fields);
    json_decref(fields);
    sw_run_log_object(log, line);
}

static json_t *number(double x) {
    return isfinite(x) ? json_real(x) : json_null();
}

void sw_run_log_step(struct sw_run_log *log, const struct sw_step_report *r) {
    if (!log) return;
    json_t *busy = json_object(), *bytes = json_object(), *memory = json_object();
    for (int l = 0; l <= SW_LANE_NVME_WRITE; l++)
        json_object_set_new(busy, sw_lane_name((enum sw_lane)l), number(r->lane_busy_s[l]));
    for (int b = 0; b < SW_BYTES_COUNT; b++)
        if (b != SW_BYTES_NVME_DIRECT || r->bytes[b]) /* most machines have no such way */
            json_object_set_new(bytes, sw_traffic_name((enum sw_traffic)b),
                                json_integer((json_int_t)r->bytes[b]));
    for (int m = 0; m < SW_TIER_COUNT; m++)
        json_object_set_new(memory, sw_tier_name((enum sw_tier)m),
                            json_integer((json_int_t)r->memory_bytes[m]));
    json_t *events = json_array();
    if (r->skipped) json_array_append_new(events, json_sprintf("skipped: %s", r->why_skipped));
    const double tokens_per_s = r->step_s > 0 ? (double)r->tokens / r->step_s : 0;
    sw_run_log_object(log,
                      json_pack("{s:I, s:o, s:o, s:o, s:o, s:I, s:o, s:o, s:o, s:s, s:o, s:o, s:o}",
                                "step", (json_int_t)r->step, "loss", number(r->loss), "grad_norm",
                                number(r->grad_norm), "clip_factor", number(r->clip_factor), "lr",
                                number(r->lr), "tokens", (json_int_t)r->tokens, "tokens_per_s",
                                number(tokens_per_s), "step_s", number(r->step_s), "lane_busy_s",
                                busy, "step_clock", sw_lane_name(r->step_clock), "bytes", bytes,
                                "memory_bytes", memory, "events", events));
}
