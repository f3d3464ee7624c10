/* engine/export.c - reads the records of all ranks (export_store.h) and writes each value to its
 * place in the files.
 *
 * A record holds master, momentum and variance of a piece of a rank's shard; the files are ordered
 * by tensor. All files are open at once and written in pieces, so that every record is read, and
 * its checksum compared, once. */
#include "engine/export.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/log.h"
#include "base/size.h"
#include "engine/export_store.h"
#include "engine/identity.h"
#include "engine/model_internal.h"
#include "engine/output.h"
#include "engine/shards.h"

enum { PIECE = 1 << 16 };

struct export {
    const struct sw_export_options *options;
    const struct sw_export_hooks *hooks;

    struct sw_model model;
    struct sw_export_store store;
    char *record;
    float *values[SW_EXPORT_PARTS]; /* PIECE of each */

    struct sw_safetensors_entry *entries; /* SW_EXPORT_PARTS for each tensor */
    char(*names)[SW_EXPORT_NAME_MAX];
    uint64_t *entry_first; /* byte in the data of its file */
    uint32_t entry_count;
    uint32_t(*entry_of)[SW_TENSORS_PER_UNIT_MAX]; /* [unit][tensor]: of its master */
    struct sw_shards shards;
    struct sw_safetensors_writer *writers; /* by shard */
    uint32_t writer_count;
    char run[24], origin[SW_EXPORT_ORIGIN_BYTES];
    struct sw_new_files files; /* optimizer.json is the last */
    int made;                  /* the folder was */
    uint64_t done_bytes;
};

void sw_export_name(int part, const char *tensor, char name[SW_EXPORT_NAME_MAX]) {
    static const char *const parts[SW_EXPORT_PARTS] = {"master", "momentum", "variance"};
    snprintf(name, SW_EXPORT_NAME_MAX, "%s.%s", parts[part], tensor);
}

void sw_export_defaults(struct sw_export_options *options) {
    *options = (struct sw_export_options){.file_bytes_max = SW_SHARD_BYTES_MAX};
}

/* ---- the files ---- */

/* Three entries for each whole tensor, whose pieces lie in units that follow each other. */
static int list_tensors(struct export *x) {
    const struct sw_model *m = &x->model;
    uint32_t most = 0;
    for (uint32_t u = 0; u < m->unit_count; u++) most += SW_EXPORT_PARTS * m->units[u].tensor_count;
    x->entries = calloc(most, sizeof(*x->entries));
    x->names = calloc(most, sizeof(*x->names));
    x->entry_first = calloc(most, sizeof(*x->entry_first));
    x->entry_of = calloc(m->unit_count, sizeof(*x->entry_of));
    if (!x->entries || !x->names || !x->entry_first || !x->entry_of) return -ENOMEM;
    for (uint32_t u = 0; u < m->unit_count; u++)
        for (uint32_t i = 0; i < m->units[u].tensor_count; i++) {
            const struct sw_tensor *tensor = &m->units[u].tensors[i];
            if (tensor->frozen) continue;
            for (int part = 0; part < SW_EXPORT_PARTS && tensor->source_first == 0; part++) {
                const uint32_t e = x->entry_count++;
                sw_export_name(part, tensor->name, x->names[e]);
                x->entries[e] = (struct sw_safetensors_entry){
                    x->names[e], sw_model_source_rows(m, u, i), tensor->cols};
            }
            x->entry_of[u][i] = x->entry_count - SW_EXPORT_PARTS;
        }
    return sw_shards_open(&x->shards, SW_EXPORT_STEM, x->entries, x->entry_count, SW_FP32,
                          x->options->file_bytes_max);
}

static int create_shard(struct export *x, uint32_t shard, uint32_t first, uint32_t count) {
    char name[SW_NEW_FILE_NAME_BYTES];
    sw_shards_name(&x->shards, shard, name);
    char *path = sw_new_files_path(&x->files, name);
    if (!path) return -ENOMEM;
    const int ret = sw_safetensors_create(&x->writers[shard], path, x->entries + first, count,
                                          SW_FP32, x->origin);
    free(path);
    if (ret < 0) return ret;
    x->writer_count++;
    sw_new_files_add(&x->files, name);
    uint64_t at = 0;
    for (uint32_t e = first; e < first + count; e++) {
        x->entry_first[e] = at;
        at += sw_entry_bytes(&x->entries[e], SW_FP32);
    }
    return 0;
}

static int create_files(struct export *x) {
    const struct sw_commit *commit = sw_export_store_commit(&x->store);
    snprintf(x->run, sizeof(x->run), "%016llx", (unsigned long long)commit->run);
    snprintf(x->origin, sizeof(x->origin), SW_EXPORT_ORIGIN_FORMAT, x->run,
             (unsigned long long)commit->step);
    int ret = list_tensors(x);
    if (ret < 0) return ret;
    x->writers = calloc(x->shards.count, sizeof(*x->writers));
    if (!x->writers) return -ENOMEM;
    ret = sw_output_make_empty("export", x->options->to, &x->made);
    if (ret == 0) ret = sw_new_files_open(&x->files, x->options->to, x->shards.count + 2);
    uint32_t first = 0;
    for (uint32_t shard = 0; shard < x->shards.count && ret == 0; shard++) {
        uint32_t end = first;
        while (end < x->entry_count && x->shards.of[end] == shard) end++;
        ret = create_shard(x, shard, first, end - first);
        first = end;
    }
    return ret;
}

/* Elements [at, at + count) of a unit; what is between tensors and behind the last is left out. */
static int write_values(struct export *x, uint32_t unit, uint64_t at, uint64_t count) {
    const struct sw_unit *u = &x->model.units[unit];
    int ret = 0;
    for (uint32_t i = 0; i < u->tensor_count; i++) {
        const struct sw_tensor *tensor = &u->tensors[i];
        const uint64_t ends = tensor->first + tensor->count, end = at + count;
        if (tensor->frozen || ends <= at || tensor->first >= end) continue;
        const uint64_t from = tensor->first > at ? tensor->first : at, to = ends < end ? ends : end;
        const uint64_t place = tensor->source_first + (from - tensor->first);
        for (uint32_t part = 0; part < SW_EXPORT_PARTS && ret == 0; part++) {
            const uint32_t e = x->entry_of[unit][i] + part;
            ret = sw_safetensors_write_at(
                &x->writers[x->shards.of[e]], x->entry_first[e] + place * sizeof(float),
                x->values[part] + (from - at), (to - from) * sizeof(float));
            x->done_bytes += (to - from) * sizeof(float);
        }
    }
    return ret;
}

/* ---- records ---- */

/* A virgin chunk's state is the model's weights and moments of zero. */
static void take_values(struct export *x, uint32_t c, int virgin, uint64_t at, uint64_t first,
                        uint64_t count) {
    const struct sw_chunk *placed = &x->store.placement.chunks[c];
    if (virgin) {
        sw_model_read_places(&x->model, x->model.weights->places, placed->unit, at, count,
                             x->values[0]);
        for (int part = 1; part < SW_EXPORT_PARTS; part++)
            memset(x->values[part], 0, count * sizeof(float));
        return;
    }
    struct sw_adam_chunk chunk = {.format = x->store.format, .count = placed->count};
    sw_adam_record_map(&chunk, x->record);
    sw_adam_read(&chunk, first, count, x->values[0], x->values[1], x->values[2]);
}

static int export_chunk(struct export *x, uint32_t c, uint32_t shard) {
    struct sw_export_store *store = &x->store;
    const struct sw_chunk *chunk = &store->placement.chunks[c];
    const uint64_t begin = shard * store->trained_elements[chunk->unit] + chunk->first;
    const int virgin =
        sw_export_store_read(store, c, shard, x->model.units[chunk->unit].name, x->record);
    int ret = virgin < 0 ? virgin : 0;
    for (uint64_t first = 0; first < chunk->count && ret == 0; first += PIECE) {
        const uint64_t left = chunk->count - first, count = left < PIECE ? left : PIECE;
        take_values(x, c, virgin, begin + first, first, count);
        ret = write_values(x, chunk->unit, begin + first, count);
    }
    return ret;
}

/* Of one process after the other, and chunk by chunk within: as they lie on the drives. */
static int export_part(struct export *x, uint32_t part) {
    const struct sw_export_store *store = &x->store;
    const struct sw_export_hooks *hooks = x->hooks;
    for (uint32_t c = 0; c < store->placement.chunk_count; c++)
        for (uint32_t rank = 0; rank < store->ranks && !store->placement.chunks[c].frozen; rank++) {
            const int ret = export_chunk(x, c, part * store->ranks + rank);
            if (ret < 0) return ret;
            if (hooks->on_progress)
                hooks->on_progress(hooks->ctx, x->done_bytes, x->shards.total_bytes);
            if (hooks->stop && atomic_load(hooks->stop)) return 1;
        }
    return 0;
}

static int export_chunks(struct export *x) {
    const struct sw_placement *p = &x->store.placement;
    uint64_t largest = 0;
    for (uint32_t c = 0; c < p->chunk_count; c++)
        if (p->chunks[c].record_bytes > largest) largest = p->chunks[c].record_bytes;
    x->record = aligned_alloc(SW_NVME_ALIGN_BYTES, largest);
    for (int part = 0; part < SW_EXPORT_PARTS; part++) {
        x->values[part] = malloc(PIECE * sizeof(float));
        if (!x->values[part]) return -ENOMEM;
    }
    if (!x->record) return -ENOMEM;
    int ret = 0;
    for (uint32_t part = 0; part < x->store.part_count && ret == 0; part++)
        ret = export_part(x, part);
    return ret;
}

/* ---- optimizer.json ---- */

static json_t *line_json(const struct sw_commit *commit, const char *name) {
    const char *value = sw_commit_value(commit->identity, name, (int)strlen(name));
    return json_stringn(value, strcspn(value, "\n"));
}

static json_t *options_json(const struct sw_identity *id) {
    const struct sw_numerics *n = &id->numerics;
    return json_pack("{s:I,s:I,s:I,s:s,s:s,s:s,s:s,s:s,s:I,s:s*}", "ranks", (json_int_t)n->ranks,
                     "micro_batch", (json_int_t)n->micro_batch, "accumulate",
                     (json_int_t)n->accumulate, "dtype", sw_dtype_name(n->dtype), "reduce_dtype",
                     sw_dtype_name(n->reduce_dtype), "grad_dtype", sw_dtype_name(n->grad_dtype),
                     "master", sw_master_name(id->master), "moments", sw_moments_name(n->moments),
                     "chunk", (json_int_t)id->chunk_bytes, "freeze",
                     *id->freeze ? id->freeze : NULL);
}

static json_t *state_json(const struct export *x) {
    const struct sw_identity *id = &x->store.id;
    const struct sw_commit *commit = sw_export_store_commit(&x->store);
    const uint64_t rows = sw_identity_step_rows(id);
    json_t *data = json_pack("{s:o,s:I,s:I,s:I,s:s,s:I}", "fingerprint", line_json(commit, "data"),
                             "rows_taken", (json_int_t)(commit->step * rows), "rows_per_step",
                             (json_int_t)rows, "seq_len", (json_int_t)id->numerics.seq_len, "order",
                             sw_order_name(id->order), "seed", (json_int_t)id->seed);
    json_t *model = json_pack("{s:o,s:I}", "fingerprint", line_json(commit, "model"), "parameters",
                              (json_int_t)id->params);
    return json_pack("{s:i,s:s,s:I,s:I,s:I,s:o,s:o,s:s,s:o}", "schema", 1, "run", x->run, "step",
                     (json_int_t)commit->step, "updates", (json_int_t)commit->updates,
                     "skips_in_a_row", (json_int_t)commit->skips_in_a_row, "data", data, "model",
                     model, "numerics_key", id->key, "options", options_json(id));
}

static int publish(struct export *x) {
    int ret = 0;
    for (; x->writer_count > 0 && ret == 0; x->writer_count--)
        ret = sw_safetensors_finish(&x->writers[x->writer_count - 1]);
    if (ret == 0) ret = sw_shards_write_index(&x->shards, &x->files, SW_EXPORT_INDEX);
    json_t *state = state_json(x);
    if (ret == 0)
        ret = state ? sw_new_files_write_json(&x->files, SW_EXPORT_STATE, state) : -ENOMEM;
    json_decref(state);
    const uint32_t last = x->files.count - 1;
    if (ret == 0) ret = sw_new_files_rename(&x->files, 0, last);
    if (ret == 0) ret = sw_new_files_sync(&x->files);
    if (ret == 0) ret = sw_new_files_rename(&x->files, last, last + 1);
    return ret < 0 ? ret : sw_new_files_sync(&x->files);
}

/* ---- the whole ---- */

static void close_export(struct export *x, int failed) {
    for (uint32_t i = 0; i < x->writer_count; i++) sw_safetensors_abort(&x->writers[i]);
    if (failed) sw_new_files_drop(&x->files);
    if (failed && x->made) rmdir(x->options->to);
    sw_new_files_close(&x->files);
    sw_shards_close(&x->shards);
    sw_export_store_close(&x->store);
    sw_model_close(&x->model);
    void *const blocks[] = {x->writers, x->entries,   x->names,     x->entry_first, x->entry_of,
                            x->record,  x->values[0], x->values[1], x->values[2]};
    for (size_t i = 0; i < sizeof(blocks) / sizeof(blocks[0]); i++) free(blocks[i]);
}

int sw_export(const struct sw_export_options *options, const struct sw_export_hooks *hooks,
              struct sw_export_report *report) {
    assert(options && options->model && options->from && options->to && hooks && report);
    struct export x = {.options = options, .hooks = hooks};
    int ret = sw_export_store_find(&x.store, options->nvme_count ? options->nvme : &options->from,
                                   options->nvme_count ? options->nvme_count : 1);
    if (ret == 0) ret = sw_model_open(&x.model, options->model);
    if (ret == 0) ret = sw_export_store_open(&x.store, &x.model);
    if (ret == 0) ret = create_files(&x);
    if (ret == 0) ret = export_chunks(&x);
    if (ret == 0) ret = publish(&x);
    if (ret == -ENOMEM) sw_error("export: no memory");
    if (ret == 0)
        *report =
            (struct sw_export_report){sw_export_store_commit(&x.store)->step,
                                      x.model.trained_params, x.shards.total_bytes, x.shards.count};
    close_export(&x, ret != 0);
    return ret;
}
