/* tools/cmd_plan.c - `spillway plan`: will it fit, how, and which line to run. */
#include "tools/commands.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "tools/plan.h"

/* The line that is offered is read as train would read it: what it refuses (options that exclude
 * each other) is refused here. */
static int check_line(char **words, int count) {
    struct sw_train_options options;
    struct sw_parsed parsed;
    const int ret = sw_parse_train(count, words, &options, &parsed);
    sw_parsed_close(&parsed);
    return ret;
}

static int print(const struct sw_plan_command_options *o, const struct sw_plan_case *c,
                 const struct sw_plan_decision *d, char **words) {
    if (!o->json) {
        sw_plan_print(c, d, words, stdout);
        return 0;
    }
    json_t *root = sw_plan_json(c, d, words);
    const int ret = root ? json_dumpf(root, stdout, JSON_INDENT(2)) : -1;
    putchar('\n');
    json_decref(root);
    return ret;
}

static int decide(const struct sw_plan_command_options *o, const struct sw_parsed *parsed,
                  const struct sw_plan_case *c, struct sw_plan_decision *d) {
    if (sw_plan_decide(c, d) < 0) return SW_EXIT_FAILED;
    if (d->step_count == 0) {
        sw_error("plan: no scheme has weights, optimizer and stage where the options want them; "
                 "leave some of --params, --optimizer, --gradients, --zero open");
        return SW_EXIT_USAGE;
    }
    char **words = NULL;
    if (d->chosen >= 0) {
        int count;
        words = sw_plan_words(parsed, c, &d->steps[d->chosen], &count);
        if (!words) return SW_EXIT_FAILED;
        if (check_line(words, count) < 0) {
            sw_plan_words_free(words);
            return SW_EXIT_USAGE;
        }
    }
    const int ret = print(o, c, d, words);
    sw_plan_words_free(words);
    return ret < 0 || d->chosen < 0 ? SW_EXIT_FAILED : SW_EXIT_OK;
}

static int plan(const struct sw_plan_command_options *o, const struct sw_parsed *parsed) {
    struct sw_subject subject;
    struct sw_machine machine;
    struct sw_plan_case c = {
        .subject = &subject, .machine = &machine, .options = o->train, .nodes = o->nodes};
    struct sw_plan_decision *d = calloc(1, sizeof(*d));
    int status = SW_EXIT_FAILED;
    if (!sw_option_origin(parsed, "grad-dtype")) c.options.grad_dtype = c.options.dtype;
    if (!d || sw_subject_open(&subject, o->train.model) < 0) {
        free(d);
        return SW_EXIT_FAILED;
    }
    int ret = sw_machine_open(&machine, o->machine);
    if (ret == 0 && !o->machine)
        ret = sw_machine_use_folders(&machine, c.options.nvme, c.options.nvme_count);
    if (ret == 0) status = sw_plan_case_settle(&c) < 0 ? SW_EXIT_USAGE : decide(o, parsed, &c, d);
    sw_subject_close(&subject);
    free(d);
    return status;
}

int sw_cmd_plan(int argc, char **argv) {
    struct sw_plan_command_options options = {.nodes = 1};
    struct sw_parsed parsed;
    sw_train_defaults(&options.train);
    const int ret = sw_options_parse(sw_plan_command(), argc, argv, &options, &parsed);
    const int status = ret < 0 ? SW_EXIT_USAGE : ret > 0 ? SW_EXIT_OK : plan(&options, &parsed);
    sw_parsed_close(&parsed);
    return status;
}
