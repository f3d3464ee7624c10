/* engine/trainer_world.c - a run of several processes: what they agree on, share, and hand to the
 * first one, which alone writes the model and the log. */
#include "engine/trainer_internal.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/log.h"
#include "engine/output.h"

int sw_trainer_open_world(struct sw_trainer *t) {
    const uint32_t ranks = t->options.ranks;
    int ret = sw_world_open(&t->world, t->options.rank_timeout_s);
    if (ret < 0) return ret;
    t->world_ranks = sw_world_size(t->world) * ranks;
    t->first_rank = sw_world_index(t->world) * ranks;
    t->shards = t->options.shard_in_node ? ranks : t->world_ranks;
    t->replicas = t->world_ranks / t->shards;
    if (!t->world) return 0;
    /* Loads, saves and commits take each process as long as its drives do. */
    const double timeouts_s[CHANNEL_COUNT] = {[CHANNEL_MAIN] = SW_WORLD_PATIENT,
                                              [CHANNEL_CONTROL] = t->options.rank_timeout_s,
                                              [CHANNEL_COMMIT] = SW_WORLD_PATIENT};
    for (int i = 0; i < CHANNEL_COUNT && ret == 0; i++)
        ret = sw_world_channel(t->world, &t->channels[i], timeouts_s[i]);
    if (ret == 0) ret = sw_trainer_agree_to_meet(t);
    if (ret == 0 && t->world_ranks > SW_RANKS_MAX) {
        if (t->first_rank == 0)
            sw_error("--ranks %u: %u processes x %u ranks = %u, and at most %d work together",
                     ranks, sw_world_size(t->world), ranks, t->world_ranks, SW_RANKS_MAX);
        ret = -EINVAL;
    }
    if (t->first_rank > 0) /* the first process speaks for all */
        t->hooks = (struct sw_trainer_hooks){
            .ctx = t->hooks.ctx, .on_stop_means = t->hooks.on_stop_means, .stop = t->hooks.stop};
    return ret;
}

/* Each process has a trace of its own, also in one folder. */
int sw_trainer_check_trace(const struct sw_trainer *t) {
    const char *given = t->options.trace;
    const uint32_t process = sw_world_index(t->world);
    char path[PATH_MAX], option[PATH_MAX + 64];
    if (!given) return 0;
    const int ret = sw_process_path(given, process, path, sizeof(path));
    if (ret < 0) {
        sw_error("--trace %s: %s", given, strerror(-ret));
        return ret;
    }
    snprintf(option, sizeof(option), "--trace %s: process %u writes", given, process);
    return sw_output_check_kind(option, path, 1);
}

int sw_trainer_share(struct sw_trainer *t, enum channel channel, void *all, const void *mine,
                     uint64_t bytes) {
    const struct sw_comm_handle *c = &t->channels[channel];
    if (t->world) return c->ops->exchange(c->comm, all, mine, bytes);
    if (bytes) memcpy(all, mine, bytes);
    return 0;
}

int sw_trainer_stop(struct sw_trainer *t) {
    int asked[SW_RANKS_MAX], mine = sw_stop_asked(t);
    if (!t->world || t->stop_agreed) return t->world ? t->stop_agreed : mine;
    /* An error here is the executor's as well, or ends the run at its next wait. */
    if (sw_trainer_share(t, CHANNEL_MAIN, asked, &mine, sizeof(mine)) < 0) return 1;
    for (uint32_t i = 0; i < sw_world_size(t->world); i++)
        if (asked[i] > t->stop_agreed) t->stop_agreed = asked[i];
    return t->stop_agreed;
}

int sw_trainer_stops_before(const struct sw_trainer *t, uint64_t from, uint64_t step) {
    if (!t->world) return sw_stop_asked(t);
    return step > from ? t->records[(step - 1) % STEP_RECORDS].stop : 0;
}

/* Whether the commits of all processes are of one run, each that of its own process. */
static int check_parts(const struct sw_trainer *t, const struct store_left *all) {
    const uint32_t count = sw_world_size(t->world), index = sw_world_index(t->world);
    char buffer[SW_PROCESS_NAME_BYTES];
    const char *name = sw_trainer_name(t, SW_STORE_NAME, buffer);
    const char *folder = sw_trainer_store_folder(t);
    uint32_t first = 0, bad = 0;
    while (first < count && all[first].step == SW_NO_COMMIT) first++;
    for (bad = first; bad < count; bad++) {
        const struct store_left *left = &all[bad];
        if (left->step == SW_NO_COMMIT) continue;
        if (left->process != bad || left->processes != count || left->run != all[first].run) break;
    }
    if (bad >= count) return 0;
    const struct store_left *left = &all[bad];
    if (bad != index) return -EINVAL; /* which tells */
    if (left->process != bad || left->processes != count)
        sw_error("--resume: %s/%s.commit is the part of process %u of %u (run %016llx), and this "
                 "is process %u of %u: start as many processes as the run had, with each one's "
                 "own part in its place, or drop what is left with --restart",
                 folder, name, left->process, left->processes, (unsigned long long)left->run, index,
                 count);
    else
        sw_error("--resume: %s/%s.commit is of run %016llx, and the part of process %u of run "
                 "%016llx: they do not belong together; put back the part of one of them "
                 "(spillway inspect shows whose it is), or drop what is left with --restart",
                 folder, name, (unsigned long long)left->run, first,
                 (unsigned long long)all[first].run);
    return -EINVAL;
}

int sw_trainer_common_step(struct sw_trainer *t, const struct store_left *mine, uint64_t *common) {
    struct store_left all[SW_RANKS_MAX];
    const int ret = sw_trainer_share(t, CHANNEL_MAIN, all, mine, sizeof(*mine));
    if (ret < 0) return ret;
    const uint32_t count = sw_world_size(t->world);
    uint32_t furthest = 0;
    int lost = 0;
    *common = mine->step;
    for (uint32_t i = 0; i < count; i++) {
        if (all[i].number > all[furthest].number) furthest = i;
        if (all[i].step == SW_NO_COMMIT) *common = SW_NO_COMMIT;
        if (*common != SW_NO_COMMIT && all[i].step < *common) *common = all[i].step;
    }
    for (uint32_t i = 0; i < count; i++) {
        const int has_first = all[i].has_journal && all[furthest].number == 1;
        lost |= all[furthest].number > 0 && all[i].step == SW_NO_COMMIT && !has_first;
    }
    if (!lost) return check_parts(t, all);
    if (mine->step == SW_NO_COMMIT)
        sw_error("--resume: process %u finds no whole commit of its own in %s, while process %u is "
                 "at step %llu: start as many processes with as many ranks as the run had, name "
                 "its folders with --nvme in the same order, or drop what is left with --restart",
                 sw_world_index(t->world), sw_trainer_store_folder(t), furthest,
                 (unsigned long long)all[furthest].step);
    return -EINVAL;
}

const char *sw_trainer_name(const struct sw_trainer *t, const char *name,
                            char out[SW_PROCESS_NAME_BYTES]) {
    return sw_process_name(name, sw_world_index(t->world), out);
}

/* ---- what the first process fetches from the others ---- */

enum request_kind { WEIGHTS, RECORD, END };

struct request {
    uint32_t kind, rank, item; /* a unit, or a chunk */
    int32_t status;            /* of END */
    uint64_t first, end;       /* elements */
};

static uint64_t answer_bytes(const struct sw_trainer *t, const struct request *q) {
    if (q->kind == RECORD) return t->placement.chunks[q->item].record_bytes;
    return q->kind == WEIGHTS ? (q->end - q->first) * sw_dtype_bytes(t->options.dtype) : 0;
}

/* All processes take part: whoever has it sends it to all. */
static int answer(struct sw_trainer *t, const struct request *q, void *data) {
    const uint32_t owner = q->rank / t->rank_count;
    int ret = 0;
    if (owner == sw_world_index(t->world)) {
        struct sw_rank *r = &t->ranks[q->rank - t->first_rank];
        ret = q->kind == RECORD ? sw_trainer_read_record(r, q->item, data)
                                : sw_trainer_fetch_shard(r, q->item, q->first, q->end, data);
    }
    if (ret == 0)
        ret = sw_comm_broadcast(&t->channels[CHANNEL_MAIN], data, answer_bytes(t, q), owner);
    return ret;
}

static int ask(struct sw_trainer *t, struct request *q) {
    return sw_comm_broadcast(&t->channels[CHANNEL_MAIN], q, sizeof(*q), 0);
}

int sw_trainer_serve(struct sw_trainer *t) {
    struct request q;
    void *data = NULL;
    uint64_t bytes = 0;
    int ret = 0;
    while ((ret = ask(t, &q)) == 0 && q.kind != END) {
        if (answer_bytes(t, &q) > bytes) {
            free(data);
            bytes = sw_round_up(answer_bytes(t, &q), SW_NVME_ALIGN_BYTES);
            data = aligned_alloc(SW_NVME_ALIGN_BYTES, bytes);
        }
        ret = data ? answer(t, &q, data) : -ENOMEM;
        if (ret < 0) break;
    }
    free(data);
    return ret < 0 ? ret : q.status;
}

int sw_trainer_end_serving(struct sw_trainer *t, int ret) {
    struct request q = {.kind = END, .status = ret};
    const int told = t->world ? ask(t, &q) : 0;
    return ret < 0 ? ret : told;
}

int sw_trainer_fetch_remote(struct sw_trainer *t, uint32_t rank, uint32_t unit, uint64_t first,
                            uint64_t end, void *out) {
    struct request q = {.kind = WEIGHTS, .rank = rank, .item = unit, .first = first, .end = end};
    const int ret = ask(t, &q);
    return ret < 0 ? ret : answer(t, &q, out);
}

int sw_trainer_record_remote(struct sw_trainer *t, uint32_t rank, uint32_t chunk, void *record) {
    struct request q = {.kind = RECORD, .rank = rank, .item = chunk};
    const int ret = ask(t, &q);
    return ret < 0 ? ret : answer(t, &q, record);
}
