/* engine/trainer.c - opens a run (reads, checks, resolves, sizes) and closes it. */
#include "engine/trainer.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/clock.h"
#include "base/log.h"
#include "base/size.h"
#include "engine/output.h"
#include "engine/trace_machine.h"
#include "engine/trainer_internal.h"

enum { SEQ_LEN_DEFAULT = 512 };

const char *sw_traffic_name(enum sw_traffic traffic) {
    static const char *const names[] = {"h2d",       "d2h",        "comm",
                                        "nvme_read", "nvme_write", "nvme_direct"};
    return names[traffic];
}

/* ---- open ---- */

static int open_data(struct sw_trainer *t) {
    struct sw_train_options *o = &t->options;
    const uint32_t limit = t->model.config.max_positions;
    if (o->seq_len == 0) o->seq_len = limit < SEQ_LEN_DEFAULT ? limit : SEQ_LEN_DEFAULT;
    if (o->seq_len > limit) {
        sw_error("--seq-len %u is longer than the model's limit of %u (max_position_embeddings in "
                 "%s/config.json)",
                 o->seq_len, limit, o->model);
        return -EINVAL;
    }
    const uint32_t vocab = t->model.config.vocab;
    int ret = sw_data_open(&t->data, o->data, o->mask, o->documents, vocab, o->seq_len, o->order,
                           o->seed);
    if (ret < 0) return ret;
    t->data_open = 1;
    if (!o->val) return 0;
    ret = sw_data_open(&t->val, o->val, NULL, NULL, vocab, o->seq_len, SW_ORDER_SEQUENTIAL, 0);
    t->val_open = ret == 0;
    return ret;
}

static void resolve_steps(struct sw_trainer *t) {
    struct sw_train_options *o = &t->options;
    const uint64_t rows = (uint64_t)t->world_ranks * o->micro_batch * o->accumulate;
    if (o->steps == 0) o->steps = t->data.rows > rows ? t->data.rows / rows : 1; /* one epoch */
    if (o->warmup < 0) o->warmup = (int64_t)(o->steps * 3 / 100);
    if ((uint64_t)o->warmup > o->steps) o->warmup = (int64_t)o->steps;
    if (o->zero < 0) o->zero = t->world_ranks > 1 ? 3 : 0;
    o->overlap = sw_overlap_of(o);
}

/* What computes, and between GPUs what sums, which may take other ways on several machines. */
static void describe_operators(const struct sw_trainer *t, char *out, size_t size) {
    const struct sw_device_handle *d = &t->ranks[0].device;
    int length = snprintf(out, size, "%s", d->ops->numerics(d->device));
    if (t->machines > 1 && t->options.reduce_dtype == SW_FP32)
        length += snprintf(out + length, size - (size_t)length, ", %u machines", t->machines);
    if (d->ops->group && t->world_ranks > 1 && length > 0 && (size_t)length < size)
        d->ops->group->numerics(t->options.reduce_dtype, out + length, size - (size_t)length);
}

/* What the run is; its model is read in 16 places of each unit. */
static void identify(struct sw_trainer *t) {
    const struct sw_train_options *o = &t->options;
    t->run = (struct sw_identity){.params = t->model.params,
                                  .units = t->model.unit_count,
                                  .data = sw_data_fingerprint(&t->data),
                                  .order = o->order,
                                  .seed = o->seed,
                                  .chunk_bytes = o->chunk_bytes,
                                  .master = o->master,
                                  .folders = o->nvme_count ? o->nvme_count : 1,
                                  .numerics = {.ranks = t->world_ranks,
                                               .replicas = t->replicas,
                                               .micro_batch = o->micro_batch,
                                               .accumulate = o->accumulate,
                                               .seq_len = o->seq_len,
                                               .dtype = o->dtype,
                                               .reduce_dtype = o->reduce_dtype,
                                               .grad_dtype = o->grad_dtype,
                                               .moments = o->moments,
                                               .head_slice = sw_llama_head_slice(
                                                   &t->model, &t->ranks[0].device, t->micro_tokens),
                                               .vocabulary_parts = t->model.parts}};
    if (o->freeze) snprintf(t->run.freeze, sizeof(t->run.freeze), "%s", o->freeze);
    sw_identity_of_model(&t->model, t->run.model);
    char operators[SW_NUMERICS_KEY_BYTES];
    describe_operators(t, operators, sizeof(operators));
    sw_identity_write_key(&t->run, operators, o->sim.flops > 0);
}

static int tell_turns(const struct sw_trainer *t, int ret) {
    sw_error("the turns of a step could not be built: %s; %llu of their tasks are those of %u "
             "micro-batch%s",
             strerror(-ret), (unsigned long long)sw_placement_micro_tasks(&t->placement),
             t->options.accumulate, t->options.accumulate == 1 ? "" : "es");
    return ret;
}

static int build_turns(struct sw_trainer *t) {
    const int picked = sw_turn_work_shape(&t->shape, &t->work, &t->options, t->world != NULL);
    if (picked < 0) return tell_turns(t, picked);
    const struct sw_turn_shape *s = &t->shape;
    const int late = sw_turn_shape_is_late(s);
    int ret = sw_turn_build(&t->first, s, SW_TURN_TRAIN, 0, NULL);
    if (ret == 0) ret = sw_turn_build(&t->second, s, SW_TURN_TRAIN, late, &t->first);
    if (ret == 0) ret = sw_turn_build(&t->steady, s, SW_TURN_TRAIN, late, &t->second);
    if (ret == 0 && late) ret = sw_turn_build(&t->drain_first, s, SW_TURN_DRAIN, 1, &t->first);
    if (ret == 0 && late) ret = sw_turn_build(&t->drain, s, SW_TURN_DRAIN, 1, &t->steady);
    if (ret == 0 && t->val_open) ret = sw_turn_build(&t->eval_first, s, SW_TURN_EVAL, 0, NULL);
    if (ret == 0 && t->val_open)
        ret = sw_turn_build(&t->eval_next, s, SW_TURN_EVAL, 0, &t->eval_first);
    if (ret < 0) return tell_turns(t, ret);
    t->late_tasks = sw_trainer_count_tasks(t, &t->steady, 1);
    t->train_tasks = sw_trainer_count_tasks(t, &t->steady, 0);
#ifdef SW_CHECK_TURNS
    const struct sw_turn *const run[] = {&t->first, &t->second, &t->steady, &t->steady, &t->drain};
    char why[256];
    if (sw_turn_check(s, run, late ? 5 : 4, why, sizeof(why)) < 0) {
        sw_error("the turn breaks an invariant: %s", why);
        return -EINVAL;
    }
#endif
    struct sw_turn *const built[] = {&t->first, &t->second,     &t->steady,   &t->drain_first,
                                     &t->drain, &t->eval_first, &t->eval_next};
    for (size_t i = 0; i < sizeof(built) / sizeof(built[0]); i++) sw_turn_settle(built[i]);
    return 0;
}

/* What the run will write is refused now if it cannot be written. A log in the output folder comes
 * to be with it. */
static int check_outputs(const struct sw_trainer *t) {
    const struct sw_train_options *o = &t->options;
    const char *const inputs[] = {o->data, o->mask, o->documents, o->val};
    int ret = sw_output_check(o->out, o->model,
                              o->resume    ? "--resume"
                              : o->restart ? "--restart"
                                           : NULL,
                              o->log, o->trace);
    const char *const files[][2] = {{"--log", o->log}, {"--trace", o->trace}};
    const size_t out_length = strlen(o->out);
    for (int i = 0; i < 2 && ret == 0; i++) {
        ret = sw_output_is_input(files[i][0], files[i][1], inputs, 4, o->model);
        const int in_out = files[i][1] && !strncmp(files[i][1], o->out, out_length) &&
                           files[i][1][out_length] == '/';
        if (ret == 0 && !in_out) ret = sw_output_check_file(files[i][0], files[i][1]);
        if (ret == 0) ret = sw_output_check_kind(files[i][0], files[i][1], files[i][1] == o->trace);
    }
    if (ret == 0) ret = sw_output_is_input("--trace", o->trace, &o->log, 1, o->model);
    for (uint32_t i = 0; i < o->nvme_count && ret == 0; i++)
        ret = sw_output_check_folder("--nvme", o->nvme[i], o->model);
    return ret;
}

int sw_trainer_open(struct sw_trainer **out, const struct sw_train_options *options,
                    const struct sw_trainer_hooks *hooks) {
    struct sw_trainer *t = calloc(1, sizeof(*t));
    if (!t) return -ENOMEM;
    t->options = *options;
    sw_train_settle_device(&t->options, 0);
    t->hooks = *hooks;
    t->out_held = -1;
    pthread_mutex_init(&t->executor_lock, NULL);
    int ret = sw_trainer_open_world(t);
    if (ret == 0) ret = sw_trainer_find_commit(t);
    if (ret == 0) ret = t->first_rank == 0 ? check_outputs(t) : sw_trainer_check_trace(t);
    if (ret == 0) ret = sw_model_open(&t->model, options->model);
    if (ret == 0) ret = open_data(t);
    if (ret == 0) {
        resolve_steps(t);
        ret = sw_trainer_cut(t);
    }
    if (ret == 0) ret = sw_trainer_open_devices(t);
    if (ret == 0) ret = sw_trainer_size(t);
    if (ret == 0) {
        identify(t);
        ret = sw_trainer_check_resume(t);
    }
    if (ret == 0) ret = sw_trainer_open_import(t);
    if (ret == 0) ret = build_turns(t);
    if (ret == 0) ret = sw_trainer_agree(t);
    if (ret < 0) {
        t->failed = 1;
        sw_trainer_close(t);
        return ret;
    }
    *out = t;
    return 0;
}

/* ---- start ---- */

static int open_executor(struct sw_trainer *t) {
    const struct sw_turn *const turns[] = {&t->first, &t->second,     &t->steady,   &t->drain_first,
                                           &t->drain, &t->eval_first, &t->eval_next};
    const uint32_t count = sizeof(turns) / sizeof(turns[0]);
    struct sw_device_handle devices[SW_RANKS_MAX];
    for (uint32_t i = 0; i < t->rank_count; i++) devices[i] = t->ranks[i].device;
    struct sw_stream *streams[SW_RANKS_MAX * SW_DEVICE_LANES];
    for (uint32_t i = 0; i < t->rank_count; i++)
        memcpy(streams + i * SW_DEVICE_LANES, t->ranks[i].lanes, sizeof(t->ranks[i].lanes));
    const struct sw_executor_ranks ranks = {t->rank_count, devices, t->nodes.of, streams};
    if (!sw_sim_any(&t->options.sim))
        return sw_executor_open(&t->executor, &ranks, &sw_trainer_lanes, t, turns, count);
    t->throttle = (struct sw_throttle){.rates = t->options.sim,
                                       .real = sw_trainer_lanes,
                                       .ctx = t,
                                       .work = sw_trainer_work,
                                       .device = devices[0].ops,
                                       .adam_lane = t->nodes.of,
                                       .adam_lanes = t->nodes.count};
    return sw_executor_open(&t->executor, &ranks, &sw_throttle_ops, &t->throttle, turns, count);
}

static void announce_ranks(const struct sw_trainer *t) {
    char list[128];
    for (uint32_t i = 0; i < t->rank_count && t->cores; i++) {
        sw_core_share_list(t->cores, i, list, sizeof(list));
        sw_info("rank %u: %d thread%s on CPUs %s", t->ranks[i].shard, t->options.device_threads,
                t->options.device_threads == 1 ? "" : "s", list);
    }
}

static void announce_team(const struct sw_trainer *t, uint32_t lane) {
    const struct sw_placement *p = &t->placement;
    const struct sw_rank *r = &t->ranks[0];
    while (t->nodes.of[r->index] != lane) r++;
    for (uint32_t c = 0; c < p->chunk_count; c++) {
        const struct sw_chunk *chunk = &p->chunks[c];
        if (chunk->frozen || chunk->tier == SW_TIER_DEVICE) continue; /* the device's own team */
        const char *record = chunk->tier == SW_TIER_HOST ? r->host_state + chunk->record_offset
                                                         : r->rings[SW_RING_STATE];
        sw_team_announce(t->teams[lane], record, chunk->record_bytes);
        return;
    }
}

/* The store is there already; a disk that the model fills would show after the last step. */
static int check_space(const struct sw_trainer *t) {
    if (t->options.sim.flops) return 0;
    return sw_output_check_space(t->options.out, sw_model_saved_bytes(&t->model, t->options.dtype),
                                 sw_starts_anew(t));
}

/* The first process takes the folder; others use it where their store lies in it. */
static int take_output(struct sw_trainer *t) {
    int ret = 0;
    if (t->first_rank == 0) ret = sw_output_take(t->options.out, &t->out_made, &t->out_held);
    if (ret == 0) ret = sw_trainer_share(t, CHANNEL_MAIN, NULL, NULL, 0);
    if (ret == 0 && t->first_rank) mkdir(t->options.out, 0777); /* on another node it is another */
    return ret;
}

static int start(struct sw_trainer *t) {
    const struct sw_train_options *o = &t->options;
    const int first = t->first_rank == 0;
    int ret = take_output(t);
    if (ret == 0) ret = sw_trainer_allocate(t);
    if (ret == 0) ret = sw_trainer_open_store(t);
    if (ret == 0 && first) ret = check_space(t);
    if (ret == 0) ret = sw_trainer_share(t, CHANNEL_MAIN, NULL, NULL, 0);
    if (ret == 0) ret = sw_trainer_begin_store(t);
    if (ret == 0) sw_trainer_drop_commit(t);
    if (ret == 0) sw_trainer_drop_scratch(t);
    if (ret == 0) ret = sw_trainer_load(t);
    if (ret == 0) sw_trainer_go_on(t);
    if (ret == 0) ret = sw_trainer_end_import(t);
    for (uint32_t i = 0; i < t->nodes.count && ret == 0; i++) announce_team(t, i);
    if (ret == 0) announce_ranks(t);
    if (ret == 0)
        ret = sw_trace_open(&t->trace, o->trace, sw_world_index(t->world), t->rank_count,
                            t->nodes.of);
    if (ret == 0) sw_trace_machine(t->trace, o);
    if (ret == 0) ret = open_executor(t);
    if (ret == 0 && first && sw_starts_anew(t)) ret = sw_output_empty(o->out, o->log, o->trace);
    /* However long the others load. From here on their traces have one time, whatever their clocks
     * say. */
    if (ret == 0) ret = sw_trainer_share(t, CHANNEL_MAIN, NULL, NULL, 0);
    if (ret == 0 && t->world) sw_trace_begin(t->trace, sw_now_ns());
    if (ret == 0) ret = sw_trainer_open_group(t);
    if (ret == 0) sw_trainer_settle(t, 1);
    return ret;
}

int sw_trainer_start(struct sw_trainer *t) {
    const int ret = start(t);
    t->failed |= ret < 0;
    return ret;
}

int sw_trainer_close(struct sw_trainer *t) {
    if (!t) return 0;
    pthread_mutex_lock(&t->executor_lock);
    t->executor_closes = 1;
    pthread_mutex_unlock(&t->executor_lock);
    sw_trainer_settle(t, 0);
    sw_executor_close(t->executor);
    sw_trace_close(t->trace);
    sw_trainer_free_memory(t);
    sw_trainer_close_import(t);
    free(t->resumed.entries);
    for (uint32_t i = 0; i < t->nodes.count; i++) sw_team_close(t->teams[i]);
    sw_core_share_close(t->cores);
    if (t->out_held >= 0) close(t->out_held);
    if (t->out_made) rmdir(t->options.out); /* goes only while nothing was saved in it */
    struct sw_turn *const turns[] = {&t->first, &t->second,     &t->steady,   &t->drain_first,
                                     &t->drain, &t->eval_first, &t->eval_next};
    for (size_t i = 0; i < sizeof(turns) / sizeof(turns[0]); i++) sw_turn_free(turns[i]);
    sw_trainer_close_devices(t);
    free(t->ranks);
    pthread_mutex_destroy(&t->executor_lock); /* the ranks' threads are over */
    if (t->data_open) sw_data_close(&t->data);
    if (t->val_open) sw_data_close(&t->val);
    sw_model_close(&t->model);
    struct sw_world *world = t->world;
    const int failed = t->failed;
    free(t);
    return sw_world_close(world, failed);
}

/* ---- what open found ---- */

const struct sw_train_options *sw_trainer_options(const struct sw_trainer *t) {
    return &t->options;
}

int sw_trainer_table(const struct sw_trainer *t, struct sw_byte_row rows[SW_BYTE_ROWS_MAX]) {
    return sw_placement_table(&t->placement, &t->input, rows);
}

const char *sw_trainer_numerics_key(const struct sw_trainer *t) {
    return t->run.key;
}
const char *sw_trainer_store_mode(const struct sw_trainer *t) {
    return t->store_mode;
}
uint64_t sw_trainer_start_step(const struct sw_trainer *t) {
    return t->start_step;
}
int sw_trainer_is_first(const struct sw_trainer *t) {
    return t->first_rank == 0;
}
int sw_trainer_was_imported(const struct sw_trainer *t) {
    return t->options.import_dir && !t->resuming && !t->done_before;
}
int sw_trainer_done_before(const struct sw_trainer *t) {
    return t->done_before;
}
uint64_t sw_trainer_written_bytes(const struct sw_trainer *t) {
    return atomic_load(&t->written_bytes);
}
int sw_trainer_commits(const struct sw_trainer *t, uint64_t *step) {
    *step = t->committed_step;
    return t->committed_step != SW_NO_COMMIT;
}
int sw_trainer_has_on_disk(const struct sw_trainer *t, uint64_t *step) {
    *step = t->durable_step;
    return t->durable_step != SW_NO_COMMIT;
}
const char *sw_trainer_store_place(const struct sw_trainer *t, uint32_t *process,
                                   uint32_t *processes) {
    *process = sw_world_index(t->world);
    *processes = sw_world_size(t->world);
    return sw_trainer_store_folder(t);
}
int sw_trainer_stopped_by(const struct sw_trainer *t) {
    return t->world ? t->stop_agreed : sw_stop_asked(t);
}
uint64_t sw_trainer_loaded_bytes(const struct sw_trainer *t) {
    return t->loaded_bytes;
}

uint64_t sw_trainer_trained_params(const struct sw_trainer *t) {
    return t->model.trained_params;
}

uint64_t sw_trainer_params(const struct sw_trainer *t) {
    return t->model.params;
}

uint64_t sw_trainer_tokens_per_step(const struct sw_trainer *t) {
    return t->step_rows * t->options.seq_len;
}
