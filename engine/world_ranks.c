/* engine/world_ranks.c - ranks of several processes: their calls, over messages.
 *
 * A call begins as within one process (rendezvous.h). Then rank 0 of each process sends every other
 * process a first message, with what is called and, where they are few, the bytes to gather. Once
 * all are here and the same, the rest goes in blocks. Every local rank moves its share of the
 * blocks, on a lane of its own: buffers, tags and requests that no other rank touches.
 *
 * all_gather: the blocks go round a ring of processes, each sending what it had and what it has
 * received, into the `out` of local rank 0; the other ranks copy. Received blocks are copied at
 * once, whether or not they can be sent on, so the ring cannot get stuck.
 *
 * reduce_scatter: partial sums go along the processes in order; each adds its ranks' values, and
 * the last one sends the sum to the process whose rank owns it. That is a chain whose end always
 * takes, as every process has posted its receives of the sums that it owns. The first process
 * begins as the only one would, and a partial sum stays FP32, so the bits are the same.
 *
 * After an error a message may still be on its way, hence the blocks of memory that no caller can
 * free. */
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/clock.h"
#include "engine/world_internal.h"

enum {
    BLOCK_BYTES = 1 << 18,
    BLOCK_VALUES = BLOCK_BYTES / sizeof(float),
    DEPTH = 4, /* blocks of a kind that are on their way at a time */
    FIRST_BYTES = SW_COMM_EXCHANGE_MAX
};

/* Within a call all processes are at work on it, so one that is late waits for another itself, and
 * the listener finds that one first. */
#define PATIENCE_IN_CALL 1.75

/* Not a call of a rank: the processes open a group of so many ranks each. */
enum { OPENS_RANKS = SW_CALL_EXCHANGE + 1 };

struct first {
    uint32_t kind, carried;
    uint64_t amount;
    char data[FIRST_BYTES];
};
enum { HEADER_BYTES = offsetof(struct first, data) };

/* A queue of blocks on their way, oldest first: [done, begun) are, each in place i % DEPTH. */
struct queue {
    uint64_t begun, done;
    void *requests[DEPTH];
    char *blocks[DEPTH];
};

struct sw_comm {
    struct sw_world_group *group;
    uint32_t lane;
    uint64_t met_ns;
    struct queue a, b;
};

struct sw_world_group {
    struct sw_world_group *next;
    struct sw_world *world;
    struct sw_rendezvous meeting;
    uint32_t tag; /* of first messages; two for each lane follow */
    void *memory;
    size_t memory_bytes;
    struct first *told, *heard; /* [1], [processes] */
    void *telling[SW_RANKS_MAX], *hearing[SW_RANKS_MAX];
    struct sw_comm ranks[];
};

static uint64_t ceiling(uint64_t a, uint64_t b) {
    return (a + b - 1) / b;
}

static int ready(const struct queue *q, uint64_t end) {
    return q->begun < end && q->begun < q->done + DEPTH;
}

/* ---- messages ---- */

static int broken(struct sw_world *w, uint32_t process, int error, const char *why) {
    sw_world_fail(w, SW_LOG_ERROR, error, "world: messages to and from process %u fail: %s",
                  process, why);
    return atomic_load(&w->error);
}

static int send_to(struct sw_world *w, uint32_t to, uint32_t tag, const void *data, uint64_t bytes,
                   void **request) {
    char why[SW_TRANSPORT_WHY_MAX];
    const int ret = w->transport->send(to, tag, data, bytes, request, why);
    return ret < 0 ? broken(w, to, ret, why) : 0;
}

static int receive_from(struct sw_world *w, uint32_t from, uint32_t tag, void *data, uint64_t bytes,
                        void **request) {
    char why[SW_TRANSPORT_WHY_MAX];
    const int ret = w->transport->receive(from, tag, data, bytes, request, why);
    return ret < 0 ? broken(w, from, ret, why) : 0;
}

static int has_come(struct sw_world *w, uint32_t process, void **request) {
    char why[SW_TRANSPORT_WHY_MAX];
    const int ret = w->transport->test(request, why);
    return ret < 0 ? broken(w, process, ret, why) : ret;
}

/* ---- first messages ---- */

static void describe(const struct first *f, char *text, size_t size) {
    const struct sw_call call = {(enum sw_call_kind)f->kind, (enum sw_dtype)f->carried, f->amount,
                                 NULL, NULL};
    if (f->kind == OPENS_RANKS)
        snprintf(text, size, "the opening of %llu ranks", (unsigned long long)f->amount);
    else
        sw_call_describe(&call, text, size);
}

static int late(struct sw_world_group *g, const uint8_t *is_here) {
    struct sw_world *w = g->world;
    char names[SW_RANKS_MAX * 4 + 1] = "", text[80];
    size_t length = 0;
    uint32_t missing = 0;
    for (uint32_t p = 0; p < w->size; p++) {
        if (is_here[p]) continue;
        length += (size_t)snprintf(names + length, sizeof(names) - length, "%s%u",
                                   missing++ ? ", " : "", p);
    }
    describe(g->told, text, sizeof(text));
    sw_world_fail(w, SW_LOG_ERROR, -ETIMEDOUT,
                  "world: process%s %s did not come to %s within %g s of process %u; stopped, or "
                  "slower than the timeout allows",
                  missing == 1 ? "" : "es", names, text, g->meeting.timeout_s, w->index);
    return atomic_load(&w->error);
}

/* Whether all processes call the same. All of them see a difference, and process 0 reports it. */
static int compare(struct sw_world_group *g) {
    struct sw_world *w = g->world;
    const struct first *zero = w->index == 0 ? g->told : &g->heard[0], *other = NULL;
    uint32_t p = 0;
    while (!other && ++p < w->size) {
        const struct first *f = p == w->index ? g->told : &g->heard[p];
        if (memcmp(f, zero, HEADER_BYTES) != 0) other = f;
    }
    if (!other) return 0;
    struct sw_patience patience = {0};
    int ret = 0;
    while (w->index != 0 && ret == 0) ret = sw_world_wait(w, &patience, g->meeting.timeout_s);
    if (other->kind == OPENS_RANKS && zero->kind == OPENS_RANKS) {
        sw_world_fail(w, SW_LOG_ERROR, -EINVAL,
                      "world: process %u has %llu ranks while process 0 has %llu; all processes "
                      "must have equally many",
                      p, (unsigned long long)other->amount, (unsigned long long)zero->amount);
        return atomic_load(&w->error);
    }
    char text[2][80];
    describe(zero, text[0], sizeof(text[0]));
    describe(other, text[1], sizeof(text[1]));
    sw_world_fail(w, SW_LOG_ERROR, -EINVAL,
                  "world: process %u calls %s while process 0 calls %s; all processes must make "
                  "the same calls",
                  p, text[1], text[0]);
    return atomic_load(&w->error);
}

/* Sends `told` to all, with so many bytes of data, and waits for theirs. */
static int meet_processes(struct sw_world_group *g, uint64_t bytes) {
    struct sw_world *w = g->world;
    struct sw_patience patience = {0};
    uint8_t is_here[SW_RANKS_MAX] = {0}, is_told[SW_RANKS_MAX] = {0};
    uint32_t left = 2 * (w->size - 1);
    int ret = 0;
    for (uint32_t p = 0; p < w->size; p++) {
        if (p == w->index) continue;
        ret = receive_from(w, p, g->tag, &g->heard[p], sizeof(g->heard[p]), &g->hearing[p]);
        if (ret < 0) return ret;
    }
    for (uint32_t p = 0; p < w->size; p++) {
        if (p == w->index) continue;
        ret = send_to(w, p, g->tag, g->told, HEADER_BYTES + bytes, &g->telling[p]);
        if (ret < 0) return ret;
    }
    is_here[w->index] = is_told[w->index] = 1;
    while (left > 0) {
        const uint32_t before = left;
        for (uint32_t p = 0; p < w->size; p++) {
            if (!is_here[p] && (ret = has_come(w, p, &g->hearing[p])) > 0) is_here[p] = 1, left--;
            if (ret < 0) return ret;
            if (!is_told[p] && (ret = has_come(w, p, &g->telling[p])) > 0) is_told[p] = 1, left--;
            if (ret < 0) return ret;
        }
        /* What has come is enough, whatever has failed meanwhile. */
        if (left == before) ret = sw_world_wait(w, &patience, g->meeting.timeout_s);
        if (ret == -ETIMEDOUT && !atomic_load(&w->error)) {
            for (uint32_t p = 0; p < w->size; p++) is_here[p] &= is_told[p];
            return late(g, is_here);
        }
        if (ret < 0) return ret;
    }
    return compare(g);
}

/* ---- blocks ---- */

static int late_in_call(struct sw_comm *c, uint32_t process) {
    struct sw_world_group *g = c->group;
    char text[80];
    sw_call_describe(&g->meeting.calls[0], text, sizeof(text));
    sw_world_fail(g->world, SW_LOG_ERROR, -ETIMEDOUT,
                  "world: process %u has been silent in the middle of %s for %g s; stopped, or "
                  "slower than the timeout allows",
                  process, text, PATIENCE_IN_CALL * g->meeting.timeout_s);
    return atomic_load(&g->world->error);
}

/* Does what can be done without waiting: how much that was, or an error. Sets *is_done at the end
 * of the job, and *waits_for to the process whose messages have not come. */
typedef int (*step_fn)(struct sw_comm *c, void *job, int *is_done, uint32_t *waits_for);

static int work(struct sw_comm *c, step_fn step, void *job) {
    struct sw_world *w = c->group->world;
    struct sw_patience patience = {0};
    const double limit_s = PATIENCE_IN_CALL * c->group->meeting.timeout_s;
    for (;;) {
        int is_done = 0;
        uint32_t waits_for = w->index;
        int ret = step(c, job, &is_done, &waits_for);
        if (ret < 0) return ret;
        if (is_done) return 0;
        if (ret > 0) {
            patience = (struct sw_patience){0};
            continue;
        }
        ret = sw_world_wait(w, &patience, limit_s);
        if (ret == -ETIMEDOUT && !atomic_load(&w->error)) return late_in_call(c, waits_for);
        if (ret < 0) return ret;
    }
}

static void begin_queues(struct sw_comm *c) {
    c->a.begun = c->a.done = c->b.begun = c->b.done = 0;
}

/* The oldest block of a queue, if it has come: 1 and it may be taken. */
static int oldest_has_come(struct sw_comm *c, struct queue *q, uint32_t process,
                           uint32_t *waits_for) {
    if (q->done == q->begun) return 0;
    *waits_for = process;
    return has_come(c->group->world, process, &q->requests[q->done % DEPTH]);
}

/* ---- all_gather ---- */

struct ring {
    char *out;
    uint64_t segment_bytes; /* of a process */
    uint64_t blocks;        /* of a segment, on this lane */
    uint64_t items;         /* to receive, and as many to send */
};

/* Item i of a lane belongs to the segment of the process `back` steps before this one. */
static char *ring_place(const struct sw_comm *c, const struct ring *r, uint64_t i, uint64_t back,
                        uint64_t *bytes) {
    const struct sw_world_group *g = c->group;
    const uint64_t size = g->world->size, segment = (g->world->index + 2 * size - back) % size;
    const uint64_t at = (c->lane + i % r->blocks * g->meeting.size) * BLOCK_BYTES;
    const uint64_t left = r->segment_bytes - at;
    *bytes = left < BLOCK_BYTES ? left : BLOCK_BYTES;
    return r->out + segment * r->segment_bytes + at;
}

static int ring_step(struct sw_comm *c, void *job, int *is_done, uint32_t *waits_for) {
    struct ring *r = job;
    struct sw_world_group *g = c->group;
    struct sw_world *w = g->world;
    struct queue *in = &c->a, *out = &c->b;
    const uint32_t next = (w->index + 1) % w->size, before = (w->index + w->size - 1) % w->size;
    const uint32_t tag = g->tag + 1 + 2 * c->lane;
    uint64_t bytes = 0;
    int moved = 0, ret = 0;
    for (; ready(in, r->items); in->begun++, moved++) {
        (void)ring_place(c, r, in->begun, in->begun / r->blocks + 1, &bytes);
        const uint64_t i = in->begun % DEPTH;
        ret = receive_from(w, before, tag, in->blocks[i], bytes, &in->requests[i]);
        if (ret < 0) return ret;
    }
    while ((ret = oldest_has_come(c, out, next, waits_for)) > 0) out->done++, moved++;
    if (ret < 0) return ret;
    while ((ret = oldest_has_come(c, in, before, waits_for)) > 0) {
        char *place = ring_place(c, r, in->done, in->done / r->blocks + 1, &bytes);
        memcpy(place, in->blocks[in->done % DEPTH], bytes);
        in->done++, moved++;
    }
    if (ret < 0) return ret;
    for (; ready(out, r->items < r->blocks + in->done ? r->items : r->blocks + in->done);
         out->begun++, moved++) {
        const char *place = ring_place(c, r, out->begun, out->begun / r->blocks, &bytes);
        const uint64_t i = out->begun % DEPTH;
        memcpy(out->blocks[i], place, bytes);
        ret = send_to(w, next, tag, out->blocks[i], bytes, &out->requests[i]);
        if (ret < 0) return ret;
    }
    *is_done = in->done == r->items && out->done == r->items;
    return moved;
}

static int go_round(struct sw_comm *c, char *out, uint64_t segment_bytes) {
    const struct sw_world_group *g = c->group;
    const uint64_t all = ceiling(segment_bytes, BLOCK_BYTES);
    struct ring r = {.out = out, .segment_bytes = segment_bytes};
    r.blocks = all > c->lane ? ceiling(all - c->lane, g->meeting.size) : 0;
    r.items = r.blocks * (g->world->size - 1);
    if (r.items == 0) return 0;
    begin_queues(c);
    return work(c, ring_step, &r);
}

/* Local rank 0's `out` becomes whole where the first messages can carry all of it; else it gets
 * what the ranks here have. */
static int gather_first(struct sw_world_group *g, uint64_t segment_bytes, int is_small) {
    const struct sw_call *call = &g->meeting.calls[0];
    const struct sw_world *w = g->world;
    char *own = (char *)call->out + w->index * segment_bytes;
    for (uint32_t r = 0; r < g->meeting.size && call->amount > 0; r++) {
        char *place = own + r * call->amount;
        const void *in = g->meeting.calls[r].in;
        if (place != in) memcpy(place, in, call->amount);
    }
    g->told->kind = call->kind;
    g->told->carried = 0;
    g->told->amount = call->amount;
    if (is_small && segment_bytes) memcpy(g->told->data, own, segment_bytes);
    const int ret = meet_processes(g, is_small ? segment_bytes : 0);
    if (ret < 0) return ret;
    for (uint32_t p = 0; p < w->size && is_small && segment_bytes; p++)
        if (p != w->index)
            memcpy((char *)call->out + p * segment_bytes, g->heard[p].data, segment_bytes);
    return 0;
}

static int gather(struct sw_comm *c, const struct sw_call *call) {
    struct sw_world_group *g = c->group;
    int ret = atomic_load(&g->world->error);
    if (ret < 0) return ret;
    ret = sw_rendezvous_enter(&g->meeting, c->lane, call);
    if (ret < 0) return ret;
    const uint64_t segment_bytes = g->meeting.size * call->amount;
    const int is_small = segment_bytes <= FIRST_BYTES;
    char *whole = g->meeting.calls[0].out;
    ret = c->lane == 0 ? gather_first(g, segment_bytes, is_small) : 0;
    ret = sw_rendezvous_share(&g->meeting, ret);
    c->met_ns = sw_now_ns();
    if (ret < 0) return ret;
    if (!is_small) {
        ret = sw_rendezvous_share(&g->meeting, go_round(c, whole, segment_bytes));
        if (ret < 0) return ret;
    }
    if (c->lane != 0 && segment_bytes > 0) {
        char *out = call->out;
        const uint64_t own = (g->meeting.first_rank + c->lane) * call->amount;
        const uint64_t after = own + call->amount, all = g->world->size * segment_bytes;
        memcpy(out, whole, own);
        if (out + own != call->in) memcpy(out + own, call->in, call->amount);
        memcpy(out + after, whole + after, all - after);
    }
    return sw_rendezvous_leave(&g->meeting, 0);
}

static int mpi_all_gather(struct sw_comm *c, struct sw_stream *s, void *out, const void *in,
                          uint64_t bytes) {
    (void)s;
    return gather(c, &(struct sw_call){SW_CALL_GATHER, .amount = bytes, .in = in, .out = out});
}

static int mpi_exchange(struct sw_comm *c, void *out, const void *in, uint64_t bytes) {
    assert(bytes <= SW_COMM_EXCHANGE_MAX);
    return gather(c, &(struct sw_call){SW_CALL_EXCHANGE, .amount = bytes, .in = in, .out = out});
}

/* ---- reduce_scatter ---- */

/* A block is a part of one rank's segment, so it has one owner. Queue `a` holds partial sums: a
 * block is received, added to where it is, and sent from there. Queue `b` holds sums that ranks
 * here own. */
struct chain {
    uint64_t count, in_segment; /* values, and blocks, of a rank */
    uint64_t partial, owned;    /* blocks of this lane: all, and of ranks here */
    uint64_t posted;            /* receives of `a`; begun are those that were added to */
};

static uint64_t block_of(const struct sw_comm *c, uint64_t i) {
    return c->lane + i * c->group->meeting.size;
}

static uint64_t owned_block_of(const struct sw_comm *c, const struct chain *n, uint64_t i) {
    const struct sw_world_group *g = c->group;
    return g->meeting.first_rank * n->in_segment + block_of(c, i);
}

static uint64_t values_of(const struct chain *n, uint64_t block) {
    const uint64_t left = n->count - block % n->in_segment * BLOCK_VALUES;
    return left < BLOCK_VALUES ? left : BLOCK_VALUES;
}

/* Puts a whole sum where its rank wants it. */
static void store(struct sw_world_group *g, const struct chain *n, uint64_t block,
                  const char *sum) {
    const uint64_t rank = block / n->in_segment - g->meeting.first_rank;
    float *out = g->meeting.calls[rank].out;
    memcpy(out + block % n->in_segment * BLOCK_VALUES, sum, values_of(n, block) * sizeof(float));
}

/* Adds this process's values to the block, and passes it on. */
static int add_and_send(struct sw_comm *c, const struct chain *n, uint64_t i) {
    struct sw_world_group *g = c->group;
    struct sw_world *w = g->world;
    const uint32_t tag = g->tag + 1 + 2 * c->lane, last = w->size - 1;
    const uint64_t block = block_of(c, i), values = values_of(n, block);
    const uint64_t at = block / n->in_segment * n->count + block % n->in_segment * BLOCK_VALUES;
    char *bytes = c->a.blocks[i % DEPTH];
    void **request = &c->a.requests[i % DEPTH];
    if (w->index == 0)
        sw_rendezvous_add_from_nothing(&g->meeting, (float *)bytes, at, values);
    else
        sw_rendezvous_add(&g->meeting, (float *)bytes, at, values);
    if (w->index < last)
        return send_to(w, w->index + 1, tag, bytes, values * sizeof(float), request);
    const uint32_t owner = (uint32_t)(block / n->in_segment / g->meeting.size);
    if (owner != last) return send_to(w, owner, tag + 1, bytes, values * sizeof(float), request);
    store(g, n, block, bytes);
    *request = NULL;
    return 0;
}

static int take_partial(struct sw_comm *c, struct chain *n, uint32_t *waits_for) {
    struct sw_world *w = c->group->world;
    const uint32_t tag = c->group->tag + 1 + 2 * c->lane;
    struct queue *q = &c->a;
    int moved = 0, ret = 0;
    for (; w->index > 0 && n->posted < n->partial && n->posted < q->done + DEPTH; n->posted++) {
        const uint64_t i = n->posted % DEPTH, values = values_of(n, block_of(c, n->posted));
        ret = receive_from(w, w->index - 1, tag, q->blocks[i], values * sizeof(float),
                           &q->requests[i]);
        if (ret < 0) return ret;
        moved++;
    }
    while (ready(q, w->index > 0 ? n->posted : n->partial)) {
        if (w->index > 0) {
            *waits_for = w->index - 1;
            ret = has_come(w, w->index - 1, &q->requests[q->begun % DEPTH]);
            if (ret <= 0) break;
        }
        ret = add_and_send(c, n, q->begun);
        if (ret < 0) break;
        q->begun++, moved++;
    }
    return ret < 0 ? ret : moved;
}

static int pass_on(struct sw_comm *c, const struct chain *n, uint32_t *waits_for) {
    struct sw_world_group *g = c->group;
    struct sw_world *w = g->world;
    struct queue *q = &c->a;
    int moved = 0;
    while (q->done < q->begun) {
        const uint64_t owner = block_of(c, q->done) / n->in_segment / g->meeting.size;
        const uint32_t to = w->index + 1 < w->size ? w->index + 1 : (uint32_t)owner;
        const int ret = to == w->index ? 1 : oldest_has_come(c, q, to, waits_for);
        if (ret < 0) return ret;
        if (ret == 0) break;
        q->done++, moved++;
    }
    return moved;
}

static int take_sums(struct sw_comm *c, const struct chain *n, uint32_t *waits_for) {
    struct sw_world *w = c->group->world;
    const uint32_t tag = c->group->tag + 1 + 2 * c->lane + 1, last = w->size - 1;
    struct queue *q = &c->b;
    int moved = 0, ret = 0;
    for (; ready(q, n->owned); q->begun++, moved++) {
        const uint64_t i = q->begun % DEPTH, values = values_of(n, owned_block_of(c, n, q->begun));
        ret = receive_from(w, last, tag, q->blocks[i], values * sizeof(float), &q->requests[i]);
        if (ret < 0) return ret;
    }
    while ((ret = oldest_has_come(c, q, last, waits_for)) > 0) {
        store(c->group, n, owned_block_of(c, n, q->done), q->blocks[q->done % DEPTH]);
        q->done++, moved++;
    }
    return ret < 0 ? ret : moved;
}

static int chain_step(struct sw_comm *c, void *job, int *is_done, uint32_t *waits_for) {
    struct chain *n = job;
    const int sums = take_sums(c, n, waits_for);
    if (sums < 0) return sums;
    const int sent = pass_on(c, n, waits_for);
    if (sent < 0) return sent;
    const int added = take_partial(c, n, waits_for);
    if (added < 0) return added;
    *is_done = c->a.done == n->partial && c->b.done == n->owned;
    return sums + sent + added;
}

static int go_along(struct sw_comm *c, uint64_t count) {
    const struct sw_world_group *g = c->group;
    struct chain n = {.count = count, .in_segment = ceiling(count, BLOCK_VALUES)};
    /* As many blocks on each lane as there are in a segment, for each process. */
    n.partial = n.in_segment * g->world->size;
    n.owned = g->world->index + 1 < g->world->size ? n.in_segment : 0;
    if (count == 0) return 0;
    begin_queues(c);
    return work(c, chain_step, &n);
}

static int mpi_reduce_scatter(struct sw_comm *c, struct sw_stream *s, float *out, const float *in,
                              enum sw_dtype carried, uint64_t count) {
    (void)s;
    struct sw_world_group *g = c->group;
    int ret = atomic_load(&g->world->error);
    if (ret < 0) return ret;
    const struct sw_call call = {SW_CALL_SCATTER, carried, count, in, out};
    ret = sw_rendezvous_enter(&g->meeting, c->lane, &call);
    if (ret < 0) return ret;
    if (c->lane == 0) {
        g->told->kind = call.kind;
        g->told->carried = call.carried;
        g->told->amount = call.amount;
        ret = meet_processes(g, 0);
    }
    ret = sw_rendezvous_share(&g->meeting, ret);
    c->met_ns = sw_now_ns();
    if (ret < 0) return ret;
    return sw_rendezvous_leave(&g->meeting, go_along(c, count));
}

/* ---- groups ---- */

static uint64_t mpi_met_ns(const struct sw_comm *c) {
    return c->met_ns;
}

static void mpi_abort(struct sw_comm *c, int error) {
    sw_world_abort(c->group->world, error);
}

static void mpi_close(struct sw_comm *c) {
    (void)c;
}

static const struct sw_comm_ops mpi_ops = {.name = "mpi",
                                           .all_gather = mpi_all_gather,
                                           .reduce_scatter = mpi_reduce_scatter,
                                           .exchange = mpi_exchange,
                                           .met_ns = mpi_met_ns,
                                           .abort = mpi_abort,
                                           .close = mpi_close};

static void group_ended(void *ctx, int error) {
    sw_world_abort(ctx, error);
}

static void carve(struct sw_world_group *g, uint32_t ranks, uint32_t processes) {
    char *at = g->memory;
    for (uint32_t r = 0; r < ranks; r++) {
        struct sw_comm *c = &g->ranks[r];
        c->group = g;
        c->lane = r;
        for (int i = 0; i < DEPTH; i++, at += BLOCK_BYTES) c->a.blocks[i] = at;
        for (int i = 0; i < DEPTH; i++, at += BLOCK_BYTES) c->b.blocks[i] = at;
    }
    g->told = (struct first *)at;
    g->heard = g->told + 1;
    assert((char *)(g->heard + processes) == (char *)g->memory + g->memory_bytes);
}

static int make_group(struct sw_world *w, struct sw_comm_handle *out, uint32_t ranks,
                      double timeout_s, struct sw_world_group **made) {
    const uint32_t tags = 1 + 2 * ranks;
    if (w->next_tag > w->tag_max - tags) {
        sw_error("world: no more than %u channels can be told apart by this MPI", w->next_tag);
        return -ENOSPC;
    }
    struct sw_world_group *g = calloc(1, sizeof(*g) + ranks * sizeof(g->ranks[0]));
    if (!g) return -ENOMEM;
    g->memory_bytes =
        (size_t)ranks * 2 * DEPTH * BLOCK_BYTES + (1 + w->size) * sizeof(struct first);
    /* Pages become real when first used: what only exchanges takes little. */
    g->memory =
        mmap(NULL, g->memory_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (g->memory == MAP_FAILED) {
        free(g);
        return -ENOMEM;
    }
    carve(g, ranks, w->size);
    g->world = w;
    g->tag = w->next_tag;
    sw_rendezvous_init(&g->meeting, ranks, w->index * ranks, timeout_s);
    g->meeting.ended = group_ended;
    g->meeting.ctx = w;
    for (uint32_t r = 0; r < ranks; r++)
        out[r] =
            (struct sw_comm_handle){&g->ranks[r], &mpi_ops, w->index * ranks + r, w->size * ranks};
    pthread_mutex_lock(&w->lock);
    w->next_tag += tags;
    g->next = w->groups;
    w->groups = g;
    pthread_mutex_unlock(&w->lock);
    *made = g;
    return 0;
}

int sw_world_channel(struct sw_world *w, struct sw_comm_handle *out, double timeout_s) {
    assert(w && out && timeout_s > 0);
    struct sw_world_group *g;
    return make_group(w, out, 1, timeout_s, &g);
}

int sw_world_ranks(struct sw_world *w, struct sw_comm_handle *out, uint32_t local_ranks,
                   double timeout_s) {
    assert(w && out && timeout_s > 0);
    assert(local_ranks > 0 && local_ranks <= SW_RANKS_MAX);
    struct sw_world_group *g;
    int ret = make_group(w, out, local_ranks, timeout_s, &g);
    if (ret < 0) return ret;
    g->told->kind = OPENS_RANKS;
    g->told->carried = 0;
    g->told->amount = local_ranks;
    ret = atomic_load(&w->error);
    if (ret == 0) ret = meet_processes(g, 0);
    if (ret < 0 || w->size * local_ranks <= SW_RANKS_MAX) return ret;
    sw_world_fail(w, SW_LOG_ERROR, -EINVAL,
                  "world: %u processes with %u ranks each are more than the %d ranks that can work "
                  "together",
                  w->size, local_ranks, SW_RANKS_MAX);
    return atomic_load(&w->error);
}

/* ---- warming up ---- */

/* First messages of a group to a process, of every size that a power of two is: Open MPI keeps what
 * has come too early by such sizes, and after some messages sets up a faster way to a process. */
enum { WARM_SIZES = 13, WARM_FIRSTS = 6 * WARM_SIZES };
static_assert(HEADER_BYTES << (WARM_SIZES - 1) <= sizeof(struct first), "as long as they may be");

/* The requests of messages to a process, then those of messages from one. */
struct warm_up {
    struct sw_world *w;
    double timeout_s;
    void **requests;
    uint32_t count;
};

static int wait_for_all(struct warm_up *u, uint32_t process, void **requests, uint32_t count) {
    struct sw_world *w = u->w;
    struct sw_patience patience = {0};
    for (uint32_t i = 0; i < count;) {
        int ret = has_come(w, process, &requests[i]);
        if (ret > 0) {
            patience = (struct sw_patience){0};
            i++;
            continue;
        }
        if (ret == 0) ret = sw_world_wait(w, &patience, u->timeout_s);
        if (ret == -ETIMEDOUT && !atomic_load(&w->error))
            sw_world_fail(w, SW_LOG_ERROR, ret,
                          "world: process %u did not come to the first messages within %g s of "
                          "process %u; stopped, or slower than the timeout allows",
                          process, u->timeout_s, w->index);
        if (ret < 0) return atomic_load(&w->error);
    }
    return 0;
}

static uint64_t warm_bytes(uint32_t i) {
    return (uint64_t)HEADER_BYTES << i % WARM_SIZES;
}

static int send_firsts(struct warm_up *u, struct sw_world_group *g, uint32_t to) {
    int ret = 0;
    for (uint32_t i = 0; i < WARM_FIRSTS && ret == 0; i++)
        ret = send_to(u->w, to, g->tag, g->told, warm_bytes(i), &u->requests[u->count++]);
    return ret;
}

static int take_firsts(struct warm_up *u, struct sw_world_group *g, uint32_t from) {
    int ret = 0;
    for (uint32_t i = 0; i < WARM_FIRSTS && ret == 0; i++) {
        ret = receive_from(u->w, from, g->tag, &g->heard[from], warm_bytes(i), &g->hearing[from]);
        if (ret == 0) ret = wait_for_all(u, from, &g->hearing[from], 1);
    }
    return ret;
}

/* As many blocks of every rank as a call sends, and in all as many messages as it waits for. */
static int start_blocks(struct warm_up *u, struct sw_world_group *g, uint32_t process, int send) {
    int ret = 0;
    for (uint32_t i = 0; i < g->meeting.size * 2 * DEPTH && ret == 0; i++) {
        const struct sw_comm *c = &g->ranks[i / (2 * DEPTH)];
        const uint32_t k = i % (2 * DEPTH), tag = g->tag + 1 + 2 * c->lane + k / DEPTH;
        const uint64_t bytes = k < DEPTH ? BLOCK_BYTES : 0;
        void **request = &u->requests[u->count++];
        ret = send ? send_to(u->w, process, tag, c->b.blocks[k % DEPTH], bytes, request)
                   : receive_from(u->w, process, tag, c->a.blocks[k % DEPTH], bytes, request);
    }
    return ret;
}

/* Messages that nobody waits for yet take most memory. So one behind them, with a tag of its own,
 * tells that all are here, and only then the receives are posted. */
static int warm_pair(struct warm_up *u, uint32_t to, uint32_t from) {
    struct sw_world *w = u->w;
    struct sw_world_group *first = w->groups;
    const uint32_t tag = w->next_tag;
    u->count = 0;
    int ret = receive_from(w, from, tag, &first->heard[from], 1, &first->hearing[from]);
    for (struct sw_world_group *g = first; g && ret == 0; g = g->next) {
        ret = send_firsts(u, g, to);
        if (ret == 0) ret = start_blocks(u, g, to, 1);
    }
    if (ret == 0) ret = send_to(w, to, tag, first->told, 1, &u->requests[u->count++]);
    const uint32_t sent = u->count;
    if (ret == 0) ret = wait_for_all(u, from, &first->hearing[from], 1);
    for (struct sw_world_group *g = first; g && ret == 0; g = g->next)
        ret = take_firsts(u, g, from);
    for (struct sw_world_group *g = first; g && ret == 0; g = g->next)
        ret = start_blocks(u, g, from, 0);
    if (ret == 0) ret = wait_for_all(u, from, u->requests + sent, u->count - sent);
    return ret < 0 ? ret : wait_for_all(u, to, u->requests, sent);
}

int sw_world_warm_up(struct sw_world *w, double timeout_s) {
    if (!w || !w->groups) return 0;
    struct warm_up u = {.w = w, .timeout_s = timeout_s};
    uint64_t messages = 1;
    for (struct sw_world_group *g = w->groups; g; g = g->next)
        messages += WARM_FIRSTS + 4 * DEPTH * (uint64_t)g->meeting.size;
    u.requests = calloc(messages, sizeof(*u.requests));
    if (!u.requests) return -ENOMEM;
    int ret = atomic_load(&w->error);
    for (uint32_t k = 1; k < w->size && ret == 0; k++)
        ret = warm_pair(&u, (w->index + k) % w->size, (w->index + w->size - k) % w->size);
    free(u.requests);
    return ret;
}

/* The list only grows while the world lives, so a copy of its head is enough. */
static struct sw_world_group *first_group(struct sw_world *w) {
    pthread_mutex_lock(&w->lock);
    struct sw_world_group *g = w->groups;
    pthread_mutex_unlock(&w->lock);
    return g;
}

void sw_world_end_groups(struct sw_world *w) {
    for (struct sw_world_group *g = first_group(w); g; g = g->next)
        sw_rendezvous_abort(&g->meeting, atomic_load(&w->error));
}

int sw_world_describe_call(struct sw_world *w, char *text, size_t size) {
    struct sw_call call;
    for (struct sw_world_group *g = first_group(w); g; g = g->next) {
        if (!sw_rendezvous_is_under_way(&g->meeting, &call)) continue;
        sw_call_describe(&call, text, size);
        return 1;
    }
    return 0;
}

void sw_world_free_groups(struct sw_world *w) {
    while (w->groups) {
        struct sw_world_group *g = w->groups;
        w->groups = g->next;
        sw_rendezvous_exit(&g->meeting);
        munmap(g->memory, g->memory_bytes);
        free(g);
    }
}
