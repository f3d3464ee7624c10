/* engine/trainer_agree.c - whether all processes of a run were asked for the same.
 *
 * Each writes what it was asked for as lines of "name=value", options first: the first line that
 * differs is told, so what only follows from an option stands behind it. Files are compared by
 * their contents, as machines may have them in different places, and told by their paths. */
#include "engine/trainer_internal.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/log.h"

enum { TEXT_BYTES = SW_COMMIT_IDENTITY_BYTES + 4096 };

struct text {
    char lines[TEXT_BYTES];
    size_t used;
};

static void put(struct text *text, const char *name, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static void put(struct text *text, const char *name, const char *format, ...) {
    va_list args;
    text->used += (size_t)snprintf(text->lines + text->used, TEXT_BYTES - text->used, "%s=", name);
    assert(text->used < TEXT_BYTES);
    va_start(args, format);
    text->used +=
        (size_t)vsnprintf(text->lines + text->used, TEXT_BYTES - text->used, format, args);
    va_end(args);
    assert(text->used + 1 < TEXT_BYTES);
    text->lines[text->used++] = '\n';
    text->lines[text->used] = '\0';
}

/* As short as it can be without being another number. */
static void put_real(struct text *text, const char *name, double value) {
    char number[32];
    int digits = 6;
    do {
        snprintf(number, sizeof(number), "%.*g", digits++, value);
    } while (digits <= 17 && strtod(number, NULL) != value);
    put(text, name, "%s", number);
}

static void put_count(struct text *text, const char *name, uint64_t value) {
    put(text, name, "%" PRIu64, value);
}

static void put_given(struct text *text, const char *name, int given) {
    put(text, name, "%s", given ? "given" : "not given");
}

static void put_hash(struct text *text, const char *name, uint64_t hash) {
    if (hash)
        put(text, name, "%016" PRIx64, hash);
    else
        put(text, name, "none");
}

/* ---- telling ---- */

/* What the others do not know of a process: where it runs, and the file that the option names. */
struct who {
    char host[64], path[192];
};

static const char *path_of(const struct sw_trainer *t, const char *name) {
    const struct sw_train_options *o = &t->options;
    const struct {
        const char *name, *path;
    } files[] = {{"--model", o->model},         {"--data", o->data}, {"--mask", o->mask},
                 {"--documents", o->documents}, {"--val", o->val},   {"--import", o->import_dir}};
    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++)
        if (strcmp(name, files[i].name) == 0) return files[i].path ? files[i].path : "";
    return "";
}

/* "process 1 on host-b: /data/mask (4711)" */
static void describe(uint32_t process, const struct who *who, const char *line, char *out,
                     size_t size) {
    const char *equals = strchr(line, '='), *value = equals ? equals + 1 : "no such setting";
    if (who->path[0])
        snprintf(out, size, "process %u on %s: %s (%s)", process, who->host, who->path, value);
    else
        snprintf(out, size, "process %u on %s: %s", process, who->host, value);
}

static int tell(struct sw_trainer *t, const struct sw_difference *d) {
    struct who all[SW_RANKS_MAX], mine = {{0}, {0}};
    const struct sw_comm_handle *c = &t->channels[CHANNEL_MAIN];
    const char *line = d->lines[*d->lines[0] ? 0 : 1];
    char name[64], text[2][1024];
    snprintf(name, sizeof(name), "%.*s", (int)strcspn(line, "="), line);
    gethostname(mine.host, sizeof(mine.host) - 1);
    snprintf(mine.path, sizeof(mine.path), "%s", path_of(t, name));
    const int ret = sw_trainer_share(t, CHANNEL_MAIN, all, &mine, sizeof(mine));
    if (ret < 0 || t->first_rank != 0) return ret < 0 ? ret : -EINVAL;
    describe(0, &all[0], d->lines[0], text[0], sizeof(text[0]));
    describe(d->rank, &all[d->rank], d->lines[1], text[1], sizeof(text[1]));
    sw_error("all processes must be asked for the same run, and %s differs: %s; %s", name, text[0],
             text[1]);
    c->ops->abort(c->comm, -EINVAL);
    return -EINVAL;
}

static int compare(struct sw_trainer *t, const struct text *text) {
    struct sw_difference difference;
    const int ret = sw_comm_compare(&t->channels[CHANNEL_MAIN], text->lines, &difference);
    return ret == 1 ? tell(t, &difference) : ret;
}

/* ---- what is compared ---- */

int sw_trainer_agree_to_meet(struct sw_trainer *t) {
    const struct sw_train_options *o = &t->options;
    struct text text = {.used = 0};
    put_count(&text, "--ranks", o->ranks);
    put_given(&text, "--resume", o->resume);
    put_given(&text, "--restart", o->restart);
    put_given(&text, "--import", o->import_dir != NULL);
    /* What groups of GPUs are made of. */
    put(&text, "--shard", "%s", o->shard_in_node ? "node" : "world");
    put(&text, "--reduce-dtype", "%s", sw_dtype_name(o->reduce_dtype));
    return compare(t, &text);
}

static void put_numerics(struct sw_trainer *t, struct text *text) {
    const struct sw_train_options *o = &t->options;
    uint64_t hashes[SW_DATA_FILES];
    static const char *const files[SW_DATA_FILES] = {"--data", "--mask", "--documents"};
    put(text, "--model", "%016" PRIx64 "-%016" PRIx64, t->run.model[0], t->run.model[1]);
    sw_data_hash_files(&t->data, hashes);
    for (int i = 0; i < SW_DATA_FILES; i++) put_hash(text, files[i], hashes[i]);
    put_count(text, "--seq-len", o->seq_len);
    put_count(text, "--micro-batch", o->micro_batch);
    put_count(text, "--accumulate", o->accumulate);
    put(text, "--order", "%s", sw_order_name(o->order));
    put_count(text, "--seed", o->seed);
    put(text, "--freeze", "%s", o->freeze ? o->freeze : "none");
    put(text, "--dtype", "%s", sw_dtype_name(o->dtype));
    put(text, "--grad-dtype", "%s", sw_dtype_name(o->grad_dtype));
    put(text, "--reduce-dtype", "%s", sw_dtype_name(o->reduce_dtype));
    put(text, "--master", "%s", sw_master_name(o->master));
    put(text, "--moments", "%s", sw_moments_name(o->moments));
    put_count(text, "--chunk", o->chunk_bytes);
    put(text, "--shard", "%s", o->shard_in_node ? "node" : "world");
}

static void put_optimizer(const struct sw_train_options *o, struct text *text) {
    static const char *const schedules[] = {"constant", "linear", "cosine"};
    put_count(text, "--steps", o->steps);
    put_real(text, "--lr", o->lr);
    put_real(text, "--min-lr", o->min_lr);
    put(text, "--schedule", "%s", schedules[o->schedule]);
    put(text, "--warmup", "%" PRId64, o->warmup);
    put_real(text, "--weight-decay", o->weight_decay);
    put(text, "--decay", "%s", o->decay == SW_DECAY_MATRICES ? "matrices" : "all");
    put_real(text, "--beta1", o->beta1);
    put_real(text, "--beta2", o->beta2);
    put_real(text, "--eps", o->eps);
    put_real(text, "--clip", o->clip);
    put_count(text, "--max-skips", o->max_skips);
}

int sw_trainer_agree(struct sw_trainer *t) {
    const struct sw_train_options *o = &t->options;
    struct text text = {.used = 0};
    if (!t->world) return 0;
    put_numerics(t, &text);
    put_optimizer(o, &text);
    if (t->import)
        put(&text, "--import", SW_EXPORT_ORIGIN_FORMAT, t->import->run,
            (unsigned long long)t->import->step);
    put(&text, "--zero", "%" PRId64, o->zero);
    put(&text, "--overlap", "%s", sw_overlap_name(o->overlap));
    put(&text, "--late-below", "%" PRId64, o->late_below);
    put(&text, "--late-top", "%" PRId64, o->late_top);
    put_count(&text, "--checkpoint-every", o->checkpoint_every);
    put(&text, "--commit-every", "%" PRId64, o->commit_every);
    put_count(&text, "--save-every", o->save_every);
    put_count(&text, "--eval-every", o->eval_every);
    put_hash(&text, "--val", t->val_open ? sw_data_fingerprint(&t->val) : 0);
    put_given(&text, "--keep-store", o->keep_store);
    put_given(&text, "--digest", o->digest);
    put_given(&text, "--dry-run", o->dry_run);
    put_count(&text, "folders of --nvme", t->run.folders);
    put(&text, "numerics key", "%s", t->run.key);
    /* What follows from placements and budgets. */
    put_count(&text, "the number of chunks", t->placement.chunk_count);
    put_count(&text, "the window that --device-memory leaves",
              t->placement.ring_slots[SW_RING_WINDOW]);
    put_count(&text, "the whole head that --device-memory leaves",
              (uint64_t)t->placement.head_whole);
    text.used +=
        (size_t)snprintf(text.lines + text.used, TEXT_BYTES - text.used, "%s", t->identity);
    assert(text.used < TEXT_BYTES);
    return compare(t, &text);
}
