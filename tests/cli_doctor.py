#!/usr/bin/env python3
"""spillway doctor: one line per check, an exit status that scripts can trust, nothing left
behind."""
import json
import os

import support as t

STATES = ("ok", "info", "slow", "bad")


def lines(run):
    found = {}
    for line in run.stdout.splitlines():
        t.check(line.split()[0] in STATES, f"a line without a state: {line!r}", run)
        found[line[6:19].strip()] = line.split()[0]
    return found


@t.test
def every_check_has_a_line_and_the_exit_status_follows():
    with t.folder() as tmp:
        run = t.spillway("doctor", "--nvme", tmp)
        found = lines(run)
        for name in ("instructions", "cores", "memory", "huge pages", "locked memory", "io_uring",
                     "direct I/O", "free space", "device"):
            t.check(name in found, f"no line about {name}", run)
        worse = any(state in ("slow", "bad") for state in found.values())
        t.equal(run.rc, 1 if worse else 0, "exit status", run)
        t.equal(os.listdir(tmp), [], "files left behind", run)
        t.equal(run.stderr, "", "standard error", run)


@t.test
def json_says_the_same():
    with t.folder() as tmp:
        text = t.spillway("doctor", "--nvme", tmp)
        run = t.spillway("doctor", "--nvme", tmp, "--json")
        report = json.loads(run.stdout)
        t.equal(report["schema"], 1, "schema", run)
        t.equal(report["ok"], run.rc == 0, "ok", run)
        t.equal({c["name"]: c["state"] for c in report["checks"]}, lines(text), "checks", run)
        for check in report["checks"]:
            if check["state"] in ("slow", "bad"):
                t.check(check["why"] and check["fix"], f"{check['name']} has no reason or fix", run)


@t.test
def a_missing_folder_is_bad_and_says_why():
    run = t.spillway("doctor", "--nvme", "build/no/such/folder", rc=1)
    t.equal(lines(run)["storage"], "bad", "state", run)
    t.contains(run.stdout, "build/no/such/folder", "the line", run)
    t.contains(run.stdout, "fix:", "the line", run)


@t.test
def a_forced_slow_variant_is_noticed():
    run = t.spillway("doctor", rc=1, env={"SPILLWAY_ISA": "scalar"})
    t.equal(lines(run)["instructions"], "slow", "state", run)
    run = t.spillway("doctor", rc=1, env={"SPILLWAY_ISA": "sse9"})
    t.equal(lines(run)["instructions"], "bad", "state", run)
    t.contains(run.stdout, "sse9", "the line", run)


@t.test
def a_folder_in_memory_is_slow():
    if not os.access("/dev/shm", os.W_OK):
        t.skip("no /dev/shm")
    run = t.spillway("doctor", "--nvme", "/dev/shm", rc=1)
    t.equal(lines(run)["direct I/O"], "slow", "state", run)


@t.test
def several_folders_are_all_tried():
    with t.folder() as one, t.folder() as two:
        run = t.spillway("doctor", "--nvme", f"{one},{two}")
        t.equal(run.stdout.count("free space"), 2, "lines about free space", run)


if __name__ == "__main__":
    t.main()
