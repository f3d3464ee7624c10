/* base/alloc_guard.h - proves that no memory is allocated and no thread started inside a step.
 *
 * Everything is allocated before the first step. While steps run, every call for memory (malloc and
 * its kin, mmap, mremap, brk, sbrk) and every pthread_create() is a fault, from any thread but the
 * trainer's own, which reports steps and writes the log. A fault is counted; where
 * SPILLWAY_ALLOC_GUARD=stop, and by default in builds that check turns (debug, poison), it ends the
 * program with the call, its bytes, the thread's name and a backtrace. SPILLWAY_ALLOC_GUARD=count
 * only counts. Giving memory back is always allowed.
 *
 * The calls are watched by tools/alloc_hooks.c, which is linked into the program and not into the
 * library; sanitizers watch memory themselves, so their builds do without. Unwatched, every count
 * stays 0 and sw_alloc_guard_watching() says so. Memory that a library takes from
 * base/library_memory.h is no fault: it was set aside at start. Threads: any, except as noted. */
#ifndef BASE_ALLOC_GUARD_H
#define BASE_ALLOC_GUARD_H
#include <stdint.h>

/* Reads SPILLWAY_ALLOC_GUARD. 0, or -EINVAL, reported, for a value that is neither stop nor count.
 * Once, before the first step. */
int sw_alloc_guard_open(void);

/* Whether this program's calls are watched. */
int sw_alloc_guard_watching(void);

/* Steps run from the first call of enter until leave; the thread that enters is the trainer's and
 * exempt from then on. Entering again changes nothing. */
void sw_alloc_guard_enter(void);
void sw_alloc_guard_leave(void);
int sw_alloc_guard_inside(void); /* whether steps run */

/* Faults so far. */
uint64_t sw_alloc_guard_count(void);

/* Calls for memory and threads before the first step, and the bytes they asked for in all. */
struct sw_alloc_figures {
    uint64_t calls, bytes;
};
struct sw_alloc_figures sw_alloc_guard_before(void);

/* The hooks': a call of this name asks for so many bytes. Does not allocate. */
void sw_alloc_guard_note(const char *call, uint64_t bytes);

#endif
