/* kernels/host/host.h - what the files of the host device share, and no one else.
 *
 * A device owns the widened panels of its matrix products and a lock over them; a stream is a name
 * under which work runs inline in the calling thread. The operators' loops are compiled once per
 * instruction set (the *_isa.c files): every copy exports three tables and nothing else, and
 * sw_host_pick() chooses one set of them when a device is opened.
 * Every kernel takes the team's size first; its result does not depend on that size. */
#ifndef KERNELS_HOST_HOST_H
#define KERNELS_HOST_HOST_H
#include <pthread.h>
#include "base/isa.h"
#include "kernels/device.h"

/* pointwise_isa.c: no element needs another one, or the order is fixed by the interface. */
struct sw_host_pointwise {
    void (*embed)(int threads, enum sw_dtype dtype, void *out, const void *table,
                  const int32_t *tokens, uint64_t n, uint64_t width, uint64_t first_row,
                  uint64_t rows);
    void (*embed_backward)(int threads, enum sw_dtype dtype, float *dtable, const void *dout,
                           const int32_t *tokens, uint64_t n, uint64_t width, uint64_t first_row,
                           uint64_t rows);
    void (*rope)(int threads, enum sw_dtype dtype, void *x, const float *cos, const float *sin,
                 uint64_t rows, uint64_t time, uint64_t heads, uint64_t head_dim, int inverse);
    void (*swiglu)(int threads, enum sw_dtype dtype, void *out, const void *gate, const void *up,
                   uint64_t count);
    void (*swiglu_backward)(int threads, enum sw_dtype dtype, void *dgate, void *dup,
                            const void *dout, const void *gate, const void *up, uint64_t count);
    void (*round)(int threads, enum sw_dtype dtype, void *dst, const float *src, uint64_t count);
    void (*round_norm)(int threads, void *dst, enum sw_dtype dst_dtype, const float *src,
                       uint64_t count, double *block_sums, struct sw_nonfinite *bad);
    /* rows x cols of dtype with leading dimension ld to and from a dense FP32 panel. */
    void (*widen)(int threads, float *panel, uint64_t panel_ld, const void *src,
                  enum sw_dtype dtype, uint64_t ld, uint64_t rows, uint64_t cols);
    void (*narrow)(int threads, void *dst, enum sw_dtype dtype, uint64_t ld, const float *panel,
                   uint64_t panel_ld, uint64_t rows, uint64_t cols);
    void (*exp)(float *out, const float *x, uint64_t count); /* the kernels' own, for its test */
};

/* rows_isa.c: reductions along a row. */
struct sw_host_rows {
    void (*rmsnorm)(int threads, enum sw_dtype dtype, void *out, float *rstd, const void *x,
                    const void *w, uint64_t n, uint64_t width, float eps);
    void (*rmsnorm_backward)(int threads, enum sw_dtype dtype, void *dx, int add_dx, float *dw,
                             int add_dw, const void *dy, const void *x, const void *w,
                             const float *rstd, uint64_t n, uint64_t width);
    void (*softmax_stats)(int threads, float *stats, const float *logits, const int32_t *targets,
                          uint64_t n, uint64_t width, uint64_t first_column, int begin);
    void (*softmax_loss)(int threads, float *loss, const float *stats, const uint8_t *mask,
                         uint64_t n);
    void (*softmax_backward)(int threads, enum sw_dtype dtype, void *dlogits, const float *logits,
                             const float *stats, const int32_t *targets, const uint8_t *mask,
                             float scale, uint64_t n, uint64_t width, uint64_t first_column);
};

/* attention_isa.c */
struct sw_host_attention {
    uint64_t (*scratch_bytes)(int threads, const struct sw_attention *shape);
    void (*forward)(int threads, enum sw_dtype dtype, const struct sw_attention *shape, void *out,
                    float *lse, const void *q, const void *k, const void *v, void *scratch);
    void (*backward)(int threads, enum sw_dtype dtype, const struct sw_attention *shape, void *dq,
                     void *dk, void *dv, const void *dout, const void *out, const float *lse,
                     const void *q, const void *k, const void *v, void *scratch);
};

struct sw_host_isa {
    const char *name; /* sw_isa_name()'s */
    const struct sw_host_pointwise *pointwise;
    const struct sw_host_rows *rows;
    const struct sw_host_attention *attention;
};

/* By enum sw_isa. */
extern const struct sw_host_isa sw_host_isas[SW_ISA_COUNT];

/* The set of sw_isa_pick(); errors as there. */
int sw_host_pick(const struct sw_host_isa **isa);

/* A matrix product runs in blocks whose operands, widened to FP32, fill at most one panel each. */
enum { SW_HOST_PANELS = 3, SW_HOST_PANEL_ELEMENTS = 1 << 20 };

/* Rows and columns of an attention tile; the order of its sums, and so its bits, depend on it. */
enum { SW_HOST_ATTENTION_BLOCK = 64 };

struct sw_device {
    int threads;
    const struct sw_host_isa *isa;
    sw_host_adam adam;
    void *adam_ctx;
    pthread_mutex_t panel_lock; /* streams of several threads may multiply at the same time */
    float *panels[SW_HOST_PANELS];
    pthread_mutex_t event_lock; /* of all its events, for who comes before one is recorded */
    pthread_cond_t event_recorded;
    char numerics[128];
};

struct sw_stream {
    struct sw_device *device;
};

/* gemm.c. sw_host_gemm_limit() keeps the library to the named instruction set where it can. */
int sw_host_gemm(struct sw_stream *s, const struct sw_gemm *g);
/* Multiplies in every form once, so that the library makes what it keeps; 0 or -errno. */
int sw_host_gemm_prepare(struct sw_stream *s);
void sw_host_gemm_limit(const char *isa);
void sw_host_gemm_describe(char *out, size_t out_size);

/* operators.c: fills the operators' part of the table. */
void sw_host_operators(struct sw_device_ops *ops);

#endif
