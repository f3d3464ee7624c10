/* base/log.c - formats a line and hands it to the sink under a lock, so lines never mix. */
#include "base/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static sw_log_sink current_sink;
static void *current_ctx;

void sw_log_set_sink(sw_log_sink sink, void *ctx) {
    pthread_mutex_lock(&lock);
    current_sink = sink;
    current_ctx = ctx;
    pthread_mutex_unlock(&lock);
}

void sw_log(enum sw_log_level level, const char *format, ...) {
    char line[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof(line), format, args);
    va_end(args);
    pthread_mutex_lock(&lock);
    if (current_sink) current_sink(level, line, current_ctx);
    pthread_mutex_unlock(&lock);
}
