/* Reports a larger alignment for direct I/O than the file system's: loaded with LD_PRELOAD.
 *
 *   STATX_ALIGN=BYTES   what statx says, where it was asked for it */
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/stat.h>

int statx(int dir, const char *restrict path, int flags, unsigned mask, struct statx *restrict sx) {
    int (*real)(int, const char *restrict, int, unsigned, struct statx *restrict) =
        (int (*)(int, const char *restrict, int, unsigned, struct statx *restrict))dlsym(RTLD_NEXT,
                                                                                         "statx");
    const char *align = getenv("STATX_ALIGN");
    const int ret = real(dir, path, flags, mask, sx);
#ifdef STATX_DIOALIGN
    if (ret == 0 && align && (mask & STATX_DIOALIGN)) {
        sx->stx_mask |= STATX_DIOALIGN;
        sx->stx_dio_mem_align = sx->stx_dio_offset_align = (unsigned)atoi(align);
    }
#endif
    return ret;
}
