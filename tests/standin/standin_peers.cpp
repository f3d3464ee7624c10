/* tests/standin/standin_peers.cpp - access of one device to another's memory, and copies between
 * them.
 *
 * STANDIN_PEER=none: no device reaches another one. Else all do once they were let, and
 * STANDIN_PEER=wrong: a direct copy brings a wrong byte, and so does NCCL unless NCCL_P2P_DISABLE
 * was set when it began; STANDIN_PEER=hang: a direct copy never ends, nor does NCCL's;
 * STANDIN_PEER=lost: one that goes through the host brings a wrong byte, too; STANDIN_PEER=stuck:
 * no copy ends. wrong:A>B and hang:A>B: from device A to B alone. */
#include "standin_internal.h"

#include <cstdio>
#include <cstdlib>
#include <set>

namespace standin {
namespace {
auto &lock = *new std::mutex;
auto &opened = *new std::set<std::pair<int, int>>;

bool is_direct(int from, int to) {
    std::lock_guard<std::mutex> held(lock);
    return opened.count({from, to}) || opened.count({to, from});
}
} // namespace

bool peers_are(const char *what) {
    const char *text = getenv("STANDIN_PEER");
    const size_t length = strlen(what);
    return text && !strncmp(text, what, length) && (!text[length] || text[length] == ':');
}

bool way_is(const char *what, int from, int to) {
    int a, b;
    const char *text = getenv("STANDIN_PEER"), *colon = text ? strchr(text, ':') : nullptr;
    return peers_are(what) &&
           (!colon || (sscanf(colon, ":%d>%d", &a, &b) == 2 && a == from && b == to));
}
} // namespace standin

using namespace standin;
extern "C" {
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    AT_START(0);
    MAY_FAIL(cudaErrorUnknown);
    if (device < 0 || peer < 0 || device >= settings().devices || peer >= settings().devices)
        return fail(cudaErrorInvalidDevice);
    *can = device != peer && !peers_are("none");
    return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
    AT_START(0);
    MAY_FAIL(cudaErrorUnknown);
    std::lock_guard<std::mutex> held(lock);
    return opened.insert({current_device(), peer}).second ? cudaSuccess
                                                          : fail(cudaErrorPeerAccessAlreadyEnabled);
}
cudaError_t cudaDeviceDisablePeerAccess(int peer) {
    AT_START(0);
    MAY_FAIL(cudaErrorUnknown);
    std::lock_guard<std::mutex> held(lock);
    return opened.erase({current_device(), peer}) ? cudaSuccess
                                                  : fail(cudaErrorPeerAccessNotEnabled);
}

cudaError_t cudaMemcpyPeerAsync(void *dst, int to, const void *src, int from, size_t bytes,
                                cudaStream_t stream) {
    MAY_FAIL(cudaErrorLaunchFailure);
    int device = -1;
    if (place_of(dst, bytes, &device) != DEVICE || device != to) return fail(cudaErrorInvalidValue);
    if (place_of(src, bytes, &device) != DEVICE || device != from)
        return fail(cudaErrorInvalidValue);
    const bool direct = is_direct(from, to);
    const bool wrong = (direct && way_is("wrong", from, to)) || peers_are("lost");
    if ((direct && way_is("hang", from, to)) || peers_are("stuck")) {
        auto never = std::make_shared<Meeting>();
        never->parts = 2;
        submit_part(stream_of(stream), never);
        return cudaSuccess;
    }
    submit(stream_of(stream), [=] {
        memcpy(dst, src, bytes);
        if (wrong && bytes) static_cast<char *>(dst)[bytes / 2] ^= 1;
    });
    return cudaSuccess;
}
}
