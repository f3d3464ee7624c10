/* The CUDA device's Adam has the CPU's bits: on the CPU stand-in, in every format, at lengths on
 * both sides of a lot, a block and a launch, at any alignment, with few ranges and many, over many
 * updates. Equality is exact, subnormals and 8-bit codes included. */
#include "kernels/device.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "tests/support_adam.h"
#include "tests/support_cuda.h"

/* Pairs of a box's buffers and the same parts of a record. */
struct part {
    void *box, *record;
    uint64_t bytes;
};

static int parts_of(const struct sw_adam_chunk *box, void *record, struct part out[6]) {
    struct sw_adam_chunk in = *box;
    const uint64_t n = box->count, blocks = (n + SW_ADAM_BLOCK - 1) / SW_ADAM_BLOCK;
    int count = 0;
    sw_adam_record_map(&in, record);
    if (box->format.master == SW_MASTER_SPLIT) {
        out[count++] = (struct part){box->half, in.half, n * 2};
        out[count++] = (struct part){box->remainder, in.remainder, n * 2};
    } else {
        out[count++] = (struct part){box->master, in.master, n * 4};
    }
    if (box->format.moments == SW_MOMENTS_8BIT) {
        out[count++] = (struct part){box->momentum_scales, in.momentum_scales, blocks * 4};
        out[count++] = (struct part){box->variance_scales, in.variance_scales, blocks * 4};
        out[count++] = (struct part){box->momentum_codes, in.momentum_codes, n};
        out[count++] = (struct part){box->variance_codes, in.variance_codes, n};
    } else {
        out[count++] = (struct part){box->momentum, in.momentum, n * 4};
        out[count++] = (struct part){box->variance, in.variance, n * 4};
    }
    return count;
}

static struct sw_device_adam_step device_step(const struct sw_adam_step *s, uint32_t apply) {
    return (struct sw_device_adam_step){.beta1 = s->beta1,
                                        .one_minus_beta1 = s->one_minus_beta1,
                                        .beta2 = s->beta2,
                                        .one_minus_beta2 = s->one_minus_beta2,
                                        .eps = s->eps,
                                        .step_size = s->step_size,
                                        .rsqrt_bias2 = s->rsqrt_bias2,
                                        .grad_scale = s->grad_scale,
                                        .decay_factor = s->decay_factor,
                                        .seed = s->seed,
                                        .apply = apply};
}

/* One update of a chunk on the device: state and weight are taken from its buffers and brought back
 * there. `offset` is what each of them begins at past an address that 4,096 divides. */
static void update_on_device(const struct sw_adam_chunk *c, const struct sw_adam_step *step,
                             uint32_t apply, unsigned offset) {
    const uint64_t record_bytes = sw_adam_record_bytes(&c->format, c->count);
    const uint64_t grad_bytes = c->count * sw_dtype_bytes(c->format.grad);
    const uint64_t weight_bytes = c->weight ? c->count * sw_dtype_bytes(c->format.weight) : 0;
    char *record = malloc(record_bytes + 16);
    struct part parts[6];
    struct sw_device_adam_range *ranges = calloc((size_t)c->range_count + 1, sizeof(*ranges));
    const int count = parts_of(c, record, parts);
    for (int i = 0; i < count; i++)
        if (c->count) memcpy(parts[i].record, parts[i].box, parts[i].bytes);
    for (int i = 0; i < c->range_count; i++)
        ranges[i] = (struct sw_device_adam_range){c->ranges[i].end, c->ranges[i].decays};
    const struct sw_device_adam_step scalars = device_step(step, apply);
    struct sw_device_adam_step *there = cuda_bytes_new(&cuda_dev, &scalars, sizeof(scalars));
    char *state = cuda_bytes_new(&cuda_dev, NULL, record_bytes + offset);
    char *grad = cuda_bytes_new(&cuda_dev, NULL, grad_bytes + offset);
    char *weight = cuda_bytes_new(&cuda_dev, NULL, weight_bytes + offset);
    const struct sw_device_adam_chunk chunk = {
        .record = state + offset,
        .grad = grad + offset,
        .weight = c->weight ? weight + offset : NULL,
        .count = c->count,
        .first = c->first,
        .ranges = ranges,
        .range_count = c->range_count,
        .split_master = c->format.master == SW_MASTER_SPLIT,
        .coded_moments = c->format.moments == SW_MOMENTS_8BIT,
        .grad_dtype = c->format.grad,
        .weight_dtype = c->format.weight,
    };
    const struct sw_device_ops *ops = cuda_dev.ops;
    assert_int_equal(ops->copy_h2d(cuda_dev.stream, chunk.record, record, record_bytes), 0);
    assert_int_equal(ops->copy_h2d(cuda_dev.stream, grad + offset, c->grad, grad_bytes), 0);
    assert_int_equal(ops->copy_h2d(cuda_dev.stream, weight + offset, c->weight, weight_bytes), 0);
    assert_int_equal(ops->adam(cuda_dev.stream, &there[0], &chunk), 0);
    memset(ranges, 0xFF, sizeof(*ranges)); /* they were read at the call */
    cuda_bytes_get(&cuda_dev, record, chunk.record, record_bytes);
    cuda_bytes_get(&cuda_dev, c->weight, weight + offset, weight_bytes);
    for (int i = 0; i < count; i++)
        if (c->count) memcpy(parts[i].box, parts[i].record, parts[i].bytes);
    ops->free(cuda_dev.device, there, sizeof(scalars));
    ops->free(cuda_dev.device, state, record_bytes + offset);
    ops->free(cuda_dev.device, grad, grad_bytes + offset);
    ops->free(cuda_dev.device, weight, weight_bytes + offset);
    free(record);
    free(ranges);
}

enum { SHAPES = ADAM_SHAPES / 2 }; /* those that decay on their own: the device has no others */

static void compare(int shape, uint64_t count, int updates, unsigned offset) {
    struct adam_box want, got;
    adam_box_init(&want, adam_shape(shape), count, 0, 7);
    adam_box_init(&got, adam_shape(shape), count, 0, 7);
    for (int t = 1; t <= updates; t++) {
        const struct sw_adam_step step = adam_step(0, (uint64_t)t, t % 2 ? 1.0f : -0.37f);
        adam_box_update(&want, adam_forced(SW_ISA_SCALAR), &step, 0, count, 1, NULL);
        update_on_device(&got.chunk, &step, 1, offset);
    }
    adam_box_same(&want, &got, "the device");
    adam_box_exit(&want);
    adam_box_exit(&got);
}

static void the_device_has_the_bits_of_the_cpu(void **state) {
    (void)state;
    static const uint64_t counts[] = {1, 7, 8, 9, 255, 256, 257, 520, 2048, 5 * 4096 + 77};
    for (int shape = 0; shape < SHAPES; shape++)
        for (size_t c = 0; c < sizeof(counts) / sizeof(counts[0]); c++)
            compare(shape, counts[c], 1, 0);
}

static void any_alignment_and_many_updates(void **state) {
    (void)state;
    for (int shape = 0; shape < SHAPES; shape++) {
        compare(shape, 1283, 1, 4);
        compare(shape, 1284, 1, 8);
        compare(shape, 776, 12, 0);
    }
}

/* A range for each element: more than one launch takes. */
static void many_ranges_are_all_heeded(void **state) {
    (void)state;
    enum { COUNT = 1500 };
    static struct sw_adam_range ranges[COUNT];
    for (int i = 0; i < COUNT; i++) ranges[i] = (struct sw_adam_range){(uint64_t)i + 1, i % 3 == 1};
    for (int shape = 0; shape < SHAPES; shape++) {
        struct adam_box want, got;
        const struct sw_adam_step step = adam_step(0, 2, 1.0f);
        adam_box_init(&want, adam_shape(shape), COUNT, 0, 8);
        adam_box_init(&got, adam_shape(shape), COUNT, 0, 8);
        want.chunk.ranges = got.chunk.ranges = ranges;
        want.chunk.range_count = got.chunk.range_count = COUNT;
        sw_adam_update(adam_forced(SW_ISA_SCALAR), &step, &want.chunk, 1, NULL);
        update_on_device(&got.chunk, &step, 1, 0);
        adam_box_same(&want, &got, "many ranges");
        adam_box_exit(&want);
        adam_box_exit(&got);
    }
}

static void without_apply_nothing_changes(void **state) {
    (void)state;
    for (int shape = 0; shape < SHAPES; shape++) {
        struct adam_box want, got;
        const struct sw_adam_step step = adam_step(0, 2, 1.0f);
        adam_box_init(&want, adam_shape(shape), 300, 0, 9);
        adam_box_init(&got, adam_shape(shape), 300, 0, 9);
        update_on_device(&got.chunk, &step, 0, 0);
        adam_box_same(&want, &got, "apply 0");
        adam_box_exit(&want);
        adam_box_exit(&got);
    }
}

/* What the boxes' values do not meet: results just below the smallest normal number, and masters
 * half way between two weights, which stay where they are as nothing moves them. */
static void subnormals_are_zero_and_ties_go_away_from_zero(void **state) {
    (void)state;
    enum { COUNT = 512 };
    const struct sw_adam_hyper still = {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8};
    struct sw_adam_step step;
    sw_adam_prepare(&step, &still, 1, 1.0f);
    for (int shape = 0; shape < SHAPES; shape++) {
        struct adam_box boxes[2];
        for (int b = 0; b < 2; b++) {
            struct sw_adam_chunk *c = &boxes[b].chunk;
            adam_box_init(&boxes[b], adam_shape(shape), COUNT, 0, 10);
            memset((void *)(uintptr_t)c->grad, 0, COUNT * sw_dtype_bytes(c->format.grad));
            for (int i = 0; i < COUNT; i++) {
                const float master = sw_f32_from_bits(0x3F808000u + ((uint32_t)i << 16));
                if (c->master) c->master[i] = master;
                if (c->half) c->half[i] = sw_bf16_from_weight(master);
                if (c->remainder) c->remainder[i] = sw_remainder_from_f32(master, c->half[i]);
                if (c->momentum) c->momentum[i] = i % 2 ? 1.2e-38f : -1e-40f;
                if (c->variance) c->variance[i] = i % 3 ? 1.2e-38f : 1e-40f;
            }
        }
        sw_adam_update(adam_forced(SW_ISA_SCALAR), &step, &boxes[0].chunk, 1, NULL);
        update_on_device(&boxes[1].chunk, &step, 1, 0);
        adam_box_same(&boxes[0], &boxes[1], "subnormals and ties");
        if (boxes[1].chunk.momentum) assert_true(boxes[1].chunk.momentum[1] == 0.0f);
        for (int b = 0; b < 2; b++) adam_box_exit(&boxes[b]);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_device_has_the_bits_of_the_cpu),
        cmocka_unit_test(any_alignment_and_many_updates),
        cmocka_unit_test(many_ranges_are_all_heeded),
        cmocka_unit_test(without_apply_nothing_changes),
        cmocka_unit_test(subnormals_are_zero_and_ties_go_away_from_zero),
    };
    return cmocka_run_group_tests(tests, cuda_open, cuda_close);
}
