/* kernels/products.h - what a step multiplies with a weight matrix [out][in] that a number of
 * tokens go through: y = x W^T, dx = dy W and dW += dy^T x, in BF16 but for dW, which is FP32. For
 * whoever times them. */
#ifndef KERNELS_PRODUCTS_H
#define KERNELS_PRODUCTS_H
#include "kernels/device.h"

enum sw_product {
    SW_PRODUCT_FORWARD,
    SW_PRODUCT_INPUT_GRADIENT,
    SW_PRODUCT_WEIGHT_GRADIENT,
    SW_PRODUCT_COUNT
};

/* Operands without padding; their pointers are the caller's to set. */
static inline struct sw_gemm sw_product_of(enum sw_product product, uint64_t out, uint64_t in,
                                           uint64_t tokens) {
    const int is_forward = product == SW_PRODUCT_FORWARD;
    const int is_weight = product == SW_PRODUCT_WEIGHT_GRADIENT;
    struct sw_gemm g = {.a_dtype = SW_BF16, .b_dtype = SW_BF16};
    g.c_dtype = is_weight ? SW_FP32 : SW_BF16;
    g.m = is_weight ? out : tokens;
    g.n = is_forward ? out : in;
    g.k = is_forward ? in : is_weight ? tokens : out;
    g.trans_a = g.accumulate = is_weight;
    g.trans_b = is_forward;
    g.lda = g.trans_a ? g.m : g.k;
    g.ldb = g.trans_b ? g.k : g.n;
    g.ldc = g.n;
    return g;
}

#endif
