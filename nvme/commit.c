/* nvme/commit.c - writing and finding commit records. */
#include "nvme/commit.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/crc32c.h"
#include "base/log.h"
#include "base/size.h"
#include "nvme/nvme_internal.h"

enum { PAGE_BYTES = 4096, FORMAT_VERSION = 2 };

static const char magic[8] = {'S', 'W', 'C', 'O', 'M', 'M', 'I', 'T'};

/* On disk, little-endian like every machine this runs on; the entries follow. */
struct header {
    char magic[8];
    uint32_t version;
    uint32_t checksum; /* CRC-32C of header and entries with this field 0 */
    uint64_t number, step, updates, skips_in_a_row, owner_pid, time_unix_s;
    uint32_t chunk_count, entry_bytes;
    char identity[SW_COMMIT_IDENTITY_BYTES];
    char note[SW_COMMIT_NOTE_BYTES];
    uint64_t run;
    uint32_t process, processes;
    char reserved[424]; /* zero */
};
_Static_assert(sizeof(struct header) == PAGE_BYTES, "a header is one page");
_Static_assert(offsetof(struct header, number) == 16, "no hidden padding");
_Static_assert(offsetof(struct header, chunk_count) == 64, "as in every version");
_Static_assert(offsetof(struct header, identity) == 72, "no hidden padding");
_Static_assert(offsetof(struct header, note) == 3144, "no hidden padding");
_Static_assert(offsetof(struct header, run) == 3656, "no hidden padding");
_Static_assert(offsetof(struct header, process) == 3664, "no hidden padding");
_Static_assert(offsetof(struct header, processes) == 3668, "no hidden padding");
_Static_assert(sizeof(struct sw_commit_entry) == 8, "entries are packed");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "records are written as they lie");

struct sw_journal {
    char *path, *folder;
    int fd;
    uint32_t chunk_count;
    uint64_t place_bytes, last;
    char *page; /* a whole place */
};

static uint64_t place_bytes(uint32_t chunk_count) {
    return sw_round_up(PAGE_BYTES + (uint64_t)chunk_count * sizeof(struct sw_commit_entry),
                       PAGE_BYTES);
}

static uint64_t record_bytes(uint32_t chunk_count) {
    return PAGE_BYTES + (uint64_t)chunk_count * sizeof(struct sw_commit_entry);
}

/* The checksum of a place as if its field were 0. */
static uint32_t checksum_of(const char *place, uint32_t chunk_count) {
    struct header header;
    memcpy(&header, place, sizeof(header));
    header.checksum = 0;
    const uint32_t crc = sw_crc32c(0, &header, sizeof(header));
    return sw_crc32c(crc, place + PAGE_BYTES, record_bytes(chunk_count) - PAGE_BYTES);
}

static int transfer(int fd, char *buf, uint64_t bytes, uint64_t offset, int write) {
    while (bytes > 0) {
        const ssize_t n =
            write ? pwrite(fd, buf, bytes, (off_t)offset) : pread(fd, buf, bytes, (off_t)offset);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return -errno;
        if (n == 0) return -EIO; /* the end of the file, or a device that takes nothing */
        buf += n;
        bytes -= (uint64_t)n;
        offset += (uint64_t)n;
    }
    return 0;
}

/* A header that can be believed so far: the size of what follows it is known. */
static int plausible(const struct header *h) {
    return !memcmp(h->magic, magic, sizeof(magic)) &&
           h->entry_bytes == sizeof(struct sw_commit_entry) && h->number > 0 &&
           memchr(h->identity, 0, sizeof(h->identity)) && memchr(h->note, 0, sizeof(h->note));
}

/* Reads the record at an offset, at most `room` bytes long, into commit, with entries of its own. 1
 * whole, 0 not, or -errno. A whole one of another version counts as none and is noted in *foreign.
 */
static int read_place(int fd, uint64_t offset, uint64_t room, struct sw_commit *commit,
                      uint32_t *foreign) {
    struct header h;
    const int ret = transfer(fd, (char *)&h, sizeof(h), offset, 0);
    if (ret < 0) return ret == -EIO ? 0 : ret;
    if (!plausible(&h) || record_bytes(h.chunk_count) > room) return 0;
    char *place = malloc(record_bytes(h.chunk_count));
    if (!place) return -ENOMEM;
    int whole = transfer(fd, place, record_bytes(h.chunk_count), offset, 0) == 0 &&
                checksum_of(place, h.chunk_count) == h.checksum;
    if (whole && h.version != FORMAT_VERSION) {
        *foreign = h.version;
        whole = 0;
    }
    if (whole) {
        *commit = (struct sw_commit){.number = h.number,
                                     .step = h.step,
                                     .updates = h.updates,
                                     .skips_in_a_row = h.skips_in_a_row,
                                     .owner_pid = h.owner_pid,
                                     .time_unix_s = h.time_unix_s,
                                     .run = h.run,
                                     .process = h.process,
                                     .processes = h.processes,
                                     .chunk_count = h.chunk_count};
        memcpy(commit->identity, h.identity, sizeof(h.identity));
        memcpy(commit->note, h.note, sizeof(h.note));
        memmove(place, place + PAGE_BYTES, record_bytes(h.chunk_count) - PAGE_BYTES);
        commit->entries = (struct sw_commit_entry *)(void *)place;
    } else {
        free(place);
    }
    return whole;
}

/* The newest of both places of an open file, of a step up to this one; the size of a place follows
 * from either header, the file's length from the one that made it. *foreign: see above, else 0. */
static int read_newest(int fd, uint64_t step_max, struct sw_commit *commit, uint32_t *foreign) {
    struct stat st;
    if (fstat(fd, &st)) return -errno;
    const uint64_t half = (uint64_t)st.st_size / 2;
    int found = 0;
    *foreign = 0;
    for (int i = 0; i < 2 && half >= PAGE_BYTES; i++) {
        struct sw_commit one;
        const int ret = read_place(fd, (uint64_t)i * half, half, &one, foreign);
        if (ret < 0) {
            if (found) free(commit->entries);
            return ret;
        }
        if (!ret) continue;
        if (one.step > step_max || (found && one.number < commit->number)) {
            free(one.entries);
            continue;
        }
        if (found) free(commit->entries);
        *commit = one;
        found = 1;
    }
    return found == 0 && *foreign ? -EPROTONOSUPPORT : found;
}

int sw_commit_read(const char *folder, const char *name, struct sw_commit *commit) {
    return sw_commit_read_until(folder, name, UINT64_MAX, commit);
}

int sw_commit_read_until(const char *folder, const char *name, uint64_t step_max,
                         struct sw_commit *commit) {
    assert(folder && name && commit);
    char *path;
    uint32_t foreign;
    if (asprintf(&path, "%s/%s.commit", folder, name) < 0) return -ENOMEM;
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    int ret = fd < 0 ? -errno : read_newest(fd, step_max, commit, &foreign);
    if (fd >= 0) close(fd);
    if (ret == -ENOENT) ret = 0;
    if (ret == -EPROTONOSUPPORT)
        sw_error("store: '%s' is of version %u of the format, and this program reads version %d: "
                 "go on with the version of the program that wrote it, or drop it with --restart",
                 path, foreign, FORMAT_VERSION);
    else if (ret < 0)
        sw_error("store: cannot read '%s': %s", path, strerror(-ret));
    free(path);
    return ret;
}

int sw_commit_rewind(const char *folder, const char *name, uint64_t step) {
    char *path;
    char zeros[PAGE_BYTES] = {0};
    if (asprintf(&path, "%s/%s.commit", folder, name) < 0) return -ENOMEM;
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat st;
    int ret = fd < 0 || fstat(fd, &st) ? -errno : 0;
    const uint64_t half = ret == 0 ? (uint64_t)st.st_size / 2 : 0;
    for (int i = 0; i < 2 && ret == 0 && half >= PAGE_BYTES; i++) {
        struct sw_commit one;
        uint32_t foreign;
        ret = read_place(fd, (uint64_t)i * half, half, &one, &foreign);
        if (ret != 1) continue;
        free(one.entries);
        ret = one.step > step ? transfer(fd, zeros, sizeof(zeros), (uint64_t)i * half, 1) : 0;
    }
    if (ret == 0 && fdatasync(fd)) ret = -errno;
    if (fd >= 0) close(fd);
    if (ret < 0) sw_error("store: cannot go back in '%s': %s", path, strerror(-ret));
    free(path);
    return ret;
}

void sw_commit_remove(const char *folder, const char *name) {
    char *path;
    if (asprintf(&path, "%s/%s.commit", folder, name) < 0) return;
    unlink(path);
    free(path);
}

int sw_journal_open(struct sw_journal **out, const char *folder, const char *name,
                    uint32_t chunk_count, int fresh) {
    assert(out && folder && name);
    struct sw_journal *j = calloc(1, sizeof(*j));
    if (!j) return -ENOMEM;
    j->fd = -1;
    j->chunk_count = chunk_count;
    j->place_bytes = place_bytes(chunk_count);
    j->folder = strdup(folder);
    j->page = calloc(1, j->place_bytes);
    int ret = 0;
    if (!j->folder || !j->page || asprintf(&j->path, "%s/%s.commit", folder, name) < 0) {
        j->path = NULL;
        ret = -ENOMEM;
    }
    if (ret == 0) {
        j->fd = open(j->path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (j->fd < 0) ret = -errno;
    }
    struct sw_commit last;
    if (ret == 0 && !fresh) {
        uint32_t foreign;
        ret = read_newest(j->fd, UINT64_MAX, &last, &foreign);
        if (ret == 1) {
            j->last = last.number;
            free(last.entries);
        }
    }
    if (ret >= 0 && fresh && ftruncate(j->fd, 0)) ret = -errno;
    /* To its full length now: a full disk is an error at start. */
    if (ret >= 0 && ftruncate(j->fd, (off_t)(2 * j->place_bytes))) ret = -errno;
    if (ret >= 0) {
        ret = fallocate(j->fd, 0, 0, (off_t)(2 * j->place_bytes)) ? -errno : 0;
        if (ret == -EOPNOTSUPP) ret = 0;
    }
    if (ret < 0) {
        sw_error("store: cannot make '%s': %s", j->path ? j->path : folder, strerror(-ret));
        sw_journal_close(j, 0);
        return ret;
    }
    sw_nvme_sync_folder(folder); /* a commit is worth nothing under a name that a cut forgets */
    *out = j;
    return 0;
}

void sw_journal_close(struct sw_journal *j, int unlink_file) {
    if (!j) return;
    if (unlink_file && j->path) unlink(j->path);
    if (j->fd >= 0) close(j->fd);
    free(j->path);
    free(j->folder);
    free(j->page);
    free(j);
}

uint64_t sw_journal_place_bytes(const struct sw_journal *journal) {
    return journal->place_bytes;
}

int sw_journal_append(struct sw_journal *j, struct sw_commit *commit) {
    assert(j && commit && commit->chunk_count == j->chunk_count);
    struct header h = {.version = FORMAT_VERSION,
                       .number = j->last + 1,
                       .step = commit->step,
                       .updates = commit->updates,
                       .skips_in_a_row = commit->skips_in_a_row,
                       .owner_pid = commit->owner_pid,
                       .time_unix_s = commit->time_unix_s,
                       .run = commit->run,
                       .process = commit->process,
                       .processes = commit->processes,
                       .chunk_count = j->chunk_count,
                       .entry_bytes = sizeof(struct sw_commit_entry)};
    memcpy(h.magic, magic, sizeof(magic));
    memcpy(h.identity, commit->identity, sizeof(h.identity));
    memcpy(h.note, commit->note, sizeof(h.note));
    memcpy(j->page + PAGE_BYTES, commit->entries,
           (uint64_t)j->chunk_count * sizeof(struct sw_commit_entry));
    memcpy(j->page, &h, sizeof(h));
    h.checksum = checksum_of(j->page, j->chunk_count);
    memcpy(j->page, &h, sizeof(h));
    int ret = transfer(j->fd, j->page, j->place_bytes, h.number % 2 * j->place_bytes, 1);
    while (ret == 0 && fdatasync(j->fd)) {
        if (errno != EINTR) ret = -errno;
    }
    if (ret < 0) {
        sw_error("store: commit %llu could not be made durable in '%s': %s; the one before it "
                 "holds",
                 (unsigned long long)h.number, j->path, strerror(-ret));
        return ret;
    }
    commit->number = j->last = h.number;
    return 0;
}

const char *sw_commit_value(const char *identity, const char *name, int length) {
    const char *line = identity;
    while (*line && (strncmp(line, name, (size_t)length) != 0 || line[length] != '=')) {
        line += strcspn(line, "\n");
        line += *line == '\n';
    }
    return *line ? line + length + 1 : line;
}

const char *sw_commit_differs(const char *want, const char *have, int *length) {
    while (*want) {
        *length = (int)strcspn(want, "=");
        const char *mine = want + *length + 1, *other = sw_commit_value(have, want, *length);
        const size_t bytes = strcspn(mine, "\n");
        if (strcspn(other, "\n") != bytes || strncmp(other, mine, bytes) != 0) return want;
        want = mine + bytes;
        want += *want == '\n';
    }
    return NULL;
}
