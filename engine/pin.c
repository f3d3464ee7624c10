/* engine/pin.c - see the header. */
#include "engine/pin.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

struct sw_pin {
    struct sw_pin_part piece;
    int pinned;
};

struct worker {
    struct sw_pins *pins;
    int node, ret;
    pthread_t thread;
    int started;
};

static uint64_t pieces_of(const struct sw_pin_part *part) {
    return (part->bytes + SW_PIN_BYTES_MAX - 1) / SW_PIN_BYTES_MAX;
}

static void *pin_node(void *arg) {
    struct worker *w = arg;
    for (uint32_t i = 0; i < w->pins->count && w->ret == 0; i++) {
        struct sw_pin *p = &w->pins->pins[i];
        if (p->piece.node != w->node) continue;
        const struct sw_device_handle *d = p->piece.device;
        w->ret = d->ops->pin(d->device, p->piece.at, p->piece.bytes);
        p->pinned = w->ret == 0;
    }
    return NULL;
}

/* The first piece of a node. */
static int begins_node(const struct sw_pins *pins, uint32_t i) {
    for (uint32_t j = 0; j < i; j++)
        if (pins->pins[j].piece.node == pins->pins[i].piece.node) return 0;
    return 1;
}

/* The last node's pieces in the calling thread; what cannot have a thread of its own as well. */
static int pin_all(struct sw_pins *pins) {
    struct worker *workers = calloc(pins->count, sizeof(*workers));
    uint32_t nodes = 0;
    int ret = 0;
    if (!workers) return -ENOMEM;
    for (uint32_t i = 0; i < pins->count; i++)
        if (begins_node(pins, i))
            workers[nodes++] = (struct worker){.pins = pins, .node = pins->pins[i].piece.node};
    for (uint32_t n = 0; n < nodes; n++) {
        struct worker *w = &workers[n];
        w->started = n + 1 < nodes && pthread_create(&w->thread, NULL, pin_node, w) == 0;
        if (!w->started) pin_node(w);
    }
    for (uint32_t n = 0; n < nodes; n++) {
        if (workers[n].started) pthread_join(workers[n].thread, NULL);
        if (ret == 0) ret = workers[n].ret;
    }
    free(workers);
    return ret;
}

int sw_pins_open(struct sw_pins *out, const struct sw_pin_part *parts, uint32_t count) {
    assert(out && (parts || count == 0));
    uint64_t total = 0;
    for (uint32_t i = 0; i < count; i++) total += pieces_of(&parts[i]);
    *out = (struct sw_pins){0};
    if (total == 0) return 0;
    out->pins = calloc(total, sizeof(*out->pins));
    if (!out->pins) return -ENOMEM;
    for (uint32_t i = 0; i < count; i++)
        for (uint64_t at = 0; at < parts[i].bytes; at += SW_PIN_BYTES_MAX) {
            struct sw_pin_part *piece = &out->pins[out->count++].piece;
            const uint64_t left = parts[i].bytes - at;
            *piece = parts[i];
            piece->at += at;
            piece->bytes = left < SW_PIN_BYTES_MAX ? left : SW_PIN_BYTES_MAX;
        }
    return pin_all(out);
}

void sw_pins_close(struct sw_pins *pins) {
    for (uint32_t i = 0; i < pins->count; i++) {
        const struct sw_pin *p = &pins->pins[i];
        if (p->pinned) p->piece.device->ops->unpin(p->piece.device->device, p->piece.at);
    }
    free(pins->pins);
    *pins = (struct sw_pins){0};
}
