/* tools/main.c - finds the subcommand; the only place where messages of the layers below get
 * printed. */
#include "tools/commands.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "tools/command_line.h"

static const struct {
    const char *name, *summary;
    int (*run)(int argc, char **argv);
} commands[] = {
    {"train", "fine-tune a model", sw_cmd_train},
    {"plan", "say whether a training fits a machine, how, and with which options", sw_cmd_plan},
    {"export", "write a run's optimizer as safetensors, for train --import", sw_cmd_export},
    {"inspect", "show a model folder: configuration, parameters, files", sw_cmd_inspect},
    {"init", "make a model folder with random weights from a configuration", sw_cmd_init},
    {"doctor", "check what this machine offers", sw_cmd_doctor},
    {"bench", "measure a part of this machine", sw_cmd_bench},
    {"report", "draw the trace of a run: what set the time of its steps", sw_cmd_report},
};
enum { COMMANDS = sizeof(commands) / sizeof(commands[0]) };

static void print_line(enum sw_log_level level, const char *line, void *ctx) {
    (void)ctx;
    static const char *const words[] = {"error: ", "warning: ", ""};
    fprintf(stderr, "spillway: %s%s\n", words[level], line);
}

static void print_usage(FILE *out) {
    fputs("usage: spillway COMMAND [options]\n\n"
          "Fine-tunes language models whose training state does not fit in memory.\n\n",
          out);
    for (int i = 0; i < COMMANDS; i++)
        fprintf(out, "  %-10s %s\n", commands[i].name, commands[i].summary);
    fputs(
        "\nspillway COMMAND --help lists a command's options; spillway --version says which build "
        "this is.\n",
        out);
}

/* A file opened under the number of a closed standard stream would receive what is printed. */
static void fill_standard_streams(void) {
    int fd;
    do fd = open("/dev/null", O_RDWR);
    while (fd >= 0 && fd <= STDERR_FILENO);
    if (fd > STDERR_FILENO) close(fd);
}

/* Output that did not reach its reader is a failure, if nothing else was. */
static int end(int status) {
    if (fflush(stdout) == 0 && !ferror(stdout)) return status;
    sw_error("not all output could be written to standard output");
    return status == SW_EXIT_OK ? SW_EXIT_FAILED : status;
}

/* In this process, so that whoever waits for it or sends it signals sees no other one. As at an
 * end, the kernel takes back what drivers hold. */
static int start_again(char **argv) {
    fflush(stdout);
    execv("/proc/self/exe", argv);
    sw_error("the program cannot be started again: %s", strerror(errno));
    return SW_EXIT_FAILED;
}

int main(int argc, char **argv) {
    fill_standard_streams();
    signal(SIGPIPE, SIG_IGN); /* a reader that leaves does not end a training */
    signal(SIGXFSZ, SIG_IGN); /* the limit is reported as a failed write */
    sw_log_set_sink(print_line, NULL);
    if (argc < 2) {
        print_usage(stderr);
        return SW_EXIT_USAGE;
    }
    const char *name = argv[1];
    if (!strcmp(name, "--help") || !strcmp(name, "-h") || !strcmp(name, "help")) {
        print_usage(stdout);
        return SW_EXIT_OK;
    }
    if (!strcmp(name, "--version")) {
        printf("spillway %s\n", SW_VERSION);
        return SW_EXIT_OK;
    }
    const char *names[COMMANDS];
    for (int i = 0; i < COMMANDS; i++) {
        names[i] = commands[i].name;
        if (strcmp(name, commands[i].name) != 0) continue;
        const int status = commands[i].run(argc - 1, argv + 1);
        return status == SW_EXIT_AGAIN ? start_again(argv) : end(status);
    }
    sw_error("unknown command '%s'; the nearest is '%s' (spillway --help lists all)", name,
             sw_nearest(name, names, COMMANDS));
    return SW_EXIT_USAGE;
}
