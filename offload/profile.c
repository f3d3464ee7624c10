/* offload/profile.c - the machine profile's file, and what identifies a drive.
 *
 * The file is read whole, one entry is replaced, and it is written aside and renamed. A drive is
 * told by its mount (/proc/self/mountinfo), as numbers of devices change from boot to boot and a
 * folder's path says nothing about what is mounted there. */
#include "offload/profile.h"

#include <assert.h>
#include <errno.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"

/* What a damaged or foreign entry may not ask of a queue. */
enum { ALIGN_BYTES = 4096, BLOCK_BYTES_MAX = 1 << 30, DEPTH_MAX = 1024, SCHEMA = 1 };
/* Nor of copies: below a page they would be countless. */
enum { PIECE_BYTES_MIN = 4096, PIECE_BYTES_MAX = 1 << 30 };

/* ---- which drive ---- */

struct mount {
    unsigned dev_major, dev_minor;
    char point[PATH_MAX], type[64], source[PATH_MAX];
};

/* Blanks and the like are written as octal \040. */
static void unescape(char *text) {
    char *to = text;
    for (const char *at = text; *at; to++) {
        unsigned code;
        int length = 0;
        if (sscanf(at, "\\%3o%n", &code, &length) == 1 && length == 4) {
            *to = (char)code;
            at += length;
        } else {
            *to = *at++;
        }
    }
    *to = 0;
}

static int parse_mount(const char *line, struct mount *m) {
    const char *dash = strstr(line, " - ");
    if (!dash ||
        sscanf(line, "%*d %*d %u:%u %*s %4095s", &m->dev_major, &m->dev_minor, m->point) != 3)
        return 0;
    if (sscanf(dash, " - %63s %4095s", m->type, m->source) != 2) return 0;
    unescape(m->point);
    unescape(m->source);
    return 1;
}

static int is_below(const char *path, const char *point) {
    const size_t length = strlen(point);
    if (!strcmp(point, "/")) return 1;
    return !strncmp(path, point, length) && (path[length] == '/' || !path[length]);
}

/* The mount that a folder lies on: of those at its path, the deepest and of equals the last, which
 * hides the others. 0 or -ENOENT. */
static int find_mount(const char *real, struct mount *out) {
    FILE *f = fopen("/proc/self/mountinfo", "re");
    if (!f) return -errno;
    struct mount *m = malloc(sizeof(*m));
    char *line = NULL;
    size_t size = 0, deepest = 0;
    int ret = m ? -ENOENT : -ENOMEM;
    while (m && getline(&line, &size, f) > 0) {
        if (!parse_mount(line, m) || !is_below(real, m->point)) continue;
        if (ret == 0 && strlen(m->point) < deepest) continue;
        deepest = strlen(m->point);
        *out = *m;
        ret = 0;
    }
    free(line);
    free(m);
    fclose(f);
    return ret;
}

/* The block device's name in /sys, such as nvme0n1p1; "-" where the file system has none. */
static const char *device_name(const struct mount *m, char *out, size_t out_size) {
    char path[64], target[PATH_MAX];
    snprintf(path, sizeof(path), "/sys/dev/block/%u:%u", m->dev_major, m->dev_minor);
    const ssize_t length = readlink(path, target, sizeof(target) - 1);
    if (length <= 0) return "-";
    target[length] = 0;
    const char *slash = strrchr(target, '/');
    snprintf(out, out_size, "%.200s", slash ? slash + 1 : target);
    return out;
}

int sw_profile_identity(const char *folder, char *out, size_t out_size) {
    assert(folder && out && out_size > 0);
    struct statvfs vfs;
    char *real = realpath(folder, NULL), name[256];
    if (!real || statvfs(real, &vfs)) {
        const int ret = -errno;
        sw_error("profile: folder '%s': %s", folder, strerror(-ret));
        free(real);
        return ret;
    }
    struct mount *m = malloc(sizeof(*m));
    const int ret = m ? find_mount(real, m) : -ENOMEM;
    if (ret == 0)
        snprintf(out, out_size, "%s %s %s %llu", device_name(m, name, sizeof(name)), m->source,
                 m->type, (unsigned long long)vfs.f_blocks * vfs.f_frsize);
    else
        sw_error("profile: no mount is known to hold '%s': %s", folder, strerror(-ret));
    free(m);
    free(real);
    return ret;
}

/* ---- the file ---- */

void sw_profile_path(char *out, size_t out_size) {
    assert(out && out_size > 0);
    const char *own = getenv("SPILLWAY_PROFILE"), *config = getenv("XDG_CONFIG_HOME"),
               *home = getenv("HOME");
    *out = 0;
    if (own)
        snprintf(out, out_size, "%s", own);
    else if (config && *config == '/')
        snprintf(out, out_size, "%s/spillway/machine.json", config);
    else if (home && *home)
        snprintf(out, out_size, "%s/.config/spillway/machine.json", home);
}

/* The whole profile, or NULL: there is none, or (said) it is of no use. *foreign: it is of a later
 * version. */
static json_t *load(const char *path, int *foreign) {
    json_error_t error;
    *foreign = 0;
    if (!*path || access(path, F_OK)) return NULL;
    json_t *root = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
    if (!root) {
        sw_warning("profile: '%s' line %d: %s; going on without it", path, error.line, error.text);
        return NULL;
    }
    const json_t *schema = json_object_get(root, "schema");
    if (json_is_integer(schema) && json_integer_value(schema) > SCHEMA) {
        sw_warning("profile: '%s' is of a later version; going on without it", path);
        *foreign = 1;
    } else if (json_integer_value(schema) == SCHEMA &&
               json_is_array(json_object_get(root, "drives"))) {
        return root;
    } else {
        sw_warning("profile: '%s' is no machine profile (\"schema\": 1 and \"drives\"); going on "
                   "without it",
                   path);
    }
    json_decref(root);
    return NULL;
}

static json_t *find(json_t *root, const char *drive) {
    json_t *entry;
    size_t i;
    json_array_foreach(json_object_get(root, "drives"), i, entry) {
        const char *name = json_string_value(json_object_get(entry, "drive"));
        if (name && !strcmp(name, drive)) return entry;
    }
    return NULL;
}

/* A whole number from min to max, or 0. */
static uint32_t number(const json_t *entry, const char *key, json_int_t min, json_int_t max) {
    const json_int_t value = json_integer_value(json_object_get(entry, key));
    return value >= min && value <= max ? (uint32_t)value : 0;
}

/* A rate above 0, or 0. */
static double rate(const json_t *entry, const char *key) {
    const double value = json_number_value(json_object_get(entry, key));
    return value > 0 ? value : 0;
}

static int read_entry(const json_t *entry, struct sw_drive_profile *out) {
    const char *measured = json_string_value(json_object_get(entry, "measured"));
    out->block_bytes = number(entry, "block_bytes", ALIGN_BYTES, BLOCK_BYTES_MAX);
    out->depth = number(entry, "depth", 1, DEPTH_MAX);
    out->read_bytes_per_s = rate(entry, "read_bytes_per_s");
    out->write_bytes_per_s = rate(entry, "write_bytes_per_s");
    out->mixed_bytes_per_s = rate(entry, "mixed_bytes_per_s");
    snprintf(out->measured, sizeof(out->measured), "%.15s", measured ? measured : "");
    return out->block_bytes && out->block_bytes % ALIGN_BYTES == 0 && out->depth &&
           out->read_bytes_per_s > 0 && out->write_bytes_per_s > 0 && out->mixed_bytes_per_s > 0;
}

int sw_profile_drive(const char *folder, struct sw_drive_profile *out) {
    assert(folder && out);
    char path[PATH_MAX], drive[2 * PATH_MAX];
    int foreign, ret = 0;
    sw_profile_path(path, sizeof(path));
    json_t *root = load(path, &foreign);
    if (!root) return 0;
    ret = sw_profile_identity(folder, drive, sizeof(drive));
    const json_t *entry = ret ? NULL : find(root, drive);
    struct sw_drive_profile found;
    if (entry) {
        ret = read_entry(entry, &found);
        if (ret)
            *out = found;
        else
            sw_warning("profile: '%s': the entry of drive '%s' is damaged; going on without it",
                       path, drive);
    }
    json_decref(root);
    return ret;
}

int sw_profile_copies(const char *gpu, uint64_t *h2d_bytes, uint64_t *d2h_bytes) {
    assert(gpu && h2d_bytes && d2h_bytes);
    char path[PATH_MAX];
    int foreign;
    *h2d_bytes = *d2h_bytes = 0;
    sw_profile_path(path, sizeof(path));
    json_t *root = load(path, &foreign);
    if (!root) return 0;
    const json_t *entry = json_object_get(root, "copies");
    const char *name = json_string_value(json_object_get(entry, "gpu"));
    const int known = name && strcmp(name, gpu) == 0;
    if (known) {
        *h2d_bytes = number(entry, "h2d_piece_bytes", PIECE_BYTES_MIN, PIECE_BYTES_MAX);
        *d2h_bytes = number(entry, "d2h_piece_bytes", PIECE_BYTES_MIN, PIECE_BYTES_MAX);
    }
    json_decref(root);
    return known;
}

/* Makes the folders above a file, as far as they are missing. */
static int make_folders(const char *path) {
    char part[PATH_MAX];
    snprintf(part, sizeof(part), "%s", path);
    for (char *at = strchr(part + 1, '/'); at; at = strchr(at + 1, '/')) {
        *at = 0;
        if (mkdir(part, 0777) && errno != EEXIST) return -errno;
        *at = '/';
    }
    return 0;
}

static int write_whole(const json_t *root, const char *path) {
    char aside[PATH_MAX + 32];
    int ret = make_folders(path);
    if (ret) return ret;
    snprintf(aside, sizeof(aside), "%s.%ld", path, (long)getpid());
    FILE *f = fopen(aside, "we");
    if (!f) return -errno;
    if (json_dumpf(root, f, JSON_INDENT(2)) || fputc('\n', f) == EOF || fflush(f) ||
        fsync(fileno(f)))
        ret = errno ? -errno : -EIO;
    if (fclose(f) && !ret) ret = -errno;
    if (!ret && rename(aside, path)) ret = -errno;
    if (ret) unlink(aside);
    return ret;
}

/* The entry of a drive in root, made when it is missing, with these figures. 0 or -ENOMEM. */
static int set_entry(json_t *root, const char *drive, const struct sw_drive_profile *in) {
    char date[16];
    const time_t seconds = time(NULL);
    struct tm day;
    localtime_r(&seconds, &day);
    strftime(date, sizeof(date), "%Y-%m-%d", &day);
    json_t *entry = find(root, drive);
    json_t *figures =
        json_pack("{s:s, s:I, s:I, s:f, s:f, s:f, s:s}", "drive", drive, "block_bytes",
                  (json_int_t)in->block_bytes, "depth", (json_int_t)in->depth, "read_bytes_per_s",
                  in->read_bytes_per_s, "write_bytes_per_s", in->write_bytes_per_s,
                  "mixed_bytes_per_s", in->mixed_bytes_per_s, "measured", date);
    if (!figures) return -ENOMEM;
    if (!entry)
        return json_array_append_new(json_object_get(root, "drives"), figures) ? -ENOMEM : 0;
    const int failed = json_object_update(entry, figures);
    json_decref(figures);
    return failed ? -ENOMEM : 0;
}

/* The profile to be changed, or a new one; NULL: it is to stay as it is. 0 or -errno, reported. */
static int load_to_change(const char *path, json_t **root) {
    int foreign;
    *root = load(path, &foreign);
    if (foreign) {
        sw_error("profile: '%s' is of a later version and is left as it is", path);
        return -EPROTO;
    }
    if (!*root) *root = json_pack("{s:i, s:[]}", "schema", SCHEMA, "drives");
    return *root ? 0 : -ENOMEM;
}

static int store_changed(int ret, json_t *root, const char *path) {
    if (!ret) ret = write_whole(root, path);
    if (ret) sw_error("profile: '%s' cannot be written: %s", path, strerror(-ret));
    json_decref(root);
    return ret;
}

int sw_profile_keep(const char *folder, const struct sw_drive_profile *in) {
    assert(folder && in && in->depth > 0);
    assert(in->block_bytes > 0 && in->block_bytes % ALIGN_BYTES == 0);
    char path[PATH_MAX], drive[2 * PATH_MAX];
    json_t *root;
    sw_profile_path(path, sizeof(path));
    if (!*path) return 0;
    int ret = sw_profile_identity(folder, drive, sizeof(drive));
    if (ret) return ret;
    ret = load_to_change(path, &root);
    if (ret == -EPROTO) return ret;
    return store_changed(ret ? ret : set_entry(root, drive, in), root, path);
}

int sw_profile_merge(const json_t *keys) {
    assert(json_is_object(keys));
    char path[PATH_MAX];
    json_t *root;
    sw_profile_path(path, sizeof(path));
    if (!*path) return 0;
    int ret = load_to_change(path, &root);
    if (ret == -EPROTO) return ret;
    if (ret == 0 && json_object_update_recursive(root, (json_t *)keys)) ret = -ENOMEM;
    return store_changed(ret, root, path);
}
