/* kernels/device_plugin.c - finds and opens the plugin of the CUDA device.
 *
 * The plugin lies beside the program unless SPILLWAY_CUDA_PLUGIN names another one. It is never
 * unloaded: threads of CUDA's own may run. */
#include <assert.h>
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/log.h"
#include "base/plugin.h"
#include "kernels/cuda_plugin.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const struct sw_cuda_plugin *loaded; /* the lock's */

static int load(const struct sw_cuda_plugin **out, enum sw_log_level level) {
    char path[SW_PLUGIN_PATH_BYTES];
    sw_plugin_path("SPILLWAY_CUDA_PLUGIN", "libspillway_cuda.so", path);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *why = dlerror();
        sw_log(level,
               "CUDA needs a plugin that cannot be loaded: %s. 'make' builds it where CUDA's "
               "toolkit is installed, SPILLWAY_CUDA_PLUGIN names another one; --device host does "
               "without",
               why ? why : path);
        return -ENOENT;
    }
    const struct sw_cuda_plugin *plugin = dlsym(library, SW_CUDA_PLUGIN_SYMBOL);
    if (!plugin || plugin->version != SW_CUDA_PLUGIN_VERSION ||
        plugin->ops_bytes != sizeof(struct sw_device_ops) ||
        plugin->chunk_bytes != sizeof(struct sw_device_adam_chunk)) {
        dlclose(library);
        sw_log(level,
               "CUDA: the plugin %s is none of this version; build program and plugin together "
               "with 'make', and see what SPILLWAY_CUDA_PLUGIN names",
               path);
        return -ENOEXEC;
    }
    *out = plugin;
    return 0;
}

static int plugin_of(const struct sw_cuda_plugin **out, enum sw_log_level level) {
    int ret = 0;
    pthread_mutex_lock(&lock);
    if (!loaded) ret = load(&loaded, level);
    *out = loaded;
    pthread_mutex_unlock(&lock);
    return ret;
}

static void pass_on(int level, const char *line) {
    sw_log((enum sw_log_level)level, "%s", line);
}

int sw_device_cuda_count(void) {
    const struct sw_cuda_plugin *plugin;
    const int ret = plugin_of(&plugin, SW_LOG_ERROR);
    return ret < 0 ? ret : plugin->device_count(pass_on);
}

static void pass_on_as_information(int level, const char *line) {
    (void)level;
    sw_info("%s", line);
}

int sw_device_cuda_usable(void) {
    const char *wanted = getenv("SPILLWAY_CUDA_PLUGIN");
    void *driver = wanted && *wanted ? NULL : dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    const struct sw_cuda_plugin *plugin;
    if (!driver && (!wanted || !*wanted)) return 0;
    if (plugin_of(&plugin, SW_LOG_INFO) < 0) return 0;
    const int count = plugin->device_count(pass_on_as_information);
    return count > 0 ? count : 0;
}

int sw_device_cuda_open(struct sw_device_handle *out,
                        const struct sw_cuda_device_options *options) {
    assert(out && options);
    const struct sw_cuda_plugin *plugin;
    const int ret = plugin_of(&plugin, SW_LOG_ERROR);
    return ret < 0 ? ret : plugin->open(out, options, pass_on);
}
