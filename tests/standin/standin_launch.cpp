/* tests/standin/standin_launch.cpp - what a launch must obey, and the workers that run a grid. */
#include "standin_internal.h"

#include <map>
#include <thread>

namespace standin {
namespace {
constexpr size_t SHARED_DEFAULT = 48 << 10;
constexpr size_t SHARED_MOST =
    99 << 10; /* of compute capability 8.9, the least that is built for */

auto &limits_lock = *new std::mutex;
auto &limits = *new std::map<const void *, size_t>;

/* Workers wait for a grid; the caller waits for them, so that the fibers and their stacks are those
 * of a few threads, whoever launches. One grid runs at a time. */
struct Pool {
    std::mutex lock;
    std::condition_variable changed;
    Grid *grid = nullptr;
    uint64_t generation = 0;
    int busy = 0;

    Pool() {
        for (int i = 0; i < settings().threads; i++) std::thread([this] { serve(); }).detach();
    }
    void serve() {
        std::unique_lock<std::mutex> held(lock);
        for (uint64_t seen = 0;;) {
            changed.wait(held, [&] { return generation != seen; });
            seen = generation;
            Grid *mine = grid;
            held.unlock();
            run_blocks(*mine);
            held.lock();
            if (--busy == 0) changed.notify_all();
        }
    }
    void run(Grid &what) {
        std::unique_lock<std::mutex> held(lock);
        changed.wait(held, [&] { return busy == 0; });
        grid = &what;
        busy = settings().threads;
        generation++;
        changed.notify_all();
        changed.wait(held, [&] { return busy == 0; });
    }
};
} // namespace

void run_grid(const Launch &launch) {
    static Pool *pool = new Pool; /* its threads never end */
    Grid grid;
    grid.launch = &launch;
    grid.blocks = (uint64_t)launch.grid.x * launch.grid.y * launch.grid.z;
    grid.taken = 0;
    pool->run(grid);
}

bool launch_is_legal(const Launch &launch) {
    const dim3 g = launch.grid, b = launch.block;
    const uint64_t threads = (uint64_t)b.x * b.y * b.z;
    if (!threads || threads > 1024 || b.z > 64 || !g.x || !g.y || !g.z || g.x > 0x7FFFFFFFu ||
        g.y > 65535 || g.z > 65535) {
        fail(cudaErrorInvalidConfiguration);
        return false;
    }
    std::lock_guard<std::mutex> held(limits_lock);
    const auto set = limits.find(launch.kernel);
    if (launch.shared_bytes > (set == limits.end() ? SHARED_DEFAULT : set->second)) {
        fail(cudaErrorInvalidValue);
        return false;
    }
    return true;
}

cudaError_t set_shared_limit(const void *kernel, int bytes) {
    if (bytes < 0 || (size_t)bytes > SHARED_MOST) return fail(cudaErrorInvalidValue);
    std::lock_guard<std::mutex> held(limits_lock);
    limits[kernel] = (size_t)bytes > SHARED_DEFAULT ? (size_t)bytes : SHARED_DEFAULT;
    return cudaSuccess;
}

void launch(Launch &&what, cudaStream_t stream) {
    if (is_told_to_fail("launch")) {
        fail(cudaErrorLaunchFailure);
        return;
    }
    if (!launch_is_legal(what)) return;
    not_for_the_first_time(what.name, what.kernel, current_device());
    submit(stream_of(stream), [l = std::move(what)] { run_grid(l); });
}
} // namespace standin
