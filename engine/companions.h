/* engine/companions.h - the files of a model folder that a saved model carries along as they are:
 * they belong to the model whatever its weights.
 *
 * They are opened with the model, so that a folder that is moved or removed while it is trained
 * loses nothing. One thread. Errors: 0 or -errno, reported. */
#ifndef ENGINE_COMPANIONS_H
#define ENGINE_COMPANIONS_H
#include <stdint.h>
#include "engine/new_files.h"

enum { SW_COMPANIONS_MAX = 10 };

struct sw_companions {
    int fds[SW_COMPANIONS_MAX]; /* -1: there is none */
};

/* One that is there and cannot be read is left out, with a warning. */
void sw_companions_open(struct sw_companions *companions, const char *dir);
void sw_companions_close(struct sw_companions *companions);

/* Adds them to what comes to files->dir, but for those that are there already. */
int sw_companions_copy(const struct sw_companions *companions, struct sw_new_files *files);

/* What they take on disk, rounded up. */
uint64_t sw_companions_bytes(const struct sw_companions *companions);

/* Whether a file of this name is one. */
int sw_companions_has(const char *name);

#endif
