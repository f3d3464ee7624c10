/* engine/data.c - maps files of tokens, masks and documents, checks them whole, and orders rows.
 *
 * The shuffle needs no table: position i of an epoch is mapped through a keyed permutation of
 * [0, rows). A balanced Feistel network permutes [0, 4^b), the smallest such range that holds all
 * rows; a value outside [0, rows) is put in again until one falls inside (cycle walking; Black &
 * Rogaway, Ciphers with arbitrary finite domains, CT-RSA 2002). A permutation restricted in this
 * way is again one; the walk takes fewer than 4 rounds on average and ends because cycles close. */
#include "engine/data.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/log.h"
#include "base/mapped_files.h"

enum { FEISTEL_ROUNDS = 8, CHECK_TOKENS = 1 << 16 };
/* Small files are hashed whole; of large ones pieces at even distances. */
enum { SAMPLES = 64, SAMPLE_BYTES = 1 << 16, SAMPLES_BYTES = SAMPLES * SAMPLE_BYTES };

/* Maps a file that is not empty; path lives as long as the map. It stays open to be asked for its
 * time. */
static int map_file(struct sw_data_file *file, const char *path, const char *what, const void **map,
                    uint64_t *bytes) {
    /* Not blocking: a pipe in the file's place is refused below, not waited for. */
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        const int ret = -errno;
        sw_error("%s: cannot open %s: %s", what, path, strerror(-ret));
        return ret;
    }
    struct stat info;
    int ret = -EINVAL;
    if (fstat(fd, &info) < 0) {
        ret = -errno;
        sw_error("%s: cannot read %s: %s", what, path, strerror(-ret));
    } else if (!S_ISREG(info.st_mode)) {
        sw_error("%s: %s is not a regular file", what, path);
    } else if (info.st_size == 0) {
        sw_error("%s: %s is empty", what, path);
    } else {
        void *address = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        ret = address == MAP_FAILED ? -errno : 0;
        if (ret < 0) {
            sw_error("%s: cannot map %s: %s", what, path, strerror(-ret));
        } else {
            *map = address;
            *bytes = (uint64_t)info.st_size;
            sw_mapped_add(address, *bytes, path);
            *file = (struct sw_data_file){path, fd, info.st_mtim, *bytes, 0};
            return 0;
        }
    }
    close(fd);
    return ret;
}

static void unmap(const void *map, uint64_t bytes) {
    sw_mapped_remove(map);
    munmap((void *)map, bytes);
}

static uint32_t token_at(const struct sw_data *data, uint64_t i) {
    return data->token_bytes == 2 ? ((const uint16_t *)data->tokens)[i]
                                  : ((const uint32_t *)data->tokens)[i];
}

/* The maximum of a piece, and only where it is too large a search for the culprit. */
static int check_tokens(const struct sw_data *data) {
    for (uint64_t first = 0; first < data->token_count; first += CHECK_TOKENS) {
        const uint64_t left = data->token_count - first;
        const uint64_t end = first + (left < CHECK_TOKENS ? left : CHECK_TOKENS);
        uint32_t largest = 0;
        for (uint64_t i = first; i < end; i++) {
            const uint32_t token = token_at(data, i);
            largest = token > largest ? token : largest;
        }
        if (largest < data->vocab) continue;
        uint64_t i = first;
        while (token_at(data, i) < data->vocab) i++;
        sw_error("data: %s: token %" PRIu64 " (byte %" PRIu64 ") is %" PRIu32
                 ", the model's vocabulary has %" PRIu32
                 " (tokens are %u-byte integers; was the file made with another tokenizer?)",
                 data->path, i, i * data->token_bytes, token_at(data, i), data->vocab,
                 data->token_bytes);
        return -EINVAL;
    }
    return 0;
}

static int open_tokens(struct sw_data *data) {
    int ret = map_file(&data->files[0], data->path, "data", &data->tokens, &data->map_bytes);
    if (ret < 0) return ret;
    data->token_count = data->map_bytes / data->token_bytes;
    if (data->map_bytes % data->token_bytes != 0) {
        sw_error("data: %s: odd length: %" PRIu64 " bytes are not a whole number of %u-byte tokens "
                 "(cut off, or made for a vocabulary %s 65536?)",
                 data->path, data->map_bytes, data->token_bytes,
                 data->token_bytes == 2 ? "above" : "up to");
        return -EINVAL;
    }
    data->rows = (data->token_count - 1) / data->seq_len;
    if (data->rows == 0) {
        sw_error("data: %s: %" PRIu64 " tokens are too few: one row of %" PRIu32
                 " needs one token more than that",
                 data->path, data->token_count, data->seq_len);
        return -EINVAL;
    }
    return check_tokens(data);
}

static int open_mask(struct sw_data *data, const char *path) {
    uint64_t bytes = 0;
    const void *map = NULL;
    const int ret = map_file(&data->files[1], path, "mask", &map, &bytes);
    if (ret < 0) return ret;
    if (bytes != data->token_count) {
        unmap(map, bytes);
        sw_error("mask: %s has %" PRIu64 " entries, %s has %" PRIu64
                 " tokens: they must be as many, one byte for each token",
                 path, bytes, data->path, data->token_count);
        return -EINVAL;
    }
    data->mask = map;
    uint8_t all = 0;
    for (uint64_t i = 0; i < bytes; i++) all |= data->mask[i];
    if (all == 1) return 0;
    if (all == 0) {
        sw_error("mask: %s is zero everywhere: no prediction would count", path);
        return -EINVAL;
    }
    uint64_t i = 0;
    while (data->mask[i] <= 1) i++;
    sw_error("mask: %s: entry %" PRIu64 " is %u; entries are 0 or 1", path, i, data->mask[i]);
    return -EINVAL;
}

/* The offsets ascend, so the first one beyond the tokens is the first that is too large. */
static int check_documents(const struct sw_data *data, const char *path) {
    for (uint64_t i = 0; i < data->document_count; i++) {
        const uint64_t offset = data->documents[i];
        if (offset >= data->token_count) {
            sw_error("documents: %s: entry %" PRIu64 " is %" PRIu64 ", %s has %" PRIu64
                     " tokens (offsets are counted in tokens, and no document is empty)",
                     path, i, offset, data->path, data->token_count);
            return -EINVAL;
        }
        if (i > 0 && offset <= data->documents[i - 1]) {
            sw_error("documents: %s: entry %" PRIu64 " is %" PRIu64 ", the one before it %" PRIu64
                     ": offsets must be strictly ascending",
                     path, i, offset, data->documents[i - 1]);
            return -EINVAL;
        }
    }
    return 0;
}

static int open_documents(struct sw_data *data, const char *path) {
    uint64_t bytes = 0;
    const void *map = NULL;
    const int ret = map_file(&data->files[2], path, "documents", &map, &bytes);
    if (ret < 0) return ret;
    data->documents = map;
    data->documents_bytes = bytes;
    data->document_count = bytes / sizeof(*data->documents);
    if (bytes % sizeof(*data->documents) != 0) {
        sw_error("documents: %s: odd length: %" PRIu64 " bytes are not a whole number of 8-byte "
                 "offsets",
                 path, bytes);
        return -EINVAL;
    }
    return check_documents(data, path);
}

/* Mask and documents may leave nothing together. */
static int check_counting(const struct sw_data *data, const char *mask_path,
                          const char *documents_path) {
    for (uint64_t row = 0; row < data->rows; row++)
        if (sw_data_counting(data, row) > 0) return 0;
    sw_error("documents: %s%s%s: every target of %s begins a document%s: no prediction would count",
             documents_path, mask_path ? " with the mask " : "", mask_path ? mask_path : "",
             data->path, mask_path ? " or is masked" : "");
    return -EINVAL;
}

static const void *map_of(const struct sw_data *data, int file) {
    return file == 0 ? data->tokens : file == 1 ? (const void *)data->mask : data->documents;
}

/* Without a state, as this may be between steps, which allocate nothing. */
static uint64_t hash_file(const struct sw_data *data, int file) {
    const uint8_t *bytes = map_of(data, file);
    const uint64_t length = data->files[file].bytes;
    uint64_t hash = length;
    if (length <= SAMPLES_BYTES) return XXH64(bytes, length, hash);
    for (uint64_t i = 0; i < SAMPLES; i++)
        hash = XXH64(bytes + (length - SAMPLE_BYTES) / (SAMPLES - 1) * i, SAMPLE_BYTES, hash);
    return hash;
}

static void hash_files(struct sw_data *data) {
    for (int i = 0; i < SW_DATA_FILES; i++)
        if (data->files[i].path) data->files[i].hash = hash_file(data, i);
}

int sw_data_open(struct sw_data *data, const char *path, const char *mask_path,
                 const char *documents_path, uint32_t vocab, uint32_t seq_len, enum sw_order order,
                 uint64_t seed) {
    assert(data && path && vocab > 0 && seq_len > 0);
    memset(data, 0, sizeof(*data));
    data->path = path;
    data->vocab = vocab;
    data->seq_len = seq_len;
    data->token_bytes = vocab > 65536 ? 4 : 2;
    data->order = order;
    data->seed = seed;
    int ret = open_tokens(data);
    if (ret == 0 && mask_path) ret = open_mask(data, mask_path);
    if (ret == 0 && documents_path) ret = open_documents(data, documents_path);
    if (ret == 0 && documents_path) ret = check_counting(data, mask_path, documents_path);
    if (ret == 0) hash_files(data);
    if (ret < 0) sw_data_close(data);
    return ret;
}

void sw_data_close(struct sw_data *data) {
    if (!data) return;
    if (data->tokens) unmap(data->tokens, data->map_bytes);
    if (data->mask) unmap(data->mask, data->token_count);
    if (data->documents) unmap(data->documents, data->documents_bytes);
    for (int i = 0; i < SW_DATA_FILES; i++)
        if (data->files[i].path) close(data->files[i].fd);
    memset(data, 0, sizeof(*data));
}

/* The finalizer of splitmix64 (Steele, Lea & Flood, OOPSLA 2014): every bit of x reaches every bit.
 */
static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

static uint64_t permute(uint64_t index, uint64_t rows, uint64_t key) {
    uint32_t half_bits = 1;
    while (half_bits < 32 && (uint64_t)1 << 2 * half_bits < rows) half_bits++;
    const uint64_t half_mask = ((uint64_t)1 << half_bits) - 1;
    do {
        uint64_t left = index >> half_bits, right = index & half_mask;
        for (uint64_t round = 1; round <= FEISTEL_ROUNDS; round++) {
            const uint64_t next = left ^ (mix(right ^ mix(key + round)) & half_mask);
            left = right;
            right = next;
        }
        index = left << half_bits | right;
    } while (index >= rows);
    return index;
}

uint64_t sw_data_row(const struct sw_data *data, uint64_t position) {
    const uint64_t epoch = position / data->rows, index = position % data->rows;
    if (data->order == SW_ORDER_SEQUENTIAL) return index;
    /* Mixed twice, so that neighbouring seeds and epochs share nothing. */
    const uint64_t key = mix(mix(data->seed + 0x9E3779B97F4A7C15u) + epoch);
    return permute(index, data->rows, key);
}

/* How many documents begin before a token. */
static uint64_t documents_before(const struct sw_data *data, uint64_t token) {
    uint64_t low = 0, high = data->document_count;
    while (low < high) {
        const uint64_t middle = low + (high - low) / 2;
        if (data->documents[middle] < token)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* What began before the row or with its first input begins at 0 in it. */
static void fill_documents(const struct sw_data *data, uint64_t first, uint8_t *mask,
                           uint32_t *starts) {
    uint64_t next = documents_before(data, first + 1);
    uint32_t start = 0;
    for (uint32_t i = 0; i < data->seq_len; i++) {
        if (starts) starts[i] = start;
        if (next == data->document_count || data->documents[next] != first + i + 1) continue;
        mask[i] = 0; /* nothing in its own document predicts the target */
        start = i + 1;
        next++;
    }
}

void sw_data_fill(const struct sw_data *data, uint64_t row, int32_t *inputs, int32_t *targets,
                  uint8_t *mask, uint32_t *starts) {
    assert(row < data->rows);
    const uint64_t first = row * data->seq_len;
    for (uint32_t i = 0; i < data->seq_len; i++) {
        inputs[i] = (int32_t)token_at(data, first + i);
        targets[i] = (int32_t)token_at(data, first + i + 1);
    }
    if (data->mask)
        memcpy(mask, data->mask + first + 1, data->seq_len);
    else
        memset(mask, 1, data->seq_len);
    if (data->documents)
        fill_documents(data, first, mask, starts);
    else if (starts)
        memset(starts, 0, data->seq_len * sizeof(*starts));
}

uint64_t sw_data_counting(const struct sw_data *data, uint64_t row) {
    assert(row < data->rows);
    const uint64_t first = row * data->seq_len + 1, end = first + data->seq_len; /* targets */
    uint64_t count = data->seq_len;
    if (data->mask) {
        count = 0;
        for (uint64_t i = first; i < end; i++) count += data->mask[i];
    }
    for (uint64_t d = documents_before(data, first);
         d < data->document_count && data->documents[d] < end; d++)
        count -= data->mask ? data->mask[data->documents[d]] : 1;
    return count;
}

static void hash_samples(XXH64_state_t *state, const uint8_t *bytes, uint64_t length) {
    XXH64_update(state, &length, sizeof(length));
    if (length <= SAMPLES_BYTES) {
        XXH64_update(state, bytes, length);
        return;
    }
    const uint64_t last = length - SAMPLE_BYTES;
    for (uint64_t i = 0; i < SAMPLES; i++)
        XXH64_update(state, bytes + last / (SAMPLES - 1) * i, SAMPLE_BYTES);
}

uint64_t sw_data_fingerprint(const struct sw_data *data) {
    XXH64_state_t *state = XXH64_createState();
    assert(state);
    XXH64_reset(state, 0);
    XXH64_update(state, &data->token_bytes, sizeof(data->token_bytes));
    hash_samples(state, data->tokens, data->map_bytes);
    if (data->mask) hash_samples(state, data->mask, data->token_count);
    if (data->documents) {
        XXH64_update(state, "documents", sizeof("documents")); /* no mask has this hash */
        hash_samples(state, (const uint8_t *)data->documents, data->documents_bytes);
    }
    const uint64_t hash = XXH64_digest(state);
    XXH64_freeState(state);
    return hash;
}

void sw_data_hash_files(const struct sw_data *data, uint64_t hashes[SW_DATA_FILES]) {
    for (int i = 0; i < SW_DATA_FILES; i++) hashes[i] = data->files[i].hash;
}

/* A file that was written to. One that is shorter is not looked into. */
static int look_into(struct sw_data *data, int i, const struct stat *now) {
    static const char *const names[SW_DATA_FILES] = {"data", "mask", "documents"};
    struct sw_data_file *file = &data->files[i];
    if ((uint64_t)now->st_size < file->bytes) {
        sw_error("%s became shorter while it was read", file->path);
        return -EIO;
    }
    if (hash_file(data, i) == file->hash) {
        file->changed = now->st_mtim;
        return 0;
    }
    sw_error(
        "%s: %s was written over while it was read, so that later rows are of another file; put "
        "back what it was, and go on from the last commit with --resume",
        names[i], file->path);
    return -EIO;
}

int sw_data_check_unchanged(struct sw_data *data) {
    for (int i = 0; i < SW_DATA_FILES; i++) {
        const struct sw_data_file *file = &data->files[i];
        struct stat now;
        if (!file->path || fstat(file->fd, &now) < 0) continue;
        if (now.st_mtim.tv_sec == file->changed.tv_sec &&
            now.st_mtim.tv_nsec == file->changed.tv_nsec && (uint64_t)now.st_size >= file->bytes)
            continue;
        const int ret = look_into(data, i, &now);
        if (ret < 0) return ret;
    }
    return 0;
}
