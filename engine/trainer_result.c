/* engine/trainer_result.c - whether the result of a run is there already, and what tells.
 *
 * A model alone does not: it may be another run's, or this one's of fewer steps, which a store that
 * was kept has gone on from. */
#include "engine/trainer_internal.h"

#include <errno.h>
#include <string.h>
#include "base/log.h"
#include "engine/output.h"
#include "engine/result.h"

int sw_trainer_write_result(struct sw_trainer *t) {
    struct sw_result result = {.run = t->run_id, .step = t->options.steps};
    memcpy(result.identity, t->identity, sizeof(result.identity));
    return sw_result_write(t->options.out, &result);
}

/* Without a store there is nothing to go on from: what is there is this run's result, or in its
 * place. */
static int refuse_another(const struct sw_trainer *t, const struct sw_result *result) {
    const struct sw_train_options *o = &t->options;
    int length = 0;
    const char *line = sw_commit_differs(t->identity, result->identity, &length);
    if (line) {
        const char *want = line + length + 1;
        const char *have = sw_commit_value(result->identity, line, length);
        sw_error(
            "--resume: the model in %s is of another run: its %.*s is '%.*s' and this run's is "
            "'%.*s'; choose another --out, or replace it with --restart",
            o->out, length, line, (int)strcspn(have, "\n"), have, (int)strcspn(want, "\n"), want);
        return -EEXIST;
    }
    if (result->step == o->steps) return 0;
    sw_error(
        "--resume: the model in %s is that of step %llu, --steps is %llu, and no store was kept "
        "to go on from: choose another --out, or begin anew with --restart",
        o->out, (unsigned long long)result->step, (unsigned long long)o->steps);
    return -EEXIST;
}

/* 1, 0 or an error; in the first process. */
static int find_result(const struct sw_trainer *t) {
    struct sw_result result;
    const char *out = t->options.out;
    if (!sw_output_has_model(out)) return 0;
    if (t->resuming && t->resumed.step < t->options.steps) return 0;
    const int found = sw_result_read(out, &result);
    if (found < 0) return found;
    if (t->resuming) /* else it is an earlier result, and the new one was not written */
        return found && result.run == t->run_id && result.step == t->options.steps;
    if (!found) {
        sw_warning("--resume: nothing in %s tells which run its model is of; it is taken for the "
                   "result of this one",
                   out);
        return 1;
    }
    const int ret = refuse_another(t, &result);
    return ret < 0 ? ret : 1;
}

int sw_trainer_check_result(struct sw_trainer *t) {
    int done[SW_RANKS_MAX], mine = 0;
    if (!t->options.resume) return 0;
    if (t->first_rank == 0) mine = find_result(t);
    if (mine < 0) return mine;
    const int ret = sw_trainer_share(t, CHANNEL_MAIN, done, &mine, sizeof(mine));
    if (ret == 0) t->done_before = done[0];
    return ret;
}
