/* engine/shards.c - see the header. */
#include "engine/shards.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

uint64_t sw_entry_bytes(const struct sw_safetensors_entry *entry, enum sw_dtype dtype) {
    return entry->rows * (entry->cols ? entry->cols : 1) * sw_dtype_bytes(dtype);
}

int sw_shards_open(struct sw_shards *s, const char *stem,
                   const struct sw_safetensors_entry *entries, uint32_t entry_count,
                   enum sw_dtype dtype, uint64_t bytes_max) {
    *s = (struct sw_shards){
        .stem = stem, .entries = entries, .entry_count = entry_count, .dtype = dtype};
    s->of = calloc(entry_count + 1, sizeof(*s->of));
    if (!s->of) return -ENOMEM;
    uint64_t data = 0, header = 0;
    for (uint32_t i = 0; i < entry_count; i++) {
        const uint64_t bytes = sw_entry_bytes(&entries[i], dtype);
        const uint64_t head = sw_safetensors_entry_bytes(entries[i].name);
        if (data > 0 &&
            (data + bytes > bytes_max || header + head > SW_SAFETENSORS_HEADER_BYTES_MAX - 4096)) {
            s->count++;
            data = header = 0;
        }
        data += bytes;
        header += head;
        s->total_bytes += bytes;
        s->of[i] = s->count;
    }
    s->count++;
    return 0;
}

void sw_shards_close(struct sw_shards *s) {
    free(s->of);
    *s = (struct sw_shards){0};
}

void sw_shards_name(const struct sw_shards *s, uint32_t shard, char name[SW_NEW_FILE_NAME_BYTES]) {
    snprintf(name, SW_NEW_FILE_NAME_BYTES, "%s-%05" PRIu32 "-of-%05" PRIu32 ".safetensors", s->stem,
             shard + 1, s->count);
}

int sw_shards_write_index(const struct sw_shards *s, struct sw_new_files *files,
                          const char *index_name) {
    json_t *map = json_object();
    int ret = map ? 0 : -ENOMEM;
    for (uint32_t i = 0; i < s->entry_count && ret == 0; i++) {
        char name[SW_NEW_FILE_NAME_BYTES];
        sw_shards_name(s, s->of[i], name);
        if (json_object_set_new(map, s->entries[i].name, json_string(name)) < 0) ret = -ENOMEM;
    }
    json_t *root = json_pack("{s:{s:I},s:o}", "metadata", "total_size", (json_int_t)s->total_bytes,
                             "weight_map", map);
    if (ret == 0) ret = root ? sw_new_files_write_json(files, index_name, root) : -ENOMEM;
    json_decref(root);
    return ret;
}
