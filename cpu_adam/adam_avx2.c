/* cpu_adam/adam_avx2.c - the loops of adam_kernel.h; the Makefile gives this file its flags. */
#define SW_ADAM_ISA avx2
#include "cpu_adam/adam_kernel.h"
