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
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/log.h"
#include "base/size.h"
#include "engine/companions.h"
#include "engine/process_name.h"
#include "engine/result.h"
#include "nvme/nvme.h"

/* What runs leave in their folder beside the model's companions; --restart removes both and refuses
 * to touch anything else. */
static const char *const ours[] = {"config.json",
                                   "model.safetensors",
                                   "model-[0-9]*-of-[0-9]*.safetensors",
                                   "model.safetensors.index.json",
                                   SW_RESULT_NAME,
                                   "step-[0-9]*",
                                   "*.partial"};

/* Likewise; those that are there when a folder is emptied are of the run that begins. */
static const char *const stores[] = {SW_STORE_NAME ".[0-9]*.state",
                                     SW_STORE_NAME ".commit",
                                     SW_STORE_WEIGHTS ".[0-9]*.state",
                                     SW_STORE_GRADIENTS ".[0-9]*.state",
                                     SW_STORE_INPUTS ".[0-9]*.state",
                                     SW_STORE_NAME "-p[0-9]*.[0-9]*.state",
                                     SW_STORE_NAME "-p[0-9]*.commit",
                                     SW_STORE_WEIGHTS "-p[0-9]*.[0-9]*.state",
                                     SW_STORE_GRADIENTS "-p[0-9]*.[0-9]*.state",
                                     SW_STORE_INPUTS "-p[0-9]*.[0-9]*.state"};

static int is_one_of(const char *const *patterns, size_t count, const char *name) {
    for (size_t i = 0; i < count; i++)
        if (fnmatch(patterns[i], name, 0) == 0) return 1;
    return 0;
}

static int is_of_a_store(const char *name) {
    return is_one_of(stores, sizeof(stores) / sizeof(stores[0]), name);
}

static int is_ours(const char *name) {
    return is_one_of(ours, sizeof(ours) / sizeof(ours[0]), name) || is_of_a_store(name) ||
           sw_companions_has(name);
}

/* The name of a path in the folder `dir`, or NULL when it lies elsewhere. */
static const char *name_in(const char *path, const char *dir) {
    char parent[PATH_MAX], a[PATH_MAX], b[PATH_MAX];
    if (!path) return NULL;
    const char *slash = strrchr(path, '/');
    if (slash)
        snprintf(parent, sizeof(parent), "%.*s/", (int)(slash - path), path);
    else
        snprintf(parent, sizeof(parent), ".");
    if (!realpath(parent, a) || !realpath(dir, b) || strcmp(a, b) != 0) return NULL;
    return slash ? slash + 1 : path;
}

static int is_named(const char *name, const char *path, const char *dir) {
    const char *own = name_in(path, dir);
    return own && strcmp(own, name) == 0;
}

/* Whether it is a trace of this name, of any process; partial: one that is being written. */
static int is_trace(const char *name, const char *trace, const char *dir, int partial) {
    static const char end[] = ".partial";
    char whole[NAME_MAX + 1];
    const char *own = name_in(trace, dir);
    const size_t length = strlen(name), end_length = partial ? sizeof(end) - 1 : 0;
    if (!own || length < end_length || strcmp(name + length - end_length, partial ? end : "") != 0)
        return 0;
    snprintf(whole, sizeof(whole), "%.*s", (int)(length - end_length), name);
    return sw_process_is_named(whole, own);
}

/* The first entry of a folder, or the first one that is not a run's, its log or trace. 1 found. */
static int find_entry(const char *dir, int foreign, const char *log, const char *trace, char *name,
                      size_t name_size) {
    DIR *d = opendir(dir);
    if (!d) return -errno;
    int found = 0;
    for (struct dirent *e; !found && (e = readdir(d));) {
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
        if (foreign && (is_ours(e->d_name) || is_named(e->d_name, log, dir) ||
                        is_trace(e->d_name, trace, dir, 0)))
            continue;
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

/* Writes the folder that `path` lies in. */
static void parent_of(const char *path, char *parent, size_t parent_size) {
    snprintf(parent, parent_size, "%s", path);
    size_t n = strlen(parent);
    while (n > 1 && parent[n - 1] == '/') parent[--n] = '\0';
    char *slash = strrchr(parent, '/');
    if (!slash)
        snprintf(parent, parent_size, ".");
    else
        slash[slash == parent] = '\0';
}

static int check_parent(const char *option, const char *out) {
    char parent[PATH_MAX];
    parent_of(out, parent, sizeof(parent));
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

static int busy(const char *out, int fd) {
    char owner[SW_NVME_OWNER_BYTES];
    sw_error("--out %s is in use by %s; end it, or choose another folder", out,
             sw_nvme_lock_owner(fd, owner));
    return -EWOULDBLOCK;
}

/* Refuses a folder that a run holds (sw_output_take). */
static int check_free(const char *out) {
    const int fd = open(out, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const int taken = fd >= 0 && flock(fd, LOCK_SH | LOCK_NB) < 0 && errno == EWOULDBLOCK;
    const int ret = taken ? busy(out, fd) : 0;
    if (fd >= 0) close(fd);
    return ret;
}

int sw_output_check(const char *out, const char *model_dir, const char *reuse, const char *log,
                    const char *trace) {
    struct stat st;
    if (lstat(out, &st) < 0) {
        char parent[PATH_MAX];
        parent_of(out, parent, sizeof(parent));
        if (errno == ENOENT && !is_same_or_inside(parent, model_dir))
            return check_parent("--out", out);
        if (errno == ENOENT) {
            sw_error("--out %s lies in the model's folder; choose another", out);
            return -EEXIST;
        }
        const int ret = -errno;
        sw_error("--out %s: %s", out, strerror(-ret));
        return ret;
    }
    if (stat(out, &st) < 0 || !S_ISDIR(st.st_mode)) {
        sw_error("--out %s exists and is not a folder", out);
        return -ENOTDIR;
    }
    const int held = check_free(out);
    if (held < 0) return held;
    if (is_same_or_inside(out, model_dir)) {
        sw_error("--out %s is the model's own folder or lies in it; choose another", out);
        return -EEXIST;
    }
    char name[NAME_MAX + 1];
    int found = find_entry(out, 0, NULL, NULL, name, sizeof(name));
    if (found == 1 && !reuse) {
        sw_error(
            "--out %s is not empty (it holds %s): choose another folder, or --restart to replace "
            "what an earlier run left there",
            out, name);
        return -EEXIST;
    }
    if (found == 1) found = find_entry(out, 1, log, trace, name, sizeof(name));
    if (found == 1) {
        sw_error("%s: %s holds %s, which no run of this program leaves there; nothing was "
                 "removed",
                 reuse, out, name);
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

int sw_output_has_model(const char *out) {
    char path[PATH_MAX];
    snprintf(path, sizeof(path), "%s/config.json", out);
    return access(path, F_OK) == 0; /* it is put in place last */
}

int sw_output_check_file(const char *option, const char *path) {
    return path ? check_parent(option, path) : 0;
}

int sw_output_check_kind(const char *option, const char *path, int replaced) {
    char partial[PATH_MAX];
    const char *const places[] = {path, partial};
    if (!path) return 0;
    if (snprintf(partial, sizeof(partial), "%s.partial", path) >= (int)sizeof(partial)) {
        sw_error("%s %s: %s", option, path, strerror(ENAMETOOLONG));
        return -ENAMETOOLONG;
    }
    for (int i = 0; i <= !!replaced; i++) {
        struct stat st;
        if (stat(places[i], &st) < 0 || S_ISREG(st.st_mode)) continue;
        if (!replaced && !S_ISDIR(st.st_mode)) continue;
        sw_error("%s %s: %s is %s, not a file; choose another name", option, path, places[i],
                 S_ISDIR(st.st_mode) ? "a folder" : "a device or pipe");
        return -EINVAL;
    }
    return 0;
}

int sw_output_check_folder(const char *option, const char *path, const char *model_dir) {
    struct stat st;
    if (is_same_or_inside(path, model_dir)) {
        sw_error("%s %s is the model's own folder or lies in it; choose another", option, path);
        return -EEXIST;
    }
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

/* A folder without config.json is no model: what a kill leaves of it passes for none. */
static int forget_model(const char *dir) {
    char path[PATH_MAX];
    if (snprintf(path, sizeof(path), "%s/config.json", dir) >= (int)sizeof(path))
        return -ENAMETOOLONG;
    return unlink(path) < 0 && errno != ENOENT ? -errno : 0;
}

/* Removes everything in a folder. */
static int empty(const char *dir) {
    if (forget_model(dir) == 0 && nftw(dir, remove_entry, 16, FTW_DEPTH | FTW_PHYS) == 0) return 0;
    const int ret = errno ? -errno : -EIO;
    sw_error("cannot empty the folder %s: %s", dir, strerror(-ret));
    return ret;
}

int sw_output_take(const char *out, int *made, int *held) {
    *made = mkdir(out, 0777) == 0;
    int ret = *made || errno == EEXIST ? 0 : -errno;
    const int fd = ret == 0 ? open(out, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    if (ret == 0 && fd < 0) ret = -errno;
    if (ret == 0 && flock(fd, LOCK_EX | LOCK_NB) < 0) {
        ret = errno == EWOULDBLOCK ? busy(out, fd) : -errno;
        close(fd);
        if (ret == -EWOULDBLOCK) return ret;
    }
    if (ret < 0)
        sw_error("cannot take the output folder %s: %s", out, strerror(-ret));
    else
        *held = fd;
    return ret;
}

int sw_output_make_empty(const char *who, const char *path, int *made) {
    *made = mkdir(path, 0777) == 0;
    if (*made) return 0;
    char name[NAME_MAX + 1];
    int ret = errno == EEXIST ? find_entry(path, 0, NULL, NULL, name, sizeof(name)) : -errno;
    if (ret < 0) sw_error("%s: cannot make the folder %s: %s", who, path, strerror(-ret));
    if (ret <= 0) return ret;
    sw_error("%s: the folder %s is not empty (it holds %s); nothing is written over", who, path,
             name);
    return -EEXIST;
}

int sw_output_empty(const char *out, const char *log, const char *trace) {
    DIR *d = opendir(out);
    int ret = d ? forget_model(out) : -errno;
    for (struct dirent *e; ret == 0 && (e = readdir(d));) {
        char path[PATH_MAX];
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
        if (is_of_a_store(e->d_name) || is_named(e->d_name, log, out) ||
            is_trace(e->d_name, trace, out, 1))
            continue; /* of the run that begins */
        if (snprintf(path, sizeof(path), "%s/%s", out, e->d_name) >= (int)sizeof(path))
            ret = -ENAMETOOLONG;
        struct stat st;
        if (ret == 0 && lstat(path, &st) == 0 && S_ISDIR(st.st_mode)) ret = empty(path);
        if (ret == 0 && remove(path) < 0) ret = -errno;
    }
    if (d) closedir(d);
    if (ret < 0) sw_error("--restart: cannot empty %s: %s", out, strerror(-ret));
    return ret;
}

static uint64_t replaced_bytes; /* nftw() hands nothing through */

static int add_entry(const char *path, const struct stat *st, int flag, struct FTW *ftw) {
    if (flag == FTW_F && (ftw->level > 1 || !is_of_a_store(path + ftw->base)))
        replaced_bytes += (uint64_t)st->st_blocks * 512;
    return 0;
}

int sw_output_check_space(const char *out, uint64_t need_bytes, int emptied) {
    char need[32], have[32];
    uint64_t available = sw_nvme_free_bytes(out);
    replaced_bytes = 0;
    if (emptied) nftw(out, add_entry, 16, FTW_PHYS);
    if (available > UINT64_MAX - replaced_bytes) return 0; /* it does not say */
    available += replaced_bytes;
    if (need_bytes <= available) return 0;
    sw_error("--out %s: the model needs %s (%llu bytes), and %s (%llu bytes) are free there", out,
             sw_size_print(need_bytes, need, sizeof(need)), (unsigned long long)need_bytes,
             sw_size_print(available, have, sizeof(have)), (unsigned long long)available);
    return -ENOSPC;
}

static int sync_parent(const char *path) {
    char parent[PATH_MAX];
    parent_of(path, parent, sizeof(parent));
    const int fd = open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return -errno;
    const int ret = fsync(fd) < 0 ? -errno : 0;
    close(fd);
    return ret;
}

/* Puts a whole save in the place of one of the same step, which an earlier life of the run made: at
 * every moment one of them is there. */
static int replace(const char *partial, const char *dir) {
    if (rename(partial, dir) == 0) return 0;
    if (errno != EEXIST && errno != ENOTEMPTY) return -errno;
    if (renameat2(AT_FDCWD, partial, AT_FDCWD, dir, RENAME_EXCHANGE) == 0) {
        const int ret = empty(partial);
        return ret < 0 ? ret : rmdir(partial) < 0 ? -errno : 0;
    }
    const int ret = empty(dir); /* a file system that cannot exchange them */
    return ret < 0 ? ret : rename(partial, dir) < 0 ? -errno : 0;
}

int sw_output_save(const struct sw_model *model, const char *dir, enum sw_dtype dtype,
                   sw_model_fetch fetch, void *ctx) {
    char partial[PATH_MAX];
    if (snprintf(partial, sizeof(partial), "%s.partial", dir) >= (int)sizeof(partial))
        return -ENAMETOOLONG;
    int ret = mkdir(partial, 0777) == 0 || errno == EEXIST ? empty(partial) : -errno;
    if (ret < 0) sw_error("cannot make the folder %s: %s", partial, strerror(-ret));
    if (ret == 0) ret = sw_model_save(model, partial, dtype, fetch, ctx);
    if (ret < 0) {
        rmdir(partial);
        return ret;
    }
    ret = replace(partial, dir);
    if (ret == 0) ret = sync_parent(dir);
    if (ret < 0) sw_error("cannot put %s in its place: %s", dir, strerror(-ret));
    return ret;
}

void sw_output_stopped_name(const char *out, uint64_t step, char *name, uint32_t name_size) {
    char whole[PATH_MAX], parent[PATH_MAX];
    if (!realpath(out, whole)) snprintf(whole, sizeof(whole), "%s", out);
    /* As the user wrote it, unless that says nothing, as "." does. */
    size_t n = strlen(out);
    while (n > 1 && out[n - 1] == '/') n--;
    const int plain = out[n - 1] != '.';
    const char *base = plain ? out : whole;
    const int length = plain ? (int)n : (int)strlen(whole);
    parent_of(whole, parent, sizeof(parent));
    const char *place = access(parent, W_OK) == 0 ? "." : "/"; /* beside, or else inside */
    struct stat st;
    snprintf(name, name_size, "%.*s%sstep-%llu", length, base, place, (unsigned long long)step);
    for (int i = 2; lstat(name, &st) == 0 && i < 10000; i++)
        snprintf(name, name_size, "%.*s%sstep-%llu.%d", length, base, place,
                 (unsigned long long)step, i);
}

/* Whether a name is PREFIXstep-N.partial, or with a number after N, and of which step. */
static int is_partial_save(const char *name, const char *prefix, uint64_t *step) {
    unsigned long long n;
    unsigned again;
    int end = 0;
    const size_t length = strlen(prefix);
    if (strncmp(name, prefix, length) != 0) return 0;
    if ((sscanf(name + length, "step-%llu.partial%n", &n, &end) != 1 || end == 0) &&
        (sscanf(name + length, "step-%llu.%u.partial%n", &n, &again, &end) != 2 || end == 0))
        return 0;
    *step = n;
    return name[length + (size_t)end] == '\0';
}

static int drop_partial(const char *dir, const char *prefix, int of_stop,
                        void (*tell)(void *ctx, const struct sw_partial_save *), void *ctx) {
    DIR *d = opendir(dir);
    int ret = d ? 0 : -errno;
    for (struct dirent *e; ret == 0 && (e = readdir(d));) {
        char path[PATH_MAX];
        struct sw_partial_save save = {.path = path, .of_stop = of_stop};
        struct stat st;
        if (!is_partial_save(e->d_name, prefix, &save.step)) continue;
        if (snprintf(path, sizeof(path), "%s/%s", dir, e->d_name) >= (int)sizeof(path)) continue;
        if (lstat(path, &st) < 0 || !S_ISDIR(st.st_mode)) continue;
        ret = empty(path);
        if (ret == 0 && rmdir(path) < 0) ret = -errno;
        if (ret == 0) tell(ctx, &save);
    }
    if (d) closedir(d);
    if (ret < 0) sw_error("--resume: cannot clean up %s: %s", dir, strerror(-ret));
    return ret;
}

int sw_output_drop_partial(const char *out, void (*tell)(void *ctx, const struct sw_partial_save *),
                           void *ctx) {
    char whole[PATH_MAX], parent[PATH_MAX], prefix[NAME_MAX + 2];
    const int ret = drop_partial(out, "", 0, tell, ctx);
    if (ret < 0 || !realpath(out, whole)) return ret;
    parent_of(whole, parent, sizeof(parent));
    if (access(parent, W_OK) < 0) return 0;
    const char *base = strrchr(whole, '/') + 1;
    if (snprintf(prefix, sizeof(prefix), "%s.", base) >= (int)sizeof(prefix)) return 0;
    return drop_partial(parent, prefix, 1, tell, ctx);
}

int sw_output_is_input(const char *option, const char *path, const char *const *inputs, int count,
                       const char *model_dir) {
    struct stat a, b;
    char parent[PATH_MAX];
    if (!path) return 0;
    parent_of(path, parent, sizeof(parent));
    int clash = is_same_or_inside(parent, model_dir);
    for (int i = 0; i < count && !clash; i++) {
        if (!inputs[i]) continue;
        clash = strcmp(path, inputs[i]) == 0 ||
                (stat(path, &a) == 0 && stat(inputs[i], &b) == 0 && a.st_ino == b.st_ino &&
                 a.st_dev == b.st_dev && S_ISREG(a.st_mode));
    }
    if (!clash) return 0;
    sw_error("%s %s would overwrite an input of this run, or another output; choose another file",
             option, path);
    return -EEXIST;
}
