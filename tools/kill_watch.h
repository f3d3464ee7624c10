/* tools/kill_watch.h - says why a run vanished when the kernel killed it for lack of memory. */
#ifndef TOOLS_KILL_WATCH_H
#define TOOLS_KILL_WATCH_H

/* Starts a small process that outlives this one by a moment. If this one ends without a word while
 * the counter of memory kills of its control group (or the machine) grew, it prints what happened
 * and what helps to standard error. Call it before threads exist. Where no process can be started
 * the run goes on unwatched. */
void sw_kill_watch_begin(void);

/* This process ends by itself. May be called in a signal handler, and without a watch. */
void sw_kill_watch_end(void);

#endif
