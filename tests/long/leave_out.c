/* Loaded before cmocka (LD_PRELOAD): runs a test program without the tests that LEAVE_OUT names,
 * separated by commas. A name that the program does not have stops it: the list is out of date. */
#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

typedef int run_group(const char *name, const struct CMUnitTest *tests, size_t count,
                      CMFixtureFunction setup, CMFixtureFunction teardown);

static int named(const char *list, const char *name) {
    const size_t length = strlen(name);
    for (const char *at = list; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (strncmp(at, name, length) == 0 && (at[length] == ',' || at[length] == 0)) return 1;
    return 0;
}

int _cmocka_run_group_tests(const char *name, const struct CMUnitTest *const tests,
                            const size_t count, CMFixtureFunction setup,
                            CMFixtureFunction teardown) {
    const char *list = getenv("LEAVE_OUT");
    size_t left = 0, out = list && *list ? 1 : 0;
    for (const char *at = list; out && (at = strchr(at, ',')); at++) out++;
    struct CMUnitTest *kept = calloc(count + 1, sizeof(*kept));
    run_group *run = NULL;
    *(void **)&run = dlsym(RTLD_NEXT, "_cmocka_run_group_tests");
    if (!kept || !run) abort();
    for (size_t i = 0; i < count; i++)
        if (!out || !named(list, tests[i].name)) kept[left++] = tests[i];
    if (left + out != count) {
        printf("of '%s' the program has not every test\n", list ? list : "");
        exit(1);
    }
    const int failed = run(name, kept, left, setup, teardown);
    free(kept);
    return failed;
}
