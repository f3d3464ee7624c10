/* tools/cmd_bench_model.c - `spillway bench model`: what this machine's device takes for the
 * operations of a model, kept in the machine profile for plans of it. */
#include "tools/bench.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "engine/collective.h"
#include "offload/profile.h"
#include "plan/subject.h"
#include "tools/bench_device.h"
#include "tools/command_line.h"

struct options {
    double seconds;
    int json;
    const char *profile;
    uint32_t seq_len, micro_batch, ranks;
    enum sw_dtype dtype;
};

static const char *const dtypes[] = {"bf16", "fp32", NULL};

static const struct sw_option options_table[] = {
    {.name = "seq-len",
     .value = "N",
     .section = "Options",
     .help = "tokens of a row",
     .fallback = "512, or the model's limit",
     .kind = SW_OPTION_COUNT,
     .marks = SW_UNSET,
     .offset = offsetof(struct options, seq_len),
     .min = 1,
     .max = 1 << 24},
    {.name = "micro-batch",
     .value = "N",
     .section = "Options",
     .help = "rows at once",
     .fallback = "1",
     .kind = SW_OPTION_COUNT,
     .offset = offsetof(struct options, micro_batch),
     .min = 1,
     .max = 65536},
    {.name = "ranks",
     .value = "N",
     .section = "Options",
     .help = "ranks that share the CPU where it is the device, all measured at once",
     .fallback = "1",
     .kind = SW_OPTION_COUNT,
     .offset = offsetof(struct options, ranks),
     .min = 1,
     .max = SW_RANKS_MAX},
    {.name = "dtype",
     .value = "NAME",
     .section = "Options",
     .help = "bf16 or fp32",
     .fallback = "bf16",
     .kind = SW_OPTION_CHOICE,
     .offset = offsetof(struct options, dtype),
     .choices = dtypes},
    SW_BENCH_OPTION_SECONDS("all of it ", "10"),
    SW_BENCH_OPTION_PROFILE,
    SW_BENCH_OPTION_JSON,
    SW_OPTION_HELP("Options"),
};

static const struct sw_command command = {
    .name = "bench model",
    .usage = "bench model MODEL [--seq-len N] [--micro-batch N] [--ranks N] [--dtype NAME]\n"
             "                                   [--json]",
    .operand = "MODEL",
    .summary =
        "Times the operations of a model's units on this machine's device, each alone, on random\n"
        "numbers: a layer there and back, the embedding, the norm, the head. On the CPU the teams\n"
        "of a run's other lanes stand beside it. MODEL is a folder, a config.json or a shape that\n"
        "plan knows. The times are kept in the machine profile beside those of bench all; a plan "
        "of\n"
        "a model of these units, with these rows, takes them instead of counting operations.",
    .options = options_table,
    .option_count = sizeof(options_table) / sizeof(options_table[0]),
};

static json_t *times_json(const struct sw_machine_model *m) {
    json_t *times = json_object();
    const char *name;
    double value;
    for (int i = 0; (name = sw_machine_model_figure(m, i, &value)); i++)
        json_object_set_new(times, name, json_real(value));
    return times;
}

static void print(const struct sw_machine_model *m) {
    const char *name;
    double value;
    printf("%s\n", m->key);
    for (int i = 0; (name = sw_machine_model_figure(m, i, &value)); i++)
        if (strcmp(name, "cpus")) printf("  %-18s %10.4g ms\n", name, 1e3 * value);
    printf("  %-18s %10.4g\n", "CPUs kept busy", m->cpus);
}

static int keep(const struct options *o, const struct sw_machine_model *m) {
    char path[PATH_MAX];
    json_t *keys = json_pack("{s:{s:o}}", "models", m->key, times_json(m));
    int ret = keys ? sw_profile_merge(keys) : -ENOMEM;
    if (ret == 0 && o->json) {
        json_t *root =
            json_pack("{s:i, s:s, s:o}", "schema", 1, "key", m->key, "times", times_json(m));
        json_dumpf(root, stdout, JSON_INDENT(2));
        putchar('\n');
        json_decref(root);
    } else if (ret == 0) {
        print(m);
    }
    json_decref(keys);
    sw_profile_path(path, sizeof(path));
    if (ret == 0 && *path) sw_info("bench model: kept in '%s'", path);
    return ret;
}

static int measure_on(const struct options *o, const struct sw_model *model, int on_gpu,
                      struct sw_machine_model *times) {
    struct sw_device_handle devices[SW_RANKS_MAX];
    struct sw_topology topology;
    struct sw_bench_model what = {.model = model,
                                  .dtype = o->dtype,
                                  .batch = o->micro_batch,
                                  .time = o->seq_len,
                                  .ranks = on_gpu ? 1 : o->ranks,
                                  .seconds = o->seconds};
    uint32_t opened = 0;
    int ret = sw_topology_read(&topology);
    while (ret == 0 && opened < what.ranks) {
        ret = sw_bench_device_open(&topology, on_gpu, opened, what.ranks, &devices[opened]);
        opened += ret == 0;
    }
    if (ret == 0 && !on_gpu) what.threads = sw_bench_device_threads(&topology, what.ranks);
    sw_bench_watch_signals();
    if (ret == 0) ret = sw_bench_model(devices, &what, times);
    while (opened-- > 0) devices[opened].ops->close(devices[opened].device);
    return ret;
}

static int measure(struct options *o, const struct sw_model *model) {
    struct sw_machine_model times = {0};
    const int on_gpu = sw_device_cuda_usable() > 0;
    const uint32_t limit = model->config.max_positions;
    if (o->seq_len > limit) {
        sw_error("--seq-len %u: the model's limit is %u", o->seq_len, limit);
        return -EINVAL;
    }
    if (o->seq_len == 0) o->seq_len = limit < 512 ? limit : 512;
    const struct sw_train_options key = {.dtype = o->dtype,
                                         .micro_batch = o->micro_batch,
                                         .seq_len = o->seq_len,
                                         .ranks = o->ranks,
                                         .device = on_gpu ? SW_DEVICE_CUDA : SW_DEVICE_HOST};
    sw_machine_model_key(&model->config, &key, times.key, sizeof(times.key));
    const int ret = measure_on(o, model, on_gpu, &times);
    return ret < 0 ? ret : keep(o, &times);
}

int sw_cmd_bench_model(int argc, char **argv) {
    struct options o = {.seconds = 10, .micro_batch = 1, .ranks = 1};
    struct sw_parsed parsed;
    struct sw_subject subject;
    const int ret = sw_options_parse(&command, argc, argv, &o, &parsed);
    int status = ret > 0 ? SW_EXIT_OK : SW_EXIT_USAGE;
    if (ret == 0) {
        if (o.profile) setenv("SPILLWAY_PROFILE", o.profile, 1);
        status = SW_EXIT_FAILED;
        if (sw_subject_open(&subject, parsed.operand) == 0) {
            const int done = measure(&o, &subject.model);
            status = done == -EINTR    ? 128 + sw_bench_stopped()
                     : done == -EINVAL ? SW_EXIT_USAGE
                     : done < 0        ? SW_EXIT_FAILED
                                       : SW_EXIT_OK;
            sw_subject_close(&subject);
        }
    }
    sw_parsed_close(&parsed);
    return status;
}
