/* engine/tensor_folder.h - the safetensors files of a folder, single or with an index: found,
 * mapped, checked against the index, and their tensors looked up by name.
 *
 * Read-only after open, any thread. Errors: 0 or -errno, reported with folder, file and tensor. */
#ifndef ENGINE_TENSOR_FOLDER_H
#define ENGINE_TENSOR_FOLDER_H
#include <stddef.h>
#include <stdint.h>
#include "engine/safetensors.h"

/* Where a tensor lies. */
struct sw_weight {
    const struct sw_safetensors *file;
    const struct sw_safetensors_tensor *tensor;
};

/* A tensor of any file. */
struct sw_tensor_place {
    const char *name;
    struct sw_weight at;
    int used; /* it was asked for */
};

struct sw_tensor_folder {
    const char *dir; /* the caller's */
    struct sw_safetensors *files;
    uint32_t file_count;
    struct sw_tensor_place *list; /* by name; until sw_tensor_folder_forget() */
    size_t count;
};

/* single: the one file's name, or NULL where there is always an index. */
int sw_tensor_folder_open(struct sw_tensor_folder *folder, const char *dir, const char *single,
                          const char *index);
void sw_tensor_folder_close(struct sw_tensor_folder *folder);
/* Frees the list; what was found stays. */
void sw_tensor_folder_forget(struct sw_tensor_folder *folder);

/* The tensor `name`, which must have this shape (cols 0: a vector). */
int sw_tensor_folder_find(const struct sw_tensor_folder *folder, const char *name, uint64_t rows,
                          uint64_t cols, struct sw_weight *at);

#endif
