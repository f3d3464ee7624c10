/* engine/export.c - reads a store record by record and writes each value to its place in the files.
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
#include "base/crc32c.h"
#include "base/log.h"
#include "base/size.h"
#include "engine/drives.h"
#include "engine/identity.h"
#include "engine/model_internal.h"
#include "engine/output.h"
#include "engine/shards.h"
#include "nvme/commit.h"
#include "nvme/nvme.h"
#include "offload/placement.h"

enum { PIECE = 1 << 16 };

struct export {
    const struct sw_export_options *options;
    const struct sw_export_hooks *hooks;
    const char *const *folders;
    uint32_t folder_count;

    struct sw_model model;
    struct sw_commit commit;
    struct sw_identity id;
    struct sw_adam_format format;
    uint64_t *shard_elements, *trained_elements; /* by unit */
    struct sw_placement placement;
    struct sw_nvme_store *store;
    struct sw_nvme_queue *queue;
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

/* ---- the store ---- */

static int read_commit(struct export *x) {
    struct sw_commit commit;
    const int found = sw_commit_read(x->folders[0], SW_STORE_NAME, &commit);
    if (found < 0) return found;
    if (found) {
        x->commit = commit;
        return 0;
    }
    sw_error(
        "export: no commit lies in %s: a run makes them with its optimizer on NVMe, or as "
        "--commit-every says, in the first folder of its --nvme, which is to be given here too; "
        "it keeps the last one when it is stopped, or with --keep-store",
        x->folders[0]);
    return -ENOENT;
}

/* Refuses a model or folders that the store is not of. */
static int check_store(const struct export *x) {
    uint64_t model[2];
    sw_identity_of_model(&x->model, model);
    const char *where = x->folders[0];
    if (memcmp(model, x->id.model, sizeof(model)) != 0) {
        sw_error("export: the store in %s is of another model than %s: its model is "
                 "%016llx-%016llx and this one is %016llx-%016llx; --model names the folder that "
                 "its run began from",
                 where, x->model.dir, (unsigned long long)x->id.model[0],
                 (unsigned long long)x->id.model[1], (unsigned long long)model[0],
                 (unsigned long long)model[1]);
        return -EINVAL;
    }
    if (x->id.params != x->model.params || x->id.units != x->model.unit_count ||
        x->id.numerics.vocabulary_parts != x->model.parts) {
        sw_error("export: the store in %s cuts its model into %u units and %u parts of the "
                 "vocabulary, and this version of the program into %u and %u",
                 where, x->id.units, x->id.numerics.vocabulary_parts, x->model.unit_count,
                 x->model.parts);
        return -EINVAL;
    }
    if (x->id.folders != x->folder_count) {
        sw_error("export: the store in %s lies in %u folder%s and %u %s given: name all of its "
                 "run's with --nvme, in the same order",
                 where, x->id.folders, x->id.folders == 1 ? "" : "s", x->folder_count,
                 x->folder_count == 1 ? "is" : "are");
        return -EINVAL;
    }
    return 0;
}

/* Of every unit; replicas of them have stores of their own. */
static uint32_t shards_of(const struct export *x) {
    return x->id.numerics.ranks / x->id.numerics.replicas;
}

/* The chunks of the store, of which tiers are no part. */
static int lay_out(struct export *x) {
    const struct sw_identity *id = &x->id;
    const struct sw_tiers device = sw_tiers_all(SW_TIER_DEVICE);
    x->format = (struct sw_adam_format){id->master, id->numerics.moments, SW_FP32, SW_FP32};
    const uint32_t shards = shards_of(x);
    x->shard_elements = calloc(x->model.unit_count, sizeof(*x->shard_elements));
    x->trained_elements = calloc(x->model.unit_count, sizeof(*x->trained_elements));
    if (!x->shard_elements || !x->trained_elements) return -ENOMEM;
    int ret = 0;
    if (*id->freeze) ret = sw_model_freeze(&x->model, id->freeze, shards, id->numerics.replicas);
    if (ret < 0) return ret;
    sw_model_shards(&x->model, shards, id->numerics.replicas, x->shard_elements,
                    x->trained_elements);
    const struct sw_placement_input input = {
        .order = sw_model_order(&x->model),
        .micro_count = 1,
        .shards = shards,
        .replicas = id->numerics.replicas,
        .local_ranks = 1,
        .unit_elements = x->shard_elements,
        .unit_trained = x->trained_elements,
        .format = x->format,
        .optimizer = sw_tiers_all(SW_TIER_NVME),
        .params = device,
        .gradients = device,
        .activations = device,
        .checkpoint_every = 1,
        .homes = 2,
        .chunk_bytes = id->chunk_bytes,
    };
    ret = sw_placement_build(&x->placement, &input);
    if (ret < 0) return ret;
    if (x->commit.chunk_count == x->placement.chunk_count * shards) return 0;
    if (x->commit.chunk_count < x->placement.chunk_count * shards) {
        sw_error("export: the store in %s is one of several processes' and has %u of %u chunks: "
                 "no export puts those together yet",
                 x->folders[0], x->commit.chunk_count, x->placement.chunk_count * shards);
        return -EINVAL;
    }
    sw_error("export: the commit in %s has %u chunks, its layout %u", x->folders[0],
             x->commit.chunk_count, x->placement.chunk_count * shards);
    return -EINVAL;
}

static int open_store(struct export *x) {
    const uint32_t ranks = shards_of(x), count = x->commit.chunk_count;
    struct sw_drives drives;
    int ret = sw_drives_choose(&drives, x->folders, x->folder_count,
                               sw_commit_value(x->commit.identity, "stripes", 7));
    uint64_t *bytes = ret == 0 ? malloc(count * sizeof(*bytes)) : NULL;
    if (!bytes) return ret < 0 ? ret : -ENOMEM;
    for (uint32_t i = 0; i < count; i++) bytes[i] = x->placement.chunks[i / ranks].record_bytes;
    const struct sw_nvme_options options = {.folders = x->folders,
                                            .folder_count = x->folder_count,
                                            .name = SW_STORE_NAME,
                                            .record_bytes = bytes,
                                            .chunk_count = count,
                                            .homes = 2,
                                            .shares = drives.striped ? drives.shares : NULL};
    const struct sw_nvme_queue_options queue = {.depth = drives.depth,
                                                .block_bytes = drives.block_bytes};
    ret = sw_nvme_open_existing(&x->store, &options);
    if (ret == 0) ret = sw_nvme_queue_open(&x->queue, x->store, &queue);
    free(bytes);
    return ret;
}

/* A run may have gone on until the lock was taken: what it committed last counts. */
static int pin_commit(struct export *x) {
    struct sw_commit first = x->commit;
    x->commit.entries = NULL;
    int ret = read_commit(x);
    if (ret == 0 && (x->commit.chunk_count != first.chunk_count ||
                     strcmp(x->commit.identity, first.identity) != 0)) {
        sw_error("export: another run took the store in %s meanwhile; try again", x->folders[0]);
        ret = -EAGAIN;
    }
    free(first.entries);
    return ret;
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
    const int ret =
        sw_safetensors_create(&x->writers[shard], path, x->entries + first, count, SW_FP32);
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

static int read_record(struct export *x, uint32_t c, uint32_t stored) {
    const struct sw_commit_entry *entry = &x->commit.entries[stored];
    const struct sw_chunk *chunk = &x->placement.chunks[c];
    struct sw_nvme_req req = {.buf = x->record, .chunk = stored, .home = entry->home}, *done;
    int ret = sw_nvme_submit(x->queue, &req);
    if (ret == 0) ret = sw_nvme_reap(x->queue, &done, 1, 1);
    if (ret >= 0) ret = req.result;
    if (ret < 0) return ret;
    const uint32_t have = sw_crc32c(0, x->record, sw_adam_record_bytes(&x->format, chunk->count));
    if (have == entry->checksum) return 0;
    uint64_t offset;
    const char *path = sw_nvme_where(x->store, stored, entry->home, &offset);
    sw_error(
        "export: the state of %s (chunk %u, %s at byte %llu) is not what step %llu wrote: "
        "CRC-32C %08x, expected %08x; the drive or its path lost or changed bytes, and nothing "
        "was exported",
        x->model.units[chunk->unit].name, stored, path, (unsigned long long)offset,
        (unsigned long long)x->commit.step, have, entry->checksum);
    return -EIO;
}

/* A virgin chunk's state is the model's weights and moments of zero. */
static void take_values(struct export *x, uint32_t c, int virgin, uint64_t at, uint64_t first,
                        uint64_t count) {
    const struct sw_chunk *placed = &x->placement.chunks[c];
    if (virgin) {
        sw_model_read_places(&x->model, x->model.weights->places, placed->unit, at, count,
                             x->values[0]);
        for (int part = 1; part < SW_EXPORT_PARTS; part++)
            memset(x->values[part], 0, count * sizeof(float));
        return;
    }
    struct sw_adam_chunk chunk = {.format = x->format, .count = placed->count};
    sw_adam_record_map(&chunk, x->record);
    sw_adam_read(&chunk, first, count, x->values[0], x->values[1], x->values[2]);
}

static int export_chunk(struct export *x, uint32_t c, uint32_t rank) {
    const struct sw_chunk *chunk = &x->placement.chunks[c];
    const uint32_t stored = c * shards_of(x) + rank;
    const uint64_t begin = rank * x->trained_elements[chunk->unit] + chunk->first;
    const int virgin = x->commit.entries[stored].home == SW_HOME_VIRGIN;
    int ret = virgin ? 0 : read_record(x, c, stored);
    for (uint64_t first = 0; first < chunk->count && ret == 0; first += PIECE) {
        const uint64_t left = chunk->count - first, count = left < PIECE ? left : PIECE;
        take_values(x, c, virgin, begin + first, first, count);
        ret = write_values(x, chunk->unit, begin + first, count);
    }
    return ret;
}

static int export_chunks(struct export *x) {
    uint64_t largest = 0;
    for (uint32_t c = 0; c < x->placement.chunk_count; c++)
        if (x->placement.chunks[c].record_bytes > largest)
            largest = x->placement.chunks[c].record_bytes;
    x->record = aligned_alloc(SW_NVME_ALIGN_BYTES, largest);
    for (int part = 0; part < SW_EXPORT_PARTS; part++) {
        x->values[part] = malloc(PIECE * sizeof(float));
        if (!x->values[part]) return -ENOMEM;
    }
    if (!x->record) return -ENOMEM;
    const struct sw_export_hooks *hooks = x->hooks;
    for (uint32_t c = 0; c < x->placement.chunk_count; c++)
        for (uint32_t rank = 0; rank < shards_of(x) && !x->placement.chunks[c].frozen; rank++) {
            const int ret = export_chunk(x, c, rank);
            if (ret < 0) return ret;
            if (hooks->on_progress)
                hooks->on_progress(hooks->ctx, x->done_bytes, x->shards.total_bytes);
            if (hooks->stop && atomic_load(hooks->stop)) return 1;
        }
    return 0;
}

/* ---- optimizer.json ---- */

static json_t *line_json(const struct export *x, const char *name) {
    const char *value = sw_commit_value(x->commit.identity, name, (int)strlen(name));
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
    const struct sw_identity *id = &x->id;
    const uint64_t rows = sw_identity_step_rows(id);
    json_t *data = json_pack("{s:o,s:I,s:I,s:I,s:s,s:I}", "fingerprint", line_json(x, "data"),
                             "rows_taken", (json_int_t)(x->commit.step * rows), "rows_per_step",
                             (json_int_t)rows, "seq_len", (json_int_t)id->numerics.seq_len, "order",
                             sw_order_name(id->order), "seed", (json_int_t)id->seed);
    json_t *model = json_pack("{s:o,s:I}", "fingerprint", line_json(x, "model"), "parameters",
                              (json_int_t)id->params);
    return json_pack("{s:i,s:I,s:I,s:I,s:o,s:o,s:s,s:o}", "schema", 1, "step",
                     (json_int_t)x->commit.step, "updates", (json_int_t)x->commit.updates,
                     "skips_in_a_row", (json_int_t)x->commit.skips_in_a_row, "data", data, "model",
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
    sw_nvme_queue_close(x->queue);
    sw_nvme_close(x->store, 0);
    sw_placement_free(&x->placement);
    sw_model_close(&x->model);
    void *const blocks[] = {x->writers,          x->entries,   x->names,
                            x->entry_first,      x->entry_of,  x->shard_elements,
                            x->trained_elements, x->record,    x->commit.entries,
                            x->values[0],        x->values[1], x->values[2]};
    for (size_t i = 0; i < sizeof(blocks) / sizeof(blocks[0]); i++) free(blocks[i]);
}

int sw_export(const struct sw_export_options *options, const struct sw_export_hooks *hooks,
              struct sw_export_report *report) {
    assert(options && options->model && options->from && options->to && hooks && report);
    struct export x = {.options = options, .hooks = hooks};
    x.folders = options->nvme_count ? options->nvme : &options->from;
    x.folder_count = options->nvme_count ? options->nvme_count : 1;
    int ret = read_commit(&x);
    if (ret == 0) ret = sw_identity_parse(&x.id, x.commit.identity, x.folders[0]);
    if (ret == 0) ret = sw_model_open(&x.model, options->model);
    if (ret == 0) ret = check_store(&x);
    if (ret == 0) ret = lay_out(&x);
    if (ret == 0) ret = open_store(&x);
    if (ret == 0) ret = pin_commit(&x);
    if (ret == 0) ret = create_files(&x);
    if (ret == 0) ret = export_chunks(&x);
    if (ret == 0) ret = publish(&x);
    if (ret == -ENOMEM) sw_error("export: no memory");
    *report = (struct sw_export_report){x.commit.step, x.model.trained_params, x.shards.total_bytes,
                                        x.shards.count};
    close_export(&x, ret != 0);
    return ret;
}
