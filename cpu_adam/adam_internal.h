/* cpu_adam/adam_internal.h - a chunk's state as the streams of memory it consists of, in the order
 * of its record. */
#ifndef CPU_ADAM_ADAM_INTERNAL_H
#define CPU_ADAM_ADAM_INTERNAL_H
#include "cpu_adam/adam.h"

enum { SW_ADAM_STREAMS_MAX = 6 };

struct sw_adam_stream {
    char *base;
    uint64_t item_bytes;
    int per_block; /* an item per SW_ADAM_BLOCK elements instead of one per element */
};

/* Fills out; returns how many. */
int sw_adam_streams(const struct sw_adam_chunk *chunk,
                    struct sw_adam_stream out[SW_ADAM_STREAMS_MAX]);

/* The item of element `first`, a multiple of SW_ADAM_BLOCK in a stream per block. */
static inline char *sw_adam_stream_at(const struct sw_adam_stream *s, uint64_t first) {
    return s->base + (s->per_block ? first / SW_ADAM_BLOCK : first) * s->item_bytes;
}

/* Bytes of elements [first, end), first as above. */
static inline uint64_t sw_adam_stream_bytes(const struct sw_adam_stream *s, uint64_t first,
                                            uint64_t end) {
    const uint64_t items = s->per_block
                               ? (end + SW_ADAM_BLOCK - 1) / SW_ADAM_BLOCK - first / SW_ADAM_BLOCK
                               : end - first;
    return end > first ? items * s->item_bytes : 0;
}

#endif
