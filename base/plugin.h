/* base/plugin.h - where a plugin of the program lies: a library that is opened only by who needs
 * it.
 */
#ifndef BASE_PLUGIN_H
#define BASE_PLUGIN_H
#include <limits.h>
#include <stddef.h>

enum { SW_PLUGIN_PATH_BYTES = PATH_MAX + 64 };

/* What the environment variable names, or the file of this name beside the program. */
void sw_plugin_path(const char *variable, const char *name, char path[SW_PLUGIN_PATH_BYTES]);

#endif
