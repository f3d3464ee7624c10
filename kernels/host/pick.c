/* kernels/host/pick.c - which instruction set's kernels run: decided by CPU, operating system and
 * SPILLWAY_ISA. */
#include "kernels/host/host.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "base/log.h"

extern const struct sw_host_pointwise sw_host_pointwise_avx512, sw_host_pointwise_avx2,
    sw_host_pointwise_scalar;
extern const struct sw_host_rows sw_host_rows_avx512, sw_host_rows_avx2, sw_host_rows_scalar;
extern const struct sw_host_attention sw_host_attention_avx512, sw_host_attention_avx2,
    sw_host_attention_scalar;

/* The compiler's test covers the operating system: it reads which registers are saved (XCR0). */
static int has_avx512(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

static int has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static int always(void) {
    return 1;
}

const struct sw_host_isa sw_host_isas[] = {
    {"avx512", has_avx512, &sw_host_pointwise_avx512, &sw_host_rows_avx512,
     &sw_host_attention_avx512},
    {"avx2", has_avx2, &sw_host_pointwise_avx2, &sw_host_rows_avx2, &sw_host_attention_avx2},
    {"scalar", always, &sw_host_pointwise_scalar, &sw_host_rows_scalar, &sw_host_attention_scalar},
};
const int sw_host_isa_count = sizeof(sw_host_isas) / sizeof(sw_host_isas[0]);

int sw_host_pick(const struct sw_host_isa **isa) {
    const char *wanted = getenv("SPILLWAY_ISA");
    for (int i = 0; i < sw_host_isa_count; i++) {
        const struct sw_host_isa *set = &sw_host_isas[i];
        if (wanted && *wanted && strcmp(wanted, set->name) != 0) continue;
        if (set->supported()) {
            *isa = set;
            return 0;
        }
        if (wanted && *wanted) {
            sw_error("host device: SPILLWAY_ISA=%s cannot run on this CPU", wanted);
            return -ENOTSUP;
        }
    }
    sw_error("host device: SPILLWAY_ISA=%s is not one of avx512, avx2, scalar", wanted);
    return -EINVAL;
}
