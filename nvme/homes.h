/* nvme/homes.h - which of a chunk's two homes is the newest and which the committed one.
 *
 * Writes go to the home that is not committed, as often as needed; reads take the newest; a commit
 * makes the newest the committed ones, after they are durable. So whatever is lost in a crash was
 * named by no record.
 * Threads: next() and wrote() belong to the writer, newest() to whoever waits for its writes; a
 * commit runs while nothing is in flight and no write starts before it has returned. */
#ifndef NVME_HOMES_H
#define NVME_HOMES_H
#include "nvme/commit.h"
#include "nvme/nvme.h"

struct sw_home {
    uint8_t newest, committed; /* 0, 1 or SW_HOME_VIRGIN */
    uint32_t checksum[2];      /* CRC-32C of what was written to each home */
};

struct sw_homes {
    uint32_t count;
    struct sw_home *of; /* by chunk */
    struct sw_commit_entry *entries;
};

/* All virgin, or as a commit names them (from NULL or with `count` chunks). 0 or -ENOMEM. */
int sw_homes_open(struct sw_homes *homes, uint32_t count, const struct sw_commit *from);
void sw_homes_close(struct sw_homes *homes);

/* The home that the chunk's next write goes to. */
uint32_t sw_homes_next(const struct sw_homes *homes, uint32_t chunk);
/* That write was started with these bytes: later reads take it. */
void sw_homes_wrote(struct sw_homes *homes, uint32_t chunk, uint32_t home, uint32_t checksum);
/* The newest home, or SW_HOME_VIRGIN; *checksum of its bytes. */
uint32_t sw_homes_newest(const struct sw_homes *homes, uint32_t chunk, uint32_t *checksum);

/* All writes have been reaped. Makes them durable, then the record: commit's step, updates, skips,
 * identity and note are the caller's, the rest is filled in. 0 or -errno, reported; then the commit
 * before holds. */
int sw_homes_commit(struct sw_homes *homes, struct sw_nvme_store *store, struct sw_journal *journal,
                    struct sw_commit *commit);

#endif
