/* tools/command_line_print.c - what the table says: help, and the options in effect. */
#include "tools/command_line.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>

#include "engine/trainer.h"

void sw_options_help(const struct sw_command *command, FILE *out) {
    fprintf(out, "usage: spillway %s\n\n%s\n", command->usage, command->summary);
    const char *section = "";
    for (uint32_t i = 0; i < command->option_count; i++) {
        const struct sw_option *option = &command->options[i];
        if (strcmp(section, option->section)) fprintf(out, "\n%s:\n", option->section);
        section = option->section;
        char left[96] = "", choices[80] = "";
        for (int c = 0; option->choices && option->choices[c]; c++) {
            const size_t used = strlen(choices);
            snprintf(choices + used, sizeof(choices) - used, "%s%s", c ? "|" : "",
                     option->choices[c]);
        }
        const char *value = option->choices ? choices : option->value;
        char letter[8] = "";
        if (option->letter) snprintf(letter, sizeof(letter), "-%c, ", option->letter);
        snprintf(left, sizeof(left), "%s--%s%s%s", letter, option->name, value ? " " : "",
                 value ? value : "");
        fprintf(out, "  %-38s %s", left, option->help);
        if (option->fallback) fprintf(out, " [%s]", option->fallback);
        if (option->marks & SW_REQUIRED) fprintf(out, " (required)");
        fputc('\n', out);
    }
}

/* The shortest of 15 or 17 digits that reads back as the same number. */
static void print_real(double value, char *out, size_t size) {
    snprintf(out, size, "%.15g", value);
    double again;
    if (sscanf(out, "%lf", &again) != 1 || again != value) snprintf(out, size, "%.17g", value);
}

static json_t *list_json(const struct sw_option *option, const void *target) {
    const char *const *items = (const char *const *)((const char *)target + option->offset);
    uint32_t count;
    memcpy(&count, (const char *)target + option->count_offset, sizeof(count));
    json_t *list = json_array();
    for (uint32_t i = 0; i < count; i++) json_array_append_new(list, json_string(items[i]));
    return list;
}

/* One option's value; null when it was left to a default that depends on the run, or has none. */
/* Two rates, or null where neither is set. */
static json_t *rates_json(const char *place) {
    uint64_t rates[2];
    memcpy(rates, place, sizeof(rates));
    if (!rates[0] && !rates[1]) return json_null();
    return json_pack("[I, I]", (json_int_t)rates[0], (json_int_t)rates[1]);
}

/* The shares, or null where what fits decides. */
static json_t *tiers_json(const char *place) {
    struct sw_tiers tiers;
    char text[64];
    memcpy(&tiers, place, sizeof(tiers));
    if (!sw_tiers_chosen(tiers)) return json_null();
    return json_string(sw_tiers_print(tiers, text, sizeof(text)));
}

static json_t *value_json(const struct sw_parsed *parsed, uint32_t i, const void *target) {
    const struct sw_option *option = &parsed->command->options[i];
    if (option->kind == SW_OPTION_CONFIG)
        return parsed->config ? json_string(parsed->config) : json_null();
    if (option->offset == SW_NO_FIELD)
        return json_string(parsed->text[i] ? parsed->text[i] : option->fallback);
    union {
        int flag;
        const char *text;
        uint32_t count;
        uint64_t count64;
        int64_t steps;
        double real;
    } value = {0};
    const char *place = (const char *)target + option->offset;
    json_int_t whole = 0;
    switch (option->kind) {
    case SW_OPTION_CONFIG:
        break; /* answered above */
    case SW_OPTION_LIST:
        return list_json(option, target);
    case SW_OPTION_FLAG:
        memcpy(&value.flag, place, sizeof(value.flag));
        return json_boolean(value.flag);
    case SW_OPTION_TEXT:
        memcpy(&value.text, place, sizeof(value.text));
        return value.text ? json_string(value.text) : json_null();
    case SW_OPTION_REAL:
        memcpy(&value.real, place, sizeof(value.real));
        return json_real(value.real);
    case SW_OPTION_CHOICE:
        memcpy(&value.flag, place, sizeof(value.flag));
        return json_string(option->choices[value.flag]);
    case SW_OPTION_COUNT:
        memcpy(&value.count, place, sizeof(value.count));
        whole = (json_int_t)value.count;
        break;
    case SW_OPTION_INT:
        memcpy(&value.flag, place, sizeof(value.flag));
        whole = value.flag;
        break;
    case SW_OPTION_TIERS:
        return tiers_json(place);
    case SW_OPTION_RATES:
        return rates_json(place);
    case SW_OPTION_COUNT64:
    case SW_OPTION_SIZE:
    case SW_OPTION_RATE:
    case SW_OPTION_STEPS:
        memcpy(&value.steps, place, sizeof(value.steps));
        whole = (json_int_t)value.steps;
        break;
    }
    const json_int_t unset = option->kind == SW_OPTION_STEPS ? -1 : 0;
    return option->marks & SW_UNSET && whole == unset ? json_null() : json_integer(whole);
}

/* Help and dry runs are about this invocation, not about the run that its options describe. */
static int is_shown(const struct sw_option *option) {
    return strcmp(option->name, "help") != 0;
}

json_t *sw_options_json(const struct sw_parsed *parsed, const void *target) {
    json_t *root = json_object();
    for (uint32_t i = 0; i < parsed->command->option_count; i++) {
        char key[64];
        snprintf(key, sizeof(key), "%s", parsed->command->options[i].name);
        for (char *c = key; *c; c++)
            if (*c == '-') *c = '_';
        if (is_shown(&parsed->command->options[i]))
            json_object_set_new(root, key, value_json(parsed, i, target));
    }
    return root;
}

void sw_options_print(const struct sw_parsed *parsed, const void *target, FILE *out) {
    for (uint32_t i = 0; i < parsed->command->option_count; i++) {
        const struct sw_option *option = &parsed->command->options[i];
        json_t *value = value_json(parsed, i, target);
        const int is_empty = json_is_null(value) || json_is_false(value) ||
                             (json_is_array(value) && json_array_size(value) == 0);
        if (is_shown(option) && (!is_empty || option->marks & SW_UNSET)) {
            fprintf(out, "  %-14s ", option->name);
            char number[40];
            if (json_is_real(value))
                print_real(json_real_value(value), number, sizeof(number));
            else
                snprintf(number, sizeof(number), "%" JSON_INTEGER_FORMAT,
                         json_integer_value(value));
            if (json_is_null(value))
                fputs(option->fallback ? option->fallback : "none", out);
            else if (json_is_number(value))
                fputs(number, out);
            else if (json_is_string(value))
                fputs(json_string_value(value), out);
            else if (json_is_true(value))
                fputs("yes", out);
            for (size_t k = 0; k < json_array_size(value); k++) {
                const json_t *item = json_array_get(value, k);
                if (k) fputc(',', out);
                if (json_is_string(item))
                    fputs(json_string_value(item), out);
                else
                    fprintf(out, "%" JSON_INTEGER_FORMAT, json_integer_value(item));
            }
            fputc('\n', out);
        }
        json_decref(value);
    }
}

/* ---- the command line again ---- */

void sw_print_quoted(const char *text, FILE *out) {
    if (text[0] && strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                "_-+=.,:/%@") == strlen(text)) {
        fprintf(out, " %s", text);
        return;
    }
    fputs(" '", out);
    for (; *text; text++) fputs(*text == '\'' ? "'\\''" : (const char[]){*text, 0}, out);
    fputc('\'', out);
}

/* Whether an argument is one of the options that the remedy sets. */
static int is_replaced(const char *argument, const struct sw_remedy *remedy) {
    if (strncmp(argument, "--", 2) != 0) return 0;
    const size_t length = strcspn(argument + 2, "=");
    for (int i = 0; i < remedy->option_count; i++)
        if (strlen(remedy->options[i].name) == length &&
            !strncmp(remedy->options[i].name, argument + 2, length))
            return 1;
    return 0;
}

void sw_print_command(int argc, char **argv, const struct sw_remedy *remedy, FILE *out) {
    sw_print_quoted(argv[0], out);
    for (int i = 1; i < argc; i++) {
        if (!is_replaced(argv[i], remedy))
            sw_print_quoted(argv[i], out);
        else if (!strchr(argv[i], '='))
            i++; /* its value */
    }
    for (int i = 0; i < remedy->option_count; i++)
        fprintf(out, " --%s %s", remedy->options[i].name, remedy->options[i].value);
    fputc('\n', out);
}
