/* engine/collective.c - what all back ends share, and the back end of one rank.
 *
 * Sum, broadcast and agreement are made of exchanges. The first exchange of each has one fixed size
 * and carries, before the data, what the rank calls. So different calls of two ranks meet in equal
 * exchanges and are told apart here. Every rank sees every call, so one of them, the same for all,
 * reports a difference and ends the group; the others return the error by themselves. */
#include "engine/collective.h"

#include <assert.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/log.h"

enum { SCRATCH_BYTES = 1 << 15, FIRST_BYTES = 256, LINE_SHOWN_MAX = 300 };

/* The numbers are unlikely as the first bytes of anything else: a rank may be in an exchange of its
 * own, of the same size. */
enum call_kind { CALL_SUM = 0x53574353, CALL_BROADCAST = 0x53574342, CALL_AGREE = 0x53574341 };

struct call {
    uint32_t kind, root; /* root: of a broadcast */
    uint64_t amount;     /* values of a sum, bytes of a broadcast */
};

static_assert((int)SW_RANKS_MAX * FIRST_BYTES <= SCRATCH_BYTES,
              "the first pieces of all ranks fit");
static_assert((int)SCRATCH_BYTES <= (int)SW_COMM_EXCHANGE_MAX,
              "a piece is small enough for an exchange");
static_assert((FIRST_BYTES - sizeof(struct call)) % sizeof(double) == 0, "no value is cut");

/* The data of a call on its way. Bytes [at, at + bytes) of each rank's stand in `pieces`. */
struct parts {
    const struct sw_comm_handle *c;
    struct call call;
    uint64_t total_bytes, at, bytes;
    uint64_t stride, skip; /* from rank to rank, and to where the data begins */
    char pieces[SCRATCH_BYTES];
};

static const char *part_of(const struct parts *p, uint32_t rank) {
    return p->pieces + rank * p->stride + p->skip;
}

static struct call call_of(const struct parts *p, uint32_t rank) {
    struct call call;
    memcpy(&call, p->pieces + rank * p->stride, sizeof(call));
    return call;
}

static int is_call(const struct call *call) {
    return call->kind == CALL_SUM || call->kind == CALL_BROADCAST || call->kind == CALL_AGREE;
}

static void describe(const struct call *call, char *text, size_t size) {
    const unsigned long long amount = call->amount;
    if (call->kind == CALL_SUM)
        snprintf(text, size, "sum of %llu values", amount);
    else if (call->kind == CALL_BROADCAST)
        snprintf(text, size, "broadcast of %llu bytes from rank %u", amount, call->root);
    else
        snprintf(text, size, "%s", call->kind == CALL_AGREE ? "agree" : "exchange");
}

/* Whether all ranks are in this call, once the first pieces are here. */
static int check_calls(const struct parts *p) {
    const uint32_t size = p->c->size;
    /* A rank in an exchange of its own sees no difference, so it is none that could report one. */
    uint32_t teller = 0, other = 0;
    struct call told = call_of(p, 0), else_told = told;
    while (!is_call(&told)) told = call_of(p, ++teller);
    while (other < size) {
        else_told = call_of(p, other);
        if (memcmp(&else_told, &told, sizeof(told)) != 0) break;
        other++;
    }
    if (other == size) return 0;
    if (p->c->rank == teller) {
        char text[2][80];
        describe(&told, text[0], sizeof(text[0]));
        describe(&else_told, text[1], sizeof(text[1]));
        sw_error("collective: rank %u calls %s while rank %u calls %s; all ranks must make the "
                 "same calls",
                 other, text[1], teller, text[0]);
        p->c->ops->abort(p->c->comm, -EINVAL);
    }
    return -EINVAL;
}

static void begin(struct parts *p, const struct sw_comm_handle *c, struct call call,
                  uint64_t total_bytes) {
    assert(c && c->size > 0 && c->size <= SW_RANKS_MAX && c->rank < c->size);
    p->c = c;
    p->call = call;
    p->total_bytes = total_bytes;
    p->at = p->bytes = p->stride = p->skip = 0;
}

/* Exchanges the next part; `data` is all of this rank's, have_bytes of it, the rest is zero. */
static int next(struct parts *p, const void *data, uint64_t have_bytes) {
    const int first = p->stride == 0;
    p->at += p->bytes;
    p->skip = first ? sizeof(p->call) : 0;
    const uint64_t left = p->total_bytes - p->at;
    const uint64_t most = SCRATCH_BYTES / p->c->size / sizeof(double) * sizeof(double);
    p->stride = first ? FIRST_BYTES : left < most ? left : most;
    p->bytes = p->stride - p->skip < left ? p->stride - p->skip : left;
    char *own = p->pieces + p->c->rank * p->stride;
    memset(own, 0, p->stride);
    if (first) memcpy(own, &p->call, sizeof(p->call));
    const uint64_t have = have_bytes > p->at ? have_bytes - p->at : 0;
    const uint64_t put = have < p->bytes ? have : p->bytes;
    if (put) memcpy(own + p->skip, (const char *)data + p->at, put);
    const int ret = p->c->ops->exchange(p->c->comm, p->pieces, own, p->stride);
    if (ret < 0) return ret;
    return first ? check_calls(p) : 0;
}

static int more(const struct parts *p) {
    return p->at + p->bytes < p->total_bytes;
}

int sw_comm_sum(const struct sw_comm_handle *c, double *values, uint32_t count) {
    assert(values || count == 0);
    struct parts p;
    const uint64_t bytes = count * sizeof(*values);
    begin(&p, c, (struct call){.kind = CALL_SUM, .amount = count}, bytes);
    do {
        const int ret = next(&p, values, bytes);
        if (ret < 0) return ret;
        for (uint64_t i = 0; i < p.bytes; i += sizeof(double)) {
            double sum, value;
            memcpy(&sum, part_of(&p, 0) + i, sizeof(sum));
            for (uint32_t r = 1; r < c->size; r++) {
                memcpy(&value, part_of(&p, r) + i, sizeof(value));
                sum += value;
            }
            values[(p.at + i) / sizeof(double)] = sum;
        }
    } while (more(&p));
    return 0;
}

int sw_comm_broadcast(const struct sw_comm_handle *c, void *data, uint64_t bytes, uint32_t root) {
    assert(c && root < c->size);
    assert(data || bytes == 0);
    struct parts p;
    begin(&p, c, (struct call){.kind = CALL_BROADCAST, .root = root, .amount = bytes}, bytes);
    do {
        const int ret = next(&p, data, c->rank == root ? bytes : 0);
        if (ret < 0) return ret;
        if (c->rank != root && p.bytes) memcpy((char *)data + p.at, part_of(&p, root), p.bytes);
    } while (more(&p));
    return 0;
}

/* What ranks tell each other of their texts before the texts themselves. */
struct digest {
    uint64_t hash, bytes;
};

static struct digest digest_of(const struct parts *p, uint32_t rank) {
    struct digest digest;
    memcpy(&digest, part_of(p, rank), sizeof(digest));
    return digest;
}

/* A line, cut at a limit. */
static void copy_line(const struct parts *p, uint32_t rank, char out[SW_COMM_LINE_BYTES],
                      int *is_over) {
    const char *line = part_of(p, rank);
    uint64_t length = 0;
    while (length < p->bytes && line[length] && line[length] != '\n') length++;
    *is_over = p->bytes == 0 || (length == 0 && !line[0]);
    if (length >= SW_COMM_LINE_BYTES) length = SW_COMM_LINE_BYTES - 1;
    memcpy(out, line, length);
    out[length] = '\0';
}

/* Finds the first line in which the texts of rank 0 and `other` differ; all ranks take part. */
static int find_difference(struct parts *p, const char *lines, uint64_t have_bytes, uint32_t other,
                           struct sw_difference *out) {
    uint64_t line_at = 0, number = 1, i = 0;
    do {
        const int ret = next(p, lines, have_bytes);
        if (ret < 0) return ret;
        const char *ours = part_of(p, 0), *theirs = part_of(p, other);
        for (i = 0; i < p->bytes && ours[i] == theirs[i]; i++) {
            if (ours[i] != '\n') continue;
            line_at = p->at + i + 1;
            number++;
        }
        /* A text that ends where the other's line does lacks the next one. */
        if (i < p->bytes && (ours[i] | theirs[i]) == '\n' && (!ours[i] || !theirs[i])) {
            line_at = p->at + i + 1;
            number++;
        }
    } while (i == p->bytes && more(p));
    p->at = line_at;
    p->bytes = 0;
    const int ret = next(p, lines, have_bytes);
    if (ret < 0) return ret;
    *out = (struct sw_difference){.rank = other, .line = number};
    copy_line(p, 0, out->lines[0], &out->is_over[0]);
    copy_line(p, other, out->lines[1], &out->is_over[1]);
    return 1;
}

int sw_comm_compare(const struct sw_comm_handle *c, const char *lines,
                    struct sw_difference *difference) {
    assert(c && lines && difference);
    uint64_t bytes = strlen(lines);
    while (bytes > 0 && lines[bytes - 1] == '\n') bytes--;
    const struct digest mine = {XXH3_64bits(lines, bytes), bytes};
    struct parts p;
    begin(&p, c, (struct call){.kind = CALL_AGREE}, sizeof(mine));
    const int ret = next(&p, &mine, sizeof(mine));
    if (ret < 0) return ret;
    const struct digest first = digest_of(&p, 0);
    for (uint32_t r = 1; r < c->size; r++) {
        const struct digest other = digest_of(&p, r);
        if (memcmp(&first, &other, sizeof(first)) == 0) continue;
        p.total_bytes = first.bytes > other.bytes ? first.bytes : other.bytes;
        p.at = p.bytes = 0;
        return find_difference(&p, lines, bytes, r, difference);
    }
    return 0;
}

static void show_line(const struct sw_difference *d, int which, char *shown, size_t size) {
    if (d->is_over[which])
        snprintf(shown, size, "no such line");
    else
        snprintf(shown, size, "'%.*s'", LINE_SHOWN_MAX, d->lines[which]);
}

int sw_comm_agree(const struct sw_comm_handle *c, const char *lines) {
    struct sw_difference d;
    const int ret = sw_comm_compare(c, lines, &d);
    if (ret != 1) return ret;
    if (c->rank == 0) {
        char shown[2][LINE_SHOWN_MAX + 3];
        show_line(&d, 0, shown[0], sizeof(shown[0]));
        show_line(&d, 1, shown[1], sizeof(shown[1]));
        sw_error("collective: ranks must run with the same settings, but line %llu differs: rank 0 "
                 "has %s, rank %u has %s",
                 (unsigned long long)d.line, shown[0], d.rank, shown[1]);
        c->ops->abort(c->comm, -EINVAL);
    }
    return -EINVAL;
}

/* One rank by itself: an error is all that it keeps. */
struct sw_comm {
    atomic_int error;
};

static int self_all_gather(struct sw_comm *c, struct sw_stream *s, void *out, const void *in,
                           uint64_t bytes) {
    (void)s;
    const int error = atomic_load(&c->error);
    if (error < 0) return error;
    if (bytes && out != in) memcpy(out, in, bytes);
    return 0;
}

static int self_reduce_scatter(struct sw_comm *c, struct sw_stream *s, float *out, const float *in,
                               enum sw_dtype carried, uint64_t count) {
    if (carried == SW_FP32) return self_all_gather(c, s, out, in, count * sizeof(*out));
    const int error = atomic_load(&c->error);
    if (error < 0) return error;
    for (uint64_t i = 0; i < count; i++) out[i] = sw_f32_from_bf16(sw_bf16_from_f32(in[i]));
    return 0;
}

static int self_exchange(struct sw_comm *c, void *out, const void *in, uint64_t bytes) {
    assert(bytes <= SW_COMM_EXCHANGE_MAX);
    return self_all_gather(c, NULL, out, in, bytes);
}

static void self_abort(struct sw_comm *c, int error) {
    assert(error < 0);
    int none = 0;
    atomic_compare_exchange_strong(&c->error, &none, error);
}

static void self_close(struct sw_comm *c) {
    free(c);
}

static uint64_t self_met_ns(const struct sw_comm *c) {
    (void)c;
    return 0;
}

static const struct sw_comm_ops self_ops = {.name = "self",
                                            .all_gather = self_all_gather,
                                            .reduce_scatter = self_reduce_scatter,
                                            .exchange = self_exchange,
                                            .met_ns = self_met_ns,
                                            .abort = self_abort,
                                            .close = self_close};

int sw_comm_open_self(struct sw_comm_handle *out) {
    assert(out);
    struct sw_comm *c = calloc(1, sizeof(*c));
    if (!c) return -ENOMEM;
    *out = (struct sw_comm_handle){.comm = c, .ops = &self_ops, .rank = 0, .size = 1};
    return 0;
}
