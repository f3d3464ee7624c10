/* tools/plan_json.c - a plan as one object: plain numbers, in bytes and per second. */
#include <math.h>
#include <string.h>

#include "tools/plan.h"

static json_t *number(double value) {
    if (value == floor(value) && fabs(value) < 0x1p53) return json_integer((json_int_t)value);
    return json_real(value);
}

static void set(json_t *object, const char *key, double value) {
    json_object_set_new(object, key, number(value));
}

static json_t *subject_json(const struct sw_subject *s, const struct sw_arithmetic_in *n) {
    static const char *const kinds[] = {"files", "shape", "count"};
    json_t *o = json_pack("{s:s, s:s, s:o}", "name", s->name, "kind", kinds[s->kind], "shape",
                          s->shape ? json_string(s->shape) : json_null());
    set(o, "params", (double)s->params);
    set(o, "trained_params", n->params);
    set(o, "bias_params_not_trained", (double)s->bias_params);
    set(o, "unit_params_max", n->unit_params);
    set(o, "layers", n->layers);
    set(o, "hidden", n->hidden);
    return o;
}

static json_t *machine_json(const struct sw_machine *m) {
    json_t *o = json_pack("{s:s, s:s, s:s, s:s}", "name", m->name, "about", m->about, "gpu", m->gpu,
                          "measured", m->measured);
    const char *name;
    double value;
    for (int i = 0; (name = sw_machine_figure(m, i, &value)); i++) set(o, name, value);
    json_t *drives = json_array();
    for (uint32_t i = 0; i < m->drive_count; i++) {
        const struct sw_machine_drive *d = &m->drives[i];
        json_t *drive = json_pack("{s:s}", "drive", d->name);
        set(drive, "bytes", d->bytes);
        set(drive, "read_bytes_per_s", d->read_bytes_per_s);
        set(drive, "write_bytes_per_s", d->write_bytes_per_s);
        set(drive, "mixed_bytes_per_s", d->mixed_bytes_per_s);
        json_array_append_new(drives, drive);
    }
    json_object_set_new(o, "drives", drives);
    json_t *numa = json_array();
    for (uint32_t i = 0; i < m->numa_count; i++) {
        json_t *node = json_object();
        set(node, "cores", m->numa[i].cores);
        set(node, "memory_bytes", m->numa[i].memory_bytes);
        set(node, "memory_bytes_per_s", m->numa[i].memory_bytes_per_s);
        set(node, "adam_bytes_per_s", m->numa[i].adam_bytes_per_s);
        json_array_append_new(numa, node);
    }
    json_object_set_new(o, "numa_nodes", numa);
    return o;
}

static json_t *schemes_json(const struct sw_arithmetic_in *n) {
    json_t *list = json_array();
    for (int i = 0; i < SW_SCHEME_COUNT; i++) {
        struct sw_arithmetic_row r;
        sw_arithmetic_scheme(n, (enum sw_scheme)i, &r);
        json_t *o = json_pack("{s:s, s:s}", "scheme", sw_scheme_name((enum sw_scheme)i), "formula",
                              r.formula);
        set(o, "gpu_bytes_per_param", r.gpu_bytes_per_param);
        set(o, "gpu_bytes", r.gpu_bytes);
        set(o, "host_bytes_per_param", r.host_bytes_per_param);
        set(o, "host_bytes", r.host_bytes);
        set(o, "traffic_params", r.traffic_params);
        set(o, "link_bytes", r.link_bytes);
        set(o, "up_bytes", r.up_bytes);
        set(o, "down_bytes", r.down_bytes);
        json_array_append_new(list, o);
    }
    return list;
}

static json_t *keeps_json(const struct sw_arithmetic_in *n) {
    json_t *list = json_array();
    for (int i = 0; i < SW_KEEP_COUNT; i++) {
        struct sw_keep_row r;
        sw_arithmetic_keep(n, (enum sw_keep)i, &r);
        json_t *o = json_pack("{s:s}", "keep", sw_keep_name((enum sw_keep)i));
        set(o, "checkpoint_every", r.every);
        set(o, "bytes_per_token", r.bytes_per_token);
        set(o, "gpu_bytes", r.gpu_bytes);
        set(o, "forwards", r.forwards);
        json_array_append_new(list, o);
    }
    return list;
}

static json_t *besides_json(const struct sw_arithmetic_in *n) {
    json_t *list = json_array();
    for (int i = 0; i < SW_BESIDE_COUNT; i++) {
        struct sw_beside_row r;
        sw_arithmetic_beside(n, (enum sw_beside)i, &r);
        json_t *o = json_pack("{s:s}", "beside", sw_beside_name((enum sw_beside)i));
        set(o, "bytes", r.bytes);
        set(o, "gpu_bytes", r.gpu_bytes);
        set(o, "link_bytes", r.link_bytes);
        set(o, "idle_share", r.idle_share);
        json_array_append_new(list, o);
    }
    return list;
}

static json_t *by_tier(const double bytes[SW_TIER_COUNT]) {
    json_t *o = json_object();
    for (int t = 0; t < SW_TIER_COUNT; t++) set(o, sw_tier_name((enum sw_tier)t), bytes[t]);
    return o;
}

static json_t *rows_json(const struct sw_fit *f) {
    json_t *list = json_array();
    for (int i = 0; i < f->row_count; i++)
        json_array_append_new(
            list, json_pack("{s:s, s:s, s:I}", "tier", sw_tier_name(f->rows[i].tier), "what",
                            f->rows[i].what, "bytes", (json_int_t)f->rows[i].bytes));
    return list;
}

static json_t *step_json(const struct sw_plan_case *c, const struct sw_plan_decision *d, int i) {
    const struct sw_plan_step *s = &d->steps[i];
    char text[1024];
    sw_plan_verdict(c, d, i, text, sizeof(text));
    json_t *o = json_pack("{s:s, s:b, s:b, s:b, s:s}", "scheme", sw_scheme_name(s->scheme), "fits",
                          s->fits, "state_fits", s->state_fits, "activations_bound",
                          s->activations_bound, "verdict", text);
    set(o, "gpu_state_bytes", s->gpu_state_bytes);
    set(o, "gpu_need_bytes", s->gpu_need_bytes);
    json_object_set_new(o, "need_bytes", by_tier(s->fit.need_bytes));
    json_object_set_new(o, "budget_bytes", by_tier(s->fit.budget_bytes));
    return o;
}

/* Rows and command are those of what the search found. */
static json_t *decision_json(const struct sw_plan_case *c, const struct sw_plan_decision *d,
                             const struct sw_plan_answer *a) {
    char text[1024];
    char **words = a ? a->words : NULL;
    json_t *steps = json_array(), *command = json_array();
    for (int i = 0; i < d->step_count; i++) json_array_append_new(steps, step_json(c, d, i));
    for (int i = 0; words && words[i]; i++) json_array_append_new(command, json_string(words[i]));
    sw_plan_conclusion(c, d, text, sizeof(text));
    const struct sw_plan_step *last = &d->steps[d->chosen < 0 ? d->step_count - 1 : d->chosen];
    return json_pack("{s:b, s:o, s:s, s:o, s:o, s:o}", "fits", d->chosen >= 0, "scheme",
                     d->chosen < 0 ? json_null() : json_string(sw_scheme_name(last->scheme)),
                     "conclusion", text, "steps", steps, "rows",
                     rows_json(a ? &a->found.step.fit : &last->fit), "command",
                     words ? command : (json_decref(command), json_null()));
}

json_t *sw_plan_json(const struct sw_plan_case *c, const struct sw_plan_decision *d,
                     const struct sw_plan_answer *a) {
    struct sw_arithmetic_in n;
    sw_plan_numbers(c, &n);
    json_t *step = json_object();
    set(step, "ranks", n.ranks);
    set(step, "nodes", c->nodes);
    set(step, "tokens_per_rank", n.micro_tokens * n.micro_batches);
    set(step, "tokens", n.micro_tokens * n.micro_batches * n.ranks);
    json_t *state = json_object();
    set(state, "bytes_per_param", SW_STATE_BYTES);
    set(state, "bytes", SW_STATE_BYTES * n.params + SW_WEIGHT_BYTES * n.frozen);
    return json_pack("{s:i, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "schema", 1,
                     "model", subject_json(c->subject, &n), "machine", machine_json(c->machine),
                     "step", step, "state", state, "schemes", schemes_json(&n), "activations",
                     keeps_json(&n), "beside", besides_json(&n), "decision", decision_json(c, d, a),
                     "search", a ? sw_plan_search_json(a) : json_null(), "times",
                     a ? sw_plan_times_json(&a->found.step.fit, &a->found.times) : json_null());
}
