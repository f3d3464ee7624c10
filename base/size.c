/* base/size.c - parsing and printing of byte counts. */
#include "base/size.h"

#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int sw_size_parse(const char *text, uint64_t *bytes) {
    assert(text && bytes);
    static const char letters[] = "KMGT";
    if (!isdigit((unsigned char)text[0])) return -EINVAL;
    for (const char *c = text; isdigit((unsigned char)*c) || *c == '.'; c++)
        if (c[0] == '.' && !isdigit((unsigned char)c[1])) return -EINVAL;
    char *end;
    const long double number = strtold(text, &end);
    if (end != text + strspn(text, "0123456789.")) return -EINVAL;
    long double unit = 1;
    if (*end) {
        const char *letter = strchr(letters, *end);
        if (!letter) return -EINVAL;
        const int power = (int)(letter - letters) + 1;
        end++;
        const int binary = *end == 'i';
        if (binary) end++;
        if (*end == 'B') end++;
        if (*end) return -EINVAL;
        for (int i = 0; i < power; i++) unit *= binary ? 1024 : 1000;
    }
    const long double value = floorl(number * unit);
    if (value > (long double)INT64_MAX) return -ERANGE;
    *bytes = (uint64_t)value;
    return 0;
}

const char *sw_size_print(uint64_t bytes, char *out, size_t out_size) {
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB", "PB", "EB"};
    double value = (double)bytes;
    int unit = 0;
    while (value >= 999.995 && unit < 6) {
        value /= 1000;
        unit++;
    }
    if (unit == 0)
        snprintf(out, out_size, "%llu B", (unsigned long long)bytes);
    else
        snprintf(out, out_size,
                 value < 10    ? "%.2f %s"
                 : value < 100 ? "%.1f %s"
                               : "%.0f %s",
                 value, units[unit]);
    return out;
}
