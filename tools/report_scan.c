/* tools/report_scan.c - a buffer that slides over the file, and the pieces of JSON in it. */
#include "tools/report_scan.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NUMBER_BYTES_MAX = 64 };

void sw_scan_init(struct sw_scan *scan, int fd) {
    scan->fd = fd;
    scan->error = 0;
    scan->used = scan->at = 0;
    scan->before = 0;
}

uint64_t sw_scan_offset(const struct sw_scan *scan) {
    return scan->before + scan->at;
}

static int refill(struct sw_scan *scan) {
    if (scan->error) return scan->error;
    scan->before += scan->used;
    scan->used = scan->at = 0;
    ssize_t got;
    do got = read(scan->fd, scan->buffer, sizeof(scan->buffer));
    while (got < 0 && errno == EINTR);
    if (got > 0)
        scan->used = (uint32_t)got;
    else
        scan->error = got < 0 ? -errno : -ENODATA;
    return scan->error;
}

/* The next character, not taken, or a result below 0. */
static inline int next(struct sw_scan *scan) {
    if (scan->at == scan->used && refill(scan) < 0) return scan->error;
    return (unsigned char)scan->buffer[scan->at];
}

int sw_scan_peek(struct sw_scan *scan) {
    int c;
    while ((c = next(scan)) == ' ' || c == '\n' || c == '\r' || c == '\t') scan->at++;
    return c;
}

int sw_scan_take(struct sw_scan *scan, char c) {
    const int have = sw_scan_peek(scan);
    if (have < 0) return have;
    if (have != (unsigned char)c) return -EINVAL;
    scan->at++;
    return 0;
}

/* Four hexadecimal digits. */
static int take_hex(struct sw_scan *scan) {
    int value = 0;
    for (int i = 0; i < 4; i++) {
        const int c = next(scan);
        if (c < 0) return c;
        if (!isxdigit(c)) return -EINVAL;
        value = value * 16 + (isdigit(c) ? c - '0' : tolower(c) - 'a' + 10);
        scan->at++;
    }
    return value;
}

/* What stands behind a backslash: one character, '?' for those beyond ASCII. */
static int take_escape(struct sw_scan *scan) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const int c = next(scan);
    if (c < 0) return c;
    scan->at++;
    if (c == 'u') {
        const int value = take_hex(scan);
        return value < 0x80 ? value : '?';
    }
    const char *known = c ? strchr(from, c) : NULL;
    return known ? to[known - from] : -EINVAL;
}

int sw_scan_string(struct sw_scan *scan, char *out, size_t out_size) {
    int ret = sw_scan_take(scan, '"');
    size_t length = 0;
    while (ret == 0) {
        int c = next(scan);
        if (c < 0) return c;
        scan->at++;
        if (c == '"') break;
        if (c < 0x20) return -EINVAL;
        if (c == '\\' && (c = take_escape(scan)) < 0) return c;
        if (c && length + 1 < out_size) out[length++] = c < 0x80 ? (char)c : '?';
    }
    if (out_size) out[length] = 0;
    return ret;
}

int sw_scan_number(struct sw_scan *scan, char *out, size_t out_size) {
    int c = sw_scan_peek(scan);
    size_t length = 0;
    if (c != '-' && !(c >= '0' && c <= '9')) return c < 0 ? c : -EINVAL;
    while (c > 0 && (isdigit(c) || strchr("+-.eE", c))) {
        if (length + 1 >= out_size) return -EINVAL;
        out[length++] = (char)c;
        scan->at++;
        c = next(scan);
    }
    out[length] = 0;
    return c < 0 ? c : 0; /* a number at the end of the file may have been longer */
}

int sw_scan_count(struct sw_scan *scan, uint64_t *out) {
    char text[NUMBER_BYTES_MAX], *end;
    const int ret = sw_scan_number(scan, text, sizeof(text));
    if (ret < 0) return ret;
    errno = 0;
    *out = strtoull(text, &end, 10);
    if (text[0] == '-' || *end || errno || *out > INT64_MAX) return -EINVAL;
    return 0;
}

int sw_scan_thousandths(struct sw_scan *scan, int64_t *out) {
    char text[NUMBER_BYTES_MAX];
    const int ret = sw_scan_number(scan, text, sizeof(text));
    if (ret < 0) return ret;
    const char *at = text + (text[0] == '-');
    int64_t value = 0;
    int digits = 0;
    for (; isdigit((unsigned char)*at) && digits < 15; at++, digits++)
        value = value * 10 + (*at - '0');
    int behind = 0;
    if (digits && *at == '.')
        for (at++; isdigit((unsigned char)*at) && behind < 3; at++, behind++)
            value = value * 10 + (*at - '0');
    for (; behind < 3; behind++) value *= 10;
    if (!*at && digits) {
        *out = text[0] == '-' ? -value : value;
        return 0;
    }
    char *end;
    const double other = strtod(text, &end) * 1000; /* an exponent, or more digits */
    if (*end) return -EINVAL;
    if (!(fabs(other) < (double)SW_SCAN_TIME_MAX)) return -ERANGE;
    *out = llround(other);
    return 0;
}

static int skip_word(struct sw_scan *scan) {
    static const char *const words[] = {"true", "false", "null"};
    const int first = sw_scan_peek(scan);
    for (int w = 0; w < 3; w++) {
        if (words[w][0] != first) continue;
        for (const char *at = words[w]; *at; at++) {
            const int c = next(scan);
            if (c != *at) return c < 0 ? c : -EINVAL;
            scan->at++;
        }
        return 0;
    }
    return first < 0 ? first : -EINVAL;
}

static int skip_to(struct sw_scan *scan, int depth) {
    if (depth > SW_SCAN_DEPTH_MAX) return -EINVAL;
    char text[NUMBER_BYTES_MAX];
    int first = 1, ret;
    const int c = sw_scan_peek(scan);
    switch (c) {
    case '{':
        while ((ret = sw_scan_member(scan, &first, text, sizeof(text))) == 1)
            if ((ret = skip_to(scan, depth + 1)) < 0) return ret;
        return ret;
    case '[':
        while ((ret = sw_scan_element(scan, &first)) == 1)
            if ((ret = skip_to(scan, depth + 1)) < 0) return ret;
        return ret;
    case '"':
        return sw_scan_string(scan, text, sizeof(text));
    default:
        if (c == '-' || (c >= '0' && c <= '9')) return sw_scan_number(scan, text, sizeof(text));
        return skip_word(scan);
    }
}

int sw_scan_skip(struct sw_scan *scan) {
    return skip_to(scan, 0);
}

int sw_scan_member(struct sw_scan *scan, int *first, char *key, size_t key_size) {
    int ret = *first ? sw_scan_take(scan, '{') : 0;
    int c = ret < 0 ? ret : sw_scan_peek(scan);
    if (c < 0) return c;
    if (c == '}') {
        scan->at++;
        return 0;
    }
    if (!*first) ret = sw_scan_take(scan, ',');
    *first = 0;
    if (ret == 0) ret = sw_scan_string(scan, key, key_size);
    if (ret == 0) ret = sw_scan_take(scan, ':');
    return ret < 0 ? ret : 1;
}

int sw_scan_element(struct sw_scan *scan, int *first) {
    int ret = *first ? sw_scan_take(scan, '[') : 0;
    int c = ret < 0 ? ret : sw_scan_peek(scan);
    if (c < 0) return c;
    if (c == ']') {
        scan->at++;
        return 0;
    }
    if (!*first) ret = sw_scan_take(scan, ',');
    *first = 0;
    return ret < 0 ? ret : 1;
}
