/* The arithmetic of a plan: the numbers that everyone knows come out, and the counts of the named
 * shapes are those that were published. */
#include "plan/arithmetic.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include "plan/decide.h"
#include "plan/subject.h"
#include "tests/support_files.h"

/* Equal but for the last bits of a double. */
static void is(double got, double want) {
    const double error = got > want ? got - want : want - got;
    if (error > 1e-12 * (want > 0 ? want : 1)) fail_msg("%.17g instead of %.17g", got, want);
}

static struct sw_arithmetic_in of(double params, double ranks) {
    return (struct sw_arithmetic_in){.params = params,
                                     .unit_params = params / 100,
                                     .ranks = ranks,
                                     .node_ranks = ranks,
                                     .micro_tokens = 4096,
                                     .micro_batches = 2,
                                     .hidden = 8192,
                                     .layers = 80,
                                     .inside_bytes = 1000,
                                     .checkpoint_every = 4,
                                     .adapters = 0.01,
                                     .moments8_bytes = 6};
}

static struct sw_arithmetic_row row_of(const struct sw_arithmetic_in *in, enum sw_scheme scheme) {
    struct sw_arithmetic_row row;
    sw_arithmetic_scheme(in, scheme, &row);
    return row;
}

static void seven_and_seventy_billion(void **state) {
    (void)state;
    const struct sw_arithmetic_in small = of(7e9, 8), large = of(70e9, 8);
    is(row_of(&small, SW_SCHEME_DATA_PARALLEL).gpu_bytes, 112e9);
    is(row_of(&small, SW_SCHEME_ZERO3).gpu_bytes, 14e9);
    is(row_of(&large, SW_SCHEME_DATA_PARALLEL).gpu_bytes, 1120e9);
    is(row_of(&large, SW_SCHEME_ZERO3).gpu_bytes, 140e9);
    struct sw_beside_row qlora, lora, coded;
    sw_arithmetic_beside(&large, SW_BESIDE_QLORA, &qlora);
    is(qlora.gpu_bytes, 46.2e9);
    sw_arithmetic_beside(&large, SW_BESIDE_LORA, &lora);
    is(lora.gpu_bytes, 140e9 + 0.7e9 * 16);
    sw_arithmetic_beside(&large, SW_BESIDE_MOMENTS8, &coded);
    is(coded.bytes, 700e9);
}

static void stages_take_their_share(void **state) {
    (void)state;
    for (double n = 1; n <= 64; n *= 2) {
        const struct sw_arithmetic_in in = of(1e9, n);
        is(row_of(&in, SW_SCHEME_DATA_PARALLEL).gpu_bytes_per_param, 16);
        is(row_of(&in, SW_SCHEME_ZERO1).gpu_bytes_per_param, 4 + 12 / n);
        is(row_of(&in, SW_SCHEME_ZERO2).gpu_bytes_per_param, 2 + 14 / n);
        is(row_of(&in, SW_SCHEME_ZERO3).gpu_bytes_per_param, 16 / n);
        is(row_of(&in, SW_SCHEME_OFFLOAD_OPTIMIZER).gpu_bytes_per_param, 2 / n);
        is(row_of(&in, SW_SCHEME_OFFLOAD_ALL).gpu_bytes_per_param, 0);
        for (int scheme = 0; scheme < SW_SCHEME_COUNT; scheme++) {
            const struct sw_arithmetic_row row = row_of(&in, (enum sw_scheme)scheme);
            const double at_hand = row.gpu_bytes - 1e9 * row.gpu_bytes_per_param;
            if (scheme < SW_SCHEME_OFFLOAD_OPTIMIZER) is(at_hand, 0);
            is(row.traffic_params, n == 1 ? 0 : scheme < SW_SCHEME_HYBRID ? 2 : 3);
            if (scheme != SW_SCHEME_HYBRID)
                is(row.link_bytes, row.traffic_params * 2e9 * (n - 1) / n);
        }
    }
}

static void hybrid_shards_inside_a_machine(void **state) {
    (void)state;
    struct sw_arithmetic_in in = of(1e9, 32);
    in.node_ranks = 8;
    const struct sw_arithmetic_row row = row_of(&in, SW_SCHEME_HYBRID);
    is(row.gpu_bytes_per_param, 2);
    /* Two gathers and a scatter over 8, then the shard's gradient summed over 4 machines. */
    is(row.link_bytes, 6e9 * 7 / 8 + 2 * 2e9 / 8 * 3 / 4);
}

static void what_leaves_the_gpus(void **state) {
    (void)state;
    struct sw_arithmetic_in in = of(70e9, 8);
    const struct sw_arithmetic_row optimizer = row_of(&in, SW_SCHEME_OFFLOAD_OPTIMIZER);
    is(optimizer.gpu_bytes, 2 * 70e9 / 8 + 2 * in.unit_params);
    is(optimizer.host_bytes, 14 * 70e9); /* records, and gradients that wait */
    is(optimizer.up_bytes, 2 * 70e9 / 8);
    is(optimizer.down_bytes, 2 * 70e9 / 8);
    const struct sw_arithmetic_row all = row_of(&in, SW_SCHEME_OFFLOAD_ALL);
    is(all.gpu_bytes, 6 * in.unit_params);
    is(all.host_bytes, 16 * 70e9);
    is(all.up_bytes, 2 * 2 * 70e9 / 8); /* forward and backward */
    is(all.down_bytes, 2 * 70e9 / 8);
    /* Frozen weights are there, once, and travel; nothing else of them does. */
    in.params = 1e9;
    in.frozen = 69e9;
    is(row_of(&in, SW_SCHEME_DATA_PARALLEL).gpu_bytes, 16e9 + 138e9);
    is(row_of(&in, SW_SCHEME_ZERO3).gpu_bytes, 2e9 + 138e9 / 8);
    is(row_of(&in, SW_SCHEME_OFFLOAD_ALL).host_bytes, 16e9 + 138e9);
    is(row_of(&in, SW_SCHEME_OFFLOAD_ALL).up_bytes, 2 * 140e9 / 8);
    is(row_of(&in, SW_SCHEME_ZERO3).link_bytes, (2 * 140e9 + 2e9) * 7 / 8);
}

static struct sw_keep_row keep_of(const struct sw_arithmetic_in *in, enum sw_keep keep) {
    struct sw_keep_row row;
    sw_arithmetic_keep(in, keep, &row);
    return row;
}

static void activations_by_token(void **state) {
    (void)state;
    const struct sw_arithmetic_in in = of(70e9, 8);
    is(keep_of(&in, SW_KEEP_WHOLE).bytes_per_token, 80 * (2 * 8192 + 1000));
    is(keep_of(&in, SW_KEEP_EVERY_LAYER).bytes_per_token, 1310720); /* 1.31 MB at 70B */
    is(keep_of(&in, SW_KEEP_EVERY_K).bytes_per_token, 2 * 8192 * (20 + 3));
    is(keep_of(&in, SW_KEEP_SQRT).every, 9);
    is(keep_of(&in, SW_KEEP_SQRT).bytes_per_token, 2 * 8192 * (9 + 8));
    is(keep_of(&in, SW_KEEP_EVERY_LAYER).gpu_bytes, 1310720.0 * 8192);
    is(keep_of(&in, SW_KEEP_WHOLE).forwards, 3);
    is(keep_of(&in, SW_KEEP_EVERY_LAYER).forwards, 4);
    is(keep_of(&in, SW_KEEP_EVERY_K).forwards, 4.75);
}

static void other_kinds_of_parallel(void **state) {
    (void)state;
    const struct sw_arithmetic_in in = of(70e9, 8);
    struct sw_beside_row tensor, pipeline;
    sw_arithmetic_beside(&in, SW_BESIDE_TENSOR, &tensor);
    is(tensor.gpu_bytes, 140e9);
    /* 80 layers x 4 all-reduces x 2 (T - 1)/T x 8192 tokens x 8192 x 2 bytes */
    is(tensor.link_bytes, 80 * 4 * 2 * 7.0 / 8 * 8192 * 8192 * 2);
    sw_arithmetic_beside(&in, SW_BESIDE_PIPELINE, &pipeline);
    is(pipeline.gpu_bytes, 140e9);
    is(pipeline.link_bytes, 2 * 8192.0 * 8192 * 2);
    is(pipeline.idle_share, 7.0 / 9);
}

/* ---- the named shapes ---- */

static void shapes_have_the_published_counts(void **state) {
    (void)state;
    static const struct {
        const char *name;
        uint64_t params, biases;
    } published[] = {
        {"smollm2-135m", 134515008, 0},     {"mistral-7b", 7241732096, 0},
        {"qwen2.5-7b", 7615616512, 129024}, {"llama-3-8b", 8030261248, 0},
        {"llama-3-70b", 70553706496, 0},    {"qwen2.5-72b", 72706203648, 819200},
        {"llama-3-405b", 405853388800, 0},
    };
    int i = 0;
    for (; sw_subject_shape(i); i++) {
        struct sw_subject s;
        assert_string_equal(sw_subject_shape(i), published[i].name);
        assert_int_equal(sw_subject_open(&s, published[i].name), 0);
        assert_int_equal(s.kind, SW_SUBJECT_SHAPE);
        assert_int_equal(s.params, published[i].params);
        assert_int_equal(s.bias_params, published[i].biases);
        assert_int_equal(s.model.params + s.bias_params, s.params);
        is(sw_subject_scale(&s), 1);
        sw_subject_close(&s);
    }
    assert_int_equal(i, sizeof(published) / sizeof(published[0]));
}

static void counts_have_a_nearest_shape(void **state) {
    (void)state;
    static const struct {
        const char *text, *shape;
        uint64_t params;
    } counts[] = {{"7B", "mistral-7b", 7000000000},     {"7b", "mistral-7b", 7000000000},
                  {"70B", "llama-3-70b", 70000000000},  {"1.5T", "llama-3-405b", 1500000000000},
                  {"350M", "smollm2-135m", 350000000},  {"7.6B", "qwen2.5-7b", 7600000000},
                  {"100B", "qwen2.5-72b", 100000000000}};
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        struct sw_subject s;
        assert_int_equal(sw_subject_open(&s, counts[i].text), 0);
        assert_int_equal(s.kind, SW_SUBJECT_COUNT);
        assert_int_equal(s.params, counts[i].params);
        assert_string_equal(s.shape, counts[i].shape);
        is(sw_subject_scale(&s) * (double)s.model.params, (double)s.params);
        sw_subject_close(&s);
    }
}

static void folders_are_read_and_nonsense_is_refused(void **state) {
    (void)state;
    struct sw_subject s;
    assert_int_equal(sw_subject_open(&s, "models/stories260k"), 0);
    assert_int_equal(s.kind, SW_SUBJECT_FILES);
    assert_int_equal(s.params, 260032);
    sw_subject_close(&s);
    static const struct {
        const char *text, *part;
    } bad[] = {{"llama-3-9b", "llama-3-8b"},
               {"7X", "none of the known shapes"},
               {"7.5.B", "none of the known shapes"},
               {"0B", "none of the known shapes"},
               {"10K", "none of the known"},
               {"1M", NULL},
               {"0.1M", "too few"},
               {"1000T", "too many"},
               {"absent/folder", "cannot open"}};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        log_catch();
        const int ret = sw_subject_open(&s, bad[i].text);
        if (!bad[i].part) {
            assert_int_equal(ret, 0);
            sw_subject_close(&s);
            continue;
        }
        assert_true(ret < 0);
        assert_reported(bad[i].part);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(seven_and_seventy_billion),
        cmocka_unit_test(stages_take_their_share),
        cmocka_unit_test(hybrid_shards_inside_a_machine),
        cmocka_unit_test(what_leaves_the_gpus),
        cmocka_unit_test(activations_by_token),
        cmocka_unit_test(other_kinds_of_parallel),
        cmocka_unit_test(shapes_have_the_published_counts),
        cmocka_unit_test(counts_have_a_nearest_shape),
        cmocka_unit_test(folders_are_read_and_nonsense_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
