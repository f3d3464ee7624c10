/* engine/import.c - see the header. */
#include "engine/import.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/log.h"
#include "engine/model_internal.h"

enum { SCHEMA = 1 };

/* ---- optimizer.json ---- */

struct reader {
    const char *path;
    int bad; /* the first bad field was reported */
};

static void complain(struct reader *r, const char *key, const char *what) {
    if (!r->bad) sw_error("%s: '%s' %s", r->path, key, what);
    r->bad = 1;
}

static uint64_t get_count(struct reader *r, const json_t *object, const char *key) {
    const json_t *value = json_object_get(object, key);
    if (!json_is_integer(value)) complain(r, key, "is missing, or not a whole number");
    return (uint64_t)json_integer_value(value); /* a seed may have all 64 bits */
}

static void get_text(struct reader *r, const json_t *object, const char *key, char *out,
                     size_t out_size) {
    const char *text = json_string_value(json_object_get(object, key));
    if (!text || strlen(text) >= out_size) complain(r, key, "is missing, or not such a text");
    snprintf(out, out_size, "%s", text ? text : "");
}

static void parse_state(struct sw_import *im, struct reader *r, const json_t *root) {
    const json_t *data = json_object_get(root, "data"), *model = json_object_get(root, "model");
    char order[16];
    if (get_count(r, root, "schema") != SCHEMA) complain(r, "schema", "is not 1");
    if (json_object_get(root, "run")) get_text(r, root, "run", im->run, sizeof(im->run));
    im->step = get_count(r, root, "step");
    im->updates = get_count(r, root, "updates");
    im->skips_in_a_row = get_count(r, root, "skips_in_a_row");
    im->step_rows = get_count(r, data, "rows_per_step");
    im->seq_len = (uint32_t)get_count(r, data, "seq_len");
    im->seed = get_count(r, data, "seed");
    get_text(r, data, "order", order, sizeof(order));
    get_text(r, data, "fingerprint", im->data, sizeof(im->data));
    get_text(r, model, "fingerprint", im->model, sizeof(im->model));
    im->order =
        strcmp(order, sw_order_name(SW_ORDER_SEQUENTIAL)) ? SW_ORDER_SHUFFLE : SW_ORDER_SEQUENTIAL;
    if (strcmp(order, sw_order_name(im->order)) != 0)
        complain(r, "order", "is neither shuffle nor sequential");
    if (im->step > INT64_MAX || im->updates > im->step || im->skips_in_a_row > im->step)
        complain(r, "updates", "and 'skips_in_a_row' must not be above 'step'");
    if (get_count(r, data, "rows_taken") != im->step * im->step_rows)
        complain(r, "rows_taken", "is not 'step' times 'rows_per_step'");
}

static int read_state(struct sw_import *im) {
    char *path = sw_model_path(im->dir, SW_EXPORT_STATE);
    if (!path) return -ENOMEM;
    json_error_t error;
    json_t *root = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
    struct reader r = {.path = path};
    if (!root) {
        r.bad = 1;
        if (error.line < 0)
            sw_error("--import: %s (an export puts this file in place last)", error.text);
        else
            sw_error("%s: line %d, column %d: %s", path, error.line, error.column, error.text);
    } else {
        parse_state(im, &r, root);
    }
    json_decref(root);
    free(path);
    return r.bad ? -EINVAL : 0;
}

/* ---- tensors ---- */

static int place_tensor(struct sw_import *im, const struct sw_model *model, int part, uint32_t unit,
                        uint32_t i) {
    const struct sw_tensor *tensor = &model->units[unit].tensors[i];
    char name[SW_EXPORT_NAME_MAX];
    sw_export_name(part, tensor->name, name);
    return sw_tensor_folder_find(&im->folder, name, sw_model_source_rows(model, unit, i),
                                 tensor->cols, &im->places[part][unit][i]);
}

static int place_tensors(struct sw_import *im, const struct sw_model *model) {
    int ret = 0;
    for (int part = 0; part < SW_EXPORT_PARTS && ret == 0; part++) {
        im->places[part] = calloc(model->unit_count, sizeof(*im->places[part]));
        if (!im->places[part]) return -ENOMEM;
        for (uint32_t u = 0; u < model->unit_count && ret == 0; u++)
            for (uint32_t i = 0; i < model->units[u].tensor_count && ret == 0; i++)
                if (!model->units[u].tensors[i].frozen) ret = place_tensor(im, model, part, u, i);
    }
    return ret;
}

static int check_leftover(const struct sw_tensor_folder *folder) {
    for (size_t i = 0; i < folder->count; i++) {
        if (folder->list[i].used) continue;
        sw_error("%s: tensor '%s' is not one of this model's optimizer",
                 folder->list[i].at.file->path, folder->list[i].name);
        return -EINVAL;
    }
    return 0;
}

/* Refuses files of several exports, where they name what they are of; all or none do. */
static int check_origins(const struct sw_import *im) {
    char want[SW_EXPORT_ORIGIN_BYTES] = "";
    if (*im->run)
        snprintf(want, sizeof(want), SW_EXPORT_ORIGIN_FORMAT, im->run,
                 (unsigned long long)im->step);
    for (uint32_t i = 0; i < im->folder.file_count; i++) {
        const struct sw_safetensors *file = &im->folder.files[i];
        const char *have = file->origin ? file->origin : "";
        if (strcmp(have, want) == 0) continue;
        sw_error("--import: %s is of run '%s', and %s/%s of run '%s': they are of two exports; "
                 "bring the files of one together, or export again",
                 file->path, have, im->dir, SW_EXPORT_STATE, want);
        return -EINVAL;
    }
    return 0;
}

int sw_import_open(struct sw_import *im, const struct sw_model *model, const char *dir) {
    *im = (struct sw_import){.dir = dir};
    int ret = read_state(im);
    if (ret == 0) ret = sw_tensor_folder_open(&im->folder, dir, NULL, SW_EXPORT_INDEX);
    if (ret == 0) ret = check_origins(im);
    if (ret == 0) ret = place_tensors(im, model);
    if (ret == 0) ret = check_leftover(&im->folder);
    if (ret == 0) sw_tensor_folder_forget(&im->folder);
    if (ret < 0) sw_import_close(im);
    return ret;
}

void sw_import_close(struct sw_import *im) {
    if (!im) return;
    sw_tensor_folder_close(&im->folder);
    for (int part = 0; part < SW_EXPORT_PARTS; part++) free(im->places[part]);
    *im = (struct sw_import){0};
}
