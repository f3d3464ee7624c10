/* Profiles of machines: shipped ones are whole and say what their name means, changes change what
 * they name and nothing else, and what is wrong with a file or a name is told. */
#include "plan/machine.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "offload/profile.h"
#include "tests/support_files.h"

static struct sw_machine m;

static void open_machine(const char *text) {
    if (sw_machine_open(&m, text)) fail_msg("%s: %s", text ? text : "this machine", log_text());
}

static void refused(const char *text, const char *part) {
    log_catch();
    assert_true(sw_machine_open(&m, text) < 0);
    assert_reported(part);
}

static void shipped_profiles_are_whole(void **state) {
    (void)state;
    const char *name, *text;
    int i = 0;
    for (; (name = sw_machine_shipped(i, &text)); i++) {
        open_machine(name);
        assert_string_equal(m.name, name);
        assert_string_equal(m.measured, "");
        const double all[] = {m.gpus,
                              m.gpu_memory_bytes,
                              m.gpu_reserved_bytes,
                              m.gpu_memory_bytes_per_s,
                              m.flops_per_s,
                              m.h2d_bytes_per_s,
                              m.d2h_bytes_per_s,
                              m.both_bytes_per_s,
                              m.cores,
                              m.memory_bytes,
                              m.memory_bytes_per_s,
                              m.adam_bytes_per_s,
                              m.drives[0].bytes,
                              m.drives[0].read_bytes_per_s,
                              m.drives[0].write_bytes_per_s,
                              m.drives[0].mixed_bytes_per_s};
        for (size_t k = 0; k < sizeof(all) / sizeof(all[0]); k++)
            if (!(all[k] > 0)) fail_msg("%s: figure %zu is missing", name, k);
        assert_int_equal(m.gather_bytes_per_s > 0, m.gpus > 1);
        /* The first line is what the name means; every figure that is no size has its source. */
        assert_int_equal(strncmp(text, "{\"about\": \"", 11), 0);
        assert_true(m.about[0] && strstr(text, m.about) < strchr(text, '\n'));
        assert_non_null(strstr(text, "\"sources\""));
        assert_non_null(strstr(text, "data sheet"));
    }
    assert_int_equal(i, 6);
}

/* Of the data sheets, by another way than the file. */
static void figures_of_8xh100(void **state) {
    (void)state;
    open_machine("8xh100");
    assert_true(m.gpus == 8 && m.gpu_memory_bytes == 80e9 && m.gpu_memory_bytes_per_s == 3.35e12);
    assert_true(m.flops_per_s == 989.4e12 && m.h2d_bytes_per_s == 64e9);
    assert_true(m.gather_bytes_per_s == 900e9 / 2 && m.both_bytes_per_s == 128e9);
    assert_true(m.memory_bytes == 2e12 && m.drive_count == 8);
    assert_true(sw_machine_drive_bytes(&m) == 8 * 7.68e12);
}

static void changes_change_what_they_name(void **state) {
    (void)state;
    open_machine("8xh100");
    struct sw_machine want = m;
    open_machine("8xh100:ram=1T,nvme=4xgen4,pcie=50G");
    want.memory_bytes = 1e12;
    want.h2d_bytes_per_s = want.d2h_bytes_per_s = 50e9;
    want.both_bytes_per_s = 100e9;
    want.drive_count = 4;
    for (int i = 0; i < 8; i++)
        want.drives[i] =
            (struct sw_machine_drive){"gen4", 7.68e12, 6.9e9, 4.2e9, m.drives[0].mixed_bytes_per_s};
    assert_true(m.drives[0].mixed_bytes_per_s > 4.2e9 && m.drives[0].mixed_bytes_per_s < 6.9e9);
    assert_string_equal(m.name, "8xh100:ram=1T,nvme=4xgen4,pcie=50G");
    memcpy(want.name, m.name, sizeof(want.name));
    memcpy(&want.drives[4], &m.drives[4], 4 * sizeof(want.drives[0])); /* beyond the count */
    assert_memory_equal(&m, &want, sizeof(m));

    open_machine("rtx4090:nvme=none");
    assert_int_equal(m.drive_count, 0);
    open_machine("8xh100:nvme=2,nvme-read=10G,nvme-mixed=7G,nvme-size=4T");
    assert_int_equal(m.drive_count, 2);
    assert_true(m.drives[1].read_bytes_per_s == 10e9 && m.drives[1].write_bytes_per_s == 6.75e9);
    assert_true(m.drives[1].mixed_bytes_per_s == 7e9 && m.drives[1].bytes == 4e12);
}

/* Every change has its effect on some figure. */
static void no_change_is_without_effect(void **state) {
    (void)state;
    const char *form, *what;
    for (int i = 0; (form = sw_machine_changes(i, &what)); i++) {
        char text[128];
        const int length = (int)strcspn(form, "=");
        snprintf(text, sizeof(text), "8xh100:%.*s=3", length, form);
        open_machine("8xh100");
        const struct sw_machine before = m;
        open_machine(text);
        memcpy(m.name, before.name, sizeof(m.name));
        if (!memcmp(&m, &before, sizeof(m))) fail_msg("%s changes nothing", text);
    }
}

static void wrong_names_and_changes_are_refused(void **state) {
    (void)state;
    refused("9xh100", "8xh100, 8xh200");
    refused("", "names no machine");
    refused("8xh100:ram=x", "no size");
    refused("8xh100:speed=3", "'speed' is nothing that can be changed");
    refused("8xh100:nvme=8xgen9", "no class of drives");
    refused("8xh100:nvme=65", "64");
    refused("8xh100:nvme=none,nvme=4", "name a class");
    refused("8xh100:nvme=none,nvme-read=3G", "no drive");
    refused("8xh100:ram=", "NAME=VALUE");
    refused("8xh100:=1", "NAME=VALUE");
    refused("8xh100:gpus=65", "64");
}

static void write_machine(const char *text) {
    file_write(in_folder("other.json"), text, strlen(text));
}

static void files_are_read_and_checked(void **state) {
    (void)state;
    char path[4200];
    write_machine(
        "{\"schema\": 1, \"machine\": {\"gpus\": 2, \"gpu_memory_bytes\": 5e9},\n"
        " \"numa_nodes\": [{\"cores\": 4, \"memory_bytes\": 3e9, \"adam_bytes_per_s\": 1},"
        " {\"cores\": 2, \"memory_bytes\": 4e9, \"adam_bytes_per_s\": 2}],\n"
        " \"drives\": [{\"drive\": \"vda /dev/vda ext4 5000\", \"read_bytes_per_s\": 7,"
        " \"block_bytes\": 4096}, {\"drive\": \"x\", \"count\": 2, \"bytes\": 10}]}");
    snprintf(path, sizeof(path), "%s", in_folder("other.json"));
    open_machine(path);
    assert_true(m.gpus == 2 && m.cores == 6 && m.memory_bytes == 7e9 && m.adam_bytes_per_s == 3);
    assert_int_equal(m.drive_count, 3);
    assert_true(m.drives[0].bytes == 5000 && m.drives[0].read_bytes_per_s == 7);
    assert_true(sw_machine_drive_bytes(&m) == 5020);
    snprintf(path, sizeof(path), "%s:gpus=0", in_folder("other.json"));
    open_machine(path);
    assert_true(m.gpus == 0);
    static const struct {
        const char *text, *part;
    } bad[] = {
        {"{", "line 1"},
        {"[]", "not one of this version"},
        {"{\"schema\": 2, \"machine\": {}}", "not one of this version"},
        {"{\"schema\": 1, \"machine\": 3}", "not one of this version"},
        {"{\"schema\": 1, \"machine\": {\"gpus\": \"8\"}}", "'gpus' in 'machine' is not a number"},
        {"{\"schema\": 1, \"machine\": {\"gpus\": -1}}", "'gpus' in 'machine' is not a number"},
        {"{\"schema\": 1, \"machine\": {\"gpus\": 1.5}}", "'gpus' is not a whole number"},
        {"{\"schema\": 1, \"drives\": [{\"drive\": \"x\", \"count\": 65}]}", "more than 64"},
        {"{\"schema\": 1, \"drives\": [{\"drive\": \"x\", \"count\": 0}]}", "'count'"},
        {"{\"schema\": 1, \"drives\": [{\"bytes\": -4}]}", "'bytes' in 'drives'"},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        write_machine(bad[i].text);
        refused(in_folder("other.json"), bad[i].part);
    }
}

/* Without a name it is the user's own profile, completed by what the system says; the drive that
 * bench nvme kept is in the same file. */
static void this_machine_has_the_users_profile(void **state) {
    (void)state;
    open_machine(NULL);
    assert_true(m.cores >= 1 && m.memory_bytes > 1e8);
    assert_int_equal(m.drive_count, 0);
    assert_int_equal(sw_machine_use_folders(&m, NULL, 0), 0);
    assert_int_equal(m.drive_count, 1);
    assert_string_equal(m.drives[0].name, SW_MACHINE_OUT_FOLDER);
    assert_true(m.drives[0].bytes > 0 && m.drives[0].read_bytes_per_s == 0);

    const struct sw_drive_profile known = {1 << 18, 24, 2.5e9, 1.25e9, 3e9, ""};
    assert_int_equal(sw_profile_keep(in_folder(""), &known), 0);
    open_machine(NULL);
    assert_int_equal(m.drive_count, 1);
    assert_true(m.drives[0].read_bytes_per_s == 2.5e9 && m.drives[0].bytes > 1e6);
    const char *folders[] = {in_folder("")};
    assert_int_equal(sw_machine_use_folders(&m, folders, 1), 0);
    assert_int_equal(m.drive_count, 1);
    assert_true(m.drives[0].write_bytes_per_s == 1.25e9 && m.drives[0].bytes > 1e6);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shipped_profiles_are_whole),
        cmocka_unit_test(figures_of_8xh100),
        cmocka_unit_test(changes_change_what_they_name),
        cmocka_unit_test(no_change_is_without_effect),
        cmocka_unit_test(wrong_names_and_changes_are_refused),
        cmocka_unit_test_setup_teardown(files_are_read_and_checked, profile_setup,
                                        profile_teardown),
        cmocka_unit_test_setup_teardown(this_machine_has_the_users_profile, profile_setup,
                                        profile_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
