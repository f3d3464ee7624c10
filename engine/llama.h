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
    uint64_t batch, time, tokens; /* tokens = batch * time */
    uint64_t head_slice;          /* tokens whose logits exist at once */
    struct sw_attention attention;
    /* Workspace, device memory. */
    void *norm1, *q, *k, *v, *att, *mid, *norm2, *gate, *up, *act; /* recomputed in backward */
    void *d_norm, *d_att, *d_q, *d_k, *d_v;
    float *rstd1, *rstd2, *lse, *rope_cos, *rope_sin;
    float *logits, *losses;
    void *d_logits, *head_norm, *d_head_norm, *scratch;
};

/* Tokens per slice of the head: the FP32 logits of a slice fill at most 32 MB. */
uint64_t sw_llama_head_slice(const struct sw_model *model, uint64_t tokens);

/* Bytes of workspace for micro-batches of batch x time. */
uint64_t sw_llama_workspace_bytes(const struct sw_model *model,
                                  const struct sw_device_handle *device, enum sw_dtype dtype,
                                  uint64_t batch, uint64_t time);

/* Lays the workspace out and uploads the angles of the rotary embedding through `stream`. */
int sw_llama_open(struct sw_llama *l, const struct sw_model *model,
                  const struct sw_device_handle *device, enum sw_dtype dtype, uint64_t batch,
                  uint64_t time, void *workspace, struct sw_stream *stream);

/* Angles per pair of a head's dimensions, head_dim / 2 of them, as the configuration's rope_theta
 * and rope scaling give them ("linear" and "llama3" as in Hugging Face's modeling_rope_utils). */
void sw_llama_rope_frequencies(const struct sw_model_config *config, double *frequencies);

/* Floating-point operations of a micro-batch through a unit: 2 for each weight of a matrix and
 * token, and causal attention's two products (Narayanan et al., arXiv:2104.04473, section 3.4,
 * whose full attention is halved here); backward takes twice the forward's, and once more for the
 * recomputation. The head's backward holds its forward. */
double sw_llama_flops(const struct sw_llama *l, uint32_t unit, int backward);

int sw_llama_embed(const struct sw_llama *l, struct sw_stream *s, const void *weights,
                   const int32_t *tokens, void *out);
int sw_llama_layer(const struct sw_llama *l, struct sw_stream *s, const struct sw_unit *unit,
                   const void *weights, const void *x, void *out);

/* dx holds the gradient of the layer's output and receives that of its input x. acc: the unit's
 * gradient, overwritten unless accumulate. */
int sw_llama_layer_backward(const struct sw_llama *l, struct sw_stream *s,
                            const struct sw_unit *unit, const void *weights, float *acc,
                            int accumulate, const void *x, void *dx);

/* The final norm, the head and the loss over slices of tokens. matrix: the head's weights [vocab]
 * [hidden] (the embedding's when tied). *loss_sum = sum of the losses of unmasked tokens. With dx:
 * its gradient times scale (1 / unmasked tokens of the step) is written to dx, d_norm and d_matrix.
 */
struct sw_llama_head {
    const void *norm, *matrix, *x;
    const int32_t *targets;
    const uint8_t *mask;
    float scale;
    double *loss_sum;
    void *dx;                 /* NULL: forward and loss alone */
    float *d_norm, *d_matrix; /* overwritten unless accumulate */
    int accumulate;
};
int sw_llama_head(const struct sw_llama *l, struct sw_stream *s, const struct sw_llama_head *h);

/* d_table += gradient of the embedding; zeroed before unless accumulate. */
int sw_llama_embed_backward(const struct sw_llama *l, struct sw_stream *s, float *d_table,
                            int accumulate, const int32_t *tokens, const void *dout);

#endif
