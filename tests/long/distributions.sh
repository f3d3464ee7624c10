#!/usr/bin/env bash
# The README's two commands in a fresh chroot of each distribution, from a fresh clone of this
# repository's last commit: git and make are installed there, nothing else, then `make quickstart`,
# `make quickstart` again, `make test`, and `make deps`, which must find nothing left to do.
#
#   tests/long/distributions.sh FOLDER [NAME...]     NAME: debian-12, debian-13, ubuntu-24.04
#
# Needs root and debootstrap. The mirror comes from this machine's own apt settings where it runs
# the same family of distributions, else from DEBIAN_MIRROR or UBUNTU_MIRROR; without one the
# distribution is skipped. Prints "ok NAME", "FAIL NAME: reason" or "skip NAME: reason"; logs stay
# in FOLDER.
set -uo pipefail
top=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:?usage: distributions.sh FOLDER [NAME...]}
shift
[ $# != 0 ] || set -- debian-12 debian-13 ubuntu-24.04
mkdir -p "$folder"
failures=0

# The first mirror in apt's settings, if this machine's distribution is of the family.
own_mirror() {
    grep -qE "^ID(_LIKE)?=.*\b$1\b" /etc/os-release || return 0
    cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null |
        sed -nE "s#^(URIs:|deb( \[[^]]*\])?) *(https?://[^ ]*/$1/?)( .*)?\$#\3#p" | head -n 1
}

# In the chroot, with /proc, /sys and /dev in a mount namespace that ends with the command.
inside() {
    local root=$1
    shift
    unshare -m bash -c '
        mount -t proc proc "$0/proc" && mount --rbind /sys "$0/sys" &&
        mount --rbind /dev "$0/dev" &&
        exec chroot "$0" env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
            HOME=/root TERM=dumb LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive "$@"' \
        "$root" "$@" </dev/null
}

# check NAME SUITE MIRROR OPTIONS...
check() {
    local name=$1 suite=$2 mirror=$3 root=$folder/$1 log=$folder/$1.log step start
    shift 3
    if [ -z "$mirror" ]; then
        echo "skip $name: not checked here: no mirror known (set DEBIAN_MIRROR or UBUNTU_MIRROR)"
        return
    fi
    rm -rf "$root"
    : >"$log"
    if ! debootstrap --variant=minbase "$@" "$suite" "$root" "$mirror" >>"$log" 2>&1; then
        echo "FAIL $name: debootstrap did not make $suite, see $log"
        failures=$((failures + 1))
        return
    fi
    cp /etc/resolv.conf "$root/etc/resolv.conf" 2>/dev/null
    if ! { inside "$root" sh -c 'apt-get -q update && apt-get -q -y --no-install-recommends \
            install git make' >>"$log" 2>&1 &&
        git clone -q "$top" "$root/root/spillway" >>"$log" 2>&1; }; then
        echo "FAIL $name: no git, make and clone in the chroot, see $log"
        failures=$((failures + 1))
        return
    fi
    for step in "make quickstart" "make quickstart" "make test" "make deps"; do
        start=$SECONDS
        printf '\n==== %s\n' "$step" >>"$log"
        if ! inside "$root" sh -c "cd /root/spillway && $step" >>"$log" 2>&1; then
            echo "FAIL $name: '$step' failed, see $log"
            tail -n 20 "$log" | sed 's/^/    | /'
            failures=$((failures + 1))
            return
        fi
        printf '    %s: %s, %s s: %s\n' "$name" "$step" $((SECONDS - start)) "$(tail -n 1 "$log")"
    done
    if ! tail -n 1 "$log" | grep -q 'everything needed is installed'; then
        echo "FAIL $name: make deps is not done after it has run"
        failures=$((failures + 1))
        return
    fi
    echo "ok $name"
    rm -rf "$root"
}

if [ "$(id -u)" != 0 ] || ! command -v debootstrap >/dev/null; then
    for name in "$@"; do echo "skip $name: not checked here: needs root and debootstrap"; done
    exit 0
fi
debian=${DEBIAN_MIRROR:-$(own_mirror debian)}
ubuntu=${UBUNTU_MIRROR:-$(own_mirror ubuntu)}
for name in "$@"; do
    case $name in
        debian-12) check $name bookworm "$debian" ;;
        debian-13) check $name trixie "$debian" ;;
        ubuntu-24.04) check $name noble "$ubuntu" --components=main,universe ;;
        *)
            echo "FAIL $name: no such distribution here"
            failures=$((failures + 1))
            ;;
    esac
done
[ $failures = 0 ]
