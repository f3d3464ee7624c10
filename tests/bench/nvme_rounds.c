/* One sample of the store's rate on a file that stays, so that peers can use the same one.
 *
 *     nvme_rounds FOLDER BYTES fill|read|write|mixed BLOCK_BYTES DEPTH SECONDS
 *         [BUFFER_BYTES]
 *
 * The file is FOLDER/peers.0.state. fill writes and checks it, and comes first. BUFFER_BYTES is
 * what a direction goes through again and again; without it as much as is in flight, as its peers
 * do. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "nvme/measure.h"
#include "offload/arena.h"

static void say(enum sw_log_level level, const char *line, void *ctx) {
    (void)level;
    (void)ctx;
    fprintf(stderr, "%s\n", line);
}

int main(int argc, char **argv) {
    if (argc < 7 || argc > 8) {
        fprintf(stderr, "usage: nvme_rounds FOLDER BYTES fill|read|write|mixed BLOCK_BYTES DEPTH "
                        "SECONDS [BUFFER_BYTES]\n");
        return 2;
    }
    sw_log_set_sink(say, NULL);
    const uint32_t block_bytes = (uint32_t)strtoul(argv[4], NULL, 10);
    const uint32_t depth = (uint32_t)strtoul(argv[5], NULL, 10);
    uint64_t each = argc > 7 ? strtoull(argv[7], NULL, 10) : (uint64_t)block_bytes * depth;
    if (each < SW_NVME_MEASURE_BUF_MIN_BYTES) each = SW_NVME_MEASURE_BUF_MIN_BYTES;
    struct sw_arena arena;
    if (sw_arena_open(&arena, 2 * each) < 0) return 1; /* to read into, and to write from */
    const char *const folder = argv[1], *const what = argv[3];
    const struct sw_nvme_measure_options options = {.folders = &folder,
                                                    .folder_count = 1,
                                                    .name = "peers",
                                                    .bytes = strtoull(argv[2], NULL, 10),
                                                    .buf = arena.base,
                                                    .buf_bytes = arena.bytes,
                                                    .keep = 1};
    struct sw_nvme_measure *measure;
    struct sw_nvme_rates rates = {0, 0, 0};
    if (options.bytes < SW_NVME_MEASURE_MIN_BYTES || sw_nvme_measure_open(&measure, &options) < 0)
        return 1;
    int ret;
    if (!strcmp(what, "fill")) {
        ret = sw_nvme_measure_fill(measure);
        if (!ret) ret = sw_nvme_measure_check(measure);
    } else {
        const enum sw_nvme_pattern pattern = !strcmp(what, "read")    ? SW_NVME_READ
                                             : !strcmp(what, "write") ? SW_NVME_WRITE
                                                                      : SW_NVME_MIXED;
        ret = sw_nvme_measure_run(measure, pattern, block_bytes, depth, atof(argv[6]), &rates);
    }
    sw_nvme_measure_close(measure);
    sw_arena_close(&arena);
    printf("{\"read\": %.0f, \"write\": %.0f}\n", rates.read, rates.write);
    return ret ? 1 : 0;
}
