/* tests/standin/standin_faults.cpp - calls that fail when they are told to.
 *
 * STANDIN_FAIL=NAME:N: call N of this function, from 1, fails with the error that is likeliest
 * there. It does nothing; but what waits or gives back does so first, because such a call passes on
 * errors of earlier work. NAME is a function of CUDA's runtime, of cuBLASLt or of NCCL; `launch`,
 * of a kernel; or `calloc`, of the back end. Calls count from where the setting was given or
 * changed, over all threads, so a program sets it only while no other thread calls. */
#include "standin_internal.h"

#include <cstdlib>
#include <string>

namespace standin {
namespace {
auto &lock = *new std::mutex;
auto &setting = *new std::string; /* as it was last seen */
uint64_t left = 0;                /* of the named calls, until one fails */
} // namespace

bool is_told_to_fail(const char *name) {
    const char *text = getenv("STANDIN_FAIL");
    if (!text || !*text) return false;
    std::lock_guard<std::mutex> held(lock);
    const char *colon = strchr(text, ':');
    if (setting != text) {
        setting = text;
        left = colon ? strtoull(colon + 1, nullptr, 10) : 1;
    }
    const size_t length = colon ? (size_t)(colon - text) : strlen(text);
    return left > 0 && strlen(name) == length && !memcmp(name, text, length) && --left == 0;
}
} // namespace standin

/* The linker sends the back end's calls here. */
extern "C" {
void *__real_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes) {
    return standin::is_told_to_fail("calloc") ? nullptr : __real_calloc(count, bytes);
}
}
