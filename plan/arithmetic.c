/* plan/arithmetic.c - see the header; each line is one that a reader can check by hand. */
#include "plan/arithmetic.h"

#include <assert.h>
#include <math.h>

const char *sw_scheme_name(enum sw_scheme scheme) {
    static const char *const names[SW_SCHEME_COUNT] = {
        "data parallel",     "ZeRO-1",     "ZeRO-2", "hybrid shard", "ZeRO-3",
        "offload optimizer", "offload all"};
    return names[scheme];
}

const char *sw_beside_name(enum sw_beside beside) {
    static const char *const names[SW_BESIDE_COUNT] = {"LoRA", "QLoRA (4 bits)", "8-bit moments",
                                                       "tensor parallel", "pipeline parallel"};
    return names[beside];
}

const char *sw_keep_name(enum sw_keep keep) {
    static const char *const names[SW_KEEP_COUNT] = {"kept whole", "every layer's input",
                                                     "every K-th", "every sqrt(L)-th"};
    return names[keep];
}

/* Of an all-gather or a reduce-scatter over n ranks, what each of them sends of `bytes`. */
static double sent(double bytes, double n) {
    return bytes * (n - 1) / n;
}

void sw_arithmetic_scheme(const struct sw_arithmetic_in *in, enum sw_scheme scheme,
                          struct sw_arithmetic_row *out) {
    const double n = in->ranks, s = in->node_ranks;
    const double bf16 = SW_WEIGHT_BYTES * in->params, frozen = SW_WEIGHT_BYTES * in->frozen;
    const double gathers = 2 * (bf16 + frozen); /* for forward and for backward */
    assert(n >= 1 && s >= 1 && s <= n);
    const double unit_gradient = in->unit_params * SW_GRADIENT_BYTES;
    double at_hand = 0, holders = 1; /* of a frozen weight, which has nothing beside it */
    *out = (struct sw_arithmetic_row){.traffic_params = 2, .link_bytes = sent(2 * bf16, n)};
    switch (scheme) {
    case SW_SCHEME_DATA_PARALLEL:
        out->formula = "16";
        out->gpu_bytes_per_param = 16;
        break;
    case SW_SCHEME_ZERO1:
        out->formula = "4 + 12/N";
        out->gpu_bytes_per_param = 4 + 12 / n;
        break;
    case SW_SCHEME_ZERO2:
        out->formula = "2 + 14/N";
        out->gpu_bytes_per_param = 2 + 14 / n;
        break;
    case SW_SCHEME_HYBRID:
        out->formula = "16/S";
        out->gpu_bytes_per_param = 16 / s;
        holders = s;
        out->traffic_params = 3;
        /* Inside a machine as ZeRO-3; then each rank's shard of the gradient over the machines. */
        out->link_bytes = sent(gathers + bf16, s) + sent(2 * bf16 / s, n / s);
        break;
    case SW_SCHEME_ZERO3:
        out->formula = "16/N";
        out->gpu_bytes_per_param = 16 / n;
        holders = n;
        out->traffic_params = 3;
        out->link_bytes = sent(gathers + bf16, n);
        break;
    case SW_SCHEME_OFFLOAD_OPTIMIZER:
        out->formula = "2/N";
        out->gpu_bytes_per_param = 2 / n;
        holders = n;
        at_hand = unit_gradient;
        out->host_bytes_per_param = SW_GRADIENT_BYTES + SW_OPTIMIZER_BYTES;
        out->traffic_params = 3;
        out->link_bytes = sent(gathers + bf16, n);
        out->up_bytes = out->down_bytes = bf16 / n;
        break;
    case SW_SCHEME_OFFLOAD_ALL:
        out->formula = "units";
        holders = INFINITY; /* they lie beside the others, off the GPUs */
        at_hand = 2 * in->unit_params * SW_WEIGHT_BYTES + unit_gradient;
        out->host_bytes_per_param = SW_STATE_BYTES;
        out->traffic_params = 3;
        out->link_bytes = sent(gathers + bf16, n);
        out->up_bytes = gathers / n;
        out->down_bytes = bf16 / n;
        break;
    case SW_SCHEME_COUNT:
        assert(0);
    }
    if (n == 1) out->traffic_params = 0;
    out->gpu_bytes = out->gpu_bytes_per_param * in->params + frozen / holders + at_hand;
    out->host_bytes = out->host_bytes_per_param * in->params + (isinf(holders) ? frozen : 0);
}

void sw_arithmetic_beside(const struct sw_arithmetic_in *in, enum sw_beside beside,
                          struct sw_beside_row *out) {
    const double p = in->params + in->frozen, trained = SW_STATE_BYTES * in->adapters * p;
    const double n = in->ranks, t = in->node_ranks;
    const double row_bytes = 2 * in->hidden * in->micro_tokens * in->micro_batches;
    *out = (struct sw_beside_row){.bytes = SW_STATE_BYTES * p};
    switch (beside) {
    case SW_BESIDE_LORA: /* the base whole on each GPU, frozen in BF16 */
        out->bytes = out->gpu_bytes = 2 * p + trained;
        break;
    case SW_BESIDE_QLORA: /* and in 4 bits */
        out->bytes = out->gpu_bytes = p / 2 + trained;
        break;
    case SW_BESIDE_MOMENTS8:
        out->bytes = (SW_WEIGHT_BYTES + SW_GRADIENT_BYTES + in->moments8_bytes) * p;
        out->gpu_bytes = out->bytes / n;
        break;
    case SW_BESIDE_TENSOR:
        /* Every layer sums its output over ranks twice forward and twice backward; an all-reduce
         * sends 2 (T - 1)/T of a row. */
        out->gpu_bytes = out->bytes / t;
        out->link_bytes = 4 * in->layers * 2 * sent(row_bytes, t);
        break;
    case SW_BESIDE_PIPELINE:
        out->gpu_bytes = out->bytes / n;
        out->link_bytes = n > 1 ? 2 * row_bytes : 0; /* there and back, over each border */
        out->idle_share = (n - 1) / (in->micro_batches + n - 1);
        break;
    case SW_BESIDE_COUNT:
        assert(0);
    }
}

void sw_arithmetic_keep(const struct sw_arithmetic_in *in, enum sw_keep keep,
                        struct sw_keep_row *out) {
    const double input = 2 * in->hidden; /* of a layer, per token, in BF16 */
    const double every[SW_KEEP_COUNT] = {0, 1, fmin(in->checkpoint_every, in->layers),
                                         round(sqrt(in->layers))};
    const double k = every[keep];
    *out = (struct sw_keep_row){.every = k, .forwards = 3};
    if (keep == SW_KEEP_WHOLE) {
        out->bytes_per_token = in->layers * (input + in->inside_bytes);
    } else {
        out->bytes_per_token = input * (ceil(in->layers / k) + k - 1);
        out->forwards = 4 + (k - 1) / k; /* each layer again, and the inputs inside a group */
    }
    out->gpu_bytes = out->bytes_per_token * in->micro_tokens * in->micro_batches;
}
