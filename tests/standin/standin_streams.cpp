/* tests/standin/standin_streams.cpp - streams and events whose work runs as late as it may.
 *
 * What is submitted waits in its stream's queue until somebody waits for it, until other work that
 * is waited for depends on it, or until chance (seeded) lets it run. So what is read, overwritten
 * or freed without a wait shows as wrong bytes, in every run. An event is a place in a stream: it
 * has happened when all before it has run. To wait for an event that was never recorded is to wait
 * for nothing, as in CUDA.
 *
 * One piece of work runs at a time, in the thread that happens to need it; whoever needs it too
 * waits. The time of an event that keeps it is when its stream got there: a stream goes on from
 * such a record only as far as something wants, but for the first record behind a piece of work,
 * which happens with that work. So what such events lie around has the time that it took, and what
 * was not awaited has none yet. Host functions run in one thread, one after the other. A
 * collective's parts wait at the front of their streams until all are there. */
#include "standin_internal.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <thread>

namespace standin {
namespace {
enum Kind { WORK, WAIT, HOST, PART, RECORD };

struct Item {
    Kind kind;
    std::function<void()> work;
    StreamPtr stream; /* WAIT: until it has done `position` items */
    uint64_t position = 0;
    std::shared_ptr<Meeting> meeting;
    std::shared_ptr<uint64_t> time_ns; /* RECORD: to be filled */
    bool started = false;              /* HOST */
};

constexpr int DEADLOCK_S = 60, DEPTH_MAX = 4096;
constexpr auto LOOK = std::chrono::milliseconds(1); /* at what other processes have done */
} // namespace

struct Stream {
    int device = 0;
    bool waits_for_null = false; /* made without cudaStreamNonBlocking */
    bool destroyed = false;
    bool records_at_once = false; /* the last thing done was work */
    bool has_worked = false;      /* more than events was ever put on it */
    std::deque<Item> items;
    uint64_t submitted = 0, done = 0;
    uint64_t work_ns = 0; /* that its work took */
};

namespace {
/* Never destroyed: a thread waits with them when the program ends. */
auto &lock = *new std::mutex;
auto &changed = *new std::condition_variable;
auto &streams = *new std::vector<StreamPtr>;      /* all that live or have work left */
auto &null_streams = *new std::vector<StreamPtr>; /* by device */
auto &host_functions = *new std::deque<std::pair<StreamPtr, std::function<void()>>>;
bool running = false;    /* a piece of work, by some thread */
bool has_others = false; /* processes that take part in meetings, and wake nobody here */
uint64_t random_state = 0;

uint64_t next_random() {
    if (!random_state) random_state = settings().stream_seed * 0x9E3779B97F4A7C15ull | 1;
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state >> 16;
}

/* The device's clock: the host's, or one that goes faster. */
uint64_t now_ns() {
    static uint64_t first_ns = 0;
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    const uint64_t ns = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
    if (!first_ns) first_ns = ns;
    return ns + (uint64_t)((double)(ns - first_ns) * settings().drift_ppm * 1e-6);
}

void pop(Stream &s) {
    s.items.pop_front();
    s.done++;
    s.records_at_once = false;
    changed.notify_all();
}

bool is_record(const Stream &s) {
    return !s.items.empty() && s.items.front().kind == RECORD;
}

void take_record(Stream &s) {
    *s.items.front().time_ns = now_ns();
    pop(s);
}

void pop_work(Stream &s) {
    pop(s);
    s.records_at_once = s.items.empty();
    if (is_record(s)) take_record(s);
}

void serve_host_functions() {
    std::unique_lock<std::mutex> held(lock);
    for (;;) {
        changed.wait(held, [] { return !host_functions.empty(); });
        auto next = std::move(host_functions.front());
        host_functions.pop_front();
        held.unlock();
        next.second();
        held.lock();
        pop_work(*next.first);
    }
}

void start_host_function(const StreamPtr &s, Item &item) {
    static bool serves = false;
    if (!serves) std::thread(serve_host_functions).detach();
    serves = true;
    item.started = true;
    host_functions.emplace_back(s, std::move(item.work));
    changed.notify_all();
}

/* Whether each part is at the front of its stream. */
bool all_are_here(const Meeting &m) {
    if (m.streams.size() < m.parts) return false;
    for (size_t i = 0; i < m.streams.size(); i++)
        if (m.streams[i]->done + 1 != m.positions[i]) return false;
    return true;
}

/* Returns how long it took. */
uint64_t run_work(std::unique_lock<std::mutex> &held, const std::function<void()> &work) {
    running = true;
    const uint64_t start_ns = now_ns();
    held.unlock();
    {
        MemoryOpen open;
        work();
    }
    held.lock();
    running = false;
    return now_ns() - start_ns;
}

void run_meeting(std::unique_lock<std::mutex> &held, const std::shared_ptr<Meeting> &m) {
    if (m->run) run_work(held, m->run);
    for (const StreamPtr &s : m->streams) pop_work(*s);
}

/* Runs the stream's front item if it can run now; whether something moved. */
bool step(std::unique_lock<std::mutex> &held, const StreamPtr &s) {
    if (s->items.empty() || running) return false;
    Item &item = s->items.front();
    if (item.kind == WAIT) {
        if (item.stream->done < item.position) return false;
        pop(*s);
        return true;
    }
    if (item.kind == RECORD) {
        take_record(*s);
        return true;
    }
    if (item.kind == HOST) {
        if (item.started) return false;
        start_host_function(s, item);
        return true;
    }
    if (item.kind == PART) {
        const std::shared_ptr<Meeting> meeting = item.meeting;
        if (meeting->abandoned) {
            pop_work(*s);
            return true;
        }
        if (!all_are_here(*meeting)) return false;
        if (meeting->may_begin && !meeting->begun) {
            if (!meeting->may_begin()) return false;
            run_work(held, meeting->begin);
            return meeting->begun = true;
        }
        if (meeting->is_ready && !meeting->is_ready()) return false;
        run_meeting(held, meeting);
        return true;
    }
    const std::function<void()> work = std::move(item.work);
    s->work_ns += run_work(held, work);
    pop_work(*s);
    return true;
}

/* One step of the stream, or of one that its front item waits for. */
bool advance(std::unique_lock<std::mutex> &held, const StreamPtr &s, int depth) {
    if (depth > DEPTH_MAX) die("streams wait for each other in a circle");
    if (s->items.empty()) return false;
    if (step(held, s)) return true;
    if (running || s->items.empty()) return false;
    const Item &front = s->items.front();
    if (front.kind == WAIT) {
        const StreamPtr other = front.stream;
        return advance(held, other, depth + 1);
    }
    if (front.kind == PART) {
        const std::shared_ptr<Meeting> m = front.meeting;
        for (size_t i = 0; i < m->streams.size(); i++)
            if (m->streams[i] != s && m->streams[i]->done + 1 < m->positions[i] &&
                advance(held, m->streams[i], depth + 1))
                return true;
    }
    return false;
}

void force(std::unique_lock<std::mutex> &held, const StreamPtr &s, uint64_t position) {
    using Clock = std::chrono::steady_clock;
    auto moved = Clock::now();
    while (s->done < position) {
        const bool advanced = advance(held, s, 0);
        if (!advanced) {
            const auto most = std::chrono::nanoseconds(std::chrono::seconds(DEADLOCK_S));
            if (changed.wait_for(held, has_others ? std::chrono::nanoseconds(LOOK) : most) ==
                std::cv_status::timeout) {
                if (Clock::now() - moved < most) continue;
                die("a wait for a stream has not ended for %d s", DEADLOCK_S);
            }
        }
        moved = Clock::now();
    }
}

void forget_finished() {
    for (size_t i = 0; i < streams.size(); i++)
        if (streams[i]->destroyed && streams[i]->items.empty()) {
            streams[i] = streams.back();
            streams.pop_back();
            i--;
        }
}

bool has_more_than_records(const Stream &s) {
    for (const Item &item : s.items)
        if (item.kind != RECORD) return true;
    return false;
}

/* Chance lets a little run at each submission, so that both orders of what is unordered occur. */
void let_some_run(std::unique_lock<std::mutex> &held, const StreamPtr &submitted) {
    if (settings().streams_sync) {
        while (!running && step(held, submitted)) {
        }
        return;
    }
    if (settings().streams_last || next_random() % 4 || streams.empty()) return;
    const StreamPtr lucky = streams[next_random() % streams.size()];
    for (uint64_t n = next_random() % 4 + 1; n > 0 && !running && has_more_than_records(*lucky);) {
        const bool counts = !is_record(*lucky); /* and goes on behind a record */
        if (!step(held, lucky)) break;
        n -= counts;
    }
    forget_finished();
}

/* Nobody is woken: what is waited for depends on nothing submitted later but parts of meetings. */
void push(const StreamPtr &s, Item item) {
    s->has_worked |= item.kind != RECORD;
    s->items.push_back(std::move(item));
    s->submitted++;
}

Item wait_item(const StreamPtr &stream, uint64_t position) {
    Item item{};
    item.kind = WAIT;
    item.stream = stream;
    item.position = position;
    return item;
}

/* The null stream waits for the device's blocking streams, and they for it. */
void order_with_null(const StreamPtr &s) {
    const StreamPtr null = null_streams[(size_t)s->device];
    if (s == null) {
        for (const StreamPtr &other : streams)
            if (other->device == s->device && other->waits_for_null &&
                other->done < other->submitted)
                push(s, wait_item(other, other->submitted));
    } else if (s->waits_for_null && null->done < null->submitted) {
        push(s, wait_item(null, null->submitted));
    }
}

void submit_item(const StreamPtr &s, Item item) {
    std::unique_lock<std::mutex> held(lock);
    order_with_null(s);
    push(s, std::move(item));
    let_some_run(held, s);
}

void make_null_streams() {
    while (null_streams.size() < (size_t)settings().devices) {
        auto s = std::make_shared<Stream>();
        s->device = (int)null_streams.size();
        null_streams.push_back(s);
        streams.push_back(s);
    }
}
} // namespace

bool coin(unsigned one_in) {
    std::lock_guard<std::mutex> held(lock);
    return settings().streams_sync || next_random() % one_in == 0;
}

int stream_device(const StreamPtr &stream) {
    return stream->device;
}

StreamPtr stream_of(cudaStream_t stream) {
    std::lock_guard<std::mutex> held(lock);
    make_null_streams();
    if (!stream) return null_streams[(size_t)current_device()];
    return *reinterpret_cast<StreamPtr *>(stream);
}

bool has_worked(const StreamPtr &stream) {
    std::lock_guard<std::mutex> held(lock);
    return stream->has_worked;
}

void submit(const StreamPtr &stream, std::function<void()> work) {
    Item item{};
    item.kind = WORK;
    item.work = std::move(work);
    submit_item(stream, std::move(item));
}

void submit_part(const StreamPtr &stream, const std::shared_ptr<Meeting> &meeting) {
    std::unique_lock<std::mutex> held(lock);
    Item item{};
    item.kind = PART;
    item.meeting = meeting;
    has_others |= (bool)meeting->may_begin;
    order_with_null(stream);
    push(stream, std::move(item));
    meeting->streams.push_back(stream);
    meeting->positions.push_back(stream->submitted);
    changed.notify_all();
    let_some_run(held, stream);
}

void abandon(const std::shared_ptr<Meeting> &meeting) {
    std::lock_guard<std::mutex> held(lock);
    meeting->abandoned = true;
    changed.notify_all();
}

void finish(const StreamPtr &stream) {
    std::unique_lock<std::mutex> held(lock);
    force(held, stream, stream->submitted);
}
} // namespace standin

using namespace standin;

namespace {
struct Event {
    StreamPtr stream; /* none: never recorded */
    uint64_t position = 0;
    bool timed = false;
    std::shared_ptr<uint64_t>
        time_ns; /* of a timed one that was recorded; 0: it has not happened */
};
Event *event_of(cudaEvent_t event) {
    return reinterpret_cast<Event *>(event);
}
} // namespace

extern "C" {
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) {
    AT_START(0);
    MAY_FAIL(cudaErrorMemoryAllocation);
    std::lock_guard<std::mutex> held(lock);
    make_null_streams();
    auto s = std::make_shared<Stream>();
    s->device = current_device();
    s->waits_for_null = !(flags & cudaStreamNonBlocking);
    streams.push_back(s);
    *out = reinterpret_cast<cudaStream_t>(new StreamPtr(s));
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *out) {
    return cudaStreamCreateWithFlags(out, 0);
}
/* What is queued still runs. */
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    AT_START(0);
    if (!stream) return fail(cudaErrorInvalidResourceHandle);
    std::lock_guard<std::mutex> held(lock);
    auto *s = reinterpret_cast<StreamPtr *>(stream);
    (*s)->destroyed = true;
    if (settings().times) {
        if (FILE *file = fopen(settings().times, "a")) {
            fprintf(file, "%d %llu\n", (*s)->device, (unsigned long long)(*s)->work_ns);
            fclose(file);
        }
    }
    delete s;
    forget_finished();
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (has_worked(stream_of(stream))) AT_START(0);
    finish(stream_of(stream));
    if (const char *us = getenv("STANDIN_SYNC_US"))
        std::this_thread::sleep_for(std::chrono::microseconds(atoi(us)));
    MAY_FAIL(cudaErrorLaunchFailure);
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    const StreamPtr s = stream_of(stream);
    std::unique_lock<std::mutex> held(lock);
    advance(held, s, 0);
    return s->done == s->submitted ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaDeviceSynchronize(void) {
    AT_START(0);
    const int device = current_device();
    std::unique_lock<std::mutex> held(lock);
    const std::vector<StreamPtr> all = streams;
    for (const StreamPtr &s : all)
        if (s->device == device) force(held, s, s->submitted);
    forget_finished();
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    MAY_FAIL(cudaErrorLaunchFailure);
    const StreamPtr s = stream_of(stream);
    Event place;
    {
        std::lock_guard<std::mutex> held(lock);
        place = *event_of(event);
    }
    if (place.stream) submit_item(s, wait_item(place.stream, place.position));
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    AT_START(0);
    Item item{};
    item.kind = HOST;
    item.work = [=] { function(data); };
    submit_item(stream_of(stream), std::move(item));
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) {
    AT_START(0);
    MAY_FAIL(cudaErrorMemoryAllocation);
    auto *event = new Event;
    event->timed = !(flags & cudaEventDisableTiming);
    *out = reinterpret_cast<cudaEvent_t>(event);
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    AT_START(0);
    delete event_of(event);
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    MAY_FAIL(cudaErrorLaunchFailure);
    const StreamPtr s = stream_of(stream);
    std::unique_lock<std::mutex> held(lock);
    Event *e = event_of(event);
    if (e->timed) {
        Item item{};
        item.kind = RECORD;
        item.time_ns = e->time_ns = std::make_shared<uint64_t>(0);
        order_with_null(s);
        push(s, std::move(item));
        if (s->records_at_once && s->items.size() == 1) take_record(*s);
        if (settings().streams_sync) let_some_run(held, s);
    }
    e->stream = s;
    e->position = s->submitted;
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    std::lock_guard<std::mutex> held(lock);
    const Event *a = event_of(from), *b = event_of(to);
    if (!a->time_ns || !b->time_ns) return fail(cudaErrorInvalidResourceHandle);
    if (!*a->time_ns || !*b->time_ns) return fail(cudaErrorNotReady);
    *ms = (float)((double)(int64_t)(*b->time_ns - *a->time_ns) * 1e-6);
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    std::unique_lock<std::mutex> held(lock);
    const Event place = *event_of(event);
    if (place.stream) force(held, place.stream, place.position);
    MAY_FAIL(cudaErrorLaunchFailure);
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    MAY_FAIL(cudaErrorLaunchFailure);
    std::unique_lock<std::mutex> held(lock);
    const Event place = *event_of(event);
    if (!place.stream || place.stream->done >= place.position) return cudaSuccess;
    advance(held, place.stream, 0);
    return place.stream->done >= place.position ? cudaSuccess : cudaErrorNotReady;
}
}
