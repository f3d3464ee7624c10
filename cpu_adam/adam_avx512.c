/* cpu_adam/adam_avx512.c - the Adam loop for AVX-512; the Makefile gives this file its flags. */
#define SW_ADAM_KERNEL sw_adam_kernel_avx512
#include "cpu_adam/adam_kernel.h"
