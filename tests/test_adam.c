/* The CPU Adam: the rule itself, and that neither variant, thread count, split nor alignment shows
 * in a bit. Equality is exact wherever two paths do the same operations; the one tolerance, against
 * double precision, is derived where it is used. */
#include "cpu_adam/adam.h"

#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

enum { LEN = 4200, GUARD = 16, ROOM = LEN + GUARD };

struct state { /* with room for an offset in front and a guard behind */
    float master[ROOM], momentum[ROOM], variance[ROOM], weight[ROOM]; /* weight: of either type */
};

static struct state want, got;
static float grad32[ROOM];
static sw_bf16 grad16[ROOM];

static uint64_t seed;
static uint32_t rnd(void) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 32);
}
static float uniform(void) {
    return (float)(int32_t)rnd() * 0x1p-31f;
}

static void fill(struct state *s, uint64_t with) {
    seed = with;
    for (int i = 0; i < ROOM; i++) {
        s->master[i] = uniform();
        s->momentum[i] = uniform() * 0.1f;
        s->variance[i] = fabsf(uniform()) * 0.01f;
        s->weight[i] = 0;
        grad32[i] = uniform() * 0.3f;
        grad16[i] = sw_bf16_from_f32(uniform() * 0.3f);
    }
    /* Values on which a fast path could take a short cut. */
    const float odd[] = {0.0f, -0.0f, 1e-40f, -1e-30f, 3e38f, INFINITY, -INFINITY, NAN};
    for (int i = 0; i < 8; i++) grad32[100 + i] = odd[i];
    for (int i = 0; i < 8; i++) grad16[200 + i] = sw_bf16_from_f32(odd[i]);
    s->variance[300] = s->momentum[300] = grad32[300] = 0;
    grad16[300] = 0;
    s->master[301] = 3.4e38f;
    s->variance[302] = 1e-40f;
}

static struct sw_adam_span span_of(struct state *s, size_t offset, size_t count, int fp32_grad,
                                   int emit) {
    struct sw_adam_span span = {
        .master = s->master + offset,
        .momentum = s->momentum + offset,
        .variance = s->variance + offset,
        .grad = fp32_grad ? (const void *)(grad32 + offset) : (const void *)(grad16 + offset),
        .count = count,
        .decay = 0.9f,
        .grad_dtype = fp32_grad ? SW_FP32 : SW_BF16,
        .weight_dtype = emit == 2 ? SW_FP32 : SW_BF16,
    };
    if (emit == 1) span.weight = (sw_bf16 *)(void *)s->weight + offset;
    if (emit == 2) span.weight = s->weight + offset;
    return span;
}

static struct sw_adam_step step_of(uint64_t t, float scale) {
    const struct sw_adam_hyper hyper = {1e-2, 0.9, 0.95, 1e-8};
    struct sw_adam_step step;
    sw_adam_prepare(&step, &hyper, t, scale);
    return step;
}

static const struct sw_adam_variant *scalar(void) {
    return &sw_adam_variants[sw_adam_variant_count - 1];
}

static const struct sw_adam_variant *best(void) {
    const struct sw_adam_variant *v = sw_adam_variants;
    while (!v->supported()) v++;
    return v;
}

/* Bits, so that NaN equals itself and -0 differs from 0; the guards too, so no overrun passes. */
static void check_same(const char *what, size_t n, size_t offset) {
    if (memcmp(&want, &got, sizeof(want)) == 0) return;
    for (int i = 0; i < ROOM; i++)
        if (memcmp(&want.master[i], &got.master[i], 4) ||
            memcmp(&want.momentum[i], &got.momentum[i], 4) ||
            memcmp(&want.variance[i], &got.variance[i], 4) ||
            memcmp(&want.weight[i], &got.weight[i], 4))
            fail_msg("%s: length %zu, offset %zu: element %d differs", what, n, offset, i);
}

static void every_variant_has_the_scalar_bits_at_every_length(void **state) {
    (void)state;
    const struct sw_adam_step step = step_of(3, 0.37f);
    for (int v = 0; v < sw_adam_variant_count; v++) {
        if (!sw_adam_variants[v].supported()) continue;
        for (int combo = 0; combo < 6; combo++) {
            fill(&want, 7);
            memcpy(&got, &want, sizeof(got));
            for (size_t n = 0; n <= LEN; n++) {
                const size_t offset = n % GUARD; /* alignments of 2 and 4 bytes alike */
                const struct sw_adam_span a = span_of(&want, offset, n, combo % 2, combo / 2);
                const struct sw_adam_span b = span_of(&got, offset, n, combo % 2, combo / 2);
                scalar()->kernel(&step, &a, 0, n);
                sw_adam_variants[v].kernel(&step, &b, 0, n);
                if (n < 200 || n > 4080 || n % 37 == 0)
                    check_same(sw_adam_variants[v].name, n, offset);
            }
        }
    }
}

/* The scalar variant comes from the same loop as the others, so an independent statement of the
 * arithmetic, one rounding at a time, stands here. */
static void the_scalar_variant_does_the_documented_operations(void **state) {
    (void)state;
    const struct sw_adam_step step = step_of(2, 0.5f);
    fill(&want, 11);
    memcpy(&got, &want, sizeof(got));
    const struct sw_adam_span span = span_of(&got, 0, LEN, 0, 1);
    scalar()->kernel(&step, &span, 0, LEN);
    for (int i = 0; i < LEN; i++) {
        volatile float g = sw_f32_from_bf16(grad16[i]) * step.grad_scale;
        volatile float p = want.master[i] * span.decay;
        volatile float m1 = step.beta1 * want.momentum[i], m2 = step.one_minus_beta1 * g;
        volatile float m = m1 + m2;
        volatile float v1 = step.beta2 * want.variance[i], v2 = step.one_minus_beta2 * g;
        volatile float v3 = v2 * g;
        volatile float v = v1 + v3;
        volatile float root = sqrtf(v);
        volatile float scaled = root * step.rsqrt_bias2;
        volatile float below = scaled + step.eps;
        volatile float ratio = m / below;
        volatile float move = step.step_size * ratio;
        want.momentum[i] = m;
        want.variance[i] = v;
        want.master[i] = p - move;
        ((sw_bf16 *)(void *)want.weight)[i] = sw_bf16_from_weight(want.master[i]);
    }
    for (int i = 0; i < LEN; i++) {
        /* A NaN's payload depends on the order of commutative operands, which C leaves open. */
        if (isnan(want.master[i]) && isnan(got.master[i])) continue;
        assert_memory_equal(&want.master[i], &got.master[i], 4);
        assert_memory_equal(&want.momentum[i], &got.momentum[i], 4);
        assert_memory_equal(&want.variance[i], &got.variance[i], 4);
        assert_int_equal(((sw_bf16 *)(void *)want.weight)[i], ((sw_bf16 *)(void *)got.weight)[i]);
    }
}

enum { BIG = 3 * 4096 + 5 };
struct arrays {
    float p[BIG], m[BIG], v[BIG], w[BIG];
};

static void threads_and_splits_do_not_show(void **state) {
    (void)state;
    static const size_t lengths[] = {1, 4095, 4096, 4097, 2 * 4096 + 3, BIG};
    static struct arrays before, one, many;
    static float g[BIG];
    seed = 3;
    for (size_t i = 0; i < BIG; i++) {
        g[i] = uniform();
        before.p[i] = g[i] * 3;
        before.m[i] = g[i] * 0.1f;
        before.v[i] = g[i] * g[i];
    }
    const struct sw_adam_step step = step_of(5, 1);
    for (size_t l = 0; l < sizeof(lengths) / sizeof(lengths[0]); l++) {
        const size_t n = lengths[l];
        one = before;
        const struct sw_adam_span whole = {one.p, one.m, one.v,   g,      one.w,
                                           n,     0.99f, SW_FP32, SW_FP32};
        scalar()->kernel(&step, &whole, 0, n);
        for (int threads = 1; threads <= 8; threads++) {
            for (size_t pieces = 1; pieces <= 5; pieces += 2) {
                many = before;
                struct sw_adam_span spans[5];
                for (size_t p = 0; p < pieces; p++) {
                    const size_t a = n * p / pieces, b = n * (p + 1) / pieces;
                    spans[p] = (struct sw_adam_span){many.p + a, many.m + a, many.v + a,
                                                     g + a,      many.w + a, b - a,
                                                     0.99f,      SW_FP32,    SW_FP32};
                }
                sw_adam_update(best(), &step, spans, (int)pieces, threads);
                assert_memory_equal(&one, &many, sizeof(one));
            }
        }
    }
}

static void every_element_of_every_span_moves_once(void **state) {
    (void)state;
    enum { SPANS = 9, TOTAL = 1 + 4096 + 4097 + 7 + 4000 + 3 };
    static const size_t counts[SPANS] = {0, 1, 0, 4096, 4097, 7, 4000, 0, 3};
    static float p[TOTAL], m[TOTAL], v[TOTAL], g[TOTAL];
    for (size_t i = 0; i < TOTAL; i++) {
        p[i] = 1;
        g[i] = 0.5f;
    }
    struct sw_adam_span spans[SPANS];
    size_t at = 0;
    for (int i = 0; i < SPANS; i++) {
        spans[i] = (struct sw_adam_span){p + at,    m + at, v + at,  g + at, NULL,
                                         counts[i], 1,      SW_FP32, SW_BF16};
        at += counts[i];
    }
    assert_int_equal(at, TOTAL);
    const struct sw_adam_step step = step_of(1, 1);
    sw_adam_update(scalar(), &step, spans, SPANS, 5);
    assert_true(p[0] != 1);
    for (size_t i = 0; i < TOTAL; i++) {
        assert_memory_equal(&p[i], &p[0], 4); /* missed or updated twice, it would differ */
        assert_memory_equal(&m[i], &m[0], 4);
    }
}

static void spans_of_one_call_keep_their_own_decay(void **state) {
    (void)state;
    float p[2] = {2, 2}, m[2] = {0}, v[2] = {0};
    const float g[2] = {0};
    const struct sw_adam_span spans[2] = {
        {p, m, v, g, NULL, 1, 0.9f, SW_FP32, SW_BF16},
        {p + 1, m + 1, v + 1, g + 1, NULL, 1, 1, SW_FP32, SW_BF16}};
    const struct sw_adam_step step = step_of(1, 1);
    sw_adam_update(scalar(), &step, spans, 2, 2);
    assert_true(p[0] == 2 * 0.9f); /* a zero gradient moves by the decay alone */
    assert_true(p[1] == 2);
}

/* All numbers are exact in binary, so the first step can be worked out by hand: m = g/2 and v =
 * g^2/4, corrected by 1 - 1/2 and 1 - 3/4 to g and g^2, so the weight moves by lr * g/|g|. */
static void the_first_step_is_the_one_computed_by_hand(void **state) {
    (void)state;
    const struct sw_adam_hyper hyper = {0.125, 0.5, 0.75, 0};
    struct sw_adam_step step;
    sw_adam_prepare(&step, &hyper, 1, 1);
    for (int i = 0; i < sw_adam_variant_count; i++) {
        if (!sw_adam_variants[i].supported()) continue;
        float p[2] = {1, 1}, m[2] = {0}, v[2] = {0};
        const float g[2] = {4, -0.5f};
        sw_bf16 w[2];
        const struct sw_adam_span span = {p, m, v, g, w, 2, 0.5f, SW_FP32, SW_BF16};
        sw_adam_update(&sw_adam_variants[i], &step, &span, 1, 1);
        assert_true(m[0] == 2 && m[1] == -0.25f);
        assert_true(v[0] == 4 && v[1] == 0.0625f);
        assert_true(p[0] == 0.5f - 0.125f && p[1] == 0.5f + 0.125f);
        assert_int_equal(w[0], 0x3EC0); /* 0.375 */
        assert_int_equal(w[1], 0x3F20); /* 0.625 */
    }
}

/* Decoupled decay: the weight shrinks by lr * decay before it moves, and the decay does not enter
 * the moments. At lr * decay = 0.1 every other order differs in the second digit. */
static void decay_is_decoupled_and_comes_first(void **state) {
    (void)state;
    const struct sw_adam_hyper hyper = {0.5, 0, 0, 0};
    struct sw_adam_step step;
    sw_adam_prepare(&step, &hyper, 1, 1);
    float p[2] = {1, 1}, m[2] = {0}, v[2] = {0};
    const float g[2] = {8, 0.25f}, decay = (float)(1 - 0.5 * 0.2);
    const struct sw_adam_span span = {p, m, v, g, NULL, 2, decay, SW_FP32, SW_BF16};
    sw_adam_update(scalar(), &step, &span, 1, 1);
    assert_true(p[0] == decay - 0.5f && p[1] == decay - 0.5f);
    assert_true(m[0] == 8 && m[1] == 0.25f);
}

/* Sixty steps with gradients of turning sign, against the same rule in double precision from the
 * same (float) scalars. With u = 2^-24: a step adds to the momentum at most 3 roundings of values
 * bounded by max |g| = 1, and errors decay with beta1, so |dm| <= 3u / (1 - beta1) = E. The
 * variance is a sum of non-negative terms, each within (2t + 2) roundings at update t, so its root
 * is within (t + 1) u relative, and the root adds one rounding and the denominator two; the
 * quotient and the product by the step size add two: (t + 6) u. The move s * m / root is thus off
 * by at most s * (E / root + |m / root| (t + 8) u), and the master adds 2 roundings of at most |p|
 * + |move|. Old errors shrink with the decay. The bound is that sum, with the values at hand. */
static void sixty_steps_stay_within_the_bound_of_double_precision(void **state) {
    (void)state;
    enum { N = 257, STEPS = 60 };
    const struct sw_adam_hyper hyper = {1e-2, 0.9, 0.95, 1e-8};
    const double u = 0x1p-24, decay = (double)0.9f;
    static double p[N], m[N], v[N], bound[N];
    static float pf[N], mf[N], vf[N], gf[N];
    seed = 5;
    for (int i = 0; i < N; i++) p[i] = pf[i] = uniform();
    for (uint64_t t = 1; t <= STEPS; t++) {
        struct sw_adam_step s;
        sw_adam_prepare(&s, &hyper, t, 1);
        for (int i = 0; i < N; i++) gf[i] = (0.5f + 0.5f * fabsf(uniform())) * (t % 2 ? 1 : -1);
        const struct sw_adam_span span = {pf, mf, vf, gf, NULL, N, 0.9f, SW_FP32, SW_BF16};
        sw_adam_update(best(), &s, &span, 1, 2);
        for (int i = 0; i < N; i++) {
            const double g = gf[i];
            m[i] = (double)s.beta1 * m[i] + (double)s.one_minus_beta1 * g;
            v[i] = (double)s.beta2 * v[i] + (double)s.one_minus_beta2 * g * g;
            const double root = sqrt(v[i]) * (double)s.rsqrt_bias2 + (double)s.eps;
            const double move = (double)s.step_size * (m[i] / root);
            p[i] = p[i] * decay - move;
            const double dm = 3 * u / (1 - hyper.beta1);
            bound[i] = bound[i] * decay + (double)s.step_size * dm / root +
                       fabs(move) * ((double)t + 8) * u + 2 * u * (fabs(p[i]) + 2 * fabs(move));
            if (!(fabs(pf[i] - p[i]) <= bound[i]))
                fail_msg("step %llu element %d: %.9g, double %.9g, bound %.3g",
                         (unsigned long long)t, i, (double)pf[i], p[i], bound[i]);
        }
    }
    double widest = 0; /* a bound that admits anything would prove nothing */
    for (int i = 0; i < N; i++) widest = fmax(widest, bound[i]);
    assert_true(widest < 1e-6);
}

/* A master in BF16 would stand still: 1e-4 is a fortieth of its spacing below 1. */
static void a_thousand_small_updates_move_the_master(void **state) {
    (void)state;
    const struct sw_adam_hyper hyper = {1e-4, 0.9, 0.95, 0};
    float p = 1, m = 0, v = 0;
    const float g = 1;
    sw_bf16 w;
    const struct sw_adam_span span = {&p, &m, &v, &g, &w, 1, 1, SW_FP32, SW_BF16};
    for (uint64_t t = 1; t <= 1000; t++) {
        struct sw_adam_step step;
        sw_adam_prepare(&step, &hyper, t, 1);
        sw_adam_update(scalar(), &step, &span, 1, 1);
    }
    /* Equal gradients move by lr each step: 1 - 0.1, within a rounding (2^-25 below 1) a step and
     * the moves' own, whose relative errors are far below 1e-4 of 1e-4. */
    assert_true(fabs((double)p - 0.9) < 1000 * 0x1p-25 + 0.1 * 1e-4);
    assert_int_equal(w, sw_bf16_from_weight(p));
}

static void a_gradient_scale_equals_scaled_gradients(void **state) {
    (void)state;
    const struct sw_adam_step one = step_of(4, 1), half = step_of(4, 0.5f);
    fill(&want, 9);
    memcpy(&got, &want, sizeof(got));
    const struct sw_adam_span a = span_of(&got, 0, LEN, 1, 1);
    scalar()->kernel(&half, &a, 0, LEN);
    for (int i = 0; i < ROOM; i++) grad32[i] *= 0.5f;
    const struct sw_adam_span b = span_of(&want, 0, LEN, 1, 1);
    scalar()->kernel(&one, &b, 0, LEN);
    check_same("scale", LEN, 0);
}

static void zero_elements_and_no_spans_do_nothing(void **state) {
    (void)state;
    const struct sw_adam_step step = step_of(1, 1);
    const struct sw_adam_span none = {.decay = 1};
    for (int i = 0; i < sw_adam_variant_count; i++) {
        if (!sw_adam_variants[i].supported()) continue;
        sw_adam_update(&sw_adam_variants[i], &step, &none, 1, 4);
        sw_adam_update(&sw_adam_variants[i], &step, NULL, 0, 4);
    }
}

/* Picks in a child with its own environment: the index of the variant, or 100 + errno. */
static int pick_with(const char *isa) {
    const pid_t child = fork();
    if (child == 0) {
        if (isa)
            setenv("SPILLWAY_ISA", isa, 1);
        else
            unsetenv("SPILLWAY_ISA");
        const struct sw_adam_variant *v = NULL;
        const int ret = sw_adam_pick(&v);
        _exit(ret < 0 ? 100 - ret : (int)(v - sw_adam_variants));
    }
    int status = 0;
    assert_true(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void the_environment_forces_a_variant_or_fails_loudly(void **state) {
    (void)state;
    const int first = (int)(best() - sw_adam_variants);
    assert_int_equal(pick_with(NULL), first);
    assert_int_equal(pick_with(""), first);
    for (int i = 0; i < sw_adam_variant_count; i++)
        assert_int_equal(pick_with(sw_adam_variants[i].name),
                         sw_adam_variants[i].supported() ? i : 100 + ENOTSUP);
    assert_int_equal(pick_with("avx"), 100 + EINVAL);
    assert_int_equal(pick_with("AVX2"), 100 + EINVAL);
    assert_string_equal(scalar()->name, "scalar");
    assert_true(scalar()->supported());
    for (int i = 1; i < sw_adam_variant_count; i++)
        assert_true(sw_adam_variants[i].kernel != sw_adam_variants[i - 1].kernel);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_environment_forces_a_variant_or_fails_loudly),
        cmocka_unit_test(every_variant_has_the_scalar_bits_at_every_length),
        cmocka_unit_test(the_scalar_variant_does_the_documented_operations),
        cmocka_unit_test(threads_and_splits_do_not_show),
        cmocka_unit_test(every_element_of_every_span_moves_once),
        cmocka_unit_test(spans_of_one_call_keep_their_own_decay),
        cmocka_unit_test(the_first_step_is_the_one_computed_by_hand),
        cmocka_unit_test(decay_is_decoupled_and_comes_first),
        cmocka_unit_test(sixty_steps_stay_within_the_bound_of_double_precision),
        cmocka_unit_test(a_thousand_small_updates_move_the_master),
        cmocka_unit_test(a_gradient_scale_equals_scaled_gradients),
        cmocka_unit_test(zero_elements_and_no_spans_do_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
