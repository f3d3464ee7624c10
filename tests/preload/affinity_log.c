/* Writes down every affinity mask that the process asks for: loaded with LD_PRELOAD.
 *
 *   AFFINITY_LOG=FILE   one line per call is appended: the CPUs, with commas
 *
 * A mask that is left for a moment and restored would be seen by chance only from outside. */
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static void note(size_t bytes, const cpu_set_t *mask) {
    const char *path = getenv("AFFINITY_LOG");
    char line[4096];
    size_t n = 0;
    if (!path) return;
    for (size_t cpu = 0; cpu < 8 * bytes && n < sizeof(line) - 16; cpu++)
        if (CPU_ISSET_S(cpu, bytes, mask))
            n += (size_t)snprintf(line + n, sizeof(line) - n, n ? ",%zu" : "%zu", cpu);
    line[n++] = '\n';
    const int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (fd < 0 || write(fd, line, n) != (ssize_t)n) abort();
    close(fd);
}

int sched_setaffinity(pid_t pid, size_t bytes, const cpu_set_t *mask) {
    int (*real)(pid_t, size_t, const cpu_set_t *) =
        (int (*)(pid_t, size_t, const cpu_set_t *))dlsym(RTLD_NEXT, "sched_setaffinity");
    note(bytes, mask);
    return real(pid, bytes, mask);
}

int pthread_setaffinity_np(pthread_t thread, size_t bytes, const cpu_set_t *mask) {
    int (*real)(pthread_t, size_t, const cpu_set_t *) =
        (int (*)(pthread_t, size_t, const cpu_set_t *))dlsym(RTLD_NEXT, "pthread_setaffinity_np");
    note(bytes, mask);
    return real(thread, bytes, mask);
}
