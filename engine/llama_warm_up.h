/* engine/llama_warm_up.h - every matrix product of a step, made once before the first step.
 *
 * A library of matrix products loads what a shape needs, and chooses how to compute it, at the
 * first product of that shape, which takes memory and waits for the device. */
#ifndef ENGINE_LLAMA_WARM_UP_H
#define ENGINE_LLAMA_WARM_UP_H
#include "engine/llama.h"

/* Makes one product of each shape that the model's units have in micro-batches of batch x time,
 * forward, backward and recomputed, with whole and divided heads; accumulates: over micro-batches,
 * too. Of memory that is taken for that and given back. Where there is not even room for the
 * largest of them nothing is made: such a run is refused by its sizes. Waits for the stream. 0, or
 * -errno, reported by the device, or -ENOMEM. */
int sw_llama_warm_up(const struct sw_model *model, const struct sw_device_handle *device,
                     enum sw_dtype dtype, uint64_t batch, uint64_t time, int accumulates,
                     struct sw_stream *stream);

#endif
