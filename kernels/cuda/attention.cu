/* kernels/cuda/attention.cu - causal grouped-query attention on tensor cores, forward and backward
 * in the flash style, for BF16 and head dimensions of 64, 80, 96, 128 and 256.
 *
 * Forward: a block takes 64 queries of one head and walks the keys, from where the first query's
 * document begins up to the diagonal, with an online softmax; each tile of keys and values comes
 * while the other is worked on. Backward has two kernels, both computing the scores again from lse.
 * One takes 64 keys and walks all heads of their group and all later queries of their documents, in
 * order; the other takes 64 queries and walks the keys. So nothing is summed by two blocks, and no
 * atomics are needed: equal inputs, equal bits. Weights of the softmax and gradients of scores are
 * rounded to BF16 before they are multiplied. */
#include "kernels/cuda/launchers.h"
#include "kernels/cuda/tiles.h"

namespace {
/* Tiles of the walk: what fits into registers and 99 KiB of shared memory. */
template <int D>
struct sizes {
    static constexpr int keys = D > 128 ? 32 : 64;      /* forward */
    static constexpr int queries = D > 128 ? 16 : 32;   /* backward, by keys */
    static constexpr int keys_back = D > 128 ? 16 : 32; /* backward, by queries */
    static constexpr int columns = D > 128 ? D / 2 : D; /* of dk and dv in a block */
    static constexpr size_t forward_bytes = (TILE_ROWS + 2 * keys) * PITCH<D> * sizeof(sw_bf16);
    static constexpr size_t by_keys_bytes =
        (2 * TILE_ROWS + 2 * queries) * PITCH<D> * sizeof(sw_bf16) + 3 * queries * sizeof(float);
    static constexpr size_t by_queries_bytes =
        (2 * TILE_ROWS + 2 * keys_back) * PITCH<D> * sizeof(sw_bf16);
    static_assert(forward_bytes <= 99 << 10 && by_keys_bytes <= 99 << 10 &&
                      by_queries_bytes <= 99 << 10,
                  "what compute capability 8.9 has");
};

/* Where a head's first row lies, and from one row to the next. */
struct head_place {
    uint64_t first, stride;
};
__device__ __forceinline__ head_place place_of(int batch, int time, int heads, int head, int dim) {
    const uint64_t stride = (uint64_t)heads * (uint64_t)dim;
    return {(uint64_t)batch * (uint64_t)time * stride + (uint64_t)head * (uint64_t)dim, stride};
}

/* The largest of a row's elements, or their sum: the four lanes of a row hold its columns. */
__device__ __forceinline__ float row_most(float x) {
    x = fmaxf(x, __shfl_xor_sync(GPU_ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(GPU_ALL_LANES, x, 2));
}
__device__ __forceinline__ float row_total(float x) {
    x += __shfl_xor_sync(GPU_ALL_LANES, x, 1);
    return x + __shfl_xor_sync(GPU_ALL_LANES, x, 2);
}

/* scores become exp2((score - maximum) log2_scale); what was summed under the old maximum shrinks
 * by alpha. Each lane has its own part of total. A row that has seen nothing of its document yet
 * has a maximum of -Inf, and sums of zero. */
template <int N>
__device__ __forceinline__ void online_softmax(float (&s)[N / 8][4], float (&most)[2],
                                               float (&total)[2], float (&alpha)[2],
                                               float log2_scale) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float next = most[r];
#pragma unroll
        for (int n = 0; n < N / 8; n++) next = fmaxf(next, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        next = row_most(next);
        const float shift = next == -INFINITY ? 0.0f : next;
        alpha[r] = exp2f((most[r] - shift) * log2_scale);
        most[r] = next;
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; e++) {
                s[n][e] = exp2f((s[n][e] - shift) * log2_scale);
                sum += s[n][e];
            }
        total[r] = total[r] * alpha[r] + sum;
    }
}

/* For 64 three blocks at a time: four would leave 128 registers, which sm_80 spills. */
template <int D>
__global__ void __launch_bounds__(TILE_THREADS, D == 64 ? 3 : 0)
    forward(sw_bf16 *out, float *lse, const sw_bf16 *q, const sw_bf16 *k, const sw_bf16 *v,
            const attention_shape shape) {
    constexpr int KEYS = sizes<D>::keys;
    GPU_DYNAMIC_SHARED(sw_bf16, queries);
    sw_bf16 *keys = queries + TILE_ROWS * PITCH<D>, *values = keys + KEYS * PITCH<D>;
    /* The longest walks first. */
    const int q0 = (int)(gridDim.x - 1 - blockIdx.x) * TILE_ROWS, head = (int)blockIdx.y;
    const int batch = (int)blockIdx.z, kv_head = head / (shape.heads / shape.kv_heads);
    const head_place at = place_of(batch, shape.time, shape.heads, head, D);
    const head_place kv = place_of(batch, shape.time, shape.kv_heads, kv_head, D);
    const int last = (min(q0 + TILE_ROWS, shape.time) - 1) / KEYS, row = q0 + warp_row();
    const int first = start_of(shape, batch, q0) / KEYS;
    int start[2];
    float o[D / 8][4] = {}, most[2] = {-INFINITY, -INFINITY}, total[2] = {}, alpha[2];
#pragma unroll
    for (int r = 0; r < 2; r++)
        start[r] = start_of(shape, batch, min(row + fragment_row(2 * r), shape.time - 1));

    load_tile<D, TILE_ROWS>(queries, q + at.first, at.stride, q0, shape.time);
    load_tile<D, KEYS>(keys, k + kv.first, kv.stride, first * KEYS, shape.time);
    gpu_copy_async_commit();
    for (int t = first; t <= last; t++) {
        load_tile<D, KEYS>(values, v + kv.first, kv.stride, t * KEYS, shape.time);
        gpu_copy_async_commit();
        gpu_copy_async_wait<1>(); /* the keys */
        __syncthreads();
        float s[KEYS / 8][4] = {};
        multiply_rows<D, KEYS>(s, queries + warp_row() * PITCH<D>, keys);
        gpu_copy_async_wait<0>(); /* the values */
        __syncthreads();          /* and nobody reads these keys any more */
        if (t < last) load_tile<D, KEYS>(keys, k + kv.first, kv.stride, (t + 1) * KEYS, shape.time);
        gpu_copy_async_commit();
        if ((t + 1) * KEYS - 1 > row || t * KEYS < start[1]) { /* the later of the two */
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int key = t * KEYS + fragment_column(n, e);
                    if (key > row + fragment_row(e) || key < start[e >> 1]) s[n][e] = -INFINITY;
                }
        }
        online_softmax<KEYS>(s, most, total, alpha, shape.scale * LOG2_E);
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) o[n][e] *= alpha[e >> 1];
        multiply_scores<D, KEYS, D>(o, s, values);
        __syncthreads(); /* before the next values come */
    }
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int i = row + fragment_row(2 * r);
        total[r] = row_total(total[r]);
        inverse[r] = 1.0f / total[r];
        if (i < shape.time && lane_index() % 4 == 0)
            lse[((uint64_t)batch * (uint64_t)shape.heads + (uint64_t)head) * (uint64_t)shape.time +
                (uint64_t)i] = most[r] * shape.scale + logf(total[r]);
    }
    put_rows<D, D>(queries, o, inverse); /* each warp over its own queries */
    store_rows<D, D>(out + at.first, queries, at.stride, q0, shape.time);
}

struct gradients {
    sw_bf16 *dq, *dk, *dv;
    const sw_bf16 *dout, *q, *k, *v;
    const float *lse, *delta;
};

/* p = exp(score - lse) and ds = p (dp - delta) scale, in place of scores and dp. */
__device__ __forceinline__ void score_gradient(float &s, float &dp, float lse_log2, float delta,
                                               const attention_shape &shape, bool counts) {
    const float p = counts ? exp2f(s * (shape.scale * LOG2_E) - lse_log2) : 0.0f;
    dp = counts ? p * (dp - delta) * shape.scale : 0.0f;
    s = p;
}

/* dk and dv of 64 keys. Rows of the scores are keys, their columns queries. */
template <int D>
__global__ void __launch_bounds__(TILE_THREADS)
    backward_by_keys(const gradients x, const attention_shape shape) {
    constexpr int QUERIES = sizes<D>::queries, COLUMNS = sizes<D>::columns, PARTS = D / COLUMNS;
    GPU_DYNAMIC_SHARED(sw_bf16, keys);
    sw_bf16 *values = keys + TILE_ROWS * PITCH<D>, *queries = values + TILE_ROWS * PITCH<D>;
    sw_bf16 *douts = queries + QUERIES * PITCH<D>;
    float *lse = reinterpret_cast<float *>(douts + QUERIES * PITCH<D>), *delta = lse + QUERIES;
    int *starts = reinterpret_cast<int *>(delta + QUERIES);
    const int k0 = (int)blockIdx.x / PARTS * TILE_ROWS, part = (int)blockIdx.x % PARTS * COLUMNS;
    const int kv_head = (int)blockIdx.y, batch = (int)blockIdx.z;
    const int group = shape.heads / shape.kv_heads, key = k0 + warp_row();
    const head_place kv = place_of(batch, shape.time, shape.kv_heads, kv_head, D);
    float dk[COLUMNS / 8][4] = {}, dv[COLUMNS / 8][4] = {};

    load_tile<D, TILE_ROWS>(keys, x.k + kv.first, kv.stride, k0, shape.time);
    load_tile<D, TILE_ROWS>(values, x.v + kv.first, kv.stride, k0, shape.time);
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
        const head_place at = place_of(batch, shape.time, shape.heads, head, D);
        const uint64_t rows =
            ((uint64_t)batch * (uint64_t)shape.heads + (uint64_t)head) * (uint64_t)shape.time;
        for (int q0 = k0; q0 < shape.time && start_of(shape, batch, q0) < k0 + TILE_ROWS;
             q0 += QUERIES) {
            __syncthreads(); /* nobody reads the queries before any more */
            load_tile<D, QUERIES>(queries, x.q + at.first, at.stride, q0, shape.time);
            load_tile<D, QUERIES>(douts, x.dout + at.first, at.stride, q0, shape.time);
            gpu_copy_async_commit();
            if (threadIdx.x < QUERIES) {
                const int i = q0 + (int)threadIdx.x;
                lse[threadIdx.x] = i < shape.time ? x.lse[rows + (uint64_t)i] * LOG2_E : 0.0f;
                delta[threadIdx.x] = i < shape.time ? x.delta[rows + (uint64_t)i] : 0.0f;
                starts[threadIdx.x] = i < shape.time ? start_of(shape, batch, i) : 0;
            }
            gpu_copy_async_wait<0>();
            __syncthreads();
            float p[QUERIES / 8][4] = {}, ds[QUERIES / 8][4] = {};
            multiply_rows<D, QUERIES>(p, keys + warp_row() * PITCH<D>, queries);
            multiply_rows<D, QUERIES>(ds, values + warp_row() * PITCH<D>, douts);
#pragma unroll
            for (int n = 0; n < QUERIES / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int c = fragment_column(n, e), i = q0 + c, j = key + fragment_row(e);
                    score_gradient(p[n][e], ds[n][e], lse[c], delta[c], shape,
                                   i < shape.time && j <= i && j >= starts[c]);
                }
            multiply_scores<D, QUERIES, COLUMNS>(dv, p, douts + part);
            multiply_scores<D, QUERIES, COLUMNS>(dk, ds, queries + part);
        }
    }
    const float one[2] = {1.0f, 1.0f};
    put_rows<D, COLUMNS>(keys, dk, one); /* each warp over its own keys and values */
    put_rows<D, COLUMNS>(values, dv, one);
    store_rows<D, COLUMNS>(x.dk + kv.first + part, keys, kv.stride, k0, shape.time);
    store_rows<D, COLUMNS>(x.dv + kv.first + part, values, kv.stride, k0, shape.time);
}

/* dq of 64 queries. */
template <int D>
__global__ void __launch_bounds__(TILE_THREADS)
    backward_by_queries(const gradients x, const attention_shape shape) {
    constexpr int KEYS = sizes<D>::keys_back;
    GPU_DYNAMIC_SHARED(sw_bf16, queries);
    sw_bf16 *douts = queries + TILE_ROWS * PITCH<D>, *keys = douts + TILE_ROWS * PITCH<D>;
    sw_bf16 *values = keys + KEYS * PITCH<D>;
    const int q0 = (int)(gridDim.x - 1 - blockIdx.x) * TILE_ROWS, head = (int)blockIdx.y;
    const int batch = (int)blockIdx.z, kv_head = head / (shape.heads / shape.kv_heads);
    const head_place at = place_of(batch, shape.time, shape.heads, head, D);
    const head_place kv = place_of(batch, shape.time, shape.kv_heads, kv_head, D);
    const uint64_t rows =
        ((uint64_t)batch * (uint64_t)shape.heads + (uint64_t)head) * (uint64_t)shape.time;
    const int last = (min(q0 + TILE_ROWS, shape.time) - 1) / KEYS, row = q0 + warp_row();
    const int first = start_of(shape, batch, q0) / KEYS;
    int start[2] = {};
    float dq[D / 8][4] = {}, lse[2] = {}, delta[2] = {};
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int i = row + fragment_row(2 * r);
        if (i >= shape.time) continue;
        lse[r] = x.lse[rows + (uint64_t)i] * LOG2_E;
        delta[r] = x.delta[rows + (uint64_t)i];
        start[r] = start_of(shape, batch, i);
    }
    load_tile<D, TILE_ROWS>(queries, x.q + at.first, at.stride, q0, shape.time);
    load_tile<D, TILE_ROWS>(douts, x.dout + at.first, at.stride, q0, shape.time);
    for (int t = first; t <= last; t++) {
        __syncthreads(); /* nobody reads the keys before any more */
        load_tile<D, KEYS>(keys, x.k + kv.first, kv.stride, t * KEYS, shape.time);
        load_tile<D, KEYS>(values, x.v + kv.first, kv.stride, t * KEYS, shape.time);
        gpu_copy_async_commit();
        gpu_copy_async_wait<0>();
        __syncthreads();
        float p[KEYS / 8][4] = {}, ds[KEYS / 8][4] = {};
        multiply_rows<D, KEYS>(p, queries + warp_row() * PITCH<D>, keys);
        multiply_rows<D, KEYS>(ds, douts + warp_row() * PITCH<D>, values);
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int i = row + fragment_row(e), j = t * KEYS + fragment_column(n, e);
                score_gradient(p[n][e], ds[n][e], lse[e >> 1], delta[e >> 1], shape,
                               i < shape.time && j <= i && j >= start[e >> 1]);
            }
        multiply_scores<D, KEYS, D>(dq, ds, keys);
    }
    const float one[2] = {1.0f, 1.0f};
    put_rows<D, D>(queries, dq, one); /* each warp over its own queries */
    store_rows<D, D>(x.dq + at.first, queries, at.stride, q0, shape.time);
}

attention_shape shape_of(const struct sw_attention *s) {
    return {(int)s->time, (int)s->heads, (int)s->kv_heads, s->scale, s->starts};
}
unsigned tiles_of(const struct sw_attention *s) {
    return (s->time + TILE_ROWS - 1) / TILE_ROWS;
}

template <int D>
cudaError_t forward_as(cudaStream_t s, const struct sw_attention *shape, void *out, float *lse,
                       const void *q, const void *k, const void *v) {
    const dim3 grid(tiles_of(shape), shape->heads, shape->batch);
    GPU_LAUNCH((forward<D>), grid, TILE_THREADS, sizes<D>::forward_bytes, s,
               static_cast<sw_bf16 *>(out), lse, static_cast<const sw_bf16 *>(q),
               static_cast<const sw_bf16 *>(k), static_cast<const sw_bf16 *>(v), shape_of(shape));
    return cudaGetLastError();
}

template <int D>
cudaError_t backward_as(cudaStream_t s, const struct sw_attention *shape, const gradients &x) {
    const dim3 by_keys(tiles_of(shape) * (unsigned)(D / sizes<D>::columns), shape->kv_heads,
                       shape->batch);
    const dim3 by_queries(tiles_of(shape), shape->heads, shape->batch);
    GPU_LAUNCH((backward_by_keys<D>), by_keys, TILE_THREADS, sizes<D>::by_keys_bytes, s, x,
               shape_of(shape));
    GPU_LAUNCH((backward_by_queries<D>), by_queries, TILE_THREADS, sizes<D>::by_queries_bytes, s, x,
               shape_of(shape));
    return cudaGetLastError();
}

/* What a kernel needs beyond 48 KiB has to be allowed, once on each device. */
template <int D>
cudaError_t prepare_as() {
    const cudaFuncAttribute most = cudaFuncAttributeMaxDynamicSharedMemorySize;
    cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void *>(forward<D>), most,
                                             (int)sizes<D>::forward_bytes);
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(reinterpret_cast<const void *>(backward_by_keys<D>), most,
                                     (int)sizes<D>::by_keys_bytes);
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(reinterpret_cast<const void *>(backward_by_queries<D>), most,
                                     (int)sizes<D>::by_queries_bytes);
    return error;
}
} // namespace

/* The head dimensions that have kernels, and nothing else. */
#define BY_HEAD_DIM(dim, function, ...)                                                            \
    ((dim) == 64    ? function<64>(__VA_ARGS__)                                                    \
     : (dim) == 80  ? function<80>(__VA_ARGS__)                                                    \
     : (dim) == 96  ? function<96>(__VA_ARGS__)                                                    \
     : (dim) == 128 ? function<128>(__VA_ARGS__)                                                   \
                    : function<256>(__VA_ARGS__))

int sw_cuda_attention_is_fast(enum sw_dtype dtype, const struct sw_attention *shape) {
    const uint32_t d = shape->head_dim;
    return dtype == SW_BF16 && (d == 64 || d == 80 || d == 96 || d == 128 || d == 256);
}

cudaError_t sw_cuda_attention_prepare(void) {
    static const int dims[] = {64, 80, 96, 128, 256};
    cudaError_t error = cudaSuccess;
    for (int d : dims)
        if (error == cudaSuccess) error = BY_HEAD_DIM(d, prepare_as);
    return error;
}

cudaError_t sw_cuda_attention(cudaStream_t s, const struct sw_attention *shape, void *out,
                              float *lse, const void *q, const void *k, const void *v) {
    return BY_HEAD_DIM(shape->head_dim, forward_as, s, shape, out, lse, q, k, v);
}

cudaError_t sw_cuda_attention_backward(cudaStream_t s, const struct sw_attention *shape, void *dq,
                                       void *dk, void *dv, const void *dout, const float *lse,
                                       const float *delta, const void *q, const void *k,
                                       const void *v) {
    const gradients x = {static_cast<sw_bf16 *>(dq),
                         static_cast<sw_bf16 *>(dk),
                         static_cast<sw_bf16 *>(dv),
                         static_cast<const sw_bf16 *>(dout),
                         static_cast<const sw_bf16 *>(q),
                         static_cast<const sw_bf16 *>(k),
                         static_cast<const sw_bf16 *>(v),
                         lse,
                         delta};
    return BY_HEAD_DIM(shape->head_dim, backward_as, s, shape, x);
}
