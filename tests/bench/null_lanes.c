/* tests/bench/null_lanes.c - the program with some of its tasks ending at once: what a step takes
 * when only the others work. A bound for the schedule, never a training run.
 *
 *   NULL_LANES=cpu    forward, backward and Adam do nothing
 *   NULL_LANES=nvme   nothing is read from the store or written to it
 *
 * The linker puts the functions below in the places of sw_executor_open() and sw_adam_update()
 * (--wrap); all else is the program's. */
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "cpu_adam/adam.h"
#include "engine/executor.h"

int __real_sw_executor_open(struct sw_executor **out, const struct sw_executor_ranks *ranks,
                            const struct sw_executor_ops *ops, void *ctx,
                            const struct sw_turn *const *turns, uint32_t turn_count);
int __wrap_sw_executor_open(struct sw_executor **out, const struct sw_executor_ranks *ranks,
                            const struct sw_executor_ops *ops, void *ctx,
                            const struct sw_turn *const *turns, uint32_t turn_count);

void __real_sw_adam_update(const struct sw_adam_variant *variant, const struct sw_adam_step *step,
                           const struct sw_adam_chunk *chunk, int threads,
                           struct sw_adam_extra *extra);
void __wrap_sw_adam_update(const struct sw_adam_variant *variant, const struct sw_adam_step *step,
                           const struct sw_adam_chunk *chunk, int threads,
                           struct sw_adam_extra *extra);

static struct sw_executor_ops real;
static int no_nvme;

static int run(void *ctx, struct sw_run *run, const struct sw_task *task, uint32_t rank,
               struct sw_stream *stream) {
    switch (task->kind) {
    case SW_TASK_FORWARD:
    case SW_TASK_BACKWARD:
    case SW_TASK_ADAM:
        return 0;
    default:
        return real.run(ctx, run, task, rank, stream);
    }
}

static int start(void *ctx, struct sw_run *run, const struct sw_task *task, uint32_t rank) {
    (void)ctx;
    (void)rank;
    (void)run;
    (void)task;
    return 1;
}

/* A record of the chunk's length that stays what it is: a slot that nothing was read into holds a
 * chunk of another length, whose master would be taken for a variance. Several in turn, so that
 * they come from memory as those of the slots do. */
static void *record_of(const struct sw_adam_chunk *chunk) {
    enum { LENGTHS = 64, TURNS = 4 };
    static struct {
        uint64_t count;
        void *records[TURNS];
        unsigned turn;
    } known[LENGTHS];
    int i = 0;
    while (i < LENGTHS && known[i].count && known[i].count != chunk->count) i++;
    if (i == LENGTHS) abort();
    known[i].count = chunk->count;
    void **record = &known[i].records[known[i].turn++ % TURNS];
    if (!*record) *record = calloc(1, sw_adam_record_bytes(&chunk->format, chunk->count) + 64);
    if (!*record) abort();
    return (char *)*record + (64 - (uintptr_t)*record % 64) % 64;
}

void __wrap_sw_adam_update(const struct sw_adam_variant *variant, const struct sw_adam_step *step,
                           const struct sw_adam_chunk *chunk, int threads,
                           struct sw_adam_extra *extra) {
    struct sw_adam_chunk own = *chunk;
    if (no_nvme) sw_adam_record_map(&own, record_of(chunk));
    __real_sw_adam_update(variant, step, &own, threads, extra);
}

int __wrap_sw_executor_open(struct sw_executor **out, const struct sw_executor_ranks *ranks,
                            const struct sw_executor_ops *ops, void *ctx,
                            const struct sw_turn *const *turns, uint32_t turn_count) {
    const char *lanes = getenv("NULL_LANES");
    struct sw_executor_ops some = real = *ops;
    if (lanes && !strcmp(lanes, "cpu")) some.run = run;
    no_nvme = lanes && !strcmp(lanes, "nvme");
    if (no_nvme) some.start = start;
    if (lanes) sw_warning("NULL_LANES=%s: what this run computes is worth nothing", lanes);
    return __real_sw_executor_open(out, ranks, &some, ctx, turns, turn_count);
}
