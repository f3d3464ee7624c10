/* Rows, their order and their files. The order must be a permutation of each epoch that seed and
 * epoch determine alone, so that a run cut anywhere goes on with the same rows; bad files are
 * named. */
#include "engine/data.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "tests/support_files.h"

#define TRAIN "data/tinyshakespeare/train.bin"

/* A file of n uint16 tokens i % vocab. */
static const char *make_tokens(const char *name, uint64_t n, uint32_t vocab) {
    uint16_t *tokens = malloc(2 * n + 2);
    assert_non_null(tokens);
    for (uint64_t i = 0; i < n; i++) tokens[i] = (uint16_t)(i % vocab);
    const char *path = in_folder(name);
    file_write(path, tokens, 2 * n);
    free(tokens);
    return path;
}

static void refuse_files(const char *path, const char *mask, const char *documents, uint32_t vocab,
                         uint32_t seq_len, const char *part) {
    struct sw_data data;
    log_catch();
    if (sw_data_open(&data, path, mask, documents, vocab, seq_len, SW_ORDER_SHUFFLE, 0) == 0)
        fail_msg("accepted, but should say '%s'", part);
    assert_reported(part);
}

static void refuse(const char *path, const char *mask, uint32_t vocab, uint32_t seq_len,
                   const char *part) {
    refuse_files(path, mask, NULL, vocab, seq_len, part);
}

static struct sw_data order_of(uint64_t rows, uint64_t seed) {
    return (struct sw_data){.rows = rows, .order = SW_ORDER_SHUFFLE, .seed = seed};
}

static void every_epoch_is_a_permutation(void **state) {
    (void)state;
    static uint8_t seen[2048];
    for (uint64_t rows = 1; rows <= 2000; rows++) {
        const struct sw_data data = order_of(rows, rows * 31);
        const uint64_t epoch = rows % 5;
        memset(seen, 0, sizeof(seen));
        for (uint64_t i = 0; i < rows; i++) {
            const uint64_t row = sw_data_row(&data, epoch * rows + i);
            if (row >= rows || seen[row]++) fail_msg("%d rows: row %d again", (int)rows, (int)row);
        }
    }
}

/* How many of 1000 positions have the same row in both orders: 1 is expected of independent ones,
 * more than 10 has a chance below 1e-7. */
static int matches(const struct sw_data *a, uint64_t first_a, const struct sw_data *b,
                   uint64_t first_b) {
    int same = 0;
    for (uint64_t i = 0; i < 1000; i++)
        same += sw_data_row(a, first_a + i) == sw_data_row(b, first_b + i);
    return same;
}

static void seeds_and_epochs_differ(void **state) {
    (void)state;
    const struct sw_data a = order_of(1000, 0), b = order_of(1000, 1), again = order_of(1000, 0);
    assert_int_equal(matches(&a, 0, &again, 0), 1000);
    assert_true(matches(&a, 0, &b, 0) <= 10);
    assert_true(matches(&a, 0, &a, 1000) <= 10);
    assert_true(matches(&a, 1000, &b, 0) <= 10);
    struct sw_data file_order = a;
    file_order.order = SW_ORDER_SEQUENTIAL;
    assert_true(matches(&a, 0, &file_order, 0) <= 10);
    for (uint64_t i = 0; i < 2500; i++) assert_int_equal(sw_data_row(&file_order, i), i % 1000);
}

/* Chi-squared over 16 x 16 cells of (position, row): 225 degrees of freedom, so mean 225 and
 * deviation 21; 350 is six deviations away. A weak shuffle that keeps neighbours together is far
 * beyond. */
static void the_shuffle_is_even(void **state) {
    (void)state;
    enum { ROWS = 25600, CELLS = 16 };
    static uint32_t cells[CELLS][CELLS];
    memset(cells, 0, sizeof(cells));
    const struct sw_data data = order_of(ROWS, 5);
    int neighbours = 0;
    uint64_t last = 0;
    for (uint64_t i = 0; i < ROWS; i++) {
        const uint64_t row = sw_data_row(&data, i);
        cells[i * CELLS / ROWS][row * CELLS / ROWS]++;
        neighbours += row == last + 1;
        last = row;
    }
    double sum = 0;
    for (int i = 0; i < CELLS; i++)
        for (int k = 0; k < CELLS; k++)
            sum += (cells[i][k] - 100.0) * (cells[i][k] - 100.0) / 100.0;
    if (sum > 350) fail_msg("chi-squared %.0f", sum);
    assert_true(neighbours < 12);
}

static void a_run_cut_anywhere_has_the_same_rows(void **state) {
    (void)state;
    enum { ROWS = 37, POSITIONS = 100 }; /* into the third epoch */
    uint64_t whole[POSITIONS];
    const struct sw_data data = order_of(ROWS, 9);
    for (uint64_t i = 0; i < POSITIONS; i++) whole[i] = sw_data_row(&data, i);
    for (uint64_t cut = 0; cut < POSITIONS; cut++) {
        const struct sw_data resumed = order_of(ROWS, 9);
        for (uint64_t i = cut; i < POSITIONS; i++)
            assert_int_equal(sw_data_row(&resumed, i), whole[i]);
    }
}

static void tokens_make_rows(void **state) {
    (void)state;
    static const struct {
        uint64_t tokens, rows;
    } cases[] = {{9, 1}, {10, 1}, {16, 1}, {17, 2}, {24, 2}, {25, 3}, {1001, 125}};
    folder_make();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct sw_data data;
        const char *path = make_tokens("t.bin", cases[i].tokens, 100);
        assert_int_equal(sw_data_open(&data, path, NULL, NULL, 100, 8, SW_ORDER_SEQUENTIAL, 0), 0);
        assert_int_equal(data.rows, cases[i].rows);
        int32_t inputs[8], targets[8];
        uint8_t mask[8];
        uint32_t starts[8];
        memset(starts, 0x55, sizeof(starts));
        for (uint64_t row = 0; row < data.rows; row++) {
            sw_data_fill(&data, row, inputs, targets, mask, starts);
            for (uint64_t k = 0; k < 8; k++) {
                assert_int_equal(inputs[k], (row * 8 + k) % 100);
                assert_int_equal(targets[k], (row * 8 + k + 1) % 100);
                assert_int_equal(mask[k], 1);
                assert_int_equal(starts[k], 0);
            }
        }
        sw_data_close(&data);
    }
    refuse(make_tokens("t.bin", 8, 100), NULL, 100, 8, "too few");
    folder_remove();
}

static void the_mask_is_that_of_the_target(void **state) {
    (void)state;
    folder_make();
    uint8_t bytes[17] = {0};
    bytes[0] = bytes[8] = bytes[11] = 1;
    file_write(in_folder("mask"), bytes, sizeof(bytes));
    struct sw_data data;
    assert_int_equal(sw_data_open(&data, make_tokens("t.bin", 17, 50), in_folder("mask"), NULL, 50,
                                  8, SW_ORDER_SEQUENTIAL, 0),
                     0);
    int32_t inputs[8], targets[8];
    uint8_t mask[8];
    sw_data_fill(&data, 0, inputs, targets, mask, NULL);
    assert_memory_equal(mask, "\0\0\0\0\0\0\0\1", 8);
    sw_data_fill(&data, 1, inputs, targets, mask, NULL);
    assert_memory_equal(mask, "\0\0\1\0\0\0\0\0", 8);
    sw_data_close(&data);
    folder_remove();
}

static void documents_begin_inside_rows(void **state) {
    (void)state;
    static const uint64_t offsets[] = {3, 8, 9, 15, 17, 23};
    static const uint8_t masks[3][8] = {
        {1, 1, 0, 1, 1, 1, 1, 0}, {0, 1, 1, 1, 1, 1, 0, 1}, {0, 1, 1, 1, 1, 1, 0, 1}};
    static const uint32_t starts[3][8] = {
        {0, 0, 0, 3, 3, 3, 3, 3}, {0, 1, 1, 1, 1, 1, 1, 7}, {0, 1, 1, 1, 1, 1, 1, 7}};
    struct sw_data data;
    folder_make();
    file_write(in_folder("documents"), offsets, sizeof(offsets));
    const char *tokens = make_tokens("t.bin", 25, 50);
    uint8_t own[25];
    memset(own, 1, sizeof(own));
    own[9] = own[10] = 0; /* the first token of a document, and another one */
    file_write(in_folder("mask"), own, sizeof(own));
    for (int masked = 0; masked < 2; masked++) {
        assert_int_equal(sw_data_open(&data, tokens, masked ? in_folder("mask") : NULL,
                                      in_folder("documents"), 50, 8, SW_ORDER_SEQUENTIAL, 0),
                         0);
        for (uint64_t row = 0; row < 3; row++) {
            int32_t inputs[8], targets[8];
            uint8_t mask[8], want[8];
            uint32_t got[8];
            uint64_t counting = 0;
            memcpy(want, masks[row], sizeof(want));
            if (masked && row == 1) want[1] = 0;
            sw_data_fill(&data, row, inputs, targets, mask, got);
            assert_memory_equal(got, starts[row], sizeof(got));
            assert_memory_equal(mask, want, sizeof(mask));
            for (int i = 0; i < 8; i++) counting += want[i];
            assert_int_equal(sw_data_counting(&data, row), counting);
            sw_data_fill(&data, row, inputs, targets, mask, NULL);
            assert_memory_equal(mask, want, sizeof(mask));
        }
        sw_data_close(&data);
    }
    folder_remove();
}

/* Whether the file names the first token's document changes nothing but the hash. */
static void the_first_document_may_be_left_out(void **state) {
    (void)state;
    static const uint64_t offsets[] = {0, 12};
    folder_make();
    const char *tokens = make_tokens("t.bin", 17, 50), *documents = in_folder("documents");
    uint8_t masks[2][16];
    uint32_t starts[2][16];
    for (int from = 0; from < 2; from++) {
        struct sw_data data;
        int32_t inputs[16], targets[16];
        file_write(documents, offsets + from, sizeof(offsets) - sizeof(offsets[0]) * (size_t)from);
        assert_int_equal(
            sw_data_open(&data, tokens, NULL, documents, 50, 16, SW_ORDER_SEQUENTIAL, 0), 0);
        sw_data_fill(&data, 0, inputs, targets, masks[from], starts[from]);
        sw_data_close(&data);
    }
    assert_memory_equal(masks[0], masks[1], sizeof(masks[0]));
    assert_memory_equal(starts[0], starts[1], sizeof(starts[0]));
    folder_remove();
}

static void bad_documents_are_named(void **state) {
    (void)state;
    static const struct {
        uint64_t offsets[4];
        size_t bytes;
        const char *part;
    } cases[] = {
        {{0, 30, 30, 40}, 32, "entry 2 is 30, the one before it 30: offsets must be strictly asc"},
        {{5, 30, 20, 40}, 32, "entry 2 is 20, the one before it 30"},
        {{5, 30, 99, 100}, 32, "entry 3 is 100, "},
        {{5, 101, 7, 100}, 32, "has 100 tokens"},
        {{5, 30, 99, 100}, 31, "odd length: 31 bytes"},
        {{0}, 4, "odd length"},
        {{0}, 0, "is empty"},
    };
    folder_make();
    const char *tokens = make_tokens("t.bin", 100, 50), *documents = in_folder("documents");
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        file_write(documents, cases[i].offsets, cases[i].bytes);
        refuse_files(tokens, NULL, documents, 50, 8, cases[i].part);
    }
    refuse_files(tokens, NULL, in_folder("none"), 50, 8, "No such file");
    uint64_t all[100];
    for (uint64_t i = 0; i < 100; i++) all[i] = i;
    file_write(documents, all, sizeof(all));
    refuse_files(tokens, NULL, documents, 50, 8, "begins a document: no prediction would count");
    uint8_t mask[100] = {0};
    mask[40] = 1;
    file_write(in_folder("mask"), mask, sizeof(mask));
    file_write(documents, all + 40, sizeof(all[0]));
    refuse_files(tokens, in_folder("mask"), documents, 50, 8, "or is masked: no prediction would");
    folder_remove();
}

static void large_vocabularies_have_four_bytes(void **state) {
    (void)state;
    folder_make();
    uint32_t tokens[20];
    for (uint32_t i = 0; i < 20; i++) tokens[i] = 70000 + i;
    file_write(in_folder("wide"), tokens, sizeof(tokens));
    struct sw_data data;
    assert_int_equal(
        sw_data_open(&data, in_folder("wide"), NULL, NULL, 70020, 4, SW_ORDER_SEQUENTIAL, 0), 0);
    int32_t inputs[4], targets[4];
    uint8_t mask[4];
    sw_data_fill(&data, 3, inputs, targets, mask, NULL);
    assert_int_equal(inputs[0], 70012);
    assert_int_equal(targets[3], 70016);
    sw_data_close(&data);
    refuse(in_folder("wide"), NULL, 70019, 4, "token 19 (byte 76) is 70019");
    file_write(in_folder("wide"), tokens, 78);
    refuse(in_folder("wide"), NULL, 70020, 4, "odd length");
    /* 65536 is the last vocabulary with two bytes. */
    assert_int_equal(
        sw_data_open(&data, make_tokens("t", 9, 9), NULL, NULL, 65536, 8, SW_ORDER_SHUFFLE, 0), 0);
    assert_int_equal(data.token_bytes, 2);
    sw_data_close(&data);
    folder_remove();
}

static void bad_files_are_named(void **state) {
    (void)state;
    folder_make();
    const char *tokens = make_tokens("t.bin", 300000, 100);
    refuse(tokens, NULL, 99, 8, "token 99 (byte 198) is 99");
    size_t bytes;
    uint16_t *all = file_read(tokens, &bytes);
    all[299999] = 511; /* the last one, far from the first piece that is checked */
    file_write(in_folder("last.bin"), all, bytes);
    refuse(in_folder("last.bin"), NULL, 511, 8, "token 299999 (byte 599998) is 511");
    file_write(in_folder("odd.bin"), all, 4001);
    refuse(in_folder("odd.bin"), NULL, 512, 8, "odd length");
    file_write(in_folder("empty.bin"), "", 0);
    refuse(in_folder("empty.bin"), NULL, 512, 8, "is empty");
    file_write(in_folder("one.bin"), "a", 1);
    refuse(in_folder("one.bin"), NULL, 512, 8, "odd length");
    refuse(in_folder("none.bin"), NULL, 512, 8, "No such file");
    refuse("data", NULL, 512, 8, "not a regular file");
    free(all);
    folder_remove();
}

static void bad_masks_are_named(void **state) {
    (void)state;
    folder_make();
    const char *tokens = make_tokens("t.bin", 100, 50);
    uint8_t bytes[101];
    memset(bytes, 1, sizeof(bytes));
    const char *mask = in_folder("mask");
    for (size_t length = 99; length <= 101; length += 2) {
        file_write(mask, bytes, length);
        refuse(tokens, mask, 50, 8, length == 99 ? "has 99 entries" : "has 101 entries");
    }
    bytes[77] = 3;
    file_write(mask, bytes, 100);
    refuse(tokens, mask, 50, 8, "entry 77 is 3");
    memset(bytes, 0, sizeof(bytes));
    file_write(mask, bytes, 100);
    refuse(tokens, mask, 50, 8, "zero everywhere");
    file_write(mask, bytes, 0);
    refuse(tokens, mask, 50, 8, "is empty");
    refuse(tokens, in_folder("no-mask"), 50, 8, "No such file");
    folder_remove();
}

static void the_fingerprint_tells_files_apart(void **state) {
    (void)state;
    folder_make();
    struct sw_data a, b;
    assert_int_equal(sw_data_open(&a, TRAIN, NULL, NULL, 512, 64, SW_ORDER_SHUFFLE, 0), 0);
    assert_int_equal(sw_data_open(&b, TRAIN, NULL, NULL, 512, 32, SW_ORDER_SEQUENTIAL, 7), 0);
    assert_true(sw_data_fingerprint(&a) == sw_data_fingerprint(&b));
    sw_data_close(&b);
    size_t bytes;
    uint16_t *tokens = file_read(TRAIN, &bytes);
    tokens[bytes / 4] ^= 1;
    file_write(in_folder("changed"), tokens, bytes);
    assert_int_equal(
        sw_data_open(&b, in_folder("changed"), NULL, NULL, 512, 64, SW_ORDER_SHUFFLE, 0), 0);
    assert_true(sw_data_fingerprint(&a) != sw_data_fingerprint(&b));
    sw_data_close(&b);
    free(tokens);
    /* Documents, other documents, nothing, and a mask. */
    static const uint64_t bits = 0x0101010001010001;
    file_write(in_folder("bits"), &bits, sizeof(bits));
    const char *few = make_tokens("few", 8, 50);
    uint64_t hashes[4];
    const uint64_t offsets[] = {3, 5};
    for (int i = 0; i < 2; i++) {
        file_write(in_folder("documents"), offsets + i, sizeof(offsets[0]));
        assert_int_equal(
            sw_data_open(&b, few, NULL, in_folder("documents"), 50, 4, SW_ORDER_SHUFFLE, 0), 0);
        hashes[i] = sw_data_fingerprint(&b);
        sw_data_close(&b);
        assert_int_equal(
            sw_data_open(&b, few, i ? in_folder("bits") : NULL, NULL, 50, 4, SW_ORDER_SHUFFLE, 0),
            0);
        hashes[2 + i] = sw_data_fingerprint(&b);
        sw_data_close(&b);
    }
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < i; k++) assert_true(hashes[i] != hashes[k]);
    sw_data_close(&a);
    folder_remove();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_epoch_is_a_permutation),
        cmocka_unit_test(seeds_and_epochs_differ),
        cmocka_unit_test(the_shuffle_is_even),
        cmocka_unit_test(a_run_cut_anywhere_has_the_same_rows),
        cmocka_unit_test(tokens_make_rows),
        cmocka_unit_test(the_mask_is_that_of_the_target),
        cmocka_unit_test(documents_begin_inside_rows),
        cmocka_unit_test(the_first_document_may_be_left_out),
        cmocka_unit_test(bad_documents_are_named),
        cmocka_unit_test(large_vocabularies_have_four_bytes),
        cmocka_unit_test(bad_files_are_named),
        cmocka_unit_test(bad_masks_are_named),
        cmocka_unit_test(the_fingerprint_tells_files_apart),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
