/* A libnccl.so.2 for machines without NCCL, which the plugin could not be loaded on: one GPU needs
 * none of it. Whoever asks for several is told that it is missing. */
#include <nccl.h>

ncclResult_t ncclGetVersion(int *version) {
    *version = 0;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) {
    (void)result;
    return "NCCL (libnccl.so.2) is not on this machine";
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    (void)id;
    return ncclSystemError;
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank) {
    (void)comm, (void)size, (void)id, (void)rank;
    return ncclSystemError;
}

/* The header's own say nothing of arguments. */
ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);

ncclResult_t ncclGroupStart(void) {
    return ncclSystemError;
}

ncclResult_t ncclGroupEnd(void) {
    return ncclSystemError;
}

ncclResult_t ncclSend(const void *at, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    (void)at, (void)count, (void)type, (void)peer, (void)comm, (void)stream;
    return ncclSystemError;
}

ncclResult_t ncclRecv(void *at, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    (void)at, (void)count, (void)type, (void)peer, (void)comm, (void)stream;
    return ncclSystemError;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    (void)comm, (void)error;
    return ncclSystemError;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    (void)comm;
    return ncclSystemError;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    (void)comm;
    return ncclSystemError;
}

ncclResult_t ncclAllGather(const void *in, void *out, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
    (void)in, (void)out, (void)count, (void)type, (void)comm, (void)stream;
    return ncclSystemError;
}

ncclResult_t ncclReduceScatter(const void *in, void *out, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    (void)in, (void)out, (void)count, (void)type, (void)op, (void)comm, (void)stream;
    return ncclSystemError;
}
