/* cpu_adam/adam_avx2.c - the Adam loop for AVX2; the Makefile gives this file its flags. */
#define SW_ADAM_KERNEL sw_adam_kernel_avx2
#include "cpu_adam/adam_kernel.h"
