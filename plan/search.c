/* plan/search.c - see the header.
 *
 * A hill is climbed from several places. A candidate is changed in one thing (a share goes down a
 * tier, another K, stage, overlap, other late units); the memory that this leaves is filled again,
 * state by state, with what fits. Nothing is fitted or played twice. */
#include "plan/search.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"

/* Placements that are played at most, and that are played with all ranks at the end. */
enum { FINE_STARTS = 3, FINALISTS = 2, ENTRIES_MAX = 4096, NO_ENTRY = ENTRIES_MAX };

/* First with few large chunks, then, from the best, with those of the run. */
enum grain { COARSE, FINE, GRAINS };
static const uint32_t plays_max[GRAINS] = {200, 8};

/* Shares are tried by so many percent. */
enum { PERCENT_STEP = 5 };

/* Percent of late units that a search begins with, near those that the engine takes unasked. */
enum { LATE_BELOW = 30, LATE_TOP = 20 };

/* Steps closer than this are equal, and the one that was there first stays. */
#define EQUAL_SHARE 1e-3

/* Of equally fast ones those are better that write less to the drives, which wear: so much of the
 * time that the drives write counts as if it were the step's. */
#define WEAR_SHARE 0.01

enum state { PARAMS, GRADIENTS, ACTIVATIONS, OPTIMIZER, STATES };

/* What may differ between candidates. */
struct choice {
    struct sw_tiers tiers[STATES];
    int64_t zero, late_below, late_top;
    uint32_t checkpoint_every;
    enum sw_overlap overlap;
    int shard_in_node;
};

struct entry {
    struct choice choice;
    int fits, played[GRAINS];
    uint8_t given_up[SW_TIER_COUNT];
    double score_s[GRAINS];
};

struct search {
    const struct sw_plan_case *c;
    int open[STATES], k_open, overlap_open, late_open;
    struct entry *entries;
    uint32_t entry_count, plays[GRAINS];
    enum grain grain;
    uint32_t best, looked_at; /* looked_at: whose fit is `fit` */
    struct sw_fit fit;
    int climbed; /* the best is another one than before */
};

/* ---- candidates ---- */

static struct sw_tiers *state_of(struct sw_train_options *o, int state) {
    struct sw_tiers *const all[] = {&o->params, &o->gradients, &o->activations, &o->optimizer};
    return all[state];
}

static void apply(const struct choice *choice, struct sw_train_options *o) {
    for (int s = 0; s < STATES; s++) *state_of(o, s) = choice->tiers[s];
    o->zero = choice->zero;
    o->shard_in_node = choice->shard_in_node;
    o->checkpoint_every = choice->checkpoint_every;
    o->overlap = choice->overlap;
    o->late_below = choice->late_below;
    o->late_top = choice->late_top;
}

static void read_choice(const struct sw_train_options *options, struct choice *choice) {
    struct sw_train_options o = *options;
    memset(choice, 0, sizeof(*choice)); /* compared as bytes */
    for (int s = 0; s < STATES; s++) choice->tiers[s] = *state_of(&o, s);
    choice->zero = o.zero;
    choice->shard_in_node = o.shard_in_node;
    choice->checkpoint_every = o.checkpoint_every;
    choice->overlap = sw_overlap_of(&o);
    choice->late_below = o.late_below;
    choice->late_top = o.late_top;
}

void sw_plan_place(struct sw_train_options *o, const struct sw_train_options *placed) {
    struct choice choice;
    read_choice(placed, &choice);
    apply(&choice, o);
}

/* What train would refuse. */
static int is_allowed(const struct choice *c) {
    const struct sw_tiers *t = c->tiers;
    const int on_device = sw_tiers_is_all(t[PARAMS], SW_TIER_DEVICE);
    if (!on_device && sw_tiers_has(t[PARAMS], SW_TIER_DEVICE)) return 0;
    if (!on_device && sw_tiers_has(t[OPTIMIZER], SW_TIER_DEVICE)) return 0;
    if (sw_tiers_is_all(t[OPTIMIZER], SW_TIER_DEVICE) &&
        !sw_tiers_is_all(t[GRADIENTS], SW_TIER_DEVICE))
        return 0;
    return c->late_below + c->late_top <= 100;
}

/* s->fit becomes that of an entry. 0 or -errno. */
static int fit_entry(struct search *s, uint32_t index) {
    struct sw_train_options o = s->c->options;
    if (s->looked_at == index) return 0;
    apply(&s->entries[index].choice, &o);
    s->looked_at = NO_ENTRY;
    const int ret = sw_plan_fit(s->c, &o, &s->fit);
    if (ret == 0) s->looked_at = index;
    return ret;
}

/* The entry of a candidate, fitted if it is new; its index, or -errno. */
static int64_t look(struct search *s, const struct choice *choice) {
    for (uint32_t i = 0; i < s->entry_count; i++)
        if (!memcmp(&s->entries[i].choice, choice, sizeof(*choice))) return i;
    if (s->entry_count == ENTRIES_MAX) return -ENOSPC;
    struct entry *entry = &s->entries[s->entry_count];
    *entry = (struct entry){.choice = *choice, .score_s = {INFINITY, INFINITY}};
    if (is_allowed(choice)) {
        const int ret = fit_entry(s, s->entry_count);
        if (ret < 0) return ret;
        entry->fits = s->fit.fits;
        memcpy(entry->given_up, s->fit.given_up, sizeof(s->fit.given_up));
    }
    return s->entry_count++;
}

static double score(const struct sw_simulation *times) {
    return times->step_s + WEAR_SHARE * times->busy_s[SW_LANE_NVME_WRITE];
}

/* Its step's time, played if nobody did; entries that do not fit have none. 0 or -errno. */
static int play(struct search *s, uint32_t index) {
    struct entry *entry = &s->entries[index];
    const int grain = s->grain;
    if (!entry->fits || entry->played[grain] || s->plays[grain] == plays_max[grain]) return 0;
    struct sw_simulation times;
    int ret = fit_entry(s, index);
    if (ret == 0) ret = sw_simulate_one(s->c, &s->fit, grain == COARSE, &times);
    if (ret < 0) return ret;
    entry->played[grain] = 1;
    entry->score_s[grain] = score(&times);
    s->plays[grain]++;
    return 0;
}

/* ---- memory is filled ---- */

/* Weights are read twice a step and written once for their bytes, gradients, kept inputs and
 * records written and read once. */
static const struct raise {
    enum state state;
    enum sw_tier to;
} raises[] = {
    {PARAMS, SW_TIER_DEVICE},    {ACTIVATIONS, SW_TIER_DEVICE}, {GRADIENTS, SW_TIER_DEVICE},
    {OPTIMIZER, SW_TIER_DEVICE}, {PARAMS, SW_TIER_HOST},        {ACTIVATIONS, SW_TIER_HOST},
    {GRADIENTS, SW_TIER_HOST},   {OPTIMIZER, SW_TIER_HOST},
};
enum { RAISES = sizeof(raises) / sizeof(raises[0]) };

/* Moves a share up from the tiers below, the nearest first. */
static void move_up(struct sw_tiers *t, enum sw_tier to, int percent) {
    for (int from = to + 1; from < SW_TIER_COUNT; from++) {
        const int moved = t->percent[from] < percent ? t->percent[from] : percent;
        t->percent[from] = (uint8_t)(t->percent[from] - moved);
        t->percent[to] = (uint8_t)(t->percent[to] + moved);
        percent -= moved;
    }
}

static int below(struct sw_tiers t, enum sw_tier tier) {
    int percent = 0;
    for (int from = tier + 1; from < SW_TIER_COUNT; from++) percent += t.percent[from];
    return percent;
}

/* The update on the device has its gradients there. */
static void raised(struct choice *c, const struct raise *r, int percent) {
    move_up(&c->tiers[r->state], r->to, percent);
    if (r->state == OPTIMIZER && sw_tiers_is_all(c->tiers[OPTIMIZER], SW_TIER_DEVICE))
        c->tiers[GRADIENTS] = sw_tiers_all(SW_TIER_DEVICE);
}

/* What a filling leaves: all rings as long as they were before, or nothing. */
enum room { ROOMY, FULL, ROOMS };

struct filling {
    enum room room;
    uint8_t given_up[SW_TIER_COUNT]; /* before */
};

/* 1: fits with so much of a state raised. */
static int fits_raised(struct search *s, const struct choice *c, const struct filling *f,
                       const struct raise *r, int percent) {
    struct choice next = *c;
    raised(&next, r, percent);
    const int64_t at = look(s, &next);
    if (at < 0) return (int)at;
    const struct entry *entry = &s->entries[at];
    int fits = entry->fits;
    for (int t = 0; t < SW_TIER_COUNT && f->room == ROOMY; t++)
        fits &= entry->given_up[t] <= f->given_up[t];
    return fits;
}

/* Raises as much of a state as fits. */
static int raise_state(struct search *s, struct choice *c, const struct filling *f,
                       const struct raise *r) {
    const int all = below(c->tiers[r->state], r->to);
    if (all == 0) return 0;
    int ret = fits_raised(s, c, f, r, all);
    if (ret == 1) raised(c, r, all);
    if (ret != 0 || (r->state == PARAMS && r->to == SW_TIER_DEVICE)) return ret < 0 ? ret : 0;
    int low = 0, high = (all + PERCENT_STEP - 1) / PERCENT_STEP;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        ret = fits_raised(s, c, f, r, middle * PERCENT_STEP);
        if (ret < 0) return ret;
        if (ret)
            low = middle;
        else
            high = middle;
    }
    if (low > 0) raised(c, r, low * PERCENT_STEP);
    return 0;
}

/* `but`: the state that is left where it is; STATES: none. */
static int fill(struct search *s, struct choice *c, enum room room, int but) {
    struct filling f = {.room = room};
    const int64_t at = look(s, c);
    if (at < 0) return (int)at;
    memcpy(f.given_up, s->entries[at].given_up, sizeof(f.given_up));
    for (int i = 0; i < RAISES; i++) {
        if (!s->open[raises[i].state] || (int)raises[i].state == but) continue;
        const int ret = raise_state(s, c, &f, &raises[i]);
        if (ret < 0) return ret;
    }
    return 0;
}

/* ---- the climb ---- */

/* Makes a candidate the best, where it is faster. 0 or -errno. */
static int try_choice(struct search *s, const struct choice *choice) {
    const int64_t at = look(s, choice);
    int ret = at < 0 ? (int)at : play(s, (uint32_t)at);
    if (ret < 0) return ret;
    const int grain = s->grain;
    if (s->entries[at].score_s[grain] >= s->entries[s->best].score_s[grain] * (1 - EQUAL_SHARE))
        return 0;
    s->best = (uint32_t)at;
    s->climbed = 1;
    return 0;
}

/* The same, as it is and with the memory filled that it leaves. */
static int try_filled(struct search *s, const struct choice *choice, int but) {
    const int64_t at = look(s, choice);
    int ret = at < 0 ? (int)at : try_choice(s, choice);
    for (int room = 0; room < ROOMS && ret == 0 && s->entries[at].fits; room++) {
        struct choice filled = *choice;
        ret = fill(s, &filled, (enum room)room, but);
        if (ret == 0) ret = try_choice(s, &filled);
    }
    return ret;
}

/* A share of a state goes to another tier. */
static int move_share(struct search *s, int state, enum sw_tier from, enum sw_tier to,
                      int percent) {
    struct choice next = s->entries[s->best].choice;
    struct sw_tiers *t = &next.tiers[state];
    const int have = t->percent[from];
    if (have == 0 || (percent > have && percent != 100)) return 0;
    const int moved = percent < have ? percent : have;
    t->percent[from] = (uint8_t)(have - moved);
    t->percent[to] = (uint8_t)(t->percent[to] + moved);
    /* Of weights all are on the device or none; Adam there has its gradients there. */
    if (state == OPTIMIZER && sw_tiers_is_all(*t, SW_TIER_DEVICE) && s->open[GRADIENTS])
        next.tiers[GRADIENTS] = sw_tiers_all(SW_TIER_DEVICE);
    return is_allowed(&next) ? try_filled(s, &next, state) : 0;
}

static int move_states(struct search *s) {
    static const int percents[] = {100, 50, 20, PERCENT_STEP};
    const int tiers = s->c->machine->drive_count ? SW_TIER_COUNT : SW_TIER_NVME;
    for (size_t p = 0; p < sizeof(percents) / sizeof(percents[0]); p++)
        for (int state = 0; state < STATES; state++)
            for (int from = 0; from < tiers && s->open[state]; from++)
                for (int to = 0; to < tiers; to++) {
                    if (to == from) continue;
                    const int ret =
                        move_share(s, state, (enum sw_tier)from, (enum sw_tier)to, percents[p]);
                    if (ret < 0) return ret;
                }
    return 0;
}

/* A share of one state goes down a tier, and one other has the room. */
static int exchange(struct search *s, int down, enum sw_tier from, int percent) {
    const struct choice best = s->entries[s->best].choice;
    for (int i = 0; i < RAISES; i++) {
        const struct raise *r = &raises[i];
        struct choice next = best;
        struct filling f = {.room = ROOMY};
        struct sw_tiers *t = &next.tiers[down];
        if ((int)r->state == down || !s->open[r->state] || r->to != from) continue;
        t->percent[from] = (uint8_t)(t->percent[from] - percent);
        t->percent[from + 1] = (uint8_t)(t->percent[from + 1] + percent);
        memcpy(f.given_up, s->entries[s->best].given_up, sizeof(f.given_up));
        int ret = is_allowed(&next) ? raise_state(s, &next, &f, r) : 0;
        if (ret == 0) ret = try_choice(s, &next);
        if (ret < 0) return ret;
    }
    return 0;
}

static int move_exchanges(struct search *s) {
    static const int percents[] = {PERCENT_STEP, 20, 50};
    const int tiers = s->c->machine->drive_count ? SW_TIER_NVME : SW_TIER_HOST;
    for (size_t p = 0; p < sizeof(percents) / sizeof(percents[0]); p++)
        for (int state = 0; state < STATES; state++)
            for (int from = 0; from < tiers && s->open[state]; from++) {
                if (s->entries[s->best].choice.tiers[state].percent[from] < percents[p]) continue;
                const int ret = exchange(s, state, (enum sw_tier)from, percents[p]);
                if (ret < 0) return ret;
            }
    return 0;
}

static int move_checkpoints(struct search *s) {
    static const struct {
        double times, plus;
    } changes[] = {{0, 1}, {1, -1}, {1, 1}, {0.5, 0}, {2, 0}};
    const double layers = s->c->subject->model.config.layers;
    for (size_t i = 0; i < sizeof(changes) / sizeof(changes[0]) && s->k_open; i++) {
        struct choice next = s->entries[s->best].choice;
        const double k = floor(changes[i].times * next.checkpoint_every + changes[i].plus);
        if (k < 1 || k > layers || k == next.checkpoint_every) continue;
        next.checkpoint_every = (uint32_t)k;
        const int ret = try_filled(s, &next, STATES);
        if (ret < 0) return ret;
    }
    return 0;
}

static int move_stage(struct search *s) {
    const uint32_t ranks = s->c->options.ranks * s->c->nodes;
    for (int zero = 0; zero <= 3 && ranks > 1 && s->c->options.zero < 0; zero++) {
        struct choice next = s->entries[s->best].choice;
        next.zero = zero;
        const int ret = try_filled(s, &next, STATES);
        if (ret < 0) return ret;
    }
    return 0;
}

static int move_overlap(struct search *s) {
    static const enum sw_overlap modes[] = {SW_OVERLAP_NONE, SW_OVERLAP_FORWARD,
                                            SW_OVERLAP_BACKWARD};
    for (int i = 0; i < 3 && s->overlap_open; i++) {
        struct choice next = s->entries[s->best].choice;
        if (modes[i] == SW_OVERLAP_BACKWARD && s->c->options.clip > 0) continue;
        if (modes[i] != SW_OVERLAP_BACKWARD) next.late_below = next.late_top = -1;
        next.overlap = modes[i];
        const int ret = try_choice(s, &next);
        if (ret < 0) return ret;
    }
    return 0;
}

/* More or fewer of the first units are late, or of the last ones. */
static int move_late(struct search *s) {
    static const int64_t changes[] = {-20, -5, 5, 20};
    for (size_t i = 0; i < 2 * sizeof(changes) / sizeof(changes[0]) && s->late_open; i++) {
        struct choice next = s->entries[s->best].choice;
        if (next.overlap != SW_OVERLAP_BACKWARD) return 0;
        if (next.late_below < 0) next.late_below = LATE_BELOW;
        if (next.late_top < 0) next.late_top = LATE_TOP;
        int64_t *share = i % 2 ? &next.late_top : &next.late_below;
        *share += changes[i / 2];
        if (*share < 0) *share = 0;
        const int ret = is_allowed(&next) ? try_choice(s, &next) : 0;
        if (ret < 0) return ret;
    }
    return 0;
}

/* Over and over, until nothing that is changed makes it faster. */
static int climb(struct search *s) {
    static int (*const moves[])(struct search *) = {move_states, move_exchanges, move_checkpoints,
                                                    move_stage,  move_overlap,   move_late};
    do {
        s->climbed = 0;
        for (size_t m = 0;
             m < sizeof(moves) / sizeof(moves[0]) && s->plays[s->grain] < plays_max[s->grain];
             m++) {
            const int ret = moves[m](s);
            if (ret < 0) return ret == -ENOSPC ? 0 : ret;
        }
    } while (s->climbed);
    return 0;
}

/* ---- where it begins ---- */

/* Everything as low as it goes, then filled. */
static int start_full(struct search *s, const struct choice *decided, int64_t zero) {
    const enum sw_tier lowest = s->c->machine->drive_count ? SW_TIER_NVME : SW_TIER_HOST;
    struct choice c = *decided;
    c.zero = zero;
    for (int state = 0; state < STATES; state++)
        if (s->open[state]) c.tiers[state] = sw_tiers_all(lowest);
    if (s->k_open) c.checkpoint_every = 1;
    return try_filled(s, &c, STATES);
}

static int start(struct search *s, const struct choice *decided) {
    int64_t at = look(s, decided);
    int ret = at < 0 ? (int)at : play(s, (uint32_t)at);
    if (ret < 0) return ret;
    s->best = (uint32_t)at;
    ret = try_filled(s, decided, STATES);
    const int stages = s->c->options.ranks * s->c->nodes > 1 && s->c->options.zero < 0;
    for (int64_t zero = 0; zero <= 3 && ret >= 0; zero++)
        if (stages || zero == decided->zero) ret = start_full(s, decided, zero);
    return ret < 0 ? ret : 0;
}

/* ---- the result ---- */

static enum sw_scheme scheme_of(const struct sw_plan_case *c, const struct sw_train_options *o) {
    static const enum sw_scheme stages[] = {SW_SCHEME_DATA_PARALLEL, SW_SCHEME_ZERO1,
                                            SW_SCHEME_ZERO2, SW_SCHEME_ZERO3};
    if (!sw_tiers_is_all(o->params, SW_TIER_DEVICE)) return SW_SCHEME_OFFLOAD_ALL;
    if (!sw_tiers_is_all(o->optimizer, SW_TIER_DEVICE)) return SW_SCHEME_OFFLOAD_OPTIMIZER;
    if (o->ranks * c->nodes == 1) return SW_SCHEME_DATA_PARALLEL;
    return o->shard_in_node && c->nodes > 1 ? SW_SCHEME_HYBRID : stages[o->zero];
}

static int weigh(const struct search *s, const struct choice *choice, struct sw_plan_step *step) {
    struct sw_train_options o = s->c->options;
    apply(choice, &o);
    if (o.overlap == sw_overlap_of(&s->c->options)) o.overlap = s->c->options.overlap;
    *step = (struct sw_plan_step){.scheme = scheme_of(s->c, &o), .state_fits = 1, .fits = 1};
    const int ret = sw_plan_fit(s->c, &o, &step->fit);
    step->gpu_state_bytes = step->fit.state_bytes[SW_TIER_DEVICE];
    step->gpu_need_bytes = step->fit.need_bytes[SW_TIER_DEVICE];
    return ret;
}

/* The fastest entry that was played at a grain but these; -1: none is left. */
static int64_t next_best(const struct search *s, enum grain grain, const int64_t *but, int count) {
    int64_t best = -1;
    for (uint32_t i = 0; i < s->entry_count; i++) {
        int taken = !s->entries[i].played[grain];
        for (int k = 0; k < count; k++) taken |= but[k] == i;
        if (taken) continue;
        if (best < 0 || s->entries[i].score_s[grain] < s->entries[best].score_s[grain]) best = i;
    }
    return best;
}

/* The best few of the coarse climb again, and on from the best of these. */
static int climb_finely(struct search *s) {
    int64_t best[FINE_STARTS];
    s->grain = FINE;
    int ret = play(s, 0); /* the rule's choice */
    s->best = 0;
    for (int i = 0; i < FINE_STARTS && ret == 0; i++) {
        best[i] = next_best(s, COARSE, best, i);
        if (best[i] < 0) break;
        ret = try_choice(s, &s->entries[best[i]].choice);
    }
    return ret < 0 ? ret : climb(s);
}

/* The best few with every rank. The rule's choice is among them and stays where it is as fast. */
static int conclude(const struct search *s, struct sw_plan_found *out) {
    int64_t finalists[FINALISTS + 1] = {-1};
    for (int i = 0; i < FINALISTS; i++) {
        const int64_t at = next_best(s, FINE, finalists, i);
        finalists[i] = at;
        if (at < 0) break;
        struct sw_plan_step step;
        struct sw_simulation times;
        int ret = at == 0 ? 0 : weigh(s, &s->entries[at].choice, &step);
        if (ret == 0 && at > 0) ret = sw_simulate(s->c, &step.fit, NULL, &times);
        if (ret < 0) return ret;
        if (at == 0 || score(&times) >= score(&out->times) * (1 - EQUAL_SHARE)) continue;
        out->step = step;
        out->times = times;
    }
    return 0;
}

static const char *missing_rate(const struct sw_simulation *times) {
    for (uint32_t i = 0; i < times->missing_count; i++)
        if (strcmp(times->missing[i], "commit_s")) return times->missing[i];
    return NULL;
}

static int search(struct search *s, const struct sw_plan_step *decided, struct sw_plan_found *out) {
    const struct sw_train_options *asked = &s->c->options;
    struct sw_train_options o = *asked;
    for (int i = 0; i < STATES; i++) s->open[i] = !sw_tiers_chosen(*state_of(&o, i));
    s->k_open = asked->checkpoint_every <= 1;
    s->overlap_open = asked->overlap == SW_OVERLAP_AUTO;
    s->late_open = asked->late_below < 0 && asked->late_top < 0;
    struct choice first;
    read_choice(&decided->fit.options, &first);
    int ret = start(s, &first);
    if (ret == 0) ret = climb(s);
    if (ret == 0) ret = climb_finely(s);
    if (ret == 0) ret = conclude(s, out);
    out->played = s->plays[COARSE] + s->plays[FINE];
    for (uint32_t i = 0; i < s->entry_count; i++) out->fitted += is_allowed(&s->entries[i].choice);
    return ret;
}

int sw_plan_take(const struct sw_plan_case *c, const struct sw_plan_decision *d,
                 struct sw_plan_found *out) {
    const struct sw_plan_step *decided = &d->steps[d->chosen];
    *out = (struct sw_plan_found){.step = *decided};
    const int ret = sw_simulate(c, &decided->fit, NULL, &out->times);
    out->decided_step_s = out->times.step_s;
    return ret;
}

int sw_plan_search(const struct sw_plan_case *c, const struct sw_plan_decision *d,
                   struct sw_plan_found *out) {
    int ret = sw_plan_take(c, d, out);
    out->missing = missing_rate(&out->times);
    if (ret < 0 || out->missing) return ret;
    struct search s = {
        .c = c, .entries = malloc(ENTRIES_MAX * sizeof(struct entry)), .looked_at = NO_ENTRY};
    ret = s.entries ? search(&s, &d->steps[d->chosen], out) : -ENOMEM;
    out->is_searched = ret == 0;
    if (ret == -ENOMEM) sw_error("no memory to search placements");
    free(s.entries);
    return ret;
}
