/* engine/teams.h - how many threads a run's teams have: Adam's and the host device's. */
#ifndef ENGINE_TEAMS_H
#define ENGINE_TEAMS_H
#include "engine/options.h"
#include "offload/topology.h"

/* Fills options->threads and options->device_threads where they are 0, and warns where the user
 * asked for more than the affinity mask or the quota has. With the optimizer on the device both are
 * the device's, which a warning says where the user asked for another size of Adam's. Then holds as
 * many threads as the run will have at once, and makes the teams smaller, with one warning, where
 * that fails: Adam's first, since its size changes no bit. Called before the first team is formed.
 */
void sw_teams_settle(struct sw_train_options *options, const struct sw_topology *topology);

/* A team for work before any run: the default size, or what of it could be started. */
int sw_teams_default(void);

/* What is left of the teams when a run may start `room` threads beside the ones it cannot do
 * without: each stays at 1 or above. */
struct sw_team_sizes {
    int adam, device; /* device: of each rank */
    int device_adam;  /* the optimizer state is on the device: Adam runs in the device's team, and
                       * its own size says nothing */
    int ranks;
};
int sw_teams_threads(const struct sw_team_sizes *sizes); /* threads that the teams start */
void sw_teams_fit(struct sw_team_sizes *sizes, int room);

#endif
