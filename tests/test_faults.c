/* Faults: a training loop over the library's own parts on a disk that misbehaves, beside a copy of
 * the state in memory that nobody disturbs.
 *
 * The parts are those of a run: a store with two homes per chunk, a reader and a writer queue, the
 * CPU Adam with the checksums in its pass, a commit every few steps. The records are small and so
 * are the blocks, so faults are many. Before Adam sees a record its bytes are compared with the
 * copy's: the checksum must find a difference where there is one, and nowhere else.
 * FAULTS=N: so many faults reach pending transfers; SEED=N: other draws. */
#include "nvme/homes.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <cmocka.h>
#include "base/crc32c.h"
#include "cpu_adam/adam.h"
#include "tests/support_nvme.h"

enum { PARTS = 12, ELEMENTS_MAX = 4000, SLOTS = 5, HANG_S = 120, NAME_BYTES = 128 };
#define NAME "faults"

/* FP32 records of 1 to 12 pages, with and without padding. */
static const uint64_t elements[PARTS] = {341, 1024, 2730, 100,  1700, 2048,
                                         777, 3000, 341,  1365, 512,  4000};

static const struct sw_adam_format formats[] = {
    {SW_MASTER_FP32, SW_MOMENTS_FP32, SW_FP32, SW_BF16},
    {SW_MASTER_SPLIT, SW_MOMENTS_8BIT, SW_BF16, SW_BF16},
};

struct setting {
    uint32_t folders, depth, block_bytes, commit_every;
    uint64_t seed;
    struct sw_adam_format format;
};

struct job {
    struct setting set;
    struct faulty_plan plans[2]; /* reads, writes */
    /* The copy: before and after the step at work, and at the last commit. */
    char *before[PARTS], *after[PARTS], *committed[PARTS];
    uint64_t step, committed_step;
    struct sw_nvme_store *store;
    struct sw_journal *journal;
    struct sw_homes homes;
    struct sw_nvme_queue *queues[2];
    char *slots[SLOTS];
    struct sw_nvme_req reqs[2][SLOTS];
    int virgin[SLOTS];
    uint32_t bad_chunk; /* of the last mismatch */
    uint64_t failed_steps, resumed, started_over;
};

static const struct sw_adam_variant *variant;
static uint64_t totals[FAULT_KINDS], fell_back, began_again, accepted;

/* ---- system calls that fail when asked: those of the commit; every transfer of a record goes
 * through the faulty disk. A sync that works is not done: nobody cuts the power here. ---- */

static const char *fail_call, *fail_suffix;
static int fail_error, fail_hits;

static int fails(const char *call, int fd) {
    if (!fail_call || strcmp(call, fail_call) != 0) return 0;
    char link[64], path[4096];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    const ssize_t n = readlink(link, path, sizeof(path) - 1);
    const size_t m = strlen(fail_suffix);
    if (n < (ssize_t)m || memcmp(path + n - m, fail_suffix, m) != 0) return 0;
    fail_hits++;
    errno = fail_error;
    return 1;
}

int fdatasync(int fd) {
    return fails("fdatasync", fd) ? -1 : 0;
}

ssize_t pwrite(int fd, const void *buf, size_t bytes, off_t offset) {
    if (fails("pwrite", fd)) {
        /* Half of it is on the disk all the same. */
        if (syscall(SYS_pwrite64, fd, buf, bytes / 2, offset) < 0) return -1;
        errno = fail_error;
        return -1;
    }
    return syscall(SYS_pwrite64, fd, buf, bytes, offset);
}

static void fail_at(const char *call, const char *suffix, int error) {
    fail_call = call;
    fail_suffix = suffix;
    fail_error = error;
    fail_hits = 0;
}

/* ---- the update, the same for the disk and for the copy ---- */

static uint64_t payload(const struct job *job, uint32_t c) {
    return sw_adam_record_bytes(&job->set.format, elements[c]);
}
static uint64_t padded(const struct job *job, uint32_t c) {
    return (payload(job, c) + PAGE - 1) / PAGE * PAGE;
}

static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 31) * 0x9E3779B97F4A7C15u;
    return x ^ x >> 29;
}
static float value(uint64_t key, uint64_t i) {
    return (float)(mix(key + i * 0xD1B54A32D192ED03u) >> 40) * 0x1p-23f - 1;
}

static struct sw_adam_chunk chunk_of(const struct job *job, uint32_t c, void *record,
                                     struct sw_adam_range *range) {
    *range = (struct sw_adam_range){elements[c], 1};
    struct sw_adam_chunk chunk = {.format = job->set.format,
                                  .count = elements[c],
                                  .first = (uint64_t)c * 4096,
                                  .ranges = range,
                                  .range_count = 1};
    sw_adam_record_map(&chunk, record);
    return chunk;
}

/* A chunk before the first step. */
static void begin_record(const struct job *job, uint32_t c, void *record) {
    float masters[ELEMENTS_MAX];
    struct sw_adam_range range;
    const struct sw_adam_chunk chunk = chunk_of(job, c, record, &range);
    for (uint64_t i = 0; i < elements[c]; i++) masters[i] = value(mix(c + 1), i);
    memset(record, 0, padded(job, c));
    sw_adam_start(&chunk, 0, elements[c], masters);
}

static void update(const struct job *job, uint32_t c, uint64_t step, void *record,
                   struct sw_adam_extra *extra) {
    static float wide[ELEMENTS_MAX];
    static sw_bf16 narrow[ELEMENTS_MAX], weights[ELEMENTS_MAX];
    const struct sw_adam_hyper hyper = {1e-2, 0.9, 0.95, 1e-8, 0.1, 0};
    struct sw_adam_range range;
    struct sw_adam_step scalars;
    struct sw_adam_chunk chunk = chunk_of(job, c, record, &range);
    for (uint64_t i = 0; i < elements[c]; i++) {
        wide[i] = value(mix(step * PARTS + c) + job->set.seed, i);
        narrow[i] = sw_bf16_from_f32(wide[i]);
    }
    chunk.grad = chunk.format.grad == SW_FP32 ? (const void *)wide : narrow;
    chunk.weight = weights;
    sw_adam_prepare(&scalars, &hyper, step, 1.0f);
    sw_adam_update(variant, &scalars, &chunk, 1, extra);
}

/* ---- the disk's side ---- */

static void open_disk(struct job *job, const struct sw_commit *from) {
    uint64_t bytes[PARTS];
    for (uint32_t c = 0; c < PARTS; c++) bytes[c] = padded(job, c);
    const struct sw_nvme_options o = {three_folders, job->set.folders, NAME, bytes, PARTS, 2, NULL};
    if (sw_nvme_open(&job->store, &o)) fail_msg("open: %s", logged);
    assert_int_equal(sw_journal_open(&job->journal, dir_a, NAME, PARTS, !from), 0);
    assert_int_equal(sw_homes_open(&job->homes, PARTS, from), 0);
    for (int write = 0; write < 2; write++) {
        job->plans[write].store = job->store;
        assert_int_equal(open_faulty(&job->queues[write], job->store, write, job->set.depth,
                                     job->set.block_bytes, &job->plans[write]),
                         0);
    }
}

static void close_disk(struct job *job, int unlink_files) {
    for (int write = 0; write < 2; write++) sw_nvme_queue_close(job->queues[write]);
    sw_homes_close(&job->homes);
    sw_journal_close(job->journal, unlink_files);
    sw_nvme_close(job->store, unlink_files);
}

static void begin_copy(struct job *job) {
    for (uint32_t c = 0; c < PARTS; c++) {
        begin_record(job, c, job->before[c]);
        memcpy(job->committed[c], job->before[c], padded(job, c));
    }
    job->step = job->committed_step = 0;
}

static void job_open(struct job *job, const struct setting *set) {
    *job = (struct job){.set = *set};
    for (uint32_t c = 0; c < PARTS; c++) {
        job->before[c] = pages(padded(job, c));
        job->after[c] = pages(padded(job, c));
        job->committed[c] = pages(padded(job, c));
    }
    for (int i = 0; i < SLOTS; i++) job->slots[i] = pages(12ull * ELEMENTS_MAX + PAGE);
    for (int write = 0; write < 2; write++)
        job->plans[write].seed = mix(set->seed * 2 + (uint64_t)write + 1);
    begin_copy(job);
    open_disk(job, NULL);
}

/* What the quota counts: completions out of order are too many to be among them. */
static uint64_t reached(const struct job *job) {
    uint64_t sum = 0;
    for (int write = 0; write < 2; write++)
        sum += job->plans[write].faults - job->plans[write].reached[FAULT_REORDERED];
    return sum;
}

static void job_close(struct job *job) {
    close_disk(job, 1);
    for (int kind = 0; kind < FAULT_KINDS; kind++)
        totals[kind] += job->plans[0].reached[kind] + job->plans[1].reached[kind];
    fell_back += job->resumed;
    began_again += job->started_over;
    for (uint32_t c = 0; c < PARTS; c++) {
        free(job->before[c]);
        free(job->after[c]);
        free(job->committed[c]);
    }
    for (int i = 0; i < SLOTS; i++) free(job->slots[i]);
}

static void harmless(struct faulty_plan *plan, uint32_t one_in, uint32_t reorder) {
    plan->short_one_in = plan->transient_one_in = plan->late_one_in = one_in;
    plan->refused_one_in = 2 * one_in;
    plan->reorder = reorder;
}
static void harmful(struct faulty_plan *plan, uint32_t one_in) {
    plan->eio_one_in = plan->torn_one_in = plan->lost_one_in = plan->stale_one_in =
        plan->flip_one_in = one_in;
}

/* ---- a step ---- */

static int submit(struct job *job, int write, uint32_t c, uint32_t home) {
    struct sw_nvme_req *req = &job->reqs[write][c % SLOTS];
    *req = (struct sw_nvme_req){
        .buf = job->slots[c % SLOTS], .chunk = c, .home = home, .write = (uint32_t)write};
    return sw_nvme_submit(job->queues[write], req);
}

static int is_wrong(const struct job *job, uint32_t c, const void *record) {
    return memcmp(record, job->before[c], payload(job, c)) != 0;
}

/* A record that was read, with its checksum: 0, or -EBADMSG. Wrong bytes, and no others, have a
 * wrong checksum. */
static int judge(struct job *job, uint32_t c, int wrong, uint32_t have) {
    uint32_t want;
    assert_int_not_equal(sw_homes_newest(&job->homes, c, &want), SW_HOME_VIRGIN);
    if (wrong != (have != want))
        fail_msg("chunk %u after step %llu: %s, CRC-32C %08x, expected %08x", c,
                 (unsigned long long)job->step, wrong ? "wrong bytes" : "right bytes", have, want);
    if (wrong) job->bad_chunk = c;
    return wrong ? -EBADMSG : 0;
}

static int update_and_write(struct job *job, uint32_t c) {
    char *slot = job->slots[c % SLOTS];
    struct sw_adam_extra extra = {.checksum = 1};
    const int wrong = is_wrong(job, c, slot);
    update(job, c, job->step + 1, slot, &extra);
    if (job->virgin[c % SLOTS])
        assert_false(wrong);
    else if (judge(job, c, wrong, extra.checksum_before))
        return -EBADMSG;
    memcpy(job->after[c], job->before[c], padded(job, c));
    update(job, c, job->step + 1, job->after[c], NULL);
    assert_memory_equal(slot, job->after[c], payload(job, c));
    const uint32_t home = sw_homes_next(&job->homes, c);
    sw_homes_wrote(&job->homes, c, home, extra.checksum_after);
    return submit(job, 1, c, home);
}

static int start_read(struct job *job, uint32_t c) {
    uint32_t checksum;
    const uint32_t home = sw_homes_newest(&job->homes, c, &checksum);
    job->virgin[c % SLOTS] = home == SW_HOME_VIRGIN;
    if (home != SW_HOME_VIRGIN) return submit(job, 0, c, home);
    begin_record(job, c, job->slots[c % SLOTS]);
    return 0;
}

/* Takes what has come back, at least `want`; the count, or the first error. */
static int reap(struct job *job, int write, uint32_t want) {
    struct sw_nvme_req *done[SLOTS];
    const int n = sw_nvme_reap(job->queues[write], done, want, write ? SLOTS : 1);
    for (int i = 0; i < n; i++)
        if (done[i]->result) return done[i]->result;
    return n;
}

/* Reads, updates and writes every chunk, several under way. 0: the step is accepted. */
static int train(struct job *job) {
    uint32_t asked = 0, got = 0, back = 0;
    int ret = 0;
    while (ret == 0 && back < PARTS) {
        while (ret == 0 && asked < PARTS && asked - back < SLOTS) ret = start_read(job, asked++);
        const int stalled = got == asked;
        if (ret == 0 && !stalled) {
            if (!job->virgin[got % SLOTS]) ret = reap(job, 0, 1);
            if (ret >= 0) ret = update_and_write(job, got++);
        }
        if (ret == 0) ret = reap(job, 1, stalled);
        if (ret > 0) {
            back += (uint32_t)ret;
            ret = 0;
        }
    }
    if (ret) return ret;
    job->step++;
    accepted++;
    for (uint32_t c = 0; c < PARTS; c++) {
        char *old = job->before[c];
        job->before[c] = job->after[c];
        job->after[c] = old;
    }
    return 0;
}

static void remember(struct job *job) {
    job->committed_step = job->step;
    for (uint32_t c = 0; c < PARTS; c++) memcpy(job->committed[c], job->before[c], padded(job, c));
}

static int commit(struct job *job) {
    struct sw_commit record = {.step = job->step, .updates = job->step};
    const int ret = sw_homes_commit(&job->homes, job->store, job->journal, &record);
    if (ret == 0) remember(job);
    return ret;
}

/* One step, with the commit when it is due. */
static int step(struct job *job) {
    forget_log();
    alarm(HANG_S);
    const int ret = train(job);
    if (ret || job->step % job->set.commit_every) return ret;
    assert_int_equal(commit(job), 0);
    return 0;
}

/* ---- after a step that failed ---- */

/* What the disk itself holds in the committed home, past every faulty part. */
static int disk_is_damaged(const struct job *job, uint32_t c) {
    uint32_t checksum;
    uint64_t offset;
    const uint32_t home = sw_homes_newest(&job->homes, c, &checksum);
    const char *path = sw_nvme_where(job->store, c, home, &offset);
    const int fd = open(path, O_RDONLY);
    assert_true(fd >= 0);
    char *record = pages(padded(job, c));
    assert_int_equal(pread(fd, record, padded(job, c), (off_t)offset), padded(job, c));
    const int damaged = memcmp(record, job->committed[c], payload(job, c)) != 0;
    close(fd);
    free(record);
    return damaged;
}

/* Opens the store at its last commit, which is the one that the copy remembers. */
static void reopen(struct job *job) {
    struct sw_commit last;
    close_disk(job, 0);
    const int found = sw_commit_read(dir_a, NAME, &last);
    assert_int_equal(found, job->committed_step > 0);
    if (found) assert_int_equal(last.step, job->committed_step);
    open_disk(job, found ? &last : NULL);
    if (found) free(last.entries);
    job->step = job->committed_step;
    for (uint32_t c = 0; c < PARTS; c++) memcpy(job->before[c], job->committed[c], padded(job, c));
}

/* Reads every record, as a run does that goes on from a commit. */
static int restore(struct job *job) {
    int ret = 0;
    for (uint32_t c = 0; c < PARTS && ret == 0; c++) {
        uint32_t checksum;
        const uint32_t home = sw_homes_newest(&job->homes, c, &checksum);
        if (home == SW_HOME_VIRGIN) continue;
        char *slot = job->slots[0];
        ret = one(job->queues[0], 0, slot, c, home);
        if (ret == 0)
            ret = judge(job, c, is_wrong(job, c, slot), sw_crc32c(0, slot, payload(job, c)));
    }
    return ret;
}

/* Every error has been told with its place and its cause. */
static void assert_told(int error) {
    if (error == -EBADMSG) return; /* found by the caller, who knows the chunk */
    assert_int_equal(error, -EIO);
    assert_true(log_errors >= 1);
    assert_logged("chunk ");
    assert_logged(".state'");
    assert_logged("bytes at offset ");
    assert_logged(strerror(EIO));
}

/* Goes on from the last commit. Where that is damaged itself, every attempt tells it; then the
 * training starts over on a fresh store. */
static void recover(struct job *job, int error) {
    job->failed_steps++;
    for (int attempts = 0; error; attempts++) {
        assert_told(error);
        assert_true(attempts < 1000);
        forget_log();
        alarm(HANG_S);
        reopen(job);
        error = restore(job);
        if (error != -EBADMSG || !disk_is_damaged(job, job->bad_chunk)) continue;
        close_disk(job, 0);
        sw_commit_remove(dir_a, NAME);
        begin_copy(job);
        open_disk(job, NULL);
        job->started_over++;
        return;
    }
    job->resumed += job->committed_step > 0;
}

/* The whole training in memory, from the beginning. */
static void assert_as_never_disturbed(struct job *job) {
    for (uint32_t c = 0; c < PARTS; c++) {
        begin_record(job, c, job->after[c]);
        for (uint64_t s = 1; s <= job->step; s++) update(job, c, s, job->after[c], NULL);
        assert_memory_equal(job->before[c], job->after[c], payload(job, c));
    }
    assert_int_equal(restore(job), 0);
}

/* ---- the tests ---- */

static uint64_t number(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

enum { SETTINGS = 16 };
static struct setting setting(uint32_t index, uint64_t round) {
    return (struct setting){.folders = index % 2 ? 3 : 1,
                            .depth = 1 + index / 2,
                            .block_bytes = (1 + index % 3) * PAGE,
                            .commit_every = 1 + index % 4,
                            .seed = number("SEED", 1) * 1000 + round * SETTINGS + index,
                            .format = formats[index / 2 % 2]};
}

static void harmless_faults_change_nothing_at_all(void **state) {
    (void)state;
    const uint64_t quota = number("FAULTS", 2000) / 2 / SETTINGS + 1;
    for (uint32_t i = 0; i < SETTINGS; i++) {
        const struct setting set = setting(i, 0);
        struct job job;
        job_open(&job, &set);
        for (int write = 0; write < 2; write++) harmless(&job.plans[write], 6, i / 4 % 2);
        while (reached(&job) < quota || job.step < 4) {
            assert_int_equal(step(&job), 0);
            assert_int_equal(log_errors + log_warnings, 0);
        }
        assert_as_never_disturbed(&job);
        assert_int_equal(log_errors + log_warnings, 0);
        job_close(&job);
    }
}

static void train_with_all_kinds(const struct setting *set, uint64_t quota) {
    struct job job;
    job_open(&job, set);
    for (int write = 0; write < 2; write++) {
        harmless(&job.plans[write], 80, (uint32_t)(set->seed / 3 % 2));
        harmful(&job.plans[write], 300);
    }
    while (reached(&job) < quota) {
        const int error = step(&job);
        if (error) recover(&job, error);
    }
    /* The disk is repaired; what it damaged before is still found. */
    for (int write = 0; write < 2; write++) harmful(&job.plans[write], 0);
    for (int clean = 0; clean < 2;) {
        const uint64_t before = job.committed_step;
        const int error = step(&job);
        if (error) recover(&job, error);
        clean = error ? 0 : clean + (job.committed_step > before);
    }
    assert_as_never_disturbed(&job);
    job_close(&job);
}

static void no_damaged_byte_is_trained_on_and_the_last_commit_goes_on(void **state) {
    (void)state;
    const uint64_t quota = number("FAULTS", 2000) / 2 / SETTINGS + 1;
    int missing = 1;
    for (uint64_t round = 0; missing && round < 100; round++) {
        for (uint32_t i = 0; i < SETTINGS; i++) {
            const struct setting set = setting(i, round);
            train_with_all_kinds(&set, quota);
        }
        missing = fell_back < 5 || began_again < 5;
        for (int kind = 0; kind < FAULT_KINDS; kind++) missing |= totals[kind] < 5;
    }
    assert_false(missing);
}

static void arm(struct job *job, enum fault kind, uint32_t one_in) {
    if (kind == FAULT_TORN) job->plans[1].torn_one_in = one_in;
    if (kind == FAULT_LOST) job->plans[1].lost_one_in = one_in;
    if (kind == FAULT_FLIP_WRITE) job->plans[1].flip_one_in = one_in;
    if (kind == FAULT_STALE) job->plans[0].stale_one_in = one_in;
    if (kind == FAULT_FLIP_READ) job->plans[0].flip_one_in = one_in;
}

/* A step on one chunk after the other, the chosen one's write being damaged. */
static void write_one_by_one(struct job *job, enum fault kind, uint32_t chosen) {
    job->step++;
    for (uint32_t c = 0; c < PARTS; c++) {
        struct sw_adam_extra extra = {.checksum = 1};
        update(job, c, job->step, job->before[c], &extra);
        memcpy(job->slots[0], job->before[c], padded(job, c));
        const uint32_t home = sw_homes_next(&job->homes, c);
        sw_homes_wrote(&job->homes, c, home, extra.checksum_after);
        arm(job, kind, c == chosen);
        assert_int_equal(one(job->queues[1], 1, job->slots[0], c, home), 0);
    }
    arm(job, kind, 0);
}

/* Reads a chunk and demands that it is found damaged, or that it is not. */
static void read_one(struct job *job, uint32_t c, const struct faulty_plan *damaged_by) {
    uint32_t checksum;
    uint64_t offset;
    const uint32_t home = sw_homes_newest(&job->homes, c, &checksum);
    assert_int_equal(one(job->queues[0], 0, job->slots[0], c, home), 0);
    const int found = judge(job, c, is_wrong(job, c, job->slots[0]),
                            sw_crc32c(0, job->slots[0], payload(job, c)));
    assert_int_equal(found, damaged_by ? -EBADMSG : 0);
    if (!damaged_by) return;
    const char *path = sw_nvme_where(job->store, c, home, &offset);
    assert_string_equal(path, job->store->files[damaged_by->damaged_file].path);
    assert_true(damaged_by->damaged_offset == offset);
}

/* One transfer is damaged, with and without a commit and a resume before the next read: that read
 * finds it, there and nowhere else. */
static void damage_once(enum fault kind, int committed) {
    const struct setting set = {.folders = 3,
                                .depth = 2,
                                .block_bytes = 16 * PAGE,
                                .commit_every = 1,
                                .seed = 7,
                                .format = formats[0]};
    const int of_writes = kind != FAULT_STALE && kind != FAULT_FLIP_READ;
    for (uint32_t chosen = 5; chosen < PARTS; chosen += 3) {
        struct job job;
        job_open(&job, &set);
        assert_int_equal(step(&job), 0);
        write_one_by_one(&job, kind, of_writes ? chosen : PARTS);
        if (committed) {
            assert_int_equal(commit(&job), 0);
            reopen(&job);
        }
        for (uint32_t c = 0; c < PARTS; c++) {
            arm(&job, kind, !of_writes && c == chosen);
            read_one(&job, c, c == chosen ? &job.plans[of_writes] : NULL);
        }
        assert_int_equal(job.plans[of_writes].reached[kind], 1);
        job_close(&job);
    }
}

static void damage_is_found_at_the_next_read_where_it_was_done(void **state) {
    (void)state;
    static const enum fault kinds[] = {FAULT_TORN, FAULT_LOST, FAULT_FLIP_WRITE, FAULT_STALE,
                                       FAULT_FLIP_READ};
    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
        for (int committed = 0; committed < 2; committed++) damage_once(kinds[i], committed);
}

static void a_drive_that_stays_busy_is_given_up(void **state) {
    (void)state;
    for (int refused = 0; refused < 2; refused++) {
        const struct setting set = {.folders = 1,
                                    .depth = 1,
                                    .block_bytes = 16 * PAGE,
                                    .commit_every = 1,
                                    .seed = 3,
                                    .format = formats[0]};
        struct job job;
        job_open(&job, &set);
        assert_int_equal(step(&job), 0);
        job.plans[0].refused_one_in = (uint32_t)refused;
        job.plans[0].forever = -EBUSY;
        const uint64_t before = job.plans[0].started;
        const int error = one(job.queues[0], 0, job.slots[0], 4, 0);
        assert_true(error == -EBUSY || (refused && error == -EAGAIN));
        assert_int_equal(job.plans[0].started - before, SW_NVME_RETRIES_MAX + 1);
        assert_logged("read of chunk 4");
        assert_logged(strerror(-error));
        job_close(&job);
    }
}

/* A record whose own sync failed may be found whole: then it counts. */
static void may_be_committed(struct job *job) {
    struct sw_commit last;
    assert_int_equal(sw_commit_read(dir_a, NAME, &last), 1);
    free(last.entries);
    if (last.step == job->step) remember(job);
}

/* A commit that fails at any of its calls; the process goes on for another step, then crashes. */
static void a_failed_commit_leaves_the_one_before_whole(void **state) {
    (void)state;
    static const struct {
        const char *call, *suffix;
        int error;
    } stages[] = {{"fdatasync", ".0.state", EIO},
                  {"fdatasync", ".1.state", EIO},
                  {"fdatasync", ".2.state", ENOSPC},
                  {"fdatasync", ".commit", EIO}, /* the one after the record's bytes */
                  {"pwrite", ".commit", EIO},
                  {"pwrite", ".commit", ENOSPC}};
    for (size_t i = 0; i < sizeof(stages) / sizeof(stages[0]); i++) {
        const struct setting set = {.folders = 3,
                                    .depth = 4,
                                    .block_bytes = 2 * PAGE,
                                    .commit_every = 100,
                                    .seed = i,
                                    .format = formats[0]};
        struct job job;
        job_open(&job, &set);
        assert_int_equal(step(&job), 0);
        assert_int_equal(step(&job), 0);
        assert_int_equal(commit(&job), 0);
        for (int tries = 0; tries < 2; tries++) {
            assert_int_equal(step(&job), 0);
            forget_log();
            fail_at(stages[i].call, stages[i].suffix, stages[i].error);
            assert_int_equal(commit(&job), -stages[i].error);
            assert_int_equal(fail_hits, 1);
            fail_call = NULL;
            assert_int_equal(log_errors, 1);
            assert_logged(stages[i].suffix);
            assert_logged(strerror(stages[i].error));
        }
        if (i == 3) may_be_committed(&job);
        reopen(&job);
        assert_int_equal(restore(&job), 0);
        while (job.step < 6) assert_int_equal(step(&job), 0);
        assert_as_never_disturbed(&job);
        job_close(&job);
    }
}

static int tell_counts(void **state) {
    uint64_t sum = 0;
    for (int kind = 0; kind < FAULT_KINDS; kind++)
        if (kind != FAULT_REORDERED) sum += totals[kind];
    printf("faults that reached a pending transfer: %llu besides those reordered",
           (unsigned long long)sum);
    for (int kind = 0; kind < FAULT_KINDS; kind++)
        printf("%s %s %llu", kind ? "," : ";", fault_names[kind], (unsigned long long)totals[kind]);
    printf("\n%llu steps accepted, %llu times on from a commit, %llu times from the beginning; "
           "SEED=%llu\n",
           (unsigned long long)accepted, (unsigned long long)fell_back,
           (unsigned long long)began_again, (unsigned long long)number("SEED", 1));
    return remove_folders(state);
}

static int prepare(void **state) {
    return sw_adam_pick(&variant) ? -1 : make_folders(state);
}

#define T(name) cmocka_unit_test_setup(name, setup)
int main(void) {
    const struct CMUnitTest tests[] = {
        T(harmless_faults_change_nothing_at_all),
        T(no_damaged_byte_is_trained_on_and_the_last_commit_goes_on),
        T(damage_is_found_at_the_next_read_where_it_was_done),
        T(a_drive_that_stays_busy_is_given_up),
        T(a_failed_commit_leaves_the_one_before_whole),
    };
    return cmocka_run_group_tests(tests, prepare, tell_counts);
}
