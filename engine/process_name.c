/* engine/process_name.c - see the header. */
#include "engine/process_name.h"

#include <stdio.h>

const char *sw_process_name(const char *name, uint32_t process, char out[SW_PROCESS_NAME_BYTES]) {
    if (process == 0) return name;
    snprintf(out, SW_PROCESS_NAME_BYTES, "%s-p%u", name, process);
    return out;
}
