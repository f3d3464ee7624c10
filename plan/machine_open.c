/* plan/machine_open.c - finds the machine that --machine means: a file, a shipped profile, or this
 * one. */
#include "plan/machine.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/log.h"
#include "kernels/device.h"
#include "nvme/nvme.h"
#include "offload/profile.h"
#include "offload/topology.h"

static int take_text(struct sw_machine *m, json_t *root, const json_error_t *error,
                     const char *path) {
    if (!root) {
        if (error->line < 0)
            sw_error("machine profile %s", error->text); /* names the file */
        else
            sw_error("machine profile %s, line %d: %s", path, error->line, error->text);
        return -EINVAL;
    }
    const int ret = sw_machine_parse(m, root, path);
    json_decref(root);
    return ret;
}

static int open_file(struct sw_machine *m, const char *path) {
    json_error_t error;
    json_t *root = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
    return take_text(m, root, &error, path);
}

static int is_file(const char *path) {
    struct stat info;
    return !stat(path, &info) && S_ISREG(info.st_mode);
}

static int open_named(struct sw_machine *m, const char *name) {
    char known[512] = "";
    const char *text, *have;
    if (is_file(name)) return open_file(m, name);
    for (int i = 0; (have = sw_machine_shipped(i, &text)); i++) {
        if (!strcmp(have, name)) {
            json_error_t error;
            json_t *root = json_loads(text, JSON_REJECT_DUPLICATES, &error);
            return take_text(m, root, &error, name);
        }
        const size_t used = strlen(known);
        snprintf(known + used, sizeof(known) - used, "%s%s", i ? ", " : "", have);
    }
    sw_error("--machine: '%s' is neither a file nor one of: %s", name, known);
    return -ENOENT;
}

/* What no profile says of this machine, the system does: sizes, but no rates. */
static int complete_this(struct sw_machine *m) {
    struct sw_topology topology;
    const int ret = sw_topology_read(&topology);
    if (ret < 0) return ret;
    if (m->cores == 0) m->cores = topology.cores;
    if (m->cpus == 0) m->cpus = sw_topology_threads(&topology);
    if (m->memory_bytes == 0) m->memory_bytes = (double)topology.memory_bytes;
    if (!m->about[0])
        snprintf(m->about, sizeof(m->about), "this machine%s",
                 m->measured[0] ? "" : ", not measured yet (spillway bench all)");
    return 0;
}

/* The user's profile, where there is one. */
static int open_own(struct sw_machine *m) {
    char path[PATH_MAX];
    sw_profile_path(path, sizeof(path));
    memset(m, 0, sizeof(*m));
    return *path && is_file(path) ? open_file(m, path) : 0;
}

int sw_machine_is_measured(void) {
    struct sw_machine m;
    return open_own(&m) == 0 && m.flops_per_s > 0;
}

static int open_this(struct sw_machine *m) {
    int ret = open_own(m);
    if (ret == 0) ret = complete_this(m);
    if (ret == 0) snprintf(m->name, sizeof(m->name), "this machine");
    if (ret < 0 || m->gpus > 0 || m->measured[0]) return ret;
    /* GPUs that nobody has measured: how many there are and what they hold is seen at once. */
    const int gpus = sw_device_cuda_usable();
    struct sw_device_handle device;
    const struct sw_cuda_device_options options = {.loads_later = 1}; /* kernels take of it, too */
    if (gpus > 0 && sw_device_cuda_open(&device, &options) == 0) {
        m->gpus = gpus;
        m->gpu_memory_bytes = (double)device.ops->free_bytes(device.device);
        device.ops->close(device.device);
    }
    return 0;
}

int sw_machine_use_folders(struct sw_machine *m, const char *const *folders, uint32_t count) {
    static const char *const here[] = {"."};
    const int named = count > 0;
    if (!named && m->drive_count > 0) return 0;
    m->drive_count = 0;
    for (uint32_t i = 0; i < (named ? count : 1); i++) {
        const char *folder = named ? folders[i] : here[0];
        struct sw_machine_drive *drive = &m->drives[m->drive_count++];
        struct sw_drive_profile known = {0};
        const int ret = sw_profile_drive(folder, &known);
        if (ret < 0) return ret;
        *drive = (struct sw_machine_drive){.bytes = (double)sw_nvme_free_bytes(folder),
                                           .read_bytes_per_s = known.read_bytes_per_s,
                                           .write_bytes_per_s = known.write_bytes_per_s,
                                           .mixed_bytes_per_s = known.mixed_bytes_per_s};
        snprintf(drive->name, sizeof(drive->name), "%.127s",
                 named ? folder : SW_MACHINE_OUT_FOLDER);
    }
    return 0;
}

int sw_machine_open(struct sw_machine *m, const char *text) {
    if (!text) return open_this(m);
    /* A path may have a colon of its own; changes have an equals sign behind theirs. */
    const char *colon = strrchr(text, ':');
    const int changed = colon && strchr(colon, '=') && !is_file(text);
    char name[PATH_MAX];
    const size_t length = changed ? (size_t)(colon - text) : strlen(text);
    if (length == 0 || length >= sizeof(name)) {
        sw_error("--machine: '%s' names no machine", text);
        return -EINVAL;
    }
    snprintf(name, sizeof(name), "%.*s", (int)length, text);
    int ret = open_named(m, name);
    if (ret == 0 && changed) ret = sw_machine_change(m, colon + 1);
    if (ret == 0) snprintf(m->name, sizeof(m->name), "%s", text);
    return ret;
}
