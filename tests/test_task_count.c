/* A lane that waits for a number of another lane's tasks is woken when that number has come, not
 * before, and never missed, in whatever order the two look; a wake that comes before the sleep is
 * kept. Whether somebody was woken is read off the park, so that nothing depends on time. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "engine/task_count.h"

static int is_woken(struct sw_park *park) {
    const int woken = atomic_load(&park->state) != 0;
    if (woken) sw_park_sleep(park, 0); /* takes the wake that is kept, without sleeping */
    return woken;
}

static void who_wants_a_number_is_woken_by_that_number(void **state) {
    (void)state;
    struct sw_task_count c = {0};
    struct sw_park early = {0}, late = {0};
    assert_int_equal(sw_task_count_wants(&c, 0, 2, &early), 1);
    assert_int_equal(sw_task_count_wants(&c, SW_COUNT_WAITERS_MAX - 1, 4, &late), 1);
    for (uint64_t n = 1; n <= 6; n++) {
        sw_task_count_up(&c);
        assert_int_equal(sw_task_count(&c), n);
        assert_int_equal(is_woken(&early), n == 2);
        assert_int_equal(is_woken(&late), n == 4);
    }
    assert_int_equal(sw_task_count_wants(&c, 0, 6, &early), 0); /* it is there */
    assert_int_equal(sw_task_count_wants(&c, 0, 7, &early), 1);
    sw_task_count_left(&c, 0);
    sw_task_count_up(&c);
    assert_int_equal(is_woken(&early), 0);
}

static void a_wake_is_kept_once(void **state) {
    (void)state;
    struct sw_park park = {0};
    sw_park_wake(&park);
    sw_park_wake(&park);
    assert_int_equal(is_woken(&park), 1);
    assert_int_equal(is_woken(&park), 0);
    sw_park_sleep(&park, 1); /* nobody wakes it: the limit does */
    assert_int_equal(atomic_load(&park.state), 0);
}

/* Three threads in a ring, each of which may be up to `ahead` in front of the one before it comes
 * round: all of them sleep and wake at every distance. A wake that is missed ends in the time limit
 * of the test. */
enum { RING = 3, ROUNDS = 20000 };
struct ring {
    struct sw_task_count counts[RING];
    struct sw_park parks[RING];
    uint64_t ahead;
    uint64_t values[RING]; /* written by its thread alone, read by the next one */
    atomic_int wrong;
};
struct member {
    struct ring *ring;
    uint32_t number;
};

static void await(struct ring *r, uint32_t self, uint32_t other, uint64_t wanted) {
    while (sw_task_count_wants(&r->counts[other], self, wanted, &r->parks[self]))
        sw_park_sleep(&r->parks[self], 0);
}

static void *member_main(void *arg) {
    const struct member *m = arg;
    struct ring *r = m->ring;
    const uint32_t before = (m->number + RING - 1) % RING;
    for (uint64_t n = 1; n <= ROUNDS; n++) {
        if (m->number > 0)
            await(r, m->number, before, n);
        else if (n > r->ahead)
            await(r, 0, before, n - r->ahead);
        if (r->ahead == 1 && m->number > 0 && r->values[before] != n) atomic_store(&r->wrong, 1);
        r->values[m->number] = n;
        sw_task_count_up(&r->counts[m->number]);
    }
    return NULL;
}

static void no_wake_is_missed(void **state) {
    (void)state;
    for (uint64_t ahead = 1; ahead <= 6; ahead += 5) {
        static struct ring r;
        r = (struct ring){.ahead = ahead};
        pthread_t threads[RING];
        struct member members[RING];
        for (uint32_t i = 0; i < RING; i++) {
            members[i] = (struct member){&r, i};
            assert_int_equal(pthread_create(&threads[i], NULL, member_main, &members[i]), 0);
        }
        for (uint32_t i = 0; i < RING; i++) pthread_join(threads[i], NULL);
        for (uint32_t i = 0; i < RING; i++) assert_int_equal(sw_task_count(&r.counts[i]), ROUNDS);
        assert_int_equal(atomic_load(&r.wrong), 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(who_wants_a_number_is_woken_by_that_number),
        cmocka_unit_test(a_wake_is_kept_once),
        cmocka_unit_test(no_wake_is_missed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
