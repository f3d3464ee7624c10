/* base/word_sum.h - a sum of bytes that a GPU takes as fast as it reads them, in any order: it
 * tells whether what came from a drive straight into its memory is what was written. Not CRC-32C,
 * as that has an order. Each word of eight bytes is multiplied by an odd number of its own, so no
 * single wrong word goes unseen, and others with the chance of 2^-64. */
#ifndef BASE_WORD_SUM_H
#define BASE_WORD_SUM_H
#include "base/bf16.h"

SW_EVERYWHERE uint64_t sw_word_term(uint64_t index, uint64_t word) {
    return word * (index * 0x9E3779B97F4A7C15ull | 1);
}

/* The word of that index, of so many bytes; what is missing of the last one is 0. */
SW_EVERYWHERE uint64_t sw_word_of(const unsigned char *bytes, uint64_t index, uint64_t count) {
    uint64_t word = 0;
    for (uint64_t i = 0; i < 8 && 8 * index + i < count; i++)
        word |= (uint64_t)bytes[8 * index + i] << (8 * i);
    return word;
}

#ifndef __CUDACC__
static inline uint64_t sw_word_sum(const void *data, uint64_t bytes) {
    const unsigned char *at = (const unsigned char *)data;
    const uint64_t whole = bytes / 8;
    uint64_t sum = 0, word;
    for (uint64_t i = 0; i < whole; i++) {
        memcpy(&word, at + 8 * i, sizeof(word));
        sum += sw_word_term(i, word);
    }
    return bytes % 8 ? sum + sw_word_term(whole, sw_word_of(at, whole, bytes)) : sum;
}
#endif

#endif
