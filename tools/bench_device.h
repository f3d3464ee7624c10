/* tools/bench_device.h - what a device does for a plan: copies, its own memory, products, and what
 * several of them do together. Everything is looked at before it is timed. Rates are per second;
 * 0: not measured. Errors: 0 or -errno, reported; -EINTR, which is not, after a signal. */
#ifndef TOOLS_BENCH_DEVICE_H
#define TOOLS_BENCH_DEVICE_H
#include "engine/model.h"
#include "kernels/device.h"
#include "offload/topology.h"
#include "plan/machine.h"

/* A GPU, or the CPU as one of so many devices that share it. */
int sw_bench_device_open(const struct sw_topology *topology, int on_gpu, uint32_t index,
                         uint32_t ranks, struct sw_device_handle *out);

/* Threads of the CPU as each of these devices. */
int sw_bench_device_threads(const struct sw_topology *topology, uint32_t ranks);

struct sw_bench_copies {
    double h2d, d2h, both; /* pinned; both: added up */
    double h2d_pageable, d2h_pageable;
    double inside; /* read and written, by a copy inside the device's memory */
    /* The pieces of a copy that make it faster than a whole one by 3% or more, the fastest; 0: none
     * does. */
    uint64_t h2d_piece, d2h_piece;
};

/* In about `seconds`; blocks of `bytes` each. */
int sw_bench_copies(const struct sw_device_handle *d, uint64_t bytes, double seconds,
                    struct sw_bench_copies *out);

/* Operations per second of the products of a decoder layer and of their gradients, in BF16, each as
 * often as a step has it. */
int sw_bench_products(const struct sw_device_handle *d, uint64_t tokens, uint64_t hidden,
                      double seconds, double *flops_per_s);

/* Bytes that each of `ranks` sends in an all-gather and a reduce-scatter of `bytes` in all. Devices
 * of GPUs talk through their own library, those of the host through its memory. */
int sw_bench_ranks(const struct sw_device_handle *devices, uint32_t ranks, int on_gpus,
                   uint64_t bytes, double seconds, double *gather, double *scatter);

/* Gradients rounded to BF16 with their norm. threads: of the CPU as device, whose other lanes have
 * teams, too (bench_company.h); 0: a GPU. */
struct sw_bench_rounding {
    double bytes_per_s; /* FP32 in, BF16 out */
    double region_s;    /* that a call takes beyond, as its team sleeps between calls */
};
int sw_bench_rounding(const struct sw_device_handle *d, int threads, double seconds,
                      struct sw_bench_rounding *out);

/* The operations of a model's units on random numbers, each alone on its rank: fills all of `out`
 * but its key. Takes memory for the weights and gradients of a layer, or of the whole head, several
 * times: 0.5 GB at least, on each rank. */
struct sw_bench_model {
    const struct sw_model *model;
    enum sw_dtype dtype;
    uint64_t batch, time;
    uint32_t ranks; /* that do so at once, and share the CPU */
    int threads;    /* of each of them where the CPU is the device, as above; 0: a GPU */
    double seconds;
};
int sw_bench_model(const struct sw_device_handle *devices, const struct sw_bench_model *what,
                   struct sw_machine_model *out);

#endif
