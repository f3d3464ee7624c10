#!/bin/sh
# The first process of the emulated machine that avx512_emulated.py boots: runs the listed test
# programs, says on the serial line how each ended, and switches the machine off. A line that the
# check reads begins with "guest:".
/bin/busybox mkdir -p /proc /sys /dev /tmp
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sysfs /sys
/bin/busybox mount -t devtmpfs devtmpfs /dev
/bin/busybox mount -t tmpfs tmpfs /tmp
exec </dev/null >/dev/ttyS0 2>&1
export PATH=/bin LD_LIBRARY_PATH=/lib OMP_WAIT_POLICY=passive LC_ALL=C
cd /spillway || exit 1

# run ISA COMMAND...: with SPILLWAY_ISA set to that, or unset for "any".
run() {
    isa=$1
    shift
    echo "guest: run $isa $*"
    if [ "$isa" = any ]; then
        "$@"
    else
        SPILLWAY_ISA=$isa "$@"
    fi
    echo "guest: end $isa status $?"
}

echo "guest: cpu $(busybox sed -n 's/^model name.*: //p' /proc/cpuinfo)"
echo "guest: flags $(busybox sed -n 's/^flags.*: //p' /proc/cpuinfo)"
while read -r line; do
    # shellcheck disable=SC2086  # the words of a line are the words of a command
    run $line
done </commands
echo "guest: finished"
# What the serial line has not sent yet would be lost: this waits for it, and a little longer.
busybox stty -echo </dev/ttyS0
busybox sleep 1
busybox poweroff -f
