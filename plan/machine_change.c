/* plan/machine_change.c - what is written behind a machine's name: "ram=1T,nvme=8xgen5". */
#include "plan/machine.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/size.h"

/* Classes of drives, by the link: a fast one of each, from its data sheet. Of both directions at
 * once no sheet tells; as much of each, one after the other, is what is left of the two rates. */
static const struct sw_machine_drive classes[] = {
    {"gen3", 3.84e12, 3.2e9, 3.0e9, 0}, /* Intel P4510 4 TB: 3.2 and 3.0 GB/s */
    {"gen4", 7.68e12, 6.9e9, 4.2e9, 0}, /* KIOXIA CM6-R: 6.9 and 4.2 GB/s */
    {"gen5", 7.68e12, 14e9, 6.75e9, 0}, /* KIOXIA CM7-R: 14.0 and 6.75 GB/s */
};

static const struct {
    const char *name, *value, *what;
    const char *figures[3]; /* all of them take the value */
} changes[] = {
    {"gpus", "N", "GPUs of the machine; 0: the CPUs compute", {"gpus"}},
    {"gpu-memory", "SIZE", "memory of each", {"gpu_memory_bytes"}},
    {"gpu-reserved", "SIZE", "what contexts and libraries take of it", {"gpu_reserved_bytes"}},
    {"hbm", "RATE", "bytes a second of that memory", {"gpu_memory_bytes_per_s"}},
    {"flops", "RATE", "operations a second of products, of each", {"flops_per_s"}},
    {"pcie",
     "RATE",
     "bytes a second each way; twice that both ways at once",
     {"h2d_bytes_per_s", "d2h_bytes_per_s"}},
    {"link",
     "RATE",
     "bytes a second that a rank sends to others",
     {"gather_bytes_per_s", "scatter_bytes_per_s"}},
    {"cores", "N", "of the host", {"cores"}},
    {"ram", "SIZE", "memory of the host", {"memory_bytes"}},
    {"ram-rate", "RATE", "bytes a second of it", {"memory_bytes_per_s"}},
    {"adam", "RATE", "bytes a second of the update", {"adam_bytes_per_s"}},
    {"nvme", "NxCLASS", "drives: 8xgen5, 2xgen4, gen3, 4 (of the kind that is there), none", {0}},
    {"nvme-size", "SIZE", "bytes of each drive", {0}},
    {"nvme-read", "RATE", "bytes a second of each drive", {0}},
    {"nvme-write", "RATE", "likewise", {0}},
    {"nvme-mixed", "RATE", "likewise, both directions together", {0}},
};
enum { CHANGES = sizeof(changes) / sizeof(changes[0]), TEXT_BYTES = 64 };

const char *sw_machine_changes(int i, const char **what) {
    static _Thread_local char text[TEXT_BYTES];
    if (i >= CHANGES) return NULL;
    snprintf(text, sizeof(text), "%s=%s", changes[i].name, changes[i].value);
    *what = changes[i].what;
    return text;
}

static int complain(const char *name, const char *value, const char *what) {
    sw_error("--machine: '%s=%s' %s", name, value, what);
    return -EINVAL;
}

/* As much of each direction, one after the other. */
static double in_turns(const struct sw_machine_drive *d) {
    if (!(d->read_bytes_per_s > 0) || !(d->write_bytes_per_s > 0)) return 0;
    return 2 / (1 / d->read_bytes_per_s + 1 / d->write_bytes_per_s);
}

/* "8xgen5", "gen4", "4", "none". */
static int set_drives(struct sw_machine *m, const char *value) {
    char *end = NULL;
    const int counted = value[0] >= '0' && value[0] <= '9';
    const long count = counted ? strtol(value, &end, 10) : 1;
    const char *kind = counted ? (*end == 'x' ? end + 1 : end) : value;
    if (!strcmp(value, "none")) {
        m->drive_count = 0;
        return 0;
    }
    if (count < 0 || count > SW_MACHINE_DRIVES_MAX || (counted && *end && *end != 'x'))
        return complain("nvme", value, "is none, N, or NxCLASS with up to 64 drives");
    struct sw_machine_drive drive = {0};
    if (!*kind && m->drive_count > 0) drive = m->drives[0];
    for (size_t c = 0; c < sizeof(classes) / sizeof(classes[0]); c++)
        if (!strcmp(kind, classes[c].name)) {
            drive = classes[c];
            drive.mixed_bytes_per_s = in_turns(&drive);
        }
    if (!drive.name[0])
        return complain("nvme", value,
                        *kind ? "names no class of drives: gen3, gen4 and gen5 are known"
                              : "says of no drive what it is: name a class (8xgen5)");
    m->drive_count = 0;
    for (long i = 0; i < count; i++) m->drives[m->drive_count++] = drive;
    return 0;
}

static int set_of_drives(struct sw_machine *m, const char *name, const char *text, double value) {
    if (m->drive_count == 0) return complain(name, text, "has no drive to be of: put nvme= first");
    for (uint32_t i = 0; i < m->drive_count; i++) {
        struct sw_machine_drive *d = &m->drives[i];
        if (!strcmp(name, "nvme-size")) d->bytes = value;
        if (!strcmp(name, "nvme-read")) d->read_bytes_per_s = value;
        if (!strcmp(name, "nvme-write")) d->write_bytes_per_s = value;
        d->mixed_bytes_per_s = !strcmp(name, "nvme-mixed") ? value
                               : strcmp(name, "nvme-size") ? in_turns(d)
                                                           : d->mixed_bytes_per_s;
    }
    return 0;
}

static int set_one(struct sw_machine *m, const char *name, const char *value) {
    int i = 0;
    while (i < CHANGES && strcmp(changes[i].name, name)) i++;
    if (i == CHANGES) {
        sw_error("--machine: '%s' is nothing that can be changed; see spillway plan --help", name);
        return -EINVAL;
    }
    if (!strcmp(name, "nvme")) return set_drives(m, value);
    uint64_t number;
    if (sw_size_parse(value, &number) < 0)
        return complain(name, value, "is no size or rate (such as 1T, 50G, 8)");
    if (!changes[i].figures[0]) return set_of_drives(m, name, value, (double)number);
    if (!strcmp(name, "gpus") && number > 64) return complain(name, value, "is above 64");
    for (int f = 0; f < 3 && changes[i].figures[f]; f++)
        sw_machine_set(m, changes[i].figures[f], (double)number);
    if (!strcmp(name, "pcie")) m->both_bytes_per_s = 2 * (double)number;
    /* What is told of single nodes is of the machine as it was. */
    if (!strncmp(name, "ram", 3) || !strcmp(name, "adam") || !strcmp(name, "cores"))
        m->numa_count = 0;
    return 0;
}

int sw_machine_change(struct sw_machine *m, const char *text) {
    while (*text) {
        char item[TEXT_BYTES];
        const size_t length = strcspn(text, ",");
        snprintf(item, sizeof(item), "%.*s", (int)length, text);
        char *equals = strchr(item, '=');
        if (length >= sizeof(item) || !equals || equals == item || !equals[1]) {
            sw_error("--machine: '%.*s' is not of the form NAME=VALUE", (int)length, text);
            return -EINVAL;
        }
        *equals = 0;
        const int ret = set_one(m, item, equals + 1);
        if (ret < 0) return ret;
        text += length;
        if (*text) text++;
    }
    return 0;
}
