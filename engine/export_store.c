/* engine/export_store.c - finds the stores of a run's processes and reads their records.
 *
 * A unit has as many shards as the run had ranks, and a store the chunks of some of them, so its
 * length tells how many stores there are; whose a part is, and of which run, stands in its commit,
 * as files can be moved. The first store's folders come first only where they were
 * given first; every folder that may begin a part is looked into for every part. */
#include "engine/export_store.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/crc32c.h"
#include "base/log.h"
#include "engine/collective.h"
#include "engine/drives.h"

enum { WHERE_BYTES = 512 };

/* ---- commits ---- */

/* The folders that a part may begin in, as a text. */
static const char *describe_folders(const struct sw_export_store *s, uint32_t step,
                                    char text[WHERE_BYTES]) {
    size_t used = 0;
    text[0] = '\0';
    for (uint32_t i = 0; i < s->folder_count && used < WHERE_BYTES; i += step)
        used += (size_t)snprintf(text + used, WHERE_BYTES - used, "%s%s",
                                 i == 0                       ? ""
                                 : i + step < s->folder_count ? ", "
                                                              : " or ",
                                 s->folders[i]);
    return text;
}

/* Whether a folder has a commit of the part, not after the step: 1, with what it holds. */
static int read_commit(struct sw_export_part *part, const char *folder, uint64_t step_max) {
    struct sw_commit found;
    const int ret = sw_commit_read_until(folder, part->name, step_max, &found);
    if (ret != 1) return ret;
    free(part->commit.entries);
    part->commit = found;
    return 1;
}

/* Every part that the folders have a commit of, where the first one's is missing. */
static int tell_others(const struct sw_export_store *s) {
    char where[WHERE_BYTES];
    for (uint32_t p = 1; p < SW_RANKS_MAX; p++)
        for (uint32_t i = 0; i < s->folder_count; i++) {
            struct sw_export_part other = {0};
            other.name = sw_process_name(SW_STORE_NAME, p, other.name_buffer);
            const int ret = read_commit(&other, s->folders[i], UINT64_MAX);
            free(other.commit.entries);
            if (ret < 0) return ret;
            if (ret == 0) continue;
            sw_error("export: %s has the store of process %u of a run, and that of process 0 "
                     "(%s.commit) lies not in %s: name the folders of all processes with --nvme",
                     s->folders[i], p, SW_STORE_NAME, describe_folders(s, 1, where));
            return -ENOENT;
        }
    return 0;
}

int sw_export_store_find(struct sw_export_store *s, const char *const *folders, uint32_t count) {
    char where[WHERE_BYTES];
    *s = (struct sw_export_store){.folders = folders, .folder_count = count};
    s->parts = calloc(1, sizeof(*s->parts));
    if (!s->parts) return -ENOMEM;
    s->part_count = 1;
    s->parts[0].name = SW_STORE_NAME;
    int found = 0;
    for (uint32_t i = 0; i < count && found == 0; i++) {
        found = read_commit(&s->parts[0], folders[i], UINT64_MAX);
        s->parts[0].folders = &folders[i];
    }
    if (found == 1)
        return sw_identity_parse(&s->id, s->parts[0].commit.identity, s->parts[0].folders[0]);
    if (found == 0) found = tell_others(s);
    if (found < 0) return found;
    sw_error(
        "export: no commit lies in %s: a run makes them with its optimizer on NVMe, or as "
        "--commit-every says, in the first folder of its --nvme, which is to be given here too; "
        "it keeps the last one when it is stopped, or with --keep-store",
        describe_folders(s, 1, where));
    return -ENOENT;
}

/* ---- what the run was ---- */

/* Refuses a model that the store is not of. */
static int check_model(const struct sw_export_store *s, const struct sw_model *m) {
    uint64_t model[2];
    sw_identity_of_model(m, model);
    const char *where = s->parts[0].folders[0];
    if (memcmp(model, s->id.model, sizeof(model)) != 0) {
        sw_error("export: the store in %s is of another model than %s: its model is "
                 "%016llx-%016llx and this one is %016llx-%016llx; --model names the folder that "
                 "its run began from",
                 where, m->dir, (unsigned long long)s->id.model[0],
                 (unsigned long long)s->id.model[1], (unsigned long long)model[0],
                 (unsigned long long)model[1]);
        return -EINVAL;
    }
    if (s->id.params != m->params || s->id.units != m->unit_count ||
        s->id.numerics.vocabulary_parts != m->parts) {
        sw_error("export: the store in %s cuts its model into %u units and %u parts of the "
                 "vocabulary, and this version of the program into %u and %u",
                 where, s->id.units, s->id.numerics.vocabulary_parts, m->unit_count, m->parts);
        return -EINVAL;
    }
    return 0;
}

/* The chunks of the run, of which tiers are no part. */
static int lay_out(struct sw_export_store *s, struct sw_model *m) {
    const struct sw_identity *id = &s->id;
    const struct sw_tiers device = sw_tiers_all(SW_TIER_DEVICE);
    s->format = (struct sw_adam_format){id->master, id->numerics.moments, SW_FP32, SW_FP32};
    s->shards = id->numerics.ranks / id->numerics.replicas;
    s->shard_elements = calloc(m->unit_count, sizeof(*s->shard_elements));
    s->trained_elements = calloc(m->unit_count, sizeof(*s->trained_elements));
    if (!s->shard_elements || !s->trained_elements) return -ENOMEM;
    int ret = 0;
    if (*id->freeze) ret = sw_model_freeze(m, id->freeze, s->shards, id->numerics.replicas);
    if (ret < 0) return ret;
    sw_model_shards(m, s->shards, id->numerics.replicas, s->shard_elements, s->trained_elements);
    const struct sw_placement_input input = {
        .order = sw_model_order(m),
        .micro_count = 1,
        .shards = s->shards,
        .replicas = id->numerics.replicas,
        .local_ranks = 1,
        .unit_elements = s->shard_elements,
        .unit_trained = s->trained_elements,
        .format = s->format,
        .optimizer = sw_tiers_all(SW_TIER_NVME),
        .params = device,
        .gradients = device,
        .activations = device,
        .checkpoint_every = 1,
        .homes = 2,
        .chunk_bytes = id->chunk_bytes,
    };
    return sw_placement_build(&s->placement, &input);
}

/* How many parts there are: each has the chunks of equally many ranks. */
static int count_parts(struct sw_export_store *s) {
    const uint32_t chunks = s->placement.chunk_count, have = s->parts[0].commit.chunk_count;
    s->ranks = have / chunks;
    if (have % chunks || s->ranks == 0 || s->shards % s->ranks) {
        sw_error("export: the commit in %s has %u chunks, its layout %u", s->parts[0].folders[0],
                 have, chunks * s->shards);
        return -EINVAL;
    }
    const uint32_t count = s->shards / s->ranks;
    struct sw_export_part *parts = realloc(s->parts, count * sizeof(*parts));
    if (!parts) return -ENOMEM;
    s->parts = parts;
    for (; s->part_count < count; s->part_count++) {
        struct sw_export_part *part = &parts[s->part_count];
        *part = (struct sw_export_part){0};
        part->name = sw_process_name(SW_STORE_NAME, s->part_count, part->name_buffer);
    }
    return 0;
}

/* Every part takes as many folders as the run of each process had. */
static int check_folders(const struct sw_export_store *s) {
    const uint32_t each = s->id.folders, given = s->folder_count;
    const char *where = s->parts[0].folders[0];
    if (each && given % each == 0 && given / each <= s->part_count &&
        (uint32_t)(s->parts[0].folders - s->folders) % each == 0)
        return 0;
    char processes[48] = "";
    if (s->part_count > 1)
        snprintf(processes, sizeof(processes), " for each of its %u processes", s->part_count);
    sw_error("export: the store in %s lies in %u folder%s%s and %u %s given: name all of its "
             "run's with --nvme, in the same order",
             where, each, each == 1 ? "" : "s", processes, given, given == 1 ? "is" : "are");
    return -EINVAL;
}

/* ---- the parts ---- */

static int find_part(struct sw_export_store *s, uint32_t p) {
    struct sw_export_part *part = &s->parts[p];
    char where[WHERE_BYTES];
    part->folders = NULL;
    for (uint32_t i = 0; i < s->folder_count; i += s->id.folders) {
        const int ret = read_commit(part, s->folders[i], UINT64_MAX);
        if (ret < 0) return ret;
        if (ret == 0) continue;
        if (part->folders) {
            sw_error("export: %s and %s both have a store of process %u: name the folders of one "
                     "run with --nvme",
                     part->folders[0], s->folders[i], p);
            return -EINVAL;
        }
        part->folders = &s->folders[i];
    }
    if (part->folders) return 0;
    sw_error("export: each of the run's %u processes has a part of the store, and that of process "
             "%u is missing: no %s.commit lies in %s; name the folders of all processes with "
             "--nvme",
             s->part_count, p, part->name, describe_folders(s, s->id.folders, where));
    return -ENOENT;
}

/* Refuses a part that lies in another one's place. */
static int check_place(const struct sw_export_store *s, uint32_t p) {
    const struct sw_export_part *part = &s->parts[p];
    const struct sw_commit *commit = &part->commit;
    const uint32_t processes = s->id.numerics.ranks / s->ranks;
    if (commit->process == p && commit->processes == processes) return 0;
    sw_error("export: %s/%s.commit is the part of process %u of %u (run %016llx), where that of "
             "process %u of %u belongs: put each part back in its place",
             part->folders[0], part->name, commit->process, commit->processes,
             (unsigned long long)commit->run, p, processes);
    return -EINVAL;
}

/* Refuses a part of another run than the first one's. */
static int check_part(const struct sw_export_store *s, uint32_t p) {
    const struct sw_export_part *first = &s->parts[0], *part = &s->parts[p];
    char want[SW_COMMIT_IDENTITY_BYTES];
    int length = 0;
    /* As it was before the drives' shares were added, which are each process's own. */
    sw_identity_write(&s->id, want, sizeof(want));
    const char *line = sw_commit_differs(want, part->commit.identity, &length);
    if (line) {
        const char *have = sw_commit_value(part->commit.identity, line, length);
        const char *value = line + length + 1;
        sw_error("export: the store of process %u in %s belongs to another run than that of "
                 "process 0 in %s: its %.*s is '%.*s' and not '%.*s'",
                 p, part->folders[0], first->folders[0], length, line, (int)strcspn(have, "\n"),
                 have, (int)strcspn(value, "\n"), value);
        return -EINVAL;
    }
    if (part->commit.chunk_count == first->commit.chunk_count) {
        if (part->commit.run == first->commit.run) return 0;
        sw_error("export: the store of process %u in %s is of run %016llx, and that of process 0 "
                 "in %s of run %016llx: name the folders of one run with --nvme, or put back the "
                 "part of one of them (spillway inspect shows whose it is)",
                 p, part->folders[0], (unsigned long long)part->commit.run, first->folders[0],
                 (unsigned long long)first->commit.run);
        return -EINVAL;
    }
    sw_error("export: the store of process %u in %s belongs to another run than that of process 0 "
             "in %s: it has %u chunks and not %u",
             p, part->folders[0], first->folders[0], part->commit.chunk_count,
             first->commit.chunk_count);
    return -EINVAL;
}

static int lock_part(struct sw_export_store *s, struct sw_export_part *part) {
    const uint32_t count = part->commit.chunk_count;
    struct sw_drives drives;
    int ret = sw_drives_choose(&drives, part->folders, s->id.folders,
                               sw_commit_value(part->commit.identity, "stripes", 7));
    uint64_t *bytes = ret == 0 ? malloc(count * sizeof(*bytes)) : NULL;
    if (!bytes) return ret < 0 ? ret : -ENOMEM;
    for (uint32_t i = 0; i < count; i++) bytes[i] = s->placement.chunks[i / s->ranks].record_bytes;
    const struct sw_nvme_options options = {.folders = part->folders,
                                            .folder_count = s->id.folders,
                                            .name = part->name,
                                            .record_bytes = bytes,
                                            .chunk_count = count,
                                            .homes = 2,
                                            .shares = drives.striped ? drives.shares : NULL};
    part->depth = drives.depth;
    part->block_bytes = drives.block_bytes;
    ret = sw_nvme_open_existing(&part->store, &options);
    free(bytes);
    return ret;
}

/* A run may have gone on until the lock was taken: what it committed last counts, and not after the
 * step `step_max`. */
static int pin(struct sw_export_part *part, uint64_t step_max) {
    const uint32_t chunks = part->commit.chunk_count;
    const uint64_t run = part->commit.run;
    char identity[SW_COMMIT_IDENTITY_BYTES];
    memcpy(identity, part->commit.identity, sizeof(identity));
    const int ret = read_commit(part, part->folders[0], step_max);
    if (ret < 0) return ret;
    if (ret == 1 && part->commit.chunk_count == chunks && part->commit.run == run &&
        strcmp(part->commit.identity, identity) == 0)
        return 0;
    sw_error("export: another run took the store in %s meanwhile; try again", part->folders[0]);
    return -EAGAIN;
}

/* A crash may have left one a commit ahead of the others: as a resume would, all go back to the
 * last step that every one of them has. */
static int pin_together(struct sw_export_store *s) {
    int ret = 0;
    for (uint32_t p = 0; p < s->part_count && ret == 0; p++) ret = pin(&s->parts[p], UINT64_MAX);
    uint32_t last = 0;
    for (uint32_t p = 1; p < s->part_count; p++)
        if (s->parts[p].commit.step < s->parts[last].commit.step) last = p;
    const uint64_t step = s->parts[last].commit.step;
    for (uint32_t p = 0; p < s->part_count && ret == 0; p++) {
        struct sw_export_part *part = &s->parts[p];
        const uint64_t newest = part->commit.step;
        if (newest == step) continue;
        ret = read_commit(part, part->folders[0], step);
        if (ret < 0) return ret;
        if (ret == 1 && part->commit.step == step) {
            ret = 0;
            continue;
        }
        sw_error("export: the store of process %u in %s stands at step %llu and that of process "
                 "%u in %s at step %llu, and they have no step in common",
                 p, part->folders[0], (unsigned long long)newest, last, s->parts[last].folders[0],
                 (unsigned long long)step);
        return -EINVAL;
    }
    return ret;
}

int sw_export_store_open(struct sw_export_store *s, struct sw_model *model) {
    int ret = check_model(s, model);
    if (ret == 0) ret = lay_out(s, model);
    if (ret == 0) ret = count_parts(s);
    if (ret == 0) ret = check_folders(s);
    for (uint32_t p = 0; p < s->part_count && ret == 0; p++) {
        ret = find_part(s, p);
        if (ret == 0 && p > 0) ret = check_part(s, p);
        if (ret == 0) ret = check_place(s, p);
    }
    for (uint32_t p = 0; p < s->part_count && ret == 0; p++) ret = lock_part(s, &s->parts[p]);
    return ret < 0 ? ret : pin_together(s);
}

/* ---- records ---- */

static int queue_to(struct sw_export_store *s, uint32_t p) {
    if (s->queue && s->queued == p) return 0;
    const struct sw_nvme_queue_options options = {.depth = s->parts[p].depth,
                                                  .block_bytes = s->parts[p].block_bytes};
    sw_nvme_queue_close(s->queue);
    s->queue = NULL;
    s->queued = p;
    return sw_nvme_queue_open(&s->queue, s->parts[p].store, &options);
}

int sw_export_store_read(struct sw_export_store *s, uint32_t c, uint32_t shard, const char *unit,
                         void *record) {
    assert(c < s->placement.chunk_count && shard < s->shards);
    const uint32_t p = shard / s->ranks, stored = c * s->ranks + shard % s->ranks;
    const struct sw_export_part *part = &s->parts[p];
    const struct sw_commit_entry *entry = &part->commit.entries[stored];
    if (entry->home == SW_HOME_VIRGIN) return 1;
    struct sw_nvme_req req = {.buf = record, .chunk = stored, .home = entry->home}, *done;
    int ret = queue_to(s, p);
    if (ret == 0) ret = sw_nvme_submit(s->queue, &req);
    if (ret == 0) ret = sw_nvme_reap(s->queue, &done, 1, 1);
    if (ret >= 0) ret = req.result;
    if (ret < 0) return ret;
    const uint64_t bytes = sw_adam_record_bytes(&s->format, s->placement.chunks[c].count);
    const uint32_t have = sw_crc32c(0, record, bytes);
    if (have == entry->checksum) return 0;
    uint64_t offset;
    const char *path = sw_nvme_where(part->store, stored, entry->home, &offset);
    sw_error(
        "export: the state of %s (chunk %u, %s at byte %llu) is not what step %llu wrote: "
        "CRC-32C %08x, expected %08x; the drive or its path lost or changed bytes, and nothing "
        "was exported",
        unit, stored, path, (unsigned long long)offset, (unsigned long long)part->commit.step, have,
        entry->checksum);
    return -EIO;
}

void sw_export_store_close(struct sw_export_store *s) {
    sw_nvme_queue_close(s->queue);
    for (uint32_t p = 0; p < s->part_count; p++) {
        sw_nvme_close(s->parts[p].store, 0);
        free(s->parts[p].commit.entries);
    }
    free(s->parts);
    free(s->shard_elements);
    free(s->trained_elements);
    sw_placement_free(&s->placement);
}
