/* tools/page_file.h - a page takes its place whole: written beside it, synced, then renamed. */
#ifndef TOOLS_PAGE_FILE_H
#define TOOLS_PAGE_FILE_H
#include <limits.h>
#include <stdio.h>

/* Where it is written first. */
void sw_page_partial(const char *path, char partial[PATH_MAX]);

/* fill: 0 or -errno; failed writes are found afterwards. option: whose argument the path is, for
 * messages. 0 or -errno, reported; then nothing has changed. */
int sw_page_write(const char *option, const char *path, int (*fill)(void *ctx, FILE *out),
                  void *ctx);

#endif
