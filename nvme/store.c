/* nvme/store.c - the files of a store: one per folder, laid out, locked and preallocated at open.
 *
 * Chunks go to the folder with the fewest bytes so far, for its share, which is round robin for
 * equal records and equal shares and stays even for unequal ones. A file holds home 0 of all its
 * chunks, then home 1 of all of them, in the order of the chunks, without any header: it can be
 * named FOLDER/NAME.DRIVE.state, found after a crash, and taken over by the next store of that
 * name. */
#include "nvme/nvme_internal.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"
#include "base/size.h"

enum { LOCK_TRIES = 20, LOCK_PAUSE_NS = 50000000 }; /* a second in all */

/* The folder that, with this record too, has the fewest bytes for its share; the first of equals.
 */
static uint32_t folder_for(const struct sw_nvme_options *o, const uint64_t *file_bytes,
                           uint64_t record_bytes) {
    uint32_t best = 0;
    for (uint32_t f = 1; f < o->folder_count; f++) {
        const uint64_t share = o->shares ? o->shares[f] : 1;
        const uint64_t share_of_best = o->shares ? o->shares[best] : 1;
        /* Multiplied crosswise, so that no rounding decides. */
        if ((unsigned __int128)(file_bytes[f] + record_bytes) * share_of_best <
            (unsigned __int128)(file_bytes[best] + record_bytes) * share)
            best = f;
    }
    return best;
}

/* Fills places (unless NULL) and the bytes of one home per folder. */
static void lay_out(const struct sw_nvme_options *o, struct sw_nvme_place *places,
                    uint64_t *file_bytes) {
    memset(file_bytes, 0, o->folder_count * sizeof(*file_bytes));
    for (uint32_t c = 0; c < o->chunk_count; c++) {
        const uint32_t file = folder_for(o, file_bytes, o->record_bytes[c]);
        assert(o->record_bytes[c] % SW_NVME_ALIGN_BYTES == 0);
        if (places) places[c] = (struct sw_nvme_place){file_bytes[file], o->record_bytes[c], file};
        file_bytes[file] += o->record_bytes[c];
    }
}

uint64_t sw_nvme_bytes(const struct sw_nvme_options *o) {
    assert(o);
    uint64_t sum = 0;
    for (uint32_t c = 0; c < o->chunk_count; c++) sum += o->record_bytes[c];
    return sum * o->homes;
}

const char *sw_nvme_lock_owner(int fd, char text[SW_NVME_OWNER_BYTES]) {
    struct stat st;
    FILE *locks = fstat(fd, &st) ? NULL : fopen("/proc/locks", "re");
    strcpy(text, "another process");
    if (!locks) return text;
    char line[256];
    long owner = 0;
    while (!owner && fgets(line, sizeof(line), locks)) {
        long pid;
        unsigned dev_major, dev_minor;
        unsigned long inode;
        if (sscanf(line, "%*d: FLOCK %*s %*s %ld %x:%x:%lu", &pid, &dev_major, &dev_minor,
                   &inode) == 4 &&
            dev_major == major(st.st_dev) && dev_minor == minor(st.st_dev) && inode == st.st_ino)
            owner = pid;
    }
    fclose(locks);
    if (owner) snprintf(text, SW_NVME_OWNER_BYTES, "process %ld", owner);
    return text;
}

/* Takes a file's lock. A process that was just killed, or its ring on the way down, may hold it a
 * moment longer. 0, -EWOULDBLOCK or another -errno. */
static int take_lock(int fd) {
    int busy = flock(fd, LOCK_EX | LOCK_NB);
    for (int tries = 0; busy && errno == EWOULDBLOCK && tries < LOCK_TRIES; tries++) {
        nanosleep(&(struct timespec){.tv_nsec = LOCK_PAUSE_NS}, NULL);
        busy = flock(fd, LOCK_EX | LOCK_NB);
    }
    return busy ? -errno : 0;
}

static int check_folder(const char *folder) {
    struct stat st;
    if (stat(folder, &st)) {
        const int ret = -errno;
        sw_error("nvme: folder '%s': %s%s", folder, strerror(-ret),
                 ret == -ENOENT ? "; make it first, on the drive that is meant" : "");
        return ret;
    }
    if (!S_ISDIR(st.st_mode)) {
        sw_error("nvme: '%s' is not a folder", folder);
        return -ENOTDIR;
    }
    return 0;
}

static int busy(const char *path, int fd) {
    char owner[SW_NVME_OWNER_BYTES];
    sw_error("nvme: '%s' is in use by %s; end it, or take another folder", path,
             sw_nvme_lock_owner(fd, owner));
    return -EEXIST;
}

static int is_in_place(const struct sw_nvme_file *file) {
    struct stat held, named;
    return fstat(file->fd, &held) == 0 && stat(file->path, &named) == 0 &&
           named.st_ino == held.st_ino && named.st_dev == held.st_dev;
}

const char *sw_nvme_missing(const struct sw_nvme_store *store) {
    for (uint32_t i = 0; i < store->file_count; i++)
        if (!is_in_place(&store->files[i])) return store->files[i].path;
    return NULL;
}

/* Locks an open file for this store. -ESTALE: its owner removed it meanwhile, open it again. */
static int lock_file(const struct sw_nvme_file *file) {
    const int ret = take_lock(file->fd);
    if (ret < 0 && ret != -EWOULDBLOCK) {
        sw_error("nvme: cannot lock '%s': %s", file->path, strerror(-ret));
        return ret;
    }
    if (ret < 0) return busy(file->path, file->fd);
    return is_in_place(file) ? 0 : -ESTALE;
}

/* Asks the file system what alignment direct I/O needs. 0: it does not say. */
static uint32_t direct_align(int fd) {
#ifdef STATX_DIOALIGN
    struct statx sx;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &sx) == 0 && (sx.stx_mask & STATX_DIOALIGN))
        return sx.stx_dio_offset_align > sx.stx_dio_mem_align ? sx.stx_dio_offset_align
                                                              : sx.stx_dio_mem_align;
#else
    (void)fd;
#endif
    return 0;
}

static int set_direct(int fd, int on) {
    const int flags = fcntl(fd, F_GETFL);
    if (flags < 0) return -errno;
    return fcntl(fd, F_SETFL, on ? flags | O_DIRECT : flags & ~O_DIRECT) ? -errno : 0;
}

static void say_buffered(const struct sw_nvme_file *file, const char *why) {
    sw_warning("nvme: folder '%s' has no direct I/O (%s); going on through the page cache, which "
               "costs speed and memory",
               file->folder, why);
}

int sw_nvme_drop_direct(struct sw_nvme_store *store, uint32_t file_index, const char *why) {
    struct sw_nvme_file *file = &store->files[file_index];
    if (!atomic_exchange(&file->direct, 0)) return 0;
    set_direct(file->fd, 0);
    say_buffered(file, why);
    return 1;
}

/* Turns direct I/O on and tries it: some file systems accept the flag and refuse the transfer. */
static void try_direct(struct sw_nvme_file *file) {
    file->align_bytes = direct_align(file->fd);
    if (file->align_bytes > SW_NVME_ALIGN_BYTES) {
        say_buffered(file, "it needs a larger alignment than 4 KiB");
        return;
    }
    file->align_bytes = SW_NVME_ALIGN_BYTES;
    const int ret = set_direct(file->fd, 1);
    if (ret < 0) {
        say_buffered(file, ret == -EINVAL ? "the file system refuses it" : strerror(-ret));
        return;
    }
    atomic_store(&file->direct, 1);
    void *page = NULL;
    if (posix_memalign(&page, SW_NVME_ALIGN_BYTES, SW_NVME_ALIGN_BYTES)) return;
    if (pread(file->fd, page, SW_NVME_ALIGN_BYTES, 0) < 0) {
        const int err = errno;
        atomic_store(&file->direct, 0);
        set_direct(file->fd, 0);
        say_buffered(file, err == EINVAL ? "it refuses a direct transfer" : strerror(err));
    }
    free(page);
}

static int open_file(struct sw_nvme_file *file) {
    for (int attempt = 0; attempt < 8; attempt++) {
        file->created = 1;
        file->fd = open(file->path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (file->fd < 0 && errno == EEXIST) {
            file->created = 0;
            file->fd = open(file->path, O_RDWR | O_CLOEXEC);
            if (file->fd < 0 && errno == ENOENT) continue; /* removed in between */
        }
        if (file->fd < 0) {
            const int ret = -errno;
            sw_error("nvme: cannot make '%s': %s%s", file->path, strerror(-ret),
                     ret == -EROFS ? "; the file system is mounted read-only" : "");
            return ret;
        }
        const int ret = lock_file(file);
        if (ret == 0) return 0;
        close(file->fd);
        file->fd = -1;
        file->created = 0;
        if (ret != -ESTALE) return ret;
    }
    sw_error("nvme: '%s' is made and removed by another process all the time", file->path);
    return -EAGAIN;
}

static int no_space(const struct sw_nvme_file *file, uint64_t needed, uint64_t available) {
    char need[32], have[32];
    sw_error("nvme: no space in '%s': %s (%llu bytes) more are needed, %s (%llu bytes) are free",
             file->folder, sw_size_print(needed, need, sizeof(need)), (unsigned long long)needed,
             sw_size_print(available, have, sizeof(have)), (unsigned long long)available);
    return -ENOSPC;
}

uint64_t sw_nvme_free_bytes(const char *folder) {
    struct statvfs vfs;
    if (statvfs(folder, &vfs) || vfs.f_blocks == 0) return UINT64_MAX;
    return (uint64_t)vfs.f_bavail * vfs.f_frsize;
}

/* Compares what all files on one file system still need with what is free there, before any byte is
 * taken: an allocation that fails half way would leave the disk full for a moment. */
static int check_space(struct sw_nvme_store *store) {
    for (uint32_t i = 0; i < store->file_count; i++) {
        struct sw_nvme_file *file = &store->files[i];
        struct stat st;
        if (fstat(file->fd, &st)) return -errno;
        const uint64_t size = file->bytes * store->homes, held = (uint64_t)st.st_blocks * 512;
        file->device = st.st_dev;
        file->needed_bytes = size > held ? size - held : 0;
    }
    for (uint32_t i = 0; i < store->file_count; i++) {
        uint64_t needed = 0;
        for (uint32_t j = 0; j < store->file_count; j++)
            if (store->files[j].device == store->files[i].device)
                needed += store->files[j].needed_bytes;
        const uint64_t available = sw_nvme_free_bytes(store->files[i].folder);
        if (needed > available) return no_space(&store->files[i], needed, available);
    }
    return 0;
}

static int preallocate(struct sw_nvme_file *file, uint64_t size) {
    /* Asked first: growing past this limit would end the process with SIGXFSZ. */
    struct rlimit limit;
    if (!getrlimit(RLIMIT_FSIZE, &limit) && limit.rlim_cur != RLIM_INFINITY &&
        size > limit.rlim_cur) {
        sw_error(
            "nvme: '%s' needs %llu bytes and the limit of a file's size is %llu: raise ulimit -f",
            file->path, (unsigned long long)size, (unsigned long long)limit.rlim_cur);
        return -EFBIG;
    }
    if (ftruncate(file->fd, (off_t)size)) {
        const int ret = -errno;
        sw_error("nvme: cannot size '%s' to %llu bytes: %s%s", file->path, (unsigned long long)size,
                 strerror(-ret), ret == -EFBIG ? "; the file system has a smaller limit" : "");
        return ret;
    }
    int ret = 0;
    do ret = size && fallocate(file->fd, 0, 0, (off_t)size) ? -errno : 0;
    while (ret == -EINTR);
    /* The last two are a sandbox's answers. */
    if (ret == -EOPNOTSUPP || ret == -ENOSYS || ret == -EPERM) {
        sw_warning("nvme: folder '%s' cannot reserve space (fallocate: %s); a full disk will show "
                   "only when "
                   "it is written to",
                   file->folder, strerror(-ret));
        return 0;
    }
    if (ret == -ENOSPC) return no_space(file, file->needed_bytes, sw_nvme_free_bytes(file->folder));
    if (ret) sw_error("nvme: cannot reserve '%s': %s", file->path, strerror(-ret));
    return ret;
}

void sw_nvme_sync_folder(const char *folder) {
    const int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return;
    fsync(fd);
    close(fd);
}

static int open_existing(struct sw_nvme_file *file) {
    file->fd = open(file->path, O_RDONLY | O_CLOEXEC);
    int ret = file->fd < 0 ? -errno : 0;
    if (ret < 0)
        sw_error("nvme: cannot open '%s': %s", file->path, strerror(-ret));
    else
        ret = lock_file(file);
    if (ret != -ESTALE) return ret;
    sw_error("nvme: '%s' was removed by the run that had it", file->path);
    return -ENOENT;
}

static int check_size(const struct sw_nvme_file *file, uint64_t size) {
    struct stat st;
    if (fstat(file->fd, &st)) return -errno;
    if ((uint64_t)st.st_size >= size) return 0;
    sw_error(
        "nvme: '%s' has %llu bytes and its layout takes %llu: it was cut, or it is not of this "
        "store",
        file->path, (unsigned long long)st.st_size, (unsigned long long)size);
    return -EINVAL;
}

/* Room for all chunks, in files that this store may write to. */
static int reserve(struct sw_nvme_store *store) {
    int ret = check_space(store);
    for (uint32_t i = 0; i < store->file_count && !ret; i++)
        ret = preallocate(&store->files[i], store->files[i].bytes * store->homes);
    return ret;
}

static int prepare_files(struct sw_nvme_store *store, const struct sw_nvme_options *o,
                         int existing) {
    for (uint32_t i = 0; i < store->file_count; i++) {
        struct sw_nvme_file *file = &store->files[i];
        file->folder = strdup(o->folders[i]);
        if (!file->folder ||
            asprintf(&file->path, "%s/%s.%u.state", o->folders[i], o->name, i) < 0) {
            file->path = NULL;
            return -ENOMEM;
        }
        int ret = check_folder(file->folder);
        if (!ret) ret = existing ? open_existing(file) : open_file(file);
        if (ret) return ret;
    }
    int ret = existing ? 0 : reserve(store);
    for (uint32_t i = 0; i < store->file_count && !ret && existing; i++)
        ret = check_size(&store->files[i], store->files[i].bytes * store->homes);
    for (uint32_t i = 0; i < store->file_count && !ret; i++) {
        try_direct(&store->files[i]);
        if (store->files[i].created) sw_nvme_sync_folder(store->files[i].folder);
    }
    return ret;
}

static void release(struct sw_nvme_store *store, int unlink_all, int unlink_created) {
    for (uint32_t i = 0; i < store->file_count; i++) {
        struct sw_nvme_file *file = &store->files[i];
        if (file->fd >= 0) {
            /* Before the lock goes, or a newcomer's file could be the one that is removed. */
            if (unlink_all || (unlink_created && file->created)) unlink(file->path);
            flock(file->fd, LOCK_UN); /* a ring on its way down may hold the file a little longer */
            close(file->fd);
        }
        free(file->path);
        free(file->folder);
    }
    free(store->places);
    free(store);
}

static int open_store(struct sw_nvme_store **out, const struct sw_nvme_options *o, int existing) {
    assert(out && o && o->folders && o->name && *o->name);
    assert(o->folder_count >= 1 && o->folder_count <= SW_NVME_FILES_MAX);
    assert(o->homes == 1 || o->homes == 2);
    assert(o->chunk_count == 0 || o->record_bytes);
    struct sw_nvme_store *store = calloc(1, sizeof(*store));
    if (store) store->places = calloc(o->chunk_count ? o->chunk_count : 1, sizeof(*store->places));
    if (!store || !store->places) {
        free(store);
        return -ENOMEM;
    }
    store->file_count = o->folder_count;
    store->chunk_count = o->chunk_count;
    store->homes = o->homes;
    uint64_t file_bytes[SW_NVME_FILES_MAX];
    lay_out(o, store->places, file_bytes);
    for (uint32_t i = 0; i < store->file_count; i++) {
        store->files[i].fd = -1;
        store->files[i].bytes = file_bytes[i];
    }
    const int ret = prepare_files(store, o, existing);
    if (ret < 0) {
        release(store, 0, 1);
        return ret;
    }
    *out = store;
    return 0;
}

int sw_nvme_open(struct sw_nvme_store **out, const struct sw_nvme_options *o) {
    return open_store(out, o, 0);
}

int sw_nvme_open_existing(struct sw_nvme_store **out, const struct sw_nvme_options *o) {
    return open_store(out, o, 1);
}

void sw_nvme_close(struct sw_nvme_store *store, int unlink_files) {
    if (store) release(store, unlink_files, 0);
}

void sw_nvme_abandon(struct sw_nvme_store *store) {
    if (store) release(store, 0, 1);
}

const char *sw_nvme_where(const struct sw_nvme_store *store, uint32_t chunk, uint32_t home,
                          uint64_t *offset_bytes) {
    assert(store && chunk < store->chunk_count && home < store->homes);
    const struct sw_nvme_place *place = &store->places[chunk];
    const struct sw_nvme_file *file = &store->files[place->file];
    *offset_bytes = place->offset_bytes + (home ? file->bytes : 0);
    return file->path;
}

int sw_nvme_check_free(const char *const *folders, uint32_t folder_count, const char *name) {
    int ret = 0;
    for (uint32_t i = 0; i < folder_count && ret == 0; i++) {
        char *path;
        if (asprintf(&path, "%s/%s.%u.state", folders[i], name, i) < 0) return -ENOMEM;
        const int fd = open(path, O_RDWR | O_CLOEXEC);
        if (fd >= 0 && take_lock(fd) == -EWOULDBLOCK) ret = busy(path, fd);
        if (fd >= 0) close(fd); /* and with it the lock */
        free(path);
    }
    return ret;
}

int sw_nvme_remove(const char *const *folders, uint32_t folder_count, const char *name) {
    int ret = 0;
    for (uint32_t i = 0; i < folder_count; i++) {
        char *path;
        if (asprintf(&path, "%s/%s.%u.state", folders[i], name, i) < 0) return -ENOMEM;
        const int fd = open(path, O_RDWR | O_CLOEXEC);
        if (fd >= 0 && take_lock(fd) == 0)
            unlink(path);
        else if (fd >= 0)
            ret = -EBUSY;
        if (fd >= 0) close(fd);
        free(path);
    }
    return ret;
}

int sw_nvme_sync(struct sw_nvme_store *store) {
    assert(store);
    int results[SW_NVME_FILES_MAX];
    const int count = (int)store->file_count;
    /* The threads wait for their drives, not for a core, so each file has its own. */
#pragma omp parallel for num_threads(count) schedule(static, 1) if (count > 1)
    for (int i = 0; i < count; i++) {
        do results[i] = fdatasync(store->files[i].fd) ? -errno : 0;
        while (results[i] == -EINTR);
    }
    int ret = 0;
    for (int i = 0; i < count; i++) {
        if (!results[i]) continue;
        sw_error("nvme: cannot sync '%s': %s; what was written to it may be lost",
                 store->files[i].path, strerror(-results[i]));
        if (!ret) ret = results[i];
    }
    return ret;
}
