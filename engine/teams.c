/* engine/teams.c - default sizes, the user's, and what the machine's limits leave of them.
 *
 * Every thread that opens parallel regions has a team of its own: the compute lane, the lane that
 * rounds gradients and Adam's. The runtime keeps a team's threads between regions, so all of them
 * count at the same time, beside the lanes' threads and those of the store. A region of another
 * size would end threads and start them again, so Adam on the device has no size of its own. */
#include "engine/teams.h"

#include <assert.h>
#include <stdio.h>

#include "base/log.h"
#include "cpu_adam/adam.h"
#include "engine/turn.h"
#include "offload/thread_trial.h"

static_assert((int)SW_TEAM_THREADS_MAX <= (int)SW_ADAM_THREADS_MAX, "Adam runs any team");

/* Transfer threads of a store where io_uring is refused, reading and writing. */
enum { STORE_THREADS = 2 * 8 };

int sw_teams_threads(const struct sw_team_sizes *s) {
    assert(s && s->adam >= 1 && s->device >= 1 && s->ranks >= 1);
    return s->ranks * 2 * (s->device - 1) + (s->device_adam ? 0 : s->adam - 1);
}

void sw_teams_fit(struct sw_team_sizes *s, int room) {
    while (sw_teams_threads(s) > room) {
        if (s->adam > 1 && !s->device_adam)
            s->adam--;
        else if (s->device > 1)
            s->device--;
        else
            return;
    }
}

static void warn_size(const char *option, int threads, const struct sw_topology *t) {
    if (threads > t->cpus)
        sw_warning("%s %d is more than the %d CPU%s of the affinity mask (%s): threads will wait "
                   "for each other's turn",
                   option, threads, t->cpus, t->cpus == 1 ? "" : "s", t->cpu_list);
    else if (threads > t->quota_cpus)
        sw_warning("%s %d is more than the container's quota of %.4g CPUs: threads will be stopped "
                   "in the middle of their work",
                   option, threads, t->quota);
}

int sw_teams_default(void) {
    struct sw_topology topology;
    if (sw_topology_read(&topology) < 0) return 1;
    char why[160];
    const int threads = sw_topology_threads(&topology);
    return sw_thread_trial(threads - 1, why, sizeof(why)) + 1;
}

/* States that are on NVMe, or may come there because a budget says so: a store each. */
static int states_on_nvme(const struct sw_train_options *o) {
    const struct sw_tiers states[] = {o->params, o->optimizer, o->gradients, o->activations};
    const int budget = o->device_memory_bytes > 0 || o->host_memory_bytes > 0;
    int count = 0;
    for (int i = 0; i < 4; i++)
        count += sw_tiers_has(states[i], SW_TIER_NVME) || (budget && !sw_tiers_chosen(states[i]));
    return count;
}

/* Each rank's team on cores of its own. */
static int a_ranks_threads(const struct sw_train_options *o, const struct sw_topology *t) {
    const int threads = sw_topology_threads(t) / (int)o->ranks;
    return threads > 0 ? threads : 1;
}

void sw_teams_settle(struct sw_train_options *o, const struct sw_topology *t) {
    assert(o && t && o->threads >= 0 && o->device_threads >= 0);
    if (o->threads) warn_size("--threads", o->threads, t);
    if (o->device_threads) warn_size("--device-threads", o->device_threads, t);
    const int device_adam = sw_tiers_is_all(o->optimizer, SW_TIER_DEVICE);
    if (o->device == SW_DEVICE_CUDA) o->device_threads = 1;
    if (o->device_threads == 0) o->device_threads = a_ranks_threads(o, t);
    if (device_adam && o->threads && o->threads != o->device_threads)
        sw_warning("--threads %d has no effect: with --optimizer device Adam runs in the host "
                   "device's team (--device-threads %d)",
                   o->threads, o->device_threads);
    if (device_adam) o->threads = o->device_threads;
    if (o->threads == 0) o->threads = sw_topology_adam_threads(t);
    const struct sw_team_sizes wanted = {o->threads, o->device_threads, device_adam, (int)o->ranks};
    const int stores = states_on_nvme(o);
    int lanes = SW_LANE_COUNT + (o->trace != NULL);
    lanes += ((int)o->ranks - 1) * (SW_LANE_COMM + 1);
    if (stores) lanes += stores * STORE_THREADS + (int)o->nvme_count; /* a sync each */
    char why[160];
    const int made = sw_thread_trial(lanes + sw_teams_threads(&wanted), why, sizeof(why));
    struct sw_team_sizes sizes = wanted;
    sw_teams_fit(&sizes, made - lanes);
    if (device_adam) sizes.adam = sizes.device;
    if (sizes.adam == wanted.adam && sizes.device == wanted.device) return;
    char device[64] = "";
    if (sizes.device != wanted.device)
        snprintf(device, sizeof(device), ", the host device %d instead of %d", sizes.device,
                 wanted.device);
    sw_warning("only %d more threads can be started, and the run has other use for %d: Adam runs "
               "%d thread%s instead of %d%s; the likely limit is %s",
               made, lanes, sizes.adam, sizes.adam == 1 ? "" : "s", wanted.adam, device, why);
    o->threads = sizes.adam;
    o->device_threads = sizes.device;
}
