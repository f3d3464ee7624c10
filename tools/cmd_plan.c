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
                 const struct sw_plan_decision *d, const struct sw_plan_answer *a) {
    if (!o->json) {
        sw_plan_print(c, d, a, stdout);
        return 0;
    }
    json_t *root = sw_plan_json(c, d, a);
    const int ret = root ? json_dumpf(root, stdout, JSON_INDENT(2)) : -1;
    putchar('\n');
    json_decref(root);
    return ret;
}

/* The exit status. */
static int answer(const struct sw_plan_command_options *o, const struct sw_parsed *parsed,
                  const struct sw_plan_case *c, const struct sw_plan_decision *d,
                  struct sw_plan_answer *a) {
    int count, ret = sw_plan_search(c, d, &a->found);
    const struct sw_fit *fit = &a->found.step.fit;
    if (ret == 0 && !a->found.not_searched) ret = sw_plan_balance(c, fit, &a->balance);
    if (ret < 0) return SW_EXIT_FAILED;
    a->words = sw_plan_words(parsed, c, &a->found.step, &count);
    if (!a->words) return SW_EXIT_FAILED;
    if (check_line(a->words, count) < 0) return SW_EXIT_USAGE;
    struct sw_simulation times;
    if (o->train.trace && sw_simulate(c, fit, o->train.trace, &times) < 0) return SW_EXIT_FAILED;
    return print(o, c, d, a) < 0 ? SW_EXIT_FAILED : SW_EXIT_OK;
}

static int decide(const struct sw_plan_command_options *o, const struct sw_parsed *parsed,
                  const struct sw_plan_case *c, struct sw_plan_decision *d) {
    if (sw_plan_decide(c, d) < 0) return SW_EXIT_FAILED;
    if (d->step_count == 0) {
        sw_error("plan: no scheme has weights, optimizer and stage where the options want them; "
                 "leave some of --params, --optimizer, --gradients, --zero open");
        return SW_EXIT_USAGE;
    }
    if (d->chosen < 0) {
        print(o, c, d, NULL);
        return SW_EXIT_FAILED;
    }
    struct sw_plan_answer *a = calloc(1, sizeof(*a));
    const int status = a ? answer(o, parsed, c, d, a) : SW_EXIT_FAILED;
    if (a) sw_plan_words_free(a->words);
    free(a);
    return status;
}

/* What a plan takes that train does not. */
static int check_options(const struct sw_plan_command_options *o, const struct sw_parsed *parsed) {
    const char *wrong = NULL;
    if (!parsed->operand && !o->train.model)
        wrong = "plan: MODEL (or --model) is required: a folder, a config.json, a known shape or a "
                "count of parameters";
    else if (parsed->operand && o->train.model)
        wrong = "plan: MODEL and --model are the same; give one of them";
    else if (o->tokens && sw_option_origin(parsed, "accumulate"))
        wrong = "--tokens and --accumulate both tell the tokens of a step; give one of them";
    if (!wrong) return 0;
    sw_error("%s", wrong);
    return -EINVAL;
}

static int plan(const struct sw_plan_command_options *o, const struct sw_parsed *parsed) {
    struct sw_subject subject;
    struct sw_machine machine;
    struct sw_plan_case c = {.subject = &subject,
                             .machine = &machine,
                             .options = o->train,
                             .nodes = o->nodes,
                             .tokens = o->tokens};
    struct sw_plan_decision *d = calloc(1, sizeof(*d));
    const char *model = parsed->operand ? parsed->operand : o->train.model;
    int status = SW_EXIT_FAILED;
    if (!sw_option_origin(parsed, "grad-dtype")) c.options.grad_dtype = c.options.dtype;
    if (check_options(o, parsed) < 0) {
        free(d);
        return SW_EXIT_USAGE;
    }
    if (!d || sw_subject_open(&subject, model) < 0) {
        free(d);
        return SW_EXIT_FAILED;
    }
    int ret = sw_machine_open(&machine, o->train.machine);
    if (ret == 0 && !o->train.machine)
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
