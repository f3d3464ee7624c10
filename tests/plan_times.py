#!/usr/bin/env python3
"""`spillway plan` and time: the tasks that it plays are those that train runs, its trace is one
that report opens, and what it says of a step follows from the rates that it is given."""
import collections
import json
import os

import support as t

# Rates of no machine that exists, all of them known.
RATES = {"flops_per_s": 2e9, "h2d_bytes_per_s": 2e8, "d2h_bytes_per_s": 1e8,
         "both_bytes_per_s": 2e8,
         "gather_bytes_per_s": 1e8, "scatter_bytes_per_s": 1e8, "cores": 4, "cpus": 4,
         "memory_bytes": 8e9, "memory_bytes_per_s": 2e10, "adam_bytes_per_s": 3e8,
         "commit_s": 0.002}
DRIVE = {"drive": "drive", "bytes": 1e12, "read_bytes_per_s": 1e8, "write_bytes_per_s": 5e7,
         "mixed_bytes_per_s": 7e7}


def profile(tmp, drives=1, **changes):
    path = os.path.join(tmp, "machine.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"schema": 1, "about": "made up", "machine": {**RATES, **changes},
                   "drives": [DRIVE] * drives}, file)
    return path


def plan(*args, rc=0):
    return json.loads(t.spillway("plan", *args, "--json", rc=rc).stdout)


def tasks_of(path, step):
    """By lane and rank, in their order: what the tasks of a step are and move."""
    with open(path, encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    lanes = collections.defaultdict(list)
    for e in events:
        if e["ph"] != "X" or e["args"]["step"] != step or e.get("cat") == "eval":
            continue
        a = e["args"]
        lanes[a["lane"], a["rank"]].append((e["name"], a["unit"], a["micro"], a["bytes"]))
    return lanes


def last_step(path):
    with open(path, encoding="utf-8") as file:
        return max(e["args"]["step"] for e in json.load(file)["traceEvents"] if e["ph"] == "X")


def tiers(params, optimizer, gradients, activations):
    return ("--params", params, "--optimizer", optimizer, "--gradients", gradients,
            "--activations", activations)


def offered(report):
    """The options that a plan offers, but for paths."""
    command = report["decision"]["command"]
    t.equal(command[0], "train", "the command")
    left_out = ("--model", "--data", "--out", "--nvme")
    return [word for i, word in enumerate(command[1:], 1)
            if word not in left_out and command[i - 1] not in left_out]


def same_program(*args):
    """What plan played is what the line does that it offers."""
    with t.folder() as tmp:
        args = ("--seq-len", 64, "--chunk", "64K", *args)
        run = t.spillway("plan", t.MODEL, "--machine", profile(tmp), "--device", "host", *args,
                         "--trace", f"{tmp}/plan.json", "--json", rc=0)
        t.train(f"{tmp}/out", *offered(json.loads(run.stdout)), "--steps", 7, "--trace",
                f"{tmp}/train.json", rc=0)
        real = tasks_of(f"{tmp}/train.json", 5)
        played = tasks_of(f"{tmp}/plan.json", last_step(f"{tmp}/plan.json"))
        what = " ".join(str(a) for a in args)
        t.equal(sorted(played), sorted(real), f"{what}: the lanes", run)
        t.check(len(real) >= 5, f"{what}: {len(real)} lanes", run)
        for lane, tasks in real.items():
            for i, (a, b) in enumerate(zip(played[lane], tasks)):
                t.equal(a, b, f"{what}: task {i} of {lane}", run)
            t.equal(len(played[lane]), len(tasks), f"{what}: the count of {lane}", run)


# ---- one program ----

@t.test
def placements_are_played_as_they_run():
    same_program(*tiers("device", "host", "host", "device"))
    same_program(*tiers("device", "nvme", "host", "device"), "--clip", 0)
    same_program(*tiers("host", "nvme", "nvme", "host"), "--accumulate", 2)
    same_program(*tiers("nvme", "host:30%,nvme:70%", "host:50%,nvme:50%", "nvme"))
    same_program(*tiers("device", "device", "device", "device"), "--micro-batch", 2)


@t.test
def modes_of_overlap_are_played_as_they_run():
    for overlap in ("none", "forward", "backward"):
        clip = ("--clip", 0) if overlap == "backward" else ()
        same_program(*tiers("host", "nvme", "host", "host"), "--overlap", overlap, *clip,
                     "--checkpoint-every", 2)


@t.test
def ranks_are_played_as_they_run():
    threads = ("--device-threads", 1)
    same_program(*tiers("device", "host", "host", "device"), "--ranks", 2, "--zero", 3, *threads)
    same_program(*tiers("host", "nvme", "host", "device"), "--ranks", 3, "--accumulate", 2,
                 "--zero", 3, "--clip", 0, *threads)
    same_program(*tiers("device", "nvme", "nvme", "device"), "--ranks", 2, "--zero", 2, *threads)


@t.test
def frozen_units_are_played_as_they_run():
    same_program(*tiers("device", "host", "host", "device"), "--freeze", "*embed*,*layers.0.*")


@t.test
def throttled_runs_are_played_as_they_run():
    # Where memory is poisoned gradients that nobody computes are NaN: no step updates, and a record
    # that was never written is not read.
    nvme = ("host", "host", "nvme", "host") if t.SANITIZED else ("host", "nvme", "host", "host")
    same_program(*tiers(*nvme), "--sim-flops", "20G", "--sim-nvme", "1G")


@t.test
def loading_ahead_is_in_the_plan_and_in_the_run():
    """Weights come from the host at a rate that takes about as long as the operations. What they
    overlap is what the builder's loads ahead of a visit are for, in either."""
    with t.folder() as tmp:
        args = (*tiers("host", "host", "host", "device"), "--seq-len", 64, "--overlap", "none",
                "--sim-pcie", "4M,1G", "--sim-flops", "500M")
        times = plan(t.MODEL, "--machine", profile(tmp), "--device", "host", *args)["times"]
        busy = {lane["lane"]: lane["busy_s"] for lane in times["lanes"]}
        alone = busy["h2d"] + busy["compute"]
        run = t.train(f"{tmp}/out", *args, "--steps", 6, "--log", f"{tmp}/log", rc=0)
        real = sorted(step["step_s"] for step in t.read_log(f"{tmp}/log")[0][1:])[2]
        told = times["step_s"]
        t.check(told < 0.75 * alone,
                f"played {told:.3f} s, one after the other {alone:.3f} s", run)
        # A busy machine makes the run longer; nothing makes it shorter.
        t.check(real > 0.9 * told, f"played {told:.3f} s, run {real:.3f} s", run)


# ---- what is said ----

@t.test
def a_plan_names_time_clock_and_lanes():
    with t.folder() as tmp:
        machine = ("--machine", profile(tmp), "--device", "host")
        args = (t.MODEL, *machine, *tiers("device", "nvme", "host", "device"), "--seq-len", 64)
        run = t.spillway("plan", *args, rc=0)
        for word in ("step time", "tokens/s", "step clock ", "of step", "critical",
                     "a day", "peak of load, train, save and resume"):
            t.contains(run.stdout, word, "the text", run)
        times = plan(*args)["times"]
        lanes = {lane["lane"]: lane for lane in times["lanes"]}
        t.close(sum(lane["critical_share"] for lane in lanes.values()), 1, 1e-6, "critical shares")
        written = lanes["nvme_write"]["bytes"]
        t.equal(times["written_bytes"], written, "bytes written")
        t.close(times["written_bytes_per_day"], written / times["step_s"] * 86400, 1e-6,
                "bytes a day", relative=True)
        t.close(times["tokens_per_s"], 64 / times["step_s"], 1e-6, "tokens/s", relative=True)
        t.check(times["step_s"] >= written / DRIVE["write_bytes_per_s"],
                f"faster than the drive: {times}")
        t.equal(times["missing"], [], "rates")
        faster = plan(*args, "--sim-nvme", "1G")["times"]["step_s"]
        t.equal(faster, times["step_s"], "a rate above the machine's")
        slower = plan(*args, "--sim-nvme", "10M")["times"]["step_s"]
        t.check(slower > 3 * times["step_s"], f"{slower} s at 10 MB/s, {times['step_s']} s")


@t.test
def unknown_rates_are_said_to_be_unknown():
    with t.folder() as tmp:
        machine = profile(tmp, adam_bytes_per_s=0)
        run = t.spillway("plan", t.MODEL, "--machine", machine, "--device", "host", rc=0)
        t.contains(run.stdout, "does not tell adam_bytes_per_s", "the text", run)


@t.test
def tokens_of_a_step_set_its_micro_batches():
    report = plan("llama-3-8b", "--machine", "8xh100", "--tokens", "96K", "--seq-len", 4096,
                  "--no-search")
    t.equal(report["step"]["tokens"], 98304, "three micro-batches on eight ranks")
    command = report["decision"]["command"]
    t.equal(command[command.index("--accumulate") + 1], "3", "in the offered line")
    t.check("--tokens" not in command, f"{command}")
    t.equal(report["times"]["tokens"], 98304, "in the times")
    run = t.spillway("plan", "7B", "--tokens", "1M", "--accumulate", 2, "--machine", "8xh100", rc=2)
    t.contains(run.stderr, "give one of them", "both", run)
    run = t.spillway("plan", "7B", "--tokens", "900G", "--machine", "8xh100", rc=2)
    t.contains(run.stderr, "micro-batches", "too many", run)


@t.test
def the_model_may_stand_alone():
    t.equal(plan("7B", "--machine", "8xh100"), plan("--model", "7B", "--machine", "8xh100"), "both")
    run = t.spillway("plan", "--machine", "8xh100", rc=2)
    t.contains(run.stderr, "MODEL (or --model) is required", "none", run)
    run = t.spillway("plan", "7B", "--model", "7B", rc=2)
    t.contains(run.stderr, "give one of them", "twice", run)


@t.test
def report_opens_the_trace():
    with t.folder() as tmp:
        trace = f"{tmp}/plan.json"
        args = (t.MODEL, "--machine", profile(tmp), "--device", "host",
                *tiers("host", "nvme", "nvme", "device"), "--seq-len", 64)
        times = plan(*args, "--trace", trace)["times"]
        run = t.spillway("report", trace, "-o", f"{tmp}/report.html", "--json", rc=0)
        report = json.loads(run.stdout)
        steps = {step["step"]: step for step in report["steps"]}
        last = steps[max(steps)]
        t.close(last["step_ns"] * 1e-9, times["step_s"], 0.02, "the last step", relative=True,
                run=run)
        t.check(os.path.getsize(f"{tmp}/report.html") > 10000, "the page", run)
        train = t.spillway("plan", *args, "--trace", "/nowhere/it.json", rc=1)
        t.contains(train.stderr, "/nowhere/it.json", "the error", train)


if __name__ == "__main__":
    t.main()
