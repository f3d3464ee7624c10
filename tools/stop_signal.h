/* tools/stop_signal.h - Ctrl-C, TERM, HUP and USR1: the first asks for a stop, the second leaves at
 * once. */
#ifndef TOOLS_STOP_SIGNAL_H
#define TOOLS_STOP_SIGNAL_H
#include <stdatomic.h>

/* The signal that asked for a stop; 0: none. */
extern atomic_int sw_stop_signal;

/* What is printed at a first signal from now on; a text that lives for ever. Any thread. */
void sw_stop_say(const char *said);

/* From now on; `said` is printed at the first signal. A bus error, which is an input file that
 * became shorter, ends the program with its reason. */
void sw_stop_watch(const char *said);

#endif
