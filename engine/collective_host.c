/* engine/collective_host.c - ranks that are threads of one process, over the memory they share.
 *
 * A call is a round. Each rank posts what it calls and waits until all have; the last one compares.
 * Then each does its own part, reading the others' memory, and waits until all have done so, since
 * whoever returns may change its buffers. The first wait ends on the timeout and on abort. The
 * second one does not: only copies and sums lie before it, so it is short, and to leave it early
 * would take memory away from those who still read it. Posts are read without the lock: none
 * changes before the round is over. */
#include "engine/collective.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"

/* Elements that are summed over all ranks before the next ones: the sums stay in the L1 cache. */
enum { BLOCK = 2048 };

#define TIMEOUT_S_MAX 1e9

enum call_kind { ALL_GATHER, REDUCE_SCATTER, EXCHANGE };

struct post {
    enum call_kind kind;
    enum sw_dtype carried; /* of a reduce_scatter */
    uint64_t amount;       /* its values; bytes of the others */
    const void *in;
};

struct group;

struct sw_comm {
    struct group *group;
    uint32_t rank;
    struct post post;
    uint64_t met_ns;
};

struct group {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint32_t size, open_count;
    double timeout_s;
    int error;       /* the first one; for ever */
    uint64_t here;   /* a bit for each rank that waits for the round to begin */
    uint64_t rounds; /* that have begun */
    uint32_t busy;   /* ranks that have not done their part of the round */
    struct sw_comm ranks[];
};

static_assert(SW_RANKS_MAX <= 64, "ranks are bits of `here`");

static void describe(const struct post *post, char *text, size_t size) {
    const unsigned long long amount = post->amount;
    if (post->kind == REDUCE_SCATTER)
        snprintf(text, size, "reduce_scatter of %llu values carried as %s", amount,
                 sw_dtype_name(post->carried));
    else
        snprintf(text, size, "%s of %llu bytes",
                 post->kind == ALL_GATHER ? "all_gather" : "exchange", amount);
}

/* Ends the group. Reports come before this, under the same lock, so that a rank that returns the
 * error finds it reported. */
static void end(struct group *g, int error) {
    assert(error < 0 && !g->error);
    g->error = error;
    pthread_cond_broadcast(&g->changed);
}

/* All have posted: begins the round if they call the same. */
static void begin_round(struct group *g) {
    const struct post *first = &g->ranks[0].post;
    for (uint32_t r = 1; r < g->size; r++) {
        const struct post *post = &g->ranks[r].post;
        if (post->kind == first->kind && post->amount == first->amount &&
            post->carried == first->carried)
            continue;
        char text[2][80];
        describe(first, text[0], sizeof(text[0]));
        describe(post, text[1], sizeof(text[1]));
        sw_error("collective: rank %u calls %s while rank 0 calls %s; all ranks must make the same "
                 "calls",
                 r, text[1], text[0]);
        end(g, -EINVAL);
        return;
    }
    g->here = 0;
    g->busy = g->size;
    g->rounds++;
    pthread_cond_broadcast(&g->changed);
}

static void late(struct group *g, const struct sw_comm *c) {
    char names[SW_RANKS_MAX * 4 + 1] = "", text[80];
    size_t length = 0;
    uint32_t missing = 0;
    for (uint32_t r = 0; r < g->size; r++) {
        if (g->here >> r & 1) continue;
        length += (size_t)snprintf(names + length, sizeof(names) - length, "%s%u",
                                   missing++ ? ", " : "", r);
    }
    describe(&c->post, text, sizeof(text));
    sw_error("collective: rank%s %s did not come to %s within %g s of rank %u; stopped, or slower "
             "than the timeout allows",
             missing == 1 ? "" : "s", names, text, g->timeout_s, c->rank);
    end(g, -ETIMEDOUT);
}

/* Waits until all ranks are in this call. */
static int enter(struct sw_comm *c, struct post post) {
    struct group *g = c->group;
    const uint64_t until_ns = sw_now_ns() + (uint64_t)(g->timeout_s * 1e9);
    const struct timespec until = {(time_t)(until_ns / 1000000000u),
                                   (long)(until_ns % 1000000000u)};
    pthread_mutex_lock(&g->lock);
    const uint64_t before = g->rounds;
    if (!g->error) {
        assert(!(g->here >> c->rank & 1)); /* one thread at a time */
        c->post = post;
        g->here |= (uint64_t)1 << c->rank;
        if (g->here == UINT64_MAX >> (64 - g->size)) begin_round(g);
    }
    while (g->rounds == before && !g->error) {
        const int ret = pthread_cond_timedwait(&g->changed, &g->lock, &until);
        if (ret == ETIMEDOUT && g->rounds == before && !g->error) late(g, c);
    }
    /* A round that has begun ends alike for all, whatever happens meanwhile. */
    const int ret = g->rounds != before ? 0 : g->error;
    pthread_mutex_unlock(&g->lock);
    c->met_ns = sw_now_ns();
    return ret;
}

/* Waits until all ranks have done their part. */
static void leave(struct sw_comm *c) {
    struct group *g = c->group;
    pthread_mutex_lock(&g->lock);
    if (--g->busy == 0) pthread_cond_broadcast(&g->changed);
    /* No next round can make it busy again before this rank has woken: it would have to take part.
     */
    while (g->busy > 0) pthread_cond_wait(&g->changed, &g->lock);
    pthread_mutex_unlock(&g->lock);
}

static void gather(const struct sw_comm *c, void *out, uint64_t bytes) {
    const struct group *g = c->group;
    if (bytes == 0) return;
    for (uint32_t r = 0; r < g->size; r++) {
        char *place = (char *)out + r * bytes;
        if (place != g->ranks[r].post.in) memcpy(place, g->ranks[r].post.in, bytes);
    }
}

static inline __attribute__((always_inline)) void
add_values(float *restrict sum, const float *restrict in, enum sw_dtype carried, uint64_t n) {
    for (uint64_t i = 0; i < n; i++)
        sum[i] += carried == SW_BF16 ? sw_f32_from_bf16(sw_bf16_from_f32(in[i])) : in[i];
}

/* Constant lengths and types let the compiler vectorise. */
static void add(float *restrict sum, const float *restrict in, enum sw_dtype carried, uint64_t n) {
    if (n == BLOCK && carried == SW_FP32)
        add_values(sum, in, SW_FP32, BLOCK);
    else if (n == BLOCK)
        add_values(sum, in, SW_BF16, BLOCK);
    else
        add_values(sum, in, carried, n);
}

/* This rank's segment. `out` may be the same memory, hence the sums beside it. */
static void reduce(const struct sw_comm *c, float *out, enum sw_dtype carried, uint64_t count) {
    const struct group *g = c->group;
    float sum[BLOCK];
    for (uint64_t at = 0; at < count; at += BLOCK) {
        const uint64_t n = count - at < BLOCK ? count - at : BLOCK;
        /* -0 is what changes nothing that is added to it: +0 would lose the sign of -0. */
        for (uint64_t i = 0; i < BLOCK; i++) sum[i] = -0.0f;
        for (uint32_t r = 0; r < g->size; r++) {
            const float *in = g->ranks[r].post.in;
            add(sum, in + c->rank * count + at, carried, n);
        }
        memcpy(out + at, sum, n * sizeof(*sum));
    }
}

static int host_all_gather(struct sw_comm *c, struct sw_stream *s, void *out, const void *in,
                           uint64_t bytes) {
    (void)s;
    const int ret = enter(c, (struct post){.kind = ALL_GATHER, .amount = bytes, .in = in});
    if (ret < 0) return ret;
    gather(c, out, bytes);
    leave(c);
    return 0;
}

static int host_reduce_scatter(struct sw_comm *c, struct sw_stream *s, float *out, const float *in,
                               enum sw_dtype carried, uint64_t count) {
    (void)s;
    const int ret = enter(c, (struct post){REDUCE_SCATTER, carried, count, in});
    if (ret < 0) return ret;
    reduce(c, out, carried, count);
    leave(c);
    return 0;
}

static int host_exchange(struct sw_comm *c, void *out, const void *in, uint64_t bytes) {
    assert(bytes <= SW_COMM_EXCHANGE_MAX);
    const int ret = enter(c, (struct post){.kind = EXCHANGE, .amount = bytes, .in = in});
    if (ret < 0) return ret;
    gather(c, out, bytes);
    leave(c);
    return 0;
}

static uint64_t host_met_ns(const struct sw_comm *c) {
    return c->met_ns;
}

static void host_abort(struct sw_comm *c, int error) {
    struct group *g = c->group;
    pthread_mutex_lock(&g->lock);
    if (!g->error) end(g, error);
    pthread_mutex_unlock(&g->lock);
}

static void host_close(struct sw_comm *c) {
    if (!c) return;
    struct group *g = c->group;
    pthread_mutex_lock(&g->lock);
    const uint32_t left = --g->open_count;
    pthread_mutex_unlock(&g->lock);
    if (left) return;
    pthread_cond_destroy(&g->changed);
    pthread_mutex_destroy(&g->lock);
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
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&g->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_mutex_init(&g->lock, NULL);
    g->size = g->open_count = size;
    g->timeout_s = timeout_s < TIMEOUT_S_MAX ? timeout_s : TIMEOUT_S_MAX;
    for (uint32_t r = 0; r < size; r++) {
        g->ranks[r].group = g;
        g->ranks[r].rank = r;
        out[r] = (struct sw_comm_handle){&g->ranks[r], &host_ops, r, size};
    }
    return 0;
}
