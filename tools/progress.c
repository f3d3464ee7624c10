/* tools/progress.c - the progress line. */
#include "tools/progress.h"

#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>
#include "base/clock.h"
#include "base/size.h"

enum { LINE_MAX_CHARS = 240 };

static const double live_s = 0.1, plain_s = 3.0;

void sw_progress_begin(struct sw_progress *p) {
    memset(p, 0, sizeof(*p));
    p->live = isatty(STDOUT_FILENO);
    p->last_print_ns = sw_now_ns();
}

void sw_progress_clear(struct sw_progress *p) {
    if (p->line_open) printf("\r\033[K");
    p->line_open = 0;
    fflush(stdout);
}

static int is_due(struct sw_progress *p, int force) {
    const uint64_t now = sw_now_ns();
    const double since = (double)(now - p->last_print_ns) * 1e-9;
    if (!force && since < (p->live ? live_s : plain_s)) return 0;
    p->last_print_ns = now;
    return 1;
}

static void show(struct sw_progress *p, const char *line) {
    if (p->live) {
        /* A line that wraps could not be drawn over: what does not fit is cut, the tiers first. */
        struct winsize size = {0};
        const int known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1;
        printf("\r%.*s\033[K", known ? size.ws_col - 1 : LINE_MAX_CHARS, line);
        p->line_open = 1;
    } else {
        printf("%s\n", line);
    }
    fflush(stdout);
}

static void print_left(double seconds, char *out, size_t out_size) {
    const unsigned long s = (unsigned long)(seconds + 0.5);
    if (s >= 3600)
        snprintf(out, out_size, "%lu h %02lu min", s / 3600, s / 60 % 60);
    else
        snprintf(out, out_size, "%lu:%02lu", s / 60, s % 60);
}

void sw_progress_step(struct sw_progress *p, const struct sw_step_report *r) {
    const int first = p->step_s_mean == 0;
    p->step_s_mean = p->step_s_mean > 0 ? 0.9 * p->step_s_mean + 0.1 * r->step_s : r->step_s;
    if (r->skipped) {
        sw_progress_clear(p);
        printf("step %llu skipped: %s\n", (unsigned long long)r->step, r->why_skipped);
    }
    if (!is_due(p, first || r->step == r->steps)) return;
    char left[32], memory[SW_TIER_COUNT][24], line[LINE_MAX_CHARS];
    print_left(p->step_s_mean * (double)(r->steps - r->step), left, sizeof(left));
    for (int m = 0; m < SW_TIER_COUNT; m++)
        sw_size_print(r->memory_bytes[m], memory[m], sizeof(memory[m]));
    snprintf(line, sizeof(line),
             "step %llu/%llu  loss %.4f  grad norm %.3f  %.0f tokens/s  %.3f s/step  %s left"
             "  clock %s %.0f%%  device %s host %s nvme %s",
             (unsigned long long)r->step, (unsigned long long)r->steps, sw_unsigned_nan(r->loss),
             sw_unsigned_nan(r->grad_norm),
             p->step_s_mean > 0 ? (double)r->tokens / p->step_s_mean : 0, p->step_s_mean, left,
             sw_lane_name(r->step_clock), 100 * r->clock_share, memory[SW_TIER_DEVICE],
             memory[SW_TIER_HOST], memory[SW_TIER_NVME]);
    show(p, line);
}

void sw_progress_beside(struct sw_progress *p, enum sw_beside_steps work, uint64_t done,
                        uint64_t total) {
    static const char *const names[] = {
        [SW_LOADING] = "loading", [SW_SAVING] = "saving", [SW_EXPORTING] = "exporting"};
    if (!is_due(p, 0)) return;
    char line[LINE_MAX_CHARS], part[32], all[32];
    if (work == SW_EVALUATING)
        snprintf(line, sizeof(line), "validation: row %llu of %llu", (unsigned long long)done,
                 (unsigned long long)total);
    else
        snprintf(line, sizeof(line), "%s: %s of %s", names[work],
                 sw_size_print(done, part, sizeof(part)), sw_size_print(total, all, sizeof(all)));
    show(p, line);
}
