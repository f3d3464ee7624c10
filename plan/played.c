/* plan/played.c - see the header. */
#include "plan/played.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

/* All that a step's time follows from in one case: options but for budgets, which only say how long
 * rings are and whether the head is whole, and these. */
struct key {
    struct sw_train_options options;
    uint32_t ring_slots[SW_RING_COUNT];
    int head_whole, one_for_all;
};

struct entry {
    uint64_t hash;
    struct key key;
    struct sw_simulation times;
};

struct sw_played {
    struct entry *entries;
    uint64_t count, capacity, found;
};

/* Compared as bytes: padding that differs would cost a play, and give no wrong answer. */
static void make_key(struct key *key, const struct sw_plan_run *run, int one_for_all) {
    memset(key, 0, sizeof(*key));
    memcpy(&key->options, &run->options, sizeof(key->options));
    key->options.device_memory_bytes = key->options.host_memory_bytes = 0;
    memcpy(key->ring_slots, run->placement.ring_slots, sizeof(key->ring_slots));
    key->head_whole = run->placement.head_whole;
    key->one_for_all = one_for_all;
}

static uint64_t hash_of(const struct key *key) {
    return XXH64(key, sizeof(*key), 0);
}

struct sw_played *sw_played_open(void) {
    return calloc(1, sizeof(struct sw_played));
}

void sw_played_close(struct sw_played *played) {
    if (played) free(played->entries);
    free(played);
}

int sw_played_find(struct sw_played *played, const struct sw_plan_run *run, int one_for_all,
                   struct sw_simulation *out) {
    struct key key;
    make_key(&key, run, one_for_all);
    const uint64_t hash = hash_of(&key);
    for (uint64_t i = 0; i < played->count; i++) {
        const struct entry *entry = &played->entries[i];
        if (entry->hash != hash || memcmp(&entry->key, &key, sizeof(key))) continue;
        *out = entry->times;
        played->found++;
        return 1;
    }
    return 0;
}

void sw_played_keep(struct sw_played *played, const struct sw_plan_run *run, int one_for_all,
                    const struct sw_simulation *times) {
    if (played->count == played->capacity) {
        const uint64_t capacity = played->capacity ? 2 * played->capacity : 256;
        struct entry *more = realloc(played->entries, capacity * sizeof(*more));
        if (!more) return;
        played->entries = more;
        played->capacity = capacity;
    }
    struct entry *entry = &played->entries[played->count++];
    make_key(&entry->key, run, one_for_all);
    entry->hash = hash_of(&entry->key);
    entry->times = *times;
}

void sw_played_count(const struct sw_played *played, uint64_t *found, uint64_t *kept) {
    *found = played->found;
    *kept = played->count;
}
