/* tests/standin/standin_block.cpp - one block at a time: its threads, barriers and warps.
 *
 * A worker (an OS thread) runs a block's threads as fibers. One runs until it waits or returns, so
 * a thread that never waits costs no switch: the next one starts on the same stack. A warp
 * operation is a meeting of the lanes of its mask; the last to arrive computes for all, through
 * pointers into their frames. Shared memory begins as NaN. When no thread can run, the block is
 * deadlocked, and who waits where is told.
 *
 * Under TSan each thread has a fiber of its own, and nothing but barriers, __syncwarp, atomics and
 * the border of a kernel orders memory. Neighbouring blocks get different fibers and different
 * shared memory, so that what they do to each other is a race as well. */
#include "standin_internal.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <xmmintrin.h>

namespace standin {
enum State : uint8_t { READY, AT_BARRIER, IN_WARP, RETURNED };

struct PendingCopy {
    void *dst;
    const void *src;
    int bytes, group;
};
struct Thread {
    Fiber *fiber = nullptr;
    uint3 index{};
    int linear = 0;
    State state = READY;
    const char *file = nullptr;
    int line = 0, result = 0, group = 0;
    std::vector<PendingCopy> copies;
};

namespace {
constexpr size_t ARENA_BYTES = 256 << 10; /* static shared memory between red zones */
constexpr size_t STATIC_BYTES_MAX = 48 << 10, RED_BYTES = 32;
constexpr int THREADS_MAX = 1024;
constexpr unsigned FLUSH_SUBNORMALS = 1 << 15 | 1 << 6; /* results and operands, in MXCSR */

struct Site {
    const void *site;
    char *at;
};

struct Worker {
    const Launch *launch = nullptr;
    Thread threads[THREADS_MAX];
    Warp warps[THREADS_MAX / 32];
    int count = 0, live = 0, at_barrier = 0, votes = 0;
    Barrier barrier_kind = BARRIER_PLAIN;
    Thread *current = nullptr;
    std::vector<Thread *> ready; /* from head on */
    size_t head = 0;
    Fiber main;
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Fiber *> idle;
    char *arena = nullptr, *arenas[2] = {};
    size_t arena_used = 0, static_used = 0;
    std::vector<Site> sites;
    char *dynamic = nullptr, *dynamics[2] = {};
    uint64_t random = 1;
    unsigned phase = 0;
    int parity = 0; /* of the block, under TSan */
    uint8_t next_token = 0;
    char tsan_barrier[2], tsan_begin[2], tsan_end[2], tsan_token[256];
};
thread_local Worker *worker = nullptr;

STANDIN_INTERNAL uint64_t next_random(Worker &w) {
    w.random ^= w.random << 13;
    w.random ^= w.random >> 7;
    w.random ^= w.random << 17;
    return w.random;
}

/* Orders the ready threads from place `from` on. */
STANDIN_INTERNAL void permute(Worker &w, size_t from) {
    if (settings().order == REVERSE) std::reverse(w.ready.begin() + (ptrdiff_t)from, w.ready.end());
    if (settings().order == RANDOM)
        for (size_t i = w.ready.size(); i > from + 1; i--)
            std::swap(w.ready[i - 1], w.ready[from + next_random(w) % (i - from)]);
}

STANDIN_INTERNAL void deadlock(Worker &w) {
    fprintf(stderr, "stand-in: %s, block (%u,%u,%u): no thread can run\n", w.launch->name,
            blockIdx.x, blockIdx.y, blockIdx.z);
    int shown = 0;
    for (int i = 0; i < w.count && shown < 40; i++) {
        const Thread &t = w.threads[i], *before = i ? &w.threads[i - 1] : nullptr;
        if (before && t.state == before->state && t.line == before->line) continue;
        shown++;
        if (t.state == AT_BARRIER)
            fprintf(stderr, "  from thread %d: __syncthreads at %s:%d\n", i, t.file, t.line);
        if (t.state == IN_WARP)
            fprintf(stderr, "  from thread %d: warp operation, mask %08x\n", i,
                    w.warps[i / 32].mask[i % 32]);
        if (t.state == RETURNED) fprintf(stderr, "  from thread %d: returned\n", i);
    }
    die("a barrier that not all threads reach");
}

STANDIN_INTERNAL Thread *pop(Worker &w) {
    if (w.head == w.ready.size()) return nullptr;
    Thread *t = w.ready[w.head++];
    if (w.head == w.ready.size()) {
        w.ready.clear();
        w.head = 0;
    }
    return t;
}

STANDIN_INTERNAL void activate(Worker &w, Thread *t) {
    w.current = t;
    threadIdx = t->index;
}

void fiber_main();

STANDIN_INTERNAL Fiber *another_fiber(Worker &w) {
    w.fibers.push_back(fiber_new(w.fibers.size(), fiber_main));
    return w.fibers.back().get();
}

STANDIN_INTERNAL void give_fiber(Worker &w, Thread *t) {
#ifdef STANDIN_TSAN
    t->fiber = w.fibers[(size_t)(w.parity * THREADS_MAX + t->linear)].get();
#else
    if (w.idle.empty()) w.idle.push_back(another_fiber(w));
    t->fiber = w.idle.back();
    w.idle.pop_back();
#endif
    t->fiber->assigned = t;
}

/* The current thread waits, its state says for what; others run. */
STANDIN_INTERNAL void wait_here(Worker &w) {
    Thread *me = w.current, *next = pop(w);
    if (!next) deadlock(w);
    if (next != me) {
        if (!next->fiber) give_fiber(w, next);
        fiber_switch(*me->fiber, *next->fiber);
    }
    activate(w, me);
}

STANDIN_INTERNAL void release_barrier(Worker &w) {
    const size_t from = w.ready.size();
    const int result = w.barrier_kind == BARRIER_OR    ? w.votes > 0
                       : w.barrier_kind == BARRIER_AND ? w.votes == w.live
                                                       : w.votes;
    for (int i = 0; i < w.count; i++)
        if (w.threads[i].state == AT_BARRIER) {
            w.threads[i].state = READY;
            w.threads[i].result = result;
            w.ready.push_back(&w.threads[i]);
        }
    permute(w, from);
    w.at_barrier = w.votes = 0;
    w.phase++;
}

/* Lets the lanes of this mask go on if all of them are here. */
STANDIN_INTERNAL void try_warp(Worker &w, int index, uint32_t mask, Collective fn) {
    Warp &warp = w.warps[index];
    const uint32_t need = mask & warp.live;
    if (settings().strict && need != mask)
        die("%s: a warp mask %08x names lanes that have returned (live: %08x)", w.launch->name,
            mask, warp.live);
    if ((warp.waiting & need) != need) return;
    for (uint32_t m = need; m; m &= m - 1)
        if (warp.mask[__builtin_ctz(m)] != mask) return;
    const int op = warp.op[__builtin_ctz(need)];
    for (uint32_t m = need; m; m &= m - 1)
        if (warp.op[__builtin_ctz(m)] != op)
            die("%s: lanes of one warp are in different operations", w.launch->name);
    if (fn) fn(warp, need);
    warp.waiting &= ~need;
    const size_t from = w.ready.size();
    for (uint32_t m = need; m; m &= m - 1) {
        Thread &t = w.threads[index * 32 + __builtin_ctz(m)];
        t.state = READY;
        w.ready.push_back(&t);
    }
    permute(w, from);
    if (settings().warps_run_ahead) /* before all others that are ready */
        std::rotate(w.ready.begin() + (long)w.head, w.ready.begin() + (long)from, w.ready.end());
}

STANDIN_INTERNAL void leave(Worker &w, Thread *t) {
    Warp &warp = w.warps[t->linear / 32];
    t->state = RETURNED;
    w.live--;
    warp.live &= ~(1u << (t->linear % 32));
    if (w.at_barrier && settings().strict)
        die("%s: thread %d has returned and others wait for it", w.launch->name, t->linear);
    if (w.live && w.at_barrier == w.live) release_barrier(w);
    if (warp.waiting) { /* lanes that waited for nobody but this one */
        const int lane = __builtin_ctz(warp.waiting);
        if (warp.op[lane] == OP_SYNCWARP) try_warp(w, t->linear / 32, warp.mask[lane], nullptr);
    }
}

STANDIN_INTERNAL void fiber_main() {
    fiber_entered();
    Worker &w = *worker;
    Fiber *self = nullptr;
    char here;
    for (auto &f : w.fibers)
        if (&here >= f->stack && &here < f->stack + f->bytes) self = f.get();
    for (;;) {
        Thread *t = self->assigned;
        activate(w, t);
        TSAN_ACQUIRE(&w.tsan_begin[w.parity]);
        w.launch->thread();
        TSAN_RELEASE(&w.tsan_end[w.parity]);
        leave(w, t);
        Thread *next = pop(w);
#ifndef STANDIN_TSAN
        if (next && !next->fiber) {
            next->fiber = self;
            self->assigned = next;
            continue;
        }
        w.idle.push_back(self);
#endif
        if (next) {
            if (!next->fiber) give_fiber(w, next);
            fiber_switch(*self, *next->fiber);
        } else {
            if (w.live) deadlock(w);
            fiber_switch(*self, w.main);
        }
    }
}

/* Not memset, which TSan would take for the block's own access. */
STANDIN_INTERNAL void fill_with_nan(void *at, size_t bytes) {
    __asm__ volatile("rep stosb" : "+D"(at), "+c"(bytes) : "a"(0xFF) : "memory");
}

STANDIN_INTERNAL void run_block(Worker &w, uint64_t block) {
    const Launch &l = *w.launch;
    blockIdx = {(unsigned)(block % l.grid.x), (unsigned)(block / l.grid.x % l.grid.y),
                (unsigned)(block / l.grid.x / l.grid.y)};
#ifdef STANDIN_TSAN
    w.parity ^= 1;
    w.arena = w.arenas[w.parity];
    w.dynamic = w.dynamics[w.parity];
    w.arena_used = ARENA_BYTES / 4;
    /* After the block before the last one, whose memory this is, and not after each other. */
    TSAN_ACQUIRE(&w.tsan_end[w.parity]);
    TSAN_RELEASE(&w.tsan_begin[w.parity]);
#endif
    ASAN_UNPOISON_MEMORY_REGION(w.arena, w.arena_used);
    fill_with_nan(w.arena, w.arena_used);
    ASAN_POISON_MEMORY_REGION(w.arena, ARENA_BYTES);
    w.arena_used = w.static_used = 0;
    w.sites.clear();
    if (l.shared_bytes) fill_with_nan(w.dynamic, l.shared_bytes);
    for (Warp &warp : w.warps) warp.live = warp.waiting = 0;
    w.live = w.count;
    w.at_barrier = w.votes = 0;
    w.ready.clear();
    w.head = 0;
    for (int i = 0; i < w.count; i++) {
        Thread &t = w.threads[i];
        const unsigned n = (unsigned)i;
        t.fiber = nullptr;
        t.state = READY;
        t.linear = i;
        t.group = 0;
        t.copies.clear();
        t.index = {n % l.block.x, n / l.block.x % l.block.y, n / l.block.x / l.block.y};
        w.warps[i / 32].live |= 1u << (i % 32);
        w.ready.push_back(&t);
    }
    permute(w, 0);
    Thread *first = pop(w);
    give_fiber(w, first);
    fiber_switch(w.main, *first->fiber);
}

Worker &worker_here() {
    if (worker) return *worker;
    worker = new Worker; /* for the life of its OS thread */
    worker->fibers.reserve(2 * THREADS_MAX);
    worker->idle.reserve(2 * THREADS_MAX);
    worker->ready.reserve(1 << 16);
    worker->sites.reserve(256);
    for (char *&arena : worker->arenas) {
        arena = static_cast<char *>(aligned_alloc(4096, ARENA_BYTES));
        fill_with_nan(arena, ARENA_BYTES);
    }
    worker->arena = worker->arenas[0];
    fiber_adopt(worker->main);
    return *worker;
}

/* Dynamic shared memory has the launch's size to the byte. */
size_t dynamic_tail(size_t bytes) {
    return (128 - bytes % 128) % 128;
}
void dynamic_make(Worker &w, size_t bytes) {
    w.dynamic = nullptr;
    if (!bytes) return;
    for (char *&d : w.dynamics) {
        d = static_cast<char *>(aligned_alloc(128, bytes + dynamic_tail(bytes)));
        ASAN_POISON_MEMORY_REGION(d + bytes, dynamic_tail(bytes));
    }
    w.dynamic = w.dynamics[0];
}
void dynamic_free(Worker &w, size_t bytes) {
    if (!bytes) return;
    for (char *&d : w.dynamics) {
        ASAN_UNPOISON_MEMORY_REGION(d + bytes, dynamic_tail(bytes));
        free(d);
        d = nullptr;
    }
    w.dynamic = nullptr;
}
} // namespace

void run_blocks(Grid &grid) {
    Worker &w = worker_here();
    const Launch &l = *grid.launch;
    w.launch = &l;
    w.count = (int)(l.block.x * l.block.y * l.block.z);
    dynamic_make(w, l.shared_bytes);
    blockDim = l.block;
    gridDim = l.grid;
#ifdef STANDIN_TSAN
    const size_t fibers = grid.blocks > 1 ? 2 * THREADS_MAX : THREADS_MAX + (size_t)w.count;
    while (w.fibers.size() < fibers) another_fiber(w);
#endif
    const unsigned mode = _mm_getcsr();
    if (l.flush_subnormals) _mm_setcsr(mode | FLUSH_SUBNORMALS);
    for (;;) {
        uint64_t block;
        {
            std::lock_guard<std::mutex> held(grid.lock);
            if (grid.taken == grid.blocks) break;
            block = grid.taken++;
        }
        w.random = (settings().seed * 0x9E3779B97F4A7C15ull) ^ (block * 0xD1B54A32D192ED03ull + 1);
        if (!w.random) w.random = 1;
        run_block(w, settings().order == FORWARD ? block : grid.blocks - 1 - block);
    }
    _mm_setcsr(mode);
    TSAN_ACQUIRE(&w.tsan_end[0]);
    TSAN_ACQUIRE(&w.tsan_end[1]);
    dynamic_free(w, l.shared_bytes);
    w.launch = nullptr;
}

/* ---- what the running thread calls ---- */

STANDIN_INTERNAL int lane_id() {
    return worker->current->linear & 31;
}

STANDIN_INTERNAL void *dynamic_shared() {
    if (!worker->dynamic)
        die("%s: dynamic shared memory is used, and 0 bytes were asked for", worker->launch->name);
    return worker->dynamic;
}

STANDIN_INTERNAL void *shared_at(const void *site, size_t bytes, size_t align) {
    Worker &w = *worker;
    for (const Site &s : w.sites)
        if (s.site == site) return s.at;
    const size_t at = (w.arena_used + RED_BYTES + align - 1) / align * align;
    w.static_used += bytes;
    if (w.static_used > STATIC_BYTES_MAX)
        die("%s: more than 48 KiB of static shared memory", w.launch->name);
    w.arena_used = at + bytes;
    ASAN_UNPOISON_MEMORY_REGION(w.arena + at, bytes);
    w.sites.push_back({site, w.arena + at});
    return w.arena + at;
}

STANDIN_INTERNAL void warp_collective(uint32_t mask, Op op, void *arg, Collective fn) {
    Worker &w = *worker;
    Thread *t = w.current;
    const int index = t->linear / 32, lane = t->linear % 32;
    Warp &warp = w.warps[index];
    if (!(mask >> lane & 1))
        die("%s: thread %d is not in its own warp mask %08x", w.launch->name, t->linear, mask);
    if (op == OP_SYNCWARP) { /* of the warp operations only this one orders memory */
        bool first = true;
        for (uint32_t m = warp.waiting; m && first; m &= m - 1)
            if (warp.mask[__builtin_ctz(m)] == mask) {
                warp.token[lane] = warp.token[__builtin_ctz(m)];
                first = false;
            }
        if (first) warp.token[lane] = w.next_token++;
        TSAN_RELEASE(&w.tsan_token[warp.token[lane]]);
    }
    const uint8_t token = warp.token[lane];
    warp.waiting |= 1u << lane;
    warp.mask[lane] = mask;
    warp.op[lane] = op;
    warp.arg[lane] = arg;
    t->state = IN_WARP;
    try_warp(w, index, mask, fn);
    wait_here(w);
    if (op == OP_SYNCWARP) TSAN_ACQUIRE(&w.tsan_token[token]);
    (void)token;
}

STANDIN_INTERNAL int block_barrier(int predicate, Barrier kind, const char *file, int line) {
    Worker &w = *worker;
    Thread *t = w.current;
    if (w.at_barrier && kind != w.barrier_kind)
        die("%s: different kinds of __syncthreads meet", w.launch->name);
    if (settings().strict && w.live != w.count)
        die("%s:%d: %s: __syncthreads after threads have returned", file, line, w.launch->name);
    w.barrier_kind = kind;
    w.votes += predicate != 0;
    w.at_barrier++;
    t->state = AT_BARRIER;
    t->file = file;
    t->line = line;
    void *barrier = &w.tsan_barrier[w.phase & 1];
    TSAN_RELEASE(barrier);
    if (w.at_barrier == w.live) {
        for (int i = 0; i < w.count && settings().strict; i++)
            if (w.threads[i].state == AT_BARRIER && w.threads[i].line != line)
                die("%s: threads of one block wait at different barriers, lines %d and %d",
                    w.launch->name, w.threads[i].line, line);
        release_barrier(w);
    }
    wait_here(w);
    TSAN_ACQUIRE(barrier);
    (void)barrier;
    return t->result;
}

STANDIN_INTERNAL void yield_thread() {
    Worker &w = *worker;
    w.ready.push_back(w.current);
    wait_here(w);
}

/* As late as the program allows: at the wait that covers it. */
STANDIN_INTERNAL void copy_async(void *dst, const void *src, int bytes) {
    const uintptr_t places = reinterpret_cast<uintptr_t>(dst) | reinterpret_cast<uintptr_t>(src);
    if (places & (uintptr_t)(bytes - 1)) die("cp.async: an address is not aligned");
    if (settings().copy_early)
        memcpy(dst, src, (size_t)bytes);
    else
        worker->current->copies.push_back({dst, src, bytes, worker->current->group});
}

STANDIN_INTERNAL void copy_async_commit() {
    worker->current->group++;
}

STANDIN_INTERNAL void copy_async_wait(int pending) {
    Thread *t = worker->current;
    size_t kept = 0;
    for (size_t i = 0; i < t->copies.size(); i++) {
        const PendingCopy copy = t->copies[i];
        if (copy.group < t->group - pending)
            memcpy(copy.dst, copy.src, (size_t)copy.bytes);
        else
            t->copies[kept++] = copy;
    }
    t->copies.resize(kept);
}
} // namespace standin
