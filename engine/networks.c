/* engine/networks.c - see the header. */
#include "engine/networks.h"

#include <arpa/inet.h>
#include <assert.h>
#include <errno.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>
#include "base/log.h"
#include "base/wait.h"

enum { LOOK_MS = 50, KINDS = 5 };
#define LIMIT_NS 2000000000u

/* What a process tells the others: where it listens, and what it will say there. Machines may have
 * equal addresses, so a connection alone shows nothing. */
struct offer {
    uint64_t word;
    struct sw_network networks[SW_NETWORKS_MAX];
    uint32_t count;
    uint16_t port; /* as on the wire */
};

/* What it has reached: a bit for each network of each process. */
struct reached {
    uint16_t of[SW_RANKS_MAX];
};
static_assert(SW_NETWORKS_MAX <= 16, "networks are bits of `of`");

/* ---- this machine ---- */

static int is_known(const struct sw_network *list, uint32_t count, const char *name) {
    for (uint32_t i = 0; i < count; i++)
        if (!strcmp(list[i].name, name)) return 1;
    return 0;
}

uint32_t sw_networks_list(struct sw_network out[SW_NETWORKS_MAX]) {
    struct ifaddrs *all = NULL;
    uint32_t count = 0;
    if (getifaddrs(&all) < 0) return 0;
    for (const struct ifaddrs *a = all; a && count < SW_NETWORKS_MAX; a = a->ifa_next) {
        struct sockaddr_in address;
        if (!a->ifa_addr || a->ifa_addr->sa_family != AF_INET || !(a->ifa_flags & IFF_UP)) continue;
        if (strlen(a->ifa_name) >= IF_NAMESIZE || is_known(out, count, a->ifa_name)) continue;
        memcpy(&address, a->ifa_addr, sizeof(address));
        out[count] = (struct sw_network){.address = address.sin_addr.s_addr};
        snprintf(out[count++].name, IF_NAMESIZE, "%s", a->ifa_name);
    }
    freeifaddrs(all);
    return count;
}

/* NCCL takes all interfaces of the first kind that there is. */
static int kind_of(const char *name) {
    static const char *const late[] = {"docker", "lo", "virbr"};
    if (!strncmp(name, "ib", 2)) return 0;
    for (int i = 0; i < 3; i++)
        if (!strncmp(name, late[i], strlen(late[i]))) return 2 + i;
    return 1;
}

/* ---- those who come ---- */

struct listener {
    int fd;
    uint64_t word;
    pthread_t thread;
    int is_running;
};

static void *answer(void *arg) {
    const struct listener *l = arg;
    for (;;) {
        const int fd = accept4(l->fd, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0 && (errno == EINTR || errno == ECONNABORTED)) continue;
        if (fd < 0) return NULL; /* it was shut down */
        /* Eight bytes go into any socket's buffer; who does not take them has not reached it. */
        const ssize_t ignored = send(fd, &l->word, sizeof(l->word), MSG_NOSIGNAL);
        (void)ignored;
        close(fd);
    }
}

static void stop_listening(struct listener *l) {
    if (l->is_running) {
        shutdown(l->fd, SHUT_RDWR);
        pthread_join(l->thread, NULL);
    }
    if (l->fd >= 0) close(l->fd);
}

/* At every address; the port, or 0. */
static uint16_t listen_everywhere(struct listener *l) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_ANY)};
    socklen_t length = sizeof(at);
    sigset_t all, before;
    l->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (l->fd < 0 || bind(l->fd, (struct sockaddr *)&at, length) < 0 || listen(l->fd, 1024) < 0 ||
        getsockname(l->fd, (struct sockaddr *)&at, &length) < 0)
        return 0;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    l->is_running = pthread_create(&l->thread, NULL, answer, l) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return l->is_running ? at.sin_port : 0;
}

/* ---- those who are sought ---- */

/* -1: it is known at once that it leads nowhere. */
static int begin(const struct offer *o, uint32_t network) {
    const struct sockaddr_in to = {.sin_family = AF_INET,
                                   .sin_port = o->port,
                                   .sin_addr.s_addr = o->networks[network].address};
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || connect(fd, (const struct sockaddr *)&to, sizeof(to)) == 0 ||
        errno == EINPROGRESS)
        return fd;
    close(fd);
    return -1;
}

/* One network of each other process, all at once. */
static void seek(const struct offer *all, uint32_t size, uint32_t mine, uint32_t network,
                 struct reached *out) {
    struct pollfd sought[SW_RANKS_MAX];
    struct sw_wait wait = {0};
    int left = 0;
    for (uint32_t p = 0; p < size; p++) {
        const int is_there = p != mine && all[p].port && network < all[p].count;
        sought[p] =
            (struct pollfd){.fd = is_there ? begin(&all[p], network) : -1, .events = POLLIN};
        left += sought[p].fd >= 0;
    }
    while (left > 0 && sw_wait_look(&wait) < LIMIT_NS) {
        if (poll(sought, size, LOOK_MS) <= 0) continue;
        for (uint32_t p = 0; p < size; p++) {
            uint64_t word = 0;
            if (sought[p].fd < 0 || !sought[p].revents) continue;
            if (recv(sought[p].fd, &word, sizeof(word), 0) == sizeof(word) && word == all[p].word)
                out->of[p] |= (uint16_t)(1u << network);
            close(sought[p].fd);
            sought[p].fd = -1;
            left--;
        }
    }
    for (uint32_t p = 0; p < size; p++)
        if (sought[p].fd >= 0) close(sought[p].fd);
}

/* ---- both ---- */

static void write_names(const struct offer *mine, uint16_t sound, char *names) {
    size_t length = 0;
    names[0] = '\0';
    for (int kind = 0; kind < KINDS && length == 0; kind++)
        for (uint32_t i = 0; i < mine->count; i++) {
            if (!(sound >> i & 1) || kind_of(mine->networks[i].name) != kind) continue;
            length += (size_t)snprintf(names + length, SW_NETWORKS_NAMES_BYTES - length, "%c%s",
                                       length ? ',' : '=', mine->networks[i].name);
        }
}

int sw_networks_try(const struct sw_comm_handle *channel, const struct sw_network *mine,
                    uint32_t count, char *names) {
    assert(count <= SW_NETWORKS_MAX && channel->size <= SW_RANKS_MAX);
    struct offer here = {.count = count}, all[SW_RANKS_MAX];
    struct reached found = {{0}}, by[SW_RANKS_MAX];
    struct listener listener = {.fd = -1};
    memcpy(here.networks, mine, count * sizeof(*mine));
    if (getrandom(&here.word, sizeof(here.word), 0) == sizeof(here.word)) {
        listener.word = here.word;
        here.port = listen_everywhere(&listener);
    }
    int ret = channel->ops->exchange(channel->comm, all, &here, sizeof(here));
    for (uint32_t i = 0; i < SW_NETWORKS_MAX && ret == 0; i++)
        seek(all, channel->size, channel->rank, i, &found);
    if (ret == 0) ret = channel->ops->exchange(channel->comm, by, &found, sizeof(found));
    stop_listening(&listener);
    uint16_t sound = UINT16_MAX;
    for (uint32_t p = 0; p < channel->size && ret == 0; p++)
        if (p != channel->rank) sound &= by[p].of[channel->rank];
    if (ret == 0) write_names(&here, sound, names);
    return ret;
}

/* ---- NCCL's settings ---- */

static int file_chooses(const char *path) {
    static const char wanted[] = "NCCL_SOCKET_IFNAME=";
    char line[256];
    int found = 0;
    FILE *file = fopen(path, "re");
    while (file && !found && fgets(line, sizeof(line), file))
        found = !strncmp(line, wanted, sizeof(wanted) - 1);
    if (file) fclose(file);
    return found;
}

/* What stands in the environment counts for NCCL before what its files say. */
static int is_chosen(void) {
    static const char *const names[] = {"NCCL_SOCKET_IFNAME", "NCCL_COMM_ID", "NCCL_SOCKET_FAMILY"};
    const char *file = getenv("NCCL_CONF_FILE"), *home = getenv("HOME");
    char path[4096];
    for (int i = 0; i < 3; i++) {
        const char *text = getenv(names[i]);
        if (text && *text) return 1;
    }
    snprintf(path, sizeof(path), "%s/.nccl.conf", home ? home : "");
    return file_chooses(file && *file ? file : path) || file_chooses("/etc/nccl.conf");
}

int sw_networks_choose(const struct sw_comm_handle *channel) {
    struct sw_network mine[SW_NETWORKS_MAX];
    char names[SW_NETWORKS_NAMES_BYTES];
    const int ret = sw_networks_try(channel, mine, sw_networks_list(mine), names);
    if (ret < 0 || !names[0] || is_chosen()) return ret;
    return setenv("NCCL_SOCKET_IFNAME", names, 1) < 0 ? -errno : 0;
}
