/* The decision over cases: each clause of the rule is reached by the case that it is for, a step is
 * refused for what it really lacks, and what is offered is what train's own parser takes and what
 * the plan has counted. */
#include "plan/decide.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "engine/budget.h"
#include "tests/support_files.h"
#include "tools/plan.h"

static struct sw_plan_command_options options;
static struct sw_parsed parsed;
static struct sw_subject subject;
static struct sw_machine machine;
static struct sw_plan_case c;
static struct sw_plan_decision d;

/* Of a command line, without its first word. */
static void plan(const char *line) {
    static char text[1024];
    char *argv[48] = {"plan"}, *next = text;
    int argc = 1;
    snprintf(text, sizeof(text), "%s", line);
    for (char *word; (word = strsep(&next, " "));) argv[argc++] = word;
    options = (struct sw_plan_command_options){.nodes = 1};
    sw_train_defaults(&options.train);
    log_catch();
    if (sw_options_parse(sw_plan_command(), argc, argv, &options, &parsed))
        fail_msg("%s: %s", line, log_text());
    assert_int_equal(sw_subject_open(&subject, options.train.model), 0);
    assert_int_equal(sw_machine_open(&machine, options.train.machine), 0);
    c = (struct sw_plan_case){.subject = &subject,
                              .machine = &machine,
                              .options = options.train,
                              .nodes = options.nodes,
                              .tokens = options.tokens};
    if (sw_plan_case_settle(&c) || sw_plan_decide(&c, &d)) fail_msg("%s: %s", line, log_text());
}

static void done(void) {
    sw_subject_close(&subject);
    sw_parsed_close(&parsed);
}

/* The scheme that is chosen, and where its states lie. */
static void chosen(const char *line, enum sw_scheme scheme, const char *tiers) {
    char got[256], one[4][64];
    plan(line);
    if (d.chosen < 0) fail_msg("%s: nothing fits", line);
    const struct sw_train_options *o = &d.steps[d.chosen].fit.options;
    const struct sw_tiers all[] = {o->params, o->optimizer, o->gradients, o->activations};
    for (int i = 0; i < 4; i++) sw_tiers_print(all[i], one[i], sizeof(one[i]));
    snprintf(got, sizeof(got), "%s %s %s %s", one[0], one[1], one[2], one[3]);
    if (d.steps[d.chosen].scheme != scheme || strcmp(got, tiers))
        fail_msg("%s: %s, %s", line, sw_scheme_name(d.steps[d.chosen].scheme), got);
    assert_int_equal(d.chosen, d.step_count - 1);
    for (int i = 0; i < d.chosen; i++) assert_false(d.steps[i].fits);
    done();
}

static void each_clause_has_its_case(void **state) {
    (void)state;
    chosen("--model smollm2-135m --machine 8xh100", SW_SCHEME_DATA_PARALLEL,
           "device device device device");
    chosen("--model 7B --machine 8xh100", SW_SCHEME_ZERO1, "device device device device");
    chosen("--model llama-3-8b --machine 8xh100:gpu-memory=40G", SW_SCHEME_ZERO2,
           "device device device device");
    chosen("--model llama-3-8b --machine 8xh100:gpu-memory=28G", SW_SCHEME_ZERO3,
           "device device device device");
    chosen("--model llama-3-70b --machine 8xh100", SW_SCHEME_OFFLOAD_OPTIMIZER,
           "device host host device");
    chosen("--model llama-3-70b --machine 8xh100:ram=200G", SW_SCHEME_OFFLOAD_OPTIMIZER,
           "device host:5%,nvme:95% host device");
    chosen("--model llama-3-70b --machine 8xh100:ram=100G", SW_SCHEME_OFFLOAD_OPTIMIZER,
           "device host:10%,nvme:90% nvme device");
    chosen("--model llama-3-405b --machine 8xh100", SW_SCHEME_OFFLOAD_ALL,
           "host host:5%,nvme:95% host device");
    chosen("--model llama-3-70b --machine 8xh200 --nodes 2", SW_SCHEME_ZERO3,
           "device device device device");
    chosen("--model llama-3-8b --machine 8xh100:gpu-memory=24G --nodes 2", SW_SCHEME_HYBRID,
           "device device device device");
}

static void activations_bind(void **state) {
    (void)state;
    /* Too many at once for K = 1: every K-th, then the host, then NVMe. */
    plan("--model llama-3-70b --machine 8xh100 --seq-len 4096 --accumulate 16");
    const struct sw_plan_step *s = &d.steps[d.chosen];
    assert_true(s->activations_bound);
    assert_true(s->fit.options.checkpoint_every > 1 && s->fit.options.checkpoint_every <= 9);
    assert_true(sw_tiers_is_all(s->fit.options.activations, SW_TIER_DEVICE));
    /* One K less does not fit. */
    struct sw_train_options less = s->fit.options;
    struct sw_fit fit;
    less.device_memory_bytes = less.host_memory_bytes = 0;
    less.checkpoint_every--;
    assert_int_equal(sw_plan_fit(&c, &less, &fit), 0);
    assert_false(fit.fits);
    assert_int_equal(fit.short_of, SW_TIER_DEVICE);
    done();
    chosen("--model mistral-7b --machine 8xh100 --seq-len 8192 --micro-batch 32", SW_SCHEME_ZERO3,
           "device device device host");
    chosen("--model mistral-7b --machine 8xh100:ram=100G --seq-len 8192 --micro-batch 32",
           SW_SCHEME_ZERO3, "device device device nvme");
}

static void what_the_user_placed_stays(void **state) {
    (void)state;
    chosen("--model llama-3-8b --machine 8xh100 --optimizer nvme", SW_SCHEME_OFFLOAD_OPTIMIZER,
           "device nvme host device");
    chosen("--model llama-3-8b --machine 8xh100 --params host", SW_SCHEME_OFFLOAD_ALL,
           "host host host device");
    chosen("--model llama-3-8b --machine 8xh100 --zero 3", SW_SCHEME_ZERO3,
           "device device device device");
    chosen("--model llama-3-8b --machine 8xh100 --activations host", SW_SCHEME_ZERO1,
           "device device device host");
    chosen("--model llama-3-70b --machine 8xh100 --gradients nvme", SW_SCHEME_OFFLOAD_OPTIMIZER,
           "device host nvme device");
    plan("--model llama-3-8b --machine 8xh100 --params host --optimizer device");
    assert_int_equal(d.step_count, 0);
    done();
}

static void nothing_fits_where_it_cannot(void **state) {
    (void)state;
    plan("--model llama-3-70b --machine 8xh100:ram=100G,nvme=none");
    assert_int_equal(d.chosen, -1);
    const struct sw_plan_step *last = &d.steps[d.step_count - 1];
    assert_int_equal(last->scheme, SW_SCHEME_OFFLOAD_ALL);
    assert_int_equal(last->fit.short_of, SW_TIER_HOST);
    char text[1024];
    sw_plan_conclusion(&c, &d, text, sizeof(text));
    assert_non_null(strstr(text, "GB of RAM are missing"));
    done();
    plan("--model llama-3-70b --machine 8xh100:ram=100G,nvme=gen3");
    assert_true(d.chosen >= 0); /* 1.7 TB of records, and gradients, on 3.84 TB */
    done();
    plan("--model llama-3-405b --machine 8xh100:ram=100G,nvme=gen3");
    assert_int_equal(d.chosen, -1);
    assert_int_equal(d.steps[d.step_count - 1].fit.short_of, SW_TIER_NVME);
    done();
    plan("--model llama-3-405b --machine rtx4090:gpu-memory=6G --seq-len 8192");
    assert_int_equal(d.chosen, -1);
    assert_int_equal(d.steps[d.step_count - 1].fit.short_of, SW_TIER_DEVICE);
    done();
}

/* Stages are held to the textbook's bytes, and a run never takes more. */
static void a_run_never_exceeds_the_textbook(void **state) {
    (void)state;
    static const char *const lines[] = {"--model llama-3-8b --machine 8xh100 --zero 1",
                                        "--model llama-3-8b --machine 8xh100 --zero 2",
                                        "--model llama-3-8b --machine 8xh100 --zero 3",
                                        "--model qwen2.5-7b --machine 4xa100-40g"};
    for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++) {
        plan(lines[i]);
        struct sw_arithmetic_in n;
        sw_plan_numbers(&c, &n);
        for (int s = 0; s < d.step_count; s++) {
            struct sw_arithmetic_row row;
            sw_arithmetic_scheme(&n, d.steps[s].scheme, &row);
            if (d.steps[s].scheme >= SW_SCHEME_OFFLOAD_OPTIMIZER) continue;
            /* Padding: each unit's shard ends on a block and a page. */
            assert_true(d.steps[s].fit.state_bytes[SW_TIER_DEVICE] <= 1.001 * row.gpu_bytes);
        }
        done();
    }
}

/* A count is its nearest shape, larger or smaller by the ratio. */
static void a_count_is_scaled(void **state) {
    (void)state;
    struct sw_fit fits[2];
    plan("--model llama-3-70b --machine 8xh100");
    fits[0] = d.steps[d.chosen].fit;
    done();
    plan("--model 71B --machine 8xh100");
    fits[1] = d.steps[d.chosen].fit;
    done();
    for (int tier = 0; tier < SW_TIER_NVME; tier++) {
        const double ratio = fits[1].state_bytes[tier] / fits[0].state_bytes[tier];
        assert_true(ratio > 71e9 / 70553706496.0 - 1e-9 && ratio < 71e9 / 70553706496.0 + 1e-9);
        const double rest[] = {fits[0].need_bytes[tier] - fits[0].state_bytes[tier],
                               fits[1].need_bytes[tier] - fits[1].state_bytes[tier]};
        assert_true(rest[0] > rest[1] - 1 && rest[0] < rest[1] + 1);
    }
}

static struct sw_train_options taken;

/* The offered line, by train's parser, has what was counted. */
static void parse_offer(const char *line) {
    int count;
    struct sw_parsed words_parsed;
    char **words = sw_plan_words(&parsed, &c, &d.steps[d.chosen], &count);
    assert_non_null(words);
    assert_string_equal(words[0], "train");
    assert_null(words[count]);
    log_catch();
    if (sw_parse_train(count, words, &taken, &words_parsed)) fail_msg("%s: %s", line, log_text());
    const struct sw_train_options *o = &d.steps[d.chosen].fit.options;
    assert_memory_equal(&taken.params, &o->params, sizeof(o->params));
    assert_memory_equal(&taken.optimizer, &o->optimizer, sizeof(o->optimizer));
    assert_memory_equal(&taken.activations, &o->activations, sizeof(o->activations));
    if (!sw_tiers_is_all(o->optimizer, SW_TIER_DEVICE))
        assert_memory_equal(&taken.gradients, &o->gradients, sizeof(o->gradients));
    assert_int_equal(taken.checkpoint_every, o->checkpoint_every);
    assert_int_equal(taken.ranks, o->ranks);
    assert_int_equal(taken.device, o->device);
    assert_int_equal(taken.shard_in_node, o->shard_in_node);
    assert_int_equal(taken.micro_batch, c.options.micro_batch);
    assert_int_equal(taken.accumulate, c.options.accumulate);
    if (o->ranks * c.nodes > 1) assert_int_equal(taken.zero, o->zero);
    const double *budget = d.steps[d.chosen].fit.budget_bytes;
    if (o->device == SW_DEVICE_CUDA)
        assert_true((double)taken.device_memory_bytes <= budget[SW_TIER_DEVICE]);
    assert_true((double)taken.host_memory_bytes <= budget[SW_TIER_HOST]);
    /* And what it takes with these budgets is what was counted, within their rounding. */
    struct sw_fit again;
    struct sw_train_options as_taken = taken;
    if (sw_tiers_is_all(o->optimizer, SW_TIER_DEVICE)) as_taken.gradients = o->gradients;
    if (as_taken.seq_len == 0) as_taken.seq_len = c.options.seq_len;
    assert_int_equal(sw_plan_fit(&c, &as_taken, &again), 0);
    if (!again.fits) fail_msg("%s: the offered line does not fit", line);
    sw_parsed_close(&words_parsed);
    sw_plan_words_free(words);
}

static void every_offer_is_taken_by_train(void **state) {
    (void)state;
    static const char *const machines[] = {"8xh100",
                                           "8xh200",
                                           "8xa100",
                                           "4xa100-40g",
                                           "rtx4090",
                                           "rtx5090",
                                           "8xh100:ram=1T,nvme=4xgen4",
                                           "8xh100:gpus=0,ram=256G"};
    static const char *const extra[] = {
        "", " --seq-len 2048 --micro-batch 2 --accumulate 4 --lr 1e-4 --steps 100 --seed 3",
        " --optimizer nvme --checkpoint-every 2 --moments 8bit --clip 0 --overlap backward",
        " --freeze model.layers.[0-7].* --nvme /a,/b --nodes 2"};
    int offers = 0;
    for (int shape = 0; sw_subject_shape(shape); shape++)
        for (size_t i = 0; i < sizeof(machines) / sizeof(machines[0]); i++)
            for (size_t k = 0; k < sizeof(extra) / sizeof(extra[0]); k++) {
                char line[512];
                /* What is large takes long to cut into chunks, on one card above all. */
                const char *name = sw_subject_shape(shape);
                const int large =
                    strstr(name, "405b") || strstr(name, "70b") || strstr(name, "72b");
                const int few = strstr(machines[i], "rtx") || strstr(machines[i], "gpus=0");
                if (large && (k || (few && strstr(name, "405b")))) continue;
                snprintf(line, sizeof(line), "--model %s --machine %s%s", sw_subject_shape(shape),
                         machines[i], extra[k]);
                plan(line);
                if (d.chosen >= 0) {
                    parse_offer(line);
                    offers++;
                }
                done();
            }
    assert_true(offers > 90);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_clause_has_its_case),
        cmocka_unit_test(activations_bind),
        cmocka_unit_test(what_the_user_placed_stays),
        cmocka_unit_test(nothing_fits_where_it_cannot),
        cmocka_unit_test(a_run_never_exceeds_the_textbook),
        cmocka_unit_test(a_count_is_scaled),
        cmocka_unit_test(every_offer_is_taken_by_train),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
