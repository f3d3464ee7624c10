/* kernels/cuda/group_nccl.c - the devices of one process as a group: NCCL's collectives on their
 * streams.
 *
 * One communicator for each device, made together; each is used by one thread at a time, beside one
 * that polls. A sum's order is NCCL's own, the same for equal sizes, devices and version. */
#include <assert.h>
#include <errno.h>
#include <nccl.h>
#include <stdlib.h>
#include "base/log.h"
#include "kernels/cuda/cuda_internal.h"

struct sw_device_group {
    struct sw_device *device;
    ncclComm_t comm;
    pthread_mutex_t lock; /* the communicator is not aborted while it is polled */
    int aborted;
};

static int check(const struct sw_device_group *g, ncclResult_t result, const char *what) {
    if (result == ncclSuccess || result == ncclInProgress) return 0;
    sw_error("CUDA device %d: NCCL, %s: %s%s", g->device->index, what, ncclGetErrorString(result),
             result == ncclSystemError
                 ? "; in a container its shared memory may be too small (docker: --shm-size=1g)"
                 : "");
    return -EIO;
}

static int group_open(struct sw_device *const *devices, uint32_t size,
                      struct sw_device_group **out) {
    int indices[SW_DEVICE_GROUP_MAX];
    ncclComm_t comms[SW_DEVICE_GROUP_MAX];
    assert(size >= 1 && size <= SW_DEVICE_GROUP_MAX);
    for (uint32_t i = 0; i < size; i++) {
        indices[i] = devices[i]->index;
        out[i] = calloc(1, sizeof(*out[i]));
        if (!out[i]) {
            sw_error("CUDA device %d: no memory for a group", indices[i]);
            while (i > 0) free(out[--i]);
            return -ENOMEM;
        }
        out[i]->device = devices[i];
        pthread_mutex_init(&out[i]->lock, NULL);
    }
    const int ret =
        check(out[0], ncclCommInitAll(comms, (int)size, indices), "to bring the devices together");
    for (uint32_t i = 0; i < size && ret < 0; i++) free(out[i]);
    for (uint32_t i = 0; i < size && ret == 0; i++) out[i]->comm = comms[i];
    return ret;
}

static int group_poll(struct sw_device_group *g) {
    ncclResult_t state = ncclSuccess;
    pthread_mutex_lock(&g->lock);
    int ret = g->aborted ? -ECANCELED : 0;
    if (ret == 0) ret = check(g, ncclCommGetAsyncError(g->comm, &state), "to ask for errors");
    pthread_mutex_unlock(&g->lock);
    return ret < 0 ? ret : check(g, state, "a call that was queued");
}

static void group_abort(struct sw_device_group *g) {
    pthread_mutex_lock(&g->lock);
    if (!g->aborted) ncclCommAbort(g->comm);
    g->aborted = 1;
    pthread_mutex_unlock(&g->lock);
}

static void group_close(struct sw_device_group *g) {
    if (!g) return;
    if (!g->aborted) ncclCommDestroy(g->comm);
    pthread_mutex_destroy(&g->lock);
    free(g);
}

static int group_gather(struct sw_device_group *g, struct sw_stream *s, void *out, const void *in,
                        uint64_t bytes) {
    static const char what[] = "all-gather";
    const int ret = sw_cuda_enter(g->device);
    if (ret < 0 || bytes == 0) return ret;
    return check(g, ncclAllGather(in, out, bytes, ncclUint8, g->comm, s->stream), what);
}

static int group_scatter(struct sw_device_group *g, struct sw_stream *s, float *out,
                         const float *in, uint64_t count) {
    static const char what[] = "reduce-scatter";
    const int ret = sw_cuda_enter(g->device);
    if (ret < 0 || count == 0) return ret;
    return check(g, ncclReduceScatter(in, out, count, ncclFloat32, ncclSum, g->comm, s->stream),
                 what);
}

static int group_numerics(char *out, size_t size) {
    int version = 0;
    ncclGetVersion(&version);
    return snprintf(out, size, ", NCCL %d.%d.%d", version / 10000, version / 100 % 100,
                    version % 100);
}

const struct sw_device_group_ops sw_cuda_group_ops = {
    .open = group_open,
    .close = group_close,
    .all_gather = group_gather,
    .reduce_scatter = group_scatter,
    .poll = group_poll,
    .abort = group_abort,
    .numerics = group_numerics,
};
