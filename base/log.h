/* base/log.h - the one sink that every layer reports through.
 *
 * No library function prints or exits. A failure is reported here once, where the file, option,
 * tensor, offset or rank is known, with the likely cause; the caller gets -errno. tools/ sets the
 * sink; without one nothing is printed. Threads: any. */
#ifndef BASE_LOG_H
#define BASE_LOG_H

enum sw_log_level { SW_LOG_ERROR, SW_LOG_WARNING, SW_LOG_INFO };

/* One complete line, without its newline. Called by one thread at a time. */
typedef void (*sw_log_sink)(enum sw_log_level level, const char *line, void *ctx);

/* Sets the sink; NULL drops every line. Call it before the first thread starts. */
void sw_log_set_sink(sw_log_sink sink, void *ctx);

void sw_log(enum sw_log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

#define sw_error(...)   sw_log(SW_LOG_ERROR, __VA_ARGS__)
#define sw_warning(...) sw_log(SW_LOG_WARNING, __VA_ARGS__)
#define sw_info(...)    sw_log(SW_LOG_INFO, __VA_ARGS__)

#endif
