/* engine/collective_host.c - ranks that are threads of one process, over the memory they share.
 *
 * A call is a round with one part: each rank copies or sums for itself what all have brought. */
#include "engine/collective.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "engine/rendezvous.h"

/* Sums that wait on the stack until they are whole. */
enum { BLOCK = 2048 };

struct group;

struct sw_comm {
    struct group *group;
    uint32_t rank;
    uint64_t met_ns;
};

struct group {
    struct sw_rendezvous meeting;
    uint32_t open_count;
    struct sw_comm ranks[];
};

static int enter(struct sw_comm *c, const struct sw_call *call) {
    const int ret = sw_rendezvous_enter(&c->group->meeting, c->rank, call);
    c->met_ns = sw_now_ns();
    return ret;
}

static void gather(const struct sw_comm *c, void *out, uint64_t bytes) {
    const struct sw_rendezvous *v = &c->group->meeting;
    if (bytes == 0) return;
    for (uint32_t r = 0; r < v->size; r++) {
        char *place = (char *)out + r * bytes;
        if (place != v->calls[r].in) memcpy(place, v->calls[r].in, bytes);
    }
}

/* This rank's segment. `out` may be the same memory, hence the sums beside it. */
static void reduce(const struct sw_comm *c, float *out, uint64_t count) {
    float sum[BLOCK];
    for (uint64_t at = 0; at < count; at += BLOCK) {
        const uint64_t n = count - at < BLOCK ? count - at : BLOCK;
        sw_rendezvous_add_from_nothing(&c->group->meeting, sum, c->rank * count + at, n);
        memcpy(out + at, sum, n * sizeof(*sum));
    }
}

static int gather_as(struct sw_comm *c, const struct sw_call *call) {
    const int ret = enter(c, call);
    if (ret < 0) return ret;
    gather(c, call->out, call->amount);
    return sw_rendezvous_leave(&c->group->meeting, 0);
}

static int host_all_gather(struct sw_comm *c, struct sw_stream *s, void *out, const void *in,
                           uint64_t bytes) {
    (void)s;
    return gather_as(c, &(struct sw_call){SW_CALL_GATHER, .amount = bytes, .in = in, .out = out});
}

static int host_reduce_scatter(struct sw_comm *c, struct sw_stream *s, float *out, const float *in,
                               enum sw_dtype carried, uint64_t count) {
    (void)s;
    const struct sw_call call = {SW_CALL_SCATTER, carried, count, in, out};
    const int ret = enter(c, &call);
    if (ret < 0) return ret;
    reduce(c, out, count);
    return sw_rendezvous_leave(&c->group->meeting, 0);
}

static int host_exchange(struct sw_comm *c, void *out, const void *in, uint64_t bytes) {
    assert(bytes <= SW_COMM_EXCHANGE_MAX);
    return gather_as(c, &(struct sw_call){SW_CALL_EXCHANGE, .amount = bytes, .in = in, .out = out});
}

static uint64_t host_met_ns(const struct sw_comm *c) {
    return c->met_ns;
}

static void host_abort(struct sw_comm *c, int error) {
    sw_rendezvous_abort(&c->group->meeting, error);
}

static void host_close(struct sw_comm *c) {
    if (!c) return;
    struct group *g = c->group;
    pthread_mutex_lock(&g->meeting.lock);
    const uint32_t left = --g->open_count;
    pthread_mutex_unlock(&g->meeting.lock);
    if (left) return;
    sw_rendezvous_exit(&g->meeting);
    free(g);
}

static const struct sw_comm_ops host_ops = {.name = "host",
                                            .all_gather = host_all_gather,
                                            .reduce_scatter = host_reduce_scatter,
                                            .exchange = host_exchange,
                                            .met_ns = host_met_ns,
                                            .abort = host_abort,
                                            .close = host_close};

int sw_comm_open_host(struct sw_comm_handle *out, uint32_t size, double timeout_s) {
    assert(out && size > 0 && size <= SW_RANKS_MAX);
    assert(timeout_s > 0);
    struct group *g = calloc(1, sizeof(*g) + size * sizeof(g->ranks[0]));
    if (!g) return -ENOMEM;
    sw_rendezvous_init(&g->meeting, size, 0, timeout_s);
    g->open_count = size;
    for (uint32_t r = 0; r < size; r++) {
        g->ranks[r] = (struct sw_comm){g, r, 0};
        out[r] = (struct sw_comm_handle){&g->ranks[r], &host_ops, r, size};
    }
    return 0;
}
