/* The decoder put together from operators: angles of the rotary embedding against Hugging Face's,
 * and the gradient of every tensor against central differences of the loss, for shapes that the
 * bundled model does not have (untied head, head_dim other than hidden / heads, grouped queries,
 * scaled angles, a vocabulary in parts). The loss comes from the head part by part, the gradients
 * from the whole head; tests/test_head.c compares the two.
 *
 * Along a tensor's own gradient g of norm G the loss must fall by G per unit step. The difference
 * quotient over 2 h has an error of rounding, about 2^-24 * loss * sqrt(operations that matter) /
 * h, here at most 1e-6 * 6 / h, and of curvature, h^2 / 6 times the third derivative. With h chosen
 * so that the loss moves by 1e-2 the first is 6e-4 of the quotient and the second at most 2e-3: the
 * limit is 3e-3, and a missing or doubled term is 100%. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <cmocka.h>
#include "engine/llama.h"
#include "engine/model_internal.h"
#include "tests/support_files.h"

enum { BATCH = 2, TIME = 9, TOKENS = BATCH * TIME, VOCAB = 40, PARTS_MAX = 3 };

static void angles_are_hugging_faces(void **state) {
    (void)state;
    /* transformers 5.24.0, ROPE_INIT_FUNCTIONS, head_dim 16 */
    static const double llama3[] = {1.0,
                                    0.07940301299095154,
                                    0.004700753837823868,
                                    0.0009115831344388425,
                                    0.00017677668074611574,
                                    3.428102354519069e-05,
                                    6.647869668086059e-06,
                                    1.289173155782919e-06};
    static const double linear[] = {0.25,
                                    0.07905694097280502,
                                    0.02500000037252903,
                                    0.007905694656074047,
                                    0.0024999999441206455,
                                    0.0007905694656074047,
                                    0.0002500000118743628,
                                    7.905694656074047e-05};
    struct sw_model_config c = {.head_dim = 16,
                                .rope_kind = SW_ROPE_LLAMA3,
                                .rope_theta = 500000,
                                .rope_factor = 8,
                                .rope_low_freq_factor = 1,
                                .rope_high_freq_factor = 4,
                                .rope_original_positions = 64};
    double f[8];
    sw_llama_rope_frequencies(&c, f); /* theirs are FP32: 2^-23 relative, a few operations */
    for (int i = 0; i < 8; i++) assert_true(fabs(f[i] - llama3[i]) <= 1e-6 * llama3[i]);
    c.rope_kind = SW_ROPE_LINEAR;
    c.rope_theta = 10000;
    c.rope_factor = 4;
    sw_llama_rope_frequencies(&c, f);
    for (int i = 0; i < 8; i++) assert_true(fabs(f[i] - linear[i]) <= 1e-6 * linear[i]);
    c.rope_kind = SW_ROPE_PLAIN;
    sw_llama_rope_frequencies(&c, f);
    for (int i = 0; i < 8; i++) assert_true(fabs(f[i] - 4 * linear[i]) <= 4e-6 * linear[i]);
}

struct rig {
    struct sw_model model;
    struct sw_device_handle device;
    struct sw_stream *stream;
    struct sw_llama llama;
    float **weights, **grads;     /* by unit */
    float *kept, *normed;         /* inputs of the layers and of the norm, and its output */
    float *dx, *d_normed, *spare; /* [TOKENS][hidden] each, as are kept's and normed */
    float stats[TOKENS][3];
    int32_t tokens[TOKENS], targets[TOKENS];
    uint8_t mask[TOKENS];
    uint32_t starts[TOKENS]; /* a row of one document, one of two */
    uint64_t counted;
    void *workspace;
};

static void no_adam(const struct sw_device_adam_step *step,
                    const struct sw_device_adam_chunk *chunk, void *ctx) {
    (void)step;
    (void)chunk;
    (void)ctx;
}

static void open_rig(struct rig *r, const char *dir, uint32_t parts) {
    const struct sw_host_device_options options = {.threads = 2, .adam = no_adam};
    assert_int_equal(sw_model_open_cut(&r->model, dir, parts), 0);
    assert_int_equal(r->model.parts, parts);
    assert_int_equal(sw_device_host_open(&r->device, &options), 0);
    const struct sw_device_ops *ops = r->device.ops;
    assert_int_equal(ops->stream_create(r->device.device, &r->stream), 0);
    const uint64_t bytes = sw_llama_workspace_bytes(&r->model, &r->device, SW_FP32, BATCH, TIME, 1);
    assert_int_equal(ops->alloc(r->device.device, bytes, &r->workspace), 0);
    assert_int_equal(sw_llama_open(&r->llama, &r->model, &r->device, SW_FP32, BATCH, TIME, 1,
                                   r->workspace, r->stream),
                     0);
    r->llama.head_slice = 7; /* several slices, the last one shorter */
    const uint32_t units = r->model.unit_count, hidden = r->model.config.hidden;
    r->weights = calloc(units, sizeof(*r->weights));
    r->grads = calloc(units, sizeof(*r->grads));
    for (uint32_t u = 0; u < units; u++) {
        r->weights[u] = calloc(r->model.units[u].count, sizeof(float));
        r->grads[u] = calloc(r->model.units[u].count, sizeof(float));
        sw_model_read(&r->model, u, 0, r->model.units[u].count, r->weights[u]);
    }
    const size_t activation = (size_t)TOKENS * hidden;
    r->kept = calloc((r->model.config.layers + 1) * activation, sizeof(float));
    r->normed = calloc(activation, sizeof(float));
    r->dx = calloc(activation, sizeof(float));
    r->d_normed = calloc(activation, sizeof(float));
    r->spare = calloc(activation, sizeof(float));
    for (int i = 0; i < TOKENS; i++) {
        r->tokens[i] = (i * 7 + 3) % VOCAB;
        r->targets[i] = (i * 11 + 5) % VOCAB;
        r->mask[i] = i % 5 != 2;
        r->starts[i] = i >= TIME + 4 ? 4 : 0;
        r->counted += r->mask[i];
    }
}

static void close_rig(struct rig *r) {
    const uint64_t bytes = sw_llama_workspace_bytes(&r->model, &r->device, SW_FP32, BATCH, TIME, 1);
    for (uint32_t u = 0; u < r->model.unit_count; u++) {
        free(r->weights[u]);
        free(r->grads[u]);
    }
    free(r->weights);
    free(r->grads);
    float *const all[] = {r->kept, r->normed, r->dx, r->d_normed, r->spare};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) free(all[i]);
    r->device.ops->free(r->device.device, r->workspace, bytes);
    r->device.ops->stream_destroy(r->stream);
    r->device.ops->close(r->device.device);
    sw_model_close(&r->model);
}

/* The input of a layer, or of the norm that follows the last. */
static float *kept(struct rig *r, uint32_t layer) {
    return r->kept + (size_t)layer * TOKENS * r->model.config.hidden;
}

static void forward(struct rig *r) {
    const struct sw_model *model = &r->model;
    for (uint32_t p = 0; p < model->parts; p++)
        assert_int_equal(sw_llama_embed(&r->llama, r->stream, &model->units[p], r->weights[p],
                                        r->tokens, kept(r, 0)),
                         0);
    for (uint32_t i = 0; i < model->config.layers; i++) {
        const uint32_t u = sw_model_first_layer(model) + i;
        assert_int_equal(sw_llama_layer(&r->llama, r->stream, &model->units[u], r->weights[u],
                                        r->starts, kept(r, i), kept(r, i + 1)),
                         0);
    }
    const uint32_t norm = sw_model_norm_unit(model);
    assert_int_equal(sw_llama_norm(&r->llama, r->stream, &model->units[norm], r->weights[norm],
                                   kept(r, model->config.layers), r->normed),
                     0);
}

static struct sw_llama_head head_of(struct rig *r, uint32_t part) {
    const uint32_t u = sw_model_head_unit(&r->model, part);
    return (struct sw_llama_head){.unit = &r->model.units[u],
                                  .matrix = r->weights[u],
                                  .x = r->normed,
                                  .targets = r->targets,
                                  .mask = r->mask,
                                  .scale = (float)(1.0 / (double)r->counted),
                                  .stats = r->stats[0],
                                  .d_matrix = r->grads[u]};
}

static double loss(struct rig *r) {
    double sum = 0;
    forward(r);
    for (uint32_t p = 0; p < r->model.parts; p++) {
        const struct sw_llama_head h = head_of(r, p);
        assert_int_equal(sw_llama_head_stats(&r->llama, r->stream, &h, p == 0), 0);
    }
    assert_int_equal(sw_llama_head_loss(&r->llama, r->stream, r->stats[0], r->mask, &sum), 0);
    return sum / (double)r->counted;
}

static void gradients(struct rig *r) {
    const struct sw_model *model = &r->model;
    const uint32_t layers = model->config.layers, norm = sw_model_norm_unit(model);
    struct sw_llama_head parts[PARTS_MAX];
    double sum;
    forward(r);
    for (uint32_t p = 0; p < model->parts; p++) parts[p] = head_of(r, p);
    assert_int_equal(
        sw_llama_head_whole(&r->llama, r->stream, parts, model->parts, &sum, r->d_normed), 0);
    /* Another micro-batch may go through a layer between the norm and its backward. */
    const uint32_t first = sw_model_first_layer(model);
    assert_int_equal(sw_llama_layer(&r->llama, r->stream, &model->units[first], r->weights[first],
                                    r->starts, r->d_normed, r->spare),
                     0);
    assert_int_equal(sw_llama_norm_backward(&r->llama, r->stream, &model->units[norm],
                                            r->weights[norm], r->grads[norm], 0, kept(r, layers),
                                            r->d_normed, r->dx),
                     0);
    for (uint32_t i = layers; i-- > 0;)
        assert_int_equal(sw_llama_layer_backward(&r->llama, r->stream, &model->units[first + i],
                                                 r->weights[first + i], r->starts,
                                                 r->grads[first + i], 0, kept(r, i), r->dx),
                         0);
    for (uint32_t p = 0; p < model->parts; p++)
        assert_int_equal(sw_llama_embed_backward(&r->llama, r->stream, &model->units[p],
                                                 r->grads[p], model->config.tied, r->tokens, r->dx),
                         0);
}

/* The relative error of a tensor's gradient along itself. */
static double check_tensor(struct rig *r, uint32_t unit, const struct sw_tensor *tensor) {
    float *w = r->weights[unit] + tensor->first;
    const float *g = r->grads[unit] + tensor->first;
    float *saved = malloc(tensor->count * sizeof(*saved));
    double norm = 0, values[2];
    memcpy(saved, w, tensor->count * sizeof(*saved));
    for (uint64_t i = 0; i < tensor->count; i++) norm += (double)g[i] * g[i];
    norm = sqrt(norm);
    assert_true(norm > 0);
    const double h = 1e-2 / norm / 2;
    for (int side = 0; side < 2; side++) {
        for (uint64_t i = 0; i < tensor->count; i++)
            w[i] = (float)(saved[i] + (side ? h : -h) * g[i] / norm);
        values[side] = loss(r);
    }
    memcpy(w, saved, tensor->count * sizeof(*saved));
    free(saved);
    return fabs((values[1] - values[0]) / (2 * h) - norm) / norm;
}

static void check_shape(const char *what, const char *config, uint32_t parts) {
    struct rig r = {0};
    folder_make();
    file_write(in_folder("config.json"), config, strlen(config));
    const char *path = in_folder("model");
    assert_int_equal(mkdir(path, 0777), 0);
    assert_int_equal(sw_model_init(in_folder("config.json"), path, 5, SW_FP32), 0);
    open_rig(&r, path, parts);
    gradients(&r);
    double worst = 0;
    for (uint32_t u = 0; u < r.model.unit_count; u++)
        for (uint32_t i = 0; i < r.model.units[u].tensor_count; i++) {
            const double error = check_tensor(&r, u, &r.model.units[u].tensors[i]);
            if (error > worst) worst = error;
            if (!(error <= 3e-3))
                fail_msg("%s, %s, %s: off by %g", what, r.model.units[u].name,
                         r.model.units[u].tensors[i].name, error);
        }
    print_message("%s, %u parts: worst relative error %.1e, limit 3e-3\n", what, parts, worst);
    close_rig(&r);
    folder_remove();
}

#define CONFIG(tied, more)                                                                         \
    "{\"model_type\":\"llama\",\"hidden_size\":24,\"intermediate_size\":40,"                       \
    "\"num_hidden_layers\":2,\"num_attention_heads\":6,\"num_key_value_heads\":2,"                 \
    "\"head_dim\":8,\"vocab_size\":40,\"max_position_embeddings\":64,\"rms_norm_eps\":1e-5,"       \
    "\"hidden_act\":\"silu\",\"initializer_range\":0.25,\"tie_word_embeddings\":" tied more "}"

static void gradients_of_every_tensor(void **state) {
    (void)state;
    for (uint32_t parts = 1; parts <= PARTS_MAX; parts++) {
        check_shape("untied, head_dim 8 of hidden 24 and 6 heads",
                    CONFIG("false", ",\"rope_theta\":100.0"), parts);
        check_shape("tied", CONFIG("true", ",\"rope_theta\":10000.0"), parts);
    }
    check_shape("linear scaling",
                CONFIG("false", ",\"rope_theta\":100.0,\"rope_scaling\":"
                                "{\"type\":\"linear\",\"factor\":2.0}"),
                1);
    check_shape("llama3 scaling",
                CONFIG("true",
                       ",\"rope_parameters\":{\"rope_type\":\"llama3\",\"rope_theta\":100.0,"
                       "\"factor\":8.0,\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,"
                       "\"original_max_position_embeddings\":32}"),
                1);
}

/* Counted by hand: 18 tokens, the matrices of a layer and of a part of the head. */
static void operations_are_counted_once(void **state) {
    (void)state;
    struct rig r = {0};
    folder_make();
    const char *config = CONFIG("true", ",\"rope_theta\":100.0");
    file_write(in_folder("config.json"), config, strlen(config));
    const char *path = in_folder("model");
    assert_int_equal(mkdir(path, 0777), 0);
    assert_int_equal(sw_model_init(in_folder("config.json"), path, 5, SW_FP32), 0);
    open_rig(&r, path, 2);
    const double layer = TOKENS * (2.0 * (2 * 48 * 24 + 2 * 16 * 24 + 3 * 40 * 24) + 2 * TIME * 48);
    const double part = TOKENS * 2.0 * 8 * 24; /* the last 8 of 40 rows */
    assert_true(sw_llama_flops(&r.llama, 2, SW_PASS_FORWARD) == layer);
    assert_true(sw_llama_flops(&r.llama, 2, SW_PASS_RECOMPUTE) == layer);
    assert_true(sw_llama_flops(&r.llama, 2, SW_PASS_BACKWARD) == 3 * layer);
    assert_true(sw_llama_flops(&r.llama, 1, SW_PASS_FORWARD) == part);
    assert_true(sw_llama_flops(&r.llama, 1, SW_PASS_HEAD_DX) == 2 * part);
    assert_true(sw_llama_flops(&r.llama, 1, SW_PASS_HEAD_GRAD) == 2 * part);
    assert_true(sw_llama_flops(&r.llama, 1, SW_PASS_BACKWARD) == 3 * part);
    assert_true(sw_llama_flops(&r.llama, 1, SW_PASS_EMBED) == 0);
    assert_true(sw_llama_flops(&r.llama, sw_model_norm_unit(&r.model), SW_PASS_BACKWARD) == 0);
    close_rig(&r);
    folder_remove();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(angles_are_hugging_faces),
        cmocka_unit_test(gradients_of_every_tensor),
        cmocka_unit_test(operations_are_counted_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
