/* engine/trainer_run.c - the loop over steps, evaluation, saving, and what a run leaves behind. */
#include "engine/trainer_internal.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>
#include "base/clock.h"
#include "base/log.h"
#include "engine/output.h"

enum { FETCH_PIECE = 1 << 18 };

/* ---- reports ---- */

uint32_t sw_trainer_count_tasks(const struct sw_trainer *t, const struct sw_turn *turn, int late) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < turn->task_count; i++) {
        const struct sw_task *task = &turn->tasks[i];
        if (task->late != late) continue;
        count += sw_task_is_joint((enum sw_task_kind)task->kind) ? 1 : t->rank_count;
    }
    return count;
}

static void begin_record(struct sw_trainer *t, uint64_t step, const struct sw_turn *turn) {
    struct step_record *record = sw_record(t, step);
    memset(record, 0, sizeof(*record));
    record->step = step;
    record->lr = sw_learning_rate(&t->options, step);
    record->factor = 1;
    /* Without late updates a first turn reads weights that others find where Adam left them. */
    const uint32_t own = turn == &t->first ? sw_trainer_count_tasks(t, turn, 0) : t->train_tasks;
    atomic_init(&record->tasks_left, own + t->late_tasks);
}

/* The pools hold what they were sized for, from start to end. */
static void trace_memory(const struct sw_trainer *t, uint64_t at_ns) {
    const struct sw_rank *r = &t->ranks[0];
    const uint64_t device = t->options.device_memory_bytes, host = t->options.host_memory_bytes;
    const uint64_t store_bytes = t->rank_count * t->placement.store_bytes;
    sw_trace_memory(t->trace, SW_TIER_DEVICE, t->taken_bytes + r->device_used,
                    device ? device : t->taken_bytes + r->device_bytes, at_ns);
    sw_trace_memory(t->trace, SW_TIER_HOST, t->arena.used, host ? host : t->arena.bytes, at_ns);
    sw_trace_memory(t->trace, SW_TIER_NVME, store_bytes, store_bytes, at_ns);
}

/* Bytes are those of all ranks, the busy time of a kind of lanes that of the busiest one. */
static void add_up_ranks(const struct sw_trainer *t, struct step_record *record) {
    struct sw_step_report *r = &record->report;
    double adam_s[SW_NODES_MAX] = {0};
    for (uint32_t i = 0; i < t->rank_count; i++) {
        /* Other processes' ranks move as much. */
        for (int k = 0; k < SW_BYTES_COUNT; k++)
            r->bytes[k] += record->bytes[i][k] * (t->world_ranks / t->rank_count);
        for (int l = 0; l < SW_LANE_COUNT; l++) {
            const int alone = sw_lane_on_device((enum sw_lane)l);
            const double busy_s = (double)record->busy_ns[i][l] * 1e-9;
            if (l == SW_LANE_ADAM) adam_s[t->nodes.of[i]] += busy_s;
            if (!alone) r->lane_busy_s[l] += busy_s;
            if (alone && busy_s > r->lane_busy_s[l]) r->lane_busy_s[l] = busy_s;
        }
    }
    r->lane_busy_s[SW_LANE_ADAM] = 0;
    for (uint32_t i = 0; i < t->nodes.count; i++)
        if (adam_s[i] > r->lane_busy_s[SW_LANE_ADAM]) r->lane_busy_s[SW_LANE_ADAM] = adam_s[i];
}

static void report_step(struct sw_trainer *t, struct step_record *record) {
    struct sw_step_report *r = &record->report;
    double share[SW_LANE_COUNT];
    r->step = record->step;
    r->steps = t->options.steps;
    r->lr = record->lr;
    r->tokens = record->tokens;
    r->clip_factor = record->factor;
    r->step_s = (double)(record->end_ns - t->last_end_ns) * 1e-9;
    t->last_end_ns = record->end_ns;
    add_up_ranks(t, record);
    r->step_clock = sw_run_step_clock(record->run, share);
    r->clock_share = share[r->step_clock];
    r->memory_bytes[SW_TIER_DEVICE] = t->taken_bytes + t->ranks[0].device_used;
    r->memory_bytes[SW_TIER_HOST] = t->arena.used;
    r->memory_bytes[SW_TIER_NVME] = t->rank_count * t->placement.store_bytes;
    trace_memory(t, record->end_ns);
    t->reported++;
    if (t->hooks.on_step) t->hooks.on_step(t->hooks.ctx, r);
}

/* Reports the steps below `next` whose updates are complete, in order. */
static void report_finished(struct sw_trainer *t, uint64_t next) {
    while (t->reported + 1 < next) {
        struct step_record *record = sw_record(t, t->reported + 1);
        if (!atomic_load(&record->finished) || atomic_load(&record->run->cancelled)) return;
        report_step(t, record);
    }
}

/* ---- stretches of steps ---- */

/* Waits for room for a turn; steps below `next` are reported meanwhile. */
static int await_room(struct sw_trainer *t, uint64_t next) {
    int ret = 0;
    while (ret == 0 && sw_executor_active(t->executor) == SW_RUNS_ACTIVE_MAX) {
        ret = sw_executor_wait(t->executor);
        if (ret == 0) report_finished(t, next);
    }
    return ret;
}

static int push(struct sw_trainer *t, const struct sw_turn *turn, uint64_t step,
                struct sw_run *before, uint64_t next) {
    const int ret = await_room(t, next);
    return ret < 0 ? ret : sw_executor_push(t->executor, turn, step, before);
}

static int push_step(struct sw_trainer *t, uint64_t from, uint64_t step, struct sw_run **last) {
    const struct sw_turn *turn = step == from       ? &t->first
                                 : step == from + 1 ? &t->second
                                                    : &t->steady;
    begin_record(t, step, turn);
    const int ret = push(t, turn, step, *last, step);
    if (ret < 0) return ret;
    *last = sw_executor_last_run(t->executor);
    sw_record(t, step)->run = *last;
    report_finished(t, step);
    return 0;
}

/* Whether a step is to be pushed: where the verdict over the one before it is still to come, it may
 * be cancelled yet. All processes push the same steps, as the ones that have ended are the same. */
static int goes_on(struct sw_trainer *t, uint64_t from, uint64_t step, int *ret) {
    *ret = await_room(t, step);
    return *ret == 0 && !sw_trainer_stops_before(t, from, step - 1);
}

/* Trains steps `from` to `to` back to back and drains. *done is the last step that was finished: a
 * stop cancels the steps that are pushed and have not begun. */
static int train_stretch(struct sw_trainer *t, uint64_t from, uint64_t to, uint64_t *done) {
    struct sw_run *last = NULL;
    uint64_t end = from; /* the first step not pushed, then the first one not trained */
    int ret = 0;
    t->fetched_chunk = UINT32_MAX; /* its weights change now */
    t->last_end_ns = sw_now_ns();
    trace_memory(t, t->last_end_ns);
    for (; end <= to && goes_on(t, from, end, &ret); end++) {
        ret = push_step(t, from, end, &last);
        if (ret < 0) break;
    }
    if (ret == 0 && last && t->late_tasks)
        ret = push(t, end == from + 1 ? &t->drain_first : &t->drain, end, last, end);
    while (ret == 0 && sw_executor_active(t->executor) > 0) {
        report_finished(t, end);
        ret = sw_executor_wait(t->executor);
    }
    if (ret == 0) ret = sw_executor_idle(t->executor);
    if (ret < 0) return ret;
    while (end > from && atomic_load(&sw_record(t, end - 1)->run->cancelled)) end--;
    if (t->world && !t->stop_agreed) t->stop_agreed = sw_trainer_stops_before(t, from, end);
    report_finished(t, end);
    *done = end - 1;
    return 0;
}

/* The loss over all of the validation text. */
static int evaluate(struct sw_trainer *t, uint64_t step) {
    const uint64_t turns = (t->val.rows + t->step_rows - 1) / t->step_rows;
    t->eval = (struct eval_state){0};
    for (uint64_t i = 0; i < turns; i++) {
        for (;;) {
            int ret = sw_executor_push(t->executor, i ? &t->eval_next : &t->eval_first, step, NULL);
            if (ret == 0) break;
            if (ret == -EAGAIN) ret = sw_executor_wait(t->executor);
            if (ret < 0) return ret;
        }
        sw_trainer_progress(t, SW_EVALUATING, i * t->step_rows, t->val.rows);
        if (sw_trainer_stop(t)) break;
    }
    const int ret = sw_executor_idle(t->executor);
    if (ret == 0 && !sw_trainer_stop(t) && t->hooks.on_eval)
        t->hooks.on_eval(t->hooks.ctx, step, t->eval.loss_sum / (double)t->eval.tokens,
                         t->eval.tokens);
    return ret;
}

static void stop_means(const struct sw_trainer *t, int saves) {
    if (t->hooks.on_stop_means) t->hooks.on_stop_means(t->hooks.ctx, saves);
}

/* Before any step: there is nothing that a stop would save. */
static int evaluate_first(struct sw_trainer *t) {
    stop_means(t, 0);
    const int ret = evaluate(t, 0);
    stop_means(t, 1);
    return ret;
}

/* ---- saving ---- */

static int fetch_and_tell(void *ctx, uint32_t unit, uint64_t first, uint64_t count,
                          enum sw_dtype dtype, void *out) {
    struct sw_trainer *t = ctx;
    const uint64_t element = sw_dtype_bytes(dtype);
    t->saved_bytes += count * element;
    sw_trainer_progress(t, SW_SAVING, t->saved_bytes, t->model.params * element);
    return sw_trainer_fetch(t, unit, first, count, dtype, out);
}

static int save_step(struct sw_trainer *t, uint64_t step, const char *dir) {
    if (t->first_rank) return sw_trainer_serve(t);
    t->saved_bytes = 0;
    const int ret = sw_trainer_end_serving(
        t, sw_output_save(&t->model, dir, t->options.dtype, fetch_and_tell, t));
    if (ret == 0 && t->hooks.on_saved) t->hooks.on_saved(t->hooks.ctx, step, dir);
    return ret;
}

static int save_in_between(struct sw_trainer *t, uint64_t step) {
    char dir[PATH_MAX];
    if (snprintf(dir, sizeof(dir), "%s/step-%llu", t->options.out, (unsigned long long)step) >=
        (int)sizeof(dir))
        return -ENAMETOOLONG;
    return save_step(t, step, dir);
}

static int is_due(const struct sw_trainer *t, uint64_t step) {
    const uint64_t every = t->options.save_every;
    return every && step > 0 && step % every == 0 && step < t->options.steps;
}

static void tell_partial(void *ctx, const struct sw_partial_save *save) {
    const struct sw_trainer *t = ctx;
    const unsigned long long step = save->step, start = t->start_step;
    if (save->of_stop)
        sw_info("--resume: %s was removed: the run was killed while it stopped after step %llu, "
                "and goes on now",
                save->path, step);
    else if (is_due(t, save->step) && save->step >= t->start_step)
        sw_info("--resume: %s was removed: the save of step %llu was cut short, and is made %s",
                save->path, step,
                save->step == t->start_step ? "now" : "when the run comes to that step again");
    else
        sw_warning("--resume: %s was removed: the save of step %llu was cut short, and is lost, as "
                   "the run goes on after step %llu",
                   save->path, step, start);
}

/* A kill between a step's commit and the end of its save has lost the save, and the run stands
 * where it can be made again. */
static int save_again(struct sw_trainer *t) {
    char dir[PATH_MAX];
    int all[SW_RANKS_MAX], mine = 0, ret = 0;
    if (!t->resuming) return 0;
    if (t->first_rank == 0) {
        ret = sw_output_drop_partial(t->options.out, tell_partial, t);
        snprintf(dir, sizeof(dir), "%s/step-%llu", t->options.out,
                 (unsigned long long)t->start_step);
        mine = is_due(t, t->start_step) && access(dir, F_OK) < 0;
    }
    if (ret == 0) ret = sw_trainer_share(t, CHANNEL_MAIN, all, &mine, sizeof(mine));
    return ret < 0 || !all[0] ? ret : save_in_between(t, t->start_step);
}

static int save_stopped(struct sw_trainer *t, uint64_t step) {
    if (t->options.sim.flops) return 0;
    char dir[PATH_MAX];
    sw_output_stopped_name(t->options.out, step, dir, sizeof(dir));
    return save_step(t, step, dir);
}

static int save_final(struct sw_trainer *t) {
    if (t->options.sim.flops) return 0; /* nothing was trained */
    if (t->first_rank) return sw_trainer_serve(t);
    t->saved_bytes = 0;
    int ret = sw_trainer_end_serving(
        t, sw_model_save(&t->model, t->options.out, t->options.dtype, fetch_and_tell, t));
    if (ret == 0) ret = sw_trainer_write_result(t);
    if (ret == 0 && t->hooks.on_saved)
        t->hooks.on_saved(t->hooks.ctx, t->options.steps, t->options.out);
    return ret;
}

/* ---- the run ---- */

static uint64_t next_stop(const struct sw_trainer *t, uint64_t step) {
    uint64_t stop = t->options.steps;
    /* NVMe chunks are committed by their turns; the others need idle lanes. */
    const int resident = !sw_turn_commits(&t->placement);
    const uint64_t every[] = {t->options.eval_every, t->options.save_every,
                              resident ? (uint64_t)t->options.commit_every : 0};
    for (int i = 0; i < 3; i++)
        if (every[i] && step / every[i] * every[i] + every[i] < stop)
            stop = step / every[i] * every[i] + every[i];
    return stop;
}

static int run(struct sw_trainer *t, uint64_t *stopped_at) {
    const struct sw_train_options *o = &t->options;
    uint64_t step = t->start_step;
    int ret = save_again(t);
    if (ret == 0 && t->val_open && step == 0) ret = evaluate_first(t);
    while (ret == 0 && step < o->steps && !sw_trainer_stop(t)) {
        ret = train_stretch(t, step + 1, next_stop(t, step), &step);
        if (ret == 0 && step > t->start_step &&
            (sw_trainer_stop(t) || (o->keep_store && step == o->steps) ||
             (o->commit_every && step % (uint64_t)o->commit_every == 0)))
            ret = sw_trainer_commit_idle(t, step);
        if (ret < 0 || sw_trainer_stop(t)) break;
        if (t->val_open && (step == o->steps || (o->eval_every && step % o->eval_every == 0)))
            ret = evaluate(t, step);
        if (ret == 0 && is_due(t, step)) ret = save_in_between(t, step);
    }
    if (ret < 0) return ret;
    *stopped_at = step;
    if (step == o->steps) {
        if (t->updates == 0)
            sw_warning("every step was skipped: the weights saved are those of --model");
        ret = save_final(t);
        t->finished = ret == 0;
        const int traced = sw_trace_close(t->trace);
        t->trace = NULL;
        return ret < 0 ? ret : traced;
    }
    ret = step > 0 ? save_stopped(t, step) : 0;
    return ret < 0 ? ret : 1;
}

int sw_trainer_run(struct sw_trainer *t, uint64_t *stopped_at) {
    const int ret = run(t, stopped_at);
    t->failed |= ret < 0;
    return ret;
}

/* ---- digest ---- */

/* Masters, momenta and variances as FP32, whatever the record's format. */
static void hash_chunk(const struct sw_rank *r, uint32_t c, void *record, XXH3_state_t *hashes[3]) {
    const struct sw_chunk *placed = &r->t->placement.chunks[c];
    const uint64_t at = sw_chunk_begin(r, placed);
    const uint64_t elements = r->t->model.units[placed->unit].trained;
    const uint64_t end = elements > at ? elements - at : 0; /* the padding of shards is left out */
    struct sw_adam_chunk chunk;
    sw_trainer_map(r, c, record, &chunk);
    for (uint64_t first = 0; first < chunk.count; first += SW_ADAM_BLOCK) {
        const uint64_t left = chunk.count - first;
        const uint64_t count = left < SW_ADAM_BLOCK ? left : SW_ADAM_BLOCK;
        const uint64_t real = first + count <= end ? count : first < end ? end - first : 0;
        float values[3][SW_ADAM_BLOCK];
        sw_adam_read(&chunk, first, count, values[0], values[1], values[2]);
        for (int part = 0; part < 3; part++)
            XXH3_64bits_update(hashes[part], values[part], real * sizeof(float));
    }
}

static int hash_record(struct sw_trainer *t, uint32_t rank, uint32_t c, char *record,
                       XXH3_state_t *hashes[3]) {
    struct sw_rank r =
        t->ranks[rank < t->rank_count ? rank : 0]; /* the first process's, or like it */
    r.shard = rank;
    const int ret = rank < t->rank_count ? sw_trainer_read_record(&t->ranks[rank], c, record)
                                         : sw_trainer_record_remote(t, rank, c, record);
    if (ret == 0) hash_chunk(&r, c, record, hashes);
    return ret;
}

/* Shard by shard of each unit, so that the elements come in their order. */
static int hash_state(struct sw_trainer *t, XXH3_state_t *hashes[3]) {
    const struct sw_placement *p = &t->placement;
    uint64_t bytes = 0;
    for (uint32_t c = 0; c < p->chunk_count; c++)
        if (p->chunks[c].record_bytes > bytes) bytes = p->chunks[c].record_bytes;
    char *record = aligned_alloc(SW_NVME_ALIGN_BYTES, bytes);
    if (!record) return -ENOMEM;
    int ret = 0;
    for (uint32_t u = 0; u < t->model.unit_count; u++)
        for (uint32_t i = 0; i < t->shards; i++)
            for (uint32_t c = p->unit_first_chunk[u]; c < p->unit_trained_end[u] && ret == 0; c++)
                ret = hash_record(t, i, c, record, hashes);
    free(record);
    return ret;
}

static int hash_weights(struct sw_trainer *t, XXH3_state_t *hash) {
    const uint64_t element = sw_dtype_bytes(t->options.dtype);
    char *piece = malloc(FETCH_PIECE * element);
    int ret = piece ? 0 : -ENOMEM;
    for (uint32_t u = 0; u < t->model.unit_count; u++)
        for (uint64_t first = 0; first < t->model.units[u].count && ret == 0;
             first += FETCH_PIECE) {
            const uint64_t left = t->model.units[u].count - first;
            const uint64_t count = left < FETCH_PIECE ? left : FETCH_PIECE;
            ret = sw_trainer_fetch(t, u, first, count, t->options.dtype, piece);
            if (ret == 0) XXH3_64bits_update(hash, piece, count * element);
        }
    free(piece);
    return ret;
}

int sw_trainer_digest(struct sw_trainer *t, struct sw_digest *digest) {
    XXH3_state_t *hashes[4] = {0};
    int ret = 0;
    if (t->first_rank) return sw_trainer_serve(t);
    for (int i = 0; i < 4; i++) {
        hashes[i] = XXH3_createState();
        if (!hashes[i])
            ret = -ENOMEM;
        else
            XXH3_64bits_reset(hashes[i]);
    }
    if (ret == 0) ret = hash_state(t, hashes);
    if (ret == 0) ret = hash_weights(t, hashes[3]);
    ret = sw_trainer_end_serving(t, ret);
    t->failed |= ret < 0;
    if (ret == 0)
        *digest = (struct sw_digest){XXH3_64bits_digest(hashes[0]), XXH3_64bits_digest(hashes[1]),
                                     XXH3_64bits_digest(hashes[2]), XXH3_64bits_digest(hashes[3])};
    for (int i = 0; i < 4; i++) XXH3_freeState(hashes[i]);
    return ret;
}
