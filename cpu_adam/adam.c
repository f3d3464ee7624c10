/* cpu_adam/adam.c - which variant runs, the scalars of a step, and the split over threads.
 *
 * Work is split over all elements of all spans in fixed blocks, each thread taking one contiguous
 * run of blocks: many small spans load the team as evenly as one large one. */
#include "cpu_adam/adam.h"

#include <assert.h>
#include <cpuid.h>
#include <errno.h>
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "cpu_adam/adam_variants.h"

/* 16 KiB per stream: large enough that a block costs far more than finding it. */
enum { BLOCK_ELEMENTS = 4096 };

/* The compiler's query also asks whether the operating system saves the registers. */
static int has_avx2(void) {
    unsigned a, b, c, d;
    const int f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
}

static int has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

static int always(void) {
    return 1;
}

const struct sw_adam_variant sw_adam_variants[] = {
    {"avx512", has_avx512, sw_adam_kernel_avx512},
    {"avx2", has_avx2, sw_adam_kernel_avx2},
    {"scalar", always, sw_adam_kernel_scalar},
};
const int sw_adam_variant_count = sizeof(sw_adam_variants) / sizeof(sw_adam_variants[0]);

int sw_adam_pick(const struct sw_adam_variant **variant) {
    assert(variant);
    const char *forced = getenv("SPILLWAY_ISA");
    if (forced && !*forced) forced = NULL;
    for (int i = 0; i < sw_adam_variant_count; i++) {
        const struct sw_adam_variant *v = &sw_adam_variants[i];
        if (forced && strcmp(forced, v->name) != 0) continue;
        if (v->supported()) {
            *variant = v;
            return 0;
        }
        if (forced) {
            sw_error("SPILLWAY_ISA=%s: this CPU, or its operating system, cannot run it", forced);
            return -ENOTSUP;
        }
    }
    sw_error("SPILLWAY_ISA=%s: unknown; it may be avx512, avx2 or scalar", forced);
    return -EINVAL;
}

void sw_adam_prepare(struct sw_adam_step *step, const struct sw_adam_hyper *hyper, uint64_t t,
                     float grad_scale) {
    assert(step && hyper && t >= 1);
    assert(hyper->lr >= 0 && hyper->eps >= 0);
    assert(hyper->beta1 >= 0 && hyper->beta1 < 1 && hyper->beta2 >= 0 && hyper->beta2 < 1);
    step->beta1 = (float)hyper->beta1;
    step->one_minus_beta1 = (float)(1 - hyper->beta1);
    step->beta2 = (float)hyper->beta2;
    step->one_minus_beta2 = (float)(1 - hyper->beta2);
    step->eps = (float)hyper->eps;
    step->step_size = (float)(hyper->lr / (1 - pow(hyper->beta1, (double)t)));
    step->rsqrt_bias2 = (float)(1 / sqrt(1 - pow(hyper->beta2, (double)t)));
    step->grad_scale = grad_scale;
}

static size_t span_blocks(const struct sw_adam_span *span) {
    return span->count / BLOCK_ELEMENTS + (span->count % BLOCK_ELEMENTS != 0);
}

/* Runs blocks [from, to) of all spans taken as one row of blocks. */
static void run_blocks(sw_adam_kernel kernel, const struct sw_adam_step *step,
                       const struct sw_adam_span *spans, int span_count, size_t from, size_t to) {
    size_t base = 0;
    for (int s = 0; s < span_count && base < to; s++) {
        const size_t blocks = span_blocks(&spans[s]);
        const size_t lo = from > base ? from - base : 0;
        const size_t hi = to - base < blocks ? to - base : blocks;
        if (lo < hi) {
            const size_t first = lo * BLOCK_ELEMENTS;
            const size_t end = hi == blocks ? spans[s].count : hi * BLOCK_ELEMENTS;
            kernel(step, &spans[s], first, end - first);
        }
        base += blocks;
    }
}

void sw_adam_update(const struct sw_adam_variant *variant, const struct sw_adam_step *step,
                    const struct sw_adam_span *spans, int span_count, int threads) {
    assert(variant && step && span_count >= 0 && threads >= 1);
    size_t blocks = 0;
    for (int s = 0; s < span_count; s++) blocks += span_blocks(&spans[s]);
    if ((size_t)threads > blocks) threads = blocks ? (int)blocks : 1;
    if (threads == 1) {
        run_blocks(variant->kernel, step, spans, span_count, 0, blocks);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        /* The runtime may give a smaller team than was asked for. */
        const size_t team = (size_t)omp_get_num_threads(), me = (size_t)omp_get_thread_num();
        run_blocks(variant->kernel, step, spans, span_count, blocks * me / team,
                   blocks * (me + 1) / team);
    }
}
