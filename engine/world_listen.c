/* engine/world_listen.c - the thread that listens to the other processes and makes every call of
 * the message library that may wait for them.
 *
 * Each process tells each other one now and then that it is alive, and at once that the run has
 * failed or that it has come to its end. So a process that was killed or stopped is found whoever
 * waits for whom, and named itself rather than one that in turn waits for it. The thread looks
 * around a hundred times a second, less than what the rest of a process notices. */
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "engine/world_internal.h"

enum control_kind { IS_ALIVE = 1, HAS_FAILED, HAS_LEFT };

#define LOOK_NS        10000000u   /* between two looks */
#define LOOK_AT_END_NS 1000000u    /* and while nothing else is to be done */
#define ALIVE_NS_MAX   1000000000u /* between two signs of life */
#define GRACE_NS_MAX   5000000000u /* to leave in order after an error */
#define REPORT_NS      500000000u  /* for a report of a failure to be made here as well */

static uint64_t timeout_ns(const struct sw_world *w) {
    return (uint64_t)(w->timeout_s * 1e9);
}

static uint64_t least(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

static uint64_t sign_every_ns(const struct sw_world *w) {
    return least(timeout_ns(w) / 8, ALIVE_NS_MAX);
}

static int is_other(const struct sw_world *w, uint32_t p) {
    return p != w->index;
}

/* ---- hearing ---- */

static void receive(struct sw_world *w, uint32_t p) {
    struct sw_peer *peer = &w->peers[p];
    char why[SW_TRANSPORT_WHY_MAX];
    const int ret = w->transport->receive(p, SW_TAG_CONTROL, &peer->heard, sizeof(peer->heard),
                                          &peer->receiving, why);
    if (ret == 0) return;
    peer->is_lost = 1;
    sw_world_fail(w, SW_LOG_ERROR, ret, "world: process %u cannot be heard: %s", p, why);
}

static void understand(struct sw_world *w, uint32_t p, uint64_t now_ns) {
    struct sw_peer *peer = &w->peers[p];
    const struct sw_control said = peer->heard;
    peer->silence = (struct sw_wait){0};
    if (said.kind == HAS_LEFT) {
        peer->has_left = 1;
        if (said.value && !w->failed_elsewhere_ns) {
            w->failed_elsewhere_ns = now_ns;
            w->failed_process = p;
            w->failed_status = said.value;
        }
        return;
    }
    /* Who leaves with a failure anyway need not hear of another's. */
    if (said.kind == HAS_FAILED && w->end_ns && w->status)
        sw_world_abort(w, said.value);
    else if (said.kind == HAS_FAILED)
        sw_world_fail(w, SW_LOG_WARNING, said.value,
                      "world: process %u has ended the run (%s); its own report tells why", p,
                      strerror(-said.value));
    receive(w, p);
}

static void hear(struct sw_world *w, uint32_t p, uint64_t now_ns) {
    struct sw_peer *peer = &w->peers[p];
    char why[SW_TRANSPORT_WHY_MAX];
    while (!peer->has_left && !peer->is_lost) {
        const int ret = w->transport->test(&peer->receiving, why);
        if (ret == 0) return;
        if (ret > 0) {
            understand(w, p, now_ns);
            continue;
        }
        peer->is_lost = 1;
        sw_world_fail(w, SW_LOG_ERROR, ret, "world: process %u cannot be heard any more: %s", p,
                      why);
    }
}

/* Whether it has been silent for longer than it should be. */
static int miss(struct sw_world *w, uint32_t p) {
    struct sw_peer *peer = &w->peers[p];
    if (peer->has_left || peer->is_lost) return 0;
    const uint64_t silence_ns = sw_wait_look(&peer->silence);
    if (silence_ns < timeout_ns(w)) return silence_ns > 3 * sign_every_ns(w);
    peer->is_lost = 1;
    char call[80] = "", during[120] = "";
    if (sw_world_describe_call(w, call, sizeof(call)))
        snprintf(during, sizeof(during), ", in %s", call);
    sw_world_fail(
        w, SW_LOG_ERROR, -ETIMEDOUT,
        "world: process %u has not been heard of for %g s%s; it was killed or stopped, or "
        "the network between the processes is down",
        p, w->timeout_s, during);
    return 0;
}

/* A failure without a report here, or on its way: the processes that see one do not all report it,
 * and who leaves first may be one that did not. */
static void wait_for_report(struct sw_world *w, uint64_t now_ns) {
    if (!w->failed_elsewhere_ns || now_ns - w->failed_elsewhere_ns < REPORT_NS) return;
    sw_world_fail(w, SW_LOG_WARNING, -ECANCELED,
                  "world: process %u has ended with status %d; its own report tells why",
                  w->failed_process, w->failed_status);
}

/* ---- telling ---- */

/* What is to be told next, or 0. */
static uint32_t next_message(const struct sw_world *w, const struct sw_peer *peer,
                             uint64_t now_ns) {
    if (peer->is_told_end) return 0;
    if (atomic_load(&w->error) && !peer->is_told_error) return HAS_FAILED;
    if (w->end_ns) return HAS_LEFT;
    return now_ns - peer->told_ns >= sign_every_ns(w) ? IS_ALIVE : 0;
}

static void tell(struct sw_world *w, uint32_t p, uint64_t now_ns) {
    struct sw_peer *peer = &w->peers[p];
    char why[SW_TRANSPORT_WHY_MAX];
    while (!peer->is_lost) {
        if (peer->is_sending && w->transport->test(&peer->sending, why) == 0) return;
        peer->is_sending = 0;
        const uint32_t kind = next_message(w, peer, now_ns);
        if (!kind) return;
        const int error = atomic_load(&w->error), status = w->end_ns ? w->status : 0;
        peer->told = (struct sw_control){kind, kind == HAS_FAILED ? error : status};
        peer->told_ns = now_ns;
        if (kind == HAS_FAILED) peer->is_told_error = 1;
        if (kind == HAS_LEFT) peer->is_told_end = 1;
        const int ret = w->transport->send(p, SW_TAG_CONTROL, &peer->told, sizeof(peer->told),
                                           &peer->sending, why);
        peer->is_sending = ret == 0;
        if (ret == 0) continue;
        peer->is_lost = 1;
        sw_world_fail(w, SW_LOG_ERROR, ret, "world: process %u cannot be reached: %s", p, why);
    }
}

/* ---- the end ---- */

/* Those that are missing at the end: names of them, and how many. */
static uint32_t name_missing(const struct sw_world *w, char *names, size_t size) {
    size_t length = 0;
    uint32_t missing = 0;
    names[0] = '\0';
    for (uint32_t p = 0; p < w->size; p++) {
        if (!is_other(w, p) || w->peers[p].has_left || w->peers[p].is_lost) continue;
        length += (size_t)snprintf(names + length, size - length, "%s%u", missing++ ? ", " : "", p);
    }
    return missing;
}

static int is_telling(const struct sw_world *w) {
    for (uint32_t p = 0; p < w->size; p++) {
        const struct sw_peer *peer = &w->peers[p];
        if (is_other(w, p) && !peer->is_lost && (peer->is_sending || !peer->is_told_end)) return 1;
    }
    return 0;
}

static int has_lost(const struct sw_world *w) {
    for (uint32_t p = 0; p < w->size; p++)
        if (w->peers[p].is_lost) return 1;
    return 0;
}

static int end_orderly(struct sw_world *w) {
    char why[SW_TRANSPORT_WHY_MAX];
    const int ret = w->transport->close(why);
    if (ret < 0) sw_error("world: MPI ended with an error: %s", why);
    return ret;
}

/* Whether the end has come; then its result. */
static int comes_to_end(struct sw_world *w, uint64_t now_ns, int *result) {
    char names[SW_RANKS_MAX * 4 + 1];
    if (!w->end_ns) w->end_ns = now_ns;
    const uint32_t missing = name_missing(w, names, sizeof(names));
    const int has_all = missing == 0 && !is_telling(w);
    int error = atomic_load(&w->error);
    if (!error && !w->status && !w->failed_elsewhere_ns) {
        if (has_all) {
            *result = end_orderly(w);
            return 1;
        }
        if (now_ns - w->end_ns < timeout_ns(w)) return 0;
        sw_world_fail(w, SW_LOG_ERROR, -ETIMEDOUT,
                      "world: process%s %s did not come to the end of the run within %g s of "
                      "process %u; stopped, or slower than the timeout allows",
                      missing == 1 ? "" : "es", names, w->timeout_s, w->index);
        return 0;
    }
    if (!error && !w->status) return 0; /* until the failure elsewhere is this one's, too */
    if (!w->failed_ns) w->failed_ns = now_ns;
    *result = w->status ? 0 : error;
    if (has_all && !has_lost(w)) return 1;
    if (!has_all && now_ns - w->failed_ns < least(timeout_ns(w) / 2, GRACE_NS_MAX)) return 0;
    /* Whoever has not left by now does not listen. */
    w->transport->abort(w->status ? w->status : 1);
    return 1;
}

/* ---- the thread ---- */

static void look(struct sw_world *w) {
    const uint64_t now_ns = sw_now_ns();
    int misses = 0;
    for (uint32_t p = 0; p < w->size; p++) {
        if (!is_other(w, p)) continue;
        hear(w, p, now_ns);
        misses |= miss(w, p);
    }
    atomic_store(&w->misses, misses);
    wait_for_report(w, now_ns);
    if (atomic_load(&w->error) && !w->has_ended_groups) {
        w->has_ended_groups = 1;
        sw_world_end_groups(w);
    }
    for (uint32_t p = 0; p < w->size; p++)
        if (is_other(w, p)) tell(w, p, now_ns);
}

/* Until the next look, or until this process has something to tell; whether it wants to end. */
static int rest(struct sw_world *w) {
    const uint64_t until_ns = sw_now_ns() + (w->end_ns ? LOOK_AT_END_NS : LOOK_NS);
    const struct timespec until = {(time_t)(until_ns / 1000000000u),
                                   (long)(until_ns % 1000000000u)};
    pthread_mutex_lock(&w->lock);
    if ((w->has_ended_groups || !atomic_load(&w->error)) && (w->end_ns || !w->wants_end))
        pthread_cond_timedwait(&w->changed, &w->lock, &until);
    const int wants_end = w->wants_end;
    pthread_mutex_unlock(&w->lock);
    return wants_end;
}

static void enter_stage(struct sw_world *w, enum sw_world_stage stage, int result) {
    pthread_mutex_lock(&w->lock);
    w->stage = stage;
    w->result = result;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

void *sw_world_listen(void *world) {
    struct sw_world *w = world;
    char why[SW_TRANSPORT_WHY_MAX];
    int ret = w->transport->open(&w->index, &w->size, &w->tag_max, why);
    if (ret < 0) {
        sw_error("world: MPI does not start: %s", why);
        enter_stage(w, SW_WORLD_HAS_ENDED, ret);
        return NULL;
    }
    enter_stage(w, SW_WORLD_TRIES, 0);
    ret = w->size <= SW_RANKS_MAX ? sw_world_try(w) : 0;
    if (ret < 0) {
        /* The others may not hear of it otherwise. */
        w->transport->abort(1);
        enter_stage(w, SW_WORLD_HAS_ENDED, ret);
        return NULL;
    }
    const uint64_t now_ns = sw_now_ns();
    for (uint32_t p = 0; p < w->size && w->size <= SW_RANKS_MAX; p++) {
        w->peers[p].told_ns = now_ns;
        if (is_other(w, p)) receive(w, p);
    }
    enter_stage(w, SW_WORLD_RUNS, 0);
    if (w->size > SW_RANKS_MAX) {
        while (!rest(w)) continue;
        w->transport->abort(1);
        enter_stage(w, SW_WORLD_HAS_ENDED, -EINVAL);
        return NULL;
    }
    for (;;) {
        const int wants_end = rest(w);
        look(w);
        if (wants_end && comes_to_end(w, sw_now_ns(), &ret)) break;
    }
    enter_stage(w, SW_WORLD_HAS_ENDED, ret);
    return NULL;
}
