/* Host memory is registered in pieces of at most 16 GiB, which cover each part once, by a thread
 * for each node; and given back as it was registered, also after an error. The device is one that
 * only notes what it is asked for, so the memory need not exist. */
#include "engine/pin.h"
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <cmocka.h>

enum { NOTES_MAX = 64 };
#define GIB  (UINT64_C(1) << 30)
#define BASE ((char *)(UINT64_C(1) << 44))

struct sw_device {
    int fails_at; /* the piece, from 1; 0: none */
};

static struct note {
    char *at;
    uint64_t bytes;
    struct sw_device *device;
    pthread_t thread;
    int given_back;
} notes[NOTES_MAX];
static int note_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* Pieces of two nodes are under way at a time only if each waits for the other's. */
static pthread_barrier_t *both;

static int pin(struct sw_device *d, void *p, uint64_t bytes) {
    if (both) pthread_barrier_wait(both);
    pthread_mutex_lock(&lock);
    const int n = note_count++;
    assert_true(n < NOTES_MAX);
    notes[n] = (struct note){p, bytes, d, pthread_self(), 0};
    pthread_mutex_unlock(&lock);
    return d->fails_at == n + 1 ? -ENOMEM : 0;
}

static void unpin(struct sw_device *d, void *p) {
    for (int i = 0; i < note_count; i++) {
        if (notes[i].at != p) continue;
        assert_ptr_equal(notes[i].device, d);
        assert_int_equal(notes[i].given_back++, 0);
        return;
    }
    fail_msg("unpinned, but never pinned");
}

static const struct sw_device_ops ops = {.pin = pin, .unpin = unpin};
static struct sw_device devices[2];
static const struct sw_device_handle handles[2] = {{&devices[0], &ops}, {&devices[1], &ops}};

static int begin(void **state) {
    (void)state;
    note_count = 0;
    both = NULL;
    devices[0].fails_at = devices[1].fails_at = 0;
    return 0;
}

/* The piece that begins there. */
static const struct note *note_at(const char *at) {
    for (int i = 0; i < note_count; i++)
        if (notes[i].at == at) return &notes[i];
    fail_msg("no piece begins %llu bytes in", (unsigned long long)(at - BASE));
    return NULL;
}

static void covers(const struct sw_pin_part *part) {
    uint64_t at = 0;
    while (at < part->bytes) {
        const struct note *n = note_at(part->at + at);
        assert_true(n->bytes > 0 && n->bytes <= 16 * GIB);
        assert_ptr_equal(n->device, part->device->device);
        at += n->bytes;
    }
    assert_int_equal(at, part->bytes);
}

static void pieces_are_of_16_gib(void **state) {
    (void)state;
    static const uint64_t sizes[] = {0, 4096, 16 * GIB, 16 * GIB + 4096, 100 * GIB};
    static const int pieces[] = {0, 1, 1, 2, 7};
    for (int i = 0; i < 5; i++) {
        struct sw_pins pins;
        const struct sw_pin_part part = {&handles[0], BASE, sizes[i], 0};
        begin(NULL);
        assert_int_equal(sw_pins_open(&pins, &part, 1), 0);
        assert_int_equal(note_count, pieces[i]);
        covers(&part);
        sw_pins_close(&pins);
        for (int n = 0; n < note_count; n++) assert_int_equal(notes[n].given_back, 1);
    }
}

/* They meet in pairs, one of each node, or this hangs. */
static void nodes_are_registered_side_by_side(void **state) {
    (void)state;
    struct sw_pins pins;
    pthread_barrier_t barrier;
    const struct sw_pin_part parts[] = {
        {&handles[0], BASE, 20 * GIB, 0},
        {&handles[1], BASE + 20 * GIB, 20 * GIB, 1},
        {&handles[0], BASE + 40 * GIB, 4096, 0},
        {&handles[1], BASE + 50 * GIB, 4096, 1},
    };
    pthread_barrier_init(&barrier, NULL, 2);
    both = &barrier;
    assert_int_equal(sw_pins_open(&pins, parts, 4), 0);
    assert_int_equal(note_count, 6);
    for (int i = 0; i < 4; i++) covers(&parts[i]);
    for (int i = 0; i < note_count; i++)
        for (int j = 0; j < i; j++)
            assert_int_equal(pthread_equal(notes[i].thread, notes[j].thread) != 0,
                             notes[i].device == notes[j].device);
    sw_pins_close(&pins);
    pthread_barrier_destroy(&barrier);
}

static void what_failed_is_not_given_back(void **state) {
    (void)state;
    struct sw_pins pins;
    const struct sw_pin_part part = {&handles[0], BASE, 100 * GIB, 0};
    devices[0].fails_at = 4;
    assert_int_equal(sw_pins_open(&pins, &part, 1), -ENOMEM);
    assert_int_equal(note_count, 4);
    sw_pins_close(&pins);
    for (int n = 0; n < 4; n++) assert_int_equal(notes[n].given_back, n < 3);
    sw_pins_close(&pins); /* all zero now */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(pieces_are_of_16_gib, begin),
        cmocka_unit_test_setup(nodes_are_registered_side_by_side, begin),
        cmocka_unit_test_setup(what_failed_is_not_given_back, begin),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
