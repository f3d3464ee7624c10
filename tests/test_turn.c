/* The builder must give turns that keep every invariant, whatever the shape; the checker must
 * notice when one does not. Shapes are random, the seed is printed and can be given as TEST_SEED.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "engine/turn_play.h"
#include "tests/support_random.h"

enum { SHAPES = 3000, TRAIN_TURNS = 5, PARTS_MAX = 3, LAYERS_MAX = 6, EVALS = 2 };
enum { UNITS_MAX = 2 * PARTS_MAX + LAYERS_MAX + 1, TURNS_MAX = TRAIN_TURNS + 1 + EVALS };

struct example {
    struct sw_placement placement;
    struct sw_turn_shape shape;
};

/* All in one tier, or shares of two or three; not above `first`. */
static struct sw_tiers random_tiers(enum sw_tier first) {
    struct sw_tiers t = {{0}};
    const uint32_t tiers = SW_TIER_COUNT - (uint32_t)first;
    if (random_below(2)) return sw_tiers_all((enum sw_tier)(first + random_below(tiers)));
    uint32_t left = 100;
    for (uint32_t tier = first; tier < SW_TIER_COUNT; tier++) {
        t.percent[tier] = (uint8_t)(tier == SW_TIER_NVME ? left : random_below(left + 1));
        left -= t.percent[tier];
    }
    return t;
}

/* Small rings are where reuse goes wrong. */
static void shorten_rings(struct sw_placement *p) {
    for (int r = 0; r < SW_RING_COUNT; r++) {
        const uint32_t least = r == SW_RING_KEPT ? p->micro_count + 1 : 1;
        if (p->ring_slots[r] > least && random_below(2))
            p->ring_slots[r] = least + random_below(p->ring_slots[r] - least + 1);
    }
}

/* Nothing frozen; or units frozen wholly, in part, or not at all, one of them at least not wholly.
 */
static void freeze_some(const uint64_t *elements, uint64_t *trained, uint32_t units) {
    const int any = random_below(2) == 0;
    for (uint32_t u = 0; u < units; u++) {
        const uint32_t how = any ? random_below(3) : 0;
        trained[u] = how == 0   ? elements[u]
                     : how == 1 ? 0
                                : 128 * random_below((uint32_t)(elements[u] / 128));
    }
    const uint32_t sure = random_below(units);
    if (any && trained[sure] == 0) trained[sure] = 128;
}

static void random_example(struct example *e) {
    uint64_t elements[UNITS_MAX], trained[UNITS_MAX];
    struct sw_unit_order order = {.parts = 1 + random_below(PARTS_MAX),
                                  .tied = (int)random_below(2)};
    order.unit_count = order.parts * (order.tied ? 1 : 2) + 1 + 1 + random_below(LAYERS_MAX);
    for (uint32_t u = 0; u < order.unit_count; u++) elements[u] = 128 * (1 + random_below(400));
    freeze_some(elements, trained, order.unit_count);
    const struct sw_tiers params =
        random_below(2) ? sw_tiers_all(SW_TIER_DEVICE) : random_tiers(SW_TIER_HOST);
    const int streamed = !sw_tiers_has(params, SW_TIER_DEVICE);
    const struct sw_placement_input input = {
        .order = order,
        .micro_count = 1 + random_below(4),
        .shards = random_below(2) ? 1 : 2 + random_below(7),
        .replicas = 1 + random_below(2),
        .local_ranks = 1,
        .whole_weights = (int)random_below(2),
        .unit_elements = elements,
        .unit_trained = trained,
        .optimizer = random_tiers(streamed ? SW_TIER_HOST : SW_TIER_DEVICE),
        .params = params,
        .gradients = random_tiers(SW_TIER_DEVICE),
        .activations = random_tiers(SW_TIER_DEVICE),
        .checkpoint_every = 1 + random_below(3),
        .chunk_bytes = SW_CHUNK_BYTES_MIN << random_below(6),
        .activation_bytes = 4096,
        .layers_read_batch = (int)random_below(2),
    };
    assert_int_equal(sw_placement_build(&e->placement, &input), 0);
    if (random_below(2)) e->placement.head_whole = 0;
    shorten_rings(&e->placement);
    const enum sw_overlap overlap = (enum sw_overlap)(SW_OVERLAP_NONE + random_below(3));
    e->shape = (struct sw_turn_shape){
        .overlap = overlap,
        .turning_point = overlap == SW_OVERLAP_NONE      ? 0
                         : overlap == SW_OVERLAP_FORWARD ? order.unit_count
                                                         : random_below(order.unit_count + 1),
        .placement = &e->placement,
        .stops_together = (int)random_below(2),
    };
    if (overlap == SW_OVERLAP_BACKWARD && random_below(2))
        e->shape.late_top = random_below(order.unit_count - e->shape.turning_point + 1);
}

/* Builds the turns of a run of TRAIN_TURNS steps and two evaluations; returns how many there are.
 */
static int build_run(const struct example *e, struct sw_turn turns[TURNS_MAX]) {
    const int late = sw_turn_shape_is_late(&e->shape);
    int count = 0;
    for (; count < TRAIN_TURNS; count++)
        assert_int_equal(sw_turn_build(&turns[count], &e->shape, SW_TURN_TRAIN, late && count > 0,
                                       count ? &turns[count - 1] : NULL),
                         0);
    if (late) {
        assert_int_equal(
            sw_turn_build(&turns[count], &e->shape, SW_TURN_DRAIN, 1, &turns[count - 1]), 0);
        count++;
    }
    for (int i = 0; i < EVALS; i++, count++)
        assert_int_equal(
            sw_turn_build(&turns[count], &e->shape, SW_TURN_EVAL, 0, &turns[count - 1]), 0);
    return count;
}

static int check_run(const struct example *e, struct sw_turn *turns, int count, char *why) {
    const struct sw_turn *list[TURNS_MAX];
    for (int t = 0; t < count; t++) list[t] = &turns[t];
    return sw_turn_check(&e->shape, list, count, why, 256);
}

static void free_run(struct example *e, struct sw_turn *turns, int count) {
    for (int t = 0; t < count; t++) sw_turn_free(&turns[t]);
    sw_placement_free(&e->placement);
}

static void random_turns_keep_the_invariants(void **state) {
    (void)state;
    for (int i = 0; i < SHAPES; i++) {
        struct example e;
        struct sw_turn turns[TURNS_MAX];
        char why[256] = "";
        random_example(&e);
        const int count = build_run(&e, turns);
        if (check_run(&e, turns, count, why) != 0)
            fail_msg("shape %d (overlap %d, turning point %u of %u units, %u parts, tied %d): %s",
                     i, e.shape.overlap, e.shape.turning_point, e.placement.order.unit_count,
                     e.placement.order.parts, e.placement.order.tied, why);
        free_run(&e, turns, count);
    }
}

/* From the second turn on a turn is the same whatever came before, so one steady turn can be
 * reused. */
static void the_steady_turn_repeats(void **state) {
    (void)state;
    for (int i = 0; i < 2000; i++) {
        struct example e;
        struct sw_turn turns[TURNS_MAX];
        random_example(&e);
        const int count = build_run(&e, turns);
        assert_int_equal(turns[2].task_count, turns[3].task_count);
        assert_memory_equal(turns[2].tasks, turns[3].tasks,
                            turns[2].task_count * sizeof(struct sw_task));
        free_run(&e, turns, count);
    }
}

/* ---- what every wait is for ---- */

/* Whether tasks of a kind wait for a lane, in any of the turns. */
static int waits_for(const struct sw_turn *turns, int count, int kind, int lane) {
    for (int t = 0; t < count; t++)
        for (uint32_t i = 0; i < turns[t].task_count; i++) {
            const struct sw_task *task = &turns[t].tasks[i];
            for (uint32_t d = 0; task->kind == kind && d < task->dep_count; d++)
                if (task->deps[d].lane == lane) return 1;
        }
    return 0;
}

static void drop_waits(struct sw_task *tasks, uint32_t count, int kind, int lane) {
    for (uint32_t i = 0; i < count; i++) {
        if (tasks[i].kind != kind) continue;
        uint32_t kept = 0;
        for (uint32_t d = 0; d < tasks[i].dep_count; d++)
            if (tasks[i].deps[d].lane != lane) tasks[i].deps[kept++] = tasks[i].deps[d];
        tasks[i].dep_count = (uint8_t)kept;
    }
}

/* Whether the checker objects to a run in which tasks of a kind do not wait for a lane. */
static int is_noticed(const struct example *e, struct sw_turn *turns, int count, int kind,
                      int lane) {
    struct sw_task *whole[TURNS_MAX];
    char why[256];
    for (int t = 0; t < count; t++) {
        const uint64_t bytes = turns[t].task_count * sizeof(struct sw_task);
        whole[t] = turns[t].tasks;
        turns[t].tasks = malloc(bytes);
        memcpy(turns[t].tasks, whole[t], bytes);
        drop_waits(turns[t].tasks, turns[t].task_count, kind, lane);
    }
    const int noticed = check_run(e, turns, count, why) != 0;
    for (int t = 0; t < count; t++) {
        free(turns[t].tasks);
        turns[t].tasks = whole[t];
    }
    return noticed;
}

/* Waits whose loss breaks nothing. Those of the plain serial order are there to be slow; each other
 * one is implied: where a task waits for the last writer and the last reader of what it overwrites,
 * the reader has waited for the writer. */
static const struct {
    enum sw_task_kind kind;
    enum sw_lane lane;
} implied[] = {
    /* Serial order: a step begins when the one before is updated, a record is read when the verdict
     * is there. */
    {SW_TASK_BATCH, SW_LANE_ADAM},
    {SW_TASK_BATCH, SW_LANE_NVME_WRITE},
    {SW_TASK_READ, SW_LANE_CONTROL},
    /* The last reader, which is waited for, had waited for the writer: Adam for the gradient read
     * back, the write for Adam, the fetch for the read. */
    {SW_TASK_GRAD, SW_LANE_NVME_READ},
    {SW_TASK_READ, SW_LANE_ADAM},
    {SW_TASK_READ_GRAD, SW_LANE_D2H},
    {SW_TASK_SPILL, SW_LANE_NVME_READ},
    {SW_TASK_READ_KEPT, SW_LANE_D2H},
    /* What is made anew comes from who has used the old: an update from its gradient, and so from
     * the unit's last use and the record's read; an input from the step after the one that fetched
     * it; the head after accumulators that were reduced later than its own. */
    {SW_TASK_WRITE, SW_LANE_NVME_READ},
    {SW_TASK_UPLOAD, SW_LANE_COMPUTE},
    {SW_TASK_UPLOAD, SW_LANE_COMM},
    {SW_TASK_WRITE_WEIGHT, SW_LANE_NVME_READ},
    {SW_TASK_WRITE_GRAD, SW_LANE_NVME_READ},
    {SW_TASK_SPILL, SW_LANE_H2D},
    {SW_TASK_WRITE_KEPT, SW_LANE_NVME_READ},
    {SW_TASK_HEAD_WHOLE, SW_LANE_D2H},
    /* The loss, earlier in the lane, waits for the same norm. */
    {SW_TASK_NORMS, SW_LANE_CONTROL},
};

static int is_implied(int kind, int lane) {
    for (size_t i = 0; i < sizeof(implied) / sizeof(implied[0]); i++)
        if ((int)implied[i].kind == kind && (int)implied[i].lane == lane) return 1;
    return 0;
}

/* Seen: as often as runs had the wait, until one was found wrong without it. */
struct waits_seen {
    int count[SW_TASK_KIND_COUNT][SW_LANE_COUNT], noticed[SW_TASK_KIND_COUNT][SW_LANE_COUNT];
};

enum { WAIT_SHAPES = 400, WAIT_SHAPES_MAX = 20000, WAIT_TRIES = 100, WAIT_PAIRS = 66 };

static void try_waits(const struct example *e, struct sw_turn *turns, int count,
                      struct waits_seen *seen) {
    for (int kind = 0; kind < SW_TASK_KIND_COUNT; kind++)
        for (int lane = 0; lane < SW_LANE_COUNT; lane++) {
            int *tries = &seen->count[kind][lane];
            if (seen->noticed[kind][lane] || (is_implied(kind, lane) && *tries == WAIT_TRIES))
                continue;
            if (!waits_for(turns, count, kind, lane)) continue;
            ++*tries;
            seen->noticed[kind][lane] = is_noticed(e, turns, count, kind, lane);
        }
}

static int any_passes(const struct waits_seen *seen) {
    for (int kind = 0; kind < SW_TASK_KIND_COUNT; kind++)
        for (int lane = 0; lane < SW_LANE_COUNT; lane++)
            if (seen->count[kind][lane] && !seen->noticed[kind][lane] && !is_implied(kind, lane))
                return 1;
    return 0;
}

/* Takes away, in random runs, all waits of one kind of task for one lane, for every such pair that
 * occurs: the checker must object, but for what is implied. */
static void missing_waits_are_noticed(void **state) {
    (void)state;
    static struct waits_seen seen;
    /* Some waits matter in few shapes. */
    for (int i = 0; i < WAIT_SHAPES || (i < WAIT_SHAPES_MAX && any_passes(&seen)); i++) {
        struct example e;
        struct sw_turn turns[TURNS_MAX];
        random_example(&e);
        const int count = build_run(&e, turns);
        try_waits(&e, turns, count, &seen);
        free_run(&e, turns, count);
    }
    int wrong = 0, pairs = 0;
    for (int kind = 0; kind < SW_TASK_KIND_COUNT; kind++)
        for (int lane = 0; lane < SW_LANE_COUNT; lane++) {
            pairs += seen.noticed[kind][lane];
            if (seen.count[kind][lane] == 0 || seen.noticed[kind][lane] != is_implied(kind, lane))
                continue;
            wrong++;
            print_message("%s without its waits for lane %s %s\n",
                          sw_task_name((enum sw_task_kind)kind), sw_lane_name((enum sw_lane)lane),
                          is_implied(kind, lane) ? "is found wrong" : "passes");
        }
    for (size_t i = 0; i < sizeof(implied) / sizeof(implied[0]); i++)
        assert_true(seen.count[implied[i].kind][implied[i].lane] > 0);
    assert_int_equal(wrong, 0);
    assert_int_equal(pairs, WAIT_PAIRS);
}

/* The byte table counts the tasks that are there for each micro-batch. */
static void tasks_of_micro_batches_are_counted(void **state) {
    (void)state;
    for (int i = 0; i < SHAPES; i++) {
        struct example e;
        struct sw_turn turn;
        uint64_t count = 0;
        random_example(&e);
        assert_int_equal(sw_turn_build(&turn, &e.shape, SW_TURN_TRAIN, 0, NULL), 0);
        for (uint32_t k = 0; k < turn.task_count; k++) {
            const enum sw_task_kind kind = (enum sw_task_kind)turn.tasks[k].kind;
            count += (kind >= SW_TASK_BATCH && kind <= SW_TASK_HEAD_GRAD) ||
                     (kind >= SW_TASK_SPILL && kind <= SW_TASK_FETCH);
        }
        assert_int_equal(count, sw_placement_micro_tasks(&e.placement));
        sw_turn_free(&turn);
        sw_placement_free(&e.placement);
    }
}

static void a_skipped_update_is_noticed(void **state) {
    (void)state;
    struct example e;
    struct sw_turn turns[TURNS_MAX];
    char why[256];
    do {
        random_example(&e);
        if (sw_turn_shape_is_late(&e.shape)) break;
        sw_placement_free(&e.placement);
    } while (1);
    const int count = build_run(&e, turns);
    assert_int_not_equal(check_run(&e, turns, TRAIN_TURNS, why), 0); /* no drain */
    free_run(&e, turns, count);
}

/* ---- overlap, played on made-up times ---- */

enum { LAYERS = 24, UNITS = LAYERS + 3, CHUNKS_PER_UNIT = 4 };

/* What is played: slots of the chunk ring, and what a chunk takes on the slower NVMe lane. */
struct played {
    uint32_t slots;
    double chunk_cost;
};

static void place_played(struct sw_placement *p, uint64_t elements[UNITS]) {
    for (int u = 0; u < UNITS; u++)
        elements[u] = u == 0 || u > LAYERS ? 128 : 1024u * CHUNKS_PER_UNIT;
    const struct sw_placement_input input = {.order = {.unit_count = UNITS, .parts = 1},
                                             .micro_count = 1,
                                             .shards = 1,
                                             .replicas = 1,
                                             .local_ranks = 1,
                                             .unit_elements = elements,
                                             .optimizer = sw_tiers_all(SW_TIER_NVME),
                                             .params = sw_tiers_all(SW_TIER_DEVICE),
                                             .gradients = sw_tiers_all(SW_TIER_HOST),
                                             .activations = sw_tiers_all(SW_TIER_DEVICE),
                                             .checkpoint_every = 1,
                                             .chunk_bytes = 12288,
                                             .activation_bytes = 4096};
    assert_int_equal(sw_placement_build(p, &input), 0);
}

static void pick_late(enum sw_overlap overlap, uint32_t *turning_point, uint32_t *late_top) {
    uint64_t elements[UNITS];
    struct sw_placement placement;
    place_played(&placement, elements);
    struct sw_turn_shape shape = {.placement = &placement, .overlap = overlap};
    sw_turn_shape_pick_late(&shape, elements);
    sw_placement_free(&placement);
    *turning_point = shape.turning_point;
    *late_top = shape.late_top;
}

/* Compute takes 4 per layer: 1 forward, 3 backward. */
static double cost_of(void *ctx, const struct sw_task *task) {
    const struct played *played = ctx;
    const int layer = task->unit > 0 && task->unit <= LAYERS;
    switch (task->kind) {
    case SW_TASK_FORWARD:
        return layer;
    case SW_TASK_BACKWARD:
        return 3 * layer;
    case SW_TASK_READ:
        return 0.9 * played->chunk_cost;
    case SW_TASK_WRITE:
        return played->chunk_cost;
    case SW_TASK_ADAM:
        return 0.1;
    case SW_TASK_UPLOAD:
        return 0.01;
    case SW_TASK_GRAD:
        return 0.0125;
    default:
        return 0;
    }
}

/* Seconds of a steady step. */
static double steady_step(enum sw_overlap overlap, uint32_t turning_point, uint32_t late_top,
                          struct played played) {
    uint64_t elements[UNITS];
    struct sw_placement placement;
    place_played(&placement, elements);
    placement.ring_slots[SW_RING_STATE] = played.slots;
    const struct sw_turn_shape shape = {.overlap = overlap,
                                        .turning_point = turning_point,
                                        .late_top = late_top,
                                        .placement = &placement};
    const double step = sw_turn_steady_step(&shape, cost_of, &played);
    sw_placement_free(&placement);
    assert_true(step > 0);
    return step;
}

/* With compute C = 4 LAYERS and update U = 4 LAYERS, none takes C + U; forward at least 3/4 C + U
 * less what its slots hold; backward at best max(C, U). */
static void overlap_modes_reach_their_bounds(void **state) {
    (void)state;
    const double compute = 4.0 * LAYERS, update = (double)LAYERS * CHUNKS_PER_UNIT;
    const struct played few = {6, 1}; /* slots, so that reading ahead hides little */
    const double none = steady_step(SW_OVERLAP_NONE, 0, 0, few);
    const double forward = steady_step(SW_OVERLAP_FORWARD, UNITS, 0, few);
    const double below = steady_step(SW_OVERLAP_BACKWARD, 1 + LAYERS / 4, 0, few);
    const double backward = steady_step(SW_OVERLAP_BACKWARD, 1 + LAYERS / 4, 2 + LAYERS / 5, few);
    print_message("none %.1f forward %.1f backward %.1f, compute %.1f update %.1f\n", none, forward,
                  backward, compute, update);
    assert_true(none >= 0.98 * (compute + update) && none <= 1.05 * (compute + update));
    assert_true(forward <= 1.05 * (0.75 * compute + update));
    assert_true(forward <= 0.92 * none);
    assert_true(backward <= 0.70 * none);
    assert_true(backward >= compute);
    /* While forward runs to the loss, the updates of the units at the top keep NVMe busy. */
    assert_true(backward <= 0.98 * below);
}

/* Against every other choice, where the update takes half as long as compute, as long, and twice as
 * long, and an eighth of the chunks are slots. */
static void the_late_units_are_chosen_well(void **state) {
    (void)state;
    uint32_t turning_point, late_top;
    pick_late(SW_OVERLAP_NONE, &turning_point, &late_top);
    assert_true(turning_point == 0 && late_top == 0);
    pick_late(SW_OVERLAP_FORWARD, &turning_point, &late_top);
    assert_true(turning_point == UNITS && late_top == 0);
    pick_late(SW_OVERLAP_BACKWARD, &turning_point, &late_top);
    const double costs[] = {0.5, 1, 2}, within[] = {1.02, 1.01, 1.01};
    for (int c = 0; c < 3; c++) {
        const struct played played = {LAYERS * CHUNKS_PER_UNIT / 8, costs[c]};
        const double chosen = steady_step(SW_OVERLAP_BACKWARD, turning_point, late_top, played);
        double best = chosen;
        for (uint32_t k = 0; k <= UNITS; k++)
            for (uint32_t top = 0; k + top <= UNITS; top++) {
                const double step = steady_step(SW_OVERLAP_BACKWARD, k, top, played);
                best = step < best ? step : best;
            }
        print_message("update %.1f of compute: %.1f, at best %.1f\n", costs[c], chosen, best);
        assert_true(chosen <= within[c] * best);
    }
}

int main(void) {
    print_message("TEST_SEED=%llu\n", random_begin());
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_turns_keep_the_invariants),
        cmocka_unit_test(the_steady_turn_repeats),
        cmocka_unit_test(missing_waits_are_noticed),
        cmocka_unit_test(tasks_of_micro_batches_are_counted),
        cmocka_unit_test(a_skipped_update_is_noticed),
        cmocka_unit_test(overlap_modes_reach_their_bounds),
        cmocka_unit_test(the_late_units_are_chosen_well),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
