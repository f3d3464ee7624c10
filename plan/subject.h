/* plan/subject.h - the model that a plan is about: one in files, a shape by its published name, or
 * nothing but a count of parameters. */
#ifndef PLAN_SUBJECT_H
#define PLAN_SUBJECT_H
#include <stdint.h>
#include "engine/model.h"

enum sw_subject_kind { SW_SUBJECT_FILES, SW_SUBJECT_SHAPE, SW_SUBJECT_COUNT };

struct sw_subject {
    enum sw_subject_kind kind;
    char name[4096];
    const char *shape; /* the named shape, or the one nearest to a bare count; NULL: the files' */
    struct sw_model model; /* the engine's units of it, as a run would have them */
    uint64_t params;       /* as published, or as counted; of a bare count the count itself */
    /* Of those, biases of query, key and value, which the engine has no place for: it refuses a
     * model that has them. */
    uint64_t bias_params;
};

/* A path wins over a name, a name over a count ("7B", "1.5b", "350M"). 0 or -errno, reported. */
int sw_subject_open(struct sw_subject *out, const char *text);
void sw_subject_close(struct sw_subject *subject);

/* The i-th named shape; NULL behind the last. */
const char *sw_subject_shape(int i);

/* How many times as large as its units it is: 1, but for a bare count. */
double sw_subject_scale(const struct sw_subject *subject);

#endif
