/* offload/unit_order.h - the order of a model's units: `parts` of the embedding, the layers, the
 * norm and, when the head has a matrix of its own, `parts` of the head. */
#ifndef OFFLOAD_UNIT_ORDER_H
#define OFFLOAD_UNIT_ORDER_H
#include <stdint.h>

enum { SW_PARTS_MAX = 64 };

struct sw_unit_order {
    uint32_t unit_count, parts; /* 1..SW_PARTS_MAX */
    int tied;
};

static inline uint32_t sw_order_norm(const struct sw_unit_order *o) {
    return o->unit_count - 1 - (o->tied ? 0 : o->parts);
}
static inline uint32_t sw_order_layers(const struct sw_unit_order *o) {
    return sw_order_norm(o) - o->parts;
}
/* The unit that holds a part of the head's matrix. */
static inline uint32_t sw_order_head(const struct sw_unit_order *o, uint32_t part) {
    return o->tied ? part : sw_order_norm(o) + 1 + part;
}

#endif
