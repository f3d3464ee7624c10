/* engine/model_config.c - config.json: every field is honoured, known to change nothing, or
 * refused.
 *
 * The fields and their defaults are those of Hugging Face's LlamaConfig and MistralConfig. A field
 * that this file does not know may change the result in a way nobody would notice, so it is an
 * error unless its value says "off" (null, false, "", [] or {}). */
#include "engine/model_internal.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/log.h"

/* Fields that say nothing about the result of a training step. The second block is what older
 * versions of the library dump for generation. */
static const char *const harmless[] = {
    "_name_or_path",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_flash_attn_2_enabled",
    "is_llama_config",
    "transformers.js_config",
    "architectures",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "unk_token_id",
    "sep_token_id",
    "dtype",
    "torch_dtype",
    "initializer_range",
    "transformers_version",
    "use_cache",
    "use_bfloat16",
    "max_sequence_length",
    "model_max_length",
    "tokenizer_class",
    "return_dict",
    "id2label",
    "label2id",
    "unsloth_fixed",
    "unsloth_version",
    "chunk_size_feed_forward",
    "bad_words_ids",
    "begin_suppress_tokens",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict_in_generate",
    "suppress_tokens",
    "temperature",
    "tf_legacy_loss",
    "top_k",
    "top_p",
    "typical_p",
};

/* Fields that this file reads; each has its own check. */
static const char *const honoured[] = {
    "attention_dropout",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "partial_rotary_factor",
    "pretraining_tp",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "vocab_size",
};

struct reader {
    const json_t *root;
    const char *path;
    const char *inside; /* "" or "rope_scaling." */
};

static int complain(const struct reader *in, const char *field, const char *what) {
    sw_error("%s: '%s%s' %s", in->path, in->inside, field, what);
    return -EINVAL;
}

/* A field that is absent or null. */
static const json_t *get(const struct reader *in, const char *field) {
    const json_t *value = json_object_get(in->root, field);
    return json_is_null(value) ? NULL : value;
}

static int is_listed(const char *const *list, size_t count, const char *field) {
    for (size_t i = 0; i < count; i++)
        if (!strcmp(list[i], field)) return 1;
    return 0;
}

static int is_off(const json_t *value) {
    return json_is_null(value) || json_is_false(value) ||
           (json_is_string(value) && json_string_length(value) == 0) ||
           (json_is_array(value) && json_array_size(value) == 0) ||
           (json_is_object(value) && json_object_size(value) == 0);
}

/* A whole number in [1, max]; fallback 0 means the field must be there. */
static int read_count(const struct reader *in, const char *field, uint32_t max, uint32_t fallback,
                      uint32_t *out) {
    const json_t *value = get(in, field);
    if (!value) {
        if (fallback == 0) return complain(in, field, "is missing");
        *out = fallback;
        return 0;
    }
    if (!json_is_integer(value) || json_integer_value(value) < 1 ||
        json_integer_value(value) > max) {
        sw_error("%s: '%s%s' is not a whole number between 1 and %" PRIu32, in->path, in->inside,
                 field, max);
        return -EINVAL;
    }
    *out = (uint32_t)json_integer_value(value);
    return 0;
}

/* A number > 0; fallback 0 means the field must be there. */
static int read_positive(const struct reader *in, const char *field, double fallback, double *out) {
    const json_t *value = get(in, field);
    if (!value && fallback > 0) {
        *out = fallback;
        return 0;
    }
    if (!value) return complain(in, field, "is missing");
    const double number = json_number_value(value);
    if (!json_is_number(value) || !(number > 0) || !isfinite(number))
        return complain(in, field, "is not a number above 0");
    *out = number;
    return 0;
}

/* A field that changes nothing at one value only, which is also its default. */
static int require_number(const struct reader *in, const char *field, double only) {
    const json_t *value = get(in, field);
    if (!value || (json_is_number(value) && json_number_value(value) == only)) return 0;
    sw_error("%s: '%s%s' must be %g: any other value changes the result and is not supported",
             in->path, in->inside, field, only);
    return -EINVAL;
}

static int check_known(const struct reader *in) {
    const char *field;
    json_t *value;
    json_object_foreach((json_t *)in->root, field, value) {
        if (is_off(value) || is_listed(honoured, sizeof(honoured) / sizeof(honoured[0]), field) ||
            is_listed(harmless, sizeof(harmless) / sizeof(harmless[0]), field))
            continue;
        if (!strcmp(field, "quantization_config"))
            return complain(in, field, "is set: quantized models cannot be trained");
        return complain(in, field, "is not supported and may change the result: refused");
    }
    return 0;
}

/* Of a rope object, keys that its kind does not read are refused like those of the whole. */
static int check_rope_fields(const struct reader *in, const char *const *fields, size_t count) {
    const char *field;
    json_t *value;
    json_object_foreach((json_t *)in->root, field, value) {
        if (is_off(value) || is_listed(fields, count, field)) continue;
        return complain(in, field, "is not supported for this rope_type and may change the result");
    }
    return 0;
}

static int read_rope_kind(const struct reader *in, const char **kind) {
    const char *type = json_string_value(json_object_get(in->root, "type"));
    const char *rope_type = json_string_value(json_object_get(in->root, "rope_type"));
    if (!type && !rope_type) return complain(in, "rope_type", "is missing");
    if (type && rope_type && strcmp(type, rope_type))
        return complain(in, "type", "and 'rope_type' contradict each other");
    *kind = rope_type ? rope_type : type;
    return 0;
}

static int parse_llama3(struct sw_model_config *config, const struct reader *in) {
    config->rope_kind = SW_ROPE_LLAMA3;
    int ret = read_positive(in, "factor", 0, &config->rope_factor);
    if (ret == 0) ret = read_positive(in, "low_freq_factor", 0, &config->rope_low_freq_factor);
    if (ret == 0) ret = read_positive(in, "high_freq_factor", 0, &config->rope_high_freq_factor);
    if (ret == 0)
        ret = read_positive(in, "original_max_position_embeddings", 0,
                            &config->rope_original_positions);
    if (ret == 0 && config->rope_high_freq_factor <= config->rope_low_freq_factor)
        ret = complain(in, "high_freq_factor", "must be above low_freq_factor");
    return ret;
}

static int parse_rope_object(struct sw_model_config *config, const struct reader *in) {
    static const char *const fields[] = {
        "type",   "rope_type",       "rope_theta",       "partial_rotary_factor",
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"};
    enum { PLAIN_FIELDS = 4, LINEAR_FIELDS = 5, LLAMA3_FIELDS = 8 };
    const char *kind;
    int ret = read_rope_kind(in, &kind);
    if (ret == 0) ret = require_number(in, "partial_rotary_factor", 1);
    if (ret < 0) return ret;
    if (!strcmp(kind, "default")) return check_rope_fields(in, fields, PLAIN_FIELDS);
    if (!strcmp(kind, "linear")) {
        config->rope_kind = SW_ROPE_LINEAR;
        ret = read_positive(in, "factor", 0, &config->rope_factor);
        return ret < 0 ? ret : check_rope_fields(in, fields, LINEAR_FIELDS);
    }
    if (!strcmp(kind, "llama3")) {
        ret = parse_llama3(config, in);
        return ret < 0 ? ret : check_rope_fields(in, fields, LLAMA3_FIELDS);
    }
    sw_error("%s: '%srope_type' is \"%s\"; default, linear and llama3 are supported", in->path,
             in->inside, kind);
    return -EINVAL;
}

/* The base and the scaling stand in rope_theta and rope_scaling, or, in newer files, together in
 * rope_parameters; where both are there they must agree. */
static int parse_rope(struct sw_model_config *config, const struct reader *in) {
    config->rope_kind = SW_ROPE_PLAIN;
    config->rope_factor = 1;
    const json_t *scaling = get(in, "rope_scaling"), *parameters = get(in, "rope_parameters");
    if (scaling && parameters && !json_equal(scaling, parameters))
        return complain(in, "rope_scaling", "and 'rope_parameters' differ: only one may be set");
    const json_t *object = parameters ? parameters : scaling;
    int ret = read_positive(in, "rope_theta", 10000, &config->rope_theta);
    if (ret < 0 || !object) return ret;
    const struct reader inner = {object, in->path,
                                 parameters ? "rope_parameters." : "rope_scaling."};
    if (!json_is_object(object))
        return complain(in, parameters ? "rope_parameters" : "rope_scaling", "is not an object");
    double theta;
    ret = read_positive(&inner, "rope_theta", config->rope_theta, &theta);
    if (ret < 0) return ret;
    if (get(in, "rope_theta") && theta != config->rope_theta)
        return complain(&inner, "rope_theta", "and 'rope_theta' contradict each other");
    config->rope_theta = theta;
    return parse_rope_object(config, &inner);
}

/* A window no shorter than the longest sequence cuts nothing off. Mistral's default is 4096. */
static int check_window(const struct sw_model_config *config, const struct reader *in) {
    const json_t *types = get(in, "layer_types");
    if (types && !json_is_array(types)) return complain(in, "layer_types", "is not a list");
    for (size_t i = 0; i < json_array_size(types); i++) {
        const char *type = json_string_value(json_array_get(types, i));
        if (!type || strcmp(type, "full_attention"))
            return complain(in, "layer_types", "names a layer that is not \"full_attention\"");
    }
    const json_t *window = json_object_get(in->root, "sliding_window");
    double size = INFINITY;
    if (json_is_number(window))
        size = json_number_value(window);
    else if (!window && !strcmp(config->model_type, "mistral"))
        size = 4096;
    else if (window && !is_off(window))
        return complain(in, "sliding_window", "is neither null nor a number");
    if (size >= config->max_positions) return 0;
    sw_error("%s: 'sliding_window' is %g%s, below max_position_embeddings %" PRIu32
             ": sliding windows are not supported",
             in->path, size, window ? "" : " (the default of this model_type)",
             config->max_positions);
    return -EINVAL;
}

static int parse_type(struct sw_model_config *config, const struct reader *in) {
    const char *type = json_string_value(json_object_get(in->root, "model_type"));
    if (!type) return complain(in, "model_type", "is missing");
    if (strcmp(type, "llama") && strcmp(type, "mistral")) {
        sw_error("%s: model_type \"%s\" is not supported; llama and mistral are", in->path, type);
        return -EINVAL;
    }
    strcpy(config->model_type, type);
    return 0;
}

static int parse_heads(struct sw_model_config *config, const struct reader *in) {
    /* LlamaConfig defaults to as many as heads, MistralConfig to 8: without it only llama is clear.
     */
    const int must =
        !strcmp(config->model_type, "mistral") && !json_object_get(in->root, "num_key_value_heads");
    int ret =
        read_count(in, "num_key_value_heads", 65536, must ? 0 : config->heads, &config->kv_heads);
    if (ret < 0) return ret;
    if (config->heads % config->kv_heads != 0)
        return complain(in, "num_key_value_heads", "does not divide 'num_attention_heads'");
    if (!get(in, "head_dim") && config->hidden % config->heads != 0)
        return complain(in, "num_attention_heads", "does not divide 'hidden_size'");
    const uint32_t fallback = config->hidden / config->heads;
    ret = read_count(in, "head_dim", 65536, fallback, &config->head_dim);
    if (ret < 0) return ret;
    if (config->head_dim % 2 != 0)
        return complain(in, "head_dim", "is odd: rotary pairs need halves");
    return 0;
}

int sw_model_parse_config(struct sw_model_config *config, const json_t *root, const char *path) {
    assert(config && path);
    memset(config, 0, sizeof(*config));
    const struct reader in = {root, path, ""};
    if (!json_is_object(root)) {
        sw_error("%s: not a JSON object", path);
        return -EINVAL;
    }
    int ret = parse_type(config, &in);
    if (ret == 0) ret = check_known(&in);
    if (ret == 0) ret = read_count(&in, "hidden_size", 1u << 20, 0, &config->hidden);
    if (ret == 0) ret = read_count(&in, "intermediate_size", 1u << 24, 0, &config->intermediate);
    if (ret == 0) ret = read_count(&in, "num_hidden_layers", 65536, 0, &config->layers);
    if (ret == 0) ret = read_count(&in, "num_attention_heads", 65536, 0, &config->heads);
    if (ret == 0) ret = read_count(&in, "vocab_size", INT32_MAX, 0, &config->vocab);
    if (ret == 0)
        ret = read_count(&in, "max_position_embeddings", INT32_MAX, 0, &config->max_positions);
    if (ret == 0) ret = parse_heads(config, &in);
    double eps = 0;
    if (ret == 0) ret = read_positive(&in, "rms_norm_eps", 1e-6, &eps);
    config->rms_eps = (float)eps;
    if (ret == 0) ret = parse_rope(config, &in);
    if (ret == 0) ret = require_number(&in, "attention_dropout", 0);
    if (ret == 0) ret = require_number(&in, "pretraining_tp", 1);
    if (ret == 0) ret = require_number(&in, "partial_rotary_factor", 1);
    if (ret == 0) ret = check_window(config, &in);
    if (ret < 0) return ret;

    const json_t *act = get(&in, "hidden_act");
    if (act && (!json_is_string(act) || strcmp(json_string_value(act), "silu")))
        return complain(&in, "hidden_act", "must be \"silu\": no other activation is supported");
    const json_t *tied = get(&in, "tie_word_embeddings");
    if (tied && !json_is_boolean(tied))
        return complain(&in, "tie_word_embeddings", "is neither true nor false");
    config->tied = json_is_true(tied);
    return 0;
}
