/* engine/model_save.c - writes a model folder so that at no moment a folder with config.json is
 * incomplete.
 *
 * Everything goes to NAME.partial beside its place and is synced; then the names are exchanged,
 * with config.json last. Writing over an older model, a single weight file is replaced by one
 * rename; when several names have to change together, the old config.json is taken away first. */
#include "engine/model_internal.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "engine/shards.h"

#define INDEX_NAME  "model.safetensors.index.json"
#define SINGLE_NAME "model.safetensors"

enum { BLOCK_ELEMENTS = 4 << 20 };

struct source { /* of one tensor to write: tensors[tensor] of units [unit, unit + pieces) */
    uint32_t unit, tensor, pieces;
};

struct save {
    const struct sw_model *model;
    const char *dir;
    enum sw_dtype dtype;
    sw_model_fetch fetch;
    void *ctx;
    struct sw_safetensors_entry *entries; /* all tensors, whole, in unit order */
    struct source *sources;
    uint32_t count;
    struct sw_shards shards;
    void *block;
    struct sw_new_files files; /* config.json is the last */
};

/* Lists the tensors; the pieces of one lie in units that follow each other. */
static int list_tensors(struct save *s) {
    uint32_t pieces = 0;
    for (uint32_t u = 0; u < s->model->unit_count; u++) pieces += s->model->units[u].tensor_count;
    s->entries = calloc(pieces, sizeof(*s->entries));
    s->sources = calloc(pieces, sizeof(*s->sources));
    if (!s->entries || !s->sources) return -ENOMEM;
    for (uint32_t u = 0; u < s->model->unit_count; u++)
        for (uint32_t i = 0; i < s->model->units[u].tensor_count; i++) {
            const struct sw_tensor *tensor = &s->model->units[u].tensors[i];
            if (tensor->source_first > 0) {
                s->sources[s->count - 1].pieces++;
                continue;
            }
            s->entries[s->count] = (struct sw_safetensors_entry){
                tensor->name, sw_model_source_rows(s->model, u, i), tensor->cols};
            s->sources[s->count++] = (struct source){.unit = u, .tensor = i, .pieces = 1};
        }
    return 0;
}

static int plan(struct save *s, uint64_t shard_bytes_max) {
    int ret = list_tensors(s);
    if (ret == 0)
        ret = sw_shards_open(&s->shards, "model", s->entries, s->count, s->dtype, shard_bytes_max);
    if (ret < 0) return ret;
    s->block = malloc(BLOCK_ELEMENTS * sw_dtype_bytes(s->dtype));
    if (!s->block) return -ENOMEM;
    return sw_new_files_open(&s->files, s->dir, s->shards.count + SW_COMPANIONS_MAX + 2);
}

static int write_piece(struct save *s, struct sw_safetensors_writer *writer, uint32_t unit,
                       uint32_t index) {
    const struct sw_tensor *tensor = &s->model->units[unit].tensors[index];
    for (uint64_t done = 0; done < tensor->count;) {
        const uint64_t left = tensor->count - done;
        const uint64_t count = left < BLOCK_ELEMENTS ? left : BLOCK_ELEMENTS;
        int ret = s->fetch(s->ctx, unit, tensor->first + done, count, s->dtype, s->block);
        if (ret == 0)
            ret = sw_safetensors_write(writer, s->block, count * sw_dtype_bytes(s->dtype));
        if (ret < 0) return ret;
        done += count;
    }
    return 0;
}

static int write_tensor(struct save *s, struct sw_safetensors_writer *writer,
                        const struct source *source) {
    int ret = 0;
    for (uint32_t i = 0; i < source->pieces && ret == 0; i++)
        ret = write_piece(s, writer, source->unit + i, source->tensor);
    return ret;
}

static int write_shard(struct save *s, uint32_t shard, uint32_t first, uint32_t count) {
    char name[SW_NEW_FILE_NAME_BYTES];
    if (s->shards.count == 1)
        strcpy(name, SINGLE_NAME);
    else
        sw_shards_name(&s->shards, shard, name);
    char *path = sw_new_files_path(&s->files, name);
    if (!path) return -ENOMEM;
    struct sw_safetensors_writer writer;
    int ret = sw_safetensors_create(&writer, path, s->entries + first, count, s->dtype, NULL);
    free(path);
    if (ret < 0) return ret;
    sw_new_files_add(&s->files, name);
    for (uint32_t i = 0; i < count && ret == 0; i++)
        ret = write_tensor(s, &writer, &s->sources[first + i]);
    if (ret == 0) return sw_safetensors_finish(&writer);
    sw_safetensors_abort(&writer);
    return ret;
}

static int write_shards(struct save *s) {
    uint32_t first = 0;
    for (uint32_t shard = 0; shard < s->shards.count; shard++) {
        uint32_t end = first;
        while (end < s->count && s->shards.of[end] == shard) end++;
        const int ret = write_shard(s, shard, first, end - first);
        if (ret < 0) return ret;
        first = end;
    }
    return 0;
}

static int write_config(struct save *s, const json_t *config) {
    json_t *copy = json_deep_copy(config);
    if (!copy) return -ENOMEM;
    const char *dtype = s->dtype == SW_FP32 ? "float32" : "bfloat16";
    const int newer = json_object_get(copy, "dtype") != NULL;
    int ret = 0;
    if (newer && json_object_set_new(copy, "dtype", json_string(dtype)) < 0) ret = -ENOMEM;
    if ((!newer || json_object_get(copy, "torch_dtype")) &&
        json_object_set_new(copy, "torch_dtype", json_string(dtype)) < 0)
        ret = -ENOMEM;
    if (ret == 0) ret = sw_new_files_write_json(&s->files, "config.json", copy);
    json_decref(copy);
    return ret;
}

static int remove_file(const struct save *s, const char *name) {
    char *path = sw_model_path(s->dir, name);
    if (!path) return -ENOMEM;
    int ret = unlink(path) < 0 && errno != ENOENT ? -errno : 0;
    if (ret < 0) sw_error("cannot remove %s: %s", path, strerror(-ret));
    free(path);
    return ret;
}

static int has_file(const struct save *s, const char *name) {
    char *path = sw_model_path(s->dir, name);
    const int there = path && access(path, F_OK) == 0;
    free(path);
    return there;
}

/* Whether the new files can replace those of an older model one by one. */
static int is_same_layout(const struct save *s) {
    if (s->shards.count > 1 || has_file(s, INDEX_NAME)) return 0;
    char *old_path = sw_model_path(s->dir, "config.json"),
         *new_path = sw_new_files_path(&s->files, "config.json");
    json_t *old = old_path ? json_load_file(old_path, 0, NULL) : NULL;
    json_t *new = new_path ? json_load_file(new_path, 0, NULL) : NULL;
    const int same = old && new &&json_equal(old, new);
    json_decref(old);
    json_decref(new);
    free(old_path);
    free(new_path);
    return same;
}

/* Weight files of an older save that are not of this one. */
static int remove_stale(const struct save *s) {
    DIR *dir = opendir(s->dir);
    if (!dir) return 0;
    int ret = 0;
    for (const struct dirent *entry; ret == 0 && (entry = readdir(dir));) {
        const char *name = entry->d_name;
        unsigned part, parts;
        int end = 0;
        const int is_shard =
            sscanf(name, "model-%5u-of-%5u.safetensors%n", &part, &parts, &end) == 2 && end > 0 &&
            !name[end];
        if ((is_shard || !strcmp(name, SINGLE_NAME) || !strcmp(name, INDEX_NAME)) &&
            !sw_new_files_has(&s->files, name))
            ret = remove_file(s, name);
    }
    closedir(dir);
    return ret;
}

static int publish(struct save *s) {
    int ret = 0;
    if (has_file(s, "config.json") && !is_same_layout(s)) {
        ret = remove_file(s, "config.json");
        if (ret == 0) ret = sw_new_files_sync(&s->files);
    }
    /* config.json comes last: all else must be in place, durably. */
    const uint32_t last = s->files.count - 1;
    if (ret == 0) ret = sw_new_files_rename(&s->files, 0, last);
    if (ret == 0) ret = remove_stale(s);
    if (ret == 0) ret = sw_new_files_sync(&s->files);
    if (ret == 0) ret = sw_new_files_rename(&s->files, last, last + 1);
    return ret < 0 ? ret : sw_new_files_sync(&s->files);
}

int sw_model_write(const struct sw_model *model, const json_t *config,
                   const struct sw_companions *companions, const char *dir, enum sw_dtype dtype,
                   uint64_t shard_bytes_max, sw_model_fetch fetch, void *ctx) {
    assert(model && config && dir && fetch);
    struct save s = {.model = model, .dir = dir, .dtype = dtype, .fetch = fetch, .ctx = ctx};
    int ret = plan(&s, shard_bytes_max);
    if (ret == 0) ret = write_shards(&s);
    if (ret == 0 && s.shards.count > 1)
        ret = sw_shards_write_index(&s.shards, &s.files, INDEX_NAME);
    if (ret == 0 && companions) ret = sw_companions_copy(companions, &s.files);
    if (ret == 0) ret = write_config(&s, config);
    if (ret == 0) ret = publish(&s);
    if (ret == -ENOMEM) sw_error("no memory to write the model to %s", dir);
    if (ret < 0) sw_new_files_drop(&s.files);
    free(s.entries);
    free(s.sources);
    free(s.block);
    sw_shards_close(&s.shards);
    sw_new_files_close(&s.files);
    return ret;
}

int sw_model_save(const struct sw_model *model, const char *dir, enum sw_dtype dtype,
                  sw_model_fetch fetch, void *ctx) {
    assert(model->weights);
    return sw_model_write(model, model->weights->config, &model->weights->companions, dir, dtype,
                          SW_SHARD_BYTES_MAX, fetch, ctx);
}

uint64_t sw_model_saved_bytes(const struct sw_model *model, enum sw_dtype dtype) {
    enum { CONFIG_BYTES = 65536 };
    uint64_t bytes = model->params * sw_dtype_bytes(dtype) + CONFIG_BYTES;
    for (uint32_t u = 0; u < model->unit_count; u++)
        for (uint32_t i = 0; i < model->units[u].tensor_count; i++)
            bytes += sw_safetensors_entry_bytes(model->units[u].tensors[i].name);
    bytes += sw_companions_bytes(&model->weights->companions);
    return bytes;
}
