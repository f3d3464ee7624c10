/* tools/cmd_inspect.c - spillway inspect: what a model folder holds, after all the checks of a run,
 * and the last commits of the stores in it. */
#include "tools/commands.h"

#include <inttypes.h>
#include <jansson.h>
#include <stddef.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"
#include "base/size.h"
#include "engine/collective.h"
#include "engine/model.h"
#include "engine/process_name.h"
#include "nvme/commit.h"
#include "tools/command_line.h"

struct inspect_options {
    int json;
};

static const struct sw_option options_table[] = {
    {.name = "json",
     .section = "Options",
     .help = "one JSON object",
     .kind = SW_OPTION_FLAG,
     .offset = offsetof(struct inspect_options, json)},
    SW_OPTION_HELP("Options"),
};

static const struct sw_command command = {
    .name = "inspect",
    .usage = "inspect DIR [--json]",
    .summary =
        "Checks a model folder and shows its configuration, units and files; of a run's stores "
        "the last commits.",
    .operand = "DIR",
    .options = options_table,
    .option_count = sizeof(options_table) / sizeof(options_table[0]),
};

static const char *rope_name(enum sw_rope_kind kind) {
    static const char *const names[] = {"default", "linear", "llama3"};
    return names[kind];
}

static json_t *config_json(const struct sw_model_config *c) {
    json_t *rope =
        json_pack("{s:s,s:f}", "rope_type", rope_name(c->rope_kind), "rope_theta", c->rope_theta);
    if (c->rope_kind != SW_ROPE_PLAIN)
        json_object_set_new(rope, "factor", json_real(c->rope_factor));
    if (c->rope_kind == SW_ROPE_LLAMA3) {
        json_object_set_new(rope, "low_freq_factor", json_real(c->rope_low_freq_factor));
        json_object_set_new(rope, "high_freq_factor", json_real(c->rope_high_freq_factor));
        json_object_set_new(rope, "original_max_position_embeddings",
                            json_real(c->rope_original_positions));
    }
    return json_pack("{s:s,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:b,s:f,s:o}", "model_type",
                     c->model_type, "hidden_size", (json_int_t)c->hidden, "intermediate_size",
                     (json_int_t)c->intermediate, "num_hidden_layers", (json_int_t)c->layers,
                     "num_attention_heads", (json_int_t)c->heads, "num_key_value_heads",
                     (json_int_t)c->kv_heads, "head_dim", (json_int_t)c->head_dim, "vocab_size",
                     (json_int_t)c->vocab, "max_position_embeddings", (json_int_t)c->max_positions,
                     "tie_word_embeddings", c->tied, "rms_norm_eps", (double)c->rms_eps,
                     "rope_parameters", rope);
}

static json_t *model_json(const struct sw_model *model) {
    json_t *units = json_array(), *files = json_array();
    for (uint32_t i = 0; i < model->unit_count; i++) {
        const struct sw_unit *unit = &model->units[i];
        json_array_append_new(units, json_pack("{s:s,s:I,s:I,s:I}", "name", unit->name, "tensors",
                                               (json_int_t)unit->tensor_count, "parameters",
                                               (json_int_t)unit->params, "padded",
                                               (json_int_t)unit->count));
    }
    for (uint32_t i = 0; i < sw_model_file_count(model); i++) {
        const struct sw_model_file file = sw_model_file(model, i);
        json_array_append_new(files, json_pack("{s:s,s:s,s:I,s:I}", "name", file.name, "dtype",
                                               file.dtype, "bytes", (json_int_t)file.bytes,
                                               "tensors", (json_int_t)file.tensors));
    }
    char hash[17];
    snprintf(hash, sizeof(hash), "%016" PRIx64, sw_model_fingerprint(model));
    return json_pack("{s:s,s:o,s:I,s:o,s:o,s:s}", "model", model->dir, "config",
                     config_json(&model->config), "parameters", (json_int_t)model->params, "units",
                     units, "files", files, "fingerprint", hash);
}

static void print_text(const struct sw_model *model) {
    const struct sw_model_config *c = &model->config;
    char a[32], b[32], d[32];
    printf("%s: %s, %" PRIu64 " parameters\n\n", model->dir, c->model_type, model->params);
    printf("  hidden %" PRIu32 ", intermediate %" PRIu32 ", layers %" PRIu32 ", heads %" PRIu32
           " (%" PRIu32 " key/value) of %" PRIu32 "\n",
           c->hidden, c->intermediate, c->layers, c->heads, c->kv_heads, c->head_dim);
    printf("  vocabulary %" PRIu32 ", positions %" PRIu32 ", head %s, rms_norm_eps %g\n", c->vocab,
           c->max_positions, c->tied ? "tied to the embedding" : "of its own", (double)c->rms_eps);
    printf("  rope %s, theta %g", rope_name(c->rope_kind), c->rope_theta);
    if (c->rope_kind != SW_ROPE_PLAIN) printf(", factor %g", c->rope_factor);
    printf("\n\n  %-18s %8s %14s %12s %12s %12s\n", "unit", "tensors", "parameters", "bf16", "fp32",
           "Adam state");
    for (uint32_t i = 0; i < model->unit_count; i++) {
        const struct sw_unit *unit = &model->units[i];
        printf("  %-18s %8" PRIu32 " %14" PRIu64 " %12s %12s %12s\n", unit->name,
               unit->tensor_count, unit->params, sw_size_print(2 * unit->params, a, sizeof(a)),
               sw_size_print(4 * unit->params, b, sizeof(b)),
               sw_size_print(12 * unit->params, d, sizeof(d)));
    }
    printf("  %-18s %8s %14" PRIu64 " %12s %12s %12s\n\n", "all", "", model->params,
           sw_size_print(2 * model->params, a, sizeof(a)),
           sw_size_print(4 * model->params, b, sizeof(b)),
           sw_size_print(12 * model->params, d, sizeof(d)));
    for (uint32_t i = 0; i < sw_model_file_count(model); i++) {
        const struct sw_model_file file = sw_model_file(model, i);
        printf("  %s: %s, %" PRIu32 " tensors, %s\n", file.name, file.dtype, file.tensors,
               sw_size_print(file.bytes, a, sizeof(a)));
    }
}

/* ---- a store ---- */

static json_t *identity_json(const char *lines) {
    json_t *out = json_object();
    while (*lines) {
        const size_t line = strcspn(lines, "\n"), name = strcspn(lines, "=");
        if (name < line) {
            char key[64];
            snprintf(key, sizeof(key), "%.*s", (int)name, lines);
            json_object_set_new(out, key, json_stringn_nocheck(lines + name + 1, line - name - 1));
        }
        lines += line + (lines[line] == '\n');
    }
    return out;
}

static const char *owner_state(uint64_t pid) {
    if (kill((pid_t)pid, 0) == 0 || errno == EPERM) return "there is a process of that number now";
    return "no longer running";
}

static uint32_t virgin_chunks(const struct sw_commit *commit) {
    uint32_t count = 0;
    for (uint32_t c = 0; c < commit->chunk_count; c++)
        count += commit->entries[c].home == SW_HOME_VIRGIN;
    return count;
}

static const char *written_at(const struct sw_commit *c, char *out, size_t out_size) {
    const time_t at = (time_t)c->time_unix_s;
    struct tm utc;
    strftime(out, out_size, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&at, &utc));
    return out;
}

/* The last commits of a run in a folder, one of each process that keeps its store there. */
struct stores {
    struct sw_commit commits[SW_RANKS_MAX];
    uint32_t processes[SW_RANKS_MAX];
    uint32_t count;
};

static int find_stores(struct stores *s, const char *dir) {
    char name[SW_PROCESS_NAME_BYTES];
    s->count = 0;
    for (uint32_t p = 0; p < SW_RANKS_MAX; p++) {
        const int ret =
            sw_commit_read(dir, sw_process_name(SW_STORE_NAME, p, name), &s->commits[s->count]);
        if (ret < 0) return ret;
        if (ret == 1) s->processes[s->count++] = p;
    }
    return 0;
}

static void free_stores(struct stores *s) {
    for (uint32_t i = 0; i < s->count; i++) free(s->commits[i].entries);
}

static json_t *store_json(const char *dir, const struct sw_commit *c, uint32_t process) {
    char when[64], id[24];
    snprintf(id, sizeof(id), "%016" PRIx64, c->run);
    return json_pack("{s:s,s:s,s:I,s:I,s:I,s:I,s:I,s:s,s:s,s:I,s:I,s:I,s:o}", "store", dir,
                     "run_id", id, "process", (json_int_t)process, "processes",
                     (json_int_t)c->processes, "commit", (json_int_t)c->number, "step",
                     (json_int_t)c->step, "updates", (json_int_t)c->updates, "run", c->note, "time",
                     written_at(c, when, sizeof(when)), "owner_pid", (json_int_t)c->owner_pid,
                     "chunks", (json_int_t)c->chunk_count, "virgin_chunks",
                     (json_int_t)virgin_chunks(c), "identity", identity_json(c->identity));
}

static json_t *stores_json(const char *dir, const struct stores *s) {
    json_t *first = store_json(dir, &s->commits[0], s->processes[0]), *others = json_array();
    for (uint32_t i = 1; i < s->count; i++)
        json_array_append_new(others, store_json(dir, &s->commits[i], s->processes[i]));
    json_object_set_new(first, "other_processes", others);
    return first;
}

static void print_commit(const struct sw_commit *c) {
    char when[64];
    printf("  %s\n", c->note);
    printf("  commit %" PRIu64 ", %" PRIu64 " updates, at %s\n", c->number, c->updates,
           written_at(c, when, sizeof(when)));
    printf("  run %016" PRIx64 ", process %" PRIu32 " of %" PRIu32 "\n", c->run, c->process,
           c->processes);
    printf("  written by process %" PRIu64 " (%s)\n", c->owner_pid, owner_state(c->owner_pid));
    printf("  %" PRIu32 " chunks, %" PRIu32 " never updated\n", c->chunk_count, virgin_chunks(c));
}

static void print_stores(const char *dir, const struct stores *s) {
    printf("%s: the optimizer state of a run\n", dir);
    for (uint32_t i = 0; i < s->count; i++) {
        if (s->processes[s->count - 1] > 0)
            printf("\n  process %" PRIu32 " of the run\n", s->processes[i]);
        else
            putchar('\n');
        print_commit(&s->commits[i]);
    }
    if (s->count > 1) putchar('\n');
    for (const char *line = s->commits[0].identity; *line;) {
        const int length = (int)strcspn(line, "\n");
        printf("  %.*s\n", length, line);
        line += length + (line[length] == '\n');
    }
}

static void print_json(const struct sw_model *model, const char *dir, const struct stores *s) {
    json_t *root = model ? model_json(model) : stores_json(dir, s);
    if (model && s->count) json_object_set_new(root, "store", stores_json(dir, s));
    json_object_set_new(root, "schema", json_integer(1));
    json_dumpf(root, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(7));
    putchar('\n');
    json_decref(root);
}

/* What lies in the folder: a model, the stores of a run, or both. */
static int inspect_with(struct stores *stores, const char *dir, int json) {
    char config[4096];
    struct sw_model opened, *model = NULL;
    snprintf(config, sizeof(config), "%s/config.json", dir);
    if (stores->count == 0 || access(config, F_OK) == 0) {
        const int ret = sw_model_open(&opened, dir);
        if (ret < 0) return ret;
        model = &opened;
    }
    if (json) print_json(model, dir, stores);
    if (!json && model) print_text(model);
    if (!json && model && stores->count) putchar('\n');
    if (!json && stores->count) print_stores(dir, stores);
    if (model) sw_model_close(model);
    return 0;
}

static int inspect(const char *dir, int json) {
    struct stores *stores = calloc(1, sizeof(*stores));
    if (!stores) return -ENOMEM;
    int ret = find_stores(stores, dir);
    if (ret == 0) ret = inspect_with(stores, dir, json);
    free_stores(stores);
    free(stores);
    return ret;
}

int sw_cmd_inspect(int argc, char **argv) {
    struct inspect_options options = {0};
    struct sw_parsed parsed;
    int status = SW_EXIT_OK;
    const int parse = sw_options_parse(&command, argc, argv, &options, &parsed);
    if (parse < 0) status = SW_EXIT_USAGE;
    if (parse == 0 && inspect(parsed.operand, options.json) < 0) status = SW_EXIT_FAILED;
    sw_parsed_close(&parsed);
    return status;
}
