/* kernels/cuda/adam.cu - AdamW over a chunk with the CPU's bits (cpu_adam/adam.h has the rule).
 *
 * Built without contraction, with IEEE divide and root, and with subnormals as zero, as the CPU
 * runs it; the operations of an element are the CPU's, in its order. A thread takes a lot of eight
 * elements, so a warp takes the 256 of a block of 8-bit moments, and finds its largest by shuffles.
 * Decay by ranges comes by value with the launch; a chunk with more than fit is cut at blocks. */
#ifndef GPU_SUBNORMALS_ARE_ZERO
#error "the Makefile builds this file with -ftz=true, and says so"
#endif
#include "kernels/cuda/launchers.h"
#include "kernels/cuda/lots.h"

namespace {
constexpr int THREADS = 256;
constexpr uint64_t BLOCK = 256; /* elements with one scale, and of a warp */
static_assert(BLOCK == 32 * LOT, "a warp takes a block");
constexpr int RANGES_MAX = 256; /* a block of 256 elements has no more of them */

/* Ends of ranges in elements from `begin`; the top bit says that the range decays. */
struct ranges {
    uint32_t end[RANGES_MAX];
    int count;
};
constexpr uint32_t DECAYS = 1u << 31;
constexpr uint64_t SPAN_MAX = 1u << 30; /* elements of a launch */

/* What a format does not use is NULL. */
struct chunk {
    float *master;
    sw_bf16 *half;
    uint16_t *remainder;
    float *momentum, *variance;
    float *momentum_scales, *variance_scales;
    uint8_t *momentum_codes, *variance_codes;
    const void *grad;
    void *weight;
    uint64_t first; /* the chunk's first element's index in the model */
    uint64_t begin, end;
    enum sw_dtype grad_dtype, weight_dtype;
    bool wide, wide_codes;
};

__device__ __forceinline__ bool decays(const ranges &r, uint64_t from_begin) {
    int low = 0, high = r.count - 1;
    while (low < high) {
        const int middle = (low + high) / 2;
        if ((r.end[middle] & ~DECAYS) > from_begin)
            high = middle;
        else
            low = middle + 1;
    }
    return (r.end[low] & DECAYS) != 0;
}

__device__ __forceinline__ uint32_t warp_most(uint32_t x) {
    for (int d = 16; d > 0; d >>= 1) {
        const uint32_t other = __shfl_xor_sync(GPU_ALL_LANES, x, d);
        x = other > x ? other : x;
    }
    return x;
}

__device__ __forceinline__ void load_codes(uint8_t (&x)[LOT], const uint8_t *p, uint64_t at,
                                           int length, bool wide) {
    if (!wide || length < LOT) {
        for (int i = 0; i < LOT; i++) x[i] = i < length ? p[at + (uint64_t)i] : (uint8_t)0;
        return;
    }
    const uint2 v = *reinterpret_cast<const uint2 *>(p + at);
    for (int i = 0; i < LOT; i++) x[i] = (uint8_t)((i < 4 ? v.x : v.y) >> (i % 4 * 8));
}

__device__ __forceinline__ void store_codes(uint8_t *p, uint64_t at, const uint8_t (&x)[LOT],
                                            int length, bool wide) {
    if (!wide || length < LOT) {
        for (int i = 0; i < LOT; i++)
            if (i < length) p[at + (uint64_t)i] = x[i];
        return;
    }
    uint32_t words[2] = {};
    for (int i = 0; i < LOT; i++) words[i / 4] |= (uint32_t)x[i] << (i % 4 * 8);
    *reinterpret_cast<uint2 *>(p + at) = make_uint2(words[0], words[1]);
}

__device__ __forceinline__ void load_moments(const chunk &c, uint64_t at, int length,
                                             float (&m)[LOT], float (&v)[LOT]) {
    uint8_t m8[LOT], v8[LOT];
    load_codes(m8, c.momentum_codes, at, length, c.wide_codes);
    load_codes(v8, c.variance_codes, at, length, c.wide_codes);
    const float m_scale = c.momentum_scales[at / BLOCK], v_scale = c.variance_scales[at / BLOCK];
#pragma unroll
    for (int i = 0; i < LOT; i++) {
        m[i] = sw_8bit_momentum(m8[i], m_scale);
        v[i] = sw_8bit_variance(v8[i], v_scale);
    }
}

/* By all lanes of the warp: its block is quantised. The momentum takes the low half of an element's
 * random bits, the variance the high one. */
__device__ __forceinline__ void store_moments(const chunk &c, uint32_t seed, uint64_t at,
                                              int length, const float (&m)[LOT],
                                              const float (&v)[LOT]) {
    uint32_t m_most = 0, v_most = 0; /* the order of magnitudes is the order of their bits */
    for (int i = 0; i < length; i++) {
        const uint32_t m_bits = sw_f32_bits(m[i]) & 0x7FFFFFFFu;
        const uint32_t v_bits = sw_f32_bits(v[i]) & 0x7FFFFFFFu;
        m_most = m_bits > m_most ? m_bits : m_most;
        v_most = v_bits > v_most ? v_bits : v_most;
    }
    const float m_top = sw_f32_from_bits(warp_most(m_most));
    const float v_top = sw_f32_from_bits(warp_most(v_most));
    if (length <= 0) return;
    const float m_inverse = m_top > 0 ? SW_8BIT_TOP / m_top : 0;
    const float v_inverse = v_top > 0 ? SW_8BIT_TOP / v_top : 0;
    const uint32_t index = (uint32_t)(c.first + at);
    uint8_t m8[LOT], v8[LOT];
#pragma unroll
    for (int i = 0; i < LOT; i++) {
        const uint32_t random = sw_8bit_hash(seed, index + (uint32_t)i);
        const uint32_t sign = sw_f32_bits(m[i]) >> 31;
        const float magnitude = sw_f32_from_bits(sw_f32_bits(m[i]) & 0x7FFFFFFFu) * m_inverse;
        const uint32_t m_code = sw_8bit_code(magnitude, SW_M8_EXPONENT, 127, random & 0xFFFFu);
        const uint32_t v_code = sw_8bit_code(v[i] * v_inverse, SW_V8_EXPONENT, 255, random >> 16);
        m8[i] = (uint8_t)(sign << 7 | m_code);
        v8[i] = (uint8_t)(v_code | ((v_code == 0) & (v[i] > 0)));
    }
    store_codes(c.momentum_codes, at, m8, length, c.wide_codes);
    store_codes(c.variance_codes, at, v8, length, c.wide_codes);
    if (at % BLOCK != 0) return;
    c.momentum_scales[at / BLOCK] = m_top / SW_8BIT_TOP;
    c.variance_scales[at / BLOCK] = v_top / SW_8BIT_TOP;
}

__device__ __forceinline__ void load_masters(const chunk &c, uint64_t at, int length,
                                             float (&p)[LOT]) {
    if (c.master) {
        load_lot<SW_FP32>(p, c.master, at, length, c.wide);
        return;
    }
    uint16_t half[LOT], remainder[LOT];
    load_halves(half, c.half, at, length, c.wide);
    load_halves(remainder, c.remainder, at, length, c.wide);
#pragma unroll
    for (int i = 0; i < LOT; i++) p[i] = sw_f32_from_split(half[i], (int16_t)remainder[i]);
}

/* The masters, and what is emitted: rounded with ties away from zero, as all working weights. */
__device__ __forceinline__ void store_masters(const chunk &c, uint64_t at, int length,
                                              const float (&p)[LOT]) {
    uint16_t half[LOT], remainder[LOT];
#pragma unroll
    for (int i = 0; i < LOT; i++) {
        half[i] = sw_bf16_from_weight(p[i]);
        remainder[i] = (uint16_t)sw_remainder_from_f32(p[i], half[i]);
    }
    if (c.master) {
        store_lot<SW_FP32>(c.master, at, p, length, c.wide);
    } else {
        store_halves(c.half, at, half, length, c.wide);
        store_halves(c.remainder, at, remainder, length, c.wide);
    }
    if (!c.weight) return;
    if (c.weight_dtype == SW_BF16)
        store_halves(static_cast<uint16_t *>(c.weight), at, half, length, c.wide);
    else
        store_lot<SW_FP32>(c.weight, at, p, length, c.wide);
}

template <bool CODED>
__global__ void __launch_bounds__(THREADS)
    update(const struct sw_device_adam_step *scalars, const chunk c, const ranges r) {
    const struct sw_device_adam_step step = *scalars;
    if (!step.apply) return;
    const uint64_t lot = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
    const uint64_t at = c.begin + lot * LOT;
    const int length = at < c.end ? lot_length(at, c.end) : 0;
    if (!CODED && length == 0) return;
    float g[LOT], p[LOT], m[LOT] = {}, v[LOT] = {};
    if (length > 0) {
        if (c.grad_dtype == SW_BF16)
            load_lot<SW_BF16>(g, c.grad, at, length, c.wide);
        else
            load_lot<SW_FP32>(g, c.grad, at, length, c.wide);
        load_masters(c, at, length, p);
        if (CODED) {
            load_moments(c, at, length, m, v);
        } else {
            load_lot<SW_FP32>(m, c.momentum, at, length, c.wide);
            load_lot<SW_FP32>(v, c.variance, at, length, c.wide);
        }
#pragma unroll
        for (int i = 0; i < LOT; i++) {
            const float decay = decays(r, at + (uint64_t)i - c.begin) ? step.decay_factor : 1.0f;
            const float scaled = g[i] * step.grad_scale;
            m[i] = step.beta1 * m[i] + step.one_minus_beta1 * scaled;
            v[i] = step.beta2 * v[i] + (step.one_minus_beta2 * scaled) * scaled;
            const float root = sqrtf(v[i]) * step.rsqrt_bias2 + step.eps;
            p[i] = p[i] * decay - step.step_size * (m[i] / root);
        }
        store_masters(c, at, length, p);
        if (!CODED) {
            store_lot<SW_FP32>(c.momentum, at, m, length, c.wide);
            store_lot<SW_FP32>(c.variance, at, v, length, c.wide);
        }
    }
    if (CODED) store_moments(c, step.seed, at, length, m, v);
}

/* The record's parts, as cpu_adam/adam.h lays them. */
chunk map(const struct sw_device_adam_chunk *from) {
    const uint64_t n = from->count, blocks = (n + BLOCK - 1) / BLOCK;
    char *at = static_cast<char *>(from->record);
    chunk c = {};
    if (from->split_master) {
        c.half = reinterpret_cast<sw_bf16 *>(at);
        c.remainder = reinterpret_cast<uint16_t *>(at + n * sizeof(sw_bf16));
    } else {
        c.master = reinterpret_cast<float *>(at);
    }
    at += n * sizeof(float);
    if (from->coded_moments) {
        c.momentum_scales = reinterpret_cast<float *>(at);
        c.variance_scales = c.momentum_scales + blocks;
        c.momentum_codes = reinterpret_cast<uint8_t *>(c.variance_scales + blocks);
        c.variance_codes = c.momentum_codes + n;
    } else {
        c.momentum = reinterpret_cast<float *>(at);
        c.variance = c.momentum + n;
    }
    c.grad = from->grad;
    c.weight = from->weight;
    c.first = from->first;
    c.grad_dtype = from->grad_dtype;
    c.weight_dtype = from->weight_dtype;
    c.wide = all_wide(c.master, c.half, c.remainder, c.momentum, c.variance,
                      static_cast<const char *>(c.grad), static_cast<const char *>(c.weight));
    c.wide_codes = ((reinterpret_cast<uintptr_t>(c.momentum_codes) |
                     reinterpret_cast<uintptr_t>(c.variance_codes)) &
                    7) == 0;
    return c;
}

/* Ranges of [begin, ...) as far as fit, in whole blocks; returns where they end. */
uint64_t take_ranges(ranges *r, const struct sw_device_adam_chunk *from, uint64_t begin) {
    const uint64_t most = from->count - begin < SPAN_MAX ? from->count : begin + SPAN_MAX;
    uint64_t end = begin;
    r->count = 0;
    for (int i = 0; i < from->range_count && end < most && r->count < RANGES_MAX; i++) {
        const uint64_t to = from->ranges[i].end < most ? from->ranges[i].end : most;
        if (to <= end) continue;
        r->end[r->count++] = (uint32_t)(to - begin) | (from->ranges[i].decays ? DECAYS : 0u);
        end = to;
    }
    return end == from->count ? end : begin + (end - begin) / BLOCK * BLOCK;
}
} // namespace

cudaError_t sw_cuda_adam(cudaStream_t s, const struct sw_device_adam_step *step,
                         const struct sw_device_adam_chunk *from) {
    chunk c = map(from);
    for (uint64_t begin = 0; begin < from->count; begin = c.end) {
        ranges r = {};
        c.begin = begin;
        c.end = take_ranges(&r, from, begin);
        const uint64_t lots = (c.end - begin + LOT - 1) / LOT;
        const unsigned blocks = (unsigned)((lots + THREADS - 1) / THREADS);
        if (from->coded_moments)
            GPU_LAUNCH((update<true>), blocks, THREADS, 0, s, step, c, r);
        else
            GPU_LAUNCH((update<false>), blocks, THREADS, 0, s, step, c, r);
    }
    return cudaGetLastError();
}
