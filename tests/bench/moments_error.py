#!/usr/bin/env python3
"""Studies what --moments 8bit costs: the bundled model fine-tuned on the bundled Shakespeare text
with FP32 and with 8-bit moments, the same seeds, and the validation loss over all of val.bin after
each run.

    tests/bench/moments_error.py [--steps 400] [--seeds 5]

The spread over the seeds (FP32 alone) is the yardstick: a difference below it is one that another
order of the data makes, too. Prints a JSON object and a table in Markdown.
"""
import argparse
import json
import os
import statistics
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import support as t  # noqa: E402

SETTINGS = [("0.95", "1e-3"), ("0.95", "3e-3"), ("0.999", "1e-3")]


def losses(tmp, steps, seed, beta2, lr, moments):
    out, log = f"{tmp}/out", f"{tmp}/log.jsonl"
    run = t.train(out, "--val", t.SHAKESPEARE + "/val.bin", "--steps", steps, "--seq-len", 128,
                  "--micro-batch", 8, "--seed", seed, "--lr", lr, "--beta2", beta2,
                  "--moments", moments, "--restart", "--log", log, timeout_s=1800)
    t.equal(run.rc, 0, f"{moments} {beta2} {lr} seed {seed}", run)
    evals = [line["val_loss"] for line in t.read_log(log)[1] if "val_loss" in line]
    os.remove(log)
    return evals[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    os.chdir(t.ROOT)
    rows = []
    with t.folder("bench-") as tmp:
        for beta2, lr in SETTINGS:
            runs = {m: [losses(tmp, args.steps, s, beta2, lr, m) for s in range(args.seeds)]
                    for m in ("fp32", "8bit")}
            pairs = [b - a for a, b in zip(runs["fp32"], runs["8bit"])]
            rows.append({"beta2": beta2, "lr": lr, "fp32": runs["fp32"], "8bit": runs["8bit"],
                         "mean_difference": statistics.mean(pairs),
                         "worst_difference": max(pairs, key=abs),
                         "seed_spread": statistics.stdev(runs["fp32"])})
    print(json.dumps({"schema": 1, "steps": args.steps, "rows": rows}, indent=1))
    print("| beta2 | lr | FP32 | 8-bit | mean difference | worst | spread of seeds |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for r in rows:
        print(f"| {r['beta2']} | {r['lr']} | {statistics.mean(r['fp32']):.4f} "
              f"| {statistics.mean(r['8bit']):.4f} | {r['mean_difference']:+.4f} "
              f"| {r['worst_difference']:+.4f} | {r['seed_spread']:.4f} |")


if __name__ == "__main__":
    main()
