/* engine/model.h - a Llama-family model folder in the Hugging Face form: its configuration, its
 * units, and its weights on disk.
 *
 * sw_model_open() reads config.json, maps every safetensors file and checks each header against the
 * file and each tensor against the configuration before anything is used. Weights are read from the
 * maps piece by piece; a model is never whole in memory. Read-only after open: any thread may read.
 */
#ifndef ENGINE_MODEL_H
#define ENGINE_MODEL_H
#include <stdint.h>
#include "base/bf16.h"
#include "offload/unit_order.h"

enum sw_rope_kind { SW_ROPE_PLAIN, SW_ROPE_LINEAR, SW_ROPE_LLAMA3 };

/* The fields of config.json that the engine honours. One that would change the result and is not
 * honoured (attention_bias, another activation, sliding windows, ...) is an error naming it. */
struct sw_model_config {
    char model_type[32]; /* "llama" or a family that computes the same, such as "mistral" */
    uint32_t hidden, intermediate, layers, heads, kv_heads, head_dim, vocab, max_positions;
    int tied; /* the head's matrix is the embedding's */
    float rms_eps;
    double rope_theta;
    enum sw_rope_kind rope_kind;
    double rope_factor, rope_low_freq_factor, rope_high_freq_factor, rope_original_positions;
};

enum { SW_TENSORS_PER_UNIT_MAX = 9, SW_TENSOR_NAME_MAX = 96 };

/* A tensor of a unit, or the rows of one that the unit holds. Its place in the unit is counted in
 * elements and starts on 128 of them (256 B in BF16). */
struct sw_tensor {
    char name[SW_TENSOR_NAME_MAX]; /* as in the files: "model.layers.0.mlp.up_proj.weight" */
    uint64_t rows, cols;           /* in this unit; cols is 0 for a vector */
    uint64_t first, count;
    uint64_t source_first; /* elements of the files' tensor before this piece; 0 for a whole one */
    int frozen;            /* nothing trains it */
};

enum sw_unit_kind { SW_UNIT_EMBED, SW_UNIT_LAYER, SW_UNIT_NORM, SW_UNIT_HEAD };

/* Indices of a layer's tensors in its unit. */
enum {
    SW_LAYER_NORM1,
    SW_LAYER_Q,
    SW_LAYER_K,
    SW_LAYER_V,
    SW_LAYER_O,
    SW_LAYER_NORM2,
    SW_LAYER_GATE,
    SW_LAYER_UP,
    SW_LAYER_DOWN
};

/* The units of the embedding, the norm and the head have one tensor each, tensors[0]. Those of the
 * embedding and the head are parts of the vocabulary: rows [first_row, first_row + tensors[0].rows)
 * of the matrix. first_row is 0 in all others. */
struct sw_unit {
    enum sw_unit_kind kind;
    char name[32]; /* "embedding", "layer 7", "norm", "head"; of several parts "head 1 of 3" */
    uint64_t first_row;
    uint32_t tensor_count;
    struct sw_tensor tensors[SW_TENSORS_PER_UNIT_MAX];
    uint8_t order[SW_TENSORS_PER_UNIT_MAX]; /* of the tensors, by their places */
    uint64_t count;                         /* elements with padding, a multiple of 128 */
    uint64_t params;                        /* elements without it */
    /* Elements with padding of what is trained, which lies first; the rest lies from frozen_first
     * on. Both are `count` where nothing is frozen. */
    uint64_t trained, frozen_first;
};

enum { SW_MODEL_PART_ROWS_STEP = 16 };

/* Units in order: the parts of the embedding, the layers, the norm, the parts of the head (none
 * when it is tied). The vocabulary is cut so that, up to SW_PARTS_MAX, a part has no more
 * elements than a layer before its rows are rounded up to a multiple of SW_MODEL_PART_ROWS_STEP;
 * the last part has the rest. The cut follows from the configuration alone, because the order of
 * the head's sums, and so the bits of a run, depend on it. */
struct sw_model {
    struct sw_model_config config;
    uint32_t parts; /* of the vocabulary, at least 1 */
    uint32_t unit_count;
    struct sw_unit *units;
    uint64_t params, trained_params;
    struct sw_weights *weights; /* the mapped files; NULL when only the configuration was opened */
    char dir[4096];
};

/* 0 or -errno, reported. sw_model_open_config() reads config.json alone (a folder, or the file). */
int sw_model_open(struct sw_model *model, const char *dir);
int sw_model_open_config(struct sw_model *model, const char *path);
/* A configuration that is in no file: units and counts, nothing to read. 0 or -ENOMEM. */
int sw_model_open_shape(struct sw_model *model, const struct sw_model_config *config);
void sw_model_close(struct sw_model *model);

static inline struct sw_unit_order sw_model_order(const struct sw_model *model) {
    return (struct sw_unit_order){model->unit_count, model->parts, model->config.tied};
}
static inline uint32_t sw_model_first_layer(const struct sw_model *model) {
    return model->parts;
}
static inline uint32_t sw_model_norm_unit(const struct sw_model *model) {
    const struct sw_unit_order order = sw_model_order(model);
    return sw_order_norm(&order);
}
/* The unit with the head's matrix for a part of the vocabulary: the embedding's when tied. */
static inline uint32_t sw_model_head_unit(const struct sw_model *model, uint32_t part) {
    const struct sw_unit_order order = sw_model_order(model);
    return sw_order_head(&order, part);
}

/* FP32 values of elements [first, first + count) of a unit; padding reads as 0. */
void sw_model_read(const struct sw_model *model, uint32_t unit, uint64_t first, uint64_t count,
                   float *out);
/* The same of a unit whose tensors lie as they do where nothing is frozen. */
void sw_model_read_unfrozen(const struct sw_model *model, uint32_t unit, uint64_t first,
                            uint64_t count, float *out);

/* Freezes the tensors that the patterns name: globs over the files' names (fnmatch), separated by
 * commas, where the last one that fits a tensor decides and "!" before one trains what it fits.
 * Places change: in each unit what is trained comes first, in `shards` equal shards with their
 * padding (sw_placement_shard of as many replicas), then what is frozen. -EINVAL, reported, for a
 * pattern that fits no tensor, and where nothing is left to train. Once, after open. */
int sw_model_freeze(struct sw_model *model, const char *patterns, uint32_t shards,
                    uint32_t replicas);

/* By unit, the elements of each of so many equal shards with their padding: of all of the unit, and
 * of what is trained. */
void sw_model_shards(const struct sw_model *model, uint32_t shards, uint32_t replicas,
                     uint64_t *elements, uint64_t *trained);

/* The files that hold the weights, for reports. */
struct sw_model_file {
    const char *name;  /* without its folder; lives as long as the model is open */
    const char *dtype; /* "BF16", "F16", "F32" or "mixed" */
    uint64_t bytes;
    uint32_t tensors;
};
uint32_t sw_model_file_count(const struct sw_model *model);
struct sw_model_file sw_model_file(const struct sw_model *model, uint32_t i);

/* A hash over names, shapes and the files' sizes and headers: says "the same model files",
 * whatever the cut of the vocabulary. */
uint64_t sw_model_fingerprint(const struct sw_model *model);

/* Supplies elements [first, first + count) of a unit in `dtype` (BF16 or FP32). 0 or -errno. */
typedef int (*sw_model_fetch)(void *ctx, uint32_t unit, uint64_t first, uint64_t count,
                              enum sw_dtype dtype, void *out);

/* Writes a model folder: config.json with its dtype following, model.safetensors (or shards of at
 * most 5 GB with an index), and the tokenizer and generation files of model->dir carried along. A
 * matrix of several units is written whole, so the files do not show how the vocabulary is cut.
 * `dir` must exist. Everything is written to temporary names in `dir`, synced, then renamed,
 * config.json last: whatever happens, a folder with config.json is complete. */
int sw_model_save(const struct sw_model *model, const char *dir, enum sw_dtype dtype,
                  sw_model_fetch fetch, void *ctx);

/* What that takes on disk, rounded up. */
uint64_t sw_model_saved_bytes(const struct sw_model *model, enum sw_dtype dtype);

/* Makes a model folder from a configuration alone: matrices N(0, initializer_range), norms 1, from
 * a counter-based generator keyed by seed and tensor, so equal seeds give equal files. */
int sw_model_init(const char *config_path, const char *dir, uint64_t seed, enum sw_dtype dtype);

#endif
