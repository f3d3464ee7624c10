/* A vocabulary cut into units: the parts hold every row once, and neither what is read nor what is
 * written shows where the cuts are. */
#include "engine/model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <xxhash.h>
#include "engine/model_internal.h"
#include "tests/support_files.h"

/* Layers of 45,440 elements; a row of the vocabulary has 64. */
static const char *make_config(uint32_t vocab, int tied) {
    char text[512];
    snprintf(text, sizeof(text),
             "{\"model_type\":\"llama\",\"hidden_size\":64,\"intermediate_size\":172,"
             "\"num_hidden_layers\":5,\"num_attention_heads\":8,\"num_key_value_heads\":4,"
             "\"vocab_size\":%u,\"max_position_embeddings\":64,\"tie_word_embeddings\":%s,"
             "\"torch_dtype\":\"float32\"}",
             vocab, tied ? "true" : "false");
    const char *path = in_folder("config.json");
    file_write(path, text, strlen(text));
    return path;
}

/* The parts [first, first + model->parts) of a matrix hold its rows once, in order, each in a unit
 * of one tensor. */
static void check_parts(const struct sw_model *model, uint32_t first, enum sw_unit_kind kind,
                        const char *unit_name, const char *tensor_name) {
    const uint64_t vocab = model->config.vocab, hidden = model->config.hidden;
    uint64_t row = 0;
    for (uint32_t p = 0; p < model->parts; p++) {
        const struct sw_unit *unit = &model->units[first + p];
        const struct sw_tensor *tensor = &unit->tensors[0];
        char name[64], of[32] = "";
        if (model->parts > 1) snprintf(of, sizeof(of), " %u of %u", p + 1, model->parts);
        snprintf(name, sizeof(name), "%s%s", unit_name, of);
        assert_string_equal(unit->name, name);
        assert_string_equal(tensor->name, tensor_name);
        assert_int_equal(unit->kind, kind);
        assert_int_equal(unit->tensor_count, 1);
        assert_int_equal(unit->first_row, row);
        assert_int_equal(tensor->source_first, row * hidden);
        assert_int_equal(tensor->first, 0);
        assert_int_equal(tensor->cols, hidden);
        assert_int_equal(tensor->count, tensor->rows * hidden);
        assert_true(tensor->rows > 0 && tensor->rows <= model->units[first].tensors[0].rows);
        if (p + 1 < model->parts) {
            assert_int_equal(tensor->rows, model->units[first].tensors[0].rows);
            assert_int_equal(tensor->rows % 16, 0);
        }
        row += tensor->rows;
    }
    assert_int_equal(row, vocab);
}

static void check_cut(const struct sw_model *model) {
    const uint32_t layers = model->config.layers, norm = sw_model_norm_unit(model);
    check_parts(model, 0, SW_UNIT_EMBED, "embedding", "model.embed_tokens.weight");
    assert_int_equal(sw_model_first_layer(model), model->parts);
    for (uint32_t i = 0; i < layers; i++)
        assert_int_equal(model->units[model->parts + i].kind, SW_UNIT_LAYER);
    assert_int_equal(norm, model->parts + layers);
    assert_int_equal(model->units[norm].kind, SW_UNIT_NORM);
    assert_string_equal(model->units[norm].tensors[0].name, "model.norm.weight");
    if (model->config.tied) {
        assert_int_equal(model->unit_count, norm + 1);
        assert_int_equal(sw_model_head_unit(model, model->parts - 1), model->parts - 1);
    } else {
        assert_int_equal(model->unit_count, norm + 1 + model->parts);
        assert_int_equal(sw_model_head_unit(model, 0), norm + 1);
        check_parts(model, norm + 1, SW_UNIT_HEAD, "head", "lm_head.weight");
    }
}

static void the_vocabulary_is_cut_to_the_size_of_a_layer(void **state) {
    (void)state;
    static const struct {
        uint32_t vocab, parts, rows; /* of the first part */
    } cases[] = {{1, 1, 1},        {512, 1, 512},      {710, 1, 710},       {711, 2, 368},
                 {1420, 2, 720},   {4096, 6, 688},     {32000, 46, 704},    {45440, 64, 720},
                 {45441, 64, 720}, {100000, 64, 1568}, {3000000, 64, 46880}};
    folder_make();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        for (int tied = 0; tied < 2; tied++) {
            struct sw_model model;
            assert_int_equal(sw_model_open_config(&model, make_config(cases[i].vocab, tied)), 0);
            assert_int_equal(model.parts, cases[i].parts);
            assert_int_equal(model.units[0].tensors[0].rows, cases[i].rows);
            const uint64_t layer = model.units[sw_model_first_layer(&model)].params;
            if (model.parts < SW_PARTS_MAX)
                assert_true(model.units[0].params < layer + SW_MODEL_PART_ROWS_STEP * 64);
            check_cut(&model);
            sw_model_close(&model);
        }
    folder_remove();
}

static void every_cut_holds_every_row_once(void **state) {
    (void)state;
    folder_make();
    for (uint32_t vocab = 1; vocab < 700; vocab += 13) {
        const char *config = make_config(vocab, vocab % 2);
        for (uint32_t parts = 1; parts <= SW_PARTS_MAX; parts++) {
            struct sw_model model;
            json_t *root = NULL;
            assert_int_equal(sw_model_open_json(&model, config, parts, &root), 0);
            json_decref(root);
            assert_true(model.parts <= parts);
            check_cut(&model);
            sw_model_close(&model);
        }
    }
    folder_remove();
}

/* All values of a unit, to be freed. */
static float *read_unit(const struct sw_model *model, uint32_t unit) {
    float *values = malloc(model->units[unit].count * sizeof(*values));
    memset(values, 0xFF, model->units[unit].count * sizeof(*values));
    sw_model_read(model, unit, 0, model->units[unit].count, values);
    return values;
}

/* The rows of a matrix, from the units that hold them, are those of a single unit. */
static void assert_same_rows(const struct sw_model *cut, uint32_t first, const float *whole) {
    for (uint32_t p = 0; p < cut->parts; p++) {
        const struct sw_unit *unit = &cut->units[first + p];
        float *part = read_unit(cut, first + p);
        assert_memory_equal(part, whole + unit->tensors[0].source_first,
                            unit->params * sizeof(*part));
        for (uint64_t i = unit->params; i < unit->count; i++) assert_true(part[i] == 0);
        free(part);
    }
}

static int fetch_model(void *ctx, uint32_t unit, uint64_t first, uint64_t count,
                       enum sw_dtype dtype, void *out) {
    float *values = dtype == SW_FP32 ? out : malloc(count * sizeof(*values));
    sw_model_read(ctx, unit, first, count, values);
    if (dtype == SW_FP32) return 0;
    for (uint64_t i = 0; i < count; i++) ((sw_bf16 *)out)[i] = sw_bf16_from_weight(values[i]);
    free(values);
    return 0;
}

/* Two files of the folder, each a prefix and the name. */
static void assert_same_file(const char *left, const char *right, const char *name) {
    char path[2][64];
    size_t bytes[2];
    snprintf(path[0], sizeof(path[0]), "%s%s", left, name);
    snprintf(path[1], sizeof(path[1]), "%s%s", right, name);
    char *a = file_read(in_folder(path[0]), &bytes[0]),
         *b = file_read(in_folder(path[1]), &bytes[1]);
    assert_int_equal(bytes[0], bytes[1]);
    assert_memory_equal(a, b, bytes[0]);
    free(a);
    free(b);
}

/* In BF16 and files that hold two matrices of the vocabulary at most. */
static void save_in_shards(struct sw_model *model, const char *name) {
    assert_int_equal(sw_model_write(model, model->weights->config, NULL, in_folder(name), SW_BF16,
                                    150000, fetch_model, model),
                     0);
}

/* `whole` lies in the folder, its shards in whole/; what is written from `cut` is the same. */
static void check_saved(struct sw_model *cut, const struct sw_model *shards) {
    assert_int_equal(sw_model_save(cut, in_folder("cut"), SW_FP32, fetch_model, cut), 0);
    assert_same_file("", "cut/", "model.safetensors");
    assert_same_file("", "cut/", "config.json");
    save_in_shards(cut, "cut");
    for (uint32_t i = 0; i < sw_model_file_count(shards); i++)
        assert_same_file("whole/", "cut/", sw_model_file(shards, i).name);
    assert_same_file("whole/", "cut/", "model.safetensors.index.json");
    assert_same_file("whole/", "cut/", "config.json");
}

static void cuts_do_not_show_in_the_files(void **state) {
    (void)state;
    static const uint32_t cuts[] = {2, 3, 5, 32};
    const char *dir = folder_make();
    struct sw_model whole, shards;
    assert_int_equal(sw_model_init(make_config(510, 0), dir, 7, SW_FP32), 0);
    assert_int_equal(sw_model_open(&whole, dir), 0);
    assert_int_equal(whole.parts, 1);
    float *embedding = read_unit(&whole, 0), *head = read_unit(&whole, 7);
    assert_int_equal(mkdir(in_folder("whole"), 0777), 0);
    assert_int_equal(mkdir(in_folder("cut"), 0777), 0);
    save_in_shards(&whole, "whole");
    assert_int_equal(sw_model_open(&shards, in_folder("whole")), 0);
    assert_true(sw_model_file_count(&shards) > 3);
    for (size_t i = 0; i < sizeof(cuts) / sizeof(cuts[0]); i++) {
        struct sw_model cut;
        assert_int_equal(sw_model_open_cut(&cut, dir, cuts[i]), 0);
        assert_int_equal(cut.parts, cuts[i]);
        assert_int_equal(cut.params, whole.params);
        assert_true(sw_model_fingerprint(&cut) == sw_model_fingerprint(&whole));
        assert_same_rows(&cut, 0, embedding);
        assert_same_rows(&cut, sw_model_head_unit(&cut, 0), head);
        check_saved(&cut, &shards);
        sw_model_close(&cut);
    }
    free(embedding);
    free(head);
    sw_model_close(&shards);
    sw_model_close(&whole);
    folder_remove();
}

/* A value depends on its tensor and place alone: this is the hash of the same file written from
 * units that are not cut. */
static void values_do_not_depend_on_the_cut(void **state) {
    (void)state;
    const char *dir = folder_make();
    struct sw_model model;
    assert_int_equal(sw_model_init(make_config(4096, 0), dir, 3, SW_BF16), 0);
    assert_int_equal(sw_model_open(&model, dir), 0);
    assert_int_equal(model.parts, 6);
    sw_model_close(&model);
    size_t bytes;
    void *data = file_read(in_folder("model.safetensors"), &bytes);
    const uint64_t hash = XXH64(data, bytes, 0);
    free(data);
    if (hash != UINT64_C(0xf87c4fe584b154c2)) fail_msg("hash %016llx", (unsigned long long)hash);
    folder_remove();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_vocabulary_is_cut_to_the_size_of_a_layer),
        cmocka_unit_test(every_cut_holds_every_row_once),
        cmocka_unit_test(cuts_do_not_show_in_the_files),
        cmocka_unit_test(values_do_not_depend_on_the_cut),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
