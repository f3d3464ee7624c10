/* base/isa.h - the instruction set of every loop that is compiled once per set: decided by the
 * CPU, the operating system (it has to save the registers) and the variable SPILLWAY_ISA. */
#ifndef BASE_ISA_H
#define BASE_ISA_H

enum sw_isa { SW_ISA_SCALAR, SW_ISA_AVX2, SW_ISA_AVX512, SW_ISA_COUNT };

/* "scalar", "avx2", "avx512": SPILLWAY_ISA's words. */
const char *sw_isa_name(enum sw_isa isa);

/* AVX2 asks for FMA and F16C, AVX-512 for F, BW, VL and DQ. Scalar always runs. */
int sw_isa_supported(enum sw_isa isa);

/* The set that SPILLWAY_ISA names, else the best supported one. 0, or, reported, -EINVAL (unknown
 * name) or -ENOTSUP (it cannot run here). */
int sw_isa_pick(enum sw_isa *isa);

#endif
