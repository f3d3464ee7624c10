/* tools/page_file.c - see the header. */
#include "tools/page_file.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "engine/output.h"

enum { BUFFER_BYTES = 1 << 18 };

void sw_page_partial(const char *path, char partial[PATH_MAX]) {
    snprintf(partial, PATH_MAX, "%s.partial", path);
}

static int fill_file(int (*fill)(void *ctx, FILE *out), void *ctx, FILE *out) {
    setvbuf(out, NULL, _IOFBF, BUFFER_BYTES);
    errno = 0;
    int ret = fill(ctx, out);
    if (ret == 0 && (fflush(out) != 0 || ferror(out))) ret = errno ? -errno : -EIO;
    if (ret == 0 && fsync(fileno(out)) < 0 && errno != EINVAL) ret = -errno;
    return ret;
}

int sw_page_write(const char *option, const char *path, int (*fill)(void *ctx, FILE *out),
                  void *ctx) {
    char partial[PATH_MAX];
    int ret = sw_output_check_kind(option, path, 1);
    if (ret < 0) return ret;
    sw_page_partial(path, partial);
    FILE *out = fopen(partial, "we");
    ret = out ? fill_file(fill, ctx, out) : -errno;
    if (out && fclose(out) != 0 && ret == 0) ret = -errno;
    if (ret == 0 && rename(partial, path) < 0) ret = -errno;
    if (ret < 0) sw_error("%s %s: %s", option, path, strerror(-ret));
    if (ret < 0 && out) unlink(partial);
    return ret;
}
