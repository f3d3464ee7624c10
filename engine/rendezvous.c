/* engine/rendezvous.c - rounds of calls among threads, and the sum over their ranks. */
#include "engine/rendezvous.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "base/wait.h"

/* Elements that are summed over all ranks before the next ones: the sums stay in the L1 cache. */
enum { BLOCK = 2048 };

#define TIMEOUT_S_MAX 1e9

static_assert(SW_RANKS_MAX <= 64, "ranks are bits of `here`");

int sw_call_is_same(const struct sw_call *a, const struct sw_call *b) {
    return a->kind == b->kind && a->amount == b->amount && a->carried == b->carried;
}

void sw_call_describe(const struct sw_call *call, char *text, size_t size) {
    const unsigned long long amount = call->amount;
    if (call->kind == SW_CALL_SCATTER)
        snprintf(text, size, "reduce_scatter of %llu values carried as %s", amount,
                 sw_dtype_name(call->carried));
    else
        snprintf(text, size, "%s of %llu bytes",
                 call->kind == SW_CALL_GATHER ? "all_gather" : "exchange", amount);
}

/* Ends the group. Reports come before this, under the same lock, so that a rank that returns the
 * error finds it reported. */
static void end(struct sw_rendezvous *v, int error) {
    assert(error < 0 && !v->error);
    v->error = error;
    pthread_cond_broadcast(&v->changed);
    if (v->ended) v->ended(v->ctx, error);
}

/* All are here: begins the round if they call the same. */
static void begin_round(struct sw_rendezvous *v) {
    for (uint32_t r = 1; r < v->size; r++) {
        if (sw_call_is_same(&v->calls[r], &v->calls[0])) continue;
        char text[2][80];
        sw_call_describe(&v->calls[0], text[0], sizeof(text[0]));
        sw_call_describe(&v->calls[r], text[1], sizeof(text[1]));
        sw_error("collective: rank %u calls %s while rank %u calls %s; all ranks must make the "
                 "same calls",
                 v->first_rank + r, text[1], v->first_rank, text[0]);
        end(v, -EINVAL);
        return;
    }
    v->here = 0;
    v->busy = v->size;
    v->result = 0;
    v->under_way = 1;
    v->rounds++;
    pthread_cond_broadcast(&v->changed);
}

static void late(struct sw_rendezvous *v, uint32_t rank) {
    char names[SW_RANKS_MAX * 4 + 1] = "", text[80];
    size_t length = 0;
    uint32_t missing = 0;
    for (uint32_t r = 0; r < v->size; r++) {
        if (v->here >> r & 1) continue;
        length += (size_t)snprintf(names + length, sizeof(names) - length, "%s%u",
                                   missing++ ? ", " : "", v->first_rank + r);
    }
    sw_call_describe(&v->calls[rank], text, sizeof(text));
    sw_error("collective: rank%s %s did not come to %s within %g s of rank %u; stopped, or slower "
             "than the timeout allows",
             missing == 1 ? "" : "s", names, text, v->timeout_s, v->first_rank + rank);
    end(v, -ETIMEDOUT);
}

int sw_rendezvous_enter(struct sw_rendezvous *v, uint32_t rank, const struct sw_call *call) {
    struct sw_wait wait = {0};
    pthread_mutex_lock(&v->lock);
    const uint64_t before = v->rounds;
    if (!v->error) {
        assert(!(v->here >> rank & 1)); /* one thread at a time */
        v->calls[rank] = *call;
        v->here |= (uint64_t)1 << rank;
        if (v->here == UINT64_MAX >> (64 - v->size)) begin_round(v);
    }
    while (v->rounds == before && !v->error)
        if (sw_wait_for(&wait, &v->changed, &v->lock, v->timeout_s) < 0) late(v, rank);
    /* A round that has begun ends alike for all, whatever happens meanwhile. */
    const int ret = v->rounds != before ? 0 : v->error;
    pthread_mutex_unlock(&v->lock);
    return ret;
}

static int done(struct sw_rendezvous *v, int result, int is_last) {
    pthread_mutex_lock(&v->lock);
    const uint64_t part = v->parts;
    if (result < 0 && v->result == 0) v->result = result;
    if (--v->busy == 0) {
        v->busy = v->size;
        v->parts++;
        if (is_last || v->result < 0) v->under_way = 0;
        if (v->result < 0 && !v->error) end(v, v->result);
        pthread_cond_broadcast(&v->changed);
    }
    /* No next part can be over before this rank has woken: it would have to take part. */
    while (v->parts == part) pthread_cond_wait(&v->changed, &v->lock);
    const int ret = v->result;
    pthread_mutex_unlock(&v->lock);
    return ret;
}

int sw_rendezvous_share(struct sw_rendezvous *v, int result) {
    return done(v, result, 0);
}

int sw_rendezvous_leave(struct sw_rendezvous *v, int result) {
    return done(v, result, 1);
}

void sw_rendezvous_abort(struct sw_rendezvous *v, int error) {
    pthread_mutex_lock(&v->lock);
    if (!v->error) end(v, error);
    pthread_mutex_unlock(&v->lock);
}

int sw_rendezvous_is_under_way(struct sw_rendezvous *v, struct sw_call *call) {
    pthread_mutex_lock(&v->lock);
    const int under_way = v->under_way;
    if (under_way) *call = v->calls[0];
    pthread_mutex_unlock(&v->lock);
    return under_way;
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

static void add_ranks(const struct sw_rendezvous *v, float *sum, uint64_t at, uint64_t n) {
    for (uint32_t r = 0; r < v->size; r++) {
        const float *in = v->calls[r].in;
        add(sum, in + at, v->calls[r].carried, n);
    }
}

void sw_rendezvous_add(const struct sw_rendezvous *v, float *sum, uint64_t at, uint64_t n) {
    for (uint64_t i = 0; i < n; i += BLOCK)
        add_ranks(v, sum + i, at + i, n - i < BLOCK ? n - i : BLOCK);
}

void sw_rendezvous_add_from_nothing(const struct sw_rendezvous *v, float *sum, uint64_t at,
                                    uint64_t n) {
    for (uint64_t i = 0; i < n; i++) sum[i] = -0.0f;
    sw_rendezvous_add(v, sum, at, n);
}

void sw_rendezvous_init(struct sw_rendezvous *v, uint32_t size, uint32_t first_rank,
                        double timeout_s) {
    assert(v && size > 0 && size <= SW_RANKS_MAX);
    assert(timeout_s > 0);
    memset(v, 0, sizeof(*v));
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&v->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_mutex_init(&v->lock, NULL);
    v->size = size;
    v->first_rank = first_rank;
    v->timeout_s = timeout_s < TIMEOUT_S_MAX ? timeout_s : TIMEOUT_S_MAX;
}

void sw_rendezvous_exit(struct sw_rendezvous *v) {
    pthread_cond_destroy(&v->changed);
    pthread_mutex_destroy(&v->lock);
}
