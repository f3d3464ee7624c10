/* tools/command_line_plan.c - the options of `spillway plan`, which are those of train and a few of
 * its own, and the command line of train that a plan ends in. */
#include "tools/plan.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define FIELD(name) .offset = offsetof(struct sw_plan_command_options, name)

static const struct sw_option own[] = {
    {"nodes", .section = "Plan", .value = "N", .kind = SW_OPTION_COUNT, .min = 1, .max = 64,
     FIELD(nodes), .fallback = "1", .help = "machines like it, each with a process of --ranks"},
    {"tokens", .section = "Plan", .value = "N", .kind = SW_OPTION_SIZE, FIELD(tokens),
     .help = "of a step, at least, over all ranks: sets --accumulate"},
    {"no-search", .section = "Plan", .kind = SW_OPTION_FLAG, FIELD(no_search),
     .help = "the placement that the rule chooses, without a search for a faster one"},
    {"sweep", .section = "Plan", .value = "WHAT[=FROM..TO]", .kind = SW_OPTION_TEXT, FIELD(sweep),
     .help =
         "step time and step clock over tokens, nvme, pcie, ram, gpus, adam or flops, from an\n"
         "eighth to eight times the case's own value (gpus: from 1), and where the clock changes"},
    {"sweep-page", .section = "Plan", .value = "FILE", .kind = SW_OPTION_TEXT, FIELD(sweep_page),
     .help = "draws the sweep in one HTML file that needs nothing else"},
    {"json", .section = "Plan", .kind = SW_OPTION_FLAG, FIELD(json),
     .help = "one JSON object, numbers in bytes"},
};
enum { OWN = sizeof(own) / sizeof(own[0]) };

/* What a plan cannot do: it is itself what --dry-run is for. */
static const char *const left_out[] = {"dry-run"};

/* What train refuses where nothing lies on a drive. */
static const char *const of_drives[] = {"nvme", "sqpoll", "iopoll", "write-budget", "sim-nvme"};

static int is_in(const char *const *list, size_t count, const char *name) {
    for (size_t i = 0; i < count; i++)
        if (!strcmp(list[i], name)) return 1;
    return 0;
}

static int is_own(const char *name) {
    for (int i = 0; i < OWN; i++)
        if (!strcmp(own[i].name, name)) return 1;
    return 0;
}

static char *append(char *text, const char *line) {
    const size_t used = text ? strlen(text) : 0;
    char *longer = realloc(text, used + strlen(line) + 1);
    if (!longer) return text;
    strcpy(longer + used, line);
    return longer;
}

/* Names and changes come from where they are known. */
static const char *summary(void) {
    char *text = append(
        NULL,
        "Says whether a training fits a machine, with which options, and how long a step takes,\n"
        "before anything is loaded: the arithmetic of every scheme, the one to take, the step's\n"
        "time by playing its tasks at the machine's rates, and the command line to run.\n"
        "It takes the options of train; those that are left open are chosen. MODEL is a\n"
        "folder, a config.json, a count of parameters (7B), or one of:\n   ");
    const char *name, *what, *profile;
    char line[256];
    for (int i = 0; (name = sw_subject_shape(i)); i++) {
        snprintf(line, sizeof(line), " %s", name);
        text = append(text, line);
    }
    text = append(text, "\n\nMachines that --machine knows:\n");
    for (int i = 0; (name = sw_machine_shipped(i, &profile)); i++) {
        /* The first line of a profile says what its name means: {"about": "...",. */
        const char *about = strchr(profile, ':');
        const size_t length = about ? strcspn(about + 3, "\"") : 0;
        snprintf(line, sizeof(line), "  %-12s %.*s\n", name, (int)length, about ? about + 3 : "");
        text = append(text, line);
    }
    text = append(text, "\nChanges to one, after a colon:\n");
    for (int i = 0; (name = sw_machine_changes(i, &what)); i++) {
        snprintf(line, sizeof(line), "  %-18s %s\n", name, what);
        text = append(text, line);
    }
    text = append(text, "\nThe exit status is 0 when the training fits, 1 when it does not.");
    return text ? text : "";
}

const struct sw_command *sw_plan_command(void) {
    static struct sw_option table[SW_OPTIONS_MAX];
    static struct sw_command command = {.name = "plan",
                                        .usage = "plan MODEL [--machine NAME] [options]",
                                        .operand = "[MODEL]",
                                        .options = table};
    if (command.option_count) return &command;
    uint32_t n = 0;
    int own_added = 0;
    for (uint32_t i = 0; i < sw_train_command.option_count; i++) {
        const struct sw_option *option = &sw_train_command.options[i];
        if (is_in(left_out, sizeof(left_out) / sizeof(left_out[0]), option->name)) continue;
        if (!strcmp(option->section, "Other") && !own_added++)
            for (int k = 0; k < OWN; k++) table[n++] = own[k];
        table[n] = *option;
        if (!strcmp(option->name, "data") || !strcmp(option->name, "out"))
            table[n].marks &= ~(unsigned)SW_REQUIRED;
        if (!strcmp(option->name, "model")) {
            table[n].value = "MODEL";
            table[n].marks &= ~(unsigned)SW_REQUIRED;
            table[n].help = "the same as MODEL: a folder, a config.json, a shape or a count";
        }
        if (!strcmp(option->name, "trace"))
            table[n].help = "the steps that were played, as train writes its own (for report)";
        if (!strcmp(option->name, "device"))
            table[n].fallback = "cuda where the machine has GPUs, else host";
        if (!strcmp(option->name, "ranks")) table[n].fallback = "the machine's GPUs; on the host 1";
        n++;
        assert(n < SW_OPTIONS_MAX);
    }
    command.summary = summary();
    command.option_count = n;
    return &command;
}

/* ---- the command line that it ends in ---- */

struct words {
    char **list;
    int count, failed;
};

static void add_word(struct words *w, const char *first, const char *second) {
    char **longer = realloc(w->list, ((size_t)w->count + 2) * sizeof(*longer));
    char *word = NULL;
    if (longer) w->list = longer;
    if (!longer || asprintf(&word, "%s%s", first, second) < 0) {
        w->failed = 1;
        return;
    }
    w->list[w->count++] = word;
    w->list[w->count] = NULL;
}

static void add_option(struct words *w, const char *name, const char *value) {
    add_word(w, "--", name);
    if (value) add_word(w, value, "");
}

void sw_plan_words_free(char **words) {
    for (int i = 0; words && words[i]; i++) free(words[i]);
    free(words);
}

/* A folder that is still to be had bears the shape's name; of a config.json, its folder. */
static void add_model(struct words *w, const struct sw_subject *subject) {
    static const char config[] = "/config.json";
    const size_t length = strlen(subject->name), tail = sizeof(config) - 1;
    const int is_config = length > tail && !strcmp(subject->name + length - tail, config);
    add_word(w, "--", "model");
    add_word(w, subject->name, "");
    if (is_config && !w->failed) w->list[w->count - 1][length - tail] = 0;
}

char **sw_plan_words(const struct sw_parsed *parsed, const struct sw_plan_case *c,
                     const struct sw_plan_step *step, int *count) {
    struct sw_plan_option options[SW_PLAN_OPTIONS_MAX];
    const int n = sw_plan_options(c, step, options);
    struct words w = {0};
    add_word(&w, "train", "");
    add_model(&w, c->subject);
    if (!sw_option_origin(parsed, "data")) add_option(&w, "data", "train.bin");
    if (!sw_option_origin(parsed, "out")) add_option(&w, "out", "out");
    for (uint32_t i = 0; i < parsed->command->option_count; i++) {
        const struct sw_option *option = &parsed->command->options[i];
        int replaced = is_own(option->name) || !strcmp(option->name, "machine") ||
                       !strcmp(option->name, "model") || !strcmp(option->name, "trace");
        for (int k = 0; k < n; k++) replaced |= !strcmp(options[k].name, option->name);
        if (step->fit.need_bytes[SW_TIER_NVME] == 0)
            replaced |= is_in(of_drives, sizeof(of_drives) / sizeof(of_drives[0]), option->name);
        if (replaced || parsed->origin[i] != SW_FROM_LINE) continue;
        add_option(&w, option->name, option->kind == SW_OPTION_FLAG ? NULL : parsed->text[i]);
    }
    for (int k = 0; k < n; k++) add_option(&w, options[k].name, options[k].value);
    *count = w.count;
    if (!w.failed) return w.list;
    sw_plan_words_free(w.list);
    return NULL;
}
