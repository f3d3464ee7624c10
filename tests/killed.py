"""Memory that a run may not take: refused before it is loaded; and where the kernel kills the run
nevertheless, the kill is named.

The runs live in a memory cgroup of their own, of either version, which only root can make.
"""
import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import support as t

ENDLESS = ["--seq-len", 24, "--steps", 1000000, "--save-every", 1000000, "--optimizer", "host"]


def own_group():
    """(this process's folder among the memory groups, the name of its limit's file), or skips."""
    with open("/proc/self/cgroup", encoding="ascii") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if "memory" in controllers.split(","):
                return "/sys/fs/cgroup/memory" + path, "memory.limit_in_bytes"
            if not controllers:
                for mount in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
                    if os.path.exists(mount + path + "/memory.max"):
                        return mount + path, "memory.max"
    t.skip("no memory cgroup")


@contextlib.contextmanager
def group(limit_bytes):
    """A memory group beside this process's own, with that limit."""
    own, limit = own_group()
    name = f"{own if limit == 'memory.limit_in_bytes' else os.path.dirname(own)}" \
           f"/spillway-test-{os.getpid()}"
    try:
        os.mkdir(name)
    except OSError as error:
        t.skip(f"no memory cgroup can be made: {error.strerror}")
    try:
        if not os.path.exists(f"{name}/{limit}"):
            t.skip("the cgroup above does not share out memory")
        with open(f"{name}/{limit}", "w", encoding="ascii") as file:
            file.write(str(limit_bytes))
        yield name
    finally:
        with open(name + "/cgroup.procs", encoding="ascii") as file:
            for pid in file.read().split():  # of a test that has failed
                os.kill(int(pid), signal.SIGKILL)
        for _ in range(200):  # the last ones may still be on their way out
            with contextlib.suppress(OSError):
                os.rmdir(name)
                break
            time.sleep(0.05)


def enter(name, score=0):
    """For preexec: into the group, with that much for the kernel's choice."""
    def move():
        with open(name + "/cgroup.procs", "w", encoding="ascii") as file:
            file.write("0")
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(str(score))
    return move


# Takes 8 MB after another until the process of that number is gone.
HOG = """
import sys
taken = []
while True:
    with open(f"/proc/{sys.argv[1]}/stat") as file:
        if file.read().rpartition(")")[2].split()[0] == "Z":
            break
    taken.append(b"x" * 8000000)
"""


def starve(name, pid, score):
    """The exit status of what took the memory."""
    return subprocess.run([sys.executable, "-c", HOG, str(pid)], timeout=100,
                          preexec_fn=enter(name, score), check=False).returncode


def out_of_memory(run):
    return [line for line in run.stderr.splitlines() if "for lack of memory" in line]


@t.test
def what_exceeds_the_control_group_is_refused_before_it_is_loaded():
    with t.folder() as tmp, group(150 << 20) as name:
        with open(t.MODEL + "/config.json", encoding="utf-8") as file:
            config = json.load(file)
        config.update(hidden_size=256, intermediate_size=1024, num_hidden_layers=16)
        with open(tmp + "/config.json", "w", encoding="utf-8") as file:
            json.dump(config, file)
        t.spillway("init", "--config", tmp + "/config.json", "--out", tmp + "/model", rc=0)
        run = t.train(tmp + "/out", "--optimizer", "host", "--seq-len", 24, "--steps", 1,
                      model=tmp + "/model", preexec=enter(name))
        t.equal(run.rc, 1, "exit status", run)
        t.contains(run.stderr, "157 MB", "the group's limit", run)
        t.equal(out_of_memory(run), [], "a kill")


@t.test
def a_kill_for_lack_of_memory_is_named():
    with t.folder() as tmp, group(1 << 30) as name:
        run = t.Process(["train", "--model", t.MODEL, "--data", t.SHAKESPEARE + "/train.bin",
                         "--out", tmp + "/out", *ENDLESS], preexec=enter(name))
        run.wait_for(r"^step +\d+")
        pid = run.pid
        with open(f"/proc/{pid}/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")  # the run alone, not the child that will tell of it
        starve(name, pid, 0)  # the kernel may come to it, too
        run = run.finish()
        t.equal(run.rc, -signal.SIGKILL, "exit status", run)
        told = out_of_memory(run)
        t.equal(len(told), 1, "lines about it", run)
        for part in (f"(process {pid})", "1.07 GB", "--host-memory", "--resume"):
            t.contains(told[0], part, "the message", run)


@t.test
def no_other_end_is_taken_for_one():
    """What else is in the group is killed for memory, and the run is stopped; and a run is killed
    by somebody."""
    for stop, rc in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        with t.folder() as tmp, group(1 << 30) as name:
            run = t.Process(["train", "--model", t.MODEL, "--data", t.SHAKESPEARE + "/train.bin",
                             "--out", tmp + "/out", *ENDLESS], preexec=enter(name))
            run.wait_for(r"^step +\d+")
            if stop == signal.SIGINT:
                t.equal(starve(name, run.pid, 1000), -signal.SIGKILL, "what took the memory")
            run.signal(stop)
            run = run.finish()
            t.equal(run.rc, rc, "exit status", run)
            t.equal(out_of_memory(run), [], "lines about a kill")


def watcher_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        for child in file.read().split():
            with open(f"/proc/{child}/comm", encoding="ascii") as name:
                if name.read().strip() == "spillway-watch":
                    return int(child)
    raise t.Failed("no child that watches")


@t.test
def a_watcher_that_is_stopped_holds_up_no_end():
    with t.folder() as tmp:
        run = t.Process(["train", "--model", t.MODEL, "--data", t.SHAKESPEARE + "/train.bin",
                         "--out", tmp + "/out", *ENDLESS])
        run.wait_for(r"^step +\d+")
        watcher = watcher_of(run.pid)
        os.kill(watcher, signal.SIGSTOP)
        run.signal(signal.SIGINT)
        try:
            run = run.finish(timeout_s=15)
            t.equal(run.rc, 130, "exit status", run)
        finally:
            with contextlib.suppress(OSError):
                os.kill(watcher, signal.SIGKILL)


if __name__ == "__main__":
    t.main()
