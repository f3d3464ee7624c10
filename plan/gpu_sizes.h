/* plan/gpu_sizes.h - a device that is asked for sizes alone: the host itself, or a GPU that is not
 * here. */
#ifndef PLAN_GPU_SIZES_H
#define PLAN_GPU_SIZES_H
#include "kernels/device.h"
#include "plan/fit.h"

/* 0 or -errno, reported. Only sw_sizing_input() may use it. */
int sw_plan_device_open(struct sw_device_handle *out, const struct sw_plan_case *c,
                        const struct sw_train_options *o);
void sw_plan_device_close(struct sw_device_handle *device);

#endif
