/* plan/machine.c - reads a machine's figures from a profile: one table names them all. */
#include "plan/machine.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "engine/model.h"
#include "engine/options.h"

struct figure {
    const char *name;
    size_t offset;
};

#define FIGURE(name)                                                                               \
    { #name, offsetof(struct sw_machine, name) }
static const struct figure figures[] = {
    FIGURE(gpus),
    FIGURE(gpu_memory_bytes),
    FIGURE(gpu_reserved_bytes),
    FIGURE(gpu_memory_bytes_per_s),
    FIGURE(flops_per_s),
    FIGURE(h2d_bytes_per_s),
    FIGURE(d2h_bytes_per_s),
    FIGURE(both_bytes_per_s),
    FIGURE(h2d_pageable_bytes_per_s),
    FIGURE(d2h_pageable_bytes_per_s),
    FIGURE(gather_bytes_per_s),
    FIGURE(scatter_bytes_per_s),
    FIGURE(round_bytes_per_s),
    FIGURE(region_s),
    FIGURE(cores),
    FIGURE(cpus),
    FIGURE(memory_bytes),
    FIGURE(memory_bytes_per_s),
    FIGURE(adam_bytes_per_s),
    FIGURE(commit_s),
    FIGURE(switch_bytes_per_s),
    FIGURE(gpus_per_switch),
    FIGURE(drives_per_switch),
};
enum { FIGURES = sizeof(figures) / sizeof(figures[0]) };

#define DRIVE(name)                                                                                \
    { #name, offsetof(struct sw_machine_drive, name) }
static const struct figure drive_figures[] = {
    DRIVE(bytes),
    DRIVE(read_bytes_per_s),
    DRIVE(write_bytes_per_s),
    DRIVE(mixed_bytes_per_s),
};

#define NUMA(name)                                                                                 \
    { #name, offsetof(struct sw_machine_numa, name) }
static const struct figure numa_figures[] = {
    NUMA(cores),
    NUMA(memory_bytes),
    NUMA(memory_bytes_per_s),
    NUMA(adam_bytes_per_s),
};

#define MODEL(name)                                                                                \
    { #name, offsetof(struct sw_machine_model, name) }
static const struct figure model_figures[] = {
    MODEL(layer_forward_s),  MODEL(layer_backward_s), MODEL(embed_forward_s),
    MODEL(embed_backward_s), MODEL(norm_forward_s),   MODEL(norm_backward_s),
    MODEL(head_forward_s),   MODEL(head_backward_s),  MODEL(head_dx_s),
    MODEL(head_grad_s),      MODEL(head_whole_s),     MODEL(cpus),
};
enum { MODEL_FIGURES = sizeof(model_figures) / sizeof(model_figures[0]) };

static double *place(void *owner, const struct figure *figure) {
    return (double *)((char *)owner + figure->offset);
}

int sw_machine_set(struct sw_machine *m, const char *name, double value) {
    for (int i = 0; i < FIGURES; i++)
        if (!strcmp(figures[i].name, name)) {
            *place(m, &figures[i]) = value;
            return 0;
        }
    return -ENOENT;
}

const char *sw_machine_figure(const struct sw_machine *m, int i, double *value) {
    if (i >= FIGURES) return NULL;
    memcpy(value, (const char *)m + figures[i].offset, sizeof(*value));
    return figures[i].name;
}

/* Takes the figures of an object that are there; a figure is a number from 0 on. */
static int take(void *owner, const struct figure *table, size_t count, const json_t *object,
                const char *path, const char *inside) {
    for (size_t i = 0; i < count; i++) {
        const json_t *value = json_object_get(object, table[i].name);
        if (!value) continue;
        if (!json_is_number(value) || !(json_number_value(value) >= 0)) {
            sw_error("machine profile %s: '%s' in '%s' is not a number from 0 on", path,
                     table[i].name, inside);
            return -EINVAL;
        }
        *place(owner, &table[i]) = json_number_value(value);
    }
    return 0;
}

static void take_text(char *out, size_t size, const json_t *object, const char *key) {
    const char *text = json_string_value(json_object_get(object, key));
    if (text) snprintf(out, size, "%s", text);
}

/* A drive that was measured is named by its mount, whose last word is its file system's size. */
static double bytes_of_name(const char *name) {
    const char *last = strrchr(name, ' ');
    return last ? strtod(last + 1, NULL) : 0;
}

static int take_drives(struct sw_machine *m, const json_t *list, const char *path) {
    size_t i;
    json_t *entry;
    json_array_foreach((json_t *)list, i, entry) {
        struct sw_machine_drive drive = {0};
        take_text(drive.name, sizeof(drive.name), entry, "drive");
        const int ret = take(&drive, drive_figures, sizeof(drive_figures) / sizeof(struct figure),
                             entry, path, "drives");
        if (ret < 0) return ret;
        if (!json_object_get(entry, "bytes")) drive.bytes = bytes_of_name(drive.name);
        const json_t *count = json_object_get(entry, "count");
        const json_int_t copies = count ? json_integer_value(count) : 1;
        if (copies < 1 || copies > SW_MACHINE_DRIVES_MAX - m->drive_count) {
            sw_error("machine profile %s: 'count' of drive '%s' is not from 1 on, or there are "
                     "more than %d drives",
                     path, drive.name, SW_MACHINE_DRIVES_MAX);
            return -EINVAL;
        }
        for (json_int_t c = 0; c < copies; c++) m->drives[m->drive_count++] = drive;
    }
    return 0;
}

static int take_numa(struct sw_machine *m, const json_t *list, const char *path) {
    size_t i;
    json_t *entry;
    json_array_foreach((json_t *)list, i, entry) {
        if (m->numa_count == SW_MACHINE_NUMA_MAX) {
            sw_error("machine profile %s: more than %d NUMA nodes", path, SW_MACHINE_NUMA_MAX);
            return -EINVAL;
        }
        const int ret =
            take(&m->numa[m->numa_count++], numa_figures,
                 sizeof(numa_figures) / sizeof(struct figure), entry, path, "numa_nodes");
        if (ret < 0) return ret;
    }
    return 0;
}

static int take_models(struct sw_machine *m, json_t *object, const char *path) {
    const char *key;
    json_t *entry;
    json_object_foreach(object, key, entry) {
        if (m->model_count == SW_MACHINE_MODELS_MAX) break; /* more than anybody trains at once */
        struct sw_machine_model *model = &m->models[m->model_count++];
        snprintf(model->key, sizeof(model->key), "%s", key);
        const int ret = take(model, model_figures, MODEL_FIGURES, entry, path, "models");
        if (ret < 0) return ret;
    }
    return 0;
}

/* What is not told of the whole machine is the sum over its NUMA nodes. */
static void add_up(struct sw_machine *m) {
    struct sw_machine_numa sum = {0};
    for (uint32_t i = 0; i < m->numa_count; i++)
        for (size_t f = 0; f < sizeof(numa_figures) / sizeof(struct figure); f++)
            *place(&sum, &numa_figures[f]) += *place(&m->numa[i], &numa_figures[f]);
    if (m->cores == 0) m->cores = sum.cores;
    if (m->memory_bytes == 0) m->memory_bytes = sum.memory_bytes;
    if (m->memory_bytes_per_s == 0) m->memory_bytes_per_s = sum.memory_bytes_per_s;
    if (m->adam_bytes_per_s == 0) m->adam_bytes_per_s = sum.adam_bytes_per_s;
}

int sw_machine_parse(struct sw_machine *m, const json_t *root, const char *path) {
    assert(m && path);
    memset(m, 0, sizeof(*m));
    const json_t *machine = json_object_get(root, "machine");
    if (!json_is_object(root) || json_integer_value(json_object_get(root, "schema")) != 1 ||
        (machine && !json_is_object(machine))) {
        sw_error("machine profile %s: not one of this version (\"schema\": 1 and \"machine\": "
                 "{...}): spillway bench all writes one",
                 path);
        return -EINVAL;
    }
    take_text(m->about, sizeof(m->about), root, "about");
    take_text(m->gpu, sizeof(m->gpu), machine, "gpu");
    take_text(m->measured, sizeof(m->measured), machine, "measured");
    int ret = take(m, figures, FIGURES, machine, path, "machine");
    if (ret == 0) ret = take_numa(m, json_object_get(root, "numa_nodes"), path);
    if (ret == 0) ret = take_drives(m, json_object_get(root, "drives"), path);
    if (ret == 0) ret = take_models(m, json_object_get(root, "models"), path);
    if (ret == 0 && (m->gpus != (uint32_t)m->gpus || m->gpus > 64)) {
        sw_error("machine profile %s: 'gpus' is not a whole number up to 64", path);
        ret = -EINVAL;
    }
    add_up(m);
    return ret;
}

const char *sw_machine_model_key(const struct sw_model_config *c, const struct sw_train_options *o,
                                 char *out, size_t out_size) {
    const uint32_t ranks = o->device == SW_DEVICE_HOST ? o->ranks : 1; /* GPUs share nothing */
    char sharing[32] = "";
    if (ranks > 1) snprintf(sharing, sizeof(sharing), ", %" PRIu32 " ranks", ranks);
    snprintf(out, out_size,
             "%s %s, hidden %" PRIu32 ", intermediate %" PRIu32 ", heads %" PRIu32 "/%" PRIu32
             " of %" PRIu32 ", vocabulary %" PRIu32 ", %" PRIu32 " x %" PRIu32 " tokens%s",
             o->device == SW_DEVICE_CUDA ? "cuda" : "host", o->dtype == SW_BF16 ? "bf16" : "fp32",
             c->hidden, c->intermediate, c->heads, c->kv_heads, c->head_dim, c->vocab,
             o->micro_batch, o->seq_len, sharing);
    return out;
}

const struct sw_machine_model *sw_machine_find_model(const struct sw_machine *m, const char *key) {
    for (uint32_t i = 0; i < m->model_count; i++)
        if (!strcmp(m->models[i].key, key)) return &m->models[i];
    return NULL;
}

const char *sw_machine_model_figure(const struct sw_machine_model *model, int i, double *value) {
    if (i >= MODEL_FIGURES) return NULL;
    memcpy(value, (const char *)model + model_figures[i].offset, sizeof(*value));
    return model_figures[i].name;
}

double sw_machine_drive_bytes(const struct sw_machine *m) {
    double sum = 0;
    for (uint32_t i = 0; i < m->drive_count; i++) sum += m->drives[i].bytes;
    return sum;
}
