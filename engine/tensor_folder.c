/* engine/tensor_folder.c - see the header. */
#include "engine/tensor_folder.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "engine/model_internal.h"

static int by_name(const void *left, const void *right) {
    return strcmp(((const struct sw_tensor_place *)left)->name,
                  ((const struct sw_tensor_place *)right)->name);
}

static int has_file(const char *dir, const char *name) {
    char *path = sw_model_path(dir, name);
    const int there = path && access(path, F_OK) == 0;
    free(path);
    return there;
}

static int open_file(struct sw_tensor_folder *folder, const char *name) {
    char *path = sw_model_path(folder->dir, name);
    if (!path) return -ENOMEM;
    const int ret = sw_safetensors_open(&folder->files[folder->file_count], path);
    if (ret == 0) folder->file_count++;
    free(path);
    return ret;
}

static const struct sw_safetensors *find_shard(const struct sw_tensor_folder *folder,
                                               const char *name) {
    for (uint32_t i = 0; i < folder->file_count; i++) {
        const char *path = folder->files[i].path, *slash = strrchr(path, '/');
        if (!strcmp(slash ? slash + 1 : path, name)) return &folder->files[i];
    }
    return NULL;
}

static int open_shards(struct sw_tensor_folder *folder, const char *index, const json_t *map) {
    const char *tensor;
    json_t *value;
    json_object_foreach((json_t *)map, tensor, value) {
        const char *name = json_string_value(value);
        if (!name || strchr(name, '/') || !*name) {
            sw_error("%s/%s: the file of tensor '%s' is not a plain file name", folder->dir, index,
                     tensor);
            return -EINVAL;
        }
        if (find_shard(folder, name)) continue;
        if (!has_file(folder->dir, name)) {
            sw_error("%s: the file %s is missing; %s places tensor '%s' there", folder->dir, name,
                     index, tensor);
            return -ENOENT;
        }
        const int ret = open_file(folder, name);
        if (ret < 0) return ret;
    }
    return 0;
}

/* Every tensor must lie in the file that the index names. */
static int check_index(const struct sw_tensor_folder *folder, const char *index,
                       const json_t *map) {
    for (uint32_t f = 0; f < folder->file_count; f++) {
        const char *slash = strrchr(folder->files[f].path, '/');
        for (uint32_t i = 0; i < folder->files[f].tensor_count; i++) {
            const char *tensor = folder->files[f].tensors[i].name;
            const char *place = json_string_value(json_object_get(map, tensor));
            if (place && !strcmp(place, slash + 1)) continue;
            sw_error("%s: tensor '%s' lies in %s, but %s %s%s", folder->dir, tensor, slash + 1,
                     index, place ? "places it in " : "does not list it", place ? place : "");
            return -EINVAL;
        }
    }
    return 0;
}

static int open_index(struct sw_tensor_folder *folder, const char *index) {
    char *path = sw_model_path(folder->dir, index);
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
        folder->files = calloc(json_object_size(map) + 1, sizeof(*folder->files));
        ret = folder->files ? open_shards(folder, index, map) : -ENOMEM;
        if (ret == 0) ret = check_index(folder, index, map);
    }
    json_decref(root);
    free(path);
    return ret;
}

/* As the transformers library does: the single file first, then the index. */
static int open_files(struct sw_tensor_folder *folder, const char *single, const char *index) {
    const char *dir = folder->dir;
    if (single && has_file(dir, single)) {
        folder->files = calloc(1, sizeof(*folder->files));
        return folder->files ? open_file(folder, single) : -ENOMEM;
    }
    if (has_file(dir, index)) return open_index(folder, index);
    const int has_pickle =
        has_file(dir, "pytorch_model.bin") || has_file(dir, "pytorch_model.bin.index.json");
    if (single)
        sw_error("%s: neither %s nor %s is there%s", dir, single, index,
                 has_pickle ? " (pytorch_model.bin cannot be read: convert it to safetensors)"
                            : "");
    else
        sw_error("%s: %s is not there", dir, index);
    return -ENOENT;
}

static int list_places(struct sw_tensor_folder *folder) {
    size_t next = 0;
    for (uint32_t f = 0; f < folder->file_count; f++)
        folder->count += folder->files[f].tensor_count;
    struct sw_tensor_place *list = folder->list = calloc(folder->count + 1, sizeof(*list));
    if (!list) return -ENOMEM;
    for (uint32_t f = 0; f < folder->file_count; f++)
        for (uint32_t i = 0; i < folder->files[f].tensor_count; i++) {
            const struct sw_safetensors *file = &folder->files[f];
            list[next++] =
                (struct sw_tensor_place){file->tensors[i].name, {file, &file->tensors[i]}, 0};
        }
    qsort(list, folder->count, sizeof(*list), by_name);
    for (size_t i = 1; i < folder->count; i++)
        if (!strcmp(list[i - 1].name, list[i].name)) {
            sw_error("%s: tensor '%s' is in two files", folder->dir, list[i].name);
            return -EINVAL;
        }
    return 0;
}

static const char *print_shape(uint32_t dims, const uint64_t *shape, char *out, size_t size) {
    size_t at = (size_t)snprintf(out, size, "[");
    for (uint32_t i = 0; i < dims && at < size; i++)
        at += (size_t)snprintf(out + at, size - at, "%s%" PRIu64, i ? ", " : "", shape[i]);
    if (at < size) snprintf(out + at, size - at, "]");
    return out;
}

static int check_shape(const struct sw_tensor_place *found, uint64_t rows, uint64_t cols) {
    const uint64_t expected[2] = {rows, cols};
    const uint32_t dims = cols ? 2 : 1;
    const struct sw_safetensors_tensor *have = found->at.tensor;
    if (have->dims == dims && !memcmp(have->shape, expected, dims * sizeof(expected[0]))) return 0;
    char want_text[64], have_text[192];
    sw_error("%s: tensor '%s' has shape %s; config.json asks for %s", found->at.file->path,
             found->name, print_shape(have->dims, have->shape, have_text, sizeof(have_text)),
             print_shape(dims, expected, want_text, sizeof(want_text)));
    return -EINVAL;
}

int sw_tensor_folder_find(const struct sw_tensor_folder *folder, const char *name, uint64_t rows,
                          uint64_t cols, struct sw_weight *at) {
    const struct sw_tensor_place key = {.name = name};
    struct sw_tensor_place *found =
        bsearch(&key, folder->list, folder->count, sizeof(*folder->list), by_name);
    if (!found) {
        sw_error("%s: tensor '%s' is missing", folder->dir, name);
        return -EINVAL;
    }
    const int ret = check_shape(found, rows, cols);
    if (ret < 0) return ret;
    found->used = 1;
    *at = found->at;
    return 0;
}

int sw_tensor_folder_open(struct sw_tensor_folder *folder, const char *dir, const char *single,
                          const char *index) {
    *folder = (struct sw_tensor_folder){.dir = dir};
    int ret = open_files(folder, single, index);
    if (ret == 0) ret = list_places(folder);
    if (ret < 0) sw_tensor_folder_close(folder);
    return ret;
}

void sw_tensor_folder_forget(struct sw_tensor_folder *folder) {
    free(folder->list);
    folder->list = NULL;
    folder->count = 0;
}

void sw_tensor_folder_close(struct sw_tensor_folder *folder) {
    for (uint32_t i = 0; i < folder->file_count; i++) sw_safetensors_close(&folder->files[i]);
    free(folder->files);
    sw_tensor_folder_forget(folder);
    *folder = (struct sw_tensor_folder){0};
}
