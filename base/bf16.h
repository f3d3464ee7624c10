/* base/bf16.h - the two roundings from FP32 to BF16, and back. Every path uses these rules.
 *
 * Working weights round to nearest with ties away from zero, (bits + 0x8000) >> 16: then
 * master = weight + signed 16-bit remainder is exact for every finite value. Gradients and
 * activations round to nearest even, as the GPU's conversion instructions do. Infinities stay,
 * and a NaN stays a NaN (made quiet), which the plain addition would turn into zero. */
#ifndef BASE_BF16_H
#define BASE_BF16_H
#include <stdint.h>
#include <string.h>

/* Rules that hold on a GPU too: its compiler makes them for both sides. */
#ifdef __CUDACC__
#define SW_EVERYWHERE static __host__ __device__ __forceinline__
#else
#define SW_EVERYWHERE static inline
#endif

typedef uint16_t sw_bf16;

enum sw_dtype { SW_BF16, SW_FP32 };

SW_EVERYWHERE uint32_t sw_f32_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

SW_EVERYWHERE float sw_f32_from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

SW_EVERYWHERE float sw_f32_from_bf16(sw_bf16 x) {
    return sw_f32_from_bits((uint32_t)x << 16);
}

/* The rounding of working weights. */
SW_EVERYWHERE sw_bf16 sw_bf16_from_weight(float x) {
    const uint32_t bits = sw_f32_bits(x);
    const uint32_t nan = 0u - (uint32_t)((int32_t)(bits & 0x7FFFFFFFu) > 0x7F800000);
    return (sw_bf16)(((bits + (0x8000u & ~nan)) | (0x400000u & nan)) >> 16);
}

/* A master as its working weight and a signed 16-bit remainder, added as integers. */
SW_EVERYWHERE int16_t sw_remainder_from_f32(float master, sw_bf16 weight) {
    return (int16_t)(sw_f32_bits(master) - ((uint32_t)weight << 16));
}
SW_EVERYWHERE float sw_f32_from_split(sw_bf16 weight, int16_t remainder) {
    return sw_f32_from_bits(((uint32_t)weight << 16) + (uint32_t)(int32_t)remainder);
}

/* The rounding of gradients and activations. */
SW_EVERYWHERE sw_bf16 sw_bf16_from_f32(float x) {
    const uint32_t bits = sw_f32_bits(x);
    const uint32_t nan = 0u - (uint32_t)((int32_t)(bits & 0x7FFFFFFFu) > 0x7F800000);
    const uint32_t addend = (0x7FFFu + ((bits >> 16) & 1u)) & ~nan;
    return (sw_bf16)(((bits + addend) | (0x400000u & nan)) >> 16);
}

SW_EVERYWHERE uint64_t sw_dtype_bytes(enum sw_dtype dtype) {
    return dtype == SW_FP32 ? 4 : 2;
}
/* Element i of an array of either type; a plain load where dtype is a constant. */
SW_EVERYWHERE __attribute__((always_inline)) float sw_load(enum sw_dtype dtype, const void *p,
                                                           uint64_t i) {
    return dtype == SW_FP32 ? ((const float *)p)[i] : sw_f32_from_bf16(((const sw_bf16 *)p)[i]);
}
SW_EVERYWHERE const char *sw_dtype_name(enum sw_dtype dtype) {
    return dtype == SW_FP32 ? "fp32" : "bf16";
}

#endif
