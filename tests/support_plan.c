/* tests/support_plan.c - see the header. */
#include "tests/support_plan.h"

#include <errno.h>

static int decide(struct planned_turns *p, const struct planned_case *of) {
    int ret = sw_subject_open(&p->subject, of->model);
    if (ret == 0) ret = sw_machine_open(&p->machine, of->machine);
    if (ret < 0) return ret;
    p->c = (struct sw_plan_case){
        .subject = &p->subject, .machine = &p->machine, .nodes = 1, .tokens = of->tokens};
    sw_train_defaults(&p->c.options);
    p->c.options.seq_len = of->seq_len;
    p->c.options.overlap = of->overlap;
    if (of->chunk_bytes) p->c.options.chunk_bytes = of->chunk_bytes;
    ret = sw_plan_case_settle(&p->c);
    if (ret == 0) ret = sw_plan_decide(&p->c, &p->decision);
    return ret == 0 && p->decision.chosen < 0 ? -ENOSPC : ret;
}

int planned_open(struct planned_turns *out, const struct planned_case *of) {
    *out = (struct planned_turns){0};
    int ret = decide(out, of);
    if (ret < 0) return ret;
    ret = sw_plan_run_open(&out->run, &out->c, &out->decision.steps[out->decision.chosen].fit);
    if (ret < 0) return ret;
    sw_rates_open(&out->rates, &out->c, &out->run);
    ret = sw_turn_work_shape(&out->shape, &out->rates.work, &out->run.options, 0);
    out->has_drain = sw_turn_shape_is_late(&out->shape);
    return ret;
}

int planned_build(struct planned_turns *p) {
    const int late = p->has_drain;
    int ret = sw_turn_build(&p->first, &p->shape, SW_TURN_TRAIN, 0, NULL);
    if (ret == 0) ret = sw_turn_build(&p->second, &p->shape, SW_TURN_TRAIN, late, &p->first);
    if (ret == 0) ret = sw_turn_build(&p->steady, &p->shape, SW_TURN_TRAIN, late, &p->second);
    if (ret == 0 && late) ret = sw_turn_build(&p->drain, &p->shape, SW_TURN_DRAIN, 1, &p->steady);
    return ret;
}

uint32_t planned_list(const struct planned_turns *p, uint32_t steps, const struct sw_turn **list) {
    uint32_t count = 0;
    for (; count < steps; count++)
        list[count] = count == 0 ? &p->first : count == 1 ? &p->second : &p->steady;
    if (p->has_drain) list[count++] = &p->drain;
    return count;
}

void planned_close(struct planned_turns *p) {
    sw_turn_free(&p->first);
    sw_turn_free(&p->second);
    sw_turn_free(&p->steady);
    sw_turn_free(&p->drain);
    sw_plan_run_close(&p->run);
    sw_subject_close(&p->subject);
}
