/* base/: sizes as users write them, the two roundings to BF16, the log sink.
 *
 * The roundings are compared with the nearest BF16 values found by exact double arithmetic, over
 * every high half and the low halves around the tie; that is everything the rule depends on. */
#include "base/bf16.h"
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <cmocka.h>
#include "base/log.h"
#include "base/size.h"

static void sizes_are_parsed(void **state) {
    (void)state;
    static const struct {
        const char *text;
        uint64_t bytes;
    } good[] = {
        {"0", 0},
        {"4096", 4096},
        {"600M", 600000000},
        {"1.5Gi", 1610612736},
        {"64Ki", 65536},
        {"2T", 2000000000000},
        {"1KiB", 1024},
        {"0.5K", 500},
        {"9223372036854775807", INT64_MAX},
    };
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        uint64_t bytes = 77;
        const int ret = sw_size_parse(good[i].text, &bytes);
        assert_int_equal(ret, 0);
        assert_int_equal(bytes, good[i].bytes);
    }
}

static void bad_sizes_are_refused(void **state) {
    (void)state;
    static const char *const bad[] = {"",    "K",   "-1",  "+1",    "1.",  "1.K",
                                      "1 K", "1e3", "0x1", "1.2.3", "1KK", "1KiX",
                                      "3kB", "1M2", "inf", " 1",    "1i"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        uint64_t bytes = 77;
        assert_int_equal(sw_size_parse(bad[i], &bytes), -EINVAL);
        assert_int_equal(bytes, 77);
    }
    uint64_t bytes = 77;
    assert_int_equal(sw_size_parse("9223372036854775808", &bytes), -ERANGE);
    assert_int_equal(sw_size_parse("9999999T", &bytes), -ERANGE);
    assert_int_equal(bytes, 77);
}

static void sizes_are_printed(void **state) {
    (void)state;
    char out[32];
    assert_string_equal(sw_size_print(0, out, sizeof(out)), "0 B");
    assert_string_equal(sw_size_print(999, out, sizeof(out)), "999 B");
    assert_string_equal(sw_size_print(1048576, out, sizeof(out)), "1.05 MB");
    assert_string_equal(sw_size_print(17600000000, out, sizeof(out)), "17.6 GB");
    assert_string_equal(sw_size_print(846000000000, out, sizeof(out)), "846 GB");
    assert_int_equal(sw_round_up(4097, 4096), 8192);
    assert_int_equal(sw_round_up(4096, 4096), 4096);
    assert_int_equal(sw_round_up(0, 4096), 0);
}

/* The BF16 value nearest to x among the high half of its bits and the next one up in magnitude;
 * on a tie away from zero, or to the even one. Overflow past the largest is infinity, whose
 * distance is that of 2^128. */
static uint16_t nearest(uint32_t bits, int ties_away) {
    const uint32_t low = bits >> 16, high = low + 1;
    const double x = fabs((double)sw_f32_from_bits(bits));
    const double below = fabs((double)sw_f32_from_bits(low << 16));
    const int overflows = (high & 0x7FFFu) == 0x7F80u;
    const double above = overflows ? ldexp(1, 128) : fabs((double)sw_f32_from_bits(high << 16));
    const double down = x - below, up = above - x;
    if (down < up) return (uint16_t)low;
    if (up < down || ties_away) return (uint16_t)high;
    return (uint16_t)((low & 1u) ? high : low);
}

static void roundings_are_nearest(void **state) {
    (void)state;
    static const uint32_t lows[] = {0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234, 0xC000};
    for (uint32_t high = 0; high < 0x10000u; high++) {
        if ((high & 0x7F80u) == 0x7F80u) continue;
        for (size_t i = 0; i < sizeof(lows) / sizeof(lows[0]); i++) {
            const uint32_t bits = high << 16 | lows[i];
            const float x = sw_f32_from_bits(bits);
            assert_int_equal(sw_bf16_from_weight(x), nearest(bits, 1));
            assert_int_equal(sw_bf16_from_f32(x), nearest(bits, 0));
        }
    }
}

static void weight_and_remainder_give_the_master_back(void **state) {
    (void)state;
    for (uint32_t high = 0; high < 0x7F80u; high += 37) {
        for (uint32_t low = 0; low < 0x10000u; low++) {
            const uint32_t bits = high << 16 | low;
            const uint32_t weight = sw_bf16_from_weight(sw_f32_from_bits(bits));
            const int32_t remainder = (int32_t)(bits - (weight << 16));
            assert_in_range(remainder + 0x8000, 0, 0xFFFF); /* fits 16 bits with its sign */
        }
    }
}

static void special_values_survive_rounding(void **state) {
    (void)state;
    assert_int_equal(sw_bf16_from_weight(INFINITY), 0x7F80);
    assert_int_equal(sw_bf16_from_f32(-INFINITY), 0xFF80);
    static const uint32_t nans[] = {0x7F800001u, 0x7FFFFFFFu, 0xFFFFFFFFu, 0xFF808000u,
                                    0x7FC00000u};
    for (size_t i = 0; i < sizeof(nans) / sizeof(nans[0]); i++) {
        const float x = sw_f32_from_bits(nans[i]);
        assert_true(isnan(sw_f32_from_bf16(sw_bf16_from_weight(x))));
        assert_true(isnan(sw_f32_from_bf16(sw_bf16_from_f32(x))));
    }
}

enum { LOG_THREADS = 4, LOG_LINES = 500 };

struct log_seen {
    int lines, broken, level;
};

static void count_line(enum sw_log_level level, const char *line, void *ctx) {
    struct log_seen *seen = ctx;
    int number, same, used = 0;
    seen->lines++;
    seen->level = (int)level;
    if (sscanf(line, "line %d and again %d%n", &number, &same, &used) != 2 || number != same ||
        line[used])
        seen->broken++;
}

static void *log_lines(void *arg) {
    (void)arg;
    for (int i = 0; i < LOG_LINES; i++) sw_warning("line %d and again %d", i, i);
    return NULL;
}

static void log_lines_arrive_whole(void **state) {
    (void)state;
    struct log_seen seen = {0};
    pthread_t threads[LOG_THREADS];
    sw_error("nobody listens, and nothing is printed");
    sw_log_set_sink(count_line, &seen);
    for (int i = 0; i < LOG_THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, log_lines, NULL), 0);
    for (int i = 0; i < LOG_THREADS; i++) pthread_join(threads[i], NULL);
    sw_log_set_sink(NULL, NULL);
    assert_int_equal(seen.lines, LOG_THREADS * LOG_LINES);
    assert_int_equal(seen.broken, 0);
    assert_int_equal(seen.level, SW_LOG_WARNING);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes_are_parsed),
        cmocka_unit_test(bad_sizes_are_refused),
        cmocka_unit_test(sizes_are_printed),
        cmocka_unit_test(roundings_are_nearest),
        cmocka_unit_test(weight_and_remainder_give_the_master_back),
        cmocka_unit_test(special_values_survive_rounding),
        cmocka_unit_test(log_lines_arrive_whole),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
