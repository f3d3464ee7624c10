/* engine/transport.h - messages between processes: what the plugin offers and all it is asked for.
 *
 * The plugin is a library with one symbol, sw_transport, opened at run time; it calls the message
 * library and nothing of this program, and this program calls no message library. Messages of one
 * sender, receiver and tag arrive in the order they were sent. The memory of a message belongs to
 * the transport until `test` says that it is done. open, close and abort may wait for other
 * processes, for ever; the rest does not wait. open and close are called by one thread; the rest
 * by any. Errors: -errno, with the library's words in `why`. */
#ifndef ENGINE_TRANSPORT_H
#define ENGINE_TRANSPORT_H
#include <stdint.h>

#define SW_TRANSPORT_SYMBOL "sw_transport"

enum {
    SW_TRANSPORT_VERSION = 1,
    SW_TRANSPORT_WHY_MAX = 512,
    SW_TRANSPORT_BYTES_MAX = 1 << 30 /* of a message */
};

struct sw_transport {
    uint32_t version; /* SW_TRANSPORT_VERSION of the header it was built with */
    int (*open)(uint32_t *index, uint32_t *size, uint32_t *tag_max, char *why);
    int (*send)(uint32_t to, uint32_t tag, const void *data, uint64_t bytes, void **request,
                char *why);
    int (*receive)(uint32_t from, uint32_t tag, void *data, uint64_t bytes, void **request,
                   char *why);
    int (*test)(void **request, char *why); /* 1 done, 0 not yet */
    /* Orderly, when no message is on its way. */
    int (*close)(char *why);
    /* Ends all processes, this one among them, with that exit status. */
    void (*abort)(int status);
};

#endif
