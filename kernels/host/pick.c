/* kernels/host/pick.c - which instruction set's kernels run: decided by CPU, operating system and
 * SPILLWAY_ISA. */
#include "kernels/host/host.h"

extern const struct sw_host_pointwise sw_host_pointwise_avx512, sw_host_pointwise_avx2,
    sw_host_pointwise_scalar;
extern const struct sw_host_rows sw_host_rows_avx512, sw_host_rows_avx2, sw_host_rows_scalar;
extern const struct sw_host_attention sw_host_attention_avx512, sw_host_attention_avx2,
    sw_host_attention_scalar;

const struct sw_host_isa sw_host_isas[SW_ISA_COUNT] = {
    [SW_ISA_SCALAR] = {"scalar", &sw_host_pointwise_scalar, &sw_host_rows_scalar,
                       &sw_host_attention_scalar},
    [SW_ISA_AVX2] = {"avx2", &sw_host_pointwise_avx2, &sw_host_rows_avx2, &sw_host_attention_avx2},
    [SW_ISA_AVX512] = {"avx512", &sw_host_pointwise_avx512, &sw_host_rows_avx512,
                       &sw_host_attention_avx512},
};

int sw_host_pick(const struct sw_host_isa **isa) {
    enum sw_isa picked;
    const int ret = sw_isa_pick(&picked);
    if (ret == 0) *isa = &sw_host_isas[picked];
    return ret;
}
