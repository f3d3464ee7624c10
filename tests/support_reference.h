/* tests/support_reference.h - the operators once more, naive and in double, and what tests of them
 * share. Written from the formulas in kernels/device.h, for clarity alone. */
#ifndef TESTS_SUPPORT_REFERENCE_H
#define TESTS_SUPPORT_REFERENCE_H
#include "kernels/device.h"

void ref_rmsnorm(double *out, const double *x, const double *w, uint64_t n, uint64_t width,
                 double eps);
void ref_rope(double *x, const float *cos, const float *sin, uint64_t rows, uint64_t time,
              uint64_t heads, uint64_t head_dim, int inverse);
/* The starts of shape are in the host's memory. */
void ref_attention(double *out, double *lse, const double *q, const double *k, const double *v,
                   const struct sw_attention *shape);
/* From the output as given, which may have been rounded. */
void ref_attention_backward(double *dq, double *dk, double *dv, const double *dout,
                            const double *out, const double *q, const double *k, const double *v,
                            const struct sw_attention *shape);
/* Starts [batch][time] of documents of these lengths, one after the other and round again, from row
 * b on the b-th; length 0: a random one. */
void ref_starts(uint32_t *starts, uint32_t batch, uint32_t time, const uint32_t *lengths,
                uint32_t count);
void ref_swiglu(double *out, const double *gate, const double *up, uint64_t count);
void ref_cross_entropy(double *loss, const double *logits, const int32_t *targets,
                       const uint8_t *mask, uint64_t n, uint64_t vocab);

/* grad[i] = d loss / d x[i] by central differences of fourth order. */
typedef double (*ref_loss)(void *ctx);
void ref_differences(double *grad, double *x, uint64_t count, ref_loss loss, void *ctx);
double ref_dot(const double *a, const double *b, uint64_t count);

/* A tensor in device memory and its exact values in double. */
struct ref_tensor {
    enum sw_dtype dtype;
    uint64_t count;
    void *data;
    double *exact;
};

/* An open host device with a stream; isa is one of sw_host_isas' names. */
struct ref_device {
    struct sw_device_handle handle;
    const struct sw_device_ops *ops;
    struct sw_device *device;
    struct sw_stream *stream;
    const char *isa;
    int threads;
};
void ref_device_open(struct ref_device *d, const char *isa, int threads);
void ref_device_close(struct ref_device *d);
/* One device per instruction set that this CPU runs; returns how many. */
enum { REF_DEVICES_MAX = 3 };
int ref_devices_open(struct ref_device devices[REF_DEVICES_MAX], int threads);

/* Values uniform in [-size, size], representable in dtype; size 0 leaves the memory as allocated.
 */
struct ref_tensor ref_tensor_new(struct ref_device *d, enum sw_dtype dtype, uint64_t count,
                                 double size);
void ref_tensor_free(struct ref_device *d, struct ref_tensor *t);
void ref_seed(uint64_t seed);
uint32_t ref_random(void);
double ref_value(enum sw_dtype dtype, const void *data, uint64_t i);

/* One operator's worst deviations, over all calls of ref_check() with it. An element may be off by
 * limit x (the largest |want|) for FP32 arithmetic, and in BF16 by 2^-8 |want| more: one rounding
 * to 8 bits.
 */
struct ref_report {
    const char *name;
    double limit, worst, worst_rounded; /* the last: share of the BF16 bound */
};
void ref_check(struct ref_report *report, enum sw_dtype dtype, const void *got, const double *want,
               uint64_t count);
void ref_report_print(const struct ref_report *report);

#endif
