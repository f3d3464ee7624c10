/* A safetensors file is believed only when its header agrees with itself and with the file. Each
 * lie is made here on purpose and must be refused with words that name it; a file cut anywhere is
 * called truncated; what is written reads back bit for bit. */
#include "engine/safetensors.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "tests/support_files.h"

#define MODEL "models/stories260k/model.safetensors"

/* Writes length, header and `data_bytes` of data. */
static const char *make_file(uint64_t length, const char *header, size_t data_bytes) {
    static uint8_t bytes[1 << 16];
    const size_t text = strlen(header);
    assert_true(8 + text + data_bytes < sizeof(bytes));
    for (int i = 0; i < 8; i++) bytes[i] = (uint8_t)(length >> 8 * i);
    memcpy(bytes + 8, header, text);
    for (size_t i = 0; i < data_bytes; i++) bytes[8 + text + i] = (uint8_t)(i * 7 + 1);
    const char *path = in_folder("file.safetensors");
    file_write(path, bytes, 8 + text + data_bytes);
    return path;
}

static void refuse(const char *path, const char *part) {
    struct sw_safetensors file;
    log_catch();
    if (sw_safetensors_open(&file, path) == 0) fail_msg("accepted, but should say '%s'", part);
    assert_reported(part);
    assert_reported(path);
}

static void an_honest_file_opens(void **state) {
    (void)state;
    folder_make();
    const char *header = "{\"__metadata__\":{\"format\":\"pt\"},"
                         "\"b\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[4,28]},"
                         "\"a\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,4]},"
                         "\"none\":{\"dtype\":\"F16\",\"shape\":[0,9],\"data_offsets\":[28,28]},"
                         "\"scalar\":{\"dtype\":\"F16\",\"shape\":[],\"data_offsets\":[28,30]}}   ";
    struct sw_safetensors file;
    log_catch();
    assert_int_equal(sw_safetensors_open(&file, make_file(strlen(header), header, 30)), 0);
    assert_string_equal(log_text(), "");
    assert_int_equal(file.tensor_count, 4);
    assert_string_equal(file.tensors[0].name, "a");
    assert_string_equal(file.tensors[1].name, "b");
    assert_int_equal(file.tensors[1].dims, 2);
    assert_int_equal(file.tensors[1].shape[1], 3);
    assert_int_equal(file.tensors[1].count, 6);
    assert_int_equal(file.tensors[2].count, 0);
    assert_int_equal(file.tensors[3].count, 1);
    sw_safetensors_close(&file);
    folder_remove();
}

#define T(dtype, shape, offsets)                                                                   \
    "{\"t\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}}"
#define PAIR(first, second)                                                                        \
    "{\"t\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":" first "},"                         \
    "\"u\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":" second "}}"

static void a_header_that_lies_is_refused(void **state) {
    (void)state;
    static const struct {
        const char *header;
        size_t data_bytes;
        const char *part;
    } lies[] = {
        {T("F32", "[4]", "[0,12]"), 12, "contradicts itself"},
        {T("BF16", "[4]", "[0,16]"), 16, "need 8 bytes, data_offsets span 16"},
        {T("F32", "[4]", "[16,0]"), 16, "data_offsets"},
        {T("F32", "[4]", "[0]"), 16, "data_offsets"},
        {T("F32", "[4]", "[-16,0]"), 16, "data_offsets"},
        {T("F32", "[4]", "\"x\""), 16, "data_offsets"},
        {T("F32", "[-4]", "[0,16]"), 16, "whole number"},
        {T("F32", "[1.5]", "[0,6]"), 6, "whole number"},
        {T("F32", "4", "[0,16]"), 16, "'shape'"},
        {T("F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4, "8 dimensions"},
        {T("F32", "[4294967296,4294967296]", "[0,0]"), 0, "more elements"},
        {T("F32", "[4611686018427387904,4]", "[0,0]"), 0, "more elements"},
        {T("I64", "[2]", "[0,16]"), 16, "dtype I64"},
        {T("", "[2]", "[0,16]"), 16, "dtype"},
        {"{\"t\":{\"shape\":[4],\"data_offsets\":[0,16]}}", 16, "'dtype'"},
        {"{\"t\":7}", 0, "not an object"},
        {"{\"__metadata__\":7}", 0, "__metadata__"},
        {"[1]", 0, "not a JSON object"},
        {"{\"t\":", 0, "not valid"},
        {"", 0, "not valid"},
        {"{\"a\":\xff}", 0, "not valid"},
        {PAIR("[0,16]", "[0,16]"), 16, "overlaps"},
        {PAIR("[0,16]", "[12,28]"), 28, "overlaps"},
        {PAIR("[0,16]", "[20,36]"), 36, "hole"},
        {T("F32", "[4]", "[4,20]"), 20, "hole"},
        {T("F32", "[4]", "[0,16]"), 15, "truncated"},
        {T("F32", "[4]", "[0,16]"), 17, "follow the last tensor"},
        {T("F32", "[4]", "[9223372036854775791,9223372036854775807]"), 16, "hole"},
        {T("F32", "[4]", "[0,99999999999999999999]"), 16, "not valid"},
        {"{\"t\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
         "\"t\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
         8, "duplicate"},
    };
    folder_make();
    for (size_t i = 0; i < sizeof(lies) / sizeof(lies[0]); i++)
        refuse(make_file(strlen(lies[i].header), lies[i].header, lies[i].data_bytes), lies[i].part);
    folder_remove();
}

static void a_lie_about_the_length_is_refused(void **state) {
    (void)state;
    folder_make();
    const char *header = T("F32", "[4]", "[0,16]");
    const uint64_t length = strlen(header);
    refuse(make_file(length - 1, header, 16), "not valid");
    refuse(make_file(length + 17, header, 16), "truncated");
    refuse(make_file(100000001, header, 16), "limit is 100000000");
    refuse(make_file(UINT64_MAX, header, 16), "limit is 100000000");
    refuse(make_file(0, header, 16), "not valid");
    folder_remove();
}

static void a_file_cut_anywhere_is_named_as_truncated(void **state) {
    (void)state;
    folder_make();
    size_t bytes;
    uint8_t *whole = file_read(MODEL, &bytes);
    const size_t header_end = 8 + (size_t)(whole[0] | whole[1] << 8);
    const char *path = in_folder("cut.safetensors");
    const size_t near[] = {0, 1, 7, 8, 9, header_end - 1, header_end, header_end + 1, bytes - 1};
    for (size_t i = 0; i < sizeof(near) / sizeof(near[0]); i++) {
        file_write(path, whole, near[i]);
        refuse(path, "truncated");
    }
    for (size_t cut = 0; cut < bytes; cut += 8111) {
        file_write(path, whole, cut);
        refuse(path, "truncated");
    }
    free(whole);
    folder_remove();
}

static void a_missing_file_and_a_folder_are_refused(void **state) {
    (void)state;
    folder_make();
    refuse(in_folder("nothing"), "No such file");
    refuse("build/tmp", "not a regular file");
    folder_remove();
}

/* The value of a half as IEEE 754 defines it, by ldexp instead of by bits. */
static double half_value(unsigned bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double size = exponent == 31 ? INFINITY
                        : exponent     ? ldexp(1024 + fraction, exponent - 25)
                                       : ldexp(fraction, -24);
    return bits & 0x8000 ? -size : size;
}

static void every_half_reads_exactly(void **state) {
    (void)state;
    folder_make();
    const char *header =
        "{\"t\":{\"dtype\":\"F16\",\"shape\":[65536],\"data_offsets\":[0,131072]}}";
    static uint16_t bytes[65536 + 64];
    uint8_t *start = (uint8_t *)bytes;
    const size_t length = strlen(header); /* odd or even: data need not be aligned */
    memset(start, 0, 8);
    start[0] = (uint8_t)length;
    memcpy(start + 8, header, length);
    for (unsigned i = 0; i < 65536; i++) {
        const uint16_t half = (uint16_t)i;
        memcpy(start + 8 + length + 2 * i, &half, 2);
    }
    file_write(in_folder("half.safetensors"), bytes, 8 + length + 131072);
    struct sw_safetensors file;
    assert_int_equal(sw_safetensors_open(&file, in_folder("half.safetensors")), 0);
    static float out[65536];
    sw_safetensors_read(&file, &file.tensors[0], 0, 65536, out);
    for (unsigned i = 0; i < 65536; i++) {
        if ((i >> 10 & 31) == 31 && (i & 1023)) {
            if (!isnan(out[i])) fail_msg("half %04x is not a NaN", i);
        } else if (sw_f32_bits(out[i]) != sw_f32_bits((float)half_value(i))) {
            fail_msg("half %04x reads as %a", i, (double)out[i]);
        }
    }
    sw_safetensors_close(&file);
    folder_remove();
}

static void what_is_written_reads_back(void **state) {
    (void)state;
    folder_make();
    const struct sw_safetensors_entry entries[] = {
        {"a\"\\\n", 3, 5}, {"v", 7, 0}, {"long.name", 1, 1}};
    float values[23], back[23];
    for (int i = 0; i < 23; i++) values[i] = ldexpf((float)(i - 11), i - 40);
    values[3] = NAN;
    struct sw_safetensors_writer writer;
    const char *path = in_folder("w.safetensors");
    assert_int_equal(sw_safetensors_create(&writer, path, entries, 3, SW_FP32, NULL), 0);
    assert_int_equal(sw_safetensors_write(&writer, values, 4 * 10), 0);
    assert_int_equal(sw_safetensors_write(&writer, values + 10, 4 * 13), 0);
    assert_int_equal(sw_safetensors_finish(&writer), 0);
    struct sw_safetensors file;
    assert_int_equal(sw_safetensors_open(&file, path), 0);
    assert_int_equal(file.data_first % 8, 0);
    uint64_t most = 64;
    for (int i = 0; i < 3; i++) {
        most += sw_safetensors_entry_bytes(entries[i].name);
        assert_string_equal(file.tensors[i].name, entries[i].name);
        assert_int_equal(file.tensors[i].dims, entries[i].cols ? 2 : 1);
    }
    assert_true(file.data_first - 8 <= most);
    sw_safetensors_read(&file, &file.tensors[0], 0, 15, back);
    sw_safetensors_read(&file, &file.tensors[1], 0, 3, back + 15);
    sw_safetensors_read(&file, &file.tensors[1], 3, 4, back + 18);
    sw_safetensors_read(&file, &file.tensors[2], 0, 1, back + 22);
    assert_memory_equal(back, values, sizeof(values));
    sw_safetensors_close(&file);
    folder_remove();
}

static void pieces_may_come_in_any_order(void **state) {
    (void)state;
    folder_make();
    const struct sw_safetensors_entry entries[] = {{"a", 3, 5}, {"b", 8, 0}};
    float values[23], back[23];
    for (int i = 0; i < 23; i++) values[i] = (float)i;
    struct sw_safetensors_writer writer;
    const char *path = in_folder("w.safetensors");
    assert_int_equal(sw_safetensors_create(&writer, path, entries, 2, SW_FP32, NULL), 0);
    const int borders[] = {15, 23, 0, 7, 7, 15};
    for (int i = 0; i < 6; i += 2)
        assert_int_equal(sw_safetensors_write_at(&writer, 4 * (uint64_t)borders[i],
                                                 values + borders[i],
                                                 4 * (uint64_t)(borders[i + 1] - borders[i])),
                         0);
    assert_int_equal(sw_safetensors_finish(&writer), 0);
    struct sw_safetensors file;
    assert_int_equal(sw_safetensors_open(&file, path), 0);
    sw_safetensors_read(&file, &file.tensors[0], 0, 15, back);
    sw_safetensors_read(&file, &file.tensors[1], 0, 8, back + 15);
    assert_memory_equal(back, values, sizeof(values));
    sw_safetensors_close(&file);
    folder_remove();
}

static void an_aborted_file_is_gone(void **state) {
    (void)state;
    folder_make();
    const struct sw_safetensors_entry entry = {"a", 3, 5};
    struct sw_safetensors_writer writer;
    const char *path = in_folder("w.safetensors");
    assert_int_equal(sw_safetensors_create(&writer, path, &entry, 1, SW_BF16, NULL), 0);
    assert_int_equal(sw_safetensors_write(&writer, "abcd", 4), 0);
    sw_safetensors_abort(&writer);
    assert_false(file_exists(path));
    folder_remove();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_honest_file_opens),
        cmocka_unit_test(a_header_that_lies_is_refused),
        cmocka_unit_test(a_lie_about_the_length_is_refused),
        cmocka_unit_test(a_file_cut_anywhere_is_named_as_truncated),
        cmocka_unit_test(a_missing_file_and_a_folder_are_refused),
        cmocka_unit_test(every_half_reads_exactly),
        cmocka_unit_test(what_is_written_reads_back),
        cmocka_unit_test(pieces_may_come_in_any_order),
        cmocka_unit_test(an_aborted_file_is_gone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
