/* engine/data.h - token files, rows and their order.
 *
 * Tokens are flat little-endian uint16 up to a vocabulary of 65,536, else uint32; an optional mask
 * file has one uint8 per token: byte i says whether the prediction OF token i counts. An optional
 * file of documents has the little-endian uint64 offsets, in tokens, at which they begin: no row
 * attends from one into another, and the prediction of a document's first token does not count.
 * Files are mapped. Row r of an epoch has inputs tok[rT .. rT+T-1] and targets one token later; n
 * tokens give floor((n-1)/T) rows. Position p = 0, 1, ... of the run is row order(p % rows) of
 * epoch p / rows: a pure function of seed and epoch. Read-only after open, but for the check that
 * the files are; any thread may read. */
#ifndef ENGINE_DATA_H
#define ENGINE_DATA_H
#include <stdint.h>
#include <time.h>

enum sw_order { SW_ORDER_SHUFFLE, SW_ORDER_SEQUENTIAL };

enum { SW_DATA_FILES = 3 }; /* tokens, mask, documents */

/* A mapped file, as it was when it was last found to be what it had been. */
struct sw_data_file {
    const char *path; /* the caller's string; NULL: there is none */
    int fd;
    struct timespec changed; /* by the file system's clock */
    uint64_t bytes, hash;
};

struct sw_data {
    const char *path; /* the caller's string */
    struct sw_data_file files[SW_DATA_FILES];
    const void *tokens;
    const uint8_t *mask;       /* NULL: all count */
    const uint64_t *documents; /* where they begin, ascending; NULL: no borders */
    uint64_t document_count;
    uint64_t token_count, map_bytes, documents_bytes, rows;
    uint32_t seq_len, vocab;
    uint32_t token_bytes; /* 2 or 4 */
    enum sw_order order;
    uint64_t seed;
};

/* Opens and checks: every id below vocab (else its index is named), whole tokens, at least one row,
 * a mask of the same length with 0 or 1 in it, documents strictly ascending below the number of
 * tokens, a prediction that counts. mask_path and documents_path may be NULL. 0 or -errno,
 * reported. */
int sw_data_open(struct sw_data *data, const char *path, const char *mask_path,
                 const char *documents_path, uint32_t vocab, uint32_t seq_len, enum sw_order order,
                 uint64_t seed);
void sw_data_close(struct sw_data *data);

/* The row (0 .. rows-1) at position `position` of the run. */
uint64_t sw_data_row(const struct sw_data *data, uint64_t position);

/* Fills seq_len inputs, targets and mask bytes (whether the target counts) of a row, and where in
 * the row the document of each input begins (0 when it does before the row); starts may be NULL. */
void sw_data_fill(const struct sw_data *data, uint64_t row, int32_t *inputs, int32_t *targets,
                  uint8_t *mask, uint32_t *starts);

/* Tokens of a row that count. */
uint64_t sw_data_counting(const struct sw_data *data, uint64_t row);

/* A hash of the files' size and content samples: says "the same data". */
uint64_t sw_data_fingerprint(const struct sw_data *data);

/* The same of each file as it was opened; 0 where there is none. */
void sw_data_hash_files(const struct sw_data *data, uint64_t hashes[SW_DATA_FILES]);

/* Whether the files still hold what they held when they were opened: 0, or -EIO, reported with the
 * file. One that was written to and has the same hash is no error. Asks the file system each time;
 * one thread. */
int sw_data_check_unchanged(struct sw_data *data);

#endif
