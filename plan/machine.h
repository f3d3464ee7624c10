/* plan/machine.h - a machine as a plan sees it: what memory it has and how fast each part is.
 *
 * Figures come from the machine profile (offload/profile.h), which `spillway bench all` fills, or
 * from a shipped profile of the same form, whose figures are published peaks. 0 means unknown; a
 * machine without GPUs computes on its CPUs. Rates are per second, copies and links are one GPU's.
 * Pure data: any thread may read. Errors: 0 or -errno, reported. */
#ifndef PLAN_MACHINE_H
#define PLAN_MACHINE_H
#include <jansson.h>
#include <stddef.h>
#include <stdint.h>

enum { SW_MACHINE_DRIVES_MAX = 64, SW_MACHINE_NUMA_MAX = 64, SW_MACHINE_MODELS_MAX = 16 };

struct sw_machine_drive {
    char name[128];
    double bytes; /* of its file system or its data sheet */
    double read_bytes_per_s, write_bytes_per_s;
    double mixed_bytes_per_s; /* both directions together, as much of each */
};

struct sw_machine_numa { /* a NUMA node */
    double cores, memory_bytes, memory_bytes_per_s, adam_bytes_per_s;
};

/* What a device takes for the operations of a model's units, a micro-batch at a time and alone: of
 * one layer, of the norm, and of all parts of the embedding and of the head. Ranks that share the
 * CPU were measured at once. */
struct sw_machine_model {
    char key[128];                            /* sw_machine_model_key() */
    double layer_forward_s, layer_backward_s; /* backward holds the recomputation */
    double embed_forward_s, embed_backward_s, norm_forward_s, norm_backward_s;
    /* The logits; the logits again, with the gradients of input and matrix, or with one of them;
     * all parts at once. */
    double head_forward_s, head_backward_s, head_dx_s, head_grad_s, head_whole_s;
    double cpus; /* kept busy meanwhile where the CPU is the device, by all ranks; 0: unknown */
};

struct sw_machine {
    char name[256], about[256], gpu[64];
    char measured[16]; /* the date; "": nobody measured it */

    double gpus, gpu_memory_bytes;
    double gpu_reserved_bytes;     /* that contexts and libraries take */
    double gpu_memory_bytes_per_s; /* of its own memory */
    double flops_per_s;            /* of BF16 products with FP32 sums; without GPUs, the CPUs' */

    double h2d_bytes_per_s, d2h_bytes_per_s; /* pinned, alone */
    double both_bytes_per_s;                 /* pinned, both ways at once, added up */
    double h2d_pageable_bytes_per_s, d2h_pageable_bytes_per_s;
    double gather_bytes_per_s, scatter_bytes_per_s; /* that each rank sends meanwhile */

    double
        round_bytes_per_s; /* of gradients rounded on the device: read in FP32, written in BF16 */
    /* The CPU as device: what a task of a team of threads takes beyond its work, as the team must
     * be woken. */
    double region_s;

    double cores;
    double cpus; /* processing units that threads may run on; 0: as many as cores */
    double memory_bytes;
    double memory_bytes_per_s; /* reads and writes together, of all NUMA nodes */
    double adam_bytes_per_s;   /* of gradient, state and weight that the update moves, likewise */
    uint32_t numa_count;       /* 0: not told one by one */
    struct sw_machine_numa numa[SW_MACHINE_NUMA_MAX];

    /* That a commit takes once its writes are over: every drive synced, the record in its place. */
    double commit_s;

    /* GPUs and drives behind one PCIe switch, whose link to the host they share; they are dealt to
     * the switches in their order. */
    double switch_bytes_per_s; /* each way; 0: no switch is in the way */
    double gpus_per_switch, drives_per_switch;

    uint32_t drive_count;
    struct sw_machine_drive drives[SW_MACHINE_DRIVES_MAX];

    uint32_t model_count;
    struct sw_machine_model models[SW_MACHINE_MODELS_MAX];
};

/* A file, or the name of a shipped profile, and changes to it: "8xh100", "my.json",
 * "8xh100:ram=1T,nvme=8xgen5,pcie=50G". sw_machine_changes() lists what can be changed. NULL: this
 * machine, with what the user's own profile says of it. A file wins over a name. */
int sw_machine_open(struct sw_machine *out, const char *text);

/* Whether the user's own profile tells what this machine computes, so that a run on it can be
 * planned. Opens no device; a profile that cannot be read is reported, and tells nothing. */
int sw_machine_is_measured(void);

/* Of this machine: the drives are those of the folders, one each, with what is free there, and with
 * the rates that the user's profile has of them. Without folders it is the current one, for the
 * output folder that nobody has named yet. 0 or -errno, reported. */
#define SW_MACHINE_OUT_FOLDER "the output folder"
int sw_machine_use_folders(struct sw_machine *m, const char *const *folders, uint32_t count);

/* The figures of a profile. `path` is for messages. */
int sw_machine_parse(struct sw_machine *out, const json_t *root, const char *path);

/* Sets one figure by the name that it has in a profile's "machine" object. -ENOENT, not reported,
 * when there is no such figure. */
int sw_machine_set(struct sw_machine *m, const char *figure, double value);
/* All figures, by that name: the i-th one's name and value; NULL behind the last. */
const char *sw_machine_figure(const struct sw_machine *m, int i, double *value);

/* Changes of the form "ram=1T,nvme=8xgen5". */
int sw_machine_change(struct sw_machine *m, const char *changes);
/* The i-th change in words: "ram=SIZE" and what it does; NULL behind the last. */
const char *sw_machine_changes(int i, const char **what);

/* The i-th shipped profile: its name, its text and what the bare name means; NULL behind the last.
 */
const char *sw_machine_shipped(int i, const char **text);

/* What the times of a model's units depend on, as a profile names it: shapes of the units, rows of
 * a micro-batch, dtype and device. Returns out. */
struct sw_model_config;
struct sw_train_options;
const char *sw_machine_model_key(const struct sw_model_config *config,
                                 const struct sw_train_options *o, char *out, size_t out_size);
/* That model's times, or NULL. */
const struct sw_machine_model *sw_machine_find_model(const struct sw_machine *m, const char *key);
/* Its figures by the names that they have in a profile; NULL behind the last. */
const char *sw_machine_model_figure(const struct sw_machine_model *model, int i, double *value);

/* Of all drives together. */
double sw_machine_drive_bytes(const struct sw_machine *m);

#endif
