/* offload/stream_isa.c - the passes of stream.h, compiled once per instruction set.
 *
 * The state is read as integers and each word XORed with the gradient's bits masked by `nothing`,
 * which is 0 at run time: every byte is read, used and written, and no value changes. Stores around
 * the caches fill a line from a copy in the first-level cache. */
#include "offload/stream_internal.h"

#include <emmintrin.h>

#define PASTE_(a, b)  a##_##b
#define PASTE(a, b)   PASTE_(a, b)
#define PART          PASTE(sw_stream_part, SW_ISA)
#define ALWAYS_INLINE static inline __attribute__((always_inline))

enum { TILE = 32, LINE_BYTES = 64 };

/* The widest vectors of the set. */
#if defined(__AVX512F__)
enum { VECTOR_BYTES = 64 };
#elif defined(__AVX2__)
enum { VECTOR_BYTES = 32 };
#else
enum { VECTOR_BYTES = 16 };
#endif
typedef uint32_t words __attribute__((vector_size(VECTOR_BYTES), may_alias));
typedef uint16_t halves __attribute__((vector_size(VECTOR_BYTES / 2), may_alias));
enum { WORDS = VECTOR_BYTES / 4 };

/* Constants at every call but prefetch_bytes: which loop this is. */
struct mix {
    enum sw_dtype grad;
    int weight;
    enum sw_stream_stores stores;
};

/* A tile: where it is read, and where its stores go. */
ALWAYS_INLINE void tile(const void *p, const void *m, const void *v, const void *g, void *p_out,
                        void *m_out, void *v_out, void *w_out, uint32_t nothing, struct mix mix) {
    for (int i = 0; i < TILE / WORDS; i++) {
        const words grad = mix.grad == SW_BF16
                               ? __builtin_convertvector(((const halves *)g)[i], words) << 16
                               : ((const words *)g)[i];
        const words x = grad & nothing, master = ((const words *)p)[i] ^ x;
        ((words *)p_out)[i] = master;
        ((words *)m_out)[i] = ((const words *)m)[i] ^ x;
        ((words *)v_out)[i] = ((const words *)v)[i] ^ x;
        if (mix.weight) ((halves *)w_out)[i] = __builtin_convertvector(master >> 16, halves);
    }
}

/* What is left of less than a tile. */
static void tail(const struct sw_stream_arrays *a, uint64_t first, uint64_t end) {
    for (uint64_t i = first; i < end && a->weight; i++)
        a->weight[i] = (sw_bf16)(sw_f32_bits(a->master[i]) >> 16);
}

ALWAYS_INLINE void around(void *to, const void *from, uint64_t bytes) {
    for (uint64_t b = 0; b < bytes; b += sizeof(__m128i))
        _mm_stream_si128((__m128i *)((char *)to + b),
                         _mm_load_si128((const __m128i *)((const char *)from + b)));
}

/* Asking for an address behind the array's end costs nothing. */
ALWAYS_INLINE void ask(const void *at, uint64_t bytes, uint64_t ahead) {
    for (uint64_t b = 0; b < bytes; b += LINE_BYTES)
        __builtin_prefetch((const char *)at + b + ahead, 0, 3);
}

ALWAYS_INLINE void pass(const struct sw_stream_arrays *a, uint64_t first, uint64_t end,
                        uint64_t ahead, uint32_t nothing, struct mix mix) {
    _Alignas(64) float copy[3][TILE];
    _Alignas(64) sw_bf16 copy16[TILE];
    const uint64_t grad_bytes = mix.grad == SW_BF16 ? 2 : 4;
    const int copied = mix.stores == SW_STREAM_ALL_AROUND;
    const int weight_copied = mix.weight && mix.stores != SW_STREAM_CACHED;
    uint64_t i = first;
    for (; i + TILE <= end; i += TILE) {
        float *p = a->master + i, *m = a->momentum + i, *v = a->variance + i;
        const char *g = (const char *)a->grad + i * grad_bytes;
        sw_bf16 *w = mix.weight ? a->weight + i : NULL;
        if (ahead) {
            ask(g, TILE * grad_bytes, ahead);
            ask(p, TILE * sizeof(*p), ahead);
            ask(m, TILE * sizeof(*m), ahead);
            ask(v, TILE * sizeof(*v), ahead);
            if (mix.weight && !weight_copied) ask(w, TILE * sizeof(*w), ahead);
        }
        tile(p, m, v, g, copied ? copy[0] : p, copied ? copy[1] : m, copied ? copy[2] : v,
             weight_copied ? copy16 : w, nothing, mix);
        if (copied) {
            around(p, copy[0], sizeof(copy[0]));
            around(m, copy[1], sizeof(copy[1]));
            around(v, copy[2], sizeof(copy[2]));
        }
        if (weight_copied) around(w, copy16, sizeof(copy16));
    }
    tail(a, i, end);
    if (mix.stores != SW_STREAM_CACHED) _mm_sfence();
}

#define LOOP(name, grad, weight, stores)                                                           \
    static void name(const struct sw_stream_arrays *a, uint64_t first, uint64_t end,               \
                     uint64_t ahead, uint32_t nothing) {                                           \
        pass(a, first, end, ahead, nothing, (struct mix){grad, weight, stores});                   \
    }
LOOP(bf16_cached, SW_BF16, 0, SW_STREAM_CACHED)
LOOP(bf16_all, SW_BF16, 0, SW_STREAM_ALL_AROUND)
LOOP(bf16_weight_cached, SW_BF16, 1, SW_STREAM_CACHED)
LOOP(bf16_weight_weight, SW_BF16, 1, SW_STREAM_WEIGHT_AROUND)
LOOP(bf16_weight_all, SW_BF16, 1, SW_STREAM_ALL_AROUND)
LOOP(fp32_cached, SW_FP32, 0, SW_STREAM_CACHED)
LOOP(fp32_all, SW_FP32, 0, SW_STREAM_ALL_AROUND)
LOOP(fp32_weight_cached, SW_FP32, 1, SW_STREAM_CACHED)
LOOP(fp32_weight_weight, SW_FP32, 1, SW_STREAM_WEIGHT_AROUND)
LOOP(fp32_weight_all, SW_FP32, 1, SW_STREAM_ALL_AROUND)

typedef void (*loop)(const struct sw_stream_arrays *a, uint64_t first, uint64_t end, uint64_t ahead,
                     uint32_t nothing);
/* By gradient, weight and stores; without a weight there is none to send around. */
static const loop loops[2][2][3] = {
    [SW_BF16] = {{bf16_cached, bf16_cached, bf16_all},
                 {bf16_weight_cached, bf16_weight_weight, bf16_weight_all}},
    [SW_FP32] = {{fp32_cached, fp32_cached, fp32_all},
                 {fp32_weight_cached, fp32_weight_weight, fp32_weight_all}},
};

void PART(const struct sw_stream_way *way, const struct sw_stream_arrays *arrays, uint64_t first,
          uint64_t end, uint32_t nothing) {
    if (first >= end) return;
    loops[arrays->grad_dtype][arrays->weight != NULL][way->stores](arrays, first, end,
                                                                   way->prefetch_bytes, nothing);
}
