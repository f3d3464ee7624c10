/* engine/trace_machine.c - peaks from the machine profile and from the rates that lanes are held
 * to. */
#include "engine/trace_machine.h"

#include <string.h>

#include "offload/profile.h"

enum { IDENTITY_BYTES = 256 };

/* What all drives together read and write; 0 and 0 where one of them was never measured. */
static void drives_peak(const char *const *folders, uint32_t count, double rates[2]) {
    char drives[SW_NVME_FOLDERS_MAX][IDENTITY_BYTES];
    double sums[2] = {0, 0};
    rates[0] = rates[1] = 0;
    for (uint32_t i = 0; i < count; i++) {
        struct sw_drive_profile profile;
        if (sw_profile_identity(folders[i], drives[i], IDENTITY_BYTES) < 0) return;
        uint32_t first = 0;
        while (strcmp(drives[first], drives[i]) != 0) first++;
        if (first < i) continue; /* two folders on one drive */
        if (sw_profile_drive(folders[i], &profile) != 1) return;
        sums[0] += profile.read_bytes_per_s;
        sums[1] += profile.write_bytes_per_s;
    }
    memcpy(rates, sums, sizeof(sums));
}

static void add_peak(struct sw_trace *trace, enum sw_lane lane, double measured, uint64_t held) {
    uint64_t peak = (uint64_t)measured;
    if (held && (!peak || held < peak)) peak = held;
    if (peak) sw_trace_peak(trace, lane, peak);
}

void sw_trace_machine(struct sw_trace *trace, const struct sw_train_options *o) {
    if (!trace) return;
    double drives[2] = {0, 0};
    if (sw_tiers_has(o->optimizer, SW_TIER_NVME) || sw_tiers_has(o->params, SW_TIER_NVME) ||
        sw_tiers_has(o->gradients, SW_TIER_NVME) || sw_tiers_has(o->activations, SW_TIER_NVME))
        drives_peak(o->nvme_count ? o->nvme : &o->out, o->nvme_count ? o->nvme_count : 1, drives);
    add_peak(trace, SW_LANE_H2D, 0, o->sim.copy_bytes[0]);
    add_peak(trace, SW_LANE_D2H, 0, o->sim.copy_bytes[1]);
    add_peak(trace, SW_LANE_NVME_READ, drives[0], o->sim.nvme_bytes[0]);
    add_peak(trace, SW_LANE_NVME_WRITE, drives[1], o->sim.nvme_bytes[1]);
}
