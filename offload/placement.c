/* offload/placement.c - cuts units into chunks, deals them out to the tiers and adds up the pools.
 */
#include "offload/placement.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "base/block_norm.h"
#include "base/size.h"

enum { PAGE_BYTES = 4096 };

/* Whole blocks whose record fits, and such that spans of whole norm blocks are whole chunks: a
 * multiple of SW_NORM_BLOCK elements, or a power of two below it. */
static uint64_t chunk_elements(const struct sw_placement_input *in) {
    const uint64_t fit =
        in->chunk_bytes / sw_adam_record_bytes(&in->format, SW_ADAM_BLOCK) * SW_ADAM_BLOCK;
    if (fit >= SW_NORM_BLOCK) return fit / SW_NORM_BLOCK * SW_NORM_BLOCK;
    uint64_t elements = SW_ADAM_BLOCK;
    while (elements * 2 <= fit) elements *= 2;
    return elements;
}

/* Elements of a rank's shard of a unit that are trained. */
static uint64_t trained(const struct sw_placement_input *in, uint32_t unit) {
    return in->unit_trained ? in->unit_trained[unit] : in->unit_elements[unit];
}

static uint64_t largest_unit(const struct sw_placement_input *in, int trained_only) {
    uint64_t largest = 0;
    for (uint32_t u = 0; u < in->order.unit_count; u++) {
        const uint64_t elements = trained_only ? trained(in, u) : in->unit_elements[u];
        if (elements > largest) largest = elements;
    }
    return in->shards * largest;
}

static uint64_t take(uint64_t *pool_bytes, uint64_t bytes) {
    const uint64_t offset = *pool_bytes;
    *pool_bytes += bytes;
    return offset;
}

/* ---- chunks ---- */

/* Spans begin where a chunk begins at a border of norm blocks. */
static void mark_spans(struct sw_placement *p, uint32_t first, uint32_t end) {
    for (uint32_t c = first; c < end;) {
        uint32_t next = c + 1;
        while (next < end && p->chunks[next].first % SW_NORM_BLOCK) next++;
        for (uint32_t i = c; i < next; i++) {
            p->chunks[i].span_first = c;
            p->chunks[i].span_end = next;
        }
        c = next;
    }
}

/* How chunks are dealt: the tiers of one period, which repeats, and how many of a unit's were
 * dealt. Each unit begins anew. */
enum { OPTIMIZER, PARAMS, GRADIENTS, DEALS };
struct deals {
    uint8_t tiers[DEALS][SW_DEAL_PERIOD];
    uint64_t dealt[DEALS];
};

static void deal_out(struct deals *deals, const struct sw_placement_input *in) {
    const struct sw_tiers shares[DEALS] = {
        [OPTIMIZER] = in->optimizer, [PARAMS] = in->params, [GRADIENTS] = in->gradients};
    for (int d = 0; d < DEALS; d++) {
        struct sw_tiers_deal deal = {0};
        for (int i = 0; i < SW_DEAL_PERIOD; i++)
            deals->tiers[d][i] = (uint8_t)sw_tiers_next(shares[d], &deal);
    }
}

static enum sw_tier next_tier(struct deals *deals, int of) {
    return (enum sw_tier)deals->tiers[of][deals->dealt[of]++ % SW_DEAL_PERIOD];
}

static void add_chunk(struct sw_placement *p, const struct sw_placement_input *in,
                      struct sw_chunk chunk, struct deals *deals) {
    const uint64_t weight = chunk.count * sw_dtype_bytes(in->format.weight);
    const uint64_t grad = chunk.count * sw_dtype_bytes(in->format.grad);
    chunk.weight_tier = next_tier(deals, PARAMS);
    const uint64_t page = chunk.weight_tier == SW_TIER_NVME ? PAGE_BYTES : 1;
    const uint64_t at = take(&p->weight_bytes[chunk.weight_tier], sw_round_up(weight, page));
    if (chunk.weight_tier != SW_TIER_NVME) chunk.weight_offset = at;
    if (chunk.frozen) {
        p->chunks[p->chunk_count++] = chunk;
        return;
    }
    chunk.tier = next_tier(deals, OPTIMIZER);
    chunk.grad_tier = next_tier(deals, GRADIENTS);
    if (chunk.tier == SW_TIER_DEVICE) chunk.grad_tier = SW_TIER_DEVICE;
    assert(chunk.tier != SW_TIER_DEVICE || chunk.weight_tier == SW_TIER_DEVICE);
    chunk.record_bytes = sw_round_up(sw_adam_record_bytes(&in->format, chunk.count), PAGE_BYTES);
    const uint64_t record = take(&p->state_bytes[chunk.tier], chunk.record_bytes);
    if (chunk.tier != SW_TIER_NVME) chunk.record_offset = record;
    const uint64_t grad_page = chunk.grad_tier == SW_TIER_NVME ? PAGE_BYTES : 1;
    const uint64_t waits = take(&p->grad_bytes[chunk.grad_tier], sw_round_up(grad, grad_page));
    if (chunk.grad_tier != SW_TIER_NVME) chunk.grad_offset = waits;
    p->chunks[p->chunk_count++] = chunk;
}

/* A unit's trained elements. */
static void cut_piece(struct sw_placement *p, const struct sw_placement_input *in, uint32_t unit,
                      uint64_t index, struct deals *deals, uint64_t step) {
    for (uint64_t first = 0; first < trained(in, unit); first += step) {
        const uint64_t left = trained(in, unit) - first;
        const struct sw_chunk chunk = {.unit = unit,
                                       .first = first,
                                       .count = left < step ? left : step,
                                       .index = index + first};
        add_chunk(p, in, chunk, deals);
    }
}

/* And those behind them. */
static void cut_frozen_piece(struct sw_placement *p, const struct sw_placement_input *in,
                             uint32_t unit, struct deals *deals, uint64_t step) {
    const uint64_t end = in->unit_elements[unit];
    for (uint64_t first = trained(in, unit); first < end; first += step) {
        const struct sw_chunk chunk = {.unit = unit,
                                       .frozen = 1,
                                       .first = first,
                                       .count = end - first < step ? end - first : step,
                                       .span_first = p->chunk_count,
                                       .span_end = p->chunk_count + 1};
        add_chunk(p, in, chunk, deals);
    }
}

static void cut_units(struct sw_placement *p, const struct sw_placement_input *in, uint64_t step) {
    uint64_t index = 0;
    struct deals deals;
    deal_out(&deals, in);
    for (uint32_t u = 0; u < in->order.unit_count; u++) {
        memset(deals.dealt, 0, sizeof(deals.dealt));
        p->unit_first_chunk[u] = p->chunk_count;
        if (sw_tiers_is_all(in->params, SW_TIER_DEVICE))
            p->weight_bytes[SW_TIER_DEVICE] =
                sw_round_up(p->weight_bytes[SW_TIER_DEVICE], PAGE_BYTES);
        p->unit_weight_offset[u] = p->weight_bytes[SW_TIER_DEVICE];
        cut_piece(p, in, u, index, &deals, step);
        p->unit_trained_end[u] = p->chunk_count;
        mark_spans(p, p->unit_first_chunk[u], p->chunk_count);
        cut_frozen_piece(p, in, u, &deals, step);
        index += in->shards * sw_round_up(in->unit_elements[u], SW_ADAM_BLOCK);
        if (p->whole_weights)
            p->weight_bytes[SW_TIER_DEVICE] =
                p->unit_weight_offset[u] +
                in->shards * in->unit_elements[u] * sw_dtype_bytes(in->format.weight);
    }
    p->unit_first_chunk[in->order.unit_count] = p->chunk_count;
    p->backward_end = 0; /* a tied head is the embedding's */
    while (p->backward_end <= sw_order_norm(&p->order) && !sw_placement_trains(p, p->backward_end))
        p->backward_end++;
    for (int tier = 0; tier < SW_TIER_COUNT; tier++) {
        p->weight_bytes[tier] = sw_round_up(p->weight_bytes[tier], PAGE_BYTES);
        p->grad_bytes[tier] = sw_round_up(p->grad_bytes[tier], PAGE_BYTES);
    }
}

/* ---- kept inputs ---- */

static uint64_t kept_total(const struct sw_placement *p) {
    return (uint64_t)p->kept_groups * p->micro_count;
}

/* How many of the first `count` kept inputs are in a tier. */
static uint64_t kept_among(const struct sw_placement *p, uint64_t count, enum sw_tier tier) {
    uint64_t in_tier = count / SW_DEAL_PERIOD * p->kept_shares.percent[tier];
    for (uint64_t i = 0; i < count % SW_DEAL_PERIOD; i++) in_tier += p->kept_tier[i] == tier;
    return in_tier;
}

/* They are as many as groups times micro-batches: what one deal repeats is enough to know them. */
static void place_kept(struct sw_placement *p, const struct sw_placement_input *in) {
    struct sw_tiers_deal deal = {0};
    p->kept_shares = in->activations;
    p->kept_input_bytes = in->activation_bytes;
    for (int i = 0; i < SW_DEAL_PERIOD; i++) {
        const struct sw_tiers_deal before = deal;
        const enum sw_tier tier = sw_tiers_next(in->activations, &deal);
        p->kept_tier[i] = (uint8_t)tier;
        p->kept_before[i] = (uint8_t)before.dealt[tier];
    }
    for (int tier = 0; tier < SW_TIER_COUNT; tier++)
        p->kept_bytes[tier] =
            kept_among(p, kept_total(p), (enum sw_tier)tier) * in->activation_bytes;
    p->group_bytes = (uint64_t)(p->checkpoint_every - 1) * in->micro_count * in->activation_bytes;
}

struct sw_kept sw_placement_kept(const struct sw_placement *p, uint64_t index) {
    assert(index < kept_total(p));
    const uint64_t deals = index / SW_DEAL_PERIOD, at = index % SW_DEAL_PERIOD;
    const enum sw_tier tier = (enum sw_tier)p->kept_tier[at];
    const uint64_t before = deals * p->kept_shares.percent[tier] + p->kept_before[at];
    return (struct sw_kept){tier, tier == SW_TIER_NVME ? 0 : before * p->kept_input_bytes};
}

void sw_placement_group_layers(const struct sw_placement *p, uint32_t group, uint32_t *first,
                               uint32_t *count, uint32_t *backward) {
    const uint32_t layers = sw_order_layers(&p->order), every = p->checkpoint_every;
    const uint32_t end = p->backward_end > p->order.parts ? p->backward_end - p->order.parts : 0;
    *first = group * every;
    *count = layers - *first < every ? layers - *first : every;
    *backward = end < *first ? *first : end < *first + *count ? end : *first + *count;
}

uint32_t sw_placement_first_needed(const struct sw_placement *p) {
    uint32_t group = 0;
    for (; group < p->kept_groups; group++) {
        uint32_t first, count, backward;
        sw_placement_group_layers(p, group, &first, &count, &backward);
        const int again = group + 1 < p->kept_groups && count > 1;
        if (backward == first || (again && backward < first + count)) break;
    }
    return group;
}

uint64_t sw_placement_micro_tasks(const struct sw_placement *p) {
    const struct sw_unit_order *o = &p->order;
    const uint64_t parts = o->parts, layers = sw_order_layers(o);
    /* The batch; the embedding, the layers and the norm. */
    uint64_t each = 1 + parts + layers + 1;
    for (uint32_t g = 0; g < p->kept_groups; g++) {
        uint32_t first, count, backward;
        sw_placement_group_layers(p, g, &first, &count, &backward);
        if (backward == first + count) continue;
        each += first + count - backward;               /* backward */
        each += g + 1 < p->kept_groups ? count - 1 : 0; /* and again before it */
    }
    for (uint32_t u = 0; u < parts; u++) each += sw_placement_trains(p, u);
    each += sw_placement_head_has_dx(p); /* the norm's */
    each += p->head_whole ? 1 : parts;
    for (uint32_t part = 0; !p->head_whole && part < parts; part++) {
        const int trains = sw_placement_trains(p, sw_order_head(o, part));
        each += sw_placement_head_has_dx(p) || (!o->tied && trains);
        each += o->tied && trains;
    }
    const uint64_t all = kept_total(p);
    const uint64_t left = (uint64_t)sw_placement_first_needed(p) * p->micro_count;
    const uint64_t staged = kept_among(p, all, SW_TIER_NVME) - kept_among(p, left, SW_TIER_NVME);
    const uint64_t away =
        staged + kept_among(p, all, SW_TIER_HOST) - kept_among(p, left, SW_TIER_HOST);
    return p->micro_count * each + 2 * (away + staged);
}

/* ---- rings ---- */

static const enum sw_tier ring_tier[SW_RING_COUNT] = {
    [SW_RING_STATE] = SW_TIER_HOST,      [SW_RING_EMIT] = SW_TIER_HOST,
    [SW_RING_WINDOW] = SW_TIER_DEVICE,   [SW_RING_WEIGHT_STAGE] = SW_TIER_HOST,
    [SW_RING_ACC] = SW_TIER_DEVICE,      [SW_RING_ROUNDED] = SW_TIER_DEVICE,
    [SW_RING_GRAD_STAGE] = SW_TIER_HOST, [SW_RING_KEPT] = SW_TIER_DEVICE,
    [SW_RING_KEPT_STAGE] = SW_TIER_HOST,
};

static uint32_t at_most(uint64_t slots, uint64_t wanted) {
    return (uint32_t)(slots < wanted ? slots : wanted);
}

/* Slots are read ahead and written behind while the update waits for gradients; an eighth of the
 * chunks hides most of that wait, and leaves seven eighths of the state out of memory. */
static uint32_t state_slots(uint64_t chunks) {
    uint64_t slots = chunks / 8;
    if (slots < SW_STATE_SLOTS_MIN) slots = SW_STATE_SLOTS_MIN;
    if (slots > SW_STATE_SLOTS_MAX) slots = SW_STATE_SLOTS_MAX;
    return at_most(slots, chunks);
}

struct counts {
    uint64_t on_nvme, emitted, streamed, weights_on_nvme, staged, grads_staged, spans, spilled,
        kept_staged;
    uint64_t record_max, count_max, span_max;
};

static struct counts count(const struct sw_placement *p) {
    struct counts n = {0};
    uint32_t last_span = UINT32_MAX;
    for (uint32_t c = 0; c < p->chunk_count; c++) {
        const struct sw_chunk *chunk = &p->chunks[c];
        if (chunk->record_bytes > n.record_max) n.record_max = chunk->record_bytes;
        if (chunk->count > n.count_max) n.count_max = chunk->count;
        n.streamed += chunk->weight_tier != SW_TIER_DEVICE;
        n.weights_on_nvme += chunk->weight_tier == SW_TIER_NVME;
        if (chunk->frozen) {
            n.staged += chunk->weight_tier == SW_TIER_NVME;
            continue;
        }
        n.on_nvme += chunk->tier == SW_TIER_NVME;
        n.emitted += chunk->tier != SW_TIER_DEVICE && chunk->weight_tier != SW_TIER_HOST;
        /* Those of the embedding may come once a turn, from Adam itself; so may the last part of a
         * head of its own, which backward finds in the window. */
        n.staged += chunk->weight_tier == SW_TIER_NVME && chunk->unit >= p->order.parts &&
                    (p->order.tied || chunk->unit + 1 < p->order.unit_count);
        n.grads_staged += chunk->tier != SW_TIER_DEVICE && chunk->grad_tier != SW_TIER_HOST;
        if (chunk->grad_tier == SW_TIER_DEVICE) continue;
        const struct sw_chunk *last = &p->chunks[chunk->span_end - 1];
        const uint64_t span = last->first + last->count - p->chunks[chunk->span_first].first;
        if (chunk->span_first != last_span) n.spans++;
        last_span = chunk->span_first;
        if (span > n.span_max) n.span_max = span;
    }
    n.spilled = kept_total(p) - kept_among(p, kept_total(p), SW_TIER_DEVICE);
    n.kept_staged = kept_among(p, kept_total(p), SW_TIER_NVME);
    return n;
}

/* Whether a unit's weights are brought together for each use, and dropped after it. */
static int gathers_units(const struct sw_placement *p) {
    return p->shards > 1 && !p->whole_weights;
}

/* No ring is longer than its uses in a turn: so whoever had a slot before did so in this turn or
 * the one before. */
static void size_rings(struct sw_placement *p, const struct sw_placement_input *in) {
    const struct counts n = count(p);
    const uint64_t weight = sw_dtype_bytes(in->format.weight),
                   grad = sw_dtype_bytes(in->format.grad);
    const uint64_t largest = largest_unit(in, 0);
    const uint64_t largest_trained = largest_unit(in, 1);
    const struct {
        uint32_t slots;
        uint64_t bytes;
    } rings[SW_RING_COUNT] = {
        [SW_RING_STATE] = {state_slots(n.on_nvme), n.record_max},
        [SW_RING_EMIT] = {at_most(SW_EMIT_SLOTS, n.emitted), n.count_max * weight},
        [SW_RING_WINDOW] = {n.streamed || gathers_units(p) ? SW_WINDOW_SLOTS : 0, largest * weight},
        [SW_RING_WEIGHT_STAGE] = {at_most(SW_WEIGHT_STAGE_SLOTS,
                                          n.staged ? n.staged : n.weights_on_nvme > 0),
                                  n.count_max * weight},
        [SW_RING_ACC] = {SW_ACC_SLOTS, largest_trained * 4},
        [SW_RING_ROUNDED] = {at_most(SW_ROUNDED_SLOTS, n.spans), n.span_max * grad},
        [SW_RING_GRAD_STAGE] = {at_most(SW_GRAD_STAGE_SLOTS, n.grads_staged), n.count_max * grad},
        [SW_RING_KEPT] = {at_most(2 * in->micro_count + 1, n.spilled), in->activation_bytes},
        [SW_RING_KEPT_STAGE] = {at_most(SW_KEPT_STAGE_SLOTS, n.kept_staged), in->activation_bytes},
    };
    for (int r = 0; r < SW_RING_COUNT; r++) {
        p->ring_slots[r] = rings[r].slots;
        p->ring_slot_bytes[r] = sw_round_up(rings[r].bytes, PAGE_BYTES);
    }
}

static void size_head(struct sw_placement *p, const struct sw_placement_input *in, int whole) {
    const uint32_t parts = in->order.parts;
    p->head_whole = whole;
    for (uint32_t part = 0; part < parts; part++) {
        const uint64_t bytes = 4 * in->shards * trained(in, sw_order_head(&in->order, part));
        p->head_acc_offset[part + 1] =
            p->head_acc_offset[part] + (whole ? sw_round_up(bytes, PAGE_BYTES) : 0);
    }
}

static uint64_t needs(const struct sw_placement *p, const struct sw_placement_input *in,
                      enum sw_tier tier) {
    struct sw_byte_row rows[SW_BYTE_ROWS_MAX];
    return sw_placement_bytes(rows, sw_placement_table(p, in, rows), tier);
}

static void shorten(struct sw_placement *p, enum sw_ring ring, uint32_t slots) {
    if (p->ring_slots[ring] > slots) p->ring_slots[ring] = slots;
}

/* What is given up for a budget, in this order: what costs the least time first. */
static int give_up(struct sw_placement *p, const struct sw_placement_input *in, enum sw_tier tier,
                   int step) {
    enum { HEAD_WHOLE = SW_RING_COUNT, ALL };
    const struct {
        int what;
        uint32_t slots;
    } steps[2][7] = {
        [SW_TIER_DEVICE] = {{HEAD_WHOLE, 0},
                            {SW_RING_WINDOW, 2},
                            {SW_RING_ACC, 1},
                            {SW_RING_ROUNDED, 2},
                            {SW_RING_KEPT, in->micro_count + 1},
                            {SW_RING_WINDOW, 1}},
        [SW_TIER_HOST] = {{SW_RING_STATE, SW_STATE_SLOTS_MIN},
                          {SW_RING_GRAD_STAGE, 3},
                          {SW_RING_WEIGHT_STAGE, 3},
                          {SW_RING_EMIT, 2},
                          {SW_RING_KEPT_STAGE, 2},
                          {SW_RING_STATE, 2},
                          {ALL, 1}},
    };
    if (step == (tier == SW_TIER_DEVICE ? 6 : 7)) return 0;
    const int what = steps[tier][step].what;
    if (what == HEAD_WHOLE) size_head(p, in, 0);
    for (int r = 0; r < SW_RING_COUNT; r++)
        if (what == r || (what == ALL && ring_tier[r] == tier))
            shorten(p, (enum sw_ring)r, steps[tier][step].slots);
    return 1;
}

static void fit(struct sw_placement *p, const struct sw_placement_input *in) {
    const enum sw_tier tiers[] = {SW_TIER_DEVICE, SW_TIER_HOST};
    for (int i = 0; i < 2; i++) {
        const uint64_t budget = in->budget_bytes[tiers[i]];
        int step = 0;
        while (step < in->give_up[tiers[i]] || (budget && needs(p, in, tiers[i]) > budget)) {
            if (!give_up(p, in, tiers[i], step)) break;
            step++;
        }
        p->given_up[tiers[i]] = (uint8_t)step;
    }
}

/* ---- the whole ---- */

uint64_t sw_placement_chunks(const struct sw_placement_input *in) {
    const uint64_t step = chunk_elements(in);
    uint64_t total = 0;
    for (uint32_t u = 0; u < in->order.unit_count; u++)
        total += (trained(in, u) + step - 1) / step +
                 (in->unit_elements[u] - trained(in, u) + step - 1) / step;
    return total;
}

static int allocate(struct sw_placement *p, const struct sw_placement_input *in) {
    const uint32_t units = in->order.unit_count;
    const uint32_t layers = sw_order_layers(&in->order);
    const uint64_t total = sw_placement_chunks(in);
    assert(total > 0 && total < UINT32_MAX);
    p->kept_groups = (layers + p->checkpoint_every - 1) / p->checkpoint_every;
    p->chunks = calloc(total, sizeof(*p->chunks));
    p->unit_first_chunk = calloc(units + 1, sizeof(*p->unit_first_chunk));
    p->unit_trained_end = calloc(units, sizeof(*p->unit_trained_end));
    p->unit_weight_offset = calloc(units, sizeof(*p->unit_weight_offset));
    if (p->chunks && p->unit_first_chunk && p->unit_trained_end && p->unit_weight_offset) return 0;
    sw_placement_free(p);
    return -ENOMEM;
}

int sw_placement_build(struct sw_placement *p, const struct sw_placement_input *in) {
    assert(in->order.parts >= 1 && in->order.parts <= SW_PARTS_MAX &&
           in->chunk_bytes >= SW_CHUNK_BYTES_MIN);
    assert(in->checkpoint_every >= 1 && in->micro_count >= 1);
    assert(in->shards >= 1 && in->replicas >= 1 && in->local_ranks >= 1);
    const int on_device = sw_tiers_is_all(in->params, SW_TIER_DEVICE);
    const uint32_t layers = sw_order_layers(&in->order);
    *p = (struct sw_placement){.order = in->order,
                               .micro_count = in->micro_count,
                               .shards = in->shards,
                               .replicas = in->replicas,
                               .whole_weights = in->shards > 1 && in->whole_weights && on_device,
                               .layers_read_batch = in->layers_read_batch,
                               .checkpoint_every =
                                   in->checkpoint_every < layers ? in->checkpoint_every : layers};
    const int ret = allocate(p, in);
    if (ret < 0) return ret;
    cut_units(p, in, chunk_elements(in));
    place_kept(p, in);
    size_rings(p, in);
    size_head(p, in, on_device && !gathers_units(p));
    p->store_bytes = in->homes * (p->state_bytes[0] + p->state_bytes[1] + p->state_bytes[2]) +
                     p->weight_bytes[SW_TIER_NVME] + p->grad_bytes[SW_TIER_NVME] +
                     p->kept_bytes[SW_TIER_NVME];
    fit(p, in);
    return 0;
}

void sw_placement_free(struct sw_placement *p) {
    free(p->chunks);
    free(p->unit_first_chunk);
    free(p->unit_trained_end);
    free(p->unit_weight_offset);
    *p = (struct sw_placement){0};
}

/* ---- the table ---- */

static const char *const ring_names[SW_RING_COUNT] = {
    [SW_RING_STATE] = "optimizer state slots",
    [SW_RING_EMIT] = "updated weight slots",
    [SW_RING_WINDOW] = "weight window",
    [SW_RING_WEIGHT_STAGE] = "weight staging slots",
    [SW_RING_ACC] = "gradient accumulators (FP32)",
    [SW_RING_ROUNDED] = "rounded gradient slots",
    [SW_RING_GRAD_STAGE] = "gradient staging slots",
    [SW_RING_KEPT] = "kept input slots",
    [SW_RING_KEPT_STAGE] = "kept input staging slots",
};

static const char program_row[] = "program, libraries and turns"; /* of the process, once */

uint64_t sw_placement_program_bytes(const struct sw_placement *p,
                                    const struct sw_placement_input *in) {
    return in->program_bytes + sw_placement_micro_tasks(p) * in->task_bytes;
}

int sw_placement_table(const struct sw_placement *p, const struct sw_placement_input *in,
                       struct sw_byte_row rows[SW_BYTE_ROWS_MAX]) {
    const uint64_t inputs = in->micro_count * in->activation_bytes;
    const uint64_t records = p->state_bytes[0] + p->state_bytes[1] + p->state_bytes[2];
    const struct sw_byte_row all[] = {
        {"weights", SW_TIER_DEVICE, p->weight_bytes[SW_TIER_DEVICE]},
        {"kept inputs", SW_TIER_DEVICE, p->kept_bytes[SW_TIER_DEVICE]},
        {"inputs inside a group", SW_TIER_DEVICE, p->group_bytes},
        {"inputs of norm and head", SW_TIER_DEVICE, 2 * inputs},
        {"gradient between units", SW_TIER_DEVICE, inputs},
        {"gradient and statistics of the head", SW_TIER_DEVICE, in->micro_count * in->head_bytes},
        {"accumulators of the head (FP32)", SW_TIER_DEVICE, p->head_acc_offset[in->order.parts]},
        {"waiting gradients", SW_TIER_DEVICE, p->grad_bytes[SW_TIER_DEVICE]},
        {"workspace", SW_TIER_DEVICE, in->workspace_bytes[p->head_whole]},
        {"batch", SW_TIER_DEVICE, in->batch_bytes},
        {"optimizer state", SW_TIER_DEVICE, p->state_bytes[SW_TIER_DEVICE]},
        {"CUDA context and libraries", SW_TIER_DEVICE, in->taken_bytes},
        {"weights", SW_TIER_HOST, p->weight_bytes[SW_TIER_HOST]},
        {"optimizer state", SW_TIER_HOST, p->state_bytes[SW_TIER_HOST]},
        {"waiting gradients", SW_TIER_HOST, p->grad_bytes[SW_TIER_HOST]},
        {"kept inputs", SW_TIER_HOST, p->kept_bytes[SW_TIER_HOST]},
        {"batch", SW_TIER_HOST, in->batch_bytes},
        {program_row, SW_TIER_HOST, sw_placement_program_bytes(p, in)},
        {in->homes == 2 ? "optimizer state, two homes" : "optimizer state", SW_TIER_NVME,
         in->homes * records},
        {"weights", SW_TIER_NVME, p->weight_bytes[SW_TIER_NVME]},
        {"waiting gradients", SW_TIER_NVME, p->grad_bytes[SW_TIER_NVME]},
        {"kept inputs", SW_TIER_NVME, p->kept_bytes[SW_TIER_NVME]},
    };
    int n = 0;
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        if (all[i].bytes > 0) rows[n++] = all[i];
    for (int r = 0; r < SW_RING_COUNT; r++)
        if (p->ring_slots[r])
            rows[n++] = (struct sw_byte_row){ring_names[r], ring_tier[r],
                                             p->ring_slots[r] * p->ring_slot_bytes[r]};
    for (int i = 0; i < n; i++)
        if (rows[i].tier != SW_TIER_DEVICE && rows[i].what != program_row)
            rows[i].bytes *= in->local_ranks;
    assert(n <= SW_BYTE_ROWS_MAX);
    return n;
}

uint64_t sw_placement_bytes(const struct sw_byte_row *rows, int row_count, enum sw_tier tier) {
    uint64_t sum = 0;
    for (int i = 0; i < row_count; i++)
        if (rows[i].tier == tier) sum += rows[i].bytes;
    return sum;
}
