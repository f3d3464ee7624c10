#!/usr/bin/env python3
"""Threads of a whole run: inside the user's mask whatever happens, bound where the memory is, fewer
where the system gives fewer, and the same bits in every case."""
import json
import os
import re
import resource
import time

import support as t

# One thread of the host device: its number is part of the numerics key, Adam's is not.
COMMON = ("--seq-len", 64, "--device-threads", 1, "--digest")
LANES = 10


def cpus():
    return sorted(os.sched_getaffinity(0))


def digest(run):
    t.equal(run.rc, 0, "exit status", run)
    found = re.search(r"^digest: .*$", run.stdout, re.M)
    t.check(found, "no digest", run)
    return found.group(0)


def plain(tmp, steps=2):
    return digest(t.train(f"{tmp}/plain", *COMMON, "--steps", steps))


def masks(pid):
    """The masks of all threads of a process, by thread."""
    found = {}
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/status", encoding="ascii") as file:
                found[task] = re.search(r"^Cpus_allowed_list:\s*(\S+)", file.read(), re.M).group(1)
    except (FileNotFoundError, ProcessLookupError, AttributeError):
        pass  # threads and processes end
    return found


def names(pid):
    found = {}
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/comm", encoding="utf-8") as file:
                found[task] = file.read().strip()
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def bytes_on_node(pid, node):
    """Of mappings that are bound to that node, or prefer it, which newer hwloc asks for."""
    policy = rf"^\S+ (?:bind|prefer[^:]*):{node} "
    try:
        with open(f"/proc/{pid}/numa_maps", encoding="ascii") as file:
            found = re.findall(policy + r".*?anon=(\d+).*?kernelpagesize_kB=(\d+)", file.read(),
                               re.M)
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(pages) * int(size) * 1024 for pages, size in found)


def watch(process):
    """Finishes the run; the masks seen in it, and the largest number of threads."""
    seen, most = set(), 0
    while not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
        now = masks(process.pid)
        seen |= set(now.values())
        most = max(most, len(now))
        time.sleep(0.002)
    return process.finish(), seen, most


def start(tmp, *args, steps=2, **options):
    return t.Process(["train", "--model", t.MODEL, "--data", t.SHAKESPEARE + "/train.bin", "--out",
                      tmp + "/out", *COMMON, "--steps", steps, *args], **options)


@t.test
def a_mask_of_one_cpu_holds_for_every_thread_and_changes_no_bit():
    last = cpus()[-1]
    with t.folder() as tmp:
        env = {**t.preload("affinity_log"), "AFFINITY_LOG": tmp + "/asked"}
        run, seen, most = watch(start(tmp, steps=6, env=env,
                                      preexec=lambda: os.sched_setaffinity(0, {last})))
        if os.path.exists(tmp + "/asked"):  # masks that were held too briefly to be seen
            with open(tmp + "/asked", encoding="ascii") as file:
                seen |= set(file.read().split())
        t.equal(digest(run), plain(tmp, steps=6), "digest", run)
        t.check(most >= LANES, f"only {most} threads seen", run)
        t.equal(seen, {str(last)}, "masks", run)
        t.contains(run.stderr, f"Adam: 1 thread on CPU {last}, not bound: one NUMA node",
                   "the line at start", run)
        t.check(re.search(r"^  threads +1$", run.stdout, re.M), "effective option", run)


@t.test
def more_threads_than_cpus_are_warned_about_and_stay_inside():
    last = cpus()[-1]
    with t.folder() as tmp:
        process = start(tmp, "--threads", 3, "--log", tmp + "/log", steps=6,
                        preexec=lambda: os.sched_setaffinity(0, {last}))
        process.wait_for("Adam: ")  # spillway itself by now, its own threads alone
        run, seen, most = watch(process)
        t.equal(digest(run), plain(tmp, steps=6), "digest", run)
        t.equal(seen, {str(last)}, "masks", run)
        t.check(most >= LANES + 3, f"only {most} threads seen", run)
        t.contains(run.stderr, f"--threads 3 is more than the 1 CPU of the affinity mask ({last})",
                   "the warning", run)
        _, others = t.read_log(tmp + "/log")
        t.equal(others[0]["options"]["threads"], 3, "effective option in the log", run)


@t.test
def threads_are_started_once_and_kept():
    """A team that is smaller for a small piece of work would end threads and start them anew."""
    with t.folder() as tmp:
        process = t.Process(["train", "--model", t.MODEL, "--data", t.SHAKESPEARE + "/train.bin",
                             "--out", tmp + "/out", "--seq-len", 64, "--steps", 10,
                             "--device-threads", 6, "--threads", 12])
        process.wait_for("Adam: ")  # what only tried whether threads can be started is over
        tasks = set()
        while not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
            tasks |= set(masks(process.pid))
            time.sleep(0.001)
        run = process.finish()
        t.equal(run.rc, 0, "exit status", run)
        # The first thread, the lanes, and the teams of the lanes for compute, gradients and Adam;
        # a sanitizer has one of its own.
        most = 1 + LANES + 5 + 5 + 11 + (1 if t.SANITIZED else 0)
        t.check(len(tasks) <= most, f"{len(tasks)} threads, more than {most}", run)


@t.test
def absurd_numbers_are_refused():
    with t.folder() as tmp:
        for option in ("--threads", "--device-threads"):
            for number in ("1025", "100000", "99999999999999999999", "-1", "0", "many", "2.5"):
                run = t.train(tmp + "/out", option, number, rc=2)
                t.contains(run.stderr, option, "the message", run)
                t.contains(run.stderr, number, "the message", run)
        t.check(not os.path.exists(tmp + "/out"), "something was made")


@t.test
def the_host_devices_threads_are_warned_about_too():
    many = len(cpus()) + 1
    with t.folder() as tmp:
        run = t.train(tmp + "/out", "--device-threads", many, "--dry-run", rc=0)
        t.contains(run.stderr, f"--device-threads {many} is more than the {len(cpus())} CPU",
                   "the warning", run)
        run = t.train(tmp + "/out", "--device-threads", len(cpus()), "--threads", len(cpus()),
                      "--dry-run", rc=0)
        t.check("warning" not in run.stderr, "a warning for what there is", run)


def under_limit(tmp, processes, *args):
    if os.getuid() != 0:
        t.skip("only root can become a user without other processes")
    os.chmod(os.path.join(t.ROOT, tmp), 0o777)
    try:
        return watch(start(tmp, *args, preexec=t.as_nobody(resource.RLIMIT_NPROC, processes)))
    except PermissionError:
        t.skip("other users may not run this build")


@t.test
def where_threads_cannot_be_started_the_run_goes_on_with_fewer():
    with t.folder() as tmp:
        run, _, most = under_limit(tmp, 16, "--threads", 64)
        t.equal(digest(run), plain(tmp), "digest", run)
        t.check(most <= 16, f"{most} threads", run)
        found = re.findall(r"warning: only \d+ more threads can be started.*", run.stderr)
        t.equal(len(found), 1, "warnings", run)
        t.contains(found[0], "RLIMIT_NPROC", "the warning", run)
        less = int(re.search(r"Adam runs (\d+) threads? instead of 64", found[0]).group(1))
        t.check(2 <= less <= 7, f"{less} threads left", run)
        t.check(re.search(rf"^  threads +{less}$", run.stdout, re.M), "effective option", run)
        t.contains(run.stderr, f"Adam: {less} thread", "the line at start", run)


@t.test
def where_even_the_lanes_cannot_be_started_the_run_ends_with_an_error():
    with t.folder() as tmp:
        run, _, _ = under_limit(tmp, 6, "--threads", 64)
        t.equal(run.rc, 1, "exit status", run)
        t.contains(run.stderr, "lane's thread", "the message", run)
        t.check(not os.path.exists(tmp + "/out"), "something was left behind", run)


@t.test
def a_model_is_made_under_the_same_limit():
    with t.folder() as tmp:
        if os.getuid() != 0:
            t.skip("only root can become a user without other processes")
        os.chmod(os.path.join(t.ROOT, tmp), 0o777)
        config, made = t.MODEL + "/config.json", tmp + "/made"
        try:
            run = t.spillway("init", "--config", config, "--out", made,
                             preexec=t.as_nobody(resource.RLIMIT_NPROC, 1),
                             env={"ASAN_OPTIONS": "detect_leaks=0"})  # it starts a thread
        except PermissionError:
            t.skip("other users may not run this build")
        t.equal(run.rc, 0, "exit status", run)
        t.spillway("init", "--config", config, "--out", tmp + "/plain", rc=0)
        t.equal(t.read_model(made)[1], t.read_model(tmp + "/plain")[1], "the model")


# hwloc takes this machine for one with a node per CPU; the kernel still has its real nodes, and
# answers for the pages of the run.
TWO_NODES = {"HWLOC_SYNTHETIC": "numa:2 core:1 pu:1", "HWLOC_THISSYSTEM": "1"}


def need_cpus_0_and_1():
    if cpus() != [0, 1]:
        t.skip("made for a machine with the CPUs 0 and 1")


@t.test
def adams_threads_are_bound_to_the_node_of_the_memory_and_no_others():
    need_cpus_0_and_1()
    with t.folder() as tmp:
        process = start(tmp, "--threads", 2, steps=6, env=TWO_NODES)
        process.wait_for("Adam: ")
        bound = 0
        while not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
            now = list(masks(process.pid).values())
            bound = max(bound, now.count("0"))
            t.check(set(now) <= {"0", "0-1"}, f"masks {now}")
            time.sleep(0.002)
        run = process.finish()
        t.equal(digest(run), plain(tmp, steps=6), "digest", run)
        t.contains(run.stderr, "Adam: 1 thread on NUMA node 0, CPU 0\n", "the line at start", run)
        t.equal(bound, 1, "threads bound to the node", run)


@t.test
def each_node_has_an_adam_of_its_own():
    """Two ranks on two nodes: two adam lanes, one for each rank, their memory bound to its node
    where there is such a node, and the bits of one lane."""
    need_cpus_0_and_1()
    with t.folder() as tmp:
        args = ("--ranks", 2, "--accumulate", 2)
        one = t.train(f"{tmp}/one", *COMMON, *args, "--steps", 6)
        process = start(tmp, *args, "--log", tmp + "/out.jsonl", "--trace", tmp + "/trace.json",
                        steps=6, env=TWO_NODES)
        lanes, bound = 0, 0
        process.wait_for("Adam: ")
        while not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
            lanes = max(lanes, list(names(process.pid).values()).count("adam"))
            bound = max(bound, bytes_on_node(process.pid, 0))
            time.sleep(0.002)
        run = process.finish()
        t.equal(digest(run), digest(one), "digest", run)
        t.equal(lanes, 2, "adam lanes", run)
        t.equal(run.stderr.count("Adam: 1 thread on NUMA node 0, CPU 0\n"), 2, "lines", run)
        with open(tmp + "/trace.json", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        ranks = {}
        for event in events:
            if event["ph"] == "X" and event["args"]["lane"].startswith("adam"):
                ranks.setdefault((event["args"]["lane"], event["tid"]), set()).add(
                    event["args"]["rank"])
        t.equal(sorted((lane, *which) for (lane, _), which in ranks.items()),
                [("adam", 0), ("adam 1", 1)], "lanes and their ranks", run)
        held = t.read_log(f"{tmp}/out.jsonl")[0][-1]["memory_bytes"]["host"]
        t.check(held / 2 <= bound < held / 2 + 3e6, f"{bound} bytes of {held} on node 0", run)


@t.test
def the_users_own_binding_is_left_alone():
    need_cpus_0_and_1()
    with t.folder() as tmp:
        env = {**TWO_NODES, "OMP_PROC_BIND": "false"}
        run, seen, _ = watch(start(tmp, "--threads", 2, steps=6, env=env))
        t.equal(digest(run), plain(tmp, steps=6), "digest", run)
        t.equal(seen, {"0-1"}, "masks", run)
        t.contains(run.stderr, "placed by OpenMP as the environment says", "the line", run)


@t.test
def the_doctor_says_how_many_threads_and_why():
    last = cpus()[-1]
    run = t.spillway("doctor", "--json", preexec=lambda: os.sched_setaffinity(0, {last}))
    check = [c for c in json.loads(run.stdout)["checks"] if c["name"] == "threads"][0]
    t.equal(check["state"], "ok", "state", run)
    t.equal(check["found"], "Adam 1, host device 1", "found", run)
    t.contains(check["why"], f"1 CPU in the affinity mask ({last}) on 1 core", "why", run)
    if os.getuid() == 0 and len(cpus()) > 1:
        run = t.spillway("doctor", "--json", preexec=t.as_nobody(resource.RLIMIT_NPROC, 1))
        check = [c for c in json.loads(run.stdout)["checks"] if c["name"] == "threads"][0]
        t.equal(check["state"], "slow", "state", run)
        t.contains(check["why"], "RLIMIT_NPROC", "why", run)


if __name__ == "__main__":
    t.main()
