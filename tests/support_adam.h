/* Chunks of optimizer state for the tests of the CPU Adam: every format, every buffer between
 * guards, filled from a seed. */
#ifndef TESTS_SUPPORT_ADAM_H
#define TESTS_SUPPORT_ADAM_H
#include <stddef.h>
#include "cpu_adam/adam.h"

/* One of the combinations that have a loop of their own. */
struct adam_shape {
    struct sw_adam_format format;
    int emits, coupled;
};
enum { ADAM_SHAPES = 48, ADAM_COUNT_MAX = 5 * 4096 + 77 };
struct adam_shape adam_shape(int index);
const char *adam_shape_name(const struct adam_shape *shape); /* until the next call */

/* Buffers in one piece of memory, each with guards around it; the chunk points into it. Elements of
 * a seed are the same at every count and offset. */
enum { ADAM_PIECES_MAX = 8 };
struct adam_box {
    struct adam_shape shape;
    struct sw_adam_chunk chunk;
    struct sw_adam_range ranges[3];
    unsigned offset;
    unsigned char *memory;
    size_t bytes;
    struct {
        size_t at, bytes;
    } pieces[ADAM_PIECES_MAX];
    int piece_count;
};

/* offset: each buffer begins this many elements past an address that 64 divides. count is at most
 * ADAM_COUNT_MAX. The chunk has three ranges (decay, none, decay) and `first` of five blocks. */
void adam_box_init(struct adam_box *box, struct adam_shape shape, uint64_t count, unsigned offset,
                   uint64_t seed);
void adam_box_exit(struct adam_box *box);

/* Back to what adam_box_init() filled in. */
void adam_box_refill(struct adam_box *box, uint64_t seed);

/* sw_adam_update() of elements [first, end), a chunk of their own; fails the test when a guard has
 * changed. AddressSanitizer watches the guards behind each buffer as well. */
void adam_box_update(struct adam_box *box, const struct sw_adam_variant *variant,
                     const struct sw_adam_step *step, uint64_t first, uint64_t end, int threads,
                     struct sw_adam_extra *extra);

/* Fails the test, naming the place, unless the buffers of both hold the same bits. Two NaN count as
 * the same: which of two NaN operands passes its sign and payload on is the compiler's choice. */
void adam_box_same(const struct adam_box *want, const struct adam_box *got, const char *what);

/* The chunk of elements [first, end); first is a multiple of SW_ADAM_BLOCK where moments are coded.
 * ranges: room for three. */
struct sw_adam_chunk adam_part(const struct sw_adam_chunk *chunk, uint64_t first, uint64_t end,
                               struct sw_adam_range *ranges);

/* SPILLWAY_ISA forced to this set and picked: NULL where the CPU cannot run it. Fails the test if
 * another one was picked. */
const struct sw_adam_variant *adam_forced(enum sw_isa isa);

/* Numbers in [-1, 1), the same on every machine. */
void adam_seed(uint64_t seed);
uint32_t adam_random(void);
float adam_uniform(void);

/* lr 0.01 and the decay that makes their product 0.1. */
struct sw_adam_step adam_step(int coupled, uint64_t t, float grad_scale);

#endif
