/* engine/import.h - an exported optimizer (engine/export.h), opened to be read.
 *
 * Files are mapped and every tensor of the model is found in them, three times, with its shape,
 * before anything is used. Read-only after open, any thread. Errors: 0 or -errno, reported. */
#ifndef ENGINE_IMPORT_H
#define ENGINE_IMPORT_H
#include <stdint.h>
#include "engine/export.h"
#include "engine/identity.h"
#include "engine/model.h"
#include "engine/tensor_folder.h"

struct sw_import {
    const char *dir; /* the caller's */
    char run[24];    /* that was exported; "": none is named */
    uint64_t step, updates, skips_in_a_row;
    char model[64], data[64]; /* fingerprints, as a commit's identity has them */
    uint64_t step_rows, seed;
    uint32_t seq_len;
    enum sw_order order;
    struct sw_tensor_folder folder;
    struct sw_weight (*places[SW_EXPORT_PARTS])[SW_TENSORS_PER_UNIT_MAX]; /* [unit][tensor] */
    uint64_t moments, rounded; /* taken so far; of these changed by 8-bit codes */
};

int sw_import_open(struct sw_import *import, const struct sw_model *model, const char *dir);
void sw_import_close(struct sw_import *import); /* NULL and an all-zero struct are fine */

#endif
