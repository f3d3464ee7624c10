/* kernels/cuda/group_nccl.c - devices as a group: copies between two of one process, and NCCL's
 * collectives on the streams of all.
 *
 * One communicator for each device, those of a process made together; each is used by one thread at
 * a time, beside one that polls. An FP32 sum's order is NCCL's own, the same for equal sizes,
 * devices and version. What is carried as BF16 is not summed by NCCL, which would round at every
 * hop: each rank rounds its values, block by block, sends every other rank its piece, and adds up
 * what has come in the ranks' order. */
#include <assert.h>
#include <errno.h>
#include <nccl.h>
#include <stdlib.h>
#include <string.h>
#include "base/log.h"
#include "kernels/cuda/cuda_internal.h"
#include "kernels/cuda/launchers.h"

/* Of BF16 values on their way, each way. A piece begins where eight of them may be read at once. */
enum { CARRIED_BYTES = 8 << 20, PIECE_STEP = 8 };

struct sw_device_group {
    struct sw_device *device;
    ncclComm_t comm;
    uint32_t rank, size;
    sw_bf16 *sent, *come; /* [size][piece] each; NULL: FP32 is carried */
    uint64_t piece;       /* values of a block for each rank */
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

/* ---- two devices ---- */

/* NCCL's own switch holds for all that devices exchange. */
static int group_connect(struct sw_device *const *devices, uint32_t size, uint8_t *direct) {
    const char *off = getenv("NCCL_P2P_DISABLE");
    const int wanted = !off || !strtol(off, NULL, 10);
    int ret = 0;
    for (uint32_t i = 0; i < size && ret == 0; i++) {
        ret = sw_cuda_enter(devices[i]);
        for (uint32_t j = 0; j < size && ret == 0; j++) {
            int can = 0;
            direct[i * size + j] = 0;
            if (i == j || !wanted) continue;
            ret = sw_cuda_check(devices[i],
                                cudaDeviceCanAccessPeer(&can, devices[i]->index, devices[j]->index),
                                "whether it reaches another one");
            if (ret < 0 || !can) continue;
            cudaError_t error = cudaDeviceEnablePeerAccess(devices[j]->index, 0);
            if (error == cudaErrorPeerAccessAlreadyEnabled) {
                cudaGetLastError();
                error = cudaSuccess;
            }
            ret = sw_cuda_check(devices[i], error, "access to another one's memory");
            direct[i * size + j] = ret == 0;
        }
    }
    return ret;
}

static int group_copy(struct sw_stream *s, struct sw_device *to, void *dst, const void *src,
                      uint64_t bytes) {
    const int ret = sw_cuda_enter(s->device);
    if (ret < 0 || bytes == 0) return ret;
    return sw_cuda_check(
        s->device, cudaMemcpyPeerAsync(dst, to->index, src, s->device->index, bytes, s->stream),
        "a copy to another device");
}

/* NCCL reads its settings when the first communicator is made. */
static int group_detour(struct sw_device *const *devices, uint32_t size, const uint8_t *direct) {
    int ret = setenv("NCCL_P2P_DISABLE", "1", 1) < 0 ? -errno : 0;
    for (uint32_t i = 0; i < size && ret == 0; i++) {
        ret = sw_cuda_enter(devices[i]);
        for (uint32_t j = 0; j < size && ret == 0; j++)
            if (direct[i * size + j])
                ret = sw_cuda_check(devices[i], cudaDeviceDisablePeerAccess(devices[j]->index),
                                    "to leave another one's memory");
    }
    return ret;
}

/* ---- groups ---- */

static void free_part(struct sw_device_group *g) {
    if (!g) return;
    if (!g->device->given_up && sw_cuda_enter(g->device) == 0 && g->sent)
        sw_cuda_check(g->device, cudaFree(g->sent), "memory of its group cannot be given back");
    pthread_mutex_destroy(&g->lock);
    free(g);
}

static int make_part(struct sw_device *d, uint32_t rank, uint32_t size, enum sw_dtype carried,
                     struct sw_device_group **out) {
    struct sw_device_group *g = calloc(1, sizeof(*g));
    if (!g) {
        sw_error("CUDA device %d: no memory for a group", d->index);
        return -ENOMEM;
    }
    g->device = d;
    g->rank = rank;
    g->size = size;
    pthread_mutex_init(&g->lock, NULL);
    *out = g;
    if (carried == SW_FP32) return 0;
    g->piece = CARRIED_BYTES / sizeof(sw_bf16) / size / PIECE_STEP * PIECE_STEP;
    const uint64_t bytes = size * g->piece * sizeof(sw_bf16);
    void *memory = NULL;
    int ret = sw_cuda_enter(d);
    if (ret == 0)
        ret = sw_cuda_check(d, cudaMalloc(&memory, 2 * bytes), "memory for gradients on their way");
    if (ret < 0) return ret;
    g->sent = memory;
    g->come = g->sent + size * g->piece;
    return 0;
}

static_assert(sizeof(ncclUniqueId) == SW_DEVICE_GROUP_NAME_BYTES, "NCCL's id is the name");

static int group_make_name(void *name) {
    const ncclResult_t result = ncclGetUniqueId(name);
    if (result == ncclSuccess) return 0;
    sw_error("CUDA: NCCL names no group: %s; NCCL_SOCKET_IFNAME chooses the network that it uses, "
             "NCCL_DEBUG=INFO shows what it finds",
             ncclGetErrorString(result));
    return -EIO;
}

/* A group of calls that was begun is ended, whatever happens. An error that is not NCCL's is told
 * to it by a call that it refuses, or it would wait for a rank that does not come. */
static int make_comms(struct sw_device_group *const *parts, uint32_t count, const void *name) {
    static const char what[] = "to bring the devices together";
    ncclUniqueId id;
    memcpy(&id, name, sizeof(id));
    int ret = check(parts[0], ncclGroupStart(), what);
    if (ret < 0) return ret;
    for (uint32_t i = 0; i < count && ret == 0; i++) {
        struct sw_device_group *g = parts[i];
        const int entered = sw_cuda_enter(g->device);
        const int size = entered == 0 ? (int)g->size : 0;
        const ncclResult_t result = ncclCommInitRank(&g->comm, size, id, (int)g->rank);
        ret = entered < 0 ? entered : check(g, result, what);
    }
    const ncclResult_t ended = ncclGroupEnd();
    return ret < 0 ? ret : check(parts[0], ended, what);
}

static int group_open(struct sw_device *const *devices, uint32_t count, uint32_t first,
                      uint32_t size, const void *name, enum sw_dtype carried,
                      struct sw_device_group **out) {
    int ret = 0;
    assert(count >= 1 && first + count <= size && size <= SW_DEVICE_GROUP_MAX);
    for (uint32_t i = 0; i < count; i++) out[i] = NULL;
    for (uint32_t i = 0; i < count && ret == 0; i++)
        ret = make_part(devices[i], first + i, size, carried, &out[i]);
    if (ret == 0) ret = make_comms(out, count, name);
    for (uint32_t i = 0; i < count && ret < 0; i++) free_part(out[i]);
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
    free_part(g);
}

static int group_gather(struct sw_device_group *g, struct sw_stream *s, void *out, const void *in,
                        uint64_t bytes) {
    static const char what[] = "all-gather";
    const int ret = sw_cuda_enter(g->device);
    if (ret < 0 || bytes == 0) return ret;
    return check(g, ncclAllGather(in, out, bytes, ncclUint8, g->comm, s->stream), what);
}

/* Each rank's piece of a block to that rank. A group that was begun is ended, whatever happens. */
static int exchange_pieces(struct sw_device_group *g, struct sw_stream *s, uint64_t count) {
    static const char what[] = "the exchange of a reduce-scatter";
    ncclResult_t result = ncclGroupStart();
    for (uint32_t r = 0; r < g->size && result == ncclSuccess; r++) {
        if (r == g->rank) continue;
        result = ncclSend(g->sent + r * g->piece, count, ncclBfloat16, (int)r, g->comm, s->stream);
        if (result == ncclSuccess)
            result =
                ncclRecv(g->come + r * g->piece, count, ncclBfloat16, (int)r, g->comm, s->stream);
    }
    const ncclResult_t ended = ncclGroupEnd();
    return check(g, result == ncclSuccess ? ended : result, what);
}

static int scatter_block(struct sw_device_group *g, struct sw_stream *s, float *out,
                         const float *in, uint64_t stride, uint64_t count) {
    static const char what[] = "a reduce-scatter's arithmetic";
    int ret = 0;
    for (uint32_t r = 0; r < g->size && ret == 0; r++) {
        sw_bf16 *to = (r == g->rank ? g->come : g->sent) + r * g->piece;
        ret = sw_cuda_check(g->device,
                            sw_cuda_round(s->stream, SW_BF16, to, in + r * stride, count), what);
    }
    if (ret == 0) ret = exchange_pieces(g, s, count);
    if (ret < 0) return ret;
    return sw_cuda_check(g->device,
                         sw_cuda_rank_sum(s->stream, out, g->come, g->size, g->piece, count), what);
}

static int group_scatter(struct sw_device_group *g, struct sw_stream *s, float *out,
                         const float *in, uint64_t count) {
    static const char what[] = "reduce-scatter";
    int ret = sw_cuda_enter(g->device);
    if (ret < 0 || count == 0) return ret;
    if (!g->sent)
        return check(g, ncclReduceScatter(in, out, count, ncclFloat32, ncclSum, g->comm, s->stream),
                     what);
    for (uint64_t at = 0; at < count && ret == 0; at += g->piece) {
        const uint64_t left = count - at;
        ret = scatter_block(g, s, out + at, in + at, count, left < g->piece ? left : g->piece);
    }
    return ret;
}

static int group_numerics(enum sw_dtype carried, char *out, size_t size) {
    int version = 0;
    if (carried != SW_FP32) return snprintf(out, size, ", sums in the order of ranks");
    ncclGetVersion(&version);
    return snprintf(out, size, ", NCCL %d.%d.%d", version / 10000, version / 100 % 100,
                    version % 100);
}

const struct sw_device_group_ops sw_cuda_group_ops = {
    .connect = group_connect,
    .copy = group_copy,
    .detour = group_detour,
    .make_name = group_make_name,
    .open = group_open,
    .close = group_close,
    .all_gather = group_gather,
    .reduce_scatter = group_scatter,
    .poll = group_poll,
    .abort = group_abort,
    .numerics = group_numerics,
};
