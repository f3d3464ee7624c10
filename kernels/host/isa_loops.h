/* kernels/host/isa_loops.h - for the *_isa.c files alone, which are compiled once per instruction
 * set.
 *
 * A load or store with a constant dtype is a plain one after inlining; so a loop is written once,
 * always inlined, and called with each dtype by SW_BY_DTYPE. Vectors are the widest of the set. */
#ifndef KERNELS_HOST_ISA_LOOPS_H
#define KERNELS_HOST_ISA_LOOPS_H
#include <stdint.h>
#include "base/bf16.h"

#ifndef SW_ISA
#error "the *_isa.c files are compiled with -DSW_ISA=scalar, avx2 or avx512"
#endif
#define SW_PASTE_(a, b)   a##_##b
#define SW_PASTE(a, b)    SW_PASTE_(a, b)
#define SW_ISA_NAME(name) SW_PASTE(name, SW_ISA)

#define SW_INLINE static inline __attribute__((always_inline))

#define SW_BY_DTYPE(dtype, function, ...)                                                          \
    ((dtype) == SW_FP32 ? function(SW_FP32, __VA_ARGS__) : function(SW_BF16, __VA_ARGS__))

/* One rounding where the set has fused multiply-add; where it has not, libm's would be a call. */
#ifdef __FMA__
#define sw_fma(a, b, c) __builtin_fmaf(a, b, c)
#else
#define sw_fma(a, b, c) ((a) * (b) + (c))
#endif

/* Register tiles: sw_vec holds SW_VEC floats. Only ever a local variable, never an argument. */
#if defined(__AVX512F__)
#include <immintrin.h>
typedef __m512 sw_vec;
#define SW_VEC              16
#define sw_vec_load(p)      _mm512_loadu_ps(p)
#define sw_vec_store(p, x)  _mm512_storeu_ps(p, x)
#define sw_vec_all(x)       _mm512_set1_ps(x)
#define sw_vec_fma(a, b, c) _mm512_fmadd_ps(a, b, c)
#elif defined(__FMA__)
#include <immintrin.h>
typedef __m256 sw_vec;
#define SW_VEC              8
#define sw_vec_load(p)      _mm256_loadu_ps(p)
#define sw_vec_store(p, x)  _mm256_storeu_ps(p, x)
#define sw_vec_all(x)       _mm256_set1_ps(x)
#define sw_vec_fma(a, b, c) _mm256_fmadd_ps(a, b, c)
#else
typedef float sw_vec __attribute__((vector_size(16), aligned(4), may_alias));
#define SW_VEC              4
#define sw_vec_load(p)      (*(const sw_vec *)(p))
#define sw_vec_store(p, x)  (*(sw_vec *)(p) = (x))
#define sw_vec_all(x)       ((sw_vec){(x), (x), (x), (x)})
#define sw_vec_fma(a, b, c) ((a) * (b) + (c))
#endif

SW_INLINE void sw_store(enum sw_dtype dtype, void *p, uint64_t i, float x) {
    if (dtype == SW_FP32)
        ((float *)p)[i] = x;
    else
        ((sw_bf16 *)p)[i] = sw_bf16_from_f32(x);
}

SW_INLINE void *sw_at(enum sw_dtype dtype, void *p, uint64_t i) {
    return (char *)p + i * (dtype == SW_FP32 ? 4 : 2);
}

SW_INLINE const void *sw_at_const(enum sw_dtype dtype, const void *p, uint64_t i) {
    return (const char *)p + i * (dtype == SW_FP32 ? 4 : 2);
}

/* A team is not worth waking for less than this many element visits. */
SW_INLINE int sw_team(int threads, uint64_t work) {
    return work < 16384 ? 1 : threads;
}

/* e^x by halving powers of two: n = round(x / ln 2), r = x - n ln 2 in two pieces, and a polynomial
 * of degree 6 in r, interpolated at Chebyshev nodes (truncation below 2^-26). Relative error at
 * most 2^-22.4 for -87.33 <= x <= 88.37; below it 0, above it e^88.37. NaN stays NaN. libm's does
 * not vectorise here. */
SW_INLINE float sw_exp(float x) {
    const float low = -87.336540f, high = 88.376250f, shift = 0x1.8p23f;
    float c = x < low ? low : x;
    c = c > high ? high : c;
    const float shifted = c * 0x1.715476p0f + shift; /* n is now in the low bits */
    const float n = shifted - shift;
    const float r = sw_fma(n, -0x1.7f7d1cp-20f, sw_fma(n, -0x1.62e4p-1f, c));
    float q = 0x1.6d10fcp-10f;
    q = sw_fma(q, r, 0x1.120b62p-7f);
    q = sw_fma(q, r, 0x1.55551ap-5f);
    q = sw_fma(q, r, 0x1.5554dep-3f);
    q = sw_fma(q, r, 0.5f);
    const float p = sw_fma(q * r, r, r) + 1.0f;
    const float scale = sw_f32_from_bits((sw_f32_bits(shifted) << 23) + 0x3F800000u);
    const float y = p * scale;
    return x < low ? 0.0f : y;
}

#endif
