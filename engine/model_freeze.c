/* engine/model_freeze.c - which tensors are trained, and the places in a unit that follow. */
#include "engine/model.h"

#include <errno.h>
#include <fnmatch.h>
#include <stdlib.h>
#include <string.h>
#include "base/log.h"
#include "base/size.h"
#include "engine/model_internal.h"
#include "offload/placement.h"

static uint64_t place(struct sw_unit *unit, int frozen, uint32_t *placed, uint64_t at) {
    for (uint32_t i = 0; i < unit->tensor_count; i++) {
        struct sw_tensor *tensor = &unit->tensors[i];
        if (tensor->frozen != frozen) continue;
        tensor->first = at;
        at = sw_round_up(at + tensor->count, SW_TENSOR_ALIGN);
        unit->order[(*placed)++] = (uint8_t)i;
    }
    return at;
}

void sw_unit_lay_out(struct sw_unit *unit, uint64_t frozen_first) {
    uint32_t placed = 0;
    unit->trained = unit->frozen_first = unit->count = place(unit, 0, &placed, 0);
    if (placed == unit->tensor_count) return;
    unit->frozen_first = frozen_first;
    unit->count = place(unit, 1, &placed, frozen_first);
}

void sw_model_shards(const struct sw_model *model, uint32_t shards, uint32_t replicas,
                     uint64_t *elements, uint64_t *trained) {
    for (uint32_t u = 0; u < model->unit_count; u++) {
        const struct sw_unit *unit = &model->units[u];
        trained[u] = sw_placement_shard(unit->trained, shards, replicas);
        elements[u] =
            trained[u] + sw_placement_shard(unit->count - unit->frozen_first, shards, replicas);
    }
}

/* Marks what a pattern fits; returns how many tensors. */
static uint32_t mark(struct sw_model *model, const char *pattern) {
    const int frozen = *pattern != '!';
    uint32_t fits = 0;
    for (uint32_t u = 0; u < model->unit_count; u++)
        for (uint32_t i = 0; i < model->units[u].tensor_count; i++) {
            struct sw_tensor *tensor = &model->units[u].tensors[i];
            if (fnmatch(pattern + !frozen, tensor->name, 0) != 0) continue;
            tensor->frozen = frozen;
            fits++;
        }
    return fits;
}

static int mark_all(struct sw_model *model, const char *patterns) {
    char *copy = strdup(patterns), *rest = copy;
    int ret = copy ? 0 : -ENOMEM;
    for (const char *pattern; ret == 0 && (pattern = strsep(&rest, ",")) != NULL;) {
        if (*pattern && mark(model, pattern) > 0) continue;
        sw_error("--freeze: no tensor of %s is named like '%s'; names are those of its files%s",
                 model->dir, pattern,
                 model->config.tied ? ", and the head's matrix is model.embed_tokens.weight" : "");
        ret = -EINVAL;
    }
    free(copy);
    return ret;
}

int sw_model_freeze(struct sw_model *model, const char *patterns, uint32_t shards,
                    uint32_t replicas) {
    const int ret = mark_all(model, patterns);
    if (ret < 0) return ret;
    model->trained_params = 0;
    for (uint32_t u = 0; u < model->unit_count; u++) {
        struct sw_unit *unit = &model->units[u];
        sw_unit_lay_out(unit, 0);
        sw_unit_lay_out(unit, shards * sw_placement_shard(unit->trained, shards, replicas));
        for (uint32_t i = 0; i < unit->tensor_count; i++)
            if (!unit->tensors[i].frozen) model->trained_params += unit->tensors[i].count;
    }
    if (model->trained_params > 0) return 0;
    sw_error("--freeze %s: it leaves no tensor of %s to train", patterns, model->dir);
    return -EINVAL;
}
