/* tests/support_file_name.h - which file a call is about. */
#ifndef TESTS_SUPPORT_FILE_NAME_H
#define TESTS_SUPPORT_FILE_NAME_H
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static inline int ends_with(const char *text, const char *suffix) {
    const size_t n = strlen(text), m = strlen(suffix);
    return n >= m && strcmp(text + n - m, suffix) == 0;
}

/* The path of an open file; "" for a descriptor without one. */
static inline const char *path_of(int fd, char *out, size_t out_size) {
    char link[64];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    const ssize_t n = readlink(link, out, out_size - 1);
    out[n > 0 ? n : 0] = 0;
    return out;
}

#endif
