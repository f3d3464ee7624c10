/* tools/train_plan.c - see the header. */
#include "tools/train_plan.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "engine/world.h"
#include "offload/topology.h"
#include "plan/played.h"
#include "tools/bench.h"
#include "tools/plan.h"

/* The first steps begin with idle lanes and read nothing of what was never updated. */
enum { STEPS_LEFT_OUT = 2 };

/* ---- the machine ---- */

/* The folder that is there of a path that is yet to be made. */
static void existing_folder(const char *path, char out[PATH_MAX]) {
    snprintf(out, PATH_MAX, "%s", path);
    while (access(out, F_OK) < 0) {
        char *slash = strrchr(out, '/');
        if (!slash) {
            strcpy(out, ".");
            return;
        }
        *(slash == out ? slash + 1 : slash) = 0;
    }
}

static int open_machine(struct sw_machine *m, const struct sw_train_options *o) {
    char out[PATH_MAX];
    const char *const here[] = {out};
    struct sw_topology topology;
    int ret = sw_machine_open(m, o->machine);
    if (ret < 0 || o->machine) return ret;
    existing_folder(o->out, out);
    ret = o->nvme_count ? sw_machine_use_folders(m, o->nvme, o->nvme_count)
                        : sw_machine_use_folders(m, here, 1);
    if (ret == 0) ret = sw_topology_read(&topology);
    /* A container may have less than what was there when the machine was measured. */
    if (ret == 0 && (double)topology.memory_bytes < m->memory_bytes)
        m->memory_bytes = (double)topology.memory_bytes;
    return ret;
}

/* ---- the plan ---- */

static int has_open(const struct sw_train_options *o) {
    return !sw_tiers_chosen(o->params) || !sw_tiers_chosen(o->optimizer) ||
           !sw_tiers_chosen(o->gradients) || !sw_tiers_chosen(o->activations);
}

/* The budgets that the fit was held to are the run's: its rings are then as long. */
static void apply(struct sw_train_options *o, const struct sw_fit *fit) {
    const struct sw_train_options *f = &fit->options;
    sw_plan_place(o, f);
    if (!o->device_memory_bytes) o->device_memory_bytes = f->device_memory_bytes;
    if (!o->host_memory_bytes) o->host_memory_bytes = f->host_memory_bytes;
}

static int search(struct sw_train_plan *p, const struct sw_plan_case *c,
                  struct sw_train_options *o) {
    struct sw_plan_decision *d = calloc(1, sizeof(*d));
    int ret = d ? sw_plan_decide(c, d) : -ENOMEM;
    if (!d) sw_error("no memory to plan the run");
    /* What does not fit is refused by the run itself, with what would. */
    if (ret == 0 && d->chosen < 0) snprintf(p->why_not, sizeof(p->why_not), "nothing fits");
    if (ret == 0 && d->chosen >= 0) {
        ret = sw_plan_search(c, d, &p->found);
        p->is_made = ret == 0 && p->found.is_searched;
        if (p->found.missing)
            snprintf(p->why_not, sizeof(p->why_not), "the profile does not tell %s",
                     p->found.missing);
    }
    free(d);
    if (p->is_made) apply(o, &p->found.step.fit);
    return ret;
}

static int plan_on(struct sw_train_plan *p, const struct sw_machine *m,
                   struct sw_train_options *o) {
    struct sw_subject subject;
    struct sw_plan_case c = {.subject = &subject, .machine = m, .options = *o, .nodes = 1};
    int ret = sw_subject_open(&subject, o->model);
    if (ret < 0) return ret;
    c.played = sw_played_open(); /* without it all is played again */
    ret = sw_plan_case_settle(&c);
    if (ret == 0) ret = search(p, &c, o);
    sw_played_close(c.played);
    sw_subject_close(&subject);
    return ret;
}

int sw_train_plan_make(struct sw_train_plan *p, struct sw_train_options *o) {
    struct sw_machine m;
    const int open = has_open(o);
    *p = (struct sw_train_plan){0};
    if (sw_world_is_launched()) {
        if (open) snprintf(p->why_not, sizeof(p->why_not), "the run has several processes");
        return 0;
    }
    int ret = open_machine(&m, o);
    if (ret < 0) return ret;
    snprintf(p->machine, sizeof(p->machine), "%.40s%s%.16s", m.name,
             m.measured[0] ? ", measured on " : "", m.measured);
    if (m.flops_per_s > 0)
        ret = plan_on(p, &m, o);
    else
        snprintf(p->why_not, sizeof(p->why_not),
                 "nobody measured this machine (spillway bench all)");
    if (!open) p->why_not[0] = 0;
    return ret;
}

/* ---- what is said ---- */

static void print_memory(const struct sw_fit *f) {
    char need[32], have[32];
    const char *between = "plan: ";
    for (int t = 0; t < SW_TIER_COUNT; t++) {
        if (f->need_bytes[t] <= 0) continue;
        printf("%s%s %s", between, sw_tier_name((enum sw_tier)t),
               sw_plan_size(f->need_bytes[t], need, sizeof(need)));
        if (f->budget_bytes[t] > 0)
            printf(" of %s", sw_plan_size(f->budget_bytes[t], have, sizeof(have)));
        between = ", ";
    }
    putchar('\n');
}

void sw_train_plan_print(const struct sw_train_plan *p) {
    char text[512], step[32], rule[32];
    const struct sw_simulation *s = &p->found.times;
    if (p->why_not[0]) printf("plan: none, as %s; what is open lies where it fits\n", p->why_not);
    if (!p->is_made) return;
    const struct sw_train_options *o = &p->found.step.fit.options;
    sw_plan_say_placement(o, o->ranks, text, sizeof(text));
    printf("plan: %s\n", text);
    printf("plan: %s a step, %.0f tokens/s; the step clock is %s, %.0f%% of the critical path\n",
           sw_plan_duration(s->step_s, step, sizeof(step)), s->tokens_per_s,
           sw_lane_name(s->step_clock), 100 * s->share[s->step_clock]);
    print_memory(&p->found.step.fit);
    printf("plan: the fastest of %" PRIu32 " that were played; the rule's choice takes %s\n",
           p->found.played, sw_plan_duration(p->found.decided_step_s, rule, sizeof(rule)));
    printf("plan: on %s\n", p->machine);
}

json_t *sw_train_plan_json(const struct sw_train_plan *p) {
    const struct sw_simulation *s = &p->found.times;
    if (!p->is_made) return NULL;
    return json_pack("{s:f, s:f, s:s, s:f, s:i, s:s}", "step_s", s->step_s, "tokens_per_s",
                     s->tokens_per_s, "step_clock", sw_lane_name(s->step_clock), "decided_step_s",
                     p->found.decided_step_s, "played", (int)p->found.played, "machine",
                     p->machine);
}

/* ---- beside the run ---- */

void sw_train_plan_step(struct sw_train_plan *p, const struct sw_step_report *report) {
    if (p->seen++ < STEPS_LEFT_OUT) return;
    p->step_s[(p->seen - 1 - STEPS_LEFT_OUT) % SW_TRAIN_PLAN_STEPS] = report->step_s;
    p->clocks[report->step_clock]++;
}

void sw_train_plan_end(struct sw_train_plan *p, struct sw_run_log *log, uint64_t step) {
    if (!p->is_made || p->seen <= STEPS_LEFT_OUT) return;
    char told[32], took[32];
    const uint64_t count = p->seen - STEPS_LEFT_OUT;
    const int kept = count < SW_TRAIN_PLAN_STEPS ? (int)count : SW_TRAIN_PLAN_STEPS;
    const double predicted_s = p->found.times.step_s, step_s = sw_bench_median(p->step_s, kept);
    enum sw_lane clock = SW_LANE_COMPUTE;
    for (int l = 0; l < SW_LANE_COUNT; l++)
        if (p->clocks[l] > p->clocks[clock]) clock = (enum sw_lane)l;
    const char *const clocks[] = {sw_lane_name(p->found.times.step_clock), sw_lane_name(clock)};
    printf("predicted %s a step, measured %s (median of %d), %+.1f%%; step clock predicted %s, "
           "measured %s\n",
           sw_plan_duration(predicted_s, told, sizeof(told)),
           sw_plan_duration(step_s, took, sizeof(took)), kept, 100 * (step_s / predicted_s - 1),
           clocks[0], clocks[1]);
    sw_run_log_event(log, "predicted", step,
                     json_pack("{s:f, s:f, s:i, s:s, s:s}", "predicted_step_s", predicted_s,
                               "measured_step_s", step_s, "steps", kept, "predicted_clock",
                               clocks[0], "measured_clock", clocks[1]));
}
