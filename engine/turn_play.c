/* engine/turn_play.c - see the header.
 *
 * The state is a set of lanes; each is idle, waits for a count of tasks of another lane or for a
 * turn to end, waits for other ranks, or has a task under way. Time goes from one end of a task to
 * the next. A lane that waits stands in the list of what it waits for, so that nothing is asked
 * twice. */
#include "engine/turn_play.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/executor.h"

enum { WARM_UP = 3, MEASURED = 3 };
enum { NOBODY = -1 };

/* Speeds and sums of shares are rounded. */
#define SLACK 1e-9

struct lane {
    enum sw_lane id;
    uint32_t rank;                    /* the only one, or the first */
    uint32_t turn, position, at_rank; /* what comes next */
    int busy, meets;                  /* a task is under way; it waits for other ranks */
    int32_t next;                     /* in the list of what it waits for */
    const struct sw_task *ahead;      /* what comes next, where it was looked up; else NULL */
    const struct sw_task *task;
    struct sw_play_cost cost;
    double start_s, since_s, left_s, speed; /* left, at full speed, since then */
};

struct load {
    double sum;        /* shares of the tasks under way */
    uint32_t side[2];  /* and how many of them take one */
    int over;          /* they take more than there is */
    double held, open; /* while speeds are shared out: taken for good; shares without a speed yet */
};

struct player {
    const struct sw_play *play;
    const struct sw_turn *const *turns;
    uint32_t turn_count, lane_count, device_lanes;
    struct lane *lanes;
    uint64_t *base;   /* [turn][lane]: tasks of earlier turns, of a rank */
    uint64_t *done;   /* [lane][rank]: tasks */
    int32_t *waiting; /* [lane][rank]: first lane that waits for it, or NOBODY */
    int32_t turn_waiting;
    uint64_t *turn_left;       /* by turn: tasks of all ranks */
    uint32_t turns_ended, met; /* met: ranks that wait for the others */
    struct load *loads;
    uint32_t over;  /* resources that are over */
    int crowded;    /* some task is slowed down */
    int32_t *retry; /* lanes that may start */
    uint32_t retry_count;
    uint32_t *active; /* lanes with a task under way */
    double *ends_at;  /* by the same index: when its task ends at its speed; close together, as
                         they are looked through at each event */
    uint32_t active_count;
    double now_s, *ends;
};

/* ---- lanes and ranks ---- */

static uint32_t adam_lane_of(const struct sw_play *play, uint32_t rank) {
    return play->adam_lane ? play->adam_lane[rank] : 0;
}

/* Whether a lane does this rank's tasks. */
static int has_rank(const struct player *p, const struct lane *lane, uint32_t rank) {
    if (sw_lane_on_device(lane->id)) return rank == lane->rank;
    if (lane->id != SW_LANE_ADAM) return 1;
    return adam_lane_of(p->play, rank) == adam_lane_of(p->play, lane->rank);
}

static int is_joint(const struct sw_task *task) {
    return sw_task_is_joint((enum sw_task_kind)task->kind);
}

static int is_together(const struct player *p, const struct sw_task *task) {
    return p->play->ranks > 1 && (task->kind == SW_TASK_GATHER || task->kind == SW_TASK_SCATTER);
}

/* The next rank of the lane from at_rank on; as many as there are: none. */
static uint32_t next_rank(const struct player *p, const struct lane *lane) {
    const uint32_t ranks = p->play->ranks;
    uint32_t rank = lane->at_rank;
    if (sw_lane_on_device(lane->id)) return rank <= lane->rank ? lane->rank : ranks;
    while (rank < ranks && !has_rank(p, lane, rank)) rank++;
    return rank;
}

/* The next task of the lane, or NULL at the end; skips ranks that are another lane's. */
static const struct sw_task *peek(struct player *p, struct lane *lane) {
    if (lane->ahead) return lane->ahead;
    for (; lane->turn < p->turn_count; lane->turn++, lane->position = 0, lane->at_rank = 0) {
        const struct sw_turn *turn = p->turns[lane->turn];
        for (; lane->position < turn->lane_count[lane->id]; lane->position++, lane->at_rank = 0) {
            const struct sw_task *task = &turn->tasks[turn->lane_tasks[lane->id][lane->position]];
            const uint32_t ranks = is_joint(task) ? 1 : p->play->ranks;
            if (!is_joint(task)) lane->at_rank = next_rank(p, lane);
            if (lane->at_rank < ranks) return lane->ahead = task;
        }
    }
    return NULL;
}

/* ---- waiting ---- */

static void retry(struct player *p, int32_t lane) {
    p->retry[p->retry_count++] = lane;
}

static void wake(struct player *p, int32_t *list) {
    int32_t lane = *list;
    *list = NOBODY;
    while (lane != NOBODY) {
        const int32_t next = p->lanes[lane].next;
        retry(p, lane);
        lane = next;
    }
}

static void stand_in(struct player *p, uint32_t lane, int32_t *list) {
    p->lanes[lane].next = *list;
    *list = (int32_t)lane;
}

/* The count of the dependency's lane and rank that must be done. */
static uint64_t needed(const struct player *p, uint32_t turn, const struct sw_dep *dep) {
    const int64_t of = (int64_t)turn + dep->turn;
    if (of < 0) return 0;
    return p->base[(uint64_t)of * SW_LANE_COUNT + dep->lane] + (uint64_t)(dep->index + 1);
}

/* Stands in the list of the first thing that is missing; 1: nothing is. */
static int is_ready(struct player *p, uint32_t index, const struct sw_task *task) {
    const struct lane *lane = &p->lanes[index];
    const uint32_t ranks = p->play->ranks;
    if (lane->turn >= p->turns_ended + SW_RUNS_ACTIVE_MAX) {
        stand_in(p, index, &p->turn_waiting);
        return 0;
    }
    const uint32_t first = is_joint(task) ? 0 : lane->at_rank;
    const uint32_t end = is_joint(task) ? ranks : first + 1;
    for (uint32_t d = 0; d < task->dep_count; d++)
        for (uint32_t r = first; r < end; r++) {
            const uint64_t at = (uint64_t)task->deps[d].lane * ranks + r;
            if (p->done[at] >= needed(p, lane->turn, &task->deps[d])) continue;
            stand_in(p, index, &p->waiting[at]);
            return 0;
        }
    return 1;
}

/* ---- speeds ---- */

static double room(const struct player *p, uint32_t resource) {
    const struct load *load = &p->loads[resource];
    const struct sw_play_resource *r = &p->play->resources[resource];
    return load->side[0] && load->side[1] ? r->mixed : r->alone;
}

/* Brings what is left of a task up to now. */
static void settle(struct player *p, struct lane *lane) {
    lane->left_s -= (p->now_s - lane->since_s) * lane->speed;
    if (lane->left_s < 0) lane->left_s = 0;
    lane->since_s = p->now_s;
}

/* The resource whose users, of those without a speed yet, must be the slowest; that speed. */
static double tightest(const struct player *p, uint32_t *resource) {
    double least = 1;
    *resource = UINT32_MAX;
    for (uint32_t r = 0; r < p->play->resource_count; r++) {
        const struct load *load = &p->loads[r];
        const double left = room(p, r) - load->held;
        if (load->open <= SLACK || left >= load->open * least) continue;
        least = left > 0 ? left / load->open : 0;
        *resource = r;
    }
    return least;
}

static int uses(const struct lane *lane, uint32_t resource) {
    for (uint32_t u = 0; u < lane->cost.use_count; u++)
        if (lane->cost.uses[u].resource == resource) return 1;
    return 0;
}

static void set_speed(struct player *p, uint32_t active, double speed) {
    struct lane *lane = &p->lanes[p->active[active]];
    lane->speed = speed;
    p->ends_at[active] = lane->since_s + lane->left_s / speed;
    for (uint32_t u = 0; u < lane->cost.use_count; u++) {
        p->loads[lane->cost.uses[u].resource].held += speed * lane->cost.uses[u].share;
        p->loads[lane->cost.uses[u].resource].open -= lane->cost.uses[u].share;
    }
}

/* All tasks speed up together; where a resource is used up, its users stay as fast as they are. */
static void share_out(struct player *p) {
    uint32_t resource;
    for (uint32_t r = 0; r < p->play->resource_count; r++) {
        p->loads[r].held = 0;
        p->loads[r].open = p->loads[r].sum;
    }
    for (uint32_t a = 0; a < p->active_count; a++) {
        settle(p, &p->lanes[p->active[a]]);
        p->lanes[p->active[a]].speed = -1;
    }
    do {
        const double speed = tightest(p, &resource);
        for (uint32_t a = 0; a < p->active_count; a++) {
            const struct lane *lane = &p->lanes[p->active[a]];
            if (lane->speed < 0 && (resource == UINT32_MAX || uses(lane, resource)))
                set_speed(p, a, speed);
        }
        if (resource != UINT32_MAX) p->loads[resource].open = 0;
    } while (resource != UINT32_MAX);
}

/* A task takes (1) its shares, or gives them back (-1). */
static void load(struct player *p, const struct sw_play_cost *cost, int sign) {
    for (uint32_t u = 0; u < cost->use_count; u++) {
        struct load *l = &p->loads[cost->uses[u].resource];
        l->side[cost->uses[u].side] += (uint32_t)sign;
        l->sum += sign * cost->uses[u].share;
        if (!l->side[0] && !l->side[1]) l->sum = 0; /* no rounding stays behind */
        const int over = l->sum > room(p, cost->uses[u].resource) * (1 + SLACK);
        p->over += (uint32_t)(over - l->over);
        l->over = over;
    }
}

/* Where nothing was short and nothing is, tasks go on as they are. */
static void update_speeds(struct player *p) {
    const int crowded = p->over > 0;
    if (crowded || p->crowded) share_out(p);
    p->crowded = crowded;
}

/* ---- tasks ---- */

static void begin(struct player *p, uint32_t index, const struct sw_task *task) {
    struct lane *lane = &p->lanes[index];
    lane->task = task;
    lane->cost.seconds = 0;
    lane->cost.use_count = 0;
    p->play->cost(p->play->ctx, lane->turn, task, lane->at_rank, &lane->cost);
    lane->busy = 1;
    lane->start_s = lane->since_s = p->now_s;
    lane->left_s = lane->cost.seconds;
    lane->speed = 1;
    if (lane->cost.seconds <= 0) lane->cost.use_count = 0;
    load(p, &lane->cost, 1);
    p->ends_at[p->active_count] = p->now_s + lane->left_s;
    p->active[p->active_count++] = index;
}

/* All ranks have come: those that wait begin as well. */
static void meet(struct player *p) {
    for (uint32_t r = 0; r < p->play->ranks; r++) {
        const uint32_t index = r * SW_DEVICE_LANES + SW_LANE_COMM;
        p->lanes[index].meets = 0;
        begin(p, index, peek(p, &p->lanes[index]));
    }
    p->met = 0;
}

static void try_start(struct player *p, uint32_t index) {
    struct lane *lane = &p->lanes[index];
    const struct sw_task *task = lane->busy || lane->meets ? NULL : peek(p, lane);
    if (!task || !is_ready(p, index, task)) return;
    if (!is_together(p, task)) {
        begin(p, index, task);
        return;
    }
    lane->meets = 1;
    if (++p->met == p->play->ranks) meet(p);
}

static void end_turns(struct player *p, uint32_t turn) {
    if (--p->turn_left[turn] > 0) return;
    p->ends[turn] = p->now_s;
    while (p->turns_ended < p->turn_count && p->turn_left[p->turns_ended] == 0) p->turns_ended++;
    wake(p, &p->turn_waiting);
}

static void end(struct player *p, uint32_t at) {
    const uint32_t index = p->active[at], ranks = p->play->ranks;
    struct lane *lane = &p->lanes[index];
    const struct sw_task *task = lane->task;
    p->active[at] = p->active[--p->active_count];
    p->ends_at[at] = p->ends_at[p->active_count];
    load(p, &lane->cost, -1);
    if (p->play->done)
        p->play->done(p->play->ctx, lane->turn, task, lane->at_rank, lane->start_s, p->now_s);
    for (uint32_t r = lane->at_rank; r < (is_joint(task) ? ranks : lane->at_rank + 1); r++) {
        const uint64_t counter = (uint64_t)lane->id * ranks + r;
        p->done[counter]++;
        wake(p, &p->waiting[counter]);
    }
    const uint32_t turn = lane->turn;
    lane->busy = 0;
    lane->ahead = NULL;
    lane->at_rank++;
    retry(p, (int32_t)index);
    end_turns(p, turn);
}

/* The time of the next end. */
static double next_end(const struct player *p) {
    double next = INFINITY;
    for (uint32_t a = 0; a < p->active_count; a++) {
        if (p->ends_at[a] < next) next = p->ends_at[a];
    }
    return next;
}

static void start_all(struct player *p) {
    while (p->retry_count > 0) try_start(p, (uint32_t)p->retry[--p->retry_count]);
    update_speeds(p);
}

/* A task ends with others where rounding alone keeps them apart. */
static void run(struct player *p) {
    for (uint32_t l = 0; l < p->lane_count; l++) retry(p, (int32_t)l);
    for (start_all(p); p->active_count > 0; start_all(p)) {
        p->now_s = next_end(p);
        for (uint32_t a = p->active_count; a-- > 0;) {
            if (p->ends_at[a] <= p->now_s * (1 + 1e-15)) end(p, a);
        }
    }
    assert(p->turns_ended == p->turn_count);
}

/* ---- life ---- */

static void add_lane(struct player *p, enum sw_lane id, uint32_t rank) {
    p->lanes[p->lane_count++] = (struct lane){.id = id, .rank = rank, .next = NOBODY};
}

/* Device lanes rank by rank; then the others, of which Adam may have several. */
static void add_lanes(struct player *p) {
    const struct sw_play *play = p->play;
    for (uint32_t r = 0; r < play->ranks; r++)
        for (int l = 0; l < SW_DEVICE_LANES; l++) add_lane(p, (enum sw_lane)l, r);
    for (int l = SW_DEVICE_LANES; l < SW_LANE_COUNT; l++)
        if (l != SW_LANE_ADAM) add_lane(p, (enum sw_lane)l, 0);
    for (uint32_t r = 0, lanes = 0; r < play->ranks; r++) {
        if (adam_lane_of(play, r) != lanes) continue;
        lanes++;
        add_lane(p, SW_LANE_ADAM, r);
    }
}

static void count_tasks(struct player *p) {
    for (uint32_t t = 0; t < p->turn_count; t++) {
        const struct sw_turn *turn = p->turns[t];
        for (int l = 0; l < SW_LANE_COUNT; l++)
            p->base[(t + 1) * SW_LANE_COUNT + l] =
                p->base[t * SW_LANE_COUNT + l] + turn->lane_count[l];
        for (uint32_t i = 0; i < turn->task_count; i++)
            p->turn_left[t] += is_joint(&turn->tasks[i]) ? 1 : p->play->ranks;
    }
}

int sw_play_turns(const struct sw_play *play, const struct sw_turn *const *turns, uint32_t count,
                  double *ends) {
    const uint32_t lanes = play->ranks * (SW_DEVICE_LANES + 1) + SW_LANE_COUNT;
    const size_t counters = (size_t)SW_LANE_COUNT * play->ranks;
    struct player p = {.play = play, .turns = turns, .turn_count = count, .ends = ends};
    p.lanes = calloc(lanes, sizeof(*p.lanes));
    p.base = calloc((count + 1) * (size_t)SW_LANE_COUNT, sizeof(*p.base));
    p.done = calloc(counters, sizeof(*p.done));
    p.waiting = malloc(counters * sizeof(*p.waiting));
    p.turn_left = calloc(count + 1, sizeof(*p.turn_left));
    p.loads = calloc(play->resource_count + 1, sizeof(*p.loads));
    p.retry = calloc((size_t)lanes * 2, sizeof(*p.retry));
    p.active = calloc(lanes, sizeof(*p.active));
    p.ends_at = calloc(lanes, sizeof(*p.ends_at));
    int ret = -ENOMEM;
    if (p.lanes && p.base && p.done && p.waiting && p.turn_left && p.loads && p.retry && p.active &&
        p.ends_at) {
        for (size_t i = 0; i < counters; i++) p.waiting[i] = NOBODY;
        p.turn_waiting = NOBODY;
        add_lanes(&p);
        count_tasks(&p);
        run(&p);
        ret = 0;
    }
    void *const blocks[] = {p.lanes, p.base,  p.done,   p.waiting, p.turn_left,
                            p.loads, p.retry, p.active, p.ends_at};
    for (size_t i = 0; i < sizeof(blocks) / sizeof(blocks[0]); i++) free(blocks[i]);
    return ret;
}

/* ---- one rank that shares nothing ---- */

struct alone {
    sw_task_cost cost;
    void *ctx;
};

static void cost_alone(void *ctx, uint32_t turn, const struct sw_task *task, uint32_t rank,
                       struct sw_play_cost *cost) {
    const struct alone *a = ctx;
    (void)turn, (void)rank;
    cost->seconds = a->cost(a->ctx, task);
}

double sw_turn_steady_step(const struct sw_turn_shape *shape, sw_task_cost cost, void *ctx) {
    const int late = sw_turn_shape_is_late(shape);
    struct sw_turn first, second = {0}, steady = {0};
    struct alone alone = {cost, ctx};
    const struct sw_play play = {.ranks = 1, .cost = cost_alone, .ctx = &alone};
    int ret = sw_turn_build(&first, shape, SW_TURN_TRAIN, 0, NULL);
    if (ret < 0) return ret;
    ret = sw_turn_build(&second, shape, SW_TURN_TRAIN, late, &first);
    if (ret == 0) ret = sw_turn_build(&steady, shape, SW_TURN_TRAIN, late, &second);
    const struct sw_turn *turns[WARM_UP + MEASURED] = {&first, &second};
    double ends[WARM_UP + MEASURED];
    for (int i = 2; i < WARM_UP + MEASURED; i++) turns[i] = &steady;
    if (ret == 0) ret = sw_play_turns(&play, turns, WARM_UP + MEASURED, ends);
    sw_turn_free(&first);
    sw_turn_free(&second);
    sw_turn_free(&steady);
    if (ret < 0) return ret;
    return (ends[WARM_UP + MEASURED - 1] - ends[WARM_UP - 1]) / MEASURED;
}
