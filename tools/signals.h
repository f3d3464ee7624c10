/* tools/signals.h - signals that a command takes for itself. */
#ifndef TOOLS_SIGNALS_H
#define TOOLS_SIGNALS_H
#include <signal.h>
#include <stddef.h>

/* What the parent ignored stays ignored: HUP under nohup, INT of a shell's background job. */
static inline void sw_catch_signal(int number, void (*handler)(int)) {
    struct sigaction old, action = {.sa_handler = handler, .sa_flags = SA_RESTART};
    sigemptyset(&action.sa_mask);
    if (sigaction(number, NULL, &old) == 0 && old.sa_handler == SIG_IGN) return;
    sigaction(number, &action, NULL);
}

#endif
