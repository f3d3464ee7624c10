/* engine/model.c - opens a model: its configuration, the units that follow from it, their values.
 */
#include "engine/model.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <xxhash.h>

#include "base/log.h"
#include "base/size.h"
#include "engine/model_internal.h"

char *sw_model_path(const char *dir, const char *name) {
    char *path;
    return asprintf(&path, "%s/%s", dir, name) < 0 ? NULL : path;
}

static void add_tensor(struct sw_unit *unit, const char *name, uint64_t rows, uint64_t cols) {
    struct sw_tensor *tensor = &unit->tensors[unit->tensor_count++];
    assert(unit->tensor_count <= SW_TENSORS_PER_UNIT_MAX);
    snprintf(tensor->name, sizeof(tensor->name), "%s", name);
    tensor->rows = rows;
    tensor->cols = cols;
    tensor->count = rows * (cols ? cols : 1);
    unit->params += tensor->count;
}

static void build_layer(struct sw_unit *unit, const struct sw_model_config *c, uint32_t layer) {
    const uint64_t q = (uint64_t)c->heads * c->head_dim, kv = (uint64_t)c->kv_heads * c->head_dim;
    const struct {
        const char *name;
        uint64_t rows, cols;
    } parts[] = {
        [SW_LAYER_NORM1] = {"input_layernorm", c->hidden, 0},
        [SW_LAYER_Q] = {"self_attn.q_proj", q, c->hidden},
        [SW_LAYER_K] = {"self_attn.k_proj", kv, c->hidden},
        [SW_LAYER_V] = {"self_attn.v_proj", kv, c->hidden},
        [SW_LAYER_O] = {"self_attn.o_proj", c->hidden, q},
        [SW_LAYER_NORM2] = {"post_attention_layernorm", c->hidden, 0},
        [SW_LAYER_GATE] = {"mlp.gate_proj", c->intermediate, c->hidden},
        [SW_LAYER_UP] = {"mlp.up_proj", c->intermediate, c->hidden},
        [SW_LAYER_DOWN] = {"mlp.down_proj", c->hidden, c->intermediate},
    };
    unit->kind = SW_UNIT_LAYER;
    snprintf(unit->name, sizeof(unit->name), "layer %" PRIu32, layer);
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        char name[SW_TENSOR_NAME_MAX];
        snprintf(name, sizeof(name), "model.layers.%" PRIu32 ".%s.weight", layer, parts[i].name);
        add_tensor(unit, name, parts[i].rows, parts[i].cols);
    }
}

static uint64_t divide_up(uint64_t value, uint64_t by) {
    return (value + by - 1) / by;
}

/* How many parts keep a part within the size of a layer. */
static uint32_t count_parts(const struct sw_model_config *c) {
    struct sw_unit layer = {0};
    build_layer(&layer, c, 0);
    const uint64_t parts = divide_up((uint64_t)c->vocab * c->hidden, layer.params);
    return parts < SW_PARTS_MAX ? (uint32_t)parts : SW_PARTS_MAX;
}

/* The part of a matrix [vocab][hidden] that begins at unit->first_row. */
static void build_part(struct sw_unit *unit, const struct sw_model *model, enum sw_unit_kind kind,
                       uint32_t part, uint64_t rows_max) {
    const struct sw_model_config *c = &model->config;
    const int is_embed = kind == SW_UNIT_EMBED;
    const char *name = is_embed ? "embedding" : "head";
    unit->kind = kind;
    unit->first_row = part * rows_max;
    if (model->parts == 1)
        snprintf(unit->name, sizeof(unit->name), "%s", name);
    else
        snprintf(unit->name, sizeof(unit->name), "%s %" PRIu32 " of %" PRIu32, name, part + 1,
                 model->parts);
    const uint64_t left = c->vocab - unit->first_row;
    add_tensor(unit, is_embed ? "model.embed_tokens.weight" : "lm_head.weight",
               left < rows_max ? left : rows_max, c->hidden);
    unit->tensors[0].source_first = unit->first_row * c->hidden;
}

static int build_units(struct sw_model *model, uint32_t parts) {
    const struct sw_model_config *c = &model->config;
    assert(parts <= SW_PARTS_MAX);
    if (parts == SW_MODEL_PARTS_BY_RULE) parts = count_parts(c);
    if (parts > c->vocab) parts = c->vocab;
    const uint64_t rows = sw_round_up(divide_up(c->vocab, parts), SW_MODEL_PART_ROWS_STEP);
    model->parts = (uint32_t)divide_up(c->vocab, rows);
    model->unit_count = model->parts + c->layers + 1 + (c->tied ? 0 : model->parts);
    model->units = calloc(model->unit_count, sizeof(*model->units));
    if (!model->units) return -ENOMEM;
    for (uint32_t i = 0; i < model->parts; i++) {
        build_part(&model->units[i], model, SW_UNIT_EMBED, i, rows);
        if (!c->tied)
            build_part(&model->units[sw_model_head_unit(model, i)], model, SW_UNIT_HEAD, i, rows);
    }
    for (uint32_t i = 0; i < c->layers; i++)
        build_layer(&model->units[sw_model_first_layer(model) + i], c, i);
    struct sw_unit *norm = &model->units[sw_model_norm_unit(model)];
    norm->kind = SW_UNIT_NORM;
    strcpy(norm->name, "norm");
    add_tensor(norm, "model.norm.weight", c->hidden, 0);
    for (uint32_t i = 0; i < model->unit_count; i++) {
        sw_unit_lay_out(&model->units[i], 0);
        model->params += model->units[i].params;
    }
    model->trained_params = model->params;
    return 0;
}

/* Splits a path to a folder, or to a file in one, into the folder (model->dir) and the file. */
static int find_config(struct sw_model *model, const char *path, char **file) {
    struct stat info;
    if (stat(path, &info) < 0) {
        const int ret = -errno;
        sw_error("model: cannot open %s: %s", path, strerror(-ret));
        return ret;
    }
    const int is_dir = S_ISDIR(info.st_mode);
    const char *slash = strrchr(path, '/');
    const size_t length = is_dir ? strlen(path) : slash ? (size_t)(slash - path) + 1 : 0;
    if (length + 1 >= sizeof(model->dir)) {
        sw_error("model: the path is too long: %.80s...", path);
        return -ENAMETOOLONG;
    }
    memcpy(model->dir, path, length);
    strcpy(model->dir + length, length ? "" : ".");
    *file = is_dir ? sw_model_path(path, "config.json") : strdup(path);
    return *file ? 0 : -ENOMEM;
}

int sw_model_open_json(struct sw_model *model, const char *path, uint32_t parts, json_t **root) {
    assert(model && path);
    memset(model, 0, sizeof(*model));
    char *file = NULL;
    int ret = find_config(model, path, &file);
    if (ret < 0) return ret;
    json_error_t error;
    *root = json_load_file(file, JSON_REJECT_DUPLICATES, &error);
    if (!*root) {
        ret = -EINVAL;
        if (error.line < 0)
            sw_error("model: %s", error.text);
        else
            sw_error("%s: line %d, column %d: %s", file, error.line, error.column, error.text);
    }
    if (ret == 0) ret = sw_model_parse_config(&model->config, *root, file);
    if (ret == 0) ret = build_units(model, parts);
    free(file);
    if (ret < 0) {
        json_decref(*root);
        *root = NULL;
        sw_model_close(model);
    }
    return ret;
}

int sw_model_open_config(struct sw_model *model, const char *path) {
    json_t *root = NULL;
    const int ret = sw_model_open_json(model, path, SW_MODEL_PARTS_BY_RULE, &root);
    json_decref(root);
    return ret;
}

int sw_model_open_cut(struct sw_model *model, const char *dir, uint32_t parts) {
    json_t *root = NULL;
    int ret = sw_model_open_json(model, dir, parts, &root);
    if (ret < 0) return ret;
    ret = sw_weights_open(model, root);
    if (ret == -ENOMEM) sw_error("%s: no memory for the tables of its tensors", dir);
    if (ret < 0) sw_model_close(model);
    return ret;
}

int sw_model_open(struct sw_model *model, const char *dir) {
    return sw_model_open_cut(model, dir, SW_MODEL_PARTS_BY_RULE);
}

int sw_model_open_shape(struct sw_model *model, const struct sw_model_config *config) {
    assert(model && config && config->heads > 0 && config->vocab > 0);
    memset(model, 0, sizeof(*model));
    model->config = *config;
    return build_units(model, SW_MODEL_PARTS_BY_RULE);
}

void sw_model_close(struct sw_model *model) {
    if (!model) return;
    sw_weights_close(model->weights);
    free(model->units);
    memset(model, 0, sizeof(*model));
}

static void read_unit(const struct sw_unit *u, const struct sw_weight *places, uint64_t first,
                      uint64_t count, float *out) {
    const uint64_t end = first + count;
    memset(out, 0, count * sizeof(*out));
    for (uint32_t i = 0; i < u->tensor_count; i++) {
        const struct sw_tensor *tensor = &u->tensors[i];
        const uint64_t tensor_end = tensor->first + tensor->count;
        const uint64_t from = first > tensor->first ? first : tensor->first;
        const uint64_t to = end < tensor_end ? end : tensor_end;
        if (from < to)
            sw_safetensors_read(places[i].file, places[i].tensor,
                                tensor->source_first + (from - tensor->first), to - from,
                                out + (from - first));
    }
}

void sw_model_read_places(const struct sw_model *model,
                          struct sw_weight (*places)[SW_TENSORS_PER_UNIT_MAX], uint32_t unit,
                          uint64_t first, uint64_t count, float *out) {
    assert(unit < model->unit_count);
    read_unit(&model->units[unit], places[unit], first, count, out);
}

void sw_model_read(const struct sw_model *model, uint32_t unit, uint64_t first, uint64_t count,
                   float *out) {
    assert(model->weights);
    sw_model_read_places(model, model->weights->places, unit, first, count, out);
}

void sw_model_read_unfrozen(const struct sw_model *model, uint32_t unit, uint64_t first,
                            uint64_t count, float *out) {
    assert(model->weights && unit < model->unit_count);
    struct sw_unit whole = model->units[unit];
    for (uint32_t i = 0; i < whole.tensor_count; i++) whole.tensors[i].frozen = 0;
    sw_unit_lay_out(&whole, 0);
    read_unit(&whole, model->weights->places[unit], first, count, out);
}

uint64_t sw_model_fingerprint(const struct sw_model *model) {
    XXH64_state_t *state = XXH64_createState();
    assert(state);
    XXH64_reset(state, 0);
    for (uint32_t u = 0; u < model->unit_count; u++)
        for (uint32_t i = 0; i < model->units[u].tensor_count; i++) {
            const struct sw_tensor *tensor = &model->units[u].tensors[i];
            const uint64_t shape[2] = {sw_model_source_rows(model, u, i), tensor->cols};
            if (tensor->source_first > 0) continue; /* a tensor counts once, with its first piece */
            XXH64_update(state, tensor->name, strlen(tensor->name) + 1);
            XXH64_update(state, shape, sizeof(shape));
        }
    for (uint32_t i = 0; model->weights && i < model->weights->folder.file_count; i++) {
        const struct sw_safetensors *file = &model->weights->folder.files[i];
        XXH64_update(state, &file->map_bytes, sizeof(file->map_bytes));
        XXH64_update(state, file->map, file->data_first);
    }
    const uint64_t hash = XXH64_digest(state);
    XXH64_freeState(state);
    return hash;
}

uint32_t sw_model_file_count(const struct sw_model *model) {
    return model->weights ? model->weights->folder.file_count : 0;
}

struct sw_model_file sw_model_file(const struct sw_model *model, uint32_t i) {
    assert(i < sw_model_file_count(model));
    const struct sw_safetensors *file = &model->weights->folder.files[i];
    const char *slash = strrchr(file->path, '/');
    const char *dtype =
        file->tensor_count ? sw_safetensors_type_name(file->tensors[0].type) : "none";
    for (uint32_t t = 1; t < file->tensor_count; t++)
        if (file->tensors[t].type != file->tensors[0].type) dtype = "mixed";
    return (struct sw_model_file){slash ? slash + 1 : file->path, dtype, file->map_bytes,
                                  file->tensor_count};
}
