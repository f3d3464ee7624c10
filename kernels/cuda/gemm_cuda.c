/* kernels/cuda/gemm_cuda.c - matrix products by cuBLASLt.
 *
 * The library is column-major and the interface row-major, so it is asked for the transposed
 * product: C^T = op(B)^T op(A)^T, where a row-major matrix is already its own transpose. Operands
 * of BF16 or FP32, sums in FP32 without TF32. The algorithm of a shape is chosen at the first
 * product of that shape and kept: a choice by measurement could differ between runs, and bits with
 * it. */
#include "kernels/cuda/cuda_internal.h"
#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include "base/log.h"

static int check(const struct sw_device *d, cublasStatus_t status, const char *what) {
    if (status == CUBLAS_STATUS_SUCCESS) return 0;
    sw_error("CUDA device %d: %s: cuBLASLt says '%s'", d->index, what,
             cublasLtGetStatusString(status));
    return status == CUBLAS_STATUS_ALLOC_FAILED    ? -ENOMEM
           : status == CUBLAS_STATUS_NOT_SUPPORTED ? -ENOTSUP
                                                   : -EIO;
}

static cudaDataType type_of(enum sw_dtype dtype) {
    return dtype == SW_FP32 ? CUDA_R_32F : CUDA_R_16BF;
}

int sw_cuda_gemm_open(struct sw_device *d) {
    return check(d, cublasLtCreate(&d->blas), "the library of matrix products cannot be opened");
}

static void forget(struct sw_cuda_product *p) {
    if (p->desc) cublasLtMatmulDescDestroy(p->desc);
    if (p->a) cublasLtMatrixLayoutDestroy(p->a);
    if (p->b) cublasLtMatrixLayoutDestroy(p->b);
    if (p->c) cublasLtMatrixLayoutDestroy(p->c);
    memset(p, 0, sizeof(*p));
}

void sw_cuda_gemm_close(struct sw_device *d) {
    for (int i = 0; i < d->product_count; i++) forget(&d->products[i]);
    if (d->blas) cublasLtDestroy(d->blas);
}

int sw_cuda_gemm_prepare(struct sw_stream *s) {
    if (s->workspace) return 0;
    return sw_cuda_check(s->device, cudaMalloc(&s->workspace, SW_CUDA_WORKSPACE_BYTES),
                         "the workspace of matrix products");
}

/* The algorithm that the library puts first, among those that fit the workspace and the pointers:
 * it would else count on 256 bytes of alignment, which a slice of tokens need not have. */
static int choose(struct sw_device *d, struct sw_cuda_product *p) {
    static const cublasLtMatmulPreferenceAttributes_t alignments[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    const uint64_t bytes = SW_CUDA_WORKSPACE_BYTES;
    const uint32_t align = p->shape.align_bytes;
    cublasLtMatmulPreference_t preference = NULL;
    cublasLtMatmulHeuristicResult_t result;
    int found = 0;
    cublasStatus_t status = cublasLtMatmulPreferenceCreate(&preference);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = cublasLtMatmulPreferenceSetAttribute(
            preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof(bytes));
    for (int i = 0; i < 4 && status == CUBLAS_STATUS_SUCCESS; i++)
        status =
            cublasLtMatmulPreferenceSetAttribute(preference, alignments[i], &align, sizeof(align));
    if (status == CUBLAS_STATUS_SUCCESS)
        status = cublasLtMatmulAlgoGetHeuristic(d->blas, p->desc, p->a, p->b, p->c, p->c,
                                                preference, 1, &result, &found);
    if (preference) cublasLtMatmulPreferenceDestroy(preference);
    if (status == CUBLAS_STATUS_SUCCESS && found < 1) status = CUBLAS_STATUS_NOT_SUPPORTED;
    if (status != CUBLAS_STATUS_SUCCESS) return check(d, status, "no algorithm for a product");
    p->algo = result.algo;
    return 0;
}

static int describe(struct sw_device *d, struct sw_cuda_product *p) {
    const struct sw_cuda_shape *s = &p->shape;
    const cublasOperation_t plain = CUBLAS_OP_N, turned = CUBLAS_OP_T;
    const cudaDataType type = type_of((enum sw_dtype)s->dtype);
    cublasStatus_t status = cublasLtMatmulDescCreate(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    /* Their A is our B: stored [k][ldb] it is n x k column by column, stored [n][ldb] k x n. */
    if (status == CUBLAS_STATUS_SUCCESS)
        status = cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSA,
                                                s->trans_b ? &turned : &plain, sizeof(plain));
    if (status == CUBLAS_STATUS_SUCCESS)
        status = cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSB,
                                                s->trans_a ? &turned : &plain, sizeof(plain));
    if (status == CUBLAS_STATUS_SUCCESS)
        status = cublasLtMatrixLayoutCreate(&p->a, type, s->trans_b ? s->k : s->n,
                                            s->trans_b ? s->n : s->k, (int64_t)s->ldb);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = cublasLtMatrixLayoutCreate(&p->b, type, s->trans_a ? s->m : s->k,
                                            s->trans_a ? s->k : s->m, (int64_t)s->lda);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = cublasLtMatrixLayoutCreate(&p->c, type_of((enum sw_dtype)s->c_dtype), s->n, s->m,
                                            (int64_t)s->ldc);
    return check(d, status, "a product cannot be described");
}

/* Holds the lock. */
static int product_of(struct sw_device *d, const struct sw_cuda_shape *shape,
                      const struct sw_cuda_product **out) {
    for (int i = 0; i < d->product_count; i++)
        if (memcmp(&d->products[i].shape, shape, sizeof(*shape)) == 0) {
            *out = &d->products[i];
            return 0;
        }
    if (d->product_count == SW_CUDA_SHAPES_MAX) {
        sw_error("CUDA device %d: more than %d shapes of matrix products", d->index,
                 SW_CUDA_SHAPES_MAX);
        return -ENOSPC;
    }
    struct sw_cuda_product *p = &d->products[d->product_count];
    p->shape = *shape;
    int ret = describe(d, p);
    if (ret == 0) ret = choose(d, p);
    if (ret < 0) {
        sw_error("CUDA device %d: no product of %" PRIu64 " x %" PRIu64 " x %" PRIu64
                 " of %s to %s",
                 d->index, shape->m, shape->n, shape->k, sw_dtype_name((enum sw_dtype)shape->dtype),
                 sw_dtype_name((enum sw_dtype)shape->c_dtype));
        forget(p);
        return ret;
    }
    d->product_count++;
    *out = p;
    return 0;
}

/* Nothing to sum up: C stays, or becomes zero. */
static int empty_sum(struct sw_stream *s, const struct sw_gemm *g) {
    const uint64_t bytes = sw_dtype_bytes(g->c_dtype);
    int ret = 0;
    for (uint64_t i = 0; i < g->m && !g->accumulate && ret == 0; i++)
        ret = sw_cuda_check(
            s->device,
            cudaMemsetAsync((char *)g->c + i * g->ldc * bytes, 0, g->n * bytes, s->stream),
            "a product over nothing");
    return ret;
}

/* No more than 16, so that the algorithm does not depend on where a tensor happens to lie. */
static uint32_t alignment_of(const struct sw_gemm *g) {
    const uintptr_t bits = (uintptr_t)g->a | (uintptr_t)g->b | (uintptr_t)g->c;
    uint32_t align = 16;
    while (bits % align) align /= 2;
    return align;
}

int sw_cuda_gemm(struct sw_stream *s, const struct sw_gemm *g) {
    struct sw_device *d = s->device;
    assert(g->a_dtype == g->b_dtype); /* the library has no mixed operands, and nobody asks */
    if (g->m == 0 || g->n == 0) return 0;
    if (g->k == 0) return empty_sum(s, g);
    const struct sw_cuda_shape shape = {.m = g->m,
                                        .n = g->n,
                                        .k = g->k,
                                        .lda = g->lda,
                                        .ldb = g->ldb,
                                        .ldc = g->ldc,
                                        .trans_a = g->trans_a != 0,
                                        .trans_b = g->trans_b != 0,
                                        .accumulate = g->accumulate != 0,
                                        .dtype = (uint32_t)g->a_dtype,
                                        .c_dtype = (uint32_t)g->c_dtype,
                                        .align_bytes = alignment_of(g)};
    const float one = 1.0f, beta = g->accumulate ? 1.0f : 0.0f;
    const struct sw_cuda_product *p = NULL;
    int ret = sw_cuda_gemm_prepare(s);
    if (ret < 0) return ret;
    pthread_mutex_lock(&d->lock);
    ret = product_of(d, &shape, &p);
    pthread_mutex_unlock(&d->lock);
    if (ret < 0) return ret;
    return check(d,
                 cublasLtMatmul(d->blas, p->desc, &one, g->b, p->a, g->a, p->b, &beta, g->c, p->c,
                                g->c, p->c, &p->algo, s->workspace, SW_CUDA_WORKSPACE_BYTES,
                                s->stream),
                 "a matrix product failed");
}
