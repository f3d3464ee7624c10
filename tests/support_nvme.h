/* tests/support_nvme.h - what the tests of the store share: folders of their own under build/ (a
 * real file system), records of odd sizes, a pattern that tells where it belongs, and the log. */
#ifndef TESTS_SUPPORT_NVME_H
#define TESTS_SUPPORT_NVME_H
#include <stdint.h>
#include "nvme/nvme.h"
#include "tests/support_faulty_io.h"

enum { PAGE = 4096, CHUNKS = 7 };
#define RECORD_MAX (65ull * PAGE)
extern const uint64_t odd_records[CHUNKS];

extern char nvme_root[], dir_a[64], dir_b[64], dir_c[64];
extern const char *three_folders[3];

extern char logged[16384]; /* log lines of the current test */
extern int log_errors, log_warnings;
void forget_log(void);

/* For cmocka: the group's setup and teardown, and each test's setup. */
int make_folders(void **state);
int remove_folders(void **state);
int setup(void **state);

void *pages(uint64_t bytes); /* aligned, filled with 0xEE; the test fails when there is none */
void pattern(void *buf, uint64_t bytes, uint32_t chunk, uint32_t home, uint32_t version);
int matches(const void *buf, uint64_t bytes, uint32_t chunk, uint32_t home, uint32_t version);

/* A store of the odd records; the test fails when it does not open. */
struct sw_nvme_store *open_store(const char *name, uint32_t folders, uint32_t homes);

/* A queue of the machine's own back end, and one on a disk that misbehaves as planned. */
int open_queue(struct sw_nvme_queue **q, struct sw_nvme_store *store, int write, uint32_t depth,
               uint32_t block_bytes, void *base, uint64_t bytes);
int open_faulty(struct sw_nvme_queue **q, struct sw_nvme_store *store, int write, uint32_t depth,
                uint32_t block_bytes, struct faulty_plan *plan);

/* One record through a queue: the request's result, or the queue's own error. */
int one(struct sw_nvme_queue *q, int write, void *buf, uint32_t chunk, uint32_t home);

#define assert_logged(text)                                                                        \
    do                                                                                             \
        if (!strstr(logged, text)) fail_msg("'%s' is not in the log: %s", text, logged);           \
    while (0)

#endif
