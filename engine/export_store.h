/* engine/export_store.h - the records of all ranks of a run that is over, as they lie in the store
 * of each of its processes, to be read and nothing else.
 *
 * One process has them all in one store; so has each of several with --shard node, where the first
 * one's is read. With --shard world each process has those of its own ranks: their stores are found
 * by their names, in one folder or in several. All are locked before their commits are pinned.
 * Threads: one at a time. Errors: -errno, reported with the folder. */
#ifndef ENGINE_EXPORT_STORE_H
#define ENGINE_EXPORT_STORE_H
#include <stdint.h>
#include "engine/identity.h"
#include "engine/model.h"
#include "engine/process_name.h"
#include "nvme/commit.h"
#include "nvme/nvme.h"
#include "offload/placement.h"

/* What one process left. */
struct sw_export_part {
    const char *name; /* of its store: SW_STORE_NAME, or a text of its own */
    char name_buffer[SW_PROCESS_NAME_BYTES];
    const char *const *folders; /* as many as the identity says */
    struct sw_commit commit;
    struct sw_nvme_store *store;
    uint32_t depth, block_bytes; /* of a queue for its drives */
};

struct sw_export_store {
    const char *const *folders; /* as given: those of one part after the other */
    uint32_t folder_count;
    struct sw_identity id;
    struct sw_adam_format format;
    uint64_t *shard_elements, *trained_elements; /* by unit */
    struct sw_placement placement;
    uint32_t shards, ranks; /* of every unit; of each part */
    struct sw_export_part *parts;
    uint32_t part_count;
    struct sw_nvme_queue *queue; /* to one part at a time */
    uint32_t queued;             /* which one that is */
};

/* Finds the first process's commit in one of the folders and reads what its run was. */
int sw_export_store_find(struct sw_export_store *s, const char *const *folders, uint32_t count);

/* Checks that the run was one of this model, freezes what it froze, lays its chunks out, finds,
 * locks and pins all parts at the last step that all of them have a commit of. */
int sw_export_store_open(struct sw_export_store *s, struct sw_model *model);

/* A chunk's record of the rank with that shard, its checksum compared. 1: there is none, as it was
 * never updated. Shards of one part after the other are read best. `unit` is for the error. */
int sw_export_store_read(struct sw_export_store *s, uint32_t chunk, uint32_t shard,
                         const char *unit, void *record);

/* Also after an error of the above, or on a store of zeros. */
void sw_export_store_close(struct sw_export_store *s);

/* The commit that is exported; those of other parts differ in their entries alone. */
static inline const struct sw_commit *sw_export_store_commit(const struct sw_export_store *s) {
    return &s->parts[0].commit;
}

#endif
