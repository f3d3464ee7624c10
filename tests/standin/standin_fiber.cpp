/* tests/standin/standin_fiber.cpp - stacks, and the switch from one to another. */
#include "standin_internal.h"

#include <pthread.h>
#include <sys/mman.h>

#ifdef STANDIN_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

#if !defined(__x86_64__)
#error "the switch between fibers is written for x86-64"
#endif
extern "C" void sw_standin_switch(void **save, void *to);
/* Saves what a call keeps, and the stack pointer with it. */
__asm__(".text\n"
        ".globl sw_standin_switch\n"
        ".hidden sw_standin_switch\n"
        ".type sw_standin_switch,@function\n"
        "sw_standin_switch:\n"
        "  pushq %rbp\n"
        "  pushq %rbx\n"
        "  pushq %r12\n"
        "  pushq %r13\n"
        "  pushq %r14\n"
        "  pushq %r15\n"
        "  movq %rsp, (%rdi)\n"
        "  movq %rsi, %rsp\n"
        "  popq %r15\n"
        "  popq %r14\n"
        "  popq %r13\n"
        "  popq %r12\n"
        "  popq %rbx\n"
        "  popq %rbp\n"
        "  ret\n"
        ".size sw_standin_switch,.-sw_standin_switch\n");

namespace standin {
namespace {
constexpr size_t STACK_BYTES = 256 << 10, PAGE_BYTES = 4096;
constexpr size_t PLACES = 61, PLACE_BYTES = 320;
} // namespace

STANDIN_INTERNAL std::unique_ptr<Fiber> fiber_new(size_t number, void (*entry)()) {
    auto fiber = std::make_unique<Fiber>();
    char *map = static_cast<char *>(mmap(nullptr, STACK_BYTES + PAGE_BYTES, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (map == MAP_FAILED) die("no memory for a thread's stack");
    mprotect(map, PAGE_BYTES, PROT_NONE); /* what outgrows the stack faults */
    fiber->stack = map + PAGE_BYTES;
    fiber->bytes = STACK_BYTES;
    void **top =
        reinterpret_cast<void **>(fiber->stack + STACK_BYTES - number % PLACES * PLACE_BYTES);
    *--top = nullptr; /* a return address that is never used: the stack is aligned as in a call */
    *--top = reinterpret_cast<void *>(entry);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    fiber->top = top;
#ifdef STANDIN_TSAN
    fiber->tsan = __tsan_create_fiber(0);
#endif
    return fiber;
}

void fiber_adopt(Fiber &f) {
    pthread_attr_t attributes;
    void *lowest = nullptr;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &lowest, &f.bytes);
    pthread_attr_destroy(&attributes);
    f.stack = static_cast<char *>(lowest);
#ifdef STANDIN_TSAN
    f.tsan = __tsan_get_current_fiber();
#endif
}

STANDIN_INTERNAL void fiber_switch(Fiber &from, Fiber &to) {
#ifdef STANDIN_ASAN
    __sanitizer_start_switch_fiber(&from.asan, to.stack, to.bytes);
#endif
#ifdef STANDIN_TSAN
    __tsan_switch_to_fiber(to.tsan, 1); /* 1: the switch orders nothing */
#endif
    sw_standin_switch(&from.top, to.top);
#ifdef STANDIN_ASAN
    __sanitizer_finish_switch_fiber(from.asan, nullptr, nullptr);
#endif
}

STANDIN_INTERNAL void fiber_entered() {
#ifdef STANDIN_ASAN
    __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
}
} // namespace standin
