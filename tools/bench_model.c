/* tools/bench_model.c - the operations of a model's units, each alone, as a run would ask for them:
 * by every rank at once where ranks share the CPU, and in the company of the other lanes' teams. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "engine/llama.h"
#include "engine/sizing.h"
#include "tools/bench.h"
#include "tools/bench_company.h"
#include "tools/bench_device.h"

enum { OPERATIONS = 11, PATTERN_ELEMENTS = 1 << 20 };
enum { ROUNDED_ELEMENTS = 16 << 20, FEW_ELEMENTS = 512 << 10 }; /* a chunk of a small model */
#define BETWEEN_S 20e-6

/* A step comes to a unit's weights after those of all others: no cache has them any more. So many
 * bytes of weights are gone through in turn, and a few accumulators, as a run has them. */
#define COLD_BYTES (512ull << 20)
enum { COPIES_MAX = 64, ACCS = 2 };

struct units {
    const struct sw_device_handle *device;
    const struct sw_model *model;
    struct sw_stream *stream;
    struct sw_llama llama;
    enum sw_dtype dtype;
    uint64_t tokens, most; /* most: elements of the layer, or of all parts of the head */
    uint32_t copies, turn;
    char *weights; /* of the call at hand */
    float *acc;
    /* Device memory, one block for each. */
    void *workspace, *all_weights, *all_accs, *x, *out, *dx, *dx32, *stats, *targets, *loss;
    void *rounded, *sums, *bad; /* of the rounding alone */
    struct sw_llama_head parts[SW_PARTS_MAX];
};

struct operation {
    int (*run)(struct units *u);
    size_t offset; /* of its seconds, in struct sw_machine_model */
};

/* ---- memory ---- */

static uint64_t head_params(const struct sw_model *model) {
    uint64_t sum = 0;
    for (uint32_t part = 0; part < model->parts; part++)
        sum += model->units[sw_model_head_unit(model, part)].count;
    return sum;
}

static uint64_t largest(const struct sw_model *model) {
    const uint64_t layer = model->units[sw_model_first_layer(model)].count;
    const uint64_t head = head_params(model);
    return layer > head ? layer : head;
}

struct block {
    void **place;
    uint64_t bytes;
};
enum { BLOCKS = 10 };

static int open_blocks(const struct sw_device_handle *d, const struct block *blocks, int count) {
    int ret = 0;
    for (int i = 0; i < count && ret == 0; i++)
        ret = d->ops->alloc(d->device, blocks[i].bytes, blocks[i].place);
    return ret;
}

/* Those that were opened; places begin as NULL. */
static void close_blocks(const struct sw_device_handle *d, const struct block *blocks, int count) {
    for (int i = 0; i < count; i++)
        if (*blocks[i].place) d->ops->free(d->device, *blocks[i].place, blocks[i].bytes);
}

static void list_blocks(struct units *u, uint64_t batch, uint64_t time, struct block out[BLOCKS]) {
    const enum sw_dtype dtype = u->dtype;
    const uint64_t element = sw_dtype_bytes(dtype);
    const uint64_t activation = u->tokens * u->model->config.hidden * element;
    const struct block blocks[BLOCKS] = {
        {&u->workspace, sw_llama_workspace_bytes(u->model, u->device, dtype, batch, time, 1)},
        {&u->all_weights, u->copies * u->most * element},
        {&u->all_accs, ACCS * u->most * sizeof(float)},
        {&u->x, activation},
        {&u->out, activation},
        {&u->dx, activation},
        {&u->dx32, sw_sizing_head_grad_bytes(u->model, u->tokens)},
        {&u->stats, sw_sizing_head_stats_bytes(u->tokens)},
        {&u->targets, u->tokens * sizeof(int32_t)},
        {&u->loss, sizeof(double)},
    };
    memcpy(out, blocks, sizeof(blocks));
}

/* Small numbers of either sign, as weights and activations are. */
static int upload_pattern(struct units *u, void *to, enum sw_dtype dtype, uint64_t count) {
    char *pattern = malloc(PATTERN_ELEMENTS * sizeof(float));
    uint64_t x = 88172645463325252u;
    int ret = pattern ? 0 : -ENOMEM;
    for (uint64_t i = 0; i < PATTERN_ELEMENTS && ret == 0; i++) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        const float value = (float)((int)(x >> 56) - 128) / 4096;
        if (dtype == SW_FP32)
            ((float *)pattern)[i] = value;
        else
            ((sw_bf16 *)pattern)[i] = sw_bf16_from_f32(value);
    }
    const uint64_t element = sw_dtype_bytes(dtype);
    for (uint64_t at = 0; at < count && ret == 0; at += PATTERN_ELEMENTS) {
        const uint64_t left = count - at, now = left < PATTERN_ELEMENTS ? left : PATTERN_ELEMENTS;
        ret =
            u->device->ops->copy_h2d(u->stream, (char *)to + at * element, pattern, now * element);
        if (ret == 0) ret = u->device->ops->stream_sync(u->stream);
    }
    free(pattern);
    return ret;
}

static int upload_tokens(struct units *u) {
    int32_t *tokens = malloc(u->tokens * sizeof(*tokens));
    if (!tokens) return -ENOMEM;
    for (uint64_t i = 0; i < u->tokens; i++)
        tokens[i] = (int32_t)(i * 7919 % u->model->config.vocab);
    int ret = u->device->ops->copy_h2d(u->stream, u->targets, tokens, u->tokens * sizeof(*tokens));
    if (ret == 0) ret = u->device->ops->stream_sync(u->stream);
    free(tokens);
    return ret;
}

static int fill(struct units *u) {
    const enum sw_dtype dtype = u->dtype;
    const uint64_t activations = u->tokens * u->model->config.hidden;
    int ret = upload_pattern(u, u->all_weights, dtype, u->copies * u->most);
    if (ret == 0) ret = upload_pattern(u, u->x, dtype, activations);
    if (ret == 0) ret = upload_pattern(u, u->dx, dtype, activations);
    if (ret == 0) ret = upload_pattern(u, u->dx32, SW_FP32, activations);
    return ret < 0 ? ret : upload_tokens(u);
}

/* The parts of the head lie one behind the other in the same memory. */
static void lay_out_head(struct units *u) {
    uint64_t at = 0;
    for (uint32_t part = 0; part < u->model->parts; part++) {
        const struct sw_unit *unit = &u->model->units[sw_model_head_unit(u->model, part)];
        u->parts[part] = (struct sw_llama_head){
            .unit = unit,
            .matrix = u->weights + at * sw_dtype_bytes(u->dtype),
            .x = u->x,
            .targets = u->targets,
            .scale = 1.0F / (float)u->tokens,
            .stats = u->stats,
            .d_matrix = u->acc + at,
            .dx_accumulate = part + 1 < u->model->parts,
        };
        at += unit->count;
    }
}

/* The next call finds other weights. */
static void turn_over(struct units *u) {
    u->turn++;
    u->weights = (char *)u->all_weights + u->turn % u->copies * u->most * sw_dtype_bytes(u->dtype);
    u->acc = (float *)u->all_accs + u->turn % ACCS * u->most;
    lay_out_head(u);
}

/* ---- operations ---- */

static const struct sw_unit *layer_of(const struct units *u) {
    return &u->model->units[sw_model_first_layer(u->model)];
}

static int layer_forward(struct units *u) {
    return sw_llama_layer(&u->llama, u->stream, layer_of(u), u->weights, NULL, u->x, u->out);
}
static int layer_backward(struct units *u) {
    return sw_llama_layer_backward(&u->llama, u->stream, layer_of(u), u->weights, NULL, u->acc, 0,
                                   u->x, u->dx);
}
static int embed_forward(struct units *u) {
    int ret = 0;
    for (uint32_t part = 0; part < u->model->parts && ret == 0; part++)
        ret = sw_llama_embed(&u->llama, u->stream, &u->model->units[part], u->parts[part].matrix,
                             u->targets, u->out);
    return ret;
}
/* A tied matrix has the head's gradient already, another one's is zeroed. */
static int embed_backward(struct units *u) {
    int ret = 0;
    for (uint32_t part = 0; part < u->model->parts && ret == 0; part++)
        ret = sw_llama_embed_backward(&u->llama, u->stream, &u->model->units[part],
                                      u->parts[part].d_matrix, u->model->config.tied, u->targets,
                                      u->x);
    return ret;
}
static int norm_forward(struct units *u) {
    const struct sw_unit *unit = &u->model->units[sw_model_norm_unit(u->model)];
    return sw_llama_norm(&u->llama, u->stream, unit, u->weights, u->x, u->out);
}
static int norm_backward(struct units *u) {
    const struct sw_unit *unit = &u->model->units[sw_model_norm_unit(u->model)];
    return sw_llama_norm_backward(&u->llama, u->stream, unit, u->weights, u->acc, 0, u->x, u->dx32,
                                  u->out);
}
static int head_forward(struct units *u) {
    int ret = 0;
    for (uint32_t part = 0; part < u->model->parts && ret == 0; part++)
        ret = sw_llama_head_stats(&u->llama, u->stream, &u->parts[part], part == 0);
    return ret;
}
static int head_gradients(struct units *u, int of_x, int of_matrix) {
    int ret = 0;
    for (uint32_t part = u->model->parts; part-- > 0 && ret == 0;) {
        struct sw_llama_head h = u->parts[part];
        h.dx = of_x ? u->dx32 : NULL;
        if (!of_matrix) h.d_matrix = NULL;
        ret = sw_llama_head_backward(&u->llama, u->stream, &h);
    }
    return ret;
}
static int head_backward(struct units *u) {
    return head_gradients(u, 1, 1);
}
static int head_dx(struct units *u) {
    return head_gradients(u, 1, 0);
}
static int head_grad(struct units *u) {
    return head_gradients(u, 0, 1);
}
static int head_whole(struct units *u) {
    return sw_llama_head_whole(&u->llama, u->stream, u->parts, u->model->parts, u->loss, u->dx32);
}

#define SECONDS(name) offsetof(struct sw_machine_model, name)
static const struct operation operations[OPERATIONS] = {
    {layer_forward, SECONDS(layer_forward_s)},
    {layer_backward, SECONDS(layer_backward_s)},
    {embed_forward, SECONDS(embed_forward_s)},
    {embed_backward, SECONDS(embed_backward_s)},
    {norm_forward, SECONDS(norm_forward_s)},
    {norm_backward, SECONDS(norm_backward_s)},
    {head_forward, SECONDS(head_forward_s)},
    {head_backward, SECONDS(head_backward_s)},
    {head_dx, SECONDS(head_dx_s)},
    {head_grad, SECONDS(head_grad_s)},
    {head_whole, SECONDS(head_whole_s)},
};

/* The median over rounds, each of which is waited for. */
static int time_operation(struct units *u, const struct operation *operation, double seconds,
                          double *each) {
    double times[SW_BENCH_ROUNDS_MAX];
    int rounds = 0, ret;
    if (u->copies) turn_over(u);
    ret = operation->run(u);
    if (ret == 0) ret = u->device->ops->stream_sync(u->stream);
    const double start = sw_bench_now();
    while (ret == 0 && rounds < SW_BENCH_ROUNDS_MAX &&
           (rounds < SW_BENCH_ROUNDS_MIN || sw_bench_now() - start < seconds)) {
        if (sw_bench_stopped()) return -EINTR;
        if (u->copies) turn_over(u);
        const double begin = sw_bench_now();
        ret = operation->run(u);
        if (ret == 0) ret = u->device->ops->stream_sync(u->stream);
        times[rounds++] = sw_bench_now() - begin;
    }
    *each = ret == 0 ? sw_bench_median(times, rounds) : 0;
    return ret;
}

static int measure_all(struct units *u, double seconds, struct sw_machine_model *out) {
    int ret = 0;
    for (int i = 0; i < OPERATIONS && ret == 0; i++) {
        double each;
        ret = time_operation(u, &operations[i], seconds / OPERATIONS, &each);
        memcpy((char *)out + operations[i].offset, &each, sizeof(each));
    }
    return ret;
}

/* The calling thread's rank; the CPUs that are kept busy are those of all ranks. */
static int measure(struct units *u, uint64_t batch, uint64_t time, double seconds,
                   struct sw_machine_model *out) {
    const struct sw_device_ops *ops = u->device->ops;
    int ret = ops->stream_create(u->device->device, &u->stream);
    if (ret == 0) ret = ops->prepare(u->stream, 1);
    if (ret == 0)
        ret = sw_llama_open(&u->llama, u->model, u->device, u->dtype, batch, time, 1, u->workspace,
                            u->stream);
    if (ret == 0) ret = fill(u);
    const double start_s = sw_bench_now(), start_cpu_s = sw_bench_cpu_now();
    if (ret == 0) ret = measure_all(u, seconds, out);
    out->cpus = (sw_bench_cpu_now() - start_cpu_s) / (sw_bench_now() - start_s);
    if (u->stream) ops->stream_destroy(u->stream);
    return ret;
}

/* ---- ranks ---- */

/* The lane that rounds and, in a team of all CPUs, Adam's: teams of so many threads on each rank.
 */
static int open_company(struct sw_bench_company **out, uint32_t ranks, int threads) {
    return sw_bench_company_open(out, (int)ranks + 1, threads);
}

struct rank {
    const struct sw_bench_model *what;
    const struct sw_device_handle *device;
    struct sw_machine_model times;
    pthread_t thread;
    int ret;
};

static void *measure_rank(void *arg) {
    struct rank *r = arg;
    const struct sw_bench_model *what = r->what;
    struct units u = {.device = r->device,
                      .model = what->model,
                      .dtype = what->dtype,
                      .tokens = what->batch * what->time,
                      .most = largest(what->model)};
    struct block blocks[BLOCKS];
    const uint64_t copies = COLD_BYTES / (u.most * sw_dtype_bytes(u.dtype)) + 1;
    u.copies = copies < COPIES_MAX ? (uint32_t)copies : COPIES_MAX;
    list_blocks(&u, what->batch, what->time, blocks);
    r->ret = open_blocks(r->device, blocks, BLOCKS);
    if (r->ret == 0) r->ret = measure(&u, what->batch, what->time, what->seconds, &r->times);
    close_blocks(r->device, blocks, BLOCKS);
    return NULL;
}

/* The first rank in the calling thread, the others beside it. */
static int measure_ranks(struct rank *ranks, uint32_t count) {
    uint32_t started = 1;
    int ret = 0;
    while (started < count && ret == 0) {
        ret = -pthread_create(&ranks[started].thread, NULL, measure_rank, &ranks[started]);
        started += ret == 0;
    }
    if (ret < 0) sw_error("bench: a thread cannot be started: %s", strerror(-ret));
    if (ret == 0) measure_rank(&ranks[0]);
    for (uint32_t r = 1; r < started; r++) pthread_join(ranks[r].thread, NULL);
    for (uint32_t r = 0; r < count && ret == 0; r++) ret = ranks[r].ret;
    return ret;
}

int sw_bench_model(const struct sw_device_handle *devices, const struct sw_bench_model *what,
                   struct sw_machine_model *out) {
    struct sw_bench_company *company = NULL;
    struct rank *ranks = calloc(what->ranks, sizeof(*ranks));
    int ret = ranks ? 0 : -ENOMEM;
    if (!ranks) sw_error("bench: no memory for %u ranks", what->ranks);
    for (uint32_t r = 0; r < what->ranks && ret == 0; r++)
        ranks[r] = (struct rank){.what = what, .device = &devices[r]};
    if (ret == 0 && what->threads > 0) ret = open_company(&company, what->ranks, what->threads);
    if (ret == 0) ret = measure_ranks(ranks, what->ranks);
    if (ret == 0) {
        memcpy(ranks[0].times.key, out->key, sizeof(out->key));
        *out = ranks[0].times;
    }
    sw_bench_company_close(company);
    free(ranks);
    return ret;
}

/* ---- rounding ---- */

static int round_elements(struct units *u, uint64_t first, uint64_t count) {
    return u->device->ops->round_norm(u->stream, (sw_bf16 *)u->rounded + first, SW_BF16,
                                      (const float *)u->all_accs + first, count, u->sums, u->bad);
}
static int round_many(struct units *u) {
    return round_elements(u, 0, ROUNDED_ELEMENTS);
}
/* Others each time, which no cache has; what a lane does between two tasks is no work of its team.
 */
static int round_few(struct units *u) {
    const uint64_t first = u->turn++ * (uint64_t)FEW_ELEMENTS % ROUNDED_ELEMENTS;
    for (const double until = sw_bench_now() + BETWEEN_S; sw_bench_now() < until;) continue;
    return round_elements(u, first, FEW_ELEMENTS);
}

#define ROUNDED_BYTES(count) ((double)(count) * (sizeof(float) + sizeof(sw_bf16)))

/* A short call is as many bytes at that rate, what is between the calls, and waking the team. */
static int time_rounding(struct units *u, double seconds, struct sw_bench_rounding *out) {
    const struct operation many = {.run = round_many}, few = {.run = round_few};
    double each = 0;
    int ret = time_operation(u, &many, seconds / 2, &each);
    if (ret < 0 || !(each > 0)) return ret;
    out->bytes_per_s = ROUNDED_BYTES(ROUNDED_ELEMENTS) / each;
    ret = time_operation(u, &few, seconds / 2, &each);
    const double over = each - BETWEEN_S - ROUNDED_BYTES(FEW_ELEMENTS) / out->bytes_per_s;
    out->region_s = over > 0 ? over : 0;
    return ret;
}

int sw_bench_rounding(const struct sw_device_handle *d, int threads, double seconds,
                      struct sw_bench_rounding *out) {
    struct units u = {.device = d};
    struct sw_bench_company *company = NULL;
    const struct block blocks[] = {{&u.all_accs, ROUNDED_ELEMENTS * sizeof(float)},
                                   {&u.rounded, ROUNDED_ELEMENTS * sizeof(sw_bf16)},
                                   {&u.sums, ROUNDED_ELEMENTS / SW_NORM_BLOCK * sizeof(double)},
                                   {&u.bad, sizeof(struct sw_nonfinite)}};
    const int count = sizeof(blocks) / sizeof(blocks[0]);
    *out = (struct sw_bench_rounding){0};
    int ret = open_blocks(d, blocks, count);
    if (ret == 0 && threads > 0) ret = open_company(&company, 1, threads);
    if (ret == 0) ret = d->ops->stream_create(d->device, &u.stream);
    if (ret == 0) ret = d->ops->prepare(u.stream, 0);
    if (ret == 0) ret = upload_pattern(&u, u.all_accs, SW_FP32, ROUNDED_ELEMENTS);
    if (ret == 0) ret = time_rounding(&u, seconds, out);
    if (u.stream) d->ops->stream_destroy(u.stream);
    close_blocks(d, blocks, count);
    sw_bench_company_close(company);
    return ret;
}
