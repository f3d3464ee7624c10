#!/usr/bin/env bash
# Are the sanitizers able to see anything, as the test runner sets them up? Plants a leak and an
# overrun for ASan, and for TSan a race between OpenMP threads beside a clean program that also
# calls oneDNN, whose distribution package is linked with gcc's OpenMP runtime. Prints a line for
# each and the counts last.
set -uo pipefail
cd "$(dirname "$0")/.."
work=build/check-sanitizers
rm -rf $work
mkdir -p $work
passed=0
failed=0

cat >$work/memory.c <<'C'
#include <stdlib.h>
#include <string.h>
int main(int argc, char **argv) {
    char *volatile block = malloc(10);
    (void)argv;
    if (argc == 2) memset(block, 0, 11);
    if (argc == 1) free(block);
    block = NULL;
    return 0;
}
C
cat >$work/threads.c <<'C'
#include <dnnl.h>
#include <stdlib.h>
static float a[128 * 128], b[128 * 128], c[128 * 128];
static double total;
int main(int argc, char **argv) {
    const int racy = argc > 1;
    (void)argv;
    for (int round = 0; round < 10; round++) {
#pragma omp parallel for num_threads(4) schedule(static)
        for (int i = 0; i < 128 * 128; i++) {
            a[i] = (float)(i % 7);
            b[i] = (float)(i % 5);
            if (racy) total += a[i];
        }
        dnnl_sgemm('N', 'N', 128, 128, 128, 1.0f, a, 128, b, 128, 0.0f, c, 128);
#pragma omp parallel for num_threads(4) schedule(static)
        for (int i = 0; i < 128 * 128; i++) c[i] += 1.0f;
    }
    return 0;
}
C

# expect NAME PATTERN CONFIG COMMAND...: the command's output has the pattern; with an empty pattern
# the command must succeed.
expect() {
    local name=$1 pattern=$2 config=$3 output status
    shift 3
    output=$(python3 tests/run.py --config "$config" --exec "$@" 2>&1)
    status=$?
    if { [ -z "$pattern" ] && [ $status = 0 ]; } ||
        { [ -n "$pattern" ] && [ $status != 0 ] && grep -q "$pattern" <<<"$output"; }; then
        echo "ok $name"
        passed=$((passed + 1))
    else
        echo "FAIL $name: exit status $status"
        head -n 30 <<<"$output"
        failed=$((failed + 1))
    fi
}

gcc -g -O1 -fsanitize=address,undefined $work/memory.c -o $work/memory &&
    clang -g -O1 -fsanitize=thread -fopenmp $work/threads.c -ldnnl -o $work/threads || failed=1
expect "ASan accepts a clean program" "" asan $work/memory
expect "ASan sees an overrun" "heap-buffer-overflow" asan $work/memory overrun
expect "LSan sees a leak" "detected memory leaks" asan $work/memory leak please
expect "TSan accepts OpenMP and oneDNN in one program" "" tsan $work/threads
expect "TSan sees a race between OpenMP threads" "data race" tsan $work/threads racy
echo "$passed passed, $failed failed"
[ $failed = 0 ]
