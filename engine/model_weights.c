/* engine/model_weights.c - the weight files of a model folder: found, mapped, and matched with the
 * tensors that the configuration asks for, each with its shape, before anything is used. */
#include "engine/model_internal.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"

#define INDEX_NAME  "model.safetensors.index.json"
#define SINGLE_NAME "model.safetensors"

static int place_tensors(const struct sw_model *model, struct sw_weights *weights) {
    for (uint32_t u = 0; u < model->unit_count; u++)
        for (uint32_t i = 0; i < model->units[u].tensor_count; i++) {
            const struct sw_tensor *tensor = &model->units[u].tensors[i];
            const int ret = sw_tensor_folder_find(&weights->folder, tensor->name,
                                                  sw_model_source_rows(model, u, i), tensor->cols,
                                                  &weights->places[u][i]);
            if (ret < 0) return ret;
        }
    return 0;
}

/* What is left over: buffers that follow from the configuration, and a tied head's second copy,
 * which the library ignores as well; anything else would silently take no part. */
static int check_leftover(const struct sw_model *model, const struct sw_tensor_folder *folder) {
    const struct sw_tensor_place *list = folder->list;
    static const char inv_freq[] = "rotary_emb.inv_freq";
    for (size_t i = 0; i < folder->count; i++) {
        if (list[i].used) continue;
        const size_t length = strlen(list[i].name), tail = sizeof(inv_freq) - 1;
        if (length >= tail && !strcmp(list[i].name + length - tail, inv_freq)) continue;
        if (model->config.tied && !strcmp(list[i].name, "lm_head.weight")) {
            sw_info("%s: lm_head.weight is ignored: the head is tied to the embedding", model->dir);
            continue;
        }
        sw_error("%s: tensor '%s' is not part of the model that config.json describes",
                 list[i].at.file->path, list[i].name);
        return -EINVAL;
    }
    return 0;
}

int sw_weights_open(struct sw_model *model, json_t *root) {
    assert(model->units && !model->weights);
    struct sw_weights *weights = calloc(1, sizeof(*weights));
    if (!weights) {
        json_decref(root);
        return -ENOMEM;
    }
    weights->config = root;
    sw_companions_open(&weights->companions, model->dir);
    int ret = sw_tensor_folder_open(&weights->folder, model->dir, SINGLE_NAME, INDEX_NAME);
    if (ret == 0) {
        weights->places = calloc(model->unit_count, sizeof(*weights->places));
        ret = weights->places ? place_tensors(model, weights) : -ENOMEM;
    }
    if (ret == 0) ret = check_leftover(model, &weights->folder);
    if (ret < 0) {
        sw_weights_close(weights);
        return ret;
    }
    sw_tensor_folder_forget(&weights->folder);
    model->weights = weights;
    return 0;
}

void sw_weights_close(struct sw_weights *weights) {
    if (!weights) return;
    sw_tensor_folder_close(&weights->folder);
    sw_companions_close(&weights->companions);
    free(weights->places);
    json_decref(weights->config);
    free(weights);
}
