/* tools/cmd_plan.c - `spillway plan`: will it fit, how, and which line to run. */
#include "tools/commands.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "engine/output.h"
#include "plan/played.h"
#include "tools/plan.h"
#include "tools/plan_sweep.h"
#include "tools/sweep_progress.h"

/* The line that is offered is read as train would read it: what it refuses (options that exclude
 * each other) is refused here. */
static int check_line(char **words, int count) {
    struct sw_train_options options;
    struct sw_parsed parsed;
    const int ret = sw_parse_train(count, words, &options, &parsed);
    sw_parsed_close(&parsed);
    return ret;
}

/* The sweep that --sweep asks for, drawn where a page is wanted. step: NULL where nothing fits. */
struct what_if {
    struct sw_sweep sweep;
    struct sw_sweep_view view;
    char about[512];
};

static int sweep(const struct sw_plan_command_options *o, const struct sw_plan_case *c,
                 const struct sw_plan_step *step, struct what_if *out) {
    struct sw_sweep_range range;
    int ret = sw_sweep_parse(o->sweep, &range);
    range.no_search = o->no_search;
    if (ret == 0) {
        sw_sweep_progress_begin(&range);
        ret = sw_sweep_case(c, step, &range, &out->sweep);
        sw_sweep_progress_end();
    }
    snprintf(out->about, sizeof(out->about), "%.250s on %s", c->subject->name, c->machine->name);
    out->view = (struct sw_sweep_view){range.what, out->about, &out->sweep, NULL};
    return ret < 0 || !o->sweep_page ? ret
                                     : sw_sweep_page(&out->view, "--sweep-page", o->sweep_page);
}

/* Before anything is counted. */
static int check_sweep(const struct sw_plan_command_options *o, const struct sw_plan_case *c) {
    struct sw_sweep_range range;
    double own;
    if (!o->sweep) return 0;
    int ret = sw_sweep_parse(o->sweep, &range);
    if (ret == 0) ret = sw_sweep_own(c, range.what, &own);
    if (ret == 0) ret = sw_output_check_kind("--sweep-page", o->sweep_page, 1);
    return ret == 0 ? sw_output_check_file("--sweep-page", o->sweep_page) : ret;
}

static int print(const struct sw_plan_command_options *o, const struct sw_plan_case *c,
                 const struct sw_plan_decision *d, const struct sw_plan_answer *a) {
    struct what_if what_if;
    const struct sw_plan_step *step = a ? &a->found.step : NULL;
    if (o->sweep && sweep(o, c, step, &what_if) < 0) return -1;
    if (!o->json) {
        sw_plan_print(c, d, a, stdout);
        if (o->sweep) sw_sweep_print(&what_if.view, stdout);
        return 0;
    }
    json_t *root = sw_plan_json(c, d, a);
    if (root && o->sweep) json_object_set_new(root, "sweep", sw_sweep_json(&what_if.view));
    const int ret = root ? json_dumpf(root, stdout, JSON_INDENT(2)) : -1;
    putchar('\n');
    json_decref(root);
    return ret;
}

/* The exit status. */
static int answer(const struct sw_plan_command_options *o, const struct sw_parsed *parsed,
                  const struct sw_plan_case *c, const struct sw_plan_decision *d,
                  struct sw_plan_answer *a) {
    int count, ret = o->no_search ? sw_plan_take(c, d, &a->found) : sw_plan_search(c, d, &a->found);
    const struct sw_fit *fit = &a->found.step.fit;
    if (ret == 0 && a->found.is_searched) ret = sw_plan_balance(c, fit, &a->balance);
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
    else if (o->sweep_page && !o->sweep)
        wrong = "--sweep-page has no effect without --sweep";
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
    c.played = sw_played_open(); /* without it all is played again */
    int ret = sw_machine_open(&machine, o->train.machine);
    if (ret == 0 && !o->train.machine)
        ret = sw_machine_use_folders(&machine, c.options.nvme, c.options.nvme_count);
    if (ret == 0)
        status = sw_plan_case_settle(&c) < 0 || check_sweep(o, &c) < 0 ? SW_EXIT_USAGE
                                                                       : decide(o, parsed, &c, d);
    sw_played_close(c.played);
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
