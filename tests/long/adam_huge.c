/* One chunk of 2^31 + 17 elements, for real: counts, byte offsets and block numbers beyond 31 and
 * 32 bits. Needs 14 GB (8-bit moments) or 27 GB (FP32 moments); each is skipped where memory is
 * short. The gradients are one small file mapped again and again.
 *
 * Masters and gradients repeat every PERIOD elements, so the whole chunk is compared with what a
 * small chunk made of one period; where the place of an element counts, which is in the rounding of
 * 8-bit moments, with small chunks that say where they begin. Prints "ok NAME", "FAIL NAME: reason"
 * or "skip NAME: reason". */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "base/crc32c.h"
#include "cpu_adam/adam.h"

enum { PERIOD = 1 << 20, TAIL = 17, THREADS = 2 };
static const uint64_t count = (1ull << 31) + TAIL;

static float period_masters[PERIOD];
static const char *failure;

static void check(int holds, const char *what) {
    if (!holds && !failure) failure = what;
}

static void *map(uint64_t bytes) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? NULL : at;
}

/* BF16 gradients: a file of one period, mapped as often as the chunk needs it. */
static sw_bf16 *map_gradients(uint64_t *bytes) {
    const uint64_t file_bytes = PERIOD * sizeof(sw_bf16);
    *bytes = (count + PERIOD - 1) / PERIOD * file_bytes;
    const int file = memfd_create("gradients", 0);
    char *all = map(*bytes);
    if (file < 0 || !all || ftruncate(file, (off_t)file_bytes) != 0) return NULL;
    for (uint64_t at = 0; at < *bytes; at += file_bytes)
        if (mmap(all + at, file_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) ==
            MAP_FAILED)
            return NULL;
    close(file);
    uint32_t x = 1;
    for (int i = 0; i < PERIOD; i++) {
        x = x * 1664525u + 1013904223u;
        ((sw_bf16 *)all)[i] = sw_bf16_from_f32((float)(int32_t)x * 0x1p-31f);
        period_masters[i] = (float)(int32_t)(x * 2654435761u) * 0x1p-31f;
    }
    return (sw_bf16 *)all;
}

static uint64_t available_bytes(void) {
    char line[128];
    uint64_t kib = 0;
    FILE *file = fopen("/proc/meminfo", "r");
    while (file && fgets(line, sizeof(line), file))
        if (sscanf(line, "MemAvailable: %lu", &kib) == 1) break;
    if (file) fclose(file);
    return kib * 1024;
}

static struct sw_adam_step step_of(uint64_t t) {
    const struct sw_adam_hyper hyper = {1e-3, 0.9, 0.95, 1e-8, 0.1, 0};
    struct sw_adam_step step;
    sw_adam_prepare(&step, &hyper, t, 0.5f);
    return step;
}

static void start(const struct sw_adam_chunk *chunk) {
    for (uint64_t at = 0; at < chunk->count; at += PERIOD)
        sw_adam_start(chunk, at, chunk->count - at < PERIOD ? chunk->count - at : PERIOD,
                      period_masters);
}

/* Elements [first, first + length) of the big chunk against a small chunk that begins there; first
 * is a multiple of the block and the range's border lies elsewhere. */
static void check_part(const struct sw_adam_variant *variant, const struct sw_adam_chunk *big,
                       uint64_t first, uint64_t length, uint64_t updates) {
    enum { MOST = 8192 };
    static float a[3][MOST], b[3][MOST], masters[MOST];
    const struct sw_adam_range all = {length, first < big->ranges[0].end};
    struct sw_adam_chunk small = {.format = big->format,
                                  .count = length,
                                  .first = big->first + first,
                                  .ranges = &all,
                                  .range_count = 1,
                                  .grad = (const sw_bf16 *)big->grad + first};
    void *record = malloc(sw_adam_record_bytes(&small.format, length));
    if (!record) return check(0, "no memory for a small chunk");
    sw_adam_record_map(&small, record);
    for (uint64_t i = 0; i < length; i++) masters[i] = period_masters[(first + i) % PERIOD];
    sw_adam_start(&small, 0, length, masters);
    for (uint64_t t = 1; t <= updates; t++) {
        const struct sw_adam_step step = step_of(t);
        sw_adam_update(variant, &step, &small, 1, NULL);
    }
    sw_adam_read(&small, 0, length, a[0], a[1], a[2]);
    sw_adam_read(big, first, length, b[0], b[1], b[2]);
    for (int k = 0; k < 3; k++)
        check(memcmp(a[k], b[k], length * sizeof(float)) == 0,
              k == 0 ? "masters differ from a small chunk's"
                     : "moments differ from a small chunk's");
    free(record);
}

static void check_sums(const struct sw_adam_chunk *chunk, const struct sw_adam_extra *extra) {
    double sum = 0;
    const uint64_t blocks = (count + SW_ADAM_BLOCK - 1) / SW_ADAM_BLOCK;
    for (uint64_t b = 0; b < blocks; b++) {
        check(extra->update_squares[b] > 0, "a block has not moved");
        sum += extra->update_squares[b];
    }
    check(sum == extra->update_square, "the update's norm is not the sum of its blocks");
    check(extra->checksum_after ==
              sw_crc32c(0, chunk->master, sw_adam_record_bytes(&chunk->format, count)),
          "the checksum is not that of the record's bytes");
}

/* After one update from moments of zero a master depends on its period alone, in every format. */
static void check_periods(const struct sw_adam_variant *variant, const struct sw_adam_chunk *big,
                          uint64_t border) {
    static float want[2][PERIOD], m[PERIOD], v[PERIOD];
    for (int decays = 0; decays < 2; decays++) {
        const struct sw_adam_range all = {PERIOD, decays};
        const struct sw_adam_chunk one = {
            .format = {SW_MASTER_FP32, SW_MOMENTS_FP32, SW_BF16, SW_BF16},
            .count = PERIOD,
            .ranges = &all,
            .range_count = 1,
            .master = want[decays],
            .momentum = m,
            .variance = v,
            .grad = big->grad};
        sw_adam_start(&one, 0, PERIOD, period_masters);
        const struct sw_adam_step step = step_of(1);
        sw_adam_update(variant, &step, &one, 1, NULL);
    }
    for (uint64_t at = 0; at < count; at += PERIOD) {
        const uint64_t end = count - at < PERIOD ? count : at + PERIOD;
        const uint64_t middle = border < at ? at : border > end ? end : border;
        check(memcmp(big->master + at, want[1], (middle - at) * sizeof(float)) == 0 &&
                  memcmp(big->master + middle, want[0] + (middle - at),
                         (end - middle) * sizeof(float)) == 0,
              "a master differs from its period's");
    }
}

static void run(const char *name, enum sw_adam_moments moments, sw_bf16 *grad) {
    const uint64_t border = (1ull << 31) - 4096 - 5;
    const struct sw_adam_range ranges[] = {{border, 1}, {count, 0}};
    struct sw_adam_chunk chunk = {.format = {SW_MASTER_FP32, moments, SW_BF16, SW_BF16},
                                  .count = count,
                                  .first = 1 << 20,
                                  .ranges = ranges,
                                  .range_count = 2,
                                  .grad = grad};
    const uint64_t bytes = sw_adam_record_bytes(&chunk.format, count);
    const uint64_t squares_bytes = (count / SW_ADAM_BLOCK + 1) * sizeof(double);
    const uint64_t spare = 2000000000; /* for whatever else runs here */
    if (available_bytes() < bytes + squares_bytes + spare) {
        printf("skip %s: not checked here: it needs %.0f GB of free memory\n", name,
               (double)(bytes + squares_bytes + spare) * 1e-9);
        return;
    }
    void *record = map(bytes);
    struct sw_adam_extra extra = {.update_squares = map(squares_bytes), .checksum = 1};
    const struct sw_adam_variant *variant;
    failure = NULL;
    if (!record || !extra.update_squares || sw_adam_pick(&variant)) {
        printf("FAIL %s: no memory, or no variant\n", name);
        return;
    }
    sw_adam_record_map(&chunk, record);
    start(&chunk);
    const uint32_t started = sw_crc32c(0, record, bytes);
    for (uint64_t t = 1; t <= 2; t++) {
        const struct sw_adam_step step = step_of(t);
        const uint32_t before = t == 1 ? started : extra.checksum_after;
        sw_adam_update(variant, &step, &chunk, THREADS, &extra);
        check(extra.checksum_before == before, "the checksum of what was read is another one");
        check_sums(&chunk, &extra);
        if (t == 1) check_periods(variant, &chunk, border);
    }
    static const uint64_t places[] = {0,
                                      1ull << 29,
                                      1ull << 30,
                                      (1ull << 30) + 4096,
                                      (1ull << 31) - (1 << 20),
                                      (1ull << 31) - 256};
    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++)
        check_part(variant, &chunk, places[i], i == 5 ? 256 + TAIL : 8192, 2);
    munmap(record, bytes);
    munmap(extra.update_squares, squares_bytes);
    if (failure)
        printf("FAIL %s: %s\n", name, failure);
    else
        printf("ok %s\n", name);
}

/* The norm over all of it is made of its periods' equal blocks. */
static void run_norm(const char *name, sw_bf16 *grad) {
    const uint64_t blocks = (count + SW_NORM_BLOCK - 1) / SW_NORM_BLOCK;
    double *sums = map(blocks * sizeof(double));
    const struct sw_adam_variant *variant;
    failure = NULL;
    if (!sums || sw_adam_pick(&variant)) {
        printf("FAIL %s: no memory, or no variant\n", name);
        return;
    }
    struct sw_adam_nonfinite bad;
    const double sum = sw_adam_grad_norm(variant, grad, SW_BF16, count, THREADS, sums, &bad);
    double total = 0;
    for (uint64_t b = 0; b < blocks; b++) {
        const uint64_t like = b % (PERIOD / SW_NORM_BLOCK);
        check(b + 1 == blocks || sums[b] == sums[like], "equal blocks have other sums");
        total += sums[b];
    }
    check(sum == total && bad.count == 0, "the sum is not that of its blocks");
    double tail[1];
    check(sums[blocks - 1] == sw_adam_grad_norm(variant, grad, SW_BF16, TAIL, 1, tail, &bad),
          "the last block has another sum");
    /* The last element, and it alone, is not finite: in every period, since they are one. */
    const sw_bf16 kept = grad[TAIL - 1];
    grad[TAIL - 1] = 0x7F80;
    sw_adam_grad_norm(variant, grad + TAIL, SW_BF16, count - TAIL, THREADS, sums, &bad);
    check(bad.count == (count - 1) / PERIOD && bad.first == PERIOD - 1 && !bad.is_nan,
          "infinities are not counted or named");
    grad[TAIL - 1] = kept;
    printf(failure ? "FAIL %s: %s\n" : "ok %s\n", name, failure);
    munmap(sums, blocks * sizeof(double));
}

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    uint64_t bytes;
    sw_bf16 *grad = map_gradients(&bytes);
    if (!grad) {
        printf("skip adam_huge: not checked here: no mapping of %d pieces\n", 1 << 11);
        return 0;
    }
    int failures = 0;
    run_norm("norm_of_2_31_gradients", grad);
    failures += failure != NULL;
    failure = NULL;
    run("chunk_of_2_31_elements_8_bit_moments", SW_MOMENTS_8BIT, grad);
    failures += failure != NULL;
    failure = NULL;
    run("chunk_of_2_31_elements_fp32_moments", SW_MOMENTS_FP32, grad);
    failures += failure != NULL;
    return failures ? 1 : 0;
}
