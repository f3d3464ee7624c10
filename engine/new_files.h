/* engine/new_files.h - files that come to a folder together: each is written beside its place as
 * NAME.partial and synced; then all are renamed. What is visible under its own name is whole.
 *
 * One thread. Errors: 0 or -errno, reported with the file. */
#ifndef ENGINE_NEW_FILES_H
#define ENGINE_NEW_FILES_H
#include <jansson.h>
#include <stddef.h>
#include <stdint.h>

enum { SW_NEW_FILE_NAME_BYTES = 64 };

struct sw_new_files {
    const char *dir; /* the caller's */
    char (*names)[SW_NEW_FILE_NAME_BYTES];
    uint32_t count, room;
};

/* Room for so many names. 0 or -ENOMEM. */
int sw_new_files_open(struct sw_new_files *files, const char *dir, uint32_t room);
/* Frees the names; files that are not renamed stay. */
void sw_new_files_close(struct sw_new_files *files);

/* "DIR/NAME.partial", to be freed; NULL without memory. */
char *sw_new_files_path(const struct sw_new_files *files, const char *name);
/* Lists a name whose NAME.partial was made by the caller, who also syncs it. */
void sw_new_files_add(struct sw_new_files *files, const char *name);
int sw_new_files_has(const struct sw_new_files *files, const char *name);

/* Writes and syncs NAME.partial and lists the name. JSON is made to be read by people. */
int sw_new_files_write(struct sw_new_files *files, const char *name, const void *data,
                       size_t bytes);
int sw_new_files_write_json(struct sw_new_files *files, const char *name, const json_t *root);

/* Renames files [first, end) in their order. */
int sw_new_files_rename(const struct sw_new_files *files, uint32_t first, uint32_t end);
/* Makes the names in the folder durable. */
int sw_new_files_sync(const struct sw_new_files *files);
/* Removes what lies as NAME.partial. */
void sw_new_files_drop(const struct sw_new_files *files);

#endif
