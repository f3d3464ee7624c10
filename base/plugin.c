/* base/plugin.c - see the header. */
#include "base/plugin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void sw_plugin_path(const char *variable, const char *name, char path[SW_PLUGIN_PATH_BYTES]) {
    const char *wanted = getenv(variable);
    char self[PATH_MAX];
    const ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);
    if (wanted && *wanted) {
        snprintf(path, SW_PLUGIN_PATH_BYTES, "%s", wanted);
    } else if (length > 0) {
        self[length] = '\0';
        char *slash = strrchr(self, '/');
        snprintf(path, SW_PLUGIN_PATH_BYTES, "%.*s/%s", slash ? (int)(slash - self) : 0, self,
                 name);
    } else {
        snprintf(path, SW_PLUGIN_PATH_BYTES, "./%s", name);
    }
}
