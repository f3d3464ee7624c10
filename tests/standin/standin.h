/* tests/standin/standin.h - CUDA C++ for the host's compiler: the language of kernels.
 *
 * A kernel source compiled with this header runs on the CPU, for tests alone. The threads of a
 * block are fibers of one OS thread that switch at barriers, warp operations and __nanosleep only;
 * standin_block.cpp has the rules. The toolkit's headers give the types; no CUDA library and no GPU
 * is needed. kernels/cuda/gpu.h includes this, and nothing else does. */
#ifndef TESTS_STANDIN_STANDIN_H
#define TESTS_STANDIN_STANDIN_H
#if defined(__CUDACC__)
#error "the stand-in is for the host's compiler"
#endif
#include <cuda_runtime_api.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __launch_bounds__
#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __launch_bounds__(...)
/* A plain shared variable could be neither poisoned nor fenced off. */
#define __shared__ shared_variables_are_declared_with_GPU_SHARED

#if defined(__SANITIZE_ADDRESS__)
#define STANDIN_ASAN 1
#endif
#if defined(__SANITIZE_THREAD__) && !defined(STANDIN_TSAN)
#define STANDIN_TSAN 1
#endif
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define STANDIN_ASAN 1
#endif
#if __has_feature(thread_sanitizer) && !defined(STANDIN_TSAN)
#define STANDIN_TSAN 1
#endif
#endif
/* What the stand-in itself does is hidden from TSan, so that it sees only what the kernel does. */
#if defined(STANDIN_TSAN)
#define STANDIN_INTERNAL __attribute__((no_sanitize_thread, noinline))
#else
#define STANDIN_INTERNAL
#endif

inline thread_local uint3 threadIdx{}, blockIdx{};
inline thread_local dim3 blockDim{}, gridDim{};
constexpr int warpSize = 32;

namespace standin {
struct Warp {
    uint32_t live = 0, waiting = 0;
    uint32_t mask[32] = {};
    int op[32] = {};
    void *arg[32] = {}; /* in the frames of the waiting lanes */
    uint8_t token[32] = {};
};
using Collective = void (*)(Warp &, uint32_t mask);
enum Op { OP_SYNCWARP = 1, OP_SHUFFLE, OP_VOTE, OP_MMA, OP_LDMATRIX };

/* Waits until every live lane of mask is here; the last one to arrive runs fn for all. */
void warp_collective(uint32_t mask, Op op, void *arg, Collective fn);

enum Barrier { BARRIER_PLAIN, BARRIER_OR, BARRIER_AND, BARRIER_COUNT };
int block_barrier(int predicate, Barrier kind, const char *file, int line);

void *shared_at(const void *site, size_t bytes, size_t align);
void *dynamic_shared();
int lane_id();
void yield_thread();
void copy_async(void *dst, const void *src, int bytes);
void copy_async_commit();
void copy_async_wait(int pending);
[[noreturn]] void die(const char *format, ...) __attribute__((format(printf, 1, 2)));

struct Launch {
    const char *name;
    const void *kernel;
    dim3 grid, block;
    size_t shared_bytes;
    bool flush_subnormals;
    std::function<void()> thread; /* what each thread of the grid runs */
};
void launch(Launch &&what, cudaStream_t stream);

/* Parameters are copied once, at the launch. */
template <class... P, class... A>
void launch_kernel(const char *name, void (*kernel)(P...), dim3 grid, dim3 block,
                   size_t shared_bytes, cudaStream_t stream, bool flush, A &&...args) {
    static_assert(sizeof...(P) == sizeof...(A), "a kernel's argument count");
    std::tuple<std::decay_t<P>...> values(static_cast<std::decay_t<P>>(std::forward<A>(args))...);
    launch(Launch{name, reinterpret_cast<const void *>(kernel), grid, block, shared_bytes, flush,
                  [kernel, values] { std::apply(kernel, values); }},
           stream);
}
} // namespace standin

/* The Makefile says so of a source whose kernels nvcc builds with -ftz=true. */
#ifdef GPU_SUBNORMALS_ARE_ZERO
#define STANDIN_FLUSH true
#else
#define STANDIN_FLUSH false
#endif
#define GPU_START(kernel, grid, block, shared_bytes, stream, ...)                                  \
    ::standin::launch_kernel(#kernel, kernel, (grid), (block), (shared_bytes), (stream),           \
                             STANDIN_FLUSH, __VA_ARGS__)
#define GPU_SHARED(type, name, dims)                                                               \
    static char standin_site_##name;                                                               \
    using standin_type_##name = type dims;                                                         \
    auto &name = *static_cast<standin_type_##name *>(                                              \
        ::standin::shared_at(&standin_site_##name, sizeof(standin_type_##name), 16))
#define GPU_DYNAMIC_SHARED(type, name) type *name = static_cast<type *>(::standin::dynamic_shared())

#define __syncthreads()                                                                            \
    ((void)::standin::block_barrier(0, ::standin::BARRIER_PLAIN, __FILE__, __LINE__))
#define __syncthreads_or(p) ::standin::block_barrier((p), ::standin::BARRIER_OR, __FILE__, __LINE__)
#define __syncthreads_and(p)                                                                       \
    ::standin::block_barrier((p), ::standin::BARRIER_AND, __FILE__, __LINE__)
#define __syncthreads_count(p)                                                                     \
    ::standin::block_barrier((p), ::standin::BARRIER_COUNT, __FILE__, __LINE__)

/* ---- warps ---- */

namespace standin {
template <class T>
struct Shuffle {
    T in, out;
    int source;
};
template <class T>
STANDIN_INTERNAL void shuffle_run(Warp &w, uint32_t mask) {
    for (uint32_t m = mask; m; m &= m - 1) {
        auto *lane = static_cast<Shuffle<T> *>(w.arg[__builtin_ctz(m)]);
        if (mask >> lane->source & 1)
            lane->out = static_cast<Shuffle<T> *>(w.arg[lane->source])->in;
        else
            memset(&lane->out, 0xFF, sizeof(T)); /* an absent lane's value is undefined */
    }
}
template <class T>
STANDIN_INTERNAL T shuffle(uint32_t mask, T value, int source) {
    static_assert(std::is_trivially_copyable<T>::value, "a shuffle moves plain bytes");
    Shuffle<T> lane{value, value, source};
    warp_collective(mask, OP_SHUFFLE, &lane, shuffle_run<T>);
    return lane.out;
}
STANDIN_INTERNAL inline void ballot_run(Warp &w, uint32_t mask) {
    uint32_t votes = 0;
    for (uint32_t m = mask; m; m &= m - 1) {
        const int lane = __builtin_ctz(m);
        if (static_cast<uint32_t *>(w.arg[lane])[0]) votes |= 1u << lane;
    }
    for (uint32_t m = mask; m; m &= m - 1)
        static_cast<uint32_t *>(w.arg[__builtin_ctz(m)])[1] = votes;
}
STANDIN_INTERNAL inline uint32_t ballot(uint32_t mask, int predicate) {
    uint32_t vote[2] = {predicate ? 1u : 0u, 0};
    warp_collective(mask, OP_VOTE, vote, ballot_run);
    return vote[1];
}
} // namespace standin

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    const int lane = standin::lane_id();
    return standin::shuffle(mask, value, (lane & ~(width - 1)) | (source & (width - 1)));
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32) {
    const int lane = standin::lane_id(), source = lane ^ flip;
    return standin::shuffle(mask, value,
                            source < (lane & ~(width - 1)) + width ? source & 31 : lane);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const int lane = standin::lane_id(), source = (lane & (width - 1)) + (int)delta;
    return standin::shuffle(mask, value, source < width ? lane + (int)delta : lane);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const int lane = standin::lane_id(), source = (lane & (width - 1)) - (int)delta;
    return standin::shuffle(mask, value, source >= 0 ? lane - (int)delta : lane);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
    return standin::ballot(mask, predicate);
}
inline int __any_sync(unsigned mask, int predicate) {
    return standin::ballot(mask, predicate) != 0;
}
inline int __all_sync(unsigned mask, int predicate) {
    return standin::ballot(mask, !predicate) == 0;
}
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) {
    standin::warp_collective(mask, standin::OP_SYNCWARP, nullptr, nullptr);
}
/* A loop that waits for another thread must call this: nothing else lets that thread run. */
inline void __nanosleep(unsigned) {
    standin::yield_thread();
}

/* ---- atomics ---- */

namespace standin {
template <class T, class F>
inline T atomic_update(T *p, F f) {
    T old;
    __atomic_load(p, &old, __ATOMIC_RELAXED);
    for (;;) {
        T value = f(old);
        if (__atomic_compare_exchange(p, &old, &value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            return old;
    }
}
template <class T>
struct Same {
    using type = T;
};
template <class T>
using same = typename Same<T>::type;
} // namespace standin

/* Whole numbers only: a sum of floats would depend on who comes first. */
template <class T>
inline T atomicAdd(T *p, standin::same<T> value) {
    static_assert(std::is_integral<T>::value, "no atomics of floating-point numbers");
    return standin::atomic_update(p, [value](T old) { return static_cast<T>(old + value); });
}
template <class T>
inline T atomicMax(T *p, standin::same<T> value) {
    return standin::atomic_update(p, [value](T old) { return old < value ? value : old; });
}
template <class T>
inline T atomicMin(T *p, standin::same<T> value) {
    return standin::atomic_update(p, [value](T old) { return value < old ? value : old; });
}

#include "standin_math.h"
#include "standin_tensor.h"

#endif
