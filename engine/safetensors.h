/* engine/safetensors.h - one safetensors file: mapped and checked, or written as a stream.
 *
 * The form: an 8-byte little-endian length, that many bytes of JSON, then the tensors' data without
 * gaps. A file is believed only after its header agrees with itself and with the file's size; a
 * file cut anywhere is named as truncated. Readers: read-only after open, any thread. Writers: one
 * thread. Errors: 0 or -errno, reported with file and tensor. */
#ifndef ENGINE_SAFETENSORS_H
#define ENGINE_SAFETENSORS_H
#include <stdint.h>
#include "base/bf16.h"

/* The form's own limit on the JSON; a writer splits its tensors over files before it. */
#define SW_SAFETENSORS_HEADER_BYTES_MAX 100000000u

enum sw_safetensors_type { SW_SAFETENSORS_BF16, SW_SAFETENSORS_F16, SW_SAFETENSORS_F32 };
enum { SW_SAFETENSORS_DIMS_MAX = 8 };

struct sw_safetensors_tensor {
    char *name;
    enum sw_safetensors_type type;
    uint32_t dims;
    uint64_t shape[SW_SAFETENSORS_DIMS_MAX];
    uint64_t count; /* elements */
    uint64_t first; /* byte in the data section */
    uint64_t bytes;
};

struct sw_safetensors {
    char *path;
    char *origin; /* what its metadata says it is of, or NULL */
    const uint8_t *map;
    uint64_t map_bytes;
    uint64_t data_first; /* byte of the file where the data section begins */
    uint32_t tensor_count;
    struct sw_safetensors_tensor *tensors; /* in the order of their data */
};

int sw_safetensors_open(struct sw_safetensors *file, const char *path);
void sw_safetensors_close(struct sw_safetensors *file); /* an all-zero struct is fine */

const char *sw_safetensors_type_name(enum sw_safetensors_type type);

/* FP32 values of elements [first, first + count) of a tensor. */
void sw_safetensors_read(const struct sw_safetensors *file,
                         const struct sw_safetensors_tensor *tensor, uint64_t first, uint64_t count,
                         float *out);

/* A tensor to be written; cols is 0 for a vector. */
struct sw_safetensors_entry {
    const char *name;
    uint64_t rows, cols;
};

struct sw_safetensors_writer {
    char *path;
    int fd;
    uint64_t data_first;                /* byte of the file where the data section begins */
    uint64_t data_bytes, written_bytes; /* promised by the header, and written so far */
};

/* The most that one entry adds to a header, so that a caller can split before the limit. */
uint64_t sw_safetensors_entry_bytes(const char *name);

/* Creates (or empties) the file and writes its header, padded to 8 bytes; then the data of all
 * tensors follows in order through write, or in pieces of any order, each byte once, through
 * write_at (first: byte of the data section); finish checks that all of it came and makes it
 * durable. origin: a text for the metadata's "origin", or NULL. */
int sw_safetensors_create(struct sw_safetensors_writer *writer, const char *path,
                          const struct sw_safetensors_entry *entries, uint32_t count,
                          enum sw_dtype dtype, const char *origin);
int sw_safetensors_write(struct sw_safetensors_writer *writer, const void *data, uint64_t bytes);
int sw_safetensors_write_at(struct sw_safetensors_writer *writer, uint64_t first, const void *data,
                            uint64_t bytes);
int sw_safetensors_finish(struct sw_safetensors_writer *writer);
void sw_safetensors_abort(struct sw_safetensors_writer *writer); /* closes and removes the file */

#endif
