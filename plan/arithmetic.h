/* plan/arithmetic.h - the textbook's bytes of mixed-precision Adam: per parameter, per GPU and per
 * step, scheme by scheme, and of activations, per token.
 *
 * Plain numbers in, plain numbers out: no model, no machine. A run of this program takes these
 * bytes at most (docs/ranks.md); plan/fit.h counts what it really takes. All bytes are decimal
 * doubles, as sums of products that no integer has to be exact for. */
#ifndef PLAN_ARITHMETIC_H
#define PLAN_ARITHMETIC_H

/* Bytes per parameter: the weight and the gradient in BF16, the rest in FP32. */
enum {
    SW_WEIGHT_BYTES = 2,
    SW_GRADIENT_BYTES = 2,
    SW_OPTIMIZER_BYTES = 12,
    SW_STATE_BYTES = SW_WEIGHT_BYTES + SW_GRADIENT_BYTES + SW_OPTIMIZER_BYTES
};

struct sw_arithmetic_in {
    double params;      /* that are trained */
    double frozen;      /* that keep their values: their weights alone are there, and travel */
    double unit_params; /* of the largest unit: what is gathered at once */
    double ranks;       /* N: all GPUs */
    double node_ranks;  /* those of a machine; N where there is one */
    /* One step of one rank. */
    double micro_tokens, micro_batches;
    double hidden, layers;
    double inside_bytes;     /* per token: everything that backward reads inside one layer */
    double checkpoint_every; /* K */
    double adapters;         /* LoRA's parameters, as a share of the model's */
    double moments8_bytes;   /* of a parameter's record with 8-bit moments */
};

enum sw_scheme {
    SW_SCHEME_DATA_PARALLEL,
    SW_SCHEME_ZERO1,
    SW_SCHEME_ZERO2,
    SW_SCHEME_HYBRID, /* sharded inside a machine, whole copies over machines */
    SW_SCHEME_ZERO3,
    SW_SCHEME_OFFLOAD_OPTIMIZER, /* weights sharded over GPUs */
    SW_SCHEME_OFFLOAD_ALL,
    SW_SCHEME_COUNT
};
const char *sw_scheme_name(enum sw_scheme scheme);

struct sw_arithmetic_row {
    const char *formula;         /* of gpu_bytes_per_param: "4 + 12/N" */
    double gpu_bytes_per_param;  /* without the units at hand */
    double gpu_bytes;            /* with them */
    double host_bytes_per_param; /* that left the GPUs, for RAM and NVMe, of all ranks */
    double host_bytes;
    double traffic_params;       /* moved between GPUs in a step, in parameters: 2, 3 */
    double link_bytes;           /* that each GPU sends for it: (N - 1)/N of them, 2 bytes each */
    double up_bytes, down_bytes; /* over each GPU's PCIe, to it and from it */
};
void sw_arithmetic_scheme(const struct sw_arithmetic_in *in, enum sw_scheme scheme,
                          struct sw_arithmetic_row *out);

/* What stands beside them: other ways to the same end, most of which this program does not go. */
enum sw_beside {
    SW_BESIDE_LORA,
    SW_BESIDE_QLORA,
    SW_BESIDE_MOMENTS8,
    SW_BESIDE_TENSOR,   /* over the GPUs of a machine */
    SW_BESIDE_PIPELINE, /* over all GPUs */
    SW_BESIDE_COUNT
};
const char *sw_beside_name(enum sw_beside beside);

struct sw_beside_row {
    double bytes;      /* of state, all of it */
    double gpu_bytes;  /* on each GPU */
    double link_bytes; /* that each GPU sends in a step for it, beside the gradients' */
    double idle_share; /* of a step in which a GPU waits for the pipeline to fill and drain */
};
void sw_arithmetic_beside(const struct sw_arithmetic_in *in, enum sw_beside beside,
                          struct sw_beside_row *out);

enum sw_keep { SW_KEEP_WHOLE, SW_KEEP_EVERY_LAYER, SW_KEEP_EVERY_K, SW_KEEP_SQRT, SW_KEEP_COUNT };
const char *sw_keep_name(enum sw_keep keep);

struct sw_keep_row {
    double every;           /* K; 0: kept whole */
    double bytes_per_token; /* kept from forward to backward, with what a group of K needs again */
    double gpu_bytes;       /* of the tokens of a step */
    double forwards; /* forward passes that a step computes: 3 are forward and backward alone */
};
void sw_arithmetic_keep(const struct sw_arithmetic_in *in, enum sw_keep keep,
                        struct sw_keep_row *out);

#endif
