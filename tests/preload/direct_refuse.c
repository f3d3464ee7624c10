/* Has direct I/O refused as some file systems do: loaded with LD_PRELOAD.
 *
 *   DIRECT_REFUSED=fcntl:ERRNO   turning O_DIRECT on ends so
 *   DIRECT_REFUSED=pread:ERRNO   it is taken, and every pread of such a file ends so */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

static int (*real_fcntl(void))(int, int, ...) {
    return (int (*)(int, int, ...))dlsym(RTLD_NEXT, "fcntl");
}

static int refused(const char *call) {
    const char *wanted = getenv("DIRECT_REFUSED");
    char name[16];
    int err;
    if (!wanted || sscanf(wanted, "%15[^:]:%d", name, &err) != 2) return 0;
    return strcmp(name, call) == 0 ? err : 0;
}

int fcntl(int fd, int command, ...) {
    va_list list;
    va_start(list, command);
    void *argument = va_arg(list, void *);
    va_end(list);
    const int err = refused("fcntl");
    if (err && command == F_SETFL && ((long)argument & O_DIRECT)) {
        errno = err;
        return -1;
    }
    return real_fcntl()(fd, command, argument);
}

ssize_t pread(int fd, void *buf, size_t bytes, off_t offset) {
    ssize_t (*real)(int, void *, size_t, off_t) =
        (ssize_t(*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread");
    const int err = refused("pread");
    if (err && (real_fcntl()(fd, F_GETFL) & O_DIRECT)) {
        errno = err;
        return -1;
    }
    return real(fd, buf, bytes, offset);
}
