/* tests/standin/standin_memory.cpp - device memory, pinned host memory, and copies.
 *
 * Device memory begins as NaN and is no one else's: a copy that names the wrong side is refused,
 * and with STANDIN_GUARD=1 the host cannot touch it at all. Pinned memory is copied when the stream
 * gets there. Pageable memory is read at the call and written before the call returns, as CUDA
 * promises; whether a read one also waits for the stream is the driver's choice, so chance's here.
 * STANDIN_PAGEABLE=late: it is copied as late as pinned memory, because kernels/device.h promises
 * no more. */
#include "standin_internal.h"

#include <cstdlib>
#include <map>
#include <sys/mman.h>

namespace standin {
namespace {
constexpr size_t PAGE_BYTES = 4096, ALIGN_BYTES = 256;

struct Allocation {
    size_t bytes, map_bytes;
    char *base;
    int device;
};
auto &lock = *new std::mutex;
auto &device_memory = *new std::map<char *, Allocation>;
auto &pinned_memory = *new std::map<char *, size_t>;
auto &used = *new std::map<int, size_t>;
int open_count = 0;

size_t round_up(size_t value, size_t step) {
    return (value + step - 1) / step * step;
}

void protect_all(int protection) {
    for (auto &a : device_memory) mprotect(a.second.base, a.second.map_bytes, protection);
}

/* The piece of a map that p lies in. */
template <class Map>
typename Map::iterator piece_of(Map &map, char *p) {
    auto it = map.upper_bound(p);
    return it == map.begin() ? map.end() : --it;
}

bool guarded_alloc(Allocation &a, char **out) {
    const size_t pages = a.bytes ? round_up(a.bytes, PAGE_BYTES) : PAGE_BYTES;
    a.map_bytes = pages;
    void *map = mmap(nullptr, pages + PAGE_BYTES, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) return false;
    a.base = static_cast<char *>(map);
    mprotect(a.base + pages, PAGE_BYTES, PROT_NONE);
    *out = a.base + (pages - a.bytes) / ALIGN_BYTES * ALIGN_BYTES; /* its end at the last page's */
    memset(*out, 0xFF, a.bytes);
    if (open_count == 0) mprotect(a.base, pages, PROT_NONE);
    return true;
}

bool plain_alloc(Allocation &a, char **out) {
    const size_t bytes = round_up(a.bytes ? a.bytes : 1, ALIGN_BYTES);
    a.base = static_cast<char *>(aligned_alloc(ALIGN_BYTES, bytes));
    if (!a.base) return false;
    memset(a.base, 0xFF, a.bytes);
    ASAN_POISON_MEMORY_REGION(a.base + a.bytes, bytes - a.bytes);
    *out = a.base;
    return true;
}

void release(char *p, const Allocation &a) {
    if (a.map_bytes) {
        munmap(a.base, a.map_bytes + PAGE_BYTES);
        return;
    }
    ASAN_UNPOISON_MEMORY_REGION(p, round_up(a.bytes ? a.bytes : 1, ALIGN_BYTES));
    free(a.base);
}

cudaError_t copy(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind,
                 const StreamPtr &stream) {
    if (!bytes) return cudaSuccess;
    int to_device = -1, from_device = -1;
    const Place to = place_of(dst, bytes, &to_device), from = place_of(src, bytes, &from_device);
    if (to == BEYOND || from == BEYOND) return fail(cudaErrorInvalidValue);
    const bool to_wanted = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_wanted = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind != cudaMemcpyDefault &&
        ((to == DEVICE) != to_wanted || (from == DEVICE) != from_wanted))
        return fail(cudaErrorInvalidValue);
    const bool at_call = !settings().pageable_late;
    if (from == PAGEABLE && at_call) {
        auto taken = std::make_shared<std::vector<char>>(bytes);
        memcpy(taken->data(), src, bytes);
        submit(stream, [=] { memcpy(dst, taken->data(), bytes); });
        if (coin(2)) finish(stream);
    } else {
        submit(stream, [=] { memcpy(dst, src, bytes); });
    }
    if (to == PAGEABLE && at_call) finish(stream);
    return cudaSuccess;
}

cudaError_t set(void *dst, int value, size_t bytes, const StreamPtr &stream) {
    int device;
    if (!bytes) return cudaSuccess;
    if (place_of(dst, bytes, &device) != DEVICE) return fail(cudaErrorInvalidValue);
    submit(stream, [=] { memset(dst, value, bytes); });
    return cudaSuccess;
}

cudaError_t pin(void *p, size_t bytes) {
    std::lock_guard<std::mutex> held(lock);
    const auto piece = piece_of(pinned_memory, static_cast<char *>(p) + bytes - 1);
    if (piece != pinned_memory.end() && piece->first + piece->second > static_cast<char *>(p))
        return fail(cudaErrorHostMemoryAlreadyRegistered);
    pinned_memory[static_cast<char *>(p)] = bytes;
    return cudaSuccess;
}

bool unpin(void *p) {
    std::lock_guard<std::mutex> held(lock);
    return pinned_memory.erase(static_cast<char *>(p)) == 1;
}
} // namespace

Place place_of(const void *p, size_t bytes, int *device) {
    char *at = static_cast<char *>(const_cast<void *>(p));
    std::lock_guard<std::mutex> held(lock);
    const auto piece = piece_of(device_memory, at);
    if (piece != device_memory.end() && at < piece->first + piece->second.bytes) {
        *device = piece->second.device;
        return at + bytes <= piece->first + piece->second.bytes ? DEVICE : BEYOND;
    }
    const auto pinned = piece_of(pinned_memory, at);
    const bool is_pinned =
        pinned != pinned_memory.end() && at + bytes <= pinned->first + pinned->second;
    return is_pinned ? PINNED : PAGEABLE;
}

MemoryOpen::MemoryOpen() {
    if (!settings().guard) return;
    std::lock_guard<std::mutex> held(lock);
    if (open_count++ == 0) protect_all(PROT_READ | PROT_WRITE);
}
MemoryOpen::~MemoryOpen() {
    if (!settings().guard) return;
    std::lock_guard<std::mutex> held(lock);
    if (--open_count == 0) protect_all(PROT_NONE);
}
} // namespace standin

using namespace standin;
extern "C" {
cudaError_t cudaMalloc(void **out, size_t bytes) {
    AT_START(bytes);
    MAY_FAIL(cudaErrorMemoryAllocation);
    Allocation a{bytes, 0, nullptr, current_device()};
    char *p = nullptr;
    std::lock_guard<std::mutex> held(lock);
    if (bytes > settings().memory - used[a.device]) return fail(cudaErrorMemoryAllocation);
    if (!(settings().guard ? guarded_alloc(a, &p) : plain_alloc(a, &p)))
        return fail(cudaErrorMemoryAllocation);
    used[a.device] += bytes;
    device_memory[p] = a;
    *out = p;
    return cudaSuccess;
}

/* Waits for the device, as the real one does. */
cudaError_t cudaFree(void *p) {
    if (!p) return cudaSuccess;
    AT_START(0);
    cudaDeviceSynchronize();
    std::lock_guard<std::mutex> held(lock);
    const auto it = device_memory.find(static_cast<char *>(p));
    if (it == device_memory.end()) return fail(cudaErrorInvalidValue);
    used[it->second.device] -= it->second.bytes;
    release(it->first, it->second);
    device_memory.erase(it);
    MAY_FAIL(cudaErrorLaunchFailure);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    AT_START(0);
    MAY_FAIL(cudaErrorUnknown);
    std::lock_guard<std::mutex> held(lock);
    *total_bytes = settings().memory;
    *free_bytes = settings().memory - used[current_device()];
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned) {
    AT_START(bytes);
    void *p = aligned_alloc(PAGE_BYTES, round_up(bytes ? bytes : 1, PAGE_BYTES));
    if (!p) return fail(cudaErrorMemoryAllocation);
    pin(p, bytes ? bytes : 1);
    *out = p;
    return cudaSuccess;
}
cudaError_t cudaMallocHost(void **out, size_t bytes) {
    return cudaHostAlloc(out, bytes, 0);
}
cudaError_t cudaFreeHost(void *p) {
    if (!p) return cudaSuccess;
    cudaDeviceSynchronize();
    if (!unpin(p)) return fail(cudaErrorInvalidValue);
    free(p);
    return cudaSuccess;
}
cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned) {
    AT_START(bytes);
    MAY_FAIL(cudaErrorMemoryAllocation);
    return p && bytes ? pin(p, bytes) : fail(cudaErrorInvalidValue);
}
cudaError_t cudaHostUnregister(void *p) {
    AT_START(0);
    cudaDeviceSynchronize();
    if (!unpin(p)) return fail(cudaErrorHostMemoryNotRegistered);
    MAY_FAIL(cudaErrorLaunchFailure);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
    MAY_FAIL(cudaErrorLaunchFailure);
    return copy(dst, src, bytes, kind, stream_of(stream));
}
cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind) {
    AT_START(bytes);
    const StreamPtr stream = stream_of(nullptr);
    const cudaError_t error = copy(dst, src, bytes, kind, stream);
    if (error == cudaSuccess && kind != cudaMemcpyDeviceToDevice) finish(stream);
    return error;
}
/* Of device memory: does not wait. */
cudaError_t cudaMemset(void *dst, int value, size_t bytes) {
    AT_START(bytes);
    MAY_FAIL(cudaErrorLaunchFailure);
    return set(dst, value, bytes, stream_of(nullptr));
}
cudaError_t cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t stream) {
    MAY_FAIL(cudaErrorLaunchFailure);
    return set(dst, value, bytes, stream_of(stream));
}
}
