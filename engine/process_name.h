/* engine/process_name.h - names of what each process of a run has files of.
 *
 * The first process has NAME, another one NAME-pN, so that one folder will do for all. */
#ifndef ENGINE_PROCESS_NAME_H
#define ENGINE_PROCESS_NAME_H
#include <stddef.h>
#include <stdint.h>

enum { SW_PROCESS_NAME_BYTES = 64 };

/* Of a store. Returns `name` or `out`. */
const char *sw_process_name(const char *name, uint32_t process, char out[SW_PROCESS_NAME_BYTES]);

#endif
