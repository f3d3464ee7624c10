/* engine/result.c - see the header. */
#include "engine/result.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/log.h"
#include "engine/model_internal.h"
#include "engine/new_files.h"

enum { SCHEMA = 1 };

static json_t *lines_json(const char *lines) {
    json_t *array = json_array();
    while (array && *lines) {
        const size_t length = strcspn(lines, "\n");
        json_array_append_new(array, json_stringn(lines, length));
        lines += length + (lines[length] == '\n');
    }
    return array;
}

int sw_result_write(const char *out, const struct sw_result *result) {
    struct sw_new_files files;
    char run[24];
    snprintf(run, sizeof(run), "%016" PRIx64, result->run);
    json_t *root = json_pack("{s:i,s:s,s:I,s:o}", "schema", SCHEMA, "run", run, "step",
                             (json_int_t)result->step, "identity", lines_json(result->identity));
    int ret = root ? sw_new_files_open(&files, out, 1) : -ENOMEM;
    if (ret == 0) {
        ret = sw_new_files_write_json(&files, SW_RESULT_NAME, root);
        if (ret == 0) ret = sw_new_files_rename(&files, 0, files.count);
        if (ret == 0) ret = sw_new_files_sync(&files);
        if (ret < 0) sw_new_files_drop(&files);
        sw_new_files_close(&files);
    }
    json_decref(root);
    return ret;
}

/* What another tool has changed into something else is no result of this program's. */
static int parse(const json_t *root, struct sw_result *result) {
    const json_t *lines = json_object_get(root, "identity"), *step = json_object_get(root, "step");
    const char *run = json_string_value(json_object_get(root, "run"));
    size_t i, used = 0;
    json_t *value;
    if (json_integer_value(json_object_get(root, "schema")) != SCHEMA || !json_is_integer(step) ||
        !run || sscanf(run, "%16" SCNx64, &result->run) != 1 || !json_is_array(lines))
        return 0;
    result->step = (uint64_t)json_integer_value(step);
    result->identity[0] = '\0';
    json_array_foreach(lines, i, value) {
        const char *line = json_string_value(value);
        if (!line || used + strlen(line) + 2 > sizeof(result->identity)) return 0;
        used += (size_t)sprintf(result->identity + used, "%s\n", line);
    }
    return 1;
}

int sw_result_read(const char *out, struct sw_result *result) {
    char *path = sw_model_path(out, SW_RESULT_NAME);
    if (!path) return -ENOMEM;
    json_error_t error;
    int ret = 0;
    if (access(path, F_OK) == 0) {
        json_t *root = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
        ret = root && parse(root, result) ? 1 : -EINVAL;
        json_decref(root);
        if (ret < 0)
            sw_error("%s cannot be understood%s%s: it tells which run the model beside it is the "
                     "result of; remove it if that is this one's",
                     path, root ? "" : ": ", root ? "" : error.text);
    }
    free(path);
    return ret;
}
