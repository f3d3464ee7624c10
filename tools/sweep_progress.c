/* tools/sweep_progress.c - see the header. The handler calls nothing but what signals may. */
#include "tools/sweep_progress.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "base/clock.h"
#include "tools/plan_sweep.h"
#include "tools/signals.h"

enum { LINE_MAX_CHARS = 200 };

/* What is over sooner needs no line. */
#define SILENT_S 0.5

static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
enum { SIGNALS = sizeof(signals) / sizeof(signals[0]) };
static struct sigaction before[SIGNALS];
static uint64_t begun_ns;
static atomic_int line_open;

static void clear_line(void) {
    static const char clear[] = "\r\033[K";
    if (!atomic_exchange(&line_open, 0)) return;
    const ssize_t ignored = write(STDERR_FILENO, clear, sizeof(clear) - 1);
    (void)ignored;
}

static void on_signal(int number) {
    static const char said[] = "spillway: plan: stopped; nothing was written\n";
    clear_line();
    const ssize_t ignored = write(STDERR_FILENO, said, sizeof(said) - 1);
    (void)ignored;
    _exit(128 + number);
}

static void show(void *ctx, uint32_t done, uint32_t points, double value) {
    const struct sw_sweep_range *range = ctx;
    char text[40], line[LINE_MAX_CHARS];
    struct winsize size = {0};
    const char *name = sw_sweep_name(range->what);
    if ((double)(sw_now_ns() - begun_ns) * 1e-9 < SILENT_S) return;
    sw_sweep_value_text(range->what, value, text, sizeof(text));
    if (done < points)
        snprintf(line, sizeof(line), "sweep of %s: point %u of %u, %s", name, done + 1, points,
                 text);
    else
        snprintf(line, sizeof(line), "sweep of %s: where the clock changes, %s", name, text);
    /* A line that wraps could not be drawn over. */
    const int known = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1;
    atomic_store(&line_open, 1); /* before it is seen, and an interrupt comes */
    fprintf(stderr, "\r%.*s\033[K", known ? size.ws_col - 1 : LINE_MAX_CHARS, line);
    fflush(stderr);
}

void sw_sweep_progress_begin(struct sw_sweep_range *range) {
    for (int i = 0; i < SIGNALS; i++) {
        sigaction(signals[i], NULL, &before[i]);
        sw_catch_signal(signals[i], on_signal);
    }
    begun_ns = sw_now_ns();
    if (!isatty(STDERR_FILENO)) return;
    range->told = show;
    range->told_ctx = range;
}

void sw_sweep_progress_end(void) {
    clear_line();
    for (int i = 0; i < SIGNALS; i++) sigaction(signals[i], &before[i], NULL);
}
