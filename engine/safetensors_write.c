/* engine/safetensors_write.c - the header first, since all sizes are known, then a plain stream. */
#include "engine/safetensors.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"

/* One write call moves at most 2 GiB; smaller pieces keep it interruptible. */
enum { WRITE_BYTES_MAX = 64 << 20 };

uint64_t sw_safetensors_entry_bytes(const char *name) {
    /* "name":{"dtype":"BF16","shape":[R,C],"data_offsets":[A,B]}, with four numbers of 20 digits; a
     * character of the name may need six when escaped. */
    return 6 * strlen(name) + 64 + 4 * 20;
}

static json_t *header_json(const struct sw_safetensors_entry *entries, uint32_t count,
                           enum sw_dtype dtype, const char *origin, uint64_t *data_bytes) {
    json_t *root = json_pack("{s:{s:s,s:s*}}", "__metadata__", "format", "pt", "origin", origin);
    uint64_t end = 0;
    for (uint32_t i = 0; root && i < count; i++) {
        const struct sw_safetensors_entry *entry = &entries[i];
        const uint64_t first = end;
        end += entry->rows * (entry->cols ? entry->cols : 1) * sw_dtype_bytes(dtype);
        json_t *shape = entry->cols
                            ? json_pack("[II]", (json_int_t)entry->rows, (json_int_t)entry->cols)
                            : json_pack("[I]", (json_int_t)entry->rows);
        json_t *value =
            json_pack("{s:s,s:o,s:[II]}", "dtype", dtype == SW_FP32 ? "F32" : "BF16", "shape",
                      shape, "data_offsets", (json_int_t)first, (json_int_t)end);
        if (!value || json_object_set_new(root, entry->name, value) < 0) {
            json_decref(root);
            root = NULL;
        }
    }
    *data_bytes = end;
    return root;
}

enum { STREAM = -1 };

/* At a byte of the file, or where the stream is. */
static int write_all(struct sw_safetensors_writer *writer, int64_t at, const void *data,
                     uint64_t bytes) {
    const char *next = data;
    while (bytes > 0) {
        const size_t piece = bytes < WRITE_BYTES_MAX ? (size_t)bytes : WRITE_BYTES_MAX;
        const ssize_t done = at == STREAM ? write(writer->fd, next, piece)
                                          : pwrite(writer->fd, next, piece, (off_t)at);
        if (done < 0) {
            if (errno == EINTR) continue;
            const int ret = -errno;
            sw_error("cannot write %s: %s", writer->path, strerror(-ret));
            return ret;
        }
        next += done;
        bytes -= (uint64_t)done;
        if (at != STREAM) at += done;
    }
    return 0;
}

static int write_header(struct sw_safetensors_writer *writer, const char *text) {
    const uint64_t text_bytes = strlen(text);
    const uint64_t length = (text_bytes + 7) / 8 * 8; /* so that the data is aligned in the file */
    if (length > SW_SAFETENSORS_HEADER_BYTES_MAX) {
        sw_error("%s: a header of %" PRIu64 " bytes is beyond the form's limit of %u", writer->path,
                 length, SW_SAFETENSORS_HEADER_BYTES_MAX);
        return -EFBIG;
    }
    writer->data_first = 8 + length;
    uint8_t prefix[8];
    for (int i = 0; i < 8; i++) prefix[i] = (uint8_t)(length >> 8 * i);
    int ret = write_all(writer, STREAM, prefix, sizeof(prefix));
    if (ret == 0) ret = write_all(writer, STREAM, text, text_bytes);
    if (ret == 0) ret = write_all(writer, STREAM, "       ", length - text_bytes);
    return ret;
}

int sw_safetensors_create(struct sw_safetensors_writer *writer, const char *path,
                          const struct sw_safetensors_entry *entries, uint32_t count,
                          enum sw_dtype dtype, const char *origin) {
    assert(writer && path);
    memset(writer, 0, sizeof(*writer));
    writer->fd = -1;
    json_t *root = header_json(entries, count, dtype, origin, &writer->data_bytes);
    char *text = root ? json_dumps(root, JSON_COMPACT) : NULL;
    json_decref(root);
    writer->path = strdup(path);
    int ret = -ENOMEM;
    if (!text || !writer->path) goto fail;
    writer->fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (writer->fd < 0) {
        ret = -errno;
        sw_error("cannot create %s: %s", path, strerror(-ret));
        goto fail;
    }
    ret = write_header(writer, text);
    if (ret < 0) goto fail;
    free(text);
    return 0;
fail:
    free(text);
    sw_safetensors_abort(writer);
    return ret;
}

int sw_safetensors_write(struct sw_safetensors_writer *writer, const void *data, uint64_t bytes) {
    assert(writer->fd >= 0 && bytes <= writer->data_bytes - writer->written_bytes);
    const int ret = write_all(writer, STREAM, data, bytes);
    if (ret == 0) writer->written_bytes += bytes;
    return ret;
}

int sw_safetensors_write_at(struct sw_safetensors_writer *writer, uint64_t first, const void *data,
                            uint64_t bytes) {
    assert(writer->fd >= 0 && first <= writer->data_bytes && bytes <= writer->data_bytes - first);
    const int ret = write_all(writer, (int64_t)(writer->data_first + first), data, bytes);
    if (ret == 0) writer->written_bytes += bytes;
    return ret;
}

int sw_safetensors_finish(struct sw_safetensors_writer *writer) {
    assert(writer->fd >= 0 && writer->written_bytes == writer->data_bytes);
    int ret = fsync(writer->fd) < 0 ? -errno : 0;
    if (close(writer->fd) < 0 && ret == 0) ret = -errno;
    writer->fd = -1;
    if (ret < 0) {
        sw_error("cannot make %s durable: %s", writer->path, strerror(-ret));
        unlink(writer->path);
    }
    free(writer->path);
    writer->path = NULL;
    return ret;
}

void sw_safetensors_abort(struct sw_safetensors_writer *writer) {
    const int created = writer->fd >= 0;
    if (created) close(writer->fd);
    if (created && writer->path) unlink(writer->path);
    writer->fd = -1;
    free(writer->path);
    writer->path = NULL;
}
