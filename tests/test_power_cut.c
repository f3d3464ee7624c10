/* Power cuts, replayed: the writes and flushes of a store and its journal are recorded, and every
 * state of the disk that a cut could leave is built and opened again.
 *
 * A write that no flush of its file followed may be lost, kept or torn, each on its own: a drive
 * orders nothing by itself. What must hold in every such state: the newest record is that of the
 * last commit that returned, or of the one that was under way; and the home that it names of every
 * chunk holds exactly the bytes of that commit. Small stores: every subset after every operation;
 * larger ones: seeded samples. pwrite and fdatasync of this program are the recorders: the store is
 * opened on its pread/pwrite back end. */
#include "nvme/homes.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <pthread.h>
#include <cmocka.h>
#include "base/crc32c.h"
#include "nvme/nvme_internal.h"
#include "tests/support_files.h"

enum { RECORD_BYTES = 4096, OPS_MAX = 4096, FILES_MAX = 3, CHUNKS_MAX = 64, COMMITS_MAX = 64 };

enum kind { WRITE, FLUSH, COMMITTED };

struct op {
    enum kind kind;
    int file;
    uint64_t offset, bytes;
    char *data;
    uint64_t commit; /* COMMITTED: the number that had returned */
};

static struct op ops[OPS_MAX];
static int op_count, recording;
static char *names[FILES_MAX]; /* base names of the files met */
static int name_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int file_of(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    const ssize_t n = readlink(link, path, sizeof(path) - 1);
    assert_true(n > 0);
    path[n] = 0;
    const char *base = strrchr(path, '/') + 1;
    for (int i = 0; i < name_count; i++)
        if (!strcmp(names[i], base)) return i;
    assert_true(name_count < FILES_MAX);
    names[name_count] = strdup(base);
    return name_count++;
}

static struct op *note(enum kind kind, int file) {
    assert_true(op_count < OPS_MAX);
    ops[op_count] = (struct op){.kind = kind, .file = file};
    return &ops[op_count++];
}

ssize_t pwrite(int fd, const void *buf, size_t bytes, off_t offset) {
    const ssize_t done = syscall(SYS_pwrite64, fd, buf, bytes, offset);
    if (!recording || done < 0) return done;
    pthread_mutex_lock(&lock);
    struct op *op = note(WRITE, file_of(fd));
    op->offset = (uint64_t)offset;
    op->bytes = (uint64_t)done;
    op->data = malloc((size_t)done);
    memcpy(op->data, buf, (size_t)done);
    pthread_mutex_unlock(&lock);
    return done;
}

int fdatasync(int fd) {
    if (recording) {
        pthread_mutex_lock(&lock);
        note(FLUSH, file_of(fd));
        pthread_mutex_unlock(&lock);
    }
    return 0; /* the recording is what counts, not the drive */
}

static uint64_t random_state;
static uint32_t dice(uint32_t n) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((random_state >> 33) % n);
}

static void fill(char *record, uint32_t chunk, uint64_t update) {
    uint64_t x = chunk * 0x9E3779B97F4A7C15u + update + 1;
    for (int i = 0; i < RECORD_BYTES; i += 8) {
        x = x * 6364136223846793005u + 1442695040888963407u;
        memcpy(record + i, &x, 8);
    }
}

/* The checksums that commit n must name; 0 where virgin. */
static uint32_t expected[COMMITS_MAX][CHUNKS_MAX];

struct job {
    uint32_t chunks, commits, updates_per_commit;
    int sparse; /* an update leaves some chunks out, as a skipped step or a tier does */
};

/* Plays a run: updates, each writing chunks, and a commit after some of them. */
static void play(const char *folder, const struct job *job) {
    uint64_t sizes[CHUNKS_MAX];
    for (uint32_t c = 0; c < job->chunks; c++) sizes[c] = RECORD_BYTES;
    const struct sw_nvme_options options = {&folder, 1, "cut", sizes, job->chunks, 2, NULL};
    struct sw_nvme_store *store;
    struct sw_nvme_queue *queue;
    struct sw_journal *journal;
    struct sw_homes homes;
    assert_int_equal(sw_nvme_open(&store, &options), 0);
    assert_int_equal(
        sw_nvme_queue_open_on(&queue, store,
                              &(struct sw_nvme_queue_options){1, 4, RECORD_BYTES, NULL, 0, 0, 0},
                              &sw_nvme_threads_ops, NULL),
        0);
    assert_int_equal(sw_journal_open(&journal, folder, "cut", job->chunks, 1), 0);
    assert_int_equal(sw_homes_open(&homes, job->chunks, NULL), 0);
    char *record = aligned_alloc(RECORD_BYTES, RECORD_BYTES);
    recording = 1;
    uint64_t update = 0;
    for (uint64_t n = 1; n <= job->commits; n++) {
        for (uint32_t u = 0; u < job->updates_per_commit; u++, update++)
            for (uint32_t c = 0; c < job->chunks; c++) {
                if (job->sparse && dice(3) == 0) continue;
                const uint32_t home = sw_homes_next(&homes, c);
                fill(record, c, update);
                struct sw_nvme_req req = {.buf = record, .chunk = c, .home = home, .write = 1},
                                   *done;
                sw_homes_wrote(&homes, c, home, sw_crc32c(0, record, RECORD_BYTES));
                assert_int_equal(sw_nvme_submit(queue, &req), 0);
                assert_int_equal(sw_nvme_reap(queue, &done, 1, 1), 1);
                assert_int_equal(req.result, 0);
            }
        for (uint32_t c = 0; c < job->chunks; c++) sw_homes_newest(&homes, c, &expected[n][c]);
        struct sw_commit commit = {.step = n};
        assert_int_equal(sw_homes_commit(&homes, store, journal, &commit), 0);
        assert_int_equal(commit.number, n);
        note(COMMITTED, 0)->commit = n;
    }
    recording = 0;
    free(record);
    sw_homes_close(&homes);
    sw_journal_close(journal, 0);
    sw_nvme_queue_close(queue);
    sw_nvme_close(store, 0);
}

/* ---- the disk after a cut ---- */

struct disk {
    char *bytes[FILES_MAX];
    uint64_t length[FILES_MAX];
    char folder[512];
};

static void apply(struct disk *disk, const struct op *op, uint64_t bytes) {
    assert_true(op->offset + bytes <= disk->length[op->file]);
    memcpy(disk->bytes[op->file] + op->offset, op->data, bytes);
}

/* Writes the journal where it can be opened, and checks all that has to hold. */
static void check(const struct disk *disk, uint32_t chunks, uint64_t returned, int at,
                  uint64_t seed) {
    int journal = -1, state = -1;
    for (int i = 0; i < name_count; i++) *(strstr(names[i], ".commit") ? &journal : &state) = i;
    char path[600];
    snprintf(path, sizeof(path), "%s/cut.commit", disk->folder);
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_true(fd >= 0);
    if (journal >= 0)
        assert_int_equal(syscall(SYS_pwrite64, fd, disk->bytes[journal], disk->length[journal], 0),
                         disk->length[journal]);
    close(fd);
    struct sw_commit commit;
    const int found = sw_commit_read(disk->folder, "cut", &commit);
    const uint64_t number = found == 1 ? commit.number : 0;
    if (number != returned && number != returned + 1)
        fail_msg("cut after operation %d (seed %llu): commit %llu, and %llu had returned", at,
                 (unsigned long long)seed, (unsigned long long)number,
                 (unsigned long long)returned);
    for (uint32_t c = 0; found == 1 && c < chunks; c++) {
        const struct sw_commit_entry *e = &commit.entries[c];
        assert_int_equal(e->checksum, expected[number][c]);
        if (e->home == SW_HOME_VIRGIN) continue;
        const char *record = disk->bytes[state] + ((uint64_t)e->home * chunks + c) * RECORD_BYTES;
        if (sw_crc32c(0, record, RECORD_BYTES) != e->checksum)
            fail_msg("cut after operation %d (seed %llu): chunk %u of commit %llu is not whole", at,
                     (unsigned long long)seed, c, (unsigned long long)number);
    }
    if (found == 1) free(commit.entries);
}

/* The fate of the n-th unflushed write: 0 lost, 1 kept, 2 torn. */
typedef int (*fate)(uint64_t seed, int n);

static int fate_of_bits(uint64_t seed, int n) {
    return (seed >> n) & 1;
}
static int fate_at_random(uint64_t seed, int n) {
    uint64_t x = (seed + 1) * 0x9E3779B97F4A7C15u + (uint64_t)n * 0xBF58476D1CE4E5B9u;
    x ^= x >> 29;
    x *= 0x94D049BB133111EBu;
    return (int)((x >> 40) % 3);
}

/* Which writes among the first `at` operations were not flushed by then. */
static int unflushed(int at, int *out) {
    int count = 0;
    for (int i = 0; i < at; i++) {
        if (ops[i].kind != WRITE) continue;
        int safe = 0;
        for (int j = i + 1; j < at && !safe; j++)
            safe = ops[j].kind == FLUSH && ops[j].file == ops[i].file;
        if (!safe) out[count++] = i;
    }
    return count;
}

static void cut(struct disk *disk, int at, uint64_t seed, fate decide, uint32_t chunks) {
    static int open_writes[OPS_MAX];
    const int count = unflushed(at, open_writes);
    uint64_t returned = 0;
    for (int f = 0; f < name_count; f++) memset(disk->bytes[f], 0, disk->length[f]);
    for (int i = 0, n = 0; i < at; i++) {
        if (ops[i].kind == COMMITTED) returned = ops[i].commit;
        if (ops[i].kind != WRITE) continue;
        if (n < count && open_writes[n] == i) {
            const int what = decide(seed, n++);
            if (what == 1) apply(disk, &ops[i], ops[i].bytes);
            if (what == 2) apply(disk, &ops[i], ops[i].bytes / 512 / 2 * 512); /* by sectors */
        } else {
            apply(disk, &ops[i], ops[i].bytes);
        }
    }
    check(disk, chunks, returned, at, seed);
}

static void prepare(struct disk *disk, const char *folder) {
    snprintf(disk->folder, sizeof(disk->folder), "%s/cut", folder);
    assert_int_equal(mkdir(disk->folder, 0700), 0);
    for (int f = 0; f < name_count; f++) {
        char path[700];
        struct stat st;
        snprintf(path, sizeof(path), "%s/%s", folder, names[f]);
        assert_int_equal(stat(path, &st), 0);
        disk->length[f] = (uint64_t)st.st_size;
        disk->bytes[f] = malloc(disk->length[f]);
    }
}

static void forget(struct disk *disk) {
    for (int i = 0; i < op_count; i++) free(ops[i].data);
    for (int f = 0; f < name_count; f++) {
        free(names[f]);
        free(disk->bytes[f]);
    }
    op_count = name_count = 0;
}

static void every_subset_of_a_small_store(void **state) {
    (void)state;
    const struct job jobs[] = {{3, 4, 1, 0}, {2, 3, 2, 0}, {3, 3, 1, 1}, {1, 5, 2, 1}};
    for (size_t j = 0; j < sizeof(jobs) / sizeof(jobs[0]); j++) {
        const char *folder = folder_make();
        struct disk disk = {0};
        random_state = 17 + j;
        play(folder, &jobs[j]);
        prepare(&disk, folder);
        for (int at = 0; at <= op_count; at++) {
            static int open_writes[OPS_MAX];
            const int count = unflushed(at, open_writes);
            assert_true(count < 12);
            for (uint64_t subset = 0; subset < 1ull << count; subset++)
                cut(&disk, at, subset, fate_of_bits, jobs[j].chunks);
        }
        forget(&disk);
        folder_remove();
    }
}

static void samples_of_a_larger_store(void **state) {
    (void)state;
    const char *asked = getenv("POWER_CUTS");
    const uint64_t cuts = asked ? strtoull(asked, NULL, 10) : 1000;
    const struct job job = {48, 8, 2, 1};
    const char *folder = folder_make();
    struct disk disk = {0};
    random_state = 5;
    play(folder, &job);
    prepare(&disk, folder);
    for (uint64_t seed = 0; seed < cuts; seed++)
        cut(&disk,
            (int)(fate_at_random(seed, 1 << 20) + (int)(seed * 2654435761u % (unsigned)op_count)) %
                (op_count + 1),
            seed, fate_at_random, job.chunks);
    forget(&disk);
    folder_remove();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_subset_of_a_small_store),
        cmocka_unit_test(samples_of_a_larger_store),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
