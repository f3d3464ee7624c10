/* tests/support_nvme.c - see the header. */
#include "tests/support_nvme.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <cmocka.h>

#include "base/log.h"

const uint64_t odd_records[CHUNKS] = {1 * PAGE,  3 * PAGE, 17 * PAGE, 2 * PAGE,
                                      65 * PAGE, 1 * PAGE, 32 * PAGE};
char nvme_root[] = "build/test-nvme-XXXXXX";
char dir_a[64], dir_b[64], dir_c[64];
const char *three_folders[3] = {dir_a, dir_b, dir_c};

char logged[16384];
int log_errors, log_warnings;
static void keep(enum sw_log_level level, const char *line, void *ctx) {
    (void)ctx;
    log_errors += level == SW_LOG_ERROR;
    log_warnings += level == SW_LOG_WARNING;
    const size_t used = strlen(logged);
    snprintf(logged + used, sizeof(logged) - used, "%s\n", line);
}
void forget_log(void) {
    logged[0] = 0;
    log_errors = log_warnings = 0;
}
int setup(void **state) {
    (void)state;
    forget_log();
    return 0;
}

/* Every 8 bytes name their chunk, home, version and place, so a displaced block cannot pass. */
void *pages(uint64_t bytes) {
    void *p = NULL;
    assert_int_equal(posix_memalign(&p, PAGE, bytes), 0);
    memset(p, 0xEE, bytes);
    return p;
}

void pattern(void *buf, uint64_t bytes, uint32_t chunk, uint32_t home, uint32_t version) {
    uint64_t *word = buf, key = ((uint64_t)chunk << 40) ^ ((uint64_t)home << 36) ^ version;
    for (uint64_t i = 0; i < bytes / 8; i++)
        word[i] = (key * 0x9E3779B97F4A7C15u) ^ (i * 0xD1B54A32D192ED03u) ^ (i >> 9);
}
int matches(const void *buf, uint64_t bytes, uint32_t chunk, uint32_t home, uint32_t version) {
    void *want = pages(bytes);
    pattern(want, bytes, chunk, home, version);
    const int same = memcmp(buf, want, bytes) == 0;
    free(want);
    return same;
}

struct sw_nvme_store *open_store(const char *name, uint32_t folders, uint32_t homes) {
    const struct sw_nvme_options o = {three_folders, folders, name, odd_records,
                                      CHUNKS,        homes,   NULL};
    struct sw_nvme_store *store = NULL;
    if (sw_nvme_open(&store, &o)) fail_msg("open: %s", logged);
    return store;
}

int open_queue(struct sw_nvme_queue **q, struct sw_nvme_store *store, int write, uint32_t depth,
               uint32_t block_bytes, void *base, uint64_t bytes) {
    const struct sw_nvme_queue_options options = {.write = (uint32_t)write,
                                                  .depth = depth,
                                                  .block_bytes = block_bytes,
                                                  .base = base,
                                                  .bytes = bytes};
    return sw_nvme_queue_open(q, store, &options);
}

int open_faulty(struct sw_nvme_queue **q, struct sw_nvme_store *store, int write, uint32_t depth,
                uint32_t block_bytes, struct faulty_plan *plan) {
    const struct sw_nvme_queue_options options = {
        .write = (uint32_t)write, .depth = depth, .block_bytes = block_bytes};
    return sw_nvme_queue_open_on(q, store, &options, &faulty_io_ops, plan);
}

int one(struct sw_nvme_queue *q, int write, void *buf, uint32_t chunk, uint32_t home) {
    struct sw_nvme_req req = {.buf = buf, .chunk = chunk, .home = home, .write = (uint32_t)write};
    struct sw_nvme_req *done = NULL;
    int ret = sw_nvme_submit(q, &req);
    if (!ret) ret = sw_nvme_reap(q, &done, 1, 1);
    if (ret < 0) return ret;
    assert_int_equal(ret, 1);
    assert_ptr_equal(done, &req);
    return req.result;
}

int make_folders(void **state) {
    (void)state;
    mkdir("build", 0777);
    if (!mkdtemp(nvme_root)) return -1;
    char *dirs[3] = {dir_a, dir_b, dir_c};
    for (int i = 0; i < 3; i++) {
        snprintf(dirs[i], sizeof(dir_a), "%s/%c", nvme_root, 'a' + i);
        if (mkdir(dirs[i], 0700)) return -1;
    }
    sw_log_set_sink(keep, NULL);
    return 0;
}
int remove_folders(void **state) {
    (void)state;
    char command[64];
    snprintf(command, sizeof(command), "rm -rf %s", nvme_root);
    return system(command);
}
