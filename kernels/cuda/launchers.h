/* kernels/cuda/launchers.h - what the kernels' files offer to device_cuda.c: each call enqueues its
 * operator's kernels on a stream of the current device. The operators are kernels/device.h's. */
#ifndef KERNELS_CUDA_LAUNCHERS_H
#define KERNELS_CUDA_LAUNCHERS_H
#include <cuda_runtime_api.h>
#include "kernels/device.h"
#ifdef __cplusplus
extern "C" {
#endif

/* embed.cu */
cudaError_t sw_cuda_embed(cudaStream_t s, enum sw_dtype dtype, void *out, const void *table,
                          const int32_t *tokens, uint64_t n, uint64_t width, uint64_t first_row,
                          uint64_t rows);
cudaError_t sw_cuda_embed_backward(cudaStream_t s, enum sw_dtype dtype, float *dtable,
                                   const void *dout, const int32_t *tokens, uint64_t n,
                                   uint64_t width, uint64_t first_row, uint64_t rows);

/* rmsnorm.cu */
cudaError_t sw_cuda_rmsnorm(cudaStream_t s, enum sw_dtype dtype, void *out, float *rstd,
                            const void *x, const void *w, uint64_t n, uint64_t width, float eps);
cudaError_t sw_cuda_rmsnorm_backward(cudaStream_t s, enum sw_dtype dtype, void *dx, int add_dx,
                                     float *dw, int add_dw, const void *dy, const void *x,
                                     const void *w, const float *rstd, uint64_t n, uint64_t width,
                                     void *scratch);
uint64_t sw_cuda_rmsnorm_scratch_bytes(uint64_t n, uint64_t width);

/* pointwise.cu */
cudaError_t sw_cuda_rope(cudaStream_t s, enum sw_dtype dtype, void *x, const float *cos,
                         const float *sin, uint64_t rows, uint64_t time, uint64_t heads,
                         uint64_t head_dim, int inverse);
cudaError_t sw_cuda_swiglu(cudaStream_t s, enum sw_dtype dtype, void *out, const void *gate,
                           const void *up, uint64_t count);
cudaError_t sw_cuda_swiglu_backward(cudaStream_t s, enum sw_dtype dtype, void *dgate, void *dup,
                                    const void *dout, const void *gate, const void *up,
                                    uint64_t count);
cudaError_t sw_cuda_round(cudaStream_t s, enum sw_dtype dtype, void *dst, const float *src,
                          uint64_t count);

/* word_sum.cu: parts [SW_CUDA_WORD_PARTS], whose sum is that of base/word_sum.h. */
enum { SW_CUDA_WORD_PARTS = 128 };
cudaError_t sw_cuda_word_parts(cudaStream_t s, uint64_t *parts, const void *data, uint64_t bytes);

/* norm.cu */
cudaError_t sw_cuda_sum(cudaStream_t s, double *out, const float *x, uint64_t n);
cudaError_t sw_cuda_round_norm(cudaStream_t s, void *dst, enum sw_dtype dst_dtype, const float *src,
                               uint64_t count, double *block_sums, struct sw_nonfinite *bad);

/* softmax.cu */
cudaError_t sw_cuda_softmax_stats(cudaStream_t s, float *stats, const float *logits,
                                  const int32_t *targets, uint64_t n, uint64_t width,
                                  uint64_t first_column, int begin);
cudaError_t sw_cuda_softmax_loss(cudaStream_t s, float *loss, const float *stats,
                                 const uint8_t *mask, uint64_t n);
cudaError_t sw_cuda_softmax_backward(cudaStream_t s, enum sw_dtype dtype, void *dlogits,
                                     const float *logits, const float *stats,
                                     const int32_t *targets, const uint8_t *mask, float scale,
                                     uint64_t n, uint64_t width, uint64_t first_column);

/* attention.cu, for BF16, the head dimensions of tensor cores and pointers aligned to 16;
 * attention_any.cu, for the rest. prepare: once on each device. delta FP32 [batch][heads][time]
 * comes from sw_cuda_attention_delta(), delta[i] = dout[i] . out[i]. */
int sw_cuda_attention_is_fast(enum sw_dtype dtype, const struct sw_attention *shape);
cudaError_t sw_cuda_attention_prepare(void);
cudaError_t sw_cuda_attention(cudaStream_t s, const struct sw_attention *shape, void *out,
                              float *lse, const void *q, const void *k, const void *v);
cudaError_t sw_cuda_attention_backward(cudaStream_t s, const struct sw_attention *shape, void *dq,
                                       void *dk, void *dv, const void *dout, const float *lse,
                                       const float *delta, const void *q, const void *k,
                                       const void *v);
cudaError_t sw_cuda_attention_any_prepare(void);
cudaError_t sw_cuda_attention_any(cudaStream_t s, enum sw_dtype dtype,
                                  const struct sw_attention *shape, void *out, float *lse,
                                  const void *q, const void *k, const void *v);
cudaError_t sw_cuda_attention_any_backward(cudaStream_t s, enum sw_dtype dtype,
                                           const struct sw_attention *shape, void *dq, void *dk,
                                           void *dv, const void *dout, const float *lse,
                                           const float *delta, const void *q, const void *k,
                                           const void *v);
cudaError_t sw_cuda_attention_delta(cudaStream_t s, enum sw_dtype dtype,
                                    const struct sw_attention *shape, float *delta,
                                    const void *dout, const void *out);

/* adam.cu */
cudaError_t sw_cuda_adam(cudaStream_t s, const struct sw_device_adam_step *step,
                         const struct sw_device_adam_chunk *chunk);

/* rank_sum.cu: out FP32 [count] = the sum, in order, of `ranks` rows of BF16 that lie `stride`
 * elements apart. */
cudaError_t sw_cuda_rank_sum(cudaStream_t s, float *out, const sw_bf16 *in, uint32_t ranks,
                             uint64_t stride, uint64_t count);

/* load.cu: once on each device. */
cudaError_t sw_cuda_load_kernels(void);

#ifdef __cplusplus
}
#endif
#endif
