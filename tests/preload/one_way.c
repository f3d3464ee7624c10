/* A transport that loses what one process sends to another one, as a firewall or a route that leads
 * nowhere does: the sender is told that all is well. SPILLWAY_MPI_PLUGIN names it.
 *
 *   ONE_WAY_PLUGIN=FILE   the transport that does the work
 *   ONE_WAY_LOST=FROM>TO[,FROM>TO]  the two processes of each way */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "engine/transport.h"

static const struct sw_transport *real;
static uint32_t mine;
static int lost; /* a request of what never arrives */

static int open_real(uint32_t *index, uint32_t *size, uint32_t *tag_max, char *why) {
    /* Parts of the message library look for its symbols among the global ones. */
    void *library = dlopen(getenv("ONE_WAY_PLUGIN"), RTLD_NOW | RTLD_GLOBAL);
    real = library ? dlsym(library, SW_TRANSPORT_SYMBOL) : NULL;
    if (!real) abort();
    const int ret = real->open(index, size, tag_max, why);
    mine = *index;
    return ret;
}

static int is_lost(uint32_t to) {
    unsigned from, there;
    for (const char *text = getenv("ONE_WAY_LOST"); text; text = strchr(text, ',')) {
        text += *text == ',';
        if (sscanf(text, "%u>%u", &from, &there) == 2 && from == mine && there == to) return 1;
    }
    return 0;
}

static int send_some(uint32_t to, uint32_t tag, const void *data, uint64_t bytes, void **request,
                     char *why) {
    if (!is_lost(to)) return real->send(to, tag, data, bytes, request, why);
    *request = &lost;
    return 0;
}

static int receive(uint32_t from, uint32_t tag, void *data, uint64_t bytes, void **request,
                   char *why) {
    return real->receive(from, tag, data, bytes, request, why);
}

static int test(void **request, char *why) {
    return *request == &lost ? 1 : real->test(request, why);
}

static int close_real(char *why) {
    return real->close(why);
}

static void abort_real(int status) {
    real->abort(status);
}

extern const struct sw_transport sw_transport;
const struct sw_transport sw_transport = {.version = SW_TRANSPORT_VERSION,
                                          .open = open_real,
                                          .send = send_some,
                                          .receive = receive,
                                          .test = test,
                                          .close = close_real,
                                          .abort = abort_real};
