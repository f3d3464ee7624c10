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

/* Of a file: "a/b.json" becomes "a/b-p2.json". 0, or -ENAMETOOLONG, not reported. */
int sw_process_path(const char *path, uint32_t process, char *out, size_t out_size);

/* Whether a file's name, without folders, is `name` or what another process makes of it. */
int sw_process_is_named(const char *file, const char *name);

#endif
