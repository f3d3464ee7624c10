/* engine/options.c - the documented defaults of a run, and the learning rate that follows. */
#include "engine/options.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "engine/world.h"
#include "kernels/device.h"

void sw_train_defaults(struct sw_train_options *options) {
    memset(options, 0, sizeof(*options));
    options->micro_batch = 1;
    options->accumulate = 1;
    options->order = SW_ORDER_SHUFFLE;
    options->lr = 1e-5;
    options->weight_decay = 0.1;
    options->beta1 = 0.9;
    options->beta2 = 0.95;
    options->eps = 1e-8;
    options->clip = 1;
    options->schedule = SW_SCHEDULE_COSINE;
    options->warmup = -1;
    options->commit_every = -1;
    options->decay = SW_DECAY_MATRICES;
    options->max_skips = 10;
    options->zero = -1;
    options->late_below = options->late_top = -1;
    options->reduce_dtype = SW_FP32;
    options->rank_timeout_s = 600;
    options->dtype = SW_BF16;
    options->grad_dtype = SW_BF16;
    options->checkpoint_every = 1;
    options->overlap = SW_OVERLAP_AUTO;
    options->chunk_bytes = 8 << 20;
}

void sw_train_settle_device(struct sw_train_options *options, int have_met) {
    const int alone = !sw_world_is_launched();
    if (options->device == SW_DEVICE_AUTO && (alone || have_met))
        options->device = sw_device_cuda_usable() > 0 ? SW_DEVICE_CUDA : SW_DEVICE_HOST;
    if (options->ranks) return;
    const int gpus = options->device == SW_DEVICE_CUDA && alone ? sw_device_cuda_usable() : 1;
    options->ranks = gpus > 1 ? (uint32_t)gpus : 1;
}

double sw_learning_rate(const struct sw_train_options *options, uint64_t step) {
    assert(step >= 1 && options->warmup >= 0);
    const double lr = options->lr, min_lr = options->min_lr;
    const uint64_t done = step - 1, warmup = (uint64_t)options->warmup;
    if (done < warmup) return lr * (double)step / (double)warmup;
    if (options->schedule == SW_SCHEDULE_CONSTANT) return lr;
    /* The first step after the warm-up has the full rate; min_lr would be that of step `steps` + 1.
     */
    const double span = options->steps > warmup ? (double)(options->steps - warmup) : 1;
    const double progress = fmin((double)(done - warmup) / span, 1);
    if (options->schedule == SW_SCHEDULE_LINEAR) return lr + (min_lr - lr) * progress;
    return min_lr + (lr - min_lr) * 0.5 * (1 + cos(3.14159265358979323846 * progress));
}

enum sw_overlap sw_overlap_of(const struct sw_train_options *o) {
    if (o->overlap != SW_OVERLAP_AUTO) return o->overlap;
    return o->clip > 0 ? SW_OVERLAP_FORWARD : SW_OVERLAP_BACKWARD;
}

const char *sw_overlap_name(enum sw_overlap overlap) {
    static const char *const names[] = {"auto", "none", "forward", "backward"};
    return names[overlap];
}
