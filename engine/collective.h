/* engine/collective.h - what ranks do together, behind one small interface.
 *
 * A group has `size` ranks; each holds one handle (struct sw_comm) and uses it from one thread at a
 * time. All ranks of a group make the same calls in the same order with the same sizes; a rank that
 * makes another call than the others is named. Data calls work on device memory and are enqueued on
 * a stream of the caller's device: they may return before they are done (a GPU) or after (the host
 * device). Control calls work on host memory and are done on return.
 *
 * Sums are formed in FP32 in rank order, beginning with rank 0's value, whatever the threads and
 * processes: equal ranks, equal bits. Errors: 0 or -errno, reported once, by the rank that finds
 * it, with the rank and call that it waited for; then every call of every rank of the group ends
 * with an error, in bounded time. A rank that does not come for `timeout_s` is an error
 * (-ETIMEDOUT). Nothing is allocated in a call.
 */
#ifndef ENGINE_COLLECTIVE_H
#define ENGINE_COLLECTIVE_H
#include <stdint.h>
#include "base/bf16.h"
#include "kernels/device.h"

struct sw_comm; /* one rank's handle */

struct sw_comm_ops {
    const char *name; /* "self", "host", ... */

    /* out [size][bytes]; `in` (bytes) may be this rank's own place in `out`. */
    int (*all_gather)(struct sw_comm *c, struct sw_stream *s, void *out, const void *in,
                      uint64_t bytes);
    /* in FP32 [size][count]; out FP32 [count] = the sum over ranks of their in[rank], in rank
     * order; it may be this rank's own place in `in`. carried SW_BF16: each contribution is rounded
     * to BF16 (nearest even) on its way, the sum stays FP32. */
    int (*reduce_scatter)(struct sw_comm *c, struct sw_stream *s, float *out, const float *in,
                          enum sw_dtype carried, uint64_t count);
    /* Control: out [size][bytes] of host memory, small (at most SW_COMM_EXCHANGE_MAX bytes a rank);
     * `in` may be this rank's own place in `out`. bytes 0 is a barrier. */
    int (*exchange)(struct sw_comm *c, void *out, const void *in, uint64_t bytes);
    /* When all ranks had come to this rank's last call, in sw_now_ns(): until then it only waited.
     * 0 where that is not known: the call may not have been made on the device yet. */
    uint64_t (*met_ns)(const struct sw_comm *c);
    /* Ends every call of the group, now and later, with `error` (-errno), which the caller has
     * reported; any thread. The first error stays. Calls that all ranks have entered may still end
     * well, as nobody returns while others read its memory. */
    void (*abort)(struct sw_comm *c, int error);
    void (*close)(struct sw_comm *c); /* NULL is fine */
};

enum { SW_COMM_EXCHANGE_MAX = 1 << 16, SW_RANKS_MAX = 64 };

struct sw_comm_handle {
    struct sw_comm *comm;
    const struct sw_comm_ops *ops;
    uint32_t rank, size;
};

/* One rank by itself. */
int sw_comm_open_self(struct sw_comm_handle *out);
/* `size` ranks that are threads of this process: fills out[0..size). Each closes its own; the last
 * one frees. */
int sw_comm_open_host(struct sw_comm_handle *out, uint32_t size, double timeout_s);

/* The ranks of `host` as devices of this process, each used by its own thread: -ENOTSUP,
 * unreported, where the devices form no groups. Takes over the `count` handles in host, how the
 * ranks meet before a call, which are closed also after an error; they are all ranks of the group
 * in this process, one after the other. name: the group's, of device.h's make_name; where processes
 * take part, all call this at once, and have timeout_s to come. carried: the only type in which
 * reduce_scatter will be asked to carry values. FP32 sums have the library's order; of values
 * carried as BF16 they are formed as above. A call that fails on the devices after it was queued is
 * found by a thread that looks for it: it reports, calls failed(), which shall stop whoever uses
 * results, and ends what is queued. */
struct sw_comm_devices {
    const struct sw_comm_handle *host;
    const struct sw_device_handle *devices;
    uint32_t count;
    const void *name;
    enum sw_dtype carried;
    double timeout_s;
    void (*failed)(void *ctx, int error);
    void *ctx;
};
int sw_comm_open_devices(struct sw_comm_handle *out, const struct sw_comm_devices *of);
/* All ranks in this process: host handles and a name of its own. */
int sw_comm_open_local_devices(struct sw_comm_handle *out, const struct sw_comm_devices *of);

/* What a call moves over this rank's links, in bytes: the textbook's (size - 1) / size of the
 * whole.
 */
static inline uint64_t sw_comm_gather_bytes(const struct sw_comm_handle *c, uint64_t bytes) {
    return (uint64_t)(c->size - 1) * bytes;
}
static inline uint64_t sw_comm_scatter_bytes(const struct sw_comm_handle *c, enum sw_dtype carried,
                                             uint64_t count) {
    return (uint64_t)(c->size - 1) * count * sw_dtype_bytes(carried);
}

/* These are made of exchanges. They use 33 KB of stack, and ranks that call different ones, or the
 * same with other sizes, are named as above.
 *
 * The sum of each value over ranks, in rank order, on all of them. Control call. */
int sw_comm_sum(const struct sw_comm_handle *c, double *values, uint32_t count);

/* Bytes of rank `root` to all. Control call; any length. */
int sw_comm_broadcast(const struct sw_comm_handle *c, void *data, uint64_t bytes, uint32_t root);

/* The first line in which the text of a rank differs from rank 0's. */
enum { SW_COMM_LINE_BYTES = 512 };
struct sw_difference {
    uint32_t rank; /* the first one that has another text */
    uint64_t line; /* from 1 */
    /* Rank 0's and the other's, cut at a limit; is_over: there is no such line. */
    char lines[2][SW_COMM_LINE_BYTES];
    int is_over[2];
};

/* Whether all ranks have the same text, lines of "name=value": 0; 1: no, and all ranks know where
 * they differ; or an error. Ranks compare hashes first; line breaks at the end say nothing. Control
 * call. */
int sw_comm_compare(const struct sw_comm_handle *c, const char *lines,
                    struct sw_difference *difference);

/* The same, where a difference is an end: -EINVAL on all ranks, reported by rank 0 with line, ranks
 * and values. Before the first data call. */
int sw_comm_agree(const struct sw_comm_handle *c, const char *lines);

#endif
