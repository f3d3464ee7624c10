/* A cuFile for the CPU stand-in, whose device memory the host can write to: the calls that the
 * back end makes, as plain reads. SPILLWAY_CUFILE names it.
 *
 *   CUFILE_COUNT=FILE        at the end, how many bytes were read stands there
 *   CUFILE_FAULT=KIND[:N]    start: the library does not start; file: files are refused; memory:
 *                            memory is not taken; short: reads end early; error, flip: read N
 *                            fails, or brings a wrong byte */
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

struct error {
    int code, cuda;
};
struct descriptor {
    int type;
    union {
        int fd;
        void *other;
    } handle;
};

static _Atomic unsigned long long bytes_read, reads;

static int faulty(const char *kind, unsigned long long number) {
    const char *text = getenv("CUFILE_FAULT");
    const size_t length = strlen(kind);
    if (!text || strncmp(text, kind, length) != 0) return 0;
    return text[length] != ':' || strtoull(text + length + 1, NULL, 10) == number;
}

struct error cuFileDriverOpen(void) {
    return (struct error){faulty("start", 0) ? 5001 : 0, 0};
}

/* Past the page cache a read wants aligned memory, which the real one does without. */
struct error cuFileHandleRegister(void **handle, const struct descriptor *d) {
    char path[64];
    int *fd = malloc(sizeof(*fd));
    if (!fd || faulty("file", 0)) {
        free(fd);
        return (struct error){5008, 0};
    }
    snprintf(path, sizeof(path), "/proc/self/fd/%d", d->handle.fd);
    *fd = open(path, O_RDONLY | O_CLOEXEC);
    *handle = fd;
    return (struct error){*fd < 0 ? 5027 : 0, 0};
}

void cuFileHandleDeregister(void *handle) {
    close(*(int *)handle);
    free(handle);
}

struct error cuFileBufRegister(const void *base, size_t bytes, int flags) {
    (void)base, (void)bytes, (void)flags;
    return (struct error){faulty("memory", 0) ? 5030 : 0, 0};
}

struct error cuFileBufDeregister(const void *base) {
    (void)base;
    return (struct error){0, 0};
}

ssize_t cuFileRead(void *handle, void *base, size_t bytes, off_t from, off_t to) {
    const unsigned long long number = atomic_fetch_add(&reads, 1) + 1;
    const size_t some = faulty("short", 0) && bytes > 1000 ? bytes / 3 : bytes;
    if (faulty("error", number)) {
        errno = EIO;
        return -1;
    }
    const ssize_t got = pread(*(int *)handle, (char *)base + to, some, from);
    if (got <= 0) return got;
    if (faulty("flip", number)) ((char *)base)[to + got / 2] ^= 1;
    atomic_fetch_add(&bytes_read, (unsigned long long)got);
    return got;
}

__attribute__((destructor)) static void tell(void) {
    const char *path = getenv("CUFILE_COUNT");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (!file) return;
    fprintf(file, "%llu\n", (unsigned long long)bytes_read);
    fclose(file);
}
