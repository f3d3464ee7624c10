/* tools/bench_company.h - the teams of a run's other lanes, beside the one that is timed.
 *
 * On the CPU as device the compute lane, the lane that rounds gradients and Adam's have a team each
 * (engine/teams.c). Where all teams together have more threads than there are CPUs, the OpenMP
 * runtime lets a team's threads sleep as soon as a region ends, and the next region wakes them,
 * which takes 0.1 ms where a CPU of a virtual machine must be woken. A process with one team
 * alone never sees that, so its times would not be those of a run. */
#ifndef TOOLS_BENCH_COMPANY_H
#define TOOLS_BENCH_COMPANY_H

struct sw_bench_company;

/* So many threads, each with a team of `threads`, which sleep until it is closed. 0 or -errno,
 * reported. */
int sw_bench_company_open(struct sw_bench_company **out, int teams, int threads);
void sw_bench_company_close(struct sw_bench_company *c); /* NULL is fine */

#endif
