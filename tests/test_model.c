/* Model folders: what a configuration means or why it is refused, which weight files are believed,
 * and that what is saved is complete, exact and never half there. */
#include "engine/model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <omp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <xxhash.h>
#include "engine/model_internal.h"
#include "tests/support_files.h"

#define BASE "models/stories260k"

/* ---- configurations ---- */

/* Writes the base's config.json with the keys of `patch` (a JSON object) set, and those in `drop`
 * removed. */
static const char *make_config(const char *patch, const char *drop) {
    json_t *root = json_load_file(BASE "/config.json", 0, NULL);
    json_t *changes = json_loads(patch, 0, NULL);
    if (!changes) fail_msg("bad patch %s", patch);
    assert_int_equal(json_object_update(root, changes), 0);
    if (drop) assert_int_equal(json_object_del(root, drop), 0);
    const char *path = in_folder("config.json");
    assert_int_equal(json_dump_file(root, path, 0), 0);
    json_decref(root);
    json_decref(changes);
    return path;
}

static struct sw_model_config accept(const char *patch, const char *drop) {
    struct sw_model model;
    log_catch();
    if (sw_model_open_config(&model, make_config(patch, drop)) != 0)
        fail_msg("refused %s: %s", patch, log_text());
    const struct sw_model_config config = model.config;
    sw_model_close(&model);
    return config;
}

static void refuse_config(const char *patch, const char *drop, const char *part) {
    struct sw_model model;
    log_catch();
    if (sw_model_open_config(&model, make_config(patch, drop)) == 0)
        fail_msg("%s: accepted, but should say '%s'", patch, part);
    assert_reported(part);
}

static void fields_are_honoured(void **state) {
    (void)state;
    folder_make();
    struct sw_model_config c = accept("{}", NULL);
    assert_string_equal(c.model_type, "llama");
    assert_int_equal(c.hidden, 64);
    assert_int_equal(c.intermediate, 172);
    assert_int_equal(c.layers, 5);
    assert_int_equal(c.heads, 8);
    assert_int_equal(c.kv_heads, 4);
    assert_int_equal(c.head_dim, 8);
    assert_int_equal(c.vocab, 512);
    assert_int_equal(c.max_positions, 512);
    assert_int_equal(c.tied, 1);
    assert_true(c.rms_eps == 1e-5f && c.rope_theta == 10000);
    assert_int_equal(c.rope_kind, SW_ROPE_PLAIN);
    assert_int_equal(accept("{}", "num_key_value_heads").kv_heads, 8);
    assert_int_equal(accept("{\"num_key_value_heads\":null}", NULL).kv_heads, 8);
    assert_int_equal(accept("{\"num_attention_heads\":4}", "head_dim").head_dim, 16);
    assert_int_equal(accept("{\"head_dim\":32}", NULL).head_dim, 32);
    assert_int_equal(accept("{}", "tie_word_embeddings").tied, 0);
    assert_true(accept("{}", "rms_norm_eps").rms_eps == 1e-6f);
    assert_true(accept("{\"rope_theta\":500000}", NULL).rope_theta == 500000);
    accept("{\"torch_dtype\":\"float16\",\"dtype\":\"bfloat16\",\"pad_token_id\":0}", NULL);
    accept("{\"something_new\":null,\"something_else\":false,\"and\":\"\",\"so\":{},\"on\":[]}",
           NULL);
    c = accept("{\"model_type\":\"mistral\",\"sliding_window\":null}", NULL);
    assert_string_equal(c.model_type, "mistral");
    /* A window no shorter than any sequence cuts nothing off. */
    accept("{\"model_type\":\"mistral\",\"sliding_window\":512}", NULL);
    accept("{\"model_type\":\"mistral\"}", NULL);
    accept("{\"layer_types\":[\"full_attention\",\"full_attention\"]}", NULL);
    folder_remove();
}

static void rope_is_read_in_both_forms(void **state) {
    (void)state;
    folder_make();
    struct sw_model_config c =
        accept("{\"rope_scaling\":{\"type\":\"linear\",\"factor\":4.0}}", NULL);
    assert_int_equal(c.rope_kind, SW_ROPE_LINEAR);
    assert_true(c.rope_factor == 4);
    const char *llama3 = "{\"%s\":{\"rope_type\":\"llama3\",\"factor\":8.0,\"low_freq_factor\":1.0,"
                         "\"high_freq_factor\":4.0,\"original_max_position_embeddings\":8192%s}}";
    char patch[512];
    snprintf(patch, sizeof(patch), llama3, "rope_scaling", "");
    c = accept(patch, NULL);
    assert_int_equal(c.rope_kind, SW_ROPE_LLAMA3);
    assert_true(c.rope_factor == 8 && c.rope_low_freq_factor == 1 && c.rope_high_freq_factor == 4 &&
                c.rope_original_positions == 8192 && c.rope_theta == 10000);
    snprintf(patch, sizeof(patch), llama3, "rope_parameters", ",\"rope_theta\":500000.0");
    c = accept(patch, "rope_theta");
    assert_int_equal(c.rope_kind, SW_ROPE_LLAMA3);
    assert_true(c.rope_factor == 8 && c.rope_theta == 500000);
    refuse_config(patch, NULL, "rope_theta");
    c = accept("{\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":77}}", "rope_theta");
    assert_int_equal(c.rope_kind, SW_ROPE_PLAIN);
    assert_true(c.rope_theta == 77);
    folder_remove();
}

static void what_would_change_the_result_is_refused(void **state) {
    (void)state;
    static const struct {
        const char *patch, *drop, *part;
    } cases[] = {
        {"{\"model_type\":\"qwen2\"}", NULL, "\"qwen2\" is not supported"},
        {"{}", "model_type", "'model_type' is missing"},
        {"{}", "hidden_size", "'hidden_size' is missing"},
        {"{}", "vocab_size", "'vocab_size' is missing"},
        {"{}", "max_position_embeddings", "'max_position_embeddings' is missing"},
        {"{\"num_hidden_layers\":0}", NULL, "'num_hidden_layers'"},
        {"{\"num_hidden_layers\":2.5}", NULL, "'num_hidden_layers'"},
        {"{\"hidden_size\":\"64\"}", NULL, "'hidden_size'"},
        {"{\"hidden_size\":-64}", NULL, "'hidden_size'"},
        {"{\"num_key_value_heads\":3}", NULL, "'num_key_value_heads'"},
        {"{\"num_attention_heads\":12}", "head_dim", "'num_attention_heads'"},
        {"{\"head_dim\":7}", NULL, "'head_dim' is odd"},
        {"{\"rms_norm_eps\":0}", NULL, "'rms_norm_eps'"},
        {"{\"attention_bias\":true}", NULL, "'attention_bias'"},
        {"{\"mlp_bias\":true}", NULL, "'mlp_bias'"},
        {"{\"attention_dropout\":0.1}", NULL, "'attention_dropout'"},
        {"{\"hidden_act\":\"gelu\"}", NULL, "'hidden_act'"},
        {"{\"pretraining_tp\":2}", NULL, "'pretraining_tp'"},
        {"{\"partial_rotary_factor\":0.5}", NULL, "'partial_rotary_factor'"},
        {"{\"tie_word_embeddings\":1}", NULL, "'tie_word_embeddings'"},
        {"{\"sliding_window\":128}", NULL, "'sliding_window'"},
        {"{\"model_type\":\"mistral\",\"max_position_embeddings\":32768}", NULL,
         "'sliding_window'"},
        {"{\"model_type\":\"mistral\"}", "num_key_value_heads", "'num_key_value_heads'"},
        {"{\"layer_types\":[\"full_attention\",\"sliding_attention\"]}", NULL, "'layer_types'"},
        {"{\"quantization_config\":{\"bits\":4}}", NULL, "'quantization_config'"},
        {"{\"embedding_multiplier\":12}", NULL, "'embedding_multiplier'"},
        {"{\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4}}", NULL, "\"yarn\""},
        {"{\"rope_scaling\":{\"type\":\"dynamic\",\"factor\":4}}", NULL, "\"dynamic\""},
        {"{\"rope_scaling\":{\"factor\":4}}", NULL, "'rope_scaling.rope_type'"},
        {"{\"rope_scaling\":{\"type\":\"linear\"}}", NULL, "'rope_scaling.factor'"},
        {"{\"rope_scaling\":{\"type\":\"linear\",\"factor\":-1}}", NULL, "'rope_scaling.factor'"},
        {"{\"rope_scaling\":{\"type\":\"linear\",\"factor\":2,\"beta_fast\":3}}", NULL,
         "'rope_scaling.beta_fast'"},
        {"{\"rope_scaling\":{\"type\":\"linear\",\"rope_type\":\"llama3\"}}", NULL, "contradict"},
        {"{\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8}}", NULL,
         "'rope_scaling.low_freq_factor'"},
        {"{\"rope_scaling\":7}", NULL, "'rope_scaling'"},
        {"{\"rope_scaling\":{\"type\":\"default\"},\"rope_parameters\":{\"type\":\"linear\"}}",
         NULL, "'rope_parameters'"},
    };
    folder_make();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        refuse_config(cases[i].patch, cases[i].drop, cases[i].part);
    struct sw_model model;
    log_catch();
    file_write(in_folder("config.json"), "{\"a\":1,\n\"a\":2}", 14);
    assert_true(sw_model_open_config(&model, in_folder("config.json")) < 0);
    assert_reported("line 2");
    assert_true(sw_model_open_config(&model, in_folder("nothing")) < 0);
    assert_reported("No such file");
    folder_remove();
}

/* ---- weights ---- */

static void open_model(struct sw_model *model, const char *dir) {
    log_catch();
    if (sw_model_open(model, dir) != 0) fail_msg("%s refused: %s", dir, log_text());
}

static void refuse_model(const char *dir, const char *part) {
    struct sw_model model;
    log_catch();
    if (sw_model_open(&model, dir) == 0) fail_msg("accepted, but should say '%s'", part);
    assert_reported(part);
}

/* All values of a unit, to be freed. */
static float *read_unit(const struct sw_model *model, uint32_t unit) {
    float *values = malloc(model->units[unit].count * sizeof(*values));
    assert_non_null(values);
    memset(values, 0xFF, model->units[unit].count * sizeof(*values));
    sw_model_read(model, unit, 0, model->units[unit].count, values);
    return values;
}

static void units_are_laid_out(void **state) {
    (void)state;
    struct sw_model model;
    open_model(&model, BASE);
    assert_int_equal(model.unit_count, 7);
    assert_int_equal(model.params, 260032);
    assert_string_equal(model.units[0].name, "embedding");
    assert_string_equal(model.units[3].name, "layer 2");
    assert_string_equal(model.units[6].name, "norm");
    assert_int_equal(model.units[6].kind, SW_UNIT_NORM);
    assert_int_equal(model.units[6].tensor_count, 1);
    assert_string_equal(model.units[3].tensors[SW_LAYER_K].name,
                        "model.layers.2.self_attn.k_proj.weight");
    for (uint32_t u = 0; u < model.unit_count; u++) {
        const struct sw_unit *unit = &model.units[u];
        uint64_t end = 0;
        for (uint32_t i = 0; i < unit->tensor_count; i++) {
            assert_int_equal(unit->tensors[i].first % 128, 0);
            assert_true(unit->tensors[i].first >= end && unit->tensors[i].first < end + 128);
            end = unit->tensors[i].first + unit->tensors[i].count;
        }
        assert_true(unit->count % 128 == 0 && unit->count >= end && unit->count < end + 128);
    }
    sw_model_close(&model);
    folder_make();
    accept("{\"tie_word_embeddings\":false}", NULL);
    assert_int_equal(sw_model_open_config(&model, in_folder("config.json")), 0);
    assert_int_equal(model.unit_count, 8);
    assert_string_equal(model.units[7].name, "head");
    assert_string_equal(model.units[7].tensors[0].name, "lm_head.weight");
    assert_int_equal(model.params, 260032 + 512 * 64);
    sw_model_close(&model);
    folder_remove();
}

static void sharded_and_bf16_folders_hold_the_same(void **state) {
    (void)state;
    struct sw_model single, sharded, bf16;
    open_model(&single, BASE);
    open_model(&sharded, BASE "/sharded");
    open_model(&bf16, BASE "/bf16");
    assert_int_equal(sw_model_file_count(&sharded), 3);
    assert_string_equal(sw_model_file(&bf16, 0).dtype, "BF16");
    assert_true(sw_model_fingerprint(&single) != sw_model_fingerprint(&bf16));
    /* Stores of earlier runs name their model by it. */
    assert_true(sw_model_fingerprint(&single) == UINT64_C(0xd030915eeeaae1c0));
    for (uint32_t u = 0; u < single.unit_count; u++) {
        float *a = read_unit(&single, u), *b = read_unit(&sharded, u), *c = read_unit(&bf16, u);
        assert_memory_equal(a, b, single.units[u].count * sizeof(*a));
        for (uint64_t i = 0; i < single.units[u].count; i++)
            if (sw_f32_bits(c[i]) != (uint32_t)sw_bf16_from_f32(a[i]) << 16)
                fail_msg("unit %u element %u", u, (unsigned)i);
        free(a);
        free(b);
        free(c);
    }
    struct sw_model again;
    open_model(&again, BASE);
    assert_true(sw_model_fingerprint(&single) == sw_model_fingerprint(&again));
    sw_model_close(&again);
    sw_model_close(&single);
    sw_model_close(&sharded);
    sw_model_close(&bf16);
}

static void pieces_read_as_the_whole_and_padding_as_zero(void **state) {
    (void)state;
    struct sw_model model;
    open_model(&model, BASE);
    const struct sw_unit *unit = &model.units[1];
    assert_true(unit->count > unit->params); /* its norms leave gaps */
    float *whole = read_unit(&model, 1);
    for (uint32_t i = 0; i < unit->tensor_count; i++) {
        const uint64_t end = unit->tensors[i].first + unit->tensors[i].count;
        const uint64_t next = i + 1 < unit->tensor_count ? unit->tensors[i + 1].first : unit->count;
        for (uint64_t k = end; k < next; k++) assert_int_equal(sw_f32_bits(whole[k]), 0);
    }
    float piece[4096];
    for (uint64_t step = 1; step <= 4001; step += 125)
        for (uint64_t first = 0; first < unit->count; first += step) {
            const uint64_t left = unit->count - first, count = left < step ? left : step;
            memset(piece, 0xFF, sizeof(piece));
            sw_model_read(&model, 1, first, count, piece);
            assert_memory_equal(piece, whole + first, count * sizeof(*piece));
            if (step == 1 && first > 2000)
                break; /* single elements across the first gaps suffice */
        }
    free(whole);
    sw_model_close(&model);
}

static void tensors_that_do_not_fit_are_named(void **state) {
    (void)state;
    const char *dir = folder_make();
    file_link(BASE "/model.safetensors", in_folder("model.safetensors"));
    make_config("{\"vocab_size\":511}", NULL);
    refuse_model(dir,
                 "'model.embed_tokens.weight' has shape [512, 64]; config.json asks for [511, 64]");
    make_config("{\"intermediate_size\":64}", NULL);
    refuse_model(dir, "'model.layers.0.mlp.gate_proj.weight' has shape [172, 64]");
    make_config("{\"num_hidden_layers\":6}", NULL);
    refuse_model(dir, "'model.layers.5.input_layernorm.weight' is missing");
    make_config("{\"num_hidden_layers\":4}", NULL);
    refuse_model(dir, "'model.layers.4.");
    make_config("{\"tie_word_embeddings\":false}", NULL);
    refuse_model(dir, "'lm_head.weight' is missing");
    assert_int_equal(unlink(in_folder("model.safetensors")), 0);
    make_config("{}", NULL);
    refuse_model(dir, "neither model.safetensors nor model.safetensors.index.json");
    assert_int_equal(unlink(in_folder("config.json")), 0);
    refuse_model(dir, "config.json");
    folder_remove();
}

static void a_shard_that_is_missing_or_misplaced_is_named(void **state) {
    (void)state;
    const char *dir = folder_make();
    make_config("{}", NULL);
    file_link(BASE "/sharded/model.safetensors.index.json",
              in_folder("model.safetensors.index.json"));
    file_link(BASE "/sharded/model-00001-of-00003.safetensors",
              in_folder("model-00001-of-00003.safetensors"));
    file_link(BASE "/sharded/model-00003-of-00003.safetensors",
              in_folder("model-00003-of-00003.safetensors"));
    refuse_model(dir, "the file model-00002-of-00003.safetensors is missing");
    file_link(BASE "/sharded/model-00001-of-00003.safetensors",
              in_folder("model-00002-of-00003.safetensors"));
    refuse_model(dir, "lies in model-00002-of-00003.safetensors, but");
    assert_int_equal(unlink(in_folder("model.safetensors.index.json")), 0);
    const char *index = "{\"weight_map\":{\"a\":\"../x\"}}";
    file_write(in_folder("model.safetensors.index.json"), index, strlen(index));
    refuse_model(dir, "not a plain file name");
    file_write(in_folder("model.safetensors.index.json"), "{}", 2);
    refuse_model(dir, "weight_map");
    folder_remove();
}

/* Writes the base's tensors plus one more. */
static void write_with_extra(const char *path, const char *name, uint64_t rows, uint64_t cols) {
    struct sw_safetensors base;
    assert_int_equal(sw_safetensors_open(&base, BASE "/model.safetensors"), 0);
    struct sw_safetensors_entry entries[64];
    for (uint32_t i = 0; i < base.tensor_count; i++) {
        const struct sw_safetensors_tensor *t = &base.tensors[i];
        entries[i] =
            (struct sw_safetensors_entry){t->name, t->shape[0], t->dims > 1 ? t->shape[1] : 0};
    }
    entries[base.tensor_count] = (struct sw_safetensors_entry){name, rows, cols};
    struct sw_safetensors_writer writer;
    assert_int_equal(
        sw_safetensors_create(&writer, path, entries, base.tensor_count + 1, SW_FP32, NULL), 0);
    assert_int_equal(
        sw_safetensors_write(&writer, base.map + base.data_first, base.map_bytes - base.data_first),
        0);
    float *zeros = calloc(rows * (cols ? cols : 1), sizeof(*zeros));
    assert_int_equal(sw_safetensors_write(&writer, zeros, 4 * rows * (cols ? cols : 1)), 0);
    assert_int_equal(sw_safetensors_finish(&writer), 0);
    free(zeros);
    sw_safetensors_close(&base);
}

static void extra_tensors_are_known_or_refused(void **state) {
    (void)state;
    const char *dir = folder_make();
    struct sw_model model;
    make_config("{}", NULL);
    write_with_extra(in_folder("model.safetensors"), "lm_head.weight", 512, 64);
    open_model(&model, dir);
    assert_non_null(strstr(log_text(), "info: "));
    assert_non_null(strstr(log_text(), "lm_head.weight is ignored"));
    sw_model_close(&model);
    make_config("{\"tie_word_embeddings\":false}", NULL);
    open_model(&model, dir);
    float *head = read_unit(&model, 7);
    assert_true(head[0] == 0);
    free(head);
    sw_model_close(&model);
    make_config("{}", NULL);
    write_with_extra(in_folder("model.safetensors"), "model.layers.1.self_attn.rotary_emb.inv_freq",
                     4, 0);
    open_model(&model, dir);
    assert_string_equal(log_text(), "");
    sw_model_close(&model);
    write_with_extra(in_folder("model.safetensors"), "model.layers.0.self_attn.q_proj.bias", 64, 0);
    refuse_model(dir, "'model.layers.0.self_attn.q_proj.bias' is not part of the model");
    folder_remove();
}

/* ---- saving ---- */

struct source {
    const struct sw_model *model;
    int calls, fail_at, exit_at; /* the call that fails, or that ends the process; 0: none */
};

static int fetch_model(void *ctx, uint32_t unit, uint64_t first, uint64_t count,
                       enum sw_dtype dtype, void *out) {
    struct source *source = ctx;
    source->calls++;
    if (source->calls == source->fail_at) return -EIO;
    if (source->calls == source->exit_at) _exit(0);
    if (dtype == SW_FP32) {
        sw_model_read(source->model, unit, first, count, out);
        return 0;
    }
    float *values = malloc(count * sizeof(*values));
    sw_model_read(source->model, unit, first, count, values);
    for (uint64_t i = 0; i < count; i++) ((sw_bf16 *)out)[i] = sw_bf16_from_weight(values[i]);
    free(values);
    return 0;
}

static void assert_same_model(const char *dir, const struct sw_model *want, enum sw_dtype dtype) {
    struct sw_model got;
    open_model(&got, dir);
    for (uint32_t u = 0; u < want->unit_count; u++) {
        float *a = read_unit(want, u), *b = read_unit(&got, u);
        for (uint64_t i = 0; i < want->units[u].count; i++) {
            const uint32_t bits =
                dtype == SW_FP32 ? sw_f32_bits(a[i]) : (uint32_t)sw_bf16_from_weight(a[i]) << 16;
            if (sw_f32_bits(b[i]) != bits) fail_msg("unit %u element %u", u, (unsigned)i);
        }
        free(a);
        free(b);
    }
    sw_model_close(&got);
}

static void assert_same_file(const char *left, const char *right) {
    size_t left_bytes, right_bytes;
    char *a = file_read(left, &left_bytes), *b = file_read(right, &right_bytes);
    assert_int_equal(left_bytes, right_bytes);
    assert_memory_equal(a, b, left_bytes);
    free(a);
    free(b);
}

static void a_saved_model_is_the_same(void **state) {
    (void)state;
    struct sw_model model;
    open_model(&model, BASE);
    for (int dtype = SW_BF16; dtype <= SW_FP32; dtype++) {
        const char *dir = folder_make();
        struct source source = {.model = &model};
        assert_int_equal(sw_model_save(&model, dir, (enum sw_dtype)dtype, fetch_model, &source), 0);
        assert_same_model(dir, &model, (enum sw_dtype)dtype);
        static const char *const carried[] = {"tokenizer.json", "tokenizer.model",
                                              "tokenizer_config.json", "special_tokens_map.json",
                                              "generation_config.json"};
        for (int i = 0; i < 5; i++) {
            char from[128];
            snprintf(from, sizeof(from), BASE "/%s", carried[i]);
            assert_same_file(from, in_folder(carried[i]));
        }
        assert_int_equal(file_count(), 7); /* and config.json and model.safetensors: no leftovers */
        json_t *config = json_load_file(in_folder("config.json"), 0, NULL);
        json_t *base = json_load_file(BASE "/config.json", 0, NULL);
        assert_string_equal(json_string_value(json_object_get(config, "torch_dtype")),
                            dtype == SW_FP32 ? "float32" : "bfloat16");
        json_object_set_new(base, "torch_dtype",
                            json_incref(json_object_get(config, "torch_dtype")));
        assert_true(json_equal(config, base));
        json_decref(config);
        json_decref(base);
        folder_remove();
    }
    sw_model_close(&model);
}

static void the_newer_dtype_field_follows_too(void **state) {
    (void)state;
    struct sw_model model;
    char source_dir[256];
    snprintf(source_dir, sizeof(source_dir), "%s", folder_make());
    make_config("{\"dtype\":\"float16\"}", "torch_dtype");
    file_link(BASE "/model.safetensors", in_folder("model.safetensors"));
    open_model(&model, source_dir);
    struct source source = {.model = &model};
    /* Into its own folder: nothing to carry along, and the mapped file is replaced, not changed. */
    assert_int_equal(sw_model_save(&model, source_dir, SW_BF16, fetch_model, &source), 0);
    json_t *config = json_load_file(in_folder("config.json"), 0, NULL);
    assert_string_equal(json_string_value(json_object_get(config, "dtype")), "bfloat16");
    assert_null(json_object_get(config, "torch_dtype"));
    json_decref(config);
    assert_same_model(source_dir, &model, SW_BF16);
    sw_model_close(&model);
    folder_remove();
}

static void large_models_are_sharded(void **state) {
    (void)state;
    struct sw_model model;
    open_model(&model, BASE);
    const char *dir = folder_make();
    struct source source = {.model = &model};
    const json_t *config = model.weights->config;
    assert_int_equal(sw_model_write(&model, config, &model.weights->companions, dir, SW_FP32,
                                    300000, fetch_model, &source),
                     0);
    assert_false(file_exists(in_folder("model.safetensors")));
    json_t *index = json_load_file(in_folder("model.safetensors.index.json"), 0, NULL);
    assert_int_equal(
        json_integer_value(json_object_get(json_object_get(index, "metadata"), "total_size")),
        4 * 260032);
    assert_int_equal(json_object_size(json_object_get(index, "weight_map")), 47);
    json_decref(index);
    struct sw_model saved;
    open_model(&saved, dir);
    assert_true(sw_model_file_count(&saved) >= 4);
    for (uint32_t i = 0; i < sw_model_file_count(&saved); i++)
        assert_true(sw_model_file(&saved, i).bytes < 300000 + 8192);
    sw_model_close(&saved);
    assert_same_model(dir, &model, SW_FP32);
    /* Other shards, then one file, then shards again: nothing stays that a reader could pick up. */
    assert_int_equal(sw_model_write(&model, config, &model.weights->companions, dir, SW_FP32,
                                    600000, fetch_model, &source),
                     0);
    assert_same_model(dir, &model, SW_FP32);
    assert_int_equal(file_count(), 6 + 2 + 1);
    assert_int_equal(sw_model_save(&model, dir, SW_BF16, fetch_model, &source), 0);
    assert_same_model(dir, &model, SW_BF16);
    assert_int_equal(file_count(), 7);
    assert_int_equal(sw_model_write(&model, config, &model.weights->companions, dir, SW_FP32,
                                    600000, fetch_model, &source),
                     0);
    assert_same_model(dir, &model, SW_FP32);
    sw_model_close(&model);
    folder_remove();
}

static void a_save_that_fails_leaves_the_old_model(void **state) {
    (void)state;
    struct sw_model model;
    open_model(&model, BASE "/sharded");
    const char *dir = folder_make();
    struct source source = {.model = &model};
    assert_int_equal(sw_model_save(&model, dir, SW_FP32, fetch_model, &source), 0);
    for (int at = 1; at <= 47; at += 23) {
        source = (struct source){.model = &model, .fail_at = at};
        assert_int_equal(sw_model_save(&model, dir, SW_BF16, fetch_model, &source), -EIO);
        assert_int_equal(file_count(), 7);
        assert_same_model(dir, &model, SW_FP32);
    }
    /* A disk that is full in the middle. */
    struct rlimit old, small = {500000, RLIM_INFINITY};
    getrlimit(RLIMIT_FSIZE, &old);
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &small);
    source = (struct source){.model = &model};
    log_catch();
    const int ret = sw_model_save(&model, dir, SW_FP32, fetch_model, &source);
    setrlimit(RLIMIT_FSIZE, &old);
    assert_int_equal(ret, -EFBIG);
    assert_reported("model.safetensors");
    assert_int_equal(file_count(), 7);
    assert_same_model(dir, &model, SW_FP32);
    sw_model_close(&model);
    folder_remove();
}

/* The process ends inside the n-th call for data. A folder that had no model has no config.json
 * then, and one that had keeps it whole. */
static void a_save_that_is_killed_leaves_no_half_model(void **state) {
    (void)state;
    struct sw_model model;
    open_model(&model, BASE);
    const char *dir = folder_make();
    for (int round = 0; round < 2; round++) {
        for (int at = 1; at <= 47; at += 15) {
            const pid_t child = fork();
            if (child == 0) {
                struct source source = {.model = &model, .exit_at = at};
                sw_model_save(&model, dir, SW_BF16, fetch_model, &source);
                _exit(1);
            }
            int status;
            assert_int_equal(waitpid(child, &status, 0), child);
            assert_int_equal(status, 0);
            assert_int_equal(file_exists(in_folder("config.json")), round);
            if (round == 1) assert_same_model(dir, &model, SW_FP32);
        }
        struct source source = {.model = &model};
        assert_int_equal(sw_model_save(&model, dir, SW_FP32, fetch_model, &source), 0);
        assert_same_model(dir, &model, SW_FP32);
        assert_int_equal(file_count(), 7);
    }
    sw_model_close(&model);
    folder_remove();
}

/* A rename that fails half way, here onto a folder, stands for a crash between two names: when
 * shards change together there is no configuration that would promise a whole model; a single file
 * stays one. */
static void a_save_that_stops_between_names_promises_nothing(void **state) {
    (void)state;
    struct sw_model model;
    open_model(&model, BASE);
    const char *dir = folder_make();
    struct source source = {.model = &model};
    assert_int_equal(sw_model_save(&model, dir, SW_FP32, fetch_model, &source), 0);
    assert_int_equal(unlink(in_folder("tokenizer.json")), 0);
    assert_int_equal(mkdir(in_folder("tokenizer.json"), 0777), 0);
    log_catch();
    assert_true(sw_model_save(&model, dir, SW_FP32, fetch_model, &source) < 0);
    assert_reported("cannot rename");
    assert_same_model(dir, &model, SW_FP32);
    log_catch();
    const json_t *config = model.weights->config;
    assert_true(sw_model_write(&model, config, &model.weights->companions, dir, SW_FP32, 300000,
                               fetch_model, &source) < 0);
    assert_reported("cannot rename");
    assert_false(file_exists(in_folder("config.json")));
    sw_model_close(&model);
    folder_remove();
}

/* ---- initialisation ---- */

static uint64_t init_hash(const char *dir, uint64_t seed, enum sw_dtype dtype, int threads) {
    omp_set_num_threads(threads);
    assert_int_equal(sw_model_init(BASE "/config.json", dir, seed, dtype), 0);
    omp_set_num_threads(omp_get_num_procs());
    size_t bytes;
    void *data = file_read(in_folder("model.safetensors"), &bytes);
    const uint64_t hash = XXH64(data, bytes, 0);
    free(data);
    return hash;
}

static void equal_seeds_give_equal_files(void **state) {
    (void)state;
    const char *dir = folder_make();
    const uint64_t first = init_hash(dir, 3, SW_FP32, 1);
    /* The same on every machine and in every version: people name models by their seed. */
    if (first != UINT64_C(0xa5d5e7aceee679f2)) fail_msg("hash %016llx", (unsigned long long)first);
    assert_true(init_hash(dir, 3, SW_FP32, 3) == first);
    assert_true(init_hash(dir, 4, SW_FP32, 1) != first);
    struct sw_model model;
    init_hash(dir, 3, SW_FP32, 2);
    open_model(&model, dir);
    init_hash(dir, 3, SW_BF16, 2);
    assert_same_model(dir, &model, SW_BF16);
    sw_model_close(&model);
    folder_remove();
}

/* 260,000 normal values: their mean is within 5 / sqrt(n) deviations, their variance within
 * 5 sqrt(2 / n) and their fourth moment within 5 sqrt(96 / n) of a normal one's, but for one seed
 * in a million; no value lies beyond what 32-bit words can give. */
static void random_weights_are_normal(void **state) {
    (void)state;
    const char *dir = folder_make();
    init_hash(dir, 1, SW_FP32, 2);
    struct sw_model model;
    open_model(&model, dir);
    double sum = 0, sum2 = 0, sum4 = 0, neighbours = 0, last = 0, n = 0;
    for (uint32_t u = 0; u < model.unit_count; u++) {
        float *values = read_unit(&model, u);
        for (uint32_t t = 0; t < model.units[u].tensor_count; t++) {
            const struct sw_tensor *tensor = &model.units[u].tensors[t];
            for (uint64_t i = tensor->first; i < tensor->first + tensor->count; i++) {
                if (tensor->cols == 0) {
                    assert_true(values[i] == 1);
                    continue;
                }
                const double x = values[i] / 0.02;
                assert_true(fabs(x) < 6.67);
                n++;
                sum += x;
                sum2 += x * x;
                sum4 += x * x * x * x;
                neighbours += x * last;
                last = x;
            }
        }
        free(values);
    }
    assert_true(fabs(sum / n) < 5 / sqrt(n));
    assert_true(fabs(neighbours / n) < 5 / sqrt(n));
    assert_true(fabs(sum2 / n - 1) < 5 * sqrt(2 / n));
    assert_true(fabs(sum4 / n - 3) < 5 * sqrt(96 / n));
    /* No two tensors share values. */
    float *a = read_unit(&model, 1), *b = read_unit(&model, 2);
    const uint64_t q = model.units[1].tensors[SW_LAYER_Q].first;
    assert_true(a[q] != b[q] && a[q] != a[model.units[1].tensors[SW_LAYER_O].first]);
    free(a);
    free(b);
    sw_model_close(&model);
    folder_remove();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fields_are_honoured),
        cmocka_unit_test(rope_is_read_in_both_forms),
        cmocka_unit_test(what_would_change_the_result_is_refused),
        cmocka_unit_test(units_are_laid_out),
        cmocka_unit_test(sharded_and_bf16_folders_hold_the_same),
        cmocka_unit_test(pieces_read_as_the_whole_and_padding_as_zero),
        cmocka_unit_test(tensors_that_do_not_fit_are_named),
        cmocka_unit_test(a_shard_that_is_missing_or_misplaced_is_named),
        cmocka_unit_test(extra_tensors_are_known_or_refused),
        cmocka_unit_test(a_saved_model_is_the_same),
        cmocka_unit_test(the_newer_dtype_field_follows_too),
        cmocka_unit_test(large_models_are_sharded),
        cmocka_unit_test(a_save_that_fails_leaves_the_old_model),
        cmocka_unit_test(a_save_that_is_killed_leaves_no_half_model),
        cmocka_unit_test(a_save_that_stops_between_names_promises_nothing),
        cmocka_unit_test(equal_seeds_give_equal_files),
        cmocka_unit_test(random_weights_are_normal),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
