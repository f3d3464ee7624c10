/* cpu_adam/adam_scalar.c - the loops of adam_kernel.h; the Makefile gives this file its flags. */
#define SW_ADAM_ISA scalar
#include "cpu_adam/adam_kernel.h"
