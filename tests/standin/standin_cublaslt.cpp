/* tests/standin/standin_cublaslt.cpp - the matrix products of cuBLASLt that the back end asks for:
 * column-major, BF16 or FP32 operands of one type, FP32 sums in order of k, one rounding. What is
 * not among these is refused with the status that the library has for it. */
#include "standin_internal.h"

#include <algorithm>
#include <cublasLt.h>

namespace {
struct Desc {
    cublasComputeType_t compute;
    cublasOperation_t trans[2];
};
struct Layout {
    cudaDataType type;
    uint64_t rows, cols;
    int64_t ld;
};
struct Preference {
    uint32_t align[4] = {256, 256, 256, 256}; /* of A, B, C and D, as the library assumes it */
};
struct Algo {
    uint32_t magic, align[4]; /* what it counts on */
};
constexpr uint32_t MAGIC = 0x5057544Cu;

Desc *desc_of(cublasLtMatmulDesc_t d) {
    return reinterpret_cast<Desc *>(d);
}
Layout *layout_of(cublasLtMatrixLayout_t l) {
    return reinterpret_cast<Layout *>(l);
}

size_t bytes_of(cudaDataType type) {
    return type == CUDA_R_32F ? 4 : 2;
}

float load(const void *p, cudaDataType type, uint64_t i) {
    return type == CUDA_R_32F ? static_cast<const float *>(p)[i]
                              : sw_f32_from_bf16(static_cast<const sw_bf16 *>(p)[i]);
}

struct Product {
    Desc desc;
    Layout a, b, c;
    const void *a_data, *b_data;
    void *c_data;
    float alpha, beta;
};

/* op(X) as a dense array, [rows][k] or [k][rows]. */
std::vector<float> widen(const void *data, const Layout &l, bool by_row, uint64_t rows, uint64_t k,
                         bool k_first) {
    std::vector<float> out(rows * k);
    for (uint64_t r = 0; r < rows; r++)
        for (uint64_t i = 0; i < k; i++)
            out[k_first ? i * rows + r : r * k + i] =
                load(data, l.type, by_row ? r * (uint64_t)l.ld + i : i * (uint64_t)l.ld + r);
    return out;
}

void multiply(const Product &p) {
    const uint64_t m = p.c.rows, n = p.c.cols;
    const bool a_trans = p.desc.trans[0] == CUBLAS_OP_T, b_trans = p.desc.trans[1] == CUBLAS_OP_T;
    const uint64_t k = a_trans ? p.a.rows : p.a.cols;
    const std::vector<float> a = widen(p.a_data, p.a, a_trans, m, k, true);
    const std::vector<float> b = widen(p.b_data, p.b, !b_trans, n, k, false);
    std::vector<float> sums(m); /* of a column: many at once, each in order of k */
    for (uint64_t j = 0; j < n; j++) {
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (uint64_t x = 0; x < k; x++) {
            const float *row = &a[x * m], factor = b[j * k + x];
            float *sum = sums.data();
#pragma omp simd
            for (uint64_t i = 0; i < m; i++) sum[i] += row[i] * factor;
        }
        for (uint64_t i = 0; i < m; i++) {
            const uint64_t at = j * (uint64_t)p.c.ld + i;
            float value = p.alpha * sums[i];
            if (p.beta != 0.0f) value += p.beta * load(p.c_data, p.c.type, at);
            if (p.c.type == CUDA_R_32F)
                static_cast<float *>(p.c_data)[at] = value;
            else
                static_cast<sw_bf16 *>(p.c_data)[at] = sw_bf16_from_f32(value);
        }
    }
}

bool fits(const Product &p) {
    const bool a_trans = p.desc.trans[0] == CUBLAS_OP_T, b_trans = p.desc.trans[1] == CUBLAS_OP_T;
    const uint64_t k = a_trans ? p.a.rows : p.a.cols;
    return (a_trans ? p.a.cols : p.a.rows) == p.c.rows &&
           (b_trans ? p.b.rows : p.b.cols) == p.c.cols && (b_trans ? p.b.cols : p.b.rows) == k &&
           p.a.ld >= (int64_t)p.a.rows && p.b.ld >= (int64_t)p.b.rows &&
           p.c.ld >= (int64_t)p.c.rows;
}

/* The types that the library has with FP32 sums. */
bool has(const Layout &a, const Layout &b, const Layout &c) {
    const bool floats = a.type == CUDA_R_32F && b.type == CUDA_R_32F && c.type == CUDA_R_32F;
    const bool halves = a.type == CUDA_R_16BF && b.type == CUDA_R_16BF &&
                        (c.type == CUDA_R_16BF || c.type == CUDA_R_32F);
    return floats || halves;
}

bool in_device(const void *p, const Layout &l) {
    int device;
    const uint64_t elements = (l.cols - 1) * (uint64_t)l.ld + l.rows;
    return standin::place_of(p, elements * bytes_of(l.type), &device) == standin::DEVICE;
}
} // namespace

extern "C" {
cublasStatus_t cublasLtCreate(cublasLtHandle_t *out) {
    AT_START(0);
    if (standin::is_told_to_fail(__func__)) return CUBLAS_STATUS_NOT_INITIALIZED;
    *out = reinterpret_cast<cublasLtHandle_t>(new int(0));
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    AT_START(0);
    delete reinterpret_cast<int *>(handle);
    return CUBLAS_STATUS_SUCCESS;
}
size_t cublasLtGetVersion(void) {
    return CUBLAS_VERSION;
}
const char *cublasLtGetStatusString(cublasStatus_t status) {
    return status == CUBLAS_STATUS_SUCCESS         ? "success"
           : status == CUBLAS_STATUS_NOT_SUPPORTED ? "not supported"
                                                   : "an invalid value";
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *out, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
    AT_START(0);
    if (standin::is_told_to_fail(__func__)) return CUBLAS_STATUS_ALLOC_FAILED;
    if (scale != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
    *out = reinterpret_cast<cublasLtMatmulDesc_t>(new Desc{compute, {CUBLAS_OP_N, CUBLAS_OP_N}});
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) {
    AT_START(0);
    standin::forget_object(d);
    delete desc_of(d);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t bytes) {
    AT_START(0);
    if (standin::is_told_to_fail(__func__)) return CUBLAS_STATUS_INVALID_VALUE;
    cublasOperation_t trans;
    if (bytes != sizeof(trans)) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(&trans, value, bytes);
    if (attribute == CUBLASLT_MATMUL_DESC_TRANSA)
        desc_of(d)->trans[0] = trans;
    else if (attribute == CUBLASLT_MATMUL_DESC_TRANSB)
        desc_of(d)->trans[1] = trans;
    else
        return CUBLAS_STATUS_INVALID_VALUE;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *out, cudaDataType type,
                                          uint64_t rows, uint64_t cols, int64_t ld) {
    AT_START(0);
    if (standin::is_told_to_fail(__func__)) return CUBLAS_STATUS_ALLOC_FAILED;
    *out = reinterpret_cast<cublasLtMatrixLayout_t>(new Layout{type, rows, cols, ld});
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) {
    AT_START(0);
    delete layout_of(l);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *out) {
    AT_START(0);
    if (standin::is_told_to_fail(__func__)) return CUBLAS_STATUS_ALLOC_FAILED;
    *out = reinterpret_cast<cublasLtMatmulPreference_t>(new Preference);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    AT_START(0);
    delete reinterpret_cast<Preference *>(preference);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void *value, size_t bytes) {
    AT_START(0);
    if (standin::is_told_to_fail(__func__)) return CUBLAS_STATUS_INVALID_VALUE;
    const int which = attribute == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES   ? 0
                      : attribute == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES ? 1
                      : attribute == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES ? 2
                      : attribute == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES ? 3
                                                                                : -1;
    if (which < 0) return CUBLAS_STATUS_SUCCESS;
    uint32_t *align = &reinterpret_cast<Preference *>(preference)->align[which];
    if (bytes != sizeof(*align)) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(align, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int *found) {
    AT_START(0);
    if (standin::is_told_to_fail(__func__)) return CUBLAS_STATUS_NOT_SUPPORTED;
    *found = 0;
    if (wanted < 1 || desc_of(desc)->compute != CUBLAS_COMPUTE_32F ||
        !has(*layout_of(a), *layout_of(b), *layout_of(c)))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    memset(&results[0], 0, sizeof(results[0]));
    Algo algo = {MAGIC, {}};
    memcpy(algo.align, reinterpret_cast<Preference *>(preference)->align, sizeof(algo.align));
    memcpy(&results[0].algo, &algo, sizeof(algo));
    results[0].state = CUBLAS_STATUS_SUCCESS;
    *found = 1;
    return CUBLAS_STATUS_SUCCESS;
}

/* C and D are one matrix, as the back end has them. */
cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                              cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                              cublasLtMatrixLayout_t c_layout, void *d, cublasLtMatrixLayout_t,
                              const cublasLtMatmulAlgo_t *chosen, void *, size_t,
                              cudaStream_t stream) {
    if (standin::is_told_to_fail(__func__)) return CUBLAS_STATUS_EXECUTION_FAILED;
    Product p = {*desc_of(desc),
                 *layout_of(a_layout),
                 *layout_of(b_layout),
                 *layout_of(c_layout),
                 a,
                 b,
                 d,
                 0.0f,
                 0.0f};
    Algo algo = {};
    if (chosen) memcpy(&algo, chosen, sizeof(algo));
    memcpy(&p.alpha, alpha, sizeof(p.alpha));
    memcpy(&p.beta, beta, sizeof(p.beta));
    if (algo.magic != MAGIC || c != d || !fits(p)) return CUBLAS_STATUS_INVALID_VALUE;
    if (!has(p.a, p.b, p.c)) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (!in_device(a, p.a) || !in_device(b, p.b) || !in_device(d, p.c))
        return CUBLAS_STATUS_INVALID_VALUE;
    const void *const pointers[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++)
        if (reinterpret_cast<uintptr_t>(pointers[i]) % algo.align[i])
            return CUBLAS_STATUS_INVALID_VALUE;
    standin::not_for_the_first_time("a matrix product", desc, 0);
    standin::submit(standin::stream_of(stream), [p] { multiply(p); });
    return CUBLAS_STATUS_SUCCESS;
}
}
