/* tools/plan.h - what the files of `spillway plan` share: its options, and what it says. */
#ifndef TOOLS_PLAN_H
#define TOOLS_PLAN_H
#include <stdio.h>
#include "plan/balance.h"
#include "plan/decide.h"
#include "plan/search.h"
#include "tools/command_line.h"

struct sw_plan_command_options {
    struct sw_train_options train; /* first: the options of train keep their places */
    uint32_t nodes;
    uint64_t tokens;
    int no_search, json;
    const char *sweep, *sweep_page; /* NULL: none */
};

/* train's options and plan's own. The table is static storage. */
const struct sw_command *sw_plan_command(void);

/* The words of the train command that a step amounts to: what the user gave on the command line,
 * but for options of plan's own, and the step's in their place. Ends with NULL; *count words. NULL
 * without memory. Frees with sw_plan_words_free(). */
char **sw_plan_words(const struct sw_parsed *parsed, const struct sw_plan_case *c,
                     const struct sw_plan_step *step, int *count);
void sw_plan_words_free(char **words);

/* What is known of a case where something fits. */
struct sw_plan_answer {
    struct sw_plan_found found;
    struct sw_plan_balance balance;
    char **words; /* of the line to run */
};

/* All that is said of a case. a: NULL where nothing fits. */
void sw_plan_print(const struct sw_plan_case *c, const struct sw_plan_decision *d,
                   const struct sw_plan_answer *a, FILE *out);
json_t *sw_plan_json(const struct sw_plan_case *c, const struct sw_plan_decision *d,
                     const struct sw_plan_answer *a);

/* The parts of it that are about the search, and about time. */
void sw_plan_print_search(const struct sw_plan_case *c, const struct sw_plan_answer *a, FILE *out);
json_t *sw_plan_search_json(const struct sw_plan_answer *a);
void sw_plan_print_times(const struct sw_plan_case *c, const struct sw_fit *f,
                         const struct sw_simulation *s, FILE *out);
json_t *sw_plan_times_json(const struct sw_fit *f, const struct sw_simulation *s);

/* "70,553,706,496" */
const char *sw_plan_commas(uint64_t value, char *out, size_t out_size);
/* Decimal, in gigabytes with commas: "1,120 GB", "46.2 GB"; smaller ones in MB or kB. */
const char *sw_plan_size(double bytes, char *out, size_t out_size);
/* As snprintf(), behind the text that is there. */
void sw_plan_say(char *out, size_t out_size, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Where each state lies, stage, K and overlap, of so many ranks. */
void sw_plan_say_placement(const struct sw_train_options *o, uint32_t ranks, char *out,
                           size_t out_size);
/* Three digits, in a unit that suits: "10.7 s", "304 ms". Returns out. */
const char *sw_plan_duration(double seconds, char *out, size_t out_size);
/* Breaks a text at blanks, within 96 columns; further lines are indented. */
void sw_plan_wrapped(const char *text, const char *indent, FILE *out);
/* The lines of the decision: the i-th step's verdict, then the reason for the choice. */
void sw_plan_verdict(const struct sw_plan_case *c, const struct sw_plan_decision *d, int i,
                     char *out, size_t out_size);
void sw_plan_conclusion(const struct sw_plan_case *c, const struct sw_plan_decision *d, char *out,
                        size_t out_size);

#endif
