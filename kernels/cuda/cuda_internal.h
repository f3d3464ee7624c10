/* kernels/cuda/cuda_internal.h - what the C files of the CUDA back end share.
 *
 * A device owns its allocations, one cuBLASLt handle and the algorithm of each shape; a stream owns
 * its workspace for products. Every call makes its device the calling thread's current one first:
 * lanes of several devices may be served by any threads. */
#ifndef KERNELS_CUDA_CUDA_INTERNAL_H
#define KERNELS_CUDA_CUDA_INTERNAL_H
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include "kernels/device.h"

enum { SW_CUDA_SHAPES_MAX = 256, SW_CUDA_WORKSPACE_BYTES = 32 << 20 };

/* Everything of a product but its pointers. */
struct sw_cuda_shape {
    uint64_t m, n, k, lda, ldb, ldc;
    uint32_t trans_a, trans_b, accumulate, dtype, c_dtype;
    uint32_t align_bytes; /* of every pointer: 16, or less where one is less */
};

struct sw_cuda_product {
    struct sw_cuda_shape shape;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, c; /* the library's: column-major, so a is ours of B */
    cublasLtMatmulAlgo_t algo;
};

struct sw_device {
    int index;
    cublasLtHandle_t blas;
    pthread_mutex_t lock; /* guards the products and the allocations */
    struct sw_cuda_product products[SW_CUDA_SHAPES_MAX];
    int product_count;
    struct sw_cuda_allocation *allocations;
    char numerics[512];
};

struct sw_stream {
    struct sw_device *device;
    cudaStream_t stream;
    void *workspace;
};

/* Converts and reports once: 0, or -errno. `what` says what was tried. */
int sw_cuda_check(const struct sw_device *d, cudaError_t error, const char *what);

/* Makes the device the calling thread's. */
int sw_cuda_enter(const struct sw_device *d);

/* group_nccl.c, where the build has NCCL. */
extern const struct sw_device_group_ops sw_cuda_group_ops;

/* gemm_cuda.c */
int sw_cuda_gemm_open(struct sw_device *d);
void sw_cuda_gemm_close(struct sw_device *d);
int sw_cuda_gemm_prepare(struct sw_stream *s); /* the stream's workspace */
int sw_cuda_gemm(struct sw_stream *s, const struct sw_gemm *g);

/* operators_cuda.c: fills the operators' part of the table. */
void sw_cuda_operators(struct sw_device_ops *ops);

#endif
