/* engine/model_weights.c - the weight files of a model folder: found, mapped, and matched with the
 * tensors that the configuration asks for, each with its shape, before anything is used. */
#include "engine/model_internal.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"

#define INDEX_NAME  "model.safetensors.index.json"
#define SINGLE_NAME "model.safetensors"

/* A tensor of any file, for looking up by name. */
struct entry {
    const char *name;
    const struct sw_safetensors *file;
    const struct sw_safetensors_tensor *tensor;
    int used;
};

static int by_name(const void *left, const void *right) {
    return strcmp(((const struct entry *)left)->name, ((const struct entry *)right)->name);
}

static int has_file(const char *dir, const char *name) {
    char *path = sw_model_path(dir, name);
    const int there = path && access(path, F_OK) == 0;
    free(path);
    return there;
}

static int open_file(struct sw_weights *weights, const char *dir, const char *name) {
    char *path = sw_model_path(dir, name);
    if (!path) return -ENOMEM;
    const int ret = sw_safetensors_open(&weights->files[weights->file_count], path);
    if (ret == 0) weights->file_count++;
    free(path);
    return ret;
}

static const struct sw_safetensors *find_shard(const struct sw_weights *weights, const char *name) {
    for (uint32_t i = 0; i < weights->file_count; i++) {
        const char *path = weights->files[i].path, *slash = strrchr(path, '/');
        if (!strcmp(slash ? slash + 1 : path, name)) return &weights->files[i];
    }
    return NULL;
}

static int open_shards(struct sw_weights *weights, const char *dir, const json_t *map) {
    const char *tensor;
    json_t *value;
    json_object_foreach((json_t *)map, tensor, value) {
        const char *name = json_string_value(value);
        if (!name || strchr(name, '/') || !*name) {
            sw_error("%s/%s: the file of tensor '%s' is not a plain file name", dir, INDEX_NAME,
                     tensor);
            return -EINVAL;
        }
        if (find_shard(weights, name)) continue;
        if (!has_file(dir, name)) {
            sw_error("%s: the file %s is missing; %s places tensor '%s' there", dir, name,
                     INDEX_NAME, tensor);
            return -ENOENT;
        }
        const int ret = open_file(weights, dir, name);
        if (ret < 0) return ret;
    }
    return 0;
}

/* Every tensor must lie in the file that the index names. */
static int check_index(const struct sw_weights *weights, const char *dir, const json_t *map) {
    for (uint32_t f = 0; f < weights->file_count; f++) {
        const char *slash = strrchr(weights->files[f].path, '/');
        for (uint32_t i = 0; i < weights->files[f].tensor_count; i++) {
            const char *tensor = weights->files[f].tensors[i].name;
            const char *place = json_string_value(json_object_get(map, tensor));
            if (place && !strcmp(place, slash + 1)) continue;
            sw_error("%s: tensor '%s' lies in %s, but %s %s%s", dir, tensor, slash + 1, INDEX_NAME,
                     place ? "places it in " : "does not list it", place ? place : "");
            return -EINVAL;
        }
    }
    return 0;
}

static int open_index(struct sw_weights *weights, const char *dir) {
    char *path = sw_model_path(dir, INDEX_NAME);
    if (!path) return -ENOMEM;
    json_error_t error;
    json_t *root = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
    const json_t *map = json_object_get(root, "weight_map");
    int ret = -EINVAL;
    if (!root) {
        sw_error("%s: line %d, column %d: %s", path, error.line, error.column, error.text);
    } else if (!json_is_object(map)) {
        sw_error("%s: there is no 'weight_map'", path);
    } else {
        weights->files = calloc(json_object_size(map) + 1, sizeof(*weights->files));
        ret = weights->files ? open_shards(weights, dir, map) : -ENOMEM;
        if (ret == 0) ret = check_index(weights, dir, map);
    }
    json_decref(root);
    free(path);
    return ret;
}

/* As the transformers library does: the single file first, then the index. */
static int open_files(struct sw_weights *weights, const char *dir) {
    if (has_file(dir, SINGLE_NAME)) {
        weights->files = calloc(1, sizeof(*weights->files));
        return weights->files ? open_file(weights, dir, SINGLE_NAME) : -ENOMEM;
    }
    if (has_file(dir, INDEX_NAME)) return open_index(weights, dir);
    const int has_pickle =
        has_file(dir, "pytorch_model.bin") || has_file(dir, "pytorch_model.bin.index.json");
    sw_error("%s: neither %s nor %s is there%s", dir, SINGLE_NAME, INDEX_NAME,
             has_pickle ? " (pytorch_model.bin cannot be read: convert it to safetensors)" : "");
    return -ENOENT;
}

static int list_entries(const struct sw_weights *weights, const char *dir, struct entry **out,
                        size_t *out_count) {
    size_t count = 0, next = 0;
    for (uint32_t f = 0; f < weights->file_count; f++) count += weights->files[f].tensor_count;
    struct entry *list = calloc(count + 1, sizeof(*list));
    if (!list) return -ENOMEM;
    for (uint32_t f = 0; f < weights->file_count; f++)
        for (uint32_t i = 0; i < weights->files[f].tensor_count; i++) {
            const struct sw_safetensors *file = &weights->files[f];
            list[next++] = (struct entry){file->tensors[i].name, file, &file->tensors[i], 0};
        }
    qsort(list, count, sizeof(*list), by_name);
    for (size_t i = 1; i < count; i++)
        if (!strcmp(list[i - 1].name, list[i].name)) {
            sw_error("%s: tensor '%s' is in two files", dir, list[i].name);
            free(list);
            return -EINVAL;
        }
    *out = list;
    *out_count = count;
    return 0;
}

static const char *print_shape(uint32_t dims, const uint64_t *shape, char *out, size_t size) {
    size_t at = (size_t)snprintf(out, size, "[");
    for (uint32_t i = 0; i < dims && at < size; i++)
        at += (size_t)snprintf(out + at, size - at, "%s%" PRIu64, i ? ", " : "", shape[i]);
    if (at < size) snprintf(out + at, size - at, "]");
    return out;
}

/* rows: of the whole tensor. */
static int check_shape(const struct entry *found, const struct sw_tensor *tensor, uint64_t rows) {
    const uint64_t expected[2] = {rows, tensor->cols};
    const uint32_t dims = tensor->cols ? 2 : 1;
    const struct sw_safetensors_tensor *have = found->tensor;
    if (have->dims == dims && !memcmp(have->shape, expected, dims * sizeof(expected[0]))) return 0;
    char want_text[64], have_text[192];
    sw_error("%s: tensor '%s' has shape %s; config.json asks for %s", found->file->path,
             tensor->name, print_shape(have->dims, have->shape, have_text, sizeof(have_text)),
             print_shape(dims, expected, want_text, sizeof(want_text)));
    return -EINVAL;
}

static int place_tensors(const struct sw_model *model, struct sw_weights *weights,
                         struct entry *list, size_t count) {
    for (uint32_t u = 0; u < model->unit_count; u++)
        for (uint32_t i = 0; i < model->units[u].tensor_count; i++) {
            const struct sw_tensor *tensor = &model->units[u].tensors[i];
            const struct entry key = {.name = tensor->name};
            struct entry *found = bsearch(&key, list, count, sizeof(*list), by_name);
            if (!found) {
                sw_error("%s: tensor '%s' is missing", model->dir, tensor->name);
                return -EINVAL;
            }
            const int ret = check_shape(found, tensor, sw_model_source_rows(model, u, i));
            if (ret < 0) return ret;
            found->used = 1;
            weights->places[u][i] = (struct sw_weight){found->file, found->tensor};
        }
    return 0;
}

/* What is left over: buffers that follow from the configuration, and a tied head's second copy,
 * which the library ignores as well; anything else would silently take no part. */
static int check_leftover(const struct sw_model *model, const struct entry *list, size_t count) {
    static const char inv_freq[] = "rotary_emb.inv_freq";
    for (size_t i = 0; i < count; i++) {
        if (list[i].used) continue;
        const size_t length = strlen(list[i].name), tail = sizeof(inv_freq) - 1;
        if (length >= tail && !strcmp(list[i].name + length - tail, inv_freq)) continue;
        if (model->config.tied && !strcmp(list[i].name, "lm_head.weight")) {
            sw_info("%s: lm_head.weight is ignored: the head is tied to the embedding", model->dir);
            continue;
        }
        sw_error("%s: tensor '%s' is not part of the model that config.json describes",
                 list[i].file->path, list[i].name);
        return -EINVAL;
    }
    return 0;
}

int sw_weights_open(struct sw_model *model, json_t *root) {
    assert(model->units && !model->weights);
    struct sw_weights *weights = calloc(1, sizeof(*weights));
    if (!weights) {
        json_decref(root);
        return -ENOMEM;
    }
    weights->config = root;
    struct entry *list = NULL;
    size_t count = 0;
    int ret = open_files(weights, model->dir);
    if (ret == 0) ret = list_entries(weights, model->dir, &list, &count);
    if (ret == 0) {
        weights->places = calloc(model->unit_count, sizeof(*weights->places));
        ret = weights->places ? place_tensors(model, weights, list, count) : -ENOMEM;
    }
    if (ret == 0) ret = check_leftover(model, list, count);
    free(list);
    if (ret < 0) {
        sw_weights_close(weights);
        return ret;
    }
    model->weights = weights;
    return 0;
}

void sw_weights_close(struct sw_weights *weights) {
    if (!weights) return;
    for (uint32_t i = 0; i < weights->file_count; i++) sw_safetensors_close(&weights->files[i]);
    free(weights->files);
    free(weights->places);
    json_decref(weights->config);
    free(weights);
}
