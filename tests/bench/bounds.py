#!/usr/bin/env python3
"""Step times of machines that are bound by one resource, against the bound that follows from the
set rates and the program's byte counts, on a random model of 206 million parameters.

    tests/bench/bounds.py [--rounds 3] [--steps 10] [--scale 1] [--only NAME] [--nvme DIR]

Each set-up holds all lanes to rates (docs/step-clock.md) of which one is the tightest. A step's
gradients exist from the loss on, and forward needs the updated weights, so of a step

    with clip 0 and overlap backward    the largest of forward + max(backward, gradients down),
                                        weights up, records read, records written, Adam
    with clipping and overlap forward   max(backward, gradients down) + max(forward, weights up,
                                        Adam, what NVMe moves beyond what the slots hold)

is the least. Bytes are counted from the sizes that the run prints, not from a trace. The first four
steps are left out (a virgin chunk is not read, and file systems journal what reserved space
becomes) and the last, whose update has no forward beside it; of the others the mean counts. The
commit of each step is part of it. --scale multiplies all rates. --nvme says where the store lies:
in memory (/dev/shm) no drive falls below its set rate.
Prints a JSON object; ratio is the median over rounds of (mean step / bound).
"""
import argparse
import json
import os
import re
import shutil
import statistics
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import support as t  # noqa: E402
from overlap import slots_share  # noqa: E402

SEQ_LEN = 256
# Rates in bytes or operations per second: low enough that two cores do the real work meanwhile.
SETUPS = {
    "nvme": {"pcie": 4e9, "nvme": 0.4e9, "adam": 12e9, "flops": 150e9},
    "pcie": {"pcie": 0.08e9, "nvme": 0.8e9, "adam": 12e9, "flops": 150e9},
    "adam": {"pcie": 4e9, "nvme": 0.8e9, "adam": 1e9, "flops": 150e9},
    "compute": {"pcie": 4e9, "nvme": 0.8e9, "adam": 12e9, "flops": 50e9},
}


def flops(config, params):
    """Of forward and backward of one row of SEQ_LEN tokens; as docs/step-clock.md counts them."""
    embedding = config["vocab_size"] * config["hidden_size"]
    head = embedding
    norms = config["hidden_size"] * (2 * config["num_hidden_layers"] + 1)
    layers = params - norms - embedding * (1 if config.get("tie_word_embeddings") else 2)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    attention = (2 * SEQ_LEN * config["num_attention_heads"] * head_dim *
                 config["num_hidden_layers"])
    forward = (2 * layers + attention) * SEQ_LEN
    # The head's forward is part of its backward task.
    return forward, 3 * forward + 3 * 2 * head * SEQ_LEN


def run(tmp, model, name, mode, rates, scale, steps, nvme):
    log = f"{tmp}/{name}.jsonl"
    out = f"{tmp}/{name}"
    done = t.train(out, "--optimizer", "nvme", *(("--nvme", nvme) if nvme else ()), "--overlap",
                   mode, "--clip", 1 if mode == "forward" else 0, "--steps", steps, "--seq-len",
                   SEQ_LEN, "--log", log, "--sim-pcie", int(rates["pcie"] * scale),
                   "--sim-nvme", int(rates["nvme"] * scale),
                   "--sim-adam", int(rates["adam"] * scale),
                   "--sim-flops", int(rates["flops"] * scale), model=model, timeout_s=1800)
    t.equal(done.rc, 0, name, done)
    found = t.read_log(log)[0][4:-1]
    shutil.rmtree(out, ignore_errors=True)
    return statistics.mean(s["step_s"] for s in found), done


def bounds(config, params, rates, scale, run_):
    """(backward's, forward's) in seconds."""
    forward_flops, backward_flops = flops(config, params)
    forward, backward = (f / (rates["flops"] * scale) for f in (forward_flops, backward_flops))
    lanes = {"nvme": 12 * params / (rates["nvme"] * scale),  # each way
             "pcie": 2 * params / (rates["pcie"] * scale),   # each way
             "adam": 28 * params / (rates["adam"] * scale)}
    copy, adam, nvme = lanes["pcie"], lanes["adam"], lanes["nvme"]
    after_loss = max(backward, copy)
    return (max(forward + after_loss, copy, adam, nvme),
            after_loss + max(forward, copy, adam, nvme * (1 - slots_share(run_))),
            {**lanes, "compute": forward + backward})


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--scale", type=float, default=1)
    parser.add_argument("--only", choices=SETUPS)
    parser.add_argument("--nvme")
    args = parser.parse_args()
    os.chdir(t.ROOT)
    with open("tests/bench/model200m.json", encoding="utf-8") as file:
        config = json.load(file)
    ratios, shown = {}, {}
    with t.folder("bench-") as tmp:
        model = tmp + "/model"
        t.spillway("init", "--config", "tests/bench/model200m.json", "--seed", 1, "--out", model,
                   rc=0)
        for i in range(args.rounds):
            for name, rates in SETUPS.items():
                if args.only and name != args.only:
                    continue
                for mode in ("backward", "forward"):
                    step_s, done = run(tmp, model, f"{name}-{mode}-{i}", mode, rates, args.scale,
                                       args.steps, args.nvme)
                    params = int(re.search(r"^(\d+) parameters", done.stdout, re.M).group(1))
                    both = bounds(config, params, rates, args.scale, done)
                    bound = both[mode == "forward"]
                    ratios.setdefault((name, mode), []).append(step_s / bound)
                    shown[name, mode] = {"bound_s": round(bound, 3), "step_s": round(step_s, 3),
                                         "lanes_s": {k: round(v, 3) for k, v in both[2].items()}}
                    print(f"round {i + 1}: {name} {mode} {step_s:.2f} s/step, bound {bound:.2f}, "
                          f"ratio {step_s / bound:.3f}", file=sys.stderr, flush=True)
    print(json.dumps({"schema": 1, "rounds": args.rounds, "steps": args.steps, "rows": [
        {"bound_by": name, "overlap": mode, "ratio": round(statistics.median(values), 3),
         "ratio_max": round(max(values), 3), **shown[name, mode]}
        for (name, mode), values in ratios.items()]}, indent=1))


if __name__ == "__main__":
    main()
