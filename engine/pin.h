/* engine/pin.h - host memory that devices copy from and to, registered with them in pieces.
 *
 * A driver takes long to register a large piece, and may refuse one; pieces of several nodes are
 * registered side by side. What was registered is given back in the same pieces. Errors: 0 or
 * -errno, reported by the device. One thread. */
#ifndef ENGINE_PIN_H
#define ENGINE_PIN_H
#include <stdint.h>
#include "kernels/device.h"

#define SW_PIN_BYTES_MAX (UINT64_C(16) << 30)

/* Memory that lies next to a device, and which node that is: any numbers, equal for one node. */
struct sw_pin_part {
    const struct sw_device_handle *device;
    char *at;
    uint64_t bytes;
    int node;
};

struct sw_pins {
    struct sw_pin *pins;
    uint32_t count; /* registered or not */
};

/* Parts do not overlap; empty ones are fine. Each becomes pieces of at most SW_PIN_BYTES_MAX, in
 * order; one thread for each node registers its pieces. After an error what is registered stays so
 * until sw_pins_close(). The devices must outlive it. */
int sw_pins_open(struct sw_pins *out, const struct sw_pin_part *parts, uint32_t count);
void sw_pins_close(struct sw_pins *pins); /* all zero is fine */

#endif
