/* tools/cmd_train.c - spillway train: options in, a fine-tuned model folder out. */
#include "tools/commands.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc_guard.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/size.h"
#include "engine/trainer.h"
#include "tools/command_line.h"
#include "tools/kill_watch.h"
#include "tools/progress.h"
#include "tools/run_log.h"
#include "tools/stop_signal.h"
#include "tools/train_plan.h"

#ifndef SW_VERSION
#define SW_VERSION "unknown"
#endif

struct run {
    int argc;
    char **argv;
    struct sw_train_options options;
    struct sw_parsed parsed;
    struct sw_trainer *trainer;
    struct sw_run_log *log;
    struct sw_progress progress;
    struct sw_train_plan plan;
    double val_first, val_last;
    int evals;
    char saved[4096];
    uint64_t tokens; /* trained on by this process */
    double seconds;
    int budget_passed;
};

/* What a first signal does, by what the run is at. */
static const char before_steps[] =
    "\nspillway: stopping before another step is made; once more to leave at once\n";
static const char at_steps[] =
    "\nspillway: finishing the step, then saving; once more to leave at once, without saving\n";
static const char at_steps_unsaved[] =
    "\nspillway: finishing the step; nothing is saved (--sim-flops); once more to leave at once\n";

static const char *said_of_steps(const struct run *run) {
    return run->options.sim.flops ? at_steps_unsaved : at_steps;
}

/* ---- hooks ---- */

static void on_step(void *ctx, const struct sw_step_report *report) {
    struct run *run = ctx;
    run->tokens += report->tokens;
    run->seconds += report->step_s;
    const uint64_t budget = run->options.write_budget_bytes;
    if (budget && !run->budget_passed && sw_trainer_written_bytes(run->trainer) > budget) {
        char size[32];
        run->budget_passed = 1;
        sw_progress_clear(&run->progress);
        sw_warning("step %llu: the run has written more than --write-budget (%s) to the drives",
                   (unsigned long long)report->step, sw_size_print(budget, size, sizeof(size)));
    }
    sw_run_log_step(run->log, report);
    sw_train_plan_step(&run->plan, report);
    sw_progress_step(&run->progress, report);
}

static void on_progress(void *ctx, enum sw_beside_steps work, uint64_t done, uint64_t total) {
    struct run *run = ctx;
    sw_progress_beside(&run->progress, work, done, total);
}

static void on_stop_means(void *ctx, int saves) {
    sw_stop_say(saves ? said_of_steps(ctx) : before_steps);
}

static void on_eval(void *ctx, uint64_t step, double loss, uint64_t tokens) {
    struct run *run = ctx;
    loss = sw_unsigned_nan(loss);
    if (run->evals++ == 0) run->val_first = loss;
    run->val_last = loss;
    sw_progress_clear(&run->progress);
    printf("validation loss %.4f after step %llu (%llu tokens)\n", loss, (unsigned long long)step,
           (unsigned long long)tokens);
    fflush(stdout);
    sw_run_log_event(run->log, "eval", step,
                     json_pack("{s:o, s:I}", "val_loss",
                               isfinite(loss) ? json_real(loss) : json_null(), "tokens",
                               (json_int_t)tokens));
}

static void on_saved(void *ctx, uint64_t step, const char *dir) {
    struct run *run = ctx;
    sw_progress_clear(&run->progress);
    snprintf(run->saved, sizeof(run->saved), "%s", dir);
    printf("saved the model after step %llu in %s\n", (unsigned long long)step, dir);
    fflush(stdout);
    sw_run_log_event(run->log, "saved", step, json_pack("{s:s}", "dir", dir));
}

/* ---- what stands at the start ---- */

static void print_rows(const struct sw_byte_row *rows, int count, FILE *out) {
    char size[32];
    fprintf(out, "bytes:\n");
    for (int i = 0; i < count; i++)
        fprintf(out, "  %-8s %-36s %10s\n", sw_tier_name(rows[i].tier), rows[i].what,
                sw_size_print(rows[i].bytes, size, sizeof(size)));
    for (int tier = 0; tier < SW_TIER_COUNT; tier++)
        fprintf(
            out, "  %-8s %-36s %10s\n", sw_tier_name((enum sw_tier)tier), "in all",
            sw_size_print(sw_placement_bytes(rows, count, (enum sw_tier)tier), size, sizeof(size)));
}

/* A run that does not fit: its table, and whole command lines of runs that would. */
static void on_refused(void *ctx, const struct sw_refusal *refusal) {
    const struct run *run = ctx;
    print_rows(refusal->rows, refusal->row_count, stderr);
    for (int i = 0; i < refusal->remedy_count; i++) {
        const struct sw_remedy *r = &refusal->remedies[i];
        fprintf(stderr, "%s (%s):\n ", i ? "or" : "this would fit", r->effect);
        sw_print_quoted(program_invocation_name, stderr);
        sw_print_command(run->argc, run->argv, r, stderr);
    }
    if (refusal->remedy_count > 0) return;
    fprintf(stderr, "nothing was found that would fit");
    if (refusal->shorter_rows)
        fprintf(stderr, ": a shorter --seq-len needs less, %u would do", refusal->shorter_rows);
    fputc('\n', stderr);
}

static void print_start(const struct run *run) {
    const struct sw_trainer *t = run->trainer;
    printf("options:\n");
    sw_options_print(&run->parsed, sw_trainer_options(t), stdout);
    sw_train_plan_print(&run->plan);
    printf("numerics key: %s\n", sw_trainer_numerics_key(t));
    const unsigned long long params = sw_trainer_params(t), trained = sw_trainer_trained_params(t);
    printf("%llu parameters, ", params);
    if (trained < params) printf("%llu of them trained, ", trained);
    printf("%llu tokens per step\n", (unsigned long long)sw_trainer_tokens_per_step(t));
    const struct sw_train_options *o = sw_trainer_options(t);
    struct sw_byte_row rows[SW_BYTE_ROWS_MAX];
    const int count = sw_trainer_table(t, rows);
    print_rows(rows, count, stdout);
    if (sw_placement_bytes(rows, count, SW_TIER_NVME) && o->nvme_count == 0)
        printf("the store lies in %s\n", o->out);
    fflush(stdout);
}

static void print_loaded(const struct run *run, uint64_t began_ns) {
    char size[32];
    printf("loaded %s of weights and state in %.2f s\n",
           sw_size_print(sw_trainer_loaded_bytes(run->trainer), size, sizeof(size)),
           (double)(sw_now_ns() - began_ns) * 1e-9);
}

static void log_start(struct run *run) {
    if (!run->log) return;
    sw_run_log_object(
        run->log, json_pack("{s:s, s:s, s:o, s:s, s:I, s:I, s:I, s:I, s:o?}", "event", "start",
                            "version", SW_VERSION, "options",
                            sw_options_json(&run->parsed, sw_trainer_options(run->trainer)),
                            "numerics_key", sw_trainer_numerics_key(run->trainer), "parameters",
                            (json_int_t)sw_trainer_params(run->trainer), "trained_parameters",
                            (json_int_t)sw_trainer_trained_params(run->trainer), "tokens_per_step",
                            (json_int_t)sw_trainer_tokens_per_step(run->trainer), "loaded_bytes",
                            (json_int_t)sw_trainer_loaded_bytes(run->trainer), "plan",
                            sw_train_plan_json(&run->plan)));
}

/* ---- the end ---- */

static int log_digest(struct run *run, uint64_t step) {
    struct sw_digest d;
    const int ret = sw_trainer_digest(run->trainer, &d);
    if (ret < 0) return ret;
    char text[4][20];
    const uint64_t hashes[] = {d.master, d.momentum, d.variance, d.weights};
    for (int i = 0; i < 4; i++)
        snprintf(text[i], sizeof(text[i]), "%016llx", (unsigned long long)hashes[i]);
    printf("digest: master %s momentum %s variance %s weights %s\n", text[0], text[1], text[2],
           text[3]);
    sw_run_log_event(run->log, "digest", step,
                     json_pack("{s:s, s:s, s:s, s:s}", "master", text[0], "momentum", text[1],
                               "variance", text[2], "weights", text[3]));
    return 0;
}

/* Drives wear by what is written to them. */
static void print_written(const struct run *run) {
    const uint64_t written = sw_trainer_written_bytes(run->trainer);
    if (written == 0 || run->tokens == 0 || !(run->seconds > 0)) return;
    char all[32], token[32], day[32];
    printf("written to the drives: %s, %s per token, %s per day at this pace\n",
           sw_size_print(written, all, sizeof(all)),
           sw_size_print(written / run->tokens, token, sizeof(token)),
           sw_size_print((uint64_t)((double)written / run->seconds * 86400), day, sizeof(day)));
}

/* Nothing may be allocated while steps run. Told where the program's calls are watched. */
static void tell_allocations(const struct run *run, uint64_t step) {
    if (!sw_alloc_guard_watching()) return;
    const struct sw_alloc_figures before = sw_alloc_guard_before();
    const uint64_t inside = sw_alloc_guard_count();
    char size[32];
    printf("allocations inside steps: %llu; before the first: %llu calls for %s\n",
           (unsigned long long)inside, (unsigned long long)before.calls,
           sw_size_print(before.bytes, size, sizeof(size)));
    sw_run_log_event(run->log, "allocations", step,
                     json_pack("{s:I, s:I, s:I}", "inside_steps", (json_int_t)inside,
                               "calls_before", (json_int_t)before.calls, "bytes_before",
                               (json_int_t)before.bytes));
}

static void print_end(const struct run *run) {
    if (run->options.sim.flops) {
        printf("nothing was trained (--sim-flops): no model was written\n");
        return;
    }
    if (run->evals > 1)
        printf("validation loss: %.4f before, %.4f after\n", run->val_first, run->val_last);
    printf("the model is in %s\n", run->saved);
    printf("next:");
    sw_print_quoted(program_invocation_name, stdout);
    printf(" inspect");
    sw_print_quoted(run->saved, stdout);
    putchar('\n');
}

static int finish(struct run *run, int ret, uint64_t stopped_at) {
    uint64_t committed;
    sw_progress_clear(&run->progress);
    if (ret >= 0) tell_allocations(run, stopped_at);
    if (ret >= 0 && run->options.digest) {
        const int digest = log_digest(run, stopped_at);
        if (digest < 0) ret = digest;
    }
    if (ret >= 0) print_written(run);
    if (ret >= 0) sw_train_plan_end(&run->plan, run->log, stopped_at);
    if (ret == 1) {
        sw_run_log_event(run->log, "stopped", stopped_at, NULL);
        if (run->options.sim.flops)
            print_end(run);
        else if (stopped_at > 0)
            printf("stopped after step %llu; the weights are in %s, %s\n",
                   (unsigned long long)stopped_at, run->saved,
                   sw_trainer_commits(run->trainer, &committed) && committed == stopped_at
                       ? "the optimizer state is committed: --resume goes on from there"
                       : "the optimizer state is not kept");
        else
            printf("stopped before the first step; nothing was saved\n");
    } else if (ret == 0) {
        print_end(run);
    }
    fflush(stdout);
    return ret;
}

/* What an error in the middle of a run leaves. */
static void tell_commit(struct run *run) {
    uint64_t committed;
    sw_progress_clear(&run->progress);
    if (run->options.sim.flops || !sw_trainer_has_on_disk(run->trainer, &committed)) return;
    if (!strcmp(run->saved, run->options.out)) return; /* the result is there, the store is not */
    uint32_t process, processes;
    const char *folder = sw_trainer_store_place(run->trainer, &process, &processes);
    if (processes > 1) {
        sw_error("the run ends here; process %u has step %llu committed in %s: go on with "
                 "--resume, from the last step that all %u processes have",
                 process, (unsigned long long)committed, folder, processes);
        return;
    }
    sw_error("the run ends here; step %llu is committed: go on with --resume",
             (unsigned long long)committed);
}

/* Where the run begins, unless that is step 0 of a new one. */
static void tell_begin(const struct run *run, uint64_t start) {
    const char *import = run->options.import_dir;
    const int imported = sw_trainer_was_imported(run->trainer);
    if (start > 0 && !imported) {
        printf("resumed: going on after step %llu\n", (unsigned long long)start);
        if (import)
            printf("--import %s is not read: --resume found a commit to go on from\n", import);
        sw_run_log_event(run->log, "resumed_from", start, NULL);
    } else if (run->options.resume) {
        printf("resumed: nothing is committed; starting %s\n",
               imported ? "with --import" : "at step 0");
    }
    if (!imported) return;
    printf("imported: going on after step %llu of %s\n", (unsigned long long)start, import);
    sw_run_log_event(run->log, "imported", start, json_pack("{s:s}", "dir", import));
}

static int train(struct run *run) {
    const uint64_t began_ns = sw_now_ns();
    int ret = sw_trainer_start(run->trainer);
    sw_progress_clear(&run->progress);
    if (ret == 1)
        printf("stopped while loading; %s\n",
               run->options.resume ? "what is committed is as it was" : "nothing was saved");
    if (ret == 0 && sw_trainer_is_first(run->trainer))
        ret = sw_run_log_open(&run->log, run->options.log, run->options.resume);
    if (ret != 0) return ret;
    sw_stop_say(said_of_steps(run));
    const uint64_t start = sw_trainer_start_step(run->trainer);
    print_loaded(run, began_ns);
    log_start(run);
    tell_begin(run, start);
    if (sw_trainer_store_mode(run->trainer)[0])
        printf("store: %s\n", sw_trainer_store_mode(run->trainer));
    fflush(stdout);
    uint64_t stopped_at = 0;
    ret = sw_trainer_run(run->trainer, &stopped_at);
    if (ret < 0) tell_commit(run);
    ret = finish(run, ret, stopped_at);
    const int logged = sw_run_log_close(run->log);
    return ret < 0 || logged == 0 ? ret : logged;
}

/* The first of several processes speaks for all. */
static void keep_quiet(const struct run *run) {
    if (sw_trainer_is_first(run->trainer)) return;
    const int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
    if (null < 0) return;
    dup2(null, STDOUT_FILENO);
    close(null);
}

int sw_cmd_train(int argc, char **argv) {
    struct run run = {.argc = argc, .argv = argv};
    int ret = sw_parse_train(argc, argv, &run.options, &run.parsed);
    if (ret != 0) {
        sw_parsed_close(&run.parsed);
        return ret == 1 ? SW_EXIT_OK : SW_EXIT_USAGE;
    }
    sw_kill_watch_begin();
    if (sw_alloc_guard_open() < 0) {
        sw_kill_watch_end();
        sw_parsed_close(&run.parsed);
        return SW_EXIT_FAILED;
    }
    sw_stop_watch(before_steps);
    sw_progress_begin(&run.progress);
    const struct sw_trainer_hooks hooks = {.ctx = &run,
                                           .on_step = on_step,
                                           .on_refused = on_refused,
                                           .on_eval = on_eval,
                                           .on_progress = on_progress,
                                           .on_saved = on_saved,
                                           .on_stop_means = on_stop_means,
                                           .stop = &sw_stop_signal};
    ret = sw_train_plan_make(&run.plan, &run.options);
    if (ret == 0) ret = sw_trainer_open(&run.trainer, &run.options, &hooks);
    if (ret == 0) {
        keep_quiet(&run);
        print_start(&run);
        const int done = sw_trainer_done_before(run.trainer);
        if (done) printf("--resume: the result is already in %s; nothing to do\n", run.options.out);
        if (done && !run.options.dry_run && !run.options.keep_store)
            sw_trainer_forget_store(run.trainer);
        if (!done && !run.options.dry_run) ret = train(&run);
    }
    int number = run.trainer ? sw_trainer_stopped_by(run.trainer) : 0;
    const int closed = sw_trainer_close(run.trainer);
    if (ret >= 0 && closed < 0) ret = closed;
    sw_parsed_close(&run.parsed);
    sw_kill_watch_end();
    if (ret == -ERESTART && !atomic_load(&sw_stop_signal)) {
        sw_info("starting again, with NCCL_P2P_DISABLE=1");
        return SW_EXIT_AGAIN;
    }
    if (ret < 0) return SW_EXIT_FAILED;
    if (!number) number = atomic_load(&sw_stop_signal);
    return ret == 1 ? 128 + (number ? number : SIGINT) : SW_EXIT_OK;
}
