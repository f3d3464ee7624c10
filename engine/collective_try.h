/* engine/collective_try.h - a first try of what devices do together, before a run counts on it.
 *
 * PCIe's access control (ACS) and IOMMUs can turn what one GPU writes into another's memory into
 * other bytes, or keep it under way for ever, without an error. So each way is taken once at start,
 * with a second's patience, and what arrives is compared. Allocates, and gives all of it back.
 * Errors: 0 or -errno, reported once with the devices and what can be done. Devices are named by
 * their place in the list. Threads: the caller's alone, with no other work on these devices. */
#ifndef ENGINE_COLLECTIVE_TRY_H
#define ENGINE_COLLECTIVE_TRY_H
#include "engine/collective.h"

/* Lets devices reach each other's memory and tries a copy for every pair, both ways. Where a direct
 * one brings wrong bytes all go through the host's memory from now on, which is a warning; where
 * that does not help, too, -EIO. Where a copy does not end all devices are given up: -ERESTART if
 * it was a direct one, which is a warning, and NCCL_P2P_DISABLE is set then, so that this program,
 * started again, takes none; else -ETIMEDOUT. Nothing for one device or a back end without groups.
 * Before a group of them is opened. */
int sw_try_peers(const struct sw_device_handle *devices, struct sw_stream *const *streams,
                 uint32_t size);

/* Makes each kind of data call once for each of some sizes up to bytes_max (of the whole), as NCCL
 * makes what a kind needs at its first call, by sizes. handles, devices and streams: of the `count`
 * ranks here, which are of one group, or of groups of one size; other processes call it, too. Wrong
 * bytes: -EIO; a call that does not end: -ETIMEDOUT; the group is aborted then. */
int sw_try_collectives(const struct sw_comm_handle *handles, const struct sw_device_handle *devices,
                       struct sw_stream *const *streams, uint32_t count, enum sw_dtype carried,
                       uint64_t bytes_max);

#endif
