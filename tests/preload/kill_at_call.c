/* Ends the process by SIGKILL at a chosen call on a chosen file: loaded with LD_PRELOAD.
 *
 *   KILL_AT=CALL:SUFFIX:N:WHEN   CALL is pwrite, fdatasync or unlink; SUFFIX ends the file's name;
 * N counts such calls from 1; WHEN is before, after, late (two seconds after the call came, before
 * it is made), torn (a pwrite of which only the first half is done), or stop (SIGSTOP before it,
 * and the end when it is continued)
 *
 * The store's records go through io_uring, its commit record through these calls; so every stage of
 * a commit has a call before or after which a run can be stopped. */
#include <dlfcn.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#include "tests/support_file_name.h"

static atomic_int calls;

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

/* What to do at this call: 'b', 'a', 't', or 0; late has slept and is 'b', stop was stopped and is
 * 'b', too. */
static int plan(const char *call, const char *path) {
    const char *at = getenv("KILL_AT");
    char wanted[32], suffix[64], when[16];
    int number;
    if (!at || sscanf(at, "%31[^:]:%63[^:]:%d:%15s", wanted, suffix, &number, when) != 4) return 0;
    if (strcmp(call, wanted) != 0 || !ends_with(path, suffix)) return 0;
    if (atomic_fetch_add(&calls, 1) + 1 != number) return 0;
    if (when[0] == 's') return raise(SIGSTOP), 'b';
    if (when[0] != 'l') return when[0];
    sleep(2);
    return 'b';
}

static int plan_fd(const char *call, int fd) {
    char path[4096];
    return plan(call, path_of(fd, path, sizeof(path)));
}

ssize_t pwrite(int fd, const void *buf, size_t bytes, off_t offset) {
    ssize_t (*real)(int, const void *, size_t, off_t) =
        (ssize_t(*)(int, const void *, size_t, off_t))dlsym(RTLD_NEXT, "pwrite");
    const int what = plan_fd("pwrite", fd);
    if (what == 'b') die();
    const ssize_t done = real(fd, buf, what == 't' ? bytes / 2 : bytes, offset);
    if (what) die();
    return done;
}

int fdatasync(int fd) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    const int what = plan_fd("fdatasync", fd);
    if (what == 'b') die();
    const int ret = real(fd);
    if (what) die();
    return ret;
}

int unlink(const char *path) {
    int (*real)(const char *) = (int (*)(const char *))dlsym(RTLD_NEXT, "unlink");
    const int what = plan("unlink", path);
    if (what == 'b') die();
    const int ret = real(path);
    if (what) die();
    return ret;
}
