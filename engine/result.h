/* engine/result.h - which run the model in an output folder is the result of: training.json beside
 * it, written once the model is whole.
 *
 * One thread. Errors: 0 or -errno, reported with the file. */
#ifndef ENGINE_RESULT_H
#define ENGINE_RESULT_H
#include <stdint.h>
#include "nvme/commit.h"

#define SW_RESULT_NAME "training.json"

struct sw_result {
    uint64_t run, step;                      /* as in a commit */
    char identity[SW_COMMIT_IDENTITY_BYTES]; /* likewise */
};

int sw_result_write(const char *out, const struct sw_result *result);

/* 1: there is one; 0: none. */
int sw_result_read(const char *out, struct sw_result *result);

#endif
