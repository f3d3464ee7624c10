/* The memory limit's passes: they touch every byte of an update and change no value of the state,
 * whatever the instruction set, way, threads and count. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "offload/stream.h"

enum { COUNT_MAX = 3 * 4096 + 100, GUARD = 64 };

/* One array with bytes behind it that nobody may write. */
static void *array(uint64_t bytes, unsigned seed) {
    unsigned char *p = aligned_alloc(64, (bytes + GUARD + 63) / 64 * 64);
    assert_non_null(p);
    for (uint64_t i = 0; i < bytes + GUARD; i++) p[i] = (unsigned char)(seed + i * 37 + (i >> 8));
    return p;
}

struct arrays {
    struct sw_stream_arrays a;
    void *master, *momentum, *variance, *grad, *weight;
};

static void open_arrays(struct arrays *s, uint64_t count, enum sw_dtype grad, int weight) {
    s->master = array(count * 4, 1);
    s->momentum = array(count * 4, 2);
    s->variance = array(count * 4, 3);
    s->grad = array(count * sw_dtype_bytes(grad), 4);
    s->weight = array(count * 2, 5);
    s->a = (struct sw_stream_arrays){
        .count = count,
        .master = s->master,
        .momentum = s->momentum,
        .variance = s->variance,
        .grad = s->grad,
        .grad_dtype = grad,
        .weight = weight ? s->weight : NULL,
    };
}

static void close_arrays(struct arrays *s) {
    free(s->master);
    free(s->momentum);
    free(s->variance);
    free(s->grad);
    free(s->weight);
}

/* The weight is the master's upper half; what is behind it, and all without one, stays. */
static void expect_pass(const struct arrays *before, const struct arrays *after, uint64_t count) {
    assert_memory_equal(before->master, after->master, count * 4 + GUARD);
    assert_memory_equal(before->momentum, after->momentum, count * 4 + GUARD);
    assert_memory_equal(before->variance, after->variance, count * 4 + GUARD);
    const uint64_t written = after->a.weight ? count : 0;
    for (uint64_t i = 0; i < written; i++)
        assert_int_equal(after->a.weight[i], sw_f32_bits(after->a.master[i]) >> 16);
    assert_memory_equal((char *)before->weight + written * 2, (char *)after->weight + written * 2,
                        (count - written) * 2 + GUARD);
}

static void passes_keep_the_state(void **state) {
    (void)state;
    static const uint64_t counts[] = {0, 1, 63, 64, 65, 4096, 4097, COUNT_MAX};
    for (int isa = 0; isa < SW_ISA_COUNT; isa++)
        for (int way = 0; way < SW_STREAM_WAYS && sw_isa_supported((enum sw_isa)isa); way++)
            for (uint64_t c = 0; c < sizeof(counts) / sizeof(counts[0]); c++)
                for (int mix = 0; mix < 8; mix++) {
                    struct arrays before, after;
                    const enum sw_dtype grad = mix & 1 ? SW_FP32 : SW_BF16;
                    open_arrays(&before, counts[c], grad, mix & 2);
                    open_arrays(&after, counts[c], grad, mix & 2);
                    sw_stream_pass((enum sw_isa)isa, &sw_stream_ways[way], &after.a,
                                   mix & 4 ? 3 : 1);
                    expect_pass(&before, &after, counts[c]);
                    close_arrays(&before);
                    close_arrays(&after);
                }
}

static void bytes_are_those_of_an_update(void **state) {
    (void)state;
    assert_int_equal(sw_stream_bytes(SW_BF16, 1), 28);
    assert_int_equal(sw_stream_bytes(SW_BF16, 0), 26);
    assert_int_equal(sw_stream_bytes(SW_FP32, 1), 30);
    assert_int_equal(sw_stream_bytes(SW_FP32, 0), 28);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(passes_keep_the_state),
        cmocka_unit_test(bytes_are_those_of_an_update),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
