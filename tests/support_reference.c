/* tests/support_reference.c - naive double versions of the operators. */
#include "tests/support_reference.h"
#include <assert.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "kernels/host/host.h"

void ref_rmsnorm(double *out, const double *x, const double *w, uint64_t n, uint64_t width,
                 double eps) {
    for (uint64_t i = 0; i < n; i++) {
        const double rms = sqrt(ref_dot(x + i * width, x + i * width, width) / (double)width + eps);
        for (uint64_t c = 0; c < width; c++) out[i * width + c] = x[i * width + c] / rms * w[c];
    }
}

void ref_rope(double *x, const float *cos, const float *sin, uint64_t rows, uint64_t time,
              uint64_t heads, uint64_t head_dim, int inverse) {
    const uint64_t half = head_dim / 2;
    for (uint64_t row = 0; row < rows; row++)
        for (uint64_t h = 0; h < heads; h++)
            for (uint64_t i = 0; i < half; i++) {
                double *a = x + (row * heads + h) * head_dim + i, *b = a + half;
                const double c = (double)cos[row % time * half + i];
                const double s = (inverse ? -1.0 : 1.0) * (double)sin[row % time * half + i];
                const double turned = *a * c - *b * s;
                *b = *b * c + *a * s;
                *a = turned;
            }
}

/* Probabilities of query i of one head; returns the log of their denominator. */
/* The first key that position i of a row sees. */
static uint64_t first_key(const struct sw_attention *s, uint64_t b, uint64_t i) {
    return s->starts ? s->starts[b * s->time + i] : 0;
}

static double attend(double *p, const double *q, const double *k, const struct sw_attention *s,
                     uint64_t b, uint64_t h, uint64_t i) {
    const uint64_t dim = s->head_dim, kv = h / (s->heads / s->kv_heads);
    const double *query = q + ((b * s->time + i) * s->heads + h) * dim;
    const uint64_t first = first_key(s, b, i);
    double most = -INFINITY, total = 0.0;
    for (uint64_t j = first; j <= i; j++) {
        p[j] = (double)s->scale *
               ref_dot(query, k + ((b * s->time + j) * s->kv_heads + kv) * dim, dim);
        most = p[j] > most ? p[j] : most;
    }
    for (uint64_t j = first; j <= i; j++) total += p[j] = exp(p[j] - most);
    for (uint64_t j = first; j <= i; j++) p[j] /= total;
    return most + log(total);
}

void ref_attention(double *out, double *lse, const double *q, const double *k, const double *v,
                   const struct sw_attention *s) {
    const uint64_t dim = s->head_dim, group = s->heads / s->kv_heads;
    double *p = malloc(s->time * sizeof(double));
    for (uint64_t b = 0; b < s->batch; b++)
        for (uint64_t h = 0; h < s->heads; h++)
            for (uint64_t i = 0; i < s->time; i++) {
                double *to = out + ((b * s->time + i) * s->heads + h) * dim;
                const double log_sum = attend(p, q, k, s, b, h, i);
                if (lse) lse[(b * s->heads + h) * s->time + i] = log_sum;
                memset(to, 0, dim * sizeof(double));
                for (uint64_t j = first_key(s, b, i); j <= i; j++)
                    for (uint64_t d = 0; d < dim; d++)
                        to[d] += p[j] * v[((b * s->time + j) * s->kv_heads + h / group) * dim + d];
            }
    free(p);
}

void ref_attention_backward(double *dq, double *dk, double *dv, const double *dout,
                            const double *out, const double *q, const double *k, const double *v,
                            const struct sw_attention *s) {
    const uint64_t dim = s->head_dim, group = s->heads / s->kv_heads;
    double *p = malloc(s->time * sizeof(double));
    memset(dq, 0, s->batch * s->time * s->heads * dim * sizeof(double));
    memset(dk, 0, s->batch * s->time * s->kv_heads * dim * sizeof(double));
    memset(dv, 0, s->batch * s->time * s->kv_heads * dim * sizeof(double));
    for (uint64_t b = 0; b < s->batch; b++)
        for (uint64_t h = 0; h < s->heads; h++)
            for (uint64_t i = 0; i < s->time; i++) {
                const uint64_t at = ((b * s->time + i) * s->heads + h) * dim;
                const double delta = ref_dot(dout + at, out + at, dim);
                attend(p, q, k, s, b, h, i);
                for (uint64_t j = first_key(s, b, i); j <= i; j++) {
                    const uint64_t kv = ((b * s->time + j) * s->kv_heads + h / group) * dim;
                    const double ds =
                        p[j] * (ref_dot(dout + at, v + kv, dim) - delta) * (double)s->scale;
                    for (uint64_t d = 0; d < dim; d++) {
                        dq[at + d] += ds * k[kv + d];
                        dk[kv + d] += ds * q[at + d];
                        dv[kv + d] += p[j] * dout[at + d];
                    }
                }
            }
    free(p);
}

void ref_swiglu(double *out, const double *gate, const double *up, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) out[i] = gate[i] / (1.0 + exp(-gate[i])) * up[i];
}

void ref_cross_entropy(double *loss, const double *logits, const int32_t *targets,
                       const uint8_t *mask, uint64_t n, uint64_t vocab) {
    for (uint64_t i = 0; i < n; i++) {
        const double *row = logits + i * vocab;
        double most = row[0], total = 0.0;
        for (uint64_t c = 1; c < vocab; c++) most = row[c] > most ? row[c] : most;
        for (uint64_t c = 0; c < vocab; c++) total += exp(row[c] - most);
        loss[i] = !mask || mask[i] ? most + log(total) - row[targets[i]] : 0.0;
    }
}

void ref_starts(uint32_t *starts, uint32_t batch, uint32_t time, const uint32_t *lengths,
                uint32_t count) {
    for (uint32_t b = 0; b < batch; b++) {
        uint32_t start = 0, next = b, left = 0;
        for (uint32_t i = 0; i < time; i++) {
            if (left == 0) {
                const uint32_t length = lengths[next++ % count];
                left = length ? length : 1 + ref_random() % 90;
                start = i;
            }
            starts[b * time + i] = start;
            left--;
        }
    }
}

double ref_dot(const double *a, const double *b, uint64_t count) {
    double sum = 0.0;
    for (uint64_t i = 0; i < count; i++) sum += a[i] * b[i];
    return sum;
}

/* With h = 2^-9 the truncation is about h^4 / 30 times a fifth derivative, the rounding 2^-53 / h:
 * both below 1e-11 of values near one. */
void ref_differences(double *grad, double *x, uint64_t count, ref_loss loss, void *ctx) {
    static const double steps[4] = {2.0, 1.0, -1.0, -2.0}, weights[4] = {-1.0, 8.0, -8.0, 1.0};
    const double h = 0x1p-9;
    for (uint64_t i = 0; i < count; i++) {
        const double saved = x[i];
        grad[i] = 0.0;
        for (int s = 0; s < 4; s++) {
            x[i] = saved + steps[s] * h;
            grad[i] += weights[s] * loss(ctx) / (12.0 * h);
        }
        x[i] = saved;
    }
}

void ref_device_open(struct ref_device *d, const char *isa, int threads) {
    const struct sw_host_device_options options = {.threads = threads};
    setenv("SPILLWAY_ISA", isa, 1);
    assert_int_equal(sw_device_host_open(&d->handle, &options), 0);
    unsetenv("SPILLWAY_ISA");
    d->ops = d->handle.ops;
    d->device = d->handle.device;
    d->isa = isa;
    d->threads = threads;
    assert_int_equal(d->ops->stream_create(d->device, &d->stream), 0);
}

void ref_device_close(struct ref_device *d) {
    d->ops->stream_destroy(d->stream);
    d->ops->close(d->device);
}

int ref_devices_open(struct ref_device devices[REF_DEVICES_MAX], int threads) {
    int count = 0;
    for (int i = SW_ISA_COUNT - 1; i >= 0; i--)
        if (sw_isa_supported((enum sw_isa)i))
            ref_device_open(&devices[count++], sw_host_isas[i].name, threads);
    return count;
}

static uint64_t random_state = 1;

void ref_seed(uint64_t seed) {
    random_state = seed * 2654435769u + 1;
}

uint32_t ref_random(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 32);
}

double ref_value(enum sw_dtype dtype, const void *data, uint64_t i) {
    return dtype == SW_FP32 ? (double)((const float *)data)[i]
                            : (double)sw_f32_from_bf16(((const sw_bf16 *)data)[i]);
}

struct ref_tensor ref_tensor_new(struct ref_device *d, enum sw_dtype dtype, uint64_t count,
                                 double size) {
    struct ref_tensor t = {.dtype = dtype, .count = count};
    assert_int_equal(d->ops->alloc(d->device, count * sw_dtype_bytes(dtype), &t.data), 0);
    t.exact = calloc(count + 1, sizeof(double));
    for (uint64_t i = 0; i < count && size != 0.0; i++) {
        const float x = (float)(((double)ref_random() / 0x1p31 - 1.0) * size);
        if (dtype == SW_FP32)
            ((float *)t.data)[i] = x;
        else
            ((sw_bf16 *)t.data)[i] = sw_bf16_from_f32(x);
        t.exact[i] = ref_value(dtype, t.data, i);
    }
    return t;
}

void ref_tensor_free(struct ref_device *d, struct ref_tensor *t) {
    d->ops->free(d->device, t->data, t->count * sw_dtype_bytes(t->dtype));
    free(t->exact);
}

void ref_check(struct ref_report *report, enum sw_dtype dtype, const void *got, const double *want,
               uint64_t count) {
    double largest = 0.0;
    for (uint64_t i = 0; i < count; i++) largest = fmax(largest, fabs(want[i]));
    for (uint64_t i = 0; i < count; i++) {
        const double error = fabs(ref_value(dtype, got, i) - want[i]);
        const double fp32 = report->limit * largest;
        const double bound = dtype == SW_FP32 ? fp32 : fp32 + 0x1p-8 * (fabs(want[i]) + fp32);
        if (!(error <= bound + 0x1p-133)) /* half the spacing of BF16's subnormals; catches NaN */
            fail_msg("%s (%s): element %llu of %llu is %g, not %g: off by %.2e, allowed %.2e",
                     report->name, sw_dtype_name(dtype), (unsigned long long)i,
                     (unsigned long long)count, ref_value(dtype, got, i), want[i], error, bound);
        if (dtype == SW_FP32)
            report->worst = fmax(report->worst, error / fmax(largest, 1e-300));
        else
            report->worst_rounded = fmax(report->worst_rounded, error / fmax(bound, 1e-300));
    }
}

void ref_report_print(const struct ref_report *report) {
    print_message("%s: worst relative error %.1e, limit %.1e; BF16 at %.0f%% of its bound\n",
                  report->name, report->worst, report->limit, 100.0 * report->worst_rounded);
}
