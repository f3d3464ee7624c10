/* Has the kernel refuse an io_uring call as a container's profile does: loaded with LD_PRELOAD.
 *
 *   REFUSE=CALL:ERRNO     every io_uring_setup, io_uring_register or io_uring_enter ends so
 *   REFUSE=CALL/N:ERRNO   only with N as its second argument: the opcode of a registration
 *
 * The filter is set before main(), so every thread inherits it. */
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static const struct {
    const char *name;
    unsigned number;
} calls[] = {
    {"io_uring_setup", SYS_io_uring_setup},
    {"io_uring_register", SYS_io_uring_register},
    {"io_uring_enter", SYS_io_uring_enter},
};

static void die(const char *why) {
    fprintf(stderr, "seccomp_refuse: %s\n", why);
    _exit(97);
}

static void refuse(unsigned number, int opcode, unsigned err) {
    /* Without an opcode the third and fourth line compare the call's number once more. */
    const unsigned field =
        opcode < 0 ? offsetof(struct seccomp_data, nr) : offsetof(struct seccomp_data, args[1]);
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, field),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, opcode < 0 ? number : (unsigned)opcode, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | err),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog filter = {sizeof(code) / sizeof(code[0]), code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) die("no_new_privs is refused");
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter)) die("the filter is refused");
}

__attribute__((constructor)) static void begin(void) {
    const char *wanted = getenv("REFUSE");
    char name[32];
    int opcode = -1, err = 0;
    if (!wanted) return;
    if (sscanf(wanted, "%31[^:/]/%d:%d", name, &opcode, &err) != 3 &&
        sscanf(wanted, "%31[^:/]:%d", name, &err) != 2)
        die("REFUSE is not CALL:ERRNO or CALL/N:ERRNO");
    for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++)
        if (strcmp(name, calls[i].name) == 0) return refuse(calls[i].number, opcode, (unsigned)err);
    die("REFUSE names no io_uring call");
}
