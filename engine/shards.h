/* engine/shards.h - tensors dealt out, in their order, to several safetensors files with an index:
 * STEM-00001-of-00002.safetensors and so on. Errors: 0 or -errno. */
#ifndef ENGINE_SHARDS_H
#define ENGINE_SHARDS_H
#include <stdint.h>
#include "engine/new_files.h"
#include "engine/safetensors.h"

#define SW_SHARD_BYTES_MAX 5000000000u

struct sw_shards {
    const char *stem;
    const struct sw_safetensors_entry *entries; /* the caller's */
    uint32_t entry_count, count;
    uint32_t *of; /* by entry: its shard */
    enum sw_dtype dtype;
    uint64_t total_bytes;
};

/* Bytes of a tensor's data. */
uint64_t sw_entry_bytes(const struct sw_safetensors_entry *entry, enum sw_dtype dtype);

/* A shard is closed before its data would pass bytes_max, or its header the form's limit. */
int sw_shards_open(struct sw_shards *shards, const char *stem,
                   const struct sw_safetensors_entry *entries, uint32_t entry_count,
                   enum sw_dtype dtype, uint64_t bytes_max);
void sw_shards_close(struct sw_shards *shards);

void sw_shards_name(const struct sw_shards *shards, uint32_t shard,
                    char name[SW_NEW_FILE_NAME_BYTES]);

/* The index: which tensor lies in which file. */
int sw_shards_write_index(const struct sw_shards *shards, struct sw_new_files *files,
                          const char *name);

#endif
