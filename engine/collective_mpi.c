/* engine/collective_mpi.c - the transport over MPI: a plugin, the only file that knows MPI.
 *
 * Nothing but point-to-point messages on MPI_COMM_WORLD, told apart by tags: a communicator of its
 * own for each channel would have to be made by all processes together, in calls that wait. */
#include "engine/transport.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include <mpi.h>

/* The one symbol that the program looks up. */
extern const struct sw_transport sw_transport;

static_assert(sizeof(MPI_Request) <= sizeof(void *), "a request fits where the program keeps it");

static int failed(const char *call, int code, char *why) {
    char text[MPI_MAX_ERROR_STRING + 1] = "";
    int length = 0;
    MPI_Error_string(code, text, &length);
    snprintf(why, SW_TRANSPORT_WHY_MAX, "%s: %.*s", call, length, text);
    return -EIO;
}

static int mpi_open(uint32_t *index, uint32_t *size, uint32_t *tag_max, char *why) {
    int provided = 0, rank = 0, count = 0, found = 0, *tag_limit = NULL;
    int code = MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &provided);
    if (code != MPI_SUCCESS) return failed("MPI_Init_thread", code, why);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    if (provided < MPI_THREAD_MULTIPLE) {
        snprintf(why, SW_TRANSPORT_WHY_MAX,
                 "this MPI was built without MPI_THREAD_MULTIPLE; use one that has it");
        return -ENOTSUP;
    }
    code = MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (code != MPI_SUCCESS) return failed("MPI_Comm_rank", code, why);
    code = MPI_Comm_size(MPI_COMM_WORLD, &count);
    if (code != MPI_SUCCESS) return failed("MPI_Comm_size", code, why);
    code = MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &tag_limit, &found);
    if (code != MPI_SUCCESS) return failed("MPI_Comm_get_attr", code, why);
    *index = (uint32_t)rank;
    *size = (uint32_t)count;
    *tag_max = found ? (uint32_t)*tag_limit : 32767; /* what the standard promises */
    return 0;
}

static int mpi_send(uint32_t to, uint32_t tag, const void *data, uint64_t bytes, void **request,
                    char *why) {
    assert(bytes <= SW_TRANSPORT_BYTES_MAX);
    MPI_Request sent;
    const int code =
        MPI_Isend(data, (int)bytes, MPI_BYTE, (int)to, (int)tag, MPI_COMM_WORLD, &sent);
    if (code != MPI_SUCCESS) return failed("MPI_Isend", code, why);
    memcpy(request, &sent, sizeof(sent));
    return 0;
}

static int mpi_receive(uint32_t from, uint32_t tag, void *data, uint64_t bytes, void **request,
                       char *why) {
    assert(bytes <= SW_TRANSPORT_BYTES_MAX);
    MPI_Request received;
    const int code =
        MPI_Irecv(data, (int)bytes, MPI_BYTE, (int)from, (int)tag, MPI_COMM_WORLD, &received);
    if (code != MPI_SUCCESS) return failed("MPI_Irecv", code, why);
    memcpy(request, &received, sizeof(received));
    return 0;
}

static int mpi_test(void **request, char *why) {
    MPI_Request tested;
    int is_done = 0;
    memcpy(&tested, request, sizeof(tested));
    const int code = MPI_Test(&tested, &is_done, MPI_STATUS_IGNORE);
    memcpy(request, &tested, sizeof(tested));
    return code != MPI_SUCCESS ? failed("MPI_Test", code, why) : is_done != 0;
}

static int mpi_close(char *why) {
    const int code = MPI_Finalize();
    return code != MPI_SUCCESS ? failed("MPI_Finalize", code, why) : 0;
}

static void mpi_abort(int status) {
    MPI_Abort(MPI_COMM_WORLD, status);
}

const struct sw_transport sw_transport = {.version = SW_TRANSPORT_VERSION,
                                          .open = mpi_open,
                                          .send = mpi_send,
                                          .receive = mpi_receive,
                                          .test = mpi_test,
                                          .close = mpi_close,
                                          .abort = mpi_abort};
