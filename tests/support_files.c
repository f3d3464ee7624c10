/* tests/support_files.c - helpers of the unit tests that work on files. */
#include "tests/support_files.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <cmocka.h>
#include <dirent.h>
#include <ftw.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"

static char folder[256];
static char lines[1 << 16];
static size_t lines_length;

const char *folder_make(void) {
    mkdir("build", 0777);
    mkdir("build/tmp", 0777);
    strcpy(folder, "build/tmp/unit-XXXXXX");
    if (!mkdtemp(folder)) fail_msg("cannot make %s", folder);
    return folder;
}

static int remove_entry(const char *path, const struct stat *info, int type, struct FTW *ftw) {
    (void)info;
    (void)type;
    (void)ftw;
    return remove(path);
}

void folder_remove(void) {
    if (!getenv("KEEP")) nftw(folder, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

const char *in_folder(const char *name) {
    static char ring[8][512];
    static unsigned next;
    char *out = ring[next++ % 8];
    snprintf(out, sizeof(ring[0]), "%s/%s", folder, name);
    return out;
}

void file_write(const char *path, const void *data, size_t bytes) {
    FILE *file = fopen(path, "wbe");
    if (!file) fail_msg("cannot create %s", path);
    const size_t done = fwrite(data, 1, bytes, file);
    if (fclose(file) != 0 || done != bytes) fail_msg("cannot write %s", path);
}

void *file_read(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "rbe");
    if (!file) fail_msg("cannot open %s", path);
    fseek(file, 0, SEEK_END);
    *bytes = (size_t)ftell(file);
    rewind(file);
    char *data = calloc(1, *bytes + 1);
    assert_non_null(data);
    assert_int_equal(fread(data, 1, *bytes, file), *bytes);
    fclose(file);
    return data;
}

int file_exists(const char *path) {
    return access(path, F_OK) == 0;
}

void file_link(const char *target, const char *path) {
    char absolute[PATH_MAX];
    if (!realpath(target, absolute)) fail_msg("no %s", target);
    if (symlink(absolute, path) < 0) fail_msg("cannot link %s", path);
}

int file_count(void) {
    DIR *dir = opendir(folder);
    assert_non_null(dir);
    int count = -2; /* itself and its parent */
    while (readdir(dir)) count++;
    closedir(dir);
    return count;
}

static void collect(enum sw_log_level level, const char *line, void *ctx) {
    (void)ctx;
    static const char *const words[] = {"error: ", "warning: ", "info: "};
    const int room = (int)(sizeof(lines) - lines_length);
    const int used = snprintf(lines + lines_length, (size_t)room, "%s%s\n", words[level], line);
    if (used < room) lines_length += (size_t)used;
}

void log_catch(void) {
    lines_length = 0;
    lines[0] = 0;
    sw_log_set_sink(collect, NULL);
}

const char *log_text(void) {
    return lines;
}

void assert_reported(const char *part) {
    const char *found = strstr(lines, part);
    if (!found) fail_msg("no line with '%s' was reported, but: %s", part, lines);
    if (!strstr(lines, "error: ")) fail_msg("no error was reported, but: %s", lines);
}

int profile_setup(void **state) {
    (void)state;
    folder_make();
    setenv("SPILLWAY_PROFILE", in_folder("machine.json"), 1);
    log_catch();
    return 0;
}

int profile_teardown(void **state) {
    (void)state;
    folder_remove();
    return 0;
}
