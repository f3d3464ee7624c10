/* engine/trainer_store.c - the optimizer's store: opening, commits, and going on from one.
 *
 * Every chunk has two homes on disk. Writes go to the home that the last commit does not name, a
 * commit makes what is newest the committed one. Chunks on NVMe are written by each update and
 * committed by the turn's own task; chunks in RAM or on the device are written here, between
 * stretches of steps. */
#include "engine/trainer_internal.h"

#include <assert.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>
#include "base/crc32c.h"
#include "base/log.h"
#include "engine/drives.h"

enum { IDLE_DEPTH = 4, IDLE_BLOCK_BYTES = 1 << 20 };

const char *const *sw_trainer_folders(const struct sw_trainer *t, uint32_t *count) {
    *count = t->options.nvme_count ? t->options.nvme_count : 1;
    return t->options.nvme_count ? t->options.nvme : &t->options.out;
}

const char *sw_trainer_store_folder(const struct sw_trainer *t) {
    uint32_t count;
    return sw_trainer_folders(t, &count)[0];
}

/* ---- open ---- */

static void describe_store(struct sw_trainer *t) {
    struct sw_nvme_mode mode;
    sw_nvme_queue_mode(t->writer ? t->writer : t->idle[1], &mode);
    snprintf(t->store_mode, sizeof(t->store_mode),
             "%s, %s, %s buffers, %s files, %u blocks of %u KiB in flight%s%s",
             mode.io_uring ? "io_uring" : "pread/pwrite", mode.direct ? "O_DIRECT" : "page cache",
             mode.fixed_buffers ? "registered" : "plain", mode.fixed_files ? "registered" : "plain",
             mode.depth, mode.block_bytes >> 10, mode.sqpoll ? ", SQPOLL" : "",
             mode.iopoll ? ", IOPOLL" : "");
}

/* How the drives are used; their shares become part of what the store is. */
static int choose_drives(struct sw_trainer *t, const char *const *folders, uint32_t count) {
    struct sw_drives *drives = &t->drives;
    static const char name[] = "stripes";
    const char *stripes =
        t->resuming ? sw_commit_value(t->resumed.identity, name, (int)strlen(name)) : NULL;
    const int ret = sw_drives_choose(drives, folders, count, stripes);
    if (ret < 0 || !drives->striped) return ret;
    char text[SW_NVME_FOLDERS_MAX * 11 + 1];
    sw_drives_stripes(drives, count, text, sizeof(text));
    const size_t used = strlen(t->identity);
    snprintf(t->identity + used, sizeof(t->identity) - used, "%s=%s\n", name, text);
    return 0;
}

static int open_files(struct sw_trainer *t) {
    const struct sw_placement *p = &t->placement;
    const uint32_t count = sw_trainer_store_chunks(t);
    uint64_t *bytes = malloc(count * sizeof(*bytes));
    if (!bytes) return -ENOMEM;
    for (uint32_t i = 0; i < count; i++) bytes[i] = p->chunks[i / t->rank_count].record_bytes;
    uint32_t folder_count;
    char name[SW_PROCESS_NAME_BYTES];
    const struct sw_nvme_options options = {
        .folders = sw_trainer_folders(t, &folder_count),
        .folder_count = folder_count,
        .name = sw_trainer_name(t, SW_STORE_NAME, name),
        .record_bytes = bytes,
        .chunk_count = count,
        .homes = t->input.homes,
        .shares = t->drives.striped ? t->drives.shares : NULL,
    };
    const int ret = sw_nvme_open(&t->store, &options);
    free(bytes);
    return ret;
}

void sw_trainer_lane_options(const struct sw_trainer *t, int write,
                             struct sw_nvme_queue_options *o) {
    *o = (struct sw_nvme_queue_options){.write = (uint32_t)write,
                                        .depth = t->drives.depth,
                                        .block_bytes = t->drives.block_bytes,
                                        .sqpoll = (uint32_t)t->options.sqpoll,
                                        .iopoll = (uint32_t)t->options.iopoll};
}

static int open_queues(struct sw_trainer *t) {
    const struct sw_placement *p = &t->placement;
    int ret = 0;
    for (int write = 0; write < 2 && ret == 0; write++) {
        const struct sw_nvme_queue_options idle = {
            .write = (uint32_t)write, .depth = IDLE_DEPTH, .block_bytes = IDLE_BLOCK_BYTES};
        struct sw_nvme_queue_options lane;
        sw_trainer_lane_options(t, write, &lane);
        lane.base = t->ranks[0].rings[SW_RING_STATE];
        lane.bytes =
            t->rank_count * p->ring_slots[SW_RING_STATE] * p->ring_slot_bytes[SW_RING_STATE];
        ret = sw_nvme_queue_open(&t->idle[write], t->store, &idle);
        if (ret == 0 && p->state_bytes[SW_TIER_NVME])
            ret = sw_nvme_queue_open(write ? &t->writer : &t->reader, t->store, &lane);
    }
    return ret;
}

int sw_trainer_open_store(struct sw_trainer *t) {
    const struct sw_placement *p = &t->placement;
    uint32_t count;
    const char *const *folders = sw_trainer_folders(t, &count);
    int ret = p->store_bytes ? choose_drives(t, folders, count) : 0;
    if (ret == 0) ret = sw_trainer_open_spills(t);
    return ret < 0 || t->input.homes == 0 ? ret : open_files(t);
}

int sw_trainer_begin_store(struct sw_trainer *t) {
    char name[SW_PROCESS_NAME_BYTES];
    int ret = 0;
    if (t->input.homes == 0) return 0;
    t->store_begun = 1;
    if (t->input.homes == 2)
        ret = sw_journal_open(&t->journal, sw_trainer_store_folder(t),
                              sw_trainer_name(t, SW_STORE_NAME, name), sw_trainer_store_chunks(t),
                              !t->resuming);
    if (ret == 0)
        ret =
            sw_homes_open(&t->homes, sw_trainer_store_chunks(t), t->resuming ? &t->resumed : NULL);
    if (ret == 0) ret = open_queues(t);
    if (ret == 0) describe_store(t);
    return ret;
}

void sw_trainer_close_store(struct sw_trainer *t) {
    /* What a commit names is kept until the run has ended well; also where it could not be read
     * back, and this run never came to a commit of its own. */
    const int committed = t->committed_step != SW_NO_COMMIT || t->resuming;
    const int keep = committed && !t->options.sim.flops && (!t->finished || t->options.keep_store);
    sw_nvme_queue_close(t->reader);
    sw_nvme_queue_close(t->writer);
    sw_nvme_queue_close(t->idle[0]);
    sw_nvme_queue_close(t->idle[1]);
    sw_journal_close(t->journal, !keep); /* first: records without it are nothing */
    if (t->store_begun)
        sw_nvme_close(t->store, !keep);
    else
        sw_nvme_abandon(t->store); /* what an earlier run committed is as it was */
    sw_homes_close(&t->homes);
}

static void remove_store(const struct sw_trainer *t) {
    uint32_t count;
    char name[SW_PROCESS_NAME_BYTES];
    const char *const *folders = sw_trainer_folders(t, &count);
    const char *own = sw_trainer_name(t, SW_STORE_NAME, name);
    if (t->store || sw_nvme_remove(folders, count, own) == 0)
        sw_commit_remove(sw_trainer_store_folder(t), own);
}

void sw_trainer_drop_commit(const struct sw_trainer *t) {
    if (!sw_starts_anew(t) || t->journal) return; /* a journal begins anew by itself */
    remove_store(t);
}

void sw_trainer_forget_store(const struct sw_trainer *t) {
    remove_store(t);
    sw_trainer_drop_scratch(t);
}

/* ---- commit ---- */

int sw_trainer_commit(struct sw_trainer *t, uint64_t step, uint64_t updates, uint64_t skips) {
    struct sw_commit commit = {.step = step,
                               .updates = updates,
                               .skips_in_a_row = skips,
                               .run = t->run_id,
                               .process = sw_world_index(t->world),
                               .processes = sw_world_size(t->world)};
    memcpy(commit.identity, t->identity, sizeof(commit.identity));
    snprintf(commit.note, sizeof(commit.note), "model folder %.200s, out %.200s, step %llu of %llu",
             t->options.model, t->options.out, (unsigned long long)step,
             (unsigned long long)t->options.steps);
    const char *missing = t->told_missing ? NULL : sw_nvme_missing(t->store);
    if (missing) {
        t->told_missing = 1;
        sw_warning("step %llu: '%s' was removed or replaced while it was in use; the run goes on, "
                   "but from now on nothing can be resumed",
                   (unsigned long long)step, missing);
    }
    const int ret = sw_homes_commit(&t->homes, t->store, t->journal, &commit);
    if (ret < 0) {
        char last[32] = "nothing";
        if (t->committed_step != SW_NO_COMMIT)
            snprintf(last, sizeof(last), "step %llu", (unsigned long long)t->committed_step);
        sw_error("step %llu: its commit failed: %s; committed before: %s", (unsigned long long)step,
                 strerror(-ret), last);
        return ret;
    }
    atomic_fetch_add(&t->written_bytes, sw_journal_place_bytes(t->journal));
    t->durable_step = step;
    /* One for all: until every process has its record, nobody overwrites what the one before
     * names, so that all of them can go back to it. */
    const int met = sw_trainer_share(t, CHANNEL_COMMIT, NULL, NULL, 0);
    if (met == 0) t->committed_step = step;
    return met;
}

static uint64_t payload_bytes(const struct sw_trainer *t, uint32_t c) {
    return sw_adam_record_bytes(&t->format, t->placement.chunks[c].count);
}

static int move(struct sw_rank *r, uint32_t c, uint32_t home, int write, void *record) {
    struct sw_trainer *t = r->t;
    struct sw_nvme_queue *queue = t->idle[write];
    struct sw_nvme_req req = {
        .buf = record, .chunk = sw_store_chunk(r, c), .home = home, .write = (uint32_t)write};
    struct sw_nvme_req *done;
    int ret = sw_nvme_submit(queue, &req);
    if (ret == 0) ret = sw_nvme_reap(queue, &done, 1, 1);
    if (write) atomic_fetch_add(&t->written_bytes, t->placement.chunks[c].record_bytes);
    return ret < 0 ? ret : req.result;
}

/* A chunk that is not on NVMe, from its tier into `record`. */
static int fetch_resident(struct sw_rank *r, uint32_t c, void *record) {
    struct sw_trainer *t = r->t;
    const struct sw_chunk *chunk = &t->placement.chunks[c];
    if (chunk->tier == SW_TIER_HOST) {
        memcpy(record, r->host_state + chunk->record_offset, chunk->record_bytes);
        return 0;
    }
    const int ret = r->device.ops->copy_d2h(
        r->stream, record, r->device_state + chunk->record_offset, chunk->record_bytes);
    return ret < 0 ? ret : r->device.ops->stream_sync(r->stream);
}

int sw_trainer_read_record(struct sw_rank *r, uint32_t c, void *record) {
    struct sw_trainer *t = r->t;
    uint32_t checksum;
    if (t->placement.chunks[c].tier != SW_TIER_NVME) return fetch_resident(r, c, record);
    const uint32_t home = sw_homes_newest(&t->homes, sw_store_chunk(r, c), &checksum);
    if (home == SW_HOME_VIRGIN) {
        sw_trainer_start_chunk(r, c, record);
        return 0;
    }
    const int ret = move(r, c, home, 0, record);
    if (ret < 0) return ret;
    return sw_trainer_check_bytes(r, c, t->reported, sw_crc32c(0, record, payload_bytes(t, c)));
}

int sw_trainer_write_record(struct sw_rank *r, uint32_t c, void *record) {
    struct sw_trainer *t = r->t;
    const uint32_t stored = sw_store_chunk(r, c), home = sw_homes_next(&t->homes, stored);
    const int ret = move(r, c, home, 1, record);
    if (ret == 0)
        sw_homes_wrote(&t->homes, stored, home, sw_crc32c(0, record, payload_bytes(t, c)));
    return ret;
}

int sw_trainer_commit_idle(struct sw_trainer *t, uint64_t step) {
    if (!t->options.commit_every || t->committed_step == step) return 0;
    char *record = aligned_alloc(SW_NVME_ALIGN_BYTES, t->placement.ring_slot_bytes[SW_RING_STATE]);
    if (!record) return -ENOMEM;
    int ret = 0;
    for (uint32_t c = 0; c < t->placement.chunk_count && ret == 0; c++) {
        if (t->placement.chunks[c].frozen || t->placement.chunks[c].tier == SW_TIER_NVME) continue;
        for (uint32_t i = 0; i < t->rank_count && ret == 0; i++) {
            ret = fetch_resident(&t->ranks[i], c, record);
            if (ret == 0) ret = sw_trainer_write_record(&t->ranks[i], c, record);
        }
    }
    free(record);
    return ret < 0 ? ret : sw_trainer_commit(t, step, t->updates, t->skips_in_a_row);
}

int sw_trainer_check_bytes(const struct sw_rank *r, uint32_t c, uint64_t step, uint32_t have) {
    const struct sw_trainer *t = r->t;
    uint32_t want;
    const uint32_t home = sw_homes_newest(&t->homes, sw_store_chunk(r, c), &want);
    if (home == SW_HOME_VIRGIN || have == want) return 0;
    const struct sw_chunk *chunk = &t->placement.chunks[c];
    const uint64_t first = sw_chunk_begin(r, chunk);
    uint64_t offset;
    const char *path = sw_nvme_where(t->store, sw_store_chunk(r, c), home, &offset);
    sw_error(
        "step %llu: the state of %s, elements %llu to %llu (chunk %u, %s at byte %llu), is not "
        "what was written: CRC-32C %08x, expected %08x; the drive or its path lost or changed "
        "bytes, and nothing was trained on them",
        (unsigned long long)step, t->model.units[chunk->unit].name, (unsigned long long)first,
        (unsigned long long)(first + chunk->count - 1), c, path, (unsigned long long)offset, have,
        want);
    return -EIO;
}

/* ---- resume ---- */

/* Refuses a store of another run, naming what differs. */
static int check_identity(struct sw_trainer *t, const struct sw_commit *commit) {
    int length = 0;
    const char *line = sw_commit_differs(t->identity, commit->identity, &length);
    if (!line) return 0;
    const char *want = line + length + 1;
    const char *have = sw_commit_value(commit->identity, line, length);
    sw_error("--resume: the store in %s belongs to another run: its %.*s is '%.*s' and this run's "
             "is '%.*s'",
             sw_trainer_store_folder(t), length, line, (int)strcspn(have, "\n"), have,
             (int)strcspn(want, "\n"), want);
    return -EINVAL;
}

/* A crash may have left a store one commit ahead of another process's: it goes back. */
static int meet_commits(struct sw_trainer *t, const char *name, int *found) {
    struct sw_commit *commit = &t->resumed;
    uint64_t common;
    char journal[PATH_MAX];
    snprintf(journal, sizeof(journal), "%s/%s.commit", sw_trainer_store_folder(t), name);
    struct store_left mine = {.step = SW_NO_COMMIT, .has_journal = access(journal, F_OK) == 0};
    if (*found) {
        mine.step = commit->step;
        mine.number = commit->number;
        mine.run = commit->run;
        mine.process = commit->process;
        mine.processes = commit->processes;
    }
    int ret = sw_trainer_common_step(t, &mine, &common);
    if (ret < 0 || *found == 0 || commit->step == common) return ret;
    free(commit->entries);
    commit->entries = NULL;
    *found = 0;
    if (common == SW_NO_COMMIT) { /* another one has none: this was the first */
        sw_commit_remove(sw_trainer_store_folder(t), name);
        return 0;
    }
    ret = sw_commit_rewind(sw_trainer_store_folder(t), name, common);
    if (ret == 0) ret = sw_commit_read(sw_trainer_store_folder(t), name, commit);
    if (ret < 0) return ret;
    *found = ret == 1 && commit->step == common;
    if (*found) return 0;
    sw_error("the store in %s has no commit of step %llu, which the other processes go on from",
             sw_trainer_store_folder(t), (unsigned long long)common);
    return -EINVAL;
}

/* The first process's word counts for all: two that drew would have begun two runs. */
static int settle_run_id(struct sw_trainer *t) {
    uint64_t all[SW_RANKS_MAX], mine = t->resuming ? t->resumed.run : 0;
    while (mine == 0)
        if (getrandom(&mine, sizeof(mine), 0) < 0 && errno != EINTR) return -errno;
    const int ret = sw_trainer_share(t, CHANNEL_MAIN, all, &mine, sizeof(mine));
    if (ret == 0) t->run_id = all[0];
    return ret;
}

static int find_commit(struct sw_trainer *t) {
    const struct sw_train_options *o = &t->options;
    char buffer[SW_PROCESS_NAME_BYTES];
    const char *name = sw_trainer_name(t, SW_STORE_NAME, buffer);
    t->committed_step = t->durable_step = SW_NO_COMMIT;
    struct sw_commit *commit = &t->resumed;
    uint32_t count;
    const char *const *folders = sw_trainer_folders(t, &count);
    /* Before anything is said of it, or it is moved back: another run may be at work on it. */
    if (o->restart) return sw_nvme_check_free(folders, count, name);
    int found = sw_commit_read(sw_trainer_store_folder(t), name, commit);
    if (found < 0) return found;
    const int busy = found == 1 ? sw_nvme_check_free(folders, count, name) : 0;
    if (busy < 0) return busy;
    if (found == 1 && !o->resume) {
        sw_error("the store in %s holds step %llu of a run (%s): go on from it with --resume, or "
                 "drop it with --restart",
                 sw_trainer_store_folder(t), (unsigned long long)commit->step, commit->note);
        return -EEXIST;
    }
    const int ret = o->resume ? meet_commits(t, name, &found) : 0;
    t->resuming = ret == 0 && found == 1;
    return ret;
}

int sw_trainer_find_commit(struct sw_trainer *t) {
    const int ret = find_commit(t);
    return ret < 0 ? ret : settle_run_id(t);
}

int sw_trainer_check_resume(struct sw_trainer *t) {
    sw_identity_write(&t->run, t->identity, sizeof(t->identity));
    if (!t->resuming) return sw_trainer_check_result(t);
    const int ret = check_identity(t, &t->resumed);
    if (ret < 0) return ret;
    if (t->resumed.chunk_count != sw_trainer_store_chunks(t)) {
        sw_error("--resume: the store in %s has %u chunks and this run has %u",
                 sw_trainer_store_folder(t), t->resumed.chunk_count, sw_trainer_store_chunks(t));
        return -EINVAL;
    }
    if (t->resumed.step > t->options.steps) {
        sw_error("--resume: the store in %s is at step %llu, beyond --steps %llu",
                 sw_trainer_store_folder(t), (unsigned long long)t->resumed.step,
                 (unsigned long long)t->options.steps);
        return -EINVAL;
    }
    return sw_trainer_check_result(t);
}

int sw_trainer_place_record(struct sw_rank *r, uint32_t c, void *record) {
    const struct sw_chunk *placed = &r->t->placement.chunks[c];
    int ret = 0;
    if (placed->tier == SW_TIER_HOST)
        memcpy(r->host_state + placed->record_offset, record, placed->record_bytes);
    if (placed->tier == SW_TIER_DEVICE) {
        assert(placed->weight_tier == SW_TIER_DEVICE); /* so the weights' sync covers this copy */
        ret = r->device.ops->copy_h2d(r->stream, r->device_state + placed->record_offset, record,
                                      placed->record_bytes);
    }
    if (ret < 0) return ret;
    sw_trainer_round_masters(r, c, record, r->t->weight_buffer);
    return sw_trainer_put_weights(r, c);
}

int sw_trainer_restore_chunk(struct sw_rank *r, uint32_t c, void *record) {
    struct sw_trainer *t = r->t;
    const struct sw_chunk *placed = &t->placement.chunks[c];
    const uint64_t first = sw_chunk_begin(r, placed);
    uint32_t checksum;
    int ret = move(r, c, sw_homes_newest(&t->homes, sw_store_chunk(r, c), &checksum), 0, record);
    if (ret < 0)
        sw_error("step %llu: the state of %s, elements %llu to %llu, could not be read: %s",
                 (unsigned long long)t->resumed.step, t->model.units[placed->unit].name,
                 (unsigned long long)first, (unsigned long long)(first + placed->count - 1),
                 strerror(-ret));
    if (ret == 0)
        ret = sw_trainer_check_bytes(r, c, t->resumed.step,
                                     sw_crc32c(0, record, payload_bytes(t, c)));
    return ret < 0 ? ret : sw_trainer_place_record(r, c, record);
}

int sw_trainer_is_committed(const struct sw_rank *r, uint32_t c) {
    const struct sw_trainer *t = r->t;
    return t->resuming && t->resumed.entries[sw_store_chunk(r, c)].home != SW_HOME_VIRGIN;
}

void sw_trainer_go_on(struct sw_trainer *t) {
    if (!t->resuming) return;
    t->updates = t->resumed.updates;
    t->skips_in_a_row = (uint32_t)t->resumed.skips_in_a_row;
    t->start_step = t->reported = t->committed_step = t->durable_step = t->resumed.step;
}
