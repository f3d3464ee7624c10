/* tools/command_line.c - reads a command line and a configuration file by a table of options.
 *
 * First every given option's text is collected with where it came from, then all texts are turned
 * into values in one place, so that the two sources cannot differ in what they accept. */
#include "tools/command_line.h"

#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/size.h"
#include "tools/toml_file.h"

/* Reports what is wrong with one option, naming it the way the user wrote it. */
static int complain(const struct sw_parsed *parsed, uint32_t i, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static int complain(const struct sw_parsed *parsed, uint32_t i, const char *format, ...) {
    char what[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof(what), format, args);
    va_end(args);
    const char *name = parsed->command->options[i].name;
    if (parsed->origin[i] == SW_FROM_FILE)
        sw_error("%s, line %d: %s: %s", parsed->config, parsed->line[i], name, what);
    else
        sw_error("--%s: %s", name, what);
    return -EINVAL;
}

/* Levenshtein's distance, with rows of the table in place; names are short. */
static size_t edit_distance(const char *a, const char *b) {
    enum { LENGTH_MAX = 64 };
    const size_t a_length = strnlen(a, LENGTH_MAX), b_length = strnlen(b, LENGTH_MAX);
    size_t row[LENGTH_MAX + 1];
    for (size_t j = 0; j <= b_length; j++) row[j] = j;
    for (size_t i = 1; i <= a_length; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b_length; j++) {
            const size_t change = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            size_t best = row[j] < row[j - 1] ? row[j] + 1 : row[j - 1] + 1;
            if (change < best) best = change;
            row[j] = best;
        }
    }
    return row[b_length];
}

const char *sw_nearest(const char *name, const char *const *candidates, size_t count) {
    assert(count > 0);
    const char *best = candidates[0];
    for (size_t i = 1; i < count; i++)
        if (edit_distance(name, candidates[i]) < edit_distance(name, best)) best = candidates[i];
    return best;
}

static const char *nearest_option(const struct sw_command *command, const char *name) {
    const char *names[SW_OPTIONS_MAX];
    for (uint32_t i = 0; i < command->option_count; i++) names[i] = command->options[i].name;
    return sw_nearest(name, names, command->option_count);
}

/* The place of a name of the given length; -1: unknown. Keys of a file may have _ for -. */
static int find_option(const struct sw_command *command, const char *name, size_t length,
                       int underscores) {
    for (uint32_t i = 0; i < command->option_count; i++) {
        const char *have = command->options[i].name;
        if (strlen(have) != length) continue;
        size_t c = 0;
        while (c < length &&
               (name[c] == have[c] || (underscores && name[c] == '_' && have[c] == '-')))
            c++;
        if (c == length) return (int)i;
    }
    return -1;
}

enum sw_origin sw_option_origin(const struct sw_parsed *parsed, const char *name) {
    const int i = find_option(parsed->command, name, strlen(name), 0);
    assert(i >= 0);
    return parsed->origin[i];
}

/* The place of an option that is written as a dash and one letter; -1: it is not one. */
static int find_letter(const struct sw_command *command, const char *arg) {
    if (arg[0] != '-' || !arg[1] || arg[1] == '-' || arg[2]) return -1;
    for (uint32_t i = 0; i < command->option_count; i++)
        if (command->options[i].letter == arg[1]) return (int)i;
    return -1;
}

/* Takes the option at argv[at]; returns how many arguments it used, or -EINVAL. */
static int take_option(struct sw_parsed *parsed, int argc, char **argv, int at) {
    const struct sw_command *command = parsed->command;
    const char *name = argv[at] + 2, *equals = strchr(name, '=');
    const size_t length = equals ? (size_t)(equals - name) : strlen(name);
    int i = find_letter(command, argv[at]);
    if (i < 0) i = find_option(command, name, length, 0);
    if (i < 0) {
        char *copy = strndup(name, length);
        sw_error("%s: unknown option --%s; the nearest is --%s", command->name, copy ? copy : name,
                 nearest_option(command, copy ? copy : name));
        free(copy);
        return -EINVAL;
    }
    const struct sw_option *option = &command->options[i];
    if (parsed->origin[i] != SW_NOT_GIVEN)
        return complain(parsed, (uint32_t)i, "given twice; which one should hold?");
    parsed->origin[i] = SW_FROM_LINE;
    if (option->kind == SW_OPTION_FLAG) {
        if (equals) return complain(parsed, (uint32_t)i, "takes no value");
        parsed->text[i] = "true";
        return 1;
    }
    if (equals) {
        parsed->text[i] = equals + 1;
        return 1;
    }
    if (at + 1 >= argc || !strncmp(argv[at + 1], "--", 2))
        return complain(parsed, (uint32_t)i, "needs a value (%s)", option->value);
    parsed->text[i] = argv[at + 1];
    return 2;
}

static int take_line(struct sw_parsed *parsed, int argc, char **argv) {
    const struct sw_command *command = parsed->command;
    for (int at = 1; at < argc;) {
        if ((argv[at][0] == '-' && argv[at][1] == '-' && argv[at][2]) ||
            find_letter(command, argv[at]) >= 0) {
            const int used = take_option(parsed, argc, argv, at);
            if (used < 0) return used;
            at += used;
        } else if (command->operand && !parsed->operand && argv[at][0] && argv[at][0] != '-') {
            parsed->operand = argv[at++];
        } else {
            sw_error("%s: unexpected argument '%s'%s", command->name, argv[at],
                     argv[at][0] == '-' ? "; options begin with two dashes" : "");
            return -EINVAL;
        }
    }
    return 0;
}

/* What a kind of option may be in a file, in the words of an error; NULL when the type is right. */
static const char *wrong_type(enum sw_option_kind kind, enum sw_toml_type type) {
    switch (kind) {
    case SW_OPTION_FLAG:
        return type == SW_TOML_BOOLEAN ? NULL : "true or false";
    case SW_OPTION_TEXT:
    case SW_OPTION_CONFIG:
    case SW_OPTION_CHOICE:
    case SW_OPTION_TIERS:
        return type == SW_TOML_STRING ? NULL : "a string";
    case SW_OPTION_COUNT:
    case SW_OPTION_COUNT64:
    case SW_OPTION_INT:
    case SW_OPTION_STEPS:
        return type == SW_TOML_INTEGER ? NULL : "a whole number";
    case SW_OPTION_REAL:
        return type == SW_TOML_INTEGER || type == SW_TOML_REAL ? NULL : "a number";
    case SW_OPTION_SIZE:
    case SW_OPTION_RATE:
    case SW_OPTION_RATES:
        return type == SW_TOML_INTEGER || type == SW_TOML_STRING
                   ? NULL
                   : "a number or a string as \"8Mi\"";
    case SW_OPTION_LIST:
        return type == SW_TOML_STRINGS || type == SW_TOML_STRING ? NULL : "a list of strings";
    }
    return "known";
}

static int take_key(struct sw_parsed *parsed, const struct sw_toml_value *value, int *lines) {
    const struct sw_command *command = parsed->command;
    const int i = find_option(command, value->key, strlen(value->key), 1);
    const int is_own = i >= 0 && (command->options[i].kind == SW_OPTION_CONFIG ||
                                  !strcmp(command->options[i].name, "help"));
    if (i < 0 || is_own) {
        if (value->type == SW_TOML_TABLE)
            sw_error("%s, line %d: table [%s]: options stand at the top level, without tables",
                     parsed->config, value->line, value->key);
        else if (is_own)
            sw_error("%s, line %d: '%s' is for the command line only", parsed->config, value->line,
                     value->key);
        else
            sw_error("%s, line %d: unknown key '%s'; the nearest is '%s'", parsed->config,
                     value->line, value->key, nearest_option(command, value->key));
        return -EINVAL;
    }
    if (lines[i]) {
        sw_error("%s, line %d: '%s' is given on line %d as well", parsed->config, value->line,
                 value->key, lines[i]);
        return -EINVAL;
    }
    lines[i] = value->line;
    const char *wanted = wrong_type(command->options[i].kind, value->type);
    if (wanted) {
        sw_error("%s, line %d: '%s' must be %s", parsed->config, value->line, value->key, wanted);
        return -EINVAL;
    }
    const int is_off = value->type == SW_TOML_BOOLEAN && !strcmp(value->text, "false");
    if (parsed->origin[i] == SW_FROM_LINE || is_off) return 0;
    parsed->origin[i] = SW_FROM_FILE;
    parsed->text[i] = value->text;
    parsed->line[i] = value->line;
    return 0;
}

static int take_file(struct sw_parsed *parsed) {
    for (uint32_t i = 0; i < parsed->command->option_count; i++)
        if (parsed->command->options[i].kind == SW_OPTION_CONFIG) parsed->config = parsed->text[i];
    if (!parsed->config) return 0;
    int ret = sw_toml_open(&parsed->file, parsed->config);
    int lines[SW_OPTIONS_MAX] = {0};
    for (int k = 0; ret == 0 && k < sw_toml_count(parsed->file); k++)
        ret = take_key(parsed, sw_toml_at(parsed->file, k), lines);
    return ret;
}

/* A whole number, with a sign for -1 where the range allows it. */
static int parse_whole(const char *text, int64_t *out) {
    const char *digits = text[0] == '-' ? text + 1 : text;
    if (!digits[0] || strspn(digits, "0123456789") != strlen(digits)) return -EINVAL;
    errno = 0;
    *out = strtoll(text, NULL, 10);
    return errno ? -ERANGE : 0;
}

static int check_range(const struct sw_parsed *parsed, uint32_t i, double value) {
    const struct sw_option *option = &parsed->command->options[i];
    if (option->min == 0 && option->max == 0) return 0;
    const int low = option->marks & SW_MIN_OPEN ? value <= option->min : value < option->min;
    const int high = option->marks & SW_MAX_OPEN ? value >= option->max : value > option->max;
    if (!low && !high) return 0;
    if (low || isinf(option->max))
        return complain(parsed, i, "%s is too small: it must be %s %.15g", parsed->text[i],
                        option->marks & SW_MIN_OPEN ? "above" : "at least", option->min);
    return complain(parsed, i, "%s is too large: it must be %s %.15g", parsed->text[i],
                    option->marks & SW_MAX_OPEN ? "below" : "at most", option->max);
}

static int set_whole(const struct sw_parsed *parsed, uint32_t i, void *place) {
    const struct sw_option *option = &parsed->command->options[i];
    int64_t value;
    const int ret = parse_whole(parsed->text[i], &value);
    if (ret == -EINVAL) return complain(parsed, i, "'%s' is not a whole number", parsed->text[i]);
    const int64_t type_max = option->kind == SW_OPTION_COUNT ? UINT32_MAX
                             : option->kind == SW_OPTION_INT ? INT32_MAX
                                                             : INT64_MAX;
    if (ret < 0 || value > type_max || value < 0)
        return complain(parsed, i, "%s is out of range (0 to %lld)", parsed->text[i],
                        (long long)type_max);
    if (check_range(parsed, i, (double)value) < 0) return -EINVAL;
    const uint32_t count = (uint32_t)value;
    const int narrow = (int)value;
    const uint64_t count64 = (uint64_t)value;
    if (option->kind == SW_OPTION_COUNT)
        memcpy(place, &count, sizeof(count));
    else if (option->kind == SW_OPTION_INT)
        memcpy(place, &narrow, sizeof(narrow));
    else
        memcpy(place, &count64, sizeof(count64)); /* int64_t has the same bytes */
    return 0;
}

static int set_real(const struct sw_parsed *parsed, uint32_t i, void *place) {
    const char *text = parsed->text[i];
    char *end;
    const double value = strtod(text, &end);
    if (end == text || *end || isspace((unsigned char)text[0]) || !isfinite(value))
        return complain(parsed, i, "'%s' is not a number", text);
    if (check_range(parsed, i, value) < 0) return -EINVAL;
    memcpy(place, &value, sizeof(value));
    return 0;
}

static int set_size(const struct sw_parsed *parsed, uint32_t i, void *place) {
    uint64_t bytes;
    if (sw_size_parse(parsed->text[i], &bytes) < 0)
        return complain(parsed, i, "'%s' is not a size (such as 600M, 8Mi or 4096)",
                        parsed->text[i]);
    if (check_range(parsed, i, (double)bytes) < 0) return -EINVAL;
    memcpy(place, &bytes, sizeof(bytes));
    return 0;
}

static int set_rates(const struct sw_parsed *parsed, uint32_t i, void *place, int count) {
    uint64_t rates[2];
    char first[32];
    const char *text = parsed->text[i], *comma = strchr(text, ',');
    const size_t length = comma ? (size_t)(comma - text) : strlen(text);
    snprintf(first, sizeof(first), "%.*s", length < sizeof(first) ? (int)length : 0, text);
    if ((comma && count == 1) || sw_size_parse(first, &rates[0]) < 0 ||
        sw_size_parse(comma ? comma + 1 : first, &rates[1]) < 0)
        return complain(parsed, i,
                        count == 1 ? "'%s' is not a rate per second (such as 1.5G)"
                                   : "'%s' is not one rate or two (such as 2G,1.2G)",
                        text);
    for (int r = 0; r < 2; r++)
        if (check_range(parsed, i, (double)rates[r]) < 0) return -EINVAL;
    memcpy(place, rates, (size_t)count * sizeof(rates[0]));
    return 0;
}

static int set_choice(const struct sw_parsed *parsed, uint32_t i, void *place) {
    const struct sw_option *option = &parsed->command->options[i];
    char all[256] = "";
    for (int c = 0; option->choices[c]; c++) {
        if (!strcmp(parsed->text[i], option->choices[c])) {
            if (place) memcpy(place, &c, sizeof(c));
            return 0;
        }
        const size_t used = strlen(all);
        snprintf(all + used, sizeof(all) - used, "%s%s", c ? ", " : "", option->choices[c]);
    }
    return complain(parsed, i, "'%s' is not one of: %s", parsed->text[i], all);
}

static int set_tiers(const struct sw_parsed *parsed, uint32_t i, void *place) {
    struct sw_tiers tiers;
    char why[128];
    if (sw_tiers_parse(parsed->text[i], &tiers, why, sizeof(why)) < 0)
        return complain(parsed, i, "%s", why);
    memcpy(place, &tiers, sizeof(tiers));
    return 0;
}

static int set_list(struct sw_parsed *parsed, uint32_t i, void *target) {
    const struct sw_option *option = &parsed->command->options[i];
    assert(!parsed->list); /* one list per command */
    parsed->list = strdup(parsed->text[i]);
    if (!parsed->list) return -ENOMEM;
    const char **items = (const char **)((char *)target + option->offset);
    uint32_t count = 0;
    for (char *next = parsed->list, *item; (item = strsep(&next, ","));) {
        if (!item[0]) return complain(parsed, i, "'%s' has an empty entry", parsed->text[i]);
        if (count == SW_NVME_FOLDERS_MAX)
            return complain(parsed, i, "more than %d entries", SW_NVME_FOLDERS_MAX);
        for (uint32_t k = 0; k < count; k++)
            if (!strcmp(items[k], item)) return complain(parsed, i, "'%s' is there twice", item);
        items[count++] = item;
    }
    memcpy((char *)target + option->count_offset, &count, sizeof(count));
    return 0;
}

static int set_value(struct sw_parsed *parsed, uint32_t i, void *target) {
    const struct sw_option *option = &parsed->command->options[i];
    char *place = option->offset == SW_NO_FIELD ? NULL : (char *)target + option->offset;
    const int on = 1;
    switch (option->kind) {
    case SW_OPTION_FLAG:
        if (place) memcpy(place, &on, sizeof(on));
        return 0;
    case SW_OPTION_TEXT:
    case SW_OPTION_CONFIG:
        if (!parsed->text[i][0]) return complain(parsed, i, "is empty");
        if (place) memcpy(place, &parsed->text[i], sizeof(parsed->text[i]));
        return 0;
    case SW_OPTION_COUNT:
    case SW_OPTION_COUNT64:
    case SW_OPTION_INT:
    case SW_OPTION_STEPS:
        return set_whole(parsed, i, place);
    case SW_OPTION_REAL:
        return set_real(parsed, i, place);
    case SW_OPTION_SIZE:
        return set_size(parsed, i, place);
    case SW_OPTION_RATE:
        return set_rates(parsed, i, place, 1);
    case SW_OPTION_RATES:
        return set_rates(parsed, i, place, 2);
    case SW_OPTION_CHOICE:
        return set_choice(parsed, i, place);
    case SW_OPTION_TIERS:
        return set_tiers(parsed, i, place);
    case SW_OPTION_LIST:
        return set_list(parsed, i, target);
    }
    return -EINVAL;
}

static int check_required(const struct sw_parsed *parsed) {
    const struct sw_command *command = parsed->command;
    for (uint32_t i = 0; i < command->option_count; i++) {
        const struct sw_option *option = &command->options[i];
        if (!(option->marks & SW_REQUIRED) || parsed->origin[i] != SW_NOT_GIVEN) continue;
        sw_error("%s: --%s %s is required (%s)", command->name, option->name, option->value,
                 option->help);
        return -EINVAL;
    }
    /* One in brackets may be left out. */
    if (command->operand && command->operand[0] != '[' && !parsed->operand) {
        sw_error("%s: %s is required", command->name, command->operand);
        return -EINVAL;
    }
    return 0;
}

int sw_options_parse(const struct sw_command *command, int argc, char **argv, void *target,
                     struct sw_parsed *parsed) {
    assert(command->option_count <= SW_OPTIONS_MAX && argc >= 1);
    memset(parsed, 0, sizeof(*parsed));
    parsed->command = command;
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) {
            sw_options_help(command, stdout);
            return 1;
        }
    int ret = take_line(parsed, argc, argv);
    if (ret == 0) ret = take_file(parsed);
    for (uint32_t i = 0; i < command->option_count && ret == 0; i++)
        if (parsed->origin[i] != SW_NOT_GIVEN) ret = set_value(parsed, i, target);
    if (ret == 0) ret = check_required(parsed);
    return ret;
}

void sw_parsed_close(struct sw_parsed *parsed) {
    sw_toml_close(parsed->file);
    free(parsed->list);
    memset(parsed, 0, sizeof(*parsed));
}
