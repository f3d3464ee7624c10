/* The files of a store: laid out, preallocated, locked and found again, and a clear answer for
 * every folder, limit or container that refuses something. */
#include "nvme/nvme.h"

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

#include "tests/support_nvme.h"

static uint64_t size_of(const char *folder, const char *file, uint64_t *allocated) {
    char path[256];
    struct stat st;
    snprintf(path, sizeof(path), "%s/%s", folder, file);
    if (stat(path, &st)) return UINT64_MAX;
    if (allocated) *allocated = (uint64_t)st.st_blocks * 512;
    return (uint64_t)st.st_size;
}

static void files_are_preallocated_and_even_over_the_folders(void **state) {
    (void)state;
    uint64_t records[30];
    for (int i = 0; i < 30; i++) records[i] = (i % 5 + 1) * (uint64_t)PAGE;
    const struct sw_nvme_options o = {three_folders, 3, "even", records, 30, 2, NULL};
    struct sw_nvme_store *store;
    assert_int_equal(sw_nvme_open(&store, &o), 0);
    uint64_t sum = 0, low = UINT64_MAX, high = 0;
    for (int f = 0; f < 3; f++) {
        char name[32];
        uint64_t allocated = 0;
        snprintf(name, sizeof(name), "even.%d.state", f);
        const uint64_t size = size_of(three_folders[f], name, &allocated);
        assert_true(size != UINT64_MAX && allocated >= size);
        sum += size;
        if (size < low) low = size;
        if (size > high) high = size;
    }
    assert_true(sum == sw_nvme_bytes(&o));
    assert_true(high - low <= 2 * 5 * PAGE); /* one record, twice for its homes */
    sw_nvme_close(store, 1);
    for (int f = 0; f < 3; f++) {
        char name[32];
        snprintf(name, sizeof(name), "even.%d.state", f);
        assert_true(size_of(three_folders[f], name, NULL) == UINT64_MAX); /* removed when told */
    }
}

static void run_after_run_the_files_keep_name_and_size(void **state) {
    (void)state;
    uint64_t first = 0;
    for (int run = 0; run < 4; run++) {
        const pid_t child = fork();
        if (child == 0) { /* dies without closing, as a killed run does */
            const struct sw_nvme_options o = {three_folders, 1, "again", odd_records,
                                              CHUNKS,        2, NULL};
            struct sw_nvme_store *store;
            _exit(sw_nvme_open(&store, &o) ? 1 : 0);
        }
        int status;
        assert_true(waitpid(child, &status, 0) == child && status == 0);
        uint64_t allocated = 0;
        size_of(dir_a, "again.0.state", &allocated);
        if (run == 0) first = allocated;
        assert_true(first > 0 && allocated == first);
    }
    /* A smaller store of the name gives the rest back. */
    const struct sw_nvme_options o = {three_folders, 1, "again", odd_records, 2, 1, NULL};
    struct sw_nvme_store *store;
    assert_int_equal(sw_nvme_open(&store, &o), 0);
    assert_true(size_of(dir_a, "again.0.state", NULL) == 4 * PAGE);
    sw_nvme_close(store, 0);
    assert_true(size_of(dir_a, "again.0.state", NULL) == 4 * PAGE); /* kept unless told */
    assert_int_equal(sw_nvme_open(&store, &o), 0);
    sw_nvme_close(store, 1);
}

static void a_second_process_is_refused_and_told_the_owner(void **state) {
    (void)state;
    struct sw_nvme_store *store = open_store("locked", 2, 1), *second = NULL;
    char owner[64];
    snprintf(owner, sizeof(owner), "process %ld", (long)getpid());
    const pid_t child = fork();
    if (child == 0) {
        const struct sw_nvme_options o = {
            three_folders + 1, 1, "locked", odd_records, CHUNKS, 1, NULL};
        struct sw_nvme_store *s;
        _exit(sw_nvme_open(&s, &o) == 0 ? 0 : 1); /* other file name: drive 0 there, drive 1 here */
    }
    int status;
    assert_true(waitpid(child, &status, 0) == child && status == 0);
    const pid_t rival = fork();
    if (rival == 0) {
        const struct sw_nvme_options o = {three_folders, 2, "locked", odd_records, CHUNKS, 1, NULL};
        struct sw_nvme_store *s;
        const int ret = sw_nvme_open(&s, &o);
        const int named = strstr(logged, owner) || strstr(logged, "another process");
        _exit(ret == -EEXIST && named ? 0 : 1);
    }
    assert_true(waitpid(rival, &status, 0) == rival && status == 0);
    const struct sw_nvme_options o = {three_folders, 2, "locked", odd_records, CHUNKS, 1, NULL};
    assert_int_equal(sw_nvme_open(&second, &o), -EEXIST);
    assert_true(size_of(dir_a, "locked.0.state", NULL) !=
                UINT64_MAX); /* the owner's, still there */
    sw_nvme_close(store, 1);
    assert_int_equal(sw_nvme_open(&second, &o), 0); /* free again */
    sw_nvme_close(second, 1);
}

static int open_in(const char *folder, const char *name) {
    const struct sw_nvme_options o = {&folder, 1, name, odd_records, CHUNKS, 1, NULL};
    struct sw_nvme_store *store = NULL;
    const int ret = sw_nvme_open(&store, &o);
    if (ret == 0) sw_nvme_close(store, 1);
    return ret;
}

static void a_folder_that_cannot_hold_the_store_is_named(void **state) {
    (void)state;
    assert_int_equal(open_in("build/no/such/folder", "x"), -ENOENT);
    assert_logged("build/no/such/folder");
    assert_int_equal(log_errors, 1);
    forget_log();
    assert_int_equal(open_in("Makefile", "x"), -ENOTDIR);
    assert_logged("'Makefile' is not a folder");
    /* A later folder's fault takes the files made before it away again. */
    const char *folders[2] = {dir_a, "build/no/such/folder"};
    const struct sw_nvme_options o = {folders, 2, "partly", odd_records, CHUNKS, 1, NULL};
    struct sw_nvme_store *store = NULL;
    assert_int_equal(sw_nvme_open(&store, &o), -ENOENT);
    assert_true(size_of(dir_a, "partly.0.state", NULL) == UINT64_MAX);
}

static void a_full_disk_is_an_error_at_open_with_both_numbers(void **state) {
    (void)state;
    char small[96];
    snprintf(small, sizeof(small), "%s/small", nvme_root);
    mkdir(small, 0700);
    if (mount("none", small, "tmpfs", 0, "size=256k")) skip(); /* needs root */
    const uint64_t fits[1] = {200 * 1024}, large[2] = {200 * 1024, 100 * 1024};
    const char *folder = small, *twice[2] = {small, small};
    struct sw_nvme_options o = {&folder, 1, "fit", fits, 1, 1, NULL};
    struct sw_nvme_store *store = NULL;
    int ret = sw_nvme_open(&store, &o);
    if (ret == 0) sw_nvme_close(store, 1);
    const int ret_fits = ret;
    forget_log();
    o = (struct sw_nvme_options){&folder, 1, "fit", large, 2, 1, NULL};
    const int ret_large = sw_nvme_open(&store, &o);
    char log_large[512];
    snprintf(log_large, sizeof(log_large), "%.500s", logged);
    /* Two folders on one disk need their sum. */
    o = (struct sw_nvme_options){twice, 2, "fit", large, 2, 1, NULL};
    forget_log();
    const int ret_twice = sw_nvme_open(&store, &o);
    const int summed = strstr(logged, "307200 bytes") != NULL;
    const int left = size_of(small, "fit.0.state", NULL) != UINT64_MAX;
    mount("none", small, "tmpfs", MS_REMOUNT | MS_RDONLY, NULL);
    const int ret_readonly = open_in(small, "ro");
    umount2(small, MNT_DETACH);
    assert_int_equal(ret_fits, 0);
    assert_int_equal(ret_large, -ENOSPC);
    assert_non_null(strstr(log_large, "307200 bytes"));
    assert_non_null(strstr(log_large, "262144 bytes"));
    assert_int_equal(ret_twice, -ENOSPC);
    assert_true(summed);
    assert_false(left);
    assert_int_equal(ret_readonly, -EROFS);
    assert_logged("read-only");
}

static void a_limit_on_file_sizes_is_an_error_and_not_a_signal(void **state) {
    (void)state;
    const pid_t child = fork();
    if (child == 0) {
        const struct rlimit limit = {64 * 1024, 64 * 1024};
        setrlimit(RLIMIT_FSIZE, &limit);
        const int ret = open_in(dir_a, "limit");
        _exit(ret == -EFBIG && strstr(logged, "ulimit -f") ? 0 : 1);
    }
    int status;
    assert_true(waitpid(child, &status, 0) == child && status == 0);
}

static int round_trip_in(const char *folder, struct sw_nvme_mode *mode) {
    const struct sw_nvme_options o = {&folder, 1, "trip", odd_records, CHUNKS, 1, NULL};
    struct sw_nvme_store *store;
    int ret = sw_nvme_open(&store, &o);
    if (ret) return ret;
    char *slab = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct sw_nvme_queue *w, *r;
    ret = open_queue(&w, store, 1, 4, 4 * PAGE, slab, 1 << 20);
    if (!ret) ret = open_queue(&r, store, 0, 4, 4 * PAGE, slab, 1 << 20);
    if (ret) return ret;
    for (uint32_t c = 0; c < CHUNKS && !ret; c++) {
        pattern(slab, odd_records[c], c, 0, 1);
        ret = one(w, 1, slab, c, 0);
        memset(slab, 0, odd_records[c]);
        if (!ret) ret = one(r, 0, slab, c, 0);
        if (!ret && !matches(slab, odd_records[c], c, 0, 1)) ret = -EBADMSG;
    }
    sw_nvme_queue_mode(w, mode);
    sw_nvme_queue_close(w);
    sw_nvme_queue_close(r);
    sw_nvme_close(store, 1);
    munmap(slab, 1 << 20);
    return ret;
}

static void a_file_system_in_memory_works_with_or_without_direct_io(void **state) {
    (void)state;
    struct sw_nvme_mode mode;
    assert_int_equal(round_trip_in("/dev/shm", &mode), 0);
    if (!mode.direct) assert_logged("page cache");
    char ram[96];
    snprintf(ram, sizeof(ram), "%s/ram", nvme_root);
    mkdir(ram, 0700);
    if (mount("none", ram, "ramfs", 0, NULL)) return; /* needs root */
    forget_log();
    const int ret = round_trip_in(ram, &mode); /* ramfs has neither direct I/O nor fallocate */
    umount2(ram, MNT_DETACH);
    assert_int_equal(ret, 0);
    assert_int_equal(mode.direct, 0);
    assert_logged("page cache");
    assert_logged("fallocate");
}

/* Runs in a child that first loses a right of its own. 0: all well. */
static int without_io_uring(void) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog filter = {4, code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return 2;
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter)) return 2;
    struct sw_nvme_mode mode;
    forget_log();
    if (round_trip_in(dir_a, &mode)) return 3;
    if (mode.io_uring || mode.fixed_buffers || mode.fixed_files) return 4;
    return strstr(logged, "seccomp") && log_warnings == 1 ? 0 : 5; /* said once for two queues */
}
static void a_container_that_forbids_io_uring_gets_threads_and_the_reason(void **state) {
    (void)state;
    const pid_t child = fork();
    if (child == 0) _exit(without_io_uring());
    int status;
    assert_true(waitpid(child, &status, 0) == child && WIFEXITED(status));
    if (WEXITSTATUS(status) == 2) skip();
    assert_int_equal(WEXITSTATUS(status), 0);
}

static int without_locked_memory(void) {
    const struct rlimit limit = {64 * 1024, 64 * 1024};
    if (chmod(nvme_root, 0777) || chmod(dir_b, 0777)) return 2;
    if (setrlimit(RLIMIT_MEMLOCK, &limit) || setgid(65534) || setuid(65534)) return 2;
    struct sw_nvme_mode mode;
    forget_log();
    if (round_trip_in(dir_b, &mode)) return 3;
    if (!mode.io_uring) return 2; /* older kernels charge the ring itself */
    if (mode.fixed_buffers) return 4;
    return strstr(logged, "locked memory is 65.5 kB") && strstr(logged, "needed 1.05 MB") ? 0 : 5;
}
static void a_small_limit_of_locked_memory_costs_registration_alone(void **state) {
    (void)state;
    if (getuid() != 0) skip(); /* a user of its own is needed, without the right to lock */
    const pid_t child = fork();
    if (child == 0) _exit(without_locked_memory());
    int status;
    assert_true(waitpid(child, &status, 0) == child && WIFEXITED(status));
    if (WEXITSTATUS(status) == 2) skip();
    assert_int_equal(WEXITSTATUS(status), 0);
}

static void a_store_without_chunks_opens_and_closes(void **state) {
    (void)state;
    const struct sw_nvme_options o = {three_folders, 2, "none", NULL, 0, 2, NULL};
    struct sw_nvme_store *store;
    assert_int_equal(sw_nvme_bytes(&o), 0);
    assert_int_equal(sw_nvme_open(&store, &o), 0);
    assert_int_equal(sw_nvme_sync(store), 0);
    sw_nvme_close(store, 1);
    sw_nvme_close(NULL, 1);
    sw_nvme_queue_close(NULL);
}

/* Opened as it lies: its bytes are read, its lock is held, nothing is made, sized or written. */
static void an_existing_store_is_locked_and_only_read(void **state) {
    (void)state;
    const struct sw_nvme_options o = {three_folders, 3, "there", odd_records, CHUNKS, 2, NULL};
    struct sw_nvme_store *store, *second;
    assert_int_equal(sw_nvme_open_existing(&store, &o), -ENOENT);
    assert_logged("cannot open");
    assert_true(size_of(three_folders[0], "there.0.state", NULL) == UINT64_MAX);
    struct sw_nvme_queue *queue;
    char *record = pages(RECORD_MAX);
    assert_int_equal(sw_nvme_open(&store, &o), 0);
    assert_int_equal(open_queue(&queue, store, 1, 2, PAGE, NULL, 0), 0);
    pattern(record, odd_records[3], 3, 1, 9);
    assert_int_equal(one(queue, 1, record, 3, 1), 0);
    sw_nvme_queue_close(queue);
    sw_nvme_close(store, 0);
    assert_int_equal(sw_nvme_open_existing(&store, &o), 0);
    assert_int_equal(sw_nvme_open(&second, &o), -EEXIST);
    assert_int_equal(open_queue(&queue, store, 0, 2, PAGE, NULL, 0), 0);
    memset(record, 0, RECORD_MAX);
    assert_int_equal(one(queue, 0, record, 3, 1), 0);
    assert_true(matches(record, odd_records[3], 3, 1, 9));
    sw_nvme_queue_close(queue);
    sw_nvme_close(store, 0);
    free(record);
    char path[128];
    snprintf(path, sizeof(path), "%s/there.1.state", three_folders[1]);
    const uint64_t size = size_of(three_folders[1], "there.1.state", NULL) - PAGE;
    assert_int_equal(truncate(path, (off_t)size), 0);
    assert_int_equal(sw_nvme_open_existing(&store, &o), -EINVAL);
    assert_logged("its layout takes");
    assert_true(size_of(three_folders[1], "there.1.state", NULL) == size);
    assert_int_equal(sw_nvme_remove(three_folders, 3, "there"), 0);
}

#define T(name) cmocka_unit_test_setup(name, setup)
int main(void) {
    const struct CMUnitTest tests[] = {
        /* First, while no thread was ever started: their children start some after the fork. */
        T(a_container_that_forbids_io_uring_gets_threads_and_the_reason),
        T(a_small_limit_of_locked_memory_costs_registration_alone),
        T(files_are_preallocated_and_even_over_the_folders),
        T(run_after_run_the_files_keep_name_and_size),
        T(a_second_process_is_refused_and_told_the_owner),
        T(a_folder_that_cannot_hold_the_store_is_named),
        T(a_full_disk_is_an_error_at_open_with_both_numbers),
        T(a_limit_on_file_sizes_is_an_error_and_not_a_signal),
        T(a_file_system_in_memory_works_with_or_without_direct_io),
        T(a_store_without_chunks_opens_and_closes),
        T(an_existing_store_is_locked_and_only_read),
    };
    return cmocka_run_group_tests(tests, make_folders, remove_folders);
}
