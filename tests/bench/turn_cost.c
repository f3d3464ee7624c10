/* tests/bench/turn_cost.c - what turns of the size that a plan is about cost by themselves: to
 * build, to check, and to execute on lanes that do nothing, beside the time of the step that they
 * are for.
 *
 *     build/release/tests/bench/turn_cost [STEPS [MODEL MACHINE TOKENS SEQ_LEN [CHUNK_MIB]]]
 *
 * A lane is a thread, and a machine has more cores than lanes: what a step waits for is the lane
 * that sets its time, and what that one takes; all lanes together say what it takes of the cores.
 * Times are processor time, so a lane that waits for another takes none but for going to sleep and
 * waking up, which here it does far more often than with tasks that take their time.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "plan/simulate.h"
#include "tests/support_null_lanes.h"
#include "tests/support_plan.h"

static double seconds(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double since(uint64_t start_ns) {
    return (double)(sw_now_ns() - start_ns) * 1e-9;
}

static int show_build(struct planned_turns *p) {
    const struct sw_turn *list[5];
    char why[256] = "";
    uint64_t start = sw_now_ns();
    int ret = planned_build(p);
    if (ret < 0) return ret;
    printf("  built in %.3f s: %u tasks a rank, with first, second and last turn\n", since(start),
           p->steady.task_count);
    start = sw_now_ns();
    const uint32_t count = planned_list(p, 4, list);
    ret = sw_turn_check(&p->shape, list, (int)count, why, sizeof(why));
    printf("  checked in %.3f s: %s\n", since(start), ret < 0 ? why : "every invariant holds");
    return ret;
}

/* Processor time: of all lanes, and of the busiest one of each kind. */
static void lane_times(struct null_lanes *lanes, double *all, double busiest[SW_LANE_COUNT]) {
    *all = 0;
    memset(busiest, 0, SW_LANE_COUNT * sizeof(*busiest));
    for (uint32_t i = 0; i < atomic_load(&lanes->lane_count); i++) {
        const struct null_lane *lane = &lanes->lanes[i];
        const double own = seconds(lane->clock);
        *all += own;
        if (own > busiest[lane->id]) busiest[lane->id] = own;
    }
}

static int execute(struct null_lanes *lanes, const struct planned_turns *p, uint32_t steps) {
    int ret = 0;
    for (uint32_t s = 0; s < steps && ret == 0; s++)
        ret = null_lanes_push(lanes, s == 0 ? &p->first : s == 1 ? &p->second : &p->steady);
    if (ret == 0 && p->has_drain) ret = null_lanes_push(lanes, &p->drain);
    return ret == 0 ? null_lanes_idle(lanes) : ret;
}

static void show_lanes(struct null_lanes *lanes, const struct planned_turns *p, uint32_t steps,
                       double step_s, double wall_s) {
    double all, busiest[SW_LANE_COUNT];
    lane_times(lanes, &all, busiest);
    const double tasks = (double)null_lanes_tasks(&p->steady, lanes->ranks);
    printf("  null lanes: %.0f tasks a step, %.3f s a step here, %.3f s of processor time in all\n",
           tasks, wall_s / steps, all / steps);
    printf("  %.2f us a task; %.3f%% of the step on each of the machine's %.0f cores\n",
           all / steps / tasks * 1e6, 100 * all / steps / (step_s * p->machine.cores),
           p->machine.cores);
    for (int l = 0; l < SW_LANE_COUNT; l++)
        if (p->steady.lane_count[l])
            printf("    %-10s %8.1f ms of a lane, %.3f%% of the step\n",
                   sw_lane_name((enum sw_lane)l), busiest[l] / steps * 1e3,
                   100 * busiest[l] / steps / step_s);
}

static int show_execution(const struct planned_turns *p, uint32_t steps, double step_s) {
    static struct null_lanes lanes;
    const struct sw_turn *turns[] = {&p->first, &p->second, &p->steady, &p->drain};
    const uint32_t ranks = p->run.options.ranks;
    int ret = null_lanes_open(&lanes, ranks, p->rates.nodes.of, turns, 3 + (uint32_t)p->has_drain);
    if (ret < 0) return ret;
    const uint64_t start = sw_now_ns();
    ret = execute(&lanes, p, steps);
    if (ret == 0) show_lanes(&lanes, p, steps, step_s, since(start));
    null_lanes_close(&lanes);
    return ret;
}

static int show(const struct planned_case *of, uint32_t steps) {
    static struct planned_turns p;
    struct sw_simulation s = {0};
    printf("%s on %s, %llu tokens a step\n", of->model, of->machine,
           (unsigned long long)of->tokens);
    int ret = planned_open(&p, of);
    if (ret == 0) ret = show_build(&p);
    if (ret == 0) ret = sw_simulate(&p.c, &p.decision.steps[p.decision.chosen].fit, NULL, &s);
    if (ret == 0) printf("  the step that is played: %.3f s\n", s.step_s);
    if (ret == 0) ret = show_execution(&p, steps, s.step_s);
    if (ret < 0) fprintf(stderr, "failed: %s\n", strerror(-ret));
    planned_close(&p);
    return ret;
}

int main(int argc, char **argv) {
    const uint32_t steps = argc > 1 ? (uint32_t)atoi(argv[1]) : 10;
    static const struct planned_case cases[] = {
        {"llama-3-70b", "8xh100", 131072, 4096, SW_OVERLAP_AUTO, 0},
        {"llama-3-70b", "8xh100:ram=1T", 131072, 4096, SW_OVERLAP_AUTO, 0}};
    if (argc == 6 || argc == 7) {
        const struct planned_case own = {argv[2],
                                         argv[3],
                                         strtoull(argv[4], NULL, 10),
                                         (uint32_t)atoi(argv[5]),
                                         SW_OVERLAP_AUTO,
                                         argc == 7 ? strtoull(argv[6], NULL, 10) << 20 : 0};
        return show(&own, steps) < 0;
    }
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        if (show(&cases[i], steps) < 0) return 1;
    return 0;
}
