/* base/mapped_files.c - a table of maps. */
#include "base/mapped_files.h"

#include <stddef.h>

enum { MAPS_MAX = 1024 };

static struct {
    const char *first;
    uint64_t bytes;
    const char *path; /* NULL: free */
} maps[MAPS_MAX];

void sw_mapped_add(const void *map, uint64_t bytes, const char *path) {
    for (int i = 0; i < MAPS_MAX; i++) {
        if (maps[i].path) continue;
        maps[i].first = map;
        maps[i].bytes = bytes;
        maps[i].path = path;
        return;
    }
}

void sw_mapped_remove(const void *map) {
    for (int i = 0; i < MAPS_MAX; i++)
        if (maps[i].path && maps[i].first == map) maps[i].path = NULL;
}

const char *sw_mapped_path(const void *address) {
    const uintptr_t at = (uintptr_t)address;
    for (int i = 0; i < MAPS_MAX; i++) {
        const uintptr_t first = (uintptr_t)maps[i].first;
        if (maps[i].path && at >= first && at - first < maps[i].bytes) return maps[i].path;
    }
    return NULL;
}
