/* engine/networks.h - the networks over which the processes of a run reach each other by TCP.
 *
 * Messages of the world go where the message library sends them, which may be no network at all.
 * NCCL finds its processes over TCP, on interfaces of its own choice, and waits for ever where one
 * leads nowhere. So each process connects to each address of each other one before that, and keeps
 * to the interfaces at which all others have found it. IPv4 alone. */
#ifndef ENGINE_NETWORKS_H
#define ENGINE_NETWORKS_H
#include <net/if.h>
#include <stddef.h>
#include <stdint.h>
#include "engine/collective.h"

enum { SW_NETWORKS_MAX = 16, SW_NETWORKS_NAMES_BYTES = SW_NETWORKS_MAX * IF_NAMESIZE + 2 };

struct sw_network {
    char name[IF_NAMESIZE];
    uint32_t address; /* IPv4, as on the wire */
};

/* This machine's that are up, each with its first address: how many. */
uint32_t sw_networks_list(struct sw_network out[SW_NETWORKS_MAX]);

/* names [SW_NETWORKS_NAMES_BYTES]: of `mine`, as NCCL_SOCKET_IFNAME, those that all other processes
 * of the channel reach, of the first kind that has any, in NCCL's own order of kinds; "" where
 * there is none. An address that swallows what it is sent costs two seconds. Control call of all
 * processes; 0 or -errno, reported. Where no socket or thread can be made nobody is reached. */
int sw_networks_try(const struct sw_comm_handle *channel, const struct sw_network *mine,
                    uint32_t count, char *names);

/* Tries this machine's and sets NCCL_SOCKET_IFNAME, unless that or another setting of NCCL's,
 * in the environment or NCCL's files, has chosen. As above. */
int sw_networks_choose(const struct sw_comm_handle *channel);

#endif
