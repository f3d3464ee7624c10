/* The identity of a run: what is written is what is read, whatever the run is, and a text of
 * another form is refused with the line that is not understood. */
#include "engine/identity.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <cmocka.h>
#include "nvme/commit.h"
#include "tests/support_files.h"

static struct sw_identity example(int i) {
    struct sw_identity id = {.model = {0x0123456789abcdefu, UINT64_MAX},
                             .params = 260032,
                             .units = 7,
                             .data = 1,
                             .order = i & 1 ? SW_ORDER_SEQUENTIAL : SW_ORDER_SHUFFLE,
                             .seed = UINT64_MAX,
                             .chunk_bytes = 8 << 20,
                             .master = i & 2 ? SW_MASTER_SPLIT : SW_MASTER_FP32,
                             .folders = 64,
                             .numerics = {.ranks = 6,
                                          .replicas = i & 1 ? 3 : 1,
                                          .micro_batch = 4,
                                          .accumulate = 5,
                                          .seq_len = 512,
                                          .dtype = i & 4 ? SW_FP32 : SW_BF16,
                                          .reduce_dtype = i & 8 ? SW_BF16 : SW_FP32,
                                          .grad_dtype = i & 4 ? SW_FP32 : SW_BF16,
                                          .moments = i & 8 ? SW_MOMENTS_8BIT : SW_MOMENTS_FP32,
                                          .head_slice = 128,
                                          .vocabulary_parts = 2}};
    sw_identity_write_key(&id, "a library 1.2, of 2 threads", i & 1);
    return id;
}

static void what_is_written_is_read(void **state) {
    (void)state;
    for (int i = 0; i < 16; i++) {
        const struct sw_identity id = example(i);
        struct sw_identity back;
        char text[SW_COMMIT_IDENTITY_BYTES];
        sw_identity_write(&id, text, sizeof(text));
        strcat(text, "stripes=2100,700\n"); /* more lines may follow */
        assert_int_equal(sw_identity_parse(&back, text, "here"), 0);
        assert_memory_equal(&back, &id, sizeof(id));
    }
}

static void another_form_is_refused_with_its_line(void **state) {
    (void)state;
    const struct {
        const char *old, *new, *line;
    } changes[] = {{"model=", "model=x", "'model'"},
                   {"shapes=", "forms=", "'shapes'"},
                   {"data=", "data=?", "'data'"},
                   {"shuffle", "any", "'rows'"},
                   {"--master fp32", "--master x", "'state'"},
                   {"64 folders", "folders", "'state'"},
                   {"ranks=6", "ranks=0", "'numerics'"},
                   {"dtype=bf16", "dtype=f8", "'numerics'"},
                   {"moments=fp32", "moments=4bit", "'numerics'"}};
    for (size_t i = 0; i < sizeof(changes) / sizeof(changes[0]); i++) {
        const struct sw_identity id = example(0);
        struct sw_identity back;
        char text[SW_COMMIT_IDENTITY_BYTES], changed[2 * SW_COMMIT_IDENTITY_BYTES];
        sw_identity_write(&id, text, sizeof(text));
        const char *at = strstr(text, changes[i].old);
        assert_non_null(at);
        memcpy(changed, text, (size_t)(at - text));
        strcpy(changed + (at - text), changes[i].new);
        strcat(changed, at + strlen(changes[i].old));
        log_catch();
        assert_int_equal(sw_identity_parse(&back, changed, "the folder"), -EINVAL);
        assert_reported("the folder");
        assert_reported(changes[i].line);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_written_is_read),
        cmocka_unit_test(another_form_is_refused_with_its_line),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
