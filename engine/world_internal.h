/* engine/world_internal.h - what the files of the world share; see world.h. */
#ifndef ENGINE_WORLD_INTERNAL_H
#define ENGINE_WORLD_INTERNAL_H
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include "base/log.h"
#include "base/wait.h"
#include "engine/rendezvous.h"
#include "engine/transport.h"
#include "engine/world.h"

enum {
    SW_TAG_CONTROL = 0, /* between the listeners */
    SW_TAG_TRY = 1,     /* of the first words */
    SW_TAG_FIRST = 2    /* of the groups' */
};

struct sw_control {
    uint32_t kind;
    int32_t value;
};

/* Another process, as the listener knows it. */
struct sw_peer {
    struct sw_control heard, told;
    void *receiving, *sending; /* requests */
    struct sw_wait silence;    /* since it was heard last */
    uint64_t told_ns;
    int is_sending, has_left, is_lost, is_told_error, is_told_end;
};

struct sw_world_group;

/* TRIES: the message library is there, and the ways to the others are tried. */
enum sw_world_stage { SW_WORLD_STARTS, SW_WORLD_TRIES, SW_WORLD_RUNS, SW_WORLD_HAS_ENDED };

struct sw_ways; /* world_try.c */

struct sw_world {
    const struct sw_transport *transport;
    uint32_t index, size, tag_max;
    double timeout_s;
    pthread_t listener;

    /* The lock is taken within a rendezvous' lock, never around it. */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    atomic_int error;          /* the first one; for ever */
    atomic_int misses;         /* a process is silent longer than it should be */
    enum sw_world_stage stage; /* of the listener */
    int result;                /* of opening, then of closing */
    int is_given_up;           /* whoever opened it has left */
    int wants_end, status;     /* of this process */
    struct sw_world_group *groups;
    uint32_t next_tag;

    /* The listener's own. */
    struct sw_peer peers[SW_RANKS_MAX];
    struct sw_ways *ways; /* while they are tried; after an error for ever: messages may come */
    uint64_t end_ns;      /* when the end began, 0: it has not */
    uint64_t failed_ns;   /* when it became a failure */
    uint64_t failed_elsewhere_ns; /* a process has left with a failure that nobody has reported */
    uint32_t failed_process;
    int failed_status, has_ended_groups;
};

/* Reports and ends all, unless there is an error. */
void sw_world_fail(struct sw_world *w, enum sw_log_level level, int error, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* The listener's thread, from the first call of the message library to its last. */
void *sw_world_listen(void *world);

/* Takes each way between this process and each other one once, the listener in its stage TRIES: 0;
 * or an error, reported with the addresses of both sides where they are known. A process that is
 * heard has 10 s to acknowledge, or half the timeout where that is less; one that is not, the
 * timeout.
 * Returns when all ways of all processes are sound. */
int sw_world_try(struct sw_world *w);

/* Ends the rendezvous of every group with the world's error. */
void sw_world_end_groups(struct sw_world *w);
/* What some group is in the middle of, for a report; 0: nothing. */
int sw_world_describe_call(struct sw_world *w, char *text, size_t size);
void sw_world_free_groups(struct sw_world *w);

/* Waits for messages: sleeps a little at first, then longer, but never so long that it matters. */
struct sw_patience {
    struct sw_wait wait;
    uint32_t sleep_ns;
};
/* Sleeps once. 0; or the world's error, or -ETIMEDOUT after limit_s without news; a limit of 0 is
 * none. While the listener misses a process it may take twice as long: whom a wait is for may in
 * turn wait for that one, which the listener names. News begin a new patience, all zero. */
int sw_world_wait(struct sw_world *w, struct sw_patience *p, double limit_s);

#endif
