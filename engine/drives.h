/* engine/drives.h - how a run uses the drives of its store: block size and depth of its queues, and
 * which part of the bytes each drive takes.
 *
 * Sources, best first: what the store was laid out by (a resumed run), the machine profile that
 * `spillway bench nvme` keeps, and for the shares of several drives a short measurement now. */
#ifndef ENGINE_DRIVES_H
#define ENGINE_DRIVES_H
#include <stdint.h>
#include "engine/options.h"

struct sw_drives {
    uint32_t block_bytes, depth; /* of queues; 0: the defaults */
    uint32_t shares[SW_NVME_FOLDERS_MAX];
    int striped; /* shares are in use; else all drives take the same */
};

/* Chooses for these folders; `stripes` is what a resumed store was laid out by, as
 * sw_drives_stripes() wrote it ("" where it is even), NULL for a new one. Says what it took. 0, or
 * -errno, reported. */
int sw_drives_choose(struct sw_drives *out, const char *const *folders, uint32_t count,
                     const char *stripes);

/* The shares as text, "2100,700"; "" when all drives take the same. */
void sw_drives_stripes(const struct sw_drives *drives, uint32_t count, char *out,
                       uint32_t out_bytes);

#endif
