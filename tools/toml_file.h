/* tools/toml_file.h - the top-level keys of a TOML file, for C.
 *
 * Values are given as text in the form the command line uses, with their TOML type beside it. A
 * syntax error is reported with its line and column. */
#ifndef TOOLS_TOML_FILE_H
#define TOOLS_TOML_FILE_H

#ifdef __cplusplus
extern "C" {
#endif

enum sw_toml_type {
    SW_TOML_STRING,
    SW_TOML_STRINGS, /* an array of strings, joined by commas */
    SW_TOML_INTEGER,
    SW_TOML_REAL,
    SW_TOML_BOOLEAN, /* "true" or "false" */
    SW_TOML_TABLE,   /* no text */
    SW_TOML_OTHER    /* dates, other arrays: no text */
};

struct sw_toml_value {
    const char *key, *text;
    enum sw_toml_type type;
    int line;
};

struct sw_toml; /* owns the strings of its values */

/* 0 or -errno, reported. */
int sw_toml_open(struct sw_toml **out, const char *path);
void sw_toml_close(struct sw_toml *file); /* NULL is fine */

/* In the order of the file. */
int sw_toml_count(const struct sw_toml *file);
const struct sw_toml_value *sw_toml_at(const struct sw_toml *file, int i);

#ifdef __cplusplus
}
#endif
#endif
