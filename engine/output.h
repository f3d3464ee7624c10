/* engine/output.h - the output folder of a run: taken without losing what is there, filled so that
 * whatever is visible under its final name is complete. */
#ifndef ENGINE_OUTPUT_H
#define ENGINE_OUTPUT_H
#include <stdint.h>
#include "engine/model.h"
#include "nvme/commit.h"

/* Names of the stores beside the optimizer's (SW_STORE_NAME): what else of a run is on NVMe. Those
 * of further processes of a run have "-pN" behind them. */
#define SW_STORE_WEIGHTS   "weights"
#define SW_STORE_GRADIENTS "gradients"
#define SW_STORE_INPUTS    "inputs"

/* Checks that `out` can be taken: absent, or empty, or (reuse names the option that admits it,
 * "--restart" or "--resume", else NULL) holding only what a run leaves and the log and trace named
 * here (NULL: none); and that it is neither the model's folder nor inside it. Changes nothing.
 * -EEXIST, -ENOENT, ... reported. */
int sw_output_check(const char *out, const char *model_dir, const char *reuse, const char *log,
                    const char *trace);

/* -EEXIST, reported, when writing `path` (NULL: fine) would overwrite one of the inputs (NULL
 * entries are fine) or a file of the model's folder. */
int sw_output_is_input(const char *option, const char *path, const char *const *inputs, int count,
                       const char *model_dir);

/* Checks before a run that a file can be made (path NULL: none is asked for), or that a folder is
 * there, writable and outside the model's. `option` is named in the error. Change nothing. 0 or
 * -errno, reported. */
int sw_output_check_file(const char *option, const char *path);
/* That no folder is there; nor, where the file is `replaced` (written as PATH.partial, then
 * renamed), a device, a pipe or a link to one, in whose place a file would come to be. */
int sw_output_check_kind(const char *option, const char *path, int replaced);
int sw_output_check_folder(const char *option, const char *path, const char *model_dir);

/* Makes the folder (*made), or takes one that is empty: -EEXIST otherwise. `who` begins the error.
 */
int sw_output_make_empty(const char *who, const char *path, int *made);

/* Whether a whole model lies in `out`. */
int sw_output_has_model(const char *out);

/* Makes the folder where it is absent (*made) and locks it for this run until *held is closed. */
int sw_output_take(const char *out, int *made, int *held);

/* Whether what is free in the folder, with what sw_output_empty() will remove where it is
 * `emptied`, holds a model of so many bytes. 0 or -ENOSPC, reported. */
int sw_output_check_space(const char *out, uint64_t need_bytes, int emptied);

/* Removes what an earlier run left, once the new one is sure to start: all but the store's files,
 * the log and the unfinished trace. */
int sw_output_empty(const char *out, const char *log, const char *trace);

/* Writes the model to dir: to dir.partial first, then renamed, in the place of an earlier save that
 * is there. */
int sw_output_save(const struct sw_model *model, const char *dir, enum sw_dtype dtype,
                   sw_model_fetch fetch, void *ctx);

/* `out`.step-N, or the next free name like it; in `out` when its parent cannot be written. */
void sw_output_stopped_name(const char *out, uint64_t step, char *name, uint32_t name_size);

/* A save that a kill cut short, as sw_output_drop_partial() finds it; of_stop: of a run that was
 * being stopped, whose folder lies beside --out. `path` has been removed. */
struct sw_partial_save {
    const char *path;
    uint64_t step;
    int of_stop;
};
/* Removes what saves left that were cut short, and tells each. 0 or -errno, reported. */
int sw_output_drop_partial(const char *out, void (*tell)(void *ctx, const struct sw_partial_save *),
                           void *ctx);

#endif
