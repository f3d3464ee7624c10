#!/usr/bin/env python3
"""How much of the communication between ranks a step shows, on a machine whose program's bound says
that it can hide all of it: every stage, with computation and links held to rates.

    tests/bench/exposed.py [--ranks 2] [--rounds 3] [--steps 8] [--layers 80]

A random model of as many layers as a 70B one, in which a layer, the embedding and the head are to
each other about as there. Computation of a step takes four seconds at the set rate,
what a rank sends three quarters of that. The same run without a rate for the links is the step that
no communication holds up; exposed is what the step with the rate takes more, as a share of it.
Medians over rounds; prints a JSON object.
"""
import argparse
import json
import os
import shutil
import statistics
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import support as t  # noqa: E402

SEQ_LEN, COMPUTE_S = 128, 4.0


def run(tmp, model, name, ranks, zero, flops, comm, steps):
    log = f"{tmp}/{name}.jsonl"
    rates = ["--sim-flops", int(flops)] + (["--sim-comm", int(comm)] if comm else [])
    t.train(f"{tmp}/out", "--ranks", ranks, "--zero", zero, "--steps", steps, "--seq-len", SEQ_LEN,
            "--log", log, *rates, model=model, timeout_s=1200, rc=0)
    shutil.rmtree(f"{tmp}/out", ignore_errors=True)
    steps = t.read_log(log)[0][2:-1]
    os.remove(log)
    return statistics.mean(s["step_s"] for s in steps), steps[0]["bytes"]["comm"] / ranks, \
        statistics.mean(s["lane_busy_s"]["compute"] for s in steps)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=80)
    args = parser.parse_args()
    os.chdir(t.ROOT)
    with t.folder("bench-") as tmp:
        with open(tmp + "/config.json", "w", encoding="utf-8") as file:
            json.dump({**t.MIDDLE_MODEL, "num_hidden_layers": args.layers, "hidden_size": 128,
                       "intermediate_size": 512, "vocab_size": 2304}, file)
        model = tmp + "/model"
        t.spillway("init", "--config", tmp + "/config.json", "--out", model, rc=0)
        # One step at a known rate gives the operations of a step.
        busy = run(tmp, model, "probe", args.ranks, 2, 20e9, 0, 4)[2]
        flops = 20e9 * busy / COMPUTE_S
        shares = {}
        for i in range(args.rounds):
            for zero in (0, 1, 2, 3):
                free_s, sent, _ = run(tmp, model, "free", args.ranks, zero, flops, 0, args.steps)
                comm = sent / (0.75 * COMPUTE_S)
                held_s = run(tmp, model, "held", args.ranks, zero, flops, comm, args.steps)[0]
                shares.setdefault(zero, []).append((held_s - free_s) / free_s)
                print(f"round {i + 1}: zero {zero}: {free_s:.2f} s, with links {held_s:.2f} s",
                      file=sys.stderr, flush=True)
    print(json.dumps({"schema": 1, "ranks": args.ranks, "rounds": args.rounds,
                      "layers": args.layers, "exposed": {
        zero: round(statistics.median(values), 4) for zero, values in shares.items()}}, indent=1))


if __name__ == "__main__":
    main()
