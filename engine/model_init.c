/* engine/model_init.c - a model from its configuration alone.
 *
 * Element i of a tensor is value i of a counter-based stream, so any piece can be made at any time
 * by any thread: Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC11)
 * with the seed as key and (i / 4, hash of the tensor's name) as counter gives four words, and two
 * Box-Muller pairs make four normal values of them. Logarithm, sine and cosine are the polynomials
 * below instead of the C library's, whose last bit depends on its version and the CPU: equal seeds
 * give equal files everywhere. */
#include "engine/model_internal.h"
#include "engine/shards.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <string.h>
#include <xxhash.h>

#include "base/log.h"
#include "engine/teams.h"

struct philox {
    uint32_t word[4];
};

static struct philox philox4x32(uint64_t key, uint64_t low, uint64_t high) {
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    struct philox c = {
        {(uint32_t)low, (uint32_t)(low >> 32), (uint32_t)high, (uint32_t)(high >> 32)}};
    for (int round = 0; round < 10; round++) {
        const uint64_t a = (uint64_t)0xD2511F53u * c.word[0], b = (uint64_t)0xCD9E8D57u * c.word[2];
        c = (struct philox){{(uint32_t)(b >> 32) ^ c.word[1] ^ k0, (uint32_t)b,
                             (uint32_t)(a >> 32) ^ c.word[3] ^ k1, (uint32_t)a}};
        k0 += 0x9E3779B9u; /* the golden ratio and sqrt(3) - 1, as in the paper */
        k1 += 0xBB67AE85u;
    }
    return c;
}

/* -log(x) for x in (0, 1]: with x = m 2^e and m in [sqrt(1/2), sqrt(2)), log m = 2 artanh(s) where
 * s = (m - 1) / (m + 1), |s| < 0.172; the terms kept leave an error below 1e-13. */
static double minus_log(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof(bits));
    /* Adding the distance from sqrt(1/2) to 1 carries into the exponent exactly when m >= sqrt(2).
     */
    const uint64_t shifted = bits - 0x3FE6A09E667F3BCDu + ((uint64_t)1023 << 52);
    const double e = (double)((int64_t)(shifted >> 52) - 1023);
    bits = (shifted & 0xFFFFFFFFFFFFFu) + 0x3FE6A09E667F3BCDu;
    double m;
    memcpy(&m, &bits, sizeof(m));
    const double s = (m - 1) / (m + 1), z = s * s;
    const double tail =
        1.0 / 3 +
        z * (1.0 / 5 +
             z * (1.0 / 7 + z * (1.0 / 9 + z * (1.0 / 11 + z * (1.0 / 13 + z * (1.0 / 15))))));
    return -(e * 0.693147180559945309417 + 2 * s * (1 + z * tail));
}

/* Two independent normal values from two uniform words (Box & Muller 1958). The top two bits of the
 * second choose a quarter of the circle, the rest an angle within 45 degrees of its axis. */
static void normal_pair(uint32_t first, uint32_t second, double *x, double *y) {
    const double radius = sqrt(2 * minus_log(((double)first + 1) * 0x1p-32));
    const double a =
        (((double)(second & 0x3FFFFFFFu) + 0.5) * 0x1p-30 - 0.5) * 1.57079632679489661923;
    const double z = a * a;
    const double sine =
        a *
        (1 + z * (-1.0 / 6 + z * (1.0 / 120 +
                                  z * (-1.0 / 5040 + z * (1.0 / 362880 + z * (-1.0 / 39916800))))));
    const double cosine =
        1 + z * (-0.5 + z * (1.0 / 24 +
                             z * (-1.0 / 720 + z * (1.0 / 40320 + z * (-1.0 / 3628800 +
                                                                       z * (1.0 / 479001600))))));
    const uint32_t quarter = second >> 30;
    const double u = quarter & 1 ? -sine : cosine, v = quarter & 1 ? cosine : sine;
    *x = radius * (quarter & 2 ? -u : u);
    *y = radius * (quarter & 2 ? -v : v);
}

struct init {
    const struct sw_model *model;
    uint64_t seed;
    double range;
    int threads;
};

static void put(enum sw_dtype dtype, void *out, uint64_t i, float value) {
    if (dtype == SW_FP32)
        ((float *)out)[i] = value;
    else
        ((sw_bf16 *)out)[i] = sw_bf16_from_weight(value);
}

static int fetch_init(void *ctx, uint32_t unit, uint64_t first, uint64_t count, enum sw_dtype dtype,
                      void *out) {
    const struct init *init = ctx;
    const struct sw_unit *u = &init->model->units[unit];
    uint32_t t = 0;
    while (t + 1 < u->tensor_count && u->tensors[t + 1].first <= first) t++;
    const struct sw_tensor *tensor = &u->tensors[t];
    assert(first - tensor->first + count <= tensor->count);
    /* Counted in the whole tensor: how it is cut into units changes no value. */
    const uint64_t begin = tensor->source_first + (first - tensor->first), end = begin + count;
    if (tensor->cols == 0) {
        for (uint64_t i = 0; i < count; i++) put(dtype, out, i, 1.0f);
        return 0;
    }
    const uint64_t hash = XXH64(tensor->name, strlen(tensor->name), 0);
#pragma omp parallel for schedule(static) num_threads(init->threads)
    for (uint64_t block = begin / 4; block < (end + 3) / 4; block++) {
        const struct philox words = philox4x32(init->seed, block, hash);
        double values[4];
        normal_pair(words.word[0], words.word[1], &values[0], &values[1]);
        normal_pair(words.word[2], words.word[3], &values[2], &values[3]);
        for (uint64_t lane = 0; lane < 4; lane++) {
            const uint64_t i = 4 * block + lane;
            if (i >= begin && i < end)
                put(dtype, out, i - begin, (float)(values[lane] * init->range));
        }
    }
    return 0;
}

int sw_model_init(const char *config_path, const char *dir, uint64_t seed, enum sw_dtype dtype) {
    struct sw_model model;
    json_t *root = NULL;
    int ret = sw_model_open_json(&model, config_path, SW_MODEL_PARTS_BY_RULE, &root);
    if (ret < 0) return ret;
    const json_t *range = json_object_get(root, "initializer_range");
    struct init init = {&model, seed, 0.02, sw_teams_default()}; /* the library's default range */
    if (range && !json_is_null(range)) init.range = json_number_value(range);
    if (!(init.range > 0) || !isfinite(init.range)) {
        sw_error("%s: 'initializer_range' is not a number above 0", config_path);
        ret = -EINVAL;
    }
    if (ret == 0) {
        struct sw_companions companions;
        sw_companions_open(&companions, model.dir);
        ret = sw_model_write(&model, root, &companions, dir, dtype, SW_SHARD_BYTES_MAX, fetch_init,
                             &init);
        sw_companions_close(&companions);
    }
    json_decref(root);
    sw_model_close(&model);
    return ret;
}
