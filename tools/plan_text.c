/* tools/plan_text.c - a plan as text: the case, the tables, the decision. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "tools/plan.h"

/* A size, or a dash for nothing. */
static const char *size(double bytes, char *out, size_t out_size) {
    if (bytes > 0) return sw_plan_size(bytes, out, out_size);
    snprintf(out, out_size, "-");
    return out;
}

static void print_subject(const struct sw_plan_case *c, const struct sw_arithmetic_in *n,
                          FILE *out) {
    const struct sw_subject *s = c->subject;
    const struct sw_model_config *config = &s->model.config;
    char params[40], bias[40];
    fprintf(out, "model    %s: %s parameters", s->name,
            sw_plan_commas(s->params, params, sizeof(params)));
    if (n->frozen > 0)
        fprintf(out, ", %s of them frozen",
                sw_plan_commas((uint64_t)llround(n->frozen), params, sizeof(params)));
    fprintf(out, ", %" PRIu32 " layers of hidden size %" PRIu32 "\n", config->layers,
            config->hidden);
    if (s->kind == SW_SUBJECT_COUNT)
        fprintf(out,
                "         a count alone: layers, units and times are those of the nearest known\n"
                "         shape, %s\n",
                s->shape);
    if (s->bias_params)
        fprintf(out,
                "         %s of them are biases of query, key and value: the arithmetic counts\n"
                "         them, train has no place for them and refuses such a model today\n",
                sw_plan_commas(s->bias_params, bias, sizeof(bias)));
}

static void print_machine(const struct sw_plan_case *c, FILE *out) {
    const struct sw_machine *m = c->machine;
    char a[32], b[32], drives[32];
    fprintf(out, "machine  %s: %s\n", m->name, m->about);
    fprintf(out, "         ");
    if (m->gpus > 0)
        fprintf(out, "%.0f GPU%s of %s, ", m->gpus, m->gpus == 1 ? "" : "s",
                sw_plan_size(m->gpu_memory_bytes, a, sizeof(a)));
    fprintf(out, "%s of RAM, %" PRIu32 " drive%s", sw_plan_size(m->memory_bytes, b, sizeof(b)),
            m->drive_count, m->drive_count == 1 ? "" : "s");
    if (sw_machine_drive_bytes(m) > 0)
        fprintf(out, " with %s", sw_plan_size(sw_machine_drive_bytes(m), drives, sizeof(drives)));
    if (m->measured[0])
        fprintf(out, "; measured on %s\n", m->measured);
    else
        fprintf(out, "; rates are published peaks, or unknown\n");
}

static void print_case(const struct sw_plan_case *c, FILE *out) {
    const struct sw_train_options *o = &c->options;
    const uint64_t micro = (uint64_t)o->micro_batch * o->seq_len, rank = micro * o->accumulate;
    char a[40], b[40];
    fprintf(out, "step     %" PRIu32 " rank%s", o->ranks * c->nodes,
            o->ranks * c->nodes == 1 ? "" : "s");
    if (c->nodes > 1) fprintf(out, " on %" PRIu32 " machines", c->nodes);
    fprintf(out, ", %s tokens each (%" PRIu32 " x %s), %s in all\n",
            sw_plan_commas(rank, a, sizeof(a)), o->accumulate, sw_plan_commas(micro, b, sizeof(b)),
            sw_plan_commas(rank * o->ranks * c->nodes, (char[40]){0}, 40));
}

static void print_state(const struct sw_arithmetic_in *n, FILE *out) {
    char all[32], each[32];
    fprintf(out,
            "\nA trained parameter takes 2 (weight) + 2 (gradient) + 12 (master, momentum, "
            "variance)\n= 16 bytes: %s in all, %s per GPU over %.0f.\n",
            sw_plan_size(16 * n->params + 2 * n->frozen, all, sizeof(all)),
            sw_plan_size((16 * n->params + 2 * n->frozen) / n->ranks, each, sizeof(each)),
            n->ranks);
}

static void print_schemes(const struct sw_arithmetic_in *n, FILE *out) {
    fprintf(out, "\n%-18s %-10s %7s %10s %10s %8s %10s %10s %10s\n", "scheme", "B/p a GPU", "=",
            "a GPU", "RAM, NVMe", "traffic", "sends", "PCIe up", "down");
    for (int i = 0; i < SW_SCHEME_COUNT; i++) {
        struct sw_arithmetic_row r;
        char gpu[32], host[32], link[32], up[32], down[32], value[32] = "", traffic[32] = "-";
        sw_arithmetic_scheme(n, (enum sw_scheme)i, &r);
        if (r.gpu_bytes_per_param > 0)
            snprintf(value, sizeof(value), "%.4g", r.gpu_bytes_per_param);
        if (r.traffic_params > 0) snprintf(traffic, sizeof(traffic), "%.0f P", r.traffic_params);
        fprintf(out, "%-18s %-10s %7s %10s %10s %8s %10s %10s %10s\n",
                sw_scheme_name((enum sw_scheme)i), r.formula, value,
                size(r.gpu_bytes, gpu, sizeof(gpu)), size(r.host_bytes, host, sizeof(host)),
                traffic, size(r.link_bytes, link, sizeof(link)), size(r.up_bytes, up, sizeof(up)),
                size(r.down_bytes, down, sizeof(down)));
    }
    fprintf(out,
            "N = %.0f, S = %.0f (GPUs of a machine), P = parameters. What each GPU sends to others "
            "and moves\nover its PCIe link is that of a step. An offload scheme has a unit's "
            "gradients on the GPU\nbeside its row, or a few units. Textbook's rows: a run takes no "
            "more.\n",
            n->ranks, n->node_ranks);
}

static void print_keeps(const struct sw_arithmetic_in *n, FILE *out) {
    fprintf(out, "\n%-22s %5s %14s %12s %10s\n", "activations", "K", "bytes a token", "a GPU",
            "forwards");
    for (int i = 0; i < SW_KEEP_COUNT; i++) {
        struct sw_keep_row r;
        char token[32], gpu[32], k[16] = "-";
        sw_arithmetic_keep(n, (enum sw_keep)i, &r);
        if (r.every > 0) snprintf(k, sizeof(k), "%.0f", r.every);
        if (r.bytes_per_token >= 1e6)
            snprintf(token, sizeof(token), "%.2f MB", r.bytes_per_token / 1e6);
        else
            snprintf(token, sizeof(token), "%.1f kB", r.bytes_per_token / 1e3);
        fprintf(out, "%-22s %5s %14s %12s %10.2f\n", sw_keep_name((enum sw_keep)i), k, token,
                sw_plan_size(r.gpu_bytes, gpu, sizeof(gpu)), r.forwards);
    }
    fprintf(out, "A backward costs two forwards; what is not kept is computed again.\n");
}

static void print_besides(const struct sw_plan_case *c, const struct sw_arithmetic_in *n,
                          FILE *out) {
    fprintf(out, "\n%-18s %10s %10s  %s\n", "beside them", "state", "a GPU", "");
    for (int i = 0; i < SW_BESIDE_COUNT; i++) {
        struct sw_beside_row r;
        char all[32], gpu[32], link[32], note[128] = "";
        sw_arithmetic_beside(n, (enum sw_beside)i, &r);
        if (i == SW_BESIDE_LORA || i == SW_BESIDE_QLORA)
            snprintf(note, sizeof(note), "adapters of %.0f%%, the base frozen on each GPU",
                     100 * n->adapters);
        if (i == SW_BESIDE_MOMENTS8)
            snprintf(note, sizeof(note), "%.4g B/p: train --moments 8bit; sharded as stage 3",
                     SW_WEIGHT_BYTES + SW_GRADIENT_BYTES + n->moments8_bytes);
        if (i == SW_BESIDE_TENSOR)
            snprintf(note, sizeof(note), "over %.0f; %s sent a step, between all layers",
                     n->node_ranks, size(r.link_bytes, link, sizeof(link)));
        if (i == SW_BESIDE_PIPELINE)
            snprintf(note, sizeof(note),
                     "over %.0f; %s sent a step, idle %.0f%% with %" PRIu32 " %s", n->ranks,
                     size(r.link_bytes, link, sizeof(link)), 100 * r.idle_share,
                     c->options.accumulate,
                     c->options.accumulate == 1 ? "micro-batch" : "micro-batches");
        fprintf(out, "%-18s %10s %10s  %s\n", sw_beside_name((enum sw_beside)i),
                sw_plan_size(r.bytes, all, sizeof(all)),
                sw_plan_size(r.gpu_bytes, gpu, sizeof(gpu)), note);
    }
    fprintf(out, "Of these train has the 8-bit moments.\n");
}

static void print_fit(const struct sw_plan_case *c, const struct sw_fit *f, FILE *out) {
    static const char *const who[] = {"each rank's device", "RAM of a machine",
                                      "NVMe of a machine"};
    char need[32], have[32];
    fprintf(out, "\nwhat the run would take:\n");
    for (int t = 0; t < SW_TIER_COUNT; t++) {
        if (f->need_bytes[t] == 0) continue;
        fprintf(out, "  %-18s %10s", who[t], sw_plan_size(f->need_bytes[t], need, sizeof(need)));
        if (f->budget_bytes[t] > 0)
            fprintf(out, " of %10s", sw_plan_size(f->budget_bytes[t], have, sizeof(have)));
        fputc('\n', out);
    }
    if (c->subject->kind != SW_SUBJECT_COUNT)
        fprintf(out, "train --dry-run prints the same byte for byte, where the model is.\n");
}

void sw_plan_wrapped(const char *text, const char *indent, FILE *out) {
    const size_t width = 96;
    size_t column = 0;
    while (*text) {
        const size_t length = strcspn(text, " ");
        if (column && column + 1 + length > width) {
            fprintf(out, "\n%s", indent);
            column = strlen(indent);
        } else if (column) {
            fputc(' ', out);
            column++;
        }
        fprintf(out, "%.*s", (int)length, text);
        column += length;
        text += length;
        while (*text == ' ') text++;
    }
    fputc('\n', out);
}

static void print_decision(const struct sw_plan_case *c, const struct sw_plan_decision *d,
                           FILE *out) {
    char text[1024];
    fprintf(out, "\ndecision:\n");
    for (int i = 0; i < d->step_count; i++) {
        sw_plan_verdict(c, d, i, text, sizeof(text));
        sw_plan_wrapped(text, "  ", out);
    }
    sw_plan_conclusion(c, d, text, sizeof(text));
    fprintf(out, "\n");
    sw_plan_wrapped(text, "", out);
}

void sw_plan_print(const struct sw_plan_case *c, const struct sw_plan_decision *d,
                   const struct sw_plan_answer *a, FILE *out) {
    struct sw_arithmetic_in n;
    sw_plan_numbers(c, &n);
    print_subject(c, &n, out);
    print_machine(c, out);
    print_case(c, out);
    print_state(&n, out);
    print_schemes(&n, out);
    print_keeps(&n, out);
    print_besides(c, &n, out);
    print_decision(c, d, out);
    if (!a) {
        print_fit(c, &d->steps[d->step_count - 1].fit, out);
        return;
    }
    sw_plan_print_search(c, a, out);
    print_fit(c, &a->found.step.fit, out);
    sw_plan_print_times(c, &a->found.step.fit, &a->found.times, out);
    fprintf(out, "\nrun");
    if (c->subject->kind != SW_SUBJECT_FILES)
        fprintf(out, ", with the folder of your model in the place of %s", c->subject->name);
    if (c->subject->bias_params) fprintf(out, " (which train refuses today, for its biases)");
    fprintf(out, ":\n ");
    if (c->nodes > 1) fprintf(out, " mpirun -np %" PRIu32, c->nodes);
    sw_print_quoted(program_invocation_name, out);
    for (int i = 0; a->words[i]; i++) sw_print_quoted(a->words[i], out);
    fputc('\n', out);
}
