/* engine/identity.c - writes and reads the identity of a run. */
#include "engine/identity.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/crc32c.h"
#include "base/log.h"
#include "nvme/commit.h"

const char *sw_order_name(enum sw_order order) {
    return order == SW_ORDER_SHUFFLE ? "shuffle" : "sequential";
}
const char *sw_master_name(enum sw_adam_master master) {
    return master == SW_MASTER_SPLIT ? "split" : "fp32";
}
const char *sw_moments_name(enum sw_adam_moments moments) {
    return moments == SW_MOMENTS_8BIT ? "8bit" : "fp32";
}

/* Values of every unit at 16 places: another training of the same shapes differs in some. */
static uint64_t weights_fingerprint(const struct sw_model *model) {
    enum { PLACES = 16, VALUES = 256 };
    float values[VALUES];
    uint32_t crc[2] = {0, 1};
    for (uint32_t u = 0; u < model->unit_count; u++) {
        const struct sw_unit *unit = &model->units[u];
        const uint64_t elements = unit->trained + unit->count - unit->frozen_first;
        for (uint64_t p = 0; p < PLACES; p++) {
            const uint64_t first = elements / PLACES * p;
            const uint64_t count = elements - first < VALUES ? elements - first : VALUES;
            sw_model_read_unfrozen(model, u, first, count, values);
            for (int i = 0; i < 2; i++) crc[i] = sw_crc32c(crc[i], values, count * sizeof(float));
        }
    }
    return (uint64_t)crc[0] << 32 | crc[1];
}

void sw_identity_of_model(const struct sw_model *model, uint64_t hashes[2]) {
    hashes[0] = sw_model_fingerprint(model);
    hashes[1] = weights_fingerprint(model);
}

/* ---- writing ---- */

#define FROZEN ", frozen "

void sw_identity_write_key(struct sw_identity *id, const char *operators, int no_compute) {
    const struct sw_numerics *n = &id->numerics;
    char replicas[24] = "";
    if (n->replicas > 1) snprintf(replicas, sizeof(replicas), " replicas=%u", n->replicas);
    snprintf(id->key, sizeof(id->key),
             "ranks=%u micro_batch=%u accumulate=%u seq_len=%u dtype=%s reduce_dtype=%s "
             "grad_dtype=%s moments=%s head_slice=%" PRIu64 " vocabulary_parts=%u%s operators=%s%s",
             n->ranks, n->micro_batch, n->accumulate, n->seq_len, sw_dtype_name(n->dtype),
             sw_dtype_name(n->reduce_dtype), sw_dtype_name(n->grad_dtype),
             sw_moments_name(n->moments), n->head_slice, n->vocabulary_parts, replicas, operators,
             no_compute ? ", left out (--sim-flops)" : "");
}

void sw_identity_write(const struct sw_identity *id, char *out, uint32_t out_bytes) {
    const char *frozen = *id->freeze ? FROZEN : "";
    snprintf(out, out_bytes,
             "model=%016" PRIx64 "-%016" PRIx64 "\n"
             "shapes=%" PRIu64 " parameters in %u units%s%s\n"
             "data=%016" PRIx64 "\n"
             "rows=order %s, seed %" PRIu64 "\n"
             "state=--chunk %" PRIu64 ", --master %s, %u folder%s\n"
             "numerics=%s\n",
             id->model[0], id->model[1], id->params, id->units, frozen, id->freeze, id->data,
             sw_order_name(id->order), id->seed, id->chunk_bytes, sw_master_name(id->master),
             id->folders, id->folders == 1 ? "" : "s", id->key);
}

/* ---- reading ---- */

enum { NAME_BYTES = 16 };

/* Which of two names a text is: 0, 1, or -1. */
static int which(const char *text, const char *first, const char *second) {
    return !strcmp(text, first) ? 0 : !strcmp(text, second) ? 1 : -1;
}

static int parse_dtype(const char *text, enum sw_dtype *out) {
    const int found = which(text, sw_dtype_name(SW_BF16), sw_dtype_name(SW_FP32));
    *out = found == 1 ? SW_FP32 : SW_BF16;
    return found >= 0;
}

static int parse_key(struct sw_numerics *n, const char *key) {
    char dtype[3][NAME_BYTES], moments[NAME_BYTES];
    const int fields =
        sscanf(key,
               "ranks=%u micro_batch=%u accumulate=%u seq_len=%u dtype=%15s reduce_dtype=%15s "
               "grad_dtype=%15s moments=%15s head_slice=%" SCNu64 " vocabulary_parts=%u",
               &n->ranks, &n->micro_batch, &n->accumulate, &n->seq_len, dtype[0], dtype[1],
               dtype[2], moments, &n->head_slice, &n->vocabulary_parts);
    const char *replicas = strstr(key, " replicas=");
    n->replicas = replicas ? (uint32_t)strtoul(replicas + strlen(" replicas="), NULL, 10) : 1;
    if (fields != 10 || !n->replicas || n->ranks % n->replicas || !n->ranks || !n->micro_batch ||
        !n->accumulate || !n->seq_len)
        return 0;
    const int form =
        which(moments, sw_moments_name(SW_MOMENTS_FP32), sw_moments_name(SW_MOMENTS_8BIT));
    n->moments = form == 1 ? SW_MOMENTS_8BIT : SW_MOMENTS_FP32;
    return form >= 0 && parse_dtype(dtype[0], &n->dtype) &&
           parse_dtype(dtype[1], &n->reduce_dtype) && parse_dtype(dtype[2], &n->grad_dtype);
}

static int parse_rows(struct sw_identity *id, const char *rows) {
    char order[NAME_BYTES];
    if (sscanf(rows, "order %15[a-z], seed %" SCNu64, order, &id->seed) != 2) return 0;
    const int found =
        which(order, sw_order_name(SW_ORDER_SHUFFLE), sw_order_name(SW_ORDER_SEQUENTIAL));
    id->order = found == 1 ? SW_ORDER_SEQUENTIAL : SW_ORDER_SHUFFLE;
    return found >= 0;
}

static int parse_shapes(struct sw_identity *id, const char *shapes) {
    int length = 0;
    if (sscanf(shapes, "%" SCNu64 " parameters in %u units%n", &id->params, &id->units, &length) !=
        2)
        return 0;
    const size_t rest = strcspn(shapes + length, "\n"), prefix = strlen(FROZEN);
    if (rest == 0) return 1;
    if (rest <= prefix || rest - prefix >= sizeof(id->freeze) ||
        strncmp(shapes + length, FROZEN, prefix) != 0)
        return 0;
    memcpy(id->freeze, shapes + length + prefix, rest - prefix);
    return 1;
}

static int parse_state(struct sw_identity *id, const char *state) {
    char master[NAME_BYTES];
    if (sscanf(state, "--chunk %" SCNu64 ", --master %15[a-z0-9], %u folder", &id->chunk_bytes,
               master, &id->folders) != 3)
        return 0;
    const int found =
        which(master, sw_master_name(SW_MASTER_FP32), sw_master_name(SW_MASTER_SPLIT));
    id->master = found == 1 ? SW_MASTER_SPLIT : SW_MASTER_FP32;
    return found >= 0;
}

static const char *value(const char *text, const char *name) {
    return sw_commit_value(text, name, (int)strlen(name));
}

int sw_identity_parse(struct sw_identity *id, const char *text, const char *where) {
    *id = (struct sw_identity){0};
    const char *key = value(text, "numerics"), *bad = NULL;
    snprintf(id->key, sizeof(id->key), "%.*s", (int)strcspn(key, "\n"), key);
    if (sscanf(value(text, "model"), "%16" SCNx64 "-%16" SCNx64, &id->model[0], &id->model[1]) != 2)
        bad = "model";
    else if (!parse_shapes(id, value(text, "shapes")))
        bad = "shapes";
    else if (sscanf(value(text, "data"), "%16" SCNx64, &id->data) != 1)
        bad = "data";
    else if (!parse_rows(id, value(text, "rows")))
        bad = "rows";
    else if (!parse_state(id, value(text, "state")))
        bad = "state";
    else if (!parse_key(&id->numerics, key))
        bad = "numerics";
    if (!bad) return 0;
    sw_error("%s: the commit's line '%s' cannot be read: it is of another version of this program",
             where, bad);
    return -EINVAL;
}
