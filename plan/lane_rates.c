/* plan/lane_rates.c - see the header. */
#include "plan/lane_rates.h"

#include <math.h>
#include <string.h>

#include "engine/throttle.h"

enum { RAM, DRIVES, CORES, LINKS }; /* then a link for each rank, then the switches' */
enum { INTO_RAM, OUT_OF_RAM };

static int on_host(const struct sw_rates *r) {
    return r->run->options.device == SW_DEVICE_HOST;
}

static uint32_t ranks_of(const struct sw_rates *r) {
    return r->run->options.ranks;
}

/* ---- resources ---- */

/* Two directions of one thing, in shares of what each can do alone; both: what they do together,
 * as much of each. unknown: what then is taken for it. */
static struct sw_play_resource two_ways(double one, double other, double both, double unknown) {
    const double alone = one > 0 && other > 0 ? (1 / one + 1 / other) / 2 : 0;
    return (struct sw_play_resource){1, both > 0 && alone > 0 ? both * alone : unknown};
}

static uint32_t switches_of(const struct sw_machine *m, uint32_t ranks) {
    if (m->switch_bytes_per_s <= 0) return 0;
    const double gpus = m->gpus_per_switch > 0 ? ceil(ranks / m->gpus_per_switch) : 0;
    const double drives =
        m->drives_per_switch > 0 ? ceil(m->drive_count / m->drives_per_switch) : 0;
    const double count = gpus > drives ? gpus : drives;
    return count > SW_RATES_SWITCHES_MAX ? SW_RATES_SWITCHES_MAX : (uint32_t)count;
}

static void add_resources(struct sw_rates *r) {
    const struct sw_machine *m = r->c->machine;
    double mixed = 0;
    for (uint32_t d = 0; d < m->drive_count; d++) {
        r->drive_read += m->drives[d].read_bytes_per_s;
        r->drive_write += m->drives[d].write_bytes_per_s;
        mixed += m->drives[d].mixed_bytes_per_s;
    }
    r->resources[RAM] = r->resources[CORES] = (struct sw_play_resource){1, 1};
    /* One after the other, where nobody measured both at once. */
    r->resources[DRIVES] = two_ways(r->drive_read, r->drive_write, mixed, 1);
    r->resource_count = LINKS;
    for (uint32_t i = 0; i < ranks_of(r); i++)
        r->resources[r->resource_count++] =
            two_ways(m->h2d_bytes_per_s, m->d2h_bytes_per_s, m->both_bytes_per_s, 2);
    r->switches = on_host(r) ? 0 : switches_of(m, ranks_of(r));
    for (uint32_t i = 0; i < r->switches; i++) /* full duplex */
        r->resources[r->resource_count++] = (struct sw_play_resource){1, 2};
}

/* As a run groups them where ranks are dealt to NUMA nodes in their order. */
static void group_ranks(struct sw_rates *r) {
    int near[SW_NODE_RANKS_MAX];
    const uint32_t ranks = ranks_of(r), numa = r->c->machine->numa_count;
    for (uint32_t i = 0; i < ranks; i++) near[i] = ranks >= numa ? (int)(i * numa / ranks) : -1;
    sw_rank_nodes_group(&r->nodes, near, ranks, (int)numa);
}

void sw_rates_open(struct sw_rates *out, const struct sw_plan_case *c,
                   const struct sw_plan_run *run) {
    *out = (struct sw_rates){.c = c, .run = run};
    sw_turn_work_describe(&out->work, &run->sizing, &run->options, &run->placement,
                          run->input.activation_bytes);
    char key[128];
    const struct sw_train_options *o = &run->options;
    /* Throttled operations are left out, and frozen tensors leave some out. */
    if (!o->sim.flops && !o->freeze)
        out->times = sw_machine_find_model(
            c->machine, sw_machine_model_key(&run->model.config, o, key, sizeof(key)));
    group_ranks(out);
    add_resources(out);
}

/* ---- rates ---- */

static int is_compute(const struct sw_task *task) {
    return task->lane == SW_LANE_COMPUTE && task->kind != SW_TASK_DEVICE_ADAM;
}

/* What the machine itself does. */
static double machine_rate(const struct sw_rates *r, const struct sw_task *task) {
    const struct sw_machine *m = r->c->machine;
    const double each = on_host(r) ? 1.0 / ranks_of(r) : 1; /* ranks part the CPU */
    if (is_compute(task)) return m->flops_per_s * each;
    switch (task->lane) {
    case SW_LANE_COMPUTE: /* the update on the device */
        return on_host(r) ? m->adam_bytes_per_s * each : m->gpu_memory_bytes_per_s;
    case SW_LANE_H2D:
        return m->h2d_bytes_per_s;
    case SW_LANE_D2H:
        return m->d2h_bytes_per_s;
    case SW_LANE_COMM:
        if (task->kind == SW_TASK_GATHER) return m->gather_bytes_per_s;
        if (task->kind == SW_TASK_SCATTER) return m->scatter_bytes_per_s;
        if (m->round_bytes_per_s > 0) return m->round_bytes_per_s * each;
        return on_host(r) ? m->memory_bytes_per_s * each : m->gpu_memory_bytes_per_s;
    case SW_LANE_ADAM:
        return m->adam_bytes_per_s / r->nodes.count;
    case SW_LANE_NVME_READ:
        return r->drive_read;
    case SW_LANE_NVME_WRITE:
        return r->drive_write;
    default:
        return 0;
    }
}

/* A throttled lane is never faster than the machine, but for computation, which is left out. */
double sw_rates_of(const struct sw_rates *r, const struct sw_task *task) {
    const double own = machine_rate(r, task);
    double held = (double)sw_sim_rate(&r->run->options.sim, task);
    if (held == 0) return own;
    if (task->lane == SW_LANE_ADAM) held /= r->nodes.count;
    return is_compute(task) || own == 0 || held < own ? held : own;
}

const char *sw_rates_missing(const struct sw_rates *r, const struct sw_task *task) {
    if (is_compute(task)) return "flops_per_s";
    switch (task->lane) {
    case SW_LANE_COMPUTE:
        return on_host(r) ? "adam_bytes_per_s" : "gpu_memory_bytes_per_s";
    case SW_LANE_H2D:
        return "h2d_bytes_per_s";
    case SW_LANE_D2H:
        return "d2h_bytes_per_s";
    case SW_LANE_COMM:
        if (task->kind == SW_TASK_GATHER) return "gather_bytes_per_s";
        if (task->kind == SW_TASK_SCATTER) return "scatter_bytes_per_s";
        return on_host(r) ? "memory_bytes_per_s" : "gpu_memory_bytes_per_s";
    case SW_LANE_ADAM:
        return "adam_bytes_per_s";
    case SW_LANE_NVME_READ:
        return "read_bytes_per_s of the drives";
    default:
        return "write_bytes_per_s of the drives";
    }
}

/* ---- operations that were measured ---- */

/* The share of a unit of all parts of the vocabulary. */
static double part_share(const struct sw_rates *r, uint32_t unit) {
    const struct sw_model *model = &r->run->model;
    return (double)model->units[unit].params / ((double)model->config.vocab * model->config.hidden);
}

static double head_seconds(const struct sw_rates *r, const struct sw_task *task) {
    const struct sw_machine_model *m = r->times;
    const int has_dx = sw_placement_head_has_dx(&r->run->placement);
    const int has_grad = task->at[SW_RING_ACC] >= 0;
    switch (task->kind) {
    case SW_TASK_HEAD_WHOLE:
        return m->head_whole_s;
    case SW_TASK_HEAD_GRAD:
        return m->head_grad_s * part_share(r, task->unit);
    case SW_TASK_HEAD_BACKWARD:
        return (!has_dx     ? m->head_grad_s
                : !has_grad ? m->head_dx_s
                            : m->head_backward_s) *
               part_share(r, task->unit);
    default:
        return m->head_forward_s * part_share(r, task->unit);
    }
}

/* Of a task of the compute lane, by the times that the model's units were seen to take. */
static double measured_seconds(const struct sw_rates *r, const struct sw_task *task) {
    const struct sw_machine_model *m = r->times;
    const struct sw_model *model = &r->run->model;
    const int backward = task->kind == SW_TASK_BACKWARD;
    if (task->kind == SW_TASK_HEAD_WHOLE || task->kind == SW_TASK_HEAD_GRAD ||
        task->kind == SW_TASK_HEAD_BACKWARD || task->kind == SW_TASK_HEAD_FORWARD)
        return head_seconds(r, task);
    if (task->unit < model->parts)
        return (backward ? m->embed_backward_s : m->embed_forward_s) * part_share(r, task->unit);
    if (model->units[task->unit].kind == SW_UNIT_NORM)
        return backward ? m->norm_backward_s : m->norm_forward_s;
    return backward ? m->layer_backward_s : m->layer_forward_s;
}

/* ---- costs ---- */

/* A span's FP32 sums, read, and its rounded gradient, written. */
static double rounded_bytes(const struct sw_rates *r, const struct sw_task *task) {
    const struct sw_chunk *chunks = r->run->placement.chunks, *first = &chunks[task->chunk];
    const struct sw_chunk *last = &chunks[first->span_end - 1];
    const uint64_t count = last->first + last->count - first->first;
    return (double)(count * (sizeof(float) + sw_dtype_bytes(r->run->options.grad_dtype)));
}

static int is_virgin(const struct sw_task *task, uint64_t step) {
    return task->kind == SW_TASK_READ && step == 1;
}

uint64_t sw_rates_bytes(const struct sw_rates *r, const struct sw_task *task, uint64_t step) {
    return is_virgin(task, step) ? 0 : sw_turn_work_bytes(&r->work, task);
}

static void use(struct sw_play_cost *cost, uint32_t resource, int side, double share) {
    if (!(share > 0) || isinf(share)) return;
    cost->uses[cost->use_count++] =
        (struct sw_play_use){.resource = resource, .side = (uint8_t)side, .share = share};
}

/* The switches in front of the drives carry as much as drives are behind them. */
static void use_drive_switches(const struct sw_rates *r, int side, double rate,
                               struct sw_play_cost *cost) {
    const struct sw_machine *m = r->c->machine;
    for (uint32_t s = 0; s < r->switches && m->drives_per_switch > 0; s++) {
        const double first = s * m->drives_per_switch, left = m->drive_count - first;
        const double here = fmin(fmax(left, 0), m->drives_per_switch);
        use(cost, LINKS + ranks_of(r) + s, side,
            rate * here / m->drive_count / m->switch_bytes_per_s);
    }
}

static void use_copies(const struct sw_rates *r, const struct sw_task *task, uint32_t rank,
                       double rate, struct sw_play_cost *cost) {
    const struct sw_machine *m = r->c->machine;
    const int side = task->lane == SW_LANE_H2D ? OUT_OF_RAM : INTO_RAM;
    const double alone = side == OUT_OF_RAM ? m->h2d_bytes_per_s : m->d2h_bytes_per_s;
    use(cost, LINKS + rank, side, rate / alone);
    /* A copy on the CPU reads memory and writes it. */
    use(cost, RAM, side, (on_host(r) ? 2 : 1) * rate / m->memory_bytes_per_s);
    if (on_host(r)) use(cost, CORES, side, rate / alone / m->cores);
    const uint32_t at = m->gpus_per_switch > 0 ? (uint32_t)(rank / m->gpus_per_switch) : UINT32_MAX;
    if (at < r->switches) use(cost, LINKS + ranks_of(r) + at, side, rate / m->switch_bytes_per_s);
}

/* Of the CPU, what a rank's operations keep busy: teams that are woken again and again leave some
 * of it to others. */
static double operations_share(const struct sw_rates *r) {
    const double each = 1.0 / ranks_of(r), cpus = r->c->machine->cpus;
    return r->times && r->times->cpus > 0 && cpus > 0 ? fmin(r->times->cpus / cpus, 1) * each
                                                      : each;
}

/* Tasks of the CPU's lanes whose work is a team's. */
static int is_of_a_team(const struct sw_rates *r, const struct sw_task *task) {
    if (!on_host(r)) return 0;
    if (task->lane == SW_LANE_ADAM || task->kind == SW_TASK_DEVICE_ADAM) return 1;
    return task->kind == SW_TASK_REDUCE;
}

static void add_uses(const struct sw_rates *r, const struct sw_task *task, uint32_t rank,
                     double rate, struct sw_play_cost *cost) {
    const struct sw_machine *m = r->c->machine;
    /* Of the CPU; a lane that is held to a rate sleeps in between. */
    const double own = machine_rate(r, task), each = (own > rate ? rate / own : 1) / ranks_of(r);
    switch (task->lane) {
    case SW_LANE_COMPUTE:
        if (!on_host(r) || (is_compute(task) && r->run->options.sim.flops)) return;
        use(cost, CORES, 0, is_compute(task) ? operations_share(r) : each);
        if (!is_compute(task)) use(cost, RAM, 0, rate / m->memory_bytes_per_s);
        return;
    case SW_LANE_H2D:
    case SW_LANE_D2H:
        use_copies(r, task, rank, rate, cost);
        return;
    case SW_LANE_COMM:
        if (!on_host(r)) return;
        use(cost, CORES, 0, each);
        use(cost, RAM, 0, (task->kind == SW_TASK_REDUCE ? 1 : 2) * rate / m->memory_bytes_per_s);
        return;
    case SW_LANE_ADAM:
        if (on_host(r)) use(cost, CORES, 0, rate / m->adam_bytes_per_s);
        use(cost, RAM, 0, rate / m->memory_bytes_per_s);
        return;
    case SW_LANE_NVME_READ:
        use(cost, DRIVES, INTO_RAM, rate / r->drive_read);
        use(cost, RAM, INTO_RAM, rate / m->memory_bytes_per_s);
        use_drive_switches(r, INTO_RAM, rate, cost);
        return;
    case SW_LANE_NVME_WRITE:
        use(cost, DRIVES, OUT_OF_RAM, rate / r->drive_write);
        use(cost, RAM, OUT_OF_RAM, rate / m->memory_bytes_per_s);
        use_drive_switches(r, OUT_OF_RAM, rate, cost);
        return;
    default:
        return;
    }
}

void sw_rates_cost(const struct sw_rates *r, const struct sw_task *task, uint32_t rank,
                   uint64_t step, struct sw_play_cost *cost) {
    const int64_t every = r->run->options.commit_every;
    if (task->kind == SW_TASK_COMMIT) {
        if (every > 0 && step % (uint64_t)every == 0) cost->seconds = r->c->machine->commit_s;
        return;
    }
    const double work = task->kind == SW_TASK_REDUCE ? rounded_bytes(r, task)
                        : is_virgin(task, step)      ? 0
                                                     : sw_turn_work(&r->work, task);
    const double rate = sw_rates_of(r, task);
    if (is_compute(task) && r->times) {
        cost->seconds = measured_seconds(r, task);
        add_uses(r, task, rank, rate, cost);
        return;
    }
    if (work <= 0 || rate <= 0) return;
    cost->seconds = work / rate;
    if (is_of_a_team(r, task)) cost->seconds += r->c->machine->region_s;
    add_uses(r, task, rank, rate, cost);
}

/* ---- one rank for all ---- */

/* Ranks whose tasks of this lane come one after the other, and how many lanes of them there are. */
static double ranks_in_line(const struct sw_rates *r, const struct sw_task *task) {
    if (sw_lane_on_device((enum sw_lane)task->lane)) return 1;
    if (sw_task_is_joint((enum sw_task_kind)task->kind)) return 1;
    return task->lane == SW_LANE_ADAM ? (double)ranks_of(r) / r->nodes.count : ranks_of(r);
}

static double lanes_at_once(const struct sw_rates *r, const struct sw_task *task) {
    if (sw_lane_on_device((enum sw_lane)task->lane)) return ranks_of(r);
    return task->lane == SW_LANE_ADAM ? r->nodes.count : 1;
}

/* A link is a rank's own; a switch is shared by those behind it. */
static double users_of(const struct sw_rates *r, uint32_t resource, double lanes) {
    if (resource < LINKS) return lanes;
    if (resource < LINKS + ranks_of(r) || lanes == 1) return 1;
    return fmin(lanes, r->c->machine->gpus_per_switch);
}

void sw_rates_cost_of_all(const struct sw_rates *r, const struct sw_task *task, uint64_t step,
                          struct sw_play_cost *cost) {
    const double lanes = lanes_at_once(r, task);
    sw_rates_cost(r, task, 0, step, cost);
    cost->seconds *= ranks_in_line(r, task);
    for (uint32_t u = 0; u < cost->use_count; u++)
        cost->uses[u].share *= users_of(r, cost->uses[u].resource, lanes);
}
