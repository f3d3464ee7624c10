/* tests/support_files.h - what unit tests of files need: folders that vanish, small files, and the
 * lines that the code under test reported. Failures end the running test. */
#ifndef TESTS_SUPPORT_FILES_H
#define TESTS_SUPPORT_FILES_H
#include <stddef.h>

/* A fresh folder under build/tmp; the result is static storage, valid until the next call. */
const char *folder_make(void);
/* Removes the folder of the last folder_make() with everything in it. */
void folder_remove(void);

/* "FOLDER/NAME" of the last folder; a ring of eight static buffers. */
const char *in_folder(const char *name);

void file_write(const char *path, const void *data, size_t bytes);
void *file_read(const char *path, size_t *bytes); /* to be freed; ends with a zero byte */
int file_exists(const char *path);
void file_link(const char *target, const char *path); /* symbolic; target from the tests' folder */
int file_count(void);                                 /* entries in the last folder */

/* Collects reported lines from here on, forgetting earlier ones. */
void log_catch(void);
const char *log_text(void);
/* Fails unless an error line with this part was reported; prints what was. */
void assert_reported(const char *part);

/* cmocka's fixture of a test with a machine profile of its own: in_folder("machine.json"). */
int profile_setup(void **state);
int profile_teardown(void **state);

#endif
