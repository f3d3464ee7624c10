/* base/library_memory.h - memory for libraries that allocate while they work, set aside at start.
 *
 * oneDNN packs the operands of a product into buffers that it allocates and frees each time, and
 * gcc's OpenMP runtime makes a new record of a team whenever a region's team has another size than
 * the one before. Neither takes memory from its caller. tools/alloc_hooks.c recognises their calls
 * by the address they come from and serves them here while steps run; before that the libraries
 * make thousands of objects to keep, which are no concern of this file. Without the hooks nothing
 * is ever taken and nothing is set aside. Threads: any. */
#ifndef BASE_LIBRARY_MEMORY_H
#define BASE_LIBRARY_MEMORY_H
#include <stddef.h>

/* Reserves the memory, which becomes real where it is first written. Later calls change nothing: it
 * stays until the process ends, as the libraries may keep some of it. Where it cannot be had, the
 * libraries' calls go to the C library as they would have. */
void sw_library_memory_open(size_t bytes);

/* Memory for a call from the address `caller`, aligned to at least 64 bytes; NULL when the caller
 * is none of the libraries, when no step runs, or when no room is left. */
void *sw_library_memory_take(const void *caller, size_t alignment, size_t bytes);

/* Takes back what was taken: 1, or 0 when p is other memory. NULL is other memory. */
int sw_library_memory_give(void *p);

/* The bytes that p was taken with (at least those asked for); 0 for other memory. */
size_t sw_library_memory_size(const void *p);

/* The most that was taken at a time since the start. */
size_t sw_library_memory_peak(void);

#endif
