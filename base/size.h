/* base/size.h - byte counts as users write and read them.
 *
 * K, M, G and T are powers of 1000; Ki, Mi, Gi and Ti powers of 1024; a plain number is bytes. */
#ifndef BASE_SIZE_H
#define BASE_SIZE_H
#include <stddef.h>
#include <stdint.h>

/* Parses "600M", "1.5Gi", "4096". 0, or -EINVAL (not a size), -ERANGE (beyond 2^63 - 1). */
int sw_size_parse(const char *text, uint64_t *bytes);

/* Writes a decimal size ("1.05 GB", "512 B") into out and returns out. */
const char *sw_size_print(uint64_t bytes, char *out, size_t out_size);

/* The smallest multiple of step that is at least value. step > 0. */
static inline uint64_t sw_round_up(uint64_t value, uint64_t step) {
    return (value + step - 1) / step * step;
}

#endif
