/* engine/export.h - the optimizer as a folder of safetensors, for other numbers of ranks, other
 * layouts and other tools.
 *
 * optimizer-00001-of-0000N.safetensors and optimizer.safetensors.index.json hold FP32 tensors
 * "master.NAME", "momentum.NAME" and "variance.NAME", with names and shapes of the model's files;
 * optimizer.json, put in place last, says where the run stood. docs/optimizer-files.md has every
 * field. engine/import.h reads it. */
#ifndef ENGINE_EXPORT_H
#define ENGINE_EXPORT_H
#include <stdatomic.h>
#include <stdint.h>
#include "engine/model.h"
#include "engine/options.h"

#define SW_EXPORT_STEM  "optimizer"
#define SW_EXPORT_INDEX "optimizer.safetensors.index.json"
#define SW_EXPORT_STATE "optimizer.json"

/* What all files of an export name as their origin: "RUN, step N". */
enum { SW_EXPORT_ORIGIN_BYTES = 48 };
#define SW_EXPORT_ORIGIN_FORMAT "%s, step %llu"

enum { SW_EXPORT_PARTS = 3, SW_EXPORT_NAME_MAX = SW_TENSOR_NAME_MAX + 16 };

/* "master.NAME", "momentum.NAME", "variance.NAME" for parts 0, 1 and 2. */
void sw_export_name(int part, const char *tensor, char name[SW_EXPORT_NAME_MAX]);

struct sw_export_options {
    const char *model, *from, *to;
    const char *nvme[SW_NVME_FOLDERS_MAX];
    uint32_t nvme_count;     /* 0: the store, of all processes, lies in `from` */
    uint64_t file_bytes_max; /* of tensors in one file, where it has several */
};

/* The documented defaults; paths NULL. */
void sw_export_defaults(struct sw_export_options *options);

struct sw_export_hooks {
    void *ctx;
    void (*on_progress)(void *ctx, uint64_t done_bytes, uint64_t total_bytes);
    const atomic_int *stop; /* non-zero: leave, with nothing left behind */
};

struct sw_export_report {
    uint64_t step, params, bytes;
    uint32_t files; /* with tensors */
};

/* Exports the last commit of a store that no run has open; the store is locked meanwhile and only
 * read. `to` is not there or empty. 0, and then the report is filled in; 1: stopped; or -errno,
 * reported. */
int sw_export(const struct sw_export_options *options, const struct sw_export_hooks *hooks,
              struct sw_export_report *report);

#endif
