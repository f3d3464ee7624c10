/* What ranks do together must equal, bit for bit, a plain loop in rank order over the same numbers,
 * whoever comes first; and every fault (another call, another text, a rank that stays away, an
 * abort) must end the calls of all ranks with one report that names it. Ranks are threads here. No
 * timeout ends anywhere but where a rank stays away for good, so no result depends on speed. */
#include "engine/collective.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

#include "base/log.h"
#include "tests/support_random.h"

enum { RANKS_MAX = 8, ROUNDS = 2000, NEVER_S = 100000 };

static const uint64_t counts[] = {0, 1, 17, 2048, 4099};
enum { COUNTS = sizeof(counts) / sizeof(counts[0]) };

static char logged[4096]; /* every line since it was emptied */
static int reports;
static void keep(enum sw_log_level level, const char *line, void *ctx) {
    (void)ctx, (void)level;
    const size_t used = strlen(logged);
    snprintf(logged + used, sizeof(logged) - used, "%s\n", line);
    reports++;
}

static int set_sink(void **state) {
    (void)state;
    sw_log_set_sink(keep, NULL);
    return 0;
}

/* ---- ranks as threads ---- */

typedef int (*rank_fn)(const struct sw_comm_handle *c, void *arg);

struct worker {
    pthread_t thread;
    const struct sw_comm_handle *c;
    rank_fn run;
    void *arg;
    int result;
};

static struct sw_comm_handle ranks[SW_RANKS_MAX];
static struct worker workers[SW_RANKS_MAX];
static atomic_int wrong; /* results that differ from what the test computes itself */

static void *work(void *arg) {
    struct worker *w = arg;
    w->result = w->run(w->c, w->arg);
    return NULL;
}

static void open_ranks(uint32_t size, double timeout_s) {
    assert_int_equal(sw_comm_open_host(ranks, size, timeout_s), 0);
    for (uint32_t r = 0; r < size; r++) {
        assert_int_equal(ranks[r].rank, r);
        assert_int_equal(ranks[r].size, size);
    }
    logged[0] = '\0';
    reports = 0;
    atomic_store(&wrong, 0);
}

static void start_rank(uint32_t r, rank_fn run, void *arg) {
    workers[r] = (struct worker){.c = &ranks[r], .run = run, .arg = arg};
    assert_int_equal(pthread_create(&workers[r].thread, NULL, work, &workers[r]), 0);
}

static int end_rank(uint32_t r) {
    assert_int_equal(pthread_join(workers[r].thread, NULL), 0);
    return workers[r].result;
}

static void close_ranks(void) {
    const uint32_t size = ranks[0].size;
    for (uint32_t r = size; r-- > 0;) ranks[r].ops->close(ranks[r].comm);
}

/* All ranks of a new group run the same and end well. */
static void all_run(uint32_t size, rank_fn run, void *arg) {
    open_ranks(size, NEVER_S);
    for (uint32_t r = 0; r < size; r++) start_rank(r, run, arg);
    for (uint32_t r = 0; r < size; r++) assert_int_equal(end_rank(r), 0);
    assert_int_equal(atomic_load(&wrong), 0);
    assert_int_equal(reports, 0);
    close_ranks();
}

static void self_runs(rank_fn run, void *arg) {
    assert_int_equal(sw_comm_open_self(ranks), 0);
    assert_string_equal(ranks[0].ops->name, "self");
    atomic_store(&wrong, 0);
    assert_int_equal(run(ranks, arg), 0);
    assert_int_equal(atomic_load(&wrong), 0);
    close_ranks();
}

static void expect(int right) {
    if (!right) atomic_fetch_add(&wrong, 1);
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

static void *take(uint64_t bytes) {
    void *p = malloc(bytes ? bytes : 1);
    if (!p) abort();
    return p;
}

/* ---- data calls ---- */

static int gather_one(const struct sw_comm_handle *c, uint64_t count, int in_place) {
    const uint64_t bytes = count * sizeof(float);
    float *out = take(c->size * bytes + sizeof(float)), *apart = take(bytes);
    float *in = in_place ? out + c->rank * count : apart;
    for (uint64_t i = 0; i < count; i++) in[i] = value_of(c->rank, i);
    out[c->size * count] = 7;
    const int ret = c->ops->all_gather(c->comm, NULL, out, in, bytes);
    for (uint64_t i = 0; i < count; i++) in[i] = -1; /* too late for anybody to see */
    for (uint32_t r = 0; r < c->size; r++) {
        if (in_place && r == c->rank) continue;
        for (uint64_t i = 0; i < count; i++)
            expect(sw_f32_bits(out[r * count + i]) == sw_f32_bits(value_of(r, i)));
    }
    expect(out[c->size * count] == 7);
    free(apart);
    free(out);
    return ret;
}

static int gather_all(const struct sw_comm_handle *c, void *arg) {
    int ret = 0;
    for (size_t k = 0; k < COUNTS && ret == 0; k++)
        for (int in_place = 0; in_place < 2 && ret == 0; in_place++)
            ret = gather_one(c, counts[k], in_place);
    if (arg && ret == 0) ret = gather_one(c, *(const uint64_t *)arg, c->rank % 2);
    return ret;
}

static int scatter_one(const struct sw_comm_handle *c, uint64_t count, enum sw_dtype carried,
                       int in_place) {
    float *in = take(c->size * count * sizeof(float)), *apart = take((count + 1) * sizeof(float));
    float *out = in_place ? in + c->rank * count : apart;
    for (uint64_t i = 0; i < c->size * count; i++) in[i] = value_of(c->rank, i);
    apart[count] = 7;
    const int ret = c->ops->reduce_scatter(c->comm, NULL, out, in, carried, count);
    for (uint64_t i = 0; i < c->size * count; i++) {
        if (in_place && i / count == c->rank) continue;
        expect(sw_f32_bits(in[i]) == sw_f32_bits(value_of(c->rank, i)));
        in[i] = -1;
    }
    for (uint64_t i = 0; i < count; i++)
        expect(sw_f32_bits(out[i]) == sw_f32_bits(sum_of(c->size, carried, c->rank * count + i)));
    expect(apart[count] == 7);
    free(apart);
    free(in);
    return ret;
}

static int scatter_all(const struct sw_comm_handle *c, void *arg) {
    int ret = 0;
    for (size_t k = 0; k < COUNTS && ret == 0; k++)
        for (int form = 0; form < 4 && ret == 0; form++)
            ret = scatter_one(c, counts[k], form & 1 ? SW_BF16 : SW_FP32, form & 2);
    for (int form = 0; arg && form < 2 && ret == 0; form++)
        ret = scatter_one(c, *(const uint64_t *)arg, form ? SW_BF16 : SW_FP32, c->rank % 2);
    return ret;
}

static void gathers_equal_a_plain_loop(void **state) {
    (void)state;
    uint64_t large = ((uint64_t)1 << 20) + 3;
    for (uint32_t size = 1; size <= RANKS_MAX; size++)
        all_run(size, gather_all, size == 3 ? &large : NULL);
    self_runs(gather_all, &large);
}

static void sums_equal_a_plain_loop_in_rank_order(void **state) {
    (void)state;
    uint64_t large = ((uint64_t)1 << 19) + 3;
    for (uint32_t size = 1; size <= RANKS_MAX; size++)
        all_run(size, scatter_all, size == 2 || size == 3 ? &large : NULL);
    self_runs(scatter_all, &large);
}

/* The others may be at work still when the first rank returns, unless it waits for them. */
static int gather_and_overwrite(const struct sw_comm_handle *c, void *arg) {
    const uint64_t count = *(const uint64_t *)arg;
    float *in = take(count * sizeof(*in)), *out = take(c->size * count * sizeof(*out));
    int ret = 0;
    for (int round = 0; round < 40 && ret == 0; round++) {
        for (uint64_t i = 0; i < count; i++) in[i] = (float)(c->rank + 100 * round);
        ret = c->ops->all_gather(c->comm, NULL, out, in, count * sizeof(*in));
        for (uint64_t i = 0; i < count; i++) in[i] = -1;
        for (uint32_t r = 0; r < c->size; r++)
            for (uint64_t i = 0; i < count; i++)
                expect(out[r * count + i] == (float)(r + 100 * round));
    }
    free(out);
    free(in);
    return ret;
}

static void nobody_returns_while_others_read(void **state) {
    (void)state;
    uint64_t count = 1 << 15;
    all_run(RANKS_MAX, gather_and_overwrite, &count);
}

static void bytes_over_links_are_told(void **state) {
    (void)state;
    open_ranks(4, NEVER_S);
    assert_int_equal(sw_comm_gather_bytes(&ranks[1], 10), 30);
    assert_int_equal(sw_comm_scatter_bytes(&ranks[1], SW_BF16, 10), 60);
    assert_int_equal(sw_comm_scatter_bytes(&ranks[1], SW_FP32, 10), 120);
    close_ranks();
}

/* ---- control calls ---- */

static atomic_uint arrivals;

static int exchange_all(const struct sw_comm_handle *c, void *arg) {
    (void)arg;
    static const uint64_t sizes[] = {1, 8, 4099, SW_COMM_EXCHANGE_MAX};
    unsigned char *out = take((uint64_t)c->size * SW_COMM_EXCHANGE_MAX);
    unsigned char *apart = take(SW_COMM_EXCHANGE_MAX);
    int ret = 0;
    for (int k = 0; k < 8 && ret == 0; k++) {
        const uint64_t bytes = sizes[k / 2];
        unsigned char *in = k % 2 ? out + c->rank * bytes : apart;
        for (uint64_t i = 0; i < bytes; i++) in[i] = (unsigned char)mix(i + c->rank * 1000003 + 1);
        ret = c->ops->exchange(c->comm, out, in, bytes);
        for (uint64_t i = 0; i < c->size * bytes; i++)
            expect(out[i] == (unsigned char)mix(i % bytes + i / bytes * 1000003 + 1));
    }
    for (uint32_t round = 1; round <= 20 && ret == 0; round++) {
        atomic_fetch_add(&arrivals, 1);
        ret = c->ops->exchange(c->comm, NULL, NULL, 0);
        expect(atomic_load(&arrivals) >= round * c->size);
    }
    free(apart);
    free(out);
    return ret;
}

static void exchanges_and_barriers(void **state) {
    (void)state;
    for (uint32_t size = 1; size <= RANKS_MAX; size++) {
        atomic_store(&arrivals, 0);
        all_run(size, exchange_all, NULL);
    }
    atomic_store(&arrivals, 0);
    self_runs(exchange_all, NULL);
}

static double wide_value_of(uint32_t rank, uint64_t i) {
    return i % 17 == 3 ? -0.0 : (double)value_of(rank, i) * value_of(rank + 9, i);
}

static int sum_all(const struct sw_comm_handle *c, void *arg) {
    (void)arg;
    static const uint32_t sizes[] = {0, 1, 3, 30, 31, 5000};
    double *values = take(5001 * sizeof(*values));
    int ret = 0;
    for (int k = 0; k < 6 && ret == 0; k++) {
        for (uint32_t i = 0; i <= sizes[k]; i++) values[i] = wide_value_of(c->rank, i);
        ret = sw_comm_sum(c, values, sizes[k]);
        for (uint32_t i = 0; i < sizes[k]; i++) {
            double sum = wide_value_of(0, i);
            for (uint32_t r = 1; r < c->size; r++) sum += wide_value_of(r, i);
            expect(memcmp(&sum, &values[i], sizeof(sum)) == 0);
        }
        expect(values[sizes[k]] == wide_value_of(c->rank, sizes[k]));
    }
    free(values);
    return ret;
}

static void sums_of_values(void **state) {
    (void)state;
    for (uint32_t size = 1; size <= RANKS_MAX; size++) all_run(size, sum_all, NULL);
    all_run(SW_RANKS_MAX, sum_all, NULL);
    self_runs(sum_all, NULL);
}

static int broadcast_all(const struct sw_comm_handle *c, void *arg) {
    (void)arg;
    static const uint64_t sizes[] = {0, 1, 240, 241, 4099, SW_COMM_EXCHANGE_MAX * 3 + 7};
    unsigned char *data = take(sizes[5] + 1);
    int ret = 0;
    for (int k = 0; k < 6; k++)
        for (uint32_t root = 0; root < c->size && ret == 0; root++) {
            for (uint64_t i = 0; i <= sizes[k]; i++)
                data[i] = (unsigned char)mix(i + c->rank * 1000003 + 1);
            ret = sw_comm_broadcast(c, data, sizes[k], root);
            for (uint64_t i = 0; i < sizes[k]; i++)
                expect(data[i] == (unsigned char)mix(i + root * 1000003 + 1));
            expect(data[sizes[k]] == (unsigned char)mix(sizes[k] + c->rank * 1000003 + 1));
        }
    free(data);
    return ret;
}

static void broadcasts_of_any_length(void **state) {
    (void)state;
    for (uint32_t size = 1; size <= 5; size++) all_run(size, broadcast_all, NULL);
    self_runs(broadcast_all, NULL);
}

/* ---- agreement ---- */

static int agree(const struct sw_comm_handle *c, void *arg) {
    return sw_comm_agree(c, ((const char *const *)arg)[c->rank]);
}

/* The texts of three ranks differ, and the report says how. */
static void differs(const char *a, const char *b, const char *c, const char *said) {
    const char *texts[] = {a, b, c};
    open_ranks(3, NEVER_S);
    for (uint32_t r = 0; r < 3; r++) start_rank(r, agree, texts);
    for (uint32_t r = 0; r < 3; r++) assert_int_equal(end_rank(r), -EINVAL);
    if (!strstr(logged, said)) fail_msg("'%s' is not in: %s", said, logged);
    assert_int_equal(reports, 1);
    for (uint32_t r = 0; r < 3; r++)
        assert_int_equal(ranks[r].ops->exchange(ranks[r].comm, NULL, NULL, 0), -EINVAL);
    assert_int_equal(reports, 1);
    close_ranks();
}

static void equal_texts_agree(void **state) {
    (void)state;
    const char *same[] = {"a=1\nb=2\n", "a=1\nb=2", "a=1\nb=2\n", "a=1\nb=2\n\n"};
    const char *empty[] = {"", "\n", ""};
    all_run(4, agree, same);
    all_run(3, agree, empty);
    self_runs(agree, same);
}

static void the_first_line_that_differs_is_named(void **state) {
    (void)state;
    differs("a=1\nb=2\nc=3\n", "a=1\nb=7\nc=4\n", "a=1\nb=2\nc=3\n",
            "line 2 differs: rank 0 has 'b=2', rank 1 has 'b=7'");
    differs("a=1\nb=2\nc=3\n", "a=1\nb=2\nc=3\n", "a=1\nb=22\nc=3\n",
            "line 2 differs: rank 0 has 'b=2', rank 2 has 'b=22'");
    differs("a=1\nb=2\nc=3\n", "a=1\nc=3\n", "a=1\n",
            "line 2 differs: rank 0 has 'b=2', rank 1 has 'c=3'");
    differs("a=1\nb=2\n", "a=1\nb=2\n", "a=1\n",
            "line 2 differs: rank 0 has 'b=2', rank 2 has no such line");
    differs("a=1", "a=1\n\nb=2\n", "a=1", "line 2 differs: rank 0 has no such line, rank 1 has ''");
    differs("", "a=1\n", "", "line 1 differs: rank 0 has no such line, rank 1 has 'a=1'");
}

static void long_texts_are_searched_to_their_end(void **state) {
    (void)state;
    enum { LINES = 20000 };
    char *text[2];
    for (int t = 0; t < 2; t++) {
        text[t] = take(LINES * 16 + 1);
        for (int i = 0, n = 0; i < LINES; i++)
            n += sprintf(text[t] + n, "n%d=%d\n", i, i == LINES - 2 && t ? 1 : 0);
    }
    differs(text[0], text[0], text[1],
            "line 19999 differs: rank 0 has 'n19998=0', rank 2 has 'n19998=1'");
    /* A line of any length; what is said of it is cut. */
    memset(text[0], 'x', LINES * 16);
    memset(text[1], 'x', LINES * 16);
    text[0][LINES * 16] = text[1][LINES * 16] = '\0';
    text[1][LINES * 16 - 1] = 'y';
    differs(text[0], text[1], text[0], "line 1 differs: rank 0 has 'xxx");
    free(text[0]);
    free(text[1]);
}

/* ---- different calls ---- */

struct odd {
    rank_fn usual, other; /* of the ranks, and of rank `odd` */
    uint32_t odd;
    const char *said;
};

static _Alignas(8) float place[SW_RANKS_MAX][1024]; /* of each rank, large enough for all below */

static int gather_8(const struct sw_comm_handle *c, void *arg) {
    (void)arg;
    float *out = place[c->rank];
    return c->ops->all_gather(c->comm, NULL, out, out + c->rank * 2, 8);
}
static int gather_12(const struct sw_comm_handle *c, void *arg) {
    (void)arg;
    float *out = place[c->rank];
    return c->ops->all_gather(c->comm, NULL, out, out + c->rank * 3, 12);
}
static int scatter_8(const struct sw_comm_handle *c, void *arg) {
    (void)arg;
    return c->ops->reduce_scatter(c->comm, NULL, place[c->rank] + 512, place[c->rank], SW_FP32, 8);
}
static int scatter_8_bf16(const struct sw_comm_handle *c, void *arg) {
    (void)arg;
    return c->ops->reduce_scatter(c->comm, NULL, place[c->rank] + 512, place[c->rank], SW_BF16, 8);
}
static int exchange_8(const struct sw_comm_handle *c, void *arg) {
    (void)arg;
    return c->ops->exchange(c->comm, place[c->rank], place[c->rank] + 512, 8);
}
static int exchange_256(const struct sw_comm_handle *c, void *arg) {
    (void)arg;
    memset(place[c->rank], 0, sizeof(place[c->rank]));
    return c->ops->exchange(c->comm, place[c->rank], place[c->rank] + 512, 256);
}
static int sum_3(const struct sw_comm_handle *c, void *arg) {
    (void)arg;
    double values[3] = {1, 2, 3};
    return sw_comm_sum(c, values, 3);
}
static int sum_2000(const struct sw_comm_handle *c, void *arg) {
    (void)arg;
    double values[2000] = {1, 2, 3};
    return sw_comm_sum(c, values, 2000);
}
static int broadcast_of_0(const struct sw_comm_handle *c, void *arg) {
    (void)arg;
    return sw_comm_broadcast(c, place[c->rank], 24, 0);
}
static int broadcast_of_1(const struct sw_comm_handle *c, void *arg) {
    (void)arg;
    return sw_comm_broadcast(c, place[c->rank], 24, 1);
}
static int agree_on_a(const struct sw_comm_handle *c, void *arg) {
    (void)arg;
    return sw_comm_agree(c, "a=1");
}

static const struct odd odds[] = {
    {gather_8, gather_12, 2,
     "rank 2 calls all_gather of 12 bytes while rank 0 calls all_gather of 8 bytes"},
    {gather_8, scatter_8, 1,
     "rank 1 calls reduce_scatter of 8 values carried as fp32 while rank 0 calls all_gather of 8 "
     "bytes"},
    {scatter_8, scatter_8_bf16, 0,
     "rank 1 calls reduce_scatter of 8 values carried as fp32 while rank 0 calls reduce_scatter of "
     "8 values carried as bf16"},
    {exchange_8, gather_8, 2,
     "rank 2 calls all_gather of 8 bytes while rank 0 calls exchange of 8 bytes"},
    {sum_3, gather_8, 1,
     "rank 1 calls all_gather of 8 bytes while rank 0 calls exchange of 256 bytes"},
    {sum_3, broadcast_of_0, 2,
     "rank 2 calls broadcast of 24 bytes from rank 0 while rank 0 calls sum of 3 values"},
    {sum_3, sum_2000, 1, "rank 1 calls sum of 2000 values while rank 0 calls sum of 3 values"},
    {broadcast_of_0, broadcast_of_1, 2,
     "rank 2 calls broadcast of 24 bytes from rank 1 while rank 0 calls broadcast of 24 bytes from "
     "rank 0"},
    {agree_on_a, sum_3, 1, "rank 1 calls sum of 3 values while rank 0 calls agree"},
};

static void different_calls_are_named(void **state) {
    (void)state;
    for (size_t k = 0; k < sizeof(odds) / sizeof(odds[0]); k++) {
        const struct odd *o = &odds[k];
        open_ranks(3, NEVER_S);
        for (uint32_t r = 0; r < 3; r++) start_rank(r, r == o->odd ? o->other : o->usual, NULL);
        for (uint32_t r = 0; r < 3; r++) assert_int_equal(end_rank(r), -EINVAL);
        if (!strstr(logged, o->said)) fail_msg("'%s' is not in: %s", o->said, logged);
        for (uint32_t r = 0; r < 3; r++) assert_int_equal(sum_3(&ranks[r], NULL), -EINVAL);
        assert_int_equal(reports, 1);
        close_ranks();
    }
}

/* The rank in the exchange cannot know that the others are elsewhere, but is ended afterwards. */
static void an_exchange_of_the_same_size_is_told_apart(void **state) {
    (void)state;
    open_ranks(3, NEVER_S);
    for (uint32_t r = 0; r < 3; r++) start_rank(r, r == 0 ? exchange_256 : sum_3, NULL);
    assert_int_equal(end_rank(0), 0);
    assert_int_equal(end_rank(1), -EINVAL);
    assert_int_equal(end_rank(2), -EINVAL);
    assert_non_null(strstr(logged, "rank 0 calls exchange while rank 1 calls sum of 3 values"));
    assert_int_equal(exchange_8(&ranks[0], NULL), -EINVAL);
    assert_int_equal(reports, 1);
    close_ranks();
}

/* ---- ranks that stay away, aborts ---- */

static void a_rank_that_stays_away_is_named(void **state) {
    (void)state;
    open_ranks(2, 0.2);
    assert_int_equal(gather_8(&ranks[0], NULL), -ETIMEDOUT);
    assert_non_null(strstr(logged, "rank 1 did not come to all_gather of 8 bytes within 0.2 s of "
                                   "rank 0"));
    assert_int_equal(scatter_8(&ranks[1], NULL), -ETIMEDOUT);
    assert_int_equal(reports, 1);
    close_ranks();

    open_ranks(4, 0.2);
    assert_int_equal(scatter_8_bf16(&ranks[2], NULL), -ETIMEDOUT);
    assert_non_null(strstr(logged, "ranks 0, 1, 3 did not come to reduce_scatter of 8 values "
                                   "carried as bf16 within 0.2 s of rank 2"));
    close_ranks();

    /* With another one that waits too. */
    open_ranks(3, 0.2);
    start_rank(0, gather_8, NULL);
    start_rank(2, gather_8, NULL);
    assert_int_equal(end_rank(0), -ETIMEDOUT);
    assert_int_equal(end_rank(2), -ETIMEDOUT);
    assert_non_null(strstr(logged, "did not come to all_gather of 8 bytes"));
    assert_int_equal(reports, 1);
    for (uint32_t r = 0; r < 3; r++) assert_int_equal(sum_3(&ranks[r], NULL), -ETIMEDOUT);
    assert_int_equal(reports, 1);
    close_ranks();
}

/* Its clock goes on while a process is stopped, but nobody has waited. Returns the exit status. */
static int stop_with_a_rank_that_waits(void) {
    open_ranks(2, 2);
    start_rank(0, gather_8, NULL);
    usleep(100000); /* rank 0 waits by now; if not, this shows less, but never wrongly */
    raise(SIGSTOP);
    start_rank(1, gather_8, NULL);
    const int first = end_rank(0), second = end_rank(1);
    return first == 0 && second == 0 && reports == 0 ? 0 : 1;
}

static void a_process_that_was_stopped_goes_on(void **state) {
    (void)state;
    fflush(NULL);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) _exit(stop_with_a_rank_that_waits());
    int status = 0;
    assert_int_equal(waitpid(child, &status, WUNTRACED), child);
    assert_true(WIFSTOPPED(status));
    usleep(2300000); /* more than the timeout */
    assert_int_equal(kill(child, SIGCONT), 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

static void an_abort_wakes_all(void **state) {
    (void)state;
    for (int round = 0; round < 5; round++) {
        open_ranks(4, NEVER_S);
        for (uint32_t r = 0; r < 3; r++) start_rank(r, r ? gather_8 : exchange_8, NULL);
        usleep(round % 2 ? 20000 : 0); /* they wait by now, or not yet */
        ranks[3].ops->abort(ranks[3].comm, -EIO);
        ranks[3].ops->abort(ranks[3].comm, -EPERM);
        for (uint32_t r = 0; r < 3; r++) assert_int_equal(end_rank(r), -EIO);
        for (uint32_t r = 0; r < 4; r++) assert_int_equal(scatter_8(&ranks[r], NULL), -EIO);
        assert_int_equal(reports, 0); /* who aborts has told why */
        close_ranks();
    }
    assert_int_equal(sw_comm_open_self(ranks), 0);
    ranks[0].ops->abort(ranks[0].comm, -EIO);
    ranks[0].ops->abort(ranks[0].comm, -EPERM);
    static const rank_fn each[] = {gather_8, scatter_8, scatter_8_bf16, exchange_8, sum_3};
    for (int k = 0; k < 5; k++) assert_int_equal(each[k](&ranks[0], NULL), -EIO);
    ranks[0].ops->close(ranks[0].comm);
    ranks[0].ops->close(NULL);
}

/* Each rank does rounds until it is aborted; what it gathers before is right. */
static int gather_for_ever(const struct sw_comm_handle *c, void *arg) {
    (void)arg;
    float in[64], out[4 * 64];
    int ret = 0;
    for (int round = 0; ret == 0; round++) {
        for (int i = 0; i < 64; i++) in[i] = (float)(c->rank + 10 * (round % 1000));
        ret = c->ops->all_gather(c->comm, NULL, out, in, sizeof(in));
        for (int i = 0; i < 64; i++) in[i] = -1;
        for (int i = 0; i < 4 * 64 && ret == 0; i++)
            expect(out[i] == (float)(i / 64 + 10 * (round % 1000)));
    }
    return ret;
}

static void an_abort_between_rounds_leaves_no_rank_behind(void **state) {
    (void)state;
    for (int k = 0; k < 10; k++) {
        open_ranks(4, NEVER_S);
        for (uint32_t r = 0; r < 4; r++) start_rank(r, gather_for_ever, NULL);
        usleep((useconds_t)(k * 700));
        ranks[1].ops->abort(ranks[1].comm, -ECANCELED);
        for (uint32_t r = 0; r < 4; r++) assert_int_equal(end_rank(r), -ECANCELED);
        assert_int_equal(atomic_load(&wrong), 0);
        close_ranks();
    }
}

/* ---- many rounds ---- */

static int random_round(const struct sw_comm_handle *c, uint64_t round, uint64_t dice) {
    const uint64_t count = 1 + (dice >> 8) % 500;
    double values[40], sum = 0;
    switch (dice % 6) {
    case 0:
        return gather_one(c, count, (int)(mix(dice + c->rank) & 1));
    case 1:
        return scatter_one(c, count, SW_FP32, (int)(mix(dice + c->rank) & 1));
    case 2:
        return scatter_one(c, count, SW_BF16, (int)(mix(dice + c->rank) & 1));
    case 3:
        return c->ops->exchange(c->comm, NULL, NULL, 0);
    case 4:
        for (int i = 0; i < 40; i++) values[i] = (double)(round * (c->rank + 1));
        for (uint32_t r = 0; r < c->size; r++) sum += (double)(round * (r + 1));
        const int ret = sw_comm_sum(c, values, 40);
        for (int i = 0; i < 40; i++) expect(values[i] == sum);
        return ret;
    default:
        for (int i = 0; i < 40; i++) values[i] = (double)(round * (c->rank + 1));
        const uint32_t root = (uint32_t)(dice >> 8) % c->size;
        const int broad = sw_comm_broadcast(c, values, sizeof(values), root);
        for (int i = 0; i < 40; i++) expect(values[i] == (double)(round * (root + 1)));
        return broad;
    }
}

static int random_rounds(const struct sw_comm_handle *c, void *arg) {
    const uint64_t seed = *(const uint64_t *)arg;
    int ret = 0;
    for (uint64_t round = 0; round < ROUNDS && ret == 0; round++) {
        const uint64_t delay = mix(seed + round * 64 + c->rank + 1);
        if (delay % 8 == 0) usleep((useconds_t)(delay >> 8) % 100);
        if (delay % 8 == 1) sched_yield();
        ret = random_round(c, round, mix(seed + round));
    }
    return ret;
}

static void many_rounds_in_any_order_of_arrival(void **state) {
    (void)state;
    uint64_t seed = random_begin();
    print_message("TEST_SEED=%llu\n", (unsigned long long)seed);
    all_run(4, random_rounds, &seed);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gathers_equal_a_plain_loop),
        cmocka_unit_test(sums_equal_a_plain_loop_in_rank_order),
        cmocka_unit_test(nobody_returns_while_others_read),
        cmocka_unit_test(bytes_over_links_are_told),
        cmocka_unit_test(exchanges_and_barriers),
        cmocka_unit_test(sums_of_values),
        cmocka_unit_test(broadcasts_of_any_length),
        cmocka_unit_test(equal_texts_agree),
        cmocka_unit_test(the_first_line_that_differs_is_named),
        cmocka_unit_test(long_texts_are_searched_to_their_end),
        cmocka_unit_test(different_calls_are_named),
        cmocka_unit_test(an_exchange_of_the_same_size_is_told_apart),
        cmocka_unit_test(a_rank_that_stays_away_is_named),
        cmocka_unit_test(a_process_that_was_stopped_goes_on),
        cmocka_unit_test(an_abort_wakes_all),
        cmocka_unit_test(an_abort_between_rounds_leaves_no_rank_behind),
        cmocka_unit_test(many_rounds_in_any_order_of_arrival),
    };
    return cmocka_run_group_tests(tests, set_sink, NULL);
}
