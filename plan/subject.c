/* plan/subject.c - the named shapes, and what a text means. */
#include "plan/subject.h"

#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"

/* From each model's published config.json; head_dim is hidden / heads in all of them. */
static const struct shape {
    const char *name;
    uint32_t hidden, intermediate, layers, heads, kv_heads, vocab, max_positions;
    int tied, qkv_bias;
    double rope_theta;
} shapes[] = {
    {"smollm2-135m", 576, 1536, 30, 9, 3, 49152, 8192, 1, 0, 1e5},
    {"mistral-7b", 4096, 14336, 32, 32, 8, 32000, 32768, 0, 0, 1e4}, /* v0.1 */
    {"qwen2.5-7b", 3584, 18944, 28, 28, 4, 152064, 131072, 0, 1, 1e6},
    {"llama-3-8b", 4096, 14336, 32, 32, 8, 128256, 8192, 0, 0, 5e5},
    {"llama-3-70b", 8192, 28672, 80, 64, 8, 128256, 8192, 0, 0, 5e5},
    {"qwen2.5-72b", 8192, 29568, 80, 64, 8, 152064, 131072, 0, 1, 1e6},
    {"llama-3-405b", 16384, 53248, 126, 128, 8, 128256, 131072, 0, 0, 5e5}, /* 3.1 */
};
enum { SHAPES = sizeof(shapes) / sizeof(shapes[0]) };

const char *sw_subject_shape(int i) {
    return i < SHAPES ? shapes[i].name : NULL;
}

static int open_shape(struct sw_subject *s, const struct shape *shape) {
    const struct sw_model_config config = {.model_type = "llama",
                                           .hidden = shape->hidden,
                                           .intermediate = shape->intermediate,
                                           .layers = shape->layers,
                                           .heads = shape->heads,
                                           .kv_heads = shape->kv_heads,
                                           .head_dim = shape->hidden / shape->heads,
                                           .vocab = shape->vocab,
                                           .max_positions = shape->max_positions,
                                           .tied = shape->tied,
                                           .rms_eps = 1e-5f,
                                           .rope_theta = shape->rope_theta};
    const int ret = sw_model_open_shape(&s->model, &config);
    if (ret < 0) {
        sw_error("model: no memory for the units of %s", shape->name);
        return ret;
    }
    const uint64_t widths = (uint64_t)(config.heads + 2 * config.kv_heads) * config.head_dim;
    s->shape = shape->name;
    s->bias_params = shape->qkv_bias ? config.layers * widths : 0;
    s->params = s->model.params + s->bias_params;
    return 0;
}

/* "7B": digits, perhaps a point, and a letter. 0: it is none. */
static double count_of(const char *text) {
    static const struct {
        char letter;
        double unit;
    } units[] = {{'M', 1e6}, {'B', 1e9}, {'G', 1e9}, {'T', 1e12}};
    char *end;
    if (!isdigit((unsigned char)text[0]) || strspn(text, "0123456789.") + 1 != strlen(text))
        return 0;
    const double number = strtod(text, &end);
    for (size_t i = 0; i < sizeof(units) / sizeof(units[0]); i++)
        if (toupper((unsigned char)*end) == units[i].letter && !end[1])
            return number * units[i].unit;
    return 0;
}

static const struct shape *nearest(double params) {
    const struct shape *best = NULL;
    double least = INFINITY;
    for (int i = 0; i < SHAPES; i++) {
        struct sw_subject s = {0};
        if (open_shape(&s, &shapes[i]) < 0) return NULL;
        const double distance = fabs(log((double)s.params / params));
        if (distance < least) {
            least = distance;
            best = &shapes[i];
        }
        sw_model_close(&s.model);
    }
    return best;
}

static int open_count(struct sw_subject *s, double params) {
    if (!(params >= 1e6 && params <= 1e14)) {
        sw_error("model: %s are too few or too many parameters to plan for (1M to 100T)", s->name);
        return -ERANGE;
    }
    const struct shape *shape = nearest(params);
    const int ret = shape ? open_shape(s, shape) : -ENOMEM;
    s->kind = SW_SUBJECT_COUNT;
    s->params = (uint64_t)llround(params);
    s->bias_params = 0;
    return ret;
}

static int open_files(struct sw_subject *s) {
    const int ret = sw_model_open_config(&s->model, s->name);
    s->kind = SW_SUBJECT_FILES;
    s->params = s->model.params;
    return ret;
}

int sw_subject_open(struct sw_subject *s, const char *text) {
    assert(s && text);
    memset(s, 0, sizeof(*s));
    if (strlen(text) >= sizeof(s->name)) {
        sw_error("model: the name is too long: %.80s...", text);
        return -ENAMETOOLONG;
    }
    strcpy(s->name, text);
    if (strchr(text, '/') || access(text, F_OK) == 0) return open_files(s);
    s->kind = SW_SUBJECT_SHAPE;
    for (int i = 0; i < SHAPES; i++)
        if (!strcasecmp(text, shapes[i].name)) return open_shape(s, &shapes[i]);
    const double params = count_of(text);
    if (params > 0) return open_count(s, params);
    char known[512] = "";
    for (int i = 0; i < SHAPES; i++) {
        const size_t used = strlen(known);
        snprintf(known + used, sizeof(known) - used, "%s%s", i ? ", " : "", shapes[i].name);
    }
    sw_error("model: '%s' is no folder or file here, no count of parameters (7B), and none of the "
             "known shapes: %s",
             text, known);
    return -ENOENT;
}

void sw_subject_close(struct sw_subject *s) {
    sw_model_close(&s->model);
}

double sw_subject_scale(const struct sw_subject *s) {
    return s->kind == SW_SUBJECT_COUNT ? (double)s->params / (double)s->model.params : 1;
}
