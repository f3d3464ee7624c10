/* plan/machine_shipped.c - the shipped profiles as they lie in plan/machines/, put into the program
 * by the assembler. The Makefile names them as what this file depends on. */
#include <stddef.h>

#include "plan/machine.h"

#define EMBED(name, file)                                                                          \
    extern const char name[];                                                                      \
    __asm__(".pushsection .rodata\n"                                                               \
            ".global " #name "\n"                                                                  \
            ".type " #name ", @object\n" #name ":\n"                                               \
            ".incbin \"plan/machines/" file ".json\"\n"                                            \
            ".byte 0\n"                                                                            \
            ".size " #name ", . - " #name "\n"                                                     \
            ".popsection\n")

EMBED(sw_machine_8xh100, "8xh100");
EMBED(sw_machine_8xh200, "8xh200");
EMBED(sw_machine_8xa100, "8xa100");
EMBED(sw_machine_4xa100_40g, "4xa100-40g");
EMBED(sw_machine_rtx4090, "rtx4090");
EMBED(sw_machine_rtx5090, "rtx5090");

static const struct {
    const char *name, *text;
} shipped[] = {
    {"8xh100", sw_machine_8xh100},   {"8xh200", sw_machine_8xh200},
    {"8xa100", sw_machine_8xa100},   {"4xa100-40g", sw_machine_4xa100_40g},
    {"rtx4090", sw_machine_rtx4090}, {"rtx5090", sw_machine_rtx5090},
};
enum { SHIPPED = sizeof(shipped) / sizeof(shipped[0]) };

const char *sw_machine_shipped(int i, const char **text) {
    if (i >= SHIPPED) return NULL;
    *text = shipped[i].text;
    return shipped[i].name;
}
