/* base/: CRC-32C and which instruction set runs. The checksum is compared with published vectors
 * and with a bit-by-bit division written here. */
#include "base/crc32c.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <cmocka.h>
#include "base/isa.h"
#include "base/log.h"

/* RFC 3720, appendix B.4, and the check value of the polynomial's catalogue entry. */
static void published_vectors(void **state) {
    (void)state;
    unsigned char bytes[32];
    memset(bytes, 0, sizeof(bytes));
    assert_int_equal(sw_crc32c(0, bytes, sizeof(bytes)), 0x8A9136AAu);
    memset(bytes, 0xFF, sizeof(bytes));
    assert_int_equal(sw_crc32c(0, bytes, sizeof(bytes)), 0x62A8AB43u);
    for (int i = 0; i < 32; i++) bytes[i] = (unsigned char)i;
    assert_int_equal(sw_crc32c(0, bytes, sizeof(bytes)), 0x46DD794Eu);
    for (int i = 0; i < 32; i++) bytes[i] = (unsigned char)(31 - i);
    assert_int_equal(sw_crc32c(0, bytes, sizeof(bytes)), 0x113FDB5Cu);
    assert_int_equal(sw_crc32c(0, "123456789", 9), 0xE3069283u);
    assert_int_equal(sw_crc32c(0, NULL, 0), 0);
}

static uint32_t by_bits(const unsigned char *data, size_t bytes) {
    uint32_t crc = 0xFFFFFFFFu;
    for (size_t i = 0; i < bytes; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (crc & 1 ? 0x82F63B78u : 0);
    }
    return ~crc;
}

static unsigned char noise[5000];

static void fill(void) {
    uint32_t x = 1;
    for (size_t i = 0; i < sizeof(noise); i++) {
        x = x * 1664525u + 1013904223u;
        noise[i] = (unsigned char)(x >> 24);
    }
}

static void every_length_and_alignment_is_the_division(void **state) {
    (void)state;
    fill();
    for (size_t length = 0; length < 700; length++) {
        const unsigned char *at = noise + length % 33;
        assert_int_equal(sw_crc32c(0, at, length), by_bits(at, length));
    }
    assert_int_equal(sw_crc32c(0, noise, sizeof(noise)), by_bits(noise, sizeof(noise)));
}

static void a_checksum_goes_on_where_it_stopped(void **state) {
    (void)state;
    fill();
    const uint32_t whole = sw_crc32c(0, noise, sizeof(noise));
    for (size_t cut = 0; cut <= sizeof(noise); cut += 7) {
        const uint32_t first = sw_crc32c(0, noise, cut);
        assert_int_equal(sw_crc32c(first, noise + cut, sizeof(noise) - cut), whole);
    }
}

static void two_checksums_combine_at_every_split(void **state) {
    (void)state;
    fill();
    for (size_t total = 0; total <= sizeof(noise); total += 1250) {
        const uint32_t whole = sw_crc32c(0, noise, total);
        for (size_t cut = 0; cut <= total; cut += cut < 300 || total - cut < 300 ? 1 : 37) {
            const uint32_t a = sw_crc32c(0, noise, cut);
            const uint32_t b = sw_crc32c(0, noise + cut, total - cut);
            assert_int_equal(sw_crc32c_combine(a, b, total - cut), whole);
        }
    }
    /* Order counts, and so do three parts in either grouping. */
    const uint32_t a = sw_crc32c(0, noise, 100), b = sw_crc32c(0, noise + 100, 57),
                   c = sw_crc32c(0, noise + 157, 300);
    const uint32_t ab = sw_crc32c_combine(a, b, 57), bc = sw_crc32c_combine(b, c, 300);
    assert_int_equal(sw_crc32c_combine(ab, c, 300), sw_crc32c_combine(a, bc, 357));
    assert_int_equal(sw_crc32c_combine(ab, c, 300), sw_crc32c(0, noise, 457));
    assert_int_not_equal(sw_crc32c_combine(a, b, 57), sw_crc32c_combine(b, a, 100));
}

/* Lengths that a 32-bit count would lose. Zeros are read from pages that are not there: 2^31 + 17
 * bytes of address space, one page of memory. */
static void lengths_beyond_31_bits(void **state) {
    (void)state;
    const size_t bytes = ((size_t)1 << 31) + 17;
    unsigned char *zeros = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (zeros == MAP_FAILED) {
        print_message("no address space for 2 GiB here\n");
        skip();
    }
    const uint32_t whole = sw_crc32c(0, zeros, bytes);
    munmap(zeros, bytes);
    /* The same by doubling what is known of 17 bytes and of one. */
    static const unsigned char few[17];
    uint32_t power = sw_crc32c(0, few, 1);
    for (int i = 0; i < 31; i++) power = sw_crc32c_combine(power, power, (uint64_t)1 << i);
    assert_int_equal(whole, sw_crc32c_combine(power, sw_crc32c(0, few, 17), 17));
    /* 2^35 bytes, twice as two halves and once as eight parts. */
    uint32_t parts = power, halves = power;
    for (int i = 31; i < 35; i++) halves = sw_crc32c_combine(halves, halves, (uint64_t)1 << i);
    for (int i = 1; i < 16; i++) parts = sw_crc32c_combine(parts, power, (uint64_t)1 << 31);
    assert_int_equal(halves, parts);
    /* A length whose low 32 bits are zero is not a length of zero. */
    assert_int_not_equal(sw_crc32c_combine(1, 0, (uint64_t)1 << 32), 1);
}

/* A single flipped bit always shows; checked for all of a record's worth of them. */
static void any_flipped_bit_shows(void **state) {
    (void)state;
    fill();
    const uint32_t whole = sw_crc32c(0, noise, 1500);
    for (int bit = 0; bit < 1500 * 8; bit++) {
        noise[bit / 8] ^= (unsigned char)(1 << bit % 8);
        assert_int_not_equal(sw_crc32c(0, noise, 1500), whole);
        noise[bit / 8] ^= (unsigned char)(1 << bit % 8);
    }
}

/* ---- instruction sets ---- */

static int reports;
static char last_report[200];
static void keep(enum sw_log_level level, const char *line, void *ctx) {
    (void)ctx;
    reports += level == SW_LOG_ERROR;
    snprintf(last_report, sizeof(last_report), "%s", line);
}

/* Picks with this environment: the set, or -errno with one report that names the variable. */
static int pick_with(const char *forced) {
    if (forced)
        setenv("SPILLWAY_ISA", forced, 1);
    else
        unsetenv("SPILLWAY_ISA");
    enum sw_isa isa = SW_ISA_COUNT;
    reports = 0;
    sw_log_set_sink(keep, NULL);
    const int ret = sw_isa_pick(&isa);
    sw_log_set_sink(NULL, NULL);
    unsetenv("SPILLWAY_ISA");
    assert_int_equal(reports, ret != 0);
    if (ret) assert_int_equal(isa, SW_ISA_COUNT);
    if (ret) assert_non_null(strstr(last_report, "SPILLWAY_ISA"));
    return ret ? ret : (int)isa;
}

static void the_environment_forces_a_set_or_fails_loudly(void **state) {
    (void)state;
    int best = SW_ISA_SCALAR;
    for (int i = 0; i < SW_ISA_COUNT; i++)
        if (sw_isa_supported((enum sw_isa)i)) best = i;
    assert_true(sw_isa_supported(SW_ISA_SCALAR));
    assert_int_equal(pick_with(NULL), best);
    assert_int_equal(pick_with(""), best);
    for (int i = 0; i < SW_ISA_COUNT; i++)
        assert_int_equal(pick_with(sw_isa_name((enum sw_isa)i)),
                         sw_isa_supported((enum sw_isa)i) ? i : -ENOTSUP);
    assert_int_equal(pick_with("avx"), -EINVAL);
    assert_int_equal(pick_with("AVX2"), -EINVAL);
    assert_int_equal(pick_with("avx2 "), -EINVAL);
}

/* The names are the words that users write. */
static void sets_have_their_names(void **state) {
    (void)state;
    assert_string_equal(sw_isa_name(SW_ISA_SCALAR), "scalar");
    assert_string_equal(sw_isa_name(SW_ISA_AVX2), "avx2");
    assert_string_equal(sw_isa_name(SW_ISA_AVX512), "avx512");
}

/* What the kernel lists for this machine, which it leaves out when it does not save the registers:
 * a set counts as supported exactly when all its flags stand there. */
static void support_is_what_the_kernel_lists(void **state) {
    (void)state;
    static const struct {
        enum sw_isa isa;
        const char *flags[8];
    } sets[] = {
        {SW_ISA_AVX2, {" avx2 ", " fma ", " f16c "}},
        {SW_ISA_AVX512,
         {" avx2 ", " fma ", " f16c ", " avx512f ", " avx512bw ", " avx512vl ", " avx512dq "}},
    };
    static char line[16384];
    FILE *file = fopen("/proc/cpuinfo", "r");
    int found = 0;
    while (file && !found && fgets(line, sizeof(line) - 1, file))
        found = strncmp(line, "flags", 5) == 0;
    if (file) fclose(file);
    if (!found) {
        print_message("no flags in /proc/cpuinfo here\n");
        skip();
    }
    line[strcspn(line, "\n")] = ' ';
    for (size_t s = 0; s < sizeof(sets) / sizeof(sets[0]); s++) {
        int all = 1;
        for (int f = 0; f < 8 && sets[s].flags[f]; f++) all &= strstr(line, sets[s].flags[f]) != 0;
        assert_int_equal(!!sw_isa_supported(sets[s].isa), all);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(published_vectors),
        cmocka_unit_test(every_length_and_alignment_is_the_division),
        cmocka_unit_test(a_checksum_goes_on_where_it_stopped),
        cmocka_unit_test(two_checksums_combine_at_every_split),
        cmocka_unit_test(lengths_beyond_31_bits),
        cmocka_unit_test(any_flipped_bit_shows),
        cmocka_unit_test(the_environment_forces_a_set_or_fails_loudly),
        cmocka_unit_test(sets_have_their_names),
        cmocka_unit_test(support_is_what_the_kernel_lists),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
