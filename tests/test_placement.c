/* Which bytes live where: dealing out shares, chunks and spans, the pools and their budgets, and
 * the choice of tiers that options leave open. Inputs are random; the seed is printed and can be
 * given as TEST_SEED. Every placement that a budget has shortened must still carry its turns. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "base/block_norm.h"
#include "base/size.h"
#include "engine/budget.h"
#include "engine/turn.h"
#include "offload/placement.h"
#include "tests/support_random.h"

enum {
    PARTS_MAX = 3,
    LAYERS_MAX = 6,
    UNITS_MAX = 2 * PARTS_MAX + LAYERS_MAX + 1,
    INPUTS = 1000,
    BUDGETS = 150
};

static struct sw_tiers tiers_of(const char *text) {
    struct sw_tiers tiers;
    char why[128];
    assert_int_equal(sw_tiers_parse(text, &tiers, why, sizeof(why)), 0);
    return tiers;
}

static struct sw_tiers random_tiers(enum sw_tier first) {
    static const char *const texts[][3] = {
        {"device", "device:30%,host:50%,nvme", "device:20%,nvme"},
        {"host", "host:40%,nvme", "nvme"}};
    return tiers_of(texts[first == SW_TIER_HOST || random_below(2)][random_below(3)]);
}

struct example {
    uint64_t elements[UNITS_MAX];
    struct sw_placement_input input;
};

static void random_example(struct example *e) {
    struct sw_unit_order order = {.parts = 1 + random_below(PARTS_MAX),
                                  .tied = (int)random_below(2)};
    order.unit_count = order.parts * (order.tied ? 1 : 2) + 2 + random_below(LAYERS_MAX);
    for (uint32_t u = 0; u < order.unit_count; u++) e->elements[u] = 128 * (1 + random_below(700));
    const int streamed = (int)random_below(2);
    e->input = (struct sw_placement_input){
        .order = order,
        .micro_count = 1 + random_below(4),
        .shards = 1,
        .replicas = 1,
        .local_ranks = 1,
        .unit_elements = e->elements,
        .format = {.grad = random_below(2) ? SW_FP32 : SW_BF16},
        .optimizer = random_tiers(streamed ? SW_TIER_HOST : SW_TIER_DEVICE),
        .params = streamed ? random_tiers(SW_TIER_HOST) : sw_tiers_all(SW_TIER_DEVICE),
        .gradients = random_tiers(SW_TIER_DEVICE),
        .activations = random_tiers(SW_TIER_DEVICE),
        .checkpoint_every = 1 + random_below(3),
        .homes = random_below(3),
        .chunk_bytes = SW_CHUNK_BYTES_MIN << random_below(6),
        .activation_bytes = 4096 * (1 + random_below(3)),
        .head_bytes = 8192,
        .workspace_bytes = {40960, 81920},
        .batch_bytes = 12288,
    };
}

/* ---- shares ---- */

static void every_prefix_is_within_an_element_of_its_share(void **state) {
    (void)state;
    for (unsigned device = 0; device <= 100; device++)
        for (unsigned host = 0; host + device <= 100; host += 1 + random_below(3)) {
            const struct sw_tiers tiers = {
                {(uint8_t)device, (uint8_t)host, (uint8_t)(100 - device - host)}};
            struct sw_tiers_deal deal = {0};
            for (int64_t n = 1; n <= 200; n++) {
                const enum sw_tier tier = sw_tiers_next(tiers, &deal);
                assert_true(sw_tiers_has(tiers, tier));
                for (int i = 0; i < SW_TIER_COUNT; i++)
                    assert_true(llabs(100 * (int64_t)deal.dealt[i] - n * tiers.percent[i]) < 100);
            }
        }
}

static void of_equals_the_upper_tier_comes_first(void **state) {
    (void)state;
    struct sw_tiers_deal deal = {0};
    const struct sw_tiers half = tiers_of("device:50%,nvme");
    assert_int_equal(sw_tiers_next(half, &deal), SW_TIER_DEVICE);
    assert_int_equal(sw_tiers_next(half, &deal), SW_TIER_NVME);
}

/* ---- chunks ---- */

static void check_chunk(const struct sw_placement *p, const struct example *e, uint32_t c) {
    const struct sw_chunk *chunk = &p->chunks[c];
    const struct sw_chunk *first = &p->chunks[chunk->span_first];
    assert_int_equal(chunk->first % SW_ADAM_BLOCK, 0);
    assert_int_equal(chunk->record_bytes % 4096, 0);
    assert_true(sw_adam_record_bytes(&e->input.format, chunk->count) <= chunk->record_bytes);
    assert_true(chunk->record_bytes <= sw_round_up(e->input.chunk_bytes, 4096));
    assert_in_range(c, chunk->span_first, chunk->span_end - 1);
    assert_int_equal(first->first % SW_NORM_BLOCK, 0);
    assert_int_equal(first->unit, chunk->unit);
    assert_int_equal(p->chunks[chunk->span_end - 1].unit, chunk->unit);
    if (c > chunk->span_first) assert_int_not_equal(chunk->first % SW_NORM_BLOCK, 0);
    /* Adam works where the record is, so that is where its gradient waits. */
    if (chunk->tier == SW_TIER_DEVICE) assert_int_equal(chunk->grad_tier, SW_TIER_DEVICE);
}

static void chunks_cover_each_unit_once(void **state) {
    (void)state;
    for (int i = 0; i < INPUTS; i++) {
        struct example e;
        struct sw_placement p;
        random_example(&e);
        assert_int_equal(sw_placement_build(&p, &e.input), 0);
        assert_int_equal(p.chunk_count, sw_placement_chunks(&e.input));
        uint64_t index = 0;
        for (uint32_t u = 0; u < e.input.order.unit_count; u++) {
            uint64_t at = 0;
            for (uint32_t c = p.unit_first_chunk[u]; c < p.unit_first_chunk[u + 1]; c++) {
                assert_int_equal(p.chunks[c].unit, u);
                assert_int_equal(p.chunks[c].first, at);
                assert_int_equal(p.chunks[c].index, index + at);
                at += p.chunks[c].count;
                check_chunk(&p, &e, c);
            }
            assert_int_equal(at, e.elements[u]);
            index += sw_round_up(at, SW_ADAM_BLOCK);
        }
        assert_int_equal(p.unit_first_chunk[e.input.order.unit_count], p.chunk_count);
        sw_placement_free(&p);
    }
}

/* Within every unit each state has its mix, to one chunk. */
static void units_have_the_same_mix(void **state) {
    (void)state;
    for (int i = 0; i < INPUTS; i++) {
        struct example e;
        struct sw_placement p;
        random_example(&e);
        assert_int_equal(sw_placement_build(&p, &e.input), 0);
        for (uint32_t u = 0; u < e.input.order.unit_count; u++) {
            int64_t n[2][SW_TIER_COUNT] = {{0}};
            const int64_t all = p.unit_first_chunk[u + 1] - p.unit_first_chunk[u];
            for (uint32_t c = p.unit_first_chunk[u]; c < p.unit_first_chunk[u + 1]; c++) {
                n[0][p.chunks[c].tier]++;
                n[1][p.chunks[c].weight_tier]++;
            }
            for (int t = 0; t < SW_TIER_COUNT; t++) {
                assert_true(llabs(100 * n[0][t] - all * e.input.optimizer.percent[t]) < 100);
                assert_true(llabs(100 * n[1][t] - all * e.input.params.percent[t]) < 100);
            }
        }
        sw_placement_free(&p);
    }
}

/* ---- pools ---- */

/* Pieces of a pool, each behind the one before; what is on NVMe has its place in a file instead. */
static void check_pool(const struct sw_placement *p, enum sw_tier tier, const uint64_t *pool,
                       size_t tier_at, size_t offset_at, uint64_t size_of) {
    uint64_t end = 0;
    for (uint32_t c = 0; c < p->chunk_count; c++) {
        const char *chunk = (const char *)&p->chunks[c];
        uint64_t at;
        enum sw_tier its;
        memcpy(&its, chunk + tier_at, sizeof(its));
        memcpy(&at, chunk + offset_at, sizeof(at));
        if (its != tier) continue;
        const uint64_t bytes = size_of ? p->chunks[c].count * size_of : p->chunks[c].record_bytes;
        if (tier == SW_TIER_NVME) {
            assert_int_equal(at, 0);
            end += sw_round_up(bytes, 4096);
            continue;
        }
        assert_true(at >= end && at - end < 4096);
        end = at + bytes;
    }
    assert_int_equal(pool[tier], sw_round_up(end, 4096));
}

/* One kept input serves all layers at most; no product of sizes wraps on the way. */
static void a_group_ends_with_the_layers(void **state) {
    (void)state;
    for (int i = 0; i < INPUTS; i++) {
        struct example e;
        struct sw_placement p;
        random_example(&e);
        const uint32_t layers = sw_order_layers(&e.input.order);
        e.input.checkpoint_every = UINT32_MAX - random_below(2);
        e.input.micro_count = 65536;
        e.input.activation_bytes = (uint64_t)1 << 36;
        assert_int_equal(sw_placement_build(&p, &e.input), 0);
        assert_int_equal(p.checkpoint_every, layers);
        assert_int_equal(p.kept_groups, 1);
        assert_int_equal(p.group_bytes, (layers - 1) * ((uint64_t)1 << 52));
        assert_int_equal(p.kept_bytes[0] + p.kept_bytes[1] + p.kept_bytes[2], (uint64_t)1 << 52);
        sw_placement_free(&p);
    }
}

static void pools_are_the_sum_of_their_pieces(void **state) {
    (void)state;
    for (int i = 0; i < INPUTS; i++) {
        struct example e;
        struct sw_placement p;
        random_example(&e);
        assert_int_equal(sw_placement_build(&p, &e.input), 0);
        uint64_t kept[SW_TIER_COUNT] = {0};
        struct sw_tiers_deal deal = {0};
        for (uint32_t k = 0; k < p.kept_groups * p.micro_count; k++) {
            const struct sw_kept got = sw_placement_kept(&p, k);
            assert_int_equal(got.tier, sw_tiers_next(e.input.activations, &deal));
            if (got.tier != SW_TIER_NVME) assert_int_equal(got.offset, kept[got.tier]);
            kept[got.tier] += e.input.activation_bytes;
        }
        for (int t = 0; t < SW_TIER_COUNT; t++) {
            const enum sw_tier tier = (enum sw_tier)t;
            check_pool(&p, tier, p.state_bytes, offsetof(struct sw_chunk, tier),
                       offsetof(struct sw_chunk, record_offset), 0);
            check_pool(&p, tier, p.weight_bytes, offsetof(struct sw_chunk, weight_tier),
                       offsetof(struct sw_chunk, weight_offset),
                       sw_dtype_bytes(e.input.format.weight));
            check_pool(&p, tier, p.grad_bytes, offsetof(struct sw_chunk, grad_tier),
                       offsetof(struct sw_chunk, grad_offset), sw_dtype_bytes(e.input.format.grad));
            assert_int_equal(p.kept_bytes[t], kept[t]);
        }
        sw_placement_free(&p);
    }
}

/* ---- budgets ---- */

/* What is given up, in order; HEAD: the head in parts, ALL: every ring of the host. */
enum { HEAD = SW_RING_COUNT, ALL };
static const struct {
    int what;
    uint32_t slots; /* 0: one more than micro-batches */
} given_up[2][7] = {
    {{HEAD, 0},
     {SW_RING_WINDOW, 2},
     {SW_RING_ACC, 1},
     {SW_RING_ROUNDED, 2},
     {SW_RING_KEPT, 0},
     {SW_RING_WINDOW, 1},
     {-1, 0}},
    {{SW_RING_STATE, SW_STATE_SLOTS_MIN},
     {SW_RING_GRAD_STAGE, 3},
     {SW_RING_WEIGHT_STAGE, 3},
     {SW_RING_EMIT, 2},
     {SW_RING_KEPT_STAGE, 2},
     {SW_RING_STATE, 2},
     {ALL, 1}},
};

static const enum sw_ring host_rings[] = {SW_RING_STATE, SW_RING_EMIT, SW_RING_WEIGHT_STAGE,
                                          SW_RING_GRAD_STAGE, SW_RING_KEPT_STAGE};

static void give_up(struct sw_placement *p, int tier, int step) {
    const int what = given_up[tier][step].what;
    const uint32_t least =
        given_up[tier][step].slots ? given_up[tier][step].slots : p->micro_count + 1;
    if (what == HEAD) {
        p->head_whole = 0;
        memset(p->head_acc_offset, 0, sizeof(p->head_acc_offset));
    }
    for (int r = 0; r < SW_RING_COUNT; r++) {
        int mine = r == what;
        for (size_t i = 0; i < sizeof(host_rings) / sizeof(host_rings[0]) && what == ALL; i++)
            mine |= r == (int)host_rings[i];
        if (mine && p->ring_slots[r] > least) p->ring_slots[r] = least;
    }
}

static uint64_t needs(const struct sw_placement *p, const struct sw_placement_input *in, int tier) {
    struct sw_byte_row rows[SW_BYTE_ROWS_MAX];
    const int count = sw_placement_table(p, in, rows);
    return sw_placement_bytes(rows, count, (enum sw_tier)tier);
}

static void same_rings(const struct sw_placement *got, const struct sw_placement *want) {
    assert_memory_equal(got->ring_slots, want->ring_slots, sizeof(got->ring_slots));
    assert_memory_equal(got->ring_slot_bytes, want->ring_slot_bytes, sizeof(got->ring_slot_bytes));
    assert_int_equal(got->head_whole, want->head_whole);
    assert_memory_equal(got->head_acc_offset, want->head_acc_offset, sizeof(got->head_acc_offset));
}

/* The turns of four steps, a drain and an evaluation, found right. */
static void check_turns(const struct sw_placement *p) {
    const enum sw_overlap overlap = (enum sw_overlap)(SW_OVERLAP_NONE + random_below(3));
    const uint32_t units = p->order.unit_count;
    const struct sw_turn_shape shape = {.overlap = overlap,
                                        .turning_point = overlap == SW_OVERLAP_NONE ? 0
                                                         : overlap == SW_OVERLAP_FORWARD
                                                             ? units
                                                             : units / 2,
                                        .placement = p};
    const int late = sw_turn_shape_is_late(&shape);
    const enum sw_turn_kind kinds[] = {SW_TURN_TRAIN, SW_TURN_TRAIN, SW_TURN_TRAIN,
                                       SW_TURN_TRAIN, SW_TURN_DRAIN, SW_TURN_EVAL};
    struct sw_turn turns[6];
    const struct sw_turn *list[6];
    char why[256] = "";
    int count = 0;
    for (int i = 0; i < 6; i++) {
        if (kinds[i] == SW_TURN_DRAIN && !late) continue;
        const int has_late = late && i > 0 && kinds[i] != SW_TURN_EVAL;
        assert_int_equal(sw_turn_build(&turns[count], &shape, kinds[i], has_late,
                                       count ? &turns[count - 1] : NULL),
                         0);
        list[count] = &turns[count];
        count++;
    }
    if (sw_turn_check(&shape, list, count, why, sizeof(why)) != 0) fail_msg("%s", why);
    for (int i = 0; i < count; i++) sw_turn_free(&turns[i]);
}

/* A byte less than each stage needs, and what it needs exactly: the next stage, and this one. */
static void a_budget_shortens_rings_in_order(void **state) {
    (void)state;
    for (int i = 0; i < BUDGETS; i++) {
        struct example e;
        struct sw_placement want, got;
        random_example(&e);
        const int tier = (int)random_below(2);
        assert_int_equal(sw_placement_build(&want, &e.input), 0);
        for (int step = 0; step < 7; step++) {
            const uint64_t need = needs(&want, &e.input, tier);
            e.input.budget_bytes[tier] = need;
            assert_int_equal(sw_placement_build(&got, &e.input), 0);
            same_rings(&got, &want);
            sw_placement_free(&got);
            while (step < 7 && needs(&want, &e.input, tier) == need) give_up(&want, tier, step++);
            step--;
            e.input.budget_bytes[tier] = need - 1;
            assert_int_equal(sw_placement_build(&got, &e.input), 0);
            same_rings(&got, &want);
            check_turns(&got);
            sw_placement_free(&got);
        }
        sw_placement_free(&want);
    }
}

static void both_budgets_leave_what_a_turn_needs(void **state) {
    (void)state;
    for (int i = 0; i < 2 * BUDGETS; i++) {
        struct example e;
        struct sw_placement p;
        random_example(&e);
        e.input.budget_bytes[SW_TIER_DEVICE] = e.input.budget_bytes[SW_TIER_HOST] = 1;
        assert_int_equal(sw_placement_build(&p, &e.input), 0);
        for (int r = 0; r < SW_RING_COUNT; r++)
            assert_true(p.ring_slots[r] <= (r == SW_RING_KEPT      ? p.micro_count + 1
                                            : r == SW_RING_ROUNDED ? 2u
                                                                   : 1u));
        check_turns(&p);
        sw_placement_free(&p);
    }
}

/* All parts of the head at once where the weights stay and there is room, else one by one. */
static void the_head_is_whole_or_in_parts(void **state) {
    (void)state;
    struct example e;
    struct sw_placement p;
    do random_example(&e);
    while (e.input.order.parts < 2 || !sw_tiers_is_all(e.input.params, SW_TIER_DEVICE));
    assert_int_equal(sw_placement_build(&p, &e.input), 0);
    assert_true(p.head_whole);
    for (uint32_t part = 0; part < e.input.order.parts; part++)
        assert_int_equal(p.head_acc_offset[part + 1] - p.head_acc_offset[part],
                         sw_round_up(4 * e.elements[sw_order_head(&e.input.order, part)], 4096));
    e.input.budget_bytes[SW_TIER_DEVICE] = needs(&p, &e.input, SW_TIER_DEVICE) - 1;
    sw_placement_free(&p);
    assert_int_equal(sw_placement_build(&p, &e.input), 0);
    assert_true(!p.head_whole && p.head_acc_offset[e.input.order.parts] == 0);
    sw_placement_free(&p);
    e.input.budget_bytes[SW_TIER_DEVICE] = 0;
    e.input.params = e.input.optimizer = sw_tiers_all(SW_TIER_HOST);
    assert_int_equal(sw_placement_build(&p, &e.input), 0);
    assert_false(p.head_whole);
    sw_placement_free(&p);
}

/* ---- what options leave open ---- */

static void defaults(struct example *e, struct sw_train_options *o) {
    do random_example(e);
    while (sw_order_layers(&e->input.order) < 4);
    e->input.homes = 0;
    sw_train_defaults(o);
    o->steps = 20;
}

/* "activations gradients optimizer params", or "refused". */
static const char *place(const struct example *e, const struct sw_train_options *options,
                         uint64_t device, uint64_t host, char out[160]) {
    struct sw_placement_input input = e->input;
    struct sw_train_options o = *options;
    struct sw_placement p;
    input.budget_bytes[SW_TIER_DEVICE] = device;
    input.budget_bytes[SW_TIER_HOST] = host;
    struct sw_shortfall shortfall;
    const int ret = sw_budget_place(&p, &input, &o, 0, &shortfall);
    if (ret < 0) {
        assert_int_equal(ret, -ENOSPC);
        assert_true(shortfall.allowed_bytes == input.budget_bytes[shortfall.tier]);
        assert_true(shortfall.need_bytes > shortfall.allowed_bytes);
        assert_true(shortfall.need_bytes == needs(&p, &input, (int)shortfall.tier));
        sw_placement_free(&p);
        return strcpy(out, "refused");
    }
    for (int t = 0; t < 2; t++)
        assert_true(!input.budget_bytes[t] || needs(&p, &input, t) <= input.budget_bytes[t]);
    char text[4][40];
    snprintf(out, 160, "%s %s %s %s", sw_tiers_print(o.activations, text[0], 40),
             sw_tiers_print(o.gradients, text[1], 40), sw_tiers_print(o.optimizer, text[2], 40),
             sw_tiers_print(o.params, text[3], 40));
    sw_placement_free(&p);
    return out;
}

/* What a choice of options needs of a tier when nothing is to be spared. */
static uint64_t need_of(const struct example *e, const struct sw_train_options *options, int tier) {
    struct sw_placement_input input = e->input;
    struct sw_train_options o = *options;
    struct sw_placement p;
    struct sw_shortfall shortfall;
    assert_int_equal(sw_budget_place(&p, &input, &o, 0, &shortfall), 0);
    const uint64_t need = needs(&p, &input, tier);
    sw_placement_free(&p);
    return need;
}

/* The smallest budget of the device with which a run starts. */
static uint64_t least_device(const struct example *e, const struct sw_train_options *o) {
    uint64_t low = 1, high = need_of(e, o, SW_TIER_DEVICE); /* refused; not */
    char got[160];
    while (high - low > 1) {
        const uint64_t middle = low + (high - low) / 2;
        if (strcmp(place(e, o, middle, 0, got), "refused") == 0)
            low = middle;
        else
            high = middle;
    }
    return high;
}

/* Walks a tier's budget down from what is asked without one, beside a fixed one of the other; the
 * choices in order, each once. */
static void walk(const struct example *e, const struct sw_train_options *o, int tier,
                 uint64_t budget, uint64_t other, const char *const *want, int count) {
    const uint64_t step = budget / 200 + 1;
    char got[160];
    int seen = 0;
    for (;; budget = budget > step ? budget - step : 1) {
        place(e, o, tier == SW_TIER_DEVICE ? budget : other, tier == SW_TIER_HOST ? budget : other,
              got);
        if (seen + 1 < count && strcmp(got, want[seen]) != 0) seen++;
        assert_string_equal(got, want[seen]);
        if (budget == 1) break;
    }
    assert_int_equal(seen, count - 1);
}

/* Inputs first, the weights last; on the device gradients and records are not to begin with. */
static void open_states_go_down_in_order(void **state) {
    (void)state;
    const char *const device[] = {"device host host device", "host host host device",
                                  "host host host host", "refused"};
    const char *const host[] = {"device host host device", "device nvme host device",
                                "device nvme nvme device", "refused"};
    const char *const below[] = {"host host host host", "nvme host host host",
                                 "nvme nvme host host", "nvme nvme nvme host",
                                 "nvme nvme nvme nvme", "refused"};
    for (int i = 0; i < 5; i++) {
        struct example e;
        struct sw_train_options o, lean;
        defaults(&e, &o);
        e.input.activation_bytes = 1 << 20; /* so that each state is more than its slots */
        e.input.micro_count = 8;
        e.input.checkpoint_every = 1;
        for (uint32_t u = 0; u < e.input.order.unit_count; u++) e.elements[u] = 128 * 700 * 8;
        e.input.format = (struct sw_adam_format){.grad = SW_BF16, .weight = SW_BF16};
        e.input.chunk_bytes = 98304;
        walk(&e, &o, SW_TIER_DEVICE, need_of(&e, &o, SW_TIER_DEVICE), 0, device, 4);
        walk(&e, &o, SW_TIER_HOST, need_of(&e, &o, SW_TIER_HOST), 0, host, 4);
        lean = o;
        lean.activations = lean.params = sw_tiers_all(SW_TIER_HOST);
        walk(&e, &o, SW_TIER_HOST, need_of(&e, &lean, SW_TIER_HOST), least_device(&e, &o), below,
             6);
    }
}

static void what_was_chosen_is_never_changed(void **state) {
    (void)state;
    for (int i = 0; i < 200; i++) {
        struct example e;
        struct sw_train_options o;
        char got[160], want[160], text[4][40];
        defaults(&e, &o);
        o.activations = random_tiers(SW_TIER_DEVICE);
        o.gradients = random_tiers(SW_TIER_DEVICE);
        o.optimizer = random_tiers(SW_TIER_HOST);
        o.params = random_below(2) ? sw_tiers_all(SW_TIER_DEVICE) : random_tiers(SW_TIER_HOST);
        snprintf(want, sizeof(want), "%s %s %s %s", sw_tiers_print(o.activations, text[0], 40),
                 sw_tiers_print(o.gradients, text[1], 40), sw_tiers_print(o.optimizer, text[2], 40),
                 sw_tiers_print(o.params, text[3], 40));
        assert_string_equal(place(&e, &o, 0, 0, got), want);
        for (int k = 0; k < 10; k++)
            if (strcmp(place(&e, &o, 1 + random_below(1 << 20), 1 + random_below(1 << 20), got),
                       "refused") != 0)
                assert_string_equal(got, want);
    }
}

static void what_does_not_fit_is_refused_with_the_shortfall(void **state) {
    (void)state;
    struct example e;
    struct sw_train_options o;
    char got[160];
    defaults(&e, &o);
    for (int tier = 0; tier < 2; tier++)
        assert_string_equal(place(&e, &o, tier == 0, tier == 1, got), "refused");
    struct sw_placement p;
    struct sw_shortfall shortfall;
    for (int apart = 0; apart < 2; apart++) {
        e.input.machine_bytes = 1;
        e.input.device_is_apart = apart;
        struct sw_train_options chosen = o;
        assert_int_equal(sw_budget_place(&p, &e.input, &chosen, 0, &shortfall), -ENOSPC);
        assert_true(shortfall.tier == SW_TIER_COUNT && shortfall.allowed_bytes == 1);
        const uint64_t device = needs(&p, &e.input, SW_TIER_DEVICE);
        assert_true(shortfall.need_bytes == !apart * device + needs(&p, &e.input, SW_TIER_HOST));
        /* What leaves a device that is apart only makes the host fuller. */
        assert_int_equal(sw_tiers_is_all(e.input.params, SW_TIER_DEVICE), apart);
        sw_placement_free(&p);
    }
}

static void the_commit_interval_follows_the_state(void **state) {
    (void)state;
    static const struct {
        const char *optimizer;
        int64_t given;
        uint64_t save_every;
        int keep_store, resuming;
        int64_t want;
        uint32_t homes;
    } cases[] = {
        {"nvme", -1, 0, 0, 0, 1, 2},          {"nvme", -1, 5, 0, 0, 1, 2},
        {"nvme", 0, 5, 0, 0, 0, 1},           {"nvme", 0, 0, 0, 1, 0, 2},
        {"nvme", 3, 0, 0, 0, 3, 2},           {"host", -1, 0, 0, 0, 0, 0},
        {"host", -1, 5, 0, 0, 5, 2},          {"host", -1, 0, 1, 0, 20, 2},
        {"host", -1, 0, 0, 1, 0, 2},          {"host:50%,nvme", -1, 0, 0, 0, 0, 1},
        {"host:50%,nvme", -1, 4, 0, 0, 4, 2}, {"device", -1, 0, 0, 0, 0, 0},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct example e;
        struct sw_train_options o;
        struct sw_placement p;
        defaults(&e, &o);
        o.optimizer = tiers_of(cases[i].optimizer);
        o.commit_every = cases[i].given;
        o.save_every = cases[i].save_every;
        o.keep_store = cases[i].keep_store;
        struct sw_shortfall shortfall;
        assert_int_equal(sw_budget_place(&p, &e.input, &o, cases[i].resuming, &shortfall), 0);
        assert_int_equal(o.commit_every, cases[i].want);
        assert_int_equal(e.input.homes, cases[i].homes);
        const uint64_t records = p.state_bytes[0] + p.state_bytes[1] + p.state_bytes[2];
        assert_int_equal(p.store_bytes, cases[i].homes * records);
        sw_placement_free(&p);
    }
}

int main(void) {
    print_message("TEST_SEED=%llu\n", random_begin());
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_prefix_is_within_an_element_of_its_share),
        cmocka_unit_test(of_equals_the_upper_tier_comes_first),
        cmocka_unit_test(chunks_cover_each_unit_once),
        cmocka_unit_test(units_have_the_same_mix),
        cmocka_unit_test(a_group_ends_with_the_layers),
        cmocka_unit_test(pools_are_the_sum_of_their_pieces),
        cmocka_unit_test(a_budget_shortens_rings_in_order),
        cmocka_unit_test(both_budgets_leave_what_a_turn_needs),
        cmocka_unit_test(the_head_is_whole_or_in_parts),
        cmocka_unit_test(open_states_go_down_in_order),
        cmocka_unit_test(what_was_chosen_is_never_changed),
        cmocka_unit_test(what_does_not_fit_is_refused_with_the_shortfall),
        cmocka_unit_test(the_commit_interval_follows_the_state),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
