/* engine/trainer_lanes.c - what each kind of task does. The executor decides when. */
#include "engine/trainer_internal.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include "base/crc32c.h"
#include "base/log.h"
#include "base/size.h"

static_assert(SW_LANE_IN_FLIGHT_MAX <= SW_NVME_REQS_MAX, "every task in flight has a request");

/* ---- batch ---- */

/* Row `row` of the data into place i of a rank's batch. */
static void fill_row(const struct sw_rank *r, const struct sw_data *data, uint64_t row,
                     uint64_t i) {
    const uint64_t T = r->t->options.seq_len;
    uint32_t *starts = r->stage_starts ? r->stage_starts + i * T : NULL;
    if (row < data->rows) {
        sw_data_fill(data, row, r->stage_tokens + i * T, r->stage_targets + i * T,
                     r->stage_mask + i * T, starts);
        return;
    }
    if (starts) memset(starts, 0, T * sizeof(*starts));
    memset(r->stage_tokens + i * T, 0, T * sizeof(int32_t));
    memset(r->stage_targets + i * T, 0, T * sizeof(int32_t));
    memset(r->stage_mask + i * T, 0, T);
}

/* Each rank has the rows of the step that follow those of the rank before it; all of them count,
 * those of other processes, too. Rows past the end of the validation text do not. */
static int fill(struct sw_trainer *t, struct sw_run *run) {
    const int eval = run->turn->kind == SW_TURN_EVAL;
    struct sw_data *data = eval ? &t->val : &t->data;
    uint64_t tokens = 0;
    const int ret = sw_data_check_unchanged(data);
    if (ret < 0) return ret;
    for (uint64_t i = 0; i < t->step_rows; i++) {
        const uint64_t row =
            eval ? t->eval.next_row++ : sw_data_row(data, (run->step - 1) * t->step_rows + i);
        const uint64_t rank = i / t->rank_rows;
        tokens += row < data->rows ? sw_data_counting(data, row) : 0;
        if (rank >= t->first_rank && rank < t->first_rank + t->rank_count)
            fill_row(&t->ranks[rank - t->first_rank], data, row, i % t->rank_rows);
    }
    if (eval)
        t->eval.tokens += tokens;
    else
        sw_record(t, run->step)->tokens = tokens;
    return 0;
}

static int batch(struct sw_rank *r, struct sw_run *run, const struct sw_task *task,
                 struct sw_stream *stream) {
    struct sw_trainer *t = r->t;
    const struct sw_device_ops *ops = r->device.ops;
    const uint64_t from = run->before ? run->step - 1 : run->step;
    const int stops = run->turn->kind == SW_TURN_EVAL ? !t->world && sw_stop_asked(t)
                                                      : sw_trainer_stops_before(t, from, run->step);
    if (sw_run_decide(run, stops)) return 0;
    const uint64_t at = task->micro * t->micro_tokens, n = t->micro_tokens;
    int ret =
        ops->copy_h2d(stream, r->batch_tokens + at, r->stage_tokens + at, n * sizeof(int32_t));
    if (ret == 0)
        ret = ops->copy_h2d(stream, r->batch_targets + at, r->stage_targets + at,
                            n * sizeof(int32_t));
    if (ret == 0 && r->batch_starts)
        ret =
            ops->copy_h2d(stream, r->batch_starts + at, r->stage_starts + at, n * sizeof(uint32_t));
    return ret < 0 ? ret : ops->copy_h2d(stream, r->batch_mask + at, r->stage_mask + at, n);
}

/* ---- verdicts ---- */

/* Over the ranks, in their order. */
static double loss_sum(const struct sw_trainer *t) {
    double sum = 0;
    for (uint32_t i = 0; i < t->world_ranks; i++) sum += t->verdicts[i].loss;
    return sum;
}

static double step_loss(const struct sw_trainer *t, const struct step_record *record) {
    return record->tokens ? loss_sum(t) / (double)record->tokens : NAN;
}

static const char *tensor_name(const struct sw_trainer *t, uint32_t unit, uint64_t element) {
    const struct sw_unit *u = &t->model.units[unit];
    for (uint32_t i = 0; i < u->tensor_count; i++)
        if (element >= u->tensors[i].first && element < u->tensors[i].first + u->tensors[i].count)
            return u->tensors[i].name;
    return "padding";
}

/* What is not finite in a rank's gradient of a unit: the count, and the first value's place in the
 * unit. */
static struct sw_nonfinite bad_of(const struct sw_rank *r, uint32_t unit) {
    const struct sw_placement *p = &r->t->placement;
    struct sw_nonfinite sum = {0};
    for (uint32_t c = p->unit_first_chunk[unit]; c < p->unit_trained_end[unit];
         c = p->chunks[c].span_end) {
        const struct sw_nonfinite *bad = &r->host_bad[c];
        if (bad->count == 0) continue;
        if (sum.count == 0)
            sum = (struct sw_nonfinite){0, sw_chunk_begin(r, &p->chunks[c]) + bad->first,
                                        bad->is_nan, 0};
        sum.count += bad->count;
    }
    return sum;
}

/* What a rank's losses, norms and what is not finite among its gradients come to. */
static struct rank_verdict judge(const struct sw_rank *r, int with_gradient) {
    const struct sw_trainer *t = r->t;
    struct rank_verdict v = {.bad_unit = -1};
    for (uint32_t m = 0; m < t->options.accumulate; m++) v.loss += r->host_loss_sums[m];
    for (uint32_t u = 0; with_gradient && u < t->model.unit_count; u++) {
        const struct unit_norms *n = &r->norms[u];
        for (uint64_t b = 0; b < n->block_count; b++) v.squared += n->block_sums[b];
        const struct sw_nonfinite bad = bad_of(r, u);
        if (bad.count == 0) continue; /* the last unit's counts: gradients arrive from there */
        v.bad_unit = u;
        v.bad = bad;
    }
    return v;
}

/* Of all ranks, here and in other processes. */
static int collect_verdicts(struct sw_trainer *t, int with_gradient) {
    struct rank_verdict mine[SW_RANKS_MAX];
    const int stop = sw_stop_asked(t);
    for (uint32_t i = 0; i < t->rank_count; i++) {
        mine[i] = judge(&t->ranks[i], with_gradient);
        mine[i].stop = stop;
    }
    return sw_trainer_share(t, CHANNEL_CONTROL, t->verdicts, mine, t->rank_count * sizeof(mine[0]));
}

/* The verdict that updates wait for: the gate's, or the norm's where there is none. */
static void check_stop(const struct sw_trainer *t, struct step_record *record) {
    for (uint32_t i = 0; i < t->world_ranks; i++)
        if (t->verdicts[i].stop > record->stop) record->stop = (int)t->verdicts[i].stop;
}

/* The rank with the first gradient that is not finite, from the last unit down, or -1. */
static int64_t find_bad(const struct sw_trainer *t) {
    int64_t rank = -1;
    for (uint32_t i = 0; i < t->world_ranks; i++)
        if (t->verdicts[i].bad_unit > (rank < 0 ? -1 : t->verdicts[rank].bad_unit)) rank = i;
    return rank;
}

static void skip(struct step_record *record, const char *why) {
    record->apply = 0;
    record->report.skipped = 1;
    snprintf(record->report.why_skipped, sizeof(record->report.why_skipped), "%s", why);
}

static void check_loss(struct sw_trainer *t, struct step_record *record) {
    char why[128];
    record->report.loss = step_loss(t, record);
    record->apply = 1;
    if (record->tokens == 0) {
        skip(record, "no token of the batch counts (all are masked)");
    } else if (!isfinite(record->report.loss)) {
        snprintf(why, sizeof(why), "the loss is %s", isnan(record->report.loss) ? "NaN" : "Inf");
        skip(record, why);
    }
}

/* The scalars of the update, and the count of skips. */
static int conclude(struct sw_trainer *t, struct step_record *record) {
    const struct sw_train_options *o = &t->options;
    if (!record->apply) {
        record->updates = t->updates;
        record->skips_in_a_row = ++t->skips_in_a_row;
        if (t->skips_in_a_row <= o->max_skips) return 0;
        sw_error("step %llu: %s; %u steps in a row were skipped, more than --max-skips %u allows",
                 (unsigned long long)record->step, record->report.why_skipped, t->skips_in_a_row,
                 o->max_skips);
        return -EDOM;
    }
    t->skips_in_a_row = record->skips_in_a_row = 0;
    record->updates = t->updates + 1;
    const struct sw_adam_hyper hyper = {record->lr, o->beta1, o->beta2, o->eps, o->weight_decay, 0};
    sw_adam_prepare(&record->adam, &hyper, ++t->updates, (float)record->factor);
    return 0;
}

static int gate(struct sw_trainer *t, struct sw_run *run) {
    const int ret = collect_verdicts(t, 0);
    if (ret < 0) return ret;
    if (run->turn->kind == SW_TURN_EVAL) {
        t->eval.loss_sum += loss_sum(t);
        return 0;
    }
    struct step_record *record = sw_record(t, run->step);
    check_stop(t, record);
    check_loss(t, record);
    record->factor = 1;
    return conclude(t, record);
}

/* Which gradient is not finite: the unit's count, and the tensor of the first value. */
static const char *describe_bad(const struct sw_trainer *t, uint32_t rank, char *out,
                                size_t out_size) {
    const struct rank_verdict *v = &t->verdicts[rank];
    const uint32_t unit = (uint32_t)v->bad_unit;
    snprintf(out, out_size, "%llu gradients of %s are not finite, the first (%s) in %s, rank %u",
             (unsigned long long)v->bad.count, t->model.units[unit].name,
             v->bad.is_nan ? "NaN" : "Inf", tensor_name(t, unit, v->bad.first), rank);
    return out;
}

/* Backward mode may have updated units already: such a gradient cannot be taken back. */
static int refuse_bad(const struct sw_trainer *t, uint64_t step, uint32_t rank) {
    char what[160];
    sw_error(
        "step %llu: %s; with --overlap backward other units may already be updated, so the run "
        "stops (--overlap forward skips such steps)",
        (unsigned long long)step, describe_bad(t, rank, what, sizeof(what)));
    return -EDOM;
}

/* Over the ranks, in their order; each one's over its blocks in the order of units. */
static double squared_norm(const struct sw_trainer *t) {
    double sum = 0;
    for (uint32_t i = 0; i < t->shards; i++) sum += t->verdicts[i].squared;
    return sum;
}

static int norm(struct sw_trainer *t, struct sw_run *run) {
    struct step_record *record = sw_record(t, run->step);
    const double clip = t->options.clip;
    const int ret = collect_verdicts(t, 1);
    if (ret < 0) return ret;
    const double value = sqrt(squared_norm(t));
    record->report.grad_norm = value;
    const int64_t bad = find_bad(t);
    if (t->shape.overlap == SW_OVERLAP_BACKWARD)
        return bad >= 0 && record->apply ? refuse_bad(t, record->step, (uint32_t)bad) : 0;
    check_stop(t, record);
    check_loss(t, record);
    if (record->apply && bad >= 0) {
        char why[160];
        skip(record, describe_bad(t, (uint32_t)bad, why, sizeof(why)));
    }
    /* torch.nn.utils.clip_grad_norm_: clip / (norm + 1e-6), at most 1. */
    record->factor = clip > 0 && value > 0 ? fmin(1.0, clip / (value + 1e-6)) : 1.0;
    return conclude(t, record);
}

/* ---- update ---- */

static int scalars(struct sw_rank *r, struct sw_run *run, const struct sw_task *task,
                   struct sw_stream *stream) {
    struct sw_trainer *t = r->t;
    const struct step_record *record = sw_record_of(t, run, task);
    const struct sw_adam_step *a = &record->adam;
    r->host_step = (struct sw_device_adam_step){.beta1 = a->beta1,
                                                .one_minus_beta1 = a->one_minus_beta1,
                                                .beta2 = a->beta2,
                                                .one_minus_beta2 = a->one_minus_beta2,
                                                .eps = a->eps,
                                                .step_size = a->step_size,
                                                .rsqrt_bias2 = a->rsqrt_bias2,
                                                .grad_scale = a->grad_scale,
                                                .decay_factor = a->decay_factor,
                                                .seed = a->seed,
                                                .apply = (uint32_t)record->apply};
    return r->device.ops->copy_h2d(stream, r->device_step, &r->host_step, sizeof(r->host_step));
}

static int adam(struct sw_rank *r, struct sw_run *run, const struct sw_task *task) {
    struct sw_trainer *t = r->t;
    const struct step_record *record = sw_record_of(t, run, task);
    const struct sw_chunk *placed = sw_chunk_of(t, task);
    const int slotted = task->at[SW_RING_STATE] >= 0, emits = task->at[SW_RING_EMIT] >= 0;
    char *state =
        slotted ? sw_slot(r, run, task, SW_RING_STATE) : r->host_state + placed->record_offset;
    char *weight =
        emits ? sw_slot(r, run, task, SW_RING_EMIT) : r->host_weights + placed->weight_offset;
    if (!record->apply) {
        /* The window may be loaded from here: with the weights as they are. */
        if (placed->weight_tier == SW_TIER_NVME)
            sw_trainer_round_masters(r, task->chunk, state, weight);
        return 0;
    }
    struct sw_adam_chunk chunk;
    sw_trainer_map(r, task->chunk, state, &chunk);
    chunk.grad = task->at[SW_RING_GRAD_STAGE] >= 0 ? sw_slot(r, run, task, SW_RING_GRAD_STAGE)
                                                   : r->host_grads + placed->grad_offset;
    chunk.weight = weight;
    const int threads = sw_team_place(t->teams[t->nodes.of[r->index]], state, placed->record_bytes);
    struct sw_adam_extra extra = {.checksum = slotted};
    sw_adam_update(t->adam_variant, &record->adam, &chunk, threads, &extra);
    if (!extra.checksum) return 0;
    r->chunks[task->chunk].fresh_checksum = extra.checksum_after;
    return sw_trainer_check_bytes(r, task->chunk, record->step, extra.checksum_before);
}

void sw_trainer_host_adam(const struct sw_device_adam_step *step,
                          const struct sw_device_adam_chunk *on_device, void *ctx) {
    const struct sw_trainer *t = ctx;
    if (!step->apply) return;
    const struct sw_adam_step adam_step = {.beta1 = step->beta1,
                                           .one_minus_beta1 = step->one_minus_beta1,
                                           .beta2 = step->beta2,
                                           .one_minus_beta2 = step->one_minus_beta2,
                                           .eps = step->eps,
                                           .step_size = step->step_size,
                                           .rsqrt_bias2 = step->rsqrt_bias2,
                                           .grad_scale = step->grad_scale,
                                           .decay_factor = step->decay_factor,
                                           .seed = step->seed};
    struct sw_adam_range ranges[RANGES_MAX];
    assert(on_device->range_count <= RANGES_MAX);
    for (int i = 0; i < on_device->range_count; i++)
        ranges[i] = (struct sw_adam_range){on_device->ranges[i].end, on_device->ranges[i].decays};
    struct sw_adam_chunk chunk = {
        .format = {.master = on_device->split_master ? SW_MASTER_SPLIT : SW_MASTER_FP32,
                   .moments = on_device->coded_moments ? SW_MOMENTS_8BIT : SW_MOMENTS_FP32,
                   .grad = on_device->grad_dtype,
                   .weight = on_device->weight_dtype},
        .count = on_device->count,
        .first = on_device->first,
        .ranges = ranges,
        .range_count = on_device->range_count,
        .grad = on_device->grad,
        .weight = on_device->weight};
    sw_adam_record_map(&chunk, on_device->record);
    sw_adam_update(t->adam_variant, &adam_step, &chunk, t->options.device_threads, NULL);
}

static int device_adam(struct sw_rank *r, struct sw_run *run, const struct sw_task *task,
                       struct sw_stream *stream) {
    struct sw_trainer *t = r->t;
    const struct step_record *record = sw_record_of(t, run, task);
    /* The scalars' copy came after the gate, and the compute lane after that copy was submitted. */
    if (!record->apply) return 0;
    const struct sw_chunk *placed = sw_chunk_of(t, task);
    const struct chunk_state *state = &r->chunks[task->chunk];
    struct sw_device_adam_range ranges[RANGES_MAX];
    for (int i = 0; i < state->range_count; i++)
        ranges[i] = (struct sw_device_adam_range){state->ranges[i].end, state->ranges[i].decays};
    const struct sw_device_adam_chunk chunk = {
        .record = r->device_state + placed->record_offset,
        .grad = r->grads + placed->grad_offset,
        .weight = sw_weights_at(r, placed),
        .count = placed->count,
        .first = placed->index + sw_piece_of(t, r->shard, placed->unit, 0).first,
        .ranges = ranges,
        .range_count = state->range_count,
        .split_master = t->format.master == SW_MASTER_SPLIT,
        .coded_moments = t->format.moments == SW_MOMENTS_8BIT,
        .grad_dtype = t->options.grad_dtype,
        .weight_dtype = t->options.dtype,
    };
    return r->device.ops->adam(stream, r->device_step, &chunk);
}

static int upload(struct sw_rank *r, struct sw_run *run, const struct sw_task *task,
                  struct sw_stream *stream) {
    struct sw_trainer *t = r->t;
    if (!sw_record_of(t, run, task)->apply) return 0;
    const uint64_t bytes = sw_turn_work_bytes(&t->work, task);
    *sw_bytes_of(r, run, task) = bytes;
    return r->device.ops->copy_h2d(stream, sw_weights_at(r, sw_chunk_of(t, task)),
                                   sw_slot(r, run, task, SW_RING_EMIT), bytes);
}

static int load(struct sw_rank *r, struct sw_run *run, const struct sw_task *task,
                struct sw_stream *stream) {
    struct sw_trainer *t = r->t;
    const struct sw_chunk *chunk = sw_chunk_of(t, task);
    const uint64_t bytes = sw_turn_work_bytes(&t->work, task);
    const char *from = r->host_weights + chunk->weight_offset;
    char *to = sw_slot(r, run, task, SW_RING_WINDOW) +
               sw_chunk_begin(r, chunk) * sw_dtype_bytes(t->options.dtype);
    *sw_bytes_of(r, run, task) = bytes;
    if (t->direct && task->at[SW_RING_EMIT] < 0 && task->at[SW_RING_WEIGHT_STAGE] >= 0) {
        const uint32_t record = t->spills[SPILL_WEIGHTS].record_of[sw_spill_index(r, task->chunk)];
        return sw_direct_load(r, run, sw_record_of(t, run, task), record, to, stream);
    }
    if (task->at[SW_RING_EMIT] >= 0)
        from = sw_slot(r, run, task, SW_RING_EMIT);
    else if (task->at[SW_RING_WEIGHT_STAGE] >= 0)
        from = sw_slot(r, run, task, SW_RING_WEIGHT_STAGE);
    return r->device.ops->copy_h2d(stream, to, from, bytes);
}

static int commit(struct sw_trainer *t, struct sw_run *run, const struct sw_task *task) {
    const struct step_record *record = sw_record_of(t, run, task);
    const uint64_t every = (uint64_t)t->options.commit_every;
    if (every == 0 || record->step % every != 0) return 0;
    return sw_trainer_commit(t, record->step, record->updates, record->skips_in_a_row);
}

/* ---- the table ---- */

static int run_task(void *ctx, struct sw_run *run, const struct sw_task *task, uint32_t rank,
                    struct sw_stream *stream) {
    struct sw_trainer *t = ctx;
    struct sw_rank *r = &t->ranks[rank];
    *sw_bytes_of(r, run, task) = 0;
    if (task->kind == SW_TASK_FILL) return fill(t, run);
    if (task->kind == SW_TASK_BATCH) return batch(r, run, task, stream);
    if (sw_is_cancelled(run, task)) return 0;
    switch (task->kind) {
    case SW_TASK_LOSS:
        return r->device.ops->copy_d2h(stream, r->host_loss_sums, r->loss_sums,
                                       t->options.accumulate * sizeof(double));
    case SW_TASK_GATE:
        return gate(t, run);
    case SW_TASK_LOAD:
        return load(r, run, task, stream);
    case SW_TASK_NORM:
        return norm(t, run);
    case SW_TASK_SCALARS:
        return scalars(r, run, task, stream);
    case SW_TASK_ADAM:
        return adam(r, run, task);
    case SW_TASK_DEVICE_ADAM:
        return device_adam(r, run, task, stream);
    case SW_TASK_UPLOAD:
        return upload(r, run, task, stream);
    case SW_TASK_COMMIT:
        return commit(t, run, task);
    default:
        return sw_trainer_compute(r, run, task, stream);
    }
}

/* ---- NVMe lanes ---- */

/* Prepares an optimizer record's transfer; 1: nothing is to be moved. */
static int aim_at_record(struct sw_rank *rank, const struct sw_task *task, char *state,
                         struct lane_request *r) {
    struct sw_trainer *t = rank->t;
    const uint32_t stored = sw_store_chunk(rank, task->chunk);
    uint32_t checksum, home = sw_homes_newest(&t->homes, stored, &checksum);
    if (task->kind == SW_TASK_WRITE) {
        home = sw_homes_next(&t->homes, stored);
        sw_homes_wrote(&t->homes, stored, home, rank->chunks[task->chunk].fresh_checksum);
    } else if (home == SW_HOME_VIRGIN) {
        sw_trainer_start_chunk(rank, task->chunk, state);
        return 1;
    }
    r->req = (struct sw_nvme_req){
        .buf = state, .chunk = stored, .home = home, .write = task->kind == SW_TASK_WRITE};
    r->queue = task->kind == SW_TASK_WRITE ? t->writer : t->reader;
    return 0;
}

static void aim_at_spill(const struct sw_rank *rank, const struct sw_task *task, char *buffer,
                         enum spill spill, int write, struct lane_request *r) {
    struct spill_store *s = &rank->t->spills[spill];
    const uint64_t index =
        spill == SPILL_KEPT ? sw_kept_index(rank->t, task->unit, task->micro) : task->chunk;
    const uint32_t record = s->record_of[sw_spill_index(rank, index)];
    r->spill = s;
    r->queue = write ? s->writer : s->reader;
    r->req = (struct sw_nvme_req){.buf = buffer, .chunk = record, .write = (uint32_t)write};
    if (write) s->checksums[record] = sw_crc32c(0, buffer, s->bytes[record]);
    if (write && spill == SPILL_WEIGHTS) sw_direct_wrote(rank->t, record, buffer);
}

/* Whether a task writes what a skipped step has not made. */
static int is_idle(const struct sw_task *task, const struct step_record *record) {
    if (task->kind != SW_TASK_WRITE && task->kind != SW_TASK_WRITE_WEIGHT) return 0;
    return !record->apply; /* Adam waited for the verdict; others need not know it yet */
}

static int start_task(void *ctx, struct sw_run *run, const struct sw_task *task, uint32_t index) {
    struct sw_trainer *t = ctx;
    struct sw_rank *rank = &t->ranks[index];
    const int write = task->lane == SW_LANE_NVME_WRITE;
    struct lane_request *r = &t->requests[write][t->request_next[write] % SW_LANE_IN_FLIGHT_MAX];
    *sw_bytes_of(rank, run, task) = 0;
    if (sw_is_cancelled(run, task)) return 1;
    *r = (struct lane_request){
        .record = sw_record_of(t, run, task), .rank = rank, .unit = task->unit};
    if (is_idle(task, r->record)) return 1;
    static const struct {
        enum sw_ring ring;
        enum spill spill;
    } kinds[SW_TASK_KIND_COUNT] = {
        [SW_TASK_READ_WEIGHT] = {SW_RING_WEIGHT_STAGE, SPILL_WEIGHTS},
        [SW_TASK_WRITE_WEIGHT] = {SW_RING_EMIT, SPILL_WEIGHTS},
        [SW_TASK_READ_GRAD] = {SW_RING_GRAD_STAGE, SPILL_GRADS},
        [SW_TASK_WRITE_GRAD] = {SW_RING_GRAD_STAGE, SPILL_GRADS},
        [SW_TASK_READ_KEPT] = {SW_RING_KEPT_STAGE, SPILL_KEPT},
        [SW_TASK_WRITE_KEPT] = {SW_RING_KEPT_STAGE, SPILL_KEPT},
    };
    if (task->kind == SW_TASK_READ || task->kind == SW_TASK_WRITE) {
        if (aim_at_record(rank, task, sw_slot(rank, run, task, SW_RING_STATE), r)) return 1;
    } else {
        aim_at_spill(rank, task, sw_slot(rank, run, task, kinds[task->kind].ring),
                     kinds[task->kind].spill, write, r);
    }
    const uint64_t bytes = sw_turn_work_bytes(&t->work, task);
    *sw_bytes_of(rank, run, task) = bytes;
    if (t->direct && task->kind == SW_TASK_READ_WEIGHT) return 1; /* by the load that follows */
    if (write) atomic_fetch_add(&t->written_bytes, bytes);
    t->request_next[write]++;
    return sw_nvme_submit(r->queue, &r->req);
}

static int report_failed(const struct sw_trainer *t, const struct lane_request *r) {
    const char *what = r->req.write ? "written" : "read";
    const char *unit = t->model.units[r->unit].name;
    const unsigned long long step = r->record->step;
    if (r->spill) {
        static const char *const names[SPILL_COUNT] = {"weights", "gradient", "kept input"};
        sw_error("step %llu: the %s of %s could not be %s: %s", step, names[r->spill - t->spills],
                 unit, what, strerror(-r->req.result));
    } else {
        const struct sw_chunk *chunk = &t->placement.chunks[r->req.chunk / t->rank_count];
        const uint64_t first = sw_chunk_begin(r->rank, chunk);
        sw_error("step %llu: the state of %s, elements %llu to %llu, could not be %s: %s", step,
                 unit, (unsigned long long)first, (unsigned long long)(first + chunk->count - 1),
                 what, strerror(-r->req.result));
    }
    return r->req.result;
}

/* One at a time, as the requests of a lane may be of several queues, and end in their order. */
static int finish_tasks(void *ctx, enum sw_lane lane, uint32_t max) {
    struct sw_trainer *t = ctx;
    const int write = lane == SW_LANE_NVME_WRITE;
    struct lane_request *r = &t->requests[write][t->request_first[write] % SW_LANE_IN_FLIGHT_MAX];
    struct sw_nvme_req *done;
    (void)max;
    int ret = sw_nvme_reap(r->queue, &done, 1, 1);
    if (ret < 0) return ret;
    assert(done == &r->req);
    t->request_first[write]++;
    if (r->req.result < 0) return report_failed(t, r);
    ret = r->spill && !write ? sw_spill_check(t, r) : 0;
    return ret < 0 ? ret : 1;
}

/* What a lane's bytes count as; the lanes that move none are left out. */
static const enum sw_traffic lane_traffic[SW_LANE_COUNT] = {
    [SW_LANE_H2D] = SW_BYTES_H2D,
    [SW_LANE_D2H] = SW_BYTES_D2H,
    [SW_LANE_COMM] = SW_BYTES_COMM,
    [SW_LANE_NVME_READ] = SW_BYTES_NVME_READ,
    [SW_LANE_NVME_WRITE] = SW_BYTES_NVME_WRITE,
};

static void trace_task(struct sw_trainer *t, const struct sw_run *run, const struct sw_task *task,
                       uint32_t rank) {
    const uint64_t index = sw_run_at(run, task, rank);
    const int of_unit = sw_task_is_of_unit((enum sw_task_kind)task->kind);
    const struct sw_trace_event event = {
        .kind = (enum sw_task_kind)task->kind,
        .lane = (enum sw_lane)task->lane,
        .unit = of_unit ? t->model.units[task->unit].name : NULL,
        .micro = task->micro,
        .rank = t->first_rank + rank,
        .eval = run->turn->kind == SW_TURN_EVAL,
        .step = run->step - task->late,
        .bytes = run->bytes[index],
        .start_ns = run->start_ns[index],
        .end_ns = run->end_ns[index],
    };
    sw_trace_add(t->trace, &event);
}

static void task_done(void *ctx, struct sw_run *run, const struct sw_task *task, uint32_t rank) {
    struct sw_trainer *t = ctx;
    if (t->trace) trace_task(t, run, task, rank);
    if (run->turn->kind == SW_TURN_EVAL) return;
    struct step_record *record = sw_record_of(t, run, task);
    const uint64_t index = sw_run_at(run, task, rank);
    record->busy_ns[rank][task->lane] += run->end_ns[index] - run->start_ns[index];
    if (run->bytes[index]) record->bytes[rank][lane_traffic[task->lane]] += run->bytes[index];
    /* Those on a device are known to be over later than they are. */
    uint64_t latest_ns = atomic_load(&record->end_ns);
    while (run->end_ns[index] > latest_ns &&
           !atomic_compare_exchange_weak(&record->end_ns, &latest_ns, run->end_ns[index])) {
    }
    if (atomic_fetch_sub(&record->tasks_left, 1) != 1) return;
    atomic_store(&record->finished, 1);
    sw_executor_nudge(t->executor);
}

double sw_trainer_work(void *ctx, struct sw_run *run, const struct sw_task *task) {
    struct sw_trainer *t = ctx;
    if (sw_is_cancelled(run, task)) return 0;
    if (task->kind == SW_TASK_ADAM && !sw_record_of(t, run, task)->apply) return 0;
    return sw_turn_work(&t->work, task);
}

/* The drives serve what somebody waits for. */
static void lane_waits(void *ctx, enum sw_lane other, int begins) {
    const struct sw_trainer *t = ctx;
    if (other == SW_LANE_NVME_READ && t->store) sw_nvme_reads_first(t->store, begins);
}

/* A rank that waits for the others in a collective must not wait for ever. */
static void lanes_abort(void *ctx, int error) {
    struct sw_trainer *t = ctx;
    for (uint32_t i = 0; i < t->rank_count; i++) {
        const struct sw_comm_handle *comms[] = {&t->ranks[i].comm, &t->ranks[i].across};
        for (int k = 0; k < 2; k++)
            if (comms[k]->comm) comms[k]->ops->abort(comms[k]->comm, error);
    }
    sw_world_abort(t->world, error);
}

const struct sw_executor_ops sw_trainer_lanes = {.enter = sw_trainer_enter_lane,
                                                 .run = run_task,
                                                 .start = start_task,
                                                 .finish = finish_tasks,
                                                 .waits = lane_waits,
                                                 .done = task_done,
                                                 .abort = lanes_abort};
