/* tests/standin/standin_guard.cpp - what may be called once a run has been made ready.
 *
 * cudaProfilerStart is where the back end says that a device is settled, cudaProfilerStop where it
 * says that the end has come. In between, the program stops at a call that makes, loads, frees,
 * pins or measures anything; at the first launch of a kernel that was not loaded before, the first
 * product of a description and the first call of a kind on a communicator, for which the real ones
 * would then make something; and at a wait for a whole stream that work was ever put on, which
 * would spin.
 *
 * STANDIN_CALLS=PATH: calls that belong to the start or the end stand there, one a line, in their
 * order: name, device, and bytes where it has any. */
#include "standin_internal.h"

#include <cuda_profiler_api.h>

#include <cstdio>
#include <cstdlib>
#include <set>

namespace standin {
namespace {
auto &lock = *new std::mutex;
auto &settled = *new std::set<int>;
auto &known = *new std::set<std::pair<const void *, int>>;

void note(const char *name, size_t bytes) {
    const char *path = getenv("STANDIN_CALLS");
    FILE *file = path ? fopen(path, "a") : nullptr;
    if (!file) return;
    fprintf(file, "%s %d %zu\n", name, current_device(), bytes);
    fclose(file);
}
} // namespace

void only_at_start(const char *name, size_t bytes) {
    std::lock_guard<std::mutex> held(lock);
    if (!settled.empty()) die("%s after the start: device %d is settled", name, *settled.begin());
    note(name, bytes);
}

void not_for_the_first_time(const char *what, const void *object, int kind) {
    std::lock_guard<std::mutex> held(lock);
    if (known.insert({object, kind}).second && !settled.empty())
        die("%s for the first time after the start: device %d is settled", what, *settled.begin());
}

void forget_object(const void *object) {
    std::lock_guard<std::mutex> held(lock);
    auto at = known.lower_bound({object, 0});
    while (at != known.end() && at->first == object) at = known.erase(at);
}

bool is_settled() {
    std::lock_guard<std::mutex> held(lock);
    return !settled.empty();
}
} // namespace standin

using namespace standin;
extern "C" {
cudaError_t cudaProfilerStart(void) {
    std::lock_guard<std::mutex> held(lock);
    note(__func__, 0);
    settled.insert(current_device());
    return cudaSuccess;
}
cudaError_t cudaProfilerStop(void) {
    std::lock_guard<std::mutex> held(lock);
    note(__func__, 0);
    settled.erase(current_device());
    return cudaSuccess;
}
}
