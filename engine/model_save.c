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
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"

#define INDEX_NAME  "model.safetensors.index.json"
#define SINGLE_NAME "model.safetensors"

enum { BLOCK_ELEMENTS = 4 << 20, NAME_MAX_BYTES = 64 };

/* Carried along as they are: they belong to the model whatever its weights. */
static const char *const companions[] = {
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
};
enum { COMPANIONS = sizeof(companions) / sizeof(companions[0]) };

int sw_model_is_companion(const char *name) {
    for (int i = 0; i < COMPANIONS; i++)
        if (strcmp(companions[i], name) == 0) return 1;
    return 0;
}

struct source { /* of one tensor to write: tensors[tensor] of units [unit, unit + pieces) */
    uint32_t unit, tensor, pieces, shard;
};

struct save {
    const struct sw_model *model;
    const char *dir;
    enum sw_dtype dtype;
    sw_model_fetch fetch;
    void *ctx;
    struct sw_safetensors_entry *entries; /* all tensors, whole, in unit order */
    struct source *sources;
    uint32_t count, shard_count;
    uint64_t total_bytes;
    void *block;
    char (*names)[NAME_MAX_BYTES]; /* files that lie as NAME.partial; config.json is the last */
    uint32_t name_count;
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

/* Sums and shards: a shard is closed before its data or its header would pass the limit. */
static int plan(struct save *s, uint64_t shard_bytes_max) {
    const int ret = list_tensors(s);
    if (ret < 0) return ret;
    uint64_t data = 0, header = 0;
    for (uint32_t i = 0; i < s->count; i++) {
        const struct sw_safetensors_entry *entry = &s->entries[i];
        const uint64_t count = entry->rows * (entry->cols ? entry->cols : 1);
        const uint64_t bytes = count * sw_dtype_bytes(s->dtype);
        const uint64_t head = sw_safetensors_entry_bytes(entry->name);
        if (data > 0 && (data + bytes > shard_bytes_max ||
                         header + head > SW_SAFETENSORS_HEADER_BYTES_MAX - 4096)) {
            s->shard_count++;
            data = header = 0;
        }
        data += bytes;
        header += head;
        s->total_bytes += bytes;
        s->sources[i].shard = s->shard_count;
    }
    s->shard_count++;
    s->block = malloc(BLOCK_ELEMENTS * sw_dtype_bytes(s->dtype));
    s->names = calloc(s->shard_count + COMPANIONS + 2, sizeof(*s->names));
    return s->block && s->names ? 0 : -ENOMEM;
}

static void shard_name(const struct save *s, uint32_t shard, char *out) {
    if (s->shard_count == 1)
        strcpy(out, SINGLE_NAME);
    else
        snprintf(out, NAME_MAX_BYTES, "model-%05" PRIu32 "-of-%05" PRIu32 ".safetensors", shard + 1,
                 s->shard_count);
}

static char *partial_path(const struct save *s, const char *name) {
    char *path;
    return asprintf(&path, "%s/%s.partial", s->dir, name) < 0 ? NULL : path;
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
    char *name = s->names[s->name_count];
    shard_name(s, shard, name);
    char *path = partial_path(s, name);
    if (!path) return -ENOMEM;
    struct sw_safetensors_writer writer;
    int ret = sw_safetensors_create(&writer, path, s->entries + first, count, s->dtype);
    free(path);
    if (ret < 0) return ret;
    s->name_count++;
    for (uint32_t i = 0; i < count && ret == 0; i++)
        ret = write_tensor(s, &writer, &s->sources[first + i]);
    if (ret == 0) return sw_safetensors_finish(&writer);
    sw_safetensors_abort(&writer);
    return ret;
}

static int write_shards(struct save *s) {
    uint32_t first = 0;
    for (uint32_t shard = 0; shard < s->shard_count; shard++) {
        uint32_t end = first;
        while (end < s->count && s->sources[end].shard == shard) end++;
        const int ret = write_shard(s, shard, first, end - first);
        if (ret < 0) return ret;
        first = end;
    }
    return 0;
}

/* Writes and syncs NAME.partial and lists the name. */
static int write_file(struct save *s, const char *name, const void *data, size_t bytes) {
    char *path = partial_path(s, name);
    if (!path) return -ENOMEM;
    int ret = 0;
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0)
        ret = -errno;
    else
        strcpy(s->names[s->name_count++], name);
    for (size_t done = 0; done < bytes && ret == 0;) {
        const ssize_t wrote = write(fd, (const char *)data + done, bytes - done);
        if (wrote >= 0)
            done += (size_t)wrote;
        else if (errno != EINTR)
            ret = -errno;
    }
    if (ret == 0 && fsync(fd) < 0) ret = -errno;
    if (fd >= 0 && close(fd) < 0 && ret == 0) ret = -errno;
    if (ret < 0) sw_error("cannot write %s: %s", path, strerror(-ret));
    free(path);
    return ret;
}

/* The whole of a small file; NULL with errno when it cannot be read. */
static char *read_file(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "rbe");
    if (!file) return NULL;
    char *text = NULL;
    struct stat info;
    if (fstat(fileno(file), &info) == 0 && S_ISREG(info.st_mode)) {
        *bytes = (size_t)info.st_size;
        text = malloc(*bytes + 1);
        if (text && fread(text, 1, *bytes, file) != *bytes) {
            free(text);
            text = NULL;
            errno = EIO;
        }
    } else {
        errno = EINVAL;
    }
    fclose(file);
    return text;
}

static int copy_companions(struct save *s, const char *source_dir) {
    struct stat from, to;
    if (!source_dir || stat(source_dir, &from) < 0) return 0;
    if (stat(s->dir, &to) == 0 && from.st_dev == to.st_dev && from.st_ino == to.st_ino) return 0;
    for (int i = 0; i < COMPANIONS; i++) {
        char *path = sw_model_path(source_dir, companions[i]);
        if (!path) return -ENOMEM;
        size_t bytes = 0;
        errno = 0;
        char *text = read_file(path, &bytes);
        int ret = 0;
        if (text)
            ret = write_file(s, companions[i], text, bytes);
        else if (errno != ENOENT)
            sw_warning("%s is not carried along: %s", path, strerror(errno));
        free(text);
        free(path);
        if (ret < 0) return ret;
    }
    return 0;
}

/* Jansson prints 17 digits, which makes 1e-05 unreadable; 15 are enough for what people write. */
static char *print_json(const json_t *root) {
    char *text = json_dumps(root, JSON_INDENT(2) | JSON_REAL_PRECISION(15));
    json_t *again = text ? json_loads(text, 0, NULL) : NULL;
    if (!json_equal(root, again)) {
        free(text);
        text = json_dumps(root, JSON_INDENT(2) | JSON_REAL_PRECISION(17));
    }
    json_decref(again);
    return text;
}

static int write_json(struct save *s, const char *name, const json_t *root) {
    char *text = print_json(root);
    if (!text) return -ENOMEM;
    const size_t bytes = strlen(text);
    text[bytes] = '\n'; /* in place of the terminator: files end with a newline */
    const int ret = write_file(s, name, text, bytes + 1);
    free(text);
    return ret;
}

static int write_index(struct save *s) {
    if (s->shard_count == 1) return 0;
    json_t *map = json_object();
    int ret = map ? 0 : -ENOMEM;
    for (uint32_t i = 0; i < s->count && ret == 0; i++) {
        char name[NAME_MAX_BYTES];
        shard_name(s, s->sources[i].shard, name);
        if (json_object_set_new(map, s->entries[i].name, json_string(name)) < 0) ret = -ENOMEM;
    }
    json_t *root = json_pack("{s:{s:I},s:o}", "metadata", "total_size", (json_int_t)s->total_bytes,
                             "weight_map", map);
    if (ret == 0) ret = root ? write_json(s, INDEX_NAME, root) : -ENOMEM;
    json_decref(root);
    return ret;
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
    if (ret == 0) ret = write_json(s, "config.json", copy);
    json_decref(copy);
    return ret;
}

static int sync_dir(const struct save *s) {
    const int fd = open(s->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int ret = fd < 0 || fsync(fd) < 0 ? -errno : 0;
    if (fd >= 0) close(fd);
    /* Some filesystems cannot sync a folder; their renames are as durable as they get. */
    if (ret == -EINVAL || ret == -ENOTSUP) ret = 0;
    if (ret < 0) sw_error("cannot sync %s: %s", s->dir, strerror(-ret));
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
    if (s->shard_count > 1 || has_file(s, INDEX_NAME)) return 0;
    char *old_path = sw_model_path(s->dir, "config.json"),
         *new_path = partial_path(s, "config.json");
    size_t old_bytes = 0, new_bytes = 1;
    char *old = old_path ? read_file(old_path, &old_bytes) : NULL;
    char *new = new_path ? read_file(new_path, &new_bytes) : NULL;
    const int same = old && new &&old_bytes == new_bytes && !memcmp(old, new, new_bytes);
    free(old);
    free(new);
    free(old_path);
    free(new_path);
    return same;
}

static int is_listed(const struct save *s, const char *name) {
    for (uint32_t i = 0; i < s->name_count; i++)
        if (!strcmp(s->names[i], name)) return 1;
    return 0;
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
            !is_listed(s, name))
            ret = remove_file(s, name);
    }
    closedir(dir);
    return ret;
}

static int publish(struct save *s) {
    int ret = 0;
    if (has_file(s, "config.json") && !is_same_layout(s)) {
        ret = remove_file(s, "config.json");
        if (ret == 0) ret = sync_dir(s);
    }
    for (uint32_t i = 0; i < s->name_count && ret == 0; i++) {
        if (i + 1 == s->name_count) { /* config.json: all else must be in place, durably */
            ret = remove_stale(s);
            if (ret == 0) ret = sync_dir(s);
            if (ret < 0) break;
        }
        char *from = partial_path(s, s->names[i]), *to = sw_model_path(s->dir, s->names[i]);
        if (!from || !to)
            ret = -ENOMEM;
        else if (rename(from, to) < 0) {
            ret = -errno;
            sw_error("cannot rename %s to %s: %s", from, to, strerror(-ret));
        }
        free(from);
        free(to);
    }
    return ret < 0 ? ret : sync_dir(s);
}

static void remove_partials(const struct save *s) {
    for (uint32_t i = 0; i < s->name_count; i++) {
        char *path = partial_path(s, s->names[i]);
        if (path) unlink(path);
        free(path);
    }
}

int sw_model_write(const struct sw_model *model, const json_t *config, const char *source_dir,
                   const char *dir, enum sw_dtype dtype, uint64_t shard_bytes_max,
                   sw_model_fetch fetch, void *ctx) {
    assert(model && config && dir && fetch);
    struct save s = {.model = model, .dir = dir, .dtype = dtype, .fetch = fetch, .ctx = ctx};
    int ret = plan(&s, shard_bytes_max);
    if (ret == 0) ret = write_shards(&s);
    if (ret == 0) ret = write_index(&s);
    if (ret == 0) ret = copy_companions(&s, source_dir);
    if (ret == 0) ret = write_config(&s, config);
    if (ret == 0) ret = publish(&s);
    if (ret == -ENOMEM) sw_error("no memory to write the model to %s", dir);
    if (ret < 0) remove_partials(&s);
    free(s.entries);
    free(s.sources);
    free(s.block);
    free(s.names);
    return ret;
}

int sw_model_save(const struct sw_model *model, const char *dir, enum sw_dtype dtype,
                  sw_model_fetch fetch, void *ctx) {
    assert(model->weights);
    return sw_model_write(model, model->weights->config, model->dir, dir, dtype,
                          SW_MODEL_SHARD_BYTES_MAX, fetch, ctx);
}

uint64_t sw_model_saved_bytes(const struct sw_model *model, enum sw_dtype dtype) {
    enum { FILE_ROUNDING = 4096, CONFIG_BYTES = 65536 };
    uint64_t bytes = model->params * sw_dtype_bytes(dtype) + CONFIG_BYTES;
    for (uint32_t u = 0; u < model->unit_count; u++)
        for (uint32_t i = 0; i < model->units[u].tensor_count; i++)
            bytes += sw_safetensors_entry_bytes(model->units[u].tensors[i].name);
    for (int i = 0; i < COMPANIONS; i++) {
        struct stat st;
        char *path = sw_model_path(model->dir, companions[i]);
        if (path && stat(path, &st) == 0) bytes += (uint64_t)st.st_size + FILE_ROUNDING;
        free(path);
    }
    return bytes;
}
