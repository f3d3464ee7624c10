/* Measuring drives: what is checked is every byte that was written, nothing stays behind, and each
 * pattern moves what it says. No rate is compared with anything. */
#include "nvme/measure.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>
#include "tests/support_files.h"

#define BYTES (4ull << 20)

static void *buf;

static int setup(void **state) {
    (void)state;
    folder_make();
    log_catch();
    return posix_memalign(&buf, 4096, SW_NVME_MEASURE_BUF_MIN_BYTES);
}

static int teardown(void **state) {
    (void)state;
    free(buf);
    folder_remove();
    return 0;
}

static struct sw_nvme_measure_options options_of(const char *const *folders, uint32_t count) {
    return (struct sw_nvme_measure_options){.folders = folders,
                                            .folder_count = count,
                                            .name = "scratch",
                                            .bytes = BYTES,
                                            .buf = buf,
                                            .buf_bytes = SW_NVME_MEASURE_BUF_MIN_BYTES};
}

/* Of this thread group, as the kernel counts them: what went to the drive. */
static uint64_t counted(const char *key) {
    FILE *f = fopen("/proc/self/io", "re");
    char line[128], format[64];
    unsigned long long value = 0;
    snprintf(format, sizeof(format), "%s: %%llu", key);
    while (f && fgets(line, sizeof(line), f))
        if (sscanf(line, format, &value) == 1) break;
    if (f) fclose(f);
    return value;
}

static void what_was_written_is_read(void **state) {
    (void)state;
    char one[256], two[256];
    snprintf(one, sizeof(one), "%s", in_folder("one"));
    snprintf(two, sizeof(two), "%s", in_folder("two"));
    assert_int_equal(mkdir(one, 0777), 0);
    assert_int_equal(mkdir(two, 0777), 0);
    const char *const folders[] = {one, two};
    for (uint32_t count = 1; count <= 2; count++) {
        const struct sw_nvme_measure_options o = options_of(folders, count);
        struct sw_nvme_measure *m;
        assert_int_equal(sw_nvme_measure_open(&m, &o), 0);
        assert_int_equal(sw_nvme_measure_bytes(m), count * BYTES);
        assert_int_equal(sw_nvme_measure_fill(m), 0);
        assert_int_equal(sw_nvme_measure_check(m), 0);
        sw_nvme_measure_close(m);
    }
}

static void one_wrong_byte_is_found(void **state) {
    (void)state;
    const char *const folders[] = {in_folder("")};
    struct sw_nvme_measure_options o = options_of(folders, 1);
    o.keep = 1;
    struct sw_nvme_measure *m;
    assert_int_equal(sw_nvme_measure_open(&m, &o), 0);
    const int fd = open(in_folder("scratch.0.state"), O_RDWR);
    assert_true(fd >= 0);
    static const off_t places[] = {0, 4095, 1234567, BYTES - 1};
    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
        unsigned char byte;
        char where[64];
        log_catch();
        assert_int_equal(sw_nvme_measure_fill(m), 0);
        assert_int_equal(sw_nvme_measure_check(m), 0);
        assert_int_equal(pread(fd, &byte, 1, places[i]), 1);
        byte ^= 4;
        assert_int_equal(pwrite(fd, &byte, 1, places[i]), 1);
        assert_int_equal(fsync(fd), 0);
        assert_int_equal(sw_nvme_measure_check(m), -EIO);
        snprintf(where, sizeof(where), "offset %llu", (unsigned long long)places[i] / 8 * 8);
        assert_reported(where);
        assert_reported("scratch.0.state");
    }
    close(fd);
    sw_nvme_measure_close(m);
}

/* The bytes of the fill before are right in every place, and stale. */
static void stale_bytes_are_found(void **state) {
    (void)state;
    const char *const folders[] = {in_folder("")};
    struct sw_nvme_measure_options o = options_of(folders, 1);
    o.keep = 1;
    static char page[2][4096];
    struct sw_nvme_measure *m;
    assert_int_equal(sw_nvme_measure_open(&m, &o), 0);
    const int fd = open(in_folder("scratch.0.state"), O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(sw_nvme_measure_fill(m), 0);
    assert_int_equal(pread(fd, page[0], 4096, 8192), 4096);
    assert_int_equal(sw_nvme_measure_fill(m), 0);
    assert_int_equal(pread(fd, page[1], 4096, 8192), 4096);
    assert_memory_not_equal(page[0], page[1], 4096);
    assert_int_equal(pwrite(fd, page[0], 4096, 8192), 4096);
    assert_int_equal(fsync(fd), 0);
    assert_int_equal(sw_nvme_measure_check(m), -EIO);
    close(fd);
    sw_nvme_measure_close(m);
}

static void patterns_move_what_they_say(void **state) {
    (void)state;
    const char *const folders[] = {in_folder("")};
    const struct sw_nvme_measure_options o = options_of(folders, 1);
    struct sw_nvme_measure *m;
    assert_int_equal(sw_nvme_measure_open(&m, &o), 0);
    assert_int_equal(sw_nvme_measure_fill(m), 0);
    for (int p = SW_NVME_READ; p <= SW_NVME_MIXED; p++) {
        struct sw_nvme_rates rates;
        const uint64_t read = counted("read_bytes"), written = counted("write_bytes");
        assert_int_equal(sw_nvme_measure_run(m, (enum sw_nvme_pattern)p, 65536, 4, 0.02, &rates),
                         0);
        const int reads = p != SW_NVME_WRITE, writes = p != SW_NVME_READ;
        assert_true((rates.read > 0) == reads && (rates.write > 0) == writes);
        assert_true(rates.seconds >= 0.02);
        if (!counted("write_bytes")) continue; /* a file system in memory */
        /* Both directions go on for the whole time, and nothing is counted that was not moved. */
        assert_true((counted("read_bytes") - read > 0) == reads);
        assert_true((counted("write_bytes") - written > 0) == writes);
        if (reads && !writes)
            assert_true(rates.read * rates.seconds <=
                        (double)(counted("read_bytes") - read) * 1.01);
    }
    sw_nvme_measure_close(m);
}

static void nothing_stays_behind(void **state) {
    (void)state;
    const char *const folders[] = {in_folder("")};
    struct sw_nvme_measure_options o = options_of(folders, 1);
    struct sw_nvme_measure *m;
    assert_int_equal(sw_nvme_measure_open(&m, &o), 0);
    assert_int_equal(file_count(), 0); /* whatever ends the process now */
    sw_nvme_measure_close(m);
    assert_int_equal(file_count(), 0);
    o.keep = 1;
    assert_int_equal(sw_nvme_measure_open(&m, &o), 0);
    sw_nvme_measure_close(m);
    struct stat st;
    assert_int_equal(stat(in_folder("scratch.0.state"), &st), 0);
    assert_int_equal(st.st_size, BYTES);
}

static int calls;
static int stop_at_ten(void) {
    return ++calls >= 10;
}

static void it_stops_when_asked(void **state) {
    (void)state;
    const char *const folders[] = {in_folder("")};
    struct sw_nvme_measure_options o = options_of(folders, 1);
    o.stopped = stop_at_ten;
    struct sw_nvme_measure *m;
    struct sw_nvme_rates rates;
    assert_int_equal(sw_nvme_measure_open(&m, &o), 0);
    calls = 0;
    assert_int_equal(sw_nvme_measure_run(m, SW_NVME_WRITE, 0, 0, 1e6, &rates), -EINTR);
    assert_int_equal(calls, 10);
    sw_nvme_measure_close(m);
    assert_string_equal(log_text(), "");
}

static void speed_is_measured_or_refused(void **state) {
    (void)state;
    uint64_t rate = 0;
    assert_int_equal(
        sw_nvme_measure_speed(in_folder(""), buf, SW_NVME_MEASURE_BUF_MIN_BYTES, 0.02, &rate), 0);
    assert_true(rate > 0);
    assert_int_equal(file_count(), 0);
    assert_int_equal(
        sw_nvme_measure_speed(in_folder("absent"), buf, SW_NVME_MEASURE_BUF_MIN_BYTES, 0.02, &rate),
        -ENOENT);
    assert_reported("absent");
}

int main(void) {
#define CASE(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        CASE(what_was_written_is_read),     CASE(one_wrong_byte_is_found),
        CASE(stale_bytes_are_found),        CASE(patterns_move_what_they_say),
        CASE(nothing_stays_behind),         CASE(it_stops_when_asked),
        CASE(speed_is_measured_or_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
