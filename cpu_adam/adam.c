/* cpu_adam/adam.c - which variant runs, the scalars of a step, and the split over threads.
 *
 * Work is split over the chunk in fixed blocks, each thread taking one contiguous run of them, so
 * that a thread's streams stay long and many small ranges load the team as evenly as one. */
#include "cpu_adam/adam.h"

#include <assert.h>
#include <math.h>
#include <omp.h>
#include <string.h>
#include <xmmintrin.h>

#include "base/crc32c.h"
#include "base/log.h"
#include "cpu_adam/adam_internal.h"
#include "cpu_adam/adam_variants.h"

/* 16 KiB per stream: large enough that a block costs far more than finding it. */
enum { SHARE_ELEMENTS = 4096 };

/* With checksums, what is summed, updated and summed again before the next piece: 12 KiB of state
 * stay in the first-level cache. */
enum { CHECKSUM_ELEMENTS = 1024 };

/* MXCSR: subnormal results become 0 (bit 15), subnormal operands count as 0 (bit 6). */
enum { FLUSH_SUBNORMALS = 1 << 15 | 1 << 6 };

const struct sw_adam_variant sw_adam_variants[SW_ISA_COUNT] = {
    [SW_ISA_SCALAR] = {SW_ISA_SCALAR, sw_adam_kernel_scalar},
    [SW_ISA_AVX2] = {SW_ISA_AVX2, sw_adam_kernel_avx2},
    [SW_ISA_AVX512] = {SW_ISA_AVX512, sw_adam_kernel_avx512},
};

static const sw_adam_norm_kernel norm_kernels[SW_ISA_COUNT] = {
    [SW_ISA_SCALAR] = sw_adam_norm_scalar,
    [SW_ISA_AVX2] = sw_adam_norm_avx2,
    [SW_ISA_AVX512] = sw_adam_norm_avx512,
};

int sw_adam_pick(const struct sw_adam_variant **variant) {
    assert(variant);
    enum sw_isa isa;
    const int ret = sw_isa_pick(&isa);
    if (ret) return ret;
    *variant = &sw_adam_variants[isa];
    sw_info("Adam on the CPU runs its %s variant", sw_isa_name(isa));
    return 0;
}

void sw_adam_prepare(struct sw_adam_step *step, const struct sw_adam_hyper *hyper, uint64_t t,
                     float grad_scale) {
    assert(step && hyper && t >= 1);
    assert(hyper->lr >= 0 && hyper->eps >= 0 && hyper->weight_decay >= 0);
    assert(hyper->beta1 >= 0 && hyper->beta1 < 1 && hyper->beta2 >= 0 && hyper->beta2 < 1);
    *step = (struct sw_adam_step){
        .beta1 = (float)hyper->beta1,
        .one_minus_beta1 = (float)(1 - hyper->beta1),
        .beta2 = (float)hyper->beta2,
        .one_minus_beta2 = (float)(1 - hyper->beta2),
        .eps = (float)hyper->eps,
        .step_size = (float)(hyper->lr / (1 - pow(hyper->beta1, (double)t))),
        .rsqrt_bias2 = (float)(1 / sqrt(1 - pow(hyper->beta2, (double)t))),
        .grad_scale = grad_scale,
        .decay_factor = hyper->coupled ? 1 : (float)(1 - hyper->lr * hyper->weight_decay),
        .decay_grad = hyper->coupled ? (float)hyper->weight_decay : 0,
        .coupled = hyper->coupled && hyper->weight_decay > 0,
        .seed = (uint32_t)t,
    };
}

/* ---- callers' bugs ---- */

#ifndef NDEBUG
static int apart(const void *a, uint64_t a_bytes, const void *b, uint64_t b_bytes) {
    const uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
    return x + a_bytes <= y || y + b_bytes <= x;
}

static int well_formed(const struct sw_adam_chunk *c) {
    if (c->count == 0) return 1;
    if (c->range_count < 1 || c->ranges[c->range_count - 1].end != c->count) return 0;
    for (int i = 1; i < c->range_count; i++)
        if (c->ranges[i].end < c->ranges[i - 1].end) return 0;
    struct sw_adam_stream s[SW_ADAM_STREAMS_MAX + 2];
    int n = sw_adam_streams(c, s);
    s[n++] = (struct sw_adam_stream){(char *)(uintptr_t)c->grad, sw_dtype_bytes(c->format.grad), 0};
    if (c->weight) s[n++] = (struct sw_adam_stream){c->weight, sw_dtype_bytes(c->format.weight), 0};
    for (int i = 0; i < n; i++) {
        if (!s[i].base) return 0;
        for (int j = 0; j < i; j++)
            if (!apart(s[i].base, sw_adam_stream_bytes(&s[i], 0, c->count), s[j].base,
                       sw_adam_stream_bytes(&s[j], 0, c->count)))
                return 0;
    }
    return c->format.moments == SW_MOMENTS_FP32 || c->first % SW_ADAM_BLOCK == 0;
}
#endif

/* ---- one thread's share ---- */

/* The checksums of one share: each stream's bytes in it. */
struct share_sums {
    uint32_t before[SW_ADAM_STREAMS_MAX], after[SW_ADAM_STREAMS_MAX];
};

static void add_sums(const struct sw_adam_stream *streams, int count, uint64_t first, uint64_t end,
                     uint32_t *sums) {
    for (int s = 0; s < count; s++)
        sums[s] = sw_crc32c(sums[s], sw_adam_stream_at(&streams[s], first),
                            sw_adam_stream_bytes(&streams[s], first, end));
}

static void run_share(const struct sw_adam_variant *variant, const struct sw_adam_step *step,
                      const struct sw_adam_chunk *chunk, uint64_t first, uint64_t end,
                      double *update_squares, struct share_sums *sums) {
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | FLUSH_SUBNORMALS);
    if (!sums) {
        variant->kernel(step, chunk, first, end, update_squares);
    } else {
        struct sw_adam_stream streams[SW_ADAM_STREAMS_MAX];
        const int count = sw_adam_streams(chunk, streams);
        memset(sums, 0, sizeof(*sums));
        for (uint64_t at = first; at < end; at += CHECKSUM_ELEMENTS) {
            const uint64_t to = end - at < CHECKSUM_ELEMENTS ? end : at + CHECKSUM_ELEMENTS;
            add_sums(streams, count, at, to, sums->before);
            variant->kernel(step, chunk, at, to, update_squares);
            add_sums(streams, count, at, to, sums->after);
        }
    }
    _mm_setcsr(mode);
}

static uint64_t share_begin(uint64_t count, uint64_t share, uint64_t shares) {
    const uint64_t blocks = count / SHARE_ELEMENTS + (count % SHARE_ELEMENTS != 0);
    /* In two parts: blocks * share could pass 2^64 only beyond 2^54 blocks. */
    const uint64_t at = blocks * share / shares * SHARE_ELEMENTS;
    return at < count ? at : count;
}

/* The record's checksums: stream by stream, each share's part in order. */
static void join_sums(const struct sw_adam_chunk *chunk, const struct share_sums *sums,
                      uint64_t shares, struct sw_adam_extra *extra) {
    struct sw_adam_stream streams[SW_ADAM_STREAMS_MAX];
    const int count = sw_adam_streams(chunk, streams);
    extra->checksum_before = extra->checksum_after = 0;
    for (int s = 0; s < count; s++)
        for (uint64_t i = 0; i < shares; i++) {
            const uint64_t bytes =
                sw_adam_stream_bytes(&streams[s], share_begin(chunk->count, i, shares),
                                     share_begin(chunk->count, i + 1, shares));
            extra->checksum_before =
                sw_crc32c_combine(extra->checksum_before, sums[i].before[s], bytes);
            extra->checksum_after =
                sw_crc32c_combine(extra->checksum_after, sums[i].after[s], bytes);
        }
}

void sw_adam_update(const struct sw_adam_variant *variant, const struct sw_adam_step *step,
                    const struct sw_adam_chunk *chunk, int threads, struct sw_adam_extra *extra) {
    assert(variant && step && chunk && threads >= 1 && threads <= SW_ADAM_THREADS_MAX);
    assert(well_formed(chunk));
    const uint64_t blocks = chunk->count / SHARE_ELEMENTS + (chunk->count % SHARE_ELEMENTS != 0);
    if (blocks < 2) threads = 1; /* else the whole team: gcc's runtime ends threads left out */
    double *squares = extra ? extra->update_squares : NULL;
    struct share_sums sums[SW_ADAM_THREADS_MAX];
    struct share_sums *wanted = extra && extra->checksum ? sums : NULL;
    uint64_t shares = 1;
    if (threads == 1) {
        run_share(variant, step, chunk, 0, chunk->count, squares, wanted);
    } else {
#pragma omp parallel num_threads(threads)
        {
            /* The runtime may give a smaller team than was asked for. */
            const uint64_t team = (uint64_t)omp_get_num_threads();
            const uint64_t me = (uint64_t)omp_get_thread_num();
            if (me == 0) shares = team;
            run_share(variant, step, chunk, share_begin(chunk->count, me, team),
                      share_begin(chunk->count, me + 1, team), squares,
                      wanted ? wanted + me : NULL);
        }
    }
    if (wanted) join_sums(chunk, sums, shares, extra);
    if (squares) {
        extra->update_square = 0;
        for (uint64_t b = 0; b < (chunk->count + SW_ADAM_BLOCK - 1) / SW_ADAM_BLOCK; b++)
            extra->update_square += squares[b];
    }
}

/* ---- the norm of gradients ---- */

static uint64_t first_nonfinite(const void *grad, enum sw_dtype dtype, uint64_t at) {
    while (isfinite(sw_load(dtype, grad, at))) at++;
    return at;
}

double sw_adam_grad_norm(const struct sw_adam_variant *variant, const void *grad,
                         enum sw_dtype dtype, uint64_t count, int threads, double *block_sums,
                         struct sw_adam_nonfinite *bad) {
    assert(variant && threads >= 1 && bad && (count == 0 || (grad && block_sums)));
    const uint64_t blocks = (count + SW_NORM_BLOCK - 1) / SW_NORM_BLOCK;
    const uint64_t bytes = sw_dtype_bytes(dtype);
    uint64_t total = 0, first = UINT64_MAX;
    if ((uint64_t)threads > blocks) threads = blocks ? (int)blocks : 1;
#pragma omp parallel for schedule(static) num_threads(threads)                                     \
    reduction(+ : total) reduction(min : first)
    for (uint64_t b = 0; b < blocks; b++) {
        const uint64_t begin = b * SW_NORM_BLOCK, left = count - begin;
        const uint64_t length = left < SW_NORM_BLOCK ? left : SW_NORM_BLOCK;
        uint64_t found = 0;
        block_sums[b] =
            norm_kernels[variant->isa]((const char *)grad + begin * bytes, dtype, length, &found);
        if (found) {
            const uint64_t at = first_nonfinite(grad, dtype, begin);
            first = at < first ? at : first;
            total += found;
        }
    }
    *bad = (struct sw_adam_nonfinite){.count = total};
    if (total) {
        bad->first = first;
        bad->is_nan = isnan(sw_load(dtype, grad, first)) != 0;
    }
    double sum = 0;
    for (uint64_t b = 0; b < blocks; b++) sum += block_sums[b];
    return sum;
}
