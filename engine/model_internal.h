/* engine/model_internal.h - what the files of the model share: the parsed configuration text and
 * the mapped weight files. */
#ifndef ENGINE_MODEL_INTERNAL_H
#define ENGINE_MODEL_INTERNAL_H
#include <jansson.h>
#include "engine/companions.h"
#include "engine/model.h"
#include "engine/tensor_folder.h"

struct sw_weights {
    json_t *config; /* config.json as it was read: the source of a saved folder's */
    struct sw_tensor_folder folder;
    struct sw_companions companions;
    struct sw_weight (*places)[SW_TENSORS_PER_UNIT_MAX]; /* [unit][tensor] */
};

/* Fills config from the JSON object of `path` (named in errors). */
int sw_model_parse_config(struct sw_model_config *config, const json_t *root, const char *path);

/* Opens a configuration and hands over its JSON, which the caller releases. parts: how many the
 * vocabulary is cut into, SW_MODEL_PARTS_BY_RULE (what all but tests ask for) or 1 to
 * SW_PARTS_MAX; fewer come of it where rounding the rows up would leave a part empty. */
enum { SW_MODEL_PARTS_BY_RULE = 0 };
int sw_model_open_json(struct sw_model *model, const char *path, uint32_t parts, json_t **root);

/* sw_model_read() of what `places` has in the place of the weights; beyond the unit's end, where
 * ranks pad their shards, all is 0. */
void sw_model_read_places(const struct sw_model *model,
                          struct sw_weight (*places)[SW_TENSORS_PER_UNIT_MAX], uint32_t unit,
                          uint64_t first, uint64_t count, float *out);

/* sw_model_open() with the cut given. */
int sw_model_open_cut(struct sw_model *model, const char *dir, uint32_t parts);

/* The rows that tensors[i] of a unit has as a whole, in the files. */
static inline uint64_t sw_model_source_rows(const struct sw_model *model, uint32_t unit,
                                            uint32_t i) {
    const struct sw_unit *u = &model->units[unit];
    const int is_part = u->kind == SW_UNIT_EMBED || u->kind == SW_UNIT_HEAD;
    return is_part ? model->config.vocab : u->tensors[i].rows;
}

enum { SW_TENSOR_ALIGN = 128 }; /* elements: 256 bytes in BF16 */

/* Gives the tensors of a unit their places: what is trained, then from frozen_first on, if anything
 * is frozen, the rest. */
void sw_unit_lay_out(struct sw_unit *unit, uint64_t frozen_first);

/* Opens, checks and places the files of model->dir; takes over root. model is unchanged on failure,
 * where root is released. */
int sw_weights_open(struct sw_model *model, json_t *root);
void sw_weights_close(struct sw_weights *weights);

/* "DIR/NAME", to be freed; NULL without memory. */
char *sw_model_path(const char *dir, const char *name);

/* sw_model_save() with the configuration, the files to carry along (NULL: none) and the limit of a
 * shard given. */
int sw_model_write(const struct sw_model *model, const json_t *config,
                   const struct sw_companions *companions, const char *dir, enum sw_dtype dtype,
                   uint64_t shard_bytes_max, sw_model_fetch fetch, void *ctx);

#endif
