/* tools/kill_watch.c - a child that waits at a pipe for the end of its parent.
 *
 * A killed process cannot speak, and its shell says "Killed" at best. The child keeps the process
 * number, the signals and the exit status of the run as they are, which a parent in front of it
 * would not. A group that the kernel kills as a whole (memory.oom.group) takes the child along. */
#include "tools/kill_watch.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/log.h"
#include "base/size.h"
#include "offload/topology.h"

enum { END_MS = 1000 }; /* what the child has to end in */

static int pipe_end = -1; /* the run's; closed by the kernel whichever way the run ends */
static pid_t watcher;

static void tell(pid_t run) {
    char size[32];
    struct sw_topology topology;
    if (sw_topology_read(&topology) < 0) return;
    sw_error(
        "the kernel killed this run (process %d) for lack of memory: it and what else runs "
        "beside it may take %s here. --host-memory SIZE makes the run take less, what it takes "
        "stands under \"bytes:\" at its start; --resume goes on from the last commit",
        (int)run, sw_size_print(topology.memory_bytes, size, sizeof(size)));
}

static void watch(int fd, pid_t run, uint64_t kills) {
    char word;
    ssize_t n;
    const int signals[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGQUIT, SIGTSTP};
    for (size_t i = 0; i < sizeof(signals) / sizeof(signals[0]); i++) signal(signals[i], SIG_IGN);
    prctl(PR_SET_NAME, "spillway-watch");
    do n = read(fd, &word, 1);
    while (n < 0 && errno == EINTR);
    if (n == 0 && sw_topology_oom_kills() > kills) tell(run);
}

void sw_kill_watch_begin(void) {
    int fds[2];
    const pid_t run = getpid();
    const uint64_t kills = sw_topology_oom_kills();
    if (pipe2(fds, O_CLOEXEC) < 0) return;
    const pid_t child = fork();
    if (child == 0) {
        /* Readers of the run's output wait for every holder of it, and files it holds stay busy. */
        if (dup2(fds[0], STDIN_FILENO) < 0) _exit(0);
        close(STDOUT_FILENO);
        close_range(STDERR_FILENO + 1, ~0u, 0);
        watch(STDIN_FILENO, run, kills);
        _exit(0);
    }
    close(fds[0]);
    if (child < 0)
        close(fds[1]);
    else
        pipe_end = fds[1];
    watcher = child;
}

void sw_kill_watch_end(void) {
    static const char word = 1;
    if (pipe_end < 0) return;
    /* It leaves no process behind: a limit of them may be all that the user has. One that does not
     * end, as it was stopped, is not waited for. */
    int left_ms = write(pipe_end, &word, 1) == 1 ? END_MS : 0;
    while (left_ms > 0 && waitpid(watcher, NULL, WNOHANG) == 0) {
        poll(NULL, 0, 1);
        left_ms--;
    }
    if (left_ms == 0 && kill(watcher, SIGKILL) == 0) waitpid(watcher, NULL, WNOHANG);
    pipe_end = -1;
}
