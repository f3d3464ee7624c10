/* base/mapped_files.h - which file an address of a map lies in, for the report of a file that
 * became shorter while it was read (SIGBUS).
 *
 * Added and removed by one thread, with no reading of the map meanwhile; asked from any, also from
 * a signal handler. */
#ifndef BASE_MAPPED_FILES_H
#define BASE_MAPPED_FILES_H
#include <stdint.h>

/* path lives as long as the map. A map beyond the table's room is not known. */
void sw_mapped_add(const void *map, uint64_t bytes, const char *path);
void sw_mapped_remove(const void *map);

/* NULL: none that is known. */
const char *sw_mapped_path(const void *address);

#endif
