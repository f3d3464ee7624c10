#!/usr/bin/env python3
"""A training run killed a hundred times (KILLS=N: N times) with SIGKILL at random moments.

After every kill: whatever has its final name is whole. A folder with a config.json (the output and
every step-N in it) has every tensor that the model has, of the right shape, finite, and
`spillway inspect` accepts it. Every run after the first is started with --restart on what the kill
left; without it, it must be refused and nothing may change. At the end one run goes through, and
its files are those of a run that nobody disturbed, byte for byte. The seed is printed; SEED=N
repeats it.
"""
import hashlib
import json
import math
import os
import random
import signal
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import support as t  # noqa: E402

KILLS = int(os.environ.get("KILLS", "100"))
SEED = int(os.environ.get("SEED", str(time.time_ns() % 1000000)))
ARGS = ["--optimizer", "nvme", "--steps", "12", "--seq-len", "64", "--micro-batch", "2",
        "--save-every", "2", "--chunk", "64Ki", "--lr", "1e-3"]


def fingerprint(top):
    """{path below top: hash} of every file."""
    found = {}
    for folder, _, names in os.walk(top):
        for name in names:
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                found[os.path.relpath(path, top)] = hashlib.sha256(file.read()).hexdigest()
    return found


def result_of(folder):
    """All but the id that every run draws."""
    found = fingerprint(folder)
    for name in [n for n in found if os.path.basename(n) == "training.json"]:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            told = json.load(file)
        t.check(told.pop("run"), f"{name}: no id of the run")
        found[name] = told
    return found


def models_below(top):
    return [folder for folder, _, names in os.walk(top)
            if "config.json" in names and ".partial" not in folder]


def check_whole(path, shapes):
    _, tensors = t.read_model(path)
    t.equal({n: x.shape for n, x in tensors.items()}, shapes, f"tensors of {path}")
    for name, tensor in tensors.items():
        t.check(all(map(math.isfinite, tensor.floats())), f"{path}: {name} has a value not finite")
    t.spillway("inspect", path, rc=0)


def kill_once(out, restart, after_s, dice):
    """Kills a run at a random moment of its life; True if it was still running."""
    process = t.Process(["train", "--model", t.MODEL, "--data", t.SHAKESPEARE + "/train.bin",
                         "--out", out, *ARGS, *(["--restart"] if restart else [])])
    time.sleep(dice.uniform(0, after_s))
    process.signal(signal.SIGKILL)
    run = process.finish()
    t.check(run.rc in (0, -signal.SIGKILL), "a run that was not killed failed", run)
    return run.rc != 0


@t.test
def nothing_half_written_after_kills():
    dice = random.Random(SEED)
    print(f"seed {SEED}, {KILLS} kills", flush=True)
    shapes = {n: x.shape for n, x in t.read_model(t.MODEL)[1].items()}
    with t.folder("kills-") as tmp:
        calm = t.train(tmp + "/calm", *ARGS, rc=0)
        out, killed, whole, tries = tmp + "/out", 0, 0, 0
        while killed < KILLS:
            tries += 1
            t.check(tries < 10 * KILLS, f"only {killed} of {tries} runs could be killed in time")
            left = os.path.isdir(out) and os.listdir(out)
            if left:
                before = fingerprint(out)
                refused = t.train(out, *ARGS)
                t.check(refused.rc != 0, "a run without --restart took a folder in use", refused)
                t.equal(fingerprint(out), before, "files after a refused run", refused)
            killed += kill_once(out, bool(left), calm.seconds, dice)
            for model in models_below(tmp):
                check_whole(model, shapes)
                whole += 1
        t.train(out, *ARGS, "--restart", rc=0)
        t.equal(result_of(out), result_of(tmp + "/calm"), "files of the last run")
        t.equal(sorted(os.listdir(tmp)), ["calm", "out"], "what lies beside the output")
        print(f"{tries} runs, {killed} killed, {whole} model folders found whole", flush=True)


if __name__ == "__main__":
    t.main()
