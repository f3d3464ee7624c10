/* tools/command_line.h - one table of options per command drives everything that is said about
 * them: the command line, the configuration file, the help, the effective options at start and in
 * the log.
 *
 * --name value and --name=value mean the same; a configuration file (TOML) has the names as keys,
 * with
 * - or _, and the command line wins over it. An unknown name is an error with the nearest one, a
 * repeated one too. Strings in the target live as long as argv and the struct sw_parsed. */
#ifndef TOOLS_COMMAND_LINE_H
#define TOOLS_COMMAND_LINE_H
#include <jansson.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include "engine/options.h"

enum sw_option_kind {
    SW_OPTION_FLAG,    /* int: 1 when given */
    SW_OPTION_TEXT,    /* const char * */
    SW_OPTION_CONFIG,  /* a TOML file with more options; kept in struct sw_parsed */
    SW_OPTION_COUNT,   /* uint32_t */
    SW_OPTION_COUNT64, /* uint64_t */
    SW_OPTION_INT,     /* int */
    SW_OPTION_STEPS,   /* int64_t */
    SW_OPTION_REAL,    /* double */
    SW_OPTION_SIZE,    /* uint64_t, bytes */
    SW_OPTION_RATE,    /* uint64_t, per second */
    SW_OPTION_RATES,   /* uint64_t[2], per second; one alone stands for both */
    SW_OPTION_CHOICE,  /* an enum whose values are the places in choices */
    SW_OPTION_TIERS,   /* struct sw_tiers */
    SW_OPTION_LIST     /* const char *[SW_NVME_FOLDERS_MAX], and the count at count_offset */
};

enum { /* marks */
       SW_REQUIRED = 1,
       SW_MIN_OPEN = 2, /* min itself is out of range */
       SW_MAX_OPEN = 4,
       SW_UNSET = 8 /* the value that was there before (0 or -1) is printed as the default's text */
};

#define SW_NO_FIELD SIZE_MAX /* checked, but the target has no place for it */
enum { SW_OPTIONS_MAX = 96 };

struct sw_option {
    const char *name, *value; /* "seq-len", "N"; value is NULL for flags */
    char letter;              /* 'o': -o means the same as the name; 0: none */
    const char *section, *help;
    const char *fallback; /* the default as the help prints it; NULL: none */
    enum sw_option_kind kind;
    unsigned marks;
    size_t offset, count_offset;
    double min, max;            /* of numbers; both 0: whatever the type holds */
    const char *const *choices; /* ends with NULL */
};

/* The last line of every table of options. */
#define SW_OPTION_HELP(section_name)                                                               \
    {                                                                                              \
        .name = "help", .section = (section_name), .help = "this text", .kind = SW_OPTION_FLAG,    \
        .offset = SW_NO_FIELD                                                                      \
    }

struct sw_command {
    const char *name, *usage, *summary;
    const char *operand; /* name of the argument without a dash, such as "DIR", in brackets where it
                          * may be left out; NULL: none */
    const struct sw_option *options;
    uint32_t option_count;
};

enum sw_origin { SW_NOT_GIVEN, SW_FROM_FILE, SW_FROM_LINE };

/* What a parse leaves behind, until sw_parsed_close(). */
struct sw_parsed {
    const struct sw_command *command;
    enum sw_origin origin[SW_OPTIONS_MAX];
    const char *text[SW_OPTIONS_MAX]; /* of options that were given */
    int line[SW_OPTIONS_MAX];         /* in the file */
    const char *config, *operand;     /* NULL when not given */
    struct sw_toml *file;
    char *list; /* the text of the list, cut at its commas */
};

/* argv[0] is the command's name. 0; 1 when help was asked for and printed; -EINVAL (or another
 * -errno from reading the file), reported, for which the exit status is SW_EXIT_USAGE. The target
 * keeps what it had where nothing was given. After any result sw_parsed_close() is due. */
int sw_options_parse(const struct sw_command *command, int argc, char **argv, void *target,
                     struct sw_parsed *parsed);
void sw_parsed_close(struct sw_parsed *parsed);

/* Where an option of this name was given. The name must be in the table. */
enum sw_origin sw_option_origin(const struct sw_parsed *parsed, const char *name);

void sw_options_help(const struct sw_command *command, FILE *out);
/* The options in effect, one per line, or as an object with _ in its keys. */
void sw_options_print(const struct sw_parsed *parsed, const void *target, FILE *out);
json_t *sw_options_json(const struct sw_parsed *parsed, const void *target);

/* A blank, then the text as a shell takes it for one word. */
void sw_print_quoted(const char *text, FILE *out);

/* The command line again, quoted for a shell, with these options instead of what it had. */
struct sw_remedy;
void sw_print_command(int argc, char **argv, const struct sw_remedy *remedy, FILE *out);

/* The candidate with the smallest edit distance. */
const char *sw_nearest(const char *name, const char *const *candidates, size_t count);

extern const struct sw_command sw_train_command;

/* Defaults, command line, file, then what contradicts or has no effect; results as above. */
int sw_parse_train(int argc, char **argv, struct sw_train_options *options,
                   struct sw_parsed *parsed);

/* SW_EXIT_AGAIN is none: main() begins again, with the same arguments and the environment as it is.
 */
enum { SW_EXIT_OK = 0, SW_EXIT_FAILED = 1, SW_EXIT_USAGE = 2, SW_EXIT_AGAIN = -1 };

#endif
