/* offload/stream.h - how fast memory can be: streams of the CPU Adam's mix with next to no
 * arithmetic. The best way of passing is the limit that the update is held to.
 *
 * A pass reads the gradient and the three states, writes the three back in place and, where asked,
 * the BF16 weight: the bytes of one update. It changes no value of the state, so that passes and
 * updates may take turns on the same memory. Threads: one caller per arrays. */
#ifndef OFFLOAD_STREAM_H
#define OFFLOAD_STREAM_H
#include <stdint.h>
#include "base/bf16.h"
#include "base/isa.h"

/* Which stores go around the caches: they spare a written line its read, and pay off for pure
 * output at most. */
enum sw_stream_stores { SW_STREAM_CACHED, SW_STREAM_WEIGHT_AROUND, SW_STREAM_ALL_AROUND };

/* One way of passing: lines are asked for prefetch_bytes ahead (0: not at all). */
struct sw_stream_way {
    const char *name;
    uint32_t prefetch_bytes;
    enum sw_stream_stores stores;
};

/* Every way that is tried; SW_STREAM_WAYS of them. */
enum { SW_STREAM_WAYS = 10 };
extern const struct sw_stream_way sw_stream_ways[SW_STREAM_WAYS];

/* Arrays of count elements, each 64-byte aligned. */
struct sw_stream_arrays {
    uint64_t count;
    float *master, *momentum, *variance;
    const void *grad; /* of grad_dtype */
    enum sw_dtype grad_dtype;
    sw_bf16 *weight; /* NULL: none */
};

/* One pass of `threads` (at least 1) OpenMP threads, split as sw_adam_update splits. */
void sw_stream_pass(enum sw_isa isa, const struct sw_stream_way *way,
                    const struct sw_stream_arrays *arrays, int threads);

/* Bytes that one element's update moves: what the program asks for, without the read of a line
 * that a cached store to pure output costs. */
uint64_t sw_stream_bytes(enum sw_dtype grad, int weight);

#endif
