/* base/crc32c.h - CRC-32C (Castagnoli polynomial 0x1EDC6F41, reflected, as in iSCSI, RFC 3720
 * section 12.1), computed by ISA-L, and the combination of two of them. Threads: any. */
#ifndef BASE_CRC32C_H
#define BASE_CRC32C_H
#include <stddef.h>
#include <stdint.h>

/* The checksum of the bytes that `crc` stands for, followed by these. Begin with 0. */
uint32_t sw_crc32c(uint32_t crc, const void *data, size_t bytes);

/* The checksum of A followed by B, from A's and from B's (begun with 0) and B's length. */
uint32_t sw_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t bytes_b);

#endif
