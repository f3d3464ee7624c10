/* A drive that misbehaves under a whole run: loaded with LD_PRELOAD.
 *
 *   FAULT=KIND:N[:SEED]   the N-th call of KIND's sort, counted from 1, is disturbed; with short,
 * eintr, eagain and ebusy one in N, drawn. SEED chooses calls, bytes and bits.
 *
 * io_uring is refused, so that the store's records go through pread and pwrite:
 *   short, eintr, eagain, ebusy     transfers of *.state, reads and writes
 *   eio_read, flip_read, stale      reads of *.state; stale: what the other home holds
 *   eio_write, lost, torn, flip_write   writes of *.state
 *   sync_state, sync_commit         fdatasync of *.state or *.commit ends in EIO
 *   eio_commit, enospc_commit       pwrite of *.commit fails half way
 * What was done is told on standard error. */
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include "tests/support_file_name.h"

struct io_uring;
struct io_uring_params;

enum { PAGE_BYTES = 4096 };
enum sort { READ = 1, WRITE = 2, SYNC = 4 };

static const struct kind {
    const char *name, *suffix;
    int sorts, drawn, error;
} kinds[] = {
    {"short", ".state", READ | WRITE, 1, 0},
    {"eintr", ".state", READ | WRITE, 1, EINTR},
    {"eagain", ".state", READ | WRITE, 1, EAGAIN},
    {"ebusy", ".state", READ | WRITE, 1, EBUSY},
    {"eio_read", ".state", READ, 0, EIO},
    {"flip_read", ".state", READ, 0, 0},
    {"stale", ".state", READ, 0, 0},
    {"eio_write", ".state", WRITE, 0, EIO},
    {"lost", ".state", WRITE, 0, 0},
    {"torn", ".state", WRITE, 0, 0},
    {"flip_write", ".state", WRITE, 0, 0},
    {"sync_state", ".state", SYNC, 0, EIO},
    {"sync_commit", ".commit", SYNC, 0, EIO},
    {"eio_commit", ".commit", WRITE, 0, EIO},
    {"enospc_commit", ".commit", WRITE, 0, ENOSPC},
};

static atomic_ulong calls;

static int is_named(int fd, const char *suffix) {
    char path[4096];
    return ends_with(path_of(fd, path, sizeof(path)), suffix);
}

/* What to do at this call, or NULL. */
static const struct kind *plan(enum sort sort, int fd, unsigned long *seed) {
    const char *text = getenv("FAULT");
    char name[32];
    unsigned long number;
    *seed = 1;
    if (!text || sscanf(text, "%31[^:]:%lu:%lu", name, &number, seed) < 2 || !number) return NULL;
    const struct kind *kind = NULL;
    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
        if (!strcmp(name, kinds[i].name)) kind = &kinds[i];
    if (!kind || !(kind->sorts & (int)sort) || !is_named(fd, kind->suffix)) return NULL;
    const unsigned long call = atomic_fetch_add(&calls, 1) + 1;
    const unsigned long dice = (call + *seed) * 6364136223846793005u >> 33;
    return (kind->drawn ? dice % number == 0 : call == number) ? kind : NULL;
}

/* Not by dprintf, which allocates: this may be inside a step. */
static void tell(const struct kind *kind, size_t bytes, off_t offset) {
    char line[128];
    const int length = snprintf(line, sizeof(line), "faulty device: %s, %zu bytes at %lld\n",
                                kind->name, bytes, (long long)offset);
    (void)!write(2, line, (size_t)length);
}

static ssize_t real_read(int fd, void *buf, size_t bytes, off_t offset) {
    ssize_t (*real)(int, void *, size_t, off_t) =
        (ssize_t(*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread");
    return real(fd, buf, bytes, offset);
}

static ssize_t real_write(int fd, const void *buf, size_t bytes, off_t offset) {
    ssize_t (*real)(int, const void *, size_t, off_t) =
        (ssize_t(*)(int, const void *, size_t, off_t))dlsym(RTLD_NEXT, "pwrite");
    return real(fd, buf, bytes, offset);
}

static void flip(void *buf, size_t bytes, unsigned long seed) {
    ((unsigned char *)buf)[seed * 2654435761u % bytes] ^= (unsigned char)(1u << seed % 8);
}

static size_t part_of(size_t bytes) {
    return bytes / 2 / PAGE_BYTES * PAGE_BYTES;
}

static off_t other_home(int fd, off_t offset) {
    struct stat st;
    if (fstat(fd, &st)) abort();
    return offset < st.st_size / 2 ? offset + st.st_size / 2 : offset - st.st_size / 2;
}

ssize_t pread(int fd, void *buf, size_t bytes, off_t offset) {
    unsigned long seed;
    const struct kind *kind = plan(READ, fd, &seed);
    if (!kind) return real_read(fd, buf, bytes, offset);
    tell(kind, bytes, offset);
    if (kind->error) {
        errno = kind->error;
        return -1;
    }
    if (!strcmp(kind->name, "short") && part_of(bytes))
        return real_read(fd, buf, part_of(bytes), offset);
    const int stale = !strcmp(kind->name, "stale");
    const ssize_t done = real_read(fd, buf, bytes, stale ? other_home(fd, offset) : offset);
    if (!strcmp(kind->name, "flip_read") && done > 0) flip(buf, bytes, seed);
    return done;
}

ssize_t pwrite(int fd, const void *buf, size_t bytes, off_t offset) {
    unsigned long seed;
    const struct kind *kind = plan(WRITE, fd, &seed);
    if (!kind) return real_write(fd, buf, bytes, offset);
    tell(kind, bytes, offset);
    if (kind->error) {
        if (!strcmp(kind->suffix, ".commit")) (void)!real_write(fd, buf, bytes / 2, offset);
        errno = kind->error;
        return -1;
    }
    if (!strcmp(kind->name, "short") && part_of(bytes))
        return real_write(fd, buf, part_of(bytes), offset);
    if (!strcmp(kind->name, "lost")) return (ssize_t)bytes;
    if (!strcmp(kind->name, "torn"))
        return real_write(fd, buf, part_of(bytes), offset) < 0 ? -1 : (ssize_t)bytes;
    if (strcmp(kind->name, "flip_write") != 0) return real_write(fd, buf, bytes, offset);
    /* One call in a run; aligned for direct I/O, and not allocated inside a step. */
    static _Alignas(PAGE_BYTES) unsigned char copy[4 << 20];
    if (bytes > sizeof(copy)) abort();
    memcpy(copy, buf, bytes);
    flip(copy, bytes, seed);
    return real_write(fd, copy, bytes, offset);
}

int fdatasync(int fd) {
    unsigned long seed;
    const struct kind *kind = plan(SYNC, fd, &seed);
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    if (!kind) return real(fd);
    tell(kind, 0, 0);
    errno = kind->error;
    return -1;
}

int io_uring_queue_init_params(unsigned entries, struct io_uring *ring,
                               struct io_uring_params *params) {
    (void)entries, (void)ring, (void)params;
    return -EPERM;
}

int io_uring_queue_init(unsigned entries, struct io_uring *ring, unsigned flags) {
    (void)entries, (void)ring, (void)flags;
    return -EPERM;
}
