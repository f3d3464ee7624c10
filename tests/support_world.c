/* What processes do together, as a program that tests/world.py starts under mpirun: one part of it
 * for each way that processes work together or fail to.
 *
 *     support_world PART [ARGUMENT...]
 *
 * Every result is compared, bit for bit, with a plain loop in rank order. Exit status: 0, or 3 when
 * a call failed (which the world has reported), or 4 when a result is wrong. */
#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "engine/world.h"

enum { FAILED = 3, WRONG = 4, THREADS = 4, NEVER_S = 100000 };

static struct sw_world *world;
static double timeout_s = NEVER_S, open_s;
static atomic_int wrong;

static void print_line(enum sw_log_level level, const char *line, void *ctx) {
    (void)ctx;
    static const char *const words[] = {"error", "warning", "info"};
    fprintf(stderr, "[%u] %s: %s\n", sw_world_index(world), words[level], line);
}

static void expect(int right) {
    if (!right) atomic_fetch_add(&wrong, 1);
}

static void say(const char *text) {
    printf("[%u] %s pid %d\n", sw_world_index(world), text, (int)getpid());
    fflush(stdout);
}

static void *take(uint64_t bytes) {
    void *p = malloc(bytes ? bytes : 1);
    assert(p);
    return p;
}

/* ---- numbers ---- */

static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* Of magnitudes so different that almost every sum depends on its order; some are -0 everywhere. */
static float value_of(uint32_t rank, uint64_t i) {
    if (i % 17 == 3) return -0.0f;
    const uint64_t x = mix(i * 64 + rank + 1);
    return sw_f32_from_bits((uint32_t)(x & 0x807FFFFFu) | (100u + (uint32_t)(x >> 32) % 56u) << 23);
}

static float carry(enum sw_dtype carried, float x) {
    return carried == SW_BF16 ? sw_f32_from_bf16(sw_bf16_from_f32(x)) : x;
}

static float sum_of(uint32_t size, enum sw_dtype carried, uint64_t i) {
    float sum = carry(carried, value_of(0, i));
    for (uint32_t r = 1; r < size; r++) sum += carry(carried, value_of(r, i));
    return sum;
}

static int equal(float a, float b) {
    return sw_f32_bits(a) == sw_f32_bits(b);
}

/* ---- calls ---- */

static int gather(const struct sw_comm_handle *c, uint64_t count, int in_place) {
    const uint64_t bytes = count * sizeof(float);
    float *out = take(c->size * bytes + sizeof(float)), *apart = take(bytes);
    float *in = in_place ? out + c->rank * count : apart;
    for (uint64_t i = 0; i < count; i++) in[i] = value_of(c->rank, i);
    out[c->size * count] = 7;
    const int ret = c->ops->all_gather(c->comm, NULL, out, in, bytes);
    for (uint64_t i = 0; i < count; i++) apart[i] = -1; /* too late for anybody to see */
    for (uint32_t r = 0; r < c->size && ret == 0; r++)
        for (uint64_t i = 0; i < count; i++) expect(equal(out[r * count + i], value_of(r, i)));
    expect(out[c->size * count] == 7);
    free(apart);
    free(out);
    return ret;
}

static int scatter(const struct sw_comm_handle *c, uint64_t count, enum sw_dtype carried,
                   int in_place) {
    float *in = take(c->size * count * sizeof(float)), *apart = take((count + 1) * sizeof(float));
    float *out = in_place ? in + c->rank * count : apart;
    for (uint64_t i = 0; i < c->size * count; i++) in[i] = value_of(c->rank, i);
    apart[count] = 7;
    const int ret = c->ops->reduce_scatter(c->comm, NULL, out, in, carried, count);
    for (uint64_t i = 0; i < c->size * count && ret == 0; i++)
        if (!in_place || i / count != c->rank) {
            expect(equal(in[i], value_of(c->rank, i)));
            in[i] = -1;
        }
    for (uint64_t i = 0; i < count && ret == 0; i++)
        expect(equal(out[i], sum_of(c->size, carried, c->rank * count + i)));
    expect(apart[count] == 7);
    free(apart);
    free(in);
    return ret;
}

static int exchange(const struct sw_comm_handle *c, uint64_t bytes, int in_place) {
    unsigned char *out = take(c->size * bytes), *apart = take(bytes);
    unsigned char *in = in_place ? out + c->rank * bytes : apart;
    for (uint64_t i = 0; i < bytes; i++) in[i] = (unsigned char)mix(i + c->rank * 1000003 + 1);
    const uint64_t begin_ns = sw_now_ns();
    const int ret = c->ops->exchange(c->comm, out, in, bytes);
    expect(ret < 0 ||
           (c->ops->met_ns(c->comm) >= begin_ns && c->ops->met_ns(c->comm) <= sw_now_ns()));
    for (uint64_t i = 0; i < c->size * bytes && ret == 0; i++)
        expect(out[i] == (unsigned char)mix(i % bytes + i / bytes * 1000003 + 1));
    free(apart);
    free(out);
    return ret;
}

static int control(const struct sw_comm_handle *c, uint32_t count) {
    double *values = take(count * sizeof(*values));
    for (uint32_t i = 0; i < count; i++) values[i] = value_of(c->rank, i);
    int ret = sw_comm_sum(c, values, count);
    for (uint32_t i = 0; i < count && ret == 0; i++) {
        double sum = value_of(0, i);
        for (uint32_t r = 1; r < c->size; r++) sum += value_of(r, i);
        expect(memcmp(&sum, &values[i], sizeof(sum)) == 0);
    }
    for (uint32_t i = 0; i < count; i++) values[i] = c->rank + i;
    if (ret == 0) ret = sw_comm_broadcast(c, values, count * sizeof(*values), c->size - 1);
    for (uint32_t i = 0; i < count && ret == 0; i++) expect(values[i] == c->size - 1 + i);
    if (ret == 0) ret = sw_comm_agree(c, "a=1\nb=2\n");
    free(values);
    return ret;
}

/* ---- threads ---- */

typedef int (*thread_fn)(const struct sw_comm_handle *c, uint32_t number);

struct worker {
    pthread_t thread;
    const struct sw_comm_handle *c;
    uint32_t number;
    thread_fn run;
    int result;
};

static void *start(void *arg) {
    struct worker *w = arg;
    w->result = w->run(w->c, w->number);
    return NULL;
}

/* The first result below zero. */
static int in_threads(struct sw_comm_handle *handles, uint32_t count, thread_fn run) {
    struct worker workers[SW_RANKS_MAX];
    int ret = 0;
    for (uint32_t i = 0; i < count; i++) {
        workers[i] = (struct worker){.c = &handles[i], .number = i, .run = run};
        const int started = pthread_create(&workers[i].thread, NULL, start, &workers[i]);
        assert(started == 0);
    }
    for (uint32_t i = 0; i < count; i++) {
        pthread_join(workers[i].thread, NULL);
        if (ret == 0) ret = workers[i].result;
    }
    return ret;
}

/* ---- parts: what works ---- */

static int all_sizes(const struct sw_comm_handle *c, uint32_t number) {
    static const uint64_t counts[] = {0, 1, 17, 4099, 300000};
    static const uint64_t bytes[] = {0, 1, 4099, SW_COMM_EXCHANGE_MAX};
    int ret = 0;
    for (int k = 0; k < 5 && ret == 0; k++)
        for (int form = 0; form < 4 && ret == 0; form++) {
            const int in_place = form & 2 ? (int)(number % 2) : (form & 1);
            ret = scatter(c, counts[k], form & 1 ? SW_BF16 : SW_FP32, in_place);
            if (ret == 0 && form < 2) ret = gather(c, counts[k], form);
        }
    for (int k = 0; k < 8 && ret == 0; k++) ret = exchange(c, bytes[k / 2], k % 2);
    if (ret == 0) ret = control(c, 3);
    return ret;
}

static int run_sizes(int count, char **arguments) {
    struct sw_comm_handle ranks[SW_RANKS_MAX];
    assert(count == 1);
    const uint32_t local = (uint32_t)atoi(arguments[0]);
    const int ret = sw_world_ranks(world, ranks, local, timeout_s);
    if (ret < 0) return ret;
    for (uint32_t i = 0; i < local; i++) {
        expect(ranks[i].rank == sw_world_index(world) * local + i);
        expect(ranks[i].size == sw_world_size(world) * local);
    }
    return in_threads(ranks, local, all_sizes);
}

static int on_channel(const struct sw_comm_handle *c, uint32_t number) {
    int ret = 0;
    for (uint32_t round = 0; round < 30 && ret == 0; round++) {
        const uint64_t dice = mix(number * 1000 + round + 1);
        if (mix(dice + c->rank) % 4 == 0) usleep((useconds_t)(dice >> 8) % 300);
        ret = dice % 3 ? exchange(c, 1 + (dice >> 16) % 5000, (int)(dice & 1))
                       : control(c, 1 + (uint32_t)(dice >> 16) % 900);
    }
    return ret;
}

/* Channels in several threads, and ranks in others, all at once. */
static int on_either(const struct sw_comm_handle *c, uint32_t number) {
    if (number < THREADS) return on_channel(c, number);
    int ret = 0;
    for (uint64_t round = 0; round < 10 && ret == 0; round++) {
        ret = scatter(c, 1 + mix(round) % 100000, SW_FP32, 0);
        if (ret == 0) ret = gather(c, 1 + mix(round + 77) % 100000, 1);
    }
    return ret;
}

static int run_channels(int count, char **arguments) {
    (void)count, (void)arguments;
    struct sw_comm_handle handles[THREADS + 2];
    int ret = 0;
    for (int i = 0; i < THREADS && ret == 0; i++) {
        ret = sw_world_channel(world, &handles[i], timeout_s);
        expect(ret < 0 || handles[i].rank == sw_world_index(world));
        expect(ret < 0 || handles[i].size == sw_world_size(world));
    }
    if (ret == 0) ret = sw_world_ranks(world, &handles[THREADS], 2, timeout_s);
    if (ret == 0) ret = in_threads(handles, THREADS + 2, on_either);
    for (int i = 0; i < THREADS + 2; i++) handles[i].ops->close(handles[i].comm);
    return ret;
}

/* Values that are cheap to make and to check, as many from every process as the argument says. */
static int run_long(int count, char **arguments) {
    struct sw_comm_handle c;
    assert(count == 1);
    int ret = sw_world_ranks(world, &c, 1, timeout_s);
    if (ret < 0) return ret;
    const uint64_t values = strtoull(arguments[0], NULL, 10), bytes = values * sizeof(uint64_t);
    uint64_t *out = take(c.size * bytes);
    for (uint64_t i = 0; i < values; i++) out[c.rank * values + i] = i * 64 + c.rank;
    ret = c.ops->all_gather(c.comm, NULL, out, out + c.rank * values, bytes);
    for (uint64_t i = 0; i < c.size * values && ret == 0; i++)
        expect(out[i] == i % values * 64 + i / values);
    free(out);
    return ret;
}

static int run_nothing(int count, char **arguments) {
    (void)count, (void)arguments;
    printf("process %u of %u, opened in %.6f s\n", sw_world_index(world), sw_world_size(world),
           open_s);
    return 0;
}

/* ---- parts: what fails ---- */

/* Two ranks in each process, one of process 1 or all of it in another call than the rest. */
static int call_of(const struct sw_comm_handle *c, const char *call) {
    float place[4 * SW_RANKS_MAX] = {0};
    double values[3] = {1, 2, 3};
    if (strcmp(call, "gather") == 0)
        return c->ops->all_gather(c->comm, NULL, place, place + c->rank * 2, 8);
    if (strcmp(call, "gather12") == 0)
        return c->ops->all_gather(c->comm, NULL, place, place + c->rank * 3, 12);
    if (strcmp(call, "scatter") == 0)
        return c->ops->reduce_scatter(c->comm, NULL, place + c->rank * 2, place, SW_FP32, 2);
    if (strcmp(call, "scatter_bf16") == 0)
        return c->ops->reduce_scatter(c->comm, NULL, place + c->rank * 2, place, SW_BF16, 2);
    if (strcmp(call, "exchange") == 0) return c->ops->exchange(c->comm, place, place + c->rank, 4);
    if (strcmp(call, "sum") == 0) return sw_comm_sum(c, values, 3);
    if (strcmp(call, "broadcast") == 0) return sw_comm_broadcast(c, values, 24, 0);
    if (strcmp(call, "agree_a") == 0) return sw_comm_agree(c, "a=1\n");
    if (strcmp(call, "agree_b") == 0) return sw_comm_agree(c, "a=2\n");
    if (strcmp(call, "late") == 0) return sleep(60), 0;
    abort();
}

static const char *usual_call, *odd_call;
static uint32_t odd_from, odd_to; /* ranks */

static int usual_or_odd(const struct sw_comm_handle *c, uint32_t number) {
    (void)number;
    int ret = call_of(c, "gather");
    if (ret == 0)
        ret = call_of(c, c->rank >= odd_from && c->rank <= odd_to ? odd_call : usual_call);
    /* What has failed fails for ever, at once. */
    if (ret < 0) expect(call_of(c, "gather") < 0 && call_of(c, "sum") < 0);
    return ret;
}

/* USUAL ODD FROM TO: ranks FROM to TO make the odd call. */
static int run_odd(int count, char **arguments) {
    struct sw_comm_handle ranks[2];
    assert(count == 4);
    usual_call = arguments[0];
    odd_call = arguments[1];
    odd_from = (uint32_t)atoi(arguments[2]);
    odd_to = (uint32_t)atoi(arguments[3]);
    const int ret = sw_world_ranks(world, ranks, 2, timeout_s);
    return ret < 0 ? ret : in_threads(ranks, 2, usual_or_odd);
}

/* As many ranks as the argument says for each process. */
static int run_unequal(int count, char **arguments) {
    struct sw_comm_handle ranks[SW_RANKS_MAX];
    assert(count > (int)sw_world_index(world));
    return sw_world_ranks(world, ranks, (uint32_t)atoi(arguments[sw_world_index(world)]),
                          timeout_s);
}

static int for_ever(const struct sw_comm_handle *c, uint32_t number) {
    int ret = 0;
    for (uint64_t round = 0; ret == 0; round++) {
        if (number < THREADS) {
            ret = exchange(c, 64, 1);
            usleep(2000);
        } else {
            ret = scatter(c, 150000, SW_FP32, 0);
            if (ret == 0) ret = gather(c, 150000, 1);
        }
        if (round == 1 && number == THREADS) say("is at work,");
    }
    return ret;
}

/* Works until somebody ends it. Calls time out a little earlier than the listener names a silent
 * process, as they do anyway where the listener comes late. */
static int run_endless(int count, char **arguments) {
    (void)count, (void)arguments;
    const double call_s = timeout_s * 0.8;
    struct sw_comm_handle handles[THREADS + 2];
    int ret = 0;
    for (int i = 0; i < THREADS && ret == 0; i++)
        ret = sw_world_channel(world, &handles[i], call_s);
    if (ret == 0) ret = sw_world_ranks(world, &handles[THREADS], 2, call_s);
    return ret < 0 ? ret : in_threads(handles, THREADS + 2, for_ever);
}

static void *abort_later(void *arg) {
    usleep(300000);
    fprintf(stderr, "[%u] aborts\n", sw_world_index(world));
    sw_world_abort(world, -EIO);
    sw_world_abort(world, -EPERM);
    return arg;
}

/* The last process aborts while all work; every call returns that error, everywhere. */
static int run_abort(int count, char **arguments) {
    pthread_t thread;
    const int is_last = sw_world_index(world) == sw_world_size(world) - 1;
    if (is_last && pthread_create(&thread, NULL, abort_later, NULL) != 0) abort();
    const int ret = run_endless(count, arguments);
    if (is_last) pthread_join(thread, NULL);
    expect(ret == -EIO);
    printf("[%u] ended by %s\n", sw_world_index(world), strerror(-ret));
    fflush(stdout);
    return ret;
}

/* Process 1 has an error of its own, which has nothing to do with the others. */
static int run_leave(int count, char **arguments) {
    return sw_world_index(world) == 1 ? -EBADF : run_endless(count, arguments);
}

/* Process 1 never comes to the end, or comes late. */
static int run_dawdle(int count, char **arguments) {
    assert(count == 1);
    if (sw_world_index(world) == 1) usleep((useconds_t)(atof(arguments[0]) * 1e6));
    return 0;
}

static const struct {
    const char *name;
    int (*run)(int count, char **arguments);
} parts[] = {
    {"nothing", run_nothing}, {"sizes", run_sizes}, {"channels", run_channels},
    {"long", run_long},       {"odd", run_odd},     {"unequal", run_unequal},
    {"endless", run_endless}, {"abort", run_abort}, {"leave", run_leave},
    {"dawdle", run_dawdle},
};

int main(int argc, char **argv) {
    sw_log_set_sink(print_line, NULL);
    if (getenv("WORLD_TIMEOUT_S")) timeout_s = atof(getenv("WORLD_TIMEOUT_S"));
    size_t part = 0;
    const size_t count = sizeof(parts) / sizeof(parts[0]);
    while (argc > 1 && part < count && strcmp(parts[part].name, argv[1]) != 0) part++;
    if (argc < 2 || part == count) return 2;
    const uint64_t begin_ns = sw_now_ns();
    int ret = sw_world_open(&world, timeout_s);
    open_s = (double)(sw_now_ns() - begin_ns) * 1e-9;
    if (ret < 0) return FAILED;
    ret = parts[part].run(argc - 2, argv + 2);
    const int status = ret < 0 ? FAILED : atomic_load(&wrong) ? WRONG : 0;
    if (atomic_load(&wrong)) fprintf(stderr, "[%u] wrong results\n", sw_world_index(world));
    fflush(stdout);
    ret = sw_world_close(world, status);
    return status ? status : ret < 0 ? FAILED : 0;
}
