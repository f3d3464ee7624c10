/* offload/tiers.h - the tiers of memory, and how a state is divided among them.
 *
 * Text: "nvme", or shares in order, the last of which may leave its own out:
 * "device:10%,host:60%,nvme". */
#ifndef OFFLOAD_TIERS_H
#define OFFLOAD_TIERS_H
#include <stddef.h>
#include <stdint.h>

enum sw_tier { SW_TIER_DEVICE, SW_TIER_HOST, SW_TIER_NVME, SW_TIER_COUNT };

const char *sw_tier_name(enum sw_tier tier);

struct sw_tiers {
    uint8_t percent[SW_TIER_COUNT]; /* sum 100; all 0: not chosen yet */
};

static inline struct sw_tiers sw_tiers_all(enum sw_tier tier) {
    struct sw_tiers t = {{0}};
    t.percent[tier] = 100;
    return t;
}
static inline int sw_tiers_chosen(struct sw_tiers t) {
    return t.percent[0] + t.percent[1] + t.percent[2] == 100;
}
static inline int sw_tiers_has(struct sw_tiers t, enum sw_tier tier) {
    return t.percent[tier] > 0;
}
static inline int sw_tiers_is_all(struct sw_tiers t, enum sw_tier tier) {
    return t.percent[tier] == 100;
}

/* Deals elements out one by one, as evenly as whole elements allow: each goes to the tier that is
 * furthest behind its share, the upper one of equals. Starts zeroed. */
struct sw_tiers_deal {
    uint64_t dealt[SW_TIER_COUNT];
};
enum sw_tier sw_tiers_next(struct sw_tiers tiers, struct sw_tiers_deal *deal);

/* 0 or -EINVAL with the reason in `why`. */
int sw_tiers_parse(const char *text, struct sw_tiers *out, char *why, size_t why_size);
/* The text, as sw_tiers_parse() takes it. Returns out. */
const char *sw_tiers_print(struct sw_tiers tiers, char *out, size_t out_size);

#endif
