/* The commit record: found again whatever lies beside it, believed only when whole. */
#include "nvme/commit.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>
#include "base/crc32c.h"
#include "tests/support_files.h"

enum { CHUNKS = 700, PLACE = 12288 }; /* 4096 + 8 * 700, rounded up to pages */

static struct sw_commit_entry entries[CHUNKS];

static struct sw_commit commit_of(uint64_t step) {
    struct sw_commit commit = {.step = step,
                               .updates = step - 1,
                               .skips_in_a_row = step % 3,
                               .owner_pid = 4711,
                               .run = 0xfedcba9876543210u + step,
                               .process = 3,
                               .processes = 5,
                               .chunk_count = CHUNKS,
                               .entries = entries};
    snprintf(commit.identity, sizeof(commit.identity), "model=m\ndata=d%d\n", 1);
    snprintf(commit.note, sizeof(commit.note), "step %llu", (unsigned long long)step);
    for (uint32_t c = 0; c < CHUNKS; c++)
        entries[c] = (struct sw_commit_entry){c * 2654435761u + (uint32_t)step, (c + step) % 3};
    return commit;
}

static void append(const char *folder, uint64_t first, uint64_t last, int fresh) {
    struct sw_journal *journal;
    assert_int_equal(sw_journal_open(&journal, folder, "t", CHUNKS, fresh), 0);
    for (uint64_t step = first; step <= last; step++) {
        struct sw_commit commit = commit_of(step);
        assert_int_equal(sw_journal_append(journal, &commit), 0);
        assert_int_equal(commit.number, step);
    }
    sw_journal_close(journal, 0);
}

/* The step of the newest record, all of whose fields must be those of that step; 0: none. */
static uint64_t newest(const char *folder) {
    struct sw_commit got;
    const int found = sw_commit_read(folder, "t", &got);
    assert_true(found == 0 || found == 1);
    if (!found) return 0;
    const struct sw_commit want = commit_of(got.step);
    assert_int_equal(got.number, got.step);
    assert_int_equal(got.updates, want.updates);
    assert_int_equal(got.skips_in_a_row, want.skips_in_a_row);
    assert_int_equal(got.owner_pid, want.owner_pid);
    assert_int_equal(got.run, want.run);
    assert_int_equal(got.process, want.process);
    assert_int_equal(got.processes, want.processes);
    assert_int_equal(got.chunk_count, CHUNKS);
    assert_string_equal(got.identity, want.identity);
    assert_string_equal(got.note, want.note);
    assert_memory_equal(got.entries, entries, sizeof(entries));
    free(got.entries);
    return got.step;
}

static void a_record_is_read_back_whole(void **state) {
    (void)state;
    const char *folder = folder_make();
    assert_int_equal(newest(folder), 0);
    append(folder, 1, 1, 0);
    assert_int_equal(newest(folder), 1);
    append(folder, 2, 9, 0); /* numbers go on in a journal that is opened again */
    assert_int_equal(newest(folder), 9);
    append(folder, 1, 1, 1); /* fresh: what was there counts no more */
    assert_int_equal(newest(folder), 1);
    folder_remove();
}

static void a_damaged_record_gives_way_to_the_one_before(void **state) {
    (void)state;
    const char *folder = folder_make();
    append(folder, 1, 6, 0);
    size_t bytes;
    char *whole = file_read(in_folder("t.commit"), &bytes);
    assert_int_equal(bytes, 2 * PLACE);
    const size_t record = 4096 + 8 * CHUNKS;
    for (size_t at = 0; at < record; at += at < 200 ? 1 : 61) {
        char *damaged = malloc(bytes);
        memcpy(damaged, whole, bytes);
        damaged[at] ^= 0x10; /* commit 6 lies in place 0 */
        file_write(in_folder("t.commit"), damaged, bytes);
        if (newest(folder) != 5) fail_msg("byte %zu of a record is not protected", at);
        damaged[PLACE + at] ^= 0x10;
        file_write(in_folder("t.commit"), damaged, bytes);
        if (newest(folder) != 0) fail_msg("two damaged records, byte %zu, were believed", at);
        free(damaged);
    }
    free(whole);
    folder_remove();
}

static void a_file_cut_anywhere_is_no_error(void **state) {
    (void)state;
    const char *folder = folder_make();
    append(folder, 1, 2, 0);
    for (off_t length = 2 * PLACE; length >= 0; length -= 509) {
        assert_int_equal(truncate(in_folder("t.commit"), length), 0);
        const uint64_t step = newest(folder);
        assert_true(step <= 2);
        if (length == 2 * PLACE) assert_int_equal(step, 2);
    }
    folder_remove();
}

/* As a program of that version would have written it: its checksum is right. */
static void set_version(char *place, uint32_t version) {
    const uint32_t none = 0;
    memcpy(place + 8, &version, sizeof(version));
    memcpy(place + 12, &none, sizeof(none));
    const uint32_t crc = sw_crc32c(0, place, 4096 + 8 * CHUNKS);
    memcpy(place + 12, &crc, sizeof(crc));
}

static void another_version_is_refused_by_name(void **state) {
    (void)state;
    const char *folder = folder_make();
    struct sw_commit commit;
    size_t bytes;
    append(folder, 1, 2, 0);
    char *whole = file_read(in_folder("t.commit"), &bytes);
    set_version(whole, 1);
    file_write(in_folder("t.commit"), whole, bytes);
    assert_int_equal(newest(folder), 1); /* the other place has a commit of this version */
    set_version(whole + PLACE, 3);
    file_write(in_folder("t.commit"), whole, bytes);
    log_catch();
    assert_int_equal(sw_commit_read(folder, "t", &commit), -EPROTONOSUPPORT);
    assert_non_null(strstr(log_text(), "t.commit' is of version 3 of the format, and this program "
                                       "reads version 2"));
    append(folder, 1, 1, 1); /* dropped */
    assert_int_equal(newest(folder), 1);
    free(whole);
    folder_remove();
}

static void foreign_files_are_not_believed(void **state) {
    (void)state;
    const char *folder = folder_make();
    static const char text[2 * PLACE] = "SWCOMMIT";
    file_write(in_folder("t.commit"), text, sizeof(text));
    assert_int_equal(newest(folder), 0);
    file_write(in_folder("t.commit"), "", 0);
    assert_int_equal(newest(folder), 0);
    log_catch();
    struct sw_commit commit;
    assert_int_equal(sw_commit_read("/nowhere", "t", &commit), 0); /* absent is no store */
    assert_string_equal(log_text(), "");
    folder_remove();
}

static void what_differs_is_named(void **state) {
    (void)state;
    int length = 0;
    const char *want = "model=a\ndata=b\nnumerics=c d=e\n";
    assert_null(sw_commit_differs(want, want, &length));
    const char *line = sw_commit_differs(want, "model=a\ndata=bb\nnumerics=c d=e\n", &length);
    assert_non_null(line);
    assert_int_equal(strncmp(line, "data", 4), 0);
    assert_int_equal(length, 4);
    line = sw_commit_differs(want, "model=a\nnumerics=c d=e\n", &length); /* a line is missing */
    assert_int_equal(strncmp(line, "data", 4), 0);
    assert_null(sw_commit_differs(want, "more=x\nnumerics=c d=e\ndata=b\nmodel=a\n", &length));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_record_is_read_back_whole),
        cmocka_unit_test(a_damaged_record_gives_way_to_the_one_before),
        cmocka_unit_test(a_file_cut_anywhere_is_no_error),
        cmocka_unit_test(another_version_is_refused_by_name),
        cmocka_unit_test(foreign_files_are_not_believed),
        cmocka_unit_test(what_differs_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
