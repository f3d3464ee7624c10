/* base/isa.c - which instruction set runs. */
#include "base/isa.h"

#include <assert.h>
#include <cpuid.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"

static const char *const names[SW_ISA_COUNT] = {"scalar", "avx2", "avx512"};

const char *sw_isa_name(enum sw_isa isa) {
    assert(isa < SW_ISA_COUNT);
    return names[isa];
}

/* The compiler's query also asks which registers the operating system saves (XCR0). */
static int has_avx2(void) {
    unsigned a, b, c, d;
    const int f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
}

static int has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

int sw_isa_supported(enum sw_isa isa) {
    assert(isa < SW_ISA_COUNT);
    return isa == SW_ISA_SCALAR || (isa == SW_ISA_AVX2 ? has_avx2() : has_avx512());
}

int sw_isa_pick(enum sw_isa *isa) {
    assert(isa);
    const char *forced = getenv("SPILLWAY_ISA");
    if (forced && !*forced) forced = NULL;
    for (int i = SW_ISA_COUNT - 1; i >= 0; i--) {
        if (forced && strcmp(forced, names[i]) != 0) continue;
        if (sw_isa_supported((enum sw_isa)i)) {
            *isa = (enum sw_isa)i;
            return 0;
        }
        if (forced) {
            sw_error("SPILLWAY_ISA=%s: this CPU, or its operating system, cannot run it", forced);
            return -ENOTSUP;
        }
    }
    sw_error("SPILLWAY_ISA=%s: unknown; it may be avx512, avx2 or scalar", forced);
    return -EINVAL;
}
