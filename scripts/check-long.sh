#!/usr/bin/env bash
# The checks that take long, need a network or need root: `make check-long`, or with
# CHECKS="kills transformers" only those.
#
#   kills          a training run killed a hundred times at random moments: nothing half written
#   resume         500 runs killed and resumed, with the bits of a run that nobody disturbed; 10,000
#                  power cuts replayed on the store
#   faults         100,000 faults of drives that reached a pending transfer, counted by kind
#   environment    io_uring refused with each of sixteen codes at each of its calls; limits of
#                  locked memory; every file system that can be mounted here
#   flat           1,000 steps and 100 saves of a small model, in each tier: private memory stays as
#                  large as it was at step 50
#   broken         every planted bug of tests/broken/ (half an hour; .ci/run has time for some)
#   waits          each wait of the CUDA back end dropped in turn: a test shows it (on the stand-in)
#   coverage       no line of kernels/cuda/ that no test executes (on the stand-in)
#   transformers   Hugging Face transformers loads what training wrote and computes the same loss;
#                  with torch's AdamW it trains models of other shapes beside the program (both from
#                  PyPI, in a virtual environment outside the tree)
#   ranks          torch's DistributedDataParallel and FullyShardedDataParallel beside --ranks, over
#                  gloo (from the same virtual environment)
#   adam           torch.optim's AdamW and Adam beside the CPU Adam (from the same virtual
#                  environment), and one chunk of 2^31 + 17 elements (up to 28 GB of memory)
#   avx512         the AVX-512 code on an emulated CPU that has it: avx512_emulated.py boots a Linux
#                  under Bochs whose first process, avx512_init.sh, runs the tests (leave_out.c: all
#                  but the longest)
#   world          two processes that gather more than 2 GiB each (10 GB of memory)
#   gpu            gpu-check on the CPU stand-in, every row to its end
#   report         the page of spillway report in a headless Chromium (Debian's package chromium),
#                  on a phone and on a desk, light and dark, up to a million tasks
#   pages          what docs/70b.md and docs/replay.md quote of plan, and what they derive by hand
#   distributions  make quickstart and make test in a fresh chroot of each distribution
#
# Everything is kept in LONG_DIR (default: /var/tmp/spillway-long), so a second run is faster. What
# cannot be checked on this machine is a skip with its reason, never a pass. The summary for
# docs/checks.md is left in build/check-long.md; the last line is "N passed, N failed, N skipped".
set -uo pipefail
cd "$(dirname "$0")/.."
long=${LONG_DIR:-/var/tmp/spillway-long}
mkdir -p "$long" build
results=$long/results
: >"$results"

# stage NAME COMMAND...: shows the lines and keeps the verdicts; a failing stage that named no
# failure is one.
stage() {
    local name=$1 status
    shift
    printf '\n==== %s\n' "$name"
    "$@" 2>&1 </dev/null | tee "$long/$name.out"
    status=${PIPESTATUS[0]}
    grep -E '^(ok|FAIL|skip) ' "$long/$name.out" |
        sed "s/^\(ok\|FAIL\|skip\) /\1 $name: /" >>"$results"
    if [ "$status" != 0 ] && ! grep -q '^FAIL' "$long/$name.out"; then
        echo "FAIL $name: exit status $status" | tee -a "$results"
    fi
}

# The virtual environment: python3 -m venv, torch and transformers from PyPI. Where it
# cannot be made the check named $1 is skipped.
python=$long/venv/bin/python
venv() {
    "$python" -c 'import torch, transformers' 2>/dev/null && return
    rm -rf "$long/venv"
    echo "making a virtual environment with torch and transformers (several GB)"
    if ! { python3 -m venv "$long/venv" &&
        "$long/venv/bin/pip" -q install torch transformers safetensors numpy; }; then
        echo "skip $1: not checked here: no virtual environment with torch and transformers"
        return 1
    fi
}

# The programs beside the scripts, linked with the library as it is.
program() {
    "${CC:-cc}" -std=gnu11 -O2 -fopenmp -D_GNU_SOURCE -I. "tests/long/$1" \
        build/release/libspillway.a -lisal -lm -o "$long/${1%.c}"
}

adam() {
    local status=0
    program adam_huge.c && "$long/adam_huge" || status=1
    program adam_steps.c || return 1
    venv torch || return $status
    "$python" tests/long/adam_agrees.py "$long/adam_steps" || status=1
    return $status
}

transformers() {
    venv all || return 0
    local status=0
    "$python" tests/long/transformers_agree.py || status=1
    "$python" tests/long/shapes_agree.py || status=1
    return $status
}

ranks() {
    venv all || return 0
    "$python" tests/long/ranks_agree.py
}

avx512() {
    make --no-print-directory -j"$(nproc)" tests && python3 tests/long/avx512_emulated.py
}

# Five hundred kills that are resumed, ten thousand power cuts that are replayed.
resume() {
    make --no-print-directory -j"$(nproc)" tests || return 1
    KILLS=500 SPILLWAY=build/spillway python3 tests/resume.py || return 1
    POWER_CUTS=10000 build/release/tests/test_power_cut && echo "ok power_cuts: 10000 replayed"
}

faults() {
    make --no-print-directory -j"$(nproc)" tests || return 1
    FAULTS=100000 build/release/tests/test_faults && echo "ok faults: 100000 reached a transfer"
}

environment() {
    make --no-print-directory -j"$(nproc)" tests &&
        ENVIRONMENT=all SPILLWAY=build/spillway python3 tests/environment.py
}

world() {
    make --no-print-directory -j"$(nproc)" tests &&
        WORLD_LONG=1 SPILLWAY=build/spillway python3 tests/world.py long_messages_arrive
}

gpu() {
    make --no-print-directory -j"$(nproc)" tests &&
        GPU_CHECK_WHOLE=1 python3 tests/run.py --exec python3 tests/gpu_check.py
}

broken() {
    make --no-print-directory check-broken || return 1
    echo "ok all_planted_bugs_are_caught"
}

waits() {
    make --no-print-directory check-waits || return 1
    echo "ok each_dropped_wait_shows: $(tail -n 1 "$long/waits.out")"
}

coverage() {
    make --no-print-directory coverage-cuda || return 1
    echo "ok every_line_is_executed: $(tail -n 1 "$long/coverage.out")"
}

make --no-print-directory -j"$(nproc)" all || exit 1
all="kills resume faults environment flat asan tsan broken waits coverage transformers ranks adam"
all="$all avx512 world gpu report pages distributions"
for check in ${*:-$all}; do
    case $check in
        kills) stage kills python3 tests/long/kills.py ;;
        resume) stage resume resume ;;
        faults) stage faults faults ;;
        environment) stage environment environment ;;
        flat) stage flat python3 tests/long/flat.py ;;
        asan) stage asan make test CONFIG=asan STRICT=1 ;;
        tsan) stage tsan make test CONFIG=tsan STRICT=1 ;;
        broken) stage broken broken ;;
        waits) stage waits waits ;;
        coverage) stage coverage coverage ;;
        transformers) stage transformers transformers ;;
        ranks) stage ranks ranks ;;
        adam) stage adam adam ;;
        avx512) stage avx512 avx512 ;;
        world) stage world world ;;
        gpu) stage gpu gpu ;;
        report) stage report python3 tests/long/report_browser.py ;;
        pages) stage pages python3 tests/long/pages.py ;;
        distributions) stage distributions tests/long/distributions.sh "$long/distributions" ;;
        *)
            echo "check-long: no check named '$check'" >&2
            exit 2
            ;;
    esac
done

passed=$(grep -c '^ok ' "$results")
failed=$(grep -c '^FAIL ' "$results")
skipped=$(grep -c '^skip ' "$results")
{
    printf '| date | commit | machine | check | result |\n| --- | --- | --- | --- | --- |\n'
    machine=$(sed -n 's/^PRETTY_NAME="\(.*\)"/\1/p' /etc/os-release)
    machine+=", Linux $(uname -r | cut -d- -f1)"
    machine+=", $(nproc) x $(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1)"
    while read -r verdict rest; do
        reason=${rest#*: }
        printf '| %s | %s | %s | %s | %s |\n' "$(date -I)" "$(git describe --always --dirty)" \
            "$machine" "${rest%%: *}: ${reason%%: *}" \
            "$verdict$([ "$reason" = "${reason#*: }" ] || printf ': %s' "${reason#*: }")"
    done <"$results"
} >build/check-long.md

printf '\nThe table for docs/checks.md is in build/check-long.md.\n'
printf '%s passed, %s failed' "$passed" "$failed"
if [ "$skipped" != 0 ]; then printf ', %s skipped' "$skipped"; fi
printf '\n'
[ "$failed" = 0 ] && [ "$passed" != 0 ]
