/* tools/stop_signal.c - see the header. Handlers call nothing but what signals may. */
#include "tools/stop_signal.h"

#include <string.h>
#include <unistd.h>
#include "tools/command_line.h"
#include "tools/kill_watch.h"
#include "tools/signals.h"

atomic_int sw_stop_signal;

static const char *text;
static size_t text_bytes;

static void on_signal(int number) {
    int none = 0;
    if (!atomic_compare_exchange_strong(&sw_stop_signal, &none, number)) {
        sw_kill_watch_end();
        _exit(128 + number);
    }
    const ssize_t ignored = write(STDERR_FILENO, text, text_bytes);
    (void)ignored;
}

static void on_bus_error(int number) {
    static const char reason[] =
        "spillway: error: an input file became shorter while it was read\n";
    const ssize_t ignored = write(STDERR_FILENO, reason, sizeof(reason) - 1);
    (void)ignored;
    (void)number;
    sw_kill_watch_end();
    _exit(SW_EXIT_FAILED);
}

void sw_stop_watch(const char *said) {
    text = said;
    text_bytes = strlen(said);
    signal(SIGBUS, on_bus_error);
    sw_catch_signal(SIGINT, on_signal);
    sw_catch_signal(SIGTERM, on_signal);
    sw_catch_signal(SIGHUP, on_signal);
}
