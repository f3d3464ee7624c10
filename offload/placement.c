/* offload/placement.c - cuts units into chunks and adds up the pools. */
#include "offload/placement.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include "base/size.h"

enum { PAGE_BYTES = 4096 };

const char *sw_tier_name(enum sw_tier tier) {
    static const char *const names[] = {"device", "host", "nvme"};
    return names[tier];
}

/* Whole blocks whose record fits. */
static uint64_t chunk_elements(const struct sw_placement_input *in) {
    return in->chunk_bytes / sw_adam_record_bytes(&in->format, SW_ADAM_BLOCK) * SW_ADAM_BLOCK;
}

static uint64_t largest_unit(const struct sw_placement_input *in, int skip_tied) {
    uint64_t largest = 0;
    for (uint32_t u = skip_tied && in->tied ? 1 : 0; u < in->unit_count; u++)
        if (in->unit_elements[u] > largest) largest = in->unit_elements[u];
    return largest;
}

/* Slots are read ahead and written behind while the update waits for gradients; an eighth of the
 * chunks hides most of that wait, and leaves seven eighths of the state out of memory. */
static uint32_t ring_slots(uint32_t chunks) {
    uint32_t slots = chunks / 8;
    if (slots < SW_CHUNK_SLOTS_MIN) slots = SW_CHUNK_SLOTS_MIN;
    if (slots > SW_CHUNK_SLOTS_MAX) slots = SW_CHUNK_SLOTS_MAX;
    return slots < chunks ? slots : chunks;
}

static void size_pools(struct sw_placement *p, const struct sw_placement_input *in) {
    uint64_t record_max = 0, count_max = 0, unit_sum = 0;
    uint32_t nvme_chunks = 0, emitted = 0;
    for (uint32_t c = 0; c < p->chunk_count; c++) {
        struct sw_chunk *chunk = &p->chunks[c];
        if (chunk->record_bytes > record_max) record_max = chunk->record_bytes;
        if (chunk->count > count_max) count_max = chunk->count;
        nvme_chunks += chunk->tier == SW_TIER_NVME;
        emitted += chunk->tier != SW_TIER_DEVICE;
        if (chunk->tier != SW_TIER_NVME) chunk->record_offset = p->state_bytes[chunk->tier];
        p->state_bytes[chunk->tier] += chunk->record_bytes;
    }
    for (uint32_t u = 0; u < in->unit_count; u++)
        unit_sum += sw_round_up(in->unit_elements[u] * sw_dtype_bytes(in->format.grad), PAGE_BYTES);
    for (int tier = 0; tier < SW_TIER_COUNT; tier++)
        p->store_bytes += in->homes * p->state_bytes[tier];
    p->chunk_slots = ring_slots(nvme_chunks);
    p->emit_slots = emitted < SW_EMIT_SLOTS_MAX ? emitted : SW_EMIT_SLOTS_MAX;
    p->chunk_slot_bytes = record_max;
    p->emit_slot_bytes = sw_round_up(count_max * sw_dtype_bytes(in->format.weight), PAGE_BYTES);
    p->acc_slot_bytes = sw_round_up(largest_unit(in, 1) * 4, PAGE_BYTES);
    p->tied_acc_bytes = in->tied ? sw_round_up(in->unit_elements[0] * 4, PAGE_BYTES) : 0;
    const int resident = in->optimizer == SW_TIER_DEVICE;
    p->grad_resident_bytes = resident ? unit_sum : 0;
    p->grad_slot_bytes =
        resident ? 0
                 : sw_round_up(largest_unit(in, 0) * sw_dtype_bytes(in->format.grad), PAGE_BYTES);
}

int sw_placement_build(struct sw_placement *p, const struct sw_placement_input *in) {
    assert(in->unit_count >= 2 && in->chunk_bytes >= SW_CHUNK_BYTES_MIN);
    *p = (struct sw_placement){.unit_count = in->unit_count};
    const uint64_t step = chunk_elements(in);
    uint64_t total = 0;
    for (uint32_t u = 0; u < in->unit_count; u++) total += (in->unit_elements[u] + step - 1) / step;
    assert(total > 0 && total < UINT32_MAX);
    p->chunks = calloc(total, sizeof(*p->chunks));
    p->unit_first_chunk = calloc(in->unit_count + 1, sizeof(*p->unit_first_chunk));
    if (!p->chunks || !p->unit_first_chunk) {
        sw_placement_free(p);
        return -ENOMEM;
    }
    uint64_t index = 0;
    for (uint32_t u = 0; u < in->unit_count; u++) {
        p->unit_first_chunk[u] = p->chunk_count;
        for (uint64_t first = 0; first < in->unit_elements[u]; first += step) {
            const uint64_t left = in->unit_elements[u] - first;
            const uint64_t count = left < step ? left : step;
            p->chunks[p->chunk_count++] = (struct sw_chunk){
                .unit = u,
                .tier = in->optimizer,
                .first = first,
                .count = count,
                .index = index + first,
                .record_bytes = sw_round_up(sw_adam_record_bytes(&in->format, count), PAGE_BYTES),
            };
        }
        index += sw_round_up(in->unit_elements[u], SW_ADAM_BLOCK);
    }
    p->unit_first_chunk[in->unit_count] = p->chunk_count;
    size_pools(p, in);
    return 0;
}

void sw_placement_free(struct sw_placement *p) {
    free(p->chunks);
    free(p->unit_first_chunk);
    *p = (struct sw_placement){0};
}

int sw_placement_table(const struct sw_placement *p, const struct sw_placement_input *in,
                       struct sw_byte_row rows[SW_BYTE_ROWS_MAX]) {
    uint64_t weights = 0, host_grads = 0;
    for (uint32_t u = 0; u < in->unit_count; u++) {
        weights +=
            sw_round_up(in->unit_elements[u] * sw_dtype_bytes(in->format.weight), PAGE_BYTES);
        host_grads +=
            sw_round_up(in->unit_elements[u] * sw_dtype_bytes(in->format.grad), PAGE_BYTES);
    }
    if (in->optimizer == SW_TIER_DEVICE) host_grads = 0;
    const struct sw_byte_row all[] = {
        {"weights", SW_TIER_DEVICE, weights},
        {"kept inputs", SW_TIER_DEVICE,
         (in->unit_count - 1) * in->micro_count * in->activation_bytes},
        {"gradient between units", SW_TIER_DEVICE, in->micro_count * in->activation_bytes},
        {"gradient accumulators (FP32)", SW_TIER_DEVICE,
         SW_ACC_SLOTS * p->acc_slot_bytes + p->tied_acc_bytes},
        {"rounded gradients", SW_TIER_DEVICE,
         SW_GRAD_SLOTS * p->grad_slot_bytes + p->grad_resident_bytes},
        {"workspace", SW_TIER_DEVICE, in->workspace_bytes},
        {"batch", SW_TIER_DEVICE, in->batch_bytes},
        {"optimizer state", SW_TIER_DEVICE, p->state_bytes[SW_TIER_DEVICE]},
        {"optimizer state", SW_TIER_HOST, p->state_bytes[SW_TIER_HOST]},
        {"waiting gradients", SW_TIER_HOST, host_grads},
        {"chunk slots", SW_TIER_HOST, p->chunk_slots * p->chunk_slot_bytes},
        {"emit slots", SW_TIER_HOST, p->emit_slots * p->emit_slot_bytes},
        {"batch", SW_TIER_HOST, in->batch_bytes},
        {in->homes == 2 ? "optimizer state, two homes" : "optimizer state", SW_TIER_NVME,
         p->store_bytes},
    };
    int count = 0;
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        if (all[i].bytes > 0) rows[count++] = all[i];
    return count;
}

uint64_t sw_placement_bytes(const struct sw_byte_row *rows, int row_count, enum sw_tier tier) {
    uint64_t sum = 0;
    for (int i = 0; i < row_count; i++)
        if (rows[i].tier == tier) sum += rows[i].bytes;
    return sum;
}
