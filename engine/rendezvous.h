/* engine/rendezvous.h - where the ranks of one process meet: what back ends of host memory share.
 *
 * A call is a round. Each rank enters it with what it calls and waits until all have; the last one
 * compares. A round has one part or more, the same for all ranks: each does its own share, reading
 * the others' memory, and waits until all have done theirs. The wait to enter ends on the timeout
 * and on an error. The wait after a part does not, as to leave it early would take memory away from
 * those who still read it: a share has to end by itself, in bounded time. A result below zero ends
 * the round, and all later ones, alike for all. Calls are read without the lock: none changes
 * before the round is over. Threads: one for each rank; abort from any. */
#ifndef ENGINE_RENDEZVOUS_H
#define ENGINE_RENDEZVOUS_H
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include "engine/collective.h"

enum sw_call_kind { SW_CALL_GATHER, SW_CALL_SCATTER, SW_CALL_EXCHANGE };

struct sw_call {
    enum sw_call_kind kind;
    enum sw_dtype carried; /* of a reduce_scatter */
    uint64_t amount;       /* its values; bytes of the others */
    const void *in;
    void *out;
};

int sw_call_is_same(const struct sw_call *a, const struct sw_call *b);
void sw_call_describe(const struct sw_call *call, char *text, size_t size);

struct sw_rendezvous {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint32_t size, first_rank; /* ranks here, and the number of the first one in the whole group */
    double timeout_s;
    /* Told of the first error, with the lock held; NULL: nobody. */
    void (*ended)(void *ctx, int error);
    void *ctx;
    int error;       /* the first one; for ever */
    uint64_t here;   /* a bit for each rank that waits for the round to begin */
    uint64_t rounds; /* that have begun */
    uint64_t parts;  /* that all have done */
    uint32_t busy;   /* ranks that have not done theirs */
    int result;      /* of the last part that all have done */
    int under_way;
    struct sw_call calls[SW_RANKS_MAX];
};

/* The caller sets `ended` and `ctx` afterwards, if at all. */
void sw_rendezvous_init(struct sw_rendezvous *v, uint32_t size, uint32_t first_rank,
                        double timeout_s);
void sw_rendezvous_exit(struct sw_rendezvous *v);

/* Waits until all ranks are in this call: 0, or the error, which has been reported. `rank` counts
 * from 0 here. */
int sw_rendezvous_enter(struct sw_rendezvous *v, uint32_t rank, const struct sw_call *call);

/* Waits until all ranks have done their share of a part: 0, or the first result below zero. The
 * last part ends the round. */
int sw_rendezvous_share(struct sw_rendezvous *v, int result);
int sw_rendezvous_leave(struct sw_rendezvous *v, int result);

/* Ends every wait to enter, now and later. The first error stays. */
void sw_rendezvous_abort(struct sw_rendezvous *v, int error);

/* Whether a round is under way, and if so what is called. */
int sw_rendezvous_is_under_way(struct sw_rendezvous *v, struct sw_call *call);

/* Adds to sum[0..n) what each rank brought, from its in[at] on, in rank order. What is carried as
 * BF16 is rounded before. Within a round of reduce_scatter. */
void sw_rendezvous_add(const struct sw_rendezvous *v, float *sum, uint64_t at, uint64_t n);

/* -0 is what changes nothing that is added to it: +0 would lose the sign of -0. */
void sw_rendezvous_add_from_nothing(const struct sw_rendezvous *v, float *sum, uint64_t at,
                                    uint64_t n);

#endif
