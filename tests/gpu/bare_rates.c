/* The same rates as gpu_rates.c through CUDA itself, a JSON line each:
 *
 *     bare_rates versions | copies | products  [tiny]
 *
 * Copies are bare cudaMemcpyAsync of memory that cudaHostAlloc made. Of a product every algorithm
 * that cuBLASLt's heuristics name within the plugin's workspace is timed, and the best one told. */
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "tests/gpu/rates.h"

enum { ALGORITHMS_MAX = 8, WORKSPACE_BYTES = 32 << 20 };

static cudaStream_t streams[2];

static void must(cudaError_t error, const char *what) {
    if (error == cudaSuccess) return;
    fprintf(stderr, "bare_rates: %s: %s\n", what, cudaGetErrorString(error));
    exit(1);
}

static void must_blas(cublasStatus_t status, const char *what) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    fprintf(stderr, "bare_rates: %s: %s\n", what, cublasLtGetStatusString(status));
    exit(1);
}

static void *device_bytes(uint64_t bytes) {
    void *p;
    must(cudaMalloc(&p, bytes), "device memory");
    return p;
}

static int wait_all(void *ctx) {
    (void)ctx;
    for (int i = 0; i < 2; i++) must(cudaStreamSynchronize(streams[i]), "a stream");
    return 0;
}

static void versions(void) {
    struct cudaDeviceProp p;
    int driver = 0, runtime = 0, count = 0;
    must(cudaGetDeviceCount(&count), "devices");
    must(cudaDriverGetVersion(&driver), "the driver");
    must(cudaRuntimeGetVersion(&runtime), "the runtime");
    for (int i = 0; i < count; i++) {
        must(cudaGetDeviceProperties(&p, i), "a device");
        rates_say("memory", p.name, (double)p.totalGlobalMem, "B");
    }
    rates_say("version", "driver", driver / 1000 + driver % 1000 / 100.0, "");
    rates_say("version", "runtime", runtime / 1000 + runtime % 1000 / 100.0, "");
    rates_say("version", "cuBLASLt", (double)cublasLtGetVersion(), "");
}

static int copy(void *ctx) {
    const struct rates_copies *c = ctx;
    cudaError_t error = cudaSuccess;
    if (c->up)
        error =
            cudaMemcpyAsync(c->device[0], c->host[0], c->bytes, cudaMemcpyHostToDevice, streams[0]);
    if (c->down && error == cudaSuccess)
        error =
            cudaMemcpyAsync(c->host[1], c->device[1], c->bytes, cudaMemcpyDeviceToHost, streams[1]);
    return error == cudaSuccess ? 0 : -1;
}

static void copies(void) {
    struct rates_copies c = {.bytes = rates_size(256 << 20)};
    for (int i = 0; i < 2; i++) {
        must(cudaHostAlloc(&c.host[i], c.bytes, cudaHostAllocDefault), "pinned memory");
        c.device[i] = device_bytes(c.bytes);
        rates_fill(c.host[i], c.bytes / 2, (uint64_t)i + 1);
    }
    rates_say_copies(copy, wait_all, &c);
}

struct product {
    struct sw_gemm g;
    cublasLtHandle_t blas;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, c;
    const cublasLtMatmulAlgo_t *algo;
    void *workspace;
};

static int multiply(void *ctx) {
    const struct product *p = ctx;
    const float one = 1.0f, beta = p->g.accumulate ? 1.0f : 0.0f;
    const cublasStatus_t status =
        cublasLtMatmul(p->blas, p->desc, &one, p->g.b, p->a, p->g.a, p->b, &beta, p->g.c, p->c,
                       p->g.c, p->c, p->algo, p->workspace, WORKSPACE_BYTES, streams[0]);
    return status == CUBLAS_STATUS_SUCCESS ? 0 : -1;
}

static cublasLtMatrixLayout_t layout(cudaDataType type, int turned, uint64_t rows, uint64_t cols,
                                     uint64_t stride) {
    cublasLtMatrixLayout_t out;
    must_blas(cublasLtMatrixLayoutCreate(&out, type, turned ? cols : rows, turned ? rows : cols,
                                         (int64_t)stride),
              "a layout");
    return out;
}

/* The library is column-major: it is asked for C^T = op(B)^T op(A)^T. */
static void describe(struct product *p) {
    const cublasOperation_t plain = CUBLAS_OP_N, turned = CUBLAS_OP_T;
    const struct sw_gemm *g = &p->g;
    must_blas(cublasLtMatmulDescCreate(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "a product");
    must_blas(cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSA,
                                             g->trans_b ? &turned : &plain, sizeof(plain)),
              "a product");
    must_blas(cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSB,
                                             g->trans_a ? &turned : &plain, sizeof(plain)),
              "a product");
    p->a = layout(CUDA_R_16BF, g->trans_b, g->n, g->k, g->ldb);
    p->b = layout(CUDA_R_16BF, g->trans_a, g->k, g->m, g->lda);
    p->c = layout(g->c_dtype == SW_FP32 ? CUDA_R_32F : CUDA_R_16BF, 0, g->n, g->m, g->ldc);
}

/* Seconds of the fastest algorithm; those that refuse are passed over. */
static double best_of(struct product *p) {
    cublasLtMatmulHeuristicResult_t results[ALGORITHMS_MAX];
    cublasLtMatmulPreference_t preference;
    const uint64_t bytes = WORKSPACE_BYTES;
    double best = -1.0;
    int found = 0;
    must_blas(cublasLtMatmulPreferenceCreate(&preference), "a preference");
    must_blas(cublasLtMatmulPreferenceSetAttribute(
                  preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof(bytes)),
              "a preference");
    must_blas(cublasLtMatmulAlgoGetHeuristic(p->blas, p->desc, p->a, p->b, p->c, p->c, preference,
                                             ALGORITHMS_MAX, results, &found),
              "the heuristics");
    for (int i = 0; i < found; i++) {
        p->algo = &results[i].algo;
        const double seconds = rates_time(multiply, wait_all, p);
        if (seconds > 0.0 && (best < 0.0 || seconds < best)) best = seconds;
    }
    cublasLtMatmulPreferenceDestroy(preference);
    return best;
}

static void *filled(uint64_t count, uint64_t seed) {
    sw_bf16 *values = malloc(count * 2);
    void *there = device_bytes(count * 2);
    rates_fill(values, count, seed);
    must(cudaMemcpyAsync(there, values, count * 2, cudaMemcpyHostToDevice, streams[0]), "a copy");
    must(cudaStreamSynchronize(streams[0]), "a copy");
    free(values);
    return there;
}

static void products(void) {
    struct product p = {.workspace = device_bytes(WORKSPACE_BYTES)};
    must_blas(cublasLtCreate(&p.blas), "cuBLASLt");
    for (int i = 0; i < MATRICES; i++)
        for (int direction = 0; direction < DIRECTIONS; direction++) {
            p.g = rates_product(&rates_matrices[i], direction);
            void *a = filled(p.g.m * p.g.k, 1), *b = filled(p.g.k * p.g.n, 2);
            const uint64_t bytes = p.g.m * p.g.n * sw_dtype_bytes(p.g.c_dtype);
            p.g.a = a;
            p.g.b = b;
            p.g.c = device_bytes(bytes);
            must(cudaMemsetAsync(p.g.c, 0, bytes, streams[0]), "clearing");
            describe(&p);
            const double seconds = best_of(&p);
            if (seconds > 0.0)
                rates_say_product(&rates_matrices[i], direction, &p.g, seconds);
            else
                fprintf(stderr, "bare_rates: no algorithm for %s, %s\n", rates_matrices[i].name,
                        rates_direction(direction));
            cublasLtMatmulDescDestroy(p.desc);
            cublasLtMatrixLayoutDestroy(p.a);
            cublasLtMatrixLayoutDestroy(p.b);
            cublasLtMatrixLayoutDestroy(p.c);
            cudaFree(a);
            cudaFree(b);
            cudaFree(p.g.c);
        }
}

int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "";
    void (*const run)(void) = strcmp(mode, "versions") == 0   ? versions
                              : strcmp(mode, "copies") == 0   ? copies
                              : strcmp(mode, "products") == 0 ? products
                                                              : NULL;
    rates_tiny = argc > 2 && strcmp(argv[2], "tiny") == 0;
    if (!run) {
        fprintf(stderr, "usage: bare_rates versions|copies|products [tiny]\n");
        return 2;
    }
    must(cudaSetDevice(0), "the device");
    for (int i = 0; i < 2; i++)
        must(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking), "a stream");
    run();
    return 0;
}
