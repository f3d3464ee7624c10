/* One table drives command line, configuration file, help and log: what one accepts the others
 * know, nothing is ignored, and every refusal names the option. Also the learning rate that
 * follows. */
#include "tools/command_line.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "tests/support_files.h"

#define PATHS "--model", "m", "--data", "d", "--out", "o"

static struct sw_train_options options;
static struct sw_parsed parsed;

static int parse(char *const *args) {
    int argc = 1;
    char *argv[64] = {"train"};
    while (args[argc - 1]) {
        argv[argc] = args[argc - 1];
        argc++;
    }
    log_catch();
    return sw_parse_train(argc, argv, &options, &parsed);
}

#define ARGS(...) ((char *const[]){__VA_ARGS__, NULL})

static void accept(char *const *args) {
    if (parse(args) != 0) fail_msg("refused: %s", log_text());
    assert_string_equal(log_text(), "");
}

static void refuse(char *const *args, const char *part) {
    if (parse(args) != -EINVAL) fail_msg("accepted, but should say '%s'", part);
    assert_reported(part);
    sw_parsed_close(&parsed);
}

static void defaults_are_those_of_the_manual(void **state) {
    (void)state;
    accept(ARGS(PATHS));
    assert_string_equal(options.model, "m");
    assert_string_equal(options.data, "d");
    assert_string_equal(options.out, "o");
    assert_null(options.mask);
    assert_null(options.documents);
    assert_null(options.val);
    assert_null(options.log);
    assert_true(options.steps == 0 && options.seq_len == 0 && options.micro_batch == 1 &&
                options.accumulate == 1 && options.seed == 0 && options.order == SW_ORDER_SHUFFLE);
    assert_true(options.lr == 1e-5 && options.min_lr == 0 && options.weight_decay == 0.1 &&
                options.beta1 == 0.9 && options.beta2 == 0.95 && options.eps == 1e-8 &&
                options.clip == 1);
    assert_true(options.schedule == SW_SCHEDULE_COSINE && options.warmup == -1 &&
                options.decay == SW_DECAY_MATRICES && options.max_skips == 10);
    assert_true(options.dtype == SW_BF16 && options.grad_dtype == SW_BF16 &&
                options.overlap == SW_OVERLAP_AUTO && options.checkpoint_every == 1);
    assert_true(!sw_tiers_chosen(options.params) && !sw_tiers_chosen(options.optimizer) &&
                !sw_tiers_chosen(options.gradients) && !sw_tiers_chosen(options.activations) &&
                options.device_memory_bytes == 0 && options.host_memory_bytes == 0);
    assert_true(options.master == SW_MASTER_FP32 && options.moments == SW_MOMENTS_FP32);
    assert_true(options.chunk_bytes == 8 << 20 && options.threads == 0 && options.nvme_count == 0);
    assert_true(options.save_every == 0 && options.eval_every == 0 && !options.restart &&
                !options.dry_run && !options.digest);
    sw_parsed_close(&parsed);
}

static void every_option_is_read(void **state) {
    (void)state;
    accept(ARGS(PATHS, "--mask=k", "--documents", "b", "--val", "v", "--steps", "100",
                "--seq-len=64", "--micro-batch", "2", "--accumulate", "3", "--order", "sequential",
                "--seed", "7", "--lr", "1e-3", "--schedule=linear", "--warmup", "0", "--min-lr",
                "1e-4", "--decay", "all", "--weight-decay", "0.01", "--beta1", "0", "--beta2",
                "0.999", "--eps", "1e-6"));
    assert_string_equal(options.mask, "k");
    assert_string_equal(options.documents, "b");
    assert_string_equal(options.val, "v");
    assert_true(options.steps == 100 && options.seq_len == 64 && options.micro_batch == 2 &&
                options.accumulate == 3 && options.order == SW_ORDER_SEQUENTIAL &&
                options.seed == 7);
    assert_true(options.lr == 1e-3 && options.schedule == SW_SCHEDULE_LINEAR &&
                options.warmup == 0 && options.min_lr == 1e-4 && options.decay == SW_DECAY_ALL);
    assert_true(options.weight_decay == 0.01 && options.beta1 == 0 && options.beta2 == 0.999 &&
                options.eps == 1e-6);
    sw_parsed_close(&parsed);
    accept(ARGS(PATHS, "--clip", "0", "--max-skips", "0", "--device", "host", "--grad-dtype",
                "fp32", "--optimizer", "nvme", "--overlap", "backward", "--chunk", "1Mi",
                "--master", "split", "--moments", "8bit", "--threads", "2", "--nvme", "/a,/b",
                "--save-every", "10", "--eval-every", "5", "--val", "v", "--restart", "--digest",
                "--log", "l", "--dry-run"));
    assert_true(options.clip == 0 && options.max_skips == 0 && options.grad_dtype == SW_FP32 &&
                options.dtype == SW_BF16 && sw_tiers_is_all(options.optimizer, SW_TIER_NVME) &&
                options.overlap == SW_OVERLAP_BACKWARD);
    assert_true(options.master == SW_MASTER_SPLIT && options.moments == SW_MOMENTS_8BIT);
    assert_true(options.chunk_bytes == 1 << 20 && options.threads == 2 && options.nvme_count == 2 &&
                options.save_every == 10 && options.eval_every == 5);
    assert_true(options.restart && options.digest && options.dry_run);
    assert_string_equal(options.nvme[0], "/a");
    assert_string_equal(options.nvme[1], "/b");
    assert_string_equal(options.log, "l");
    sw_parsed_close(&parsed);
}

static void placements_take_shares(void **state) {
    (void)state;
    accept(ARGS(PATHS, "--params", "host:30%,nvme", "--optimizer", "host:60%,nvme:40%",
                "--gradients", "device:10%,host:60%,nvme", "--activations", "nvme",
                "--checkpoint-every", "3", "--device-memory", "600M", "--host-memory", "2Gi"));
    assert_true(options.params.percent[SW_TIER_HOST] == 30 &&
                options.params.percent[SW_TIER_NVME] == 70);
    assert_true(options.optimizer.percent[SW_TIER_HOST] == 60 &&
                options.optimizer.percent[SW_TIER_NVME] == 40);
    assert_true(options.gradients.percent[SW_TIER_DEVICE] == 10 &&
                options.gradients.percent[SW_TIER_HOST] == 60 &&
                options.gradients.percent[SW_TIER_NVME] == 30);
    assert_true(sw_tiers_is_all(options.activations, SW_TIER_NVME));
    assert_true(options.checkpoint_every == 3 && options.device_memory_bytes == 600000000 &&
                options.host_memory_bytes == 2ull << 30);
    json_t *all = sw_options_json(&parsed, &options);
    assert_string_equal(json_string_value(json_object_get(all, "gradients")),
                        "device:10%,host:60%,nvme:30%");
    json_decref(all);
    sw_parsed_close(&parsed);
    static const char *const wrong[][2] = {
        {"disk", "--optimizer: 'disk' is not one of: device, host, nvme"},
        {"host:60%", "--optimizer: the shares add up to 60%, not to 100%"},
        {"host:60%,nvme:50%", "'nvme:50%' is not a share of 1% to 40%"},
        {"host:0%,nvme", "'host:0%' is not a share of 1% to 100%"},
        {"host:60,nvme", "'host:60' is not a share"},
        {"host:-5%,nvme", "'host:-5%' is not a share"},
        {"host:1e1%,nvme", "'host:1e1%' is not a share"},
        {"host,nvme", "'host' needs a share, as in host:60%,nvme"},
        {"host:100%,nvme", "no share is left for 'nvme'"},
        {"host:50%,host:50%", "'host' is there twice"},
        {"host:50%,", "'' is not one of"},
        {"", "'' is not one of"},
    };
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
        refuse(ARGS(PATHS, "--optimizer", (char *)wrong[i][0]), wrong[i][1]);
}

static void fp32_means_fp32_throughout(void **state) {
    (void)state;
    accept(ARGS(PATHS, "--dtype", "fp32"));
    assert_true(options.dtype == SW_FP32 && options.grad_dtype == SW_FP32);
    sw_parsed_close(&parsed);
    accept(ARGS(PATHS, "--dtype", "fp32", "--grad-dtype", "bf16"));
    assert_true(options.dtype == SW_FP32 && options.grad_dtype == SW_BF16);
    sw_parsed_close(&parsed);
}

static void unknown_options_name_the_nearest(void **state) {
    (void)state;
    refuse(ARGS(PATHS, "--stepz", "3"), "unknown option --stepz; the nearest is --steps");
    refuse(ARGS(PATHS, "--sequence-len", "3"), "the nearest is --seq-len");
    refuse(ARGS(PATHS, "--weightdecay=1"),
           "unknown option --weightdecay; the nearest is --weight-decay");
    refuse(ARGS(PATHS, "--seq_len", "3"), "the nearest is --seq-len");
    refuse(ARGS(PATHS, "--overlaps", "x"), "--overlap");
    refuse(ARGS(PATHS, "-lr", "3"), "two dashes");
    refuse(ARGS(PATHS, "extra"), "'extra'");
}

static void bad_values_name_option_and_value(void **state) {
    (void)state;
    static const struct {
        const char *name, *value, *part;
    } cases[] = {
        {"--steps", "ten", "--steps: 'ten' is not a whole number"},
        {"--steps", "1.5", "--steps: '1.5'"},
        {"--steps", "0", "--steps: 0 is too small"},
        {"--steps", "-3", "--steps: -3"},
        {"--steps", "99999999999999999999", "--steps: 99999999999999999999 is out of range"},
        {"--seq-len", "4294967296", "--seq-len: 4294967296"},
        {"--seq-len", "12x", "'12x'"},
        {"--micro-batch", "0", "--micro-batch: 0"},
        {"--accumulate", "0", "--accumulate: 0"},
        {"--threads", "0", "--threads: 0"},
        {"--lr", "-1", "--lr: -1 is too small"},
        {"--lr", "fast", "--lr: 'fast' is not a number"},
        {"--lr", "nan", "--lr: 'nan'"},
        {"--lr", "inf", "--lr: 'inf'"},
        {"--lr", "1e-5x", "'1e-5x'"},
        {"--beta1", "1", "--beta1: 1 is too large"},
        {"--beta2", "1.5", "--beta2: 1.5"},
        {"--eps", "0", "--eps: 0 is too small"},
        {"--chunk", "8MM", "--chunk: '8MM' is not a size"},
        {"--chunk", "16", "--chunk: 16 is too small"},
        {"--schedule", "cosin", "'cosin' is not one of: constant, linear, cosine"},
        {"--optimizer", "disk", "'disk' is not one of: device, host, nvme"},
        {"--device", "tpu", "'tpu' is not one of: auto, host, cuda"},
        {"--overlap", "both", "auto, none, forward, backward"},
        {"--dtype", "fp16", "'fp16' is not one of: bf16, fp32"},
        {"--nvme", "/a,,/b", "empty entry"},
        {"--nvme", "/a,/a", "'/a' is there twice"},
        {"--log", "", "--log: is empty"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        refuse(ARGS(PATHS, (char *)cases[i].name, (char *)cases[i].value), cases[i].part);
    refuse(ARGS(PATHS, "--steps"), "--steps: needs a value");
    refuse(ARGS(PATHS, "--steps", "--restart"), "--steps: needs a value");
    refuse(ARGS(PATHS, "--restart=yes"), "--restart: takes no value");
    refuse(ARGS(PATHS, "--steps", "3", "--steps=3"), "--steps: given twice");
    refuse(ARGS("--model", "m", "--data", "d"), "--out DIR is required");
    refuse(ARGS("--model", "m", "--out", "d"), "--data FILE is required");
    refuse(ARGS("--data", "d", "--out", "d"), "--model DIR is required");
}

static void contradictions_are_errors(void **state) {
    (void)state;
    refuse(ARGS(PATHS, "--overlap", "backward"), "--overlap backward needs --clip 0");
    refuse(ARGS(PATHS, "--overlap", "backward", "--clip", "0.5"), "--clip 0");
    refuse(ARGS(PATHS, "--nvme", "/a"), "--nvme has no effect without a placement on nvme");
    accept(ARGS(PATHS, "--nvme", "/a", "--machine", "8xh100"));
    sw_parsed_close(&parsed);
    refuse(ARGS(PATHS, "--eval-every", "5"), "--eval-every has no effect without --val");
    refuse(ARGS(PATHS, "--late-top", "5"), "--late-top have no effect without overlap backward");
    refuse(ARGS(PATHS, "--clip", "0", "--overlap", "forward", "--late-below", "5"), "no effect");
    refuse(ARGS(PATHS, "--clip", "0", "--late-below", "70", "--late-top", "31"), "more than 100%");
    accept(ARGS(PATHS, "--clip", "0", "--late-below", "70", "--late-top", "30"));
    assert_true(options.late_below == 70 && options.late_top == 30);
    sw_parsed_close(&parsed);
    refuse(ARGS(PATHS, "--schedule", "constant", "--min-lr", "0"), "--min-lr has no effect");
    refuse(ARGS(PATHS, "--min-lr", "1e-3"), "--min-lr 0.001 is above --lr 1e-05");
    refuse(ARGS(PATHS, "--decay", "all", "--weight-decay", "0"), "--decay has no effect");
    refuse(ARGS(PATHS, "--steps", "5", "--warmup", "6"), "--warmup 6 is longer than --steps 5");
    accept(ARGS(PATHS, "--steps", "5", "--warmup", "5"));
    sw_parsed_close(&parsed);
    accept(ARGS(PATHS, "--overlap", "forward"));
    sw_parsed_close(&parsed);
}

/* ---- the file ---- */

static const char *make_toml(const char *text) {
    file_write(in_folder("run.toml"), text, strlen(text));
    return in_folder("run.toml");
}

static void the_file_has_the_same_options(void **state) {
    (void)state;
    folder_make();
    char *file =
        (char *)make_toml("# a run\nmodel = 'm'\ndata = \"d\"\nsteps = 1_000\nseq_len = 32\n"
                          "micro-batch = 2\nlr = 1e-3\nweight_decay = 0\nclip = 0.5\n"
                          "chunk = \"1Mi\"\noptimizer = \"nvme\"\nnvme = [\"/a\", \"/b\"]\n"
                          "restart = true\ndigest = false\nschedule = \"linear\"\n");
    accept(ARGS("--config", file, "--out", "o", "--steps", "7"));
    assert_string_equal(options.model, "m");
    assert_string_equal(options.out, "o");
    assert_true(options.steps == 7); /* the command line wins */
    assert_true(options.seq_len == 32 && options.micro_batch == 2 && options.lr == 1e-3 &&
                options.weight_decay == 0 && options.clip == 0.5 && options.chunk_bytes == 1 << 20);
    assert_true(options.restart && !options.digest && options.schedule == SW_SCHEDULE_LINEAR);
    assert_true(options.nvme_count == 2 && !strcmp(options.nvme[1], "/b"));
    assert_int_equal(sw_option_origin(&parsed, "steps"), SW_FROM_LINE);
    assert_int_equal(sw_option_origin(&parsed, "lr"), SW_FROM_FILE);
    assert_int_equal(sw_option_origin(&parsed, "digest"), SW_NOT_GIVEN);
    sw_parsed_close(&parsed);
    folder_remove();
}

static void bad_files_name_line_and_key(void **state) {
    (void)state;
    static const struct {
        const char *text, *part;
    } cases[] = {
        {"steps = 3\nseqlen = 5\n", "line 2: unknown key 'seqlen'; the nearest is 'seq-len'"},
        {"steps = \"3\"\n", "line 1: 'steps' must be a whole number"},
        {"steps = 3.5\n", "line 1: 'steps' must be a whole number"},
        {"\nlr = \"fast\"\n", "line 2: 'lr' must be a number"},
        {"restart = 1\n", "'restart' must be true or false"},
        {"model = 7\n", "'model' must be a string"},
        {"nvme = [1, 2]\n", "'nvme' must be a list of strings"},
        {"steps = 0\n", "line 1: steps: 0 is too small"},
        {"order = \"random\"\n", "line 1: order: 'random' is not one of: shuffle, sequential"},
        {"seq-len = 3\nseq_len = 4\n", "line 2: 'seq_len' is given on line 1 as well"},
        {"[optimizer]\nlr = 1\n", "must be a string"},
        {"[train]\nlr = 1\n", "line 1: table [train]"},
        {"config = \"other.toml\"\n", "'config' is for the command line only"},
        {"steps = \n", "line 1, column"},
        {"steps = 3\nsteps = 4\n", "line 2"},
        {"overlap = \"backward\"\n", "--overlap backward needs --clip 0"},
    };
    folder_make();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char *file = (char *)make_toml(cases[i].text);
        refuse(ARGS(PATHS, "--config", file), cases[i].part);
    }
    assert_int_equal(parse(ARGS(PATHS, "--config", (char *)in_folder("none.toml"))), -ENOENT);
    assert_reported("none.toml");
    sw_parsed_close(&parsed);
    assert_true(parse(ARGS(PATHS, "--config", "build")) < 0);
    assert_reported("cannot read build");
    sw_parsed_close(&parsed);
    folder_remove();
}

/* ---- what the table says ---- */

static void every_option_is_in_the_help_the_list_and_the_log(void **state) {
    (void)state;
    accept(ARGS(PATHS, "--val", "v", "--optimizer", "nvme", "--nvme", "/a,/b", "--lr", "0.1"));
    char *help, *list;
    size_t size;
    FILE *out = open_memstream(&help, &size);
    sw_options_help(&sw_train_command, out);
    fclose(out);
    out = open_memstream(&list, &size);
    sw_options_print(&parsed, &options, out);
    fclose(out);
    json_t *log = sw_options_json(&parsed, &options);
    for (uint32_t i = 0; i < sw_train_command.option_count; i++) {
        const struct sw_option *option = &sw_train_command.options[i];
        char text[80], key[64];
        snprintf(text, sizeof(text), "  --%s ", option->name);
        if (!strstr(help, text)) fail_msg("%s is not in the help", option->name);
        snprintf(key, sizeof(key), "%s", option->name);
        for (char *c = key; *c; c++) *c = *c == '-' ? '_' : *c;
        if (strcmp(key, "help") && !json_object_get(log, key))
            fail_msg("%s is not in the log", key);
        /* Every default in the table is the one in effect. */
        if (option->kind == SW_OPTION_CHOICE && option->fallback &&
            strcmp(option->name, "grad-dtype") && strcmp(option->name, "optimizer") &&
            strcmp(option->name, "device"))
            assert_string_equal(json_string_value(json_object_get(log, key)), option->fallback);
        if (option->kind == SW_OPTION_REAL && strcmp(option->name, "lr"))
            assert_true(json_real_value(json_object_get(log, key)) ==
                        strtod(option->fallback, NULL));
    }
    assert_non_null(strstr(list, "  lr             0.1\n"));
    assert_non_null(strstr(list, "  nvme           /a,/b\n"));
    assert_non_null(strstr(list, "  optimizer      nvme\n"));
    assert_non_null(strstr(list, "  steps          one epoch\n"));
    assert_true(json_is_null(json_object_get(log, "steps")));
    assert_int_equal(json_integer_value(json_object_get(log, "chunk")), 8 << 20);
    assert_int_equal(json_array_size(json_object_get(log, "nvme")), 2);
    json_decref(log);
    free(help);
    free(list);
    sw_parsed_close(&parsed);
}

static void nearest_is_the_smallest_edit_distance(void **state) {
    (void)state;
    static const char *const names[] = {"steps", "seed", "seq-len", "lr"};
    assert_string_equal(sw_nearest("step", names, 4), "steps");
    assert_string_equal(sw_nearest("sed", names, 4), "seed");
    assert_string_equal(sw_nearest("rl", names, 4), "lr");
    assert_string_equal(sw_nearest("seqlenn", names, 4), "seq-len");
    assert_string_equal(sw_nearest("seed", names, 4), "seed");
}

/* ---- the learning rate ---- */

static void the_schedules_meet_their_corners(void **state) {
    (void)state;
    struct sw_train_options o;
    sw_train_defaults(&o);
    o.lr = 8;
    o.min_lr = 2;
    o.steps = 14;
    o.warmup = 4;
    o.schedule = SW_SCHEDULE_LINEAR;
    const double warm[] = {2, 4, 6, 8};
    for (uint64_t s = 1; s <= 4; s++) assert_true(sw_learning_rate(&o, s) == warm[s - 1]);
    for (uint64_t s = 5; s <= 14; s++)
        assert_true(fabs(sw_learning_rate(&o, s) - (8 - 0.6 * (double)(s - 5))) < 1e-12);
    o.schedule = SW_SCHEDULE_COSINE;
    assert_true(sw_learning_rate(&o, 5) == 8);
    assert_true(fabs(sw_learning_rate(&o, 10) - 5) < 1e-12); /* half way */
    for (uint64_t s = 5; s < 14; s++)
        assert_true(sw_learning_rate(&o, s + 1) < sw_learning_rate(&o, s));
    assert_true(sw_learning_rate(&o, 14) > 2);
    o.schedule = SW_SCHEDULE_CONSTANT;
    assert_true(sw_learning_rate(&o, 2) == 4 && sw_learning_rate(&o, 5) == 8 &&
                sw_learning_rate(&o, 14) == 8);
    o.warmup = 0;
    assert_true(sw_learning_rate(&o, 1) == 8);
    o.schedule = SW_SCHEDULE_COSINE;
    assert_true(sw_learning_rate(&o, 1) == 8);
    o.warmup = 14; /* warm-up to the end */
    assert_true(sw_learning_rate(&o, 14) == 8);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_are_those_of_the_manual),
        cmocka_unit_test(every_option_is_read),
        cmocka_unit_test(placements_take_shares),
        cmocka_unit_test(fp32_means_fp32_throughout),
        cmocka_unit_test(unknown_options_name_the_nearest),
        cmocka_unit_test(bad_values_name_option_and_value),
        cmocka_unit_test(contradictions_are_errors),
        cmocka_unit_test(the_file_has_the_same_options),
        cmocka_unit_test(bad_files_name_line_and_key),
        cmocka_unit_test(every_option_is_in_the_help_the_list_and_the_log),
        cmocka_unit_test(nearest_is_the_smallest_edit_distance),
        cmocka_unit_test(the_schedules_meet_their_corners),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
