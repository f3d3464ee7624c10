/* tools/stop_signal.c - see the header. Handlers call nothing but what signals may. */
#include "tools/stop_signal.h"

#include <signal.h>
#include <string.h>
#include <unistd.h>
#include "base/mapped_files.h"
#include "tools/command_line.h"
#include "tools/kill_watch.h"
#include "tools/signals.h"

atomic_int sw_stop_signal;

static _Atomic(const char *) text;

static void say(const char *words) {
    const ssize_t ignored = write(STDERR_FILENO, words, strlen(words));
    (void)ignored;
}

static void on_signal(int number) {
    int none = 0;
    if (!atomic_compare_exchange_strong(&sw_stop_signal, &none, number)) {
        sw_kill_watch_end();
        _exit(128 + number);
    }
    say(atomic_load(&text));
}

static void on_bus_error(int number, siginfo_t *info, void *context) {
    const char *path = sw_mapped_path(info->si_addr);
    say("spillway: error: ");
    say(path ? path : "an input file");
    say(" became shorter while it was read\n");
    (void)context;
    (void)number;
    sw_kill_watch_end();
    _exit(SW_EXIT_FAILED);
}

void sw_stop_say(const char *said) {
    atomic_store(&text, said);
}

void sw_stop_watch(const char *said) {
    sw_stop_say(said);
    struct sigaction bus = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO};
    sigemptyset(&bus.sa_mask);
    sigaction(SIGBUS, &bus, NULL);
    sw_catch_signal(SIGINT, on_signal);
    sw_catch_signal(SIGTERM, on_signal);
    sw_catch_signal(SIGHUP, on_signal);
    sw_catch_signal(SIGUSR1, on_signal); /* which mpirun passes on, and batch systems send ahead */
}
