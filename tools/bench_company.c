/* tools/bench_company.c - see the header. */
#include "tools/bench_company.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "offload/team.h"

struct sw_bench_company {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int team_threads, started, ready, leave;
    pthread_t threads[];
};

static void *keep_a_team(void *arg) {
    struct sw_bench_company *c = arg;
    sw_team_form(c->team_threads);
    pthread_mutex_lock(&c->lock);
    c->ready++;
    pthread_cond_broadcast(&c->changed);
    while (!c->leave) pthread_cond_wait(&c->changed, &c->lock);
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

int sw_bench_company_open(struct sw_bench_company **out, int teams, int threads) {
    assert(out && teams >= 0 && threads >= 1);
    struct sw_bench_company *c = calloc(1, sizeof(*c) + (size_t)teams * sizeof(c->threads[0]));
    int error = c ? 0 : ENOMEM;
    if (c) {
        pthread_mutex_init(&c->lock, NULL);
        pthread_cond_init(&c->changed, NULL);
        c->team_threads = threads;
    }
    for (int i = 0; i < teams && !error; i++) {
        error = pthread_create(&c->threads[i], NULL, keep_a_team, c);
        c->started += !error;
    }
    if (error) {
        sw_error("bench: a thread cannot be started: %s", strerror(error));
        sw_bench_company_close(c);
        return -error;
    }
    pthread_mutex_lock(&c->lock);
    while (c->ready < c->started) pthread_cond_wait(&c->changed, &c->lock);
    pthread_mutex_unlock(&c->lock);
    *out = c;
    return 0;
}

void sw_bench_company_close(struct sw_bench_company *c) {
    if (!c) return;
    pthread_mutex_lock(&c->lock);
    c->leave = 1;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
    for (int i = 0; i < c->started; i++) pthread_join(c->threads[i], NULL);
    pthread_cond_destroy(&c->changed);
    pthread_mutex_destroy(&c->lock);
    free(c);
}
