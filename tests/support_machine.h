/* tests/support_machine.h - a machine with memory for everything and no rate that is known. */
#ifndef TESTS_SUPPORT_MACHINE_H
#define TESTS_SUPPORT_MACHINE_H
#include "plan/machine.h"

static inline struct sw_machine made_machine(double gpus) {
    return (struct sw_machine){.name = "made up",
                               .gpus = gpus,
                               .gpu_memory_bytes = 1e12,
                               .cores = 4,
                               .memory_bytes = 1e12,
                               .drive_count = 1,
                               .drives = {{.bytes = 1e13}}};
}

#endif
