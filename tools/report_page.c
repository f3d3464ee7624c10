/* tools/report_page.c - the page: the template with the figures as JSON and the timeline as bytes
 * in base64.
 *
 * The bytes are LEB128 numbers, signed ones in zigzag. Lane by lane, its tasks by start, each as
 *     (kind << 1 | on path), start - end of the task before it (signed), duration,
 *     step - step of the task before it (signed)
 * where a kind is a different (name, micro, bytes, evaluation), listed in front; then tier by tier
 * its samples, each as time since the one before, used and budget as differences (all signed).
 * Times count from the figures' begin_ns. A task takes about eight bytes, and its event 180. */
#include "tools/report.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- base64 ---- */

struct base64 {
    FILE *out;
    uint32_t bits, count; /* of bytes waiting */
};

static void put_bits(struct base64 *b, uint32_t bytes) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (uint32_t i = 0; i < 4; i++)
        putc_unlocked(i <= bytes ? digits[b->bits >> (18 - 6 * i) & 63] : '=', b->out);
    b->bits = b->count = 0;
}

static void put_byte(struct base64 *b, uint8_t byte) {
    b->bits |= (uint32_t)byte << (16 - 8 * b->count);
    if (++b->count == 3) put_bits(b, 3);
}

static void end_bytes(struct base64 *b) {
    if (b->count) put_bits(b, b->count);
}

static void put_unsigned(struct base64 *b, uint64_t value) {
    for (; value >= 128; value >>= 7) put_byte(b, (uint8_t)(value | 128));
    put_byte(b, (uint8_t)value);
}

static void put_signed(struct base64 *b, int64_t value) {
    put_unsigned(b, (uint64_t)value << 1 ^ (uint64_t)(value >> 63));
}

/* ---- kinds ---- */

struct kinds {
    uint32_t *of_task;           /* by place of the task */
    uint32_t *first;             /* a task of each kind */
    uint32_t *table, table_size; /* kind + 1; 0: free */
    uint32_t count;
};

static int same_kind(const struct sw_report_task *a, const struct sw_report_task *b) {
    return a->name == b->name && a->micro == b->micro && a->bytes == b->bytes && a->eval == b->eval;
}

static uint32_t kind_hash(const struct sw_report_task *t) {
    uint64_t hash = t->name;
    hash = (hash ^ hash >> 29) * 0x9E3779B97F4A7C15u + t->micro;
    hash = (hash ^ hash >> 29) * 0x9E3779B97F4A7C15u + t->bytes;
    hash = (hash ^ hash >> 29) * 0x9E3779B97F4A7C15u + t->eval;
    return (uint32_t)((hash ^ hash >> 29) * 0x9E3779B97F4A7C15u >> 32);
}

static int find_kinds(const struct sw_report_trace *trace, struct kinds *k) {
    const struct sw_report_task *tasks = trace->tasks;
    k->table_size = 16;
    while (k->table_size < 2 * (uint64_t)trace->task_count) k->table_size *= 2;
    k->of_task = malloc((trace->task_count + (size_t)1) * sizeof(*k->of_task));
    k->first = malloc((trace->task_count + (size_t)1) * sizeof(*k->first));
    k->table = calloc(k->table_size, sizeof(*k->table));
    if (!k->of_task || !k->first || !k->table) return -ENOMEM;
    for (uint32_t i = 0; i < trace->task_count; i++) {
        uint32_t at = kind_hash(&tasks[i]) & (k->table_size - 1);
        while (k->table[at] && !same_kind(&tasks[k->first[k->table[at] - 1]], &tasks[i]))
            at = (at + 1) & (k->table_size - 1);
        if (!k->table[at]) {
            k->first[k->count] = i;
            k->table[at] = ++k->count;
        }
        k->of_task[i] = k->table[at] - 1;
    }
    return 0;
}

static void free_kinds(struct kinds *k) {
    free(k->of_task);
    free(k->first);
    free(k->table);
}

/* ---- the timeline ---- */

static void put_kinds(struct base64 *b, const struct sw_report_trace *trace,
                      const struct kinds *k) {
    put_unsigned(b, k->count);
    for (uint32_t i = 0; i < k->count; i++) {
        const struct sw_report_task *t = &trace->tasks[k->first[i]];
        put_unsigned(b, t->name);
        put_unsigned(b, t->micro);
        put_unsigned(b, t->bytes);
        put_unsigned(b, t->eval);
    }
}

static void put_tasks(struct base64 *b, const struct sw_report_trace *trace, const struct kinds *k,
                      int64_t begin_ns) {
    uint32_t at = 0;
    for (uint32_t l = 0; l < trace->lane_count; l++) {
        uint32_t end = at;
        while (end < trace->task_count && trace->tasks[end].lane == l) end++;
        put_unsigned(b, end - at);
        int64_t time = begin_ns;
        uint64_t step = 0;
        for (; at < end; at++) {
            const struct sw_report_task *t = &trace->tasks[at];
            put_unsigned(b, (uint64_t)k->of_task[at] << 1 | t->on_path);
            put_signed(b, t->start_ns - time);
            put_unsigned(b, (uint64_t)(t->end_ns - t->start_ns));
            put_signed(b, (int64_t)(t->step - step));
            time = t->end_ns;
            step = t->step;
        }
    }
}

static void put_samples(struct base64 *b, const struct sw_report_trace *trace, int64_t begin_ns) {
    for (uint32_t i = 0; i < trace->tier_count; i++) {
        const struct sw_report_tier *tier = &trace->tiers[i];
        struct sw_report_sample before = {begin_ns, 0, 0};
        put_unsigned(b, tier->count);
        for (uint32_t s = 0; s < tier->count; s++) {
            const struct sw_report_sample *sample = &tier->samples[s];
            put_signed(b, sample->at_ns - before.at_ns);
            put_signed(b, (int64_t)(sample->used - before.used));
            put_signed(b, (int64_t)(sample->budget - before.budget));
            before = *sample;
        }
    }
}

/* ---- the page ---- */

/* jansson's pieces; no '<', so that nothing in a name ends the element or begins a comment. */
static int put_json(const char *text, size_t size, void *ctx) {
    FILE *out = ctx;
    for (size_t i = 0; i < size; i++) {
        if (text[i] == '<')
            fputs("\\u003c", out);
        else
            putc_unlocked(text[i], out);
    }
    return 0;
}

static int put_figures(const struct sw_report_trace *trace, const struct sw_report_figures *f,
                       const char *path, FILE *out) {
    json_t *figures = sw_report_json(trace, f, path);
    const int bad =
        !figures || json_dump_callback(figures, put_json, out,
                                       JSON_COMPACT | JSON_ENSURE_ASCII | JSON_REAL_PRECISION(12));
    json_decref(figures);
    return bad ? -ENOMEM : 0;
}

static int put_names(const struct sw_report_trace *trace, FILE *out) {
    json_t *names = json_array();
    for (uint32_t i = 0; i < sw_report_name_count(trace); i++)
        json_array_append_new(names, json_string(sw_report_name(trace, i)));
    const int bad =
        !names || json_dump_callback(names, put_json, out, JSON_COMPACT | JSON_ENSURE_ASCII);
    json_decref(names);
    return bad ? -ENOMEM : 0;
}

static int put_timeline(const struct sw_report_trace *trace, const struct sw_report_figures *f,
                        FILE *out) {
    struct kinds kinds = {0};
    struct base64 b = {.out = out};
    const int ret = find_kinds(trace, &kinds);
    if (ret == 0) {
        put_kinds(&b, trace, &kinds);
        put_tasks(&b, trace, &kinds, f->begin_ns);
        put_samples(&b, trace, f->begin_ns);
        end_bytes(&b);
    }
    free_kinds(&kinds);
    return ret;
}

/* The template has {{style}}, {{figures}}, {{names}}, {{timeline}} and {{script}}. */
int sw_report_page(const struct sw_report_trace *trace, const struct sw_report_figures *f,
                   const char *path, FILE *out) {
    const char *at = sw_report_html, *mark;
    int ret = 0;
    while (ret == 0 && (mark = strstr(at, "{{"))) {
        fwrite(at, 1, (size_t)(mark - at), out);
        at = strstr(mark, "}}") + 2;
        if (!strncmp(mark, "{{style}}", 9))
            fputs(sw_report_css, out);
        else if (!strncmp(mark, "{{script}}", 10))
            fputs(sw_report_js, out);
        else if (!strncmp(mark, "{{figures}}", 11))
            ret = put_figures(trace, f, path, out);
        else if (!strncmp(mark, "{{names}}", 9))
            ret = put_names(trace, out);
        else
            ret = put_timeline(trace, f, out);
    }
    if (ret == 0) fputs(at, out);
    return ret;
}
