/* engine/new_files.c - see the header. */
#include "engine/new_files.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/log.h"

int sw_new_files_open(struct sw_new_files *files, const char *dir, uint32_t room) {
    *files = (struct sw_new_files){.dir = dir, .room = room};
    files->names = calloc(room, sizeof(*files->names));
    return files->names ? 0 : -ENOMEM;
}

void sw_new_files_close(struct sw_new_files *files) {
    free(files->names);
    *files = (struct sw_new_files){0};
}

char *sw_new_files_path(const struct sw_new_files *files, const char *name) {
    char *path;
    return asprintf(&path, "%s/%s.partial", files->dir, name) < 0 ? NULL : path;
}

void sw_new_files_add(struct sw_new_files *files, const char *name) {
    assert(files->count < files->room && strlen(name) < SW_NEW_FILE_NAME_BYTES);
    strcpy(files->names[files->count++], name);
}

int sw_new_files_has(const struct sw_new_files *files, const char *name) {
    for (uint32_t i = 0; i < files->count; i++)
        if (!strcmp(files->names[i], name)) return 1;
    return 0;
}

int sw_new_files_write(struct sw_new_files *files, const char *name, const void *data,
                       size_t bytes) {
    char *path = sw_new_files_path(files, name);
    if (!path) return -ENOMEM;
    int ret = 0;
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0)
        ret = -errno;
    else
        sw_new_files_add(files, name);
    for (size_t done = 0; done < bytes && ret == 0;) {
        const ssize_t wrote = write(fd, (const char *)data + done, bytes - done);
        if (wrote >= 0)
            done += (size_t)wrote;
        else if (errno != EINTR)
            ret = -errno;
    }
    if (ret == 0 && fsync(fd) < 0) ret = -errno;
    if (fd >= 0 && close(fd) < 0 && ret == 0) ret = -errno;
    if (ret < 0) sw_error("cannot write %s: %s", path, strerror(-ret));
    free(path);
    return ret;
}

/* Jansson prints 17 digits, which makes 1e-05 unreadable; 15 are enough for what people write. */
static char *print_json(const json_t *root) {
    char *text = json_dumps(root, JSON_INDENT(2) | JSON_REAL_PRECISION(15));
    json_t *again = text ? json_loads(text, 0, NULL) : NULL;
    if (!json_equal(root, again)) {
        free(text);
        text = json_dumps(root, JSON_INDENT(2) | JSON_REAL_PRECISION(17));
    }
    json_decref(again);
    return text;
}

int sw_new_files_write_json(struct sw_new_files *files, const char *name, const json_t *root) {
    char *text = print_json(root);
    if (!text) return -ENOMEM;
    const size_t bytes = strlen(text);
    text[bytes] = '\n'; /* in place of the terminator: files end with a newline */
    const int ret = sw_new_files_write(files, name, text, bytes + 1);
    free(text);
    return ret;
}

int sw_new_files_rename(const struct sw_new_files *files, uint32_t first, uint32_t end) {
    int ret = 0;
    for (uint32_t i = first; i < end && ret == 0; i++) {
        char *from = sw_new_files_path(files, files->names[i]), *to = NULL;
        if (!from || asprintf(&to, "%s/%s", files->dir, files->names[i]) < 0) {
            to = NULL;
            ret = -ENOMEM;
        } else if (rename(from, to) < 0) {
            ret = -errno;
            sw_error("cannot rename %s to %s: %s", from, to, strerror(-ret));
        }
        free(from);
        free(to);
    }
    return ret;
}

int sw_new_files_sync(const struct sw_new_files *files) {
    const int fd = open(files->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int ret = fd < 0 || fsync(fd) < 0 ? -errno : 0;
    if (fd >= 0) close(fd);
    /* Some filesystems cannot sync a folder; their renames are as durable as they get. */
    if (ret == -EINVAL || ret == -ENOTSUP) ret = 0;
    if (ret < 0) sw_error("cannot sync %s: %s", files->dir, strerror(-ret));
    return ret;
}

void sw_new_files_drop(const struct sw_new_files *files) {
    for (uint32_t i = 0; i < files->count; i++) {
        char *path = sw_new_files_path(files, files->names[i]);
        if (path) unlink(path);
        free(path);
    }
}
