#!/usr/bin/env python3
"""Whole runs whose guard stops the program at the first allocation inside a step.

Every placement, number format and schedule that calls other code runs a few steps under
SPILLWAY_ALLOC_GUARD=stop (base/alloc_guard.h), evaluations and commits included. A sanitizer's
build does not watch allocations, and says so.
"""
import struct

import support as t

STOP = {"SPILLWAY_ALLOC_GUARD": "stop"}
SMALL = ["--steps", 6, "--seq-len", 64]
LONG = ["--steps", 2, "--seq-len", 512]
SETTINGS = {
    "host": [],
    "nvme": ["--optimizer", "nvme", "--chunk", "64Ki"],
    "nvme, backward": ["--optimizer", "nvme", "--clip", 0, "--accumulate", 2],
    "nvme, in turn": ["--optimizer", "nvme", "--overlap", "none", "--commit-every", 2],
    "device": ["--optimizer", "device"],
    "device, backward": ["--optimizer", "device", "--clip", 0, "--micro-batch", 2],
    "fp32": ["--dtype", "fp32", "--grad-dtype", "fp32"],
    "fp32, nvme": ["--dtype", "fp32", "--grad-dtype", "fp32", "--optimizer", "nvme"],
    "split, 8 bits": ["--optimizer", "nvme", "--master", "split", "--moments", "8bit"],
    "long rows": [*LONG, "--micro-batch", 4],
    "a few tokens": ["--steps", 6, "--seq-len", 5],
    "all on NVMe": ["--params", "nvme", "--optimizer", "nvme", "--gradients", "nvme",
                    "--activations", "nvme", "--checkpoint-every", 2, "--eval-every", 2],
    "saves": ["--save-every", 2, "--keep-store"],
    "trace": ["--optimizer", "nvme"],
    "documents": ["--accumulate", 2],
    "rates": ["--optimizer", "nvme", "--sim-pcie", "1G", "--sim-nvme", "500M"],
    "one thread": ["--threads", 1, "--device-threads", 1],
    "more threads than cores": ["--threads", 5, "--device-threads", 4],
    "other teams, device": ["--threads", 5, "--device-threads", 3, "--optimizer", "device"],
}


@t.test
def no_step_allocates():
    if t.SANITIZED:
        return
    with t.folder() as tmp:
        for i, (name, options) in enumerate(SETTINGS.items()):
            out = f"{tmp}/{i}"
            more = ["--trace", out + ".trace"] if name == "trace" else []
            if "--eval-every" in options:
                t.write_tokens(out + ".val", t.read_tokens(t.SHAKESPEARE + "/val.bin")[:1000])
                more += ["--val", out + ".val"]
            if name == "documents":
                with open(out + ".documents", "wb") as file:
                    file.write(struct.pack("<50Q", *range(0, 1000, 20)))
                more += ["--documents", out + ".documents"]
            length = [] if "--steps" in options else SMALL
            run = t.train(out, *length, *options, *more, "--log", out + ".log", env=STOP)
            t.equal(run.rc, 0, name, run)
            t.contains(run.stdout, "allocations inside steps: 0;", name, run)
            told = [o for o in t.read_log(out + ".log")[1] if o.get("event") == "allocations"]
            t.equal([o["inside_steps"] for o in told], [0], name, run)
            t.check(told[0]["calls_before"] > 0 and told[0]["bytes_before"] > 0, f"{told}", run)


@t.test
def no_step_allocates_with_the_lesser_instruction_sets():
    if t.SANITIZED:
        return
    with t.folder() as tmp:
        for isa in ("avx2", "scalar"):
            run = t.train(f"{tmp}/{isa}", *SMALL, env={**STOP, "SPILLWAY_ISA": isa})
            if "SPILLWAY_ISA" in run.stderr:
                continue  # not this CPU's
            t.equal(run.rc, 0, isa, run)


@t.test
def an_unknown_wish_is_refused():
    with t.folder() as tmp:
        run = t.train(tmp + "/out", *SMALL, env={"SPILLWAY_ALLOC_GUARD": "halt"})
        t.equal(run.rc, 1, "exit status", run)
        t.contains(run.stderr, "SPILLWAY_ALLOC_GUARD=halt is neither stop nor count", "why", run)


@t.test
def only_a_build_that_watches_tells_a_count():
    with t.folder() as tmp:
        run = t.train(tmp + "/out", *SMALL, env=STOP)
        t.equal(run.rc, 0, "exit status", run)
        t.equal("allocations inside steps" in run.stdout, not t.SANITIZED, "a count", run)
        t.equal("SPILLWAY_ALLOC_GUARD has no effect" in run.stderr, t.SANITIZED, "a warning", run)


if __name__ == "__main__":
    t.main()
