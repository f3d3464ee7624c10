/* cpu_adam/adam_kernel.h - the loops behind every variant, compiled once per instruction set.
 *
 * Plain element-wise C: the compiler vectorises it, each element's operations stay the same IEEE
 * operations in the same order (no contraction, no reduction, no approximate root or divide), and
 * so the width of a vector cannot show in the bits. A file that includes this defines SW_ADAM_ISA.
 * The loops are specialised by type, so nothing is decided inside; 8-bit moments and the update's
 * norm are made around them, a block at a time in the first-level cache. */
#include <immintrin.h>
#include <math.h>
#include <string.h>
#include "cpu_adam/adam_variants.h"
#include "base/moments8.h"

#define SW_PASTE_(a, b) a##_##b
#define SW_PASTE(a, b)  SW_PASTE_(a, b)
#define SW_NAME(name)   SW_PASTE(name, SW_ADAM_ISA)
#define SW_INLINE       static inline __attribute__((always_inline))

/* Lines of a tile are asked for this many bytes ahead of their use, into the cache of level 1 (3),
 * 2 (2) or 3 (1); docs/cpu-adam.md has the measurement that chose both. */
#ifndef SW_ADAM_PREFETCH_BYTES
#define SW_ADAM_PREFETCH_BYTES 2048
#endif
#ifndef SW_ADAM_PREFETCH_TO
#define SW_ADAM_PREFETCH_TO 3
#endif
#ifndef SW_ADAM_TILE
#define SW_ADAM_TILE 32
#endif
/* The weight is pure output: stores around the caches spare its lines their read. */
#ifndef SW_ADAM_WEIGHT_AROUND
#define SW_ADAM_WEIGHT_AROUND 1
#endif
enum { TILE = SW_ADAM_TILE, LINE_BYTES = 64, BLOCK = SW_ADAM_BLOCK };
_Static_assert(TILE * sizeof(sw_bf16) % LINE_BYTES == 0, "a tile's weights are whole lines");

/* Where one run of elements lies; what a format does not use is NULL. */
struct place {
    float *master;
    sw_bf16 *half;
    int16_t *remainder;
    float *momentum, *variance;
    const void *grad;
    void *weight;
};

/* How the master is kept and what is emitted. */
enum form { FP32, FP32_TO_BF16, FP32_TO_FP32, SPLIT, SPLIT_TO_BF16, SPLIT_TO_FP32, FORMS };

SW_INLINE float master_at(const float *master, const sw_bf16 *half, const int16_t *remainder,
                          uint64_t i, enum form form) {
    return form >= SPLIT ? sw_f32_from_split(half[i], remainder[i]) : master[i];
}

/* One piece of a run, at most a tile. `grad_dtype`, `form` and `coupled` are constants at every
 * call, so the branches on them fold away. The scalars come by value because the stores could alias
 * them. Two loops, because the chain from gradient to weight, with a root and a division in it, is
 * longer than what a core looks ahead: cut in two, more elements are under way at once. */
SW_INLINE void piece(const struct sw_adam_step step, float decay_factor, float decay_grad,
                     float *restrict master, sw_bf16 *restrict half, int16_t *restrict remainder,
                     float *restrict momentum, float *restrict variance, const void *restrict grad,
                     void *restrict weight, uint64_t count, enum sw_dtype grad_dtype,
                     enum form form, int coupled) {
    _Alignas(LINE_BYTES) float direction[TILE];
    for (uint64_t i = 0; i < count; i++) {
        const float scaled = sw_load(grad_dtype, grad, i) * step.grad_scale;
        const float g =
            coupled ? scaled + decay_grad * master_at(master, half, remainder, i, form) : scaled;
        const float m = step.beta1 * momentum[i] + step.one_minus_beta1 * g;
        const float v = step.beta2 * variance[i] + (step.one_minus_beta2 * g) * g;
        const float root = sqrtf(v) * step.rsqrt_bias2 + step.eps;
        direction[i] = m / root;
        momentum[i] = m;
        variance[i] = v;
    }
    for (uint64_t i = 0; i < count; i++) {
        const float before = master_at(master, half, remainder, i, form);
        const float p = before * decay_factor - step.step_size * direction[i];
        const sw_bf16 rounded = sw_bf16_from_weight(p);
        if (form >= SPLIT) {
            half[i] = rounded;
            remainder[i] = sw_remainder_from_f32(p, rounded);
        } else {
            master[i] = p;
        }
        if (form == FP32_TO_BF16 || form == SPLIT_TO_BF16) ((sw_bf16 *)weight)[i] = rounded;
        if (form == FP32_TO_FP32 || form == SPLIT_TO_FP32) ((float *)weight)[i] = p;
    }
}

/* A line of weights to where it belongs, around the caches, in the widest stores there are: `to` is
 * its beginning. */
SW_INLINE void emit_line(char *to, const char *from) {
#if defined(__AVX512F__)
    _mm512_stream_si512((__m512i *)to, _mm512_load_si512(from));
#elif defined(__AVX__)
    for (int b = 0; b < LINE_BYTES; b += (int)sizeof(__m256i))
        _mm256_stream_si256((__m256i *)(to + b), _mm256_load_si256((const __m256i *)(from + b)));
#else
    for (int b = 0; b < LINE_BYTES; b += (int)sizeof(__m128i))
        _mm_stream_si128((__m128i *)(to + b), _mm_load_si128((const __m128i *)(from + b)));
#endif
}

SW_INLINE void prefetch(const void *at, uint64_t bytes, int write) {
    for (uint64_t b = 0; b < bytes; b += LINE_BYTES) {
        const char *line = (const char *)at + b + SW_ADAM_PREFETCH_BYTES;
        if (write)
            __builtin_prefetch(line, 1, SW_ADAM_PREFETCH_TO);
        else
            __builtin_prefetch(line, 0, SW_ADAM_PREFETCH_TO);
    }
}

SW_INLINE struct place place_after(struct place at, uint64_t count, uint64_t grad_bytes,
                                   uint64_t weight_bytes, enum form form) {
    return (struct place){
        .master = form >= SPLIT ? NULL : at.master + count,
        .half = form >= SPLIT ? at.half + count : NULL,
        .remainder = form >= SPLIT ? at.remainder + count : NULL,
        .momentum = at.momentum + count,
        .variance = at.variance + count,
        .grad = (const char *)at.grad + count * grad_bytes,
        .weight = weight_bytes ? (char *)at.weight + count * weight_bytes : NULL,
    };
}

/* Elements before the first line of weights begins: all of them where no line ever does. */
SW_INLINE uint64_t before_line(const void *weight, uint64_t weight_bytes, uint64_t count) {
    const uint64_t past = (uintptr_t)weight % LINE_BYTES;
    if (past == 0) return 0;
    if (past % weight_bytes) return count;
    const uint64_t head = (LINE_BYTES - past) / weight_bytes;
    return head < count ? head : count;
}

/* A run, tile by tile. The weight's lines are whole ones, wherever it begins: what lies before the
 * first is a piece of its own. An address of the tiles ahead costs nothing where nothing lies
 * there. */
SW_INLINE void run(const struct sw_adam_step *step, float decay_factor, float decay_grad,
                   const struct place *begin, uint64_t count, enum sw_dtype grad_dtype,
                   enum form form, int coupled) {
    const uint64_t grad_bytes = grad_dtype == SW_BF16 ? 2 : 4;
    const uint64_t weight_bytes = form == FP32_TO_FP32 || form == SPLIT_TO_FP32   ? 4
                                  : form == FP32_TO_BF16 || form == SPLIT_TO_BF16 ? 2
                                                                                  : 0;
    const int around = SW_ADAM_WEIGHT_AROUND && weight_bytes;
    const struct sw_adam_step scalars = *step;
    struct place at = *begin;
#define PIECE(to, length)                                                                          \
    piece(scalars, decay_factor, decay_grad, at.master, at.half, at.remainder, at.momentum,        \
          at.variance, at.grad, to, length, grad_dtype, form, coupled)
#define ADVANCE(length) at = place_after(at, length, grad_bytes, weight_bytes, form)
    if (around) {
        const uint64_t head = before_line(at.weight, weight_bytes, count);
        PIECE(at.weight, head);
        ADVANCE(head);
        count -= head;
    }
    for (; count >= TILE; count -= TILE) {
        if (SW_ADAM_PREFETCH_BYTES) {
            prefetch(at.grad, TILE * grad_bytes, 0);
            if (form >= SPLIT) {
                prefetch(at.half, TILE * sizeof(*at.half), 1);
                prefetch(at.remainder, TILE * sizeof(*at.remainder), 1);
            } else {
                prefetch(at.master, TILE * sizeof(*at.master), 1);
            }
            prefetch(at.momentum, TILE * sizeof(float), 1);
            prefetch(at.variance, TILE * sizeof(float), 1);
            if (!around) prefetch(at.weight, TILE * weight_bytes, 1);
        }
        _Alignas(LINE_BYTES) char emitted[TILE * sizeof(float)];
        PIECE(around ? emitted : at.weight, TILE);
        for (uint64_t b = 0; around && b < TILE * weight_bytes; b += LINE_BYTES)
            emit_line((char *)at.weight + b, emitted + b);
        ADVANCE(TILE);
    }
    PIECE(at.weight, count);
#undef PIECE
#undef ADVANCE
    if (around) _mm_sfence(); /* before anybody is told of them */
}

typedef void (*loop)(const struct sw_adam_step *step, float decay_factor, float decay_grad,
                     const struct place *at, uint64_t count);

#define LOOP(grad, form, coupled)                                                                  \
    static void loop_##grad##_##form##_##coupled(const struct sw_adam_step *step,                  \
                                                 float decay_factor, float decay_grad,             \
                                                 const struct place *at, uint64_t count) {         \
        run(step, decay_factor, decay_grad, at, count, grad, form, coupled);                       \
    }
#define EACH_FORM(make, grad, coupled)                                                             \
    make(grad, FP32, coupled) make(grad, FP32_TO_BF16, coupled) make(grad, FP32_TO_FP32, coupled)  \
        make(grad, SPLIT, coupled) make(grad, SPLIT_TO_BF16, coupled)                              \
            make(grad, SPLIT_TO_FP32, coupled)
EACH_FORM(LOOP, SW_BF16, 0)
EACH_FORM(LOOP, SW_BF16, 1)
EACH_FORM(LOOP, SW_FP32, 0)
EACH_FORM(LOOP, SW_FP32, 1)

#define NAME_OF(grad, form, coupled) loop_##grad##_##form##_##coupled,
static const loop loops[2][2][FORMS] = {
    [SW_BF16] = {{EACH_FORM(NAME_OF, SW_BF16, 0)}, {EACH_FORM(NAME_OF, SW_BF16, 1)}},
    [SW_FP32] = {{EACH_FORM(NAME_OF, SW_FP32, 0)}, {EACH_FORM(NAME_OF, SW_FP32, 1)}},
};

static enum form form_of(const struct sw_adam_chunk *chunk) {
    const int emit = !chunk->weight ? 0 : chunk->format.weight == SW_BF16 ? 1 : 2;
    return (enum form)((chunk->format.master == SW_MASTER_SPLIT ? SPLIT : FP32) + emit);
}

/* The places of element `at`; the moments are the caller's, given for that element. */
static struct place place_of(const struct sw_adam_chunk *chunk, uint64_t at, float *momentum,
                             float *variance) {
    const int split = chunk->format.master == SW_MASTER_SPLIT;
    return (struct place){
        .master = split ? NULL : chunk->master + at,
        .half = split ? chunk->half + at : NULL,
        .remainder = split ? chunk->remainder + at : NULL,
        .momentum = momentum,
        .variance = variance,
        .grad = (const char *)chunk->grad + at * sw_dtype_bytes(chunk->format.grad),
        .weight = chunk->weight ? (char *)chunk->weight + at * sw_dtype_bytes(chunk->format.weight)
                                : NULL,
    };
}

/* Elements [first, end), range by range; momentum and variance are element `first`'s. */
static void run_ranges(const struct sw_adam_step *step, const struct sw_adam_chunk *chunk,
                       uint64_t first, uint64_t end, float *momentum, float *variance) {
    const enum form form = form_of(chunk);
    uint64_t at = first;
    for (const struct sw_adam_range *range = chunk->ranges; at < end; range++) {
        if (range->end <= at) continue;
        const uint64_t to = range->end < end ? range->end : end;
        const struct place place =
            place_of(chunk, at, momentum + (at - first), variance + (at - first));
        const int coupled = range->decays && step->coupled;
        loops[chunk->format.grad][coupled][form](step, range->decays ? step->decay_factor : 1.0f,
                                                 step->decay_grad, &place, to - at);
        at = to;
    }
}

SW_INLINE uint32_t largest(const float *x, uint64_t count) {
    uint32_t top = 0; /* the order of magnitudes is the order of their bits */
    for (uint64_t i = 0; i < count; i++) {
        const uint32_t bits = sw_f32_bits(x[i]) & 0x7FFFFFFFu;
        top = bits > top ? bits : top;
    }
    return top;
}

/* Quantises a block. The momentum takes the low half of an element's random bits, the variance the
 * high one. */
static void encode(const struct sw_adam_step *step, const struct sw_adam_chunk *chunk,
                   uint64_t first, uint64_t count, const float *restrict momentum,
                   const float *restrict variance) {
    uint8_t *restrict m8 = chunk->momentum_codes + first;
    uint8_t *restrict v8 = chunk->variance_codes + first;
    const float m_top = sw_f32_from_bits(largest(momentum, count));
    const float v_top = sw_f32_from_bits(largest(variance, count));
    const float m_inverse = m_top > 0 ? SW_8BIT_TOP / m_top : 0;
    const float v_inverse = v_top > 0 ? SW_8BIT_TOP / v_top : 0;
    const uint32_t index = (uint32_t)(chunk->first + first), seed = step->seed;
    for (uint64_t i = 0; i < count; i++) {
        const uint32_t random = sw_8bit_hash(seed, index + (uint32_t)i);
        const uint32_t sign = sw_f32_bits(momentum[i]) >> 31;
        const float m = sw_f32_from_bits(sw_f32_bits(momentum[i]) & 0x7FFFFFFFu) * m_inverse;
        const float v = variance[i] * v_inverse;
        const uint32_t m_code = sw_8bit_code(m, SW_M8_EXPONENT, 127, random & 0xFFFFu);
        const uint32_t v_code = sw_8bit_code(v, SW_V8_EXPONENT, 255, random >> 16);
        m8[i] = (uint8_t)(sign << 7 | m_code);
        v8[i] = (uint8_t)(v_code | ((v_code == 0) & (variance[i] > 0)));
    }
    chunk->momentum_scales[first / BLOCK] = m_top / SW_8BIT_TOP;
    chunk->variance_scales[first / BLOCK] = v_top / SW_8BIT_TOP;
}

static void decode(const struct sw_adam_chunk *chunk, uint64_t first, uint64_t count,
                   float *restrict momentum, float *restrict variance) {
    const uint8_t *restrict m8 = chunk->momentum_codes + first;
    const uint8_t *restrict v8 = chunk->variance_codes + first;
    const float m_scale = chunk->momentum_scales[first / BLOCK];
    const float v_scale = chunk->variance_scales[first / BLOCK];
    for (uint64_t i = 0; i < count; i++) {
        momentum[i] = sw_8bit_momentum(m8[i], m_scale);
        variance[i] = sw_8bit_variance(v8[i], v_scale);
    }
}

static void masters(const struct sw_adam_chunk *chunk, uint64_t first, uint64_t count, float *out) {
    if (chunk->format.master == SW_MASTER_FP32) {
        memcpy(out, chunk->master + first, count * sizeof(*out));
        return;
    }
    for (uint64_t i = 0; i < count; i++)
        out[i] = sw_f32_from_split(chunk->half[first + i], chunk->remainder[first + i]);
}

/* Element i goes to sum i % 16; the sums fold as a tree: one order for every width of vector. */
static double change(const float *before, const float *after, uint64_t count) {
    double lane[16] = {0};
    for (uint64_t i = 0; i < count; i++) {
        const double moved = (double)(after[i] - before[i]);
        lane[i % 16] += moved * moved;
    }
    for (int half = 8; half > 0; half /= 2)
        for (int l = 0; l < half; l++) lane[l] += lane[l + half];
    return lane[0];
}

static void run_block(const struct sw_adam_step *step, const struct sw_adam_chunk *chunk,
                      uint64_t first, uint64_t count, double *update_square) {
    float before[BLOCK], after[BLOCK], momentum[BLOCK], variance[BLOCK];
    if (update_square) masters(chunk, first, count, before);
    if (chunk->format.moments == SW_MOMENTS_8BIT) {
        decode(chunk, first, count, momentum, variance);
        run_ranges(step, chunk, first, first + count, momentum, variance);
        encode(step, chunk, first, count, momentum, variance);
    } else {
        run_ranges(step, chunk, first, first + count, chunk->momentum + first,
                   chunk->variance + first);
    }
    if (update_square) {
        masters(chunk, first, count, after);
        *update_square = change(before, after, count);
    }
}

void SW_NAME(sw_adam_kernel)(const struct sw_adam_step *step, const struct sw_adam_chunk *chunk,
                             uint64_t first, uint64_t end, double *update_squares) {
    if (chunk->format.moments == SW_MOMENTS_FP32 && !update_squares) {
        if (first < end)
            run_ranges(step, chunk, first, end, chunk->momentum + first, chunk->variance + first);
        return;
    }
    for (uint64_t at = first; at < end; at += BLOCK)
        run_block(step, chunk, at, end - at < BLOCK ? end - at : BLOCK,
                  update_squares ? update_squares + at / BLOCK : NULL);
}

double SW_NAME(sw_adam_norm)(const void *grad, enum sw_dtype dtype, uint64_t count,
                             uint64_t *nonfinite) {
    return dtype == SW_BF16 ? sw_block_norm(SW_BF16, grad, count, nonfinite)
                            : sw_block_norm(SW_FP32, grad, count, nonfinite);
}
