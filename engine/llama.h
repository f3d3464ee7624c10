/* engine/llama.h - the units of a Llama decoder on a device: forward, and recompute with backward.
 *
 * Composes the device's operators; knows no tier, lane or schedule. Weights of a unit are one flat
 * buffer in the working type (tensor places as in engine/model.h), gradients one flat FP32 buffer
 * with the same places. A micro-batch is `batch` rows of `time` tokens; activations are [batch *
 * time] [hidden]. Everything inside a unit is recomputed in backward from the unit's input. The
 * work is enqueued on the caller's stream; nothing is allocated. Errors: those of the operators. */
#ifndef ENGINE_LLAMA_H
#define ENGINE_LLAMA_H
#include <stdint.h>
#include "engine/model.h"
#include "kernels/device.h"

struct sw_llama {
    const struct sw_device_ops *ops;
    const struct sw_model *model;
    enum sw_dtype dtype;
    uint64_t batch, time, tokens;  /* tokens = batch * time */
    uint64_t head_slice;           /* tokens whose logits exist at once */
    int head_whole;                /* sw_llama_head_whole() may be called */
    struct sw_attention attention; /* without the starts of documents, which are a batch's */
    /* Workspace, device memory. */
    void *norm1, *q, *k, *v, *att, *mid, *norm2, *gate, *up, *act; /* recomputed in backward */
    void *d_norm, *d_att, *d_q, *d_k, *d_v;
    float *rstd1, *rstd2, *lse, *rope_cos, *rope_sin;
    float *logits,
        *losses;    /* logits: a slice's, of one part or (head_whole) of all, part by part */
    void *d_logits; /* of one part, in dtype; FP32: where the part's logits are */
    void *scratch;
};

/* Tokens per slice of the head: the FP32 logits of a slice, over the whole vocabulary, fill at most
 * 32 MB of the host's memory, but for a smallest slice of 16 tokens. On a GPU 256 MB: every slice
 * reads the head's matrix anew, and takes longer for that than for its products below some 300
 * tokens (operations a byte of the card). */
uint64_t sw_llama_head_slice(const struct sw_model *model, const struct sw_device_handle *device,
                             uint64_t tokens);

/* Fills in what follows from shapes alone: enough for sw_llama_flops(), and what open begins with.
 */
void sw_llama_describe(struct sw_llama *l, const struct sw_model *model,
                       const struct sw_device_handle *device, enum sw_dtype dtype, uint64_t batch,
                       uint64_t time, int head_whole);

/* Bytes of workspace for micro-batches of batch x time. head_whole: sw_llama_head_whole() may be
 * called, which needs logits over the whole vocabulary; else those of the largest part suffice. */
uint64_t sw_llama_workspace_bytes(const struct sw_model *model,
                                  const struct sw_device_handle *device, enum sw_dtype dtype,
                                  uint64_t batch, uint64_t time, int head_whole);

/* Lays the workspace out and uploads the angles of the rotary embedding through `stream`. The model
 * and the workspace (sw_llama_workspace_bytes() of the same arguments) must outlive l. */
int sw_llama_open(struct sw_llama *l, const struct sw_model *model,
                  const struct sw_device_handle *device, enum sw_dtype dtype, uint64_t batch,
                  uint64_t time, int head_whole, void *workspace, struct sw_stream *stream);

/* Angles per pair of a head's dimensions, head_dim / 2 of them, as the configuration's rope_theta
 * and rope scaling give them ("linear" and "llama3" as in Hugging Face's modeling_rope_utils). */
void sw_llama_rope_frequencies(const struct sw_model_config *config, double *frequencies);

/* What is done with a unit, for counting. Of a layer: forward, its recomputation, and backward,
 * which holds the recomputation. Of a part of the head: the logits (forward, recompute), the logits
 * with the gradient of x alone or of the matrix alone, or with both (backward). SW_PASS_EMBED is
 * the embedding's own use of its unit, there and back, which counts nothing. */
enum sw_llama_pass {
    SW_PASS_FORWARD,
    SW_PASS_BACKWARD,
    SW_PASS_HEAD_DX,
    SW_PASS_HEAD_GRAD,
    SW_PASS_RECOMPUTE,
    SW_PASS_EMBED
};

/* Floating-point operations of a micro-batch through a unit: 2 for each weight of a matrix and
 * token, and causal attention's two products (Narayanan et al., arXiv:2104.04473, section 3.4,
 * whose full attention is halved here); backward takes twice the forward's, but for the gradients
 * of frozen matrices, and once more for the recomputation. A tied embedding's unit is counted as
 * the part of the head that it is, unless the pass is SW_PASS_EMBED; an untied one and the norm
 * count 0. */
double sw_llama_flops(const struct sw_llama *l, uint32_t unit, enum sw_llama_pass pass);

/* Writes the rows of out [tokens][hidden] whose tokens the unit holds, and no others: after all
 * parts of the embedding, in any order, out is whole. tokens: int32 [tokens]. */
int sw_llama_embed(const struct sw_llama *l, struct sw_stream *s, const struct sw_unit *unit,
                   const void *weights, const int32_t *tokens, void *out);
/* starts: of the documents, as in struct sw_attention; NULL: each row is one. */
int sw_llama_layer(const struct sw_llama *l, struct sw_stream *s, const struct sw_unit *unit,
                   const void *weights, const uint32_t *starts, const void *x, void *out);

/* dx holds the gradient of the layer's output and receives that of its input x. acc: the unit's
 * gradient, overwritten unless accumulate; NULL where all of it is frozen. */
int sw_llama_layer_backward(const struct sw_llama *l, struct sw_stream *s,
                            const struct sw_unit *unit, const void *weights, const uint32_t *starts,
                            float *acc, int accumulate, const void *x, void *dx);

/* acc += gradient of the unit's part of the embedding, from the gradient of its output; zeroed
 * before unless accumulate. */
int sw_llama_embed_backward(const struct sw_llama *l, struct sw_stream *s,
                            const struct sw_unit *unit, float *acc, int accumulate,
                            const int32_t *tokens, const void *dout);

/* The final norm: out, the head's input, from the last layer's output x, both [tokens][hidden]. */
int sw_llama_norm(const struct sw_llama *l, struct sw_stream *s, const struct sw_unit *unit,
                  const void *weights, const void *x, void *out);
/* dout FP32 [tokens][hidden], as the head leaves it, is rounded to the working type first; dx is
 * written (not added to), acc overwritten unless accumulate; NULL where it is frozen. */
int sw_llama_norm_backward(const struct sw_llama *l, struct sw_stream *s,
                           const struct sw_unit *unit, const void *weights, float *acc,
                           int accumulate, const void *x, const float *dout, void *dx);

/* A part of the head at work on a micro-batch, in slices of l->head_slice tokens. The gradients are
 * those of scale (1 / unmasked tokens of the step) times the sum of the losses. */
struct sw_llama_head {
    const struct sw_unit *unit; /* of kind SW_UNIT_HEAD, or SW_UNIT_EMBED when tied */
    const void *matrix;         /* the unit's weights [rows][hidden] */
    const void *x;              /* the head's input [tokens][hidden] */
    const int32_t *targets;     /* [tokens], of the whole vocabulary */
    const uint8_t *mask;        /* [tokens]; NULL: all count */
    float scale;
    float *stats;                    /* FP32 [tokens][3], as softmax_stats() leaves them */
    float *dx;                       /* FP32 [tokens][hidden]; NULL: left out */
    float *d_matrix;                 /* FP32 [rows][hidden]; NULL: left out */
    int dx_accumulate, d_accumulate; /* added to what is there, instead of in its place */
};

/* The part's logits enter stats; begin: it is the first part of the micro-batch. The parts follow
 * in ascending order. Reads unit, matrix, x and targets. */
int sw_llama_head_stats(const struct sw_llama *l, struct sw_stream *s,
                        const struct sw_llama_head *h, int begin);
/* After the last part: *loss_sum = sum of the losses of unmasked tokens. */
int sw_llama_head_loss(const struct sw_llama *l, struct sw_stream *s, const float *stats,
                       const uint8_t *mask, double *loss_sum);
/* The part's logits once more, then its gradient and its share of that of x. Any order of the parts
 * is right; its bits are those of the order of the sums in dx. */
int sw_llama_head_backward(const struct sw_llama *l, struct sw_stream *s,
                           const struct sw_llama_head *h);

/* All parts at once, which computes the logits once: parts[i] is part i, `count` all of them. The
 * bits of stats, *loss_sum, dx and every d_matrix are those of sw_llama_head_stats() over ascending
 * parts, sw_llama_head_loss(), and sw_llama_head_backward() over descending ones, the first of
 * which overwrites dx. x, targets, mask, scale and stats are read from parts[0]; dx is this
 * argument (NULL: left out), not a part's. Only after an open with head_whole. */
int sw_llama_head_whole(const struct sw_llama *l, struct sw_stream *s,
                        const struct sw_llama_head *parts, uint32_t count, double *loss_sum,
                        float *dx);

#endif
