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

/* Where a device's clock and the host's met: an event, and the host's time of it. */
struct sw_cuda_base {
    cudaEvent_t event;
    uint64_t host_ns, error_ns; /* it was then, give or take this */
    double device_ms;           /* since the first base */
};

enum { SW_CUDA_BASES = 512 };

/* clock_cuda.c; for one thread at a time. */
struct sw_cuda_clock {
    cudaStream_t stream; /* its own, always idle */
    cudaEvent_t spare;   /* of the attempt at hand */
    struct sw_cuda_base bases[SW_CUDA_BASES];
    uint64_t count; /* of bases so far; the last SW_CUDA_BASES are kept */
    uint64_t tried_ns, error_ns_max;
};

struct sw_device {
    int index;
    int given_up; /* work on it will never end */
    cublasLtHandle_t blas;
    pthread_mutex_t lock; /* guards the products and the allocations */
    struct sw_cuda_product products[SW_CUDA_SHAPES_MAX];
    int product_count;
    struct sw_cuda_allocation *allocations;
    char numerics[512];
    uint64_t h2d_piece, d2h_piece; /* bytes of a copy, at most; 0: any */
    int file_count;                /* open ones that it reads by itself */
    char *file_base;               /* memory that cuFile knows; NULL: none */
    uint64_t file_bytes;
    struct sw_cuda_clock clock;
};

struct sw_event {
    struct sw_device *device;
    cudaEvent_t event;
};

struct sw_stream {
    struct sw_device *device;
    cudaStream_t stream;
    struct sw_event *synced; /* stream_sync's */
    void *workspace;
};

/* Converts and reports once: 0, or -errno. `what` says what was tried. */
int sw_cuda_check(const struct sw_device *d, cudaError_t error, const char *what);

/* Makes the device the calling thread's. */
int sw_cuda_enter(const struct sw_device *d);

/* device_cuda.c: the table's stream_sync. */
int sw_cuda_stream_sync(struct sw_stream *s);

/* file_cuda.c: its part of the table. */
int sw_cuda_file_open(struct sw_device *d, int fd, void *base, uint64_t bytes,
                      struct sw_device_file **out, char *why, size_t size);
void sw_cuda_file_close(struct sw_device_file *f);
int sw_cuda_file_read(struct sw_stream *s, struct sw_device_file *f, void *dst, uint64_t offset,
                      uint64_t bytes, uint64_t *sum);

/* group_nccl.c, where the build has NCCL. */
extern const struct sw_device_group_ops sw_cuda_group_ops;

/* gemm_cuda.c */
int sw_cuda_gemm_open(struct sw_device *d);
void sw_cuda_gemm_close(struct sw_device *d);
int sw_cuda_gemm_prepare(struct sw_stream *s); /* the stream's workspace */
int sw_cuda_gemm(struct sw_stream *s, const struct sw_gemm *g);

/* clock_cuda.c: its part of the table; close leaves nothing. */
int sw_cuda_clock_set(struct sw_device *d);
int sw_cuda_event_ns(struct sw_event *e, uint64_t *ns);
uint64_t sw_cuda_clock_error_ns(struct sw_device *d);
void sw_cuda_clock_close(struct sw_device *d);

/* operators_cuda.c: fills the operators' part of the table. */
void sw_cuda_operators(struct sw_device_ops *ops);

#endif
