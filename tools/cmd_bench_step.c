/* tools/cmd_bench_step.c - `spillway bench step`: what sets the time of a step, by real runs whose
 * lanes are held to rates, one of which is swept; beside what the simulator says of the same lines
 * before the first of them runs. */
#include "tools/bench.h"

#include <errno.h>
#include <ftw.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "engine/output.h"
#include "plan/simulate.h"
#include "tools/command_line.h"
#include "tools/plan_sweep.h"
#include "tools/step_run.h"

enum { WORDS_MAX = 64, SEQ_LEN = 128, MICRO_BATCHES = 2, TOKENS = 1 << 14 };

/* What a run takes beside its steps: to start, to make its store, to load. */
#define START_S 0.5

/* How long each lane takes of a step at the case's own rates, so that each can be the clock. */
#define COMPUTE_S 0.2
#define COPIES_S  0.16
#define DRIVES_S  0.12
#define ADAM_S    0.08

struct options {
    const char *sweep, *model, *scratch, *page;
    uint64_t steps;
    uint32_t points;
    struct sw_sim_rates sim;
    int json;
};

struct bench {
    struct options options;
    struct sw_sweep_range range;
    double own;
    char scratch[PATH_MAX], model[PATH_MAX]; /* scratch: "": there is none */
    char data[PATH_MAX], out[PATH_MAX], log[PATH_MAX], said[PATH_MAX];
    struct sw_subject subject;
    struct sw_machine machine;
    struct sw_plan_case c;
    struct sw_plan_step step;
    struct sw_sweep predicted, measured;
    char about[256], last_words[PATH_MAX + 64];
};

static const struct sw_option options_table[] = {
    {.name = "sweep",
     .value = "WHAT[=FROM..TO]",
     .section = "Options",
     .help = "tokens, nvme, pcie, adam or flops; from an eighth to eight times its own value",
     .fallback = "pcie",
     .kind = SW_OPTION_TEXT,
     .offset = offsetof(struct options, sweep)},
    {.name = "model",
     .value = "DIR",
     .section = "Options",
     .help = "a model folder",
     .fallback = "a random one of 1.2 million parameters",
     .kind = SW_OPTION_TEXT,
     .offset = offsetof(struct options, model)},
    {.name = "steps",
     .value = "N",
     .section = "Options",
     .help = "of each run; all but the first two and the last count",
     .fallback = "7",
     .kind = SW_OPTION_COUNT64,
     .offset = offsetof(struct options, steps),
     .min = 4,
     .max = 1000},
    {.name = "points",
     .value = "N",
     .section = "Options",
     .help = "runs to aim at",
     .fallback = "7",
     .kind = SW_OPTION_COUNT,
     .offset = offsetof(struct options, points),
     .min = 2,
     .max = 30},
    {.name = "scratch",
     .value = "DIR",
     .section = "Options",
     .help = "where a folder is made for the runs, and removed",
     .fallback = "the current folder",
     .kind = SW_OPTION_TEXT,
     .offset = offsetof(struct options, scratch)},
    {.name = "page",
     .value = "FILE",
     .section = "Options",
     .help = "draws both curves in one HTML file that needs nothing else",
     .kind = SW_OPTION_TEXT,
     .offset = offsetof(struct options, page)},
    SW_BENCH_OPTION_JSON,
    {.name = "sim-pcie",
     .value = "UP[,DOWN]",
     .section = "Rates that the lanes are held to, as those of train",
     .help = "copies to and from the device",
     .fallback = "by the model, so that each lane can be the clock",
     .kind = SW_OPTION_RATES,
     .offset = offsetof(struct options, sim.copy_bytes),
     .min = 1,
     .max = 1e18},
    {.name = "sim-nvme",
     .value = "READ[,WRITE]",
     .section = "Rates that the lanes are held to, as those of train",
     .help = "the store",
     .fallback = "likewise",
     .kind = SW_OPTION_RATES,
     .offset = offsetof(struct options, sim.nvme_bytes),
     .min = 1,
     .max = 1e18},
    {.name = "sim-adam",
     .value = "RATE",
     .section = "Rates that the lanes are held to, as those of train",
     .help = "Adam on the CPU",
     .fallback = "likewise",
     .kind = SW_OPTION_RATE,
     .offset = offsetof(struct options, sim.adam_bytes),
     .min = 1,
     .max = 1e18},
    {.name = "sim-flops",
     .value = "RATE",
     .section = "Rates that the lanes are held to, as those of train",
     .help = "the model's computation, which is left out",
     .fallback = "likewise",
     .kind = SW_OPTION_RATE,
     .offset = offsetof(struct options, sim.flops),
     .min = 1,
     .max = 1e18},
    SW_OPTION_HELP("Other"),
};

static const struct sw_command command = {
    .name = "bench step",
    .usage = "bench step [--sweep WHAT] [--model DIR] [--page FILE] [--json] [options]",
    .summary =
        "Sweeps a rate, or the tokens of a step, by real runs of a few steps each on the CPU as\n"
        "device, all of whose lanes are held to rates: weights are streamed from RAM, the\n"
        "optimizer's state from NVMe. Says for each run the time of a step and its clock, beside\n"
        "what the simulator of spillway plan said before, and where the clock changes. Only lanes\n"
        "that are slower than this machine's own are meaningful. About half a minute by default.",
    .options = options_table,
    .option_count = sizeof(options_table) / sizeof(options_table[0]),
};

/* ---- the scratch folder ---- */

static int remove_entry(const char *path, const struct stat *st, int flag, struct FTW *ftw) {
    (void)st, (void)flag, (void)ftw;
    return remove(path);
}

static void remove_tree(const char *path) {
    if (nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS) < 0 && errno != ENOENT)
        sw_warning("bench step: %s cannot be removed: %s", path, strerror(errno));
}

static int name_file(const struct bench *b, const char *name, char out[PATH_MAX]) {
    const int length = snprintf(out, PATH_MAX, "%s/%s", b->scratch, name);
    return length < PATH_MAX ? 0 : -ENAMETOOLONG;
}

static int make_scratch(struct bench *b) {
    int ret = snprintf(b->scratch, sizeof(b->scratch), "%s/spillway-step-XXXXXX",
                       b->options.scratch) < PATH_MAX
                  ? 0
                  : -ENAMETOOLONG;
    if (ret == 0 && !mkdtemp(b->scratch)) ret = -errno;
    if (ret < 0) {
        b->scratch[0] = 0;
        sw_error("bench step: --scratch %s: %s", b->options.scratch, strerror(-ret));
        return ret;
    }
    snprintf(b->last_words, sizeof(b->last_words), "spillway: bench step: %s is left behind\n",
             b->scratch);
    sw_bench_leave_says(b->last_words);
    ret = name_file(b, "train.bin", b->data);
    if (ret == 0) ret = name_file(b, "out", b->out);
    if (ret == 0) ret = name_file(b, "log.jsonl", b->log);
    if (ret == 0) ret = name_file(b, "said", b->said);
    return ret;
}

static int write_file(const char *path, const void *content, size_t size) {
    FILE *file = fopen(path, "we");
    int bad = !file || fwrite(content, 1, size, file) != size;
    if (file) bad |= fclose(file) != 0;
    if (bad) sw_error("bench step: %s: %s", path, strerror(errno));
    return bad ? -EIO : 0;
}

/* Small, as the same bytes go over each lane at each point, and of enough units for lanes to
 * overlap. */
static const char random_config[] =
    "{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\", \"hidden_size\": 128,\n"
    " \"intermediate_size\": 352, \"num_hidden_layers\": 6, \"num_attention_heads\": 4,\n"
    " \"num_key_value_heads\": 2, \"vocab_size\": 512, \"max_position_embeddings\": 512,\n"
    " \"rms_norm_eps\": 1e-5, \"rope_theta\": 10000.0, \"hidden_act\": \"silu\",\n"
    " \"initializer_range\": 0.02, \"tie_word_embeddings\": false, \"torch_dtype\": "
    "\"bfloat16\"}\n";

static int make_model(struct bench *b) {
    char config[PATH_MAX];
    int ret = 0;
    if (b->options.model) {
        snprintf(b->model, sizeof(b->model), "%s", b->options.model);
        return 0;
    }
    ret = name_file(b, "config.json", config);
    if (ret == 0) ret = name_file(b, "model", b->model);
    if (ret == 0) ret = write_file(config, random_config, sizeof(random_config) - 1);
    int made;
    if (ret == 0) ret = sw_output_make_empty("bench step", b->model, &made);
    return ret == 0 ? sw_model_init(config, b->model, 0, SW_BF16) : ret;
}

/* Any tokens: what they are takes no time. */
static int make_data(const struct bench *b) {
    const uint32_t vocab = b->subject.model.config.vocab;
    uint32_t *wide = malloc(TOKENS * sizeof(*wide));
    if (!wide) return -ENOMEM;
    uint16_t *narrow = (uint16_t *)wide; /* each is written where none is read any more */
    for (uint32_t i = 0; i < TOKENS; i++) {
        const uint32_t token = (uint32_t)((uint64_t)i * 7919 % vocab);
        if (vocab > 65536)
            wide[i] = token;
        else
            narrow[i] = (uint16_t)token;
    }
    const size_t each = vocab > 65536 ? sizeof(*wide) : sizeof(*narrow);
    const int ret = write_file(b->data, wide, TOKENS * each);
    free(wide);
    return ret;
}

/* ---- the command line ---- */

struct words {
    char *list[WORDS_MAX + 1], *memory;
    size_t size, used;
    int count;
};

static void add(struct words *w, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void add(struct words *w, const char *format, ...) {
    va_list args;
    va_start(args, format);
    const int length = vsnprintf(w->memory + w->used, w->size - w->used, format, args);
    va_end(args);
    if (w->count == WORDS_MAX || length < 0 || (size_t)length >= w->size - w->used) return;
    w->list[w->count++] = w->memory + w->used;
    w->list[w->count] = NULL;
    w->used += (size_t)length + 1;
}

static void add_option(struct words *w, const char *name, const char *value) {
    add(w, "--%s", name);
    add(w, "%s", value);
}

static void add_rates(struct words *w, const char *name, const uint64_t rates[2]) {
    if (!rates[0]) return;
    add(w, "--%s", name);
    add(w, "%" PRIu64 ",%" PRIu64, rates[0], rates[1]);
}

static void add_number(struct words *w, const char *name, uint64_t value) {
    if (!value) return;
    add(w, "--%s", name);
    add(w, "%" PRIu64, value);
}

/* What all runs have in common, from "train" on; list[0] is the program's name. */
static int common_words(struct words *w, const struct bench *b) {
    const uint32_t limit = b->subject.model.config.max_positions;
    w->size = 8 * PATH_MAX;
    w->memory = malloc(w->size);
    if (!w->memory) return -ENOMEM;
    add(w, "spillway");
    add(w, "train");
    add_option(w, "model", b->model);
    add_option(w, "data", b->data);
    add_option(w, "out", b->out);
    add_option(w, "log", b->log);
    add_option(w, "nvme", b->scratch);
    add_option(w, "device", "host");
    add_option(w, "params", "host");
    add_option(w, "optimizer", "nvme");
    add_option(w, "gradients", "host");
    add_option(w, "activations", "device");
    add_option(w, "overlap", "forward");
    add_option(w, "commit-every", "0"); /* no sync is in the way */
    if (!b->options.model) add_option(w, "chunk", "64Ki");
    add_number(w, "seq-len", limit < SEQ_LEN ? limit : SEQ_LEN);
    add_number(w, "steps", b->options.steps);
    return 0;
}

/* Those of a run: the point's own rates and micro-batches behind them. */
static int run_words(struct words *w, const struct bench *b, uint32_t micro_batches,
                     const struct sw_sim_rates *sim) {
    const int ret = common_words(w, b);
    if (ret < 0) return ret;
    add_number(w, "accumulate", micro_batches);
    add_rates(w, "sim-pcie", sim->copy_bytes);
    add_rates(w, "sim-nvme", sim->nvme_bytes);
    add_number(w, "sim-adam", sim->adam_bytes);
    add_number(w, "sim-flops", sim->flops);
    return 0;
}

/* ---- the case that the simulator plays ---- */

/* By train's own parser, from the words that would be run. */
static int set_case(struct bench *b, const struct sw_sim_rates *sim) {
    struct words w = {0};
    struct sw_parsed parsed = {0};
    b->c = (struct sw_plan_case){.subject = &b->subject, .machine = &b->machine, .nodes = 1};
    int ret = run_words(&w, b, MICRO_BATCHES, sim);
    if (ret == 0) ret = sw_parse_train(w.count - 1, w.list + 1, &b->c.options, &parsed);
    if (ret == 0) {
        /* The parsed words go; of texts the case has its own. */
        struct sw_train_options *o = &b->c.options;
        o->model = b->model;
        o->data = b->data;
        o->out = b->out;
        o->log = b->log;
        o->nvme[0] = b->scratch;
        ret = sw_plan_case_settle(&b->c);
    }
    sw_parsed_close(&parsed);
    free(w.memory);
    if (ret == 0) ret = sw_plan_weigh(&b->c, &b->c.options, &b->step);
    return ret;
}

/* Two digits. */
static uint64_t rounded(double rate) {
    const double unit = pow(10, floor(log10(rate)) - 1);
    return rate > 10 ? (uint64_t)llround(round(rate / unit) * unit) : 10;
}

/* The rate at which a lane takes so long of a step, from what it takes at `rate`. */
static uint64_t rate_for(const struct sw_simulation *s, enum sw_lane lane, uint64_t rate,
                         double seconds) {
    return rounded((double)rate * s->busy_s[lane] / seconds);
}

/* Rates that nobody gave: what is moved and computed in a step is the same at any rate. */
static int settle_rates(struct bench *b) {
    const uint64_t any = 1000000000;
    const struct sw_machine machine = b->machine;
    struct sw_sim_rates *sim = &b->options.sim;
    struct sw_simulation s;
    const struct sw_sim_rates probe = {{any, any}, {any, any}, any, 0, any};
    b->machine = (struct sw_machine){.cores = machine.cores,
                                     .memory_bytes = machine.memory_bytes,
                                     .drive_count = machine.drive_count};
    int ret = set_case(b, &probe);
    if (ret == 0) ret = sw_simulate(&b->c, &b->step.fit, NULL, &s);
    b->machine = machine;
    if (ret < 0) return ret;
    if (!sim->flops) sim->flops = rate_for(&s, SW_LANE_COMPUTE, any, COMPUTE_S);
    if (!sim->copy_bytes[0])
        sim->copy_bytes[0] = sim->copy_bytes[1] = rate_for(&s, SW_LANE_H2D, any, COPIES_S);
    if (!sim->nvme_bytes[0])
        sim->nvme_bytes[0] = sim->nvme_bytes[1] = rate_for(&s, SW_LANE_NVME_READ, any, DRIVES_S);
    if (!sim->adam_bytes) sim->adam_bytes = rate_for(&s, SW_LANE_ADAM, any, ADAM_S);
    return set_case(b, sim);
}

static int prepare(struct bench *b) {
    const char *const folders[] = {b->scratch};
    int ret = make_scratch(b);
    if (ret == 0) ret = make_model(b);
    if (ret == 0) ret = sw_subject_open(&b->subject, b->model);
    if (ret == 0) ret = make_data(b);
    if (ret == 0) ret = sw_machine_open(&b->machine, NULL);
    if (ret == 0) ret = sw_machine_use_folders(&b->machine, folders, 1);
    if (ret == 0) ret = settle_rates(b);
    if (ret == 0 && !b->step.fits) {
        sw_error("bench step: the runs do not fit this machine's memory");
        ret = -ENOSPC;
    }
    return ret;
}

/* ---- the runs ---- */

static int predict(struct bench *b) {
    double seconds = 0;
    int ret = sw_sweep_own(&b->c, b->range.what, &b->own);
    b->range.points = b->options.points;
    if (ret == 0) ret = sw_sweep_case(&b->c, &b->step, &b->range, &b->predicted);
    if (ret < 0) return ret;
    for (uint32_t i = 0; i < b->predicted.point_count; i++)
        seconds += START_S + (double)b->options.steps * b->predicted.points[i].step_s;
    sw_info("bench step: %u runs of %" PRIu64 " steps, about %.0f seconds. An interrupt shows the "
            "runs that are done",
            b->predicted.point_count, b->options.steps, ceil(seconds));
    return 0;
}

static int measure_point(struct bench *b, uint32_t i) {
    const struct sw_sweep_point *p = &b->predicted.points[i];
    struct sw_sweep_point *point = &b->measured.points[i];
    struct sw_train_options o;
    struct sw_step_run run;
    struct words w = {0};
    sw_sweep_options(&b->c, b->range.what, b->own, p->value, &o);
    int ret = run_words(&w, b, o.accumulate, &o.sim);
    remove_tree(b->out);
    if (ret == 0) ret = sw_step_run(w.list, b->log, b->said, &run);
    free(w.memory);
    if (ret < 0) return ret;
    *point = *p;
    point->step_s = run.step_s;
    point->tokens_per_s = run.step_s > 0 ? run.tokens / run.step_s : 0;
    point->step_clock = run.step_clock;
    point->clock_share = 0;
    b->measured.point_count = i + 1;
    return 0;
}

static int measure(struct bench *b) {
    int ret = 0;
    /* With this machine's rates train would plan what is left open, and run another step. */
    setenv("SPILLWAY_PROFILE", "", 1);
    for (uint32_t i = 0; i < b->predicted.point_count && ret == 0; i++) {
        ret = sw_bench_stopped() ? -EINTR : measure_point(b, i);
    }
    sw_sweep_between(&b->measured);
    return ret;
}

/* ---- what is said ---- */

static int print_json(const struct bench *b, const struct sw_sweep_view *v) {
    const struct sw_sim_rates *sim = &b->options.sim;
    json_t *sweep = sw_sweep_json(v);
    json_t *root = json_pack(
        "{s:i, s:I, s:I, s:{s:[I, I], s:[I, I], s:I, s:I}, s:o}", "schema", 1, "params",
        (json_int_t)b->subject.params, "steps", (json_int_t)b->options.steps, "rates", "sim_pcie",
        (json_int_t)sim->copy_bytes[0], (json_int_t)sim->copy_bytes[1], "sim_nvme",
        (json_int_t)sim->nvme_bytes[0], (json_int_t)sim->nvme_bytes[1], "sim_adam",
        (json_int_t)sim->adam_bytes, "sim_flops", (json_int_t)sim->flops, "sweep", sweep);
    const int bad = !root || json_dumpf(root, stdout, JSON_INDENT(2));
    putchar('\n');
    json_decref(root);
    return bad ? -ENOMEM : 0;
}

/* The own value's run, without the folders that are gone when it is read. */
static void print_line(const struct bench *b) {
    struct words w = {0};
    if (run_words(&w, b, MICRO_BATCHES, &b->options.sim) < 0) return;
    printf("the run at its own value:\n ");
    for (int i = 0; i < w.count; i++) sw_print_quoted(w.list[i], stdout);
    putchar('\n');
    free(w.memory);
}

static int tell(struct bench *b) {
    snprintf(b->about, sizeof(b->about), "%.80s, %" PRIu64 " parameters, %s",
             b->options.model ? b->options.model : "a random model", b->subject.params,
             b->machine.measured[0] ? "throttled lanes of this machine"
                                    : "throttled lanes alone have a time in the simulator");
    const struct sw_sweep_view view = {b->range.what, b->about, &b->predicted, &b->measured};
    int ret = 0;
    if (b->options.json) {
        ret = print_json(b, &view);
    } else {
        print_line(b);
        sw_sweep_print(&view, stdout);
    }
    if (ret == 0 && b->options.page) ret = sw_sweep_page(&view, "--page", b->options.page);
    return ret;
}

static int run(struct bench *b) {
    sw_bench_watch_signals();
    int ret = prepare(b);
    if (ret == 0) ret = predict(b);
    if (ret == 0) ret = measure(b);
    if ((ret == 0 || ret == -EINTR) && b->measured.point_count > 0) {
        const int told = tell(b);
        if (ret == 0) ret = told;
    }
    if (ret == -EINTR)
        sw_info("bench step: stopped after %u of %u runs", b->measured.point_count,
                b->predicted.point_count);
    if (b->subject.name[0]) sw_subject_close(&b->subject);
    if (b->scratch[0]) remove_tree(b->scratch);
    sw_bench_leave_says(NULL);
    return ret == 0 ? SW_EXIT_OK : ret == -EINTR ? 128 + sw_bench_stopped() : SW_EXIT_FAILED;
}

/* Before anything is made. */
static int check(struct bench *b) {
    struct options *o = &b->options;
    int ret = sw_sweep_parse(o->sweep, &b->range);
    if (ret == 0 && (b->range.what == SW_SWEEP_RAM || b->range.what == SW_SWEEP_GPUS)) {
        sw_error("--sweep %s: no throttle stands for it; spillway plan --sweep %s plays it",
                 o->sweep, o->sweep);
        return -EINVAL;
    }
    if (ret == 0) ret = sw_output_check_kind("--page", o->page, 1);
    return ret == 0 ? sw_output_check_file("--page", o->page) : ret;
}

int sw_cmd_bench_step(int argc, char **argv) {
    struct bench *b = calloc(1, sizeof(*b));
    struct sw_parsed parsed;
    if (!b) return SW_EXIT_FAILED;
    b->options = (struct options){.sweep = "pcie", .scratch = ".", .steps = 7, .points = 7};
    int ret = sw_options_parse(&command, argc, argv, &b->options, &parsed);
    if (ret == 0 && check(b) < 0) ret = -EINVAL;
    const int status = ret < 0 ? SW_EXIT_USAGE : ret > 0 ? SW_EXIT_OK : run(b);
    sw_parsed_close(&parsed);
    free(b);
    return status;
}
