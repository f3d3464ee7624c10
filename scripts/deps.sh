#!/usr/bin/env bash
# Installs what building and testing needs on Debian 12, Ubuntu 24.04 and later, with apt.
#
#   scripts/deps.sh          what `make`, `make test` and `make quickstart` need
#   scripts/deps.sh check    and what `.ci/run` needs on top: clang for TSan and for the format
#
# Open MPI, for runs of several processes, is installed where apt has it and done without elsewhere.
# Says first what it would install; does nothing where all is there. As another user than root it
# goes through sudo. It asks nothing else, and exits with 1 and the reason when it cannot do it.
set -euo pipefail

build_packages=(gcc g++ libc6-dev make git python3 libcmocka-dev
    liburing-dev libhwloc-dev libdnnl-dev libjansson-dev libxxhash-dev libisal-dev
    libtomlplusplus-dev)
# Nothing but runs of several processes, and their tests, need these.
optional_packages=(libopenmpi-dev openmpi-bin)
# clang's default version decides which runtimes fit; see clang_packages.
check_packages=(clang llvm)

say() { printf 'deps: %s\n' "$*"; }
die() { printf 'deps: %s\n' "$*" >&2; exit 1; }

installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }
available() { apt-cache show "$1" >/dev/null 2>&1; }

# The OpenMP runtime with Archer, the sanitizers' runtime and the formatter for the default clang.
clang_packages() {
    local version
    version=$(apt-cache depends clang 2>/dev/null |
        sed -n 's/^ *Depends: clang-\([0-9]*\)$/\1/p' | head -n 1)
    [ -n "$version" ] || return 0
    echo "libomp-$version-dev"
    # A package of its own from version 14 on.
    if available "libclang-rt-$version-dev"; then echo "libclang-rt-$version-dev"; fi
    # The tree is formatted with version 14, and others differ in details.
    if available clang-format-14; then echo clang-format-14; else echo clang-format; fi
}

missing_of() {
    local package
    for package in "$@"; do installed "$package" || echo "$package"; done
}

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif ! command -v sudo >/dev/null; then
        die "not root and no sudo here; run as root: apt-get install ${missing[*]}"
    elif [ -n "${CI:-}" ] || [ ! -t 0 ]; then
        sudo -n "$@" ||
            die "sudo wants a password; run yourself: sudo apt-get install ${missing[*]}"
    else
        sudo "$@"
    fi
}

wanted=("${build_packages[@]}")
with_check=no
case "${1:-}" in
    "") ;;
    check) with_check=yes ;;
    *) die "usage: scripts/deps.sh [check]" ;;
esac

if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    die "this system has no apt. Install the equivalents of: ${wanted[*]}"
fi

export DEBIAN_FRONTEND=noninteractive
# What is missing, in `missing`; of what can be done without, in `extra`.
look() {
    mapfile -t missing < <(missing_of "${wanted[@]}")
    # Before the first `apt-get update` apt cannot tell clang's version: look again after it.
    if [ $with_check = yes ]; then
        mapfile -t missing < <(missing_of "${wanted[@]}" "${check_packages[@]}" $(clang_packages))
    fi
    mapfile -t extra < <(missing_of "${optional_packages[@]}")
}

# install PACKAGE...: all of them, or ends this shell with the reason.
install() {
    local package
    for package in "$@"; do
        available "$package" ||
            die "apt knows no package '$package' (on Ubuntu: is 'universe' enabled?)"
    done
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends install "$@" ||
        die "apt-get could not install: $*"
    mapfile -t missing < <(missing_of "$@")
    [ ${#missing[@]} = 0 ] || die "still missing after the installation: ${missing[*]}"
}

update() { as_root apt-get -q update >/dev/null; }

look
if [ ${#missing[@]} = 0 ] && [ ${#extra[@]} = 0 ]; then
    say "everything needed is installed"
    exit 0
fi
all=("${missing[@]}" "${extra[@]}")
say "will install with apt-get: ${all[*]}"
if [ ${#missing[@]} != 0 ]; then
    update || say "apt-get update failed; trying with the lists at hand"
    look
    if [ ${#missing[@]} != 0 ]; then install "${missing[@]}"; fi
fi
if [ ${#extra[@]} != 0 ]; then
    # In shells of their own, which may end.
    missing=("${extra[@]}")
    (update) || say "apt-get update failed; trying with the lists at hand"
    (install "${extra[@]}") ||
        say "goes on without: ${extra[*]}; runs of several processes (mpirun) need them"
fi
say "done"
