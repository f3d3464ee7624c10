/* tools/report_template.c - the page's parts as they lie in the tree, put into the program by the
 * assembler. The Makefile names them as what this file depends on. */
#include "tools/report.h"

#define EMBED(name, file)                                                                          \
    __asm__(".pushsection .rodata\n"                                                               \
            ".global " name "\n"                                                                   \
            ".type " name ", @object\n" name ":\n"                                                 \
            ".incbin \"" file "\"\n"                                                               \
            ".byte 0\n"                                                                            \
            ".size " name ", . - " name "\n"                                                       \
            ".popsection\n")

EMBED("sw_report_html", "tools/report.html");
EMBED("sw_report_css", "tools/report.css");
EMBED("sw_report_js", "tools/report.js");
