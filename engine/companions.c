/* engine/companions.c - see the header. */
#include "engine/companions.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/log.h"

enum { FILE_ROUNDING = 4096 };

static const char *const names[] = {
    "tokenizer.json",     "tokenizer.model",         "tokenizer_config.json", "vocab.json",
    "merges.txt",         "special_tokens_map.json", "added_tokens.json",     "chat_template.jinja",
    "chat_template.json", "generation_config.json"};
enum { COMPANIONS = sizeof(names) / sizeof(names[0]) };
_Static_assert((int)COMPANIONS == (int)SW_COMPANIONS_MAX, "a place for each name");

int sw_companions_has(const char *name) {
    for (int i = 0; i < COMPANIONS; i++)
        if (strcmp(names[i], name) == 0) return 1;
    return 0;
}

void sw_companions_open(struct sw_companions *c, const char *dir) {
    for (int i = 0; i < COMPANIONS; i++) {
        char *path;
        struct stat info;
        c->fds[i] = -1;
        if (asprintf(&path, "%s/%s", dir, names[i]) < 0) continue;
        const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        int error = fd < 0 ? errno : 0;
        if (fd >= 0 && fstat(fd, &info) < 0) error = errno;
        if (fd >= 0 && !error && !S_ISREG(info.st_mode)) error = EINVAL;
        if (error && error != ENOENT)
            sw_warning("%s is not carried along: %s", path, strerror(error));
        if (error && fd >= 0) close(fd);
        if (!error) c->fds[i] = fd;
        free(path);
    }
}

void sw_companions_close(struct sw_companions *c) {
    for (int i = 0; i < COMPANIONS; i++)
        if (c->fds[i] >= 0) close(c->fds[i]);
}

static int is_there(const struct sw_new_files *files, const char *name, const struct stat *from) {
    char *path;
    struct stat to;
    if (asprintf(&path, "%s/%s", files->dir, name) < 0) return 0;
    const int same = stat(path, &to) == 0 && from->st_dev == to.st_dev && from->st_ino == to.st_ino;
    free(path);
    return same;
}

static int read_all(int fd, char *text, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        const ssize_t got = pread(fd, text + done, bytes - done, (off_t)done);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return got < 0 ? -errno : -EIO;
        done += (size_t)got;
    }
    return 0;
}

static int copy(int fd, const char *name, struct sw_new_files *files) {
    struct stat info;
    if (fstat(fd, &info) < 0 || is_there(files, name, &info)) return 0;
    const size_t bytes = (size_t)info.st_size;
    char *text = malloc(bytes + 1);
    if (!text) return -ENOMEM;
    const int lost = read_all(fd, text, bytes);
    if (lost < 0) sw_warning("%s is not carried along: %s", name, strerror(-lost));
    const int ret = lost < 0 ? 0 : sw_new_files_write(files, name, text, bytes);
    free(text);
    return ret;
}

int sw_companions_copy(const struct sw_companions *c, struct sw_new_files *files) {
    int ret = 0;
    for (int i = 0; i < COMPANIONS && ret == 0; i++)
        if (c->fds[i] >= 0) ret = copy(c->fds[i], names[i], files);
    return ret;
}

uint64_t sw_companions_bytes(const struct sw_companions *c) {
    uint64_t bytes = 0;
    struct stat info;
    for (int i = 0; i < COMPANIONS; i++)
        if (c->fds[i] >= 0 && fstat(c->fds[i], &info) == 0)
            bytes += (uint64_t)info.st_size + FILE_ROUNDING;
    return bytes;
}
