/* offload/stream.c - the ways of passing, and the split over threads. */
#include "offload/stream.h"

#include <assert.h>
#include <omp.h>

#include "offload/stream_internal.h"

/* As the update's shares: long runs of whole pieces. */
enum { SHARE_ELEMENTS = 4096 };

const struct sw_stream_way sw_stream_ways[SW_STREAM_WAYS] = {
    {"plain", 0, SW_STREAM_CACHED},
    {"prefetch 512", 512, SW_STREAM_CACHED},
    {"prefetch 1024", 1024, SW_STREAM_CACHED},
    {"prefetch 2048", 2048, SW_STREAM_CACHED},
    {"weight around", 0, SW_STREAM_WEIGHT_AROUND},
    {"prefetch 512, weight around", 512, SW_STREAM_WEIGHT_AROUND},
    {"prefetch 1024, weight around", 1024, SW_STREAM_WEIGHT_AROUND},
    {"prefetch 2048, weight around", 2048, SW_STREAM_WEIGHT_AROUND},
    {"all around", 0, SW_STREAM_ALL_AROUND},
    {"prefetch 2048, all around", 2048, SW_STREAM_ALL_AROUND},
};

typedef void (*part)(const struct sw_stream_way *way, const struct sw_stream_arrays *arrays,
                     uint64_t first, uint64_t end, uint32_t nothing);
static const part parts[SW_ISA_COUNT] = {
    [SW_ISA_SCALAR] = sw_stream_part_scalar,
    [SW_ISA_AVX2] = sw_stream_part_avx2,
    [SW_ISA_AVX512] = sw_stream_part_avx512,
};

static int aligned(const void *p) {
    return (uintptr_t)p % 64 == 0;
}

void sw_stream_pass(enum sw_isa isa, const struct sw_stream_way *way,
                    const struct sw_stream_arrays *arrays, int threads) {
    assert(way && arrays && threads >= 1);
    assert(aligned(arrays->master) && aligned(arrays->momentum) && aligned(arrays->variance));
    assert(aligned(arrays->grad) && aligned(arrays->weight));
    static volatile uint32_t zero;
    const uint32_t nothing = zero;
    const uint64_t count = arrays->count;
    const uint64_t pieces = count / SHARE_ELEMENTS + (count % SHARE_ELEMENTS != 0);
    if ((uint64_t)threads > pieces) threads = pieces ? (int)pieces : 1;
#pragma omp parallel num_threads(threads)
    {
        const uint64_t team = (uint64_t)omp_get_num_threads();
        const uint64_t me = (uint64_t)omp_get_thread_num();
        const uint64_t first = pieces * me / team * SHARE_ELEMENTS;
        const uint64_t end = pieces * (me + 1) / team * SHARE_ELEMENTS;
        parts[isa](way, arrays, first, end < count ? end : count, nothing);
    }
}

uint64_t sw_stream_bytes(enum sw_dtype grad, int weight) {
    const uint64_t states = 3 * (sizeof(float) + sizeof(float)); /* read and written */
    return states + sw_dtype_bytes(grad) + (weight ? sizeof(sw_bf16) : 0);
}
