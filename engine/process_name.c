/* engine/process_name.c - see the header. */
#include "engine/process_name.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

const char *sw_process_name(const char *name, uint32_t process, char out[SW_PROCESS_NAME_BYTES]) {
    if (process == 0) return name;
    snprintf(out, SW_PROCESS_NAME_BYTES, "%s-p%u", name, process);
    return out;
}

/* Where a file's extension begins, or its end. A point in front begins none. */
static const char *extension_of(const char *path) {
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    const char *point = strrchr(name, '.');
    return point && point > name ? point : name + strlen(name);
}

int sw_process_path(const char *path, uint32_t process, char *out, size_t out_size) {
    const char *end = extension_of(path);
    const int n =
        process == 0 ? snprintf(out, out_size, "%s", path)
                     : snprintf(out, out_size, "%.*s-p%u%s", (int)(end - path), path, process, end);
    return n < 0 || (size_t)n >= out_size ? -ENAMETOOLONG : 0;
}

int sw_process_is_named(const char *file, const char *name) {
    const char *end = extension_of(name);
    const size_t stem = (size_t)(end - name);
    if (strcmp(file, name) == 0) return 1;
    if (strncmp(file, name, stem) != 0 || strncmp(file + stem, "-p", 2) != 0) return 0;
    const char *digits = file + stem + 2;
    const size_t count = strspn(digits, "0123456789");
    return count > 0 && strcmp(digits + count, end) == 0;
}
