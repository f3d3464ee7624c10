/* tools/report_scan.h - JSON taken apart while it is read, for files that are too large to be held.
 *
 * jansson's tree of a trace with a million tasks takes two gigabytes; this one keeps a buffer and
 * nothing else. It checks the form of what it passes (brackets, commas, strings, numbers); texts
 * are cut at the size asked for, and '?' stands for each byte beyond ASCII. Results: 0, or -ENODATA
 * (the file ended first), -EINVAL (not JSON, or not of this type), another -errno of reading.
 * Nothing is reported here. */
#ifndef TOOLS_REPORT_SCAN_H
#define TOOLS_REPORT_SCAN_H
#include <stddef.h>
#include <stdint.h>

enum { SW_SCAN_BUFFER_BYTES = 1 << 18, SW_SCAN_DEPTH_MAX = 64 };

struct sw_scan {
    int fd, error;
    uint32_t used, at;
    uint64_t before; /* bytes of the file before the buffer */
    char buffer[SW_SCAN_BUFFER_BYTES];
};

void sw_scan_init(struct sw_scan *scan, int fd); /* the file stays the caller's */

/* The next character that is no blank, not taken; or a result below 0. */
int sw_scan_peek(struct sw_scan *scan);
/* Where in the file it is. */
uint64_t sw_scan_offset(const struct sw_scan *scan);
/* Takes this character, after blanks. */
int sw_scan_take(struct sw_scan *scan, char c);

int sw_scan_string(struct sw_scan *scan, char *out, size_t out_size);
/* A number as text. */
int sw_scan_number(struct sw_scan *scan, char *out, size_t out_size);
/* A whole number from 0 on. */
int sw_scan_count(struct sw_scan *scan, uint64_t *out);
/* A number times 1000, to the nearest whole: microseconds as nanoseconds, exactly where there are
 * three digits behind the point. -ERANGE: not below SW_SCAN_TIME_MAX, either way. */
#define SW_SCAN_TIME_MAX ((int64_t)1 << 62)
int sw_scan_thousandths(struct sw_scan *scan, int64_t *out);
/* Passes any value. */
int sw_scan_skip(struct sw_scan *scan);

/* The members of an object, one by one. `first` starts as 1. 1: a key is in `key` and its value
 * comes next; 0: the object is over. Likewise the elements of an array. */
int sw_scan_member(struct sw_scan *scan, int *first, char *key, size_t key_size);
int sw_scan_element(struct sw_scan *scan, int *first);

#endif
