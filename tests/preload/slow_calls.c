/* A drive that takes its time: loaded with LD_PRELOAD.
 *
 *   SLOW_CALLS=PART:MS:HOW   every fsync, fdatasync and pwrite of a file, and every rename to a
 * name, that has PART in its path takes MS milliseconds longer; HOW is always, or random: from 0 to
 * MS, drawn anew in each process. */
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#include "tests/support_file_name.h"

static uint64_t draw(void) {
    static atomic_ullong count;
    uint64_t x = ((uint64_t)getpid() << 32) + atomic_fetch_add(&count, 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

static void take_time(const char *path) {
    const char *wish = getenv("SLOW_CALLS");
    char part[64], how[16];
    unsigned ms;
    if (!wish || sscanf(wish, "%63[^:]:%u:%15s", part, &ms, how) != 3) return;
    if (!strstr(path, part)) return;
    if (strcmp(how, "random") == 0) ms = (unsigned)(draw() % (ms + 1));
    const struct timespec rest = {ms / 1000, (long)(ms % 1000) * 1000000};
    nanosleep(&rest, NULL);
}

static void take_time_fd(int fd) {
    char path[4096];
    take_time(path_of(fd, path, sizeof(path)));
}

ssize_t pwrite(int fd, const void *buf, size_t bytes, off_t offset) {
    ssize_t (*real)(int, const void *, size_t, off_t) =
        (ssize_t(*)(int, const void *, size_t, off_t))dlsym(RTLD_NEXT, "pwrite");
    take_time_fd(fd);
    return real(fd, buf, bytes, offset);
}

int fsync(int fd) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    take_time_fd(fd);
    return real(fd);
}

int fdatasync(int fd) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    take_time_fd(fd);
    return real(fd);
}

int rename(const char *from, const char *to) {
    int (*real)(const char *, const char *) =
        (int (*)(const char *, const char *))dlsym(RTLD_NEXT, "rename");
    take_time(to);
    return real(from, to);
}
