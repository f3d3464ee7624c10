/* engine/world.c - whether there are other processes, and the way to them.
 *
 * All calls of the message library that may wait for other processes, and some wait for ever, are
 * made by one thread, the listener (world_listen.c). This side waits for it, with a timeout, so no
 * fault of another process holds up more than that thread. */
#include "engine/world.h"

#include <assert.h>
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/plugin.h"
#include "base/size.h"
#include "engine/world_internal.h"

#define TIMEOUT_S_MAX 1e9
#define LIBRARY_END_S 5                   /* what the message library may take for its own end */
#define SHARED_BYTES  ((uint64_t)9 << 19) /* Open MPI's shared memory of a process, and some */

enum { SLEEP_NS_FIRST = 10000, SLEEP_NS_MAX = 200000 };

/* An environment that a launcher makes, the surest first: where one starts another, both are seen.
 * SLURM_NTASKS would not do: a batch script itself has it, and is a single process. */
static const struct {
    const char *name, *size, *index;
} launchers[] = {
    {"mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"},
    {"a launcher (PMI)", "PMI_SIZE", "PMI_RANK"},
    {"srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"},
    {"a launcher (PMIx)", NULL, "PMIX_RANK"}, /* which does not tell how many */
};
enum { LAUNCHERS = sizeof(launchers) / sizeof(launchers[0]) };

struct launch {
    const char *name;   /* NULL: none */
    unsigned processes; /* 0: unknown */
};

/* Worlds that could not be closed, as a thread may still use their memory: kept in sight. */
static struct sw_world *abandoned;

static struct launch find_launch(void) {
    struct launch found = {NULL, 1};
    for (int i = 0; i < LAUNCHERS; i++) {
        const char *size = launchers[i].size ? getenv(launchers[i].size) : "0";
        if (!size || !getenv(launchers[i].index)) continue;
        found = (struct launch){launchers[i].name, (unsigned)strtoul(size, NULL, 10)};
        break;
    }
    if (found.processes == 1) found.name = NULL;
    return found;
}

int sw_world_is_launched(void) {
    return find_launch().name != NULL;
}

static void describe_launch(const struct launch *l, char *text, size_t size) {
    if (l->processes)
        snprintf(text, size, "%s has started %u processes", l->name, l->processes);
    else
        snprintf(text, size, "%s has started this process", l->name);
}

static int load(const struct launch *l, const struct sw_transport **out) {
    char path[SW_PLUGIN_PATH_BYTES], started[80];
    sw_plugin_path("SPILLWAY_MPI_PLUGIN", "libspillway_mpi.so", path);
    describe_launch(l, started, sizeof(started));
    /* Open MPI loads parts of itself later, and these look for its symbols among the global ones.
     * It is never unloaded: threads of its own may run. */
    void *library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (!library) {
        const char *why = dlerror();
        sw_error("world: %s, and these need a plugin that cannot be loaded: %s. 'make deps' and "
                 "'make' build it where Open MPI is installed, SPILLWAY_MPI_PLUGIN names another "
                 "one; a single process needs neither launcher nor plugin",
                 started, why ? why : path);
        return -ENOENT;
    }
    const struct sw_transport *transport = dlsym(library, SW_TRANSPORT_SYMBOL);
    if (!transport || transport->version != SW_TRANSPORT_VERSION) {
        sw_error("world: the plugin %s is none of this version; build program and plugin together "
                 "with 'make', and see what SPILLWAY_MPI_PLUGIN names",
                 path);
        return -ENOEXEC;
    }
    *out = transport;
    return 0;
}

/* With every signal blocked, so that the program's handlers run in the program's threads. */
static int start_listener(struct sw_world *w) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int ret = pthread_create(&w->listener, NULL, sw_world_listen, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (ret == 0) return 0;
    sw_error("world: the thread that listens to the other processes cannot be started: %s",
             strerror(ret));
    return -ret;
}

/* Until the listener is in that stage: 0, or -ETIMEDOUT. Holds the lock. */
static int await(struct sw_world *w, enum sw_world_stage stage, double limit_s) {
    struct sw_wait wait = {0};
    while (w->stage < stage)
        if (sw_wait_for(&wait, &w->changed, &w->lock, limit_s) < 0) return -ETIMEDOUT;
    return 0;
}

static struct sw_world *make_world(double timeout_s) {
    struct sw_world *w = calloc(1, sizeof(*w));
    if (!w) return NULL;
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&w->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_mutex_init(&w->lock, NULL);
    w->timeout_s = timeout_s < TIMEOUT_S_MAX ? timeout_s : TIMEOUT_S_MAX;
    w->next_tag = SW_TAG_FIRST;
    return w;
}

static void free_world(struct sw_world *w) {
    sw_world_free_groups(w);
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->lock);
    free(w);
}

/* Whether the launcher and the message library mean the same processes. */
static int check_size(const struct sw_world *w, const struct launch *l) {
    char started[80];
    describe_launch(l, started, sizeof(started));
    if (w->size > SW_RANKS_MAX) {
        sw_error("world: %u processes are more than the %d that can work together", w->size,
                 SW_RANKS_MAX);
        return -EINVAL;
    }
    if (!l->processes || w->size == l->processes) return 0;
    sw_error("world: %s, but MPI sees %u: the launcher is not of the Open MPI that the plugin was "
             "built with. Start the run with that one's mpirun, or with 'srun --mpi=pmix'",
             started, w->size);
    return -EPROTO;
}

/* srun gives its processes PMIx where it is told to, and none or another way to find each other
 * where not. An Open MPI that finds none of its own ends the program, and names no remedy. */
static void warn_without_pmix(void) {
    const char *process = getenv("SLURM_PROCID");
    if (!process || strcmp(process, "0") != 0 || !getenv("SLURM_STEP_NUM_TASKS")) return;
    if (getenv("PMIX_RANK") || getenv("OMPI_COMM_WORLD_RANK")) return;
    sw_warning("world: srun has started this process without PMIx, which most builds of Open MPI "
               "need: start the run with 'srun --mpi=pmix' ('srun --mpi=list' tells whether this "
               "Slurm has it), or with mpirun within an allocation");
}

/* Containers have little of it, and mpirun loses some of what Open MPI says of that. Told by the
 * first process of a machine. */
static void warn_of_shared_memory(const struct launch *l) {
    static const char folder[] = "/dev/shm";
    const char *processes = getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
    const char *process = getenv("OMPI_COMM_WORLD_LOCAL_RANK");
    const uint64_t count = processes ? strtoul(processes, NULL, 10) : l->processes;
    const uint64_t need = count * SHARED_BYTES;
    struct statvfs fs;
    if (count < 2 || (process && strcmp(process, "0") != 0) || statvfs(folder, &fs) < 0) return;
    const uint64_t have = (uint64_t)fs.f_bavail * fs.f_frsize;
    char text[2][32];
    if (have >= need) return;
    sw_warning("world: %s has %s left and Open MPI takes %s there for %llu processes: without it "
               "messages between them take a slower way, or fail; give the container more ('docker "
               "run --shm-size')",
               folder, sw_size_print(have, text[0], sizeof(text[0])),
               sw_size_print(need, text[1], sizeof(text[1])), (unsigned long long)count);
}

/* At Ctrl-C Open MPI's mpirun waits a second, sends SIGTERM, waits another one and sends SIGKILL:
 * too little to end a step and save a model in. Its odls_base_sigkill_timeout is both waits, and
 * mpirun itself does not end before they are over. */
static void advise_signal(const struct launch *l, const struct sw_world *w) {
    char path[32], name[16] = "", number[16] = "PID";
    if (w->index != 0 || strcmp(l->name, "mpirun") != 0) return;
    /* A daemon of its own on another machine, or a script, may stand in between. */
    snprintf(path, sizeof(path), "/proc/%ld/comm", (long)getppid());
    FILE *file = fopen(path, "re");
    if (file && fscanf(file, "%15s", name) == 1 && strcmp(name, "mpirun") == 0)
        snprintf(number, sizeof(number), "%ld", (long)getppid());
    if (file) fclose(file);
    sw_info("world: mpirun kills what has not ended 2 s after Ctrl-C; to end the step and save the "
            "model send it SIGUSR1 instead: kill -USR1 %s",
            number);
}

int sw_world_open(struct sw_world **out, double timeout_s) {
    assert(out && timeout_s > 0);
    *out = NULL;
    const struct launch launch = find_launch();
    if (!launch.name) return 0;
    const struct sw_transport *transport = NULL;
    int ret = load(&launch, &transport);
    if (ret < 0) return ret;
    warn_without_pmix();
    warn_of_shared_memory(&launch);
    struct sw_world *w = make_world(timeout_s);
    if (!w) return -ENOMEM;
    w->transport = transport;
    ret = start_listener(w);
    if (ret < 0) {
        free_world(w);
        return ret;
    }
    pthread_mutex_lock(&w->lock);
    ret = await(w, SW_WORLD_TRIES, w->timeout_s);
    if (ret == 0) ret = await(w, SW_WORLD_RUNS, 4 * w->timeout_s + LIBRARY_END_S);
    w->is_given_up = ret < 0;
    if (ret == 0) ret = w->result;
    pthread_mutex_unlock(&w->lock);
    if (w->is_given_up) {
        sw_error("world: MPI did not bring the processes together within %g s; is each of them "
                 "running?",
                 w->timeout_s);
        pthread_detach(w->listener);
        abandoned = w;
        return ret;
    }
    if (ret < 0) {
        pthread_join(w->listener, NULL);
        free_world(w);
        return ret;
    }
    ret = check_size(w, &launch);
    if (ret < 0 || w->size == 1) {
        const int closed = sw_world_close(w, ret < 0 && w->size > 1);
        return ret < 0 ? ret : closed;
    }
    advise_signal(&launch, w);
    *out = w;
    return 0;
}

uint32_t sw_world_index(const struct sw_world *w) {
    return w ? w->index : 0;
}

uint32_t sw_world_size(const struct sw_world *w) {
    return w ? w->size : 1;
}

/* The listener tells the groups and the other processes. Holds the lock. */
static void set_error(struct sw_world *w, int error) {
    assert(error < 0);
    if (atomic_load(&w->error)) return;
    atomic_store(&w->error, error);
    pthread_cond_broadcast(&w->changed);
}

void sw_world_fail(struct sw_world *w, enum sw_log_level level, int error, const char *format,
                   ...) {
    pthread_mutex_lock(&w->lock);
    /* Reported under the lock: whoever returns the error finds it reported. */
    if (!atomic_load(&w->error)) {
        char text[1024];
        va_list args;
        va_start(args, format);
        vsnprintf(text, sizeof(text), format, args);
        va_end(args);
        sw_log(level, "%s", text);
        set_error(w, error);
    }
    pthread_mutex_unlock(&w->lock);
}

void sw_world_abort(struct sw_world *w, int error) {
    if (!w) return;
    pthread_mutex_lock(&w->lock);
    set_error(w, error);
    pthread_mutex_unlock(&w->lock);
}

int sw_world_wait(struct sw_world *w, struct sw_patience *p, double limit_s) {
    const int error = atomic_load(&w->error);
    if (error < 0) return error;
    const double waited_s = (double)sw_wait_look(&p->wait) * 1e-9;
    const int misses = atomic_load(&w->misses) && waited_s < 2 * limit_s;
    if (limit_s > 0 && waited_s > limit_s && !misses) return -ETIMEDOUT;
    const uint32_t twice = p->sleep_ns * 2;
    p->sleep_ns = !p->sleep_ns ? SLEEP_NS_FIRST : twice < SLEEP_NS_MAX ? twice : SLEEP_NS_MAX;
    nanosleep(&(struct timespec){.tv_nsec = p->sleep_ns}, NULL);
    return 0;
}

int sw_world_close(struct sw_world *w, int status) {
    if (!w) return 0;
    pthread_mutex_lock(&w->lock);
    w->wants_end = 1;
    w->status = status;
    pthread_cond_broadcast(&w->changed);
    /* To wait for the others, to let them end, and the library's own end. */
    int ret = await(w, SW_WORLD_HAS_ENDED, 2 * w->timeout_s + LIBRARY_END_S);
    const int is_stuck = ret < 0, error = atomic_load(&w->error);
    if (!is_stuck) ret = w->result;
    pthread_mutex_unlock(&w->lock);
    if (is_stuck) {
        sw_error("world: MPI does not come to its end");
        pthread_detach(w->listener);
    } else {
        pthread_join(w->listener, NULL);
    }
    /* After an error messages may be on their way still, from and to this memory. */
    if (is_stuck || error || status)
        abandoned = w;
    else
        free_world(w);
    return ret;
}
