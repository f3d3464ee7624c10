/* engine/identity.h - what a run is, as the lines of text that its commits carry.
 *
 * Here alone is known how that text is written and read. A resume compares it line by line
 * (sw_commit_differs); an export reads from it how the store's records were laid out. */
#ifndef ENGINE_IDENTITY_H
#define ENGINE_IDENTITY_H
#include <stdint.h>
#include "base/bf16.h"
#include "cpu_adam/adam.h"
#include "engine/data.h"
#include "engine/model.h"

enum { SW_NUMERICS_KEY_BYTES = 512, SW_FREEZE_BYTES = 384 };

/* All that may change a bit of the result. */
struct sw_numerics {
    uint32_t ranks, micro_batch, accumulate, seq_len;
    uint32_t replicas; /* of every shard */
    enum sw_dtype dtype, reduce_dtype, grad_dtype;
    enum sw_adam_moments moments;
    uint64_t head_slice;
    uint32_t vocabulary_parts;
};

struct sw_identity {
    uint64_t model[2]; /* of its files' form, and of values in them */
    uint64_t params;
    uint32_t units;
    char freeze[SW_FREEZE_BYTES]; /* patterns as sw_model_freeze() takes them; "": none */
    uint64_t data;                /* tokens, mask and documents */
    enum sw_order order;
    uint64_t seed;
    uint64_t chunk_bytes;
    enum sw_adam_master master;
    uint32_t folders;
    struct sw_numerics numerics;
    char key[SW_NUMERICS_KEY_BYTES]; /* the numerics as text, with the operators' own */
};

/* Rows that a step takes from the data. */
static inline uint64_t sw_identity_step_rows(const struct sw_identity *id) {
    return (uint64_t)id->numerics.ranks * id->numerics.micro_batch * id->numerics.accumulate;
}

/* Hashes of a model, opened with its weights: what `model` above is. */
void sw_identity_of_model(const struct sw_model *model, uint64_t hashes[2]);

/* Writes the numerics key. operators: the library's own text; no_compute: it was left out. */
void sw_identity_write_key(struct sw_identity *id, const char *operators, int no_compute);

void sw_identity_write(const struct sw_identity *id, char *out, uint32_t out_bytes);

/* Reads what sw_identity_write() wrote; `where` is named in the error. 0, or -EINVAL, reported. */
int sw_identity_parse(struct sw_identity *id, const char *text, const char *where);

/* Names as options have them. */
const char *sw_order_name(enum sw_order order);
const char *sw_master_name(enum sw_adam_master master);
const char *sw_moments_name(enum sw_adam_moments moments);

#endif
