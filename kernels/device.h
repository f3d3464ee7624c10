/* kernels/device.h - the border between the engine and whatever computes: memory, copies, streams,
 * events and the model's operators, behind one table. No CUDA type appears here.
 *
 * Order: work on one stream runs in submission order; streams are ordered against each other by
 * events alone. A stream is submitted to by one thread. Calls on a stream may return before the
 * work is done (a GPU) or after it (the host device, which runs everything inside the call).
 * Memory: "device memory" comes from alloc(); kernels read and write nothing else. Nothing is
 * allocated by any operator; scratch is the caller's and sized by the *_scratch_bytes functions.
 * Numbers: `dtype` is the type of weights and activations, BF16 or FP32; arithmetic inside an
 * operator is FP32, results round to nearest even. Weight gradients are FP32 and accumulate where
 * told. Equal inputs give equal bits on one machine with one thread count; no float atomics.
 * Errors: 0 or -errno, reported once. Sizes that make no sense are asserted. */
#ifndef KERNELS_DEVICE_H
#define KERNELS_DEVICE_H
#include <stddef.h>
#include <stdint.h>
#include "base/bf16.h"
#include "base/block_norm.h"

struct sw_device; /* opaque, the back end's */
struct sw_stream;
struct sw_event;

/* Filled by round_norm: what N reads about one unit. */
struct sw_nonfinite {
    uint64_t count;  /* elements that are Inf or NaN */
    uint64_t first;  /* index of the first, when count > 0 */
    uint32_t is_nan; /* that first one is a NaN */
    uint32_t pad;
};

/* Shapes of attention: q and out are [batch][time][heads][head_dim], k and v [batch][time]
 * [kv_heads][head_dim], all contiguous; lse is FP32 [batch][heads][time]. heads % kv_heads == 0. */
struct sw_attention {
    uint32_t batch, time, heads, kv_heads, head_dim;
    float scale; /* 1 / sqrt(head_dim) */
    /* Where the document of each position begins in its row, device memory [batch][time]: starts[b]
     * [i] <= i, ascending in i. Position i sees keys starts[b][i] .. i. NULL: 0 .. i; a row of
     * zeros has the same bits. */
    const uint32_t *starts;
};

/* Elements that decay alike, and one chunk of a device Adam step: fields and record layout as in
 * cpu_adam/adam.h. The ranges are the caller's and lie in host memory. */
struct sw_device_adam_range {
    uint64_t end;
    int decays;
};
struct sw_device_adam_chunk {
    void *record;
    const void *grad;
    void *weight;
    uint64_t count, first;
    const struct sw_device_adam_range *ranges;
    int range_count;
    uint32_t split_master, coded_moments;
    enum sw_dtype grad_dtype, weight_dtype;
};

/* The scalars that the control lane uploads for a device Adam; as struct sw_adam_step. */
struct sw_device_adam_step {
    float beta1, one_minus_beta1, beta2, one_minus_beta2, eps, step_size, rsqrt_bias2, grad_scale;
    float decay_factor;
    uint32_t seed;
    uint32_t apply; /* 0: the kernel changes nothing */
};

/* C[m][n] = op(A) op(B) (+ C when accumulate), row-major, FP32 sums rounded once to c_dtype.
 * op(A) is m x k: A is stored [m][lda] or, transposed, [k][lda]; op(B) is k x n: B is stored
 * [k][ldb] or, transposed, [n][ldb]. */
struct sw_gemm {
    uint64_t m, n, k;
    int trans_a, trans_b, accumulate;
    const void *a;
    enum sw_dtype a_dtype;
    uint64_t lda;
    const void *b;
    enum sw_dtype b_dtype;
    uint64_t ldb;
    void *c;
    enum sw_dtype c_dtype;
    uint64_t ldc;
};

enum { SW_DEVICE_GROUP_MAX = 64, SW_DEVICE_GROUP_NAME_BYTES = 128 };

/* Devices that move data between them, of one process or of several. A call is made by a thread for
 * each device, by all with the same sizes in the same order, and is queued on a stream of that
 * device. */
struct sw_device_file;  /* one that a device reads */
struct sw_device_group; /* one device's part */
struct sw_device_group_ops {
    /* Lets each of the devices read and write the others' memory without a detour, where the
     * machine can; before anything else is made of them. direct [size][size]: from row to column;
     * the diagonal is 0. */
    int (*connect)(struct sw_device *const *devices, uint32_t size, uint8_t *direct);
    /* Bytes from memory of one device to that of another, on a stream of the former. */
    int (*copy)(struct sw_stream *s, struct sw_device *to, void *dst, const void *src,
                uint64_t bytes);
    /* No direct way is to be trusted: copies and the groups opened from now on go through the
     * host's memory. Before the first group. */
    int (*detour)(struct sw_device *const *devices, uint32_t size, const uint8_t *direct);
    /* name [SW_DEVICE_GROUP_NAME_BYTES]: one for a group that is to be opened, made by one process
     * for all that take part. */
    int (*make_name)(void *name);
    /* The ranks [first, first + count) of `size`, which these devices are: fills out[0..count).
     * Waits, for ever if need be, until all ranks of that name are there. carried: the type in
     * which reduce_scatter will move what it sums. */
    int (*open)(struct sw_device *const *devices, uint32_t count, uint32_t first, uint32_t size,
                const void *name, enum sw_dtype carried, struct sw_device_group **out);
    void (*close)(struct sw_device_group *g); /* each its own; NULL is fine */
    /* out [size][bytes]; `in` may be this device's own place in `out`. */
    int (*all_gather)(struct sw_device_group *g, struct sw_stream *s, void *out, const void *in,
                      uint64_t bytes);
    /* in FP32 [size][count]; out FP32 [count] = the sum over devices of their in[this one], and may
     * be its own place in `in`. Carried as BF16, each value is rounded to nearest even on its way,
     * and the sum is formed in FP32 in the devices' order, beginning with -0. */
    int (*reduce_scatter)(struct sw_device_group *g, struct sw_stream *s, float *out,
                          const float *in, uint64_t count);
    /* Whether what is queued has failed: 0, or -errno, reported; any thread. */
    int (*poll)(struct sw_device_group *g);
    void (*abort)(struct sw_device_group *g); /* ends what is queued, in bounded time; any thread */
    /* What sums depend on, of values carried so; as snprintf(). */
    int (*numerics)(enum sw_dtype carried, char *out, size_t size);
};

enum { SW_BUS_ADDRESS_BYTES = 24, SW_CLOCK_NS = 250000000 };

struct sw_device_ops {
    const char *name;                        /* "host", "cuda" */
    const struct sw_device_group_ops *group; /* NULL: none can be formed */

    void (*close)(struct sw_device *d);
    /* Text of operator library, version, instruction set and threads: part of the numerics key. */
    const char *(*numerics)(struct sw_device *d);

    int (*alloc)(struct sw_device *d, uint64_t bytes, void **out); /* 4 KiB aligned, zeroed */
    void (*free)(struct sw_device *d, void *p, uint64_t bytes);
    uint64_t (*free_bytes)(struct sw_device *d); /* for alloc(); UINT64_MAX: the host's memory */
    /* Its address on the PCI bus ("0000:3b:00.0"), or "": unknown, or the host itself. */
    void (*bus_address)(struct sw_device *d, char out[SW_BUS_ADDRESS_BYTES]);
    /* Host memory from which, and to which, copies run behind the caller's back: until it is
     * unpinned it stays in place. Copies of other host memory may wait for the stream. Pieces do
     * not overlap, and are unpinned as they were pinned. */
    int (*pin)(struct sw_device *d, void *p, uint64_t bytes);
    void (*unpin)(struct sw_device *d, void *p);

    int (*stream_create)(struct sw_device *d, struct sw_stream **out);
    void (*stream_destroy)(struct sw_stream *s); /* after all work submitted so far */
    int (*stream_sync)(struct sw_stream *s);     /* waits for all work submitted so far */
    /* Makes what later calls from the calling thread would otherwise make at their first time: its
     * team, and where `products` is set what the library of matrix products keeps. */
    int (*prepare)(struct sw_stream *s, int products);
    int (*event_create)(struct sw_device *d, struct sw_event **out);
    void (*event_destroy)(struct sw_event *e);
    int (*event_record)(struct sw_event *e, struct sw_stream *s);
    int (*stream_wait)(struct sw_stream *s, struct sw_event *e); /* e was recorded before */
    int (*event_wait)(struct sw_event *e); /* blocks the caller, no spinning */
    /* Whether what event_wait would wait for is over: 1, 0, or -errno. */
    int (*event_done)(struct sw_event *e);

    /* When work ran on streams, by sw_now_ns(). Back ends that run everything inside the call have
     * none of these four (NULL): there the caller's own clock tells.
     *
     * An event that keeps its time; else as event_create's. */
    int (*timed_event_create)(struct sw_device *d, struct sw_event **out);
    /* Compares the device's clock with the host's, once each SW_CLOCK_NS at most: to be called
     * before the first event is recorded, outside steps, and about that often from then on, while
     * times are wanted. Does not wait for work on other streams. 1: it has; 0: not now; or -errno.
     * One thread at a time, together with the two below. */
    int (*clock_set)(struct sw_device *d);
    /* When a timed event happened. -EAGAIN: not yet, or it is not known yet; not reported. */
    int (*event_ns)(struct sw_event *e, uint64_t *ns);
    /* How far off event_ns may have been at most, but for what the clocks drift apart in between.
     */
    uint64_t (*clock_error_ns)(struct sw_device *d);

    /* The start of a run, in which each step is done on all devices before the next (docs/cuda.md).
     * Back ends that have nothing to make before a step have none of these (NULL).
     *
     * Loads the kernels and opens the library of matrix products: by open itself, unless its
     * options leave it to the caller. Once. */
    int (*load)(struct sw_device *d);
    /* What is not free of the device's memory, by whoever it was taken. */
    uint64_t (*taken_bytes)(struct sw_device *d);
    /* From 1 on, until 0 again, nothing is asked of the device but what operators, copies, events
     * and groups queue and wait for: no call that makes, frees, pins or measures. Tests on the
     * stand-in hold callers and the back end itself to that. Profilers may take it for the range
     * that they record. */
    void (*settle)(struct sw_device *d, int settled);
    /* What is queued on it will never end: from now on nothing waits for it, and nothing that it
     * may still use is given back. */
    void (*give_up)(struct sw_device *d);

    /* From now on copies up and down are made in pieces of so many bytes; 0: each whole, as at
     * first. The bytes that arrive are the same. While no copy is being queued. NULL where it would
     * change nothing. */
    void (*cut_copies)(struct sw_device *d, uint64_t h2d_bytes, uint64_t d2h_bytes);
    int (*copy_h2d)(struct sw_stream *s, void *dst, const void *src, uint64_t bytes);
    int (*copy_d2h)(struct sw_stream *s, void *dst, const void *src, uint64_t bytes);
    int (*copy_d2d)(struct sw_stream *s, void *dst, const void *src, uint64_t bytes);
    int (*zero)(struct sw_stream *s, void *dst, uint64_t bytes);

    /* Files that the device reads by itself, past the host's memory. Back ends that have no such
     * thing have none of these (NULL).
     *
     * fd was opened with O_DIRECT and stays the caller's, open until file_close(). base: the memory
     * of the device that reads go to. -ENOTSUP, not reported, with the reason in `why` [size]: not
     * on this machine, or no such file. At the start of a run. */
    int (*file_open)(struct sw_device *d, int fd, void *base, uint64_t bytes,
                     struct sw_device_file **out, char *why, size_t size);
    void (*file_close)(struct sw_device_file *f); /* NULL is fine */
    /* Behind all that is on the stream; done on return. *sum: that of base/word_sum.h, taken by the
     * device, of what has come. */
    int (*file_read)(struct sw_stream *s, struct sw_device_file *f, void *dst, uint64_t offset,
                     uint64_t bytes, uint64_t *sum);

    /* For tokens in [first_row, first_row + rows) alone, out[i] = table[tokens[i] - first_row]; the
     * others' rows of out stay as they are. out [n][width], table [rows][width], tokens int32 [n],
     * none below 0. */
    int (*embed)(struct sw_stream *s, enum sw_dtype dtype, void *out, const void *table,
                 const int32_t *tokens, uint64_t n, uint64_t width, uint64_t first_row,
                 uint64_t rows);
    /* For the same tokens, dtable[tokens[i] - first_row] += dout[i], in order of i for each row:
     * dtable FP32 [rows][width]. */
    int (*embed_backward)(struct sw_stream *s, enum sw_dtype dtype, float *dtable, const void *dout,
                          const int32_t *tokens, uint64_t n, uint64_t width, uint64_t first_row,
                          uint64_t rows);

    /* out = x / sqrt(mean(x^2) + eps) * w by rows (Zhang & Sennrich, arXiv:1910.07467, eq. 4);
     * rstd FP32 [n] is kept for backward. */
    int (*rmsnorm)(struct sw_stream *s, enum sw_dtype dtype, void *out, float *rstd, const void *x,
                   const void *w, uint64_t n, uint64_t width, float eps);
    /* dx = gradient (+ dx when add_dx); dw FP32 [width] = gradient (+ dw when add_dw), or NULL:
     * left out. */
    int (*rmsnorm_backward)(struct sw_stream *s, enum sw_dtype dtype, void *dx, int add_dx,
                            float *dw, int add_dw, const void *dy, const void *x, const void *w,
                            const float *rstd, uint64_t n, uint64_t width, void *scratch);
    uint64_t (*rmsnorm_scratch_bytes)(struct sw_device *d, uint64_t n, uint64_t width);

    int (*gemm)(struct sw_stream *s, const struct sw_gemm *g);

    /* Rotates pairs (i, i + head_dim/2) of x [rows][heads][head_dim] in place by the angles of
     * position row % time (Su et al., arXiv:2104.09864; halves as in Hugging Face's Llama). cos and
     * sin: FP32 [time][head_dim/2]. inverse rotates back, which is the backward pass. */
    int (*rope)(struct sw_stream *s, enum sw_dtype dtype, void *x, const float *cos,
                const float *sin, uint64_t rows, uint64_t time, uint64_t heads, uint64_t head_dim,
                int inverse);

    /* Causal grouped-query attention inside documents, in blocks with an online softmax (Dao et
     * al., arXiv:2205.14135): no time x time matrix exists. */
    int (*attention)(struct sw_stream *s, enum sw_dtype dtype, const struct sw_attention *shape,
                     void *out, float *lse, const void *q, const void *k, const void *v,
                     void *scratch);
    int (*attention_backward)(struct sw_stream *s, enum sw_dtype dtype,
                              const struct sw_attention *shape, void *dq, void *dk, void *dv,
                              const void *dout, const void *out, const float *lse, const void *q,
                              const void *k, const void *v, void *scratch);
    uint64_t (*attention_scratch_bytes)(struct sw_device *d, const struct sw_attention *shape);

    /* out = silu(gate) * up (Shazeer, arXiv:2002.05202); out may be gate or up. */
    int (*swiglu)(struct sw_stream *s, enum sw_dtype dtype, void *out, const void *gate,
                  const void *up, uint64_t count);
    /* dgate and dup may be gate and up themselves. */
    int (*swiglu_backward)(struct sw_stream *s, enum sw_dtype dtype, void *dgate, void *dup,
                           const void *dout, const void *gate, const void *up, uint64_t count);

    /* The cross-entropy of rows whose columns come in parts: a call sees columns [first_column,
     * first_column + width) of each row, as logits FP32 [n][width], width > 0. targets int32 [n]
     * are columns of the whole row. Three operators:
     *
     * stats FP32 [n][3] become those of the columns so far: their maximum, the sum of exp(l -
     * maximum), and the target's logit (NaN until its column came). begin: these are the row's
     * first columns; else they go on from what stats holds, in ascending order (the online softmax
     * of Milakov & Gimelshein, arXiv:1805.02867, algorithm 3). A NaN or +Inf among the logits, or
     * nothing but -Inf in a call, makes the sum NaN. */
    int (*softmax_stats)(struct sw_stream *s, float *stats, const float *logits,
                         const int32_t *targets, uint64_t n, uint64_t width, uint64_t first_column,
                         int begin);
    /* After the last columns: loss[i] = mask[i] ? maximum + log(sum) - target's logit : 0, FP32
     * [n]. mask NULL: all count. */
    int (*softmax_loss)(struct sw_stream *s, float *loss, const float *stats, const uint8_t *mask,
                        uint64_t n);
    /* dlogits [n][width] in dtype = mask[i] ? (exp(l - maximum) / sum - onehot) * scale : 0, with
     * the whole row's stats. dlogits may be logits itself when dtype is FP32. */
    int (*softmax_backward)(struct sw_stream *s, enum sw_dtype dtype, void *dlogits,
                            const float *logits, const float *stats, const int32_t *targets,
                            const uint8_t *mask, float scale, uint64_t n, uint64_t width,
                            uint64_t first_column);

    /* *out = sum of x in index order, in double. */
    int (*sum)(struct sw_stream *s, double *out, const float *x, uint64_t n);

    /* dst = src rounded to dtype (nearest even; a copy for FP32). dst may not be src. */
    int (*round)(struct sw_stream *s, enum sw_dtype dtype, void *dst, const float *src,
                 uint64_t count);

    /* dst = src rounded to dst_dtype (nearest even); block_sums[i] = squared norm, in double, of
     * the rounded elements [i * SW_NORM_BLOCK, ...) in a fixed order; *bad counts what is not
     * finite (such elements do enter the sums). dst may not be src. */
    int (*round_norm)(struct sw_stream *s, void *dst, enum sw_dtype dst_dtype, const float *src,
                      uint64_t count, double *block_sums, struct sw_nonfinite *bad);

    /* AdamW over a chunk with the CPU's bits; step lies in device memory. */
    int (*adam)(struct sw_stream *s, const struct sw_device_adam_step *step,
                const struct sw_device_adam_chunk *chunk);
};

struct sw_device_handle { /* what open functions fill */
    struct sw_device *device;
    const struct sw_device_ops *ops;
};

/* The CPU as a device. adam runs a device Adam chunk (kernels/ knows no optimizer, so the engine
 * passes the CPU's own). threads: the OpenMP team of each stream, >= 1. The instruction set is
 * SPILLWAY_ISA's or the best supported one: errors as in base/isa.h. */
typedef void (*sw_host_adam)(const struct sw_device_adam_step *step,
                             const struct sw_device_adam_chunk *chunk, void *ctx);
struct sw_host_device_options {
    int threads;
    sw_host_adam adam;
    void *adam_ctx;
};
int sw_device_host_open(struct sw_device_handle *out, const struct sw_host_device_options *options);

/* An NVIDIA GPU, through the plugin libspillway_cuda.so beside the program, or the one that
 * SPILLWAY_CUDA_PLUGIN names. -ENOENT: no plugin; -ENOEXEC: one of another version; -ENODEV: no
 * driver or no such device. */
struct sw_cuda_device_options {
    int index;       /* CUDA's */
    int loads_later; /* load() is the caller's; until then there are memory, streams and copies */
};
int sw_device_cuda_open(struct sw_device_handle *out, const struct sw_cuda_device_options *options);
int sw_device_cuda_count(void); /* devices, or -errno as above */
/* Likewise for who can do without: 0 where there is no driver and no plugin is named, in silence;
 * what else is missing is told, and is no error. */
int sw_device_cuda_usable(void);

#endif
