/* tools/bench_adam_verify.c - what is timed is right: checked on every machine before each
 * benchmark, because a processor or a compiler that the tests never saw may run it. */
#include "tools/bench.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"

/* Several shares, whole tiles, and a tail that no vector divides. */
enum { COUNT = 3 * 4096 + 77, DECAYS_UNTIL = 5000, UPDATES = 3 };

static const struct sw_adam_range ranges[] = {{DECAYS_UNTIL, 1}, {COUNT, 0}};

/* One chunk with memory of its own. */
struct subject {
    struct sw_adam_chunk chunk;
    void *record;
    uint64_t record_bytes, weight_bytes;
};

/* 32 random bits (a linear congruence, the upper half). */
static uint32_t next(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 32);
}

/* Of either sign, between 2^-20 and 2. */
static float value(uint64_t *state) {
    const uint32_t bits = next(state);
    return sw_f32_from_bits((bits & 0x807FFFFFu) | (107 + next(state) % 21) << 23);
}

static int open_subject(struct subject *s, const struct sw_adam_format *format, int weight,
                        const void *grad) {
    memset(s, 0, sizeof(*s));
    s->chunk = (struct sw_adam_chunk){
        .format = *format, .count = COUNT, .ranges = ranges, .range_count = 2, .grad = grad};
    s->record_bytes = sw_adam_record_bytes(format, COUNT);
    s->weight_bytes = weight ? COUNT * sw_dtype_bytes(format->weight) : 0;
    s->record = calloc(1, s->record_bytes);
    s->chunk.weight = weight ? calloc(1, s->weight_bytes) : NULL;
    float *masters = malloc(COUNT * sizeof(*masters));
    const int ok = s->record && masters && (!weight || s->chunk.weight);
    if (ok) {
        uint64_t state = 1;
        for (int i = 0; i < COUNT; i++) masters[i] = value(&state);
        sw_adam_record_map(&s->chunk, s->record);
        sw_adam_start(&s->chunk, 0, COUNT, masters);
        for (int i = 0; i < COUNT && format->moments == SW_MOMENTS_FP32; i++) {
            s->chunk.momentum[i] = value(&state) * 0.01f;
            s->chunk.variance[i] = fabsf(value(&state)) * 1e-4f;
        }
    }
    free(masters);
    return ok ? 0 : -ENOMEM;
}

static void close_subject(struct subject *s) {
    free(s->record);
    free(s->chunk.weight);
}

static int differ(const struct sw_adam_format *f, enum sw_isa isa) {
    sw_error("bench: Adam's %s variant has other bits than the scalar one (master %s, moments %s, "
             "gradient %s): it must not be used",
             sw_isa_name(isa), f->master == SW_MASTER_SPLIT ? "split" : "fp32",
             f->moments == SW_MOMENTS_8BIT ? "8bit" : "fp32", sw_dtype_name(f->grad));
    return -EIO;
}

/* Several updates by each variant that runs here: the same state and weights. */
static int same_bits(const struct sw_adam_format *format, int weight, int coupled,
                     const void *grad) {
    const struct sw_adam_hyper hyper = {1e-3, 0.9, 0.95, 1e-8, 0.1, coupled};
    struct subject want, got;
    int ret = open_subject(&want, format, weight, grad);
    for (int isa = SW_ISA_SCALAR; isa < SW_ISA_COUNT && !ret; isa++) {
        if (!sw_isa_supported((enum sw_isa)isa)) continue;
        struct subject *s = isa == SW_ISA_SCALAR ? &want : &got;
        if (s == &got) ret = open_subject(&got, format, weight, grad);
        for (uint64_t t = 1; t <= UPDATES && !ret; t++) {
            struct sw_adam_step step;
            sw_adam_prepare(&step, &hyper, t, 0.375f);
            sw_adam_update(&sw_adam_variants[isa], &step, &s->chunk, isa == SW_ISA_SCALAR ? 1 : 2,
                           NULL);
        }
        if (s == &got) {
            if (!ret &&
                (memcmp(want.record, got.record, want.record_bytes) ||
                 (weight && memcmp(want.chunk.weight, got.chunk.weight, want.weight_bytes))))
                ret = differ(format, (enum sw_isa)isa);
            close_subject(&got);
        }
    }
    close_subject(&want);
    return ret;
}

/* One element's update as adam.h states it, in double, and how far from it FP32 may end: each
 * operation and each scalar is off by a relative 2^-24, taken at the size of its terms. */
static int follows_rule(const struct sw_adam_hyper *h, uint64_t t, float scale, int decays,
                        const float before[3], float grad, const float after[3]) {
    const double unit = 0x1p-24;
    double p = (double)before[0], g = (double)grad * (double)scale;
    if (decays && h->coupled) g += h->weight_decay * p;
    const double g_size =
        fabs((double)grad * (double)scale) + (decays && h->coupled ? h->weight_decay * fabs(p) : 0);
    if (decays && !h->coupled) p *= 1 - h->lr * h->weight_decay;
    const double m = h->beta1 * (double)before[1] + (1 - h->beta1) * g;
    const double m_size = h->beta1 * fabs((double)before[1]) + (1 - h->beta1) * g_size;
    const double v = h->beta2 * (double)before[2] + (1 - h->beta2) * g * g;
    const double v_size = h->beta2 * (double)before[2] + (1 - h->beta2) * g_size * g_size;
    const double root = sqrt(v) / sqrt(1 - pow(h->beta2, (double)t)) + h->eps;
    const double size = h->lr / (1 - pow(h->beta1, (double)t));
    const double m_off = 8 * unit * m_size, v_off = 12 * unit * v_size;
    /* The root's relative error is half of v's, and ten operations and scalars more. */
    const double move_off = size * (m_off / root + fabs(m) / root * (v_off / (2 * v) + 12 * unit));
    return fabs((double)after[1] - m) <= m_off && fabs((double)after[2] - v) <= v_off &&
           fabs((double)after[0] - (p - size * m / root)) <= 4 * unit * fabs(p) + move_off;
}

/* The scalar variant, an update at a time, element by element. */
static int rule_holds(enum sw_dtype grad_dtype, int coupled, const void *grad) {
    const struct sw_adam_format format = {.grad = grad_dtype, .weight = SW_BF16};
    const struct sw_adam_hyper hyper = {1e-3, 0.9, 0.95, 1e-8, 0.1, coupled};
    const float scale = 0.375f;
    struct subject s;
    float(*before)[3] = malloc(COUNT * sizeof(*before));
    int ret = open_subject(&s, &format, 1, grad);
    if (!before) ret = -ENOMEM;
    for (uint64_t t = 1; t <= UPDATES && !ret; t++) {
        const struct sw_adam_chunk *c = &s.chunk;
        for (int i = 0; i < COUNT; i++)
            memcpy(before[i], (float[]){c->master[i], c->momentum[i], c->variance[i]},
                   sizeof(before[i]));
        struct sw_adam_step step;
        sw_adam_prepare(&step, &hyper, t, scale);
        sw_adam_update(&sw_adam_variants[SW_ISA_SCALAR], &step, c, 1, NULL);
        for (int i = 0; i < COUNT && !ret; i++) {
            const float after[3] = {c->master[i], c->momentum[i], c->variance[i]};
            const float g = grad_dtype == SW_BF16 ? sw_f32_from_bf16(((const sw_bf16 *)grad)[i])
                                                  : ((const float *)grad)[i];
            const sw_bf16 weight = sw_bf16_from_weight(after[0]);
            if (follows_rule(&hyper, t, scale, i < DECAYS_UNTIL, before[i], g, after) &&
                weight == ((const sw_bf16 *)c->weight)[i])
                continue;
            sw_error("bench: Adam's scalar variant breaks its rule at element %d of update %d", i,
                     (int)t);
            ret = -EIO;
        }
    }
    free(before);
    close_subject(&s);
    return ret;
}

int sw_bench_adam_verify(void) {
    float *grad = malloc(COUNT * sizeof(*grad));
    sw_bf16 *grad16 = malloc(COUNT * sizeof(*grad16));
    int ret = grad && grad16 ? 0 : -ENOMEM;
    uint64_t state = 2;
    for (int i = 0; i < COUNT && !ret; i++) {
        grad[i] = value(&state) * 0.01f;
        grad16[i] = sw_bf16_from_f32(grad[i]);
    }
    /* Each bit of `c` is one choice, so that every combination is had. */
    for (int c = 0; c < 64 && !ret; c++) {
        const struct sw_adam_format format = {
            .master = c & 1 ? SW_MASTER_SPLIT : SW_MASTER_FP32,
            .moments = c & 2 ? SW_MOMENTS_8BIT : SW_MOMENTS_FP32,
            .grad = c & 4 ? SW_FP32 : SW_BF16,
            .weight = c & 8 ? SW_FP32 : SW_BF16,
        };
        ret = same_bits(&format, !(c & 16), !!(c & 32), c & 4 ? (void *)grad : (void *)grad16);
    }
    for (int c = 0; c < 4 && !ret; c++)
        ret =
            rule_holds(c & 1 ? SW_FP32 : SW_BF16, !!(c & 2), c & 1 ? (void *)grad : (void *)grad16);
    if (ret == -ENOMEM) sw_error("bench: no memory for a check of 150 KB");
    free(grad);
    free(grad16);
    return ret;
}
