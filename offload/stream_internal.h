/* offload/stream_internal.h - what each instruction set's build of stream_isa.c offers. */
#ifndef OFFLOAD_STREAM_INTERNAL_H
#define OFFLOAD_STREAM_INTERNAL_H
#include "offload/stream.h"

/* Elements [first, end) of the arrays; first a multiple of 32, so that lines are whole. `nothing`
 * is 0, which the compiler must not know. */
#define SW_STREAM_VARIANT(isa)                                                                     \
    void sw_stream_part_##isa(const struct sw_stream_way *way,                                     \
                              const struct sw_stream_arrays *arrays, uint64_t first, uint64_t end, \
                              uint32_t nothing)

SW_STREAM_VARIANT(scalar);
SW_STREAM_VARIANT(avx2);
SW_STREAM_VARIANT(avx512);

#endif
