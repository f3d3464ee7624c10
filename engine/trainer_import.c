/* engine/trainer_import.c - a run that begins with an exported optimizer.
 *
 * Records are made from its values while the run loads, in whatever layout this run has; the first
 * commit follows at once where the run commits at all, and from then on its store is like any
 * other. */
#include "engine/trainer_internal.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include "base/log.h"
#include "engine/model_internal.h"

/* ---- whether it is this run's ---- */

/* A fingerprint of the export's run and this one's. */
static int check_line(const struct sw_trainer *t, const char *name, const char *theirs,
                      const char *remedy) {
    const char *ours = sw_commit_value(t->identity, name, (int)strlen(name));
    const size_t length = strcspn(ours, "\n");
    if (strlen(theirs) == length && !strncmp(ours, theirs, length)) return 0;
    sw_error("--import %s: it is of a run with another %s: %s, and this run's is %.*s; %s",
             t->import->dir, name, theirs, (int)length, ours, remedy);
    return -EINVAL;
}

/* The data goes on where it was: the same rows in the same order, as many for each step. */
static int check_rows(const struct sw_trainer *t) {
    const struct sw_import *im = t->import;
    const struct sw_train_options *o = &t->options;
    if (im->order != o->order || im->seed != o->seed) {
        sw_error("--import %s: its run took its rows in --order %s with --seed %" PRIu64
                 ", and this one --order %s with --seed %" PRIu64 ": give the former",
                 im->dir, sw_order_name(im->order), im->seed, sw_order_name(o->order), o->seed);
        return -EINVAL;
    }
    if (im->seq_len != o->seq_len) {
        sw_error("--import %s: its run had --seq-len %u and this one has %u: give the former",
                 im->dir, im->seq_len, o->seq_len);
        return -EINVAL;
    }
    if (im->step_rows == t->step_rows) return 0;
    sw_error("--import %s: its run took %" PRIu64 " rows for each step and this one takes %" PRIu64
             " (--ranks %u x --micro-batch %u x --accumulate %u): they must be as many",
             im->dir, im->step_rows, t->step_rows, o->ranks, o->micro_batch, o->accumulate);
    return -EINVAL;
}

static int check_import(const struct sw_trainer *t) {
    int ret = check_line(t, "model", t->import->model,
                         "--model names the folder that the exported run began from");
    if (ret == 0)
        ret = check_line(t, "data", t->import->data,
                         "give the --data, --mask and --documents of the exported run");
    if (ret == 0) ret = check_rows(t);
    if (ret < 0 || t->import->step <= t->options.steps) return ret;
    sw_error("--import %s: it is at step %" PRIu64 ", beyond --steps %" PRIu64
             ", which counts from the first run's first step",
             t->import->dir, t->import->step, t->options.steps);
    return -EINVAL;
}

int sw_trainer_open_import(struct sw_trainer *t) {
    if (!t->options.import_dir || t->resuming || t->done_before) return 0;
    struct sw_import *im = calloc(1, sizeof(*im));
    if (!im) return -ENOMEM;
    int ret = sw_import_open(im, &t->model, t->options.import_dir);
    if (ret < 0) {
        free(im);
        return ret;
    }
    t->import = im;
    return check_import(t);
}

void sw_trainer_close_import(struct sw_trainer *t) {
    sw_import_close(t->import);
    free(t->import);
    t->import = NULL;
}

/* ---- records ---- */

/* Nothing of a value that this run's form cannot hold is guessed. */
static int refuse(const struct sw_rank *r, uint32_t c, uint64_t first, uint64_t count) {
    const struct sw_trainer *t = r->t;
    const struct sw_chunk *chunk = &t->placement.chunks[c];
    const uint64_t at = sw_chunk_begin(r, chunk) + first;
    sw_error("--import %s: a value of %s, elements %" PRIu64 " to %" PRIu64
             ", is negative where it is a variance, or not finite where --master %s and --moments "
             "%s have no such value",
             t->import->dir, t->model.units[chunk->unit].name, at, at + count - 1,
             sw_master_name(t->options.master), sw_moments_name(t->options.moments));
    return -EINVAL;
}

int sw_trainer_import_chunk(struct sw_rank *r, uint32_t c, void *record) {
    enum { PIECE = 4 * SW_ADAM_BLOCK };
    struct sw_trainer *t = r->t;
    const struct sw_chunk *placed = &t->placement.chunks[c];
    const uint64_t begin = sw_chunk_begin(r, placed);
    float values[SW_EXPORT_PARTS][PIECE];
    struct sw_adam_chunk chunk;
    sw_trainer_map(r, c, record, &chunk);
    const uint64_t used = sw_adam_record_bytes(&chunk.format, chunk.count);
    memset((char *)record + used, 0, placed->record_bytes - used);
    for (uint64_t first = 0; first < chunk.count; first += PIECE) {
        const uint64_t left = chunk.count - first, count = left < PIECE ? left : PIECE;
        for (int part = 0; part < SW_EXPORT_PARTS; part++)
            sw_model_read_places(&t->model, t->import->places[part], placed->unit, begin + first,
                                 count, values[part]);
        const int64_t rounded =
            sw_adam_write(&chunk, first, count, values[0], values[1], values[2]);
        if (rounded < 0) return refuse(r, c, first, count);
        t->import->rounded += (uint64_t)rounded;
        t->import->moments += 2 * count;
    }
    if (placed->tier == SW_TIER_NVME) {
        const int ret = sw_trainer_write_record(r, c, record);
        if (ret < 0) return ret;
    }
    return sw_trainer_place_record(r, c, record);
}

int sw_trainer_end_import(struct sw_trainer *t) {
    struct sw_import *im = t->import;
    if (!im) return 0;
    if (t->options.moments == SW_MOMENTS_8BIT)
        sw_info("--import: 8-bit moments are coded anew, which rounds: %" PRIu64 " of %" PRIu64
                " values were changed",
                im->rounded, im->moments);
    t->updates = im->updates;
    t->skips_in_a_row = (uint32_t)im->skips_in_a_row;
    t->start_step = t->reported = im->step;
    sw_trainer_close_import(t);
    return sw_trainer_commit_idle(t, t->start_step);
}
