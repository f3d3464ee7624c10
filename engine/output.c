/* engine/output.c - taking the output folder, and saving into it. */
#include "engine/output.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <ftw.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/log.h"

/* What runs leave in their folder; --restart removes these and refuses to touch anything else. */
static const char *const ours[] = {"config.json",
                                   "generation_config.json",
                                   "*.safetensors",
                                   "model.safetensors.index.json",
                                   "tokenizer*",
                                   "special_tokens_map.json",
                                   "vocab.json",
                                   "merges.txt",
                                   "added_tokens.json",
                                   "chat_template.jinja",
                                   "step-*",
                                   "*.state",
                                   "*.partial",
                                   "*.jsonl",
                                   ".*.tmp*",
                                   "*.tmp"};

static int is_ours(const char *name) {
    for (size_t i = 0; i < sizeof(ours) / sizeof(ours[0]); i++)
        if (fnmatch(ours[i], name, 0) == 0) return 1;
    return 0;
}

/* The first entry of a folder that satisfies `foreign`, or any entry at all. 1 found, 0 none. */
static int find_entry(const char *dir, int foreign, char *name, size_t name_size) {
    DIR *d = opendir(dir);
    if (!d) return -errno;
    int found = 0;
    for (struct dirent *e; !found && (e = readdir(d));) {
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
        if (foreign && is_ours(e->d_name)) continue;
        snprintf(name, name_size, "%s", e->d_name);
        found = 1;
    }
    closedir(d);
    return found;
}

static int is_same_or_inside(const char *path, const char *dir) {
    char a[PATH_MAX], b[PATH_MAX];
    if (!realpath(path, a) || !realpath(dir, b)) return 0;
    const size_t n = strlen(b);
    return !strncmp(a, b, n) && (a[n] == '\0' || a[n] == '/');
}

static int check_parent(const char *option, const char *out) {
    char parent[PATH_MAX];
    snprintf(parent, sizeof(parent), "%s", out);
    size_t n = strlen(parent);
    while (n > 1 && parent[n - 1] == '/') parent[--n] = '\0';
    char *slash = strrchr(parent, '/');
    if (!slash)
        snprintf(parent, sizeof(parent), ".");
    else
        slash[slash == parent] = '\0';
    struct stat st;
    if (stat(parent, &st) < 0) {
        const int ret = -errno;
        sw_error("%s %s: cannot use the parent folder %s: %s", option, out, parent, strerror(-ret));
        return ret;
    }
    if (access(parent, W_OK) < 0) {
        const int ret = -errno;
        sw_error("%s %s: the parent folder %s is not writable: %s", option, out, parent,
                 strerror(-ret));
        return ret;
    }
    return 0;
}

int sw_output_check(const char *out, const char *model_dir, int restart) {
    struct stat st;
    if (lstat(out, &st) < 0) {
        if (errno == ENOENT) return check_parent("--out", out);
        const int ret = -errno;
        sw_error("--out %s: %s", out, strerror(-ret));
        return ret;
    }
    if (stat(out, &st) < 0 || !S_ISDIR(st.st_mode)) {
        sw_error("--out %s exists and is not a folder", out);
        return -ENOTDIR;
    }
    if (is_same_or_inside(out, model_dir)) {
        sw_error("--out %s is the model's own folder or lies in it; choose another", out);
        return -EEXIST;
    }
    char name[NAME_MAX + 1];
    int found = find_entry(out, 0, name, sizeof(name));
    if (found == 1 && !restart) {
        sw_error(
            "--out %s is not empty (it holds %s): choose another folder, or --restart to replace "
            "what an earlier run left there",
            out, name);
        return -EEXIST;
    }
    if (found == 1) found = find_entry(out, 1, name, sizeof(name));
    if (found == 1) {
        sw_error("--restart: %s holds %s, which no run of this program leaves there; nothing was "
                 "removed",
                 out, name);
        return -EEXIST;
    }
    if (found < 0)
        sw_error("--out %s: %s", out, strerror(-found));
    else if (access(out, W_OK) < 0) {
        found = -errno;
        sw_error("--out %s is not writable: %s", out, strerror(-found));
    }
    return found < 0 ? found : 0;
}

int sw_output_check_file(const char *option, const char *path) {
    return path ? check_parent(option, path) : 0;
}

int sw_output_check_folder(const char *option, const char *path) {
    struct stat st;
    int ret = 0;
    if (stat(path, &st) < 0)
        ret = -errno;
    else if (!S_ISDIR(st.st_mode))
        ret = -ENOTDIR;
    else if (access(path, W_OK | X_OK) < 0)
        ret = -errno;
    if (ret < 0)
        sw_error("%s %s: %s; name an existing, writable folder", option, path, strerror(-ret));
    return ret;
}

static int remove_entry(const char *path, const struct stat *st, int flag, struct FTW *ftw) {
    (void)st;
    (void)flag;
    return ftw->level == 0 ? 0 : remove(path);
}

int sw_output_take(const char *out, int restart, int *made) {
    *made = 0;
    if (mkdir(out, 0777) == 0) {
        *made = 1;
        return 0;
    }
    if (errno != EEXIST) {
        const int ret = -errno;
        sw_error("cannot make the output folder %s: %s", out, strerror(-ret));
        return ret;
    }
    if (restart && nftw(out, remove_entry, 16, FTW_DEPTH | FTW_PHYS) != 0) {
        const int ret = errno ? -errno : -EIO;
        sw_error("cannot empty the output folder %s: %s", out, strerror(-ret));
        return ret;
    }
    return 0;
}

static int sync_parent(const char *path) {
    char parent[PATH_MAX];
    snprintf(parent, sizeof(parent), "%s", path);
    char *slash = strrchr(parent, '/');
    if (!slash)
        snprintf(parent, sizeof(parent), ".");
    else
        slash[slash == parent] = '\0';
    const int fd = open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return -errno;
    const int ret = fsync(fd) < 0 ? -errno : 0;
    close(fd);
    return ret;
}

int sw_output_save(const struct sw_model *model, const char *dir, enum sw_dtype dtype,
                   sw_model_fetch fetch, void *ctx) {
    char partial[PATH_MAX];
    if (snprintf(partial, sizeof(partial), "%s.partial", dir) >= (int)sizeof(partial))
        return -ENAMETOOLONG;
    int made;
    int ret = sw_output_take(partial, 1, &made);
    if (ret == 0) ret = sw_model_save(model, partial, dtype, fetch, ctx);
    if (ret < 0) return ret;
    if (rename(partial, dir) < 0)
        ret = -errno;
    else
        ret = sync_parent(dir);
    if (ret < 0) sw_error("cannot put %s in its place: %s", dir, strerror(-ret));
    return ret;
}

void sw_output_stopped_name(const char *out, uint64_t step, char *name, uint32_t name_size) {
    size_t n = strlen(out);
    while (n > 1 && out[n - 1] == '/') n--;
    struct stat st;
    snprintf(name, name_size, "%.*s.step-%llu", (int)n, out, (unsigned long long)step);
    for (int i = 2; lstat(name, &st) == 0 && i < 10000; i++)
        snprintf(name, name_size, "%.*s.step-%llu.%d", (int)n, out, (unsigned long long)step, i);
}
