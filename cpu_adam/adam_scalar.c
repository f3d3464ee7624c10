/* cpu_adam/adam_scalar.c - the Adam loop for baseline x86-64, which every CPU runs; the Makefile
 * gives this file its flags. */
#define SW_ADAM_KERNEL sw_adam_kernel_scalar
#include "cpu_adam/adam_kernel.h"
