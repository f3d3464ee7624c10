/* tests/standin/standin_math.h - the bit and number intrinsics that kernels use. */
#ifndef TESTS_STANDIN_STANDIN_MATH_H
#define TESTS_STANDIN_STANDIN_MATH_H
#include <cmath>
#include <cstdint>
#include <cstring>

inline float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}
inline unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}
inline int __popc(unsigned x) {
    return __builtin_popcount(x);
}
inline int __ffs(int x) {
    return __builtin_ffs(x);
}
inline int __clz(int x) {
    return x ? __builtin_clz((unsigned)x) : 32;
}
inline int min(int a, int b) {
    return a < b ? a : b;
}
inline int max(int a, int b) {
    return a > b ? a : b;
}

#endif
