/* kernels/cuda/attention_any.cu - attention for every type and head dimension, in FP32: the
 * fallback of attention.cu, with the same walks over square tiles in shared memory, and the delta
 * of both. The tile is as large as fits, so its edge depends on the head dimension alone. */
#include "kernels/cuda/launchers.h"
#include "kernels/cuda/lots.h"

namespace {
constexpr int THREADS = 128, EDGE_MAX = 32;
constexpr size_t SHARED_MAX = 96 << 10;

struct layout {
    int time, heads, kv_heads, dim, edge;
    float scale;
    const uint32_t *starts; /* as in kernels/device.h */
};

/* Six tiles of rows, two of scores, three vectors: what the largest kernel uses. */
size_t shared_bytes(int edge, int dim) {
    return ((size_t)edge * 6 * (size_t)dim + 2 * (size_t)edge * (size_t)edge + 3 * (size_t)edge) *
           sizeof(float);
}

/* 0: no tile fits. */
int edge_of(int dim) {
    int edge = EDGE_MAX;
    while (edge && shared_bytes(edge, dim) > SHARED_MAX) edge /= 2;
    return edge;
}

__device__ __forceinline__ uint64_t head_first(const layout &l, int heads, int head) {
    return ((uint64_t)blockIdx.z * (uint64_t)l.time * (uint64_t)heads + (uint64_t)head) *
           (uint64_t)l.dim;
}
__device__ __forceinline__ uint64_t lse_first(const layout &l, int head) {
    return ((uint64_t)blockIdx.z * (uint64_t)l.heads + (uint64_t)head) * (uint64_t)l.time;
}

/* Where the document of position i of the block's row begins. */
__device__ __forceinline__ int start_of(const layout &l, int i) {
    return l.starts ? (int)l.starts[(uint64_t)blockIdx.z * (uint64_t)l.time + (uint64_t)i] : 0;
}

/* Rows [first, first + edge) of a head, zeros beyond the last. */
template <enum sw_dtype T>
__device__ __forceinline__ void load_rows(const layout &l, float *to, const void *from, int heads,
                                          int head, int first) {
    const uint64_t at = head_first(l, heads, head), stride = (uint64_t)heads * (uint64_t)l.dim;
    for (int n = (int)threadIdx.x; n < l.edge * l.dim; n += THREADS) {
        const int row = first + n / l.dim;
        to[n] = row < l.time ? sw_load(T, from, at + (uint64_t)row * stride + (uint64_t)(n % l.dim))
                             : 0.0f;
    }
}

template <enum sw_dtype T>
__device__ __forceinline__ void store_rows(const layout &l, void *to, const float *from, int heads,
                                           int head, int first) {
    const uint64_t at = head_first(l, heads, head), stride = (uint64_t)heads * (uint64_t)l.dim;
    for (int n = (int)threadIdx.x; n < l.edge * l.dim; n += THREADS) {
        const int row = first + n / l.dim;
        if (row < l.time)
            store<T>(to, at + (uint64_t)row * stride + (uint64_t)(n % l.dim), from[n]);
    }
}

__device__ __forceinline__ float dot(const float *a, const float *b, int count) {
    float sum = 0.0f;
    for (int i = 0; i < count; i++) sum += a[i] * b[i];
    return sum;
}

template <enum sw_dtype T>
__global__ void __launch_bounds__(THREADS)
    any_forward(void *out, float *lse, const void *q, const void *k, const void *v,
                const layout l) {
    GPU_DYNAMIC_SHARED(float, queries);
    const int tile = l.edge * l.dim, head = (int)blockIdx.y;
    const int kv_head = head / (l.heads / l.kv_heads), q0 = (int)blockIdx.x * l.edge;
    float *keys = queries + tile, *values = keys + tile, *sums = values + tile;
    float *p = sums + tile, *most = p + l.edge * l.edge, *total = most + l.edge;
    float *alpha = total + l.edge;
    load_rows<T>(l, queries, q, l.heads, head, q0);
    for (int n = (int)threadIdx.x; n < tile; n += THREADS) sums[n] = 0.0f;
    if ((int)threadIdx.x < l.edge) {
        most[threadIdx.x] = -INFINITY;
        total[threadIdx.x] = 0.0f;
    }
    for (int k0 = start_of(l, q0) / l.edge * l.edge; k0 <= q0; k0 += l.edge) {
        __syncthreads();
        load_rows<T>(l, keys, k, l.kv_heads, kv_head, k0);
        load_rows<T>(l, values, v, l.kv_heads, kv_head, k0);
        __syncthreads();
        for (int n = (int)threadIdx.x; n < l.edge * l.edge; n += THREADS) {
            const int i = n / l.edge, j = n % l.edge;
            const bool sees = k0 + j <= q0 + i && k0 + j >= start_of(l, min(q0 + i, l.time - 1));
            p[n] = sees ? dot(queries + i * l.dim, keys + j * l.dim, l.dim) * l.scale : -INFINITY;
        }
        __syncthreads();
        if ((int)threadIdx.x < l.edge) {
            const int i = (int)threadIdx.x;
            float *row = p + i * l.edge, next = most[i], sum = 0.0f;
            for (int j = 0; j < l.edge; j++) next = fmaxf(next, row[j]);
            const float shift = next == -INFINITY ? 0.0f : next; /* nothing of its document yet */
            for (int j = 0; j < l.edge; j++) sum += row[j] = expf(row[j] - shift);
            alpha[i] = expf(most[i] - shift);
            total[i] = total[i] * alpha[i] + sum;
            most[i] = next;
        }
        __syncthreads();
        for (int n = (int)threadIdx.x; n < tile; n += THREADS) {
            const int i = n / l.dim, d = n % l.dim;
            float sum = sums[n] * alpha[i];
            for (int j = 0; j < l.edge; j++) sum += p[i * l.edge + j] * values[j * l.dim + d];
            sums[n] = sum;
        }
    }
    /* Each thread its own sums; the totals are whole since the last barrier. */
    for (int n = (int)threadIdx.x; n < tile; n += THREADS) sums[n] /= total[n / l.dim];
    if ((int)threadIdx.x < l.edge && q0 + (int)threadIdx.x < l.time)
        lse[lse_first(l, head) + (uint64_t)(q0 + (int)threadIdx.x)] =
            most[threadIdx.x] + logf(total[threadIdx.x]);
    store_rows<T>(l, out, sums, l.heads, head, q0); /* each thread what it has divided */
}

struct any_gradients {
    void *dq, *dk, *dv;
    const void *dout, *q, *k, *v;
    const float *lse, *delta;
};

/* p = exp(score - lse), ds = p (dp - delta) scale for a tile of queries by keys. */
__device__ __forceinline__ void scores(const layout &l, float *p, float *ds, const float *queries,
                                       const float *douts, const float *keys, const float *values,
                                       const float *lse, const float *delta, int q0, int k0) {
    for (int n = (int)threadIdx.x; n < l.edge * l.edge; n += THREADS) {
        const int i = n / l.edge, j = n % l.edge;
        p[n] = ds[n] = 0.0f;
        if (q0 + i >= l.time || k0 + j > q0 + i || k0 + j < start_of(l, q0 + i)) continue;
        const float score = dot(queries + i * l.dim, keys + j * l.dim, l.dim) * l.scale;
        const float dp = dot(douts + i * l.dim, values + j * l.dim, l.dim);
        p[n] = expf(score - lse[i]);
        ds[n] = p[n] * (dp - delta[i]) * l.scale;
    }
}

__device__ __forceinline__ void load_statistics(const layout &l, float *lse, float *delta,
                                                const any_gradients &x, int head, int q0) {
    const int i = (int)threadIdx.x;
    if (i >= l.edge) return;
    const bool is_there = q0 + i < l.time;
    lse[i] = is_there ? x.lse[lse_first(l, head) + (uint64_t)(q0 + i)] : 0.0f;
    delta[i] = is_there ? x.delta[lse_first(l, head) + (uint64_t)(q0 + i)] : 0.0f;
}

template <enum sw_dtype T>
__global__ void __launch_bounds__(THREADS) any_by_keys(const any_gradients x, const layout l) {
    GPU_DYNAMIC_SHARED(float, keys);
    const int tile = l.edge * l.dim, kv_head = (int)blockIdx.y, k0 = (int)blockIdx.x * l.edge;
    const int group = l.heads / l.kv_heads;
    float *values = keys + tile, *dk = values + tile, *dv = dk + tile, *queries = dv + tile;
    float *douts = queries + tile, *p = douts + tile, *ds = p + l.edge * l.edge;
    float *lse = ds + l.edge * l.edge, *delta = lse + l.edge;
    load_rows<T>(l, keys, x.k, l.kv_heads, kv_head, k0);
    load_rows<T>(l, values, x.v, l.kv_heads, kv_head, k0);
    for (int n = (int)threadIdx.x; n < tile; n += THREADS) dk[n] = dv[n] = 0.0f;
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++)
        for (int q0 = k0; q0 < l.time && start_of(l, q0) < k0 + l.edge; q0 += l.edge) {
            __syncthreads();
            load_rows<T>(l, queries, x.q, l.heads, head, q0);
            load_rows<T>(l, douts, x.dout, l.heads, head, q0);
            load_statistics(l, lse, delta, x, head, q0);
            __syncthreads();
            scores(l, p, ds, queries, douts, keys, values, lse, delta, q0, k0);
            __syncthreads();
            for (int n = (int)threadIdx.x; n < tile; n += THREADS) {
                const int j = n / l.dim, d = n % l.dim;
                float to_k = dk[n], to_v = dv[n];
                for (int i = 0; i < l.edge; i++) {
                    to_k += ds[i * l.edge + j] * queries[i * l.dim + d];
                    to_v += p[i * l.edge + j] * douts[i * l.dim + d];
                }
                dk[n] = to_k;
                dv[n] = to_v;
            }
        }
    store_rows<T>(l, x.dk, dk, l.kv_heads, kv_head, k0); /* each thread its own sums */
    store_rows<T>(l, x.dv, dv, l.kv_heads, kv_head, k0);
}

template <enum sw_dtype T>
__global__ void __launch_bounds__(THREADS) any_by_queries(const any_gradients x, const layout l) {
    GPU_DYNAMIC_SHARED(float, queries);
    const int tile = l.edge * l.dim, head = (int)blockIdx.y, q0 = (int)blockIdx.x * l.edge;
    const int kv_head = head / (l.heads / l.kv_heads);
    float *douts = queries + tile, *dq = douts + tile, *keys = dq + tile, *values = keys + tile;
    float *p = values + tile, *ds = p + l.edge * l.edge, *lse = ds + l.edge * l.edge;
    float *delta = lse + l.edge;
    load_rows<T>(l, queries, x.q, l.heads, head, q0);
    load_rows<T>(l, douts, x.dout, l.heads, head, q0);
    load_statistics(l, lse, delta, x, head, q0);
    for (int n = (int)threadIdx.x; n < tile; n += THREADS) dq[n] = 0.0f;
    for (int k0 = start_of(l, q0) / l.edge * l.edge; k0 <= q0; k0 += l.edge) {
        __syncthreads();
        load_rows<T>(l, keys, x.k, l.kv_heads, kv_head, k0);
        load_rows<T>(l, values, x.v, l.kv_heads, kv_head, k0);
        __syncthreads();
        scores(l, p, ds, queries, douts, keys, values, lse, delta, q0, k0);
        __syncthreads();
        for (int n = (int)threadIdx.x; n < tile; n += THREADS) {
            const int i = n / l.dim, d = n % l.dim;
            float sum = dq[n];
            for (int j = 0; j < l.edge; j++) sum += ds[i * l.edge + j] * keys[j * l.dim + d];
            dq[n] = sum;
        }
    }
    store_rows<T>(l, x.dq, dq, l.heads, head, q0); /* each thread its own sums */
}

/* A warp for each row of each head. */
template <enum sw_dtype T>
__global__ void __launch_bounds__(THREADS)
    delta_of_rows(float *delta, const void *dout, const void *out, const layout l, uint64_t rows) {
    const uint64_t n = (uint64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (n >= rows) return; /* the whole warp */
    const uint64_t time = (uint64_t)l.time, heads = (uint64_t)l.heads, dim = (uint64_t)l.dim;
    const uint64_t i = n % time, head = n / time % heads, batch = n / time / heads;
    const uint64_t at = ((batch * time + i) * heads + head) * dim;
    float sum = 0.0f;
    for (uint64_t d = threadIdx.x & 31; d < dim; d += 32)
        sum += sw_load(T, dout, at + d) * sw_load(T, out, at + d);
    sum = warp_sum(sum);
    if ((threadIdx.x & 31) == 0) delta[n] = sum;
}

layout layout_of(const struct sw_attention *s) {
    return {
        (int)s->time, (int)s->heads, (int)s->kv_heads, (int)s->head_dim, edge_of((int)s->head_dim),
        s->scale,     s->starts};
}
unsigned tiles_of(const layout &l) {
    return (unsigned)((l.time + l.edge - 1) / l.edge);
}

template <enum sw_dtype T>
cudaError_t forward_as(cudaStream_t s, const struct sw_attention *shape, void *out, float *lse,
                       const void *q, const void *k, const void *v) {
    const layout l = layout_of(shape);
    if (!l.edge) return cudaErrorInvalidValue;
    GPU_LAUNCH((any_forward<T>), dim3(tiles_of(l), shape->heads, shape->batch), THREADS,
               shared_bytes(l.edge, l.dim), s, out, lse, q, k, v, l);
    return cudaGetLastError();
}

template <enum sw_dtype T>
cudaError_t backward_as(cudaStream_t s, const struct sw_attention *shape, const any_gradients &x) {
    const layout l = layout_of(shape);
    if (!l.edge) return cudaErrorInvalidValue;
    GPU_LAUNCH((any_by_keys<T>), dim3(tiles_of(l), shape->kv_heads, shape->batch), THREADS,
               shared_bytes(l.edge, l.dim), s, x, l);
    GPU_LAUNCH((any_by_queries<T>), dim3(tiles_of(l), shape->heads, shape->batch), THREADS,
               shared_bytes(l.edge, l.dim), s, x, l);
    return cudaGetLastError();
}

template <enum sw_dtype T>
cudaError_t delta_as(cudaStream_t s, const struct sw_attention *shape, float *delta,
                     const void *dout, const void *out) {
    const uint64_t rows = (uint64_t)shape->batch * shape->time * shape->heads;
    GPU_LAUNCH((delta_of_rows<T>), (unsigned)((rows + THREADS / 32 - 1) / (THREADS / 32)), THREADS,
               0, s, delta, dout, out, layout_of(shape), rows);
    return cudaGetLastError();
}

template <enum sw_dtype T>
cudaError_t prepare_as() {
    const cudaFuncAttribute most = cudaFuncAttributeMaxDynamicSharedMemorySize;
    const void *const kernels[] = {reinterpret_cast<const void *>(any_forward<T>),
                                   reinterpret_cast<const void *>(any_by_keys<T>),
                                   reinterpret_cast<const void *>(any_by_queries<T>)};
    cudaError_t error = cudaSuccess;
    for (const void *kernel : kernels)
        if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, most, (int)SHARED_MAX);
    return error;
}
} // namespace

cudaError_t sw_cuda_attention_any_prepare(void) {
    const cudaError_t error = prepare_as<SW_BF16>();
    return error == cudaSuccess ? prepare_as<SW_FP32>() : error;
}

cudaError_t sw_cuda_attention_any(cudaStream_t s, enum sw_dtype dtype,
                                  const struct sw_attention *shape, void *out, float *lse,
                                  const void *q, const void *k, const void *v) {
    return BY_DTYPE(dtype, forward_as, s, shape, out, lse, q, k, v);
}

cudaError_t sw_cuda_attention_any_backward(cudaStream_t s, enum sw_dtype dtype,
                                           const struct sw_attention *shape, void *dq, void *dk,
                                           void *dv, const void *dout, const float *lse,
                                           const float *delta, const void *q, const void *k,
                                           const void *v) {
    const any_gradients x = {dq, dk, dv, dout, q, k, v, lse, delta};
    return BY_DTYPE(dtype, backward_as, s, shape, x);
}

cudaError_t sw_cuda_attention_delta(cudaStream_t s, enum sw_dtype dtype,
                                    const struct sw_attention *shape, float *delta,
                                    const void *dout, const void *out) {
    return BY_DTYPE(dtype, delta_as, s, shape, delta, dout, out);
}
