/* base/bf16.h against rules written independently, on all 65,536 upper halves with the lower halves
 * that decide: neighbours by distance in double, ties by evenness or by magnitude. */
#include "base/bf16.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

static const uint32_t lows[] = {0x0000, 0x0001, 0x0002, 0x3FFF, 0x4000, 0x7FFE, 0x7FFF,
                                0x8000, 0x8001, 0x8002, 0xBFFF, 0xC000, 0xFFFE, 0xFFFF};

/* The value of BF16 bits in double, with the step after the largest finite one counted on: rounding
 * decides between 2^128 and it before calling the result infinite. */
static double magnitude(uint32_t half) {
    const int exponent = (int)(half >> 7 & 0xFF);
    const double fraction = half & 0x7F;
    return exponent == 0 ? ldexp(fraction, -133) : ldexp(128.0 + fraction, exponent - 134);
}

static double magnitude_f32(uint32_t bits) {
    const int exponent = (int)(bits >> 23 & 0xFF);
    const double fraction = bits & 0x7FFFFF;
    return exponent == 0 ? ldexp(fraction, -149) : ldexp(8388608.0 + fraction, exponent - 150);
}

/* The nearer of the two BF16 values around a finite number; in the middle the even or the larger
 * one. */
static uint32_t nearest(uint32_t bits, int tie_to_even) {
    const uint32_t sign = bits >> 16 & 0x8000, below = bits >> 16 & 0x7FFF, above = below + 1;
    const double x = magnitude_f32(bits);
    const double down = x - magnitude(below), up = magnitude(above) - x;
    const int takes_above = up < down || (up == down && (!tie_to_even || (below & 1)));
    return sign | (takes_above ? above : below);
}

static void check_all(sw_bf16 (*rounding)(float), int tie_to_even) {
    for (uint32_t high = 0; high < 65536; high++)
        for (size_t l = 0; l < sizeof(lows) / sizeof(lows[0]); l++) {
            const uint32_t bits = high << 16 | lows[l];
            const float x = sw_f32_from_bits(bits);
            const uint32_t got = rounding(x);
            if ((bits & 0x7F800000u) != 0x7F800000u) {
                if (got != nearest(bits, tie_to_even))
                    fail_msg("%08X rounds to %04X, not %04X", bits, got,
                             nearest(bits, tie_to_even));
            } else if (bits & 0x7FFFFFu) { /* NaN: quiet, with its sign */
                if ((got & 0x7FC0) != 0x7FC0 || (got >> 15) != (bits >> 31))
                    fail_msg("the NaN %08X becomes %04X", bits, got);
            } else {
                assert_int_equal(got, high);
            }
        }
}

static void activations_round_to_nearest_even(void **state) {
    (void)state;
    check_all(sw_bf16_from_f32, 1);
}

static void weights_round_ties_away_from_zero(void **state) {
    (void)state;
    check_all(sw_bf16_from_weight, 0);
}

static void every_value_survives_the_way_there_and_back(void **state) {
    (void)state;
    for (uint32_t half = 0; half < 65536; half++) {
        const float x = sw_f32_from_bf16((sw_bf16)half);
        assert_int_equal(sw_f32_bits(x), half << 16);
        const uint32_t quiet = isnan(x) ? half | 0x40u : half;
        assert_int_equal(sw_bf16_from_f32(x), quiet);
        assert_int_equal(sw_bf16_from_weight(x), quiet);
    }
}

/* master = weight + signed 16-bit remainder, for every finite master: with all low halves here. */
static void remainder_fits_sixteen_bits(void **state) {
    (void)state;
    static const uint32_t highs[] = {0x0000, 0x0001, 0x007F, 0x0080, 0x3F7F,
                                     0x3F80, 0x7F7E, 0x8000, 0xBF80, 0xFF7E};
    for (size_t h = 0; h < sizeof(highs) / sizeof(highs[0]); h++)
        for (uint32_t low = 0; low < 65536; low++) {
            const uint32_t bits = highs[h] << 16 | low;
            const uint32_t weight = sw_bf16_from_weight(sw_f32_from_bits(bits));
            const int32_t remainder = (int32_t)(bits - (weight << 16));
            assert_in_range(remainder + 32768, 0, 65535);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(activations_round_to_nearest_even),
        cmocka_unit_test(weights_round_ties_away_from_zero),
        cmocka_unit_test(every_value_survives_the_way_there_and_back),
        cmocka_unit_test(remainder_fits_sixteen_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
