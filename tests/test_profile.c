/* The machine profile: what was kept for a drive is found from every folder on it, whatever else
 * the file holds stays, and a damaged file counts as none and says so. */
#include "offload/profile.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <cmocka.h>
#include "tests/support_files.h"

static const struct sw_drive_profile known = {.block_bytes = 1 << 18,
                                              .depth = 24,
                                              .read_bytes_per_s = 2.5e9,
                                              .write_bytes_per_s = 1.25e9,
                                              .mixed_bytes_per_s = 3e9};

static void profile_is(const char *text) {
    file_write(in_folder("machine.json"), text, strlen(text));
}

static void found_is(const char *folder, const struct sw_drive_profile *want) {
    struct sw_drive_profile got;
    assert_int_equal(sw_profile_drive(folder, &got), 1);
    assert_int_equal(got.block_bytes, want->block_bytes);
    assert_int_equal(got.depth, want->depth);
    assert_true(got.read_bytes_per_s == want->read_bytes_per_s);
    assert_true(got.write_bytes_per_s == want->write_bytes_per_s);
    assert_true(got.mixed_bytes_per_s == want->mixed_bytes_per_s);
    assert_int_equal(strlen(got.measured), strlen("2026-01-31"));
    assert_string_equal(log_text(), "");
}

static void nothing_is_found(void) {
    struct sw_drive_profile got = {.depth = 77};
    assert_int_equal(sw_profile_drive(in_folder(""), &got), 0);
    assert_int_equal(got.depth, 77);
}

static void what_was_kept_is_found(void **state) {
    (void)state;
    nothing_is_found();
    assert_int_equal(sw_profile_keep(in_folder(""), &known), 0);
    found_is(in_folder(""), &known);
    assert_int_equal(file_count(), 1); /* nothing is left aside */
}

static void folders_of_a_drive_share_an_entry(void **state) {
    (void)state;
    char one[4096], two[4096];
    assert_int_equal(mkdir(in_folder("a b"), 0777), 0);
    assert_int_equal(sw_profile_keep(in_folder("a b"), &known), 0);
    found_is(in_folder(""), &known);
    struct sw_drive_profile later = known;
    later.depth = 3;
    assert_int_equal(sw_profile_keep(in_folder(""), &later), 0);
    found_is(in_folder("a b"), &later);
    assert_int_equal(sw_profile_identity(in_folder(""), one, sizeof(one)), 0);
    assert_int_equal(sw_profile_identity(in_folder("a b/.."), two, sizeof(two)), 0);
    assert_string_equal(one, two);
    char *text = file_read(in_folder("machine.json"), &(size_t){0});
    const char *entry = strstr(text, one);
    assert_non_null(entry);
    assert_null(strstr(entry + 1, one));
    free(text);
}

/* /dev/shm is a file system of its own wherever there is one. */
static void another_drive_is_another_entry(void **state) {
    (void)state;
    struct stat here, there;
    if (stat(in_folder(""), &here) || stat("/dev/shm", &there) || here.st_dev == there.st_dev) {
        print_message("/dev/shm is no file system of its own here\n");
        skip();
    }
    char drive[4096];
    assert_int_equal(sw_profile_keep(in_folder(""), &known), 0);
    struct sw_drive_profile got;
    assert_int_equal(sw_profile_drive("/dev/shm", &got), 0);
    struct sw_drive_profile other = known;
    other.block_bytes = 1 << 20;
    assert_int_equal(sw_profile_keep("/dev/shm", &other), 0);
    found_is("/dev/shm", &other);
    found_is(in_folder(""), &known);
    struct statvfs vfs;
    char size[32];
    assert_int_equal(statvfs("/dev/shm", &vfs), 0);
    snprintf(size, sizeof(size), " %llu", (unsigned long long)vfs.f_blocks * vfs.f_frsize);
    assert_int_equal(sw_profile_identity("/dev/shm", drive, sizeof(drive)), 0);
    assert_string_equal(drive + strlen(drive) - strlen(size), size);
}

static void what_is_unknown_stays(void **state) {
    (void)state;
    char drive[4096], text[8192];
    assert_int_equal(sw_profile_identity(in_folder(""), drive, sizeof(drive)), 0);
    snprintf(text, sizeof(text),
             "{\"schema\": 1, \"links\": [1, {\"a\": 2}], \"drives\": [{\"drive\": \"other\", "
             "\"x\": 5}, {\"drive\": \"%s\", \"nick\": \"fast\", \"depth\": 1}]}",
             drive);
    profile_is(text);
    assert_int_equal(sw_profile_keep(in_folder(""), &known), 0);
    found_is(in_folder(""), &known);
    char *now = file_read(in_folder("machine.json"), &(size_t){0});
    for (char *at = now; *at; at++)
        if (*at == '\n') *at = ' ';
    assert_non_null(strstr(now, "\"links\""));
    assert_non_null(strstr(now, "\"a\": 2"));
    assert_non_null(strstr(now, "\"x\": 5"));
    assert_non_null(strstr(now, "\"nick\": \"fast\""));
    free(now);
}

static void damage_is_warned_of_and_is_none(void **state) {
    (void)state;
    static const char *const damaged[] = {
        "",
        "{\"schema\": 1, \"drives\": [",
        "[]",
        "{\"schema\": \"1\", \"drives\": []}",
        "{\"schema\": 1, \"drives\": {}}",
        "{\"schema\": 0, \"drives\": []}",
        "{\"schema\": 2, \"drives\": []}",
    };
    for (size_t i = 0; i < sizeof(damaged) / sizeof(damaged[0]); i++) {
        profile_is(damaged[i]);
        log_catch();
        nothing_is_found();
        assert_non_null(strstr(log_text(), "machine.json"));
    }
}

static void damaged_entries_are_none(void **state) {
    (void)state;
    static const struct {
        const char *block, *depth, *rate;
    } bad[] = {{"262145", "8", "1e9"}, {"0", "8", "1e9"},    {"4294967296", "8", "1e9"},
               {"4096.5", "8", "1e9"}, {"4096", "0", "1e9"}, {"4096", "1000000", "1e9"},
               {"4096", "8", "-1"},    {"4096", "8", "\"\""}};
    char drive[4096], text[8192];
    assert_int_equal(sw_profile_identity(in_folder(""), drive, sizeof(drive)), 0);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        snprintf(text, sizeof(text),
                 "{\"schema\": 1, \"drives\": [{\"drive\": \"%s\", \"block_bytes\": %s, \"depth\": "
                 "%s, \"read_bytes_per_s\": 1e9, \"write_bytes_per_s\": 1e9, "
                 "\"mixed_bytes_per_s\": %s}]}",
                 drive, bad[i].block, bad[i].depth, bad[i].rate);
        profile_is(text);
        log_catch();
        nothing_is_found();
        assert_non_null(strstr(log_text(), "damaged"));
    }
}

static void damage_is_replaced_and_a_later_version_is_not(void **state) {
    (void)state;
    profile_is("{\"schema\": 1, ");
    assert_int_equal(sw_profile_keep(in_folder(""), &known), 0);
    log_catch();
    found_is(in_folder(""), &known);
    static const char later[] = "{\"schema\": 2, \"drives\": []}";
    profile_is(later);
    assert_int_equal(sw_profile_keep(in_folder(""), &known), -EPROTO);
    assert_reported("later version");
    char *now = file_read(in_folder("machine.json"), &(size_t){0});
    assert_string_equal(now, later);
    free(now);
}

static void the_path_follows_the_environment(void **state) {
    (void)state;
    char path[4096];
    sw_profile_path(path, sizeof(path));
    assert_string_equal(path, in_folder("machine.json"));
    setenv("XDG_CONFIG_HOME", "/x/y", 1);
    setenv("HOME", "/home/z", 1);
    sw_profile_path(path, sizeof(path));
    assert_string_equal(path, in_folder("machine.json"));
    unsetenv("SPILLWAY_PROFILE");
    sw_profile_path(path, sizeof(path));
    assert_string_equal(path, "/x/y/spillway/machine.json");
    unsetenv("XDG_CONFIG_HOME");
    sw_profile_path(path, sizeof(path));
    assert_string_equal(path, "/home/z/.config/spillway/machine.json");
    setenv("SPILLWAY_PROFILE", "", 1);
    sw_profile_path(path, sizeof(path));
    assert_string_equal(path, "");
    assert_int_equal(sw_profile_keep(in_folder(""), &known), 0);
    nothing_is_found();
    assert_int_equal(file_count(), 0);
}

static void missing_folders_are_made(void **state) {
    (void)state;
    setenv("SPILLWAY_PROFILE", in_folder("one/two/machine.json"), 1);
    assert_int_equal(sw_profile_keep(in_folder(""), &known), 0);
    found_is(in_folder(""), &known);
}

static void what_cannot_be_written_is_reported(void **state) {
    (void)state;
    file_write(in_folder("file"), "x", 1);
    setenv("SPILLWAY_PROFILE", in_folder("file/machine.json"), 1);
    assert_int_equal(sw_profile_keep(in_folder(""), &known), -ENOTDIR);
    assert_reported("file/machine.json");
    char drive[4096];
    assert_int_equal(sw_profile_identity(in_folder("absent"), drive, sizeof(drive)), -ENOENT);
    assert_reported("absent");
}

/* Objects are completed, all else is replaced, and drives stay. */
static void keys_are_merged(void **state) {
    (void)state;
    json_t *first = json_pack("{s:{s:i, s:i}, s:[i, i]}", "machine", "a", 1, "b", 2, "list", 1, 2);
    json_t *second = json_pack("{s:{s:i}, s:[i]}", "machine", "b", 3, "list", 4);
    assert_int_equal(sw_profile_merge(first), 0);
    assert_int_equal(sw_profile_keep(in_folder(""), &known), 0);
    assert_int_equal(sw_profile_merge(second), 0);
    found_is(in_folder(""), &known);
    json_t *got = json_load_file(in_folder("machine.json"), 0, NULL);
    json_t *want = json_pack("{s:{s:i, s:i}, s:[i]}", "machine", "a", 1, "b", 3, "list", 4);
    assert_true(json_equal(json_object_get(got, "machine"), json_object_get(want, "machine")));
    assert_true(json_equal(json_object_get(got, "list"), json_object_get(want, "list")));
    assert_int_equal(json_array_size(json_object_get(got, "drives")), 1);
    json_decref(got);
    json_decref(want);
    json_decref(second);
    /* A file of a later version stays. */
    profile_is("{\"schema\": 2}");
    assert_int_equal(sw_profile_merge(first), -EPROTO);
    assert_reported("later version");
    char *text = file_read(in_folder("machine.json"), &(size_t){0});
    assert_string_equal(text, "{\"schema\": 2}");
    free(text);
    json_decref(first);
}

int main(void) {
#define CASE(f) cmocka_unit_test_setup_teardown(f, profile_setup, profile_teardown)
    const struct CMUnitTest tests[] = {
        CASE(what_was_kept_is_found),
        CASE(folders_of_a_drive_share_an_entry),
        CASE(another_drive_is_another_entry),
        CASE(keys_are_merged),
        CASE(what_is_unknown_stays),
        CASE(damage_is_warned_of_and_is_none),
        CASE(damaged_entries_are_none),
        CASE(damage_is_replaced_and_a_later_version_is_not),
        CASE(the_path_follows_the_environment),
        CASE(missing_folders_are_made),
        CASE(what_cannot_be_written_is_reported),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
