"""A run whose machine was measured is planned: what is left open of its placement is what `spillway
plan` offers, it says so in five lines, and at its end what was predicted beside what was measured.
"""
import json
import os
import re
import statistics

import support as t

# Rates of no machine that exists: memory for half of the state, a fast drive.
RATES = {"flops_per_s": 2e10, "h2d_bytes_per_s": 2e9, "d2h_bytes_per_s": 2e9,
         "both_bytes_per_s": 3e9, "gather_bytes_per_s": 1e9, "scatter_bytes_per_s": 1e9,
         "cores": 4, "cpus": 4, "memory_bytes": 8e9, "memory_bytes_per_s": 2e10,
         "adam_bytes_per_s": 3e9, "commit_s": 0.002}
ARGS = ("--seq-len", 64, "--chunk", "64K", "--steps", 6)
STATES = ("params", "optimizer", "gradients", "activations")


def profile(tmp, **changes):
    path = os.path.join(tmp, "machine.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"schema": 1, "about": "made up", "machine": {**RATES, **changes},
                   "drives": [{"drive": tmp, "bytes": 1e12, "read_bytes_per_s": 1e9,
                               "write_bytes_per_s": 1e9, "mixed_bytes_per_s": 1e9}]}, file)
    return path


def started(log):
    return [e for e in t.read_log(log)[1] if e.get("event") == "start"][0]


def plan_lines(run):
    return [line for line in run.stdout.splitlines() if line.startswith("plan: ")]


def planned(tmp, name, *args, **options):
    return t.train(f"{tmp}/{name}", *ARGS, *args, "--log", f"{tmp}/{name}.jsonl", rc=0, **options)


@t.test
def what_is_open_is_what_plan_offers():
    with t.folder() as tmp:
        machine = ("--machine", profile(tmp))
        run = planned(tmp, "out", *machine)
        told = json.loads(t.spillway("plan", t.MODEL, *machine, *ARGS, "--device", "host", "--json",
                                     rc=0).stdout)
        start = started(f"{tmp}/out.jsonl")
        for state in STATES:
            t.equal(start["options"][state], told["search"]["placement"][state], state, run)
        t.equal(start["options"]["overlap"], told["search"]["placement"]["overlap"], "mode", run)
        t.equal(start["plan"]["step_s"], told["times"]["step_s"], "the step's time", run)
        t.equal(len(plan_lines(run)), 5, "lines of the plan", run)


@t.test
def what_memory_does_not_hold_lies_on_drives():
    with t.folder() as tmp:
        run = planned(tmp, "out", "--machine", profile(tmp, memory_bytes=3.05e7))
        steps, _ = t.read_log(f"{tmp}/out.jsonl")
        t.check(steps[3]["bytes"]["nvme_read"] > 0, "nothing was read from the drive", run)
        t.contains(run.stdout, "nvme", "the plan", run)


@t.test
def what_is_given_stays():
    with t.folder() as tmp:
        given = ("--params", "host", "--optimizer", "nvme", "--gradients", "nvme")
        run = planned(tmp, "out", *given, "--machine", profile(tmp), "--checkpoint-every", 2)
        options = started(f"{tmp}/out.jsonl")["options"]
        got = [options[state] for state in ("params", "optimizer", "gradients", "checkpoint_every")]
        t.equal(got, ["host", "nvme", "nvme", 2], "placement", run)


@t.test
def a_plan_changes_no_bit():
    with t.folder() as tmp:
        losses = []
        for name, args in (("plain", ()), ("planned", ("--machine", profile(tmp)))):
            planned(tmp, name, *args, "--digest")
            steps, events = t.read_log(f"{tmp}/{name}.jsonl")
            digest = [e for e in events if e.get("event") == "digest"]
            losses.append(([s["loss"] for s in steps], digest))
        t.equal(losses[0], losses[1], "losses and digests")


@t.test
def prediction_and_measurement_stand_side_by_side():
    with t.folder() as tmp:
        run = planned(tmp, "out", "--machine", profile(tmp))
        steps, events = t.read_log(f"{tmp}/out.jsonl")
        told = [e for e in events if e.get("event") == "predicted"][0]
        t.equal(told["predicted_step_s"], started(f"{tmp}/out.jsonl")["plan"]["step_s"], "told")
        measured = statistics.median(s["step_s"] for s in steps[2:])
        t.close(told["measured_step_s"], measured, 1e-9, "measured", relative=True, run=run)
        t.equal(told["steps"], len(steps) - 2, "steps that count", run)
        t.equal(len(re.findall(r"^predicted .* a step, measured .* \(median of 4\)", run.stdout,
                               re.M)), 1, "the line", run)


@t.test
def this_machine_is_planned_with_its_own_profile():
    with t.folder() as tmp:
        run = planned(tmp, "out", env={"SPILLWAY_PROFILE": profile(tmp)})
        t.contains(run.stdout, "plan: on this machine", "the plan", run)


@t.test
def nvme_alone_gives_its_drive_to_the_plan():
    """Where the user's profile plans the run; else no placement could take the folder."""
    with t.folder() as tmp:
        drive = tmp + "/drive"
        os.makedirs(os.path.join(t.ROOT, drive))
        env = {"SPILLWAY_PROFILE": profile(os.path.join(t.ROOT, tmp), memory_bytes=3.05e7)}
        t.spillway("bench", "nvme", "--nvme", drive, "--seconds", "0.2", "--size", "4Mi", env=env,
                   rc=0)
        run = planned(tmp, "out", "--nvme", drive, env=env)
        t.contains(run.stdout, "plan: on this machine", "the plan", run)
        t.check(t.read_log(f"{tmp}/out.jsonl")[0][3]["bytes"]["nvme_read"] > 0,
                "nothing was read from the drive", run)
        t.contains(str(started(f"{tmp}/out.jsonl")["options"]["nvme"]), drive, "the folder", run)
        run = t.train(f"{tmp}/no", *ARGS, "--nvme", drive, rc=2)
        t.contains(run.stderr, "--nvme has no effect", "without a profile", run)


@t.test
def without_rates_there_is_no_plan_and_it_says_so():
    with t.folder() as tmp:
        run = planned(tmp, "out")
        t.equal(plan_lines(run), ["plan: none, as nobody measured this machine (spillway bench all)"
                                  "; what is open lies where it fits"], "the plan", run)
        run = planned(tmp, "adam", "--machine", profile(tmp, adam_bytes_per_s=0))
        t.contains(run.stdout, "plan: none, as the profile does not tell adam_bytes_per_s",
                   "the plan", run)
        t.equal(started(f"{tmp}/adam.jsonl")["plan"], None, "in the log", run)
        run = t.train(f"{tmp}/no", *ARGS, "--machine", "11xh100", rc=1)
        t.contains(run.stderr, "11xh100", "a machine that nobody knows", run)


if __name__ == "__main__":
    t.main()
