/* engine/drives.c - see the header. */
#include "engine/drives.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/log.h"
#include "nvme/measure.h"
#include "nvme/nvme.h"
#include "offload/profile.h"

/* Long enough for a drive's rate, short enough to go unnoticed at start. */
#define MEASURE_SECONDS   0.25
#define MEASURE_BUF_BYTES (8ull << 20)
/* Rates nearer than this are one rate: measuring says no more. */
#define EQUAL_WITHIN 1.1

/* The queue that suits the drive which wants most in flight; the others take no harm by it. */
static void choose_queue(struct sw_drives *out, const struct sw_drive_profile *profile) {
    if ((uint64_t)profile->block_bytes * profile->depth <= (uint64_t)out->block_bytes * out->depth)
        return;
    out->block_bytes = profile->block_bytes;
    out->depth = profile->depth;
}

static int on_one_drive(const char *const *folders, uint32_t count) {
    struct stat first, other;
    if (stat(folders[0], &first)) return 1; /* opening the store says what is wrong */
    for (uint32_t i = 1; i < count; i++)
        if (stat(folders[i], &other) || other.st_dev != first.st_dev) return 0;
    return 1;
}

static int measure(const char *folder, double *rate) {
    void *buf = NULL;
    if (posix_memalign(&buf, SW_NVME_ALIGN_BYTES, MEASURE_BUF_BYTES)) return -ENOMEM;
    uint64_t bytes_per_s = 0;
    const int ret =
        sw_nvme_measure_speed(folder, buf, MEASURE_BUF_BYTES, MEASURE_SECONDS, &bytes_per_s);
    free(buf);
    *rate = (double)bytes_per_s;
    return ret;
}

/* Shares in MB/s, from the rates of all drives. */
static void stripe(struct sw_drives *out, const double *rates, uint32_t count) {
    double low = rates[0], high = rates[0];
    for (uint32_t i = 1; i < count; i++) {
        if (rates[i] < low) low = rates[i];
        if (rates[i] > high) high = rates[i];
    }
    out->striped = high > low * EQUAL_WITHIN;
    for (uint32_t i = 0; i < count; i++) {
        const double mb = rates[i] * 1e-6;
        out->shares[i] = mb < 1 ? 1 : mb > 1e9 ? 1000000000u : (uint32_t)(mb + 0.5);
    }
}

/* The layout of a store that is there. */
static int take_stripes(struct sw_drives *out, uint32_t count, const char *stripes) {
    const char *at = stripes;
    if (!*at || *at == '\n') return 0;
    for (uint32_t i = 0; i < count; i++) {
        char *end;
        const unsigned long share = strtoul(at, &end, 10);
        if (end == at || share < 1 || share > UINT32_MAX || *end != (i + 1 < count ? ',' : '\n')) {
            sw_error("the store's record of its stripes is not one of %u folders", count);
            return -EINVAL;
        }
        out->shares[i] = (uint32_t)share;
        at = end + 1;
    }
    out->striped = 1;
    return 0;
}

static void say(const struct sw_drives *out, const char *const *folders, uint32_t count,
                const char *how) {
    if (!out->striped) return;
    uint64_t sum = 0;
    for (uint32_t i = 0; i < count; i++) sum += out->shares[i];
    for (uint32_t i = 0; i < count; i++)
        sw_info("store: %s takes %.0f%% of the state: %" PRIu32 " MB/s, %s", folders[i],
                100.0 * out->shares[i] / (double)sum, out->shares[i], how);
}

int sw_drives_choose(struct sw_drives *out, const char *const *folders, uint32_t count,
                     const char *stripes) {
    double rates[SW_NVME_FOLDERS_MAX];
    uint32_t known = 0;
    *out = (struct sw_drives){0};
    for (uint32_t i = 0; i < count; i++) {
        struct sw_drive_profile profile;
        const int found = sw_profile_drive(folders[i], &profile);
        rates[i] = found == 1 ? profile.mixed_bytes_per_s : 0;
        if (found == 1) choose_queue(out, &profile);
        known += rates[i] > 0;
    }
    if (stripes) {
        const int ret = take_stripes(out, count, stripes);
        if (ret == 0) say(out, folders, count, "as the store was laid out");
        return ret;
    }
    if (count == 1 || on_one_drive(folders, count)) return 0;
    const int profiled = known == count;
    for (uint32_t i = 0; i < count && !profiled; i++) { /* one yardstick for all of them */
        const int ret = measure(folders[i], &rates[i]);
        if (ret < 0) return ret;
    }
    stripe(out, rates, count);
    say(out, folders, count, profiled ? "from the machine profile" : "measured now");
    return 0;
}

void sw_drives_stripes(const struct sw_drives *drives, uint32_t count, char *out,
                       uint32_t out_bytes) {
    uint32_t used = 0;
    out[0] = 0;
    for (uint32_t i = 0; i < count && drives->striped && used < out_bytes; i++)
        used += (uint32_t)snprintf(out + used, out_bytes - used, i ? ",%" PRIu32 : "%" PRIu32,
                                   drives->shares[i]);
}
