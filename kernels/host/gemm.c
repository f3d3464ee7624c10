/* kernels/host/gemm.c - matrix products by oneDNN in FP32 (docs/matrix-products.md says why
 * oneDNN).
 *
 * FP32 operands go to the library as they are. A BF16 operand is widened, exactly, block by block
 * into the device's panels; a BF16 result gathers in a panel over all of k and is rounded once.
 * What the library allocates inside a product comes from base/library_memory.h. */
#include "kernels/host/host.h"
#include <assert.h>
#include <dnnl.h>
#include <errno.h>
#include <inttypes.h>
#include <omp.h>
#include <stdio.h>
#include <string.h>
#include "base/log.h"
#include "base/size.h"

enum { EDGE = 1024, STEP = 16 }; /* a block's longest edge where a panel limits it; its granule */
static_assert(EDGE * EDGE <= SW_HOST_PANEL_ELEMENTS, "a block fits its panel");
enum { PANEL_A, PANEL_B, PANEL_C };

void sw_host_gemm_limit(const char *isa) {
    /* Heeded until the library first looks at its setting; numerics() tells what runs. */
    if (strcmp(isa, "avx2") == 0) dnnl_set_max_cpu_isa(dnnl_cpu_isa_avx2);
    if (strcmp(isa, "scalar") == 0) dnnl_set_max_cpu_isa(dnnl_cpu_isa_sse41);
}

void sw_host_gemm_describe(char *out, size_t out_size) {
    const dnnl_version_t *version = dnnl_version();
    const unsigned isa = (unsigned)dnnl_get_effective_cpu_isa();
    const char *name = isa == dnnl_cpu_isa_sse41         ? "sse4.1"
                       : isa == dnnl_cpu_isa_avx         ? "avx"
                       : isa == dnnl_cpu_isa_avx2        ? "avx2"
                       : isa == dnnl_cpu_isa_avx512_core ? "avx512"
                                                         : NULL;
    if (name)
        snprintf(out, out_size, "oneDNN %d.%d.%d %s", version->major, version->minor,
                 version->patch, name);
    else
        snprintf(out, out_size, "oneDNN %d.%d.%d isa 0x%x", version->major, version->minor,
                 version->patch, isa);
}

/* An operand as stored: element (row, col) at data + (row * ld + col). */
struct matrix {
    const void *data;
    enum sw_dtype dtype;
    uint64_t ld;
};

/* What a panel holds, so that a block needed again at once is not widened again. */
struct panel {
    float *floats;
    const void *block;
};

static const float *operand(const struct sw_device *d, struct panel *panel, const struct matrix *x,
                            uint64_t row, uint64_t col, uint64_t rows, uint64_t cols,
                            uint64_t *ld) {
    const char *block = (const char *)x->data + (row * x->ld + col) * sw_dtype_bytes(x->dtype);
    if (x->dtype == SW_FP32) {
        *ld = x->ld;
        return (const float *)(const void *)block;
    }
    *ld = sw_round_up(cols, STEP);
    if (panel->block != block)
        d->isa->pointwise->widen(d->threads, panel->floats, *ld, block, x->dtype, x->ld, rows,
                                 cols);
    panel->block = block;
    return panel->floats;
}

/* The library takes its team from the calling thread's OpenMP setting. */
static int multiply(const struct sw_device *d, const struct sw_gemm *g, uint64_t m, uint64_t n,
                    uint64_t k, const float *a, uint64_t lda, const float *b, uint64_t ldb,
                    float beta, float *c, uint64_t ldc) {
    const int before = omp_get_max_threads();
    if (before != d->threads) omp_set_num_threads(d->threads);
    const dnnl_status_t status = dnnl_sgemm(
        g->trans_a ? 'T' : 'N', g->trans_b ? 'T' : 'N', (dnnl_dim_t)m, (dnnl_dim_t)n, (dnnl_dim_t)k,
        1.0f, a, (dnnl_dim_t)lda, b, (dnnl_dim_t)ldb, beta, c, (dnnl_dim_t)ldc);
    if (before != d->threads) omp_set_num_threads(before);
    if (status == dnnl_success) return 0;
    sw_error("host device: oneDNN failed a product of %" PRIu64 " x %" PRIu64 " x %" PRIu64
             " with status %d",
             m, n, k, (int)status);
    return status == dnnl_out_of_memory ? -ENOMEM : -EIO;
}

/* The largest edge up to limit that cuts size into even pieces. */
static uint64_t edge(uint64_t size, uint64_t limit) {
    const uint64_t pieces = (size + limit - 1) / limit;
    const uint64_t even = sw_round_up((size + pieces - 1) / pieces, STEP);
    return even < limit ? even : limit;
}

struct blocks {
    uint64_t m, n, k;
};

static struct blocks blocks_of(const struct sw_gemm *g) {
    struct blocks size = {g->m, g->n, g->k};
    const int widens = g->a_dtype != SW_FP32 || g->b_dtype != SW_FP32;
    if (widens) size.k = edge(g->k, EDGE);
    if (widens || g->c_dtype != SW_FP32) {
        /* Only a result panel has both m and n as its edges. */
        const uint64_t limit =
            g->c_dtype == SW_FP32 ? SW_HOST_PANEL_ELEMENTS / sw_round_up(size.k, STEP) : EDGE;
        size.m = edge(g->m, limit / STEP * STEP);
        size.n = edge(g->n, limit / STEP * STEP);
    }
    return size;
}

/* One block of C, over all of k. */
static int result_block(const struct sw_device *d, const struct sw_gemm *g, struct panel *panels,
                        uint64_t k_step, uint64_t i, uint64_t m, uint64_t j, uint64_t n) {
    const struct matrix a = {g->a, g->a_dtype, g->lda}, b = {g->b, g->b_dtype, g->ldb};
    void *c = (char *)g->c + (i * g->ldc + j) * sw_dtype_bytes(g->c_dtype);
    const int rounds = g->c_dtype != SW_FP32;
    float *sums = rounds ? d->panels[PANEL_C] : c;
    const uint64_t ldc = rounds ? sw_round_up(n, STEP) : g->ldc;
    if (rounds && g->accumulate)
        d->isa->pointwise->widen(d->threads, sums, ldc, c, g->c_dtype, g->ldc, m, n);
    for (uint64_t p = 0; p < g->k; p += k_step) {
        const uint64_t k = g->k - p < k_step ? g->k - p : k_step;
        uint64_t lda, ldb;
        const float *left = g->trans_a ? operand(d, &panels[PANEL_A], &a, p, i, k, m, &lda)
                                       : operand(d, &panels[PANEL_A], &a, i, p, m, k, &lda);
        const float *right = g->trans_b ? operand(d, &panels[PANEL_B], &b, j, p, n, k, &ldb)
                                        : operand(d, &panels[PANEL_B], &b, p, j, k, n, &ldb);
        const float beta = g->accumulate || p > 0 ? 1.0f : 0.0f;
        const int ret = multiply(d, g, m, n, k, left, lda, right, ldb, beta, sums, ldc);
        if (ret < 0) return ret;
    }
    if (rounds) d->isa->pointwise->narrow(d->threads, c, g->c_dtype, g->ldc, sums, ldc, m, n);
    return 0;
}

/* A sum over nothing. */
static void clear(const struct sw_gemm *g) {
    const uint64_t bytes = sw_dtype_bytes(g->c_dtype);
    for (uint64_t i = 0; i < g->m && !g->accumulate; i++)
        memset((char *)g->c + i * g->ldc * bytes, 0, g->n * bytes);
}

/* The library generates its kernels at the first product that needs one, and makes each thread's
 * state at its first work. Whether it copies the operands, and with how many threads, depends on
 * the sizes, and up to sixteen rows have kernels of their own where there is AVX-512: hence small
 * products and one that fills the panels, over what lies in them. */
int sw_host_gemm_prepare(struct sw_stream *s) {
    static const uint64_t sizes[][3] = {{1, 64, 64},  {64, 1, 64},    {64, 64, 1},    {4, 64, 64},
                                        {64, 64, 64}, {640, 64, 384}, {1024, 128, 64}};
    struct sw_device *d = s->device;
    int ret = 0;
    pthread_mutex_lock(&d->panel_lock);
    for (uint64_t i = 0; i < SW_HOST_PANELS; i++)
        memset(d->panels[i], 0, SW_HOST_PANEL_ELEMENTS * sizeof(float));
    for (unsigned form = 0; form < 8 && ret == 0; form++)
        for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]) && ret == 0; i++) {
            const struct sw_gemm g = {.trans_a = form & 1, .trans_b = form >> 1 & 1};
            const uint64_t m = sizes[i][0], n = sizes[i][1], k = sizes[i][2];
            ret =
                multiply(d, &g, m, n, k, d->panels[PANEL_A], g.trans_a ? m : k, d->panels[PANEL_B],
                         g.trans_b ? k : n, form & 4 ? 1.0f : 0.0f, d->panels[PANEL_C], n);
        }
    pthread_mutex_unlock(&d->panel_lock);
    return ret;
}

int sw_host_gemm(struct sw_stream *s, const struct sw_gemm *g) {
    struct sw_device *d = s->device;
    assert(g->lda >= (g->trans_a ? g->m : g->k));
    assert(g->ldb >= (g->trans_b ? g->k : g->n));
    assert(g->ldc >= g->n);
    if (g->m == 0 || g->n == 0) return 0;
    if (g->k == 0) {
        clear(g);
        return 0;
    }
    int ret = 0;
    const struct blocks step = blocks_of(g);
    pthread_mutex_lock(&d->panel_lock);
    struct panel panels[2] = {{d->panels[PANEL_A], NULL}, {d->panels[PANEL_B], NULL}};
    for (uint64_t j = 0; j < g->n && ret == 0; j += step.n)
        for (uint64_t i = 0; i < g->m && ret == 0; i += step.m)
            ret = result_block(d, g, panels, step.k, i, g->m - i < step.m ? g->m - i : step.m, j,
                               g->n - j < step.n ? g->n - j : step.n);
    pthread_mutex_unlock(&d->panel_lock);
    return ret;
}
