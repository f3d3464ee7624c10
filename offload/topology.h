/* offload/topology.h - the machine as this process may use it (hwloc): cores, nodes, quota. */
#ifndef OFFLOAD_TOPOLOGY_H
#define OFFLOAD_TOPOLOGY_H
#include <stdint.h>

enum { SW_TEAM_THREADS_MAX = 1024 }; /* of one thread team */

struct sw_topology {
    int cpus;       /* processing units in the affinity mask */
    int cores;      /* cores with at least one of them: fewer where cores have several threads */
    int quota_cpus; /* floor of the cgroup's CPU quota, at least 1; cpus when there is none */
    double quota;   /* the quota itself, in CPUs; 0: none */
    int numa_nodes; /* with processing units in the mask, at least 1 */
    int user_binds; /* the user's environment lets OpenMP place its threads (OMP_PROC_BIND, ...) */
    char cpu_list[128];     /* the mask, as "0-3,8" */
    uint64_t memory_bytes;  /* what may be used: the machine's, or the cgroup's limit if smaller */
    uint64_t memory_group;  /* of processes that share that limit; 0: it is the machine's memory */
    uint64_t machine_bytes; /* all memory of the machine */
    char cpu_name[96];
};

/* 0 or -errno, reported. Read once; cheap. */
int sw_topology_read(struct sw_topology *topology);

/* A NUMA node with cores in the affinity mask. */
struct sw_numa_node {
    int id;    /* as the system counts; -1: the whole machine, where nodes cannot be told apart */
    int cores; /* of the node, in the mask */
    uint64_t memory_bytes;
};
enum { SW_NUMA_NODES_MAX = 64 };
/* Fills nodes; their count, at least 1. */
int sw_topology_numa(const struct sw_topology *topology,
                     struct sw_numa_node nodes[SW_NUMA_NODES_MAX]);

/* The NUMA node next to a device at a PCI address ("0000:3B:00.0"), as the system counts; -1: none
 * is nearer than others, or it is unknown. */
int sw_topology_bus_node(const char *address);

/* How many processes of this one's control group the kernel has killed for lack of memory so far;
 * where no group counts them, of the machine. 0 where nothing does. */
uint64_t sw_topology_oom_kills(void);

/* min(mask, quota): the default size of a thread team that computes. */
int sw_topology_threads(const struct sw_topology *topology);

/* min(cores, quota): the default size of Adam's team. It waits for memory, so a core's second
 * hardware thread adds nothing and takes cycles from what runs beside it. */
int sw_topology_adam_threads(const struct sw_topology *topology);

#endif
