/* offload/profile.h - the machine profile: what was measured on this machine once and is used by
 * later runs, one JSON file for each user.
 *
 *     {"schema": 1, "drives": [{"drive": "vda /dev/vda ext4 270553174016", "block_bytes": 524288,
 *      "depth": 8, "read_bytes_per_s": 2.6e9, "write_bytes_per_s": 1.4e9,
 *      "mixed_bytes_per_s": 2.7e9, "measured": "2026-01-31"}],
 *      "copies": {"gpu": "cuda NVIDIA H100...", "h2d_piece_bytes": 0, "d2h_piece_bytes": 4194304},
 *      "machine": {"cores": 8, "memory_bytes_per_s": 1.6e11, ...}, "numa_nodes": [{...}, ...]}
 *
 * A run uses the drives' part and the copies'; the rest is for plans (plan/machine.h).
 *
 * Its path is $SPILLWAY_PROFILE (set and empty: there is no profile, and none is kept), else
 * machine.json in spillway/ of $XDG_CONFIG_HOME or $HOME/.config. A damaged profile is warned of
 * and counts as none. Keys that this version does not know stay when it is written. Threads: any,
 * but two writers at once keep one's entry. Errors: -errno, reported. */
#ifndef OFFLOAD_PROFILE_H
#define OFFLOAD_PROFILE_H
#include <jansson.h>
#include <stddef.h>
#include <stdint.h>

struct sw_drive_profile {
    uint32_t block_bytes, depth; /* as in struct sw_nvme_queue_options */
    double read_bytes_per_s, write_bytes_per_s;
    double mixed_bytes_per_s; /* both directions together */
    char measured[16];        /* the date, such as 2026-01-31; set by sw_profile_keep() */
};

/* The profile's path in out, "" when there is none to have. */
void sw_profile_path(char *out, size_t out_size);

/* Names the drive that holds a folder, the same for all folders on it: its block device, what is
 * mounted, the file system's type and size. 0 or -errno. */
int sw_profile_identity(const char *folder, char *out, size_t out_size);

/* What is known of the drive that holds the folder. 1, 0 when nothing is, or -errno. */
int sw_profile_drive(const char *folder, struct sw_drive_profile *out);

/* Keeps it as known, instead of what was; the file is replaced whole, or stays as it was. Does
 * nothing where sw_profile_path() is "". */
int sw_profile_keep(const char *folder, const struct sw_drive_profile *in);

/* The pieces in which copies of a device are fastest (kernels/device.h, cut_copies; 0: whole), as
 * `spillway bench all` found for what calls itself so. 1; or 0, and both are 0, when nothing is
 * known. */
int sw_profile_copies(const char *gpu, uint64_t *h2d_bytes, uint64_t *d2h_bytes);

/* Puts an object's keys into the profile: objects in it are completed key by key, all else takes
 * the place of what was. The same of files and errors. */
int sw_profile_merge(const json_t *keys);

#endif
