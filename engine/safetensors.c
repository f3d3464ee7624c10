/* engine/safetensors.c - reading: a header is parsed by jansson, then every claim it makes is
 * checked against the others and against the file's size, so that later reads need no check at all.
 */
#include "engine/safetensors.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mapped_files.h"

static const struct {
    const char *name;
    uint64_t bytes;
} types[] = {
    [SW_SAFETENSORS_BF16] = {"BF16", 2},
    [SW_SAFETENSORS_F16] = {"F16", 2},
    [SW_SAFETENSORS_F32] = {"F32", 4},
};

const char *sw_safetensors_type_name(enum sw_safetensors_type type) {
    return types[type].name;
}

static int bad(const struct sw_safetensors *file, const char *name, const char *what) {
    sw_error("%s: tensor '%s': %s", file->path, name, what);
    return -EINVAL;
}

static int truncated(const struct sw_safetensors *file, uint64_t needed, const char *what) {
    sw_error("%s: truncated: %s needs %" PRIu64 " bytes, the file has %" PRIu64, file->path, what,
             needed, file->map_bytes);
    return -EINVAL;
}

static int map_file(struct sw_safetensors *file) {
    /* Not blocking: a pipe in the file's place is refused below, not waited for. */
    const int fd = open(file->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        const int ret = -errno;
        sw_error("cannot open %s: %s", file->path, strerror(-ret));
        return ret;
    }
    struct stat info;
    int ret = 0;
    if (fstat(fd, &info) < 0) {
        ret = -errno;
        sw_error("cannot read %s: %s", file->path, strerror(-ret));
    } else if (!S_ISREG(info.st_mode)) {
        ret = -EINVAL;
        sw_error("%s is not a regular file", file->path);
    } else if (info.st_size < 8) {
        file->map_bytes = (uint64_t)info.st_size;
        ret = truncated(file, 8, "the length of its header");
    } else {
        void *map = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (map == MAP_FAILED) {
            ret = -errno;
            sw_error("cannot map %s: %s", file->path, strerror(-ret));
        } else {
            file->map = map;
            file->map_bytes = (uint64_t)info.st_size;
            sw_mapped_add(map, file->map_bytes, file->path);
        }
    }
    close(fd);
    return ret;
}

static int parse_type(const struct sw_safetensors *file, struct sw_safetensors_tensor *tensor,
                      const json_t *value) {
    const char *text = json_string_value(value);
    if (!text) return bad(file, tensor->name, "the header gives no 'dtype'");
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++)
        if (!strcmp(text, types[i].name)) {
            tensor->type = (enum sw_safetensors_type)i;
            return 0;
        }
    sw_error("%s: tensor '%s' has dtype %s; BF16, F16 and F32 can be read", file->path,
             tensor->name, text);
    return -EINVAL;
}

/* A count as the header writes it: an integer that is not negative. */
static int parse_count(const json_t *value, uint64_t *out) {
    if (!json_is_integer(value) || json_integer_value(value) < 0) return -EINVAL;
    *out = (uint64_t)json_integer_value(value);
    return 0;
}

static int parse_tensor(const struct sw_safetensors *file, struct sw_safetensors_tensor *tensor,
                        const char *name, const json_t *value) {
    tensor->name = strdup(name);
    if (!tensor->name) return -ENOMEM;
    if (!json_is_object(value)) return bad(file, name, "the header's entry is not an object");
    const int ret = parse_type(file, tensor, json_object_get(value, "dtype"));
    if (ret < 0) return ret;

    const json_t *shape = json_object_get(value, "shape");
    if (!json_is_array(shape)) return bad(file, name, "the header gives no 'shape'");
    if (json_array_size(shape) > SW_SAFETENSORS_DIMS_MAX)
        return bad(file, name, "more than 8 dimensions");
    tensor->dims = (uint32_t)json_array_size(shape);
    uint64_t bytes = types[tensor->type].bytes;
    tensor->count = 1;
    for (uint32_t i = 0; i < tensor->dims; i++) {
        if (parse_count(json_array_get(shape, i), &tensor->shape[i]) < 0)
            return bad(file, name, "a dimension of its shape is not a whole number >= 0");
        if (__builtin_mul_overflow(tensor->count, tensor->shape[i], &tensor->count) ||
            __builtin_mul_overflow(bytes, tensor->shape[i], &bytes))
            return bad(file, name, "its shape has more elements than 64 bits can count");
    }

    const json_t *offsets = json_object_get(value, "data_offsets");
    uint64_t end;
    if (json_array_size(offsets) != 2 ||
        parse_count(json_array_get(offsets, 0), &tensor->first) < 0 ||
        parse_count(json_array_get(offsets, 1), &end) < 0 || end < tensor->first)
        return bad(file, name, "'data_offsets' is not a pair [begin, end] with begin <= end");
    tensor->bytes = end - tensor->first;
    if (tensor->bytes != bytes) {
        sw_error("%s: tensor '%s': the header contradicts itself: shape and dtype need %" PRIu64
                 " bytes, data_offsets span %" PRIu64,
                 file->path, name, bytes, tensor->bytes);
        return -EINVAL;
    }
    return 0;
}

static int by_place(const void *left, const void *right) {
    const struct sw_safetensors_tensor *a = left, *b = right;
    if (a->first != b->first) return a->first < b->first ? -1 : 1;
    if (a->bytes != b->bytes) return a->bytes < b->bytes ? -1 : 1;
    return strcmp(a->name, b->name);
}

/* Sorted by place, the tensors must follow each other without overlap or hole and end with the
 * file. */
static int check_places(struct sw_safetensors *file) {
    qsort(file->tensors, file->tensor_count, sizeof(*file->tensors), by_place);
    uint64_t end = 0;
    for (uint32_t i = 0; i < file->tensor_count; i++) {
        const struct sw_safetensors_tensor *tensor = &file->tensors[i];
        if (tensor->first != end) {
            sw_error("%s: tensor '%s' begins at byte %" PRIu64 " of the data, where %" PRIu64
                     " is next: %s",
                     file->path, tensor->name, tensor->first, end,
                     tensor->first < end ? "it overlaps another tensor" : "a hole lies before it");
            return -EINVAL;
        }
        end += tensor->bytes; /* no overflow: first + bytes was read as one 63-bit number */
    }
    const uint64_t have = file->map_bytes - file->data_first;
    if (end > have) return truncated(file, file->data_first + end, "the data its header promises");
    if (end < have) {
        sw_error("%s: %" PRIu64 " bytes follow the last tensor: the header does not describe this "
                 "file",
                 file->path, have - end);
        return -EINVAL;
    }
    return 0;
}

static int parse_header(struct sw_safetensors *file, const json_t *root) {
    if (!json_is_object(root)) {
        sw_error("%s: the header is not a JSON object", file->path);
        return -EINVAL;
    }
    file->tensors = calloc(json_object_size(root) + 1, sizeof(*file->tensors));
    if (!file->tensors) return -ENOMEM;
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)root, name, value) {
        if (!strcmp(name, "__metadata__")) {
            const char *origin = json_string_value(json_object_get(value, "origin"));
            if (origin && !(file->origin = strdup(origin))) return -ENOMEM;
            if (json_is_object(value)) continue;
            sw_error("%s: '__metadata__' of the header is not an object", file->path);
            return -EINVAL;
        }
        const int ret = parse_tensor(file, &file->tensors[file->tensor_count++], name, value);
        if (ret < 0) return ret;
    }
    return check_places(file);
}

static int read_header(struct sw_safetensors *file) {
    uint64_t length = 0;
    for (int i = 7; i >= 0; i--) length = length << 8 | file->map[i];
    if (length > SW_SAFETENSORS_HEADER_BYTES_MAX) {
        sw_error(
            "%s: not a safetensors file, or damaged: its first 8 bytes give a header of %" PRIu64
            " bytes, the limit is %u",
            file->path, length, SW_SAFETENSORS_HEADER_BYTES_MAX);
        return -EINVAL;
    }
    if (length > file->map_bytes - 8) return truncated(file, 8 + length, "its header");
    file->data_first = 8 + length;
    json_error_t error;
    json_t *root = json_loadb((const char *)file->map + 8, length, JSON_REJECT_DUPLICATES, &error);
    if (!root) {
        sw_error("%s: the header is not valid: %s (byte %d of it)", file->path, error.text,
                 error.position);
        return -EINVAL;
    }
    const int ret = parse_header(file, root);
    json_decref(root);
    return ret;
}

int sw_safetensors_open(struct sw_safetensors *file, const char *path) {
    assert(file && path);
    memset(file, 0, sizeof(*file));
    file->path = strdup(path);
    if (!file->path) return -ENOMEM;
    int ret = map_file(file);
    if (ret == 0) ret = read_header(file);
    if (ret < 0) sw_safetensors_close(file);
    return ret;
}

void sw_safetensors_close(struct sw_safetensors *file) {
    for (uint32_t i = 0; i < file->tensor_count; i++) free(file->tensors[i].name);
    free(file->tensors);
    if (file->map) {
        sw_mapped_remove(file->map);
        munmap((void *)file->map, file->map_bytes);
    }
    free(file->origin);
    free(file->path);
    memset(file, 0, sizeof(*file));
}

/* IEEE half to float, exact for every value: a subnormal half is its integer times 2^-24. */
static float f32_from_f16(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16, exponent = half >> 10 & 0x1Fu;
    const uint32_t fraction = half & 0x3FFu;
    if (exponent == 0) {
        const float magnitude = (float)fraction * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    const uint32_t wide = exponent == 31 ? 0xFFu : exponent + (127 - 15);
    return sw_f32_from_bits(sign | wide << 23 | fraction << 13);
}

void sw_safetensors_read(const struct sw_safetensors *file,
                         const struct sw_safetensors_tensor *tensor, uint64_t first, uint64_t count,
                         float *out) {
    assert(first <= tensor->count && count <= tensor->count - first);
    if (count == 0) return;
    const uint8_t *src =
        file->map + file->data_first + tensor->first + first * types[tensor->type].bytes;
    if (tensor->type == SW_SAFETENSORS_F32) {
        memcpy(out, src, count * sizeof(*out));
        return;
    }
    const int is_half = tensor->type == SW_SAFETENSORS_F16;
    for (uint64_t i = 0; i < count; i++) {
        uint16_t bits; /* the form does not promise alignment */
        memcpy(&bits, src + 2 * i, sizeof(bits));
        out[i] = is_half ? f32_from_f16(bits) : sw_f32_from_bf16(bits);
    }
}
