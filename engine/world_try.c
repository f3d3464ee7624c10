/* engine/world_try.c - each way between two processes, once, before anything counts on it.
 *
 * A message library picks networks by itself, and one that leads nowhere, or there and not back,
 * shows as a wait without end. So each process greets each other one, and acknowledges what it was
 * greeted with: whoever is greeted and not acknowledged knows that what it sends does not arrive.
 * Greetings say where a process is, as nobody else will when it cannot be reached. Once all ways of
 * a process are sound it says so, and nobody starts before all have. */
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/world_internal.h"

enum { GREETING, ACKNOWLEDGED, ALL_ARE_SOUND, WORDS };
enum { LOOK_NS = 1000000, ADDRESS_BYTES = 384 };

/* From where a process is heard, and until when it may wait for an answer: it is there, and has
 * nothing else to do. */
#define ANSWER_S 10.0
/* The other side of a way that is lost may have something to say, too. */
#define REPORT_NS 500000000

struct greeting {
    uint32_t word;
    char address[ADDRESS_BYTES];
};

/* Between this process and another one; by word. */
struct way {
    struct greeting said[WORDS], heard[WORDS];
    void *saying[WORDS], *hearing[WORDS]; /* requests */
    int is_said[WORDS], is_saying[WORDS], is_heard[WORDS];
    struct sw_wait wait; /* since it was heard last, or since the beginning */
};

struct sw_ways {
    char address[ADDRESS_BYTES]; /* this process's */
    struct way with[];
};

/* "node7 (eth0 10.0.0.7, ib0 10.1.0.7)": names, and what other machines could reach. */
static void describe_self(char *out, size_t size) {
    struct ifaddrs *all = NULL;
    char host[64] = "?", number[NI_MAXHOST];
    gethostname(host, sizeof(host) - 1);
    size_t length = (size_t)snprintf(out, size, "%s (", host);
    int count = 0;
    if (getifaddrs(&all) < 0) all = NULL;
    for (const struct ifaddrs *a = all; a; a = a->ifa_next) {
        const unsigned flags = a->ifa_flags & (IFF_UP | IFF_LOOPBACK);
        if (!a->ifa_addr || a->ifa_addr->sa_family != AF_INET || flags != IFF_UP) continue;
        if (getnameinfo(a->ifa_addr, sizeof(struct sockaddr_in), number, sizeof(number), NULL, 0,
                        NI_NUMERICHOST) != 0)
            continue;
        char text[IF_NAMESIZE + NI_MAXHOST + 8];
        const int more =
            snprintf(text, sizeof(text), "%s%s %s", count++ ? ", " : "", a->ifa_name, number);
        if (length + (size_t)more + 2 > size) break;
        length += (size_t)snprintf(out + length, size - length, "%s", text);
    }
    if (all) freeifaddrs(all);
    snprintf(out + length, size - length, count ? ")" : "no address but its own)");
}

static int say(struct sw_world *w, uint32_t p, uint32_t word) {
    struct way *way = &w->ways->with[p];
    char why[SW_TRANSPORT_WHY_MAX];
    struct greeting *g = &way->said[word];
    *g = (struct greeting){.word = word};
    memcpy(g->address, w->ways->address, sizeof(g->address));
    const int ret = w->transport->send(p, SW_TAG_TRY, g, sizeof(*g), &way->saying[word], why);
    if (ret < 0) {
        sw_error("world: process %u cannot be reached from process %u on %s: %s", p, w->index,
                 w->ways->address, why);
        return ret;
    }
    way->is_saying[word] = 1;
    return 0;
}

/* All words are awaited from the start; they come in order. */
static int listen_to(struct sw_world *w, uint32_t p) {
    struct way *way = &w->ways->with[p];
    char why[SW_TRANSPORT_WHY_MAX];
    int ret = 0;
    for (int k = 0; k < WORDS && ret == 0; k++)
        ret = w->transport->receive(p, SW_TAG_TRY, &way->heard[k], sizeof(way->heard[k]),
                                    &way->hearing[k], why);
    if (ret < 0) sw_error("world: process %u cannot be heard: %s", p, why);
    return ret;
}

static int take(struct sw_world *w, void **request, uint32_t p) {
    char why[SW_TRANSPORT_WHY_MAX];
    const int ret = w->transport->test(request, why);
    if (ret < 0)
        sw_error("world: messages between process %u and process %u on %s fail: %s", p, w->index,
                 w->ways->address, why);
    return ret;
}

/* What has moved between the two: 1 when all of so many words are said and heard, 0, or an error.
 */
static int go_on(struct sw_world *w, uint32_t p, uint32_t words) {
    struct way *way = &w->ways->with[p];
    int all = 1, ret;
    for (uint32_t k = 0; k < words; k++) {
        if (way->is_saying[k]) {
            ret = take(w, &way->saying[k], p);
            if (ret < 0) return ret;
            if (ret > 0) way->is_saying[k] = 0, way->is_said[k] = 1;
        }
        if (!way->is_heard[k] && (k == 0 || way->is_heard[k - 1])) {
            ret = take(w, &way->hearing[k], p);
            if (ret < 0) return ret;
            if (ret > 0) {
                way->is_heard[k] = 1;
                way->wait = (struct sw_wait){0};
                ret = k == GREETING ? say(w, p, ACKNOWLEDGED) : 0;
                if (ret < 0) return ret;
            }
        }
        all &= way->is_said[k] && way->is_heard[k];
    }
    return all;
}

static int judge(struct sw_world *w, uint32_t p) {
    static const char remedy[] =
        "a firewall, or a network that only one of them is on, is the usual cause; name one that "
        "both are on: 'mpirun --mca btl_tcp_if_include NETWORK', OMPI_MCA_btl_tcp_if_include "
        "under srun";
    struct way *way = &w->ways->with[p];
    const double waited_s = (double)sw_wait_look(&way->wait) * 1e-9;
    /* Before the other side is told that nothing has come: it knows less. */
    const double answer_s = w->timeout_s < 2 * ANSWER_S ? w->timeout_s / 2 : ANSWER_S;
    const char *there = way->heard[GREETING].address;
    if (way->is_heard[GREETING] && !way->is_heard[ACKNOWLEDGED] && waited_s > answer_s) {
        sw_error("world: process %u on %s is heard, and has not acknowledged within %g s what "
                 "process %u on %s sends: messages get through one way only; %s",
                 p, there, answer_s, w->index, w->ways->address, remedy);
        return -ETIMEDOUT;
    }
    if (way->is_heard[ACKNOWLEDGED] && !way->is_heard[ALL_ARE_SOUND] &&
        waited_s > 2 * w->timeout_s) { /* whoever knows more has had its time */
        sw_error("world: process %u on %s has not found all ways to the others sound within %g s; "
                 "its own report tells why",
                 p, there, 2 * w->timeout_s);
        return -ETIMEDOUT;
    }
    if (!way->is_heard[GREETING] && waited_s > w->timeout_s) {
        sw_error("world: nothing has come from process %u to process %u on %s within %g s: is it "
                 "running? %s",
                 p, w->index, w->ways->address, w->timeout_s, remedy);
        return -ETIMEDOUT;
    }
    return 0;
}

/* Until all have said and heard so many words. */
static int exchange_words(struct sw_world *w, uint32_t words) {
    for (int all = 0; !all;) {
        all = 1;
        for (uint32_t p = 0; p < w->size; p++) {
            if (p == w->index) continue;
            int ret = go_on(w, p, words);
            if (ret == 0) all = 0, ret = judge(w, p);
            if (ret < 0) return ret;
        }
        if (!all) nanosleep(&(struct timespec){.tv_nsec = LOOK_NS}, NULL);
    }
    return 0;
}

static int say_to_all(struct sw_world *w, uint32_t word) {
    int ret = 0;
    for (uint32_t p = 0; p < w->size && ret == 0; p++)
        if (p != w->index) ret = say(w, p, word);
    return ret;
}

int sw_world_try(struct sw_world *w) {
    w->ways = calloc(1, sizeof(*w->ways) + w->size * sizeof(w->ways->with[0]));
    if (!w->ways) return -ENOMEM;
    describe_self(w->ways->address, sizeof(w->ways->address));
    int ret = 0;
    for (uint32_t p = 0; p < w->size && ret == 0; p++)
        if (p != w->index) ret = listen_to(w, p);
    if (ret == 0) ret = say_to_all(w, GREETING);
    if (ret == 0) ret = exchange_words(w, ALL_ARE_SOUND);
    if (ret == 0) ret = say_to_all(w, ALL_ARE_SOUND);
    if (ret == 0) ret = exchange_words(w, WORDS);
    if (ret < 0) {
        nanosleep(&(struct timespec){.tv_nsec = REPORT_NS}, NULL);
        return ret;
    }
    free(w->ways);
    w->ways = NULL;
    return 0;
}
