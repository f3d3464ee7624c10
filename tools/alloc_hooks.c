/* tools/alloc_hooks.c - the program's own malloc, mmap and pthread_create: they tell the guard
 * (base/alloc_guard.h), serve libraries (base/library_memory.h), and else do what glibc's do.
 *
 * A definition in the program comes before glibc's for every shared library too, which is the
 * point: the linker's --wrap would see the program's own calls alone, and oneDNN, the OpenMP
 * runtime, liburing and jansson are libraries. For the memory calls glibc keeps second names, which
 * need no look-up (that would allocate before it had found anything); the others are looked up at
 * the first call. The library libspillway.a does not hold these: it must not take over the malloc
 * of whoever links it. Sanitizers bring their own, so the Makefile leaves this file out there; with
 * another C library than glibc it is empty, and the guard says that it does not watch. */
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "base/alloc_guard.h"
#include "base/library_memory.h"

#ifdef __GLIBC__

extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *p, size_t bytes);
extern void *__libc_memalign(size_t alignment, size_t bytes);
extern void __libc_free(void *p);

void *malloc(size_t bytes) {
    void *p = sw_library_memory_take(__builtin_return_address(0), 0, bytes);
    if (p) return p;
    sw_alloc_guard_note("malloc", bytes);
    return __libc_malloc(bytes);
}

void *calloc(size_t count, size_t bytes) {
    size_t all;
    if (!__builtin_mul_overflow(count, bytes, &all)) {
        void *p = sw_library_memory_take(__builtin_return_address(0), 0, all);
        if (p) return memset(p, 0, all);
        sw_alloc_guard_note("calloc", all);
    }
    return __libc_calloc(count, bytes);
}

void *realloc(void *p, size_t bytes) {
    const size_t before = sw_library_memory_size(p);
    if (!before) {
        sw_alloc_guard_note("realloc", bytes);
        return __libc_realloc(p, bytes);
    }
    void *grown = sw_library_memory_take(__builtin_return_address(0), 0, bytes);
    if (!grown) {
        sw_alloc_guard_note("realloc", bytes);
        grown = __libc_malloc(bytes);
    }
    if (!grown) return NULL;
    memcpy(grown, p, before < bytes ? before : bytes);
    sw_library_memory_give(p);
    return grown;
}

void free(void *p) {
    if (!sw_library_memory_give(p)) __libc_free(p);
}

static void *aligned(const char *call, const void *caller, size_t alignment, size_t bytes) {
    void *p = sw_library_memory_take(caller, alignment, bytes);
    if (p) return p;
    sw_alloc_guard_note(call, bytes);
    return __libc_memalign(alignment, bytes);
}

void *aligned_alloc(size_t alignment, size_t bytes) {
    return aligned("aligned_alloc", __builtin_return_address(0), alignment, bytes);
}

void *memalign(size_t alignment, size_t bytes) {
    return aligned("memalign", __builtin_return_address(0), alignment, bytes);
}

void *valloc(size_t bytes) {
    return aligned("valloc", __builtin_return_address(0), (size_t)sysconf(_SC_PAGESIZE), bytes);
}

int posix_memalign(void **out, size_t alignment, size_t bytes) {
    if (alignment % sizeof(void *) || alignment == 0 || (alignment & (alignment - 1)))
        return EINVAL;
    const int before = errno; /* which this call does not set */
    void *p = aligned("posix_memalign", __builtin_return_address(0), alignment, bytes);
    errno = before;
    if (!p) return ENOMEM;
    *out = p;
    return 0;
}

/* ---- what is looked up ---- */

/* The next definition, into *slot: two threads that look it up at once find the same. */
static void *next(_Atomic uintptr_t *slot, const char *name) {
    uintptr_t found = *slot;
    if (!found) *slot = found = (uintptr_t)dlsym(RTLD_NEXT, name);
    return (void *)found;
}

/* C++'s operator new(size_t): oneDNN makes a vector within a product, and malloc would see the C++
 * library as its caller. Its delete calls free(). */
void *_Znwm(size_t bytes);
void *_Znwm(size_t bytes) {
    static _Atomic uintptr_t slot;
    void *p = sw_library_memory_take(__builtin_return_address(0), 0, bytes);
    return p ? p : ((void *(*)(size_t))(uintptr_t)next(&slot, "_Znwm"))(bytes);
}

/* ---- address space ---- */

void *mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    sw_alloc_guard_note("mmap", bytes);
    /* On x86-64 the call takes bytes, and the C library adds nothing to it. */
    return (void *)syscall(SYS_mmap, at, bytes, protection, flags, fd, offset);
}

void *mmap64(void *at, size_t bytes, int protection, int flags, int fd, off64_t offset) {
    sw_alloc_guard_note("mmap", bytes);
    return (void *)syscall(SYS_mmap, at, bytes, protection, flags, fd, offset);
}

void *mremap(void *at, size_t before, size_t bytes, int flags, ...) {
    va_list more;
    va_start(more, flags);
    void *to = flags & MREMAP_FIXED ? va_arg(more, void *) : NULL;
    va_end(more);
    sw_alloc_guard_note("mremap", bytes);
    return (void *)syscall(SYS_mremap, at, before, bytes, flags, to);
}

int brk(void *end) {
    static _Atomic uintptr_t slot;
    int (*real)(void *) = (int (*)(void *))(uintptr_t)next(&slot, "brk");
    sw_alloc_guard_note("brk", 0);
    return real(end);
}

void *sbrk(intptr_t bytes) {
    static _Atomic uintptr_t slot;
    void *(*real)(intptr_t) = (void *(*)(intptr_t))(uintptr_t)next(&slot, "sbrk");
    if (bytes > 0) sw_alloc_guard_note("sbrk", (uint64_t)bytes);
    return real(bytes);
}

/* ---- threads ---- */

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*main)(void *),
                   void *arg) {
    static _Atomic uintptr_t slot;
    int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) =
        (int (*)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *))(uintptr_t)next(
            &slot, "pthread_create");
    sw_alloc_guard_note("pthread_create", 0);
    return real(thread, attributes, main, arg);
}

#endif
