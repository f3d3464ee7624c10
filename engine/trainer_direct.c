/* engine/trainer_direct.c - weights on NVMe that GPUs read by themselves, past the host's memory.
 *
 * The turn stays as it is: the read into the host's memory does nothing, and the load that follows
 * reads the file instead of copying. Whoever writes a record takes a sum of it that the device can
 * take, too, and compares. Where the device, the machine or the file system has no such way, all
 * goes through the host's memory as ever. */
#include "engine/trainer_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/log.h"
#include "base/word_sum.h"

struct place {
    uint32_t file;
    uint64_t offset;
};

struct sw_direct {
    uint32_t file_count;
    const char *paths[SW_NVME_FOLDERS_MAX]; /* the store's */
    struct place *places;                   /* by record */
    uint64_t *sums;                         /* by record: of what was written */
    int fds[SW_RANKS_MAX][SW_NVME_FOLDERS_MAX];
    struct sw_device_file *files[SW_RANKS_MAX][SW_NVME_FOLDERS_MAX];
};

static uint32_t file_of(struct sw_direct *d, const char *path) {
    uint32_t i = 0;
    while (i < d->file_count && strcmp(d->paths[i], path) != 0) i++;
    if (i == d->file_count) d->paths[d->file_count++] = path;
    return i;
}

static int find_places(struct sw_direct *d, const struct spill_store *s, uint32_t records) {
    d->places = calloc(records, sizeof(*d->places));
    d->sums = calloc(records, sizeof(*d->sums));
    if (!d->places || !d->sums) return -ENOMEM;
    for (uint32_t r = 0; r < records; r++) {
        const char *path = sw_nvme_where(s->store, r, 0, &d->places[r].offset);
        d->places[r].file = file_of(d, path);
    }
    return 0;
}

/* 0; -ENOTSUP with the reason; or an error, reported. */
static int open_file(struct sw_direct *d, const struct sw_rank *r, uint32_t file, char *why,
                     size_t size) {
    const struct sw_placement *p = &r->t->placement;
    const uint64_t bytes = p->ring_slots[SW_RING_WINDOW] * p->ring_slot_bytes[SW_RING_WINDOW];
    const int fd = open(d->paths[file], O_RDONLY | O_DIRECT | O_CLOEXEC);
    d->fds[r->index][file] = fd;
    if (fd < 0) {
        snprintf(why, size, "%s cannot be opened past the page cache: %s", d->paths[file],
                 strerror(errno));
        return -ENOTSUP;
    }
    return r->device.ops->file_open(r->device.device, fd, r->rings[SW_RING_WINDOW], bytes,
                                    &d->files[r->index][file], why, size);
}

static int open_all(struct sw_trainer *t, struct sw_direct *d, char *why, size_t size) {
    int ret = 0;
    for (uint32_t r = 0; r < t->rank_count && ret == 0; r++)
        for (uint32_t f = 0; f < d->file_count && ret == 0; f++)
            ret = open_file(d, &t->ranks[r], f, why, size);
    return ret;
}

int sw_trainer_open_direct(struct sw_trainer *t, uint32_t records) {
    char why[320] = "";
    if (!t->ranks[0].device.ops->file_open || sw_sim_any(&t->options.sim)) return 0;
    struct sw_direct *d = t->direct = calloc(1, sizeof(*d));
    if (!d) return -ENOMEM;
    memset(d->fds, 0xFF, sizeof(d->fds));
    int ret = find_places(d, &t->spills[SPILL_WEIGHTS], records);
    if (ret == 0) ret = open_all(t, d, why, sizeof(why));
    if (ret == 0) sw_info("weights on NVMe go to the GPUs past the host's memory");
    if (ret == 0) return 0;
    sw_trainer_close_direct(t);
    return ret == -ENOTSUP ? 0 : ret;
}

void sw_trainer_close_direct(struct sw_trainer *t) {
    struct sw_direct *d = t->direct;
    if (!d) return;
    for (uint32_t r = 0; r < t->rank_count; r++)
        for (uint32_t f = 0; f < d->file_count; f++) {
            if (d->files[r][f]) t->ranks[r].device.ops->file_close(d->files[r][f]);
            if (d->fds[r][f] >= 0) close(d->fds[r][f]);
        }
    free(d->places);
    free(d->sums);
    free(d);
    t->direct = NULL;
}

void sw_direct_wrote(struct sw_trainer *t, uint32_t record, const void *data) {
    if (t->direct)
        t->direct->sums[record] = sw_word_sum(data, t->spills[SPILL_WEIGHTS].bytes[record]);
}

int sw_direct_load(struct sw_rank *r, const struct sw_run *run, struct step_record *step,
                   uint32_t record, void *dst, struct sw_stream *stream) {
    const struct sw_direct *d = r->t->direct;
    const struct place *at = &d->places[record];
    const uint64_t bytes = r->t->spills[SPILL_WEIGHTS].bytes[record];
    uint64_t sum;
    const int ret = r->device.ops->file_read(stream, d->files[r->index][at->file], dst, at->offset,
                                             bytes, &sum);
    if (ret < 0) {
        sw_error("step %llu: weights could not be read from %s at byte %llu",
                 (unsigned long long)step->step, d->paths[at->file],
                 (unsigned long long)at->offset);
        return ret;
    }
    if (run->turn->kind != SW_TURN_EVAL) step->bytes[r->index][SW_BYTES_NVME_DIRECT] += bytes;
    if (sum == d->sums[record]) return 0;
    sw_error("step %llu: weights in %s at byte %llu are not what was written: sum %016llx, "
             "expected %016llx; the drive or its path lost or changed bytes, and nothing was "
             "trained on them",
             (unsigned long long)step->step, d->paths[at->file], (unsigned long long)at->offset,
             (unsigned long long)sum, (unsigned long long)d->sums[record]);
    return -EIO;
}
