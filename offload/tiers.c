/* offload/tiers.c - shares of the tiers, as text and as a sequence. */
#include "offload/tiers.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *sw_tier_name(enum sw_tier tier) {
    static const char *const names[] = {"device", "host", "nvme"};
    return names[tier];
}

enum sw_tier sw_tiers_next(struct sw_tiers t, struct sw_tiers_deal *deal) {
    assert(sw_tiers_chosen(t));
    for (int tier = 0; tier < SW_TIER_COUNT; tier++) {
        if (!sw_tiers_is_all(t, (enum sw_tier)tier)) continue;
        deal->dealt[tier]++; /* what most deals are needs no arithmetic */
        return (enum sw_tier)tier;
    }
    uint64_t next = 1;
    for (int tier = 0; tier < SW_TIER_COUNT; tier++) next += deal->dealt[tier];
    int best = 0;
    int64_t behind[SW_TIER_COUNT];
    for (int tier = 0; tier < SW_TIER_COUNT; tier++) {
        behind[tier] = (int64_t)(next * t.percent[tier]) - (int64_t)(100 * deal->dealt[tier]);
        if (behind[tier] > behind[best]) best = tier;
    }
    deal->dealt[best]++;
    return (enum sw_tier)best;
}

static int tier_named(const char *name, size_t length) {
    for (int tier = 0; tier < SW_TIER_COUNT; tier++) {
        const char *known = sw_tier_name((enum sw_tier)tier);
        if (strlen(known) == length && !strncmp(known, name, length)) return tier;
    }
    return -1;
}

int sw_tiers_parse(const char *text, struct sw_tiers *out, char *why, size_t why_size) {
    struct sw_tiers t = {{0}};
    unsigned sum = 0;
    int given[SW_TIER_COUNT] = {0};
    for (const char *at = text;;) {
        const size_t part = strcspn(at, ","), name = strcspn(at, ":,");
        const int tier = tier_named(at, name);
        const int last = at[part] == 0;
        if (tier < 0 || given[tier]++) {
            snprintf(why, why_size,
                     tier < 0 ? "'%.*s' is not one of: device, host, nvme"
                              : "'%.*s' is there twice",
                     (int)name, at);
            return -EINVAL;
        }
        unsigned percent = 100 - sum;
        if (name < part) {
            char *end;
            const unsigned long value = strtoul(at + name + 1, &end, 10);
            if (at[name + 1] < '0' || at[name + 1] > '9' || end != at + part - 1 || *end != '%' ||
                value < 1 || value > percent) {
                snprintf(why, why_size,
                         percent ? "'%.*s' is not a share of 1%% to %u%%"
                                 : "no share is left for '%.*s': those before it add up to 100%%",
                         (int)part, at, percent);
                return -EINVAL;
            }
            percent = (unsigned)value;
        } else if (!last || percent == 0) {
            snprintf(why, why_size,
                     percent ? "'%.*s' needs a share, as in host:60%%,nvme"
                             : "no share is left for '%.*s': those before it add up to 100%%",
                     (int)part, at);
            return -EINVAL;
        }
        t.percent[tier] = (uint8_t)percent;
        sum += percent;
        if (last) break;
        at += part + 1;
    }
    if (sum != 100) {
        snprintf(why, why_size, "the shares add up to %u%%, not to 100%%", sum);
        return -EINVAL;
    }
    *out = t;
    return 0;
}

const char *sw_tiers_print(struct sw_tiers t, char *out, size_t out_size) {
    size_t used = 0;
    if (out_size) out[0] = 0;
    for (int tier = 0; tier < SW_TIER_COUNT && used < out_size; tier++) {
        if (!t.percent[tier]) continue;
        const char *name = sw_tier_name((enum sw_tier)tier), *comma = used ? "," : "";
        const int n = t.percent[tier] == 100 ? snprintf(out, out_size, "%s", name)
                                             : snprintf(out + used, out_size - used, "%s%s:%u%%",
                                                        comma, name, t.percent[tier]);
        used += (size_t)n;
    }
    return out;
}
