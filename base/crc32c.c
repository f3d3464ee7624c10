/* base/crc32c.c - CRC-32C by ISA-L; combining is a product of polynomials modulo the generator.
 *
 * Appending b bytes multiplies a checksum by x^(8b) (Hacker's Delight, chapter 14: a CRC is a
 * remainder), so the power is found by squaring and one multiplication joins two checksums. */
#include "base/crc32c.h"

#include <isa-l/crc.h>

/* Reflected: bit 31 is the coefficient of x^0. */
#define POLYNOMIAL 0x82F63B78u
#define ONE        0x80000000u

enum { PIECE_BYTES = 1 << 30 }; /* the library counts in int */

uint32_t sw_crc32c(uint32_t crc, const void *data, size_t bytes) {
    const unsigned char *at = data;
    uint32_t state = ~crc;
    while (bytes > 0) {
        const size_t piece = bytes < PIECE_BYTES ? bytes : PIECE_BYTES;
        state = crc32_iscsi((unsigned char *)(uintptr_t)at, (int)piece, state);
        at += piece;
        bytes -= piece;
    }
    return ~state;
}

static uint32_t times(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = ONE; bit; bit >>= 1) {
        if (a & bit) product ^= b;
        b = (b >> 1) ^ (b & 1 ? POLYNOMIAL : 0);
    }
    return product;
}

uint32_t sw_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t bytes_b) {
    uint32_t power = ONE, square = ONE >> 8; /* x^8: one byte */
    for (uint64_t n = bytes_b; n; n >>= 1) {
        if (n & 1) power = times(square, power);
        square = times(square, square);
    }
    return times(power, crc_a) ^ crc_b;
}
