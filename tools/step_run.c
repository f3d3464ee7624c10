/* tools/step_run.c - see the header. */
#include "tools/step_run.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"
#include "tools/bench.h"

enum { STEPS_MAX = 1024, FIRST = 2, LAST = 1, LOOK_NS = 2000000 };

/* ---- the process ---- */

/* Of a group of its own: the terminal's signals are for this process, which passes on what it
 * means. */
static void become(char *const *words, const char *said, pid_t parent) {
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
    const int in = open("/dev/null", O_RDONLY);
    const int out = open(said, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0666);
    if (in < 0 || out < 0) _exit(1);
    dup2(in, STDIN_FILENO);
    dup2(out, STDOUT_FILENO);
    dup2(out, STDERR_FILENO);
    execv("/proc/self/exe", words);
    _exit(127);
}

/* The exit status, 128 and the signal's number where one ended it; -EINTR: stopped. */
static int wait_for(pid_t child) {
    const struct timespec look = {0, LOOK_NS};
    int status = 0, stopped = 0;
    while (waitpid(child, &status, WNOHANG) == 0) {
        /* Nothing that it leaves is wanted. */
        if (!stopped && sw_bench_stopped()) stopped = kill(-child, SIGKILL) == 0;
        nanosleep(&look, NULL);
    }
    if (stopped) return -EINTR;
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

/* The last line that it has said. */
static void report_end(int status, const char *said) {
    char line[1024], last[1024] = "it said nothing";
    FILE *file = fopen(said, "re");
    while (file && fgets(line, sizeof(line), file)) {
        line[strcspn(line, "\n")] = 0;
        if (line[0]) snprintf(last, sizeof(last), "%s", line);
    }
    if (file) fclose(file);
    sw_error("bench step: a run ended with status %d: %s", status, last);
}

/* ---- its log ---- */

struct steps {
    double seconds[STEPS_MAX], tokens;
    enum sw_lane clocks[STEPS_MAX];
    int count;
};

static enum sw_lane lane_named(const char *name) {
    int l = 0;
    while (name && l < SW_LANE_COUNT - 1 && strcmp(name, sw_lane_name((enum sw_lane)l))) l++;
    return (enum sw_lane)l;
}

static void take_line(struct steps *s, const json_t *line) {
    if (!json_object_get(line, "loss") || s->count == STEPS_MAX) return;
    s->seconds[s->count] = json_number_value(json_object_get(line, "step_s"));
    s->clocks[s->count] = lane_named(json_string_value(json_object_get(line, "step_clock")));
    s->tokens = json_number_value(json_object_get(line, "tokens"));
    s->count++;
}

static int read_log(struct steps *s, const char *log) {
    FILE *file = fopen(log, "re");
    char *text = NULL;
    size_t size = 0;
    if (!file) return -errno;
    while (getline(&text, &size, file) > 0) {
        json_t *line = json_loads(text, 0, NULL);
        take_line(s, line);
        json_decref(line);
    }
    free(text);
    fclose(file);
    return 0;
}

static int conclude(const struct steps *s, struct sw_step_run *out) {
    int clocks[SW_LANE_COUNT] = {0}, most = 0;
    out->steps = s->count - FIRST - LAST;
    if (out->steps < 1) return -ENODATA;
    out->step_s = sw_bench_median(s->seconds + FIRST, out->steps);
    out->tokens = s->tokens;
    for (int i = 0; i < out->steps; i++) clocks[s->clocks[FIRST + i]]++;
    for (int l = 0; l < SW_LANE_COUNT; l++)
        if (clocks[l] > clocks[most]) most = l;
    out->step_clock = (enum sw_lane)most;
    return 0;
}

int sw_step_run(char *const *words, const char *log, const char *said, struct sw_step_run *out) {
    const pid_t parent = getpid();
    struct steps *steps = calloc(1, sizeof(*steps));
    if (!steps) return -ENOMEM;
    unlink(log);
    const pid_t child = fork();
    if (child == 0) become(words, said, parent);
    int ret = child < 0 ? -errno : wait_for(child);
    if (child < 0) sw_error("bench step: no process can be started: %s", strerror(-ret));
    if (ret > 0) {
        report_end(ret, said);
        ret = -EIO;
    } else if (ret == 0) {
        ret = read_log(steps, log);
        if (ret == 0) ret = conclude(steps, out);
        if (ret < 0) sw_error("bench step: the log of a run, %s: %s", log, strerror(-ret));
    }
    free(steps);
    return ret;
}
