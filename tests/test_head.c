/* The head in parts of the vocabulary: against sums in double whose limits count roundings, and
 * part by part against all at once, bit for bit, in both types, for shapes with an uneven last part
 * and an uneven last slice, masks, and gradients that are added to what is there. */
#include "engine/llama.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <jansson.h>
#include "engine/model_internal.h"
#include "kernels/host/host.h"
#include "tests/support_files.h"
#include "tests/support_reference.h"

enum { PARTS_MAX = 8, GUARD_BYTES = 1 << 16 };

struct shape {
    uint32_t hidden, vocab, parts; /* parts that come of the cut, not only asked for */
    uint64_t batch, time, slice;
    int tied, masked, add;
};

static const struct shape shapes[] = {
    {24, 75, 1, 2, 9, 7, 0, 1, 0},     {24, 75, 2, 2, 9, 7, 0, 1, 0},
    {24, 75, 5, 2, 9, 7, 1, 1, 1},     {64, 1000, 3, 3, 50, 64, 0, 0, 0},
    {40, 2500, 2, 1, 33, 33, 1, 1, 1}, {16, 300, 7, 1, 20, 16, 0, 0, 1},
};
enum { SHAPES = sizeof(shapes) / sizeof(shapes[0]) };

struct rig {
    struct shape shape;
    enum sw_dtype dtype;
    struct sw_model model;
    struct ref_device device;
    struct sw_llama llama;
    char *workspace;
    uint64_t tokens, workspace_bytes;
    struct ref_tensor matrix, x; /* [vocab][hidden], [tokens][hidden] */
    int32_t *targets;
    uint8_t *mask; /* NULL: all count */
    float scale;
};

/* That of a usual run. Picked once: opening a device by name forgets what SPILLWAY_ISA said. */
static const struct sw_host_isa *isa;

static int pick_isa(void **state) {
    (void)state;
    return sw_host_pick(&isa);
}

/* What a pass leaves behind. */
struct result {
    float *stats, *dx, *d_matrix;
    double loss;
};

/* The workspace is as large as it says and no larger: what follows it must stay. */
static void open_rig(struct rig *r, const struct shape *shape, enum sw_dtype dtype,
                     int head_whole) {
    char config[512];
    *r = (struct rig){.shape = *shape, .dtype = dtype, .tokens = shape->batch * shape->time};
    snprintf(config, sizeof(config),
             "{\"model_type\":\"llama\",\"hidden_size\":%u,\"intermediate_size\":16,"
             "\"num_hidden_layers\":1,\"num_attention_heads\":2,\"head_dim\":8,\"vocab_size\":%u,"
             "\"max_position_embeddings\":64,\"tie_word_embeddings\":%s}",
             shape->hidden, shape->vocab, shape->tied ? "true" : "false");
    folder_make();
    file_write(in_folder("config.json"), config, strlen(config));
    json_t *root = NULL;
    assert_int_equal(sw_model_open_json(&r->model, in_folder("config.json"), shape->parts, &root),
                     0);
    json_decref(root);
    folder_remove();
    assert_int_equal(r->model.parts, shape->parts);
    ref_device_open(&r->device, isa->name, 2);
    r->workspace_bytes = sw_llama_workspace_bytes(&r->model, &r->device.handle, dtype, shape->batch,
                                                  shape->time, head_whole);
    r->workspace = aligned_alloc(4096, r->workspace_bytes + GUARD_BYTES);
    memset(r->workspace, 0xFF, r->workspace_bytes + GUARD_BYTES);
    assert_int_equal(sw_llama_open(&r->llama, &r->model, &r->device.handle, dtype, shape->batch,
                                   shape->time, head_whole, r->workspace, r->device.stream),
                     0);
    assert_true(r->llama.head_slice >= shape->slice);
    r->llama.head_slice = shape->slice;
    ref_seed(shape->vocab);
    r->matrix = ref_tensor_new(&r->device, dtype, (uint64_t)shape->vocab * shape->hidden, 0.7);
    r->x = ref_tensor_new(&r->device, dtype, r->tokens * shape->hidden, 1.0);
    r->targets = calloc(r->tokens, sizeof(*r->targets));
    r->mask = shape->masked ? calloc(r->tokens, 1) : NULL;
    for (uint64_t i = 0; i < r->tokens; i++) {
        r->targets[i] = (int32_t)(ref_random() % shape->vocab);
        if (r->mask) r->mask[i] = i % 5 != 2;
    }
    r->scale = 1.0f / (float)r->tokens;
}

static void close_rig(struct rig *r) {
    for (int i = 0; i < GUARD_BYTES; i++)
        assert_int_equal((uint8_t)r->workspace[r->workspace_bytes + (uint64_t)i], 0xFF);
    ref_tensor_free(&r->device, &r->matrix);
    ref_tensor_free(&r->device, &r->x);
    free(r->targets), free(r->mask), free(r->workspace);
    ref_device_close(&r->device);
    sw_model_close(&r->model);
}

/* The gradients begin as 0.25 each where the shape adds to them, else as NaN. */
static struct result result_new(const struct rig *r) {
    struct result out = {
        .stats = calloc(r->tokens * 3, sizeof(float)),
        .dx = calloc(r->x.count, sizeof(float)),
        .d_matrix = calloc(r->matrix.count, sizeof(float)),
        .loss = NAN,
    };
    for (uint64_t i = 0; i < r->tokens * 3; i++) out.stats[i] = NAN;
    for (uint64_t i = 0; i < r->x.count; i++) out.dx[i] = NAN;
    for (uint64_t i = 0; i < r->matrix.count; i++) out.d_matrix[i] = r->shape.add ? 0.25f : NAN;
    return out;
}

static void result_free(struct result *out) {
    free(out->stats), free(out->dx), free(out->d_matrix);
}

static struct sw_llama_head head_of(const struct rig *r, const struct result *out, uint32_t part) {
    const struct sw_unit *unit = &r->model.units[sw_model_head_unit(&r->model, part)];
    const uint64_t first = unit->first_row * r->shape.hidden;
    return (struct sw_llama_head){.unit = unit,
                                  .matrix = (const char *)r->matrix.data +
                                            first * sw_dtype_bytes(r->dtype),
                                  .x = r->x.data,
                                  .targets = r->targets,
                                  .mask = r->mask,
                                  .scale = r->scale,
                                  .stats = out->stats,
                                  .dx = out->dx,
                                  .d_matrix = out->d_matrix + first,
                                  .d_accumulate = r->shape.add};
}

static void run_parts(const struct rig *r, struct result *out) {
    const uint32_t parts = r->model.parts;
    for (uint32_t p = 0; p < parts; p++) {
        const struct sw_llama_head h = head_of(r, out, p);
        assert_int_equal(sw_llama_head_stats(&r->llama, r->device.stream, &h, p == 0), 0);
    }
    assert_int_equal(
        sw_llama_head_loss(&r->llama, r->device.stream, out->stats, r->mask, &out->loss), 0);
    for (uint32_t p = parts; p-- > 0;) {
        struct sw_llama_head h = head_of(r, out, p);
        h.dx_accumulate = p + 1 < parts;
        assert_int_equal(sw_llama_head_backward(&r->llama, r->device.stream, &h), 0);
    }
}

static void run_whole(const struct rig *r, struct result *out, float *dx) {
    struct sw_llama_head parts[PARTS_MAX];
    for (uint32_t p = 0; p < r->model.parts; p++) parts[p] = head_of(r, out, p);
    assert_int_equal(
        sw_llama_head_whole(&r->llama, r->device.stream, parts, r->model.parts, &out->loss, dx), 0);
}

static void assert_same(const struct rig *r, const struct result *a, const struct result *b) {
    assert_memory_equal(&a->loss, &b->loss, sizeof(a->loss));
    assert_memory_equal(a->stats, b->stats, r->tokens * 3 * sizeof(float));
    assert_memory_equal(a->dx, b->dx, r->x.count * sizeof(float));
    assert_memory_equal(a->d_matrix, b->d_matrix, r->matrix.count * sizeof(float));
}

static void the_whole_has_the_bits_of_its_parts(void **state) {
    (void)state;
    for (int s = 0; s < SHAPES; s++)
        for (int dtype = SW_BF16; dtype <= SW_FP32; dtype++) {
            struct rig alone, together;
            open_rig(&alone, &shapes[s], (enum sw_dtype)dtype, 0);
            open_rig(&together, &shapes[s], (enum sw_dtype)dtype, 1);
            struct result parts = result_new(&alone), again = result_new(&together);
            struct result whole = result_new(&together);
            run_parts(&alone, &parts);
            run_parts(&together, &again);
            run_whole(&together, &whole, whole.dx);
            assert_true(isfinite(whole.loss) && isfinite(whole.dx[0]) &&
                        isfinite(whole.d_matrix[0]));
            assert_same(&alone, &parts, &again);
            assert_same(&alone, &parts, &whole);
            if (shapes[s].parts > 1) assert_true(alone.workspace_bytes < together.workspace_bytes);
            result_free(&parts), result_free(&again), result_free(&whole);
            close_rig(&alone);
            close_rig(&together);
        }
}

/* What is not asked for is not written, and changes nothing of the rest. */
static void gradients_may_be_left_out(void **state) {
    (void)state;
    struct rig r;
    open_rig(&r, &shapes[1], SW_FP32, 1);
    struct result all = result_new(&r), some = result_new(&r);
    run_whole(&r, &all, all.dx);
    run_whole(&r, &some, NULL);
    assert_true(isnan(some.dx[0]));
    assert_memory_equal(some.d_matrix, all.d_matrix, r.matrix.count * sizeof(float));
    assert_memory_equal(&some.loss, &all.loss, sizeof(all.loss));
    for (uint32_t p = r.model.parts; p-- > 0;) {
        struct sw_llama_head h = head_of(&r, &some, p);
        h.d_matrix = NULL;
        h.dx_accumulate = p + 1 < r.model.parts;
        assert_int_equal(sw_llama_head_backward(&r.llama, r.device.stream, &h), 0);
    }
    assert_same(&r, &all, &some);
    result_free(&all), result_free(&some);
    close_rig(&r);
}

/* Logits, losses and gradients in double, and how far FP32 may be from them.
 *
 * With u = 2^-24 a logit is a sum of `hidden` products: off by at most e = hidden u A, where A is
 * the largest sum of |x w|. A probability is off by the factor 1 + D: 2 e from the exponent and
 * those of the sum, and roundings: of two exponentials (3 each) with their differences (u times
 * their size), of the sum (the columns, 5 for each part), of the factor and of the product. A loss
 * is off by D, by its target's e, and by its own rounding. */
struct bound {
    double logit, share;
};

static struct bound logits_in_double(const struct rig *r, double *logits) {
    const uint64_t hidden = r->shape.hidden, vocab = r->shape.vocab;
    const double u = 0x1p-24;
    double size = 0, largest = 0;
    for (uint64_t i = 0; i < r->tokens; i++)
        for (uint64_t c = 0; c < vocab; c++) {
            double sum = 0, absolute = 0;
            for (uint64_t k = 0; k < hidden; k++) {
                const double term = r->x.exact[i * hidden + k] * r->matrix.exact[c * hidden + k];
                sum += term;
                absolute += fabs(term);
            }
            logits[i * vocab + c] = sum;
            size = fmax(size, absolute);
            largest = fmax(largest, fabs(sum));
        }
    const double logit = (double)hidden * u * size;
    const double roundings = (double)vocab + 5 * r->model.parts + 12 + 2 * largest;
    return (struct bound){logit, 2 * logit + roundings * u};
}

static void check_losses(const struct rig *r, const struct result *out, const double *logits,
                         struct bound bound) {
    double *losses = calloc(r->tokens, sizeof(*losses)), sum = 0, allowed = 0;
    ref_cross_entropy(losses, logits, r->targets, r->mask, r->tokens, r->shape.vocab);
    for (uint64_t i = 0; i < r->tokens; i++) {
        sum += losses[i];
        allowed += bound.share + bound.logit + losses[i] * 0x1p-24;
    }
    if (!(fabs(out->loss - sum) <= allowed))
        fail_msg("%u parts: loss %.9g, not %.9g: off by %.1e, allowed %.1e", r->model.parts,
                 out->loss, sum, fabs(out->loss - sum), allowed);
    free(losses);
}

/* dlogits [tokens][vocab] in double, and what each may be off by: its share of the bound and in
 * BF16 one rounding. */
static void gradients_in_double(const struct rig *r, const double *logits, struct bound bound,
                                double *d, double *allowed) {
    const uint64_t vocab = r->shape.vocab;
    for (uint64_t i = 0; i < r->tokens; i++) {
        double most = -INFINITY, sum = 0;
        for (uint64_t c = 0; c < vocab; c++) most = fmax(most, logits[i * vocab + c]);
        for (uint64_t c = 0; c < vocab; c++) sum += exp(logits[i * vocab + c] - most);
        for (uint64_t c = 0; c < vocab; c++) {
            const uint64_t at = i * vocab + c;
            const double p = exp(logits[at] - most) / sum;
            const double hit = c == (uint64_t)r->targets[i];
            const int counts = !r->mask || r->mask[i];
            d[at] = counts ? (p - hit) * (double)r->scale : 0;
            allowed[at] = counts ? (p * bound.share + hit * 0x1p-23) * (double)r->scale : 0;
            if (r->dtype == SW_BF16) allowed[at] += 0x1p-8 * (fabs(d[at]) + allowed[at]);
        }
    }
}

/* got = before + the sum of d a over `terms`, where d has its own allowance and the sum one
 * rounding for each term, and as many for the parts and slices that it may come in. */
static void check_sum(const char *what, float got, double before, const double *d,
                      const double *allowed, uint64_t d_step, const double *a, uint64_t a_step,
                      uint64_t terms) {
    double sum = before, absolute = fabs(before), off = 0;
    for (uint64_t i = 0; i < terms; i++) {
        sum += d[i * d_step] * a[i * a_step];
        absolute += fabs(d[i * d_step] * a[i * a_step]);
        off += allowed[i * d_step] * fabs(a[i * a_step]);
    }
    off += (double)(terms + 1) * 0x1p-24 * (absolute + off);
    if (!(fabs((double)got - sum) <= off))
        fail_msg("%s: %.9g, not %.9g: off by %.1e, allowed %.1e", what, (double)got, sum,
                 fabs((double)got - sum), off);
}

static void every_cut_is_right(void **state) {
    (void)state;
    for (int s = 0; s < SHAPES; s++)
        for (int dtype = SW_BF16; dtype <= SW_FP32; dtype++) {
            struct rig r;
            open_rig(&r, &shapes[s], (enum sw_dtype)dtype, 0);
            const uint64_t vocab = r.shape.vocab, hidden = r.shape.hidden;
            struct result out = result_new(&r);
            double *logits = calloc(r.tokens * vocab, sizeof(*logits));
            double *d = calloc(r.tokens * vocab, sizeof(*d));
            double *allowed = calloc(r.tokens * vocab, sizeof(*allowed));
            run_parts(&r, &out);
            const struct bound bound = logits_in_double(&r, logits);
            check_losses(&r, &out, logits, bound);
            gradients_in_double(&r, logits, bound, d, allowed);
            for (uint64_t i = 0; i < r.tokens; i++)
                for (uint64_t k = 0; k < hidden; k++)
                    check_sum("dx", out.dx[i * hidden + k], 0, d + i * vocab, allowed + i * vocab,
                              1, r.matrix.exact + k, hidden, vocab);
            for (uint64_t c = 0; c < vocab; c++)
                for (uint64_t k = 0; k < hidden; k++)
                    check_sum("d_matrix", out.d_matrix[c * hidden + k], r.shape.add ? 0.25 : 0,
                              d + c, allowed + c, vocab, r.x.exact + k, hidden, r.tokens);
            free(logits), free(d), free(allowed);
            result_free(&out);
            close_rig(&r);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_whole_has_the_bits_of_its_parts),
        cmocka_unit_test(gradients_may_be_left_out),
        cmocka_unit_test(every_cut_is_right),
    };
    return cmocka_run_group_tests(tests, pick_isa, NULL);
}
