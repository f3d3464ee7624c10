/* nvme/homes.c - two homes per chunk, and the order of a commit. */
#include "nvme/homes.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

int sw_homes_open(struct sw_homes *h, uint32_t count, const struct sw_commit *from) {
    assert(h && (!from || from->chunk_count == count));
    *h = (struct sw_homes){.count = count};
    h->of = calloc(count ? count : 1, sizeof(*h->of));
    h->entries = calloc(count ? count : 1, sizeof(*h->entries));
    if (!h->of || !h->entries) {
        sw_homes_close(h);
        return -ENOMEM;
    }
    for (uint32_t c = 0; c < count; c++) {
        const uint32_t home = from ? from->entries[c].home : SW_HOME_VIRGIN;
        h->of[c].newest = h->of[c].committed = (uint8_t)home;
        if (home != SW_HOME_VIRGIN) h->of[c].checksum[home] = from->entries[c].checksum;
    }
    return 0;
}

void sw_homes_close(struct sw_homes *h) {
    free(h->of);
    free(h->entries);
    *h = (struct sw_homes){0};
}

uint32_t sw_homes_next(const struct sw_homes *h, uint32_t chunk) {
    assert(chunk < h->count);
    return h->of[chunk].committed == 0;
}

void sw_homes_wrote(struct sw_homes *h, uint32_t chunk, uint32_t home, uint32_t checksum) {
    assert(chunk < h->count && home < 2 && home != h->of[chunk].committed);
    h->of[chunk].newest = (uint8_t)home;
    h->of[chunk].checksum[home] = checksum;
}

uint32_t sw_homes_newest(const struct sw_homes *h, uint32_t chunk, uint32_t *checksum) {
    assert(chunk < h->count);
    const struct sw_home *home = &h->of[chunk];
    *checksum = home->newest == SW_HOME_VIRGIN ? 0 : home->checksum[home->newest];
    return home->newest;
}

int sw_homes_commit(struct sw_homes *h, struct sw_nvme_store *store, struct sw_journal *journal,
                    struct sw_commit *commit) {
    /* io_uring does not order a sync behind requests in flight: all were reaped before. */
    int ret = sw_nvme_sync(store);
    if (ret < 0) return ret;
    for (uint32_t c = 0; c < h->count; c++) {
        h->entries[c].home = sw_homes_newest(h, c, &h->entries[c].checksum);
    }
    commit->owner_pid = (uint64_t)getpid();
    commit->time_unix_s = (uint64_t)time(NULL);
    commit->chunk_count = h->count;
    commit->entries = h->entries;
    ret = sw_journal_append(journal, commit);
    if (ret < 0) return ret;
    for (uint32_t c = 0; c < h->count; c++) h->of[c].committed = h->of[c].newest;
    return 0;
}
