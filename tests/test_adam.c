/* The CPU Adam's rule: what one update does to a number, coupled and decoupled, against the same
 * operations written out here and against double precision; that every element gets its update and
 * its own decay; and which callers' bugs stop the program. That all variants agree is
 * test_adam_bits.c's part. */
#include "cpu_adam/adam.h"

#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <xmmintrin.h>
#include <cmocka.h>
#include "base/log.h"
#include "tests/support_adam.h"

/* A chunk of FP32 state over arrays of the caller, with one range. */
struct plain {
    struct sw_adam_range all;
    struct sw_adam_chunk chunk;
};

static const struct sw_adam_chunk *plain(struct plain *at, float *p, float *m, float *v,
                                         const float *g, void *w, uint64_t count, int decays) {
    at->all = (struct sw_adam_range){count, decays};
    at->chunk =
        (struct sw_adam_chunk){.format = {SW_MASTER_FP32, SW_MOMENTS_FP32, SW_FP32, SW_BF16},
                               .count = count,
                               .ranges = &at->all,
                               .range_count = 1,
                               .master = p,
                               .momentum = m,
                               .variance = v,
                               .grad = g,
                               .weight = w};
    return &at->chunk;
}

static const struct sw_adam_variant *best(void) {
    const struct sw_adam_variant *variant = NULL;
    assert_int_equal(sw_adam_pick(&variant), 0);
    return variant;
}

/* ---- which variant ---- */

static char picked_line[200];
static void keep(enum sw_log_level level, const char *line, void *ctx) {
    (void)level;
    (void)ctx;
    snprintf(picked_line, sizeof(picked_line), "%s", line);
}

static void the_environment_forces_a_variant_that_is_told(void **state) {
    (void)state;
    sw_log_set_sink(keep, NULL);
    int runs = 0;
    for (int i = 0; i < SW_ISA_COUNT; i++) {
        picked_line[0] = 0;
        if (!adam_forced((enum sw_isa)i)) continue;
        runs++;
        assert_non_null(strstr(picked_line, sw_isa_name((enum sw_isa)i)));
    }
    setenv("SPILLWAY_ISA", "sse2", 1);
    const struct sw_adam_variant *variant = NULL;
    assert_int_equal(sw_adam_pick(&variant), -EINVAL);
    assert_null(variant);
    unsetenv("SPILLWAY_ISA");
    sw_log_set_sink(NULL, NULL);
    assert_true(runs >= 1);
    for (int i = 0; i < SW_ISA_COUNT; i++) {
        assert_int_equal(sw_adam_variants[i].isa, i);
        for (int j = 0; j < i; j++)
            assert_true(sw_adam_variants[i].kernel != sw_adam_variants[j].kernel);
    }
}

/* ---- the arithmetic ---- */

/* All numbers are exact in binary, so the first step can be worked out by hand: m = g/2 and v =
 * g^2/4, corrected by 1 - 1/2 and 1 - 3/4 to g and g^2, so the weight moves by lr * g/|g|. Before
 * that it shrinks by 1 - lr * 4 = 0.5. */
static void the_first_step_is_the_one_computed_by_hand(void **state) {
    (void)state;
    const struct sw_adam_hyper hyper = {0.125, 0.5, 0.75, 0, 4, 0};
    struct sw_adam_step step;
    sw_adam_prepare(&step, &hyper, 1, 1);
    for (int i = 0; i < SW_ISA_COUNT; i++) {
        const struct sw_adam_variant *variant = adam_forced((enum sw_isa)i);
        if (!variant) continue;
        float p[2] = {1, 1}, m[2] = {0}, v[2] = {0};
        const float g[2] = {4, -0.5f};
        sw_bf16 w[2];
        struct plain c;
        sw_adam_update(variant, &step, plain(&c, p, m, v, g, w, 2, 1), 1, NULL);
        assert_true(m[0] == 2 && m[1] == -0.25f);
        assert_true(v[0] == 4 && v[1] == 0.0625f);
        assert_true(p[0] == 0.5f - 0.125f && p[1] == 0.5f + 0.125f);
        assert_int_equal(w[0], 0x3EC0); /* 0.375 */
        assert_int_equal(w[1], 0x3F20); /* 0.625 */
    }
}

/* The scalars of a step, in double from the formulas of adam.h, rounded once. */
static void the_scalars_of_a_step(void **state) {
    (void)state;
    static const uint64_t times[] = {1, 2, 3, 10, 1000, 100000};
    for (int coupled = 0; coupled < 2; coupled++) {
        const struct sw_adam_hyper h = {3e-4, 0.9, 0.999, 1e-8, 0.1, coupled};
        for (size_t i = 0; i < sizeof(times) / sizeof(times[0]); i++) {
            struct sw_adam_step s;
            sw_adam_prepare(&s, &h, times[i], 0.25f);
            double b1 = 1, b2 = 1; /* powers by multiplying: within t roundings of double */
            for (uint64_t t = 0; t < times[i]; t++) {
                b1 *= 0.9;
                b2 *= 0.999;
            }
            const double size = 3e-4 / (1 - b1), root = 1 / sqrt(1 - b2);
            assert_true(fabs((double)s.step_size - size) <= 0x1p-23 * size);
            assert_true(fabs((double)s.rsqrt_bias2 - root) <= 0x1p-23 * root);
            assert_true(s.beta1 == 0.9f && s.one_minus_beta1 == (float)(1 - 0.9));
            assert_true(s.beta2 == 0.999f && s.one_minus_beta2 == (float)(1 - 0.999));
            assert_true(s.eps == 1e-8f && s.grad_scale == 0.25f);
            assert_true(s.decay_factor == (coupled ? 1 : (float)(1 - 3e-4 * 0.1)));
            assert_true(s.decay_grad == (coupled ? 0.1f : 0));
            assert_int_equal(s.coupled, coupled);
            assert_int_equal(s.seed, (uint32_t)times[i]);
        }
    }
}

/* The scalar variant comes from the same loop as the others, so an independent statement of the
 * arithmetic, one rounding at a time, stands here. Flushing of subnormals is the same mode of the
 * processor. lr times decay is 0.1: another order of decay and move differs in the second digit. */
static void one_by_hand(const struct sw_adam_step *step, int decays, float g0, float *p, float *m,
                        float *v) {
    volatile float g = g0 * step->grad_scale;
    volatile float before = *p;
    if (decays && step->coupled) {
        volatile float pull = step->decay_grad * before;
        g = g + pull;
    }
    if (decays && !step->coupled) before = before * step->decay_factor;
    volatile float m1 = step->beta1 * *m, m2 = step->one_minus_beta1 * g;
    volatile float m3 = m1 + m2;
    volatile float v1 = step->beta2 * *v, v2 = step->one_minus_beta2 * g;
    volatile float v3 = v2 * g;
    volatile float v4 = v1 + v3;
    volatile float root = sqrtf(v4);
    volatile float scaled = root * step->rsqrt_bias2;
    volatile float below = scaled + step->eps;
    volatile float ratio = m3 / below;
    volatile float move = step->step_size * ratio;
    volatile float after = before - move;
    *m = m3;
    *v = v4;
    *p = after;
}

/* A NaN's payload depends on the order of commutative operands, which C leaves open. */
static int same_float(float a, float b) {
    return sw_f32_bits(a) == sw_f32_bits(b) || (isnan(a) && isnan(b));
}

static void check_by_hand(int shape, const struct sw_adam_variant *variant) {
    enum { COUNT = 2000 };
    static float p[COUNT], m[COUNT], v[COUNT], p2[COUNT], m2[COUNT], v2[COUNT];
    struct adam_box box;
    adam_box_init(&box, adam_shape(shape), COUNT, 0, 11);
    const struct sw_adam_chunk *c = &box.chunk;
    sw_adam_read(c, 0, COUNT, p, m, v);
    for (uint64_t t = 2; t < 5; t++) {
        const struct sw_adam_step step = adam_step(box.shape.coupled, t, 0.37f);
        adam_box_update(&box, variant, &step, 0, COUNT, 1, NULL);
        sw_adam_read(c, 0, COUNT, p2, m2, v2);
        const unsigned mode = _mm_getcsr();
        _mm_setcsr(mode | 0x8040);
        for (int i = 0; i < COUNT; i++) {
            const float g = c->format.grad == SW_FP32
                                ? ((const float *)c->grad)[i]
                                : sw_f32_from_bf16(((const sw_bf16 *)c->grad)[i]);
            one_by_hand(&step, i < COUNT / 3 || i >= COUNT / 2, g, &p[i], &m[i], &v[i]);
        }
        _mm_setcsr(mode);
        for (int i = 0; i < COUNT; i++) {
            if (!same_float(p[i], p2[i]) || !same_float(m[i], m2[i]) || !same_float(v[i], v2[i]))
                fail_msg("%s: %s: update %d, element %d: %a %a %a, by hand %a %a %a",
                         sw_isa_name(variant->isa), adam_shape_name(&box.shape), (int)t, i,
                         (double)p2[i], (double)m2[i], (double)v2[i], (double)p[i], (double)m[i],
                         (double)v[i]);
            const sw_bf16 narrow = sw_bf16_from_weight(p[i]);
            if (!isnan(p[i]) && box.shape.emits && c->format.weight == SW_BF16)
                assert_int_equal(((const sw_bf16 *)c->weight)[i], narrow);
            if (!isnan(p[i]) && box.shape.emits && c->format.weight == SW_FP32)
                assert_memory_equal((const float *)c->weight + i, &p[i], 4);
        }
    }
    adam_box_exit(&box);
}

static void every_loop_does_the_documented_operations(void **state) {
    (void)state;
    for (int isa = 0; isa < SW_ISA_COUNT; isa++) {
        const struct sw_adam_variant *variant = adam_forced((enum sw_isa)isa);
        for (int shape = 0; variant && shape < ADAM_SHAPES; shape++)
            if (adam_shape(shape).format.moments == SW_MOMENTS_FP32) check_by_hand(shape, variant);
    }
}

/* Decoupled decay: the weight shrinks by lr * decay before it moves, and the decay does not enter
 * the moments; where a range does not decay nothing happens. Coupled: it enters both. */
static void decay_is_decoupled_and_comes_first_or_enters_the_gradient(void **state) {
    (void)state;
    float p[4] = {1, 1, 1, 1}, m[4] = {0}, v[4] = {0};
    const float g[4] = {8, 0.25f, 8, 0.25f}, decay = (float)(1 - 0.5 * 0.2);
    const struct sw_adam_range ranges[2] = {{2, 1}, {4, 0}};
    struct sw_adam_hyper hyper = {0.5, 0, 0, 0, 0.2, 0};
    struct sw_adam_step step;
    struct plain c;
    plain(&c, p, m, v, g, NULL, 4, 1);
    c.chunk.ranges = ranges;
    c.chunk.range_count = 2;
    sw_adam_prepare(&step, &hyper, 1, 1);
    sw_adam_update(best(), &step, &c.chunk, 1, NULL);
    assert_true(p[0] == decay - 0.5f && p[1] == decay - 0.5f);
    assert_true(p[2] == 0.5f && p[3] == 0.5f);
    for (int i = 0; i < 4; i++) assert_true(m[i] == g[i]);

    hyper.coupled = 1;
    hyper.weight_decay = 0.25;
    for (int i = 0; i < 4; i++) p[i] = -1;
    sw_adam_prepare(&step, &hyper, 1, 1);
    sw_adam_update(best(), &step, &c.chunk, 1, NULL);
    assert_true(m[0] == 7.75f && m[1] == 0 && m[2] == 8 && m[3] == 0.25f);
    assert_true(v[0] == 7.75f * 7.75f && v[1] == 0 && v[2] == 64 && v[3] == 0.0625f);
    assert_true(p[0] == -1.5f && p[2] == -1.5f && p[3] == -1.5f);
}

/* ---- many updates against double precision ---- */

/* One number's exact history (double: its own roundings are 2^-53, below all that follows) beside
 * a bound of what FP32 made of it. u = 2^-24 bounds each rounding, relative to its result. An error
 * bound goes through each operation as the operation's derivative says, plus one u of the result:
 *   g  = s + w p                 eg = w ep + 2u |w p| + u |g| (coupled)
 *   m' = b1 m + c1 g             em = b1 em + c1 eg + u (|b1 m| + |c1 g| + |m'|)
 *   v' = b2 v + (c2 g) g         ev = b2 ev + 2 c2 |g| eg + u (b2 v + 2 c2 g^2 + v')
 *   r  = sqrt(v') k + eps        er = k ev / (2 sqrt(v' - ev)) + u (2 sqrt(v') k + r)
 *   q  = h (m' / r)              eq = h (em / r + |m'| er / r^2) + 2u |q|
 *   p' = d p - q                 ep = d ep + eq + half an ulp of d p (unless d is 1) and of p'
 * Second-order terms (products of two errors, each under 1e-4 of its value) are below one percent
 * of the sum, which `slack` adds. */
struct exact {
    double p, m, v, ep, em, ev;
};

/* Of an FP32 number within `error` of x. */
static double half_ulp(double x, double error) {
    return ldexp(1, ilogb(fabs(x) + error) - 24);
}

static void exact_update(struct exact *x, const struct sw_adam_step *s, int decays, double g) {
    const double u = 0x1p-24, slack = 1.01;
    const double b1 = s->beta1, c1 = s->one_minus_beta1, b2 = s->beta2, c2 = s->one_minus_beta2;
    const double d = decays ? (double)s->decay_factor : 1, k = s->rsqrt_bias2, h = s->step_size;
    double eg = 0;
    if (decays && s->coupled) {
        const double w = s->decay_grad, pull = w * x->p;
        g += pull;
        eg = w * x->ep + 2 * u * fabs(pull) + u * fabs(g);
    }
    const double m = b1 * x->m + c1 * g, v = b2 * x->v + c2 * g * g;
    x->em = slack * (b1 * x->em + c1 * eg + u * (fabs(b1 * x->m) + fabs(c1 * g) + fabs(m)));
    x->ev = slack * (b2 * x->ev + 2 * c2 * fabs(g) * eg + u * (b2 * x->v + 2 * c2 * g * g + v));
    const double root = sqrt(v), r = root * k + (double)s->eps;
    const double er = k * x->ev / (2 * sqrt(v - x->ev)) + u * (2 * root * k + r);
    const double q = h * (m / r);
    const double eq = slack * (h * (x->em / r + fabs(m) * er / (r * r)) + 2 * u * fabs(q));
    const double p = d * x->p - q;
    x->ep = d * x->ep + eq + (d < 1 ? half_ulp(d * x->p, x->ep) : 0) + half_ulp(p, x->ep + eq);
    x->p = p;
    x->m = m;
    x->v = v;
}

/* Gradients of turning sign, a third of the elements without decay, lr * decay = 0.1. */
static double sixty_steps(int coupled, enum sw_adam_master master) {
    enum { N = 771, STEPS = 60 };
    static struct exact x[N];
    static float g[N], p[N], m[N], v[N], zero[N];
    static sw_bf16 half[N];
    static int16_t remainder[N];
    const struct sw_adam_range ranges[] = {{N / 3, 1}, {2 * N / 3, 0}, {N, 1}};
    struct plain c;
    plain(&c, zero, m, v, g, NULL, N, 1);
    c.chunk.ranges = ranges;
    c.chunk.range_count = 3;
    c.chunk.format.master = master;
    c.chunk.half = half;
    c.chunk.remainder = remainder;
    adam_seed(5);
    for (int i = 0; i < N; i++) x[i] = (struct exact){.p = p[i] = 0.25f * adam_uniform()};
    sw_adam_start(&c.chunk, 0, N, p);
    double widest = 0;
    for (uint64_t t = 1; t <= STEPS; t++) {
        const struct sw_adam_step step = adam_step(coupled, t, 1);
        for (int i = 0; i < N; i++) g[i] = (0.5f + 0.5f * fabsf(adam_uniform())) * (t % 2 ? 1 : -1);
        sw_adam_update(best(), &step, &c.chunk, 2, NULL);
        sw_adam_read(&c.chunk, 0, N, p, NULL, NULL);
        for (int i = 0; i < N; i++) {
            exact_update(&x[i], &step, i < N / 3 || i >= 2 * N / 3, (double)g[i]);
            if (!(fabs((double)p[i] - x[i].p) <= x[i].ep) ||
                !(fabs((double)m[i] - x[i].m) <= x[i].em) ||
                !(fabs((double)v[i] - x[i].v) <= x[i].ev))
                fail_msg("step %d element %d: %.9g, double %.9g, bound %.3g", (int)t, i,
                         (double)p[i], x[i].p, x[i].ep);
            widest = fmax(widest, x[i].ep);
        }
    }
    print_message("coupled %d: widest bound %.2g\n", coupled, widest);
    return widest;
}

/* A bound that admits anything would prove nothing. */
static void sixty_steps_stay_within_the_bound_of_double_precision(void **state) {
    (void)state;
    assert_true(sixty_steps(0, SW_MASTER_FP32) < 1.5e-6);
    assert_true(sixty_steps(0, SW_MASTER_SPLIT) < 1.5e-6);
    assert_true(sixty_steps(1, SW_MASTER_FP32) < 1e-4);
    assert_true(sixty_steps(1, SW_MASTER_SPLIT) < 1e-4);
}

/* A master in BF16 would stand still: 1e-4 is a fortieth of its spacing below 1. */
static void a_thousand_small_updates_move_the_master(void **state) {
    (void)state;
    const struct sw_adam_hyper hyper = {1e-4, 0.9, 0.95, 0, 0, 0};
    float p = 1, m = 0, v = 0;
    const float g = 1;
    sw_bf16 w;
    struct plain c;
    plain(&c, &p, &m, &v, &g, &w, 1, 1);
    for (uint64_t t = 1; t <= 1000; t++) {
        struct sw_adam_step step;
        sw_adam_prepare(&step, &hyper, t, 1);
        sw_adam_update(best(), &step, &c.chunk, 1, NULL);
    }
    /* Equal gradients move by lr each step: 1 - 0.1, within a rounding (2^-25 below 1) a step and
     * the moves' own, whose relative errors are far below 1e-4 of 1e-4. */
    assert_true(fabs((double)p - 0.9) < 1000 * 0x1p-25 + 0.1 * 1e-4);
    assert_int_equal(w, sw_bf16_from_weight(p));
}

/* The clip factor multiplies the gradient: the same bits as a gradient that was scaled by a power
 * of two before, and no change at all with a factor of 1. */
static void a_gradient_scale_equals_scaled_gradients(void **state) {
    (void)state;
    enum { COUNT = 1000 };
    for (int shape = 0; shape < ADAM_SHAPES; shape++) {
        struct adam_box want, got;
        adam_box_init(&want, adam_shape(shape), COUNT, 0, 9);
        adam_box_init(&got, adam_shape(shape), COUNT, 0, 9);
        const struct sw_adam_step one = adam_step(want.shape.coupled, 4, 1);
        const struct sw_adam_step half = adam_step(want.shape.coupled, 4, 0.5f);
        void *grad = (void *)(uintptr_t)want.chunk.grad; /* the box's own memory */
        for (int i = 0; i < COUNT; i++) {
            if (want.chunk.format.grad == SW_FP32)
                ((float *)grad)[i] *= 0.5f;
            else
                ((sw_bf16 *)grad)[i] =
                    sw_bf16_from_f32(sw_f32_from_bf16(((sw_bf16 *)grad)[i]) * 0.5f);
        }
        adam_box_update(&want, best(), &one, 0, COUNT, 1, NULL);
        adam_box_update(&got, best(), &half, 0, COUNT, 1, NULL);
        /* The gradients themselves differ. */
        memcpy(grad, got.chunk.grad, COUNT * sw_dtype_bytes(want.chunk.format.grad));
        adam_box_same(&want, &got, "scale");
        adam_box_exit(&want);
        adam_box_exit(&got);
    }
}

/* ---- every element, once, with its own decay ---- */

/* Equal elements end equal: missed or updated twice, one would differ. Counts on both sides of a
 * thread's share, and two of a tensor's shapes. */
static void every_element_moves_once(void **state) {
    (void)state;
    static const uint64_t counts[] = {1, 7, 4095, 4096, 4097, 2 * 4096 + 3, 3 * 5 * 7, 96 * 200};
    enum { MOST = 96 * 200 };
    static float p[MOST + 1], m[MOST + 1], v[MOST + 1], g[MOST + 1];
    const struct sw_adam_step step = adam_step(0, 1, 1);
    for (size_t c = 0; c < sizeof(counts) / sizeof(counts[0]); c++) {
        for (int threads = 1; threads <= 5; threads++) {
            for (int i = 0; i <= MOST; i++) {
                p[i] = 1;
                m[i] = v[i] = 0;
                g[i] = 0.5f;
            }
            struct plain chunk;
            plain(&chunk, p, m, v, g, NULL, counts[c], 0);
            sw_adam_update(best(), &step, &chunk.chunk, threads, NULL);
            assert_true(p[0] != 1 && m[0] != 0 && v[0] != 0);
            for (uint64_t i = 0; i < counts[c]; i++)
                if (p[i] != p[0] || m[i] != m[0] || v[i] != v[0])
                    fail_msg("%d threads: element %d of %d differs", threads, (int)i,
                             (int)counts[c]);
            assert_true(p[counts[c]] == 1 && m[counts[c]] == 0 && v[counts[c]] == 0);
        }
    }
}

/* Gradients of zero move an element by its decay alone. Ranges of no, one and many elements, some
 * of them cut by a share's border, and neighbours that decay alike. */
static void ranges_keep_their_own_decay(void **state) {
    (void)state;
    enum { COUNT = 3 * 4096 + 9 };
    static const struct sw_adam_range ranges[] = {
        {0, 1},   {1, 0},    {1, 1},    {2, 1},    {5, 0},    {5, 0},        {260, 1},
        {300, 0}, {4095, 1}, {4096, 0}, {4097, 1}, {4103, 0}, {4 * 2048, 1}, {COUNT, 0}};
    enum { RANGES = sizeof(ranges) / sizeof(ranges[0]) };
    static float p[COUNT], m[COUNT], v[COUNT], g[COUNT];
    const struct sw_adam_step step = adam_step(0, 1, 1);
    for (int isa = 0; isa < SW_ISA_COUNT; isa++) {
        const struct sw_adam_variant *variant = adam_forced((enum sw_isa)isa);
        for (int threads = 1; variant && threads <= 4; threads++) {
            for (int i = 0; i < COUNT; i++) p[i] = 2;
            struct plain c;
            plain(&c, p, m, v, g, NULL, COUNT, 0);
            c.chunk.ranges = ranges;
            c.chunk.range_count = RANGES;
            sw_adam_update(variant, &step, &c.chunk, threads, NULL);
            uint64_t at = 0;
            for (int r = 0; r < RANGES; r++)
                for (; at < ranges[r].end; at++)
                    if (p[at] != (ranges[r].decays ? 2 * step.decay_factor : 2))
                        fail_msg("range %d, element %d: %g", r, (int)at, (double)p[at]);
        }
    }
}

static void no_elements_need_no_memory(void **state) {
    (void)state;
    const struct sw_adam_step step = adam_step(0, 1, 1);
    for (int isa = 0; isa < SW_ISA_COUNT; isa++) {
        const struct sw_adam_variant *variant = adam_forced((enum sw_isa)isa);
        for (int shape = 0; variant && shape < ADAM_SHAPES; shape++) {
            const struct sw_adam_chunk none = {.format = adam_shape(shape).format};
            double squares[1] = {7};
            struct sw_adam_extra extra = {.update_squares = squares,
                                          .update_square = 7,
                                          .checksum = 1,
                                          .checksum_before = 7,
                                          .checksum_after = 7};
            sw_adam_update(variant, &step, &none, 4, NULL);
            sw_adam_update(variant, &step, &none, 4, &extra);
            assert_true(extra.update_square == 0 && squares[0] == 7);
            assert_int_equal(extra.checksum_before, 0);
            assert_int_equal(extra.checksum_after, 0);
            assert_int_equal(sw_adam_record_bytes(&none.format, 0), 0);
        }
    }
}

/* ---- callers' bugs ---- */

static int stops(const struct sw_adam_chunk *chunk, int threads) {
    const struct sw_adam_step step = adam_step(0, 1, 1);
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        const struct rlimit none = {0, 0};
        setrlimit(RLIMIT_CORE, &none);
        if (!freopen("/dev/null", "w", stderr)) _exit(3);
        signal(SIGABRT, SIG_DFL);
        sw_adam_update(&sw_adam_variants[SW_ISA_SCALAR], &step, chunk, threads, NULL);
        _exit(0);
    }
    int status = 0;
    assert_true(child > 0 && waitpid(child, &status, 0) == child);
    assert_true(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

static void bad_buffers_stop_the_program(void **state) {
    (void)state;
#ifdef NDEBUG
    print_message("assertions are off in this build\n");
    skip();
#endif
    enum { N = 512 };
    static float p[2 * N], m[2 * N], v[2 * N], g[2 * N];
    static sw_bf16 w[2 * N];
    struct plain c;
    plain(&c, p, m, v, g, w, N, 1);
    const struct sw_adam_chunk good = c.chunk;
    assert_false(stops(&good, 1));
    struct sw_adam_chunk bad = good;
    assert_true(stops(&bad, 0) && stops(&bad, SW_ADAM_THREADS_MAX + 1));
#define BAD(field, value)                                                                          \
    (bad = good, bad.field = (value));                                                             \
    if (!stops(&bad, 1)) fail_msg("." #field " = " #value " goes on")
    BAD(master, NULL);
    BAD(momentum, NULL);
    BAD(variance, NULL);
    BAD(grad, NULL);
    BAD(momentum, p + N - 1);
    BAD(variance, m);
    BAD(grad, v + 1);
    BAD(weight, g);
    BAD(weight, (char *)p + sizeof(float) * N - 1);
    BAD(range_count, 0);
    BAD(count, N - 1);
    BAD(count, N + 1);
    bad = good; /* buffers that only touch are fine */
    bad.momentum = p + N;
    assert_false(stops(&bad, 1));
    const struct sw_adam_range backwards[] = {{300, 1}, {200, 0}, {N, 1}};
    bad = good;
    bad.ranges = backwards;
    bad.range_count = 3;
    assert_true(stops(&bad, 1));
    struct adam_box box;
    adam_box_init(&box, adam_shape(12), N, 0, 7); /* 8-bit moments */
    assert_false(stops(&box.chunk, 1));
    box.chunk.first = 255;
    assert_true(stops(&box.chunk, 1));
    box.chunk.first = 0;
    box.chunk.variance_scales = box.chunk.momentum_scales + 1;
    assert_true(stops(&box.chunk, 1));
    adam_box_exit(&box);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_buffers_stop_the_program), /* it forks: before any team of threads */
        cmocka_unit_test(the_environment_forces_a_variant_that_is_told),
        cmocka_unit_test(the_first_step_is_the_one_computed_by_hand),
        cmocka_unit_test(the_scalars_of_a_step),
        cmocka_unit_test(every_loop_does_the_documented_operations),
        cmocka_unit_test(decay_is_decoupled_and_comes_first_or_enters_the_gradient),
        cmocka_unit_test(sixty_steps_stay_within_the_bound_of_double_precision),
        cmocka_unit_test(a_thousand_small_updates_move_the_master),
        cmocka_unit_test(a_gradient_scale_equals_scaled_gradients),
        cmocka_unit_test(every_element_moves_once),
        cmocka_unit_test(ranges_keep_their_own_decay),
        cmocka_unit_test(no_elements_need_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
