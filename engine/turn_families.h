/* engine/turn_families.h - what tasks read and write, as the checker of turns names it. Included by
 * it alone; the builder has its own list (turn_track.h), so that a mistake in one shows. */
#ifndef ENGINE_TURN_FAMILIES_H
#define ENGINE_TURN_FAMILIES_H
#include <stdint.h>
#include "offload/placement.h"

enum family {
    STAGING,
    BATCH,
    WEIGHT,
    FULL,
    KEPT,
    GROUP,
    NORM_INPUT,
    HEAD_INPUT,
    STATS,
    HEAD_GRAD,
    BETWEEN,
    HEAD_ACC,
    GRAD,
    NORMS,
    HOST_NORMS,
    LOSS,
    HOST_LOSS,
    VERDICT,
    NORMED,
    SCALARS,
    STATE,
    COMMITTED,
    RING, /* the slots of the rings follow */
    FAMILY_COUNT = RING + SW_RING_COUNT
};

static const char *const family_names[FAMILY_COUNT] = {"staging",
                                                       "batch",
                                                       "weights of chunk",
                                                       "weights of other ranks",
                                                       "kept input",
                                                       "input inside a group",
                                                       "input of the norm",
                                                       "input of the head",
                                                       "statistics of the head",
                                                       "gradient of the head's input",
                                                       "gradient between units",
                                                       "accumulator of the head",
                                                       "waiting gradient of chunk",
                                                       "block norms",
                                                       "host norms",
                                                       "loss sums",
                                                       "host loss sums",
                                                       "verdict",
                                                       "seen norm",
                                                       "scalars",
                                                       "record",
                                                       "commit",
                                                       "state slot",
                                                       "emit slot",
                                                       "window slot",
                                                       "weight staging slot",
                                                       "accumulator",
                                                       "rounded gradient slot",
                                                       "gradient staging slot",
                                                       "kept input slot",
                                                       "kept input staging slot"};

/* Which side of the border a family lies on; what a placement may put on either is neither. */
enum side { EITHER, DEVICE, HOST };
static const uint8_t family_side[FAMILY_COUNT] = {
    HOST,   DEVICE, EITHER, DEVICE, EITHER, DEVICE, DEVICE, DEVICE, DEVICE, DEVICE, DEVICE,
    DEVICE, EITHER, DEVICE, HOST,   DEVICE, HOST,   HOST,   HOST,   DEVICE, EITHER, HOST,
    HOST,   HOST,   DEVICE, HOST,   DEVICE, DEVICE, HOST,   DEVICE, HOST,
};

#endif
