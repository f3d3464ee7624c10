/* plan/simulate.c - see the header. */
#include "plan/simulate.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "engine/executor.h"
#include "engine/trace.h"
#include "plan/arithmetic.h"
#include "plan/lane_rates.h"
#include "plan/played.h"

/* Steps played at first, and at most; how many of the last ones are the steady ones. The very last
 * has the drain behind it, and does not count. */
enum { STEPS_FIRST = 7, STEPS_MAX = 28, STEADY = 3 };

/* By so much may steps differ that are called steady. */
#define STEADY_SHARE 0.002

/* A trace's clock does not begin at 0, which means that it has not begun. */
enum { TRACE_BEGIN_NS = 1000 };

struct turns {
    struct sw_turn first, second, steady, drain;
    const struct sw_turn *list[STEPS_MAX + 1];
    uint32_t count;
};

struct simulation {
    const struct sw_plan_case *c;
    struct sw_plan_run run;
    struct sw_rates rates;
    uint32_t ranks; /* that are played: one may stand for all */
    struct sw_turn_shape shape;
    struct turns turns;
    uint32_t steps, observed; /* observed: the step that is told about */
    double step_end_s[STEPS_MAX + 2];
    double busy_s[SW_RANKS_MAX][SW_LANE_COUNT];
    struct sw_run times; /* of the observed step's turn */
    struct sw_trace *trace;
    struct sw_simulation *out;
};

/* ---- turns ---- */

static int build_turns(struct simulation *s) {
    struct turns *t = &s->turns;
    const struct sw_turn_shape *shape = &s->shape;
    const int late = sw_turn_shape_is_late(shape);
    int ret = sw_turn_build(&t->first, shape, SW_TURN_TRAIN, 0, NULL);
    if (ret == 0) ret = sw_turn_build(&t->second, shape, SW_TURN_TRAIN, late, &t->first);
    if (ret == 0) ret = sw_turn_build(&t->steady, shape, SW_TURN_TRAIN, late, &t->second);
    if (ret == 0 && late) ret = sw_turn_build(&t->drain, shape, SW_TURN_DRAIN, 1, &t->steady);
    return ret;
}

static void free_turns(struct turns *t) {
    sw_turn_free(&t->first);
    sw_turn_free(&t->second);
    sw_turn_free(&t->steady);
    sw_turn_free(&t->drain);
}

static void list_turns(struct simulation *s, uint32_t steps) {
    struct turns *t = &s->turns;
    t->count = 0;
    t->list[t->count++] = &t->first;
    t->list[t->count++] = &t->second;
    while (t->count < steps) t->list[t->count++] = &t->steady;
    if (sw_turn_shape_is_late(&s->shape)) t->list[t->count++] = &t->drain;
    s->steps = steps;
    s->observed = steps - 1;
}

/* ---- what is seen of tasks ---- */

static uint64_t step_of(uint32_t turn, const struct sw_task *task) {
    return turn + 1 - task->late;
}

static void cost_of(void *ctx, uint32_t turn, const struct sw_task *task, uint32_t rank,
                    struct sw_play_cost *cost) {
    const struct simulation *s = ctx;
    if (s->ranks < s->run.options.ranks)
        sw_rates_cost_of_all(&s->rates, task, step_of(turn, task), cost);
    else
        sw_rates_cost(&s->rates, task, rank, step_of(turn, task), cost);
}

static uint64_t to_ns(double seconds) {
    return (uint64_t)llround(seconds * 1e9);
}

static void trace_task(const struct simulation *s, const struct sw_task *task, uint32_t rank,
                       uint64_t step, double start_s, double end_s) {
    const struct sw_trace_event event = {
        .kind = (enum sw_task_kind)task->kind,
        .lane = (enum sw_lane)task->lane,
        .unit = sw_task_is_of_unit((enum sw_task_kind)task->kind)
                    ? s->run.model.units[task->unit].name
                    : NULL,
        .micro = task->micro,
        .rank = rank,
        .step = step,
        .bytes = sw_rates_bytes(&s->rates, task, step),
        .start_ns = TRACE_BEGIN_NS + to_ns(start_s),
        .end_ns = TRACE_BEGIN_NS + to_ns(end_s),
    };
    sw_trace_add(s->trace, &event);
}

/* By rank for device lanes, by node for Adam, else for all together. */
static uint32_t busy_row(const struct simulation *s, enum sw_lane lane, uint32_t rank) {
    if (sw_lane_on_device(lane)) return rank;
    return lane == SW_LANE_ADAM ? s->rates.nodes.of[rank] : 0;
}

static void observe(struct simulation *s, const struct sw_task *task, uint32_t rank, double start_s,
                    double end_s) {
    const enum sw_lane lane = (enum sw_lane)task->lane;
    s->busy_s[busy_row(s, lane, rank)][lane] += end_s - start_s;
    s->out->bytes[lane] += (double)sw_rates_bytes(&s->rates, task, s->observed);
    s->out->tasks++;
    if (rank > 0 || lane != SW_LANE_COMPUTE || task->kind == SW_TASK_DEVICE_ADAM) return;
    struct sw_play_cost cost = {0};
    sw_rates_cost(&s->rates, task, rank, s->observed, &cost);
    s->out->compute_s += cost.seconds;
}

static void done(void *ctx, uint32_t turn, const struct sw_task *task, uint32_t rank,
                 double start_s, double end_s) {
    struct simulation *s = ctx;
    const uint64_t step = step_of(turn, task);
    if (end_s > s->step_end_s[step]) s->step_end_s[step] = end_s;
    if (step == s->observed) observe(s, task, rank, start_s, end_s);
    if (turn + 1 == s->observed) {
        const uint64_t at = sw_run_at(&s->times, task, rank);
        s->times.start_ns[at] = to_ns(start_s);
        s->times.end_ns[at] = to_ns(end_s);
    }
    if (s->trace && step + STEADY > s->observed && step <= s->observed)
        trace_task(s, task, rank, step, start_s, end_s);
}

/* ---- playing ---- */

static int play(struct simulation *s, uint32_t steps) {
    const struct sw_play play = {.ranks = s->ranks,
                                 .adam_lane = s->rates.nodes.of,
                                 .resource_count = s->rates.resource_count,
                                 .resources = s->rates.resources,
                                 .cost = cost_of,
                                 .done = done,
                                 .ctx = s};
    double ends[STEPS_MAX + 1];
    list_turns(s, steps);
    memset(s->step_end_s, 0, sizeof(s->step_end_s));
    memset(s->busy_s, 0, sizeof(s->busy_s));
    memset(s->out->bytes, 0, sizeof(s->out->bytes));
    s->out->tasks = 0;
    s->out->compute_s = 0;
    const int ret = sw_play_turns(&play, s->turns.list, s->turns.count, ends);
    if (ret < 0) return ret;
    const double *at = s->step_end_s, mean = (at[steps - 1] - at[steps - 1 - STEADY]) / STEADY;
    s->out->step_s = mean;
    s->out->steps = steps;
    s->out->is_steady = 1;
    for (uint32_t n = steps - STEADY; n < steps; n++)
        s->out->is_steady &= fabs(at[n] - at[n - 1] - mean) <= STEADY_SHARE * mean;
    return 0;
}

/* Longer while steps still differ, up to so many. */
static int play_until_steady(struct simulation *s, uint32_t most) {
    int ret = play(s, STEPS_FIRST);
    for (uint32_t steps = 2 * STEPS_FIRST; ret == 0 && !s->out->is_steady && steps <= most;
         steps *= 2)
        ret = play(s, steps);
    return ret;
}

static int open_times(struct simulation *s) {
    const struct sw_turn *turn = &s->turns.steady;
    const size_t count = (size_t)turn->task_count * s->ranks;
    s->times = (struct sw_run){.turn = turn,
                               .rank_count = s->ranks,
                               .adam_lane = s->rates.nodes.of,
                               .start_ns = calloc(count, sizeof(uint64_t)),
                               .end_ns = calloc(count, sizeof(uint64_t)),
                               .positions = calloc(turn->task_count, sizeof(uint32_t))};
    return s->times.start_ns && s->times.end_ns && s->times.positions ? 0 : -ENOMEM;
}

static void close_times(struct simulation *s) {
    free(s->times.start_ns);
    free(s->times.end_ns);
    free(s->times.positions);
}

/* ---- what it comes to ---- */

static void find_missing(struct simulation *s) {
    const struct sw_turn *turn = &s->turns.steady;
    struct sw_simulation *out = s->out;
    for (uint32_t i = 0; i < turn->task_count; i++) {
        const struct sw_task *task = &turn->tasks[i];
        const int works = task->kind == SW_TASK_REDUCE || sw_turn_work(&s->rates.work, task) > 0;
        const int commits = task->kind == SW_TASK_COMMIT && s->run.options.commit_every > 0;
        if (commits ? s->c->machine->commit_s > 0 : !works || sw_rates_of(&s->rates, task) > 0)
            continue;
        const char *name = commits ? "commit_s" : sw_rates_missing(&s->rates, task);
        uint32_t k = 0;
        while (k < out->missing_count && strcmp(out->missing[k], name)) k++;
        if (k == out->missing_count && k < SW_SIMULATION_MISSING_MAX)
            out->missing[out->missing_count++] = name;
    }
}

/* Chunks off the drives are written by the steps that commit, with idle lanes. */
static double idle_written_bytes(const struct simulation *s) {
    const struct sw_placement *p = &s->run.placement;
    const int64_t every = s->run.options.commit_every;
    if (every <= 0 || sw_turn_commits(p)) return 0;
    const double resident =
        (double)p->state_bytes[SW_TIER_HOST] + (double)p->state_bytes[SW_TIER_DEVICE];
    return resident * s->run.options.ranks / (double)every;
}

static void conclude(struct simulation *s) {
    struct sw_simulation *out = s->out;
    const struct sw_train_options *o = &s->run.options;
    for (int l = 0; l < SW_LANE_COUNT; l++)
        for (uint32_t r = 0; r < s->ranks; r++)
            out->busy_s[l] = fmax(out->busy_s[l], s->busy_s[r][l]);
    out->step_clock = sw_run_step_clock(&s->times, out->share);
    out->tokens = (double)o->micro_batch * o->seq_len * o->accumulate * o->ranks * s->c->nodes;
    out->tokens_per_s = out->step_s > 0 ? out->tokens / out->step_s : 0;
    out->written_bytes = out->bytes[SW_LANE_NVME_WRITE] + idle_written_bytes(s);
    out->written_bytes_per_day = out->step_s > 0 ? out->written_bytes / out->step_s * 24 * 3600 : 0;
}

/* ---- the trace ---- */

static void trace_machine(const struct simulation *s, const struct sw_fit *fit) {
    const enum sw_lane lanes[] = {SW_LANE_H2D, SW_LANE_D2H, SW_LANE_ADAM, SW_LANE_NVME_READ,
                                  SW_LANE_NVME_WRITE};
    for (size_t i = 0; i < sizeof(lanes) / sizeof(lanes[0]); i++) {
        const struct sw_task task = {.lane = (uint8_t)lanes[i], .kind = SW_TASK_KIND_COUNT};
        const double rate = sw_rates_of(&s->rates, &task);
        if (rate > 0) sw_trace_peak(s->trace, lanes[i], (uint64_t)rate);
    }
    for (int tier = 0; tier < SW_TIER_COUNT; tier++) {
        const double need = fit->need_bytes[tier], budget = fit->budget_bytes[tier];
        if (need > 0)
            sw_trace_memory(s->trace, (enum sw_tier)tier, (uint64_t)need,
                            (uint64_t)(budget > 0 ? budget : need), TRACE_BEGIN_NS);
    }
}

/* The same steps again, as now it is known how many there are. */
static int write_trace(struct simulation *s, const struct sw_fit *fit, const char *path) {
    const double begins_s = s->step_end_s[s->observed - STEADY];
    int ret = sw_trace_open(&s->trace, path, 0, s->run.options.ranks, s->rates.nodes.of);
    if (ret < 0) return ret;
    sw_trace_begin(s->trace, TRACE_BEGIN_NS + to_ns(begins_s));
    trace_machine(s, fit);
    ret = play(s, s->steps);
    const int closed = sw_trace_close(s->trace);
    s->trace = NULL;
    return ret < 0 ? ret : closed;
}

/* ---- all of it ---- */

static int simulate(struct simulation *s, const struct sw_fit *fit, int one_for_all,
                    const char *trace) {
    s->ranks = one_for_all ? 1 : s->run.options.ranks;
    sw_rates_open(&s->rates, s->c, &s->run);
    int ret = sw_turn_work_shape(&s->shape, &s->rates.work, &s->run.options, s->c->nodes > 1);
    if (ret == 0) ret = build_turns(s);
    if (ret == 0) ret = open_times(s);
    if (ret == 0) ret = play_until_steady(s, one_for_all ? STEPS_FIRST : STEPS_MAX);
    if (ret == 0 && trace) ret = write_trace(s, fit, trace);
    if (ret == 0) {
        find_missing(s);
        conclude(s);
    }
    if (ret == -ENOMEM) sw_error("no memory to play the turns of a step");
    free_turns(&s->turns);
    close_times(s);
    return ret;
}

/* Chunks of which a layer has a few: enough for shares of 5%, and for lanes to run beside each
 * other. */
enum { COARSE_CHUNKS = 20 };

/* The same run with larger chunks where they are many, and with room for its rings, of which as
 * many are short. */
static void coarsen(const struct sw_plan_case *c, struct sw_fit *fit) {
    const struct sw_model *model = &c->subject->model;
    struct sw_train_options *o = &fit->options;
    const double unit_params = (double)model->params / model->unit_count / o->ranks / c->nodes;
    const double bytes = unit_params * SW_STATE_BYTES / COARSE_CHUNKS;
    if (bytes <= 2 * (double)o->chunk_bytes) return;
    o->chunk_bytes = (uint64_t)bytes;
    o->device_memory_bytes = o->host_memory_bytes = 0;
}

/* What was played before is not played again, but for a trace of it. */
static int play_once(struct simulation *s, const struct sw_fit *fit, int one_for_all,
                     const char *trace) {
    struct sw_played *played = trace ? NULL : s->c->played;
    if (played && sw_played_find(played, &s->run, one_for_all, s->out)) return 0;
    const int ret = simulate(s, fit, one_for_all, trace);
    if (ret == 0 && played) sw_played_keep(played, &s->run, one_for_all, s->out);
    return ret;
}

static int open_and_simulate(const struct sw_plan_case *c, const struct sw_fit *fit,
                             int one_for_all, const char *trace, struct sw_simulation *out) {
    *out = (struct sw_simulation){0};
    struct simulation *s = calloc(1, sizeof(*s));
    if (!s) return -ENOMEM;
    s->c = c;
    s->out = out;
    int ret = sw_plan_run_open(&s->run, c, fit);
    if (ret == 0) ret = play_once(s, fit, one_for_all, trace);
    sw_plan_run_close(&s->run);
    free(s);
    return ret;
}

int sw_simulate(const struct sw_plan_case *c, const struct sw_fit *fit, const char *trace,
                struct sw_simulation *out) {
    return open_and_simulate(c, fit, 0, trace, out);
}

int sw_simulate_one(const struct sw_plan_case *c, const struct sw_fit *fit, int coarse,
                    struct sw_simulation *out) {
    struct sw_fit f = *fit;
    if (coarse) coarsen(c, &f);
    return open_and_simulate(c, &f, 1, NULL, out);
}
