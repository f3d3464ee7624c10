/* tests/standin/standin_internal.h - what the stand-in's own files share: its settings, fibers, the
 * workers that run blocks, device memory, and the queues of streams. */
#ifndef TESTS_STANDIN_STANDIN_INTERNAL_H
#define TESTS_STANDIN_STANDIN_INTERNAL_H
#include "standin.h"

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#ifdef STANDIN_ASAN
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(at, bytes)   ((void)(at), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(at, bytes) ((void)(at), (void)(bytes))
#endif
#ifdef STANDIN_TSAN
extern "C" {
void *__tsan_get_current_fiber(void);
void *__tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void *fiber, unsigned flags);
void __tsan_acquire(void *at);
void __tsan_release(void *at);
}
#define TSAN_ACQUIRE(at) __tsan_acquire(at)
#define TSAN_RELEASE(at) __tsan_release(at)
#else
#define TSAN_ACQUIRE(at) ((void)(at))
#define TSAN_RELEASE(at) ((void)(at))
#endif

namespace standin {

/* ---- settings (standin_runtime.cpp), from the environment, read once:
 *
 * STANDIN_SCHED=fwd|rev|rand:N    order of threads between barriers, and of blocks
 * STANDIN_STRICT=1                threads that have returned may not be missing at a barrier or in
 *                                 a mask, and one barrier is one place in the source
 * STANDIN_GUARD=1                 the host cannot touch device memory
 * STANDIN_COPY=late|early         when cp.async copies: at the wait for it, or at once
 * STANDIN_STREAMS=late:N|sync     when queued work runs: as late as it may, seeded; or at the call
 * STANDIN_THREADS=N               blocks that run at a time
 * STANDIN_DEVICES=N               how many devices there are
 * STANDIN_MEMORY=BYTES            of each
 * STANDIN_TIMES=PATH              where each stream says at its end how long its work took, in ns
 * STANDIN_DRIFT=PPM               how much faster the devices' clock goes than the host's
 * STANDIN_SYNC_US=N               how much longer each wait for a stream takes; read at each
 * STANDIN_ERROR=N                 what cudaGetDeviceCount returns instead of success
 */
enum Order { FORWARD, REVERSE, RANDOM };
struct Settings {
    Order order = FORWARD;
    uint64_t seed = 1, stream_seed = 1;
    bool strict = false, guard = false, copy_early = false, streams_sync = false;
    bool pageable_late = false, streams_last = false;
    bool warps_run_ahead = false;
    int threads = 1, devices = 1, error = 0;
    double drift_ppm = 0;
    const char *times = nullptr;
    size_t memory = (size_t)64 << 30;
};
const Settings &settings();

/* ---- fibers (standin_fiber.cpp) ---- */

struct Thread;
struct Fiber {
    void *top = nullptr;   /* the stack pointer while it does not run */
    char *stack = nullptr; /* the lowest address */
    size_t bytes = 0;
    Thread *assigned = nullptr;
    void *asan = nullptr, *tsan = nullptr;
};
/* number: spreads the first addresses used, or all stacks would share a few lines of the caches. */
std::unique_ptr<Fiber> fiber_new(size_t number, void (*entry)());
void fiber_adopt(Fiber &f); /* the running OS thread's own stack */
void fiber_switch(Fiber &from, Fiber &to);
void fiber_entered();

/* ---- blocks (standin_block.cpp) ---- */

struct Grid {
    const Launch *launch;
    uint64_t blocks, taken;
    std::mutex lock; /* guards taken */
};
/* Runs blocks of the grid in the calling thread until none is left. */
void run_blocks(Grid &grid);

/* ---- kernels (standin_launch.cpp) ---- */

void run_grid(const Launch &launch);
bool launch_is_legal(const Launch &launch);
cudaError_t set_shared_limit(const void *kernel, int bytes);

/* ---- memory (standin_memory.cpp) ---- */

enum Place { PAGEABLE, PINNED, DEVICE, BEYOND }; /* BEYOND: begins in device memory and leaves it */
Place place_of(const void *p, size_t bytes, int *device);
/* While one lives, the running work may touch device memory. */
struct MemoryOpen {
    MemoryOpen();
    ~MemoryOpen();
};

/* ---- streams (standin_streams.cpp) ---- */

struct Stream;
struct Meeting; /* a collective: its parts lie in several streams and run together */
using StreamPtr = std::shared_ptr<Stream>;

StreamPtr stream_of(cudaStream_t stream); /* the null stream is the current device's */
int stream_device(const StreamPtr &stream);
void submit(const StreamPtr &stream, std::function<void()> work);
void finish(const StreamPtr &stream);     /* all that was submitted to it so far */
bool coin(unsigned one_in);               /* from the streams' seed */
bool has_worked(const StreamPtr &stream); /* more than events was ever put on it */

/* run: once, by the last part to come to the front of its stream. Where other processes take part
 * (may_begin is set), begin comes before it, as soon as may_begin says so, and run once is_ready.
 */
struct Meeting {
    uint32_t parts = 0;              /* that it needs, in this process */
    std::vector<StreamPtr> streams;  /* of those that were submitted */
    std::vector<uint64_t> positions; /* theirs in these streams */
    std::function<bool()> may_begin, is_ready;
    std::function<void()> begin, run;
    bool begun = false;
    bool abandoned = false; /* its parts end without it */
};
void submit_part(const StreamPtr &stream, const std::shared_ptr<Meeting> &meeting);
void abandon(const std::shared_ptr<Meeting> &meeting);

/* ---- errors and devices (standin_runtime.cpp) ---- */

cudaError_t fail(cudaError_t error); /* notes it as the thread's last one */
/* Whether this call is the one that STANDIN_FAIL names (standin_faults.cpp). */
bool is_told_to_fail(const char *name);
/* First in a function of CUDA's runtime. */
#define MAY_FAIL(error)                                                                            \
    if (standin::is_told_to_fail(__func__)) return standin::fail(error)
int current_device();

/* ---- the guard (standin_guard.cpp) ---- */

/* Stops the program where a device is settled. */
void only_at_start(const char *name, size_t bytes);
/* Likewise where this is the first use of an object of such a kind. */
void not_for_the_first_time(const char *what, const void *object, int kind);
void forget_object(const void *object); /* its address may come again */
bool is_settled();
/* First in a function that belongs to a run's start, or its end. */
#define AT_START(bytes) standin::only_at_start(__func__, (bytes))

/* ---- peers (standin_peers.cpp) ---- */

bool peers_are(const char *what); /* STANDIN_PEER */
} // namespace standin

#endif
